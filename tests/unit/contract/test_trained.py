"""What a job of one's own has trained: found by its path, and refused where the job does not say how."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import yaml

import rlplace
from rlplace.checkpoints import report_written
from rlplace.checkpoints.store import Contents, Store
from rlplace.cli.evaluate import main as evaluate
from rlplace.cli.export import main as export
from rlplace.contract.job import Job
from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.contract.stages import Stage, full
from rlplace.contract.trained import find_trained
from rlplace.errors import ConfigError
from rlplace.trained import Trained
from rlplace.workers.worker import Worker


class Learner(Worker):
    """Learns nothing."""

    def learn(self, iteration: int) -> None:
        """Does nothing."""


class Told(Job):
    """Says how it is evaluated."""

    def evaluate(self, trained: Trained, request: EvaluationRequest) -> Evaluation:
        report = {"seed": request.seed, "rate": trained.config.settings["rate"]}
        return Evaluation(report=report, rows=[("rate", str(report["rate"]))])


STAGES = (Stage("learn", full("actor").calls("learn")),)
SILENT = Job(components={"actor": Learner}, stages=STAGES, name="silent")
TOLD = Told(components={"actor": Learner}, stages=STAGES, name="told")


def run_of(job: str, folder: Path) -> Path:
    """Return the folder of a run with one checkpoint of a job of this module."""
    config = {
        "job": f"{__name__}:{job}",
        "cluster": {"component_placement": {"actor": 0}},
        "rate": 3,
    }
    folder.mkdir()
    store = Store(folder, keep_last=1, keep_best=0)
    part = store.begin(2, ["actor"])
    (part / "actor" / "state").write_text("1", encoding="utf-8")
    report_written(part / "actor", 0, ["state"])
    contents = Contents(
        ranks={"actor": 1},
        texts={"config.yaml": yaml.safe_dump(config)},
        version=2,
        score=None,
        libraries={},
    )
    store.commit(part, contents, timeout_s=5.0, cancelled=threading.Event())
    return folder


def test_a_job_that_says_nothing_of_it_is_refused_by_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("SILENT", tmp_path / "run")
    assert evaluate([str(run)]) == 2
    told = capsys.readouterr().err
    assert "[not-evaluated]" in told
    assert "the job silent does not say how" in told
    assert export([str(run), str(tmp_path / "out")]) == 2
    assert "[not-exported]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError) as caught:
        rlplace.load_policy(run)
    assert caught.value.codes == ("not-loaded",)


def test_a_job_that_says_how_is_evaluated_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("TOLD", tmp_path / "run")
    assert evaluate([str(run), "seed=4"]) == 0
    assert capsys.readouterr().out == "rate     3\n"
    assert evaluate([str(run), "--format", "json", "seed=4"]) == 0
    assert '"seed": 4' in capsys.readouterr().out
    found = find_trained(run)
    assert found.text.startswith("after 2 iterations, policy version 2: ")


def test_a_folder_of_runs_means_the_run_that_saved_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "told"
    runs.mkdir()
    last = run_of("TOLD", runs / "b")
    # The manifests decide, neither the names nor the times of the folders.
    older = run_of("TOLD", runs / "c")
    manifest = older / "checkpoints" / "000002" / "manifest.json"
    saved = json.loads(manifest.read_text(encoding="utf-8"))
    saved["saved_at"] = "2026-01-01T00:00:00+00:00"
    manifest.write_text(json.dumps(saved), encoding="utf-8")

    assert find_trained(runs).checkpoint == find_trained(last).checkpoint
    assert find_trained(f"{runs}/").checkpoint == find_trained(last).checkpoint
    assert evaluate([str(runs)]) == 0
    assert capsys.readouterr().out == "rate     3\n"

    # The folder of all jobs is no folder of runs.
    assert evaluate([str(tmp_path)]) == 2
    assert "[not-a-checkpoint]" in capsys.readouterr().err
