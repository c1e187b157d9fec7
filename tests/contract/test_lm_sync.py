"""Weights from a language model's actor to its engine, version after version: all of them, some, factors, changes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.device_push import DevicePush
from rlplace.comm.weights.device_sync import DeviceSender, LoadedParts
from rlplace.errors import NotResident, WeightSyncError
from rlplace.metrics import Metrics
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.schedule import Residency
from rlplace.tokens import Request
from rlplace.workers import weights
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, WEIGHTS, EndOfIteration
from rlplace.workers.engines.contract import Weights
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.engines.weights import NAME as PROBE
from rlplace.workers.engines.weights import UnfitWeights
from rlplace.workers.roles.rollout import TextRolloutWorker
from rlplace.workers.training import trained_model
from rlplace.workers.worker import Rendezvous
from tests.contract.device_sync import CutEngine, Grown
from tests.lm_ranks import ADAM, LmScenario, give, made_up_samples, make_lm_worker
from tests.rollout_stage import Ledger
from tests.tiny_lm import Kind, tiny_model
from tests.worker_ranks import attached, context_of, listen, rendezvous_at, spec_of

OFF, WEIGHTS_ONLY, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
TOKENS = [40 + 7 * i for i in range(30)]
ENGINE = {
    "engine": "transformers",
    "dtype": "fp32",
    "cache_dtype": "fp32",
    "kv_cache_memory": 1 << 20,
}
LENGTHS = {"max_prompt_length": 40, "max_new_tokens": 60}
LORA = {
    "lora_rank": 3,
    "lora_targets": ["q_proj", "down_proj"],
    "optimizer": ADAM | {"lr": 2e-2},
}
# Bytes for tiny models: several buckets in a window, several windows in a model
BUCKET = 20_000
WINDOW = 100_000
SMALL = 4096  # of counters and of the probe
FAR = (Delivery(readers=(0,)),)  # as from another node


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "llama"):
        tiny_model(root / kind, kind)
    return root


class Pair:
    """An actor and a rollout rank in turns on one accelerator: in between, the engine loses its weights."""

    def __init__(self, scenario: LmScenario, folder: Path) -> None:
        self.actor = make_lm_worker(scenario, 0, rendezvous_at(listen()), folder=folder)
        channels: dict[str, Channel] = {
            name: LocalChannel(spec_of(name)) for name in (REQUESTS, COMPLETIONS)
        }
        channels[WEIGHTS] = attached(WEIGHTS, folder, "rollout rank 0")
        nowhere = Rendezvous(host="", port=0)
        self.context = context_of(
            "rollout", 0, 1, nowhere, channels, folder=folder, device=Ledger()
        )
        self.rollout = TextRolloutWorker(scenario.job, self.context)
        self.rollout.setup()

    def learn(self, iteration: int) -> None:
        self.rollout.move(OFF)
        give(self.actor, made_up_samples(iteration))
        self.actor.move(FULL)
        self.actor.learn(iteration, iteration)

    def sync(self, version: int) -> tuple[Metrics, Metrics]:
        self.rollout.move(OFF)
        self.actor.move(WEIGHTS_ONLY)
        self.rollout.move(WEIGHTS_ONLY)
        with ThreadPoolExecutor(
            1
        ) as thread:  # past the host, a push takes as long as its pull
            pushed = thread.submit(self.actor.push_weights, version)
            pulled = self.rollout.pull_weights(version)
            return pushed.result(), pulled

    def generate(self) -> Metrics:
        """Nothing is asked."""
        self.rollout.move(FULL)
        self.context.channels[REQUESTS].put(EndOfIteration(iteration=0))
        return self.rollout.generate(0)

    def difference(self) -> float:
        self.rollout.move(FULL)
        by_engine, by_actor = (
            self.rollout.engine.logprobs(TOKENS),
            self.actor.logprobs(TOKENS),
        )
        return float((torch.tensor(by_engine) - torch.tensor(by_actor)).abs().max())

    @property
    def actor_member(self) -> Any:
        """Of the actor rank in device syncs, once there was one."""
        return self.actor._sender._device._member

    @property
    def engine(self) -> TransformersEngine:
        engine = self.rollout.engine
        assert isinstance(engine, TransformersEngine)
        return engine

    def close(self) -> None:
        self.rollout.close()
        self.actor.close()


@pytest.fixture
def pair_of(root: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []
    with JobFolder.create() as folder:
        channel = SharedChannel.create(folder.path, spec_of(WEIGHTS))

        def make(
            kind: Kind = "qwen3",
            deliveries: tuple[Delivery, ...] = (),
            *,
            rollout: dict[str, object] | None = None,
            **actor: object,
        ) -> Pair:
            scenario = LmScenario(
                model=root / kind,
                algorithm=LENGTHS,
                trained=actor,
                rollout=ENGINE | (rollout or {}),
                deliveries=deliveries,
            )
            made.append(Pair(scenario, folder.path))
            return made[-1]

        yield make
        for pair in made:
            pair.close()
        channel.destroy()


@pytest.mark.parametrize(
    ("kind", "deliveries"),
    [("qwen3", FAR), ("llama", ())],
    ids=["from far", "on the node"],
)
@pytest.mark.parametrize("mode", ["all", "trainable", "lora", "adapter", "delta"])
def test_engine_and_trainer_agree_after_every_sync(
    pair_of: Callable[..., Pair],
    mode: str,
    deliveries: tuple[Delivery, ...],
    kind: Kind,
) -> None:
    leaves = {"enable_offload": True}
    pair = pair_of(kind, deliveries, rollout=leaves, **LORA, sync={"mode": mode})
    pair.sync(0)
    assert pair.difference() < 1e-4
    for version in range(1, 4):
        before = pair.rollout.engine.logprobs(TOKENS)
        pair.learn(version - 1)
        pair.sync(version)
        assert pair.difference() < 1e-4
        after = pair.rollout.engine.logprobs(TOKENS)
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 0.01, (
            "nothing was learned"
        )


def test_an_engine_that_keeps_its_weights_gets_factors_alone_and_merges_nothing(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first sync is kept beside it."""
    verified = {"mode": "adapter", "verify": "logprobs", "verify_every": 1}
    pair = pair_of(**LORA, sync=verified)
    pushed, _ = pair.sync(0)
    whole = pushed["actor/pushed_bytes"].value
    assert pair.rollout._kept._kept is None
    before = {name: t.clone() for name, t in pair.engine._tensors.items()}
    monkeypatch.setattr(TransformersEngine, "load", Mock(side_effect=AssertionError))
    for version in range(1, 3):
        learn_in_place(pair, version - 1)
        pair.actor.move(WEIGHTS_ONLY)
        pushed = pair.actor.push_weights(version)
        pair.rollout.pull_weights(version)
        assert pair.engine.version == version
        assert 3 * pushed["actor/pushed_bytes"].value < whole
        assert pair.difference() < 1e-4
        assert pair.generate()["sync/verify_max_diff"].value < 1e-4
    changed = {
        name
        for name, tensor in pair.engine._tensors.items()
        if not torch.equal(tensor, before[name])
    }
    assert changed
    assert all("lora_" in name for name in changed)


