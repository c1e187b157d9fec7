"""The picture: well-formed, every resident named and described, nothing outside of its page, whatever the plan."""

from __future__ import annotations

import functools
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rlplace.placement.show.drawing import PALETTE, width_of
from rlplace.placement.show.svg import WIDTH, render_svg
from rlplace.placement.show.view import PlanView
from tests.unit.placement.reports import APART, H100, SIX, llm, ppo, shown

SVG = "{http://www.w3.org/2000/svg}"
FOLDED = {"actor": "all", "env": "0-127", "rollout": "128-511"}
CLUSTER: dict[str, Any] = {"accelerator": {"kind": "auto"}}
# Made when a test asks: each process of a run of all tests reads this file, and one of them tests it.
REPORTS: dict[str, Callable[[], PlanView]] = {
    "hybrid": partial(ppo),
    "apart": partial(ppo, APART),
    "idle": partial(ppo, {"actor": "0-1", "env": "2", "rollout": "3-4"}),
    "one": partial(
        ppo, {"actor": "0", "env": "0", "rollout": "0"}, nodes=[{"accelerators": 1}]
    ),
    "uneven": partial(
        ppo,
        {"actor": "0-13", "env": "0-3", "rollout": "4-13"},
        nodes=[{"accelerators": n} for n in (4, 8, 2)],
        envs=560,
    ),
    "folded": partial(ppo, FOLDED, nodes=[H100 | {"count": 64}], envs=4096, **CLUSTER),
    "many-nodes": partial(
        llm,
        {
            "actor": "0-831",
            "reward.math": "1016-1019",
            "reward.code": "1020-1023",
            "rollout": "0-511,832-1015",
        },
        cluster={"nodes": [H100 | {"count": 128}]},
    ),
    "too-large-at-the-edge": partial(
        llm,
        {"actor": "0", "rollout": "1"},
        cluster={"nodes": [H100 | {"memory": "20GiB"}]},
    ),
    "several-kinds": partial(
        llm,
        {
            "actor": "0-15",
            "critic": "16-23",
            "reference": "0-47",
            "reward": "24-31",
            "rollout": "0-47",
        },
        cluster={
            "nodes": [H100 | {"accelerators": count} for count in (8, 4, 8, 4, 8, 8, 8)]
        },
    ),
    "on-nodes": partial(
        llm,
        {
            "actor": "0-7",
            "rollout": "0-7",
            "agent": {"node_group": "node", "placement": 0},
        },
    ),
    "six": partial(llm),
    "turns": partial(
        llm, dict.fromkeys(("actor", "critic", "reference", "reward", "rollout"), "0-7")
    ),
    "crowded": partial(
        llm,
        cluster={"allow_resident": [*SIX]},
        **{c.partition(".")[0]: {"enable_offload": False} for c in SIX},
    ),
    "six-without-memory": partial(llm, model=None),
    "too-large": partial(
        llm,
        dict.fromkeys(SIX, "0-7"),
        actor={"enable_offload": True, "micro_batch": 64},
    ),
}


@functools.cache
def report_of(name: str) -> PlanView:
    return REPORTS[name]()


def drawn(report: PlanView) -> ET.Element:
    return ET.fromstring(render_svg(report))


def size_of(text: ET.Element) -> float:
    return float(
        (
            re.search(r"font-size:([0-9.]+)px", text.attrib.get("style", ""))
            or [0, "12"]
        )[1]
    )


def span_of(text: ET.Element) -> tuple[float, float]:
    """The columns of a text that is not turned, by its estimated width."""
    bold = bool({"name", "alarm"} & {*text.attrib.get("class", "").split()})
    width = (
        0.0
        if "transform" in text.attrib
        else width_of("".join(text.itertext()), size_of(text), bold=bold) * 0.9
    )
    before = {"start": 0.0, "middle": width / 2, "end": width}[
        text.attrib.get("text-anchor", "start")
    ]
    return float(text.attrib["x"]) - before, float(text.attrib["x"]) - before + width


