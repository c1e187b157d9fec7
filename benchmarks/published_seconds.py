"""Predict the seconds of runs that others have published, from published rates of accelerators alone.

    python benchmarks/published_seconds.py              the tables of docs/validation_seconds.md
    python benchmarks/published_seconds.py --check      exit 1 if the page has other figures

The runs, their settings and where they stand are in published_seconds.toml. Nothing is measured here. A step of another
library is predicted as the nearest job of rlplace: FSDP, with tensor parallelism where the library has it, in place of
pipeline and expert parallelism; answers are log-normal around the published mean, cut at the longest.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.contract.registry import job_of
from rlplace.foresight.costs import Costs
from rlplace.foresight.predict import predict
from rlplace.foresight.show import predicted_seconds
from rlplace.jobs.language_model.performance.published import (
    TextLengths,
    published_profile,
)
from rlplace.workers.launch.machines import declared_topology

_HERE = Path(__file__)
PAGE = _HERE.parents[1] / "docs" / "validation_seconds.md"
_BEGIN = "<!-- begin: benchmarks/published_seconds.py -->"
_END = "<!-- end -->"
_LONGEST = 4096
_PROMPT = 160.0  # of OpenMathInstruct-2 with the template, not published
_SIGMA = 0.7  # of the logarithms of answers' lengths, not published
_PROMPTS = 64
_ANSWERS = 32
_H100 = "H100-80GB"
_GB200 = "GB200"


@dataclasses.dataclass(frozen=True)
class Compared:
    """One published number and its prediction. `what`: "iteration", a stage, or "tokens/s"."""

    row: str
    source: str
    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / published - 1; for tokens per second as if these were seconds."""
        if self.what == "tokens/s":
            return self.published / self.predicted - 1.0
        return self.predicted / self.published - 1.0


def table() -> dict[str, Any]:
    return tomllib.loads(_HERE.with_suffix(".toml").read_text(encoding="utf-8"))


def lengths(row: Mapping[str, Any]) -> TextLengths:
    """Return lengths of a row's texts: log-normal, cut at the longest, with the published mean."""
    longest = _LONGEST - _PROMPT
    mean = row["tokens"] - _PROMPT * row["whole"]
    normal = statistics.NormalDist()
    drawn = [
        normal.inv_cdf((i + 0.5) / (_PROMPTS * _ANSWERS))
        for i in range(_PROMPTS * _ANSWERS)
    ]

    def cut(middle: float) -> list[float]:
        return [min(longest, math.exp(middle + _SIGMA * z)) for z in drawn]

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if statistics.fmean(cut(middle)) < mean:
            low = middle
        else:
            high = middle
    return TextLengths(_PROMPT, cut(low))


def _mapping(
    model: Mapping[str, Any], gpus: int, product: str, placement: Mapping[str, Any]
) -> dict[str, Any]:
    per_node = min(8, gpus)
    nodes: dict[str, Any] = {
        "product": product,
        "host_memory": "2TiB",
        "nvlink_gb_per_s": 450,
        "pcie_gb_per_s": 50,
        "network_gb_per_s": 50,
    }
    if product == _GB200:
        per_node = min(4, gpus)
        # NVLink joins all nodes of a rack, and two accelerators to their Grace.
        nodes |= {
            "nvlink_gb_per_s": 900,
            "pcie_gb_per_s": 225,
            "network_gb_per_s": 900,
        }
    nodes["count"] = gpus // per_node
    nodes["accelerators"] = per_node
    return {
        "cluster": {
            "num_nodes": gpus // per_node,
            "accelerators_per_node": "auto",
            "nodes": [nodes],
            "component_placement": {"env": "cpu", **placement},
        },
        "env": {"task": "arithmetic"},
        "actor": {
            "model": {"kind": "causal_lm", "path": None, **model},
            "weights": "bf16",
            "compute": "bf16",
            "optimizer": {"kind": "adamw_master"},
            "token_budget": _LONGEST,
            "enable_offload": True,
        },
        "rollout": {
            "engine": "vllm",
            "gpu_memory_utilization": 0.6,
            "sleep_level": 2,
            "enable_offload": True,
        },
        "memory": {"check": "warn"},
    }


