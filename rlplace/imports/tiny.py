"""An imported job at a size that a laptop runs: the same components in the same places, every number small.

Accelerators become as few as preserve the sharing, and are emulated; models become the shipped `tiny` one, prompts the
shipped task `arithmetic`. What is learned is of no interest: that the job runs, and how, is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import gcd
from typing import Any

from rlplace.config import read_config
from rlplace.errors import ConfigError, Problem
from rlplace.imports.importer import Imported, ordered
from rlplace.imports.models import shipped
from rlplace.placement import Topology
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.plan import make_plan

_MEMORY = "4GiB"
_TRAINED = {"weights": "fp32", "compute": "fp32", "checkpointing": False, "token_budget": 256}
_FROZEN = {"dtype": "fp32", "token_budget": 256}
_SIZES: Mapping[str, Mapping[str, object]] = {
    "actor": _TRAINED,
    "critic": _TRAINED | {"model": None},
    "reference": _FROZEN | {"model": None},
    "reward": _FROZEN,
    "rollout": {
        "engine": "transformers",
        "dtype": "fp32",
        "cache_dtype": "fp32",
        "kv_cache_memory": "4MiB",
        "step_tokens": 256,
        "step_sequences": 8,
        "enforce_eager": True,
    },
}
_KEPT = (
    "lora_rank",
    "lora_alpha",
    "optimizer",
    "enable_offload",
    "sharded",
    "on_host",
    "warmup_iterations",
    "ema_decay",
)
_KEPT_OF_ENGINES = ("enable_offload", "sleep_level", "temperature", "top_p", "top_k")
_KEPT_OF_REWARDS = ("url", "function", "head")


def shrink(imported: Imported) -> Imported:
    """Raises ConfigError for a job without language models, and for one whose placement does not hold."""
    if imported.layout is None or imported.kind != "causal_lm":
        raise ConfigError([_not_shrunk(imported)])
    placement = imported.layout.placement
    pieces = [p for c in placement.components for p in placement.accelerators(c).pieces]
    unit = gcd(*(edge for piece in pieces for edge in (piece.start, piece.stop)))  # all components are alike within it
    cluster = _cluster(imported.config, placement, unit)
    config: dict[str, Any] = {"cluster": cluster, "algorithm": _algorithm(imported.config)}
    for role, sizes in _SIZES.items():
        given = _block(imported.config, role)
        kept = _KEPT_OF_ENGINES if role == "rollout" else (*_KEPT, *_KEPT_OF_REWARDS)
        if role in placement.components:
            config[role] = {**{key: given[key] for key in kept if key in given}, **sizes}
            if "optimizer" in config[role]:
                config[role]["optimizer"] = {**config[role]["optimizer"], "kind": "adamw", "on_host": False}
    config["actor"]["model"] = {"kind": "causal_lm", **shipped("tiny")}
    if "reward" in config and not {"url", "function"} & config["reward"].keys():
        config["reward"]["model"] = {**shipped("tiny"), "path": "models/tiny_reward"}  # with a head that scores
    scored = any(c.partition(".")[0] == "reward" for c in placement.components)
    config["env"] = {
        "kind": "text",
        "task": "arithmetic",
        "kwargs": {"digits": 1},
        "chat": False,
        "enable_offload": True,
    }
    config["env"] |= {"rewards": [{"name": "unscored"}]} if scored else {}
    config["runner"] = {"output_dir": "runs"} | _block(imported.config, "runner")
    config["runner"] |= {"total_iterations": 2, "eval_every": 0}
    config = ordered(config, imported.kind)
    topology = Topology.uniform(1, cluster["accelerators_per_node"], "emulated")
    layout = make_plan(read_config(config), topology)
    why = f"{unit} accelerators of the original are one here; sizes, models and prompts are small"
    assumed = (*imported.assumed, ("everything as small as it runs", why))
    return dataclasses.replace(
        imported, config=config, topology=topology, layout=layout, assumed=assumed, missing=(), findings=()
    )


def _cluster(config: Mapping[str, object], placement: HybridComponentPlacement, unit: int) -> dict[str, Any]:
    lines: dict[str, object] = {}
    for component in placement.components:
        numbers = placement.accelerators(component)
        fewer = Ranges.of([range(p.start // unit, p.stop // unit) for p in numbers.pieces])
        lines[component] = str(fewer) if numbers else "cpu"
    lines.setdefault("env", "cpu")
    per_node = max(p.stop for c in placement.components for p in placement.accelerators(c).pieces) // unit
    single = len(placement.accelerators("actor")) == unit
    cluster: dict[str, Any] = {
        "num_nodes": 1,
        "accelerators_per_node": per_node,
        "accelerator": {"kind": "emulated", "memory": _MEMORY},
        "component_placement": lines,
        "launcher": "inline" if single else "ray",
    }
    given = _block(config, "cluster").get("allow_resident")
    return cluster | ({"allow_resident": given} if given else {})


def _algorithm(config: Mapping[str, object]) -> dict[str, Any]:
    given = _block(config, "algorithm")
    samples = min(2, int(given.get("samples_per_prompt", 1)))
    for key in ("sequence_length", "train_batch"):
        given.pop(key, None)
    return given | {"max_prompt_length": 64, "max_new_tokens": 8, "prompts": 8, "samples_per_prompt": samples}


def _block(config: Mapping[str, object], name: str) -> dict[str, Any]:
    block = config.get(name)
    return dict(block) if isinstance(block, Mapping) else {}


def _not_shrunk(imported: Imported) -> Problem:
    broken = imported.layout is None
    return Problem(
        code="import-value",
        key="--tiny",
        what="the placement does not hold" if broken else "is for jobs with language models",
        got=imported.library,
        why="without --tiny, the report has the reasons" if broken else "a simulator has no smaller one",
        fix="leave out --tiny",
    )
