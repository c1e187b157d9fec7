"""Keys of earlier configs: each is refused with the line that replaces it, its value converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
_OPTIMIZER = {"optimizer": "kind", "optimizer_on_host": "on_host"}  # old key beside the block -> key in it
RENAMED = (
    *_SAME_VALUE,
    "runner.total_env_steps",
    *(f"{role}.{key}" for role in ("actor", "critic") for key in ("adam", *_OPTIMIZER)),
    "model",
    "algorithm.name: rlhf",
)


def replace_renamed(mapping: Mapping[str, object], reject: Reject) -> Mapping[str, object]:
    """The mapping with new keys for old ones, each of which is recorded as a problem."""
    new: Blocks = {key: dict(block) if isinstance(block, Mapping) else block for key, block in mapping.items()}
    for old, (name, why) in _SAME_VALUE.items():
        _move(new, old, name, lambda value: value, why, reject)
    _replace_env_steps(new, reject)
    for role in ("actor", "critic"):
        _gather_optimizer(new, role, reject)
    _move_model(new, reject)
    algorithm = new.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") == "rlhf":
        why = "ppo has a critic, whatever is trained; of a language model with actor.model.kind: causal_lm"
        reject("renamed-key", "algorithm.name", "rlhf is now ppo", "rlhf", why=why, fix="name: ppo")
        algorithm["name"] = "ppo"
        actor = new.setdefault("actor", {})
        if isinstance(actor, dict) and actor.get("model") is None:
            actor["model"] = {"kind": "causal_lm"}
    return new


def _move(new: Blocks, old: str, name: str, convert: Callable[[Any], object], why: str, reject: Reject) -> None:
    """Replace a key by another of the same block."""
    block, _, leaf = old.partition(".")
    keys = new.get(block)
    if not isinstance(keys, dict) or leaf not in keys:
        return
    value = keys.pop(leaf)
    fix = f"{name}: {show(convert(value))}" + (f"        (and remove {leaf})" if name in keys else "")
    keys.setdefault(name, convert(value))
    reject("renamed-key", old, f"is now {block}.{name}", value, why=why, fix=fix)


def _replace_env_steps(new: Blocks, reject: Reject) -> None:
    """Runs were as long as a number of environment steps; they are as long as a number of iterations."""
    env, algorithm = new.get("env"), new.get("algorithm")
    envs = env.get("total_num_envs", 64) if isinstance(env, dict) else 64
    steps = algorithm.get("rollout_steps", 64) if isinstance(algorithm, dict) else 64

    def iterations(value: Any) -> object:
        counts = all(isinstance(n, (int, float)) and n > 0 for n in (value, envs, steps))
        return math.ceil(value / (envs * steps)) if counts else 100

    why = f"an iteration has total_num_envs {show(envs)} x rollout_steps {show(steps)} steps; all jobs count iterations"
    _move(new, "runner.total_env_steps", "total_iterations", iterations, why, reject)


def _gather_optimizer(new: Blocks, role: str, reject: Reject) -> None:
    """`adam`, the word `optimizer` and `optimizer_on_host` are one block; each fix is the whole block."""
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
    """The model of a language-model job stood at the top; it is the actor's."""
    if "model" not in new:
        return
    model = new.pop("model")
    actor = new.setdefault("actor", {})
    keys = {"kind": "causal_lm"} | (dict(model) if isinstance(model, Mapping) else {})
    why = "the model belongs to the actor that trains it; as a default: model@actor.model"
    reject("renamed-key", "model", "is now actor.model", model, why=why, fix=f"actor.model: {show(keys)}")
    if isinstance(actor, dict) and actor.get("model") is None:
        actor["model"] = keys
