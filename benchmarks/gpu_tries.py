"""One try of something on this machine's GPUs: `python -m benchmarks.gpu_tries sleep-1`, as gpu_check runs them.

The last line that it prints is the figure. Exit codes: 0 it works, 77 this machine cannot run it (the last line says
why), else it does not work.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_check import NOT_HERE
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.comm.weights.device_sync import device_group, open_shared, share
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.devices import CudaDevice
from rlplace.workers.offload import Offloadable
from tests.contract.device_sync import Mixture, Weights, held_by, serve

GIB = 1 << 30
PATIENCE_S = 60.0
REPETITIONS = 5  # the best counts
TOKENS = [3 + 11 * i % 300 for i in range(64)]


def sleep(level: Literal[1, 2]) -> str:
    """Bytes and seconds of one sleep and wake, and what stays; the model must say the same after as before."""
    from benchmarks.generation import small_model, stored_weights
    from rlplace.config.schema import TextRolloutConfig
    from rlplace.workers.engines.contract import EngineSettings
    from rlplace.workers.engines.vllm import VllmEngine

    torch.cuda.init()
    free = _free()
    with tempfile.TemporaryDirectory() as temporary:
        folder = small_model(Path(temporary))
        cache = 4 * GIB
        rollout = TextRolloutConfig(dtype="bf16", kv_cache_memory=cache, sleep_level=level, enforce_eager=True)
        settings = EngineSettings(rollout=rollout, model=folder, context=1024)
        engine = VllmEngine(settings, device=CudaDevice(), owner="rollout rank 0")
        engine.move(Residency.WEIGHTS)
        engine.load(stored_weights(folder), 1)
        engine.move(Residency.FULL)
        before, awake = np.array(engine.logprobs(TOKENS)), _free()
        slept_s = _seconds(lambda: engine.move(Residency.OFF))
        asleep = _free()

        def wake() -> None:
            engine.move(Residency.WEIGHTS)
            if level == 2:
                engine.load(stored_weights(folder), 2)
            engine.move(Residency.FULL)

        woke_s = _seconds(wake)
        error = float(np.abs(np.array(engine.logprobs(TOKENS)) - before).max())
        engine.close()
    if not error < 1e-3:
        sys.exit(f"log-probabilities differ by {error:.2g} after waking")
    if asleep - awake < 0.9 * cache:
        sys.exit(f"a KV cache of {_gib(cache)} was held, and {_gib(asleep - awake)} were freed")
    return f"freed {_gib(asleep - awake)} in {slept_s:.3f} s, awake again in {woke_s:.3f} s; {_gib(free - asleep)} stay"


def ipc() -> str:
    tensor = torch.full((GIB // 4,), 3.0, device="cuda")
    with _processes(1) as pool:
        found = [pool.submit(_copy, share(tensor)).result(PATIENCE_S) for _ in range(REPETITIONS)]
    if any(total != 3.0 * tensor.numel() for total, _, _ in found):
        sys.exit("another process read something else than what was shared")
    open_s, copy_s = (min(each[i] for each in found[1:]) for i in (1, 2))
    return f"opened in {1e6 * open_s:,.0f} us, copied at {_rate(GIB, copy_s)}"


def _copy(note: bytes) -> tuple[float, float, float]:
    """The sum of what was shared, seconds to open it and to copy it."""
    torch.cuda.init()
    found: list[Tensor] = []
    open_s = _seconds(lambda: found.append(open_shared(note)))
    mine = torch.empty_like(found[0])
    copy_s = _seconds(lambda: mine.copy_(found[0]))
    return mine.double().sum().item(), open_s, copy_s


def weight_sync() -> str:
    """From a sender to a receiver in another process of the same GPU, checksums compared."""
    mixture = Mixture(actors=1, hosts=(0,), bucket_bytes=64 << 20, verify_every=1, device=torch.device("cuda:0"))
    sent: Weights = {str(i): torch.randn(4096, 4096, device="cuda").bfloat16() for i in range(32)}
    size = sum(tensor.nbytes for tensor in sent.values())
    store, point = serve()
    versions = range(1, REPETITIONS + 1)
    with JobFolder.create() as folder, _processes(1) as pool:
        channel = SharedChannel.create(folder.path, ChannelSpec(name="weights", capacity_items=8, timeout_s=PATIENCE_S))
        sender = mixture.sender(channel, 0, point, folder.path)
        pulled = pool.submit(_pull, mixture, folder.path, versions)
        for version in versions:
            moved = sender.push(version, held_by(0, 1, sent))
        sums, seconds = pulled.result(PATIENCE_S)
        sender.close()
        channel.destroy()
    del store
    if sums != {name: tensor.double().sum().item() for name, tensor in sent.items()}:
        sys.exit("other weights arrived than were sent")
    return f"{_gib(size)} in {min(seconds):.3f} s, {_rate(size, min(seconds))}, by {', '.join(moved)}"


def _pull(mixture: Mixture, folder: Path, versions: Sequence[int]) -> tuple[Mapping[str, float], list[float]]:
    receiver = mixture.receiver(SharedChannel.attach(folder / "weights.channel"), 0, folder)
    seconds: list[float] = []
    for version in versions:
        began = time.perf_counter()
        with receiver.pull(version) as received:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            sums = {name: tensor.double().sum().item() for name, tensor in received.tensors.items()}
    receiver.close()
    return sums, seconds[1:]  # the first meets the sender


def nccl() -> str:
    if (count := torch.cuda.device_count()) < 2:
        print(f"two GPUs are needed, and there is {count}")
        sys.exit(NOT_HERE)
    store, point = serve()
    with _processes(2) as pool:
        ends = [pool.submit(_broadcast, rank, point.port) for rank in range(2)]
        (sent, _), (got, seconds) = (end.result(PATIENCE_S) for end in ends)
    del store
    if sent != got:
        sys.exit("the second GPU got something else than the first one sent")
    return f"{_gib(GIB)} in {seconds:.4f} s, {_rate(GIB, seconds)}"


def _broadcast(rank: int, port: int) -> tuple[float, float]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there, but not in the stubs

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = device_group(
        TCPStore("127.0.0.1", port, is_master=False), rank=rank, size=2, device=device, timeout_s=PATIENCE_S
    )
    tensor = torch.full((GIB // 4,), float(rank + 1), device=device)
    seconds = min(_seconds(lambda: group.broadcast(tensor, root=0).wait()) for _ in range(REPETITIONS))
    return tensor.double().sum().item(), seconds


def offload() -> str:
    """Both ways, as shares of a copy between the GPU and pinned memory that is already there."""
    tensor = torch.randn(GIB // 4, device="cuda")
    total, pinned = tensor.sum().item(), torch.empty(GIB // 4, pin_memory=True)
    limits = (_best(lambda: pinned.copy_(tensor)), _best(lambda: tensor.copy_(pinned)))
    part = Offloadable("weights", CudaDevice(), lambda: [tensor])
    there, back = zip(*((_seconds(part.offload), _seconds(part.onload)) for _ in range(REPETITIONS)), strict=True)
    if tensor.sum().item() != total:
        sys.exit("what came back is not what was offloaded")
    return "; ".join(
        f"{name} {_rate(GIB, min(seconds))}, {limit / min(seconds):.2f} of pinned"
        for name, seconds, limit in zip(("offload", "onload"), (there, back), limits, strict=True)
    )


def attention() -> str:
    """bf16 in one kernel against fp32, sequence by sequence."""
    from rlplace.models.packed import Packed, attention

    lengths = (700, 1, 64, 2048, 333)
    batch = Packed.of([np.arange(n) for n in lengths], [np.arange(n) > 0 for n in lengths], "cuda")
    query, key, value = (torch.randn(1, n, sum(lengths), 64, device="cuda").bfloat16() for n in (16, 4, 4))
    errors, seconds = [], []
    for window in (None, 128):
        attend = partial(attention, nn.Module(), attention_mask=None, packed=batch, sliding_window=window)
        kernel, _ = attend(query, key, value)
        exact, _ = attend(query.float(), key.float(), value.float())
        errors.append((kernel.float() - exact).abs().max().item())
        seconds.append(_best(lambda: attend(query, key, value)))  # noqa: B023  called at once
    if not max(errors) < 3e-2:
        sys.exit(f"one kernel for all sequences differs from one sequence at a time by {max(errors):.2g}")
    return f"differs by {max(errors):.1g} at most; {sum(lengths)} tokens in {1e6 * seconds[0]:,.0f} us"


def grpo() -> str:
    """Through the command, on one GPU that all share."""
    subprocess.run(["scripts/get_model", "tiny"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["scripts/train", *grpo_words(), f"runner.output_dir={folder}"], check=True)
        (file,) = Path(folder).glob("*/summary.json")
        summary = json.loads(file.read_text(encoding="utf-8"))
    if not summary["tokens_learned"] or not math.isfinite(summary["return_last"]):
        sys.exit("nothing was learned")
    per_iteration = summary["train_s"] / summary["iterations"]
    spent = ", ".join(f"{name} {value / summary['iterations']:.2f}" for name, value in summary["seconds"].items())
    return f"{per_iteration:.2f} s per iteration ({spent}), start {summary['start_s']:.0f} s"


def grpo_words() -> list[str]:
    placed = [f"cluster.component_placement.{component}=0" for component in ("actor", "env", "rollout")]
    return [
        *("--config-name", "collocated_grpo_llm", "model@actor.model=tiny"),
        *("cluster.accelerators_per_node=1", "cluster.accelerator.kind=cuda", *placed),
        *("rollout.dtype=bf16", "rollout.cache_dtype=bf16", "actor.compute=bf16"),
        *("algorithm.max_prompt_length=192", "runner.total_iterations=4", "runner.eval_every=0"),
    ]


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def _free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _best(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(REPETITIONS))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _rate(size: int, seconds: float) -> str:
    return f"{size / GIB / seconds:,.1f} GiB/s"


TRIES: Mapping[str, Callable[[], str]] = {
    "sleep-1": partial(sleep, 1),
    "sleep-2": partial(sleep, 2),
    "ipc": ipc,
    "weight-sync": weight_sync,
    "nccl": nccl,
    "offload": offload,
    "attention": attention,
    "grpo": grpo,
}

if __name__ == "__main__":
    print(TRIES[sys.argv[1]]())
