"""Placements of one job against each other, on emulated accelerators whose work takes modelled seconds.

    python benchmarks/placements.py [--quick] [--ray] [--rounds 2] [--scale 50] [--pictures FOLDER]

The loop, the schedule, the moves, the channels and the launch are a run's own; only what computes is emulated
(benchmarks/emulated_work.py): an 8B model on 8 accelerators of 80 GB, 64 samples of 4 turns and 320 tokens on average,
whose environments need an accelerator too. All placements learn the same samples. Seconds are those of the job, `scale`
times those of the benchmark. Predicted is what the plan and the work alone say: in each stage the accelerator that has
most to do. The engine's own overhead is an iteration in which all work takes no time, in real milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.emulated_work import (
    PASS,
    SAMPLES,
    TOKENS,
    TURNS,
    Actor,
    Emulated,
    Env,
    Job,
    Model,
    Rollout,
)
from rlplace.comm.channel import ChannelSpec
from rlplace.config.blocks.engine import RunnerConfig
from rlplace.config.blocks.machines import AcceleratorConfig, ClusterConfig
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.execution.overlap import loop_of
from rlplace.jobs.language_model import iteration
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan, plan_components
from rlplace.placement.schedule import Transition, text_needs
from rlplace.report.timeline import render_timeline
from rlplace.workers.launch.cluster import Cluster

GIB = 1 << 30
WORKERS: Mapping[str, type[Emulated]] = {"actor": Actor, "env": Env, "rollout": Rollout}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where components are, how far rollout may run ahead of learning, whether gradients are accumulated early."""

    where: Mapping[str, str]
    ahead: int = 0
    early: bool = False


