"""Makes an imported job so small that a laptop runs it: the same components in the same places, with small numbers.

There are as few accelerators as keep the sharing, and they are emulated. Models are the shipped model `tiny`, prompts
those of the shipped task `arithmetic`; simulators are shipped tasks, too. Such a run shows that the job works, not what
it learns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import gcd, lcm
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.contract.planning import make_plan
from rlplace.contract.reading import try_job
from rlplace.errors import ConfigError
from rlplace.imports.importer import SIMULATOR, Imported, ordered
from rlplace.imports.rules import shipped_model
from rlplace.imports.settings import read_mapping
from rlplace.placement import Topology
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.topology import Ranges

_SIZES = Path(__file__).with_name("rules") / "tiny.yaml"
_SIMULATOR_SIZES = Path(__file__).with_name("rules") / "tiny_simulators.yaml"
# Advantages and loss of RLinf's algorithms
_PPO = ("gae", "embodied_gae", "ppo")
_GRPO = ("grpo", "actor")
_SAC = ("embodied_sac", "embodied_sac")
# Beginnings of RLinf's kinds of policies whose actions come from noise
_FLOWS = ("openpi", "gr00t", "dexbotic_pi")
# Keys of flow matching in RLinf -> key here, least and greatest value
_FLOW_KEYS: Mapping[str, tuple[str, float, float]] = {
    "actor.model.num_steps": ("denoising_steps", 1, 100),
    "actor.model.openpi.noise_level": ("noise_level", 0.01, 1),
}
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

    Raises ConfigError if its placement is not valid, or if its algorithm has no job here.
    """
    if imported.layout is None:
        raise config_error(
            "import-value", "--tiny", imported.library, error="tiny-placement"
        )
    if imported.target == SIMULATOR:
        return _small_simulators(imported, imported.layout.placement)
    placement = imported.layout.placement
    unit, width = _units(placement)
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
    why = f"{unit} accelerators of the original are one here; sizes, models and prompts are small"
    return _small(imported, ordered(config, imported.target.job), width, [why])


def _small(
    imported: Imported, config: dict[str, Any], width: int, reasons: Sequence[str]
) -> Imported:
    """Return an imported job with a small config.

    `width`: number of its accelerators. `reasons`: what is small, and what else is another.
    """
    topology = Topology.uniform(1, width, "emulated")
    small = [("everything as small as it runs", why) for why in reasons]
    read, wrong = try_job(config, {})
    if read is None or wrong:
        raise ConfigError(wrong)
    return dataclasses.replace(
        imported,
        config=config,
        topology=topology,
        layout=make_plan(read, topology),
        assumed=(*imported.assumed, *small),
        missing=(),
        findings=(),
    )


def _units(placement: HybridComponentPlacement) -> tuple[int, int]:
    """Return how many accelerators of the original are one of the small job, and how many the small job has."""
    pieces = [p for c in placement.components for p in placement.accelerators(c).pieces]
    # All accelerators within a unit are used alike.
    unit = gcd(*(edge for piece in pieces for edge in (piece.start, piece.stop)))
    return unit, max(piece.stop for piece in pieces) // unit


def _small_simulators(
    imported: Imported, placement: HybridComponentPlacement
) -> Imported:
    """Return a small job with the components of an imported job on simulators, in the same places.

    Simulator and policy are shipped ones: of an original with a vision-language-action model, the task `reach` with a
    small one of that kind. Raises ConfigError if the algorithm has no job on simulators.
    """
    given = {each.setting.key: each.setting.value for each in imported.results}
    kind = str(given.get("actor.model.model_type", "mlp_policy"))
    advantages = str(given.get("algorithm.adv_type", "gae"))
    loss = str(given.get("algorithm.loss_type", "actor_critic"))
    unit, width = _units(placement)
    why = f"{unit} accelerators of the original are one here; the simulator and the policy are small ones of rlplace"
    reasons = [why]
    if (advantages, loss) == _SAC:
        config = _small_sac(imported, placement, unit, width)
        reasons.append("rollout steps the simulators, and env has no place of its own")
    elif advantages in _PPO or (advantages, loss) == _GRPO:
        config = _small_ppo(imported, placement, unit, width, kind, given)
        if advantages not in _PPO:
            reasons.append("jobs on simulators have PPO in place of GRPO")
    else:
        raise config_error(
            "import-value",
            "--tiny",
            f"{advantages}, {loss}",
            error="tiny-simulator",
        )
    return _small(imported, config, width, reasons)


