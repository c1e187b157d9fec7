"""The judge process: runs tests against an answer's code, which runs in an answer process of its own.

`main` is the whole program of the process. The job comes through standard input.
Names of the answer stand for objects in the answer process: each use is a request, and each result is data. Imports the
standard library only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import re
import resource
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rlplace.envs.text.code import answer as answering
from rlplace.envs.text.code import confine, wire

# Names of comparisons and tolerances that an answer must not bring along
_COMPARISONS = re.compile(
    r"isclose|allclose|array_equal|approx|raises|eps|epsilon|tol|tolerance|delta",
    re.IGNORECASE,
)
# Names of functions that may judge what they are given
_ASSERTIONS = re.compile(r"(assert|expect|check|verify|test)\w*", re.IGNORECASE)
_ALIASES = {"np": "numpy"}
# Modules that tests may use without an import of their own, if the answer imports them
_LIBRARIES = {*sys.stdlib_module_names, "numpy"}
# Modules under which tests import the answer's names
_AS_MODULES = ("solution", "answer", "main", "candidate", "submission")
_LONGEST_OUTPUT = 16 << 20
_CHUNK = 1 << 16
# The judge itself may use so much more memory than the answer
_OWN_BYTES = 1 << 30


# ── the starter ──────────────────────────────────────────────────────────────────────────────────────────────────────


def start_answers(control: socket.socket, memory_bytes: int, cpu_s: float) -> None:
    """Start confined answer processes for the judge, one at a time, until the control socket closes.

    A message is one byte, with file descriptors: `f` with a socket, for functions; `p` with standard input, standard
    output and a file that has the code, for a program; `l` with a pipe, for the names of the layers. The reply is the
    exit status of the process, as four bytes. `memory_bytes`, `cpu_s`: limits of memory and processor time of each
    process.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            control.close()
            _become_answer(message, fds, memory_bytes, cpu_s)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(child, 0)
        control.sendall(struct.pack("=i", os.waitstatus_to_exitcode(status)))


def _become_answer(
    message: bytes, fds: list[int], memory_bytes: int, cpu_s: float
) -> None:
    """Confine this process, and run the answer's code in it. Does not return.

    `message`, `fds`: what the starter has received.
    """
    try:
        code = ""
        if message == b"p":
            os.dup2(fds[0], 0)
            os.dup2(fds[1], 1)
            with open(fds[2], encoding="utf-8", errors="replace") as file:
                code = file.read()
        layers = confine.confine(os.getcwd(), memory_bytes, cpu_s)
        if message == b"l":
            os.write(fds[0], ",".join(layers).encode())
            os._exit(0)
        if message == b"p":
            sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
            sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
            answering.run_program(code)
        answering.serve(socket.socket(fileno=fds[0]))
    finally:
        os._exit(1)


# ── objects of the answer ────────────────────────────────────────────────────────────────────────────────────────────


class _Kind(type):
    """The type of classes that stand for classes of the answer."""

    _number: int
    _judge: Judge

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if "_number" not in cls.__dict__:
            raise TypeError("this class cannot be called")
        return cls._judge.call(cls._number, given, named)

    def __getattr__(cls, name: str) -> Any:
        number = cls.__dict__.get("_number")
        if number is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return cls._judge.do("get", number, name)


def _one_operand(name: str) -> Callable[[Any], Any]:
    def operation(self: Remote) -> Any:
        return self._judge.do(name, self._id)

    return operation