PLACEMENTS: Mapping[str, Placing] = {
    "collocated": Placing(where={"actor": "0-7", "env": "0-7", "rollout": "0-7"}),
    "hybrid": Placing(where={"actor": "0-7", "env": "0-3", "rollout": "4-7"}),
    "hybrid, partial overlap": Placing(
        where={"actor": "0-5", "env": "0-3", "rollout": "4-7"}
    ),
    "disaggregated": Placing(where={"actor": "0-3", "env": "4-5", "rollout": "6-7"}),
    "disaggregated, early": Placing(
        where={"actor": "0-3", "env": "4-5", "rollout": "6-7"}, early=True
    ),
    "disaggregated, 1 ahead": Placing(
        where={"actor": "0-3", "env": "4-5", "rollout": "6-7"}, ahead=1
    ),
    "disaggregated, 16": Placing(
        where={"actor": "0-7", "env": "8-11", "rollout": "12-15"}
    ),
}
EVEN = Model(name="even")
CASES = (
    (EVEN, "generation, environments and learning take about as long"),
    (
        Model(name="long answers", step_s=0.066, in_flight_s=0.0012),
        "3 times the generation",
    ),
    (Model(name="slow environments", turn_s=1.5), "3 times the simulation"),
    (Model(name="much learning", token_s=0.033), "3 times the learning"),
    (
        Model(name="no simulation", turn_s=0.001),
        "rewards cost nothing: prompts and verifiers",
    ),
    (
        Model(name="slow host", bytes_per_s=2e9),
        "moves and sync at 2 GB/s: a shared or remote host memory",
    ),
)
NOTHING = dataclasses.replace(EVEN, name="nothing", scale=math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One placement with one model, in seconds of the job; the fastest of its iterations."""

    predicted_s: float
    iteration_s: float
    busy: float
    bubble: float
    moving: float  # moves and sync
    accelerators: int
    samples: tuple[
        float, ...
    ]  # number, tokens, squared tokens: equal where the samples are


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that was measured of one placement."""

    rows: Sequence[Measured]  # by model
    own_ms: float  # of an iteration in which work takes no time
    picture: str  # of an iteration of the first model


def layout_of(placing: Placing) -> Plan:
    where = placing.where
    accelerators = 1 + max(int(text.rpartition("-")[2]) for text in where.values())
    cluster = ClusterConfig(
        component_placement=where,
        accelerators_per_node=accelerators,
        accelerator=AcceleratorConfig(kind="emulated", memory=80 * GIB),
    )
    topology = Topology.uniform(1, accelerators, "emulated", 80 * GIB)
    needs = dataclasses.replace(
        text_needs(WORKERS, accumulates=placing.early), ahead=placing.ahead
    )
    return plan_components(cluster, topology, needs=needs, offload=tuple(WORKERS))


# ── what the plan says ───────────────────────────────────────────────────────────────────────────────────────────────


def predict(layout: Plan, model: Model) -> float:
    """Seconds of an iteration: moves, sync, and in each stage whatever takes longest."""
    moves = sum(
        sum(_moves(layout, model, entry)) for entry in layout.schedule.entries.values()
    )
    rollout = _rollout(layout, model)
    learning = _learning(layout, model)
    if (
        "actor" in layout.schedule.active["rollout"]
    ):  # at best all passes but one are made meanwhile
        last = learning * PASS * layout.placement.world_size("actor") / SAMPLES
        return moves + model.sync_s + max(rollout + last, learning)
    return (
        moves
        + model.sync_s
        + (max(rollout, learning) if layout.needs.ahead else rollout + learning)
    )


def _moves(layout: Plan, model: Model, entry: Transition) -> tuple[float, float]:
    """Releases run together, then acquires do."""
    ranks = layout.placement.world_size
    release, acquire = (
        max(
            (
                model.move_s(m.component, m.before, m.after, ranks(m.component))
                for m in moves
            ),
            default=0.0,
        )
        for moves in (entry.releases, entry.acquires)
    )
    return release, acquire


def _rollout(layout: Plan, model: Model) -> float:
    """On accelerators of its own a component only waits for the longest sample; on shared ones work adds up."""
    engines, envs = (layout.placement.world_size(c) for c in ("rollout", "env"))
    simulating = math.ceil(SAMPLES / envs) * TURNS * model.turn_s
    longest = 0.0
    for rank in range(engines):
        tokens = [sum(model.lengths(s)) for s in range(rank, SAMPLES, engines)]
        generating = max(tokens) * model.step_s + sum(tokens) * model.in_flight_s
        longest = max(longest, generating)
    if layout.placement.shared("env", "rollout"):
        return simulating + longest
    return max(simulating, longest + TURNS * model.turn_s)


def _learning(layout: Plan, model: Model) -> float:
    return SAMPLES * TOKENS * model.token_s / layout.placement.world_size("actor")


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


def measure(
    name: str, models: Sequence[Model], rounds: int, launcher: Literal["ray", "inline"]
) -> Found:
    """An iteration without work and one of each model, round after round, on workers launched once."""
    layout = layout_of(PLACEMENTS[name])
    ranks = {c: layout.placement.world_size(c) for c in WORKERS}
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(topology=layout.topology, launcher=launcher) as cluster,
    ):
        keys = {
            "requests": "rollout",
            "completions": "env",
            "samples": "actor",
            "weights": "rollout",
        }
        channels = {
            name: cluster.channel(
                ChannelSpec(
                    name=name,
                    capacity_items=4 * SAMPLES,
                    keys=tuple(str(r) for r in range(ranks[reader])),
                )
            )
            for name, reader in keys.items()
        }
        job = Job(models=(NOTHING, *models), folder=Path(folder), ranks=ranks)
        groups = cluster.launch_all(
            {
                c: (w.create_group(job), layout.placement.get_strategy(c), channels)
                for c, w in WORKERS.items()
            }
        )
        case = MemoryCase(
            placement=layout.placement,
            needs=layout.needs,
            offload=dict.fromkeys(WORKERS, True),
            demands={},
        )
        memory = MemoryMonitor(case)
        iterations = 2 * rounds * len(job.models)
        loop = loop_of(layout.schedule)(
            layout.schedule,
            groups,
            memory,
            RunnerConfig(stage_timeout_s=120.0, total_iterations=iterations),
            iteration.work(layout.needs),
        )
        best: dict[str, Mapping[str, float]] = {}
        pictures: dict[str, str] = {}
        for at in range(0, iterations, 2):
            model = job.model(at)
            loop.iteration(
                at
            )  # in which a rollout that runs ahead has begun beside other work
            numbers = loop.iteration(at + 1)
            if (
                model.name not in best
                or numbers["time/iteration_s"] < best[model.name]["time/iteration_s"]
            ):
                best[model.name] = numbers
                if model in models:
                    calls = list(loop.log.iterations)
                    on = loop.usage.accelerators
                    shown = render_timeline(
                        calls, on, layout.placement.components, name, model.scale
                    )
                    pictures[model.name] = shown
    return Found(
        rows=[measured(layout, model, best[model.name]) for model in models],
        own_ms=1000 * best[NOTHING.name]["time/iteration_s"],
        picture=pictures[models[0].name],
    )


