"""What this machine's GPUs do: each check in a process of its own with a deadline, all of them in one table.

    scripts/gpu_check [--python PYTHON] [--within 8m] [--json FILE] [--emulated] [check ...]

A check that fails, hangs or crashes does not stop the others. A check whose libraries are missing is `not here`. When
a check has ended, its lines are printed and appended to a JSON file, so that they are not lost with the machine. The
checks that tell most per second come first. After eight minutes, without set-up, the running check is ended and the
others are not started. With `--emulated` a CPU stands in for the GPU: this tries the checks, and says nothing of GPUs.

`--python` names the interpreter of a machine as it is found: nothing is installed, and no network is used.
Exit codes: 0 nothing failed, 1 something did, 2 there is no GPU, or no such check.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from rlplace.errors import ClusterError, Problem
from rlplace.tables import chapter, table
from rlplace.units import clipped
from rlplace.workers.launch.machines import visible_gpus

FINE = 0
FAILED = 1
WRONG = 2
NOT_HERE = (
    77  # exit code of a check that this machine cannot run; its last line says why
)
GRACE_S = 30.0  # for what is past its deadline, to end what it has started
WITHIN_S = 480.0  # all checks, the end of the last one included
MODELS = "RLPLACE_CHECK_MODELS"  # names the folder that a check writes its models into
MODEL_BYTES = 20 << 30  # of the largest model, with room to spare
RESULTS = Path("runs/gpu_check.jsonl")  # one JSON object a check
_LOOK_S = 0.05
_LAST_LINES = 15  # of a failure, below the table
_KEPT_LINES = 150  # in the file
_WIDEST = 110
_MEASURED = ("what", "measured", "expected", "missed")


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
    needs: Sequence[str] = ()  # modules that have to be installed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    check: Check
    result: Literal["ok", "failed", "not here", "no time"]
    figure: str  # or why not
    seconds: float = 0.0
    measured: Sequence[Sequence[str]] = ()  # what, measured, expected, "missed" or ""
    errors: str = ""  # the last lines of a failure


def _check(
    module: str,
    name: str,
    what: str,
    deadline_s: float,
    *needs: str,
    argument: str = "",
) -> Check:
    command = (sys.executable, "-m", f"benchmarks.{module}", argument or name)
    return Check(
        name=name, what=what, command=command, deadline_s=deadline_s, needs=needs
    )


_CONFIG = ("hydra", "pydantic")  # to read a config
_MODEL = (*_CONFIG, "transformers", "safetensors")
_RUN = (*_CONFIG, "zmq", "psutil")
_SIMULATORS = (*_RUN, "gymnasium", "mujoco")
# Those that tell most per second come first; those with vLLM or a second GPU come last.
CHECKS = (
    _check(
        "gpu_tries",
        "environment",
        "libraries, drivers, shared memory; whether processes can share a GPU's",
        180.0,
    ),
    _check(
        "gpu_tries",
        "attention",
        "packed attention against one sequence at a time",
        60.0,
        "transformers",
    ),
    _check("gpu_tries", "offload", "offload and onload against a pinned copy", 60.0),
    _check(
        "gpu_ledger",
        "ledger-small",
        "memory of an actor of 0.6B in seven ways",
        240.0,
        *_MODEL,
        argument="small",
    ),
    _check(
        "gpu_runs",
        "grpo-learns",
        "GRPO in one process: the reward rises",
        180.0,
        *_RUN,
        argument="learns",
    ),
    _check(
        "gpu_learning",
        "learning-0.6b",
        "how fast a model of 0.6B learns, against a plain loop",
        120.0,
        *_MODEL,
    ),
    _check("gpu_tries", "ipc", "a tensor lent to another process of the GPU", 120.0),
    _check("gpu_tries", "weight-sync", "weights lent to a rank on the same GPU", 180.0),
    _check(
        "gpu_groups",
        "nccl-one",
        "bytes of a context and of NCCL; what never completes",
        150.0,
        *_CONFIG,
    ),
    _check(
        "gpu_ledger",
        "ledger-medium",
        "memory of an actor of 1.7B",
        120.0,
        *_MODEL,
        argument="medium",
    ),
    _check(
        "gpu_ledger",
        "ledger-large",
        "memory of actors of 4B and 8B",
        180.0,
        *_MODEL,
        argument="large",
    ),
    _check(
        "gpu_learning",
        "attention-speed",
        "packed attention against SDPA over padded batches",
        60.0,
        *_MODEL,
    ),
    _check(
        "gpu_simulators",
        "simulators",
        "hybrid PPO in one process, on the GPU and the CPU",
        150.0,
        *_SIMULATORS,
    ),
    _check(
        "gpu_learning",
        "learning-1.7b",
        "how fast a model of 1.7B learns",
        120.0,
        *_MODEL,
    ),
    _check(
        "gpu_runs",
        "grpo-turns",
        "GRPO by Ray, in turns on one GPU",
        240.0,
        *_RUN,
        "ray",
        argument="turns",
    ),
    _check(
        "gpu_simulators",
        "simulators-ray",
        "hybrid PPO by Ray, in turns on one GPU",
        120.0,
        *_SIMULATORS,
        "ray",
    ),
    _check(
        "gpu_learning",
        "fused",
        "whether compiled layers and another AdamW help",
        120.0,
        *_MODEL,
        "triton",
    ),
    _check(
        "gpu_learning",
        "learning-4b-lora",
        "how fast factors of a model of 4B learn",
        150.0,
        *_MODEL,
        "peft",
    ),
    _check(
        "gpu_tries",
        "sleep-1",
        "vLLM sleeps at level 1: weights on the host",
        300.0,
        *_MODEL,
        "vllm",
    ),
    _check(
        "gpu_tries",
        "sleep-2",
        "vLLM sleeps at level 2: weights dropped",
        300.0,
        *_MODEL,
        "vllm",
    ),
    _check(
        "gpu_tries",
        "generation",
        "tokens per second against vLLM alone",
        300.0,
        *_MODEL,
        "vllm",
    ),
    _check(
        "gpu_runs",
        "grpo-vllm",
        "GRPO with vLLM by Ray, and its memory",
        300.0,
        *_RUN,
        "ray",
        "vllm",
        argument="vllm",
    ),
    _check("gpu_tries", "nccl", "a broadcast between two GPUs", 180.0),
    _check(
        "gpu_tries", "ranks", "two GPUs learn together, in five ways", 300.0, *_MODEL
    ),
    _check(
        "gpu_tries",
        "cut-sync",
        "weights of two ranks into an engine over their two GPUs",
        300.0,
        *_MODEL,
        "vllm",
    ),
    Check(
        name="tests",
        what="tests that need a GPU",
        command=(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu and not slow",
            "-p",
            "no:cacheprovider",
        ),
        words=("--collect-only",),
        needs=("pytest", "pytest_timeout", *_SIMULATORS),
    ),
)


def main(
    argv: Sequence[str] | None = None,
    checks: Sequence[Check] = CHECKS,
    count: Callable[[], int] = lambda: len(visible_gpus()),
) -> int:
    """Prints what it does, then the table and what went wrong; returns the exit code. `count`: of GPUs here."""
    asked = _arguments(argv, checks)
    if not asked.emulated and not count():
        print(no_gpu(), file=sys.stderr)
        return WRONG
    try:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.open("a").close()
    except OSError as error:
        print(
            f"gpu_check: {asked.json} cannot be written: {error.strerror}        (--json FILE)",
            file=sys.stderr,
        )
        return WRONG
    outcomes = []
    if asked.emulated:
        print(
            "a CPU stands in for the GPU: nothing here says anything about one",
            flush=True,
        )
    ends = time.monotonic() + asked.within - min(GRACE_S, asked.within / 4)
    for check in checks:
        if asked.only and check.name not in asked.only:
            continue
        outcome = _outcome(check, asked.emulated, ends - time.monotonic(), asked.within)
        outcomes.append(outcome)
        _tell(outcome, asked.json, asked.emulated)
    print(render(outcomes))
    if any(outcome.result == "failed" for outcome in outcomes):
        return FAILED
    return FINE


def _arguments(
    argv: Sequence[str] | None, checks: Sequence[Check]
) -> argparse.Namespace:
    names = [check.name for check in checks]
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Tries what only a GPU can show."
    )
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="let a CPU stand in for the GPU: tries the checks",
    )
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        help="the interpreter of the checks, as it is: nothing is installed",
    )
    parser.add_argument(
        "--within",
        type=_seconds,
        metavar="TIME",
        help="of all checks: 8m (the default), 90s",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="where each result is appended",
    )
    parser.add_argument("only", nargs="*", metavar="check", help=", ".join(names))
    asked = parser.parse_args(argv)
    asked.within = asked.within or (math.inf if asked.emulated else WITHIN_S)
    if unknown := [name for name in asked.only if name not in names]:
        parser.error(
            f"no check is called {', '.join(unknown)}; there are {', '.join(names)}"
        )
    return asked


def _seconds(text: str) -> float:
    """Read `8m`, `90s` or a number of seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if found is None or not float(found.group(1)):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 8m, 90s")
    return (
        float(found.group(1))
        * {"s": 1.0, "m": 60.0, "h": 3600.0}[found.group(2) or "s"]
    )


