"""The answer process: runs the code of an answer, and serves requests of the judge for objects of the code.

Nothing in this process is trusted. Imports the standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import operator
import os
import socket
import sys
import threading
import typing
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlplace.envs.text.code import wire

# Characters of output that one call returns
_SHOWN = 1 << 20
_CONTAINERS = (list, dict, set, bytearray, deque)
# Names that the code of an answer may use without an import
_PRELUDE = {
    **{
        name: getattr(typing, name)
        for name in ("Any", "Callable", "Dict", "Iterable", "List")
    },
    **{name: getattr(typing, name) for name in ("Optional", "Set", "Tuple", "Union")},
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
    "deque": deque,
}
# Name of the module in which the code is executed
_MODULE = "answer"
# Built-in types whose subclasses are described by their value too
_BASES = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "abs": abs,
    "float": float,
    "int": int,
    "round": round,
    "hash": hash,
    "enter": lambda context: context.__enter__(),
    "leave": lambda context: context.__exit__(None, None, None),
}


class TestObject:
    """A proxy in the answer process for an object of a class that the tests define, such as a node of a tree.

    The object itself is in the judge process. Reading or setting a field is a request to the judge.
    """

    _answer: Answer
    _number: int

    def __init__(self, answer: Answer, number: int) -> None:
        """`number`: number of the object in the judge process."""
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._answer.ask("field", self._number, [name], {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._answer.ask("field", self._number, [name, value], {})


class Answer:
    """The names that an answer's code has defined, and the objects that the judge has a number for."""

    def __init__(self, end: socket.socket) -> None:
        """`end`: connected socket to the judge."""
        self._objects: dict[int, Any] = {}
        self._test_objects: dict[int, TestObject] = {}
        # (object, function) -> bound method. Without this dict, each use would make a new method object
        self._methods: dict[tuple[int, int], Any] = {}
        # Dataclasses and type hints look up the module of their code, so the module must exist
        module = ModuleType(_MODULE)
        sys.modules[_MODULE] = module
        self._names: dict[str, Any] = module.__dict__
        self.line = wire.Line(end, self.reply)
        # Output and input of the code go through the judge
        self._output = io.StringIO()
        sys.stdout = self._output
        builtins.input = self._input
        self._names["__builtins__"] = {**vars(builtins), **_PRELUDE}
        _run_threads_at_once()

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what the judge requests, and return the result or the exception that was raised."""
        try:
            result = self._done(request)
        except BaseException as error:  # noqa: BLE001  # any exception of the code is the answer's own
            return {"raised": self._described_error(error), "output": self._printed()}
        return {**result, "output": self._printed()}

    def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request and return the fields of its reply."""
        do = request["do"]
        if do == "run":
            # Executing untrusted code is the purpose of this process
            _run_pools_at_once(request["code"])
            exec(_compiled(request["code"]), self._names)
            return {"value": None}
        if do == "names":
            return {"names": self._known()}
        target = self._objects[request["on"]]
        given = [self._value(part) for part in request.get("given", ())]
        named = {k: self._value(part) for k, part in request.get("named", {}).items()}
        if do == "call":
            return self._called(target, given, named)
        if do == "await":
            import asyncio

            return {"value": self._data(asyncio.run(target))}
        if do == "base":
            return {"value": self._base(target)}
        if do.startswith("r:"):
            # An operation whose right operand is the object
            swapped = getattr(operator, do.removeprefix("r:"))
            return {"value": self._data(swapped(given[0], target))}
        operation = _OPERATIONS.get(do) or getattr(operator, do)
        return {"value": self._data(operation(target, *given))}

    def _called(
        self,
        target: Any,
        given: list[Any],
        named: dict[str, Any],
    ) -> dict[str, Any]:
        """Call an object and return the fields of the reply.

        If the call has changed containers among its arguments, the field `after` has their new content by position.
        """
        parts = [*given, *named.values()]
        before = [
            self._data(part) if isinstance(part, _CONTAINERS) else None
            for part in parts
        ]
        value = target(*given, **named)
        after = []
        for part, was in zip(parts, before, strict=True):
            now = None if was is None else self._data(part)
            after.append(None if now == was else now)
        if not any(after):
            return {"value": self._data(value)}
        return {"value": self._data(value), "after": after}

    def _input(self, prompt: object = "") -> str:
        """Return a line of input, as the judge's `input` gives it."""
        reply = self.line.ask({"do": "input", "prompt": str(prompt)})
        if "value" not in reply:
            raise EOFError("EOF when reading a line")
        return str(reply["value"])

    def _printed(self) -> str:
        """Return the output since the last call."""
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text[:_SHOWN]

    # ── objects as data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _known(self) -> dict[str, Any]:
        """Return name -> description of what the code has defined: functions, classes, modules and plain values."""
        known: dict[str, Any] = {}
        for name, value in list(self._names.items()):
            if name.startswith("__"):
                continue
            if isinstance(value, ModuleType):
                known[name] = ["module", value.__name__]
            elif callable(value):
                known[name] = self._data(value)
            else:
                # A value that is no plain data is left out: tests cannot have it from the code
                with contextlib.suppress(Exception):
                    known[name] = wire.packed(value, _refused)
        return known

    def _data(self, value: Any) -> Any:
        return wire.packed(value, self._described)

    def _value(self, data: Any) -> Any:
        return wire.unpacked(data, self._made)

    def _made(self, tag: str, body: Any) -> Any:
        """Return the object of a number of this process, or a function that calls the judge's function."""
        if tag == "object":
            return self._objects[body]
        if tag == "builtin":
            return getattr(builtins, body)
        if tag == "test_object":
            return self._test_objects.setdefault(body, TestObject(self, body))
        if tag != "function":
            raise ValueError(tag)
        return lambda *given, **named: self.ask("function", body, given, named)

    def ask(self, do: str, number: int, given: Any, named: dict[str, Any]) -> Any:
        """Ask the judge to call a function of the tests, or to get or set a field of a test object. Return the result.

        `do`: "function" or "field". `number`: number of the function or the object. `given`: arguments of the function,
        or the name of the field and perhaps its new value.
        """
        reply = self.line.ask(
            {
                "do": do,
                "on": number,
                "given": [self._data(part) for part in given],
                "named": {name: self._data(part) for name, part in named.items()},
            }
        )
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), RuntimeError)
            raise kind(reply.get("text", ""))
        return self._value(reply["value"])

    def _described(self, value: Any) -> Any:
        """Return the description of an object that is no plain data. The judge gets a number for the object."""
        if isinstance(value, TestObject):
            return ["test_object", value._number]
        if inspect.ismethod(value):
            key = (id(value.__self__), id(value.__func__))
            value = self._methods.setdefault(key, value)
        number = id(value)
        self._objects[number] = value
        if wire.builtin_name(value) and isinstance(value, type):
            return ["builtin", value.__name__]
        if isinstance(value, type):
            return ["class", self._described_class(value)]
        if inspect.iscoroutine(value):
            return ["coroutine", number]
        described = self._described_class(type(value))
        base = self._base(value)
        return ["object", {"number": number, "class": described, "base": base}]

    def _base(self, value: Any) -> Any:
        """Return the value of an instance of a subclass of a built-in type, as data; None for other objects."""
        for kind in _BASES:
            if isinstance(value, kind):
                return wire.packed(_plain(kind, value), self._described)
        return None

    def _described_class(self, kind: type) -> dict[str, Any]:
        self._objects[id(kind)] = kind
        bases = [
            self._described_class(base)
            for base in kind.__bases__
            if base.__module__ == _MODULE
        ]
        return {
            "number": id(kind),
            "name": kind.__name__,
            "module": kind.__module__,
            "bases": bases,
            "exception": _builtin_error(kind),
            "lacks": _lacking(kind),
        }

    def _described_error(self, error: BaseException) -> dict[str, Any]:
        """Return the description of an exception, with its texts."""
        kind = type(error)
        given: Any = []
        with contextlib.suppress(BaseException):
            given = [wire.packed(part, _refused) for part in error.args]
        fields: dict[str, Any] = {}
        for name, value in vars(error).items():
            with contextlib.suppress(Exception):
                fields[name] = wire.packed(value, _refused)
        return {
            "class": self._described_class(kind),
            "own": kind.__module__ == _MODULE,
            "given": given,
            "text": _shown(error),
            "fields": fields,
        }


