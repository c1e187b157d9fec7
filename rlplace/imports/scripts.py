"""Read a launch script of another library: by running it under bash with stubs, or as a text.

Both give the words of one launch, the config file that the launch names, and lines about how the script was read: the
chosen branches, the other launches of the script, and missing files and programs that the script uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace.codes import config_error
from rlplace.errors import Source
from rlplace.imports.sandbox import (
    KILLED,
    PROCESSOR_SECONDS,
    SECONDS,
    Launch,
    Ran,
    run_script,
)
from rlplace.imports.settings import words_of
from rlplace.imports.shell import launch_words, options_in, taken_branches
from rlplace.units import clipped, counted

_AS_TEXT = (
    "Read as text, nothing was run; --run-script runs it isolated under bash, "
    "which gives its words exactly."
)
_SHOWN = 3  # branches or launches that are listed
_LONGEST = 100  # of a launch that is listed
_CONFIG = re.compile(r"--(config(?:_|-)?(?:name|path|file|dir)?)(?:=(.*))?", re.DOTALL)
_NO_TRAINER = ("start", "stop", "status", "list", "timeline")  # of `ray`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How launch scripts are read.

    `runs`: whether a script is run under bash; otherwise it is read as a text. `trusted`: whether it is run without
    isolation. `launch`: number of the launch to take, from 1; 0: the one with the most options. `variables`: variables
    of the environment. `arguments`: arguments of the script.
    """

    runs: bool = False
    trusted: bool = False
    launch: int = 0
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What was read of a launch script.

    `words`: the words of the launch, each with its place. `config`: the config file that the launch names; None:
    none, or it is not there. `notes`: how the script was read, in lines of text.
    """

    words: list[tuple[str, Source]]
    config: Path | None
    notes: tuple[str, ...]


def known_variables(reading: Reading) -> dict[str, str]:
    """Return the variables of the environment that a script may use when it is read as a text."""
    usual = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    return usual | dict(reading.variables)


def read_script(text: str, file: str, reading: Reading) -> Script:
    """Return the words of the launch in a script that is read without being run. `text`, `file`: the script."""
    variables = known_variables(reading)
    _, branches = taken_branches(text, variables)
    notes = [_AS_TEXT]
    notes += [
        f"line {branch.line}: {branch.condition}: {branch.taken}"
        for branch in branches[:_SHOWN]
    ]
    if branches[_SHOWN:]:
        notes.append(f"and {len(branches) - _SHOWN} more conditions")
    return Script(
        words=words_of(text, file, variables), config=None, notes=tuple(notes)
    )


def ran_script(file: Path, reading: Reading) -> Script:
    """Return the words of a launch of a script, by running the script under bash.

    Raises ConfigError if it cannot be run, if it launches nothing, or if it has no launch of that number.
    """
    ran = run_script(
        file, reading.arguments, reading.variables, trusted=reading.trusted
    )
    launches = [launch for launch in ran.launches if _trains(launch)]
    if not launches and ran.code == KILLED:
        raise config_error(
            "import-script",
            "import",
            str(file),
            error="ended",
            seconds=SECONDS,
            processor=PROCESSOR_SECONDS,
        )
    if not launches:
        raise config_error(
            "import-script",
            "import",
            str(file),
            error="nothing-launched",
            ended=ran.code,
            said=_last_words(ran, file),
        )
    if reading.launch > len(launches):
        raise config_error(
            "import-script",
            "--launch",
            str(reading.launch),
            error="launch-number",
            count=counted(len(launches), "launch"),
        )
    sizes = [options_in(launch.words) for launch in launches]
    chosen = (reading.launch or 1 + sizes.index(max(sizes))) - 1
    launch = launches[chosen]
    text = file.read_text(encoding="utf-8", errors="replace")
    words, config = _without_config(launch, launch_words(launch.program, launch.words))
    return Script(
        words=[(word, _place(word, text, str(file))) for word in words],
        config=config,
        notes=_ran_notes(ran, launches, chosen, file),
    )


def _trains(launch: Launch) -> bool:
    """Return whether a launch may train: it has options, and is not a helper such as `ray start`."""
    words = launch.words
    # Python whose program is a text, also behind `uv run`
    if not words or words[0] in ("-c", "-"):
        return False
    if any(
        word in ("-c", "-") and before.startswith("python")
        for before, word in itertools.pairwise(words)
    ):
        return False
    if launch.program == "ray" and words[0] in _NO_TRAINER:
        return False
    return options_in(launch_words(launch.program, words)) > 0


def _last_words(ran: Ran, file: Path) -> str:
    """Return the last error line of the script `file`, without its path; lines of `set -x` are left out."""
    lines = [line for line in ran.said.split("\n") if line and line[0] != "+"]
    if not lines:
        return "it said nothing"
    return clipped(lines[-1].removeprefix(f"{file.resolve()}: "), _LONGEST)


def _ran_notes(
    ran: Ran, launches: Sequence[Launch], chosen: int, file: Path
) -> tuple[str, ...]:
    how = "isolated" if ran.isolated else "as a trusted script, not isolated"
    notes = [f"Run under bash, {how}; programs were recorded and not started."]
    if len(launches) > 1:
        notes.append(
            f"It launches {len(launches)} programs; number {chosen + 1} is taken, "
            "--launch N takes another:"
        )
        for number, launch in enumerate(launches[:_SHOWN], 1):
            line = " ".join([launch.program, *launch.words])
            notes.append(f"  {number}  {clipped(line, _LONGEST)}")
        if launches[_SHOWN:]:
            notes.append(f"  and {len(launches) - _SHOWN} more")
    if ran.code == KILLED:
        notes.append(
            f"It was ended after {SECONDS} s, or {PROCESSOR_SECONDS} s of processor time; "
            "later launches are not known."
        )
    elif ran.code:
        notes.append(
            f"It ended with {ran.code}: {_last_words(ran, file)}; "
            "later launches are not known."
        )
    if ran.unknown:
        listed = ", ".join(ran.unknown[:_SHOWN])
        more = f" and {len(ran.unknown) - _SHOWN} more" if ran.unknown[_SHOWN:] else ""
        notes.append(f"Not there, and passed over: {clipped(listed, _LONGEST)}{more}")
    return tuple(notes)


def _place(word: str, text: str, file: str) -> Source:
    """Return where a word of a launch is written in its script, if only one line has its name."""
    name = re.split(r"[=\s]", word.lstrip("+~"))[0]
    lines = [n for n, line in enumerate(text.split("\n"), 1) if name and name in line]
    return Source(file=file, line=lines[0] if len(lines) == 1 else None)


def _without_config(
    launch: Launch, words: Sequence[str]
) -> tuple[list[str], Path | None]:
    """Return (words without those that name the config file, config file; None if it does not exist)."""
    rest: list[str] = []
    named: dict[str, str] = {}
    waiting = ""
    for word in words:
        if waiting:
            named[waiting] = word
            waiting = ""
        elif match := _CONFIG.fullmatch(word):
            option = re.sub(r"[-_]", "", match[1])
            if match[2] is None:
                waiting = option
            else:
                named[option] = match[2]
        else:
            rest.append(word)
    return rest, _config_file(launch, named)


def _config_file(launch: Launch, named: Mapping[str, str]) -> Path | None:
    """Return the config file of a launch. `named`: option without dashes -> its value."""
    name = next(
        (
            named[o].strip("'\"")
            for o in ("configname", "config", "configfile")
            if o in named
        ),
        "",
    )
    path = next(
        (named[o].strip("'\"") for o in ("configpath", "configdir") if o in named), ""
    )
    if not name:
        return None
    folders = [Path(launch.folder)]
    # Hydra looks beside the program, or beside the module that `-m` names
    programs = [w for w in (launch.program, *launch.words) if w.endswith(".py")]
    programs += [
        word.replace(".", "/")
        for before, word in itertools.pairwise(launch.words)
        if before == "-m"
    ]
    folders += [folders[0] / Path(program).parent for program in programs]
    for folder in folders:
        for ending in ("", ".yaml", ".yml"):
            file = folder / path / f"{name}{ending}"
            if file.is_file():
                return file
    return None
