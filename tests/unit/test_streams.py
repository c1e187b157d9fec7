"""Standard streams that take everything: bytes that are no text, and descriptors that are closed, full or slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN = "import os, sys; from rlplace.streams import Streams; streams = Streams(); "


def said(code: str, redirect: str = "") -> subprocess.CompletedProcess[bytes]:
    line = f'PYTHONIOENCODING=ascii "$@" {redirect}'
    words = ["bash", "-c", line, "bash", sys.executable, "-c", BEGIN + code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60)


def test_characters_that_an_encoding_lacks_are_shown_by_others() -> None:
    assert (
        said("print('1 ± 2 → 3 µs, Grö\\u00dfe')").stdout == b"1 +- 2 -> 3 us, Gr??e\n"
    )


def test_the_bytes_of_a_name_that_is_no_text_are_shown_as_they_are() -> None:
    assert said("print(os.fsdecode(b'caf\\xe9'))").stdout == b"caf\xe9\n"


def test_no_file_takes_the_place_of_a_stream_that_is_closed() -> None:
    """The first file that is opened would be standard output of what a program starts."""
    done = said(
        "file = os.open(sys.executable, os.O_RDONLY); sys.exit(file if file < 3 else 0)",
        "<&- >&- 2>&-",
    )
    assert done.returncode == 0


def test_an_error_of_the_output_is_kept_but_for_a_reader_that_has_seen_enough() -> None:
    ask = "print('x' * 100_000, flush=True); print(streams.error, file=sys.stderr)"
    assert said(ask, "> /dev/full").stderr == b"[Errno 28] No space left on device\n"
    assert said(ask, "| true").stderr == b"None\n"


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything() -> None:
    done = said(
        "os.set_blocking(1, False); print('x' * 300_000)", "| (sleep 0.3; wc -c)"
    )
    assert (done.stdout.strip(), done.stderr) == (b"300001", b"")


def test_unbuffered_streams_stay_so() -> None:
    """A process that is killed has told all that it printed."""
    words = [
        sys.executable,
        "-u",
        "-c",
        BEGIN + "print('out'); sys.stderr.write('error'); os.kill(os.getpid(), 9)",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"out\n", b"error")


def test_unbuffered_streams_write_all_of_a_long_text() -> None:
    words = [
        "bash",
        "-c",
        '"$@" | (sleep 0.3; wc -c)',
        "bash",
        sys.executable,
        "-u",
        "-c",
    ]
    done = subprocess.run(
        [*words, BEGIN + "os.set_blocking(1, False); print('x' * 300_000)"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == (b"300001", b"")
