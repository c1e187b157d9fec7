"""What only the vLLM engine does: sleep at two levels, fill a given budget, cut itself over processes, end cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.folder import JobFolder, claim
from rlplace.comm.weights.device_sync import WindowReceiver
from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import NotResident, WeightSyncError
from rlplace.placement.schedule import Residency
from rlplace.tokens import Request
from rlplace.workers.engines import vllm_loading, vllm_versions
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.vllm import _build, _memory_arguments
from rlplace.workers.engines.vllm_memory import (
    KV_CACHE,
    WEIGHTS,
    CudaMemory,
    Held,
    OlderCudaMemory,
    cuda_memory,
)
from rlplace.workers.engines.weights import ExpectedWeights, in_buckets
from rlplace.workers.launch.devices import CudaDevice, Device
from tests.contract.device_sync import Grown, Mixture, serve
from tests.contract.weight_ends import held_by
from tests.rollout_stage import Ledger
from tests.tiny_lm import request_of, tiny_model

if TYPE_CHECKING:
    from rlplace.workers.engines.vllm import VllmEngine

pytestmark = pytest.mark.vllm

OFF, WEIGHTS_ONLY, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
TOKENS = [40 + 7 * i for i in range(30)]
CACHE_BYTES = 4 << 20
GREEDY = request_of(0, longest=8, greedy=True, tokens=np.array(TOKENS, np.int32))

# What vLLM below 0.32 has no step of its own for.
OLDER = {
    vllm_versions.unmap_cache: "discard",
    vllm_versions.sleep_but_for_what_sleeps: "sleep",
}

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama."""
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def weights(folder: Path) -> Mapping[str, Tensor]:
    """As they are stored: without the head, which is the embedding."""
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    return stored


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    return scored(plain(folder))


def plain(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def scored(model: Any) -> np.ndarray:
    """Log-probabilities of TOKENS by plain transformers."""
    logprobs = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


@pytest.fixture
def build(folder: Path) -> Iterator[Build]:
    """Makes engines and closes them; what their processes share goes as it does in a run."""
    from rlplace.workers.engines.vllm import VllmEngine

    engines, job = list[VllmEngine](), JobFolder.create()

    def make(
        device: Device,
        *,
        memory: int = 0,
        tensor_parallel: int = 1,
        model: Path = folder,
        **others: Any,
    ) -> VllmEngine:
        small = {
            "dtype": "fp32",
            "kv_cache_memory": CACHE_BYTES,
            "step_tokens": 64,
            "step_sequences": 4,
        }
        rollout = TextRolloutConfig(**small | {"enforce_eager": True} | others)
        settings = EngineSettings(
            rollout=rollout,
            model=model,
            context=64,
            emulated_memory=memory,
            tensor_parallel=tensor_parallel,
        )
        engines.append(VllmEngine(settings, device=device, owner="rollout rank 0"))
        if tensor_parallel > 1:
            claim(
                job.path,
                [
                    os.getpid(),
                    *(child.pid for child in psutil.Process().children(recursive=True)),
                ],
            )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    job.close()


def difference(engine: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.array(engine.logprobs(TOKENS)) - expected).max())


def answer(engine: Any, request: Request = GREEDY) -> list[int]:
    engine.submit(request)
    while engine.in_flight:
        for completion in engine.step():
            return completion.tokens.tolist()
    raise AssertionError("no answer")


