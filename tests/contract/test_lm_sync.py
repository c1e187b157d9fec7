"""Weights from a language model's actor to its engine, version after version: all of them, some, factors, changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.device_push import DevicePush
from rlplace.comm.weights.device_sync import LoadedParts
from rlplace.errors import WeightSyncError
from rlplace.metrics import Metrics
from rlplace.placement.flow import Delivery, DeviceDelivery
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, WEIGHTS, EndOfIteration
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.engines.weights import NAME as PROBE
from rlplace.workers.roles.rollout import TextRolloutWorker
from rlplace.workers.training import trained_model
from rlplace.workers.worker import Rendezvous
from tests.contract.device_sync import CutEngine
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
            kind: Kind = "qwen3", deliveries: tuple[Delivery, ...] = (), **actor: object
        ) -> Pair:
            scenario = LmScenario(
                model=root / kind,
                algorithm=LENGTHS,
                trained=actor,
                rollout=ENGINE,
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
@pytest.mark.parametrize("mode", ["all", "trainable", "lora", "delta"])
def test_engine_and_trainer_agree_after_every_sync(
    pair_of: Callable[..., Pair],
    mode: str,
    deliveries: tuple[Delivery, ...],
    kind: Kind,
) -> None:
    pair = pair_of(kind, deliveries, **LORA, sync={"mode": mode})
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


@pytest.mark.parametrize(("host", "way"), [(0, "shared_tensor"), (None, "gloo")])
def test_past_the_host_they_agree_too(
    pair_of: Callable[..., Pair], host: int | None, way: str
) -> None:
    """The ways of GPUs, here with what stands for CUDA IPC and NCCL."""
    past_host = DeviceDelivery(readers=(0,), owners=(host,), actors=1)
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
