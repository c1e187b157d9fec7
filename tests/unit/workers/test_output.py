"""Standard streams by thread: given back in any order, and text streams to code that wraps them."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

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


def test_files_are_closed_and_what_is_written_later_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_before = set(os.listdir("/proc/self/fd"))
    outputs = Outputs()
    closed = threading.Event()

    def work() -> None:
        outputs.enter(tmp_path / "env-0.txt", "env rank 0")
        stream = sys.stdout
        print("while it works")
        entered.set()
        closed.wait()
        print("after the close", file=stream)

    entered = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    outputs.close()
    assert set(os.listdir("/proc/self/fd")) == open_before
    closed.set()
    thread.join()
    assert "while it works" in (tmp_path / "env-0.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == "after the close\n"


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
