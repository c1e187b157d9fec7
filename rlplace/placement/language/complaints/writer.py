"""What a writer of words is: it returns the facts that the templates of a fault need besides those of the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlplace.placement.language.faults import Fault

# Values of names in the templates of an error, such as `line`, a corrected line to paste. Three names are for the
# problem itself: `at`, a text to point to instead; `got`, what to show in place of the text; `span`, columns to mark.
Facts = dict[str, Any]
Writer = Callable[[Fault], Facts]


def span_of(fault: Fault) -> tuple[int, int]:
    """Return the columns of a fault, which must have some."""
    assert fault.span is not None
    return fault.span
