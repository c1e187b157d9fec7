"""Faults of placement texts -> the problems that a user reads: columns to mark, and a line to paste.

The words are templates of `rlplace/codes`. Their names are filled in from the `facts` of a fault, and from the values
that the writer of its error returns. Every template can also use `lead`, `leaf` and `text` of what was written, and, if
the fault is about a pool, `noun` and `inventory` of the pool.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from rlplace.codes import problem
from rlplace.errors import Problem
from rlplace.placement.language.complaints import groups, lines, numbers
from rlplace.placement.language.complaints.meant import (
    meant_component,
    meant_line,
    several_components,
)
from rlplace.placement.language.complaints.paste import lead_of, near
from rlplace.placement.language.complaints.writer import Facts
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.grammar import SEGMENTS
from rlplace.placement.language.text import Text

MOST_MISTAKES = 8  # told of one value; further ones usually repeat the first
# Code and name of an error -> the writer of its words, where the facts of the fault are not enough.
WRITERS = {**lines.WRITERS, **numbers.WRITERS, **groups.WRITERS}


def problems_of(faults: Iterable[Fault]) -> list[Problem]:
    """Return the problems of faults, in the order of the faults, at most MOST_MISTAKES for each config key.

    A component that is not placed because its name is misspelt gets no problem: the misspelt name has one already.
    """
    problems: list[Problem] = []
    told = Counter[str]()
    for fault in faults:
        if fault.code == "unplaced-component" and _is_misspelt(fault):
            continue
        found = _problem(fault)
        told[found.key] += 1
        if told[found.key] <= MOST_MISTAKES:
            problems.append(found)
    return problems


def _is_misspelt(fault: Fault) -> bool:
    """Return whether a component that is reported as not placed is probably in the block under a misspelt name."""
    components = fault.facts["components"]
    named = fault.facts["named"]
    free = [name for name in components if name not in named]
    for name in named:
        if name in components:
            continue
        meant = [meant_component(name, components), *several_components(name, free)]
        if fault.facts["name"] in meant:
            return True
    return False


def _problem(fault: Fault) -> Problem:
    """Return the problem that a user reads for a fault, with the texts of its error code filled in."""
    kind = (fault.code, fault.error)
    facts: Facts = {name: _shown(fact) for name, fact in fault.facts.items()}
    if kind in WRITERS:
        facts |= WRITERS[kind](fault)
    text: Text = facts.pop("at", fault.text)
    got: str = facts.pop("got", text.text)
    marked: tuple[int, int] = facts.pop("span", fault.span or (0, len(got)))
    shown, span = near(got, marked)
    facts |= {"lead": lead_of(text), "leaf": text.leaf, "text": text.text}
    pool = fault.facts.get("pool")
    if pool is not None:
        facts |= {"noun": pool.noun, "inventory": pool.describe()}
    found = problem(
        fault.code,
        text.key,
        shown,
        error=fault.error,
        span=span,
        source=text.source,
        **facts,
    )
    # One line for all mistakes in the numbers of one text.
    if kind in numbers.IN_NUMBERS and not SEGMENTS.fullmatch(text.text):
        whole = meant_line(text)
        if whole is not None:
            return dataclasses.replace(found, fix=whole)
    return found


def _shown(fact: object) -> object:
    """Return `fact` as one text, joined by commas, if it is a list of texts. Return any other value unchanged."""
    if isinstance(fact, list | tuple) and all(isinstance(name, str) for name in fact):
        return ", ".join(fact)
    return fact
