"""Tries of single things on this machine's GPUs: `python -m benchmarks.gpu_tries sleep-1`, as gpu_check runs them.

Exit codes: 0 it works, 77 this machine cannot run it (the last line says why), else it does not work, or not as it
should. Lines and `--emulated`: `gpu_measure`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.gpu_check import NOT_HERE
from benchmarks.gpu_measure import (
    DEVICE,
    GIB,
    MIB,
    ON_CPU,
    REPETITIONS,
    best,
    expect,
    matrix_rate,
    miss,
    seconds_of,
    synchronize,
    try_named_on_command_line,
)
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.device_group import device_group, open_shared, share
from rlplace.comm.weights.rendezvous import StoreAddress
from rlplace.placement.memory.formulas import GRAPHS_BYTES
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request
from rlplace.workers.engines.weights import EMBEDDING
from rlplace.workers.launch.devices import CudaDevice, Device
from rlplace.workers.launch.gpu_sharing import obstacle
from rlplace.workers.offload import Offloadable
from tests.contract.device_sync import Mixture, Weights, held_by, serve

if TYPE_CHECKING:
    from rlplace.workers.engines.vllm import VllmEngine
    from rlplace.workers.worker import Rendezvous
    from tests.lm_ranks import LmScenario, Outcome

SIZE = 64 * MIB if ON_CPU else GIB  # of what is shared, sent and offloaded
PATIENCE_S = 60.0
TOKENS = [3 + 11 * i % 300 for i in range(64)]


def environment() -> str:
    """Whether libraries and this machine are what everything else needs; the ceilings of this GPU."""
    if not ON_CPU and not torch.cuda.is_available():
        built = (
            f"for CUDA {torch.version.cuda}, which needs a newer driver"
            if torch.version.cuda
            else "for CPUs"
        )
        sys.exit(
            f"torch {torch.__version__} does not see the GPU: it is a build {built}        (rlplace doctor)"
        )
    shm = os.statvfs("/dev/shm")
    expect(
        "room in /dev/shm", shm.f_bavail * shm.f_frsize / GIB, least=1.0, unit=" GiB"
    )
    if ON_CPU:
        return f"torch {torch.__version__}"
    expect(
        "bf16 product of 8192 x 8192 matrices",
        matrix_rate() / 1e12,
        least=100.0,
        unit=" TFLOP/s",
    )
    expect(
        "copy within the GPU, read and written",
        2 * SIZE / GIB / _within(SIZE, DEVICE),
        least=500.0,
        unit=" GiB/s",
    )
    # What is wrong is told after the rates, which do not depend on it.
    for what, why in (
        ("compilers of kernels", _lacks_to_compile()),
        ("vLLM", _wrong_vllm()),
        ("weights past the host", obstacle("cuda:0")),
    ):
        if why:
            miss(what, why)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    count = torch.cuda.device_count()
    size = f"{found.total_memory / GIB:.0f} GiB"
    return f"{count} x {found.name}, {size}; {versions}; {os.cpu_count()} cores"


def _lacks_to_compile() -> str | None:
    if importlib.util.find_spec("hydra") is None:  # the doctor reads configs
        return None
    from rlplace.cli.doctor import lacks_to_compile

    lacking = lacks_to_compile()
    if lacking:
        return f"{lacking}        (sudo apt-get install gcc g++ python3-dev)"
    return None


def _wrong_vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    from rlplace.workers.engines.contract import vllm_problem

    problem = vllm_problem("gpu")
    if problem is not None:
        return problem.what
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return f"{error}, which its kernels need: an older cuda-python writes over it"
    return None


def device() -> Device:
    if ON_CPU:
        return Device()
    return CudaDevice()


def sleep(level: Literal[1, 2]) -> str:
    """Bytes and seconds of one sleep and wake, and what stays; the model must say the same after as before."""
    from benchmarks.generation import small_model, stored_weights
    from rlplace.config.blocks.language_model import TextRolloutConfig
    from rlplace.workers.engines.contract import EngineSettings
    from rlplace.workers.engines.vllm import VllmEngine

    free = _free()
    with tempfile.TemporaryDirectory() as temporary:
        folder = small_model(Path(temporary))
        cache = 4 * SIZE
        dtype: Literal["fp32", "bf16"] = "fp32" if ON_CPU else "bf16"
        rollout = TextRolloutConfig(
            dtype=dtype, kv_cache_memory=cache, sleep_level=level, enforce_eager=True
        )
        settings = EngineSettings(rollout=rollout, model=folder, context=1024)
        engine = VllmEngine(settings, device=device(), owner="rollout rank 0")
        engine.move(Residency.WEIGHTS)
        engine.load(stored_weights(folder), 1)
        engine.move(Residency.FULL)
        before = np.array(engine.logprobs(TOKENS))
        awake = _free()
        slept_s = seconds_of(lambda: engine.move(Residency.OFF))
        asleep = _free()

        def wake() -> None:
            engine.move(Residency.WEIGHTS)
            if level == 2:
                engine.load(stored_weights(folder), 2)
            engine.move(Residency.FULL)

        woke_s = seconds_of(wake)
        error = float(np.abs(np.array(engine.logprobs(TOKENS)) - before).max())
        strayed = _changed_in_flight(engine, stored_weights(folder))
        engine.close()
    if not error < 1e-3:
        sys.exit(f"log-probabilities differ by {error:.2g} after waking")
    if not strayed < 0.2:
        sys.exit(
            f"an answer over two versions has other log-probabilities than its tokens', by {strayed:.2g}"
        )
    expect("freed of the KV cache", (asleep - awake) / cache, least=0.9)
    expect(
        "residue of the sleep",
        (free - asleep) / GIB,
        most=GRAPHS_BYTES / GIB,
        unit=" GiB",
    )
    return f"freed {_gib(asleep - awake)} in {slept_s:.3f} s, awake again in {woke_s:.3f} s; {_gib(free - asleep)} stay"


def _changed_in_flight(engine: VllmEngine, weights: Mapping[str, Tensor]) -> float:
    """The largest difference of an answer's log-probabilities from those of its tokens by the weights they came from.

    Halfway through, it gets weights that say something else; `weights` are those it has.
    """
    first = engine.version
    others = {**weights, EMBEDDING: 8 * weights[EMBEDDING]}  # it is the head as well
    assert first is not None, "it has weights"
    whose: dict[str, Any] = {
        "env_rank": 0,
        "iteration": 0,
        "group": 0,
        "turn": 0,
        "first_sample": 0,
        "samples": 1,
    }
    engine.submit(
        Request(**whose, tokens=np.array(TOKENS, np.int32), max_new_tokens=24)
    )
    for _ in range(12):
        engine.step()
    engine.load(others, first + 1)
    answers: list[Completion] = []
    while not answers:
        answers += engine.step()
    tokens = answers[0].tokens.tolist()
    versions = answers[0].versions
    by_others = engine.logprobs([*TOKENS, *tokens])[-len(tokens) :]
    engine.load(weights, first + 2)
    by_these = engine.logprobs([*TOKENS, *tokens])[-len(tokens) :]
    if set(versions.tolist()) != {first, first + 1}:
        sys.exit(
            f"an answer over versions {first} and {first + 1} says it has {sorted({*versions.tolist()})}"
        )
    return float(
        np.abs(
            np.where(versions == first, by_these, by_others) - answers[0].logprobs
        ).max()
    )


def ipc() -> str:
    tensor = torch.full((SIZE // 4,), 3.0, device=DEVICE)
    limit = _within(SIZE, DEVICE)
    with _processes(1) as pool:
        found = [
            pool.submit(_copy, share(tensor)).result(PATIENCE_S)
            for _ in range(REPETITIONS)
        ]
    if any(total != 3.0 * tensor.numel() for total, _, _ in found):
        sys.exit("another process read something else than what was shared")
    open_s, copy_s = (min(each[i] for each in found[1:]) for i in (1, 2))
    expect("speed of a copy within the GPU", limit / copy_s, least=0.8, unit=" x")
    return f"opened in {1e6 * open_s:,.0f} us, copied at {_rate(SIZE, copy_s)}, within the process {_rate(SIZE, limit)}"


def _copy(note: bytes) -> tuple[float, float, float]:
    """The sum of what was shared, seconds to open it and to copy it."""
    found: list[Tensor] = []
    open_s = seconds_of(lambda: found.append(open_shared(note)))
    mine = torch.empty_like(found[0])
    copy_s = seconds_of(lambda: mine.copy_(found[0]))
    return mine.double().sum().item(), open_s, copy_s


def weight_sync() -> str:
    """From a sender into an engine in another process of the same GPU, window by window; what arrives is equal to the
    bit, and the receiver holds one window beside its weights.
    """
    on = DEVICE if ON_CPU else torch.device("cuda:0")
    window = SIZE // 8
    mixture = Mixture(
        actors=1,
        hosts=(0,),
        whole=False,
        bucket_bytes=SIZE // 16,
        window_bytes=window,
        device=on,
    )
    sent: Weights = {
        str(i): torch.randn(SIZE // 32 // 2048, 1024, device=on).bfloat16()
        for i in range(32)
    }
    size = sum(tensor.nbytes for tensor in sent.values())
    store, point = serve()
    versions = range(1, REPETITIONS + 1)
    with JobFolder.create() as folder, _processes(1) as pool:
        channel = SharedChannel.create(
            folder.path,
            ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S),
        )
        sender = mixture.sender(channel, 0, point, folder.path)
        pulled = pool.submit(_pull, mixture, folder.path, versions)
        for version in versions:
            moved = sender.push(version, held_by(0, 1, sent))
        digests, seconds, most = pulled.result(PATIENCE_S)
        sender.close()
        channel.destroy()
    del store
    if digests != _digests(sent):
        sys.exit("other weights arrived than were sent")
    expect(
        "held beside the weights during a sync",
        max(0, most - size) / window,
        most=1.1,
        unit=" windows",
    )
    expect(
        "speed, far above that of the host",
        size / GIB / min(seconds),
        least=50.0,
        unit=" GiB/s",
    )
    return f"{_gib(size)} in {min(seconds):.3f} s, {_rate(size, min(seconds))}, by {', '.join(moved)}"


def cut_sync() -> str:
    """From two actor ranks into an engine of vLLM over both their GPUs, which then says what it said before."""
    from benchmarks.generation import small_model, stored_weights
    from rlplace.comm.weights.device_sync import WindowReceiver
    from rlplace.config.blocks.language_model import TextRolloutConfig
    from rlplace.workers.engines.contract import EngineSettings
    from rlplace.workers.engines.vllm import VllmEngine

    _needs_two_gpus()
    store, point = serve()
    with (
        JobFolder.create() as job,
        tempfile.TemporaryDirectory() as temporary,
        _processes(2) as pool,
    ):
        folder = small_model(Path(temporary))
        dtype = "fp32" if ON_CPU else "bf16"
        rollout = TextRolloutConfig(
            dtype=dtype,  # type: ignore[arg-type]  # one of them
            kv_cache_memory=SIZE,
            enforce_eager=True,
        )
        settings = EngineSettings(
            rollout=rollout, model=folder, context=1024, tensor_parallel=2
        )
        channel = SharedChannel.create(
            job.path,
            ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S),
        )
        engine = VllmEngine(settings, device=device(), owner="rollout rank 0")
        engine.move(Residency.FULL)
        engine.load(stored_weights(folder), 0)
        before = np.array(engine.logprobs(TOKENS))
        versions = range(1, REPETITIONS + 1)
        pushed = [
            pool.submit(_push, rank, folder, job.path, point, versions)
            for rank in range(2)
        ]
        receiver = WindowReceiver(channel, 0, load=engine.load_from)
        seconds = []
        for version in versions:
            began = time.perf_counter()
            with receiver.pull(version) as received:
                seconds.append(time.perf_counter() - began)
        error = float(np.abs(np.array(engine.logprobs(TOKENS)) - before).max())
        for push in pushed:
            push.result(PATIENCE_S)
        size = sum(weight.nbytes for weight in stored_weights(folder).values())
        engine.close()
        channel.destroy()
    del store
    if not error < 1e-3:
        sys.exit(f"log-probabilities differ by {error:.2g} after the sync")
    expect(
        "speed, far above that of the host",
        size / GIB / min(seconds[1:]),
        least=5.0,
        unit=" GiB/s",
    )
    return (
        f"{_gib(size)} in {min(seconds[1:]):.3f} s, by {', '.join(received.transports)}"
    )


def _push(
    rank: int, model: Path, folder: Path, point: StoreAddress, versions: Sequence[int]
) -> None:
    from benchmarks.generation import stored_weights

    on = DEVICE if ON_CPU else torch.device("cuda", rank)
    mixture = Mixture(
        actors=2,
        hosts=(0, 1),
        parts=(2,),
        bucket_bytes=SIZE // 16,
        window_bytes=SIZE // 4,
        device=on,
    )
    sender = mixture.sender(
        SharedChannel.attach(folder / "weights.channel"), rank, point, folder
    )
    weights = {name: weight.to(on) for name, weight in stored_weights(model).items()}
    for version in versions:
        sender.push(version, held_by(rank, 2, weights))
    sender.close()


def _needs_two_gpus() -> None:
    if not ON_CPU and (count := torch.cuda.device_count()) < 2:
        print(f"two GPUs are needed, and there is {count}")
        sys.exit(NOT_HERE)


def _within(size: int, on: torch.device) -> float:
    """Seconds of a copy within the device."""
    target, source = torch.empty(2, size, dtype=torch.uint8, device=on)
    return best(lambda: target.copy_(source))


def _pull(
    mixture: Mixture, folder: Path, versions: Sequence[int]
) -> tuple[Mapping[str, str], list[float], int]:
    """Hashes of the last version, seconds of each version, and the most bytes that torch held meanwhile."""
    receiver = mixture.receiver(
        SharedChannel.attach(folder / "weights.channel"), 0, folder
    )
    seconds: list[float] = []
    for version in versions:
        began = time.perf_counter()
        with receiver.pull(version) as received:
            synchronize()
            seconds.append(time.perf_counter() - began)
            if version == versions[-1]:  # to hash a GiB takes longer than to send it
                digests = _digests(received.tensors)
    receiver.close()
    most = 0 if ON_CPU else torch.cuda.max_memory_allocated()
    return digests, seconds[1:], most  # the first meets the sender


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a hash of the bytes of each tensor: equal where they are equal to the bit."""
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(torch.uint8).cpu().numpy()
        found[name] = hashlib.sha256(bits.tobytes()).hexdigest()
    return found


