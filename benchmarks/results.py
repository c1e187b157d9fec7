"""Train the shipped tasks over several seeds, keep what each run learned, and make the page with the results.

    python benchmarks/results.py train                     all tasks and seeds that are not kept yet
    python benchmarks/results.py train hopper ant          these tasks alone
    python benchmarks/results.py train hopper seeds=0,1    these seeds alone
    python benchmarks/results.py                           the table
    python benchmarks/results.py --write                   docs/results.md, its picture, and the table of settings

Each run is one `python -m rlplace.train task=<task> placement=one_process runner.seed=<seed>`. What is kept of it is a
small file in benchmarks/results: settings, versions, the curve of returns, seconds. A run that is kept is not trained
again. benchmarks/results.toml has the returns that others have published.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.config.compose import TASK, group_names, with_hydra
from rlplace.extras import versions_of

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results"
PUBLISHED = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "results.svg"
SETTINGS_PAGE = ROOT / "docs" / "hyperparameters.md"
SEEDS = (0, 1, 2)
# Episodes of the evaluation at the end, with the most likely actions. The mean of 20 episodes is too noisy: of one
# policy of Pendulum it was -270, and -203 of 400 episodes.
EPISODES = 100
POINTS = 100  # most points of a kept curve
LIBRARIES = (
    "torch",
    "gymnasium",
    "mujoco",
    "numpy",
    "box2d",
    "gymnasium-robotics",
)
# Blocks of a config that decide what is learned, in contrast to where and how fast
LEARNER = (
    ("env", ("kind", "id", "total_num_envs", "wrappers", "kwargs")),
    ("actor", ("model", "optimizer")),
    ("algorithm", ()),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of one training run.

    `settings`: the learner's settings. `env_steps`: steps of all environments. `episodes`: episodes that ended.
    `sampled`: mean return of the last 100 training episodes, with actions drawn. `evaluated`: mean return of
    `eval_episodes` episodes after training, by the likeliest actions.
    `curve`: [env steps, mean return of the last 100 episodes] pairs. `wall_s`: seconds of the whole command.
    `cpu_s`: processor seconds of the same. `versions`: library -> version.
    """

    task: str
    seed: int
    settings: Mapping[str, Any]
    env_steps: int
    episodes: int
    sampled: float
    evaluated: float
    eval_episodes: int
    curve: Sequence[tuple[int, float]]
    wall_s: float
    cpu_s: float
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A return that others have published. `deviation`: over seeds or episodes, as `how` says; None: not given."""

    library: str
    env: str
    steps: int
    mean: float
    deviation: float | None


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings_of(task: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the learner's settings of a shipped task: what decides its results, the number of steps included.

    `overrides`: words that change its config.
    """
    (composed,) = with_hydra([f"task={task}", "placement=one_process", *overrides])
    found: dict[str, Any] = {}
    for block, keys in LEARNER:
        values = composed.mapping[block]
        found[block] = {key: values[key] for key in keys or values if key in values}
    found["runner"] = {
        "total_iterations": composed.mapping["runner"]["total_iterations"]
    }
    return found


def file_of(task: str, seed: int) -> Path:
    return KEPT / f"{task}-{seed}.json"


