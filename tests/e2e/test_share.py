"""`rlplace share`: two runs use accelerators in turns, with the numbers that each has alone; kills and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 240.0
CONFIG = """
job: tests.e2e.sharing_job:job
cluster:
  launcher: {launcher}
  accelerators_per_node: 2
  accelerator: {{kind: emulated, memory: 8MiB}}
  component_placement: {{actor: 0, rollout: 1}}
actor: {{enable_offload: true, memory: {{full: 6MiB}}, seconds: {seconds}, seed: {seed}, slow: {slow}}}
rollout: {{enable_offload: true, memory: {{full: 6MiB}}, seconds: {seconds}, seed: {seed}}}
runner: {{output_dir: {folder}/runs, total_iterations: {iterations}, sinks: [jsonl]}}
checkpoint: {{every: 100}}
"""


class Case:
    """Two configs of runs, and what is in their folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # While it exists, an update takes seconds
        self.slow = folder / "slow"

    def config(
        self,
        name: str,
        *,
        seed: int,
        iterations: int,
        seconds: float = 0.02,
        launcher: str = "inline",
    ) -> str:
        file = self.folder / f"{name}.yaml"
        text = CONFIG.format(
            launcher=launcher,
            seconds=seconds,
            seed=seed,
            slow=self.slow,
            folder=self.folder,
            iterations=iterations,
        )
        file.write_text(text, encoding="utf-8")
        return str(file)

    def run_of(self, name: str) -> Path:
        """The only folder of a run."""
        (found,) = (self.folder / "runs" / name).glob("*/")
        return found

    def numbers(self, name: str) -> list[dict[str, Any]]:
        file = self.run_of(name) / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()]

    def curve(self, name: str) -> list[float]:
        return [numbers["actor/total"] for numbers in self.numbers(name)]

    def summary(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.run_of(name) / "summary.json").read_text("utf-8")
        )
        return found


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", f"rlplace.{name}", *words]


def shared(*words: str) -> tuple[int, str]:
    """Return the exit code of the command, and what it has printed."""
    done = subprocess.run(
        command("share", *words),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def alone(*words: str) -> None:
    subprocess.run(
        command("train", *words),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )


class Started:
    """The command at work."""

    def __init__(self, process: subprocess.Popen[str], printed: Path) -> None:
        self.process = process
        self._printed = printed

    @property
    def printed(self) -> str:
        return self._printed.read_text(encoding="utf-8")

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end, self.printed
            assert self.process.poll() is None, self.printed
            time.sleep(0.05)

    def drivers(self) -> dict[str, int]:
        """Config -> the process of its driver."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == self.process.pid and "rlplace.train" in words:
                found[Path(words[3]).stem] = int(folder.name)
        return found

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def starting(case: Case, *words: str) -> Iterator[Started]:
    printed = case.folder / "printed.txt"
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command("share", *words),
            env=environment(),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    started = Started(process, printed)
    drivers: dict[str, int] = {}
    try:
        started.until(lambda: len(started.drivers()) == 2)
        drivers = started.drivers()
        yield started
    finally:
        for each in (process.pid, *drivers.values()):
            if process.poll() is None or each != process.pid:
                with_end(each)
        process.wait(LIMIT_S)


def with_end(pid: int) -> None:
    """Kill a process of the test if it still lives."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
        if "rlplace" in words:
            os.kill(pid, signal.SIGKILL)
    except (OSError, ProcessLookupError):
        return


def iterations(case: Case, name: str) -> int:
    """The iterations that a run has written so far."""
    files = list((case.folder / "runs" / name).glob("*/metrics.jsonl"))
    return len(files[0].read_text("utf-8").splitlines()) if files else 0


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_each_run_has_the_numbers_that_it_has_alone(case: Case, launcher: str) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
    a = case.config("a", seed=1, iterations=6, launcher=launcher)
    b = case.config("b", seed=2, iterations=12, launcher=launcher)
    code, printed = shared(a, b)
    assert code == 0, printed
    together = {name: case.curve(name) for name in "ab"}
    assert [len(together[name]) for name in "ab"] == [6, 12]
    turns = [numbers["time/turns_s"] for numbers in case.numbers("a")]
    assert all(seconds >= 0.0 for seconds in turns)
    for name, words in (("a", a), ("b", b)):
        case.run_of(name).rename(case.folder / f"{name}-together")
        alone(words)
        assert case.curve(name) == together[name]
        assert "time/turns_s" not in case.numbers(name)[0]


def test_a_run_that_is_killed_leaves_everything_to_the_other(case: Case) -> None:
    a = case.config("a", seed=1, iterations=500)
    b = case.config("b", seed=2, iterations=40)
    with starting(case, a, b) as started:
        started.until(lambda: iterations(case, "a") >= 3)
        # It dies within a stage, with its accelerators
        case.slow.touch()
        time.sleep(1.0)
        os.kill(started.drivers()["a"], signal.SIGKILL)
        case.slow.unlink()
        assert started.wait() == 137
    assert "a has ended with exit code 137" in started.printed
    assert case.summary("b")["state"] == "finished"
    assert len(case.curve("b")) == 40


def test_both_runs_save_and_end_if_the_arbiter_is_killed(case: Case) -> None:
    a = case.config("a", seed=1, iterations=300)
    b = case.config("b", seed=2, iterations=300)
    with starting(case, a, b) as started:
        started.until(lambda: min(iterations(case, "a"), iterations(case, "b")) >= 3)
        drivers = started.drivers()
        os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait(LIMIT_S)
        end = time.monotonic() + LIMIT_S
        while not all(ended(pid) for pid in drivers.values()):
            assert time.monotonic() < end
            time.sleep(0.1)
    for name, words in (("a", a), ("b", b)):
        folder = case.run_of(name)
        error = (folder / "error.txt").read_text("utf-8")
        assert "[sharing-ended]" in error
        assert "rlplace share has ended" in error
        done = len(case.curve(name))
        alone(words, "resume=auto", f"runner.total_iterations={done + 2}")
        assert len(case.curve(name)) == done + 2


def test_ctrl_c_ends_both_with_their_checkpoints(case: Case) -> None:
    a = case.config("a", seed=1, iterations=500)
    b = case.config("b", seed=2, iterations=500)
    with starting(case, a, b) as started:
        started.until(lambda: min(iterations(case, "a"), iterations(case, "b")) >= 3)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
    for name in "ab":
        assert case.summary(name)["state"].startswith("stopped")
        done = len(case.curve(name))
        (checkpoint,) = (case.run_of(name) / "checkpoints").glob("0*")
        assert int(checkpoint.name) == done
    # Both go on in turns, from the folders of the runs
    more = f"runner.total_iterations={max(len(case.curve(n)) for n in 'ab') + 3}"
    words = [str(case.run_of("a")), more, str(case.run_of("b")), more]
    code, printed = shared(*words)
    assert code == 0, printed
    assert len(case.curve("a")) == len(case.curve("b"))


def test_a_shared_run_refuses_another_placement(case: Case) -> None:
    a = case.config("a", seed=1, iterations=300)
    b = case.config("b", seed=2, iterations=300)
    with starting(case, a, b) as started:
        started.until(lambda: iterations(case, "a") >= 3)
        place = "cluster.component_placement.actor=1"
        asked = subprocess.run(
            command("replace", str(case.run_of("a")), place),
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert asked.returncode == 2
        assert "another run uses these accelerators in turns" in asked.stderr
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
