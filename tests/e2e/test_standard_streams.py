"""Commands on a terminal of few characters, without standard streams, cut off, and in a folder that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.training import INLINE, placed, train

ROOT = Path(__file__).parents[2]
ASCII = {
    "LC_ALL": "C",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}
SHORT = [
    "hybrid_ppo_cartpole",
    *INLINE,
    *placed("0", "0", "0"),
    "runner.total_iterations=2",
]
# Each command is tried; those that start workers or load much are slow tests
OTHERS = (
    "train",
    "doctor",
    "evaluate",
    "export",
    "profile",
    "report",
    "runs",
    "search",
)
COMMANDS = [
    "plan",
    *(pytest.param(command, marks=pytest.mark.slow) for command in OTHERS),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = train(SHORT[0], tmp_path_factory.mktemp("runs"), *SHORT[1:]).folder
    assert folder is not None
    return folder


def words(command: str, run: Path, out: Path) -> list[str]:
    """A command line that shows as much as the command has to show."""
    return {
        "doctor": [],
        "evaluate": [str(run), "episodes=1"],
        "export": [str(run), str(out / "exported")],
        "plan": ["hybrid_ppo"],
        "profile": ["--help"],
        "report": [str(run)],
        "runs": [str(run.parent)],
        "search": ["--help"],
        "train": [*SHORT, f"runner.output_dir={out}"],
    }[command]


def typed(
    line: str, *arguments: str, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Have a shell run a line in which "$@" is `python -m rlplace...`."""
    python = [sys.executable, "-m", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        ["bash", "-c", line, "bash", *python],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_itself_on_a_terminal_of_ascii(
    command: str, run: Path, tmp_path: Path
) -> None:
    shown = typed('"$@"', f"rlplace.{command}", *words(command, run, tmp_path), **ASCII)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.isascii()
    assert command != "evaluate" or " +- " in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("closed", [pytest.param("1", marks=pytest.mark.slow), "0,1,2"])
def test_every_command_works_without_standard_streams(
    command: str, closed: str, run: Path, tmp_path: Path
) -> None:
    line = '"$@" ' + " ".join(f"{number}>&-" for number in closed.split(","))
    done = typed(line, f"rlplace.{command}", *words(command, run, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_outlasts_its_reader(
    command: str, run: Path, tmp_path: Path
) -> None:
    """The reader is gone before the command writes: its end of the pipe is closed when the shell has read nothing."""
    line = 'exec 3> >(exec true); wait $!; "$@" >&3'
    done = typed(line, f"rlplace.{command}", *words(command, run, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_run_whose_output_is_cut_off_trains_to_its_end(tmp_path: Path) -> None:
    """What the terminal did not show is in the run's folder."""
    done = typed('"$@" | read', "rlplace.train", *words("train", tmp_path, tmp_path))
    assert done.stderr == ""
    (screen,) = tmp_path.rglob("screen.txt")
    assert "evaluate   " in screen.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["plan", "runs"])
def test_output_that_finds_no_space_is_a_failure_in_one_line(
    command: str, run: Path, tmp_path: Path
) -> None:
    done = typed(
        '"$@" > /dev/full', f"rlplace.{command}", *words(command, run, tmp_path)
    )
    assert (done.returncode, done.stderr) == (
        1,
        "standard output: cannot write: No space left on device\n",
    )


def test_a_run_goes_on_where_its_output_finds_no_space(tmp_path: Path) -> None:
    done = typed(
        '"$@" > /dev/full', "rlplace.train", *words("train", tmp_path, tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_its_folder_is_gone(
    command: str, run: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = typed(
        'rmdir "$PWD" && "$@"',
        f"rlplace.{command}",
        *words(command, run, tmp_path),
        cwd=gone,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("command line: the working folder is gone ")
    assert f"    got: {gone}\n" in done.stderr
    assert '    fix: cd "$PWD" ' in done.stderr


def test_the_one_name_of_all_commands_is_as_safe(tmp_path: Path) -> None:
    assert typed('"$@" 1>&-', "rlplace", "plan", "hybrid_ppo").returncode == 0
    assert typed('"$@" | true', "rlplace", "--help").stderr == ""
