"""`cluster.elastic`: a run that searches beside its iterations, and advises, changes, keeps and goes back."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli.plan import main as plan
from rlplace.cli.train import main as train
from rlplace.foresight.decide import Case, Decision, Verdict
from rlplace.runtime import pilot
from rlplace.runtime.pilot import FILE
from rlplace.runtime.search_beside import Option, Reply, Request
from tests.e2e.test_resume import ONE_EACH, numbers
from tests.e2e.training import train as train_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
cluster:
  launcher: inline
  accelerators_per_node: 8
  accelerator: {kind: emulated}
  component_placement: {actor: 0-3, rollout: 4-5, scorer: 6-7}
  elastic: {warmup: 10, every: 5, pay_back: 30, share: 1.0}
actor: {memory: {full: 9GiB}}
rollout: {memory: {full: 9GiB}}
scorer: {memory: {full: 9GiB}}
runner: {sinks: [jsonl]}
"""


class Run:
    """A finished run: what it printed, and what is in its folder."""

    def __init__(self, folder: Path, job: str, mode: str, iterations: int) -> None:
        file = folder / "elastic.yaml"
        text = f"job: tests.e2e.elastic_job:{job}{CONFIG}"
        file.write_text(text, encoding="utf-8")
        self.words = [
            str(file),
            f"runner.output_dir={folder / 'runs'}",
            f"runner.total_iterations={iterations}",
            f"cluster.elastic.mode={mode}",
        ]
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            self.code = train(self.words)
        self.out = told.getvalue()
        (self.folder,) = (folder / "runs").glob("*/*/")

    @property
    def summary(self) -> Any:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self.folder / FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def decided(self, *decisions: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["decision"] in decisions]

    @property
    def seconds(self) -> Sequence[float]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["time/iteration_s"] for line in lines]


def test_a_run_whose_generation_grows_moves_ranks_to_it_and_is_faster(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "GROWING", "on", 110)
    assert run.code == 0, run.out
    change, keep = run.decided("change", "keep", "back", "refused", "failed")
    assert (change["decision"], keep["decision"]) == ("change", "keep")
    moved = change["moved"]
    assert (moved["actor"], moved["rollout"]) == (["0-3", "4-5"], ["4-5", "0-3"])
    # Predicted and measured, before and after
    for event in (change, keep):
        assert set(event["predicted"]) == {"before", "after"}
    assert keep["predicted"]["after"] == pytest.approx(0.4, rel=0.15)
    assert keep["measured"]["after"] == pytest.approx(0.4, rel=0.15)
    assert keep["measured"]["before"] == pytest.approx(0.6, rel=0.15)
    at = change["iteration"]
    before_s = statistics.median(run.seconds[at - 5 : at])
    after_s = statistics.median(run.seconds[at + 3 :])
    assert after_s < 0.8 * before_s
    elastic = run.summary["elastic"]
    assert [event["decision"] for event in elastic["events"]] == ["change", "keep"]
    assert elastic["searches"] > 1
    assert [c["after"] for c in run.summary["changes"]] == [at]
    assert f"after {at}: change: actor 0-3 -> 4-5, rollout 4-5 -> 0-3" in " ".join(
        run.out.split()
    )


def test_a_change_that_was_wrong_is_taken_back_and_not_made_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "CROWDED", "on", 110)
    assert run.code == 0, run.out
    change, back = run.decided("change", "keep", "back", "refused", "failed")[:2]
    assert (change["decision"], back["decision"]) == ("change", "back")
    assert change["predicted"]["after"] < 0.7 * change["predicted"]["before"]
    assert back["measured"]["after"] > 1.5 * back["measured"]["before"]
    there, again = run.summary["changes"][:2]
    assert (there["kept"], again["kept"]) == ("", "")
    assert again["moved"] == {c: move[::-1] for c, move in there["moved"].items()}
    tried = [event["moved"] for event in run.decided("change")]
    assert tried.count(change["moved"]) == 1
    last_s = statistics.median(run.seconds[-10:])
    assert last_s < 0.8 * back["measured"]["after"]


def test_work_that_stays_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "STEADY", "on", 110)
    assert run.code == 0, run.out
    assert {event["decision"] for event in run.events} == {"stay"}
    assert "changes" not in run.summary
    (stay, *_) = run.events
    assert stay["model_error"] < 0.1
    assert "1 search" in run.out or "searches beside the run" in run.out


def test_advice_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, "GROWING", "advise", 110)
    assert run.code == 0, run.out
    assert "changes" not in run.summary
    advised = run.decided("advise")
    assert advised
    lines = run.out.splitlines()
    # Told once, however often it is found
    (from_start,) = [line for line in lines if line.startswith("  from the start: ")]
    (during,) = [line for line in lines if line.startswith("  or from now on: ")]
    words = shlex.split(from_start.removeprefix("  from the start: "))
    off = "cluster.elastic=off"
    assert plan([*run.words, off, *words]) == 0
    assert "rollout 4 1 accelerator 0-3" in " ".join(capsys.readouterr().out.split())
    changes = shlex.split(during.removeprefix("  or from now on: "))
    assert plan([*run.words, off, *changes]) == 0


def test_a_change_of_the_pilot_has_the_numbers_of_a_change_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search and the rule are stand-ins: what is tested is the change, and one that is refused before it."""
    place = "cluster.component_placement.env"

    class Ready:
        """A search that has ended at once, with a placement that cannot be planned, and with another one."""

        def __init__(self, share: float) -> None:
            self.left: Sequence[object] = ()

        def ask(self, request: Request) -> None:
            self.left = request.left

        def reply(self) -> Reply:
            options = [
                Option(
                    changes={place: where},
                    moves={"env": ("0", where)},
                    seconds=0.1,
                    key=where,
                )
                for where in ("1-3", "2-3")
            ]
            return Reply(
                now_s=1.0,
                work={"rollout": 1.0},
                options=options,
                left_s=[1.0 for _ in self.left],
                proven=True,
                took_s=0.0,
                cpu_s=0.0,
            )

        def close(self) -> None:
            pass

    def choose(case: Case) -> Decision:
        stays = case.left is not None
        return Decision(
            verdict=Verdict.STAY if stays else Verdict.CHANGE,
            why="for a test",
            gain=0.9,
            expected_s=0.1,
            error=0.02,
            pays_back=1.0,
        )

    monkeypatch.setattr(pilot, "SearchProcess", Ready)
    monkeypatch.setattr(pilot, "decide", choose)
    words = [*ONE_EACH, "runner.total_iterations=12", "runner.seed=5"]
    elastic = "cluster.elastic={mode: on, warmup: 4, every: 1}"
    run = train_of("hybrid_ppo", tmp_path / "pilot", *words, elastic)
    assert run.code == 0, run.err
    refused, change = run.summary()["elastic"]["events"][:2]
    assert (refused["decision"], change["decision"]) == ("refused", "change")
    assert "16 environments do not divide" in refused["why"]
    (done,) = run.summary()["changes"]
    assert done["moved"] == {"env": ["0", "2-3"]}
    move = f"{{after: {done['after']}, component_placement: {{env: 2-3}}}}"
    changes = f"cluster.changes=[{move}]"
    expected = train_of("hybrid_ppo", tmp_path / "config", *words, changes)
    assert expected.code == 0, expected.err
    assert numbers(run) == numbers(expected)
