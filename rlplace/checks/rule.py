"""A rule of a job: an error code, the jobs that it applies to, and a finding for each place that breaks it.

A rule has no text. The texts of its code are in `rlplace/codes`, beside the explanation of the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from rlplace.codes import Reason, problem
from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source
from rlplace.placement.language.spec import ComponentSpec

# What a rule looks at, such as a config with its placement. A rule of a class is a rule of its subclasses, too.
Case = TypeVar("Case", contravariant=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A finding: one place in a job that breaks a rule.

    `key`: key path in the config. `got`: what is written there; None: nothing. `error`: name of the error text, for a
    code that has several. `span`: columns of `got` to mark. `source`: file and line. `reasons`: the reasons that hold,
    if the code has a table of reasons. `facts`: name -> value, for the placeholders in the code's texts.
    """

    key: str
    got: str | None = None
    error: str = ""
    span: tuple[int, int] | None = None
    source: Source | None = None
    reasons: Sequence[str | Reason] = ()
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)


def at_key(
    key: str,
    value: object,
    error: str = "",
    *,
    reasons: Sequence[str | Reason] = (),
    **facts: object,
) -> Found:
    """Return the finding for a config key that breaks a rule.

    `value`: the value in the config; None: the key is not in the config. `error`: name of the error text, for a code
    that has several. `reasons`: the reasons that hold. `facts`: values of the placeholders in the code's texts.
    """
    got = None
    if value is not None:
        got = f"{key.rpartition('.')[2]}: {show(value)}"
    return Found(key=key, got=got, error=error, reasons=reasons, facts=facts)


def at_line(spec: ComponentSpec, error: str = "", **facts: object) -> Found:
    """Return the finding for a component's placement line that breaks a rule.

    `error`: name of the error text, for a code that has several. `facts`: values of the placeholders in the code's
    texts.
    """
    return Found(key=spec.key, got=spec.text, error=error, facts=facts)


def always(case: object) -> bool:
    """Return True: a rule with this function as `applies` is checked for every job."""
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Case]):
    """A rule that a job must keep.

    `code`: the error code if the job breaks the rule. `facts`: function that yields a finding for each place that
    breaks the rule. `applies`: function that says whether the rule is checked for a job.
    """

    code: str
    facts: Callable[[Case], Iterable[Found]]
    applies: Callable[[Case], bool] = always


def broken(rules: Iterable[Rule[Case]], case: Case) -> Iterator[Problem]:
    """Yield a problem for each place in `case` that breaks a rule, in the order of the rules.

    `case`: what the rules are checked on, such as a job with its placement.
    """
    for rule in rules:
        if not rule.applies(case):
            continue
        for found in rule.facts(case):
            yield problem(
                rule.code,
                found.key,
                found.got,
                error=found.error,
                span=found.span,
                source=found.source,
                reasons=found.reasons,
                **found.facts,
            )
