"""Seconds of changes of the placement between two iterations, as the run measures them.

    python benchmarks/change.py [--config hybrid_ppo] [--there 'env: 0-7'] [--back 'env: 0-3'] [--times 3]
                                [--output runs/change] [override ...]

The run changes after each second iteration, there and back. Prints one row for each change, with the parts of its
seconds, the size of the state and where it was, and the medians of both directions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlplace.cli.train import main as train
from rlplace.json_text import read_object

PARTS = ("save_s", "end_s", "launch_s", "load_s", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="hybrid_ppo")
    parser.add_argument("--there", default="env: 0-7", help="places after a change")
    parser.add_argument("--back", default="env: 0-3", help="places after the next one")
    parser.add_argument("--times", type=int, default=3, help="changes there and back")
    parser.add_argument("--output", type=Path, default=Path("runs/change"))
    options, overrides = parser.parse_known_args()
    changes = []
    for number in range(2 * options.times):
        places = options.back if number % 2 else options.there
        after = 2 * (number + 1)
        changes.append(f"{{after: {after}, component_placement: {{{places}}}}}")
    last = 2 * len(changes) + 1
    code = train(
        [
            "--config-name",
            options.config,
            f"runner.output_dir={options.output}",
            f"runner.total_iterations={last}",
            "runner.stop_at_return=null",
            "checkpoint.every=0",
            *overrides,
            f"cluster.changes=[{', '.join(changes)}]",
        ]
    )
    if code:
        sys.exit(code)
    newest = max(options.output.glob("*/*/summary.json"), key=os.path.getmtime)
    show(read_object(newest, "--output")["changes"])


def show(changes: list[dict[str, Any]]) -> None:
    """Print the table. `changes`: the list of summary.json."""
    names = [part.removesuffix("_s") for part in PARTS]
    print("\n" + "".join(f"{name:>9}" for name in ("after", *names, "MiB")) + "   in")
    for change in changes:
        cells = [f"{change['after']:9}"]
        cells += [f"{change[part]:9.2f}" for part in PARTS]
        cells.append(f"{change['bytes'] / (1 << 20):9.1f}")
        kept = f"   kept: {change['kept']}" if change["kept"] else ""
        print("".join(cells) + f"   {change['where']}{kept}")
    for direction, rows in (("there", changes[::2]), ("back", changes[1::2])):
        median = statistics.median(row["seconds"] for row in rows)
        print(f"median {direction}: {median:.2f} s of {len(rows)}")


if __name__ == "__main__":
    main()
