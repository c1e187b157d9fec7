"""An HTML page about a run, or about two runs side by side, made from the files in the runs' folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rlplace.config.blocks.engine import RunnerConfig
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.show.drawing import PALETTE, style
from rlplace.placement.show.html import document, table, tiles
from rlplace.report import changes
from rlplace.report.charts import CONTROLS, Line, chart, number, scripts, styles
from rlplace.report.record import RunRecord
from rlplace.report.summary import (
    SIMULATED,
    is_custom,
    parts_of_training,
    steps_name,
)
from rlplace.report.timeline import LOOK
from rlplace.report.trackers import FAILED, FINISHED, STOPPED
from rlplace.report.utilisation import bottleneck, only_sync
from rlplace.units import clipped, plural, show_bytes

_LOOK = (
    f"{style(len(PALETTE))}<style>{LOOK}{styles()}.plan svg{{margin-bottom:12px}}details{{margin:12px 0}}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(290px,100%),1fr));gap:12px}"
    "summary{cursor:pointer}.lines{margin-top:16px;overflow-wrap:anywhere}@media(min-width:1400px){main{max-width:1320px}}"
    ".samples td{vertical-align:top}"
    ".samples td:nth-child(n+4){white-space:pre-wrap;overflow-wrap:anywhere;min-width:220px}"
    "</style>"
)
_SHARES = {"busy": "at work", "bubble": "idle", "moves": "moves", "sync": "sync"}
# Headings of curves, and the ends of the names of metrics below them.
_SPEED = "Speed"
_RETURN = "Return"
_CURVES: Mapping[str, Sequence[str]] = {
    _RETURN: (
        "/mean_return",
        "env/return",
        "actor/reward",
        "eval/return",
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
    "KL": (
        "/approx_kl",
        "/kl_reference",
        "/kl_teacher",
        "/mismatch",
        "/mismatch_max",
        "/mismatch_kl",
    ),
    _SPEED: ("/steps_per_s", "/tokens_per_s", "time/iteration_s"),
}
# Looks of the states that are not as good as finished.
_LOOKS = {FAILED: "tight", STOPPED: "unknown", "ended early": "unknown"}
# Headings of tables; `>` sets a column to the right.
_USE = ("stage", ">seconds", ">moves into it", ">accelerators at work", ">planned")
_ACCELERATOR = (
    "accelerators",
    "components",
    "stage",
    ">at work",
    ">idle",
    ">share at work",
)
_PART = ("part", ">whole run", ">one iteration")
_TIMER = ("timer", ">whole run", ">one iteration")
_TIMERS = "What workers timed inside their methods; push, pull and load are of weights."
_FAULT = ("iteration", "stage", "what", "why", ">lost")
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
_MOST_KEYS = 2  # changed keys of the config that name a run in a comparison
_SHORT = 24  # characters of such a value
# Keys that say where a run writes, not what it is
_PLACES_OF_RUN = ("runner.output_dir", "resume")

Rows = Iterable[Sequence[str]]
Numbers = Mapping[str, float]


def render_report(run: RunRecord) -> str:
    """Return an HTML page about one run."""
    summary = run.summary
    state = _state(run)
    heading = (
        f'{escape(run.name)}<span class="verdict {_LOOKS.get(state, "fits")}">{state}'
    )
    predicted = summary.get("predicted", {})
    source = escape(predicted.get("from", ""))
    curves = _curves({run.name: run})
    # The curves about speed are shown with the tables of seconds.
    speed = curves.pop(_SPEED, "")
    parts = [
        _LOOK,
        f"<h1>{heading}</span></h1>",
        f"<p>{escape(_machines(run))}</p>",
        tiles(_tiles(run)),
        # How the policy learned.
        *_learning(curves, {run.name: run}),
        '<div class="samples">',
        *_section("Samples", _SAMPLE, _samples(run), _SAMPLES),
        "</div>",
        '<div class="lines">',
        *(f"<p>{escape(line)}</p>" for line in _lines(run)),
        "</div>",
        # The time of the run, from the picture to the parts.
        f'<h2>Timeline</h2>\n<div class="plan">{run.timeline}</div>',
        *_changes(run),
        *_section("Accelerators by stage", _USE, _uses(run)),
        *_accelerators(run),
        *_section("Seconds by part", _PART, _parts(run)),
        *_section("Timers of workers", _TIMER, _timers(run), _TIMERS),
        *_section(
            "Seconds of an iteration, predicted and measured",
            _AGAINST,
            _against(predicted.get("seconds", {}), _seconds),
            f"From {source}; measured is a median.",
        ),
        *_section(
            "Memory of one accelerator",
            _AGAINST,
            _against(_memory(summary), _bytes),
        ),
        speed,
        # Data that was moved.
        *_section(
            "Transfers",
            _TRANSFER,
            [*_weights(run), *_channel_bytes(summary)],
            _TRANSFERS,
        ),
        *_section("Channels", _CHANNEL, _channels(summary)),
        # What went wrong.
        *_section("Faults", _FAULT, _faults(summary)),
        *_section(
            "Left out, for it was not finite",
            ("metric", ">count"),
            _skipped(summary),
        ),
        # How the run was set up.
        f'<h2>Plan</h2>\n<div class="plan">{run.plan_picture}</div>'
        + _folded("plan.txt", run.plan_text),
        f"<h2>Config</h2>\n{_folded('config.yaml', run.config)}",
        *_section("Machine and versions", ("what", "is"), _made_with(summary)),
    ]
    return document(f"{run.name}: report", parts, scripts())


def render_comparison(left: RunRecord, right: RunRecord) -> str:
    """Return an HTML page that compares two runs.

    It shows the numbers of both runs side by side, the config keys with different values, and charts with the curves of
    both runs.
    """
    names = _distinct_names(left, right)
    runs = dict(zip(names, (left, right), strict=True))
    title = f"{names[0]} and {names[1]}"
    parts = [_LOOK, f"<h1>{escape(title)}</h1>"]
    for run in (left, right):
        line = f"{run.folder}: {_state(run)}; {_machines(run)}"
        parts.append(f"<p>{escape(line)}</p>")
    # Curves of both runs in the same charts.
    curves = _curves(runs)
    speed = curves.pop(_SPEED, "")
    parts += _learning(curves, runs)
    heading = ("", *(f">{name}" for name in names), ">ratio")
    parts += _section("Numbers", heading, _side_by_side(left, right))

    # Keys of either config with different values, as they are written.
    changed = []
    for key in _changed_keys(left, right):
        shown = [run.keys.get(key, "not set") for run in (left, right)]
        changed.append((key, *shown))
    if changed:
        parts += _section("Changed keys of the config", ("key", *names), changed)
    else:
        parts.append("<p>The same config.</p>")

    # Speed, and timelines below each other.
    parts.append(speed)
    pictures = ""
    for name, run in runs.items():
        pictures += f"<h3>{escape(name)}</h3>{run.timeline}"
    parts.append(f'<h2>Timeline</h2>\n<div class="plan">{pictures}</div>')
    return document(title, parts, scripts())


def _distinct_names(left: RunRecord, right: RunRecord) -> list[str]:
    """Return two different names for the runs `left` and `right`, in this order.

    The names are those of the configs. If they are equal, the names say which values of the config differ, such as
    `lr=0.001`. If too many differ, or none, the names are those of the folders; if these are equal as well, the paths
    of the folders.
    """
    if left.name != right.name:
        return [left.name, right.name]
    keys = [
        key for key in _changed_keys(left, right) if not key.startswith(_PLACES_OF_RUN)
    ]
    if 0 < len(keys) <= _MOST_KEYS:
        return [_values_of(run, keys) for run in (left, right)]
    if left.folder.name != right.folder.name:
        return [left.folder.name, right.folder.name]
    return [str(left.folder), str(right.folder)]


def _changed_keys(left: RunRecord, right: RunRecord) -> list[str]:
    """Return the keys of either config with different values."""
    keys = dict.fromkeys([*left.keys, *right.keys])
    return [key for key in keys if left.keys.get(key) != right.keys.get(key)]


def _values_of(run: RunRecord, keys: Sequence[str]) -> str:
    """Return the values of these keys of a run's config as text, each with the last word of its key."""
    texts = []
    for key in keys:
        value = clipped(run.keys.get(key, "not set"), _SHORT, "…")
        texts.append(f"{key.rpartition('.')[2]}={value}")
    return f"{run.name} {', '.join(texts)}"


