"""Runs of `python -m rlplace.train`, small enough to end in seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplace.cli.train import main

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0

# Two actor ranks, one env and one rollout rank in each of the three shapes; 256 samples an iteration.
SMALL = (
    "cluster.accelerators_per_node=4",
    "cluster.accelerator.kind=emulated",
    "env.total_num_envs=16",
    "algorithm.rollout_steps=16",
    "algorithm.epochs=2",
)
PLACEMENTS = {
    "hybrid_ppo": ("0-1", "0", "1"),
    "collocated_ppo": ("0-1", "0-1", "0-1"),
    "disaggregated_ppo": ("0-1", "2", "3"),
}
ONE_RANK_EACH = {
    "hybrid_ppo": ("0", "0", "1"),
    "collocated_ppo": ("0", "0", "0"),
    "disaggregated_ppo": ("0", "2", "3"),
}
# Env and rollout in one process, the actor in another.
SHARED = (
    "cluster.component_placement.actor=1",
    "cluster.component_placement.env={accelerators: 0-0, process: shared}",
    "cluster.component_placement.rollout={same_as: env, process: shared}",
    "cluster.allow_resident=[env,rollout]",
    "env.enable_offload=false",
    "rollout.enable_offload=false",
)
INLINE_LAUNCHER = "cluster.launcher=inline"
INLINE = (*SMALL, INLINE_LAUNCHER)


def placed(actor: str, env: str, rollout: str) -> tuple[str, ...]:
    where = {"actor": actor, "env": env, "rollout": rollout}
    return tuple(
        f"cluster.component_placement.{component}={text}"
        for component, text in where.items()
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended, and what it left."""

    code: int
    out: str
    err: str
    folder: Path | None  # None when it made none

    def metrics(self) -> list[dict[str, Any]]:
        assert self.folder is not None
        return [
            json.loads(line)
            for line in (self.folder / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]

    def summary(self) -> dict[str, Any]:
        assert self.folder is not None
        summary: dict[str, Any] = json.loads(
            (self.folder / "summary.json").read_text(encoding="utf-8")
        )
        return summary


def start(
    config: str,
    output: Path,
    *overrides: str,
    inside: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[str]:
    """`inside`: a command that runs the rest of its line somewhere else, such as in a network namespace."""
    command = [
        *inside,
        sys.executable,
        "-u",
        "-m",
        "rlplace.train",
        "--config-name",
        config,
    ]
    command += [f"runner.output_dir={output}", *overrides]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(
    process: subprocess.Popen[str],
    output: Path,
    before: str = "",
    limit_s: float = LIMIT_S,
) -> Finished:
    """Waits for the end. `before` is what was read of its output already."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    folders = sorted(output.glob("*/*"))
    return Finished(
        process.returncode, before + out, err, folders[-1] if folders else None
    )


def train(config: str, output: Path, *overrides: str, **options: Any) -> Finished:
    """Run one job: with the inline launcher in this process, which spares the start of Python and torch."""
    if INLINE_LAUNCHER not in overrides or options:
        return finish(start(config, output, *overrides, **options), output)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(ROOT),
    ):
        code = main(
            ["--config-name", config, f"runner.output_dir={output}", *overrides]
        )
    folders = sorted(output.glob("*/*"))
    return Finished(
        code, out.getvalue(), err.getvalue(), folders[-1] if folders else None
    )


def read_until(process: subprocess.Popen[str], begin: str) -> str:
    """Output up to the line that begins with `begin`; fails when the run ends before."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(begin):
            return seen
    _, err = process.communicate()
    raise AssertionError(f"the run ended before it said {begin!r}:\n{seen}\n{err}")
