"""Mistakes on command lines: told in the standard format, with exit code 2, and a fix that can be typed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.config.options import OptionParser

WRONG = {  # command line -> the fix
    "train hybrid_ppo --dry-run": "dry_run=true",
    "train hybrid_ppo --dryrun": "dry_run=true",
    "train hybrid_ppo -gamma 0.9": "algorithm.gamma=0.9",
    "train hybrid_ppo --lr=1e-3": "actor.optimizer.lr=1e-3",
    "train hybrid_ppo --algorithm.gamma 0.9": "algorithm.gamma=0.9",
    "train hybrid_ppo --resume": "resume=<a value>",
    "train --config hybrid_ppo": "--config-name hybrid_ppo",
    "train --config-nam hybrid_ppo": "--config-name hybrid_ppo",
    "train hybrid_ppo --cfg jb": "--cfg job",
    "train hybrid_ppo --quickly": "leave out --quickly",
    "plan hybrid_ppo --simulatr": "--simulator",
    "plan hybrid_ppo --num_envs=8": "env.total_num_envs=8",
    "search hybrid_ppo --objective gpus": "objective=<a value>",
    "search hybrid_ppo --accelerators=4": "accelerators=4",
    "search hybrid_ppo --probes 2": "--probe 2",
    "profile hybrid_ppo --iterations many": "--iterations 8",
    "profile hybrid_ppo --iteration 4": "--iterations 4",
    "evaluate a_run --episodes 3": "episodes=3",
    "evaluate a_run --video=play.gif": "video=play.gif",
    "evaluate a_run --format xml": "--format text",
    "export": "python -m rlplace.export <CHECKPOINT> <OUT>",
    "export a_run policy.pt --component": "--component <actor|critic>",
    "export a_run policy.pt extra": "leave out extra",
    "report": "python -m rlplace.report <RUN>",
    "report a_run --dif another": "--diff another",
    "report a_run another": "leave out another",
    "runs --format jsn": "--format json",
    "runs runs more": "leave out more",
    "doctor --format yml": "--format text",
    "doctor hybrid_ppo": "leave out hybrid_ppo",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_option_is_refused_with_its_fix_before_anything_is_done(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLPLACE_CALLED", raising=False)
    command, *words = line.split()
    main: Callable[[list[str]], int] = importlib.import_module(
        f"rlplace.{command}" + ".__main__" * (command == "report")
    ).main
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "[bad-option]" in said.err
    assert f"    fix: {WRONG[line]}\n" in said.err + "\n"
    assert "usage:" not in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fix", ["dry_run=true", "--config-name hybrid_ppo dry_run=true", "algorithm.gamma=0.9"])
def test_what_is_proposed_is_taken(fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rlplace.train import main

    name = [] if "--config-name" in fix else ["hybrid_ppo"]
    assert main([*name, *fix.split(), "cluster.accelerator.kind=emulated", "dry_run=true"]) == 0, (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("- runner\n- env\n", "fix: defaults: [hybrid_ppo, _self_]"),
        ("runner: {seed: 1}\n", "fix: defaults: [hybrid_ppo, _self_]"),
    ],
    ids=["a list", "without a placement"],
)
def test_a_file_that_is_no_whole_config_is_told_what_to_begin_with(
    text: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlplace.train import main

    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / "mine.yaml"), "dry_run=true"]) == 2
    assert fix in capsys.readouterr().err


def test_a_dash_that_is_no_hyphen_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    from rlplace.train import main

    assert main(["hybrid_ppo", "cluster.component_placement.env=0\u20133", "dry_run=true"]) == 2
    assert "fix: cluster.component_placement.env=0-3\n" in capsys.readouterr().err


def test_help_is_still_that_of_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser("rlplace runs", description="Lists runs.")
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--help"])
    assert left.value.code == 0
    assert "usage: rlplace runs [-h]" in capsys.readouterr().out