def learn_in_place(pair: Pair, iteration: int) -> None:
    """The engine stays where it is."""
    give(pair.actor, made_up_samples(iteration))
    pair.actor.move(FULL)
    pair.actor.learn(iteration, iteration)


WAYS = [(0, "shared_tensor"), (None, "gloo")]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in windows"])
@pytest.mark.parametrize(("host", "way"), WAYS)
def test_past_the_host_they_agree_too(
    pair_of: Callable[..., Pair], host: int | None, way: str, whole: bool
) -> None:
    """The ways of GPUs, here with what stands for CUDA IPC and NCCL."""
    past_host = DeviceDelivery(readers=(0,), owners=(host,), actors=1, whole=whole)
    pair = pair_of(
        "llama", (past_host,), sync={"verify": "logprobs", "verify_every": 1}
    )
    for version in range(3):
        if version:
            pair.learn(version - 1)
        pushed, pulled = pair.sync(version)
        assert (
            pushed[f"actor/pushed_{way}_bytes"].value
            == pulled[f"rollout/pulled_{way}_bytes"].value
            > 0
        )
        assert pair.generate()["sync/verify_max_diff"].value < 1e-4


def test_an_engine_whose_processes_load_what_they_take_agrees_too(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them beside the actor, one in a group; threads stand for them, and a whole engine for their parts."""
    cut = CutEngine(2, torch.device("cpu"))

    def load_from(
        engine: TransformersEngine, sync: DevicePush, rank: int, deadline_s: float
    ) -> LoadedParts:
        found = cut.load_from(sync, rank, deadline_s)
        others = {name: found.others.pop(name) for name in [PROBE]}
        engine.load(found.others, sync.push.version)
        return dataclasses.replace(found, others=others)

    monkeypatch.setattr(TransformersEngine, "load_from", load_from, raising=False)
    delivery = DeviceDelivery(readers=(0,), owners=(0, None), actors=1, parts=(2,))
    pair = pair_of("llama", (delivery,), sync={"verify": "logprobs", "verify_every": 1})
    for version in range(2):
        if version:
            pair.learn(version - 1)
        pushed, pulled = pair.sync(version)
        for way in ("gloo", "shared_tensor"):
            assert (
                pushed[f"actor/pushed_{way}_bytes"].value
                == pulled[f"rollout/pulled_{way}_bytes"].value
                > 0
            )
        assert pair.generate()["sync/verify_max_diff"].value < 1e-4


def in_windows(
    host: int | None, monkeypatch: pytest.MonkeyPatch, *, whole: bool = False
) -> DeviceDelivery:
    """A delivery to one engine, and senders with buckets and windows for tiny models."""
    sizes = {"bucket_bytes": BUCKET, "window_bytes": WINDOW}
    sender = functools.partial(DeviceSender, **sizes)
    monkeypatch.setattr(weights, "DeviceSender", sender)
    return DeviceDelivery(readers=(0,), owners=(host,), actors=1, whole=whole)


@pytest.mark.parametrize(("host", "way"), WAYS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in windows"])
def test_windows_and_buckets_are_all_that_an_engine_takes_beside_its_weights(
    host: int | None,
    way: str,
    whole: bool,
    root: Path,
    pair_of: Callable[..., Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_model(root / "deep", "llama", layers=12)
    pair = pair_of("deep", (in_windows(host, monkeypatch, whole=whole),))
    pair.sync(0)
    pair.learn(0)
    pair.actor.move(WEIGHTS_ONLY)
    pair.rollout.move(WEIGHTS_ONLY)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(pair.actor.push_weights, 1)
        with Grown() as grown:
            pair.rollout.pull_weights(1)
        pushed = sent.result()
    assert pair.difference() < 1e-4
    size = pushed[f"actor/pushed_{way}_bytes"].value
    largest = max(tensor.nbytes for tensor in pair.engine._tensors.values())
    window = max(WINDOW, largest)
    print(f"{size:.0f} bytes of weights: {grown.most} bytes beside them")
    assert size > 5 * (window + 2 * BUCKET)
    if whole:
        assert grown.most >= size
    else:
        assert window <= grown.most <= window + 2 * BUCKET + SMALL


@pytest.mark.parametrize("host", [0, None], ids=["beside the actor", "apart"])
@pytest.mark.parametrize(
    ("buckets", "left"), [(0, 0), (12, None)], ids=["first bucket", "middle"]
)
def test_an_engine_that_a_broken_sync_left_in_the_middle_generates_nothing_until_the_next(
    host: int | None,
    buckets: int,
    left: int | None,
    pair_of: Callable[..., Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything was loaded, the weights before stay."""
    pair = pair_of("llama", (in_windows(host, monkeypatch),))
    pair.sync(0)
    pair.rollout.move(FULL)
    before = pair.engine.logprobs(TOKENS)
    with monkeypatch.context() as broken:
        breaks_after(buckets, pair, broken)
        with ThreadPoolExecutor(1) as thread:
            pushed = thread.submit(pair.actor.push_weights, 1)
            with pytest.raises(WeightSyncError, match="has no weights until the next"):
                pair.rollout.pull_weights(1)
            assert "fell off the bus" in str(pushed.exception())
    assert pair.engine.version == left
    if left is None:
        with pytest.raises(NotResident, match="before weights were loaded"):
            pair.engine.logprobs(TOKENS)
    else:
        assert pair.engine.logprobs(TOKENS) == before
    pair.sync(2)
    assert pair.engine.version == 2
    assert pair.difference() < 1e-4


def breaks_after(buckets: int, pair: Pair, patched: pytest.MonkeyPatch) -> None:
    member = pair.actor_member
    broadcast = member.broadcast
    calls = itertools.count()

    def broken(bucket: torch.Tensor, owner: int, deadline_s: float) -> None:
        if next(calls) == buckets:
            raise RuntimeError("its GPU fell off the bus")
        broadcast(bucket, owner, deadline_s)

    patched.setattr(member, "broadcast", broken)


def test_an_engine_that_cannot_load_a_window_takes_the_rest_and_is_named(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama", (in_windows(0, monkeypatch),))
    pair.sync(0)
    copied = itertools.count()

    def fails_once(self: TransformersEngine, window: Weights) -> None:
        if next(copied) == 1:
            raise RuntimeError("an illegal memory access")
        copy(self, window)

    copy = TransformersEngine._copy
    monkeypatch.setattr(TransformersEngine, "_copy", fails_once)
    with pytest.raises(
        WeightSyncError,
        match=r"rollout rank 0: version 1 could not be loaded: .*illegal memory access",
    ):
        pair.sync(1)
    assert pair.engine.version is None
    pair.sync(2)
    assert pair.difference() < 1e-4


def test_a_sync_of_other_weights_does_not_begin_and_the_engine_keeps_its_own(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama", (in_windows(0, monkeypatch),))
    pair.sync(0)
    pair.rollout.move(FULL)
    before = pair.engine.logprobs(TOKENS)
    shapes = dict(pair.engine.shapes)
    pair.engine.shapes["model.norm.weight"] = (1,)
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(pair.actor.push_weights, 1)
        with pytest.raises(UnfitWeights, match=r"model\.norm\.weight is"):
            pair.rollout.pull_weights(1)
        assert "rollout rank 0 could not begin" in str(pushed.exception())
    assert pair.engine.version == 0
    assert pair.engine.logprobs(TOKENS) == before
    pair.engine.shapes = shapes
    pair.sync(2)
    assert pair.difference() < 1e-4


def test_answers_in_flight_go_on_with_weights_that_came_in_windows(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama", (in_windows(None, monkeypatch),))
    pair.sync(0)
    pair.rollout.move(FULL)
    request = Request(
        env_rank=0,
        iteration=0,
        group=0,
        first_sample=0,
        samples=2,
        turn=0,
        tokens=np.array(TOKENS, np.int32),
        max_new_tokens=8,
        greedy=True,
    )
    pair.engine.submit(request)
    pair.engine.step()
    pair.actor.move(WEIGHTS_ONLY)
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(pair.actor.push_weights, 1)
        pair.rollout.pull_weights(1)
        pushed.result()
    finished = []
    while pair.engine.in_flight:
        finished += pair.engine.step()
    assert len(finished) == 2
    assert all({*done.versions.tolist()} == {0, 1} for done in finished)
    taker = pair.engine._taker
    assert taker is not None
    assert taker._member._group is not None
    pair.engine.close()
    assert taker._member._group is None


def test_only_factors_travel_and_rounding_does_not_add_up(
    pair_of: Callable[..., Pair], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    pair = pair_of(**LORA, sync={"mode": "lora"})
    first, _ = pair.sync(0)
    stored = load_file(root / "qwen3" / "model.safetensors")
    adapted = [
        weight
        for name, weight in stored.items()
        if "q_proj" in name or "down_proj" in name
    ]
    factors = sum(3 * sum(weight.shape) * 4 for weight in adapted)
    assert (
        first["actor/pushed_bytes"].value
        == sum(w.nbytes for w in stored.values()) + factors
    )
    for version in range(1, 6):
        pair.learn(version - 1)
        with monkeypatch.context() as patched:
            patched.setattr(
                trained_model,
                "by_rows",
                prepared := Mock(side_effect=trained_model.by_rows),
            )
            pushed, pulled = pair.sync(version)
        assert (
            pushed["actor/pushed_bytes"].value
            == pulled["rollout/pull_bytes"].value
            == factors
        )
        assert prepared.call_count == 2 * len(adapted), (
            "ranks that cut a copy would exchange what is frozen as well"
        )
    engine = {name: weight.clone() for name, weight in pair.engine._tensors.items()}
    pair.actor.move(FULL)
    for name, weight in dict(pair.actor._model.whole_weights()).items():
        touched = "q_proj" in name or "down_proj" in name
        torch.testing.assert_close(
            engine[name], weight, rtol=0, atol=1e-6 if touched else 0
        )
        assert torch.equal(weight, stored[name]) != touched


def test_changes_are_enough_for_an_engine_that_dropped_its_weights(
    pair_of: Callable[..., Pair],
) -> None:
    """They apply to the copy on the engine's node, from which it is given all weights."""
    pair = pair_of(
        "qwen3", FAR, **LORA | {"lora_targets": ["k_proj"]}, sync={"mode": "delta"}
    )
    first, _ = pair.sync(0)
    for version in range(1, 4):
        pair.learn(version - 1)
        assert pair.engine.version is None
        pushed, pulled = pair.sync(version)
        assert (
            2 * pushed["actor/pushed_bytes"].value < first["actor/pushed_bytes"].value
        )
        assert pulled["rollout/pull_bytes"].value == first["actor/pushed_bytes"].value
        assert pair.difference() < 1e-4


def test_what_the_first_sync_brought_is_shared_memory_of_the_node(
    pair_of: Callable[..., Pair],
) -> None:
    """Kept where it was written, not copied by every rank."""
    pair = pair_of(**LORA, sync={"mode": "lora"})
    pair.sync(0)
    kept = pair.rollout._kept._kept
    assert kept
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    boards = [line.split()[0].split("-") for line in lines if ".buffer" in line]
    for tensor in kept.tensors.values():
        assert any(
            int(low, 16) <= tensor.data_ptr() < int(high, 16) for low, high in boards
        )


def test_some_weights_without_the_others_are_refused(
    pair_of: Callable[..., Pair],
) -> None:
    pair = pair_of(**LORA, sync={"mode": "lora"})
    pair.actor._pushes = 1  # as if another engine had been there before
    with pytest.raises(WeightSyncError) as caught:
        pair.sync(0)
    assert caught.value.code == "some-weights"
    assert pair.engine.version is None


# ── verified by log-probabilities ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_every_nth_version_is_compared_by_what_both_say_of_the_probe(
    pair_of: Callable[..., Pair], mode: str
) -> None:
    pair = pair_of(**LORA, sync={"mode": mode, "verify": "logprobs", "verify_every": 2})
    seen = []
    for version in range(3):
        if version:
            pair.learn(version - 1)
        pair.sync(version)
        seen.append(pair.generate()["sync/verify_max_diff"].value)
    assert seen[0] == seen[1] != seen[2]
    assert max(seen) < 1e-4


def test_an_engine_that_is_awake_compares_at_once(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(sync={"verify": "logprobs", "verify_every": 1})
    pair.rollout.move(FULL)
    pair.actor.move(WEIGHTS_ONLY)
    pair.actor.push_weights(0)
    assert pair.rollout.pull_weights(0)["sync/verify_max_diff"].value < 1e-4


@pytest.mark.parametrize("spoil", [1.5, float("nan")])
def test_an_engine_that_says_something_else_is_an_error_with_the_worst_token(
    pair_of: Callable[..., Pair], spoil: float
) -> None:
    pair = pair_of(sync={"verify": "logprobs", "verify_every": 1})
    pair.sync(3)
    pair.engine._tensors["model.norm.weight"].mul_(spoil)
    with pytest.raises(WeightSyncError) as caught:
        pair.generate()
    assert caught.value.code == "logprobs-differ"
    text = str(caught.value)
    assert text.startswith(
        "rollout rank 0: the engine does not use the weights of version 3: token "
    )
    assert "rounding explains 0.001 at most" in text
