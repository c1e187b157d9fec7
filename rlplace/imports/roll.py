"""ROLL: its YAML. Every group of workers lists its devices by number there, so the placement goes over as it is.

`actor_train` is the actor, `actor_infer` the rollout, each entry of `rewards` a `reward.NAME`. A group without a
`device_mapping` runs on CPUs and takes no accelerators. States leave the accelerators after every step by themselves.
"""

from __future__ import annotations

import ast

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.learning import set_algorithm, set_kl
from rlplace.imports.placing import check_engine_size, place
from rlplace.imports.settings import PLACEMENT
from rlplace.placement.machines.ranges import Ranges

_ROLES = {
    "actor_train": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward": "reward",
    "actor_infer": "rollout",
}
_BATCH, _STEPS = (
    f"actor_train.training_args.{n}" for n in ("per_device_train_batch_size", "gradient_accumulation_steps")
)


def import_roll(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: num_gpus_per_node, else 8."""
    width = per_node or draft.count("num_gpus_per_node", 8, 1)
    where = _places(draft)
    copies = {
        "rollout": max(
            draft.count("actor_infer.num_gpus_per_worker", 1, 1),
            draft.count("actor_infer.strategy_args.strategy_config.tensor_parallel_size", 1, 1),
        ),
        "actor": draft.count("actor_train.strategy_args.strategy_config.tensor_model_parallel_size", 1, 1),
    }
    if "rollout" in where:
        check_engine_size(draft, "actor_infer.num_gpus_per_worker", copies["rollout"], len(where["rollout"]))
    topology = place(draft, where, copies, width)
    set_algorithm(draft, "adv_estimator", "gae")
    draft.set_model("actor.model", "pretrain")
    draft.set_model("reward.model", "reward_pretrain")
    if draft.has("use_kl_loss"):
        set_kl(draft, "loss", "use_kl_loss", "kl_loss_coef", 0.0, "kl_penalty", "k3")
    elif draft.has("init_kl_coef"):
        set_kl(draft, "reward", "add_token_level_kl", "init_kl_coef", 0.0, "kl_penalty", "k1")
    count = len(where.get("actor", ())) // copies["actor"]
    if _BATCH in draft.given and count:  # a step takes what each copy of the model accumulates
        batch = draft.count(_BATCH, 1, 1)
        draft.set("actor.micro_batch", batch)
        draft.derive("algorithm.train_batch", batch * draft.count(_STEPS, 1, 1) * count, _BATCH, _STEPS)
        draft.becomes(_BATCH, "actor.micro_batch", "algorithm.train_batch")
    draft.apply_rules()
    draft.assume("enable_offload: true of all", "states leave after every step there")
    return finish(draft, topology, dict.fromkeys(where, True))


def _places(draft: Draft) -> dict[str, Ranges]:
    where: dict[str, Ranges] = {}
    for theirs, ours in _ROLES.items():
        if found := _devices(draft, f"{theirs}.device_mapping"):
            where[ours] = found
    for key in [key for key in draft.given if key.startswith("rewards.")]:
        ours = f"reward.{key.split('.')[1]}"
        if key.endswith(".device_mapping") and (found := _devices(draft, key)):
            where[ours] = found
            draft.becomes(key, f"{PLACEMENT}.{ours}")
        elif key.endswith(".world_size"):
            draft.unmapped(key, f"{ours} runs on CPUs there; only what has accelerators is placed here")
    return where


def _devices(draft: Draft, key: str) -> Ranges | None:
    """The numbers of `list(range(0, 8)) + [12]`; None where nothing is written, or nothing that can be read."""
    value = draft.value(key)
    if value is None:
        return None
    try:
        numbers = _numbers(ast.parse(str(value), mode="eval").body)
    except (SyntaxError, ValueError):
        fix = f'{key}: "list(range(0,8))"'
        draft.refuse(key, "expected a list of device numbers", "lists, ranges and their sums are read", fix)
        return None
    return Ranges.of(range(n, n + 1) for n in numbers) if numbers else None


def _numbers(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [number for item in items for number in _numbers(item)]
        case ast.Constant(value=int(number)):
            return [number]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _numbers(left) + _numbers(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _numbers(inner)
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if 1 <= len(bounds) <= 3:
            window = range(*(number for bound in bounds for number in _numbers(bound)))
            if len(window) > 10**6:
                raise ValueError("more devices than any cluster has")
            return list(window)
    raise ValueError(ast.dump(node))
