"""Calls -> the picture of an iteration."""

from __future__ import annotations

import re
import xml.etree.ElementTree

import pytest

from rlplace.report.calls import StageTime
from rlplace.report.timeline import render_timeline
from rlplace.report.utilisation import Usage
from tests.iterations import BEGAN_S, call, iteration, slot, spans

COMPONENTS = ["actor", "env", "rollout"]


def boxes(picture: str) -> list[tuple[str, float, float, float, str]]:
    """Look, x, y, width and title of each box."""
    pattern = r'<rect class="([^"]*)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"[^>]*><title>([^<]*)'
    return [
        (look, float(x), float(y), float(w), title)
        for look, x, y, w, title in re.findall(pattern, picture)
    ]


def test_work_is_drawn_when_it_was_and_waiting_light() -> None:
    made, at = iteration(0), slot("env", 0, [0])
    made.calls = [
        call(at, "move full", "rollout", 0.1, 0.2),
        call(
            at,
            "run",
            "rollout",
            0.2,
            0.6,
            spans(0.2, ("sim", 0.3), ("wait", 0.5), ("sim", 0.6)),
        ),
    ]
    picture = render_timeline([made], [0], COMPONENTS)
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")
    assert boxes(picture) == [
        ("moves", 158.0, 118.0, 86.0, "env rank 0: move full, 0.1 s"),
        ("f1 wait", 244.0, 118.0, 344.0, "env rank 0: run, 0.4 s, 0.2 s at work"),
    ]
    (outline,) = re.findall(
        r'<path class="f1" transform="matrix\(1.000 [^)]*244.00 140.00\)" d="([^"]*)"',
        picture,
    )
    assert outline == "M0 0v8h86v-8h172v8h86v-8z"


def test_columns_are_as_high_as_the_share_of_work_where_laps_are_shorter_than_a_pixel() -> (
    None
):
    made, at = iteration(0), slot("env", 0, [0])
    cuts = [
        ("sim" if n % 4 == 0 else "wait", 0.2 + (n + 1) * 0.4 / 40_000)
        for n in range(40_000)
    ]
    made.calls = [call(at, "run", "rollout", 0.2, 0.6, spans(0.2, *cuts))]
    picture = render_timeline([made], [0], COMPONENTS)
    assert 'd="M0 0v2h344v-2z"' in picture
    assert len(picture) < 6_000


def test_components_that_are_at_work_at_once_divide_the_row() -> None:
    made = iteration(0)
    made.calls = [
        call(slot("env", 0, [0]), "run", "rollout", 0.2, 0.4),
        call(slot("rollout", 0, [0, 1]), "generate", "rollout", 0.3, 0.6),
        call(slot("actor", 0, [0]), "learn", "learn", 0.7, 0.9),
    ]
    found = {
        (title.partition(":")[0], y)
        for _, _, y, _, title in boxes(render_timeline([made], [0, 1], COMPONENTS))
    }
    assert found == {
        ("env rank 0", 118),
        ("rollout rank 0", 129),
        ("actor rank 0", 118),
        ("rollout rank 0", 145),
    }


def test_it_is_the_last_iteration_that_learned_or_the_first_where_generation_runs_ahead() -> (
    None
):
    first, second, evaluated = (
        iteration(2, index=0),
        iteration(2, index=1),
        iteration(2, index=2),
    )
    for made in (second, evaluated):
        made.began_s += 1.0
        made.stages = [
            s._replace(began_s=s.began_s + 1, ended_s=s.ended_s + 1)
            for s in made.stages
        ]
        made.calls = []
    generated = call(slot("rollout", 0, [0]), "generate", "learn", 1.2, 1.9)
    learned = call(slot("actor", 0, [1]), "learn", "learn", 1.8, 1.9)
    second.calls = [learned, generated]
    assert "iteration 2: 1 s" in render_timeline(
        [first, second, evaluated], [0, 1], COMPONENTS
    )
    second.calls = [learned, generated._replace(record=first.calls[3].record)]
    assert "iteration 1: 1 s" in render_timeline([first, second], [0, 1], COMPONENTS)


def test_sending_weights_is_drawn_as_sync_in_a_stage_of_any_name() -> None:
    usage = Usage({"actor": [(0,)]})
    usage.stage_ended("send", moves_s=0.0, seconds=0.1, sync_s=0.1)
    usage.stage_ended("learn", moves_s=0.0, seconds=0.9, sync_s=0.2)
    usage.iteration_ended(1.0)
    made, at = iteration(0), slot("actor", 0, [0])
    made.uses = usage.last
    made.stages = [
        StageTime("send", BEGAN_S, BEGAN_S + 0.1),
        StageTime("learn", BEGAN_S + 0.1, BEGAN_S + 1.0),
    ]
    made.calls = [
        call(at, "push_weights", "send", 0.0, 0.1),
        call(at, "push_weights", "learn", 0.1, 0.3, spans(0.1, ("wait", 0.2))),
        call(at, "learn", "learn", 0.3, 1.0),
    ]
    picture = render_timeline([made], [0], COMPONENTS)
    stages = dict(re.findall(r'<path class="(sync|idle)"[^>]*><title>(\w+)', picture))
    assert stages == {"sync": "send", "idle": "learn"}
    assert [(look, title) for look, *_, title in boxes(picture)] == [
        ("sync", "actor rank 0: push_weights, 0.2 s"),
        ("f0", "actor rank 0: learn, 0.7 s"),
    ]


@pytest.mark.parametrize("accelerators", [8, 512])
def test_a_picture_stays_small_however_many_laps_there_are(accelerators: int) -> None:
    made = iteration(accelerators, laps=2000)
    picture = render_timeline(
        [made], range(accelerators), COMPONENTS, "hybrid", scale=50.0
    )
    assert len(picture) < 300_000
    assert "hybrid: 50 s" in picture
    assert ("32 of 512 accelerators are drawn" in picture) == (accelerators == 512)
    assert f"rollout rank {accelerators // 2}: run" in picture
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")


def test_of_many_accelerators_every_component_is_drawn() -> None:
    made = iteration(0)
    made.calls = [
        call(slot("actor", 0, list(range(300))), "learn", "learn", 0.7, 0.9),
        call(slot("reward", 0, [7]), "score", "rollout", 0.2, 0.6),
        call(slot("critic", 0, [511]), "learn", "learn", 0.7, 0.9),
    ]
    picture = render_timeline([made], range(512), ["actor", "reward", "critic"])
    numbers = [int(n) for n in re.findall(r'x="60" [^>]*>(\d+)<', picture)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= 32
    assert {0, 7, 8, 300, 511} <= set(numbers)
    assert {title.partition(":")[0] for *_, title in boxes(picture)} == {
        "actor rank 0",
        "reward rank 0",
        "critic rank 0",
    }
