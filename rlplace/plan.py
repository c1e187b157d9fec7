"""`python -m rlplace.plan --config-name hybrid_ppo [key=value ...]`: the plan of a config, without Ray, torch or a GPU.

Exit codes: 0 the plan holds, 2 wrong usage, config or placement.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rlplace import compose
from rlplace.errors import ProblemsError
from rlplace.placement import render_json, render_svg, render_text
from rlplace.train import read_plan

USAGE = """\
Shows where and when each component runs, before anything starts.

    {program} --config-name hybrid_ppo
    {program} --config-name hybrid_ppo cluster.component_placement.env=0-1
    {program} --config-name hybrid_ppo --format svg > plan.svg         also: text, json"""

_FORMATS = {
    "text": render_text,
    "json": lambda plan: json.dumps(render_json(plan), indent=1),
    "svg": render_svg,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan of one command line and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(USAGE.format(program="python -m rlplace.plan"))
        return 0
    form = "text"
    if "--format" in words:
        at = words.index("--format")
        form = words[at + 1] if at + 1 < len(words) else ""
        del words[at : at + 2]
    if form not in _FORMATS:
        print(f"--format: expected one of {', '.join(_FORMATS)}, got {form!r}", file=sys.stderr)
        return 2
    try:
        for composed in compose.with_hydra(words):
            print(_FORMATS[form](read_plan(composed)[1]))
    except ProblemsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
