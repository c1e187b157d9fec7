"""`rlplace.search(config, overrides)`: the placement of a job with the shortest iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlplace.api.callables import Config, Overrides
from rlplace.api.words import command_words
from rlplace.cli.search import read_request, search_for
from rlplace.foresight.answer import Result


def search(
    config: Config,
    overrides: Overrides = (),
    *,
    objective: str = "seconds",
    fix: Sequence[str] = (),
    accelerators: Sequence[int] = (),
    vary: Sequence[str] = (),
    seconds: float = 60.0,
    probe: int = 0,
    apply: str | Path | None = None,
) -> Result:
    """Find the placement with the shortest predicted iterations, and return it with the next best placements.

    The arguments are explained in `rlplace.search`; they are checked as the words of the command are.
    """
    options = [f"objective={objective}", f"seconds={seconds}"]
    for name, values in (("fix", fix), ("vary", vary), ("accelerators", accelerators)):
        if values:
            options.append(f"{name}={','.join(map(str, values))}")
    if probe:
        options += ["--probe", str(probe)]
    if apply is not None:
        options += ["--apply", str(apply)]
    with command_words(config, overrides) as words:
        return search_for(read_request([*words, *options]))
