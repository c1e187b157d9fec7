"""Return, time and overhead of a shipped config over several seeds.

    python benchmarks/ppo_seeds.py [config] [seeds] [key=value ...]

Each seed is one whole `python -m rlplace.train`, start-up included. Solved means at least GOAL of the greatest return.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GREATEST = {"hybrid_ppo": 1000.0, "collocated_ppo": 1000.0, "disaggregated_ppo": 1000.0, "hybrid_ppo_cartpole": 500.0}
GOAL = {"hybrid_ppo_cartpole": 0.95}  # 475 of 500; 0.9 elsewhere


def main(config: str = "hybrid_ppo", seeds: str = "10", *overrides: str) -> int:
    goal = GOAL.get(config, 0.9) * GREATEST[config]
    print(f"{config}, return goal {goal:.0f}\n")
    print(" seed  return  wall s  start s  train s  steps/s  overhead  rollout  learn   sync  moves  solved")
    solved = 0
    for seed in range(int(seeds)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "rlplace.train", "--config-name", config]
            command += [f"runner.seed={seed}", f"runner.output_dir={folder}", *overrides]
            began = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            wall = time.perf_counter() - began
            if done.returncode != 0:
                print(f"{seed:5}  failed with exit code {done.returncode}")
                continue
            run = json.loads(next(Path(folder).glob("*/*/summary.json")).read_text(encoding="utf-8"))
        good = (run["return_last"] or 0.0) >= goal
        solved += good
        seconds = run["seconds"]
        print(
            f"{seed:5}  {run['return_last'] or 0:6.0f}  {wall:6.1f}  {run['start_s']:7.1f}  {run['train_s']:7.1f}"
            f"  {run['env_steps_per_s']:7.0f}  {run['overhead_share']:8.0%}  {seconds['rollout']:7.1f}"
            f"  {seconds['learn']:5.1f}  {seconds['sync']:5.1f}  {seconds['moves']:5.1f}  {'yes' if good else 'no'}",
            flush=True,
        )
    print(f"\nsolved {solved} of {seeds}")
    return 0 if solved == int(seeds) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
