"""The page stands alone: well-formed, without requests or scripts, and says what the text says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from rlplace.placement.show.html import render_html
from rlplace.placement.show.view import PlanView
from tests.unit.placement.reports import APART, H100, SIX, llm, ppo
from tests.unit.placement.test_picture import REPORTS, report_of


def read(page: str) -> ET.Element:
    """Parse a page, whose elements nest; `meta` alone has no end."""
    return ET.fromstring(re.sub("(<meta[^>]*)>", r"\1/>", page))


def texts(view: PlanView) -> list[str]:
    return list(read(render_html(view)).itertext())


@pytest.mark.parametrize("name", REPORTS)
def test_every_page_is_well_formed_and_asks_for_nothing(name: str) -> None:
    page = render_html(report_of(name))
    elements = list(read(page).iter())
    assert {e.tag.rpartition("}")[2] for e in elements}.isdisjoint(
        {"script", "link", "img", "iframe", "object"}
    )
    assert not [e for e in elements if {"href", "src"} & set(e.attrib)]
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_the_verdict_comes_first() -> None:
    fits, short, unknown = map(
        texts,
        (report_of("six"), report_of("too-large"), ppo(nodes=[{"accelerators": 8}])),
    )
    assert "fits" in fits
    assert "does not fit" in short
    assert "fits" in unknown, "the emulated accelerators of a config have a size"
    for view in (
        ppo(nodes=[{"accelerators": 8}], accelerator={"kind": "auto"}),
        llm(model=None),
    ):
        assert "memory not known" in texts(view)


def test_numbers_at_the_top() -> None:
    words = " ".join(texts(ppo()))
    assert "8 accelerators" in words
    assert "each component on its own would use 16" in words
    assert "256 MiB of 16 GiB" in words
    assert "8 moves" in words
    apart = " ".join(texts(ppo(APART)))
    assert "no component shares any" in apart
    assert "every component stays where it is" in apart


def test_problems_and_warnings_have_their_fix() -> None:
    words = " ".join(texts(report_of("too-large")))
    assert "does-not-fit" in words
    assert "fix: actor.micro_batch" in words
    assert "no component uses accelerators 5-7" in " ".join(texts(report_of("idle")))


def test_bars_are_as_long_as_what_is_held() -> None:
    report = llm(dict.fromkeys(SIX, "0-7"))
    bars = [e for e in read(render_html(report)).iter() if e.get("class") == "bar"]
    assert len(bars) == sum(
        len(account.loads) for account in report.ledger.accelerators
    )
    widths = [
        float(r.get("width", 0)) for r in bars[0] if r.get("class", "").startswith("f")
    ]
    load, capacity = (
        report.ledger.accelerators[0].loads[0],
        report.ledger.accelerators[0].capacity_bytes,
    )
    assert sum(widths) == pytest.approx(1000 * load.total_bytes / capacity, abs=1)


def test_many_kinds_of_accelerator_end_somewhere() -> None:
    nodes = [H100 | {"accelerators": 1, "memory": f"{80 + i}GiB"} for i in range(14)]
    report = ppo(
        {"actor": "all", "env": "all", "rollout": "all"},
        nodes=nodes,
        envs=28,
        accelerator={"kind": "auto"},
    )
    assert "and 2 more kinds of accelerator" in " ".join(texts(report))


def test_names_are_escaped() -> None:
    assert "<b>x" not in render_html(
        llm({"actor": "0-7", "rollout": "0-7", "reward.<b>x": "0-7"}, name="<i>y")
    )
