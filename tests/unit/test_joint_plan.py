"""Runs that share accelerators are planned together: what stays of one beside the work of another, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli import share
from rlplace.errors import ConfigError
from rlplace.placement.schedule import Residency
from rlplace.runtime.joint_plan import PlannedRun, proof_of
from rlplace.runtime.prepare import Prepared, prepare

MIB = 1 << 20


def config(enable_offload: bool, size: str = "6MiB") -> dict[str, Any]:
    block = {"enable_offload": enable_offload, "memory": {"full": size}}
    return {
        "job": "tests.e2e.sharing_job:job",
        "cluster": {
            "launcher": "inline",
            "accelerators_per_node": 2,
            "accelerator": {"kind": "emulated", "memory": "8MiB"},
            "component_placement": {"actor": 0, "rollout": 1},
        },
        "actor": dict(block),
        "rollout": dict(block),
    }


def planned(mapping: Mapping[str, Any], *, shared: bool = True) -> Prepared:
    cluster = {**mapping["cluster"], "shared": shared}
    return prepare({**mapping, "cluster": cluster})


def joint(*jobs: Prepared) -> list[PlannedRun]:
    return [
        PlannedRun(name=name, job=job, share=share.Share())
        for name, job in zip("abc", jobs, strict=False)
    ]


def test_a_shared_run_leaves_accelerators_that_are_its_own() -> None:
    alone = planned(config(True), shared=False).plan.schedule.residency
    shared = planned(config(True)).plan.schedule.residency
    assert alone["learn"] == {"actor": Residency.FULL, "rollout": Residency.FULL}
    assert shared["learn"] == {"actor": Residency.FULL, "rollout": Residency.OFF}
    assert shared["rollout"] == {"actor": Residency.OFF, "rollout": Residency.FULL}


def test_a_component_that_may_not_leave_stays() -> None:
    residency = planned(config(False)).plan.schedule.residency
    assert residency["learn"]["rollout"] == Residency.FULL


def test_what_leaves_its_accelerators_fits_beside_another_run() -> None:
    proof = proof_of(joint(planned(config(True)), planned(config(True))))
    assert proof.fits
    assert {each.total_bytes for each in proof.accelerators} == {6 * MIB}
    assert {(each.numbers, each.works) for each in proof.accelerators} == {
        ((0, 1), "a"),
        ((0, 1), "b"),
    }


def test_what_stays_counts_beside_the_work_of_the_other_run() -> None:
    proof = proof_of(joint(planned(config(False)), planned(config(True))))
    assert not proof.fits
    short = [each for each in proof.accelerators if not each.fits]
    assert {each.works for each in short} == {"b"}
    (worst,) = {each.total_bytes for each in short}
    assert worst == 12 * MIB
    assert {name for each in short for name in each.staying} == {"a"}


def test_three_runs_stay_beside_each_other() -> None:
    jobs = [planned(config(False, "3MiB")) for _ in range(2)]
    assert proof_of(joint(*jobs)).fits
    assert not proof_of(joint(*jobs, jobs[0])).fits


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def file_of(folder: Path, name: str, enable_offload: bool) -> str:
    offload = str(enable_offload).lower()
    file = folder / f"{name}.yaml"
    file.write_text(
        f"""
job: tests.e2e.sharing_job:job
cluster:
  launcher: inline
  accelerators_per_node: 2
  accelerator: {{kind: emulated, memory: 8MiB}}
  component_placement: {{actor: 0, rollout: 1}}
actor: {{enable_offload: {offload}, memory: {{full: 6MiB}}}}
rollout: {{enable_offload: {offload}, memory: {{full: 6MiB}}}}
runner: {{output_dir: {folder}/runs}}
""",
        encoding="utf-8",
    )
    return str(file)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = share.main([*words, "--plan"])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_the_plan_shows_stages_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = file_of(tmp_path, "a", True)
    b = file_of(tmp_path, "b", True)
    code, text = answer(capsys, a, "runner.seed=1", b, "--weights", "2,1")
    assert code == 0, text
    assert "2 runs in turns on 2 accelerators, 0-1" in text
    assert "the runs fit together" in text
    assert [line.split() for line in text.splitlines() if "learn" in line] == [
        ["learn", "0", "-"],
        ["learn", "0", "-"],
    ]


def test_the_proposed_command_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = file_of(tmp_path, "a", False)
    b = file_of(tmp_path, "b", False)
    code, text = answer(capsys, a, b, "runner.seed=2")
    assert code == 3
    assert "[runs-do-not-fit]" in text
    assert "rollout of a stays with 6 MiB (6291456)" in text
    fix = next(line for line in text.splitlines() if "fix:" in line)
    words = fix.partition("rlplace.share ")[2].split()
    assert "rollout.enable_offload=true" in words
    code, text = answer(capsys, *words)
    assert code == 0, text


def test_runs_that_cannot_leave_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = file_of(tmp_path, "a", True)
    change = "cluster.changes=[{after: 2, component_placement: {actor: 1}}]"
    code, text = answer(
        capsys,
        a,
        change,
        a,
        "cluster.accelerators_per_node=4",
        "cluster.elastic=on",
        "runner.total_iterations=100",
    )
    assert code == 2
    assert text.count("[cannot-share]") == 3
    assert "the placement of a-1 changes during the run" in text
    assert "cluster.elastic=advise" in text
    assert "the runs are planned for different machines" in text
    code, text = answer(
        capsys, a, a, "cluster.launcher=ray", "cluster.ray.address=auto"
    )
    assert code == 2
    assert "a-2 joins a Ray cluster" in text


def test_a_run_that_generates_ahead_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["disaggregated_grpo_llm", "cluster=laptop"]
    code, text = answer(capsys, *words, "algorithm.max_staleness=1", *words)
    assert code == 2
    assert "generates ahead of learning" in text
    assert "algorithm.max_staleness=0" in text


def test_memory_that_is_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = file_of(tmp_path, "a", True)
    text = Path(a).read_text(encoding="utf-8").replace("full: 6MiB", "")
    b = tmp_path / "b.yaml"
    b.write_text(text, encoding="utf-8")
    code, text = answer(capsys, a, str(b))
    assert code == 2
    assert "the memory of actor and rollout is not known" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hybrid_ppo"], "only one run is named"),
        (["runner.seed=1", "hybrid_ppo", "hybrid_ppo"], "before the first run"),
        (["hybrid_ppo", "hybrid_ppo", "--weights", "1"], "one number for each run"),
        (["hybrid_ppo", "hybrid_ppo", "--weights", "1,0"], "one number for each run"),
        (["hybrid_ppo", "hybrid_ppo", "--priorities", "x"], "one number for each run"),
        (["hybrid_ppo", "-m", "runner.seed=1,2", "hybrid_ppo"], "bad-option"),
        (
            ["hybrid_ppo", "hydra.mode=MULTIRUN", "runner.seed=1,2", "hybrid_ppo"],
            "a run of hybrid_ppo is a sweep",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = answer(capsys, *words)
    assert code == 2
    assert said in text


def test_an_unknown_run_is_an_error_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError):
        share._planned(["no_such_config"])
    assert answer(capsys, "hybrid_ppo", "no_such_config")[0] == 2
