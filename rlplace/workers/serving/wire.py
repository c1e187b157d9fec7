"""The protobuf messages of the training API: requests for a pass are read, results of passes and samples are written.

The client sends and takes these three messages as protobuf, all others as JSON. Field numbers are those of the file
`tinker_public.proto` of the published client, version 0.38. The encoding is described at
https://protobuf.dev/programming-guides/encoding::

    a message    fields, in any order: key, value
    key          varint: number of the field * 8 + wire type
    value        type 0: varint | 1: 8 bytes | 2: varint with a length, then so many bytes | 5: 4 bytes

Letters: N tokens of a datum.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.tokens import Completion

_VARINT = 0
_EIGHT_BYTES = 1
_BYTES = 2
_FOUR_BYTES = 5
# More bits than this, and it is no varint of protobuf
_MOST_BITS = 70
Fields = list[tuple[int, Any]]
Array = NDArray[Any]

# Values of the enum DType
_FLOAT32 = 1
_DTYPES: Mapping[int, str] = {_FLOAT32: "<f4", 2: "<i8", 3: "<i4"}
# Values of the enum StopReason
_REASONS: Mapping[Literal["stop", "length"], int] = {"stop": 0, "length": 1}


class NotReadable(Exception):  # the answer to a request is made of it
    """Raised for a body that is not a message of the protocol. The text says why."""


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DatumMessage:
    """One datum of a request for a pass.

    `tokens`: token ids of its text, [N] int32. `inputs`: name -> array of the loss function. `others`: why the datum
    cannot be used; "" if it can.
    """

    tokens: NDArray[np.int32]
    inputs: Mapping[str, Array]
    others: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassMessage:
    """A request for a forward pass, and for a backward pass unless `forward_only`.

    `settings`: numbers and texts of the loss function.
    """

    model_id: str
    number: int
    data: Sequence[DatumMessage]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool


def read_pass(body: bytes) -> PassMessage:
    """Return the message ForwardBackwardRequest in `body`. Raises NotReadable."""
    data = list[DatumMessage]()
    settings = dict[str, float | str]()
    model_id = ""
    loss = ""
    number = 0
    forward_only = False
    for field, value in fields_of(body):
        match field:
            case 1:
                model_id = _text(value)
            case 2:
                number = _whole(value)
            case 3:
                data.append(_datum(_part(value)))
            case 4:
                loss = _text(value)
            case 5:
                name, written = _entry(value)
                settings.setdefault(name, _number(written))
            case 6:
                forward_only = bool(_whole(value))
            case 7:
                name, written = _entry(value)
                settings[name] = _setting(_part(written))
    return PassMessage(
        model_id=model_id,
        number=number,
        data=data,
        loss=loss,
        settings=settings,
        forward_only=forward_only,
    )


def _datum(body: bytes) -> DatumMessage:
    tokens = [np.zeros(0, np.int32)]
    inputs = dict[str, Array]()
    others = ""
    for field, value in fields_of(body):
        if field == 1:
            for kind, chunk in fields_of(_part(value)):
                if kind != 1:
                    others = "it has an image or audio, and the server reads text only"
                    continue
                for at, written in fields_of(_part(chunk)):
                    if at == 1:
                        tokens.append(_array(_part(written), "<i4"))
        elif field == 2:
            name, written = _entry(value)
            found = _tensor(_part(written))
            if isinstance(found, str):
                others = f"{name}: {found}"
            else:
                inputs[name] = found
    return DatumMessage(
        tokens=np.concatenate(tokens).astype(np.int32), inputs=inputs, others=others
    )


def _tensor(body: bytes) -> Array | str:
    """Return the array in a message Tensor; a text that says why it cannot be used."""
    dense = b""
    dtype = 0
    shape = list[int]()
    for field, value in fields_of(body):
        match field:
            case 1:
                dense = _part(value)
            case 2:
                return "sparse tensors are not taken"
            case 3:
                dtype = _whole(value)
            case 4 if isinstance(value, bytes):
                shape += _varints(value)
            case 4:
                shape.append(_whole(value))
    if dtype not in _DTYPES:
        return f"an array has the dtype float32, int64 or int32, this one {dtype}"
    if len(shape) > 1:
        return f"one number for each token is taken, and the shape is {shape}"
    return _array(dense, _DTYPES[dtype])


def _setting(body: bytes) -> float | str:
    for field, value in fields_of(body):
        if field == 1:
            return _number(value)
        if field == 2:
            return _text(value)
    raise NotReadable("a setting of the loss function has no value")


def write_pass(
    logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]
) -> bytes:
    """Return the message ForwardBackwardOutput. `logprobs`: of the target tokens of each datum, [N]."""
    edges = np.cumsum([0, *(4 * len(each) for each in logprobs)])
    empty = np.zeros(0, np.float32)
    batched = message_of(
        [
            (1, np.concatenate([empty, *logprobs]).astype("<f4").tobytes()),
            (2, edges.astype("<i8").tobytes()),
            (3, _FLOAT32),
        ]
    )
    field = message_of([(1, "logprobs"), (2, batched)])
    record = message_of([(1, "TorchLossReturn"), (2, field), (3, len(logprobs))])
    entries = [(3, message_of([(1, n), (2, float(v))])) for n, v in metrics.items()]
    return message_of([(1, "TorchLossReturn"), (2, record), *entries])


def write_samples(
    answers: Iterable[Completion],
    prompt_logprobs: Sequence[float] | None,
    cached: int = 0,
) -> bytes:
    """Return the message SampleResponse.

    `prompt_logprobs`: of the tokens of the prompt but the first one; None: they were not asked. `cached`: tokens of
    the prompt that were in a cache.
    """
    fields: Fields = []
    for answer in answers:
        sequence = message_of(
            [
                (1, _REASONS[answer.finish]),
                (2, answer.tokens.astype("<i4").tobytes()),
                (3, answer.logprobs.astype("<f4").tobytes()),
            ]
        )
        fields.append((1, sequence))
    if prompt_logprobs is not None:
        # Nothing comes before the first token
        numbers = np.array([np.nan, *prompt_logprobs], "<f4")
        fields.append((2, numbers.tobytes()))
    return message_of([*fields, (4, cached)])


# ── the encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fields_of(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field: an int for a varint, else the bytes. Raises NotReadable."""
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(body, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(body, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise NotReadable(f"a field has the wire type {kind}")
        if at + size > len(body):
            raise NotReadable("a field ends behind the end of the body")
        yield key >> 3, body[at : at + size]
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the varint at byte `at` of `body`, and the number of the byte behind it. Raises NotReadable."""
    value = 0
    for bits in range(0, _MOST_BITS, 7):
        if at >= len(body):
            raise NotReadable("a number ends behind the end of the body")
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << bits
        if byte < 0x80:
            return value, at
    raise NotReadable("a number has more than 64 bits")


def _varints(body: bytes) -> Iterator[int]:
    at = 0
    while at < len(body):
        value, at = _varint(body, at)
        yield value


def _entry(value: int | bytes) -> tuple[str, int | bytes]:
    """Return (key, value) of an entry of a map."""
    name = ""
    found: int | bytes = b""
    for field, each in fields_of(_part(value)):
        if field == 1:
            name = _text(each)
        elif field == 2:
            found = each
    return name, found


def _part(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise NotReadable("a number stands where a message or bytes belong")
    return value


def _whole(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise NotReadable("bytes stand where a whole number belongs")
    return value


def _number(value: int | bytes) -> float:
    written = _part(value)
    # The default of a field is not sent
    if not written:
        return 0.0
    if len(written) != 8:
        raise NotReadable("a number has 8 bytes")
    (found,) = struct.unpack("<d", written)
    return float(found)


def _text(value: int | bytes) -> str:
    try:
        return _part(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotReadable("a text is not in UTF-8") from error


def _array(value: bytes, dtype: str) -> Array:
    try:
        return np.frombuffer(value, np.dtype(dtype))
    except ValueError as error:
        raise NotReadable(f"an array ends within a number of {dtype}") from error


def message_of(fields: Iterable[tuple[int, int | float | str | bytes]]) -> bytes:
    """Return a message with these fields: (number, value)."""
    out = bytearray()
    for number, value in fields:
        match value:
            case int():
                out += _as_varint(number << 3 | _VARINT) + _as_varint(value)
            case float():
                out += _as_varint(number << 3 | _EIGHT_BYTES)
                out += struct.pack("<d", value)
            case _:
                content = value.encode() if isinstance(value, str) else value
                out += _as_varint(number << 3 | _BYTES) + _as_varint(len(content))
                out += content
    return bytes(out)


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
