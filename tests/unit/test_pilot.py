"""The search beside a run and the words of the pilot: which placements it considers, what it says, what is refused."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlplace.config import compose
from rlplace.config.compose import with_hydra
from rlplace.contract.reading import try_job
from rlplace.errors import ConfigError
from rlplace.foresight.probe import changed
from rlplace.runtime import pilot
from rlplace.runtime.changes import differing
from rlplace.runtime.launched import job_spec
from rlplace.runtime.pilot import Pilot, advice, as_change, words_of
from rlplace.runtime.prepare import Prepared, prepare, prepare_composed
from rlplace.runtime.replace import PlanFrom
from rlplace.runtime.search_beside import (
    Reply,
    Request,
    SearchFailed,
    SearchProcess,
    key_of,
    request_of,
    searched,
)
from tests.foresight_profiles import usual_profile

# The whole of a value of `cluster.elastic` -> its mode
WORDS = {
    "on": "on",
    "off": "off",
    "advise": "advise",
    "true": "on",
    "false": "off",
    "{mode: advise, every: 5}": "advise",
}


def job(*words: str) -> Prepared:
    (composed,) = with_hydra(["--config-name", "hybrid_ppo", *words])
    return prepare_composed(composed)


@functools.cache
def shipped() -> Mapping[str, Any]:
    (composed,) = with_hydra(["--config-name", "hybrid_ppo"])
    return composed.mapping


@pytest.mark.parametrize(("written", "mode"), WORDS.items())
def test_a_plain_word_stands_for_the_block(written: str, mode: str) -> None:
    """A file of YAML reads on and off as true and false."""
    cluster = {**shipped()["cluster"], "elastic": yaml.safe_load(written)}
    config, wrong = try_job({**shipped(), "cluster": cluster}, {})
    assert wrong == []
    assert config is not None
    assert config.cluster.elastic.mode == mode


def test_a_plain_word_may_be_an_override() -> None:
    assert job("cluster.elastic=on").config.cluster.elastic.mode == "on"


CHANGE = "cluster.changes=[{after: 5, component_placement: {env: 0-7}}]"


@pytest.mark.parametrize(
    ("words", "key", "code", "fix"),
    [
        (
            ["cluster.elastic=onn"],
            "mode",
            "unknown-choice",
            "mode: on",
        ),
        (
            ["cluster.elastic=on", CHANGE],
            "mode",
            "bad-elastic",
            "mode: off        (or remove cluster.changes)",
        ),
        (
            ["cluster.elastic=advise", "runner.total_iterations=10"],
            "warmup",
            "bad-elastic",
            "runner.total_iterations: 11        (or more; or mode: off)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(
    words: list[str], key: str, code: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        job(*words)
    (problem,) = refused.value.problems
    assert (problem.key, problem.code) == (f"cluster.elastic.{key}", code)
    assert problem.fix == fix


def test_a_run_without_a_search_may_have_changes_and_few_iterations() -> None:
    job("cluster.elastic=off", CHANGE, "runner.total_iterations=8")


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────────


SMALL = (
    "cluster.accelerators_per_node=2",
    "cluster.accelerator.kind=emulated",
    *(f"cluster.component_placement.{c}=0-1" for c in ("actor", "env", "rollout")),
)


def reply_of(made: Prepared, now: dict[str, Any], left: list[Any]) -> Reply:
    request = request_of(
        made.mapping,
        made.plan,
        usual_profile(),
        name="hybrid_ppo",
        now=now,
        left=left,
    )
    return searched(request)


@functools.cache
def first() -> tuple[Prepared, Reply]:
    """Return a small job, and the reply of its first search."""
    made = job(*SMALL)
    return made, reply_of(made, {}, [])


def test_a_search_changes_places_and_offloading_alone() -> None:
    made, found = first()
    assert found.options
    seconds = [option.seconds for option in found.options]
    assert seconds == sorted(seconds)
    for option in found.options:
        other = prepare(changed(made.mapping, option.changes))
        assert other.fits
        assert key_of(other.plan) == option.key != key_of(made.plan)
        assert option.moves == differing(made.plan, other.plan)
        before = {**made.mapping, "cluster": None}
        after = {**other.mapping, "cluster": None}
        for block in ("actor", "env", "rollout"):
            for of in (before, after):
                of[block] = {**of[block], "enable_offload": None}
        assert after == before
        cluster = {"component_placement": None, "allow_resident": None}
        assert {**other.mapping["cluster"], **cluster} == {
            **made.mapping["cluster"],
            **cluster,
        }


def test_the_present_placement_is_no_option_and_those_that_were_left_are_predicted() -> (
    None
):
    made, before = first()
    best = before.options[0]
    again = reply_of(made, dict(best.changes), [{}])
    assert again.now_s == pytest.approx(best.seconds)
    assert best.key not in [option.key for option in again.options]
    # The config's own placement was left; the work is measured by it, whatever holds now
    assert again.left_s == [pytest.approx(before.now_s)]
    assert again.work == pytest.approx(before.work)
    assert sum(again.work.values()) == pytest.approx(before.now_s, rel=0.05)


def finished(process: SearchProcess, request: Request) -> Reply:
    process.ask(request)
    until = time.monotonic() + 120.0
    while (found := process.reply()) is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_search_in_its_own_process_gives_the_same_reply() -> None:
    made, here = first()
    request = request_of(
        made.mapping,
        made.plan,
        usual_profile(),
        name="hybrid_ppo",
        now={},
        left=[],
    )
    process = SearchProcess(0.5)
    # The process stays for the next request
    for _ in range(2):
        there = finished(process, request)
        assert [o.key for o in there.options] == [o.key for o in here.options]
        assert there.now_s == pytest.approx(here.now_s)
    process.close()


@pytest.mark.slow
def test_a_search_that_fails_gives_the_reason_and_the_next_one_may_work() -> None:
    made, _ = first()
    request = request_of(
        made.mapping,
        made.plan,
        usual_profile(),
        name="hybrid_ppo",
        now={},
        left=[],
    )
    wrong = dataclasses.replace(request, mapping={**made.mapping, "env": {}})
    process = SearchProcess(1.0)
    with pytest.raises(SearchFailed, match="residents-clash"):
        finished(process, wrong)
    assert finished(process, request).now_s > 0.0
    process.close()


@pytest.mark.slow
def test_a_search_whose_process_ends_fails_and_the_next_one_has_another() -> None:
    made, _ = first()
    request = request_of(
        made.mapping,
        made.plan,
        usual_profile(),
        name="hybrid_ppo",
        now={},
        left=[],
    )
    process = SearchProcess(1.0)
    process.ask(request)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    with pytest.raises(SearchFailed, match="exit code -9"):
        process.reply()
    assert finished(process, request).now_s > 0.0
    process.close()


def test_a_search_that_takes_too_long_is_ended() -> None:
    made, _ = first()
    request = request_of(
        made.mapping,
        made.plan,
        usual_profile(),
        name="hybrid_ppo",
        now={},
        left=[],
    )
    process = SearchProcess(0.1)
    process.ask(dataclasses.replace(request, seconds=0.0))
    running = process._process
    assert running is not None
    with pytest.raises(SearchFailed, match="took too long"):
        process.reply()
    assert running.returncode == -signal.SIGKILL
    process.close()


def test_a_process_uses_at_most_its_share_of_a_core() -> None:
    program = (
        "import time; from rlplace.cores import use_at_most; use_at_most(0.25); began = time.monotonic();\n"
        "while time.process_time() < 0.3: pass\n"
        "print((time.process_time()) / (time.monotonic() - began))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert float(done.stdout) < 0.5


# ── the pilot ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Asked:
    """A process of searches that never replies. `requests`: all that were asked."""

    def __init__(self, share: float) -> None:
        self.requests: list[Request] = []
        self.closed = 0

    def ask(self, request: Request) -> None:
        self.requests.append(request)

    def reply(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


def plan_from(made: Prepared) -> PlanFrom:
    return PlanFrom(after=0, job=job_spec(made.config, made.plan), view=made.view)


def at_work(plan: PlanFrom, seconds: Sequence[float]) -> Any:
    """Return a stand-in for a launched plan with these measured seconds of iterations."""
    observed = SimpleNamespace(
        series=lambda metric: tuple(seconds), profile=lambda recent: usual_profile()
    )
    return SimpleNamespace(job=plan.job, observed=observed)


def test_a_change_by_the_user_is_followed_with_a_new_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot, "SearchProcess", Asked)
    made = job(*SMALL, "cluster.elastic={mode: on, warmup: 4, every: 1}")
    start = plan_from(made)
    found = Pilot(start.job, start.view, made.mapping, tmp_path, lambda line: None)
    process: Any = found._process
    for _ in range(8):
        assert found.due(at_work(start, [1.0] * 4), start) is None
    (request,) = process.requests
    assert (request.now, request.left) == ({}, [])
    there = plan_from(job(*SMALL, "cluster.component_placement.env=0"))
    # The reply would be about the placement before
    for asked in (1, 1, 1, 1, 2):
        assert found.due(at_work(there, [1.0] * 4), there) is None
        assert len(process.requests) == asked
    assert process.closed == 1
    assert process.requests[-1].now == {"cluster.component_placement.env": "0"}


def test_too_few_measured_iterations_start_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot, "SearchProcess", Asked)
    made = job(*SMALL, "cluster.elastic={mode: on, warmup: 4, every: 1}")
    start = plan_from(made)
    found = Pilot(start.job, start.view, made.mapping, tmp_path, lambda line: None)
    process: Any = found._process
    for _ in range(8):
        assert found.due(at_work(start, [1.0] * 3), start) is None
    assert process.requests == []


def test_a_placement_on_a_drained_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot, "SearchProcess", Asked)
    joined = ("cluster.num_nodes=2", "cluster.ray.address=auto")
    made = job(*SMALL, *joined, "cluster.elastic=on")
    start = plan_from(made)
    found = Pilot(start.job, start.view, made.mapping, tmp_path, lambda line: None)
    there = {"cluster.component_placement.env": "2-3"}
    assert isinstance(found._planned(start, there), PlanFrom)
    found.barred = frozenset({1})
    assert found._planned(start, there) == "node 1 was drained"


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_changes_are_words_that_can_be_pasted() -> None:
    changes = {
        "cluster.component_placement.env": "0-7",
        "actor.enable_offload": False,
        "cluster.allow_resident": ["actor", "env"],
    }
    words = words_of(changes)
    assert words.split(" ", 2)[0] == 'cluster.component_placement.env="0-7"' or (
        words.split(" ", 2)[0] == "'cluster.component_placement.env=\"0-7\"'"
    )
    assert "actor.enable_offload=false" in words
    assert words_of({"cluster.component_placement.env": None}) == (
        "~cluster.component_placement.env"
    )


def test_a_change_of_places_alone_is_also_an_entry_of_cluster_changes() -> None:
    changes = {"cluster.component_placement.env": "0-7"}
    written = as_change(changes, 30)
    assert written is not None
    (composed,) = compose.with_hydra(
        ["--config-name", "hybrid_ppo", written.strip("'")]
    )
    (planned,) = prepare_composed(composed).changes
    assert planned.after == 30
    assert as_change({**changes, "actor.enable_offload": False}, 30) is None


def test_advice_has_gain_cost_pay_back_and_confidence() -> None:
    event = {
        "iteration": 30,
        "moved": {"env": ["0-3", "0-7"]},
        "measured": {"before": 1.2},
        "expected_s": 0.84,
        "gain": 0.3,
        "model_error": 0.021,
        "noise": 0.004,
        "cost_s": 6.3,
        "cost": "predicted",
        "pays_back": 17.5,
    }
    lines = advice(event, {"cluster.component_placement.env": "0-7"}).splitlines()
    assert lines[0] == "elastic, after iteration 30: env 0-3 -> 0-7"
    assert lines[1].startswith("  an iteration takes 1.2 s, and would take 0.84 s: -30")
    assert "the model is off by 2.1%, the noise is 0.4%" in lines[1]
    assert lines[2] == (
        "  a change costs 6.3 s (predicted), and pays back in 18 iterations"
    )
    assert len(lines) == 5