def test_at_level_1_weights_outlive_a_sleep(
    build: Build, weights: Mapping[str, Tensor], expected: np.ndarray
) -> None:
    size = sum(weight.nbytes for weight in weights.values())
    device = Ledger()
    engine = build(device, sleep_level=1)
    assert (engine.move(OFF), engine.host_bytes, device.held) == (0, 0, {})
    assert engine.move(FULL) == size + CACHE_BYTES
    engine.load(weights, 5)
    asked = dataclasses.replace(
        GREEDY, tokens=np.array(TOKENS + TOKENS[:10], np.int32)
    )  # a block, which is cached
    before = answer(engine, asked)
    assert engine.move(OFF) == 0
    assert (engine.host_bytes, device.held, engine.version) == (size, {}, 5)
    assert engine.move(WEIGHTS_ONLY) == size
    assert (engine.host_bytes, device.held) == (0, {WEIGHTS: size})
    engine.move(FULL)
    assert difference(engine, expected) < 1e-3
    assert answer(engine, asked) == before


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_moves_on_a_gpu_are_steps_that_vllms_own_core_allows(
    build: Build,
    weights: Mapping[str, Tensor],
    expected: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
) -> None:
    """Its scheduler and executor are real; of the worker only what moves memory is not: a CPU's has none of it."""
    engine, moved = build(Ledger(), sleep_level=level), list[str]()
    engine.move(FULL)
    engine.load(weights, 1)
    executor = engine._vllm.model_executor
    ask = executor.collective_rpc

    def on_a_gpu(method: Any, *args: Any, **others: Any) -> Any:
        step = method if isinstance(method, str) else OLDER.get(method)
        if step not in ("sleep", "wake_up", "discard"):
            return ask(method, *args, **others)
        moved.append(step)
        return [None]

    monkeypatch.setattr(executor, "collective_rpc", on_a_gpu)
    monkeypatch.setattr(
        CudaMemory,
        "_measure",
        lambda self: [Held(weights=1, cache=1, accelerator=2, host=0)],
    )
    engine._memory = cuda_memory(engine._vllm)(engine._vllm, Ledger(), level)
    for version in (2, 3):
        assert len(answer(engine)) == 8
        engine.move(OFF)
        engine.move(WEIGHTS_ONLY)
        engine.load(weights, version)
        engine.move(FULL)
        assert difference(engine, expected) < 1e-3
        engine.submit(GREEDY)
        engine.step()
        engine.drop()
        engine.move(WEIGHTS_ONLY)
        engine.move(FULL)
    assert moved == ["discard", "sleep", "wake_up", "wake_up", "discard", "wake_up"] * 2


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_vllms_own_allocator_unmaps_and_maps_each_page_once(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is the installed vLLM's; the driver's calls below it, which take a GPU, are counted instead."""
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    from vllm import device_allocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    pages, copied = {1: True, 2: True, 3: True}, list[int]()

    def turned(to: bool) -> Callable[[Any], None]:
        def turn(handle: Any) -> None:
            assert pages[handle[2]] is not to, f"allocation {handle[2]} twice"
            pages[handle[2]] = to

        return turn

    allocator = object.__new__(cumem.CuMemAllocator)
    tags = {1: "weights", 2: "kv_cache", 3: "weights"}
    made = {
        at: device_allocator.AllocationData((0, 8, at, at), tag)
        for at, tag in tags.items()
    }
    allocator.pointer_to_data = made
    driver = types.SimpleNamespace(
        cudaMemcpy=lambda to, of, size: copied.append(size), cudaMemset=lambda *_: None
    )
    for name, value in (
        ("unmap_and_release", turned(False)),
        ("create_and_map", turned(True)),
        ("libcudart", driver),
        ("PIN_MEMORY", False),
    ):
        monkeypatch.setattr(cumem, name, value)
    monkeypatch.setattr(
        device_allocator, "get_mem_allocator_instance", lambda: allocator
    )
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    backend = CuMemBackend()

    class Worker:
        def sleep(self, level: int) -> None:
            backend.suspend(level)

        def wake_up(self, tags: list[str]) -> None:
            backend.resume(tags)

    class Engine:
        def collective_rpc(
            self, method: Any, args: Any = (), kwargs: Any = None
        ) -> list[Any]:
            step = (
                getattr(Worker(), method)
                if isinstance(method, str)
                else partial(method, Worker())
            )
            return [step(*args, **(kwargs or {}))]

        def reset_prefix_cache(self) -> bool:
            return True

    monkeypatch.setattr(
        OlderCudaMemory,
        "_measure",
        lambda self: [Held(weights=1, cache=1, accelerator=2, host=0)],
    )
    memory = OlderCudaMemory(Engine(), Ledger(), level)
    mapped = {OFF: set(), WEIGHTS_ONLY: {1, 3}, FULL: {1, 2, 3}}
    for to in (OFF, WEIGHTS_ONLY, FULL, WEIGHTS_ONLY, FULL, OFF, FULL, OFF):
        memory.move(to)
        assert {at for at, there in pages.items() if there} == mapped[to]
        assert {at for at, each in made.items() if not each.is_asleep} == mapped[to]
    assert bool(copied) is (level == 1)


@pytest.mark.slow  # builds vLLM once more
def test_keys_and_values_of_8_bits_take_a_quarter_and_are_nearly_right(
    build: Build, weights: Mapping[str, Tensor], expected: np.ndarray
) -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        with pytest.raises(NotImplementedError, match="FP8 KV cache on CPU requires"):
            build(Ledger(), cache_dtype="fp8")
        return
    exact = build(Ledger())
    blocks = exact._vllm.vllm_config.cache_config.num_gpu_blocks
    exact.close()
    engine = build(Ledger(), cache_dtype="fp8")
    assert engine._vllm.vllm_config.cache_config.num_gpu_blocks == pytest.approx(
        4 * blocks, abs=4
    )
    engine.move(FULL)
    engine.load(weights, 1)
    assert 1e-3 < difference(engine, expected) < 0.5
    assert len(answer(engine)) == 8


def test_a_share_of_an_emulated_accelerator_is_for_weights_and_cache(
    build: Build, weights: Mapping[str, Tensor]
) -> None:
    size = sum(weight.nbytes for weight in weights.values()) + CACHE_BYTES
    assert (
        build(
            Ledger(), kv_cache_memory=None, gpu_memory_utilization=0.5, memory=2 * size
        ).move(FULL)
        == size
    )


@pytest.mark.parametrize(
    "given", [{"kv_cache_memory": CACHE_BYTES}, {"gpu_memory_utilization": 0.1}]
)
def test_a_cache_of_a_given_size_needs_no_share_of_a_gpu_to_be_free(
    folder: Path, given: Mapping[str, Any]
) -> None:
    """VLLM's own start asks for the share in any case: a rank that is replaced starts beside what is resident there."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    settings = EngineSettings(
        rollout=TextRolloutConfig(**given), model=folder, context=64
    )
    cache = CacheConfig(
        **_memory_arguments(settings, ExpectedWeights.of_folder(folder), False)
    )
    found = MemorySnapshot(
        device="cpu", auto_measure=False, total_memory=80 << 30, free_memory=2 << 30
    )
    if "kv_cache_memory" in given:
        assert cache.kv_cache_memory_bytes == CACHE_BYTES
        request_memory(found, cache)
    else:
        with pytest.raises(
            ValueError, match="less than desired GPU memory utilization"
        ):
            request_memory(found, cache)


