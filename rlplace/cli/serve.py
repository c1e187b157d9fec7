"""`python -m rlplace.serve --config-name serve_tiny [key=value ...]`: read a config, plan, start workers, serve.

The job is that of `algorithm.name: serve`. Exit codes are those of `python -m rlplace.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlplace.cli import train
from rlplace.commands import typed

_ALGORITHM = "algorithm.name"
_USAGE = """\
Serves a training API over HTTP, for clients of the package tinker (docs/serve.md).

    {program} --config-name serve_tiny                      a tiny model with random weights
    {program} --config-name serve_tiny dry_run=true         print the plan, start nothing
    {program} --config-name serve_tiny actor.model.path=<a Hugging Face folder> actor.lora_rank=32
    {program} --config-name serve_tiny serve.port=9000      override any key
    {program} --config-name serve_tiny resume=auto          go on from the newest checkpoint

exit codes: those of python -m rlplace.train"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `serve`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(_USAGE.format(program=typed("serve")))
        return train.DONE
    named = any(word.lstrip("+").startswith(f"{_ALGORITHM}=") for word in words)
    resumes = any(word.startswith("resume=") for word in words)
    if not named and not resumes:
        words.append(f"{_ALGORITHM}=serve")
    return train.main(words, called="serve")
