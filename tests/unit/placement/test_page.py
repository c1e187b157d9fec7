"""The page stands alone: well-formed, without requests or scripts, and says what the text says."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from rlplace.placement.show.html import render_html
from tests.unit.placement.reports import APART, H100, SIX, llm, ppo
from tests.unit.placement.test_picture import REPORTS

VOID = {"meta"}


class Reader(HTMLParser):
    """Checks that elements nest and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", REPORTS)
def test_every_page_is_well_formed_and_asks_for_nothing(name: str) -> None:
    page = render_html(REPORTS[name])
    reader = read(page)
    tags = {tag for tag, _ in reader.seen}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not [a for _, a in reader.seen if {"href", "src"} & set(a)]
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_the_verdict_comes_first() -> None:
    fits, short, unknown = (
        read(render_html(r)).text for r in (REPORTS["six"], REPORTS["too-large"], ppo(nodes=[{"accelerators": 8}]))
    )
    assert "fits" in fits
    assert "does not fit" in short
    assert "fits" in unknown, "the emulated accelerators of a config have a size"
    for view in (ppo(nodes=[{"accelerators": 8}], accelerator={"kind": "auto"}), llm(model=None)):
        assert "memory not known" in read(render_html(view)).text


def test_numbers_at_the_top() -> None:
    words = " ".join(read(render_html(ppo())).text)
    assert "8 accelerators" in words
    assert "each component on its own would use 16" in words
    assert "256 MiB of 16 GiB" in words
    assert "8 moves" in words
    apart = " ".join(read(render_html(ppo(APART))).text)
    assert "no component shares any" in apart
    assert "every component stays where it is" in apart


def test_problems_and_warnings_have_their_fix() -> None:
    words = " ".join(read(render_html(REPORTS["too-large"])).text)
    assert "does-not-fit" in words
    assert "fix: actor.micro_batch" in words
    idle = " ".join(read(render_html(REPORTS["idle"])).text)
    assert "no component uses accelerators 5-7" in idle


def test_bars_are_as_long_as_what_is_held() -> None:
    report = llm(dict.fromkeys(SIX, "0-7"))
    bars = [a for tag, a in read(render_html(report)).seen if tag == "svg" and a.get("class") == "bar"]
    assert len(bars) == sum(len(account.loads) for account in report.ledger.accelerators)
    page = render_html(report)
    first = re.search(r'<svg class="bar".*?</svg>', page, re.S)
    assert first is not None
    widths = [float(w) for w in re.findall(r'class="f\d+"[^>]* width="([0-9.]+)"', first[0])]
    load, capacity = report.ledger.accelerators[0].loads[0], report.ledger.accelerators[0].capacity_bytes
    assert sum(widths) == pytest.approx(1000 * load.total_bytes / capacity, abs=1)


def test_many_kinds_of_accelerator_end_somewhere() -> None:
    nodes = [H100 | {"accelerators": 1, "memory": f"{80 + i}GiB"} for i in range(14)]
    report = ppo({"actor": "all", "env": "all", "rollout": "all"}, nodes=nodes, envs=28, accelerator={"kind": "auto"})
    assert "and 2 more kinds of accelerator" in " ".join(read(render_html(report)).text)


def test_names_are_escaped() -> None:
    assert "<b>x" not in render_html(llm({"actor": "0-7", "rollout": "0-7", "reward.<b>x": "0-7"}, name="<i>y"))
