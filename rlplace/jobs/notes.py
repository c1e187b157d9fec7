"""Messages that both jobs use: missing keys and resumed runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlplace.codes import problem
from rlplace.config.schema import Config
from rlplace.errors import Problem


def learning_rate_notes(config: Config, changed: Collection[str]) -> list[str]:
    """Return a note for a resumed run if its learning-rate schedule now decays over a new number of iterations.

    `changed`: the config keys whose values differ from the values in the checkpoint. The list is empty
    otherwise.
    """
    falls = config.actor.optimizer.schedule != "constant"
    if falls and "runner.total_iterations" in changed:
        return ["    the learning rate falls over the new number of iterations"]
    return []


def missing_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each missing config key that a run needs. Planning works without these keys."""
    for key, (reason, line) in config.missing.items():
        yield problem("plan-only", key, error="missing", reason=reason, line=line)
