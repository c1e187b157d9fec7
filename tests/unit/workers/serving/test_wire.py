"""The protobuf messages of the training API: read and written as protobuf itself does, and refused where damaged."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.tokens import Completion
from rlplace.workers.serving.wire import (
    NotReadable,
    fields_of,
    message_of,
    read_pass,
    write_samples,
)

# Field 3, of a Datum with one chunk of the tokens 7 and 300, and weights [0.5]; written by protobuf 7.36
DATUM = bytes.fromhex(
    "0a0c0a0a0a08070000002c01000012160a0777656967687473120b0a040000003f1801220101"
)


def test_a_message_of_protobuf_is_read() -> None:
    body = message_of([(1, "a model"), (2, 300), (3, DATUM), (4, "ppo"), (6, 1)])
    # A map entry with the default value 0, which protobuf leaves out, and one with a number
    number = message_of([(1, "low"), (2, message_of([(1, 0.75)]))])
    body += message_of([(5, message_of([(1, "none")])), (7, number)])
    found = read_pass(body)
    assert (found.model_id, found.number, found.loss) == ("a model", 300, "ppo")
    assert found.forward_only
    assert found.settings == {"none": 0.0, "low": 0.75}
    (datum,) = found.data
    assert datum.tokens.tolist() == [7, 300]
    assert datum.inputs["weights"].tolist() == [0.5]
    assert not datum.others


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\x0a\x05abc", "ends behind the end"),
        (b"\xff" * 12, "more than 64 bits"),
        (b"\x80", "ends behind the end"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x01\xff", "not in UTF-8"),
        (b"\x0d\x00\x00", "ends behind the end"),
        (message_of([(2, "text")]), "whole number"),
        (message_of([(3, 5)]), "message or bytes belong"),
        (
            message_of(
                [(3, message_of([(1, message_of([(1, message_of([(1, b"abc")]))]))]))]
            ),
            "ends within",
        ),
    ],
)
def test_damaged_bodies_are_refused_in_words(body: bytes, why: str) -> None:
    with pytest.raises(NotReadable, match=why):
        read_pass(body)


def test_images_and_sparse_tensors_are_told() -> None:
    image = message_of([(1, message_of([(2, b"png")]))])
    sparse = message_of(
        [(2, message_of([(1, "weights"), (2, message_of([(2, b"")]))]))]
    )
    found = read_pass(message_of([(3, image), (3, sparse)]))
    assert "image" in found.data[0].others
    assert "sparse" in found.data[1].others


def test_samples_are_written_with_their_reasons() -> None:
    answer = Completion(
        env_rank=0,
        iteration=0,
        held_out=False,
        group=1,
        sample=0,
        turn=0,
        tokens=np.array([5, 6], np.int32),
        logprobs=np.array([-1.0, -2.0], np.float32),
        versions=np.zeros(2, np.int32),
        finish="length",
    )
    fields = list(fields_of(write_samples([answer], [-3.0], cached=4)))
    assert [number for number, _ in fields] == [1, 2, 4]
    (_, first), (_, second), _ = fields
    assert isinstance(first, bytes)
    assert isinstance(second, bytes)
    sequence = dict(fields_of(first))
    assert sequence[1] == 1
    scores = np.frombuffer(second, "<f4")
    assert np.isnan(scores[0])
    assert scores[1] == -3.0
