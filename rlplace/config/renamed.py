"""Keys of earlier configs: each is refused with the line that replaces it, its value converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlplace.config.kinds import Reject
from rlplace.config.show import show

Blocks = dict[str, Any]

# Old key -> the key of the same block that has its value now, and why.
_SAME_VALUE = {
    "env.adapter": ("kind", "env.kind names the simulator library, or text"),
    "runner.stop_at_reward": ("stop_at_return", "the reward of a text episode is its return"),
    "actor.precision": ("compute", "actor.compute is the dtype of the computation, whatever is trained"),
    "algorithm.clip_ratio": ("clip_ratio_low", "the clip has two sides; clip_ratio_high: null is as wide as low"),
    "algorithm.whiten_advantages": ("normalize_advantages", "one key normalizes advantages, whatever is trained"),
}
_ENV_STEPS = "runner.total_env_steps"
_OPTIMIZER = {"optimizer": "kind", "optimizer_on_host": "on_host"}  # old key beside the block -> key in it
RENAMED = (
    *_SAME_VALUE,
    _ENV_STEPS,
    *(f"{role}.{key}" for role in ("actor", "critic") for key in ("adam", *_OPTIMIZER)),
    "model",
    "algorithm.name: rlhf",
)


def replace_renamed(mapping: Mapping[str, object], reject: Reject) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Return the mapping with new keys for old ones, and the new key of each; record a problem for each."""
    new: Blocks = {key: dict(block) if isinstance(block, Mapping) else block for key, block in mapping.items()}
    env, algorithm = (new[name] if isinstance(new.get(name), dict) else {} for name in ("env", "algorithm"))
    envs, steps = env.get("total_num_envs", 64), algorithm.get("rollout_steps", 64)
    counted = f"an iteration has total_num_envs {show(envs)} x rollout_steps {show(steps)} steps; all jobs count them"
    moved: dict[str, str] = {}
    for old, (name, why) in (_SAME_VALUE | {_ENV_STEPS: ("total_iterations", counted)}).items():
        role, _, leaf = old.partition(".")
        keys = new.get(role)
        if isinstance(keys, dict) and leaf in keys:
            written, moved[old] = keys.pop(leaf), f"{role}.{name}"
            value = _iterations(written, envs, steps) if old == _ENV_STEPS else written
            fix = f"{name}: {show(value)}" + (f"        (and remove {leaf})" if name in keys else "")
            keys.setdefault(name, value)
            reject("renamed-key", old, f"is now {role}.{name}", written, why=why, fix=fix)
    for role in ("actor", "critic"):
        _gather_optimizer(new, role, reject)
    if "model" in new:
        _move_model(new, reject)
    if algorithm.get("name") == "rlhf":
        why = "ppo has a critic, whatever is trained; of a language model with actor.model.kind: causal_lm"
        reject("renamed-key", "algorithm.name", "rlhf is now ppo", "rlhf", why=why, fix="name: ppo")
        algorithm["name"] = "ppo"
        _set_model(new, {"kind": "causal_lm"})
    return new, moved


def _iterations(written: object, envs: object, steps: object) -> object:
    """Convert the length of a run from environment steps to iterations."""
    if not isinstance(written, (int, float)) or not isinstance(envs, int) or not isinstance(steps, int):
        return 100
    return math.ceil(written / (envs * steps)) if min(written, envs, steps) > 0 else 100


def _gather_optimizer(new: Blocks, role: str, reject: Reject) -> None:
    """Make one block of `adam`, the word `optimizer` and `optimizer_on_host`; each fix is the whole block."""
    keys = new.get(role)
    if not isinstance(keys, dict):
        return
    old = {key: keys[key] for key in ("adam", *_OPTIMIZER) if key in keys}
    if not isinstance(old.get("optimizer"), str):
        old.pop("optimizer", None)
    if not old:
        return
    adam, written = old.get("adam"), keys.get("optimizer")
    block = dict(written) if isinstance(written, Mapping) else {}
    block |= {_OPTIMIZER[key]: value for key, value in old.items() if key in _OPTIMIZER}
    block |= adam if isinstance(adam, Mapping) else {}
    for key, value in old.items():
        del keys[key]
        where = f"{role}.optimizer" + (f".{_OPTIMIZER[key]}" if key in _OPTIMIZER else "")
        why = "the optimizer is one block: kind, on_host, lr, ..."
        reject("renamed-key", f"{role}.{key}", f"is now {where}", value, why=why, fix=f"optimizer: {show(block)}")
    keys["optimizer"] = block


def _move_model(new: Blocks, reject: Reject) -> None:
    """Move the model from the top, where it was, to the actor."""
    model = new.pop("model")
    keys = {"kind": "causal_lm"} | (dict(model) if isinstance(model, Mapping) else {})
    why = "the model belongs to the actor that trains it; as a default: model@actor.model"
    reject("renamed-key", "model", "is now actor.model", model, why=why, fix=f"actor.model: {show(keys)}")
    _set_model(new, keys)


def _set_model(new: Blocks, model: Mapping[str, object]) -> None:
    actor = new.setdefault("actor", {})
    if isinstance(actor, dict) and actor.get("model") is None:
        actor["model"] = model
