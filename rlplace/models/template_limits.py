"""Limits of time and size for chat templates, which are programs from a model's folder.

The sandbox of jinja2 keeps a template from doing harm, but not from running for hours or filling the memory. Here each
iteration of a loop, call, filter, operator and piece of output counts. What a single call inside Python makes of lists
that hold each other is not limited.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S = (
    10.0  # longest time of one rendering; usual ones take less than a millisecond
)
MOST_CHARACTERS = 16 << 20  # of the output, and of any text within a template
# Largest number that is passed to a call or filter, such as a width; the sandbox limits `range` in the same way
_MOST_NUMBER = 100_000
_MOST_BITS = 1 << 20  # of an integer
# A width or precision in a format such as %09d or {:>9}: a large one, or one that is an argument
_WIDTH = re.compile(r"%[-+ #0]*(?:[0-9]*\.)?(?:[0-9]{6,}|\*)|\{[^{}]*[0-9]{6,}")
# Names of filters that no template can write
_TICKS = "counted in rlplace"
_SIZED = "sized in rlplace"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 for one thread, in which templates have limits.

    A template beyond a limit raises TemplateRuntimeError in `limited` or `render`.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._until_s = 0.0

    def limited(self, source: str) -> jinja2.Template:
        """Return the template of `source`, whose loops and texts are counted. Call this once."""
        self._until_s = time.monotonic() + RENDER_S
        for name, function in list(self.filters.items()):
            self.filters[name] = self._checked(name, function)
        self.filters[_TICKS] = self._ticks
        self.filters[_SIZED] = self._sized
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._filtered(cast("nodes.Expr", loop.iter), _TICKS)
        for parent in [tree, *tree.find_all(nodes.Node)]:
            self._count_concats(parent)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Return the output of a template that `limited` has returned. `values`: the template's variables."""
        self._until_s = time.monotonic() + RENDER_S
        pieces = []
        size = 0
        for piece in template.generate(values):
            self._tick()
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._tick()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        self._tick()
        _check_numbers((*args, *named.values()))
        # The sandbox wraps the method `format`.
        method = getattr(called, "__wrapped__", called)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_growth(method.__name__, (owner, *args, *named.values()))
        return self._sized(super().call(context, called, *args, **named))

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter with limits for its numbers and its result, in place of the filter `function`."""
        # Some filters take a context first.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            self._tick()
            values = (*args[first:], *named.values())
            _check_numbers(values[1:])
            _check_growth(name, values)
            return self._sized(function(*args, **named))

        return checked

    def _filtered(self, node: nodes.Expr, name: str) -> nodes.Expr:
        """Return the expression `node` with a filter behind it. `name`: name of the filter."""
        filtered = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        filtered.set_environment(self)
        return filtered

    def _count_concats(self, parent: nodes.Node) -> None:
        """Put a filter behind the children of `parent` that join texts (`a ~ b`)."""
        if isinstance(parent, nodes.Filter) and parent.name == _SIZED:
            return
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, self._filtered(value, _SIZED))
            elif isinstance(value, list):
                value[:] = [
                    self._filtered(each, _SIZED)
                    if isinstance(each, nodes.Concat)
                    else each
                    for each in value
                ]

    def _ticks(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._tick()
            yield item

    def _sized(self, value: Any) -> Any:
        """Return `value`. Raises TemplateRuntimeError if it is too long a text."""
        if isinstance(value, str):
            _check_size(len(value))
        return value

    def _tick(self) -> None:
        if time.monotonic() > self._until_s:
            raise jinja2.TemplateRuntimeError(f"it did not end within {RENDER_S:g} s")


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateRuntimeError(
            f"it makes more than {MOST_CHARACTERS:,} characters"
        )


def _check_numbers(values: Iterable[Any]) -> None:
    """Check the arguments of a call or filter: a number may be a width or a count."""
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_NUMBER:
            raise jinja2.TemplateRuntimeError(
                f"it passes a number beyond {_MOST_NUMBER:,}"
            )


def _check_growth(name: str, values: Sequence[Any]) -> None:
    """Check the size of what a method or filter makes of a text, before it is made.

    `name`: name of the method or filter. `values`: the text, or the list of texts for a filter, and the arguments.
    """
    if not values:
        return
    text = values[0]
    rest = values[1:]
    if name in ("format", "format_map") and isinstance(text, str):
        if _WIDTH.search(text):
            raise jinja2.TemplateRuntimeError("it formats with too large a width")
    elif name == "replace" and len(rest) > 1 and isinstance(text, str):
        old = str(rest[0])
        _check_size(len(text) + text.count(old) * len(str(rest[1])))
    elif name == "join":
        # A method is of the text between the parts, the filter is of the parts.
        parts = [each for each in values if isinstance(each, list | tuple)]
        texts = [each for each in values if isinstance(each, str)]
        between = max(map(len, texts), default=0)
        for part in parts:
            lengths = [len(each) for each in part if isinstance(each, str)]
            _check_size(sum(lengths) + between * len(part))
    elif name in ("expandtabs", "indent") and isinstance(text, str):
        places = text.count("\t") + text.count("\n") + 1
        widths = [each for each in rest if isinstance(each, int)]
        _check_size(len(text) + places * max(widths, default=8))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Check the operands of `*`, `**`, `+` or `%`, so that the result has a bearable size."""
    if operator == "%":
        _check_growth("format", (left,))
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        if bits > _MOST_BITS:
            raise jinja2.TemplateRuntimeError("it makes a number that is too large")
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(count, int) and hasattr(sequence, "__len__"):
                _check_size(len(sequence) * max(count, 0))
