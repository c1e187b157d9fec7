"""The folder of a run -> one page; two folders -> one page of both."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.report.__main__ import main
from rlplace.report.page import render_comparison, render_report
from rlplace.report.record import read_run
from rlplace.report.timeline import render_timeline
from tests.iterations import iteration

COMPONENTS = ["actor", "env", "rollout"]
CONFIG = "runner: {total_iterations: 3, stop_at_return: null}\nactor: {lr: %s}\n"


def make_run(
    folder: Path,
    accelerators: int = 4,
    lr: str = "0.1",
    name: str = "hybrid",
    **summary: Any,
) -> Path:
    """The files of a run of three iterations, with a fault and odd names."""
    half, iterations = accelerators // 2, 3
    held = {
        "actor": range(accelerators),
        "env": range(half),
        "rollout": range(half, accelerators),
    }
    ranks = {
        c: {"ranks": [{"rank": r, "accelerators": [a]} for r, a in enumerate(on)]}
        for c, on in held.items()
    }
    uses = {
        str(a): {"learn": {"busy_s": 1.0 + a / accelerators, "idle_s": 1.0}}
        for a in range(accelerators)
    }
    stages = {
        "sync": {
            "seconds": 0.5,
            "moves_s": 0.25,
            "at_work": 0.0,
            "planned_at_work": None,
        },
        "learn": {
            "seconds": 3.0,
            "moves_s": 0.75,
            "at_work": 1.5,
            "planned_at_work": accelerators,
        },
    }
    shares = {"busy": 0.5, "bubble": 0.25, "moves": 0.125, "sync": 0.125}
    usage = {
        "shares": shares,
        "stages": stages,
        "by_accelerator": uses,
        "accelerator_hours": 0.5,
    }
    fault = {
        "iteration": 1,
        "stage": "learn",
        "what": "rank <0> & co",
        "why": "lost",
        "recovery_s": 2.0,
        "redone_s": 1,
    }
    ended = {
        "iterations": iterations,
        "env_steps": 30,
        "env_steps_per_s": 10.0,
        "return_first": 1.0,
        "return_last": 45.5,
        "wall_s": 1234.5,
        "start_s": 4.0,
        "train_s": 8.0,
        "policy": "policy.safetensors",
        "seconds": {"learn": 3.0, "start_cluster": 2.0},
        "predicted": {
            "from": "a profile",
            "seconds": {"learn": {"predicted": 2.0, "measured": 3.0}},
        },
        "waits": {
            "actions": {
                "producers": ["rollout"],
                "consumers": ["env"],
                "items": 12,
                "bytes": 4 << 30,
                "high_water_items": 3,
                "consumer_wait_s": 0.5,
                "producer_wait_s": 0.0,
                "staleness_max": 1,
            }
        },
        "memory": {
            "actor": {
                "off": {"predicted": 0, "measured": 0},
                "full": {"predicted": 1024, "measured": 3072},
            }
        },
        "utilisation": usage,
        "faults": {"events": [fault]},
        "versions": {"torch": "2.13.0"},
    }
    plan = {
        "config": name,
        "components": ranks,
        "schedule": {"active": {"learn": ["actor"]}},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG % lr)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "plan.txt").write_text("plan: hybrid, 4 accelerators\n")
    (folder / "summary.json").write_text(json.dumps(ended | summary))
    (folder / "timeline.svg").write_text(
        render_timeline([iteration(accelerators)], range(accelerators), COMPONENTS)
    )
    pushed = {
        "actor/pushed_bytes": 3072.0,
        "actor/pushed_same_node_bytes": 2048.0,
        "actor/pushed_network_bytes": 1024.0,
    }
    seconds = {
        "time/iteration_s": 4.0,
        "time/moves_s": 0.5,
        "actor/learn_s": 3.0,
        "util/busy_share": 0.75,
    }
    seconds |= {**pushed, "actor/push_gb_per_s": 1.5}
    returns = [None, 5.0, 7.0]
    lines = [
        {
            "iteration": i + 1,
            "actor/value_loss": 2.0**-i,
            "env/return": returns[i],
            **seconds,
        }
        for i in range(3)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


class Page(html.parser.HTMLParser):
    """The rows of all tables; asserts that the page is well formed and asks for nothing from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}
        assert tag not in ("link", "img", "iframe")
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is open after it."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def test_the_page_has_the_numbers_of_the_run_and_needs_nothing_else(
    tmp_path: Path,
) -> None:
    text = render_report(read_run(make_run(tmp_path / "run")))
    rows = Page(text).rows
    assert ["learn", "3 s", "0.75 s", "1.5", "4"] in rows
    assert ["learn", "2 s", "3 s", "1.50"] in rows  # predicted, measured
    assert ["actor full", "1 KiB", "3 KiB", "3.00"] in rows
    assert ["1", "learn", "rank <0> & co", "lost", "3 s"] in rows
    assert ["torch", "2.13.0"] in rows
    assert [
        "weights, written: same node",
        "actor → rollout",
        "2 KiB",
        "6 KiB",
        "1.4 GiB/s",
    ] in rows
    assert [
        "weights, written: network",
        "actor → rollout",
        "1 KiB",
        "3 KiB",
    ] in rows  # the rate is of both
    assert [
        "channel actions",
        "rollout → env",
        "1.33 GiB",
        "4 GiB",
        "512 MiB/s",
    ] in rows
    assert ["actions", "rollout → env", "12", "3", "0.5 s", "0 s", "1"] in rows
    assert '<span class="verdict fits">finished</span>' in text
    assert "<b>45.5</b><span>return, from 1 in the first iteration</span>" in text
    assert "<b>1,234 s</b>" in text
    assert "env rank 0: run" in text  # the timeline
    assert (
        "<p>bottleneck of an iteration: actor in learn, 3.00 of 4.00 s; accelerators idle 25% of it</p>"
        in text
    )
    assert "url(" not in text
    # The browser runs the scripts of the page and no others: the policy has their hashes.
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = ""
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        hashes += f" 'sha256-{base64.b64encode(digest).decode()}'"
    assert "uPlot" in scripts[0]
    assert f'; script-src{hashes}">' in text


