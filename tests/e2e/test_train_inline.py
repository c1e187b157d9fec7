"""Whole runs in threads of one process: files, learning steps, and failures that leave nothing half done."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import resource
import signal
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from rlplace.checkpoints.store import Store
from rlplace.cli.train import NOT_SAVED, main
from rlplace.config.read import read_config
from rlplace.errors import OutputError
from rlplace.report import live
from tests.e2e.training import INLINE, ROOT, Finished, placed, train
from tests.iterations import read_trace
from tests.screen import Screen

ONE_EACH = (*INLINE, *placed("0", "0", "1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(
        "hybrid_ppo",
        tmp_path_factory.mktemp("run"),
        *ONE_EACH,
        "runner.total_iterations=3",
        "runner.seed=7",
    )


def test_a_run_leaves_its_config_plan_metrics_policy_and_summary(run: Finished) -> None:
    assert run.code == 0, run.err
    assert run.folder is not None
    plan = {"plan.txt", "plan.json", "plan.svg", "run.lock"}
    read = {"config.yaml", "inputs.json"}
    measured = {
        "logs",
        "metrics.jsonl",
        "tensorboard",
        "summary.json",
        "memory.json",
        "profile.json",
        "checkpoints",
    }
    shown = {"report.html", "timeline.svg", "trace.json", "command.json", "screen.txt"}
    assert {
        path.name for path in run.folder.iterdir()
    } == plan | read | measured | shown | {"policy.safetensors"}
    config = read_config(
        yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
    )
    assert config.runner.seed == 7
    assert config.cluster.component_placement == {"actor": 0, "env": 0, "rollout": 1}
    whole = (run.folder / "plan.txt").read_text(encoding="utf-8")
    short = run.out.partition("the whole plan: plan.txt")[0]
    assert short.splitlines()[0] == whole.splitlines()[0]
    assert len(short.splitlines()) <= 12 < len(whole.splitlines())
    assert max(map(len, short.partition("memory: ")[0].splitlines())) <= 80
    assert json.loads((run.folder / "plan.json").read_text(encoding="utf-8"))
    lines = run.metrics()
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert [line["env_steps"] for line in lines] == [256, 512, 768]
    assert [line["policy/version"] for line in lines] == [1, 2, 3]
    assert all(line["actor/version_lag"] == 0 for line in lines)
    assert all(line["env/steps"] == line["actor/samples"] == 256 for line in lines)
    with safe_open(run.folder / "policy.safetensors", "np") as policy:
        assert all(policy.get_tensor(name).size for name in policy.keys())  # noqa: SIM118 -- not a mapping
    summary = run.summary()
    assert (summary["iterations"], summary["env_steps"]) == (3, 768)
    assert f"files {run.folder}" in " ".join(run.out.split())


def test_a_run_ends_with_a_page_a_picture_and_a_trace_of_it(run: Finished) -> None:
    assert run.folder is not None
    page, picture = (
        (run.folder / name).read_text(encoding="utf-8")
        for name in ("report.html", "timeline.svg")
    )
    assert picture in page
    assert '<span class="verdict fits">finished</span>' in page
    assert "bottleneck of an iteration: " in page
    events = [
        e
        for e in read_trace((run.folder / "trace.json").read_text(encoding="utf-8"))
        if e["ph"] == "X"
    ]
    assert [e["name"] for e in events if e["name"].startswith("iteration")] == [
        f"iteration {n}" for n in (1, 2, 3)
    ]
    assert {
        "sync",
        "rollout",
        "learn",
        "move full",
        "push_weights",
        "sim",
        "minibatch",
    } <= {e["name"] for e in events}
    assert sum(e["name"] == "sim" for e in events) > 3 * 16, "each step is a lap"


def test_a_run_that_fails_has_a_page_of_what_it_did(tmp_path: Path) -> None:
    poisoned = (
        "env.id=tests.gyms:Poisoned-v0",
        "+env.kwargs.what=reward",
        "+env.kwargs.at=5",
    )
    asked = ("algorithm.rollout_steps=4", "runner.total_iterations=3")
    run = train("hybrid_ppo", tmp_path, *ONE_EACH, *poisoned, *asked)
    assert run.code == 1
    assert run.folder is not None
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert '<span class="verdict tight">failed</span>' in page
    assert "64 in 1 iteration<" in page
    assert "iteration 1: " in page


def test_time_is_accounted_for(run: Finished) -> None:
    """Stages and moves add up to the iteration; overhead is what neither simulator, policy nor learning took."""
    in_stages = []
    in_shares = []
    for line in run.metrics():
        whole = line["time/iteration_s"]
        stages = sum(
            line[f"time/{stage}_s"] for stage in ("sync", "rollout", "learn", "moves")
        )
        work = max(line["env/sim_s"], line["rollout/policy_s"]) + line["actor/learn_s"]
        assert line["time/overhead_s"] == pytest.approx(whole - work)
        shares = [
            line[f"util/{name}_share"] for name in ("busy", "bubble", "moves", "sync")
        ]
        assert all(share >= 0 for share in shares)
        # Nothing is counted twice
        assert stages <= whole * 1.000001
        assert sum(shares) <= 1.000001
        in_stages.append(stages / whole)
        in_shares.append(sum(shares))
    # The rest is the driver's own. It is little, but in an iteration in which another process took the driver's core
    assert statistics.median(in_stages) == pytest.approx(1.0, abs=0.05)
    assert statistics.median(in_shares) == pytest.approx(1.0, abs=0.05)
    usage = run.summary()["utilisation"]
    assert usage["accelerators"] == 2
    assert (
        usage["by_accelerator"]["1"]["learn"]["busy_s"] == 0.0
    )  # only rollout sits there
    assert usage["by_accelerator"]["0"]["learn"]["busy_s"] > 0.0
    assert usage["stages"]["learn"]["planned_at_work"] == 1
    assert "accelerators at work, measured (planned)" in " ".join(run.out.split())


def test_the_same_seed_gives_the_same_run(run: Finished, tmp_path: Path) -> None:
    job = (*ONE_EACH, "runner.total_iterations=3")
    same, other = (
        train("hybrid_ppo", tmp_path / str(seed), *job, f"runner.seed={seed}")
        for seed in (7, 8)
    )
    first, again, another = (
        [line["actor/policy_loss"] for line in r.metrics()] for r in (run, same, other)
    )
    assert first == again
    assert first != another


def test_the_run_stops_at_the_return_asked_for(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "runner.total_iterations=391",
        "runner.stop_at_return=5.0",
    )
    assert run.code == 0
    assert run.summary()["env_steps"] < 100_000
    assert run.summary()["return_last"] >= 5.0


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_whole_lines(tmp_path: Path) -> None:
    """Files may not grow beyond 40 kB: what a full disk does, to one process only."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    run = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "runner.total_iterations=3907",
        preexec_fn=limit,
    )
    assert run.code == 1
    assert "metrics.jsonl" in run.err
    assert "runner.output_dir" in run.err
    lines = run.metrics()  # every line parses
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.parametrize("whole", [0, 1])
def test_a_run_whose_last_state_is_not_saved_does_not_end_as_done(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`whole`: checkpoints that are written before the disk is full."""
    begin = Store.begin
    begun: list[int] = []

    def full(store: Store, iteration: int, components: Iterable[str]) -> Path:
        begun.append(iteration)
        if len(begun) <= whole:
            return begin(store, iteration, components)
        raise OutputError.of(tmp_path, OSError(errno.ENOSPC, "no space"))

    monkeypatch.setattr(Store, "begin", full)
    job = (*ONE_EACH, "checkpoint.every=1", "runner.total_iterations=3")
    run = train("hybrid_ppo", tmp_path, *job)
    assert run.code == NOT_SAVED, run.err
    assert run.summary()["state"] == "finished"
    # The last state is tried once more at the end
    assert begun == [1, 2, 3, 3]
    told, _, fix = run.err.partition("[last-state-not-saved]")
    assert told.count("no checkpoint after iteration") == 4 - whole
    if not whole:
        assert "no checkpoint was written" in told
        return
    assert "after iteration 1" in fix
    # The disk has space again, and the fix is pasted
    monkeypatch.undo()
    (resume,) = re.findall(r"resume=\S+", fix)
    again = train("hybrid_ppo", tmp_path, *job, resume)
    assert again.code == 0, again.err
    assert [line["iteration"] for line in again.metrics()] == [1, 2, 3]


def test_no_return_is_shown_where_no_episode_has_ended(tmp_path: Path) -> None:
    """No pole falls within the four steps of the first iteration."""
    run = train(
        "hybrid_ppo",
        tmp_path,
        *ONE_EACH,
        "algorithm.rollout_steps=4",
        "runner.total_iterations=5",
    )
    ended = [line["env/episodes"] > 0 for line in run.metrics()]
    assert not ended[0]
    assert any(ended)
    assert ["env/mean_return" in line for line in run.metrics()] == ended
    lines = run.out.splitlines()
    header = next(at for at, line in enumerate(lines) if "env steps" in line)
    rows = lines[header + 1 : header + 1 + len(ended)]
    shown = [row.split()[2] for row in rows]
    assert [cell != "-" for cell in shown] == ended


def test_a_terminal_shows_what_the_run_does_and_keeps_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, errors = Screen(), io.StringIO()
    monkeypatch.setattr(live, "_REDRAW_S", 0.001)
    monkeypatch.setattr(live, "_SHARE", 0.3)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "50")):
        monkeypatch.setenv(name, value)
    asked = (
        "--config-name",
        "hybrid_ppo",
        f"runner.output_dir={tmp_path}",
        *ONE_EACH,
        "runner.total_iterations=12",
    )
    with (
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(errors),
        contextlib.chdir(ROOT),
    ):
        assert main(asked) == 0, errors.getvalue()
    lines = screen.lines
    first = next(
        number for number, line in enumerate(lines) if line.startswith(" iter")
    )
    table = lines[first : first + 13]
    assert [line.split()[0] for line in table] == ["iter", *map(str, range(1, 13))]
    assert max(map(len, table)) <= 80
    assert next(line for line in lines[first + 13 :] if line).startswith(
        "return"
    )  # of the summary
    shown = screen.written
    heads = ("starting   ", "iteration  ", "resident   ", "queues     ", "bottleneck ")
    assert [head for head in heads if head not in shown] == []
    assert not any(
        line.startswith(("iteration ", "resident ", "bottleneck ")) for line in lines
    )
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    run = train("hybrid_ppo", tmp_path / "file", *ONE_EACH)
    assert run.code == 1
    assert "[cannot-write]" in run.err


def test_the_run_measures_what_the_ledger_predicted(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo",
        tmp_path,
        *INLINE,
        *placed("0", "0", "0"),
        "runner.total_iterations=2",
    )
    memory = run.summary()["memory"]
    assert {component: set(rows) for component, rows in memory.items()} == {
        "actor": {"off", "weights", "full"},
        "rollout": {"off", "weights", "full"},
        "env": {"off", "full"},
    }
    for rows in memory.values():
        for size in rows.values():
            assert size["measured"] == pytest.approx(size["predicted"], rel=0.05)
    assert memory["env"]["full"]["measured"] == 256 << 20


def test_a_sweep_ends_with_a_row_for_each_run(tmp_path: Path) -> None:
    sweep = (
        "-m",
        "runner.seed=1,2",
        "runner.total_iterations=1",
        "algorithm.rollout_steps=4",
    )
    run = train("hybrid_ppo", tmp_path, *ONE_EACH, *sweep)
    assert run.code == 0, run.err
    heading, *rows = (line.split() for line in run.out.rstrip().splitlines()[-3:])
    assert heading == ["result", "folder", "overrides"]
    assert [row[-1] for row in rows] == ["runner.seed=1", "runner.seed=2"]
    assert sorted(row[1] for row in rows) == sorted(map(str, tmp_path.glob("*/*")))