def test_it_is_built_on_the_gpus_of_its_rank_and_computes_in_its_dtype(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is a thread sees all GPUs, of which vLLM would take the first."""
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda arguments: arguments)

    def built(
        at: int, tensor_parallel: int, dtype: Any
    ) -> tuple[list[int] | None, str | None]:
        monkeypatch.setattr(
            os,
            "environ",
            {n: v for n, v in os.environ.items() if n != "TRITON_F32_DEFAULT"},
        )
        rollout = TextRolloutConfig(dtype=dtype, kv_cache_memory=CACHE_BYTES)
        settings = EngineSettings(
            rollout=rollout, model=folder, context=64, tensor_parallel=tensor_parallel
        )
        arguments = _build(
            settings, ExpectedWeights.of_folder(folder), torch.device("cuda", at)
        )
        return arguments.device_ids, os.environ.get("TRITON_F32_DEFAULT")

    assert built(0, 2, "bf16") == (None, None)
    assert built(1, 1, "bf16") == ([1], None)
    assert built(2, 2, "fp32") == ([2, 3], "ieee")


def test_it_leaves_the_process_as_it_found_it_and_without_a_seed_no_two_draw_alike(
    build: Build, weights: Mapping[str, Tensor]
) -> None:
    drawn, threads = [], torch.set_num_threads
    for _ in range(2):
        engine = build(Ledger())
        assert torch.set_num_threads is threads
        assert torch.distributed.is_initialized()
        engine.move(FULL)
        engine.load(weights, 1)
        drawn.append(answer(engine, dataclasses.replace(GREEDY, greedy=False)))
        engine.close()
        assert not torch.distributed.is_initialized()
    assert drawn[0] != drawn[1]


def test_it_draws_no_weights_that_the_first_sync_replaces(
    build: Build, weights: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.model_loader import dummy_loader

    def drawn(tensor: Tensor) -> None:
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(dummy_loader, "initialize_single_dummy_weight", drawn)
    engine = build(Ledger())
    engine.move(FULL)
    engine.load(weights, 1)


@pytest.mark.parametrize(
    "bad",
    [
        "layers.0.self_attn.k_proj.weight",
        pytest.param("layers.1.mlp.up_proj.weight", marks=pytest.mark.slow),
    ],
)
def test_layers_that_a_reload_leaves_unfinished_have_the_tensors_that_they_had(
    bad: str, build: Build, weights: Mapping[str, Tensor], expected: np.ndarray
) -> None:
    """CUDA graphs remember where they are."""
    engine = build(Device())
    engine.move(FULL)
    engine.load(weights, 1)
    (model,) = engine._vllm.collective_rpc(
        lambda worker: worker.model_runner.get_model()
    )
    before = {
        name: (weight, weight.detach().clone())
        for name, weight in model.named_parameters()
    }
    new = {
        name: weight[:-1] if name.endswith(bad) else 2 * weight
        for name, weight in weights.items()
    }
    engine._vllm.collective_rpc(vllm_loading._begin_reload)
    with pytest.raises(Exception, match=r"size|shape|dimension"):
        engine._vllm.collective_rpc(vllm_loading._load_some, args=(new.items(),))
    engine._vllm.collective_rpc(vllm_loading._give_up_reload)
    changed = set()
    for name, weight in model.named_parameters():
        assert weight is before[name][0]
        if not torch.equal(weight, before[name][1]):
            assert torch.equal(weight, 2 * before[name][1])
            changed.add(name)
    assert changed
    assert not any(
        name.startswith("model.layers.1") for name in changed if "layers.0" in bad
    )
    engine.load(weights, 2)
    assert difference(engine, expected) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_engine_over_two_processes_is_the_same_engine(
    build: Build, weights: Mapping[str, Tensor], expected: np.ndarray
) -> None:
    """That no process is left is checked for every test."""
    device = Ledger()
    engine = build(device, tensor_parallel=2)
    held = engine.move(WEIGHTS_ONLY)
    size = sum(weight.nbytes for weight in weights.values())
    assert size / 2 <= held < 0.6 * size  # norms are on both
    engine.load(weights, 1)
    assert engine.move(FULL) - held == device.held[KV_CACHE]
    assert difference(engine, expected) < 1e-3
    assert len(answer(engine)) == 8
    assert engine.move(OFF) == 0
    with syncs_to(engine) as sync:
        engine.move(WEIGHTS_ONLY)
        wrong = {name: 2 * weight for name, weight in weights.items()}
        assert sync(2, wrong) == {"shared_tensor": size, "gloo": size}
        engine.move(FULL)
        assert difference(engine, expected) > 0.1
        with pytest.raises(
            WeightSyncError,
            match="an engine that had begun to load has no weights",
        ):
            sync(3, weights, fails_at=15)
        assert engine.version is None
        sync(4, weights)
        assert engine.version == 4
        assert difference(engine, expected) < 1e-3

        def fails_once(worker: Any) -> None:
            model = worker.model_runner.get_model()

            def broken(weights: Any) -> None:
                del model.load_weights
                raise RuntimeError("no memory is left")

            if worker.rank == 1:
                model.load_weights = broken

        engine._vllm.collective_rpc(fails_once)
        with pytest.raises(
            WeightSyncError,
            match=r"rank 0 part 1: version 5 could not be loaded.*no memory(.|\n)*rank 0;",
        ):
            sync(5, wrong)
        assert engine.version is None
        sync(6, weights)
        assert difference(engine, expected) < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_experts_are_shared_by_an_engine_over_two_processes(
    build: Build, tmp_path: Path
) -> None:
    """The actor sends all experts of a layer in one, vLLM takes each by itself, and packs them anew each time."""
    folder = tiny_model(tmp_path, "qwen3_moe")
    model = plain(folder)
    weights, expected = model.state_dict(), scored(model)
    engine = build(Ledger(), tensor_parallel=2, model=folder)
    engine.move(FULL)
    with syncs_to(engine) as sync:
        for version, load in (
            (2, sync),
            (4, lambda version, weights: engine.load(weights, version)),
        ):
            sync(version - 1, {name: 2 * weight for name, weight in weights.items()})
            assert difference(engine, expected) > 0.1
            load(version, weights)
            assert difference(engine, expected) < 1e-3


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(0, id="beside an actor", marks=pytest.mark.slow),
        pytest.param(None, id="apart"),
    ],
)
def test_an_engine_of_one_process_loads_window_by_window(
    host: int | None, build: Build, weights: Mapping[str, Tensor], expected: np.ndarray
) -> None:
    engine = build(Ledger())
    size = sum(weight.nbytes for weight in weights.values())
    way = "gloo" if host is None else "shared_tensor"
    with syncs_to(engine, hosts=(host,), parts=()) as sync:
        engine.move(WEIGHTS_ONLY)
        wrong = {name: 2 * weight for name, weight in weights.items()}
        assert sync(2, wrong) == {way: size}
        engine.move(FULL)
        assert difference(engine, expected) > 0.1
        with pytest.raises(WeightSyncError, match="rank 0; an engine that had begun"):
            sync(3, weights, fails_at=15)
        assert engine.version is None
        with pytest.raises(NotResident, match="before weights were loaded"):
            engine.logprobs([1, 2, 3])
        sync(4, weights)
        assert engine.version == 4
        assert difference(engine, expected) < 1e-3


@contextlib.contextmanager
def syncs_to(
    engine: VllmEngine,
    hosts: tuple[int | None, ...] = (0, None),
    parts: tuple[int, ...] = (2,),
    bucket_bytes: int = 20_000,
    window_bytes: int = 50_000,
) -> Iterator[Callable[..., Mapping[str, int]]]:
    """From two actor ranks past the host: the first shares with one process of the engine, the other is in a group."""
    mixture = Mixture(
        actors=2,
        hosts=hosts,
        parts=parts,
        whole=False,
        bucket_bytes=bucket_bytes,
        window_bytes=window_bytes,
    )
    channel = LocalChannel(
        ChannelSpec(name="weights", capacity_items=64, timeout_s=20.0)
    )
    store, point = serve()
    senders = [
        mixture.sender(channel, rank, point, None) for rank in range(mixture.actors)
    ]
    receiver = WindowReceiver(channel, 0, load=engine.load_from)
    failing = senders[1]._device._member

    def sync(
        version: int, weights: Mapping[str, Tensor], fails_at: int | None = None
    ) -> Mapping[str, int]:
        calls, broadcast = itertools.count(), failing.broadcast

        def broken(*arguments: Any) -> None:
            if next(calls) == fails_at:
                raise RuntimeError("its GPU fell off the bus")
            broadcast(*arguments)

        with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(2) as threads:
            patched.setattr(failing, "broadcast", broken)
            pushes = [
                threads.submit(
                    sender.push, version, held_by(rank, mixture.actors, {**weights})
                )
                for rank, sender in enumerate(senders)
            ]
            with receiver.pull(version) as received:
                assert received.loaded
                moved = received.transports
            for push in pushes:
                push.result()
        return moved

    try:
        yield sync
    finally:
        receiver.close()
        for sender in senders:
            sender.close()
        del store


LARGE = {"hidden": 512, "layers": 12}  # 82 MiB
BUCKET = 8 << 20


@pytest.mark.slow
def test_an_engine_of_one_process_holds_windows_and_a_layer_beside_the_model(
    build: Build, tmp_path: Path
) -> None:
    """Of the tensors that its process makes, while loaded weights are loaded again.

    Beside windows and buckets, the CPU stands in for the accelerator: a layer is made anew, packed, and copied.
    """
    folder = tiny_model(tmp_path, "llama", **LARGE)
    stored = load_file(folder / "model.safetensors")
    size = sum(weight.nbytes for weight in stored.values())
    largest = max(weight.nbytes for weight in stored.values())
    engine = build(Ledger(), model=folder)
    engine.move(FULL)
    sizes = {"bucket_bytes": 1 << 20, "window_bytes": 4 << 20}
    with syncs_to(engine, hosts=(0,), parts=(), **sizes) as sync, Grown() as grown:
        sync(1, stored)
        # What vLLM has packed, in place of what the first load packs
        packed = grown.live
        grown.most = 0
        sync(2, stored)
    beside = grown.most - packed
    print(f"{size >> 10} KiB of weights: {beside >> 10} KiB beside them")
    windows = 2 * max(sizes["window_bytes"], largest) + 2 * sizes["bucket_bytes"]
    assert beside < windows + 3 * largest
    assert beside < size / 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sync_into_an_engine_over_two_processes_holds_two_buckets_beside_the_model(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory that any of its processes has, each page counted once, while loaded weights are loaded again.

    Beside what is on its way, the CPU stands in for the accelerators: a layer is made anew, packed, and copied.
    """
    folder = tiny_model(tmp_path, "llama", **LARGE)
    stored = load_file(folder / "model.safetensors")
    weights = {
        name: weight.clone() for name, weight in stored.items()
    }  # in memory, not in files
    monkeypatch.setattr(
        vllm_loading, "in_buckets", partial(in_buckets, size_bytes=BUCKET)
    )
    engine = build(Device(), tensor_parallel=2, model=folder)
    engine.move(FULL)
    engine.load(weights, 1)
    with Peak() as peak:
        engine.load(weights, 2)
    size, largest = (
        sum(weight.nbytes for weight in weights.values()),
        max(weight.nbytes for weight in weights.values()),
    )
    on_the_way, all_of_it = peak.shared_bytes, peak.all_bytes
    print(
        f"above {size >> 20} MiB of weights: {on_the_way >> 10} KiB on their way, {all_of_it >> 10} KiB in all"
    )
    assert largest <= BUCKET < on_the_way <= 2 * BUCKET
    assert all_of_it < size / 2


class Peak:
    """Watches this process and its children: the most they had above what they have when the block begins."""

    shared_bytes = all_bytes = 0

    def __enter__(self) -> Peak:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._files = [
            Path(f"/proc/{process.pid}/smaps_rollup") for process in processes
        ]
        self._before, self._over = self._held(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            shared, everything = self._held()
            self.shared_bytes = max(self.shared_bytes, shared - self._before[0])
            self.all_bytes = max(self.all_bytes, everything - self._before[1])

    def _held(self) -> tuple[int, int]:
        """Bytes in shared memory, and of every kind; a page that several processes have counts once."""
        found = [
            dict(line.split()[:2] for line in file.read_text().splitlines()[1:])
            for file in self._files
        ]
        return sum(int(of["Pss_Shmem:"]) << 10 for of in found), sum(
            int(of["Pss:"]) << 10 for of in found
        )


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_on_a_gpu_frees_what_it_says(
    build: Build, weights: Mapping[str, Tensor], expected: np.ndarray, level: int
) -> None:
    size = sum(weight.nbytes for weight in weights.values()) // 2  # bf16
    cache = 256 << 20
    engine = build(CudaDevice(), dtype="bf16", sleep_level=level, kv_cache_memory=cache)
    asleep = engine.move(OFF)
    awake = engine.move(WEIGHTS_ONLY)
    assert awake - asleep >= size
    engine.load({name: weight.cuda() for name, weight in weights.items()}, 1)
    assert engine.move(FULL) - awake >= 0.9 * cache
    assert difference(engine, expected) < 0.1
    before, free = answer(engine), torch.cuda.mem_get_info()[0]
    assert engine.move(OFF) < awake
    assert torch.cuda.mem_get_info()[0] - free >= 0.9 * cache
    assert engine.version == (1 if level == 1 else None)
    assert engine.host_bytes >= (size if level == 1 else 0)
    engine.move(WEIGHTS_ONLY)
    if level == 2:
        engine.load(weights, 2)
    engine.move(FULL)
    assert answer(engine) == before


@pytest.mark.parametrize("first", ["trainer", "engine"])
def test_a_trainer_and_an_engine_in_one_process_close_in_any_order(
    first: str, build: Build, qwen: Path, actor_of: Callable[..., Any]
) -> None:
    """They share torch's default process group, in which the engine has subgroups."""
    engine = build(Ledger())
    trainer = actor_of(qwen)
    assert torch.distributed.is_initialized()
    ends = [trainer, engine] if first == "trainer" else [engine, trainer]
    for each in ends:
        each.close()
    assert not torch.distributed.is_initialized()
