"""ROLL: its YAML -> ours. There, every group of workers lists its devices by number, so the placement goes over as is.

`actor_train` is the actor, `actor_infer` the rollout, each entry of `rewards` a `reward.NAME`. A cluster without a
`device_mapping` runs on CPUs and takes no accelerators. States leave the accelerators after every step by themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from rlplace.imports.draft import Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.imported import Imported, finish
from rlplace.imports.pool import check_engine_size, place
from rlplace.imports.rules import Already, Into, No, Rule, Rulebook, To, Words
from rlplace.imports.settings import Setting
from rlplace.placement.machines.ranges import Ranges

_ROLES = {
    "actor_train": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward": "reward",
    "actor_infer": "rollout",
}
_PLACE = "cluster.component_placement"
_MODEL = No("has no key yet")
_LEARN = No("how a language model learns is no part of a plan yet")
_NAMED = No("memory is counted once model has the keys of its config.json")
_ENGINE = No("options of a generation engine have no keys yet")
_TRAINING = No("an option of a training library; the actor trains with FSDP2")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_SCORES = No("how scores become rewards has no key yet")
_RUN = No("a job with language models is planned, not run: nothing is written")
_ESTIMATOR = No("a variant of the algorithm that has no key yet")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_TRAIN, _INFER = "actor_train.", "actor_infer."

_KEYS: dict[str, Rule] = {
    "seed": To("runner.seed"),
    "output_dir": To("runner.output_dir"),
    "num_gpus_per_node": Into("cluster.accelerators_per_node"),
    "ppo_epochs": To("algorithm.epochs"),
    "value_clip": To("algorithm.value_clip"),
    "pg_clip": To("algorithm.clip_ratio_low"),
    "gamma": To("algorithm.gamma"),
    "lambd": To("algorithm.gae_lambda"),
    "entropy_loss_coef": To("algorithm.entropy_coef"),
    "whiten_advantages": To("algorithm.normalize_advantages"),
    "max_grad_norm": To("actor.optimizer.max_grad_norm"),
    "adv_estimator": Into("algorithm.name"),
    "rollout_batch_size": To("algorithm.prompts"),
    "num_return_sequences_in_group": To("algorithm.samples_per_prompt", 1),
    "prompt_length": Into("algorithm.sequence_length"),
    "response_length": Into("algorithm.sequence_length"),
    "reference.infer_batch_size": To("reference.micro_batch"),
    f"{_TRAIN}model_args.disable_gradient_checkpointing": Words("actor.checkpointing", {False: True, True: False}),
    f"{_TRAIN}training_args.learning_rate": _LEARN,
    f"{_TRAIN}training_args.weight_decay": _LEARN,
    f"{_TRAIN}training_args.per_device_train_batch_size": Into("algorithm.train_batch"),
    f"{_TRAIN}training_args.gradient_accumulation_steps": Into("algorithm.train_batch"),
    f"{_TRAIN}model_args.dtype": Words("actor.compute", {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16"}),
    f"{_INFER}num_gpus_per_worker": Into(f"{_PLACE}.rollout"),
    f"{_INFER}strategy_args.strategy_config.tensor_parallel_size": Into(f"{_PLACE}.rollout"),
    f"{_INFER}strategy_args.strategy_config.gpu_memory_utilization": To("rollout.gpu_memory_utilization"),
    f"{_TRAIN}strategy_args.strategy_config.tensor_model_parallel_size": Into(f"{_PLACE}.actor"),
    "offload_nccl": _TRAINING,
}
_DEVICES: dict[str, Rule] = {f"{theirs}.device_mapping": Into(f"{_PLACE}.{ours}") for theirs, ours in _ROLES.items()}

RULES = Rulebook(
    _KEYS | _DEVICES,
    {
        "defaults": No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes"),
        "hydra.": No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes"),
        "actor_train.strategy_args.": _TRAINING,
        "actor_train.training_args.": _TRAINING,
        "actor_train.": _MODEL,
        "actor_infer.": _ENGINE,
        "critic.": No("has no key in the critic block"),
        "reference.": No("has no key in the reference block"),
        "rewards.": _SCORES,
        "reward.": _SCORES,
        "reward": _SCORES,
        "advantage_": _ESTIMATOR,
        "init_kl": _ESTIMATOR,
        "use_kl": _ESTIMATOR,
        "kl_": _ESTIMATOR,
        "pretrain": _NAMED,
        "sequence_length": _DATA,
        "validation.": No("evaluation has no keys yet"),
        "track": _RUN,
        "logging": _RUN,
        "checkpoint": No("checkpoints have no keys yet"),
        "save_steps": No("checkpoints have no keys yet"),
        "resume": No("checkpoints have no keys yet"),
        "eval_steps": No("evaluation has no keys yet"),
        "exp_name": _RUN,
        "max_steps": No("runner.total_iterations counts iterations"),
        "generate_opt_level": _ENGINE,
        "is_num_return": Already("rows are counted one by one"),
        "num_train_epochs": _RUN,
    },
)


def import_roll(settings: Sequence[Setting], per_node: int = 0) -> Imported:
    """The settings of a composed file. `per_node` 0: num_gpus_per_node, else 8."""
    draft = Draft("ROLL", settings, RULES)
    width = per_node or draft.count("num_gpus_per_node", 8, 1)
    spots = _spots(draft)
    copies = {
        "rollout": max(
            draft.count("actor_infer.num_gpus_per_worker", 1, 1),
            draft.count("actor_infer.strategy_args.strategy_config.tensor_parallel_size", 1, 1),
        ),
        "actor": draft.count("actor_train.strategy_args.strategy_config.tensor_model_parallel_size", 1, 1),
    }
    if "rollout" in spots:
        check_engine_size(draft, "actor_infer.num_gpus_per_worker", copies["rollout"], len(spots["rollout"]))
    topology = place(draft, spots, copies, width)
    set_algorithm(draft, "adv_estimator", "gae")
    _set_iteration(draft, len(spots.get("actor", ())) // copies["actor"])
    draft.apply_rules()
    leaves = dict.fromkeys(spots, True)
    draft.assume("enable_offload: true of all", "states leave after every step there")
    return finish(draft, topology, leaves)


def _spots(draft: Draft) -> dict[str, Ranges]:
    spots: dict[str, Ranges] = {}
    rewards = {s.key: f"reward.{s.key.split('.')[1]}" for s in draft.settings if s.key.startswith("rewards.")}
    for theirs, ours in _ROLES.items():
        if found := _devices(draft, f"{theirs}.device_mapping"):
            spots[ours] = found
    for key, ours in rewards.items():
        if key.endswith(".device_mapping") and (found := _devices(draft, key)):
            spots[ours] = found
            draft.becomes(key, f"{_PLACE}.{ours}")
        elif key.endswith(".world_size"):
            draft.unmapped(key, f"{ours} runs on CPUs there; only what has accelerators is placed here")
    return spots


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


def _set_iteration(draft: Draft, copies: int) -> None:
    """A step takes what each copy of the model accumulates."""
    each, steps = (f"actor_train.training_args.{leaf}" for leaf in _BATCH)
    if each in draft.given and copies:
        batch = draft.count(each, 1, 1) * draft.count(steps, 1, 1)
        draft.set("actor.micro_batch", draft.count(each, 1, 1))
        draft.derive("algorithm.train_batch", batch * copies, each, steps)
        draft.becomes(each, "actor.micro_batch", "algorithm.train_batch")
    lengths = ("prompt_length", "response_length")
    if any(key in draft.given for key in lengths):
        draft.derive("algorithm.sequence_length", sum(draft.count(key, 0) for key in lengths), *lengths)
