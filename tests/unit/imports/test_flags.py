"""Words of a command line as settings."""

from __future__ import annotations

import pytest

from rlplace.errors import ConfigError
from rlplace.imports.flags import MANY, Flag, read_flags

TABLE = {
    "nodes": Flag(1, ("num_nodes",)),
    "sleep": Flag(0),
    "betas": Flag(2),
    "modules": Flag(MANY),
}


def read(text: str, file: str = "") -> list[tuple[str, object, str]]:
    return [(s.key, s.value, s.written) for s in read_flags(text, file, TABLE)]


def test_values_are_what_they_mean() -> None:
    assert read("--nodes 2 --num_nodes=3 --sleep --betas 0.9 1e-3 --modules a b --nodes true") == [
        ("nodes", 2, "--nodes 2"),
        ("nodes", 3, "--num_nodes=3"),
        ("sleep", True, "--sleep"),
        ("betas", (0.9, 0.001), "--betas 0.9 1e-3"),
        ("modules", ("a", "b"), "--modules a b"),
        ("nodes", True, "--nodes true"),
    ]


def test_a_negative_number_is_a_value() -> None:
    assert read("--nodes -1") == [("nodes", -1, "--nodes -1")]


def test_unknown_flags_take_what_follows_and_stray_words_stand_alone() -> None:
    assert read("--sleep on --other 1 2 --last") == [
        ("sleep", True, "--sleep"),
        ("on", None, "on"),
        ("other", (1, 2), "--other 1 2"),
        ("last", True, "--last"),
    ]


def test_sources_say_where() -> None:
    typed, script = read_flags("--nodes 1", "", TABLE), read_flags("x\nt --nodes 1", "run.sh", TABLE)
    assert [str(s.source) for s in (*typed, *script)] == ["command line", "run.sh:2"]


def test_missing_values_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read("--nodes --betas 1 --sleep")
    assert caught.value.codes == ("import-flag-value", "import-flag-value")
    assert [p.what for p in caught.value.problems] == ["its value is missing", "takes 2 values"]
    assert caught.value.problems[1].fix == "--betas VALUE VALUE"


def test_an_open_quote_is_told_in_the_usual_form() -> None:
    with pytest.raises(ConfigError) as caught:
        read("a\n--nodes '1", "run.sh")
    (problem,) = caught.value.problems
    assert (problem.code, problem.got, str(problem.source)) == ("import-quote", "--nodes '1", "run.sh:2")
