"""Which kind of value an argument takes, by its annotation or its default: a text where a number is due is refused.

Python compares a number with a text, and takes any text for true, without an error: an environment with `steps: many`
never ends, and one with `shaped: "no"` is shaped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["number", "whole number", "truth value"]
# Annotation -> kind. Any other annotation allows several kinds, or one that is not compared
_ANNOTATED: Mapping[str, Kind] = {
    "int": "whole number",
    "float": "number",
    "bool": "truth value",
}
# Texts that people write for truth values
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class Argument(NamedTuple):
    """What is known of an argument's values.

    `kind`: what it takes. `is_annotated`: whether an annotation says so; otherwise its default does. `default`: None if
    it has none.
    """

    kind: Kind
    is_annotated: bool
    default: object


def argument_of(annotation: str, default: object) -> Argument | None:
    """Return what is known of an argument's values; None if it may take several kinds, or another one.

    `annotation`: as it is written; "": none. `default`: None if it has none.
    """
    if annotation:
        annotated = _ANNOTATED.get(annotation)
        return annotated and Argument(annotated, True, default)
    if isinstance(default, bool):
        return Argument("truth value", False, default)
    if isinstance(default, int | float):
        return Argument("number", False, default)
    return None


def arguments_of(call: Callable[..., Any]) -> Mapping[str, Argument]:
    """Return name -> what is known of its values, for the arguments of `call` of which something is known."""
    found = {}
    for name, parameter in inspect.signature(call).parameters.items():
        annotation = parameter.annotation
        text = ""
        if isinstance(annotation, type) and annotation is not parameter.empty:
            text = annotation.__name__
        elif annotation is not parameter.empty:
            text = str(annotation)
        default = parameter.default
        if default is parameter.empty:
            default = None
        argument = argument_of(text, default)
        if argument is not None:
            found[name] = argument
    return found


def is_unfit(argument: Argument, value: object) -> bool:
    """Return whether an argument certainly does not take a value. None is taken: it often means no limit.

    Without an annotation, only texts are unfit, and truth values in place of a number other than 0 and 1.
    """
    if value is None:
        return False
    if isinstance(value, str):
        return True
    is_number = argument.kind != "truth value"
    if isinstance(value, bool):
        counts = not argument.is_annotated and argument.default in (0, 1)
        return is_number and not counts
    if not argument.is_annotated:
        return False
    if not isinstance(value, int | float):
        return True
    if argument.kind == "whole number":
        return value != value // 1
    return argument.kind == "truth value" and value not in (0, 1)


def meant(argument: Argument, value: object) -> object:
    """Return the value that is probably meant by an unfit one: the number or truth value of a text, or the default."""
    if isinstance(value, str):
        word = value.strip().lower()
        if argument.kind == "truth value" and word in _TRUE + _FALSE:
            return word in _TRUE
        if argument.kind != "truth value":
            number = _number(word)
            if number is not None and not is_unfit(argument, number):
                return number
    return argument.default


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