def _folded(name: str, content: str) -> str:
    """Return HTML with the heading `name`; a click on it shows `content`."""
    inside = f"<summary>{name}</summary><pre>{escape(content)}</pre>"
    return f"<details>{inside}</details>"


def _section(
    title: str, header: Sequence[str], rows: Rows, note: str = ""
) -> list[str]:
    """Return a list with the HTML of one section: a heading, a note and a table; an empty list if there are no rows.

    `title`: text of the heading. `header`: names of the columns. `note`: HTML between heading and table. The table has
    at most `_MOST_ROWS` rows; a line below it says how many rows were left out.
    """
    found = list(rows)
    if not found:
        return []
    part = f"<h2>{title}</h2>\n"
    if note:
        part += f"<p>{note}</p>\n"
    part += table(header, found[:_MOST_ROWS])
    if len(found) > _MOST_ROWS:
        part += f"<p>and {len(found) - _MOST_ROWS} more</p>"
    return [part]


def _seconds(value: float) -> str:
    """Return a time in seconds as text with about three digits; below a millisecond, in microseconds."""
    if 0 < value < 1e-3:
        return f"{1e6 * value:.3g} µs"
    if value >= 1000:
        return f"{value:,.0f} s"
    return f"{value:.3g} s"


def _bytes(size: float) -> str:
    return show_bytes(int(size))


