"""Messages that both jobs use: missing keys, resumed runs and wrong command options."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlplace.config.schema import Config
from rlplace.errors import ConfigError, Problem


def learning_rate_notes(config: Config, changed: Collection[str]) -> list[str]:
    """Note that the end value of the learning-rate schedule has changed."""
    falls = config.actor.optimizer.schedule != "constant"
    if falls and "runner.total_iterations" in changed:
        return ["    the learning rate falls over the new number of iterations"]
    return []


def missing_problems(config: Config) -> Iterator[Problem]:
    """Report missing keys, without which a job can be planned but not run."""
    for key, (why, fix) in config.missing.items():
        yield Problem(
            code="plan-only",
            key=key,
            what="is required in a run",
            got=None,
            why=f"{why}; without it the job is planned only",
            fix=f"{fix}        (or only plan: dry_run: true)",
        )


def wrong_option(
    key: str, what: str, got: str | None, why: str | None, fix: str
) -> ConfigError:
    """Return the error for a wrong option of a command."""
    return ConfigError.of("bad-option", key, what, got, why, fix)
