"""Mistakes on command lines: told in the standard format, with exit code 2, and a fix that can be typed."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplace.cli import plan, profile, runs, search
from rlplace.config import compose
from rlplace.config.options import OptionParser
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.errors import ConfigError

WRONG = {  # command line -> the fix
    "train hybrid_ppo --dry-run": "dry_run=true",
    "train hybrid_ppo --dryrun": "dry_run=true",
    "train hybrid_ppo -gamma 0.9": "algorithm.gamma=0.9",
    "train hybrid_ppo --lr=1e-3": "actor.optimizer.lr=1e-3",
    "train hybrid_ppo --algorithm.gamma 0.9": "algorithm.gamma=0.9",
    "train hybrid_ppo --resume": "resume=auto",
    "train --config hybrid_ppo": "--config-name hybrid_ppo",
    "train --config-nam hybrid_ppo": "--config-name hybrid_ppo",
    "train hybrid_ppo --cfg jb": "--cfg job",
    "train hybrid_ppo --quickly": "leave out --quickly",
    "plan hybrid_ppo --simulatr": "--simulator",
    "plan hybrid_ppo --num_envs=8": "env.total_num_envs=8",
    "plan exlpain bad-option": "explain bad-option",
    "search hybrid_ppo --objective gpus": "objective=accelerator_seconds",
    "search hybrid_ppo --seconds 9": "seconds=9",
    "search hybrid_ppo objectve=seconds": "objective=seconds",
    "search hybrid_ppo accelerators=2,x,3": "accelerators=2,3",
    "search hybrid_ppo accelerators=\u00b2": "accelerators=1",
    "search hybrid_ppo --probe": "--probe 4",
    "search hybrid_ppo \u2014probe 2": "--probe 2",
    "search hybrid_ppo --accelerators=4": "accelerators=4",
    "search hybrid_ppo --probes 2": "--probe 2",
    "search hybrid_ppo fix=": "fix=actor",
    "search hybrid_ppo fix=actor,actor": "fix=actor",
    "search hybrid_ppo fix=actor fix=env": "leave out fix=env",
    "search hybrid_ppo accelerators=": "accelerators=1",
    "search hybrid_ppo accelerators=4,4": "accelerators=4",
    "search hybrid_ppo seconds=inf": "seconds=60",
    "search hybrid_ppo --quickly": "leave out --quickly",
    "search hybrid_ppo --apply": "--apply best.yaml",
    "search hybrid_ppo objective=secnds": "objective=seconds",
    "search hybrid_ppo objective=money": "objective=accelerator_seconds",
    "search --multirun hybrid_ppo runner.seed=1,2": "name one, without a sweep",
    "profile hybrid_ppo profile=nowhere": "--out nowhere",
    "profile hybrid_ppo --format json": "leave out --format",
    "profile hybrid_ppo --num_envs=8": "env.total_num_envs=8",
    "profile hybrid_ppo --iterations many": "--iterations 8",
    "profile hybrid_ppo --iterations 2": "--iterations 3",
    "profile --multirun hybrid_ppo runner.seed=1,2": "one config",
    "profile hybrid_ppo --iterations 2.5": "--iterations 8",
    "profile hybrid_ppo --iteration 4": "--iterations 4",
    "profile hybrid_ppo \u2013-iterations 4": "--iterations 4",
    "evaluate a_run --episodes 3": "episodes=3",
    "evaluate a_run --video=play.gif": "video=play.gif",
    "evaluate a_run --format xml": "--format text",
    "evaluate": "python -m rlplace.evaluate runs/<config>/<date>_<time>",
    "evaluate a_run seed": "seed=<value>",
    "evaluate a_run seed=1 seed=2": "seed=2",
    "evaluate a_run seed=one": "seed=0",
    "evaluate a_run sed=1": "seed=1",
    "evaluate a_run money=1": "leave it out",
    "evaluate a_run video=play.avi": "video=play.mp4",
    "evaluate a_run deterministic=maybe": "deterministic=true",
    "export": "python -m rlplace.export <CHECKPOINT> <OUT>",
    "export a_run policy.pt --component": "--component <actor|critic>",
    "export a_run policy.pt extra": "leave out extra",
    "report": "python -m rlplace.report <RUN>",
    "report a_run --dif another": "--diff another",
    "report a_run another": (
        "python -m rlplace.report a_run --diff another"
        "        (or one run: python -m rlplace.report another)"
    ),
    "report a_run --open=yes": "--open",
    "runs \u2013format json": "--format json",
    "runs --format jsn": "--format json",
    "runs --json": "--format json",
    "runs runs more": "leave out more",
    "doctor --format yml": "--format text",
    "doctor --format ''": "--format text",
    "doctor hybrid_ppo": "leave out hybrid_ppo",
}


def read(words: list[str]) -> Config:
    (composed,) = compose.with_hydra(words)
    return read_config(composed.mapping, composed.sources)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_option_is_refused_with_its_fix_before_anything_is_done(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    assert "invalid" not in said.err  # a word of argparse
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "fixes"),
    [
        ("evaluate runs/nope --episods 10", ["episodes=10", "name another checkpoint"]),
        ("evaluate runs/nope episods=10", ["episodes=10", "name another checkpoint"]),
        ("evaluate --checkpoint runs/nope", ["name another checkpoint"]),
        ("report runs/nope --opne", ["--open", "the folder that a run names"]),
        ("report --format json runs/nope", ["the folder that a run names"]),
        ("export runs/nope out --emaa", ["--ema", "name another checkpoint"]),
        ("export runs/nope", ["<CHECKPOINT> <OUT>", "name another checkpoint"]),
        ("runs runs/nope --jsn", ["python -m rlplace.runs <runner.output_dir"]),
    ],
)
def test_a_wrong_option_does_not_hide_a_missing_run(
    line: str,
    fixes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are told at once."""
    monkeypatch.chdir(tmp_path)
    command, *words = line.split()
    main = importlib.import_module(f"rlplace.cli.{command}").main
    assert main(words) == 2
    told = capsys.readouterr().err
    for fix in fixes:
        assert fix in told
    assert "[bad-option]" in told
    assert re.search(r"\[(resume-not-found|not-a-run)\]", told)