def _state(run: RunRecord) -> str:
    """Return how a run ended, as text: finished, goal reached, stopped, failed or ended early."""
    summary = run.summary
    keys = run.keys
    # Older versions wrote no state, but named the policy of a finished run.
    state = summary.get("state") or (FINISHED if summary.get("policy") else FAILED)
    if state != FINISHED:
        return str(state)
    total = keys.get("runner.total_iterations", RunnerConfig().total_iterations)
    if summary["iterations"] >= int(total):
        return FINISHED
    goal = keys.get("runner.stop_at_return", "null")
    reached = summary.get("return_last")
    if goal != "null" and reached is not None and reached >= float(goal):
        return "goal reached"
    return "ended early"


def _machines(run: RunRecord) -> str:
    """Return a text about the placement and the machines of a run, the first line of its plan."""
    return run.plan_text.partition("\n")[0].removeprefix("plan: ")


def _score(summary: Mapping[str, Any]) -> str:
    named = summary.get("score_name")
    if named:
        return str(named)
    return "return" if "env_steps" in summary else "reward"


def _tiles(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (large text, small text) of each tile at the top of the page.

    Tiles show the score, the score of held-out prompts, times, speed, and the use of accelerators.
    """
    summary = run.summary
    # Return or reward; None before the first episode has finished.
    first = summary.get("return_first")
    last = summary.get("return_last")
    if first is not None and last is not None:
        score = f"{_score(summary)}, from {number(first)} in the first iteration"
        yield number(last), score

    held_out = summary.get("eval_last")
    if held_out is not None:
        before = number(summary["eval_first"])
        what = "reward of held-out prompts"
        if steps_name(summary) == SIMULATED.steps:
            what = "return of the last evaluation"
        elif is_custom(summary):
            what = "score of held-out data"
        yield number(held_out), f"{what}, from {before}"

    # Seconds of the whole command, and steps or answers for each second of training.
    start = _seconds(summary["start_s"])
    training = _seconds(summary["train_s"])
    yield _seconds(summary["wall_s"]), f"start {start}, training {training}"

    steps = steps_name(summary)
    iterations = summary["iterations"]
    noun = plural(iterations, "iteration")
    made = f"{summary[steps]:,} in {iterations:,} {noun}"
    speed = number(summary[f"{steps}_per_s"])
    yield f"{speed} / s", f"{steps.replace('_', ' ')}: {made}"

    # Shares of the accelerators' time; a job without accelerators has none.
    usage = summary.get("utilisation", {})
    if usage:
        shares = []
        for key, name in _SHARES.items():
            if key != "busy":
                shares.append(f"{name} {usage['shares'][key]:.0%}")
        hours = f"{usage['accelerator_hours']:.3g} accelerator hours"
        yield f"{usage['shares']['busy']:.0%} at work", f"{', '.join(shares)}; {hours}"


def _lines(run: RunRecord) -> Iterator[str]:
    """Yield the lines below the tiles: paths of policy and checkpoint, and the bottleneck of the latest iterations."""
    for key in ("policy", "checkpoint"):
        if run.summary.get(key):
            yield f"{key}: {run.summary[key]}"
    whole = run.metrics.get("time/iteration_s")
    if whole is None:
        return
    # Only metrics of the last iteration: others are of stages that it did not have.
    last = whole.iterations[-1]
    latest = {}
    for name, series in run.metrics.items():
        if series.iterations[-1] == last:
            latest[name] = series.recent
    longest = bottleneck(latest, run.plan["schedule"]["active"])
    yield f"bottleneck of an iteration: {longest}"


def _uses(run: RunRecord) -> Rows:
    """Yield a table row for each stage about its seconds and accelerators at work. The columns are those of `_USE`."""
    for stage, row in run.summary.get("utilisation", {}).get("stages", {}).items():
        at_work = ""
        if not only_sync(row["seconds"], row.get("sync_s", 0.0)):
            at_work = f"{row['at_work']:.1f}"
        planned = ""
        if row["planned_at_work"] is not None:
            planned = str(row["planned_at_work"])
        seconds = _seconds(row["seconds"])
        yield stage, seconds, _seconds(row["moves_s"]), at_work, planned


def _accelerators(run: RunRecord) -> list[str]:
    """Return a list with the HTML of the section about accelerators: how busy they were in each stage.

    Accelerators with the same components are shown together, with averages.
    """
    by_number = run.summary.get("utilisation", {}).get("by_accelerator", {})
    users = defaultdict[int, list[str]](list)
    for component, row in run.plan["components"].items():
        held = {number for rank in row["ranks"] for number in rank["accelerators"]}
        for accelerator in held:
            users[accelerator].append(component)

    # Accelerators with the same components -> their numbers.
    folds = defaultdict[tuple[str, ...], list[int]](list)
    for text in by_number:
        folds[tuple(users[int(text)])].append(int(text))
    rows = list[tuple[str, ...]]()
    for names, numbers in folds.items():
        of_fold = [by_number[str(accelerator)] for accelerator in numbers]
        places = str(Ranges.of(range(a, a + 1) for a in numbers))
        head = (places, ", ".join(names))
        for stage in of_fold[0]:
            rows.append((*head, stage, *_use(of_fold, stage)))
            # Only the first of its rows names the accelerators
            head = ("", "")
    note = "Of one accelerator, on average; the share is from the least to the most busy. Moves and sync are above."
    return _section("Accelerators", _ACCELERATOR, rows, note)


def _use(
    accelerators: Sequence[Mapping[str, Numbers]], stage: str
) -> tuple[str, str, str]:
    """Return three texts for a stage: mean busy seconds, mean idle seconds, and the range of busy shares.

    `accelerators`: for each accelerator, stage -> `busy_s` and `idle_s`.
    """
    count = len(accelerators)
    busy_s = 0.0
    idle_s = 0.0
    pairs = []
    for uses in accelerators:
        use = uses[stage]
        busy_s += use["busy_s"]
        idle_s += use["idle_s"]
        pairs.append((use["busy_s"], use["idle_s"]))
    shares = []
    for busy, idle in sorted(pairs):
        shares.append(f"{busy / ((busy + idle) or 1.0):.0%}")
    share = shares[0]
    if shares[0] != shares[-1]:
        share = f"{shares[0]} to {shares[-1]}"
    return _seconds(busy_s / count), _seconds(idle_s / count), share


def _parts(run: RunRecord) -> Rows:
    """Return a table row for each part of the run's time: name, seconds in the whole run, seconds in one iteration.

    Parts of iterations come first, then parts of the start; the longest parts come first in each of these groups.
    """
    iterated = []
    started = []
    longest_first = sorted(run.summary["seconds"].items(), key=lambda item: -item[1])
    for part, seconds in longest_first:
        name = part.replace("_", " ", 1)
        if part.startswith("start_"):
            started.append((name, _seconds(seconds), ""))
            continue
        each = ""
        series = run.metrics.get(f"time/{part}_s")
        if series is not None:
            each = _seconds(series.recent)
        iterated.append((name, _seconds(seconds), each))
    return [*iterated, *started]


def _timers(run: RunRecord) -> Rows:
    """Yield table rows with the timers of a custom job's workers; no rows for other jobs.

    The columns are those of `_TIMER`. Rows are in the order of components, and each component's longest timer comes
    first.
    """
    if not is_custom(run.summary):
        return
    for component in run.plan["components"]:
        found = []
        for name in _metrics_of(component, run.metrics):
            if name.endswith("_s"):
                series = run.metrics[name]
                timer = name.removesuffix("_s").replace("/", " ", 1)
                found.append((sum(series.values), timer, series.recent))
        for whole, timer, each in sorted(found, reverse=True):
            yield timer, _seconds(whole), _seconds(each)


def _metrics_of(component: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are metrics of `component`.

    Metrics of bytes and of their rates are left out, because another table shows them.
    """
    return [
        name
        for name in names
        if name.startswith(f"{component}/")
        and not name.endswith(("_bytes", "_gb_per_s"))
    ]


def _memory(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return `<component> <residency>` -> its `predicted` and `measured` bytes.

    Entries are left out if both numbers are 0 or None.
    """
    found = {}
    for component, row in summary.get("memory", {}).items():
        for word, sizes in row.items():
            if any(sizes.values()):
                found[f"{component} {word}"] = sizes
    return found


def _against(
    rows: Mapping[str, Mapping[str, Any]], show: Callable[[float], str]
) -> Rows:
    """Yield table rows that compare predictions: name, predicted value, measured value, measured / predicted.

    `rows`: name -> `predicted` value (None: not known) and `measured` value. `show`: converts a value to text.
    """
    for name, numbers in rows.items():
        predicted = numbers["predicted"]
        measured = numbers["measured"]
        ratio = ""
        if predicted:
            ratio = f"{measured / predicted:.2f}"
        shown = "not known"
        if predicted is not None:
            shown = show(predicted)
        yield name, shown, show(measured), ratio


def _curves(runs: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return heading -> HTML of the section with the curves below this heading. `runs`: label -> run.

    The first curve of the page is the score, as wide as the page.
    """
    metrics = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    if all(is_custom(run.summary) for run in runs.values()):
        headings = _curves_of_custom(runs, metrics)
    else:
        headings = _curves_of_shipped(metrics)
    sections: dict[str, str] = {}
    for title, names in headings.items():
        charts: list[str] = []
        for name in names:
            first = not sections and not charts and title != _SPEED
            charts.append(_curve(name, runs, wide=first))
        if title == _SPEED and len(runs) == 1:
            (run,) = runs.values()
            charts += _together(run)
        if any(charts):
            inside = "".join(charts)
            if title == _RETURN:
                # Of language models it is the reward
                names_of_score = [_score(run.summary) for run in runs.values()]
                title = " or ".join(dict.fromkeys(names_of_score)).capitalize()
            sections[title] = (
                f'<h2>{escape(title)}</h2>\n<div class="charts">{inside}</div>'
            )
    return sections


def _learning(
    curves: Mapping[str, str], runs: Mapping[str, RunRecord]
) -> Iterator[str]:
    """Yield the HTML of the curves about learning, and a line for each run that has none.

    `curves`: heading -> HTML of its section. `runs`: label -> run.
    """
    if curves:
        yield CONTROLS
    yield from curves.values()
    for label, run in runs.items():
        if not run.metrics:
            yield f"<p>{escape(label)} has no curves: its runner.sinks have no jsonl.</p>"


def _steps(run: RunRecord) -> Mapping[float, float] | None:
    """Return iteration -> env steps or samples until then; None for a job without them."""
    steps = run.metrics.get("env_steps")
    if steps is None:
        return None
    return dict(zip(steps.iterations, steps.values, strict=True))


def _axis(runs: Iterable[RunRecord]) -> str:
    """Return the name of the horizontal axis of charts with these runs."""
    names = set()
    for run in runs:
        if _steps(run) is None:
            names.add("iterations")
        else:
            names.add(steps_name(run.summary).replace("_", " "))
    return " or ".join(sorted(names))


def _curves_of_shipped(metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return heading -> names of the metrics below it, for jobs that come with rlplace.

    `metrics`: names of all metrics. A metric's heading follows from the end of its name, see `_CURVES`.
    """
    found = {}
    for title, ends in _CURVES.items():
        # A dict keeps each name once.
        names: dict[str, None] = {}
        for end in ends:
            names |= dict.fromkeys(name for name in metrics if name.endswith(end))
        found[title] = list(names)
    return found


def _curves_of_custom(
    runs: Mapping[str, RunRecord], metrics: Sequence[str]
) -> dict[str, list[str]]:
    """Return heading -> names of the metrics below it, for custom jobs.

    First the score, then the metrics of each component, then the seconds of an iteration. `runs`: label -> run.
    `metrics`: names of all metrics.
    """
    scores = [str(run.summary.get("score", "")) for run in runs.values()]
    found = {"Score": [name for name in dict.fromkeys(scores) if name in metrics]}
    for run in runs.values():
        for component in run.plan["components"]:
            names = _metrics_of(component, metrics)
            found[component] = [name for name in names if name not in scores]
    found[_SPEED] = [name for name in metrics if name == "time/iteration_s"]
    return found


def _curve(metric: str, runs: Mapping[str, RunRecord], wide: bool = False) -> str:
    """Return a chart of one metric, with a line for each run that has this metric.

    `runs`: label -> run. `wide`: whether the chart is as wide as the page.
    """
    lines = []
    for at, (label, run) in enumerate(runs.items()):
        if metric in run.metrics:
            lines.append(Line(label, at, run.metrics[metric], _steps(run)))
    return chart(metric, lines, _axis(runs.values()), wide)


def _together(run: RunRecord) -> Iterator[str]:
    """Yield two charts of one run: the seconds of all its stages, and all shares of the accelerators' time."""
    stages = {}
    for stage in parts_of_training(run.summary):
        stages[f"time/{stage.replace(' ', '_')}_s"] = stage
    shares = {f"util/{key}_share": name for key, name in _SHARES.items()}
    for title, labels in (
        ("seconds of an iteration", stages),
        ("shares of the accelerators' time", shares),
    ):
        lines: list[Line] = []
        for metric, label in labels.items():
            if metric in run.metrics:
                series = run.metrics[metric]
                lines.append(Line(label, len(lines), series, _steps(run)))
        if lines:
            yield chart(title, lines, _axis([run]))


def _samples(run: RunRecord) -> Rows:
    """Yield a table row for each recorded sample, with the columns of `_SAMPLE`."""
    for sample in run.samples:
        row = [str(sample.get("iteration", ""))]
        for key in ("reward", "tokens"):
            shown = ""
            if key in sample:
                shown = number(sample[key])
            row.append(shown)
        for key in ("prompt", "answer"):
            row.append(clipped(str(sample.get(key, "")), _SHOWN, " …"))
        yield row


def _weights(run: RunRecord) -> Rows:
    """Yield table rows about sent weights: for each transport, the bytes written, then the bytes read.

    The columns are those of `_TRANSFER`. The rate is known only for all transports together. It is shown in the first
    row of written weights and in the first row of read weights.
    """
    for what, verb, sizes in (
        ("weights, written", "actor/push", "actor/pushed_"),
        ("weights, read", "rollout/pull", "rollout/pulled_"),
    ):
        rate = ""
        rates = run.metrics.get(f"{verb}_gb_per_s")
        if rates is not None:
            rate = _rate(1e9 * rates.recent)
        for name, series in run.metrics.items():
            if not name.startswith(sizes) or not name.endswith("_bytes"):
                continue
            # The sum of all transports names none.
            transport = name[len(sizes) : -len("_bytes")].replace("_", " ")
            if transport and any(series.values):
                each = _bytes(series.recent)
                whole = _bytes(sum(series.values))
                yield f"{what}: {transport}", "actor → rollout", each, whole, rate
                rate = ""


def _channel_bytes(summary: Mapping[str, Any]) -> Rows:
    """Yield a table row for each channel between processes, with the columns of `_TRANSFER`.

    Channels between threads are left out, because they pass items by reference.
    """
    # Channels are new where a run is resumed, and count from zero.
    earlier = summary.get("before_resume", {})
    iterations = summary["iterations"] - earlier.get("iterations", 0)
    train_s = summary["train_s"] - earlier.get("train_s", 0)
    if iterations <= 0 or train_s <= 0.0:
        return
    for name, seen in summary.get("waits", {}).items():
        size = seen.get("bytes", 0)
        if size:
            each = show_bytes(size // iterations)
            rate = _rate(size / train_s)
            yield f"channel {name}", _ends(seen), each, show_bytes(size), rate


def _rate(bytes_per_s: float) -> str:
    return f"{show_bytes(int(bytes_per_s))}/s"


def _channels(summary: Mapping[str, Any]) -> Rows:
    """Yield a table row about the items and waiting times of each channel, with the columns of `_CHANNEL`."""
    for name, seen in summary.get("waits", {}).items():
        yield (
            name,
            _ends(seen),
            f"{seen['items']:,}",
            f"{seen['high_water_items']:,}",
            _seconds(seen["consumer_wait_s"]),
            _seconds(seen["producer_wait_s"]),
            str(seen["staleness_max"]),
        )


def _ends(seen: Mapping[str, Any]) -> str:
    """Return a text with the producers and consumers of a channel. `seen`: the channel's record in summary.json."""
    return f"{'+'.join(seen['producers'])} → {'+'.join(seen['consumers'])}"


def _faults(summary: Mapping[str, Any]) -> Rows:
    for event in summary.get("faults", {}).get("events", []):
        lost = _seconds(event["recovery_s"] + event["redone_s"])
        yield str(event["iteration"]), event["stage"], event["what"], event["why"], lost


def _changes(run: RunRecord) -> list[str]:
    """Return the section about the changes of the placement; an empty list for a run without any."""
    found = list(changes.rows(run))
    if not found:
        return []
    return [
        "<h2>Changes of the placement</h2>",
        changes.picture(run),
        f"<p>{changes.NOTE}</p>",
        table(changes.HEADER, found),
    ]


def _skipped(summary: Mapping[str, Any]) -> Rows:
    for name, count in summary.get("skipped", {}).get("counts", {}).items():
        yield name, f"{count:,}"


def _made_with(summary: Mapping[str, Any]) -> Rows:
    for part in ("machine", "versions"):
        for name, value in summary.get(part, {}).items():
            yield name, str(value)


def _side_by_side(left: RunRecord, right: RunRecord) -> Rows:
    """Yield a table row for each number of two runs: name, value in `left`, value in `right`, right / left."""
    ours = _numbers(left)
    theirs = _numbers(right)
    for name in dict.fromkeys([*ours, *theirs]):
        values = [ours.get(name), theirs.get(name)]
        shown = ["" if value is None else number(value) for value in values]
        ratio = ""
        if values[0] and values[1] is not None:
            ratio = f"{values[1] / values[0]:.2f}"
        yield name, *shown, ratio


def _numbers(run: RunRecord) -> dict[str, float]:
    """Return name in words -> value, for the numbers of a run that can be compared with another run."""
    summary = run.summary
    found: dict[str, float | None] = {
        f"{_score(summary)}, last": summary.get("return_last"),
        "held out, last": summary.get("eval_last"),
    }
    for key in ("iterations", "wall_s", "start_s", "train_s"):
        found[key.replace("_", " ")] = summary[key]
    for key, value in summary.items():
        if key.endswith("_per_s"):
            found[key.replace("_", " ")] = value

    usage = summary.get("utilisation", {})
    if usage:
        for key, name in _SHARES.items():
            found[f"share {name}"] = usage["shares"][key]

    # Parts of the start happen once, all others in each iteration.
    for part, seconds in summary["seconds"].items():
        name = part.replace("_", " ", 1)
        if part.startswith("start_"):
            found[f"{name} s"] = seconds
        else:
            found[f"{name} s, mean"] = seconds / summary["iterations"]
    for name, sizes in _memory(summary).items():
        found[f"{name} bytes"] = sizes["measured"]
    return {name: value for name, value in found.items() if value is not None}
