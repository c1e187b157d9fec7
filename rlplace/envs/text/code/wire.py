"""Messages between the judge and an answer process: JSON texts with a length before each, and values as plain data.

Imports the standard library only, because both processes run isolated from installed packages.
"""

from __future__ import annotations

import builtins
import datetime
import json
import socket
import struct
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Bytes of the longest message
LONGEST = 8 << 20
# Nested containers in a value
_DEEPEST = 100
# Integers up to this size are written as JSON numbers
_SMALL = 1 << 53
_LENGTH = struct.Struct("=I")
_CHUNK = 1 << 16
# Kind of dict -> its tag; a defaultdict becomes a dict, since its factory cannot be sent
_DICTS: dict[type, str] = {
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
}
_MADE_DICTS: dict[str, type] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
_DATES = (datetime.datetime, datetime.date, datetime.time)


# Operations that a proxy has only if the answer's class has them: they make an object an iterator, or give it a length
OPTIONAL = ("__iter__", "__next__", "__len__")


class Broken(BaseException):
    """The other process has ended, or has sent what is no message.

    The class is no Exception, so that code with `except Exception` does not catch it.
    """


class Line:
    """One end of the connection between the judge and an answer process. Both ends may ask and answer in turn."""

    def __init__(
        self, end: socket.socket, serve: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """`end`: a connected stream socket. `serve`: returns the reply to a request of the other end."""
        self._end = end
        self._serve = serve
        self.broken = False
        # Tests may use threads
        self._lock = threading.RLock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. Serve requests of the other end meanwhile. Raises Broken."""
        with self._lock:
            self._send({"request": request})
            while True:
                message = self._receive()
                if "reply" in message:
                    return self._fields(message["reply"])
                self._send({"reply": self._serve(self._fields(message.get("request")))})

    def serve_all(self) -> None:
        """Serve requests until the other end closes."""
        try:
            while True:
                message = self._receive()
                self._send({"reply": self._serve(self._fields(message.get("request")))})
        except Broken:
            return

    def close(self) -> None:
        """Close this end; the other end then stops serving."""
        self._end.close()

    def _fields(self, value: Any) -> dict[str, Any]:
        """Return `value`, which must be a dict. Raises Broken."""
        if not isinstance(value, dict):
            self.broken = True
            raise Broken("no message")
        return value

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        if len(body) > LONGEST:
            self.broken = True
            raise Broken("a message is too long")
        try:
            self._end.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            self.broken = True
            raise Broken(str(error)) from error

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
        if length > LONGEST:
            self.broken = True
            raise Broken("a message is too long")
        try:
            message = json.loads(self._bytes(length))
        except (ValueError, RecursionError) as error:
            self.broken = True
            raise Broken(str(error)) from error
        return self._fields(message)

    def _bytes(self, count: int) -> bytes:
        """Return the next `count` bytes of the connection. Raises Broken at its end."""
        parts: list[bytes] = []
        while count:
            try:
                part = self._end.recv(min(count, _CHUNK))
            except OSError as error:
                self.broken = True
                raise Broken(str(error)) from error
            if not part:
                self.broken = True
                raise Broken("the other process has ended")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


# ── values as data ───────────────────────────────────────────────────────────────────────────────────────────────────


def packed(value: Any, other: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a value as JSON data.

    `other`: packs a value of any type that is no plain data. Raises ValueError for containers that are nested too
    deeply, such as a list that contains itself.
    """
    if depth > _DEEPEST:
        raise ValueError("the value is nested too deeply")

    def inner(part: Any) -> Any:
        return packed(part, other, depth + 1)

    # Only exact types: a subclass may behave differently
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < _SMALL else ["int", hex(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [inner(part) for part in value]]
    if kind in _DICTS:
        return [
            _DICTS[kind],
            [[inner(key), inner(part)] for key, part in value.items()],
        ]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is range:
        return ["range", [inner(value.start), inner(value.stop), inner(value.step)]]
    if kind is deque:
        return ["deque", [inner(part) for part in value]]
    if kind in _DATES and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind in (Decimal, Fraction):
        return [kind.__name__, str(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic) and value.dtype != object:
            return inner(value.item())
        if kind is numpy.ndarray and value.dtype.kind in "biufc":
            data = numpy.ascontiguousarray(value).tobytes().hex()
            return ["array", [value.dtype.str, list(value.shape), data]]
    return other(value)


def builtin_name(value: Any) -> str:
    """Return the name under which `builtins` has a class or a function; "" for any other object."""
    name = getattr(value, "__name__", None)
    own = isinstance(name, str) and getattr(builtins, name, None) is value
    return str(name) if own else ""


def unpacked(data: Any, other: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """Return the value that `packed` has made `data` of.

    `other`: makes the value of a tag that is not one of `packed`'s own. Raises ValueError or TypeError for other data.
    """
    if depth > _DEEPEST:
        raise ValueError("the value is nested too deeply")
    if data is None or isinstance(data, bool | str | float | int):
        return data
    if not isinstance(data, list) or len(data) != 2 or not isinstance(data[0], str):
        raise ValueError("no packed value")
    tag, body = data

    def inner(part: Any) -> Any:
        return unpacked(part, other, depth + 1)

    if tag == "int":
        return int(body, 16)
    if tag in ("list", "tuple", "set", "frozenset", "deque"):
        kinds = (list, tuple, set, frozenset, deque)
        maker: Any = {kind.__name__: kind for kind in kinds}[tag]
        return maker(inner(part) for part in body)
    if tag in _MADE_DICTS:
        return _MADE_DICTS[tag]({inner(key): inner(part) for key, part in body})
    if tag in ("datetime", "date", "time"):
        made: Any = getattr(datetime, tag)
        return made.fromisoformat(body)
    if tag == "timedelta":
        return datetime.timedelta(*(int(part) for part in body))
    if tag == "iterator":
        return iter(inner(body))
    if tag == "bytes":
        return bytes.fromhex(body)
    if tag == "bytearray":
        return bytearray.fromhex(body)
    if tag == "complex":
        return complex(*body)
    if tag == "range":
        return range(*(inner(part) for part in body))
    if tag in ("Decimal", "Fraction"):
        return Decimal(body) if tag == "Decimal" else Fraction(body)
    if tag == "array":
        import numpy

        kind, shape, text = body
        flat = numpy.frombuffer(bytes.fromhex(text), numpy.dtype(kind))
        return flat.reshape(shape).copy()
    return other(tag, body)
