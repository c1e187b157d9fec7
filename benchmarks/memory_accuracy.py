"""Compare the memory that the ledger foresees with what workers at work really hold, by kind of job and stage.

Each rank is a process; the accelerator is emulated, and torch's own record of allocations gives the fullest moment.
Run from the repository: python benchmarks/memory_accuracy.py
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.memory_kinds import FrozenJob, engine_readings, scorer_readings, vllm_block
from tests.memory_kinds import language_model as with_tokenizer
from tests.memory_peaks import Reading, lm_cases, lm_models, lm_readings

MIB = 1 << 20


def main() -> None:
    print(
        "| kind | stage | resident MiB | measured MiB | predicted MiB | ratio | of working bytes |"
    )
    print("|---|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as of_actors,
        tempfile.TemporaryDirectory() as of_others,
    ):
        for name, job in lm_cases(lm_models(Path(of_actors))).items():
            show(name, lm_readings(job))
        model = with_tokenizer(Path(of_others))
        show(
            "reference, refreshed",
            scorer_readings(FrozenJob(model=model, block={"refresh_every": 1})),
        )
        rollout = FrozenJob(model=model, component="rollout")
        show("transformers engine", engine_readings(rollout))
        if importlib.util.find_spec("vllm") is not None:
            engine = dataclasses.replace(
                rollout, answer=8, block=vllm_block(sleep_level=2)
            )
            show("vLLM engine, on a CPU", engine_readings(engine))


def show(name: str, ranks: Sequence[Sequence[Reading]]) -> None:
    for stage in dict.fromkeys(reading.stage for reading in ranks[0]):
        found = max(
            (r for rank in ranks for r in rank if r.stage == stage),
            key=lambda r: r.measured,
        )
        working = found.measured - found.resident
        share = (
            f"{(found.predicted - found.resident) / working:.2f}"
            if working > MIB
            else "-"
        )
        ratio = f"{found.ratio:.2f}" if found.measured > MIB else "-"
        sizes = " | ".join(
            f"{n / MIB:.1f}" for n in (found.resident, found.measured, found.predicted)
        )
        print(f"| {name} | {stage} | {sizes} | {ratio} | {share} |", flush=True)


if __name__ == "__main__":
    main()