@pytest.mark.parametrize("name", ["folded", "many-nodes", "uneven"])
def test_labels_of_nodes_run_neither_into_the_blocks_nor_into_numbers(
    name: str,
) -> None:
    picture = drawn(report_of(name))
    first = min(
        float(r.attrib["x"])
        for g in picture.iter(f"{SVG}g")
        for r in g.iter(f"{SVG}rect")
    )
    labels = [
        t
        for t in picture.findall(f"{SVG}text")
        if float(t.attrib["x"]) < first and float(t.attrib["y"]) > 200
    ]
    for text in labels:
        assert span_of(text)[1] <= first
    for a, b in itertools.combinations(labels, 2):
        if a.attrib["y"] == b.attrib["y"]:
            assert span_of(a)[1] <= span_of(b)[0] or span_of(b)[1] <= span_of(a)[0]


def titles(picture: ET.Element) -> list[str]:
    return [t.text or "" for t in picture.iter(f"{SVG}title")]


@pytest.mark.parametrize("name", REPORTS)
def test_blocks_lie_on_the_page_and_say_what_they_are(name: str) -> None:
    picture = drawn(report_of(name))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for rect in picture.iter(f"{SVG}rect"):
        x, y, w, h = (
            float(rect.attrib.get(k, 0)) for k in ("x", "y", "width", "height")
        )
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 0 < float(text.attrib["y"]) < height
        assert 0 <= span_of(text)[0] <= span_of(text)[1] <= width
    plan = report_of(name).plan
    words = " ".join(picture.itertext())
    for stage in plan.schedule.stages:
        assert stage in words
    for component in plan.placement.components:
        assert (
            any(t.startswith(f"{component} on ") for t in titles(picture))
            or f"{component} is on nodes" in words
        )


@pytest.mark.parametrize("name", REPORTS)
def test_no_text_runs_into_another_or_into_a_block_that_is_not_its_own(
    name: str,
) -> None:
    picture = drawn(report_of(name))
    texts = [
        (t, *span_of(t))
        for t in picture.iter(f"{SVG}text")
        if "transform" not in t.attrib
    ]
    boxes = [
        (t, left, float(t.attrib["y"]) - 0.7 * size_of(t), right, float(t.attrib["y"]))
        for t, left, right in texts
    ]
    for (a, *first), (b, *second) in itertools.combinations(boxes, 2):
        assert apart(first, second), ("".join(a.itertext()), "".join(b.itertext()))
    own = {t: g for g in picture.iter(f"{SVG}g") for t in g.iter(f"{SVG}text")}
    for group in picture.iter(f"{SVG}g"):
        (rect,) = group.iter(f"{SVG}rect")
        x, y, width, height = (
            float(rect.attrib[k]) for k in ("x", "y", "width", "height")
        )
        frame = rect.attrib["class"] == "over"  # around blocks
        for text, *box in boxes:
            alarm = "alarm" in text.attrib["class"]
            assert (
                own.get(text) is group
                or frame
                or apart([x, y, x + width, y + height], box)
            ), text.attrib
            if own.get(text) is group:
                assert x - 1 <= box[0] <= box[2] <= x + width + 1
                assert (box[3] <= y) is alarm


def apart(a: list[float], b: list[float]) -> bool:
    """Whether two boxes (left, top, right, bottom) have no point in common, but for a pixel."""
    return a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 1 or b[3] <= a[1] + 1


@pytest.mark.parametrize(
    "name",
    ["several-kinds", "many-nodes", "six", "crowded", "turns", "too-large-at-the-edge"],
)
def test_every_block_shows_the_bytes_it_holds_however_many_kinds_of_node_there_are(
    name: str,
) -> None:
    for group in drawn(report_of(name)).iter(f"{SVG}g"):
        held = re.search(r": (\S+ [KMGT]iB) on each", group.findtext(f"{SVG}title", ""))
        assert held is None or held[1] in " ".join(
            t for text in group.iter(f"{SVG}text") for t in text.itertext()
        )


def test_a_component_without_accelerators_has_a_block_in_every_stage() -> None:
    report = report_of("on-nodes")
    found = [t for t in titles(drawn(report)) if t.startswith("agent on node 0, ")]
    looks = ["waits", "full", "waits", "waits"]
    assert found == [
        f"agent on node 0, {look} in {s.name}"
        for look, s in zip(looks, report.stages, strict=True)
    ]


