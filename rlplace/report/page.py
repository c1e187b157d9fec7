"""A run as one HTML page that stands alone, or two of them side by side; from the files of their folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.config.schema import RunnerConfig
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.show.drawing import PALETTE, style
from rlplace.placement.show.html import document, table, tiles
from rlplace.report.charts import STYLE, Line, chart, number
from rlplace.report.record import RunRecord
from rlplace.report.timeline import LOOK
from rlplace.report.trackers import FAILED, STOPPED
from rlplace.report.utilisation import SYNC, bottleneck
from rlplace.units import plural, show_bytes

_LOOK = (
    f"{style(len(PALETTE))}<style>{LOOK}{STYLE}.plan svg{{margin-bottom:12px}}details{{margin:12px 0}}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:12px}summary{cursor:pointer}"
    ".samples td{vertical-align:top}"
    ".samples td:nth-child(n+4){white-space:pre-wrap;overflow-wrap:anywhere;min-width:220px}"
    ".chart{width:100%;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:6px}</style>"
)
_STAGES = ("sync", "rollout", "infer", "learn", "moves", "evaluate")
_SHARES = {"busy": "at work", "bubble": "idle", "moves": "moves", "sync": "sync"}
# Headings of curves, and the ends of the names of metrics below them.
_CURVES: Mapping[str, Sequence[str]] = {
    "Return": (
        "/mean_return",
        "env/return",
        "actor/reward",
        "eval/reward",
        "/length_learned",
        "/episode_length",
    ),
    "Losses": (
        "_loss",
        "/entropy",
        "/grad_norm",
        "/explained_variance",
        "/clip_fraction",
    ),
    "KL": ("/approx_kl", "/kl_reference", "/mismatch", "/mismatch_max", "/mismatch_kl"),
    "Speed": ("/steps_per_s", "/tokens_per_s", "time/iteration_s"),
}
_AGAINST = ("", ">predicted", ">measured", ">measured / predicted")
_TRANSFER = ("what", "from → to", ">one iteration", ">whole run", ">rate")
_TRANSFERS = (
    "The rate of weights is of all ranks while they are copied, that of channels an average of the training. What went"
    " through channels is counted from the last resumption on."
)
_CHANNEL = (
    "channel",
    "from → to",
    ">items",
    ">most at once",
    ">taking waited",
    ">putting waited",
    ">oldest, versions",
)
_SAMPLE = (">iteration", ">reward", ">tokens", "prompt", "answer")
_SAMPLES = "Of the first and the last iteration, from the least reward to the greatest; samples.jsonl has those of all."
_SHOWN = 1200  # characters of a text
_MOST_ROWS = 64

Rows = Iterable[Sequence[str]]


def render_report(run: RunRecord) -> str:
    """Return the page of one run."""
    summary = run.summary
    state = _state(run)
    look = {FAILED: "tight", STOPPED: "unknown", "ended early": "unknown"}.get(
        state, "fits"
    )
    config, plan_text = (
        f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>"
        for name, text in (("config.yaml", run.config), ("plan.txt", run.plan_text))
    )
    return document(
        f"{run.name}: report",
        [
            _LOOK,
            f'<h1>{escape(run.name)}<span class="verdict {look}">{state}</span></h1>',
            f"<p>{escape(_machines(run))}</p>",
            tiles(_tiles(run)),
            *(f"<p>{escape(line)}</p>" for line in _lines(run)),
            f'<h2>Timeline</h2>\n<div class="plan">{run.timeline}</div>',
            *_section(
                "Accelerators by stage",
                (
                    "stage",
                    ">seconds",
                    ">moves into it",
                    ">accelerators at work",
                    ">planned",
                ),
                _uses(run),
            ),
            *_accelerators(run),
            *_section(
                "Seconds by part", ("part", ">whole run", ">one iteration"), _parts(run)
            ),
            *_section(
                "Seconds of an iteration, predicted and measured",
                _AGAINST,
                _against(summary.get("predicted", {}).get("seconds", {}), _seconds),
                f"From {escape(summary.get('predicted', {}).get('from', ''))}; measured is a median.",
            ),
            *_section(
                "Memory of one accelerator",
                _AGAINST,
                _against(_memory(summary), lambda size: show_bytes(int(size))),
            ),
            *_curves({run.name: run}),
            '<div class="samples">',
            *_section("Samples", _SAMPLE, _samples(run), _SAMPLES),
            "</div>",
            *_section(
                "Transfers",
                _TRANSFER,
                [*_weights(run), *_channel_bytes(summary)],
                _TRANSFERS,
            ),
            *_section("Channels", _CHANNEL, _channels(summary)),
            *_section(
                "Faults",
                ("iteration", "stage", "what", "why", ">lost"),
                _faults(summary),
            ),
            *_section(
                "Left out, for it was not finite",
                ("metric", ">count"),
                _skipped(summary),
            ),
            f'<h2>Plan</h2>\n<div class="plan">{run.plan_picture}</div>{plan_text}',
            f"<h2>Config</h2>\n{config}",
            *_section("Machine and versions", ("what", "is"), _made_with(summary)),
        ],
    )


def render_comparison(left: RunRecord, right: RunRecord) -> str:
    """Return the page of two runs: numbers side by side, changed keys of the config, curves of both in one chart."""
    names = [
        run.name if left.name != right.name else run.folder.name
        for run in (left, right)
    ]
    if names[0] == names[1]:
        names = [str(run.folder) for run in (left, right)]
    head = ("", *(f">{name}" for name in names), ">ratio")
    keys = [left.keys, right.keys]
    changed = [
        (key, *(of.get(key, "not set") for of in keys))
        for key in dict.fromkeys([*keys[0], *keys[1]])
        if keys[0].get(key) != keys[1].get(key)
    ]
    pictures = "".join(
        f"<h3>{escape(n)}</h3>{run.timeline}"
        for n, run in zip(names, (left, right), strict=True)
    )
    return document(
        f"{names[0]} and {names[1]}",
        [
            _LOOK,
            f"<h1>{escape(names[0])} and {escape(names[1])}</h1>",
            *(
                f"<p>{escape(f'{run.folder}: {_state(run)}; {_machines(run)}')}</p>"
                for run in (left, right)
            ),
            *_section("Numbers", head, _side_by_side(left, right)),
            *(
                _section("Changed keys of the config", ("key", *names), changed)
                or ["<p>The same config.</p>"]
            ),
            *_curves(dict(zip(names, (left, right), strict=True))),
            f'<h2>Timeline</h2>\n<div class="plan">{pictures}</div>',
        ],
    )


def _section(
    title: str, header: Sequence[str], rows: Rows, note: str = ""
) -> list[str]:
    """Return a heading and a table; nothing without rows."""
    found = list(rows)
    if not found:
        return []
    more = (
        f"<p>and {len(found) - _MOST_ROWS} more</p>" if len(found) > _MOST_ROWS else ""
    )
    return [
        f"<h2>{title}</h2>\n"
        + f"<p>{note}</p>\n" * bool(note)
        + table(header, found[:_MOST_ROWS])
        + more
    ]


def _seconds(value: float) -> str:
    if 0 < value < 1e-3:
        return f"{1e6 * value:.3g} µs"
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s"


def _state(run: RunRecord) -> str:
    summary = run.summary
    keys = run.keys
    if summary.get("state") == STOPPED:
        return STOPPED
    if not summary.get("policy"):
        return FAILED
    if summary["iterations"] >= int(
        keys.get("runner.total_iterations", RunnerConfig().total_iterations)
    ):
        return "finished"
    goal = keys.get("runner.stop_at_return", "null")
    reached = summary.get("return_last")
    if goal != "null" and reached is not None and reached >= float(goal):
        return "goal reached"
    return "ended early"


def _machines(run: RunRecord) -> str:
    return run.plan_text.partition("\n")[0].removeprefix("plan: ")


def _score(summary: Mapping[str, Any]) -> str:
    if "env_steps" in summary:
        return "return"
    return "reward"


def _tiles(run: RunRecord) -> Iterator[tuple[str, str]]:
    summary, usage = run.summary, run.summary.get("utilisation", {})
    first, last = (summary.get(key) for key in ("return_first", "return_last"))
    if first is not None and last is not None:
        yield (
            number(last),
            f"{_score(summary)}, from {number(first)} in the first iteration",
        )
    if (held_out := summary.get("eval_last")) is not None:
        yield (
            number(held_out),
            f"reward of held-out prompts, from {number(summary['eval_first'])}",
        )
    yield (
        _seconds(summary["wall_s"]),
        f"start {_seconds(summary['start_s'])}, training {_seconds(summary['train_s'])}",
    )
    steps = "env_steps" if "env_steps" in summary else "answers"
    made = f"{summary[steps]:,} in {summary['iterations']:,} {plural(summary['iterations'], 'iteration')}"
    yield (
        f"{number(summary[f'{steps}_per_s'])} / s",
        f"{steps.replace('_', ' ')}: {made}",
    )
    if usage:
        shares = ", ".join(
            f"{name} {usage['shares'][key]:.0%}"
            for key, name in _SHARES.items()
            if key != "busy"
        )
        yield (
            f"{usage['shares']['busy']:.0%} at work",
            f"{shares}; {usage['accelerator_hours']:.3g} accelerator hours",
        )


def _lines(run: RunRecord) -> Iterator[str]:
    """Say where the policy is, and what the latest iterations waited for."""
    for key in ("policy", "checkpoint"):
        if run.summary.get(key):
            yield f"{key}: {run.summary[key]}"
    if whole := run.metrics.get("time/iteration_s"):
        last = whole.iterations[-1]
        latest = {
            name: series.recent
            for name, series in run.metrics.items()
            if series.iterations[-1] == last
        }
        yield f"bottleneck of an iteration: {bottleneck(latest, run.plan['schedule']['active'])}"


def _uses(run: RunRecord) -> Rows:
    for stage, row in run.summary.get("utilisation", {}).get("stages", {}).items():
        planned = row["planned_at_work"]
        at_work = "" if stage == SYNC else f"{row['at_work']:.1f}"
        yield (
            stage,
            _seconds(row["seconds"]),
            _seconds(row["moves_s"]),
            at_work,
            "" if planned is None else str(planned),
        )


def _accelerators(run: RunRecord) -> list[str]:
    """Fold accelerators with the same components into one row."""
    by_number = run.summary.get("utilisation", {}).get("by_accelerator", {})
    users = defaultdict[int, list[str]](list)
    for component, row in run.plan["components"].items():
        for a in {a for rank in row["ranks"] for a in rank["accelerators"]}:
            users[a].append(component)
    folds = defaultdict[tuple[str, ...], list[int]](list)
    for text in by_number:
        folds[tuple(users[int(text)])].append(int(text))
    rows = list[tuple[str, ...]]()
    for names, numbers in folds.items():
        whom = (str(Ranges.of(range(a, a + 1) for a in numbers)), ", ".join(names))
        for stage in by_number[str(numbers[0])]:
            busy = [by_number[str(a)][stage]["busy_s"] for a in numbers]
            idle = [by_number[str(a)][stage]["idle_s"] for a in numbers]
            shares = [
                f"{b / ((b + i) or 1.0):.0%}"
                for b, i in sorted(zip(busy, idle, strict=True))
            ]
            share = (
                shares[0] if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"
            )
            rows.append(
                (
                    *whom,
                    stage,
                    *(_seconds(sum(each) / len(numbers)) for each in (busy, idle)),
                    share,
                )
            )
            whom = ("", "")
    note = "Of one accelerator, on average; the share is from the least to the most busy. Moves and sync are above."
    header = (
        "accelerators",
        "components",
        "stage",
        ">at work",
        ">idle",
        ">share at work",
    )
    return _section("Accelerators", header, rows, note)


def _parts(run: RunRecord) -> Rows:
    for part, seconds in sorted(
        run.summary["seconds"].items(),
        key=lambda item: (item[0].startswith("start_"), -item[1]),
    ):
        series = (
            None if part.startswith("start_") else run.metrics.get(f"time/{part}_s")
        )
        yield (
            part.replace("_", " ", 1),
            _seconds(seconds),
            _seconds(series.recent) if series else "",
        )


def _memory(summary: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    held = summary.get("memory", {})
    return {
        f"{component} {word}": of
        for component, row in held.items()
        for word, of in row.items()
        if any(of.values())
    }


def _against(
    rows: Mapping[str, Mapping[str, float]], show: Callable[[float], str]
) -> Rows:
    for name, of in rows.items():
        predicted = of["predicted"]
        measured = of["measured"]
        yield (
            name,
            show(predicted),
            show(measured),
            f"{measured / predicted:.2f}" if predicted else "",
        )


def _curves(runs: Mapping[str, RunRecord]) -> Iterator[str]:
    """Draw a chart for each metric, with a line for each run; of one run also its stages and shares together."""
    metrics = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    together = list[str]()
    if len(runs) == 1:
        (run,) = runs.values()
        for title, names in (
            (
                "seconds of an iteration",
                {f"time/{stage}_s": stage for stage in _STAGES},
            ),
            (
                "shares of the accelerators' time",
                {f"util/{key}_share": name for key, name in _SHARES.items()},
            ),
        ):
            there = [
                (label, run.metrics[name])
                for name, label in names.items()
                if name in run.metrics
            ]
            if there:
                together.append(
                    chart(
                        title,
                        [
                            Line(label, at, series)
                            for at, (label, series) in enumerate(there)
                        ],
                    )
                )
    for title, ends in _CURVES.items():
        found = [name for end in ends for name in metrics if name.endswith(end)]
        charts = [
            chart(
                name,
                [
                    Line(label, at, r.metrics[name])
                    for at, (label, r) in enumerate(runs.items())
                    if name in r.metrics
                ],
            )
            for name in dict.fromkeys(found)
        ]
        charts += together if title == "Speed" else []
        if charts:
            yield f'<h2>{title}</h2>\n<div class="charts">{"".join(charts)}</div>'
    for label, run in runs.items():
        if not run.metrics:
            yield f"<p>{escape(label)} has no curves: its runner.sinks have no jsonl.</p>"


def _samples(run: RunRecord) -> Rows:
    for sample in run.samples:
        numbers = (
            f"{sample.get('iteration', '')}",
            *(number(sample[n]) if n in sample else "" for n in ("reward", "tokens")),
        )
        texts = (str(sample.get(name, "")) for name in ("prompt", "answer"))
        yield (
            *numbers,
            *(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …" for text in texts),
        )


def _weights(run: RunRecord) -> Rows:
    """Yield what the actor writes and the rollout reads, by transport; a rate is of all transports together."""
    for verb, sizes in (
        ("actor/push", "actor/pushed_"),
        ("rollout/pull", "rollout/pulled_"),
    ):
        what = "weights, written" if verb == "actor/push" else "weights, read"
        rate = run.metrics.get(f"{verb}_gb_per_s")
        shown = "" if rate is None else _rate(1e9 * rate.recent)
        for name, series in run.metrics.items():
            transport = name[len(sizes) : -len("_bytes")].replace(
                "_", " "
            )  # none in the name of their sum
            if (
                name.startswith(sizes)
                and name.endswith("_bytes")
                and transport
                and any(series.values)
            ):
                sent = (
                    show_bytes(int(series.recent)),
                    show_bytes(int(sum(series.values))),
                )
                yield f"{what}: {transport}", "actor → rollout", *sent, shown
                shown = ""


def _channel_bytes(summary: Mapping[str, Any]) -> Rows:
    """Yield channels between processes: between threads items pass by reference."""
    earlier = summary.get(
        "before_resume", {}
    )  # channels are new where a run is resumed, and count from zero
    iterations, train_s = (
        summary[name] - earlier.get(name, 0) for name in ("iterations", "train_s")
    )
    for name, seen in summary.get("waits", {}).items():
        if (size := seen.get("bytes", 0)) and iterations > 0 and train_s > 0.0:
            sent = (show_bytes(size // iterations), show_bytes(size))
            yield f"channel {name}", _ends(seen), *sent, _rate(size / train_s)


def _rate(bytes_per_s: float) -> str:
    return f"{show_bytes(int(bytes_per_s))}/s"


def _channels(summary: Mapping[str, Any]) -> Rows:
    for name, seen in summary.get("waits", {}).items():
        counts = (f"{seen['items']:,}", f"{seen['high_water_items']:,}")
        waits = (_seconds(seen["consumer_wait_s"]), _seconds(seen["producer_wait_s"]))
        yield name, _ends(seen), *counts, *waits, str(seen["staleness_max"])


def _ends(seen: Mapping[str, Any]) -> str:
    return " → ".join("+".join(seen[side]) for side in ("producers", "consumers"))


def _faults(summary: Mapping[str, Any]) -> Rows:
    for event in summary.get("faults", {}).get("events", []):
        lost = _seconds(event["recovery_s"] + event["redone_s"])
        yield str(event["iteration"]), event["stage"], event["what"], event["why"], lost


def _skipped(summary: Mapping[str, Any]) -> Rows:
    for name, count in summary.get("skipped", {}).get("counts", {}).items():
        yield name, f"{count:,}"


def _made_with(summary: Mapping[str, Any]) -> Rows:
    for name, value in (
        *summary.get("machine", {}).items(),
        *summary.get("versions", {}).items(),
    ):
        yield name, str(value)


def _side_by_side(left: RunRecord, right: RunRecord) -> Rows:
    of = [_numbers(run) for run in (left, right)]
    for name in dict.fromkeys([*of[0], *of[1]]):
        values = [numbers.get(name) for numbers in of]
        shown = ["" if value is None else number(value) for value in values]
        ratio = (
            f"{values[1] / values[0]:.2f}"
            if values[0] and values[1] is not None
            else ""
        )
        yield name, *shown, ratio


def _numbers(run: RunRecord) -> dict[str, float]:
    summary, usage = run.summary, run.summary.get("utilisation", {})
    found = {
        f"{_score(summary)}, last": summary.get("return_last"),
        "held out, last": summary.get("eval_last"),
    }
    found |= {
        name.replace("_", " "): summary[name]
        for name in ("iterations", "wall_s", "start_s", "train_s")
    }
    found |= {
        name.replace("_", " "): value
        for name, value in summary.items()
        if name.endswith("_per_s")
    }
    found |= {
        f"share {name}": usage["shares"][key] for key, name in _SHARES.items() if usage
    }
    for part, seconds in summary["seconds"].items():
        name = part.replace("_", " ", 1)
        once = part.startswith("start_")
        found[f"{name} s" if once else f"{name} s, mean"] = (
            seconds if once else seconds / summary["iterations"]
        )
    found |= {f"{name} bytes": of["measured"] for name, of in _memory(summary).items()}
    return {name: value for name, value in found.items() if value is not None}