def _lacking(kind: type) -> list[str]:
    """Return the optional operations that instances of a class lack. With `__getitem__`, a class has `__iter__` too."""
    lacking = [name for name in wire.OPTIONAL if not hasattr(kind, name)]
    if hasattr(kind, "__getitem__") and "__iter__" in lacking:
        lacking.remove("__iter__")
    return lacking


def _refused(value: Any) -> Any:
    raise ValueError(f"a {type(value).__name__} is no plain data")


def _shown(error: BaseException) -> str:
    """Return the text of an exception; "" if making the text fails."""
    with contextlib.suppress(BaseException):
        return str(error)[:_SHOWN]
    return ""


def _plain(kind: Any, value: Any) -> Any:
    """Return the value of an instance of a subclass of a built-in type, as an instance of the built-in type."""
    if kind in (list, tuple, set, frozenset):
        return kind(kind.__iter__(value))
    if kind is dict:
        return {key: dict.__getitem__(value, key) for key in dict.__iter__(value)}
    if kind is str:
        return str.__str__(value)
    if kind is bytes:
        return bytes(memoryview(value))
    if kind is bool:
        return value is True
    return kind.__add__(value, kind())


def _builtin_error(kind: type) -> str:
    """Return the name of the nearest built-in exception class; "" for a class that is no exception."""
    if not issubclass(kind, BaseException):
        return ""
    for base in kind.__mro__:
        if getattr(builtins, base.__name__, None) is base:
            return base.__name__
    return "Exception"


