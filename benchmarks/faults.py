"""Effective training time of a run whose workers die: at even intervals, one drawn at random gets SIGKILL.

    python benchmarks/faults.py [--config hybrid_ppo] [--minutes 8] [--every 120] [--seed 0] [--kinds env rollout]
                                [--output runs/faults] [override ...]

Prints what `summary.json` of the run says: the share of the time since all workers were ready that went into work that
counted, saving and ending included in that time, and the seconds of each recovery.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import rlplace.runtime.launched
from rlplace.cli.train import main as train
from rlplace.placement.language.spec import role_of
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.ray_launch.launcher import RayLauncher

LASTING = (
    "runner.total_iterations=1000000",
    "runner.stop_at_return=null",
    "faults.restarts=1000",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="hybrid_ppo")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--every", type=float, default=120.0, help="seconds between two kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["env", "rollout", "reference", "reward"],
        help="roles to kill",
    )
    parser.add_argument("--output", default="runs/faults")
    options, overrides = parser.parse_known_args()
    launched = rlplace.runtime.launched.launch

    def launch(cluster: Cluster, job: Any, staying: Collection[str] = ()) -> Any:
        groups = launched(cluster, job, staying)
        threading.Thread(
            target=kill, args=(cluster._launcher, options), daemon=True
        ).start()
        return groups

    rlplace.runtime.launched.launch = launch
    words = [
        "--config-name",
        options.config,
        f"runner.output_dir={options.output}",
        *LASTING,
        *overrides,
    ]
    code = train(words)
    assert code in (0, 128 + signal.SIGINT), f"the run ended with {code}"
    folder = max(Path(options.output).glob("*/*"), key=os.path.getmtime)
    show(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def kill(launcher: RayLauncher, options: argparse.Namespace) -> None:
    """Kill workers until the time is over; then end the run as Ctrl-C does."""
    drawn = random.Random(options.seed)
    ends = 60 * options.minutes
    began = time.monotonic()
    for number in itertools.count(1):
        due = number * options.every
        time.sleep(max(0.0, began + min(due, ends) - time.monotonic()))
        if due >= ends:
            os.kill(os.getpid(), signal.SIGINT)
            return
        alive = {slot.owner: process for slot, process in launcher._processes.items()}
        owner = drawn.choice(
            sorted(
                name
                for name in alive
                if role_of(name.split(" rank ")[0]) in options.kinds
            )
        )
        print(f"kill -9 {owner} after {time.monotonic() - began:.0f} s", flush=True)
        alive[owner].kill()


def show(summary: dict[str, Any]) -> None:
    faults = summary["faults"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in faults["events"]:
        replaced = {role_of(name.split(" rank ")[0]) for name in event["replaced"]}
        kinds.setdefault(", ".join(sorted(replaced)), []).append(event)
    print(
        f"\n{summary['iterations']} iterations; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
    )
    print(
        "| replaced | times | seconds to recover, median (most) | seconds done again, median (most) |"
    )
    print("|---|---|---|---|")
    for kind, events in sorted(kinds.items()):
        cells = []
        for name in ("recovery_s", "redone_s"):
            found = [event[name] for event in events]
            cells.append(f"{statistics.median(found):.1f} ({max(found):.1f})")
        print(f"| {kind} | {len(events)} | {' | '.join(cells)} |")
    print(f"\n{faults['effective_share']:.1%} of the time went into work that counted")


if __name__ == "__main__":
    main()
