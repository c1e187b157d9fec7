"""Hybrid PPO of simulators on one GPU: `python -m benchmarks.gpu_simulators simulators`.

As `benchmarks.gpu_tries`: lines that begin with `@` are measurements, the last line is the figure, 77 means that a
library is not here; with `--emulated` a CPU stands in for the GPU, and nothing is compared.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_measure import MIB, ON_CPU, expect, show, try_named_on_command_line

LEARNED = 30.0  # return of the pole, which begins at about 9


def simulators() -> str:
    """Hybrid PPO in one process: actor, rollout and simulators share the GPU in turns; the same on the CPU."""
    iterations = 3 if ON_CPU else 12
    figures = []
    for where, kind in {
        "GPU": "emulated" if ON_CPU else "cuda",
        "CPU": "emulated",
    }.items():
        summary = run_of(kind, "inline", iterations)
        first = summary["return_first"]
        last = summary["return_last"]
        per_iteration = summary["train_s"] / summary["iterations"]
        seconds = {
            name: summary["seconds"][name] / summary["iterations"]
            for name in ("rollout", "learn", "sync", "moves")
        }
        show(
            f"{where}, seconds of an iteration",
            f"{per_iteration:.2f} s",
            parts_of(seconds),
        )
        show(f"{where}, start", f"{summary['start_s']:.1f} s")
        expect(f"{where}, return of the last iteration", last, least=LEARNED)
        figures.append(
            f"{where} {first:.0f} -> {last:.0f}, {per_iteration:.2f} s per iteration"
        )
    return "; ".join(figures)


def simulators_by_ray() -> str:
    """Hybrid PPO by workers of Ray, all on one GPU in turns: a process each."""
    summary = run_of("emulated" if ON_CPU else "cuda", "ray", 3)
    per_iteration = summary["train_s"] / summary["iterations"]
    for component, states in summary["memory"].items():
        for residency, found in states.items():
            measured, predicted = (
                found[name] / MIB for name in ("measured", "predicted")
            )
            show(
                f"memory of {component} {residency}",
                f"{measured:.0f} MiB",
                f"plan {predicted:.0f} MiB",
            )
    seconds = {
        name: summary["seconds"][name] / summary["iterations"]
        for name in ("rollout", "learn", "sync", "moves")
    }
    return f"{per_iteration:.2f} s per iteration ({parts_of(seconds)}), start {summary['start_s']:.0f} s"


def run_of(kind: str, launcher: str, iterations: int) -> Mapping[str, Any]:
    """The summary of a run of hybrid_ppo, all of whose components are on one accelerator."""
    placed = [
        f"cluster.component_placement.{component}=0"
        for component in ("actor", "env", "rollout")
    ]
    words = [
        *("--config-name", "hybrid_ppo", *placed),
        *(
            "cluster.accelerators_per_node=1",
            f"cluster.accelerator.kind={kind}",
            f"cluster.launcher={launcher}",
        ),
        *(f"runner.total_iterations={iterations}", "checkpoint.every=0"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "rlplace.train",
            *words,
            f"runner.output_dir={folder}",
        ]
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.exit(f"hybrid_ppo on {kind} by {launcher} ended with exit code {code}")
        (file,) = Path(folder).glob("*/*/summary.json")
        summary: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if summary["state"] != "finished" or summary["iterations"] != iterations:
        sys.exit(
            f"it says that it {summary['state']} after {summary['iterations']} iterations of {iterations}"
        )
    if not math.isfinite(summary["return_last"]):
        sys.exit(f"its return is {summary['return_last']}")
    return summary


def parts_of(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


TRIES: Mapping[str, Callable[[], str]] = {
    "simulators": simulators,
    "simulators-ray": simulators_by_ray,
}

if __name__ == "__main__":
    try_named_on_command_line(TRIES)