def test_names_do_not_run_into_the_title() -> None:
    """Components beside the title where there is room, else in lines of their own."""
    for name, beside in (("hybrid", True), ("crowded", False)):
        picture = drawn(report_of(name))
        dots = [
            r
            for r in picture.iter(f"{SVG}rect")
            if r.attrib.get("rx") == "4" and float(r.attrib["y"]) < 110
        ]
        assert len(dots) == len(report_of(name).plan.placement.components)
        assert all((float(d.attrib["x"]) > 300) is beside or not beside for d in dots)
        assert {float(d.attrib["y"]) < 60 for d in dots} == {beside}


def test_a_block_tells_what_it_holds() -> None:
    assert (
        "env on 0\u20133, node 0, full in rollout: 256 MiB on each accelerator"
        in titles(drawn(report_of("hybrid")))
    )
    assert "256 MiB" in " ".join(drawn(report_of("hybrid")).itertext())
    assert "MiB" not in " ".join(
        ET.fromstring(render_svg(shown(report_of("hybrid").plan))).itertext()
    )


def test_what_does_not_fit_is_marked_where_and_when() -> None:
    picture = drawn(report_of("too-large"))
    assert any(t.endswith("of 76.8 GiB: does not fit") for t in titles(picture))
    assert (
        len([r for r in picture.iter(f"{SVG}rect") if r.attrib.get("class") == "over"])
        >= 1
    )
    assert not [
        r
        for r in drawn(report_of("six")).iter(f"{SVG}rect")
        if r.attrib.get("class") == "over"
    ]


def test_alike_nodes_are_one_picture_and_many_kinds_end_somewhere() -> None:
    words = [w.strip() for w in drawn(report_of("folded")).itertext()]
    assert "nodes 0-15" in words
    assert "48 \u00d7 0\u20137" in words
    sizes = [1 + i % 2 for i in range(60)]
    many = ppo(
        {"actor": "all", "env": "all", "rollout": "all"},
        nodes=[{"accelerators": n} for n in sizes],
        envs=2 * sum(sizes),
    )
    assert "and 36 more kinds of node" in " ".join(drawn(many).itertext())


def test_moves_stay_in_the_column_of_their_stage() -> None:
    picture = drawn(report_of("turns"))
    assert (
        float(picture.attrib["width"])
        > WIDTH
        == float(drawn(report_of("apart")).attrib["width"])
    )
    moves = [
        t for t in picture.iter(f"{SVG}text") if " \u2192 " in "".join(t.itertext())
    ]
    columns = sorted({float(t.attrib["x"]) for t in moves})
    assert (
        len(columns) == len(report_of("turns").plan.schedule.stages) - 1
    )  # nothing moves on entry to learn 1
    for text in moves:
        x = float(text.attrib["x"])
        following = next((c for c in columns if c > x), float(picture.attrib["width"]))
        assert x + width_of("".join(text.itertext())) < following


def test_text_stays_inside_of_narrow_blocks() -> None:
    """reward.math goes on two lines, reference is turned; none is wider than its block."""
    picture = drawn(report_of("crowded"))
    turned = [
        t
        for t in picture.iter(f"{SVG}text")
        if "rotate" in t.attrib.get("transform", "")
    ]
    words = ["".join(t.itertext()) for t in turned]
    assert {"reference full", "reference waits"} <= {
        " ".join(text.split()[:2]) for text in words
    }
    assert all(size_of(t) >= 10 for t in turned)
    for group in picture.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        for text in group.findall(f"{SVG}text"):
            if "transform" not in text.attrib:
                assert width_of("".join(text.itertext()), size_of(text) * 0.9) <= float(
                    rect.attrib["width"]
                )


def test_colours_repeat_where_there_are_more_components() -> None:
    names = {f"reward.r{i}": f"{i}" for i in range(len(PALETTE))}
    picture = drawn(
        llm(
            {"actor": "0-7", "rollout": "0-7", **names},
            cluster={"nodes": [H100 | {"accelerators": 16}]},
        )
    )
    assert len(titles(picture)) > len(PALETTE)


@pytest.mark.parametrize("name", ["a<b", 'a"b'])
def test_names_are_escaped(name: str) -> None:
    report = llm({"actor": "0-7", "rollout": "0-7", f"reward.{name}": "0-7"})
    assert any(name in t for t in titles(drawn(report)))
