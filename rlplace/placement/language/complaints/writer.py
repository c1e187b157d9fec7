"""What a writer of words is: a function that returns the values which complete the error message of a fault.

These values are in addition to the `facts` of the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlplace.placement.language.faults import Fault

# Values of names in the templates of an error, such as `line`, a corrected line to paste. Three names are for the
# problem itself: `at`, a text to point to instead; `got`, what to show in place of the text; `span`, columns to mark.
Facts = dict[str, Any]
Writer = Callable[[Fault], Facts]


def span_of(fault: Fault) -> tuple[int, int]:
    """Return the columns that a fault marks, as (first column, column after the last). The fault must have some."""
    assert fault.span is not None
    return fault.span
