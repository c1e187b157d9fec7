"""Numbers in texts that YAML does not read as numbers."""

from __future__ import annotations

import pytest

from rlplace.config.number_text import Meant, as_number, as_seconds, as_thousands


@pytest.mark.parametrize(
    ("text", "of", "number"),
    [
        ("3e-4", float, "3.0e-4"),
        ("2.5e-4,", float, "2.5e-4"),
        ("0.99,", float, "0.99"),
        ("10,", int, "10"),
        ("1e3", int, "1000"),
        ("1.5e3", int, "1500"),
        ("1 000", int, "1000"),
        ("1_000_000", int, "1000000"),
        ("1,024", int, "1024"),
        ("0,99", float, "0.99"),
        ("90%", float, "0.9"),
        ("1.0e-6f", float, "1.0e-6"),
        ("2**14", int, "16384"),
        ("4 * 1024", int, "4096"),
        ("3*1e-4", float, "0.0003"),
        ("10^-3", float, "0.001"),
        ("1/4", float, "0.25"),
        # Another form than a number, or none of the type
        ("1/3", int, None),
        ("1.5", int, None),
        ("lin_3e-4", float, None),
        ("1/0", float, None),
        ("10**1000", float, None),
        ("-2**0.5", float, None),
        ("0-3", int, None),
        ("1.2.3", float, None),
        ("nan", float, None),
        ("", int, None),
    ],
)
def test_a_text_that_means_a_number(text: str, of: type, number: str | None) -> None:
    assert as_number(text, of) == number


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("16k", "max_new_tokens", Meant("16384", "16000")),
        ("4K", "total_num_envs", Meant("4096", "4000")),
        ("2k", "total_iterations", Meant("2000")),
        ("1M", "", Meant("1000000")),
        ("1.5k", "total_iterations", Meant("1500")),
        ("1.5k", "max_new_tokens", Meant("1536", "1500")),
        ("16kB", "max_new_tokens", None),
        ("k", "max_new_tokens", None),
    ],
)
def test_thousands(text: str, name: str, meant: Meant | None) -> None:
    """Lengths in tokens are powers of two; iterations are not."""
    assert as_thousands(text, name) == meant


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8gpus", "8"),
        ("100 (short)", "100"),
        (":8000", "8000"),
        ("=64", "64"),
        ("~5", "5"),
        ("64;", "64"),
        ("100 (short", None),
        ("a:8000", None),
    ],
)
def test_a_remark_a_sign_or_a_unit_stays_away(text: str, number: str | None) -> None:
    assert as_number(text, int) == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10min", "600"),
        ("1h", "3600"),
        ("2 hours", "7200"),
        ("00:10:00", "600"),
        ("30 sec", "30"),
        ("1.5h", "5400"),
        ("1h30m", "5400"),
        ("500ms", "0.5"),
        ("1 parsec", None),
        ("1h and more", None),
    ],
)
def test_durations(text: str, seconds: str | None) -> None:
    assert as_seconds(text, "stage_timeout_s") == seconds
    assert as_seconds(text, "total_iterations") is None