def _flow_keys(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of flow matching that a small job keeps of RLinf's settings, `given` by their names."""
    found: dict[str, object] = {}
    for theirs, (ours, least, most) in _FLOW_KEYS.items():
        value = given.get(theirs)
        if isinstance(value, int | float) and least <= value <= most:
            found[ours] = value
    return found


def _small_ppo(
    imported: Imported,
    placement: HybridComponentPlacement,
    unit: int,
    width: int,
    kind: str,
    given: Mapping[str, object],
) -> dict[str, Any]:
    """Return the config of a small job of PPO. `kind`: of the policy in the original, with the settings `given`."""
    sizes = read_mapping(_SIMULATOR_SIZES.read_text(encoding="utf-8"))
    cluster = _cluster(imported, placement, unit, width)
    stages = int(_block(imported, "rollout").get("pipeline_stage_num", 1))
    chunk = int(_block(imported, "rollout").get("action_chunk", 1))
    ranks = [placement.world_size(c) // unit or 1 for c in placement.components]
    algorithm = _block(imported, "algorithm") | sizes["algorithm"]
    network = {"mlp_policy": "numbers", "cnn_policy": "images"}.get(kind, "vla")
    if kind.startswith(_FLOWS):
        network = "flow"
        # The noise is given, so there is no entropy to reward
        algorithm["entropy_coef"] = 0.0
    of_policy = sizes[network]
    model = dict(of_policy["model"])
    if network == "flow":
        model |= _flow_keys(given)
    env = of_policy["env"] | {"total_num_envs": 2 * stages * lcm(*ranks)}
    config: dict[str, Any] = {
        "cluster": cluster,
        "env": env,
        "rollout": {
            **_kept(imported, "rollout", ("pipeline_stage_num", "enable_offload")),
            "engine": "torch",
            "action_chunk": min(2, chunk),
        },
        "actor": {
            **_kept(imported, "actor", ("optimizer", "enable_offload")),
            "model": model,
            "compute": "fp32",
        },
        "algorithm": algorithm,
        "runner": _small_runner(imported, sizes),
    }
    if _block(imported, "env").get("enable_offload"):
        config["env"]["enable_offload"] = True
    found = ordered(config, SIMULATOR.job)
    # Only a config with a kind of network says which keys a network has
    found["actor"] = {**config["actor"]}
    return found


def _small_sac(
    imported: Imported, placement: HybridComponentPlacement, unit: int, width: int
) -> dict[str, Any]:
    """Return the config of a small off-policy job, in which rollout steps the simulators."""
    sizes = read_mapping(_SIMULATOR_SIZES.read_text(encoding="utf-8"))
    cluster = _cluster(imported, placement, unit, width)
    places = cluster["component_placement"]
    cluster["component_placement"] = {
        "actor": places["actor"],
        "rollout": places["rollout"],
        "replay": "cpu",
    }
    cluster.pop("allow_resident", None)
    ranks = [placement.world_size(c) // unit or 1 for c in ("actor", "rollout")]
    every = sizes["sac"]
    return {
        "job": "off_policy",
        **every,
        "cluster": cluster,
        "env": every["env"] | {"total_num_envs": lcm(*ranks)},
        "algorithm": {
            **every["algorithm"],
            "batch_size": 8 * ranks[0],
            "steps_per_iteration": 16 * lcm(*ranks),
            "sync_every": 4 * lcm(*ranks),
        },
        "replay": {"capacity": 1024 * lcm(*ranks)},
        "runner": _small_runner(imported, sizes),
    }


def _small_runner(imported: Imported, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block runner of a small job. The run's folder is a local one, not that of the original."""
    kept = _kept(imported, "runner", ("seed", "sinks"))
    return {**kept, "output_dir": "runs", **sizes["runner"]}


def _kept(imported: Imported, name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a block that a small job keeps."""
    return {k: value for k, value in _block(imported, name).items() if k in keys}


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
