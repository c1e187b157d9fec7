"""Letters of a model description: widths read from the keys of a config.json, and expressions over them.

A description says `shape = ["q", "h"]`; its table of letters says which key of a config.json gives `h`, and that `q`
is `heads * d`. A letter is one of

    h = { key = "hidden_size" }                      a whole number that the config must have
    d = { key = "head_dim", default = "h // heads" } a whole number; the default is a number or an expression
    tied = { key = "tie_word_embeddings", default = false }          a switch: the default is true or false
    types = { key = "layer_types", default = [] }    a list; an entry that it lacks is null
    q = "heads * d"                                  an expression over other letters

A letter with a key can have `least`, the smallest number accepted (1), and `null`, the value of a key that is written
as null, where a key that is absent means something else. `key` can be a list of names; the first that the config has
is read. A letter is read when an expression needs it, so no key is required that a model has no use for.

Expressions are those of Python over numbers: `+ - * // / %`, comparisons, `and`, `or`, `not`, `x if c else y`, `in`,
`types[i]`, `max(...)`; and `count(L, condition)`, the number of layers `i` of 0 to L - 1 for which the condition
holds.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.config.yaml_text import show
from rlplace.errors import Problem

_MOST = 10**12  # largest number accepted in a config.json
# What an expression means: its value for given letters and, inside of `count`, a layer
_Meaning = Callable[["Letters", int], Any]
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}


class Letters:
    """The values of the letters (variables) of one model description, computed from one config.json.

    Problems are collected, not raised. A number that is missing or wrong counts as 1.
    """

    def __init__(
        self, letters: Mapping[str, Any], config: Mapping[str, object], key: str
    ) -> None:
        self._letters = letters
        self._config = config
        self._key = key
        self._values: dict[str, Any] = {}
        # Problems by the letter that has them; "" for numbers without a letter
        self._problems: dict[str, Problem] = {}

    @property
    def problems(self) -> list[Problem]:
        """The problems of all letters (variables) that were read, in the order of the description."""
        names = (*self._letters, "")
        return [self._problems[name] for name in names if name in self._problems]

    @property
    def family(self) -> object:
        return self._config.get("model_type")

    def give(self, name: str, value: int) -> None:
        """Set the value of a letter (a variable of the description) that is not read from the config.json."""
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._read(name)
        return self._values[name]

    def value(self, written: Any) -> Any:
        """Return the value of an entry of a description.

        A text is computed as an expression. Any other entry is returned as it is.
        """
        if isinstance(written, str):
            return meaning(written)(self, 0)
        return written

    def number(
        self, name: str, default: int | None = None, *, least: int = 1, letter: str = ""
    ) -> int:
        """Return the whole number at key `name` of the config.json, or `default` if the key is missing.

        `least`: the smallest number accepted. `letter`: the letter (variable of the description) whose value the key
        gives. For a wrong number, or a missing number without a default, a problem of this letter is recorded, and 1 is
        returned.
        """
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and least <= value <= _MOST
        ):
            return value
        key = f"{self._key}.{name}"
        if value is None:
            self._problems[letter] = problem(
                "missing-key", key, error="size", name=name, family=self.family
            )
            return 1
        unquoted = isinstance(value, str) and re.fullmatch("[1-9][0-9]{0,11}", value)
        self._problems[letter] = problem(
            "wrong-type",
            key,
            show(value),
            error="size-in-quotes" if unquoted else "size",
            name=name,
            family=self.family,
            least=least,
            most=f"{_MOST:,}",
            value=value,
        )
        return 1

    def _read(self, name: str) -> Any:
        letter = self._letters[name]
        if isinstance(letter, str):
            return self.value(letter)
        # The first of the key's names that the config has
        names = letter["key"] if isinstance(letter["key"], list) else [letter["key"]]
        present = [key for key in names if self._config.get(key) is not None]
        key = present[0] if present else names[0]
        written = self._config.get(key)
        default = letter.get("default")
        if isinstance(default, bool):
            return default if written is None else bool(written)
        if isinstance(default, list):
            return written if isinstance(written, (list, tuple)) else default
        # A number
        if "null" in letter and key in self._config and written is None:
            return letter["null"]
        return self.number(
            key, self.value(default), least=letter.get("least", 1), letter=name
        )


@functools.cache
def meaning(expression: str) -> _Meaning:
    """Return the function that computes an expression of a model description from its variables and a layer number.

    Raises ValueError for syntax that an expression cannot have.
    """
    return _meaning(ast.parse(expression, mode="eval").body)


def _meaning(node: ast.expr) -> _Meaning:
    match node:
        case ast.Constant(value=constant):
            return lambda letters, layer: constant
        case ast.Name(id="i"):
            return lambda letters, layer: layer
        case ast.Name(id=name):
            return lambda letters, layer: letters[name]
        case ast.Subscript(value=whole, slice=place):
            return _entry(_meaning(whole), _meaning(place))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _combined(_OPERATORS[type(op)], _meaning(left), _meaning(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _combined(_OPERATORS[type(op)], _meaning(left), _meaning(right))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _meaning(operand)
            return lambda letters, layer: not inner(letters, layer)
        case ast.BoolOp(op=op, values=values):
            return _joined(isinstance(op, ast.And), [_meaning(v) for v in values])
        case ast.IfExp(test=test, body=body, orelse=other):
            return _chosen(_meaning(test), _meaning(body), _meaning(other))
        case ast.Call(func=ast.Name(id="max"), args=args, keywords=[]):
            parts = [_meaning(part) for part in args]
            return lambda letters, layer: max(part(letters, layer) for part in parts)
        case ast.Call(func=ast.Name(id="count"), args=[layers, condition], keywords=[]):
            return _counted(_meaning(layers), _meaning(condition))
        case _:
            raise ValueError(f"an expression cannot have {ast.unparse(node)}")


def _entry(whole: _Meaning, place: _Meaning) -> _Meaning:
    def entry(letters: Letters, layer: int) -> Any:
        values = whole(letters, layer)
        index = place(letters, layer)
        return values[index] if index < len(values) else None

    return entry


def _combined(
    combine: Callable[[Any, Any], Any], left: _Meaning, right: _Meaning
) -> _Meaning:
    return lambda letters, layer: combine(left(letters, layer), right(letters, layer))


def _joined(every: bool, parts: list[_Meaning]) -> _Meaning:
    """Return the function that computes `and` or `or` of several conditions.

    `every`: True for `and`, False for `or`. `parts`: the functions of the conditions, called only until one decides the
    result.
    """
    join = all if every else any
    return lambda letters, layer: join(part(letters, layer) for part in parts)


def _chosen(test: _Meaning, body: _Meaning, other: _Meaning) -> _Meaning:
    return lambda letters, layer: (
        body(letters, layer) if test(letters, layer) else other(letters, layer)
    )


def _counted(layers: _Meaning, condition: _Meaning) -> _Meaning:
    def count(letters: Letters, _: int) -> int:
        found = 0
        for layer in range(layers(letters, 0)):
            if condition(letters, layer):
                found += 1
        return found

    return count
