"""A custom job goes on from its checkpoint as if it had never stopped, with tensors that leave the accelerator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace import run
from rlplace.cli.runs import read
from tests.e2e.own_resumed_job import CONFIG, job


def losses(folder: Path) -> list[float]:
    """Return the loss of each iteration of the newest run below `folder`."""
    (newest,) = folder.glob("resumed/*/metrics.jsonl")
    lines = newest.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["actor/loss"] for line in lines]


@pytest.mark.parametrize("save_first", [False, True])
def test_a_resumed_job_learns_what_an_unbroken_one_learns(
    tmp_path: Path, save_first: bool
) -> None:
    def train(name: str, iterations: int, *words: str) -> int:
        output = f"runner.output_dir={tmp_path / name}"
        total = f"runner.total_iterations={iterations}"
        return run(job(save_first), CONFIG, [output, total, *words])

    assert train("whole", 6) == 0
    assert train("broken", 3) == 0
    assert train("broken", 6, "resume=auto") == 0
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "broken") == whole
    assert whole[-1] < whole[0]


def test_what_differs_is_told_by_the_keys_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"runner.output_dir={tmp_path}"
    env = CONFIG["env"] | {"id": "first", "micro_batch": 2}
    config = CONFIG | {"env": env}
    assert run(job(), config, [output, "runner.total_iterations=1"]) == 0
    capsys.readouterr()
    changed = ["env.id=second", "env.micro_batch=4", "actor.memory.host=1GiB"]
    changed += ["runner.total_iterations=2", "resume=auto", "dry_run=true"]
    assert run(job(), config, [output, *changed]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (at for at, line in enumerate(lines) if line.startswith("resumes "))
    told = [line.strip() for line in lines[first + 1 :] if " -> " in line]
    effect = "        changes the numbers of what follows"
    assert sorted(told) == [
        "actor.memory.host: 0 -> 1073741824",
        f"env.id: first -> second{effect}",
        f"env.micro_batch: 2 -> 4{effect}",
        "runner.total_iterations: 1 -> 2",
    ]


def test_a_run_is_listed_with_its_score(tmp_path: Path) -> None:
    output = f"runner.output_dir={tmp_path}"
    assert run(job(), CONFIG, [output, "runner.total_iterations=3"]) == 0
    (folder,) = tmp_path.glob("resumed/*/")
    listed = read(folder)
    found = losses(tmp_path)
    assert (listed.best, listed.last) == (max(found), found[-1])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert ">finished</span>" in page
