"""One field of a config block: its meaning, its default and its bounds, which the reader and the JSON Schema use."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

ModelKind = Literal["mlp", "causal_lm"]  # what the actor trains


def knob(doc: str, default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """A config field with its one-line meaning and its rules.

    `minimum`, `above`, `maximum` and `below` bound a number; `unit="bytes"` reads `16GiB`. `only` names the one kind of
    actor model that has this key; `mlp` is the default in a job whose actor is an MLP, where it differs; `by_kind` has
    the type by kind of actor model, where it differs.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, **rules})