def _ordering(name: str) -> Callable[[Any, Any], Any]:
    def operation(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._judge.do(name, self._id, other)
        if self._base is not None:
            return getattr(self._base, f"__{name}__")(other)
        return NotImplemented

    return operation


def _arithmetic(name: str, *, right: bool = False) -> Callable[[Any, Any], Any]:
    """Return an operation with two operands, which the answer process does for operands that tell nothing.

    A number in a subtraction is what the test expects, so the answer must not see it. `right`: whether the object is
    the right operand.
    """
    what = f"r:{name}" if right else name
    own = f"__r{name.rstrip('_')}__" if right else f"__{name.rstrip('_')}__"

    def operation(self: Remote, other: Any) -> Any:
        subtracted = name == "sub" and isinstance(other, int | float | complex)
        if isinstance(other, Remote) or (
            self._judge.tests_name(type(self)) and not subtracted
        ):
            return self._judge.do(what, self._id, other)
        return getattr(self._base, own, lambda _: NotImplemented)(other)

    return operation


class Remote(metaclass=_Kind):
    """Stands for an object of the answer. Operations are requests to the answer process.

    A comparison with data of the tests is decided here, so that an object cannot claim to equal what a test expects.
    """

    _judge: Judge
    # Number of the object in the answer process; the value of a subclass of a built-in type
    _id: int
    _base: Any

    __abs__ = _one_operand("abs")
    __int__ = _one_operand("int")
    __float__ = _one_operand("float")
    __neg__ = _one_operand("neg")
    __pos__ = _one_operand("pos")
    __invert__ = _one_operand("invert")
    __index__ = _one_operand("index")
    __round__ = _one_operand("round")
    __lt__ = _ordering("lt")
    __le__ = _ordering("le")
    __gt__ = _ordering("gt")
    __ge__ = _ordering("ge")
    __add__ = _arithmetic("add")
    __radd__ = _arithmetic("add", right=True)
    __sub__ = _arithmetic("sub")
    __rsub__ = _arithmetic("sub", right=True)
    __mul__ = _arithmetic("mul")
    __rmul__ = _arithmetic("mul", right=True)
    __truediv__ = _arithmetic("truediv")
    __rtruediv__ = _arithmetic("truediv", right=True)
    __floordiv__ = _arithmetic("floordiv")
    __rfloordiv__ = _arithmetic("floordiv", right=True)
    __mod__ = _arithmetic("mod")
    __rmod__ = _arithmetic("mod", right=True)
    __pow__ = _arithmetic("pow")
    __rpow__ = _arithmetic("pow", right=True)
    __matmul__ = _arithmetic("matmul")
    __rmatmul__ = _arithmetic("matmul", right=True)
    __and__ = _arithmetic("and_")
    __rand__ = _arithmetic("and_", right=True)
    __or__ = _arithmetic("or_")
    __ror__ = _arithmetic("or_", right=True)
    __xor__ = _arithmetic("xor")
    __rxor__ = _arithmetic("xor", right=True)
    __lshift__ = _arithmetic("lshift")
    __rlshift__ = _arithmetic("lshift", right=True)
    __rshift__ = _arithmetic("rshift")
    __rrshift__ = _arithmetic("rshift", right=True)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._judge.call(self._id, given, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._judge.do("get", self._id, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._judge.do("set", self._id, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self is other or self._judge.do("eq", self._id, other) is True
        return self._base is not None and bool(self._judge.base(self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._base) if self._base is not None else hash(self._id)

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Remote) or self._judge.tests_name(type(self)):
            return self._judge.do("contains", self._id, item) is True
        return any(item == part for part in self)

    def __iter__(self) -> Iterator[Any]:
        values = self._judge.do("iter", self._id)
        while True:
            try:
                value = self._judge.do("next", values._id)
            except StopIteration:
                return
            yield value

    def __next__(self) -> Any:
        return self._judge.do("next", self._id)

    def __getitem__(self, key: Any) -> Any:
        return self._judge.do("getitem", self._id, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._judge.do("setitem", self._id, key, value)

    def __delitem__(self, key: Any) -> None:
        self._judge.do("delitem", self._id, key)

    def __enter__(self) -> Any:
        return self._judge.do("enter", self._id)

    def __exit__(self, *error: object) -> None:
        self._judge.do("leave", self._id)

    def __array__(self, *given: Any, **named: Any) -> Any:
        raise TypeError("an object of the answer is no array")

    def __len__(self) -> int:
        return int(self._judge.do("len", self._id))

    def __bool__(self) -> bool:
        return self._judge.do("bool", self._id) is True

    def __str__(self) -> str:
        return str(self._judge.do("str", self._id))

    def __repr__(self) -> str:
        return str(self._judge.do("repr", self._id))


class Judge:
    """Asks one answer process for the answer's names, and makes Python objects of its replies."""

    def __init__(self, end: socket.socket) -> None:
        """`end`: connected socket to the answer process."""
        self.line = wire.Line(end, self._serve)
        self._kinds: dict[int, type] = {}
        self._objects: dict[int, Remote] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        # Text of the check that runs now
        self.text = ""

    def run(self, code: str) -> bool:
        """Run the answer's code; return whether it raised no exception."""
        return "raised" not in self.line.ask({"do": "run", "code": code})

    def names(self, entry: str = "") -> dict[str, Any]:
        """Return name -> object of what the code has defined.

        Names of builtins, and of what the tests use to compare results, are left out: tests mean functions of Python,
        or of their own. `entry`: name of the
        function under test, which is never left out.
        """
        names: dict[str, Any] = {}
        judging = set(_judging(self.text))
        for name, data in self.line.ask({"do": "names"}).get("names", {}).items():
            own = hasattr(builtins, name) or _COMPARISONS.fullmatch(name) is not None
            own = own or name in judging
            if own and name != entry:
                continue
            module = _ALIASES.get(name, name)
            if isinstance(data, list) and data[:1] == ["module"]:
                module = str(data[1])
            elif module not in _LIBRARIES or name == entry or self._called(name):
                names[name] = self._value(data)
                continue
            # Modules are the judge's own
            if module.partition(".")[0] in _LIBRARIES:
                with contextlib.suppress(ImportError):
                    names[name] = importlib.import_module(module)
        return names

    def _called(self, name: str) -> bool:
        """Return whether the text of the tests calls a name, as it would not call a module."""
        return re.search(rf"(?<![.\w]){re.escape(name)}\(", self.text) is not None

    def tests_name(self, kind: type) -> bool:
        """Return whether the text of the tests names a class of the answer."""
        name = kind.__name__
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def call(self, number: int, given: Any, named: dict[str, Any]) -> Any:
        """Call an object of the answer. If the call returns None, the containers that were given take its changes."""
        reply = self.line.ask(
            {
                "do": "call",
                "on": number,
                "given": [self._data(part) for part in given],
                "named": {name: self._data(part) for name, part in named.items()},
            }
        )
        value = self._result(reply)
        if value is None:
            for part, data in zip(given, reply.get("after") or (), strict=False):
                if data is not None:
                    _replace(part, self._value(data))
        return value

    def do(self, what: str, number: int, *given: Any) -> Any:
        """Do an operation on an object of the answer and return the result."""
        data = [self._data(part) for part in given]
        return self._result(self.line.ask({"do": what, "on": number, "given": data}))

    def base(self, value: Remote) -> Any:
        """Return the value that an instance of a subclass of a built-in type has now."""
        if isinstance(value._base, list | dict | set):
            return self.do("base", value._id)
        return value._base

    def _result(self, reply: dict[str, Any]) -> Any:
        """Return the value of a reply, or raise the exception that it describes."""
        output = reply.get("output")
        if isinstance(output, str) and output:
            sys.stdout.write(output)
        if "raised" in reply:
            raise self._error(reply["raised"])
        return self._value(reply.get("value"))

    def _error(self, described: dict[str, Any]) -> BaseException:
        """Return the exception of a description: a built-in one, or one of a class that stands for the answer's."""
        kind = self._kind(described["class"])
        if not described.get("own"):
            kind = getattr(builtins, str(described["class"]["exception"]), Exception)
        if not issubclass(kind, BaseException):
            kind = Exception
        given = [self._value(part) for part in described.get("given", ())]
        try:
            return kind(*given)
        except TypeError:
            return Exception(str(kind))

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests that the answer was given, or return a line of input."""
        try:
            if request.get("do") == "input":
                return {"value": str(input(request.get("prompt", "")))}
            function = self._functions[request["on"]]
            given = [self._value(part) for part in request["given"]]
            named = {name: self._value(v) for name, v in request["named"].items()}
            return {"value": self._data(function(*given, **named))}
        except Exception as error:  # noqa: BLE001  # the answer sees the exception of the function that it calls
            return {"raised": type(error).__name__, "text": str(error)}

    # ── objects as data ──────────────────────────────────────────────────────────────────────────────────────────────

    def _data(self, value: Any) -> Any:
        return wire.packed(value, self._described)

    def _value(self, data: Any) -> Any:
        return wire.unpacked(data, self._made)

    def _described(self, value: Any) -> Any:
        """Return the description of a value of the tests that is no plain data."""
        if isinstance(value, _Kind):
            return ["object", value._number]
        if isinstance(value, Remote):
            return ["object", value._id]
        if wire.builtin_name(value):
            return ["builtin", value.__name__]
        if callable(value):
            self._functions[id(value)] = value
            return ["function", id(value)]
        raise TypeError(f"a {type(value).__name__} cannot be sent to the answer")

    def _made(self, tag: str, body: Any) -> Any:
        """Return what stands for an object of the answer."""
        if tag == "class":
            return self._kind(body)
        if tag == "builtin":
            kind = getattr(builtins, str(body))
            if isinstance(kind, type):
                return kind
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
            base = self._value(body["base"])
            for name, value in (("_id", number), ("_base", base), ("_judge", self)):
                object.__setattr__(made, name, value)
            self._objects[number] = made
        return self._objects[number]

    async def _waiting(self, number: int) -> Any:
        """Return the result of a coroutine of the answer, which runs to its end there."""
        return self.do("await", number)

    def _kind(self, described: dict[str, Any]) -> type:
        """Return the class that stands for a class of the answer."""
        number = int(described["number"])
        if number not in self._kinds:
            name = re.sub(r"\W", "_", str(described["name"]))
            error = getattr(builtins, str(described["exception"]), None)
            bases: tuple[Any, ...]
            if isinstance(error, type) and issubclass(error, BaseException):
                bases = tuple(self._kind(base) for base in described["bases"])
                self._kinds[number] = type(name, bases or (error,), {})
                return self._kinds[number]
            bases = tuple(self._kind(base) for base in described["bases"])
            members = {"_number": number, "_judge": self}
            self._kinds[number] = _Kind(name, bases or (Remote,), members)
        return self._kinds[number]


def _judging(text: str) -> Iterator[str]:
    """Yield the names that a text of tests uses to judge results: their own results are not used.

    Examples: `Test` in `Test.assert_equals(f(1), 2)`, `same` in `same(f(1), 2)`.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        # The name at the root of the called expression, and the name that says what it does
        root: ast.expr = node.func
        named = getattr(root, "attr", getattr(root, "id", ""))
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name):
            continue
        # A function under test is given plain values; a function that judges is given results of others
        results = any(isinstance(part, ast.Call) for part in node.args)
        unused = id(node) in statements
        asserts = _ASSERTIONS.fullmatch(named) is not None
        if (asserts and (unused or results)) or (
            unused and results and len(node.args) > 1
        ):
            yield root.id


def _replace(part: Any, value: Any) -> None:
    """Give a container the content of another one of its type."""
    if isinstance(part, list | bytearray):
        part[:] = value
    elif isinstance(part, dict | set):
        part.clear()
        part.update(value)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Case:
    """An answer's code and its checks. Starts answer processes through the starter."""

    def __init__(self, code: str, control: socket.socket) -> None:
        """`control`: socket to the starter."""
        self._code = code
        self._control = control
        self._judge: Judge | None = None

    def passes(self, check: dict[str, Any]) -> bool:
        """Return whether the code passes one check."""
        if check["kind"] == "program":
            return self._program(check)
        judge = self._running()
        if judge is None or judge.line.broken:
            return False
        judge.text = str(check.get("text", ""))
        names = judge.names(check.get("entry", ""))
        self._offer(names)
        if check["kind"] == "call":
            passed = _call_passes(names, check)
        else:
            passed = _text_passes(names, check)
        # An answer that has ended its process passes nothing, whatever a test catches
        return passed and not judge.line.broken

    def _running(self) -> Judge | None:
        """Return the judge of the answer process that has run the code; None if the code failed."""
        if self._judge is None:
            here, there = socket.socketpair()
            socket.send_fds(self._control, [b"f"], [there.fileno()])
            there.close()
            self._judge = Judge(here)
            try:
                if not self._judge.run(self._code):
                    self._judge.line.broken = True
            except wire.Broken:
                self._judge.line.broken = True
        return self._judge

    def _end_functions(self) -> None:
        """End the answer process that serves functions, since the starter has one process at a time."""
        if self._judge is not None:
            self._judge.line.close()
            self._judge = None
            self._control.recv(4, socket.MSG_WAITALL)

    @staticmethod
    def _offer(names: dict[str, Any]) -> None:
        """Let tests import the names from modules that public tests import answers from."""
        for name in _AS_MODULES:
            module = ModuleType(name)
            module.__dict__.update(names)
            sys.modules[name] = module

    def _program(self, check: dict[str, Any]) -> bool:
        """Return whether the code, run as a program, prints the expected text for a standard input."""
        self._end_functions()
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as code:
            given.write(check["stdin"].encode("utf-8", "replace"))
            given.seek(0)
            code.write(self._code.encode("utf-8", "replace"))
            code.seek(0)
            fds = [given.fileno(), writer, code.fileno()]
            socket.send_fds(self._control, [b"p"], fds)
        os.close(writer)
        printed = _read(reader)
        os.close(reader)
        reply = self._control.recv(4, socket.MSG_WAITALL)
        ended_well = reply == bytes(4)
        return ended_well and equal_output(printed, check["stdout"])


def _read(fd: int) -> str:
    """Return the text that a program writes into a pipe until its end; "" for more than the longest output."""
    text = b""
    while chunk := os.read(fd, _CHUNK):
        text += chunk
        if len(text) > _LONGEST_OUTPUT:
            return ""
    return text.decode("utf-8", "replace")


def equal_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have equal lines, but for blanks at the ends and digits after a decimal point.

    A number with a decimal point in the expected text may differ by a millionth.
    """
    lines = printed.rstrip().splitlines()
    wanted = expected.rstrip().splitlines()
    if len(lines) != len(wanted):
        return False
    return all(map(_equal_line, lines, wanted))


def _equal_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    parts, expected = line.split(), wanted.split()
    return len(parts) == len(expected) and all(map(_equal_part, parts, expected))


def _equal_part(part: str, wanted: str) -> bool:
    """Return whether two words are equal, or numbers that are close to each other."""
    if part == wanted:
        return True
    number = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
    if "." not in wanted or not number.fullmatch(part) or not number.fullmatch(wanted):
        return False
    import math

    return math.isclose(float(part), float(wanted), rel_tol=1e-6, abs_tol=1e-9)


def _call_passes(names: dict[str, Any], check: dict[str, Any]) -> bool:
    """Return whether a function of the answer returns the expected value. It may be a method of a class Solution."""
    try:
        function = names.get(check["entry"])
        if function is None:
            function = getattr(names["Solution"](), check["entry"])
        value = _listed(function(*check["given"]))
    except BaseException:  # noqa: BLE001  # whatever the answer raises, the check has failed
        return False
    expected = _listed(check["expected"])
    return (type(value) is type(expected) and value == expected) or _numbers(
        value, expected
    )


def _numbers(value: Any, expected: Any) -> bool:
    """Return whether two values are equal numbers, though one is an int and one a float; True is no number."""
    both = (type(value), type(expected))
    return both in ((int, float), (float, int)) and bool(value == expected)


def _listed(value: Any) -> Any:
    """Return a value as JSON would have it: with lists instead of tuples, and texts as keys."""
    if isinstance(value, list | tuple):
        return [_listed(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _listed(part) for key, part in value.items()}
    return value


def _text_passes(names: dict[str, Any], check: dict[str, Any]) -> bool:
    """Return whether a text of Python passes: the text itself, then a function or a method that it defines."""
    space: dict[str, Any] = {**names, "__name__": "tests"}
    try:
        for text in (check.get("before", ""), check["text"]):
            exec(compile(text, "<test>", "exec", dont_inherit=True), space)
        if check["kind"] == "check":
            space["check"](names[check["entry"]])
        elif check["kind"] == "function":
            _run_function(space, check["function"], check.get("of", ""))
        elif check["kind"] == "unittest":
            return _run_method(space[check["of"]], check["function"])
    except BaseException:  # noqa: BLE001  # whatever is raised, the check has failed
        return False
    return True


def _run_function(space: dict[str, Any], name: str, of: str) -> None:
    """Run a test function, or a method of the class `of`, with each set of arguments that pytest's marks give."""
    function = space[name] if not of else None
    marks = getattr(
        space[name] if not of else getattr(space[of], name), "pytestmark", []
    )
    sets: list[dict[str, Any]] = [{}]
    for mark in marks:
        if mark.name == "parametrize":
            sets = [
                {**known, **given}
                for known in sets
                for given in _arguments(*mark.args[:2])
            ]
    for given in sets:
        if function is None:
            one = space[of]()
            for before in ("setup_method", "setUp"):
                getattr(one, before, lambda *_: None)()
            getattr(one, name)(**given)
        else:
            function(**given)


def _arguments(names: Any, values: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case of a parametrize mark."""
    keys = (
        [key.strip() for key in names.split(",")] if isinstance(names, str) else names
    )
    for value in values:
        value = getattr(value, "values", value) if hasattr(value, "marks") else value
        yield dict(zip(keys, value if len(keys) > 1 else [value], strict=True))


def _run_method(kind: Any, name: str) -> bool:
    """Return whether a method of a unittest.TestCase succeeds. A skipped test has not succeeded."""
    import unittest

    result = unittest.TestResult()
    suite = unittest.TestSuite([kind(name)])
    suite.run(result)
    skipped = bool(result.skipped or result.expectedFailures)
    return result.testsRun == 1 and result.wasSuccessful() and not skipped


def main() -> None:
    """Read the job, run its checks, and write one line for each check to the report.

    Arguments of the program: file descriptor of the report; bytes of memory and seconds of processor time of each
    answer process.
    """
    confine.die_with_parent()
    report = int(sys.argv[1])
    memory_bytes = int(sys.argv[2])
    cpu_s = float(sys.argv[3])
    # The starter is forked before this process knows the tests
    here, there = socket.socketpair()
    if os.fork() == 0:
        os.close(report)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        here.close()
        confine.die_with_parent()
        start_answers(there, memory_bytes, cpu_s)
    there.close()
    confine.hide_memory()
    most = memory_bytes + _OWN_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    job = json.loads(sys.stdin.buffer.read())
    if job.get("layers"):
        # No code runs: the report is the layers of an answer process
        socket.send_fds(here, [b"l"], [report])
        here.recv(4, socket.MSG_WAITALL)
        os._exit(0)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    case = Case(job["code"], here)
    for number, check in enumerate(job["checks"]):
        try:
            passed = case.passes(check)
        except BaseException:  # noqa: BLE001  # a reply that is no value, a lost process: the check has failed
            passed = False
        result = "passed" if passed else "failed"
        os.write(report, f"{number} {result}\n".encode())
    os._exit(0)
