"""Weights as an engine loads them: completed by kept weights, checked by names and shapes, verified by a probe.

::

    first sync    all weights ──────────────▶ kept, on the host ───────────────────────┐
    later ones    trained weights ──▶ replace the kept ones ───────────────────────────┼──▶ engine.load: all weights
                  low-rank factors alone ──▶ added to the kept weights while loading ──┘

Each version is made from the first version, so rounding errors do not add up, and an engine that has dropped its
weights gets all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlplace.codes import problem
from rlplace.comm.codec import dtype_name
from rlplace.comm.weights.shards import Shard, replicas
from rlplace.comm.weights.version import ReceivedWeights
from rlplace.config.model_folder import text_keys
from rlplace.errors import WeightSyncError
from rlplace.json_text import read_object
from rlplace.metrics import Metric, Metrics
from rlplace.models.heads import weight_shapes
from rlplace.placement.flow import CUT_BUCKET_BYTES
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import TextArguments
from rlplace.workers.engines.contract import NO_FACTORS, FactorsOf, TextEngine, Weights

Each = TypeVar("Each")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store this buffer, which every model computes for itself


class KeptWeights:
    """Keeps the last complete version of the weights, to fill up later versions that arrive with only the changed
    weights.

    All ranks of a node share the memory of the kept version.

    `keeps`: whether incomplete versions will come; if False, nothing is kept. `scale`: scale of LoRA factors that are
    sent together with the weights; None: no such factors are sent.
    """

    def __init__(self, owner: str, *, keeps: bool, scale: float | None = None) -> None:
        self._owner = owner
        self._keeps = keeps
        self._scale = scale
        self._kept: ReceivedWeights | None = None

    @contextlib.contextmanager
    def completed(
        self, received: ReceivedWeights
    ) -> Iterator[tuple[Weights, FactorsOf]]:
        """Return a context manager that yields all weights of the received version, and the LoRA factors to add to
        them.

        At the end of its `with` block, the received version is released, or kept to complete later versions. Raises
        WeightSyncError if the version is incomplete and no complete version is kept.
        """
        with contextlib.ExitStack() as releasing:
            releasing.enter_context(received)
            yield self._completed(received)
            if self._keeps and not received.partial:
                releasing.pop_all()
                self.close()
                self._kept = received

    def _completed(self, received: ReceivedWeights) -> tuple[Weights, FactorsOf]:
        # Not copied: the tensors are views of memory that `received` releases
        weights: Weights = received.tensors
        if received.partial:
            if self._kept is None:
                raise WeightSyncError(
                    problem("some-weights", self._owner, version=received.version)
                )
            weights = {**self._kept.tensors, **weights}
        if self._scale is None:
            return weights, NO_FACTORS
        from rlplace.models.lora import take_factors

        weights, factors = take_factors(weights, self._scale)
        assert factors.keys() <= weights.keys(), (
            "factors of weights that the first sync brought"
        )
        return weights, factors

    def close(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """Names and shapes of the weights in a model's checkpoint, known without reading the weights.

    `shapes`: name -> shape. `tied`: whether the output head has the same weights as the embedding; most checkpoints
    then store them once.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    @classmethod
    def of_folder(cls, folder: Path) -> ExpectedWeights:
        """Return the names and shapes of the weights in a model's folder.

        Raises FileNotFoundError if there are no safetensors files or no config.json, OSError for weights that cannot be
        read, and ConfigError for a damaged config.json.
        """
        for file in folder.glob("*.safetensors"):
            try:
                with safe_open(file, framework="np"):
                    # The header is checked against the length of the file
                    pass
            except SafetensorError as error:
                raise OSError(f"{file} is damaged or cut short: {error}") from error
        shapes = {
            name: tuple(shape)
            for name, shape in weight_shapes(folder).items()
            if _COMPUTED not in name
        }
        if not shapes:
            raise FileNotFoundError(f"{folder} has no *.safetensors")
        config = read_object(folder / "config.json", "actor.model.path")
        tied = EMBEDDING in shapes and (
            bool(config.get("tie_word_embeddings")) or HEAD not in shapes
        )
        return cls(
            shapes=shapes | ({HEAD: shapes[EMBEDDING]} if tied else {}), tied=tied
        )

    @property
    def elements(self) -> int:
        """Number of elements of all weights. A tied weight counts once."""
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if not (self.tied and name == HEAD)
        )

    def complete(self, weights: Mapping[str, Each]) -> Mapping[str, Each]:
        """Return `weights` with an entry for the output head.

        If the head is tied to the embedding and has no entry, the embedding is entered under the head's name too.
        Otherwise `weights` is returned unchanged. An engine that packs its output head needs this entry.
        """
        if self.tied and HEAD not in weights and EMBEDDING in weights:
            return {**weights, HEAD: weights[EMBEDDING]}
        return weights


