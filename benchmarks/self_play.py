"""Train recipes/self_play.py over several seeds, keep what each run learned, and draw it.

    python benchmarks/self_play.py train             seeds 0, 1 and 2, where they are not kept yet
    python benchmarks/self_play.py keep SEED RUN     keeps a run that there is: its folder
    python benchmarks/self_play.py                   the table
    python benchmarks/self_play.py --write           the picture docs/self_play.svg; and the table in docs/self_play.md

What is kept of a run is a small file in benchmarks/self_play: settings, versions of the league, seconds.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "self_play.py"
KEPT = ROOT / "benchmarks" / "self_play"
PAGE = ROOT / "docs" / "self_play.md"
PICTURE = ROOT / "docs" / "self_play.svg"
SEEDS = (0, 1, 2)
# Metric of a version -> title of its chart
MEASURES = {
    "elo": "Elo within the league",
    "against_random": "result against a random player",
    "against_faultless": "result against a faultless player",
    "defeats": "lost positions an opponent can reach",
}
BLOCKS = ("runner", "game", "network", "actor", "rollout", "league")  # of settings
STAGES = ("iteration", "sync", "play", "learn", "moves")
TABLE_BEGINS = "| seed |"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of one run.

    `settings`: blocks of its config that decide what is learned. `versions`: of the league, each with its iteration and
    MEASURES. `seconds`: stage -> [predicted, measured], the median of iterations. `training_s`: seconds of all
    iterations.
    """

    seed: int
    settings: Mapping[str, Any]
    versions: Sequence[Mapping[str, float]]
    seconds: Mapping[str, tuple[float, float]]
    training_s: float


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config that decide what is learned, without its seed."""
    found = {name: dict(config[name]) for name in BLOCKS}
    found["runner"] = {"total_iterations": config["runner"]["total_iterations"]}
    for name in BLOCKS:
        # Blocks of components repeat those of the game and the network.
        if name not in ("game", "network"):
            found[name].pop("game", None)
            found[name].pop("network", None)
    found["network"].pop("seed")
    return found


def read(folder: Path, seed: int) -> Run:
    """Return what is to be kept of the run in a folder."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    versions: list[dict[str, float]] = []
    every = config["league"]["every"]
    training_s = 0.0
    for iteration, line in enumerate(lines):
        row = json.loads(line)
        training_s += row["time/iteration_s"]
        if iteration % every == 0:
            values = {name: round(row[f"league/{name}"], 3) for name in MEASURES}
            versions.append({"iteration": iteration, **values})
    seconds = {}
    for stage in STAGES:
        told = summary["predicted"]["seconds"][stage]
        seconds[stage] = (round(told["predicted"], 3), round(told["measured"], 3))
    return Run(
        seed=seed,
        settings=settings_of(config),
        versions=versions,
        seconds=seconds,
        training_s=round(training_s, 1),
    )


def keep(run: Run) -> None:
    KEPT.mkdir(exist_ok=True)
    values = dataclasses.asdict(run)
    versions = ",\n  ".join(json.dumps(version) for version in values.pop("versions"))
    text = json.dumps(values, indent=1)
    text = f'{text[:-2]},\n "versions": [\n  {versions}\n ]\n}}\n'
    (KEPT / f"{run.seed}.json").write_text(text, encoding="utf-8")


def kept() -> list[Run]:
    """Return the kept runs, by seed."""
    runs: list[Run] = []
    for file in sorted(KEPT.glob("*.json")):
        runs.append(Run(**json.loads(file.read_text(encoding="utf-8"))))
    return runs


