"""Bytes and seconds of a weight sync of LoRA factors, by `actor.sync.mode`.

    python benchmarks/adapter_sync.py MODEL [--engine vllm] [--rank 16] [--syncs 5] [--modes all adapter]

`MODEL`: folder of a language model. Each mode has a process of its own with an actor and an engine that keeps its
weights. The factors are random. The first sync sends all weights and does not count; the other numbers are medians.
`push s`: until the actor has written its weights; `load s`: until the engine has loaded what arrived; `largest
difference`: of log-probabilities of the same tokens in actor and engine, after the last sync.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.models.sharding import own
from rlplace.workers.arguments import WEIGHTS
from tests.contract.test_lm_sync import FULL, LENGTHS, WEIGHTS_ONLY, Pair
from tests.lm_ranks import LmScenario
from tests.worker_ranks import spec_of

MODES = ("all", "trainable", "lora", "adapter")
COLUMNS = ("MB sent", "push s", "load s", "largest difference")


def measured(mode: str, options: argparse.Namespace) -> list[float]:
    """Return the numbers of one mode, one for each of COLUMNS."""
    engine = {
        "engine": options.engine,
        "dtype": "fp32",
        "kv_cache_memory": 64 << 20,
        "step_tokens": 256,
        "step_sequences": 4,
        "enforce_eager": True,
    }
    scenario = LmScenario(
        model=options.model,
        algorithm=LENGTHS,
        trained={"lora_rank": options.rank, "sync": {"mode": mode}},
        rollout=engine,
    )
    rows = []
    with JobFolder.create() as folder:
        channel = SharedChannel.create(folder.path, spec_of(WEIGHTS))
        pair = Pair(scenario, folder.path)
        try:
            pair.actor.move(WEIGHTS_ONLY)
            with torch.no_grad():
                for _, factor in pair.actor._model.by_name(
                    pair.actor._model.trained_shards()
                ):
                    own(factor).normal_(std=0.01)
            pair.sync(0)
            pair.rollout.move(FULL)
            for version in range(1, options.syncs + 1):
                pair.actor.move(WEIGHTS_ONLY)
                pushed = pair.actor.push_weights(version)
                pulled = pair.rollout.pull_weights(version)
                sent = pushed["actor/pushed_bytes"].value / 1e6
                push_s = pushed["actor/push_s"].value
                rows.append((sent, push_s, pulled["rollout/load_s"].value))
            difference = pair.difference()
        finally:
            pair.close()
            channel.destroy()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return [*medians, difference]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    options = parser.parse_args()
    if len(options.modes) == 1:
        (mode,) = options.modes
        found = measured(mode, options)
        print(f"{mode:12}" + "".join(f"{value:20.3g}" for value in found), flush=True)
        return
    print(f"{'mode':12}" + "".join(f"{name:>20}" for name in COLUMNS), flush=True)
    # A process has one engine of vLLM
    given = (str(options.model), "--engine", options.engine)
    sizes = ("--rank", str(options.rank), "--syncs", str(options.syncs))
    for mode in options.modes:
        command = [sys.executable, __file__, *given, *sizes, "--modes", mode]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