def weights_of_folder(engine: TextEngine, folder: Path, key: str) -> dict[str, Tensor]:
    """Read all weights from a Hugging Face folder, and return them by the names that `engine` expects.

    `key`: what names the folder, for errors. Raises ConfigError.
    """
    from rlplace.models.checkpoint import Checkpoint

    files = Checkpoint(folder, key)
    expected = ExpectedWeights.of_folder(folder)
    # Names of a module, where it has other ones than the files
    shapes: Mapping[str, tuple[int, ...]]
    shapes = getattr(engine, "shapes", expected.shapes)
    weights = {}
    for name, shape in shapes.items():
        names: tuple[str, ...] = (name,)
        if name == HEAD and expected.tied:
            names = (HEAD, EMBEDDING)
        whole = tuple(slice(0, size) for size in shape)
        weights[name] = files.part(names, shape, whole)
    return weights


def merged(
    weights: Weights, factors: FactorsOf, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each weight. If there are LoRA factors for a weight, they are added to it, on
    `device`.

    `factors`: name of a weight -> its LoRA factors.
    """
    for name, weight in weights.items():
        yield (
            name,
            factors[name].added_to(weight, device) if name in factors else weight,
        )


# ── to an engine's workers that are other processes ──────────────────────────────────────────────────────────────────
#
#   engine     writes whole weights into a bucket ─▶ SharedBucket, a note ─▶ the next bucket, once all have taken it
#   worker     opens the bucket's memory ─▶ loads its shards of the weights out of it
#
# A worker keeps a bucket until all layers with a weight in it are complete, so at most two buckets exist at a time.

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedBucket:
    """Whole weights in memory of the process `pid`, which keeps this memory until the next bucket is requested.

    `file`: descriptor of the memory in the process `pid`. `size_bytes`: number of bytes in use. `weights`: (name,
    dtype, shape, first byte) of each weight.
    """

    pid: int
    file: int
    size_bytes: int
    # Name, dtype, shape, first byte
    weights: tuple[tuple[str, str, tuple[int, ...], int], ...]

    def open(self) -> list[tuple[str, Tensor]]:
        """Map the bucket's memory into this process, and return the names and tensors of its weights.

        The memory stays mapped as long as one of the tensors exists. Other processes do not see writes to the tensors.
        """
        file = os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = mmap.mmap(file, self.size_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        return [
            (name, _at(pages, dtype, shape, first))
            for name, dtype, shape, first in self.weights
        ]


def in_buckets(
    items: Iterable[tuple[str, Tensor]], size_bytes: int = CUT_BUCKET_BYTES
) -> Iterator[SharedBucket]:
    """Copy all weights, in their order, into buckets of shared memory, and yield each bucket when it is full.

    The memory is not a file in /dev/shm. `items`: names and tensors. `size_bytes`: the most bytes of a bucket; a larger
    weight has a bucket of its own.
    """
    with contextlib.ExitStack() as opened:
        pages = None
        file = -1
        end = 0
        weights: list[tuple[str, str, tuple[int, ...], int]] = []
        for name, tensor in items:
            if pages is None or end + tensor.nbytes > len(pages):
                if pages is not None:
                    yield SharedBucket(
                        pid=os.getpid(),
                        file=file,
                        size_bytes=end,
                        weights=tuple(weights),
                    )
                    weights = []
                    pages = None
                    opened.close()
                file = os.memfd_create("rlplace weights")
                opened.callback(os.close, file)
                os.ftruncate(file, max(size_bytes, tensor.nbytes))
                pages = mmap.mmap(file, max(size_bytes, tensor.nbytes))
                end = 0
            if tensor.nbytes:
                _at(pages, dtype_name(tensor), tuple(tensor.shape), end).copy_(tensor)
            weights.append((name, dtype_name(tensor), tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if pages is not None:
            yield SharedBucket(
                pid=os.getpid(),
                file=file,
                size_bytes=min(end, len(pages)),
                weights=tuple(weights),
            )


def _at(pages: mmap.mmap, dtype: str, shape: tuple[int, ...], first: int) -> Tensor:
    """Return a tensor whose data are the bytes of `pages` from byte `first` on. The tensor keeps `pages` mapped.

    `dtype`, `shape`: name of the torch dtype, and shape, of the tensor.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if not math.prod(shape):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(
        pages, dtype=kind, count=math.prod(shape), offset=first
    ).view(shape)


class Shaped(Protocol):
    """An object with a shape, such as a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class UnfitWeights(ValueError):
    """Error of weights whose names or shapes are not those of the model.

    `misfits`: one text for each weight that does not fit.
    """

    def __init__(self, owner: str, version: int, misfits: Sequence[str]) -> None:
        self.misfits = tuple(misfits)
        super().__init__(
            f"{owner}: weights of version {version} do not fit the model: "
            + "; ".join(misfits)
        )


def check_fit(
    given: Mapping[str, Shaped],
    expected: Mapping[str, tuple[int, ...]],
    *,
    owner: str,
    version: int,
) -> None:
    """Raise UnfitWeights if names or shapes of the weights are not those of the model.

    The error lists all weights that are missing, unknown or of a wrong shape.

    `given`: name -> weight. `expected`: name -> shape of the model's weight. `owner`: rank that loads the weights, and
    `version`: their version; both for the error.
    """
    problems = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    problems += [
        f"{name} is not the model's" for name in sorted(given.keys() - expected.keys())
    ]
    problems += [
        f"{name} is {list(given[name].shape)}, expected {list(expected[name])}"
        for name in sorted(expected.keys() & given.keys())
        if tuple(given[name].shape) != expected[name]
    ]
    if problems:
        raise UnfitWeights(owner, version, problems)


# ── the probe ────────────────────────────────────────────────────────────────────────────────────────────────────────
#
#   actor     push: scores the probe ─▶ encloses the log-probabilities with the weights ─┐
#   rollout   pull ◀─────────────────────────────────────────────────────────────────────┘
#             as soon as the engine can generate: scores the probe, compares
#
# The log-probabilities are sent as one more tensor, so that every transport delivers them with their version.

NAME = "probe.logprobs"  # among the weights; no model has it
_TOKENS = 32
# Largest difference of one log-probability that rounding explains. Half precision differs by some hundredths on most
# tokens and tenths on unlikely ones; weights that are not the actor's, by a nat and more.
_TOLERANCE = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5, "fp8": 1.0}


def probe_tokens(job: TextArguments) -> list[int]:
    """Return the tokens of the probe, by which a weight sync is verified: random tokens, equal in every process."""
    config = read_object(job.model / "config.json", "actor.model.path")
    vocabulary: int = text_keys(config)["vocab_size"]
    length = min(_TOKENS, job.config.algorithm.longest - 1)
    drawn: list[int] = np.random.default_rng(0).integers(0, vocabulary, length).tolist()
    return drawn


def probe_shard(scores: Sequence[float] | None, length: int, ranks: int) -> Shard:
    """Return the actor's log-probabilities of the probe tokens, as a tensor that is sent together with the weights.

    `scores`: log-probabilities of all tokens but the first, equal on all ranks; None: this version is not verified, and
    the tensor has NaN. `length`: number of probe tokens. `ranks`: number of ranks that send.
    """
    data = (
        torch.full((length - 1,), torch.nan)
        if scores is None
        else torch.tensor(scores, dtype=torch.float32)
    )
    return Shard(
        names=(NAME,),
        dtype="float32",
        shape=(length - 1,),
        blocks=replicas(length - 1, ranks),
        data=data,
    )


class SyncProbe:
    """Verifies weight syncs on a rollout rank: engine and actor must give the probe tokens about the same
    log-probabilities.

    It keeps the actor's log-probabilities, which come with the weights, until they are compared.
    """

    def __init__(self, engine: TextEngine, job: TextArguments, owner: str) -> None:
        self._engine, self._tokens, self._owner = engine, probe_tokens(job), owner
        rollout = job.config.rollout
        dtypes = (job.config.actor.compute, rollout.dtype, rollout.cache)
        # The tolerance of the coarsest dtype in use
        self._tolerance = max(_TOLERANCE[dtype] for dtype in dtypes)
        self._expected: NDArray[np.float32] | None = None
        self._largest: float | None = None

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Remove the actor's log-probabilities of the probe from the received `tensors`, and keep them for
        `compare`.
        """
        expected = tensors.pop(NAME, None)
        self._expected = (
            None
            if expected is None or expected.isnan().any()
            else expected.cpu().numpy().copy()
        )

    def compare(self) -> Metrics:
        """Compare the engine's log-probabilities of the probe with the actor's, and return the largest difference as a
        metric.

        Each version is compared once, and only at residency FULL. If there is nothing to compare, return the difference
        of the last comparison; before the first comparison, return no metric. Raises WeightSyncError if the difference
        is larger than rounding explains.
        """
        if self._expected is not None and self._engine.residency is Residency.FULL:
            expected = self._expected
            self._expected = None
            differences = np.abs(
                np.asarray(self._engine.logprobs(self._tokens), np.float64) - expected
            )
            differences[np.isnan(differences)] = np.inf
            worst = int(differences.argmax())
            self._largest = float(differences[worst])
            if self._largest > self._tolerance:
                raise self._differ(worst, float(expected[worst]))
        if self._largest is None:
            return {}
        return {"sync/verify_max_diff": Metric(self._largest, "max")}

    def _differ(self, worst: int, expected: float) -> WeightSyncError:
        # The first token is given
        place = worst + 1
        differ = problem(
            "logprobs-differ",
            self._owner,
            f"the actor has {expected:.5f}",
            version=self._engine.version,
            token=self._tokens[place],
            place=place,
            largest=self._largest,
            tolerance=self._tolerance,
        )
        return WeightSyncError(differ)
