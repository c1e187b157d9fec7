"""Predict the memory that others have published of their runs: engines, caches and trainers of other libraries.

    python benchmarks/published_memory.py            print predicted beside published
    python benchmarks/published_memory.py --write    and write docs/validation.md

The predictions come from the demands of which every plan's memory proof consists. Nothing is fetched and nothing runs.
"""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.config.blocks.training import ActorConfig, OptimizerConfig
from rlplace.placement.memory import formulas
from rlplace.placement.memory.demands import (
    EngineDemand,
    Part,
    Placed,
    TrainingDemand,
)
from rlplace.placement.memory.model import ModelShape, read_model
from rlplace.placement.schedule import Residency
from rlplace.tables import table

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs" / "validation.md"
GIB = 1 << 30
# Predicted over published. A cache is what is left: there, less is the safe side.
LEAST, MOST = 0.97, 1.10
LEFT = ("cache", "tokens")
# Bytes of a score where tokens are drawn from sorted scores: logits in 16 and 32 bits, sorted values and indices, the
# sort's own buffers, probabilities and noise
SORTED_SCORE_BYTES = 38
NAMES = {
    "weights": "weights",
    "peak": "activation peak",
    "outside": "memory outside of torch",
    "cache": "KV cache",
    "tokens": "KV cache, tokens",
    "asleep": "memory of a sleeping engine, from the driver",
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "driver": "peak, from the driver",
    "resident": "resident weights",
}


_HEAD = """\
# Validation

This page compares the memory use that others have published for their runs with the prediction of rlplace. The
prediction uses only the settings of these runs. None of them is a run of rlplace. `python
benchmarks/published_memory.py` reads the settings and sources of the runs from `benchmarks/published_memory.toml`, and
computes the memory with the same formulas as every plan. The script needs no GPU and no network. With `--write`, the
script writes this page.

{summary}.

Sizes are in GiB unless the row names another unit. A ratio is the predicted value divided by the published value. It
should be between 0.97 and 1.10. For a KV cache, the bounds are 0.91 and 1.03: the cache gets the memory that other
parts leave free, so a prediction that is too small is safe. A test checks that every row is within its bounds or has a
reason."""

_END = """\
## Sizes that were measured in these runs

Most predictions are computed from the operations and shapes of a model. Some sizes cannot be computed from a config.
These sizes were measured in some of the published runs. The rows of these runs are therefore not a test of these
sizes:

| size | measured in |
|---|---|
| 256 MiB for kernels outside of torch; 1.9 GiB more for buffers if an engine uses several GPUs | vLLM 0.18 and 0.19 |
| 64 MiB for workspaces in a step of an engine | vLLM 0.19, the same size for 14 models |
| 38 bytes for each logit if an older vLLM sorts the logits | vLLM 0.11 |
| 8 % of the memory that a pass allocates and frees: torch reserves it and cannot use it | torchtitan, the first row |
| 512 MiB for a CUDA context | the memory that GPU drivers report |

The predictions depend on the version of a library. vLLM before 0.17 sorts the logits of the vocabulary to sample a
token. This takes 38 bytes for each logit instead of 14. vLLM before 0.21 stores its CUDA graphs outside of the memory
that `gpu_memory_utilization` gives it; later versions store them inside. The log-probabilities that rlplace requests
take 4 bytes more for each logit. Libraries that compute the logits of all tokens at once hold 12 bytes for each logit
at the peak (the log-softmax, its gradient and the gradient of the loss). rlplace computes logits in tiles instead.

## Runs that are not in the table

Few runs of reinforcement learning are published with all their settings. The table has no runs with quantised weights,
autocast (which keeps inputs of layers in float32), pipeline parallelism or images, and no model families that the
planner does not describe itself. It also has no run whose publication lacks one of these settings: batch size, length,
dtypes, sharding, activation checkpointing, version."""


class Row(NamedTuple):
    """A published number and its prediction. `why`: reason of a prediction that is out of bounds; empty: none."""

    library: str
    url: str
    run: str
    number: str
    published: float
    predicted: float
    why: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def inside(self) -> bool:
        """Whether the prediction is within the bounds. A cache must not be larger than it was, so they are turned."""
        ratio = self.ratio
        if self.number in LEFT:
            ratio = 1 / ratio
        return LEAST <= ratio <= MOST


