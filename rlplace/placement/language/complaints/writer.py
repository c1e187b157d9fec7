"""What a writer of words is: it returns the facts that the templates of a fault need besides those of the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlplace.placement.language.faults import Fault

# Three of them are for the problem instead: `at`, another text; `got`, what is shown in place of the text; `span`, its
# columns that are marked.
Facts = dict[str, Any]
Writer = Callable[[Fault], Facts]


def span_of(fault: Fault) -> tuple[int, int]:
    """Return the columns of a fault, which must have some."""
    assert fault.span is not None
    return fault.span
