"""Compare the memory that the ledger foresees with what workers at work really hold, by kind of job and stage.

Each rank is a process; the accelerator is emulated, and torch's own record of allocations gives the fullest moment.
Run from the repository: python benchmarks/memory_accuracy.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.memory_peaks import language_model, lm_cases, lm_readings

MIB = 1 << 20


def main() -> None:
    print("| kind | stage | resident MiB | measured MiB | predicted MiB | ratio | of working bytes |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, job in lm_cases(language_model(Path(folder))).items():
            ranks = lm_readings(job)
            for stage in dict.fromkeys(reading.stage for reading in ranks[0]):
                found = max((r for rank in ranks for r in rank if r.stage == stage), key=lambda r: r.measured)
                working = found.measured - found.resident
                share = f"{(found.predicted - found.resident) / working:.2f}" if working > MIB else "-"
                sizes = " | ".join(f"{n / MIB:.1f}" for n in (found.resident, found.measured, found.predicted))
                print(f"| {name} | {stage} | {sizes} | {found.ratio:.2f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
