"""What this machine's GPUs do: each check in a process of its own with a deadline, all of them in one table.

    scripts/gpu_check [--emulated] [check ...]

A check that fails, hangs or crashes does not keep the others from running. After eight minutes, set-up aside, the last
one is ended, and those that are not begun are left out. With `--emulated`, on a machine without a GPU, a CPU stands in
for it: nothing is learned about GPUs, but every line of the checks runs that needs none. Exit codes: 0 nothing failed,
1 something did, 2 there is no GPU, or no such check.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Literal

from rlplace.errors import ClusterError, Problem
from rlplace.placement.show.text import chapter, table
from rlplace.units import clipped
from rlplace.workers.launch.machines import visible_gpus

FINE, FAILED, WRONG = 0, 1, 2
NOT_HERE = 77  # exit code of a check that this machine cannot run; its last line says why
GRACE_S = 30.0  # for what is past its deadline, to end what it has started
BUDGET_S = 480.0 - GRACE_S  # of all checks
_LOOK_S = 0.05
_LAST_LINES, _WIDEST = 15, 110


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The command's last line is its figure; of one that fails, the last line of its errors says why.

    Lines `@what, measured, expected, "missed" or ""`, apart by tabs, are measurements. `words`: what follows it where
    a CPU stands in for the GPU.
    """

    name: str
    what: str
    command: Sequence[str]
    deadline_s: float = 300.0
    words: Sequence[str] = ("--emulated",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: Check
    result: Literal["ok", "failed", "not here", "no time"]
    figure: str  # or why not
    seconds: float = 0.0
    measured: Sequence[Sequence[str]] = ()  # what, measured, expected, "missed" or ""
    errors: str = ""  # the last lines of a failure


def _tried(name: str, what: str, deadline_s: float = 300.0) -> Check:
    command = (sys.executable, "-m", "benchmarks.gpu_tries", name)
    return Check(name=name, what=what, command=command, deadline_s=deadline_s)


CHECKS = (
    _tried("environment", "libraries, drivers, shared memory; whether processes can share a GPU's", 180.0),
    _tried("sleep-1", "vLLM sleeps at level 1: weights on the host"),
    _tried("sleep-2", "vLLM sleeps at level 2: weights dropped"),
    _tried("ipc", "a tensor lent to another process of the GPU", 120.0),
    _tried("weight-sync", "weights lent to a rank on the same GPU", 180.0),
    _tried("nccl", "a broadcast between two GPUs", 180.0),
    _tried("ranks", "two GPUs learn together: sharded, by heads, by tokens, with the optimizer on the host"),
    _tried("cut-sync", "weights of two actor ranks into an engine over their two GPUs"),
    _tried("offload", "offload and onload against a pinned copy", 120.0),
    _tried("attention", "packed attention against one sequence at a time", 120.0),
    _tried("grpo", "a short GRPO run of a tiny model, and its memory"),
    _tried("generation", "tokens per second against vLLM alone"),
    Check(
        name="tests",
        what="tests that need a GPU",
        command=(sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider"),
        words=("--collect-only",),
    ),
)


def main(
    argv: Sequence[str] | None = None,
    checks: Sequence[Check] = CHECKS,
    count: Callable[[], int] = lambda: len(visible_gpus()),
    budget_s: float = BUDGET_S,
) -> int:
    """Prints what it does, then the table and what went wrong; returns the exit code. `count`: of GPUs here."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="Tries what only a GPU can show.")
    parser.add_argument("--emulated", action="store_true", help="let a CPU stand in for the GPU: tries the checks")
    parser.add_argument("only", nargs="*", metavar="check", help=", ".join(c.name for c in checks))
    asked = parser.parse_args(argv)
    only = asked.only
    if unknown := [name for name in only if name not in {c.name for c in checks}]:
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(c.name for c in checks)}")
    if not asked.emulated and not count():
        print(no_gpu(), file=sys.stderr)
        return WRONG
    outcomes, began = [], time.monotonic()
    for check in checks:
        left_s = budget_s - (time.monotonic() - began)
        if only and check.name not in only:
            continue
        if left_s <= 0 and not asked.emulated:
            why = f"{budget_s:g} s are over        (scripts/gpu_check {check.name})"
            outcomes.append(Outcome(check=check, result="no time", figure=why))
            continue
        print(f"{check.name}: {check.what} ...", flush=True)
        command = [*check.command, *(check.words if asked.emulated else ())]
        limit_s = check.deadline_s if asked.emulated else min(check.deadline_s, left_s)
        outcomes.append(run(dataclasses.replace(check, command=command), limit_s))
    print(render(outcomes))
    return FAILED if any(outcome.result == "failed" for outcome in outcomes) else FINE


def run(check: Check, limit_s: float | None = None) -> Outcome:
    """Blocks until its process has ended, at most the deadline and GRACE_S. Nothing it started stays in its group.

    `limit_s`: what is left of the time of all checks, if that is less than its deadline.
    """
    began = time.perf_counter()
    limit_s = check.deadline_s if limit_s is None else limit_s
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, since whoever a check leaves behind would keep the end of a pipe open.
        process = subprocess.Popen(check.command, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        told, errors = _text(out), _text(err)
    seconds = time.perf_counter() - began
    rows = [line[1:].split("\t") for line in told.splitlines() if line.startswith("@")]
    measured = [row for row in rows if len(row) == 4]
    if code in (FINE, NOT_HERE):
        result: Literal["ok", "not here"] = "ok" if code == FINE else "not here"
        return Outcome(check=check, result=result, figure=_last(told), seconds=seconds, measured=measured)
    if code is None and limit_s < check.deadline_s:
        why = f"not done when the time of all was over        (scripts/gpu_check {check.name})"
        return Outcome(check=check, result="no time", figure=why, seconds=seconds, measured=measured)
    why = f"not done after {check.deadline_s:g} s" if code is None else _last(errors) or _last(told) or f"exit {code}"
    lines = (errors or told).rstrip().splitlines()[-_LAST_LINES:]
    errors = "\n".join(lines)
    return Outcome(check=check, result="failed", figure=why, seconds=seconds, measured=measured, errors=errors)


def render(outcomes: Sequence[Outcome]) -> str:
    """The table: each check, and below it what it measured; then the last words of each failure."""
    rows = [("check", "result", "measured", "expected", "seconds", "figure, or why not")]
    for o in outcomes:
        rows.append((o.check.name, o.result, "", "", f"{o.seconds:.1f}", clipped(o.figure, _WIDEST)))
        rows += [(f"  {what}", missed, measured, expected, "", "") for what, measured, expected, missed in o.measured]
    failures = [chapter(f"{o.check.name}:", o.errors.splitlines()) for o in outcomes if o.result == "failed"]
    return "\n\n".join(["\n".join(["", *table(rows)]), *failures])


def no_gpu() -> ClusterError:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ClusterError(
        Problem(
            code="no-gpu",
            key="gpu_check",
            what="there is no GPU to check",
            got=None if visible is None else f"CUDA_VISIBLE_DEVICES={visible}",
            why="every check runs on an NVIDIA GPU of this machine",
            fix="run it where nvidia-smi lists one        (scripts/gpu_check --emulated tries the checks themselves)",
        )
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask all of its group, such as a run that has others to end; then force whatever is left of it."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _signal(process, 0) and time.monotonic() < until:
            process.poll()
            time.sleep(_LOOK_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send it to the group, 0 to nobody; return whether there is one."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # all of them have ended
        return False
    return True


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
