"""A run in this process that writes down every sample it learns.

`python -m tests.e2e.learned_run FILE <words of rlplace.train>`. A line of the file has the version of the policy that
learns the sample, its group, number and tokens, and the version that drew each token of its answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlplace.cli.train import main
from rlplace.workers.roles.actor import LmActor


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Have actors in this process add what they learn to `file`, before they learn it."""
    receive = LmActor._receive

    def receiving(self: LmActor, iteration: int, part: int) -> Any:
        shard, experience = receive(self, iteration, part)
        with open(file, "a", encoding="utf-8") as out:
            for sample in (
                s for group in (experience.groups if experience else ()) for s in group
            ):
                entry = {
                    "version": iteration,
                    "group": sample.group,
                    "sample": sample.sample,
                }
                arrays = {
                    "tokens": sample.tokens.tolist(),
                    "versions": sample.versions[sample.mask].tolist(),
                }
                out.write(json.dumps(entry | arrays) + "\n")
        return shard, experience

    LmActor._receive = receiving
    try:
        yield
    finally:
        LmActor._receive = receive


if __name__ == "__main__":
    with recorded(Path(sys.argv[1])):
        sys.exit(main(sys.argv[2:]))
