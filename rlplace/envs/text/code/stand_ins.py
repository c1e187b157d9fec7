"""Proxies in the judge process for objects and classes of an answer. Each use is a request to the answer process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

# Special names that are attributes of the answer's object too
_ATTRIBUTES = ("__name__", "__qualname__", "__doc__", "__wrapped__")
# Operations whose right operand is often the expected result
_DIFFERENCES = ("sub", "xor")


class AnswerClient(Protocol):
    """Sends requests to the answer process. The proxies use these methods; the judge has them."""

    def call(self, number: int, given: Any, named: dict[str, Any]) -> Any:
        """Call an object of the answer. `number`: number of the object in the answer process."""
        ...

    def do(self, what: str, number: int, *given: Any) -> Any:
        """Do an operation on an object of the answer and return the result."""
        ...

    def base(self, value: Remote) -> Any:
        """Return the present value of `value` as its built-in base type, such as the list of a subclass of list."""
        ...

    def is_under_test(self, kind: type) -> bool:
        """Return whether the source text of the test names this class of the answer."""
        ...


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _ATTRIBUTES


def each(judge: AnswerClient, number: int) -> Iterator[Any]:
    """Yield the items of an object of the answer. `number`: number of the object."""
    values = judge.do("iter", number)
    while True:
        try:
            value = judge.do("next", values._remote_id)
        except StopIteration:
            return
        yield value


class RemoteClass(type):
    """The metaclass of proxies for classes of the answer."""

    _remote_number: int
    _remote_judge: AnswerClient

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if "_remote_number" not in cls.__dict__:
            raise TypeError("this class cannot be called")
        return cls._remote_judge.call(cls._remote_number, given, named)

    def __getattr__(cls, name: str) -> Any:
        number = cls.__dict__.get("_remote_number")
        if number is None or _is_special(name):
            raise AttributeError(name)
        return cls._remote_judge.do("get", number, name)

    # The next three methods are for enumerations, whose members belong to the class

    def __getitem__(cls, key: Any) -> Any:
        return cls._remote_judge.do("getitem", cls._remote_number, key)

    def __iter__(cls) -> Iterator[Any]:
        return each(cls._remote_judge, cls._remote_number)

    def __len__(cls) -> int:
        return int(cls._remote_judge.do("len", cls._remote_number))


def _one_operand(name: str) -> Callable[..., Any]:
    def operation(self: Remote, *given: Any) -> Any:
        return self._remote_judge.do(name, self._remote_id, *given)

    return operation


def _ordering(name: str) -> Callable[[Any, Any], Any]:
    def operation(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._remote_judge.do(name, self._remote_id, other)
        if self._remote_base is not None:
            return getattr(self._remote_base, f"__{name}__")(other)
        return NotImplemented

    return operation


def _arithmetic(name: str, *, right: bool = False) -> Callable[[Any, Any], Any]:
    """Return the method of `Remote` for an operation with two operands.

    The answer process computes the operation if the other operand is an object of the answer, or if the test names the
    class of the object. A test may subtract the expected result, so for other operands, and for differences, only the
    value of a built-in base type is used, in this process. `right`: whether the object is the right operand.
    """
    what = f"r:{name}" if right else name
    own = f"__r{name.rstrip('_')}__" if right else f"__{name.rstrip('_')}__"

    def operation(self: Remote, other: Any) -> Any:
        named = name not in _DIFFERENCES and self._remote_judge.is_under_test(
            type(self)
        )
        if isinstance(other, Remote) or named:
            return self._remote_judge.do(what, self._remote_id, other)
        return getattr(self._remote_base, own, lambda _: NotImplemented)(other)

    return operation


class Remote(metaclass=RemoteClass):
    """A proxy for an object of the answer. Operations are requests to the answer process.

    A comparison with data of the tests is computed in this process. So the object cannot claim to equal an expected
    result.
    """

    _remote_judge: AnswerClient
    # Number of the object in the answer process
    _remote_id: int
    # Value as the built-in base type, for an instance of a subclass of one; else None
    _remote_base: Any

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
        return self._remote_judge.call(self._remote_id, given, named)

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return self._remote_judge.do("get", self._remote_id, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_judge.do("set", self._remote_id, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return (
                self is other
                or self._remote_judge.do("eq", self._remote_id, other) is True
            )
        return self._remote_base is not None and bool(
            self._remote_judge.base(self) == other
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        if self._remote_base is not None:
            return hash(self._remote_judge.base(self))
        return int(self._remote_judge.do("hash", self._remote_id))

    def __contains__(self, item: object) -> bool:
        if isinstance(item, Remote) or self._remote_judge.is_under_test(type(self)):
            return self._remote_judge.do("contains", self._remote_id, item) is True
        return any(item == part for part in self)

    def __iter__(self) -> Iterator[Any]:
        return each(self._remote_judge, self._remote_id)

    def __next__(self) -> Any:
        return self._remote_judge.do("next", self._remote_id)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_judge.do("getitem", self._remote_id, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote_judge.do("setitem", self._remote_id, key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote_judge.do("delitem", self._remote_id, key)

    def __enter__(self) -> Any:
        return self._remote_judge.do("enter", self._remote_id)

    def __exit__(self, *error: object) -> None:
        self._remote_judge.do("leave", self._remote_id)

    def __array__(self, *given: Any, **named: Any) -> Any:
        raise TypeError("an object of the answer is no array")

    def __len__(self) -> int:
        return int(self._remote_judge.do("len", self._remote_id))

    def __bool__(self) -> bool:
        return self._remote_judge.do("bool", self._remote_id) is True

    def __str__(self) -> str:
        return str(self._remote_judge.do("str", self._remote_id))

    def __repr__(self) -> str:
        return str(self._remote_judge.do("repr", self._remote_id))