def train_missing() -> None:
    """Train the seeds that are not kept. Raises CalledProcessError if a run fails."""
    for seed in SEEDS:
        if (KEPT / f"{seed}.json").exists():
            continue
        with tempfile.TemporaryDirectory() as output:
            words = [
                f"network.seed={seed}",
                f"runner.output_dir={output}",
                "+runner.sinks=[jsonl]",
            ]
            subprocess.run([sys.executable, str(RECIPE), *words], check=True)
            (file,) = Path(output).glob("*/*/summary.json")
            keep(read(file.parent, seed))


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def table_of(runs: Sequence[Run]) -> str:
    """Return the table of all runs as Markdown: their last version, and seconds of an iteration."""
    lines = [
        "| seed | Elo | against random | against faultless | defeats | iteration, s, predicted (measured) |"
        " training, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        last = run.versions[-1]
        predicted, measured = run.seconds["iteration"]
        cells = (
            f"{run.seed}",
            f"{last['elo']:.0f}",
            f"{last['against_random']:.3f}",
            f"{last['against_faultless']:.3f}",
            f"{last['defeats']:.0f}",
            f"{predicted:.2f} ({measured:.2f})",
            f"{run.training_s:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """Return the page with its table replaced."""
    begin = page.index(TABLE_BEGINS)
    end = page.index("\n\n", begin)
    return page[:begin] + table + page[end:]


WIDE, HIGH = 340, 190  # of one chart
LEFT, TOP, PLOT_WIDE, PLOT_HIGH = 46, 34, 276, 120
_STYLE = (
    ".page{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#59636e}.axis{stroke:#d0d7de}"
    ".seed{fill:none;stroke:#2f6fdb;stroke-opacity:.75;stroke-width:1.5}"
    "text{font-size:11px}.title{font-size:13px;font-weight:650}"
    "@media (prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d}.ink{fill:#f0f6fc}.soft{fill:#9198a1}"
    ".axis{stroke:#30363d}.seed{stroke:#8fb6ff}}"
)
_FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def _chart(measure: str, runs: Sequence[Run], x: int, y: int) -> list[str]:
    """Return the elements of one chart, whose upper left corner is at (x, y): a line for each run."""
    values = [version[measure] for run in runs for version in run.versions]
    low = min(0.0, *values)
    high = max(values)
    span = high - low or 1.0
    most = max(version["iteration"] for run in runs for version in run.versions)
    left = x + LEFT
    top = y + TOP
    bottom = top + PLOT_HIGH
    right = left + PLOT_WIDE
    found = [
        f'<text class="title ink" x="{left}" y="{y + 22}">{MEASURES[measure]}</text>',
        f'<path class="axis" fill="none" d="M{left},{top}V{bottom}H{right}"/>',
        f'<text class="soft" x="{left - 6}" y="{top + 8}" text-anchor="end">{high:.4g}</text>',
        f'<text class="soft" x="{left - 6}" y="{bottom}" text-anchor="end">{low:.4g}</text>',
        f'<text class="soft" x="{left}" y="{bottom + 15}">0</text>',
        f'<text class="soft" x="{right}" y="{bottom + 15}" text-anchor="end">iteration {most:.0f}</text>',
    ]
    for run in runs:
        points: list[str] = []
        for version in run.versions:
            across = left + PLOT_WIDE * version["iteration"] / most
            down = top + PLOT_HIGH * (high - version[measure]) / span
            points.append(f"{across:.1f},{down:.1f}")
        found.append(f'<polyline class="seed" points="{" ".join(points)}"/>')
    return found


def picture(runs: Sequence[Run]) -> str:
    """Return the picture of all curves as SVG: a chart for each measure."""
    wide = 2 * WIDE + 20
    high = 2 * HIGH + 20
    label = ", ".join(MEASURES.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        f' role="img" aria-label="versions of a league by iteration: {label}" font-family="{_FONT}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="12"/>',
    ]
    for place, measure in enumerate(MEASURES):
        row, column = divmod(place, 2)
        parts += _chart(measure, runs, 6 + column * WIDE, 6 + row * HIGH)
    return "\n".join([*parts, "</svg>", ""])


def main(*words: str) -> int:
    match words:
        case ["train"]:
            train_missing()
        case ["keep", seed, folder]:
            keep(read(Path(folder), int(seed)))
        case ["--write"]:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(with_table(page, table_of(kept())), encoding="utf-8")
            PICTURE.write_text(picture(kept()), encoding="utf-8")
        case []:
            print(table_of(kept()))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