def test_changes_of_the_placement_are_shown_with_what_they_cost_and_gained(
    tmp_path: Path,
) -> None:
    def change(after: int, old: str, new: str, kept: str = "") -> dict[str, Any]:
        parts = {"save_s": 0.5, "end_s": 0.25, "launch_s": 2.0, "load_s": 0.25}
        more = {"kept": kept, "stayed": [] if kept else ["actor"], "seconds": 3.0}
        return {"after": after, "moved": {"env": [old, new]}} | parts | more

    changes = [
        change(3, "0", "0-1"),
        change(6, "0-1", "0-3", kept="no room"),
        change(9, "0-1", "2-3"),
    ]
    folder = make_run(tmp_path / "run", iterations=12, changes=changes)
    seconds = [9.0, 2.0, 2.0, 8.0, 1.5, 1.5, 1.5, 1.5, 1.5, 7.0, 1.5, 1.5]
    lines = {at: {"time/iteration_s": it} for at, it in enumerate(seconds, 1)}
    with_metrics(folder, lines)
    text = render_report(read_run(folder))
    shown = [row for row in Page(text).rows if "0.5 + 0.2 + 2.0 + 0.2" in row]
    parts = "0.5 + 0.2 + 2.0 + 0.2"
    assert shown == [
        ["3", "env 0 → 0-1 (actor stayed)", "3.0 s", parts, "2 s", "1.5 s"]
        + ["6 iterations"],
        ["6", "env 0-1 → 0-3: not made: no room", "3.0 s", parts, "1.5 s", "1.5 s"]
        + ["-"],
        ["9", "env 0-1 → 2-3 (actor stayed)", "3.0 s", parts, "1.5 s", "1.5 s"]
        + ["never: iterations are not shorter"],
    ]
    bars = re.findall(r'title="env: ([^"]*)" style="flex:(\d+)', text)
    assert bars == [("0", "3"), ("0-1", "6"), ("2-3", "3")]
    assert "Changes of the placement" not in render_report(
        read_run(make_run(tmp_path / "other"))
    )


