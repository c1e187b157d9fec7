"""The judge's connection to an answer process: asks for the names of the answer, and makes proxies for its objects."""

from __future__ import annotations

import builtins
import itertools
import re
import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

from rlplace.envs.text.code import wire
from rlplace.envs.text.code.names import TestSource, library, python_object
from rlplace.envs.text.code.stand_ins import Remote, RemoteClass

# Name of the module in which texts of tests run
TESTS = "tests"
# Most items of an iterator that are sent to the answer
_LONGEST_ITERATOR = 1_000_000
_ITERATED: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class Judge:
    """Sends requests to one answer process, and makes Python objects of its replies."""

    def __init__(self, end: socket.socket) -> None:
        """`end`: connected socket to the answer process."""
        self.line = wire.Line(end, self._serve)
        self._kinds: dict[int, type] = {}
        self._objects: dict[int, Remote] = {}
        # id -> function or object of the tests that was sent to the answer
        self._given: dict[int, Any] = {}
        # (container, new content): changes that calls made to their arguments and that are not applied yet
        self._changes: list[tuple[Any, Any]] = []
        # Source text of the running test, and the names that it got
        self._source = TestSource("")
        self._names: dict[str, Any] = {}

    def run(self, code: str) -> bool:
        """Run the answer's code; return whether it raised no exception."""
        return "raised" not in self.line.ask({"do": "run", "code": code})

    def names(self, source: TestSource, entry: str = "") -> dict[str, Any]:
        """Return name -> object for a test: objects of the answer, or of Python's libraries where the test means those.

        `source`: source text of the test. `entry`: name of the function under test, which is always the answer's.
        """
        self._source = source
        known = self.line.ask({"do": "names"}).get("names", {})
        # The answer process may send any name. Names with two underscores could replace Python's builtins
        known = {
            name: data
            for name, data in known.items()
            if name.isidentifier() and not name.startswith("__")
        }
        classes = {name for name, data in known.items() if _has_tag(data, "class")}
        modules = {name for name, data in known.items() if _has_tag(data, "module")}
        of_answer = source.names_of_answer(known.keys() - modules, classes) | {entry}
        names: dict[str, Any] = {}
        for name, data in known.items():
            imported = str(data[1]) if name in modules else None
            own = library(name, imported) if name in source.words else None
            about = name == entry or name in source.called
            if own is not None and (name in modules or not about):
                names[name] = own
            elif name in of_answer:
                names[name] = self._value(data)
            elif name in source.words and (meant := python_object(name)) is not None:
                names[name] = meant
        self._names = names
        return names

    def is_under_test(self, kind: type) -> bool:
        return any(
            value is kind and name in self._source.words
            for name, value in self._names.items()
        )

    def call(self, number: int, given: Any, named: dict[str, Any]) -> Any:
        """Call an object of the answer and return the result.

        If the call changes a container among its arguments, the test sees the change: at once if the call returns None,
        otherwise before the next statement of the test. So `f(a) == sorted(a)` uses the content of `a` before the call.
        """
        reply = self.line.ask(
            {
                "do": "call",
                "on": number,
                "given": [self._data(part) for part in given],
                "named": {name: self._data(part) for name, part in named.items()},
            }
        )
        value = self._result(reply, "call")
        after = reply.get("after") or ()
        for part, data in zip((*given, *named.values()), after, strict=False):
            if data is not None:
                self._changes.append((part, self._value(data)))
        if value is None:
            self.apply_changes()
        return value

    def apply_changes(self) -> None:
        """Change the judge's own lists, dicts and sets as earlier calls of the answer have changed their copies."""
        for part, value in self._changes:
            _replace(part, value)
        self._changes = []

    def do(self, what: str, number: int, *given: Any) -> Any:
        """Do an operation on an object of the answer and return the result."""
        data = [self._data(part) for part in given]
        reply = self.line.ask({"do": what, "on": number, "given": data})
        return self._result(reply, what)

    def base(self, value: Remote) -> Any:
        if isinstance(value._remote_base, list | dict | set):
            return self.do("base", value._remote_id)
        return value._remote_base

    def _result(self, reply: dict[str, Any], what: str) -> Any:
        """Return the value of a reply, or raise the exception that it describes. `what`: the operation."""
        output = reply.get("output")
        if isinstance(output, str) and output:
            sys.stdout.write(output)
        if "raised" in reply:
            error = self._error(reply["raised"])
            # Elsewhere, StopIteration would end a loop of the test before the loop has compared all values
            if isinstance(error, StopIteration) and what != "next":
                raise RuntimeError("the answer raised StopIteration")
            raise error
        return self._value(reply.get("value"))

    def _error(self, described: dict[str, Any]) -> BaseException:
        """Return the described exception: of one of Python's classes, or of a proxy for a class of the answer."""
        kind: Any = self._kind(described["class"])
        if not described.get("own"):
            kind = _python_error(described["class"])
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            kind = Exception
        given = [self._value(part) for part in described.get("given", ())]
        try:
            made = kind(*given)
        except TypeError:
            made = kind.__new__(kind)
        if described.get("own"):
            made.__dict__["_remote_text"] = str(described.get("text", ""))
            for name, data in described.get("fields", {}).items():
                if not name.startswith("_"):
                    made.__dict__[name] = self._value(data)
        return made

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do a request of the answer process: call a function of the tests, get or set a field, or read a line."""
        try:
            if request.get("do") == "input":
                return {"value": str(input(request.get("prompt", "")))}
            own = self._given[request["on"]]
            given = [self._value(part) for part in request["given"]]
            named = {name: self._value(v) for name, v in request["named"].items()}
            if request["do"] == "field":
                return {"value": self._data(_field(own, *given))}
            return {"value": self._data(own(*given, **named))}
        except Exception as error:  # noqa: BLE001  # the answer sees the exception of the function that it calls
            return {"raised": type(error).__name__, "text": str(error)}

    # ── objects as data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _data(self, value: Any) -> Any:
        return wire.packed(value, self._described)

    def _value(self, data: Any) -> Any:
        return wire.unpacked(data, self._made)

    def _described(self, value: Any) -> Any:
        """Return the description of a value of the tests that is no plain data."""
        if isinstance(value, RemoteClass):
            return ["object", value._remote_number]
        if isinstance(value, Remote):
            return ["object", value._remote_id]
        if wire.builtin_name(value):
            return ["builtin", value.__name__]
        if isinstance(value, (Iterator, *_ITERATED)):
            items = itertools.islice(
                iter(cast("Iterator[Any]", value)), _LONGEST_ITERATOR
            )
            return ["iterator", self._data(list(items))]
        if callable(value):
            self._given[id(value)] = value
            return ["function", id(value)]
        if type(value).__module__ == TESTS:
            self._given[id(value)] = value
            return ["test_object", id(value)]
        raise TypeError(f"a {type(value).__name__} cannot be sent to the answer")

    def _made(self, tag: str, body: Any) -> Any:
        """Return the proxy for an object of the answer, or the object of the tests or of Python that the data name."""
        if tag == "class":
            return self._kind(body)
        if tag == "builtin":
            kind = getattr(builtins, str(body))
            if isinstance(kind, type):
                return kind
        if tag == "test_object":
            return self._given[int(body)]
        if tag == "coroutine":
            return self._waiting(int(body))
        if tag != "object":
            raise ValueError(tag)
        number = int(body["number"])
        if number not in self._objects:
            kind = self._kind(body["class"])
            if not issubclass(kind, Remote):
                kind = Remote
            made = object.__new__(kind)
            object.__setattr__(made, "_remote_id", number)
            object.__setattr__(made, "_remote_base", self._value(body["base"]))
            object.__setattr__(made, "_remote_judge", self)
            self._objects[number] = made
        return self._objects[number]

    async def _waiting(self, number: int) -> Any:
        """Return the result of a coroutine of the answer, which runs to its end there."""
        return self.do("await", number)

    def _kind(self, described: dict[str, Any]) -> type:
        """Return the proxy for a class of the answer."""
        number = int(described["number"])
        if number not in self._kinds:
            name = re.sub(r"\W", "_", str(described["name"]))
            error = getattr(builtins, str(described["exception"]), None)
            bases: tuple[Any, ...] = tuple(
                self._kind(base) for base in described["bases"]
            )
            if isinstance(error, type) and issubclass(error, BaseException):
                members = {
                    "__str__": lambda made: made.__dict__.get("_remote_text", "")
                }
                self._kinds[number] = type(name, bases or (error,), members)
            else:
                fields = {"_remote_number": number, "_remote_judge": self}
                lacks = described.get("lacks", ())
                fields |= {name: None for name in wire.OPTIONAL if name in lacks}
                self._kinds[number] = RemoteClass(name, bases or (Remote,), fields)
        return self._kinds[number]


def _field(own: Any, name: str, *value: Any) -> Any:
    """Return a field of an object of the tests; or set the field, if there is a value.

    Raises AttributeError for names that begin with an underscore: such fields give access to Python's internals.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    if value:
        setattr(own, name, *value)
        return None
    return getattr(own, name)


def _has_tag(data: Any, tag: str) -> bool:
    return isinstance(data, list) and data[:1] == [tag]


def _python_error(described: dict[str, Any]) -> Any:
    """Return the exception class that a description names: of an imported module, or a built-in one."""
    module = sys.modules.get(str(described.get("module")))
    kind = getattr(module, str(described["name"]), None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    return getattr(builtins, str(described["exception"]), Exception)


def _replace(part: Any, value: Any) -> None:
    """Give a container the content of another one of its type."""
    if isinstance(part, list | bytearray):
        part[:] = value
    elif isinstance(part, dict | set | deque):
        items = value.items() if isinstance(part, dict) else value
        part.clear()
        if isinstance(part, deque):
            part.extend(items)
        else:
            part.update(items)