def _compiled(code: str) -> Any:
    """Return the code object of an answer. Raises SyntaxError and ValueError."""
    return compile(code, "<answer>", "exec", dont_inherit=True)


def serve(end: socket.socket) -> None:
    """Serve the judge until it closes the connection. The process then ends without running exit handlers."""
    answer = Answer(end)
    answer.line.serve_all()
    os._exit(0)


def _run_threads_at_once() -> None:
    """Replace `Thread.start`: the work of a thread runs at once, in the thread that calls `start`.

    This process cannot start threads. Programs often use one thread only, for its larger stack.
    """

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        pass

    names: dict[str, Any] = {"start": threading.Thread.run, "join": join}
    for name, function in names.items():
        setattr(threading.Thread, name, function)
    # Setting a size fails where the limits are low
    setattr(threading, "stack_size", lambda size=0: 0)  # noqa: B010


def _run_pools_at_once(code: str) -> None:
    """Replace thread pools, if `code` may use them: submitted work runs at once, in the thread that submits it."""
    if "concurrent" not in code and "asyncio" not in code:
        return
    from concurrent import futures
    from concurrent.futures import thread

    class AtOnce(futures.Executor):
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def submit(self, fn: Any, /, *given: Any, **named: Any) -> Any:
            future: futures.Future[Any] = futures.Future()
            try:
                future.set_result(fn(*given, **named))
            except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets the exception
                future.set_exception(error)
            return future

    for module in (futures, thread):
        setattr(module, "ThreadPoolExecutor", AtOnce)  # noqa: B010


def run_program(code: str) -> None:
    """Run code as a program, with standard input and output. The process ends with the program's exit status."""
    status = 0
    try:
        _run_threads_at_once()
        _run_pools_at_once(code)
        known = {**vars(builtins), **_PRELUDE}
        exec(_compiled(code), {"__name__": "__main__", "__builtins__": known})
    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException:  # noqa: BLE001  # any exception of the code is the answer's own
        status = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(status)