@pytest.mark.parametrize(
    "fix",
    ["dry_run=true", "--config-name hybrid_ppo dry_run=true", "algorithm.gamma=0.9"],
)
def test_what_is_proposed_is_taken(
    fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlplace.cli.train import main

    name = [] if "--config-name" in fix else ["hybrid_ppo"]
    assert (
        main([*name, *fix.split(), "cluster.accelerator.kind=emulated", "dry_run=true"])
        == 0
    ), capsys.readouterr().err


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
    from rlplace.cli.train import main

    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / "mine.yaml"), "dry_run=true"]) == 2
    assert fix in capsys.readouterr().err


def test_a_dash_that_is_no_hyphen_is_corrected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rlplace.cli.train import main

    assert (
        main(["hybrid_ppo", "cluster.component_placement.env=0\u20133", "dry_run=true"])
        == 2
    )
    assert "fix: cluster.component_placement.env=0-3\n" in capsys.readouterr().err


def test_help_is_still_that_of_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser("rlplace runs", description="Lists runs.")
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--help"])
    assert left.value.code == 0
    assert "usage: rlplace runs [-h]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--all", "--few"], "--few: not allowed with argument --all"),
        ([], "sample: one of the arguments --all --few is required"),
    ],
)
def test_what_argparse_says_of_options_that_exclude_each_other_is_kept(
    words: list[str], text: str
) -> None:
    parser = OptionParser("sample")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--all", action="store_true")
    group.add_argument("--few", action="store_true")
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(words)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["explain", "zz-zz-zz"], "explain: no such error code "),
        (
            ["explain", "env", "0", "money", "0", "--config-name", "hybrid_ppo"],
            "explain: no such component ",
        ),
    ],
)
def test_a_topic_that_resembles_none_is_told_without_a_guess(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(text)
    assert "fix: see --help" in said


def test_an_empty_word_is_one_too_many() -> None:
    with pytest.raises(ConfigError) as caught:
        OptionParser("doctor").parse_args([""])
    assert caught.value.problems[0].fix == "leave out ''"


def test_the_fix_of_a_value_on_the_command_line_is_a_word_for_it() -> None:
    fixes = {
        "runner.sinks=wandb": "runner.sinks=[wandb]",
        "runner.sinks=[jsonl,wandbb]": "runner.sinks=[jsonl, wandb]",
        "profile=5": 'profile="5"',
        "cluster.launcher=inlin": "cluster.launcher=inline",
        "cluster.component_placement=all": "cluster.component_placement={preset: colocate_all}",
        "runner.sinks={wandb: 1}": "runner.sinks=[wandb]",
        "runner.callbacks={name: 'a:B'}": "runner.callbacks=[{name: a:B}]",
        "actor.optimizer.l=0.1": "actor.optimizer.lr=0.1",
        "actor.optim={lr: 0.1}": "actor.optimizer={lr: 0.1}",
        "actor.adam.lr=0.1": "actor.optimizer={lr: 0.1}",
        "runner.total_env_steps=8192": "runner.total_iterations=2",
        "total_timesteps=8192": "runner.total_iterations=2",
        "algorithm.learning_rate=0.1": "actor.optimizer.lr=0.1",
    }
    for word, meant in fixes.items():
        with pytest.raises(ConfigError) as caught:
            read(["cartpole", word])
        (fix,) = [problem.pasted for problem in caught.value.problems]
        assert fix is not None
        assert shlex.split(fix) == [meant]
        read(["cartpole", *shlex.split(fix)])


def test_several_profiles_are_given_with_commas() -> None:
    assert read(["cartpole", "profile=a.json,b.json"]).profile == "a.json,b.json"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("${runner.sed}", "${runner.seed}"),
        ("${runer.seed}", "${runner.seed}"),
        ("${.sed}", "${.seed}"),
    ]
    + [("${oc.evn:HOME}", "${oc.env:HOME}")],
)
def test_a_misspelt_reference_is_named_with_its_line_and_the_right_one(
    written: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"defaults: [cartpole, _self_]\nrunner:\n  seed: 1\n  output_dir: {written}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        read([str(file)])
    (problem,) = caught.value.problems
    assert (str(problem.source), problem.fix) == (f"{file}:4", f"output_dir: {meant}")


def test_a_place_where_nothing_can_be_written_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, work in ((profile, "_run_all"), (search, "_found")):
        monkeypatch.setattr(module, work, lambda *_: pytest.fail("started"))
    (tmp_path / "file").touch()
    for main, words in (
        (profile.main, ["--out", "file/x"]),
        (profile.main, ["--out="]),
        (search.main, ["--apply", "file/x"]),
    ):
        monkeypatch.chdir(tmp_path)
        assert main(["cartpole", *words]) == 1
        said = capsys.readouterr().err
        assert "[cannot-write]" in said
        assert f"    fix: {words[0].rstrip('=')}=<a file" in said
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_damaged_numbers_of_a_run_count_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "run.lock").touch()
    (tmp_path / "summary.json").write_text(
        '{"iterations": "many", "wall_s": null}', encoding="utf-8"
    )
    for line in (
        '{"iteration": "two", "time/iteration_s": null}',
        '{"iteration": 1e999}',
        "",
    ):
        (tmp_path / "metrics.jsonl").write_text(line, encoding="utf-8")
        found = runs.read(tmp_path)
        assert (found.iterations, found.seconds) == (0, 0.0)


def test_a_folder_of_runs_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runs.main(["r" * 5000]) == 2
    assert "why: it cannot be read: File name too long" in capsys.readouterr().err


def test_a_search_of_nothing_asks_for_a_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert search.main([]) == 2
    assert "[no-config]" in capsys.readouterr().err