def nccl() -> str:
    _needs_two_gpus()
    store, point = serve()
    with _processes(2) as pool:
        ends = [pool.submit(_broadcast, rank, point.port) for rank in range(2)]
        (sent, _), (got, seconds) = (end.result(PATIENCE_S) for end in ends)
    del store
    if sent != got:
        sys.exit("the second GPU got something else than the first one sent")
    return f"{_gib(SIZE)} in {seconds:.4f} s, {_rate(SIZE, seconds)}"


def _broadcast(rank: int, port: int) -> tuple[float, float]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there, but not in the stubs

    device = DEVICE if ON_CPU else torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = device_group(store, rank=rank, size=2, device=device, timeout_s=PATIENCE_S)
    tensor = torch.full((SIZE // 4,), float(rank + 1), device=device)
    seconds = min(
        seconds_of(lambda: group.broadcast(tensor, root=0).wait())
        for _ in range(REPETITIONS)
    )
    return tensor.double().sum().item(), seconds


def ranks() -> str:
    """Two ranks learn a tiny model together, in each way of sharing it, beside one that learns alone."""
    from tests.lm_ranks import ADAM, LmScenario
    from tests.tiny_lm import tiny_model

    _needs_two_gpus()
    on_host = {"optimizer": {**ADAM, "on_host": True}, "activation_offload": True}
    ways: Mapping[str, Mapping[str, Any]] = {
        "sharded": {},
        "optimizer and inputs of layers on the host": {"trained": on_host},
        "tensor_parallel_size 2": {"tensor_parallel": 2},
        "context_parallel_size 2": {"context_parallel": 2},
    }
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        alone = LmScenario(model=tiny_model(Path(folder), "qwen3"), iterations=2)
        expected = _learned(alone)
        for way, words in ways.items():
            found = _learned(dataclasses.replace(alone, ranks=2, **words))
            apart = max(
                float(np.abs(found[name] - weight).max())
                for name, weight in expected.items()
            )
            expect(
                f"weights after two steps, {way}, from those of one rank",
                apart,
                most=0.05 * float(ADAM["lr"]),
            )
        in_bf16 = {
            "compute": "bf16",
            "weights": "bf16",
            "optimizer": {**ADAM, "kind": "adamw_master"},
        }
        rounded = _learned(dataclasses.replace(alone, ranks=2, trained=in_bf16))
    if not all(np.isfinite(weight).all() for weight in rounded.values()):
        sys.exit("in bfloat16, weights are not finite after two steps")
    return f"{len(ways) + 1} ways of two ranks in {time.perf_counter() - began:.0f} s"


def _learned(scenario: LmScenario) -> Mapping[str, NDArray[np.float32]]:
    """The weights that all ranks have in the end, as they push them."""
    from tests.worker_ranks import in_processes, spec_of

    found = in_processes(
        _learning, scenario, scenario.ranks, channels=(spec_of("weights"),)
    )
    if len({outcome.digest for outcome in found}) != 1:
        sys.exit("ranks that have learned together have different weights")
    return found[0].weights


def _learning(
    scenario: LmScenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> Outcome:
    from tests.lm_ranks import follow, make_lm_worker

    worker = make_lm_worker(
        scenario,
        rank,
        rendezvous,
        folder=folder,
        device=None if ON_CPU else CudaDevice(rank),
    )
    try:
        return follow(scenario, worker)
    finally:
        worker.close()


def offload() -> str:
    """Both ways, as shares of a copy between the GPU and pinned memory that is already there."""
    tensor = torch.randn(SIZE // 4, device=DEVICE)
    total = tensor.sum().item()
    pinned = torch.empty(SIZE // 4, pin_memory=not ON_CPU)
    limits = (best(lambda: pinned.copy_(tensor)), best(lambda: tensor.copy_(pinned)))
    part = Offloadable("weights", device(), lambda: [tensor])
    there, back = zip(
        *(
            (seconds_of(part.offload), seconds_of(part.onload))
            for _ in range(REPETITIONS)
        ),
        strict=True,
    )
    if tensor.sum().item() != total:
        sys.exit("what came back is not what was offloaded")
    figures = []
    for name, seconds, limit in zip(
        ("offload", "onload"), (there, back), limits, strict=True
    ):
        expect(
            f"{name}, of a copy to pinned memory",
            limit / min(seconds),
            least=0.8,
            unit=" x",
        )
        figures.append(f"{name} {_rate(SIZE, min(seconds))}")
    return "; ".join(figures)


def attention() -> str:
    """bf16 in one kernel against fp32, sequence by sequence; also where several have one prompt."""
    from rlplace.models.packed import Packed, attention

    lengths = (70, 1, 64, 33) if ON_CPU else (700, 1, 64, 2048, 333)
    nowhere = [np.zeros(n, bool) for n in lengths]
    alike = [
        (min(i, 2), 0 if i < 2 else 20) for i in range(len(lengths))
    ]  # the last ones begin alike
    alone, together = (
        Packed.of([np.arange(n) for n in lengths], nowhere, DEVICE, pairs)
        for pairs in ((), alike)
    )
    errors = []
    seconds = []
    for batch, window in itertools.product((alone, together), (None, 128)):
        tokens = len(batch.tokens)
        query, key, value = (
            torch.randn(1, n, tokens, 64, device=DEVICE).bfloat16() for n in (16, 4, 4)
        )
        attend = partial(
            attention,
            nn.Module(),
            attention_mask=None,
            packed=batch,
            sliding_window=window,
        )
        kernel, _ = attend(query, key, value)
        exact, _ = attend(query.float(), key.float(), value.float())
        errors.append((kernel.float() - exact).abs().max().item())
        seconds.append(best(lambda: attend(query, key, value)))  # noqa: B023  called at once
    if not max(errors) < 3e-2:
        sys.exit(
            f"one kernel for all sequences differs from one sequence at a time by {max(errors):.2g}"
        )
    return f"differs by {max(errors):.1g} at most; {sum(lengths)} tokens in {1e6 * seconds[0]:,.0f} us"


def generation() -> str:
    """The engine as a rollout rank steps it beside vLLM's own, by the wall."""
    from benchmarks.generation import PROMPT_TOKENS, compare, small_model

    draws = np.random.default_rng(0)
    pairs = 2 if ON_CPU else 5
    prompts = [
        draws.integers(3, 300, PROMPT_TOKENS).tolist()
        for _ in range(4 if ON_CPU else 32)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = small_model(Path(temporary))
        ratio = compare(
            folder, prompts, 8 if ON_CPU else 128, pairs, "fp32" if ON_CPU else "bf16"
        )["wall"]
    expect("tokens per second, of vLLM alone", ratio, least=0.97, unit=" x")
    return f"{ratio:.3f} of vLLM alone"


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def _free() -> int:
    """Bytes of the GPU; of a CPU, those that this process does not have, from any number on."""
    if ON_CPU:
        return -4096 * int(Path("/proc/self/statm").read_text().split()[1])
    synchronize()
    return torch.cuda.mem_get_info()[0]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rate(size: int, seconds: float) -> str:
    return f"{size / GIB / seconds:,.1f} GiB/s"


TRIES: Mapping[str, Callable[[], str]] = {
    "environment": environment,
    "sleep-1": partial(sleep, 1),
    "sleep-2": partial(sleep, 2),
    "ipc": ipc,
    "weight-sync": weight_sync,
    "nccl": nccl,
    "ranks": ranks,
    "cut-sync": cut_sync,
    "offload": offload,
    "attention": attention,
    "generation": generation,
}

if __name__ == "__main__":
    try_named_on_command_line(TRIES)