def train(task: str, seed: int, overrides: Sequence[str] = ()) -> Run:
    """Train a task with a seed, and return what is to be kept. Raises CalledProcessError if the run fails.

    `overrides`: words that change its config.
    """
    settings = settings_of(task, overrides)
    iterations = settings["runner"]["total_iterations"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"task={task}",
            "placement=one_process",
            f"runner.seed={seed}",
            f"runner.output_dir={folder}",
            "runner.sinks=[jsonl]",
            f"runner.eval_every={iterations}",
            f"runner.eval_episodes={EPISODES}",
            "checkpoint.every=0",
            *overrides,
        ]
        subprocess.run(
            [sys.executable, "-m", "rlplace.train", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        wall_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (file,) = Path(folder).glob("*/*/metrics.jsonl")
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        summary = json.loads(file.with_name("summary.json").read_text(encoding="utf-8"))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    curve = [
        (row["env_steps"], row["env/mean_return"])
        for row in rows
        if row.get("env/mean_return") is not None
    ]
    return Run(
        task=task,
        seed=seed,
        settings=settings,
        env_steps=summary["env_steps"],
        episodes=sum(int(row.get("env/episodes") or 0) for row in rows),
        sampled=summary["return_last"],
        evaluated=summary["eval_last"],
        eval_episodes=EPISODES,
        curve=thinned(curve),
        wall_s=round(wall_s, 1),
        cpu_s=round(cpu_s, 1),
        versions={"python": platform.python_version(), **versions_of(LIBRARIES)},
    )


def thinned(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most POINTS points of a curve, evenly spaced, the last one included. Returns have five digits."""
    step = max(1, math.ceil(len(curve) / POINTS))
    kept = [*reversed([*reversed(curve)][::step])]
    return [(steps, float(f"{value:.5g}")) for steps, value in kept]


def keep(run: Run) -> None:
    """Write what is kept of a run into its file."""
    KEPT.mkdir(exist_ok=True)
    values = dataclasses.asdict(run)
    curve = values.pop("curve")
    text = json.dumps(values, indent=1)
    # One line for the curve
    text = f'{text[:-2]},\n "curve": {json.dumps(curve)}\n}}\n'
    file_of(run.task, run.seed).write_text(text, encoding="utf-8")


def kept(folder: Path = KEPT) -> list[Run]:
    """Return the kept runs, by task and seed."""
    runs: list[Run] = []
    for file in sorted(folder.glob("*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        values["curve"] = [(steps, value) for steps, value in values["curve"]]
        runs.append(Run(**values))
    return sorted(runs, key=lambda run: (run.task, run.seed))


def train_missing(tasks: Sequence[str], seeds: Sequence[int]) -> int:
    """Train all tasks with all seeds, seed by seed, except those that are kept. Return the number of failed runs."""
    failed = 0
    for seed in seeds:
        for task in tasks:
            if file_of(task, seed).exists():
                continue
            try:
                run = train(task, seed)
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{task} {seed}: failed with exit code {error.returncode}")
                continue
            keep(run)
            print(
                f"{task} {seed}: {run.sampled:.1f} sampled, {run.evaluated:.1f} evaluated, {run.env_steps:,} steps,"
                f" {run.wall_s:.0f} s, {run.cpu_s:.0f} processor seconds",
                flush=True,
            )
    return failed


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_HEAD = """\
# Results

This page compares the returns of PPO with the shipped settings of each task with returns that others have published.

```bash
rlplace train hopper                             # a row of this page: one process, two cores or one
rlplace train task=hopper placement=hybrid       # the same settings in another placement
```

The settings of a task, also called hyperparameters, are in `configs/task`. The page
[hyperparameters](hyperparameters.md) explains them and lists the runs that led to them.

{table}

- **sampled**: mean return of the last 100 training episodes, with sampled actions. CleanRL reports this number.
- **greedy**: mean return of whole episodes after training, with the most likely actions. RL Baselines3 Zoo reports
  this number. Both numbers are means over the seeds, ± their standard deviation.
  {evaluated}
- **CPU s**: processor seconds of the whole command with its start, with one torch thread. On an idle machine, this is
  about the wall time. The runs with 100 episodes after training were made on a busier machine, which raises this number
  too: earlier runs of `pendulum` with the same number of steps and 20 episodes took 29 s.
- **wall s**: measured seconds on a machine with two cores, on which many other programs ran at the same time. CleanRL's
  runs of HalfCheetah, Hopper and Walker2d took {minutes} minutes each, on another machine.
- {below}
- {without}
"""

_END = """\
## Curves

The curves show the mean return of the last 100 episodes over environment steps: one curve for each seed, and their
mean. The dashed line is CleanRL's return. The dotted line is the return of RL Baselines3 Zoo. Both are returns after
the steps in the table.

![Curves of all tasks](results.svg)

## How this was made

- Seeds 0, 1 and 2 are reported, all of them. The settings were chosen with other runs, whose seeds began at 100.
  After weak first runs with seeds 0 to 2, the settings of some tasks were changed. The table has only runs with the new
  settings: [what was tried](hyperparameters.md#what-was-tried) names these tasks.
- The tasks of rlplace are those of Gymnasium {gymnasium} (`-v5`) with MuJoCo {mujoco}. The published returns are for
  older versions of the same tasks, which the table names. Rewards, observations and models differ a little: `-v5`
  corrected the rewards of Hopper, Walker2d, Ant and Pusher, and Ant observes its contact forces. So compare with care.
  LunarLander-v3 differs from `-v2` in the declared bounds of its observations and in its wind, which is off here.
- CleanRL: `ppo_continuous_action.py` and `ppo.py`, three seeds, {cleanrl}.
- RL Baselines3 Zoo: one run for each task, with settings tuned for the task, {zoo}.
  Its standard deviation is over episodes.
- The robot arms are Pusher and Reacher. Neither CleanRL's nor RL Zoo's table has PPO on Reacher.
  The config `fetch_reach` trains another arm: [environments](environments.md#results-and-seconds-of-training).
- Atari has no results here. `pong` and `breakout` have the hyperparameters that CleanRL published, but no wrappers for
  lost lives, the fire button and clipped rewards. They were run for a few iterations only.
  The published runs have 10M steps. A step of `pong` took 6.5 processor ms here, on a busy machine, so that such a run
  takes 18 processor hours.

```bash
python benchmarks/results.py train           # trains the runs that are missing in benchmarks/results
python benchmarks/results.py --write         # writes this page
```

`benchmarks/results` has a small file for each run: settings, versions, curve. `benchmarks/results.toml` has the
published returns. A test checks that this page is made from these files, and that the shipped settings are those of
the runs.
"""


def published(file: Path = PUBLISHED) -> dict[str, list[Reference]]:
    """Return task -> what others have published of it."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    found: dict[str, list[Reference]] = {}
    for task, entries in table["tasks"].items():
        found[task] = [
            Reference(
                library=library,
                env=entry["env"],
                steps=entry["steps"],
                mean=entry["mean"],
                deviation=entry.get("deviation"),
            )
            for library, entry in entries.items()
        ]
    return found


def sources(file: Path = PUBLISHED) -> dict[str, str]:
    """Return library -> the address of its published returns."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: entry["url"] for name, entry in table["libraries"].items()}


def runtimes(file: Path = PUBLISHED) -> str:
    """Return how many minutes CleanRL's runs took, as a link to its table."""
    given = tomllib.loads(file.read_text(encoding="utf-8"))["runtimes"]
    return f"[{given['minutes']}]({given['url']})"


def number(value: float) -> str:
    """Return a return as text: whole numbers from 100 on, else one decimal, and two below 2."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 2:
        return f"{value:.1f}"
    return f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    """Return the mean of values, and ± their standard deviation if there are several."""
    mean = number(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {number(statistics.stdev(values))}"


def thousands(steps: int) -> str:
    """Return a number of steps as text, such as `500k` or `1M`."""
    if steps >= 995_000:
        return f"{steps / 1e6:.3g}M"
    return f"{round(steps / 1e3)}k"


def _referred(references: Sequence[Reference], library: str) -> str:
    """Return a library's return as a cell of the table; "" if it has not published one."""
    for each in references:
        if each.library == library:
            deviation = ""
            if each.deviation is not None:
                deviation = f" ± {number(each.deviation)}"
            return (
                f"{number(each.mean)}{deviation} ({each.env}, {thousands(each.steps)})"
            )
    return ""


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return task -> its runs, in the order of the published tasks, then by name."""
    order = [*published()]
    names = sorted({run.task for run in runs} - set(order))
    groups: dict[str, list[Run]] = {}
    for task in [*order, *names]:
        mine = [run for run in runs if run.task == task]
        if mine:
            groups[task] = mine
    return groups


def table_of(runs: Sequence[Run]) -> str:
    """Return the table of all tasks as Markdown."""
    lines = [
        "| task | steps | seeds | sampled | greedy | CleanRL, sampled | RL Zoo, greedy | CPU s | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    references = published()
    for task, mine in by_task(runs).items():
        cells = [
            f"`{task}` ({mine[0].settings['env']['id']})",
            thousands(mine[0].env_steps),
            str(len(mine)),
            f"**{spread([run.sampled for run in mine])}**",
            spread([run.evaluated for run in mine]),
            _referred(references.get(task, ()), "cleanrl"),
            _referred(references.get(task, ()), "zoo"),
            f"{statistics.fmean(run.cpu_s for run in mine):.0f}",
            f"{statistics.fmean(run.wall_s for run in mine):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def below(runs: Sequence[Run]) -> list[str]:
    """Return the tasks with a mean return below that of a reference, each with the library, as texts."""
    found: list[str] = []
    names = {"cleanrl": "CleanRL", "zoo": "RL Zoo"}
    for task, mine in by_task(runs).items():
        for each in published().get(task, ()):
            values = [run.sampled for run in mine]
            if each.library == "zoo":
                values = [run.evaluated for run in mine]
            if statistics.fmean(values) < each.mean:
                found.append(f"`{task}` (of {names[each.library]})")
    return found


def evaluated_episodes(runs: Sequence[Run]) -> str:
    """Return sentences that say how many episodes gave the greedy returns, and which tasks are exceptions."""
    tasks: dict[int, list[str]] = {}
    for task, mine in by_task(runs).items():
        fewest = min(run.eval_episodes for run in mine)
        tasks.setdefault(fewest, []).append(f"`{task}`")
    usual = max(tasks, key=lambda episodes: (len(tasks[episodes]), episodes))
    sentences = [f"Each policy played {usual} episodes."]
    for episodes, names in sorted(tasks.items()):
        if episodes != usual:
            sentences.append(f"Those of {' and '.join(names)} played {episodes}.")
    return " ".join(sentences)


def page(runs: Sequence[Run]) -> str:
    """Return the text of docs/results.md."""
    lower = below(runs)
    text = "No mean is below that of a reference."
    if lower:
        text = f"Below a reference: {', '.join(lower)}. The table shows where the numbers of steps differ."
    lacking = sorted(set(group_names(TASK)) - {run.task for run in runs})
    without = "Every shipped task has runs here."
    if lacking:
        names = ", ".join(f"`{task}`" for task in lacking)
        without = f"Shipped without runs: {names}. Their settings come from other libraries, and were tested briefly."
    where = sources()
    versions = runs[0].versions
    return "\n".join(
        [
            _HEAD.format(
                table=table_of(runs),
                evaluated=evaluated_episodes(runs),
                below=text,
                without=without,
                minutes=runtimes(),
            ),
            _END.format(
                gymnasium=versions["gymnasium"],
                mujoco=versions["mujoco"],
                cleanrl=f"[{'its table'}]({where['cleanrl']})",
                zoo=f"[{'its table'}]({where['zoo']})",
            ),
        ]
    )


# ── the settings ─────────────────────────────────────────────────────────────────────────────────────────────────────

_BEGIN, _STOP = "<!-- settings -->\n", "<!-- end of settings -->"
# Keys of the table of settings, and the heads of their columns
_SHOWN = {
    "env.total_num_envs": "envs",
    "algorithm.rollout_steps": "steps",
    "algorithm.num_minibatches": "minibatches",
    "algorithm.epochs": "epochs",
    "actor.optimizer.lr": "lr",
    "actor.optimizer.schedule": "schedule",
    "algorithm.gamma": "gamma",
    "algorithm.gae_lambda": "lambda",
    "actor.model.initial_log_std": "log std",
    "algorithm.normalize_observations": "observations",
    "algorithm.normalize_rewards": "rewards",
    "algorithm.entropy_coef": "entropy",
}


def settings_table() -> str:
    """Return the table with the settings of all shipped tasks as Markdown."""
    lines = [
        f"| task | {' | '.join(_SHOWN.values())} |",
        "|---" * (len(_SHOWN) + 1) + "|",
    ]
    for task in group_names(TASK):
        settings = settings_of(task)
        cells = [f"`{task}`"]
        for key in _SHOWN:
            value: Any = settings
            for part in key.split("."):
                value = value.get(part, "")
            if isinstance(value, bool):
                value = "normalised" if value else ""
            cells.append(str(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def settings_page(text: str) -> str:
    """Return the text of docs/hyperparameters.md with the table of settings as it is now."""
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_STOP)[2]
    return f"{before}{_BEGIN}\n{settings_table()}\n\n{_STOP}{after}"


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = 3
WIDE, HIGH = 300, 190  # of one chart
LEFT, TOP, PLOT_WIDE, PLOT_HIGH = 52, 30, 232, 124
_STYLE = (
    ".page{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#59636e}.axis{stroke:#d0d7de}"
    ".seed{fill:none;stroke:#2f6fdb;stroke-opacity:.35}.mean{fill:none;stroke:#2f6fdb;stroke-width:2}"
    ".cleanrl{stroke:#c9620b;stroke-dasharray:6 4}.zoo{stroke:#1c8a5f;stroke-dasharray:2 3}"
    "text{font-size:11px}.title{font-size:13px;font-weight:650}"
    "@media (prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d}.ink{fill:#f0f6fc}.soft{fill:#9198a1}"
    ".axis{stroke:#30363d}.seed,.mean{stroke:#8fb6ff}.cleanrl{stroke:#ffb26b}.zoo{stroke:#6fd3a8}}"
)
_FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return the mean of the runs' curves, at the steps of the first one that all others have reached.

    A value between two points of a curve is on the line between them.
    """
    begin = max(run.curve[0][0] for run in runs)
    end = min(run.curve[-1][0] for run in runs)
    points: list[tuple[int, float]] = []
    for steps, _ in runs[0].curve:
        if begin <= steps <= end:
            values = [value_at(run.curve, steps) for run in runs]
            points.append((steps, statistics.fmean(values)))
    return points


def value_at(curve: Sequence[tuple[int, float]], steps: int) -> float:
    """Return the value of a curve at a number of steps that is within its ends."""
    before = curve[0]
    for point in curve:
        if point[0] >= steps:
            between = point[0] - before[0]
            if between == 0:
                return point[1]
            share = (steps - before[0]) / between
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


def _chart(task: str, runs: Sequence[Run], x: int, y: int) -> list[str]:
    """Return the elements of one chart, whose upper left corner is at (x, y)."""
    lines = {each.library: each.mean for each in published().get(task, ())}
    values = [value for run in runs for _, value in run.curve] + [*lines.values()]
    low, high = min(values), max(values)
    span = high - low or 1.0
    most = max(run.env_steps for run in runs)
    left, top = x + LEFT, y + TOP

    def at(point: tuple[float, float]) -> str:
        steps, value = point
        across = left + PLOT_WIDE * steps / most
        down = top + PLOT_HIGH * (high - value) / span
        return f"{across:.1f},{down:.1f}"

    def path(curve: Sequence[tuple[int, float]], kind: str) -> str:
        return f'<polyline class="{kind}" points="{" ".join(map(at, curve))}"/>'

    bottom = top + PLOT_HIGH
    found = [
        f'<text class="title ink" x="{left}" y="{y + 20}">{task}</text>',
        f'<path class="axis" fill="none" d="M{left},{top}V{bottom}H{left + PLOT_WIDE}"/>',
        f'<text class="soft" x="{left - 6}" y="{top + 8}" text-anchor="end">{number(high)}</text>',
        f'<text class="soft" x="{left - 6}" y="{bottom}" text-anchor="end">{number(low)}</text>',
        f'<text class="soft" x="{left}" y="{bottom + 15}">0</text>',
        f'<text class="soft" x="{left + PLOT_WIDE}" y="{bottom + 15}" text-anchor="end">{thousands(most)} steps</text>',
    ]
    for library, value in lines.items():
        begin = at((0, value))
        end = at((most, value))
        found.append(f'<path class="{library}" fill="none" d="M{begin}L{end}"/>')
    found += [path(run.curve, "seed") for run in runs]
    found.append(path(mean_curve(runs), "mean"))
    return found


def picture(runs: Sequence[Run]) -> str:
    """Return the picture of all curves as SVG: one chart for each task."""
    groups = by_task(runs)
    rows = math.ceil(len(groups) / COLUMNS)
    wide, high = COLUMNS * WIDE + 20, rows * HIGH + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        f' role="img" aria-label="returns by environment steps: {", ".join(groups)}" font-family="{_FONT}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="12"/>',
    ]
    for place, (task, mine) in enumerate(groups.items()):
        row, column = divmod(place, COLUMNS)
        parts += _chart(task, mine, 6 + column * WIDE, 6 + row * HIGH)
    return "\n".join([*parts, "</svg>", ""])


def main(*words: str) -> int:
    match words:
        case ["train", *rest]:
            names = [word for word in rest if "=" not in word]
            seeds: Sequence[int] = SEEDS
            for word in rest:
                if word.startswith("seeds="):
                    listed = word.removeprefix("seeds=").split(",")
                    seeds = tuple(int(seed) for seed in listed)
            return 1 if train_missing(names or [*group_names(TASK)], seeds) else 0
        case ["--write"]:
            PAGE.write_text(page(kept()), encoding="utf-8")
            PICTURE.write_text(picture(kept()), encoding="utf-8")
            text = SETTINGS_PAGE.read_text(encoding="utf-8")
            SETTINGS_PAGE.write_text(settings_page(text), encoding="utf-8")
        case []:
            print(table_of(kept()))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
