"""A fault: what is wrong with a text, as a value. `complaints` makes the problem that a user reads of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlplace.placement.language.text import Text


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in a text of the config.

    `code`: the error code; its messages are in `rlplace/codes`. `text`: the text with the mistake. `error`: which of
    the code's messages; "" if the code has only one. `span`: (first column, column after the last) of the mistake in
    the text; None: the whole text. `facts`: name -> value that the message needs.
    """

    code: str
    text: Text
    # Name of the error, for a code that has several.
    error: str = ""
    # Columns of the text; None: the whole text is wrong.
    span: tuple[int, int] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
