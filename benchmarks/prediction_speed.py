"""How many different plans a core predicts in a second, for a batch of 8,192 samples on 64 H100.

    python benchmarks/prediction_speed.py [--accelerators 64] [--plans 40] [--against ../other/checkout] [--rounds 3]

The job is GRPO of an 8B under published rates, with 512 prompts and 16 samples of each. The plans differ in the sizes
of actor and rollout, and in whether both share accelerators. One search predicts them all, so what several plans have
in common is computed once. Seconds are processor seconds, without those of making the plans. With `--against`, the code
of another checkout predicts the same plans, in turns with this one and each time in a new process; printed are the
ratio, and the largest difference of the predicted seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rlplace.config import compose
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import ProblemsError
from rlplace.foresight.known import find_profile
from rlplace.foresight.loads import Size
from rlplace.foresight.search import Search
from rlplace.foresight.space import Layout, Space
from rlplace.runtime.prepare import prepare_composed

_ONCE = "--once"


def layouts(space: Space, accelerators: int) -> Iterator[Layout]:
    """Yield layouts of many sizes: rollout beside the actor where there is room, else on the actor's accelerators."""
    sizes = [n for n in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256, 512) if n]
    now = space.current()
    for actor in reversed(sizes):
        for rollout in reversed(sizes):
            if max(actor, rollout) > accelerators or actor < 8:
                continue
            start = actor if actor + rollout <= accelerators else 0
            if start == 0 and actor != rollout != accelerators:
                continue
            own = {"actor": Size(actor, actor), "rollout": Size(rollout, rollout)}
            yield Layout(
                mode=now.mode,
                sizes={**now.sizes, **own},
                starts={**now.starts, "actor": 0, "rollout": start},
            )


def once(accelerators: int, plans: int) -> dict[str, Any]:
    """Predict up to `plans` plans. Return their seconds, and the processor seconds that each prediction took."""
    nodes = max(1, accelerators // 8)
    (composed,) = compose.with_hydra(
        [
            *("--config-name", "grpo_qwen3_8b", "profile=published"),
            "algorithm.samples_per_prompt=16",
            f"algorithm.prompts={max(512, 2 * accelerators)}",
            f"cluster.num_nodes={nodes}",
            f"cluster.nodes.0.count={nodes}",
        ]
    )
    job = prepare_composed(composed)
    space = Space(job.config, job.plan)
    profile = find_profile(job.config, job.plan, job.case)
    assert profile is not None
    search = Search(space, profile)
    predicted: list[float] = []
    took: list[float] = []
    for layout in layouts(space, accelerators):
        if len(predicted) == plans:
            break
        config = space.config_of(layout)
        try:
            plan = make_plan(config, space.plan.topology)
        except ProblemsError:
            continue
        case = memory_case(plan, config)
        began = time.process_time()
        found = search.predict(config, plan, case, layout)
        took.append(time.process_time() - began)
        predicted.append(found.seconds)
    return {"predicted": predicted, "took": took}


def apart(folder: Path, accelerators: int, plans: int) -> dict[str, Any]:
    """Return the result of `once` with the code in `folder`, from a new process."""
    command = [sys.executable, __file__, _ONCE]
    command += ["--accelerators", str(accelerators), "--plans", str(plans)]
    there = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, env=there, cwd=folder, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate(found: dict[str, Any]) -> float:
    return len(found["took"]) / sum(found["took"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerators", type=int, default=64)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument(_ONCE, action="store_true", help="print one round as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.accelerators, options.plans)))
        return
    here = Path(__file__).resolve().parents[1]
    ratios: list[float] = []
    for _ in range(options.rounds):
        found = apart(here, options.accelerators, options.plans)
        first_s = found["took"][0]
        rest_s = median(found["took"][1:])
        line = f"{len(found['took'])} plans, {rate(found):.1f} predictions a second"
        line += f" (the first {first_s:.3f} s, others {rest_s:.3f} s)"
        if options.against:
            other = apart(
                options.against.resolve(), options.accelerators, options.plans
            )
            ratios.append(rate(found) / rate(other))
            pairs = zip(found["predicted"], other["predicted"], strict=True)
            differ = max(abs(a / b - 1) for a, b in pairs)
            line += f"; there {rate(other):.1f}, here {ratios[-1]:.1f} times as many"
            line += f"; predicted seconds differ by at most {differ:.1e}"
        print(line, flush=True)
    if ratios:
        print(f"median ratio {median(ratios):.1f}")


if __name__ == "__main__":
    main()