def measured(layout: Plan, model: Model, numbers: Mapping[str, float]) -> Measured:
    return Measured(
        predicted_s=predict(layout, model),
        iteration_s=numbers["time/iteration_s"] * model.scale,
        busy=numbers["util/busy_share"],
        bubble=numbers["util/bubble_share"],
        moving=numbers["util/moves_share"] + numbers["util/sync_share"],
        accelerators=len(layout.placement.used),
        samples=tuple(
            numbers[f"actor/{name}"] for name in ("samples", "tokens", "squares")
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="one model, about a minute"
    )
    parser.add_argument(
        "--ray", action="store_true", help="processes of Ray instead of threads"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="the fastest iteration of each model counts",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        help="a folder for a picture of each placement's iteration",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=50.0,
        help="seconds of the job in one; less on a busy machine",
    )
    options = parser.parse_args()
    cases = [
        (dataclasses.replace(m, scale=options.scale), about)
        for m, about in CASES[: 1 if options.quick else None]
    ]
    launcher: Literal["ray", "inline"] = "ray" if options.ray else "inline"
    found: dict[str, Found] = {}
    for name, placing in PLACEMENTS.items():
        found[name] = measure(
            name, [model for model, _ in cases], options.rounds, launcher
        )
        print(
            f"measured {name}: {', '.join(f'{c} {a}' for c, a in placing.where.items())}",
            flush=True,
        )
        if options.pictures:
            (options.pictures / f"{name}.svg").write_text(
                found[name].picture, encoding="utf-8"
            )
    for at, (model, about) in enumerate(cases):
        rows = {name: each.rows[at] for name, each in found.items()}
        samples = {row.samples for row in rows.values()}
        assert len(samples) == 1, (
            f"{model.name}: placements learned different samples {samples}"
        )
        print(f"\n{model.name}: {about}\n")
        print(_table(rows, {name: each.own_ms for name, each in found.items()}))
    if len(cases) > 1:
        print(
            "\nwho is fastest on 8 accelerators, and on what each accelerator of the next one spends more\n"
        )
        print(
            _winners(
                {
                    m.name: {n: f.rows[at] for n, f in found.items()}
                    for at, (m, _) in enumerate(cases)
                }
            )
        )


def _table(rows: Mapping[str, Measured], own: Mapping[str, float]) -> str:
    lines = [
        "| placement | predicted s | measured s | busy | idle | moves+sync | accelerator s per sample | own ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, m in rows.items():
        cost = m.accelerators * m.iteration_s / SAMPLES
        lines.append(
            f"| {name} | {m.predicted_s:.1f} | {m.iteration_s:.1f} | {m.busy:.0%} | {m.bubble:.0%} | {m.moving:.1%} "
            f"| {cost:.2f} | {own[name]:.1f} |"
        )
    return "\n".join(lines)


def _winners(cases: Mapping[str, Mapping[str, Measured]]) -> str:
    lines = [
        "| work | fastest on policy | s | next | s | because | 1 ahead s |",
        "|---|---|---:|---|---:|---|---:|",
    ]
    for work, rows in cases.items():
        ahead = min(m.iteration_s for name, m in rows.items() if PLACEMENTS[name].ahead)
        alike = {
            n: m
            for n, m in rows.items()
            if m.accelerators == 8 and not PLACEMENTS[n].ahead
        }
        (first, best), (second, other) = sorted(
            alike.items(), key=lambda item: item[1].iteration_s
        )[:2]
        lines.append(
            f"| {work} | {first} | {best.iteration_s:.0f} | {second} | {other.iteration_s:.0f} | {_why(best, other)} "
            f"| {ahead:.0f} |"
        )
    return "\n".join(lines)


def _why(best: Measured, other: Measured) -> str:
    """On what the next one spends more of its accelerators' time."""
    if other.iteration_s < 1.03 * best.iteration_s:
        return "about as fast"

    def seconds(m: Measured) -> Mapping[str, float]:
        return {
            "idle": m.bubble * m.iteration_s,
            "moving": m.moving * m.iteration_s,
            "at work": m.busy * m.iteration_s,
        }

    mine = seconds(best)
    theirs = seconds(other)
    most = max(mine, key=lambda what: theirs[what] - mine[what])
    return f"{theirs[most] - mine[most]:.0f} s less {most}"


if __name__ == "__main__":
    main()
