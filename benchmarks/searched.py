"""Shipped configs beside what a search makes of them: predicted and measured seconds of an iteration.

    python -m benchmarks.searched [config ...] [--iterations 16] [--repeat 3]

One profile is taken, of the first config; the others run the same simulator and policy. Then each config as it is
shipped and as `python -m rlplace.search` changes it are run in turns. Measured is the median of the runs' medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.prediction import prepared
from rlplace.foresight.measure import Variant, run
from rlplace.foresight.predict import predict
from rlplace.foresight.profile import Profile, read_profile
from rlplace.runtime.prepare import Prepared

CONFIGS = ("hybrid_ppo", "collocated_ppo", "disaggregated_ppo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile.json")
        command("profile", "--config-name", options.configs[0], "--out", str(file))
        profile = read_profile(file.read_text(encoding="utf-8"), file=str(file))
        head = f"{'config':20}{'as shipped, predicted':>24}{'measured':>10}"
        print(
            f"{head}{'as searched, predicted':>24}{'measured':>10}{'ratio':>8}",
            flush=True,
        )
        for config in options.configs:
            best = Path(folder, f"{config}_searched.yaml")
            command(
                "search",
                "--config-name",
                config,
                f"profile={file}",
                "--apply",
                str(best),
            )
            sides = (
                prepared(["--config-name", config]),
                prepared(["--config-dir", folder, "--config-name", best.stem]),
            )
            turns = [
                [measured(side, options.iterations) for side in sides]
                for _ in range(options.repeat)
            ]
            shipped, searched = (
                statistics.median(turn[at] for turn in turns) for at in (0, 1)
            )
            before, after = (predicted(side, profile) for side in sides)
            numbers = f"{before:23.3f}s{shipped:9.3f}s{after:23.3f}s{searched:9.3f}s{shipped / searched:7.2f}x"
            print(f"{config:20}{numbers}", flush=True)


def command(name: str, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", f"rlplace.{name}", *words],
        stdout=subprocess.DEVNULL,
        check=True,
    )


def measured(job: Prepared, iterations: int) -> float:
    return run(Variant(name="one of both", mapping=job.mapping), iterations).seconds[
        "iteration"
    ]["measured"]


def predicted(job: Prepared, profile: Profile) -> float:
    return predict(job.config, job.plan, job.case, profile).seconds


if __name__ == "__main__":
    main()