def rows(file: Path = TABLE) -> list[Row]:
    """Return all published numbers with their predictions, in the order of the table."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    predicted = []
    for written in found["runs"]:
        run = {**found["sources"].get(written.get("source"), {}), **written}
        keys = found["models"][run["model"]]
        numbers = KINDS[run["kind"]](read_model(keys), run)
        for number, size in run["published"].items():
            predicted.append(
                Row(
                    library=run["name"],
                    url=run["url"],
                    run=f"{run['model']}, {describe(run)}",
                    number=number,
                    published=size,
                    predicted=numbers[number],
                    why=run.get("why", {}).get(number, ""),
                )
            )
    return predicted


def engine(model: ModelShape, run: Mapping[str, Any]) -> dict[str, float]:
    """Return the predicted numbers of an engine, as vLLM counts them."""
    dtype = run.get("dtype", "bf16")
    block = TextRolloutConfig(
        engine="vllm",
        dtype=dtype,
        cache_dtype=run.get("cache_dtype"),
        step_tokens=run["tokens"],
        step_sequences=run["sequences"],
        gpu_memory_utilization=run["share"],
        enforce_eager=not run["graphs"],
    )
    score = SORTED_SCORE_BYTES if run.get("sorts") else formulas.SCORE_BYTES
    demand = EngineDemand(model=model, block=block, sequence_length=1024, score=score)
    parallel = run.get("parallel", 1)
    placed = Placed(
        ranks=1,
        accelerators_per_rank=parallel,
        tensor_parallel=parallel,
        memory_bytes=int(run["gpu_gib"] * GIB),
        kind="cuda",
    )
    footprint = demand.footprint(placed)
    held = footprint.held[Residency.FULL]
    token = formulas.kv_sequence(
        model, 1, 1, formulas.DTYPE_BYTES[block.cache], parallel
    )
    return {
        "weights": held[Part.PARAMETERS] / GIB,
        "peak": footprint.working["rollout"][Part.WORKSPACE] / GIB,
        "outside": held[Part.ASLEEP] / GIB,
        "cache": held[Part.KV_CACHE] / GIB,
        "tokens": held[Part.KV_CACHE] / token,
        "asleep": sum(footprint.held[Residency.OFF].values()) / GIB,
    }


def cache(model: ModelShape, run: Mapping[str, Any]) -> dict[str, float]:
    """Return the predicted bytes of a KV cache for a number of tokens."""
    parallel = run.get("parallel", 1)
    token = formulas.kv_sequence(model, 1, 1, 2, parallel)
    return {"cache": run["of_tokens"] * token / GIB}


def trainer(model: ModelShape, run: Mapping[str, Any]) -> dict[str, float]:
    """Return the predicted peaks of a trainer, with what its library holds and rlplace does not."""
    context = run.get("context", 1)
    parallel = run.get("parallel", 1)
    block = ActorConfig(
        micro_batch=run["micro_batch"],
        weights=run["weights"],
        compute="bf16",
        optimizer=OptimizerConfig(kind=run["optimizer"]),
        checkpointing=run["checkpointing"],
        activation_offload=run.get("offload", False),
        lora_rank=run.get("lora_rank"),
    )
    copies = run["gpus"] // parallel
    # Samples of a step: 0 where gradients are accumulated over several passes
    samples = run["micro_batch"] * copies // context
    demand = TrainingDemand(
        model=model,
        block=block,
        sequence_length=run["length"],
        samples=0 if run.get("accumulates") else samples,
    )
    placed = Placed(
        ranks=run["gpus"],
        accelerators_per_rank=1,
        tensor_parallel=parallel,
        context_parallel=context,
        memory_bytes=0,
        kind="cuda",
    )
    footprint = demand.footprint(placed)
    tokens = run["micro_batch"] * run["length"] // context
    scores = tokens * model.vocabulary // parallel * run["logits"]
    learning = footprint.working["learn"]
    fragments = learning[Part.FRAGMENTS] + formulas.fragments(scores)
    reserved = sum(learning.values()) + formulas.fragments(scores) + scores
    reserved += footprint.reported_bytes(Residency.FULL)
    outside = footprint.held[Residency.FULL]
    of_process = outside[Part.CONTEXT] + outside[Part.COMMUNICATOR]
    return {
        "allocated": (reserved - fragments) / GIB,
        "reserved": reserved / GIB,
        "driver": (reserved + of_process) / GIB,
        "resident": footprint.reported_bytes(Residency.WEIGHTS) / GIB,
    }


KINDS = {"engine": engine, "cache": cache, "trainer": trainer}


def describe(run: Mapping[str, Any]) -> str:
    """Return the settings of a run in words."""
    said = [run["gpu"]]
    if run["kind"] == "trainer":
        said.append("1 GPU" if run["gpus"] == 1 else f"{run['gpus']} GPUs")
        if run["published"].keys() != {"resident"}:
            said.append(f"{run['micro_batch']} x {run['length']:,} tokens")
        said.append(f"weights {run['weights']}")
        if run.get("lora_rank"):
            said.append(f"LoRA {run['lora_rank']}")
        said.append(
            "activation checkpointing"
            if run["checkpointing"]
            else "no activation checkpointing"
        )
        if run.get("offload"):
            said.append("activation offload")
        if run["logits"]:
            said.append("all logits at once")
    if run.get("parallel", 1) > 1:
        said.append(f"TP {run['parallel']}")
    if run.get("context", 1) > 1:
        said.append(f"CP {run['context']}")
    # Weights, and what stays while an engine sleeps, depend on nothing else
    if run["kind"] == "engine" and not run["published"].keys() <= {"weights", "asleep"}:
        said.append(f"gpu_memory_utilization {run['share']:g}")
        step = f"{run['tokens']:,} tokens and {run['sequences']:,} sequences"
        said.append(f"a step of {step} at most")
    if run["kind"] == "cache":
        said.append(f"{run['of_tokens']:,} tokens")
    for key in ("dtype", "cache_dtype"):
        if key in run:
            said.append(f"{key} {run[key]}")
    return ", ".join(said)


def main(arguments: Sequence[str]) -> None:
    found = rows()
    heading = ("library", "run", "number", "published", "predicted", "ratio", "")
    cells: list[Sequence[str]] = [heading]
    for row in found:
        note = "" if row.inside else row.why or "OUT OF BOUNDS"
        cells.append(
            (
                row.library,
                row.run,
                NAMES[row.number],
                *_shown(row),
                f"{row.ratio:.3f}",
                note,
            )
        )
    print("\n".join(table(cells, right=(3, 4, 5))))
    print(summary(found))
    if "--write" in arguments:
        PAGE.write_text(page(found), encoding="utf-8")


def _shown(row: Row) -> tuple[str, str]:
    if row.number == "tokens":
        return f"{row.published:,.0f}", f"{row.predicted:,.0f}"
    return f"{row.published:g}", f"{row.predicted:.2f}"


def summary(found: Sequence[Row]) -> str:
    """Return the counts of rows, rows within the bounds and rows with a reason, as a sentence."""
    inside = sum(row.inside for row in found)
    reasons = sum(not row.inside and bool(row.why) for row in found)
    return (
        f"The table has {len(found)} numbers from {len({row.url for row in found})} sources: "
        f"{inside} are within their bounds (-3 % to +10 %), {reasons} are outside and have a reason"
    )


def _by_number(found: Sequence[Row]) -> list[str]:
    """Return a table with the ratios of each kind of number."""
    lines = [
        "| number | rows | smallest ratio | median ratio | largest ratio |",
        "|---|---|---|---|---|",
    ]
    for number, name in NAMES.items():
        ratios = [row.ratio for row in found if row.number == number]
        middle = statistics.median(ratios)
        ends = f"{min(ratios):.3f} | {middle:.3f} | {max(ratios):.3f}"
        lines.append(f"| {name} | {len(ratios)} | {ends} |")
    return lines


def page(found: Sequence[Row]) -> str:
    """Return docs/validation.md."""
    urls = list(dict.fromkeys(row.url for row in found))
    reasons = list(dict.fromkeys(row.why for row in found if not row.inside))
    lines = ["| library | run | number | published | predicted | ratio |"]
    lines.append("|---|---|---|---|---|---|")
    for row in found:
        mark = "" if row.inside else f" ({reasons.index(row.why) + 1})"
        published, predicted = _shown(row)
        cells = (
            f"[{row.library}][{urls.index(row.url) + 1}]",
            row.run,
            NAMES[row.number],
            published,
            predicted,
            f"{row.ratio:.3f}{mark}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    parts = [_HEAD.format(summary=summary(found)), "\n".join(_by_number(found))]
    parts.append("\n".join(lines))
    parts.append("Reasons for the rows outside of the bounds:")
    parts.append("\n".join(f"{at}. {why}" for at, why in enumerate(reasons, 1)))
    parts.append(_END)
    parts.append("\n".join(f"[{at}]: {url}" for at, url in enumerate(urls, 1)))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