def test_channels_of_a_resumed_run_are_told_by_what_was_trained_since(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", before_resume={"iterations": 1, "train_s": 4.0})
    rows = Page(render_report(read_run(folder))).rows
    assert ["channel actions", "rollout → env", "2 GiB", "4 GiB", "1 GiB/s"] in rows


def test_a_curve_has_a_point_for_each_iteration_with_a_value(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert list(run.metrics["env/return"].iterations) == [2, 3]
    chart = (
        render_report(run)
        .partition('aria-label="actor/value_loss"')[2]
        .partition("</svg>")[0]
    )
    outline = chart.partition('line" d="M')[2].partition('"')[0]
    points = [tuple(map(float, point.split())) for point in outline.split("L")]
    assert [x for x, _ in points] == [62.0, 185.0, 308.0]
    assert points[1][1] - points[0][1] == pytest.approx(
        2 * (points[2][1] - points[1][1]), abs=0.2
    )


def curve_data(text: str, title: str) -> dict[str, Any]:
    """Return what the script of the page is given for the chart with this title."""
    chart = text.partition(f'aria-label="{title}"')[2]
    found = chart.partition('<script type="application/json">')[2]
    data: dict[str, Any] = json.loads(found.partition("</script>")[0])
    return data


def with_metrics(run: Path, records: dict[int, dict[str, float]]) -> Path:
    lines = [
        json.dumps({"iteration": i, "env_steps": 64 * i, **record})
        for i, record in records.items()
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return run


def test_curves_are_by_env_steps_and_where_no_value_is_there_is_a_gap(
    tmp_path: Path,
) -> None:
    # Without a value in iteration 3; evaluated in every fourth iteration
    records = {
        i: {"actor/grad_norm": 1.0} | ({"env/mean_return": float(i)} if i != 3 else {})
        for i in range(1, 9)
    }
    records[4]["eval/return"] = 5.0
    records[8]["eval/return"] = 7.0
    run = with_metrics(make_run(tmp_path / "run"), records)
    text = render_report(read_run(run))
    data = curve_data(text, "env/mean_return")
    assert data["axis"] == "env steps"
    (line,) = data["lines"]
    assert line["x"] == [64, 128, 192, 256, 320, 384, 448, 512]
    assert line["y"] == [1, 2, None, 4, 5, 6, 7, 8]
    chart = text.partition('aria-label="env/mean_return"')[2].partition("</svg>")[0]
    assert chart.partition('line" d="')[2].partition('"')[0].count("M") == 2
    # What comes at equal distances is one line
    assert curve_data(text, "actor/grad_norm")["lines"][0]["y"] == [1.0] * 8


def test_the_curve_of_the_score_is_first_and_tables_of_seconds_are_below(
    tmp_path: Path,
) -> None:
    records = {i: {"env/mean_return": 1.0, "time/iteration_s": 2.0} for i in (1, 2, 3)}
    run = with_metrics(make_run(tmp_path / "run"), records)
    text = render_report(read_run(run))
    places = [
        text.index(part)
        for part in (
            '<figure class="curve wide">',
            "<h2>Timeline</h2>",
            "<h2>Seconds by part</h2>",
            "<h2>Speed</h2>",
        )
    ]
    assert places == sorted(places)
    assert "<h2>Return</h2>" in text
    assert text.count("curve wide") == 1


def test_a_name_in_the_data_of_a_curve_cannot_end_it(tmp_path: Path) -> None:
    name = "a </script><b>/mean_return"
    records = {i: {name: 1.0 * i} for i in (1, 2, 3)}
    left = with_metrics(make_run(tmp_path / "a", name="</script>"), records)
    text = render_report(read_run(left))
    assert Page(text).rows
    data = text.partition('<script type="application/json">')[2]
    (line,) = json.loads(data.partition("</script>")[0])["lines"]
    assert line["label"] == "</script>"


@pytest.mark.parametrize(
    ("left", "right", "names"),
    [
        ({"lr": "0.1"}, {"lr": "0.2"}, ["hybrid lr=0.1", "hybrid lr=0.2"]),
        ({"name": "mine"}, {"lr": "0.2"}, ["mine", "hybrid"]),
        ({}, {}, ["a", "b"]),
    ],
)
def test_runs_in_a_comparison_are_named_by_what_differs(
    tmp_path: Path, left: dict[str, Any], right: dict[str, Any], names: list[str]
) -> None:
    runs = [
        read_run(make_run(tmp_path / folder, **made))
        for folder, made in (("a", left), ("b", right))
    ]
    text = render_comparison(*runs)
    assert f"<h1>{' and '.join(names)}</h1>" in text
    assert Page(text).rows[0] == [*names, "ratio"]


def test_samples_of_the_first_and_the_last_iteration_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    told = [
        {
            "iteration": i,
            "group": 0,
            "sample": n,
            "reward": n / 2,
            "tokens": 4,
            "prompt": f"<{i}>?",
            "answer": "a\nb" * 999,
        }
        for i in (1, 2, 3)
        for n in (0, 1)
    ]
    (run / "samples.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in told)
    )
    rows = [
        row
        for row in Page(render_report(read_run(run))).rows
        if row[-1].startswith("a\nba")
    ]
    assert [row[:4] for row in rows] == [
        *(
            ["1", "0", "4", "<1>?"],
            ["1", "0.5", "4", "<1>?"],
            ["3", "0", "4", "<3>?"],
            ["3", "0.5", "4", "<3>?"],
        ),
    ]
    assert all(len(row[4]) < 1300 for row in rows)


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({"policy": None}, "failed"),
        ({"policy": None, "state": "stopped"}, "stopped"),
        ({"policy": None, "state": "failed"}, "failed"),
        # A custom job saves no model.
        ({"policy": None, "state": "finished"}, "finished"),
        ({"iterations": 2}, "ended early"),
        ({}, "finished"),
    ],
)
def test_how_the_run_ended_is_said(
    tmp_path: Path, summary: dict[str, Any], state: str
) -> None:
    assert f">{state}</span>" in render_report(
        read_run(make_run(tmp_path / "run", **summary))
    )


def make_custom_run(folder: Path) -> Path:
    """The files of a run of a custom job with stages, metrics and timers of its own."""
    seconds = {"collect": 0.6, "sync_weights": 0.1, "learn": 2.4, "moves": 0.03}
    made = make_run(
        folder,
        state="finished",
        policy=None,
        steps_name="iterations",
        iterations_per_s=1.0,
        score="env/return",
        score_name="return",
        stages=["sync", "collect", "learn"],
        memory={"actor": {"full": {"predicted": None, "measured": 3072}}},
        seconds={**seconds, "iteration": 3.2, "overhead": 0.1, "start_cluster": 2.0},
    )
    plan = json.loads((made / "plan.json").read_text())
    plan["schedule"]["active"] = {
        "sync": ["actor", "rollout"],
        "collect": ["env", "rollout"],
        "learn": ["actor"],
    }
    (made / "plan.json").write_text(json.dumps(plan))
    record = {"env/return": 2.0, "actor/q": 0.5, "actor/update_s": 0.7}
    record |= {"actor/pushed_bytes": 8.0, "time/iteration_s": 1.1}
    record |= {"time/collect_s": 0.2, "time/learn_s": 0.8, "time/moves_s": 0.01}
    lines = [json.dumps({"iteration": i + 1, **record}) for i in range(3)]
    (made / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return made


def test_the_page_of_a_custom_job_has_its_own_metrics_timers_and_stages(
    tmp_path: Path,
) -> None:
    text = render_report(read_run(make_custom_run(tmp_path / "run")))
    assert ["actor update", "2.1 s", "0.7 s"] in Page(text).rows
    assert ["actor full", "not known", "3 KiB"] in Page(text).rows
    assert "bottleneck of an iteration: learn, 0.80 of 1.10 s" in text
    curves = text[text.index("<h2>Score</h2>") :]
    for title in ("env/return", "actor/q", "actor/update_s", "seconds of an iteration"):
        assert title in curves
    assert "<h2>actor</h2>" in curves
    together = curves[curves.index("seconds of an iteration") :]
    assert "collect" in together


def test_many_accelerators_are_folded_by_their_components(tmp_path: Path) -> None:
    text = render_report(read_run(make_run(tmp_path / "run", accelerators=512)))
    assert len(text) < 1_500_000
    rows = Page(text).rows
    assert ["0-255", "actor, env", "learn", "1.25 s", "1 s", "50% to 60%"] in rows
    assert ["256-511", "actor, rollout", "learn", "1.75 s", "1 s", "60% to 67%"] in rows


def test_a_run_without_curves_or_pictures_still_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", utilisation={}, faults={}, predicted={})
    for name in ("metrics.jsonl", "timeline.svg"):
        (run / name).unlink()
    text = render_report(read_run(run))
    assert "has no curves: its runner.sinks have no jsonl" in text
    assert Page(text).rows


def test_two_runs_are_put_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = (
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", lr="0.2", return_last=91.0),
    )
    (right / "metrics.jsonl").write_text('{"iteration": 1, "actor/value_loss": 4.0}\n')
    assert (
        main([str(left), "--diff", str(right), "--out", str(tmp_path / "both.html")])
        == 0
    )
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    rows = Page(text).rows
    assert ["return, last", "45.5", "91", "2.00"] in rows
    assert ["learn s, mean", "1", "1", "1.00"] in rows  # of an iteration
    assert ["start cluster s", "2", "2", "1.00"] in rows
    assert ["actor.lr", "0.1", "0.2"] in rows
    assert [row[0] for row in rows].count("runner.total_iterations") == 0
    chart = text.partition('aria-label="actor/value_loss"')[2].partition("</svg>")[0]
    assert chart.count(' line" d="M') == 2
    assert "<circle" in chart  # one point makes no line


def test_the_command_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert (run / "report.html").read_text(encoding="utf-8") == render_report(
        read_run(run)
    )
    assert main([str(run), "--out", str(tmp_path / "no" / "such" / "folder.html")]) == 1
    assert main([str(run), "--nonsense"]) == 2


def test_the_page_is_opened_in_a_browser_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, shown = make_run(tmp_path / "a run"), list[str]()
    monkeypatch.setattr(
        webbrowser, "open", lambda url: shown.append(url) or len(shown) == 1
    )
    assert [main([str(run), "--open"]) for _ in range(2)] == [0, 1]
    assert shown == [(run / "report.html").as_uri()] * 2
    assert "[no-browser]" in capsys.readouterr().err
    assert main([str(run)]) == 0
    assert len(shown) == 2


def test_what_is_no_run_is_refused_in_our_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, cut = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "cut")
    empty, begun = (
        make_run(tmp_path / "empty", iterations=0),
        make_run(tmp_path / "begun"),
    )
    (begun / "summary.json").unlink()
    odd, torn = make_run(tmp_path / "odd"), make_run(tmp_path / "torn")
    (odd / "plan.json").write_text("[]")
    (torn / "config.yaml").write_text("runner: {total")
    (cut / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "x"')
    codes = {
        run.parent: "not-a-run",
        empty: "run-without-iterations",
        begun: "run-without-iterations",
    }
    for folder, code in (
        codes
        | {
            cut: "broken-metrics",
            tmp_path / "nowhere": "not-a-run",
            odd: "not-a-run",
            torn: "not-a-run",
        }
    ).items():
        with pytest.raises(ConfigError) as refused:
            read_run(folder)
        assert refused.value.codes == (code,)
        assert main([str(folder)]) == 2
        assert f"[{code}]" in capsys.readouterr().err
        assert not (folder / "report.html").exists()
    assert main([str(run), "--diff", str(cut)]) == 2
    assert "line 2 is no JSON object" in capsys.readouterr().err
    assert main([str(run.parent)]) == 2
    assert f"fix: {run}" in capsys.readouterr().err  # the newest run below
    (odd / "checkpoints" / "000001").mkdir(parents=True)
    (odd / "checkpoints" / "000001" / "plan.json").write_text("{}")
    (cut / "metrics.jsonl").write_text('{"iteration": NaN, "x": 1}')
    folder = tmp_path / "a folder"
    folder.mkdir()
    for words, status, text in (
        (
            [odd],
            2,
            "fix: the folder that a run names",
        ),  # which a checkpoint of it is not
        ([cut], 2, "its iteration is no finite number"),
        ([run, "--out", folder], 1, "--out: cannot write: it is no file"),
        ([run, "--out="], 1, "--out: cannot write: it is no file"),
        ([run, "--out", "x" * 400], 1, "--out: cannot write: File name too long"),
    ):
        assert main([str(word) for word in words]) == status
        assert text in capsys.readouterr().err


def test_files_that_are_not_as_a_run_writes_them_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    whole = {
        name: (run / name).read_text()
        for name in ("config.yaml", "plan.json", "summary.json")
    }
    texts = ["", "{}", "[]", "null", "{", "\0", "runner: {total_iterations: many}"]
    tried = [(name, text) for name in whole for text in texts]
    for name in ("plan.json", "summary.json"):
        keys = json.loads(whole[name])
        tried += [
            (name, json.dumps({k: v for k, v in keys.items() if k != gone}))
            for gone in keys
        ]
        tried += [
            (name, json.dumps(keys | {key: odd}))
            for key in keys
            for odd in (None, [], {}, "x")
        ]
    refused = 0
    for name, text in tried:
        (run / name).write_text(text)
        status, told = main([str(run)]), capsys.readouterr().err
        assert (status, told) == (0, "") or (
            status == 2 and told.startswith("RUN: ")
        ), (name, text)
        refused += status == 2
        (run / name).write_text(whole[name])
    assert refused > 60
    assert main([str(run)]) == 0


def test_two_runs_without_diff_are_told_how_to_compare_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["runs/pole/a", "runs/pole/b"]) == 2
    told = capsys.readouterr().err
    assert "RUN: several runs, but a report has one run" in told
    assert "report runs/pole/a --diff runs/pole/b" in told
