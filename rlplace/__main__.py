"""`rlplace train hybrid_ppo`: the commands of this package under one name; `python -m rlplace.train` is the same."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import sys
from pathlib import Path

from rlplace.codes import config_error
from rlplace.commands import begin
from rlplace.errors import did_you_mean, suggestion
from rlplace.extras import version_of

COMMANDS = {
    "train": "trains a policy on a declared placement",
    "init": "creates a project: environment, config, test, run script",
    "plan": "shows, draws, checks and compares placements; starts nothing",
    "profile": "measures a job under several placements",
    "search": "finds the fastest placement, from measured seconds",
    "runs": "lists runs: state, iterations, return or reward",
    "replace": "moves components of a run that goes on",
    "drain": "empties a node of a run that goes on, so that the machine can leave",
    "share": "trains several runs that use the same accelerators in turns",
    "report": "writes the report of a run",
    "evaluate": "evaluates a trained policy, and records a video",
    "doctor": "checks this machine, and shows which shipped configs run on it",
    "serve": "answers clients that train and sample over HTTP",
    "export": "writes the model of a checkpoint for other programs",
    "completion": "prints a script for completion in a shell",
}
WRONG = 2
NEEDED = ("hydra", "omegaconf", "pydantic")


# Word of other programs -> the words of rlplace; {} stands for the words behind it
_MEANT = {
    **dict.fromkeys(("start", "learn", "fit", "launch"), "train {}"),
    **dict.fromkeys(("eval", "test", "play", "enjoy"), "evaluate {}"),
    **dict.fromkeys(("sweep", "multirun"), "train {} --multirun"),
    **dict.fromkeys(("new", "create"), "init {}"),
    **dict.fromkeys(("check", "validate", "show", "dryrun"), "plan {}"),
    **dict.fromkeys(("tune", "optimize"), "search {}"),
    **dict.fromkeys(("list", "ls"), "runs {}"),
    **dict.fromkeys(("bench", "benchmark"), "profile {}"),
    "resume": "train resume={}",
    "import": "plan import {}",
    "explain": "plan explain {}",
    "solve": "plan solve {}",
    "schema": "plan schema {}",
}


def _meant(word: str, words: str) -> str | None:
    """Return the words that are meant by an unknown command and the words behind it; None if that is not clear.

    `words`: the words behind the command, as text.
    """
    shipped = Path(__file__).parent / "configs" / f"{word.removesuffix('.yaml')}.yaml"
    if shipped.is_file() or word.endswith((".yaml", ".yml")) or "=" in word:
        return f"train {shlex.quote(word)} {words}".strip()
    line = _MEANT.get(word)
    # `run` alone may mean the list of runs
    if word == "run" and words:
        line = "train {}"
    return line.format(words).strip() if line else None


def main() -> None:
    """Run the command named by the first word of the command line, such as `train`. Further words are its arguments."""
    begin()
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    listed = "\n".join(
        f"    rlplace {name:<10} {about}" for name, about in COMMANDS.items()
    )
    if word in ("--help", "-h", "help"):
        print(f"{listed}\n\nrlplace train --help: what a command takes")
        return
    if word in ("--version", "-V", "version"):
        print(
            f"rlplace {version_of('rlplace') or '(not installed: modules of ' + os.path.dirname(__file__) + ')'}"
        )
        return
    if word not in COMMANDS:
        words = " ".join(shlex.quote(each) for each in sys.argv[2:])
        line = _meant(word, words)
        if line is not None:
            command = line.partition(" ")[0]
            meant = config_error(
                "bad-option",
                "rlplace",
                word,
                error="meant-command",
                command=command,
                about=COMMANDS[command],
                line=line,
            )
            print(meant, file=sys.stderr)
            sys.exit(WRONG)
        near = did_you_mean(word, COMMANDS)
        unknown = config_error(
            "bad-option",
            "rlplace",
            word,
            error="command",
            hint=suggestion(near),
            commands=listed.strip(),
            near=near or "train",
        )
        print(unknown, file=sys.stderr)
        sys.exit(WRONG)
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            config_error(
                "missing-library",
                "rlplace",
                error="planner",
                lacking=", ".join(lacking),
            ),
            file=sys.stderr,
        )
        sys.exit(WRONG)
    by_module = sys.argv[0].endswith("__main__.py")
    # As `python -m` does, so that the user's modules are found; but not where a clone would hide the installed package
    if not by_module and not sys.flags.safe_path and not os.path.isdir("rlplace"):
        sys.path.insert(0, os.getcwd())
    os.environ["RLPLACE_CALLED"] = f"{'python -m ' * by_module}rlplace {word}"
    del sys.argv[1]
    runpy.run_module(f"rlplace.{word}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
