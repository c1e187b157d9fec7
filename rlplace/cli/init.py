"""`python -m rlplace.init [FOLDER]`: begin a project with an environment, a config, a test and a run script.

Exit codes: 0 written, 1 a file cannot be written, 2 wrong usage, or a file of the project exists already.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlplace.codes import config_error
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import Meaning, OptionParser, of_other_programs
from rlplace.errors import OutputError

_TEMPLATES = Path(__file__).with_name("project")
_KEY = "FOLDER"
# Name of each file, and what it is for
FILES = {
    "environment.py": "the environment",
    "train.yaml": "the config that trains it",
    "test_environment.py": "tests of both",
    "run.py": "trains and evaluates, from Python",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files of a new project, print what to type next, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = OptionParser(
        typed("init"),
        description="Begins a project: an environment, a config that trains it, a test and a run script.",
        reader=lambda words: of_other_programs(words, _meant),
    )
    parser.add_argument(
        "folder", metavar=_KEY, nargs="?", default=".", help="to write into (.)"
    )

    def command() -> int:
        folder = Path(parser.parse_args(argv).folder).expanduser()
        write_project(folder)
        lines = [f"wrote in {folder}:"]
        lines += [f"    {name:<20} {about}" for name, about in FILES.items()]
        lines.append("\nnext:")
        if folder != Path():
            lines.append(f"    cd {shlex.quote(str(folder))}")
        lines += [
            "    python -m rlplace.train --config-dir . --config-name train",
            "    python run.py",
            "    python -m pytest",
        ]
        print("\n".join(lines))
        return DONE

    return answered(command)


def _meant(name: str, value: str) -> Meaning | None:
    """Return what is meant by an option of another program for a setting of the project."""
    if name in ("env", "env_id", "environment", "gym_id") and value:
        option = f"--{name.replace('_', '-')}"
        return Meaning(
            f"leave out {option}, and write id: {value} for id and kwargs of env in train.yaml",
            "a project begins with an environment of its own, environment.py",
        )
    if name in ("name", "dir", "output", "out", "path", "project") and value:
        return Meaning(value, "FOLDER has no name of an option")
    return None


def write_project(folder: Path) -> None:
    """Write the files of a new project into a folder, which is made if it does not exist.

    Raises ConfigError if the folder has a file of the project already; nothing is written then. Raises OutputError.
    """
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise config_error(
            "bad-option",
            _KEY,
            str(folder),
            error="project-exists",
            names=", ".join(there),
            other=shlex.quote(str(folder / "my_project")),
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = (_TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.of(folder, error, _KEY) from error