def step_mapping(row: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a published step as values of YAML."""
    gpus = row["gpus"]
    trained = gpus - row["apart"]
    learner: dict[str, Any] = {"placement": f"0-{trained - 1}"}
    if row["train_tensor"] > 1:
        learner["tensor_parallel_size"] = row["train_tensor"]
    first = trained if row["apart"] else 0
    engines: dict[str, Any] = {"placement": f"{first}-{gpus - 1}"}
    if row["engine"] > 1:
        engines["tensor_parallel_size"] = row["engine"]
    placement = {"actor": learner, "rollout": engines, "reference": learner}
    values = _mapping(model, gpus, row.get("product", _H100), placement)
    values["actor"]["checkpointing"] = row["checkpointing"]
    values["rollout"]["enable_offload"] = not row["apart"]
    values["reference"] = {"token_budget": 2 * _LONGEST, "enable_offload": True}
    values["algorithm"] = {
        "name": "grpo",
        "prompts": _PROMPTS,
        "samples_per_prompt": _ANSWERS,
        "max_prompt_length": 512,
        "max_new_tokens": _LONGEST - 512,
        "train_batch": row["train_batch"],
        "kl_coef": 0.01,
        "tis_cap": 2.0 if row["logprobs"] > 1 else None,
        "max_staleness": row["off"],
    }
    return values


def _planned(values: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    config = read_config(values)
    config = job_of(config).completed(config, {})
    plan = make_plan(config, declared_topology(config.cluster))
    return config, plan, memory_case(plan, config)


def predict_step(row: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, float]:
    """Return stage -> predicted seconds of a published step; `learn` has the log-probabilities as well."""
    config, plan, case = _planned(step_mapping(row, model))
    profile = published_profile(config, plan, case, lengths(row))
    found = predicted_seconds(predict(config, plan, case, profile))
    found["learn"] = found.get("learn", 0.0) + found.pop("infer", 0.0)
    return found


def predict_pass(row: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the predicted tokens per second of published training passes."""
    gpus = row["gpus"]
    placement = {"actor": "all", "rollout": "all"}
    values = _mapping(model, gpus, row["product"], placement)
    values["actor"]["token_budget"] = row["length"]
    values["actor"]["checkpointing"] = True
    if row["lora"]:
        values["actor"]["lora_rank"] = row["lora"]
        values["actor"]["lora_targets"] = ["all-linear"]
    values["algorithm"] = {
        "name": "grpo",
        "prompts": 8 * gpus,
        "max_prompt_length": 512,
        "max_new_tokens": 1024,
    }
    config, plan, case = _planned(values)
    text = TextLengths(0.0, [float(row["length"])])
    costs = Costs(published_profile(config, plan, case, text))
    part = "sharded_micro_batch" if gpus > 1 else "micro_batch"
    once = costs.of(f"actor.learn/{part}", row["length"]).seconds
    step = costs.of("actor.learn/exchange", gpus).seconds
    return float(2 * row["length"] * gpus / (2 * once + step))


def compared() -> list[Compared]:
    """Return all published numbers with their predictions."""
    known = table()
    found: list[Compared] = []
    for row in known["step"]:
        seconds = predict_step(row, known["model"][row["model"]])
        kept = "shared accelerators"
        if row["apart"]:
            kept = f"{row['apart']} for generation, staleness {row['off']}"
        product = row.get("product", _H100).partition("-")[0]
        name = f"{row['model']}, {row['gpus']} x {product}, {kept}"
        if row["train_tensor"] > 1:
            name += f", TP {row['train_tensor']}"
        for what, published in row["published"].items():
            found.append(Compared(name, row["source"], what, published, seconds[what]))
    for row in known["pass"]:
        predicted = predict_pass(row, known["model"][row["model"]])
        kind = f"LoRA {row['lora']}" if row["lora"] else "all weights"
        product = row["product"].partition("-")[0]
        name = f"{row['model']}, {row['gpus']} x {product}, {row['length']:,} tokens, {kind}"
        found.append(
            Compared(name, row["source"], "tokens/s", row["published"], predicted)
        )
    return found


def pairs(rows: Sequence[Compared]) -> Iterator[tuple[Compared, Compared, bool]]:
    """Yield pairs of placements: whole steps of one model and source, and whether they are predicted in their order.

    Pairs within 5 % of each other as published are left out.
    """
    whole = [row for row in rows if row.what == "iteration"]
    for one, other in itertools.combinations(whole, 2):
        same = one.row.partition(",")[0] == other.row.partition(",")[0]
        if not same or one.source != other.source or one.row == other.row:
            continue
        if abs(one.published / other.published - 1.0) < 0.05:
            continue
        right = (one.published < other.published) is (one.predicted < other.predicted)
        yield one, other, right


def median_error(rows: Sequence[Compared]) -> float:
    return statistics.median(abs(row.error) for row in rows)


def render(rows: Sequence[Compared]) -> str:
    """Return the tables as Markdown."""
    lines: list[str] = []
    known = table()
    for name, source in known["source"].items():
        own = [row for row in rows if row.source == name]
        lines += ["", f"[{source['title']}]({source['url']})", ""]
        lines += [
            "| run | number | published | predicted | error |",
            "|---|---|---:|---:|---:|",
        ]
        for row in own:
            published = f"{row.published:,.4g}"
            predicted = f"{row.predicted:,.4g}"
            if row.what == "tokens/s":
                published = f"{row.published:,.0f}"
                predicted = f"{row.predicted:,.0f}"
            lines.append(
                f"| {row.row} | {row.what} | {published} | {predicted} | {row.error:+.0%} |"
            )
    ordered = list(pairs(rows))
    right = sum(ok for *_, ok in ordered)
    lines += [
        "",
        "| numbers | count | median absolute error |",
        "|---|---:|---:|",
    ]
    kinds = {
        "all": list(rows),
        "whole steps": [row for row in rows if row.what == "iteration"],
        "generation": [row for row in rows if row.what == "rollout"],
        "learning in a step": [row for row in rows if row.what == "learn"],
        "training passes": [row for row in rows if row.what == "tokens/s"],
    }
    for kind, some in kinds.items():
        lines.append(f"| {kind} | {len(some)} | {median_error(some):.0%} |")
    lines += [
        "",
        f"Order of placements for one model and source: the prediction is right for {right} of {len(ordered)} pairs.",
    ]
    for one, other, ok in ordered:
        if not ok:
            lines.append(
                f"Wrong order: {one.row} ({one.published:.4g} s), and {other.row} ({other.published:.4g} s)."
            )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the page")
    options = parser.parse_args()
    found = render(compared())
    if not options.check:
        print(found)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    there = page.partition(_BEGIN)[2].partition(_END)[0].strip()
    if there == found.strip():
        return 0
    print(f"{PAGE} has other figures than these:\n{found}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