def _outcome(check: Check, emulated: bool, left_s: float, within_s: float) -> Outcome:
    """Run it, unless this machine lacks what it needs, or no time is left."""
    if lacking := [
        name for name in check.needs if importlib.util.find_spec(name) is None
    ]:
        return Outcome(
            check=check,
            result="not here",
            figure=f"{' and '.join(lacking)} not installed",
        )
    if left_s <= 0:
        why = f"{within_s:g} s are over        (scripts/gpu_check {check.name})"
        return Outcome(check=check, result="no time", figure=why)
    print(f"{check.name}: {check.what} ...", flush=True)
    command = [*check.command, *(check.words if emulated else ())]
    return run(
        dataclasses.replace(check, command=command), min(check.deadline_s, left_s)
    )


def _tell(outcome: Outcome, file: Path, emulated: bool) -> None:
    """Print the lines of a check that has ended, and append them to the file."""
    for line in table(_rows(outcome)):
        print(line, flush=True)
    told = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": "a CPU that stands in" if emulated else ", ".join(gpu_names()),
        "check": outcome.check.name,
        "what": outcome.check.what,
        "result": outcome.result,
        "figure": outcome.figure,
        "seconds": round(outcome.seconds, 2),
        "measured": [
            dict(zip(_MEASURED, row, strict=True)) for row in outcome.measured
        ],
        "errors": outcome.errors,
    }
    with file.open("a", encoding="utf-8") as appended:
        appended.write(json.dumps(told) + "\n")


