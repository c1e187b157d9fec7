"""Standard streams by thread: given back in any order, and text streams to code that wraps them."""

from __future__ import annotations

import io
import sys

import pytest

from rlplace.workers.launch.output import Outputs


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_streams_are_given_back_in_any_order(order: tuple[int, int]) -> None:
    before = sys.stdout, sys.stderr
    both = Outputs(), Outputs()
    for each in order:
        assert sys.stdout is not before[0]
        both[each].close()
    assert (sys.stdout, sys.stderr) == before


def test_a_stream_is_a_text_stream(capsys: pytest.CaptureFixture[str]) -> None:
    before, outputs = sys.stdout, Outputs()
    try:
        assert isinstance(sys.stdout, io.TextIOBase)
        with sys.stdout:
            print("inside")
        print("after")
        assert (sys.stdout.encoding, sys.stdout.isatty()) == (
            before.encoding,
            before.isatty(),
        )
    finally:
        outputs.close()
    assert capsys.readouterr().out == "inside\nafter\n"
