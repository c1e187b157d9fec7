"""Makes an imported job so small that a laptop runs it: the same components in the same places, with small numbers.

There are as few accelerators as keep the sharing, and they are emulated. Models are the shipped model `tiny`, prompts
those of the shipped task `arithmetic`. Such a run shows that the job works, not what it learns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.imports.importer import Imported, ordered
from rlplace.imports.rules import shipped_model
from rlplace.imports.settings import read_mapping
from rlplace.placement import Topology
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.topology import Ranges

_SIZES = Path(__file__).with_name("rules") / "tiny.yaml"
_MODELS = ("actor", "critic", "reference", "reward", "rollout")
_KEPT = (
    "lora_rank",
    "lora_alpha",
    "optimizer",
    "enable_offload",
    "sharded",
    "on_host",
    "warmup_iterations",
)
_KEPT_OF_SOME = ("ema_decay", "url", "function", "head")
_KEPT_OF_ENGINES = ("enable_offload", "sleep_level", "temperature", "top_p", "top_k")


def shrink(imported: Imported) -> Imported:
    """Return a small job with the same components in the same places as an imported job, which a laptop can run.

    Raises ConfigError if it is not a job on language models, or if its placement is not valid.
    """
    if imported.layout is None or not imported.target.shrinks:
        error = "tiny-simulator"
        if imported.layout is None:
            error = "tiny-placement"
        raise config_error("import-value", "--tiny", imported.library, error=error)
    placement = imported.layout.placement
    pieces = [p for c in placement.components for p in placement.accelerators(c).pieces]
    # All accelerators within a unit are used alike.
    unit = gcd(*(edge for piece in pieces for edge in (piece.start, piece.stop)))
    width = max(piece.stop for piece in pieces) // unit
    algorithm = _block(imported, "algorithm")
    for key in ("sequence_length", "train_batch"):
        algorithm.pop(key, None)
    samples = min(2, int(algorithm.get("samples_per_prompt", 1)))
    sizes = read_mapping(_SIZES.read_text(encoding="utf-8"))
    algorithm |= sizes["algorithm"] | {"samples_per_prompt": samples}
    config: dict[str, Any] = {
        "cluster": _cluster(imported, placement, unit, width),
        "algorithm": algorithm,
    }
    for role in (role for role in _MODELS if role in placement.components):
        kept = _KEPT_OF_ENGINES if role == "rollout" else (*_KEPT, *_KEPT_OF_SOME)
        config[role] = {
            key: value for key, value in _block(imported, role).items() if key in kept
        } | sizes[role]
        if "optimizer" in config[role]:
            config[role]["optimizer"] = {
                **config[role]["optimizer"],
                "kind": "adamw",
                "on_host": False,
            }
    config["actor"]["model"] = {"kind": "causal_lm", **shipped_model("tiny")}
    if "reward" in config and not {"url", "function"} & config["reward"].keys():
        # A model with a head for scores
        config["reward"]["model"] = {
            **shipped_model("tiny"),
            "path": "models/tiny_reward",
        }
    config["env"] = sizes["env"]
    if any(c.partition(".")[0] == "reward" for c in placement.components):
        config["env"]["rewards"] = [{"name": "unscored"}]
    # The run's folder is a local one, not that of the original
    config["runner"] = (
        _block(imported, "runner") | {"output_dir": "runs"} | sizes["runner"]
    )
    config = ordered(config, imported.target.job)
    topology = Topology.uniform(1, width, "emulated")
    why = f"{unit} accelerators of the original are one here; sizes, models and prompts are small"
    return dataclasses.replace(
        imported,
        config=config,
        topology=topology,
        layout=make_plan(read_config(config), topology),
        assumed=(*imported.assumed, ("everything as small as it runs", why)),
        missing=(),
        findings=(),
    )


def _cluster(
    imported: Imported, placement: HybridComponentPlacement, unit: int, width: int
) -> dict[str, Any]:
    lines: dict[str, str] = {}
    for component in placement.components:
        numbers = placement.accelerators(component)
        fewer = Ranges.of(
            [range(p.start // unit, p.stop // unit) for p in numbers.pieces]
        )
        lines[component] = str(fewer) if numbers else "cpu"
    lines.setdefault("env", "cpu")
    staying = _block(imported, "cluster").get("allow_resident")
    return {
        "num_nodes": 1,
        "accelerators_per_node": width,
        "accelerator": {"kind": "emulated", "memory": "4GiB"},
        "component_placement": lines,
        "launcher": "inline" if len(placement.accelerators("actor")) == unit else "ray",
        **({"allow_resident": staying} if staying else {}),
    }


def _block(imported: Imported, name: str) -> dict[str, Any]:
    block = imported.config.get(name)
    if isinstance(block, Mapping):
        return dict(block)
    return {}