def run(check: Check, limit_s: float | None = None) -> Outcome:
    """Block until the check's process has ended, at most its deadline and GRACE_S; then end what it has started.

    `limit_s`: what is left of the time of all checks, if that is less than the deadline.
    """
    began = time.perf_counter()
    limit_s = check.deadline_s if limit_s is None else limit_s
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryDirectory(prefix="gpu_check_", dir=_roomy()) as folder,
    ):
        # Files, since whoever a check leaves behind would keep the end of a pipe open.
        process = subprocess.Popen(
            check.command,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=_environment(folder),
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        told = _text(out)
        errors = _text(err)
    seconds = time.perf_counter() - began
    rows = [line[1:].split("\t") for line in told.splitlines() if line.startswith("@")]
    measured = [row for row in rows if len(row) == 4]
    if code in (FINE, NOT_HERE):
        result: Literal["ok", "not here"] = "ok" if code == FINE else "not here"
        return Outcome(
            check=check,
            result=result,
            figure=_last(told),
            seconds=seconds,
            measured=measured,
        )
    if code is None and limit_s < check.deadline_s:
        why = f"not done when the time of all was over        (scripts/gpu_check {check.name})"
        return Outcome(
            check=check,
            result="no time",
            figure=why,
            seconds=seconds,
            measured=measured,
        )
    why = (
        f"not done after {check.deadline_s:g} s"
        if code is None
        else _last(errors) or _last(told) or f"exit {code}"
    )
    lines = (errors or told).rstrip().splitlines()[-_KEPT_LINES:]
    errors = "\n".join(lines)
    return Outcome(
        check=check,
        result="failed",
        figure=why,
        seconds=seconds,
        measured=measured,
        errors=errors,
    )


def render(outcomes: Sequence[Outcome]) -> str:
    """The table: each check, and below it what it measured; then the last words of each failure."""
    rows: list[tuple[str, ...]] = [
        ("check", "result", "measured", "expected", "seconds", "figure, or why not")
    ]
    for outcome in outcomes:
        rows += _rows(outcome)
    failures = [
        chapter(f"{o.check.name}:", o.errors.splitlines()[-_LAST_LINES:])
        for o in outcomes
        if o.result == "failed"
    ]
    return "\n\n".join(["\n".join(["", *table(rows)]), *failures])


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    figure = clipped(outcome.figure, _WIDEST)
    first = (
        outcome.check.name,
        outcome.result,
        "",
        "",
        f"{outcome.seconds:.1f}",
        figure,
    )
    measured = outcome.measured
    return [
        first,
        *(
            (f"  {what}", missed, found, expected, "", "")
            for what, found, expected, missed in measured
        ),
    ]


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs as its driver gives them; none where it has no such command."""
    asked = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if shutil.which(asked[0]) is None:
        return []
    return subprocess.run(
        asked, capture_output=True, text=True, check=False, timeout=GRACE_S
    ).stdout.splitlines()


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


def _roomy() -> str | None:
    """Return a folder in memory where models of 16 GB have room; None: the usual one of the machine."""
    fast = Path("/dev/shm")
    if fast.is_dir() and shutil.disk_usage(fast).free > MODEL_BYTES:
        return str(fast)
    return None


def _environment(folder: str) -> dict[str, str]:
    """Return that of a check, whose models lie in a folder that goes with it, also where it is killed."""
    return os.environ | {MODELS: folder}


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
    if lines:
        return lines[-1]
    return ""


if __name__ == "__main__":
    sys.exit(main())
