"""Messages that both jobs use: missing keys and resumed runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlplace.codes import problem
from rlplace.config.schema import Config
from rlplace.errors import Problem


def learning_rate_notes(config: Config, changed: Collection[str]) -> list[str]:
    """Return a line of text if the learning rate now falls over another number of iterations; else an empty list.

    `changed`: the config keys that differ from those of the checkpoint.
    """
    falls = config.actor.optimizer.schedule != "constant"
    if falls and "runner.total_iterations" in changed:
        return ["    the learning rate falls over the new number of iterations"]
    return []


def missing_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each missing key without which a job can be planned but not run."""
    for key, (reason, line) in config.missing.items():
        yield problem("plan-only", key, error="missing", reason=reason, line=line)
