"""Messages that both jobs use: missing keys and resumed runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.config.schema import Config
from rlplace.errors import Problem


def learning_rate_notes(
    config: Config,
    differences: Mapping[str, tuple[object, object]],
    iteration: int,
) -> list[str]:
    """Return a line of text for each trained component whose next learning rate differs from that before the resume.

    `differences`: config key -> (value in the checkpoint, value now), for the values that differ. `iteration`: number
    of iterations before the checkpoint.
    """
    total = config.runner.total_iterations
    before_total = _before(differences, "runner.total_iterations", total)
    lines = []
    for component in ("actor", "critic"):
        if component not in config.placed:
            continue
        optimizer = config.block_of(component).optimizer
        then = {}
        for name in ("lr", "schedule", "min_lr_ratio"):
            key = f"{component}.optimizer.{name}"
            then[name] = _before(differences, key, getattr(optimizer, name))
        old = dataclasses.replace(optimizer, **then)
        rates = (old.rate(iteration / before_total), optimizer.rate(iteration / total))
        if rates[0] == rates[1]:
            continue
        line = f"    {component}: learning rate {rates[0]:.3g} -> {rates[1]:.3g}"
        if total != before_total and optimizer.schedule != "constant":
            line += (
                f", since it falls over {total} iterations instead of {before_total}"
            )
        lines.append(line)
    return lines


def _before(
    differences: Mapping[str, tuple[object, object]], key: str, now: Any
) -> Any:
    """Return the value of a key in the checkpoint. `now`: its value now, which is the same unless it differs."""
    if key in differences:
        return differences[key][0]
    return now


def missing_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each missing config key that a run needs. Planning works without these keys."""
    for key, (reason, line) in config.missing.items():
        yield problem("plan-only", key, error="missing", reason=reason, line=line)
