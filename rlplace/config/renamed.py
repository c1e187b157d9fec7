"""Keys of earlier configs: each is refused with the line that replaces it, its value converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import NoneType
from typing import Any

from rlplace.config.kinds import Reject, value_at
from rlplace.config.show import show

_ENV_STEPS = "runner.total_env_steps"
_ONE_BLOCK = "the optimizer is one block: kind, on_host, lr, ..."
# Old key -> the key that has its value now, and why. A word in place of the optimizer's block comes before its keys.
_MOVED = {
    "env.adapter": ("env.kind", "env.kind names the simulator library, or text"),
    "runner.stop_at_reward": ("runner.stop_at_return", "the reward of a text episode is its return"),
    "actor.precision": ("actor.compute", "actor.compute is the dtype of the computation, whatever is trained"),
    "algorithm.clip_ratio": ("algorithm.clip_ratio_low", "the clip has two sides; clip_ratio_high: null is as wide"),
    "algorithm.whiten_advantages": ("algorithm.normalize_advantages", "one key, whatever is trained"),
    _ENV_STEPS: (
        "runner.total_iterations",
        "an iteration has total_num_envs x rollout_steps steps; all jobs count them",
    ),
    "model": ("actor.model", "the model belongs to the actor that trains it; as a default: model@actor.model"),
} | {
    f"{role}.{old}": (f"{role}.{new}", _ONE_BLOCK)
    for role in ("actor", "critic")
    for old, new in (("optimizer", "optimizer.kind"), ("optimizer_on_host", "optimizer.on_host"), ("adam", "optimizer"))
}
RENAMED = (*_MOVED, "algorithm.name: rlhf")


def replace_renamed(mapping: Mapping[str, object], reject: Reject) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Return the mapping with new keys for old ones, and the new key of each; record a problem for each."""
    new = _copied(mapping)
    written: dict[str, object] = {}
    doubled: dict[str, str] = {}
    joined = {old for old in _MOVED if old.endswith(".adam") and isinstance(value_at(new, _MOVED[old][0]), dict)}
    for old, (path, _) in _MOVED.items():
        role, _, leaf = old.rpartition(".")
        keys = new.get(role) if role else new
        if isinstance(keys, dict) and leaf in keys and (leaf != "optimizer" or isinstance(keys[leaf], str)):
            written[old] = value = keys.pop(leaf)
            if old == _ENV_STEPS:
                value = _iterations(value, new)
            elif old == "model":
                value = {"kind": "causal_lm"} | (value if isinstance(value, dict) else {})
            if not isinstance(value_at(new, path), (dict, NoneType)):
                doubled[old] = f"{path.rpartition('.')[2]}: {show(value)}        (and remove {leaf})"
            _put(new, path, value)
    for old, value in written.items():
        path, why = _MOVED[old]
        key = ".".join(path.split(".")[:2])  # the optimizer is replaced as a whole
        name = key.rpartition(".")[2] if "." in old else key
        beside = " " * 8 + f"(and remove {old.rpartition('.')[2]})" if old in joined else ""
        fix = doubled.get(old) or f"{name}: {show(value_at(new, key))}{beside}"
        reject("renamed-key", old, f"is now {path}", value, why=why, fix=fix)
    algorithm = new.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") == "rlhf":
        why = "ppo has a critic, whatever is trained; of a language model with actor.model.kind: causal_lm"
        reject("renamed-key", "algorithm.name", "rlhf is now ppo", "rlhf", why=why, fix="name: ppo")
        algorithm["name"] = "ppo"
        _put(new, "actor.model", {"kind": "causal_lm"})
    return new, {old: _MOVED[old][0] for old in written}


def _copied(value: Any) -> Any:
    return {key: _copied(below) for key, below in value.items()} if isinstance(value, Mapping) else value


def _put(keys: Any, path: str, value: object) -> None:
    """Write the value of a new key that is not there; join its block, an old optimizer before the new."""
    name, _, below = path.partition(".")
    if not isinstance(keys, dict):
        return
    if below:
        if keys.get(name) is None:
            keys[name] = {}
        _put(keys[name], below, value)
    elif keys.get(name) is None:
        keys[name] = value
    elif isinstance(value, dict) and isinstance(keys[name], dict):
        keys[name] = keys[name] | value if name == "optimizer" else value | keys[name]


def _iterations(written: object, mapping: Mapping[str, Any]) -> object:
    """Convert the length of a run from environment steps to iterations."""
    keys = (("env", "total_num_envs"), ("algorithm", "rollout_steps"))
    numbers = [(block if isinstance(block := mapping.get(role), dict) else {}).get(key, 64) for role, key in keys]
    if not all(isinstance(number, (int, float)) and number > 0 for number in (written, *numbers)):
        return 100
    return math.ceil(written / math.prod(numbers))
