"""Published seconds beside predicted ones: the table is whole, and the page has what the command prints."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import published_seconds
from benchmarks.published_seconds import Compared, lengths, pairs, render, table


def test_every_row_names_its_source_model_and_published_number() -> None:
    known = table()
    assert all(s["url"].startswith("https://") for s in known["source"].values())
    rows = [*known["step"], *known["pass"]]
    assert len(rows) >= 15
    for row in rows:
        assert row["source"] in known["source"], row
        assert row["model"] in known["model"], row
        assert row["published"], row


def test_lengths_have_the_published_mean_and_end_at_the_longest() -> None:
    for row in table()["step"]:
        drawn = lengths(row)
        whole = drawn.prompt * row["whole"]
        assert statistics.fmean(drawn.answers) + whole == pytest.approx(row["tokens"])
        assert max(drawn.answers) <= 4096 - drawn.prompt


def compared(row: str, published: float, predicted: float) -> Compared:
    return Compared(row, "s", "iteration", published, predicted)


def test_only_placements_that_differ_are_pairs() -> None:
    turn = compared("8b, in turn", 100.0, 90.0)
    apart = compared("8b, apart", 80.0, 95.0)
    near = compared("8b, elsewhere", 101.0, 50.0)
    other = compared("70b, in turn", 10.0, 1.0)
    again = compared("8b, in turn", 50.0, 10.0)
    found = [ok for *_, ok in pairs([turn, apart, near, other, again])]
    # turn and apart; apart and near; apart and again; near and again
    assert found == [False, False, True, True]
    assert turn.error == pytest.approx(-0.1)
    slow = Compared("r", "s", "tokens/s", 100.0, 125.0)
    assert slow.error == pytest.approx(-0.2)


@pytest.mark.slow
def test_the_page_has_what_the_command_prints() -> None:
    page = published_seconds.PAGE.read_text(encoding="utf-8")
    assert render(published_seconds.compared()).strip() in page


def test_the_page_has_the_numbers_of_training_passes() -> None:
    known = table()
    page = published_seconds.PAGE.read_text(encoding="utf-8")
    for row in known["pass"]:
        model = known["model"][row["model"]]
        predicted = published_seconds.predict_pass(row, model)
        assert f"| {row['published']:,} | {predicted:,.0f} |" in page, row
