"""Messages that both jobs use: missing keys and resumed runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlplace.codes import problem
from rlplace.config.schema import Config
from rlplace.errors import Problem


def learning_rate_notes(config: Config, changed: Collection[str]) -> list[str]:
    """Return a line of text if the learning rate of a resumed run now decays over a new number of iterations.

    Otherwise, return an empty list. `changed`: the config keys with values that differ from those in the checkpoint.
    """
    falls = config.actor.optimizer.schedule != "constant"
    if falls and "runner.total_iterations" in changed:
        return ["    the learning rate falls over the new number of iterations"]
    return []


def missing_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each missing config key that a run needs. Planning works without these keys."""
    for key, (reason, line) in config.missing.items():
        yield problem("plan-only", key, error="missing", reason=reason, line=line)
