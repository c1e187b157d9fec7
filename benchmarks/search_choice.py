"""The plan that a search chooses, against all plans of a small cluster measured one by one, on work that sleeps.

    python benchmarks/search_choice.py [--scale 1] [--iterations 4]

PPO with simulators that sleep for each step and a network that sleeps for each row, so that the work of a plan takes as
long whatever else the machine does; loop, channels, moves, collectives and schedule are a run's own. The profile is
measured on few plans (those of `rlplace profile`), then every placement on two accelerators with every number of stage
groups is run, in one process or two, with all components resident: about 40 runs of 15 s. Told are the seconds of the
plan that the search has chosen and of the best that was measured, and how well the predictions order all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium
import numpy as np
from torch import Tensor, nn

from rlplace.cli.train import main as train
from rlplace.config import compose
from rlplace.config.yaml_text import to_yaml
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.measure import variants
from rlplace.foresight.predict import predict
from rlplace.foresight.probe import changed
from rlplace.foresight.profile import Profile, read_profile
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.runtime.prepare import Prepared, prepare_composed

_SCALE = "RLPLACE_BENCHMARK_SCALE"
_STEP_S = 0.012
_ROW_S = 0.004  # of a simulator, of a row in a pass of the network
_ME = "benchmarks.search_choice"


def nap(seconds: float) -> None:
    time.sleep(seconds * float(os.environ.get(_SCALE, "1")))


class Sleeping(gymnasium.Env[Any, Any]):
    """Counts its steps, slowly."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        nap(_STEP_S)
        return np.zeros(4, np.float32), float(action), False, False, {}


class Net(nn.Module):
    """A small network whose passes take longer the more rows they have."""

    def __init__(self, spaces: Any) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        nap(_ROW_S * len(observations))
        outputs = self.head(observations)
        return outputs[:, 1:], outputs[:, 0]


WORDS = (
    "--config-name",
    "hybrid_ppo",
    "cluster.accelerators_per_node=2",
    "cluster.accelerator.kind=emulated",
    *(f"cluster.component_placement.{c}=0-1" for c in ("actor", "env", "rollout")),
    f"env.id={_ME}:Sleeping",
    "env.total_num_envs=8",
    "env.max_episode_steps=100",
    f"actor.model={{kind: module, name: '{_ME}:Net'}}",
    "algorithm.rollout_steps=4",
    "algorithm.epochs=1",
    "algorithm.num_minibatches=2",
)


def layouts(space: Space) -> Iterator[Layout]:
    """Give all placements of a space in which everybody stays."""
    for mode in space.modes:
        sizes = space.sizes(mode)
        for chosen in itertools.product(*(sizes[c] for c in space.free)):
            of = dict(zip(space.free, chosen, strict=True))
            spots = [
                range(space.plan.topology.num_accelerators - of[c].accelerators + 1)
                for c in space.free
            ]
            for starts in itertools.product(*spots):
                at = dict(zip(space.free, starts, strict=True))
                if not mode.shared or (at["env"], of["env"]) == (
                    at["rollout"],
                    of["rollout"],
                ):
                    yield Layout(mode=mode, sizes=of, starts=at, stays=space.free)


def run(
    mapping: Mapping[str, Any], iterations: int, folder: Path
) -> tuple[float, Profile]:
    """Train; return the median seconds of an iteration, and what was measured."""
    runner = {
        **mapping["runner"],
        "total_iterations": iterations,
        "sinks": ["jsonl"],
        "output_dir": str(folder),
    }
    (folder / "plan.yaml").write_text(
        to_yaml({**mapping, "runner": runner}), encoding="utf-8"
    )
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = train(["--config-dir", str(folder), "--config-name", "plan"])
    if status:
        raise SystemExit(f"a run ended with {status}\n{told.getvalue()}")
    (found,) = folder.glob("*/*/summary.json")
    profile = read_profile(
        (found.parent / "profile.json").read_text(encoding="utf-8"), file="profile.json"
    )
    return json.loads(found.read_text(encoding="utf-8"))["predicted"]["seconds"][
        "iteration"
    ]["measured"], profile


def measured(mapping: Mapping[str, Any], iterations: int) -> tuple[float, Profile]:
    with tempfile.TemporaryDirectory() as folder:
        return run(mapping, iterations, Path(folder))


def profiled(job: Prepared, iterations: int) -> Profile:
    found: Profile | None = None
    for variant in variants(job.mapping, job.plan.topology.num_accelerators):
        with contextlib.suppress(ProblemsError):
            profile = measured(variant.mapping, iterations)[1]
            found = profile if found is None else found.merged(profile)
    assert found is not None, "the config itself is a plan"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", default="1", help="naps are so many times as long")
    parser.add_argument("--iterations", type=int, default=6, help="of each run")
    options = parser.parse_args()
    os.environ[_SCALE] = options.scale
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [sys.path[0], os.environ.get("PYTHONPATH")])
    )  # of the workers
    (composed,) = compose.with_hydra(WORDS)
    job = prepare_composed(composed)
    space = Space(job.config, job.plan)
    profile = profiled(job, options.iterations)
    search = Search(space, profile)
    best = search.run(keep=1).best
    assert best is not None, "the config itself is a plan"
    chosen = search.keys(best.layout, best.plan.schedule)
    rows: dict[object, tuple[float, float, str]] = {}
    for layout in layouts(space):
        try:
            plan = make_plan(config := space.config_of(layout), job.plan.topology)
        except ProblemsError:
            continue
        keys = search.keys(layout, plan.schedule)
        if keys not in rows:
            seconds, _ = measured(
                changed(job.mapping, space.changes(layout)), options.iterations
            )
            told = predict(config, plan, memory_case(plan, config), profile).seconds
            where = ", ".join(
                f"{c} {plan.placement.accelerators(c)}"
                for c in plan.placement.components
            )
            rows[keys] = (
                seconds,
                told,
                f"{where}; {layout.mode.groups} groups{', one process' * layout.mode.shared}",
            )
            print(f"{told:8.3f}{seconds:8.3f}  {rows[keys][2]}", flush=True)
    least = min(rows.values())
    print(f"\n{len(rows)} plans; the best measured: {least[0]:.3f} s  {least[2]}")
    print(
        f"the search's: {rows[chosen][0]:.3f} s, {rows[chosen][0] / least[0] - 1.0:+.1%}  {rows[chosen][2]}"
    )
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows.values(), 2)
        if a[0] != b[0] and a[1] != b[1]
    ]
    alike = sum(math.copysign(1.0, (a[0] - b[0]) * (a[1] - b[1])) for a, b in pairs)
    print(f"order: Kendall's tau {alike / max(1, len(pairs)):.2f}")


if __name__ == "__main__":
    main()
