"""verl: its YAML or overrides. One pool of machines holds every model there, and all take turns on it.

A critic exists where advantages are estimated by GAE, a reference where a KL term needs it, a reward model where it is
enabled; that one may have a pool of its own. Training state leaves the accelerators only where `*_offload` is set.
"""

from __future__ import annotations

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.learning import set_algorithm, set_kl
from rlplace.imports.placing import Allocation, check_engine_size, place

_ACTOR, _ROLLOUT, _REFERENCE = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
_TENSOR = f"{_ROLLOUT}.tensor_model_parallel_size"
_TENSOR_DEFAULT = 2


def import_verl(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: trainer.n_gpus_per_node."""
    width = per_node or draft.count("trainer.n_gpus_per_node", 8, 1)
    total = width * draft.count("trainer.nnodes", 1, 1)
    accelerators = Allocation(width)
    where = dict.fromkeys(_models(draft), accelerators.take(total))
    if "reward" in where and draft.has("reward_model.enable_resource_pool"):
        own = draft.count("reward_model.n_gpus_per_node", 8, 1) * draft.count("reward_model.nnodes", 1, 1)
        where["reward"] = accelerators.take(own)
    tensor = draft.count(_TENSOR, _TENSOR_DEFAULT, 1)
    check_engine_size(draft, _TENSOR, tensor, total)
    topology = place(draft, where, {"rollout": tensor}, width)
    if _TENSOR not in draft.given:
        draft.assume(f"rollout in engines of {tensor}", f"the default of {_TENSOR} there")
    set_algorithm(draft, "algorithm.adv_estimator", "gae")
    for ours, key in (("actor", "actor_rollout_ref"), ("critic", "critic"), ("reward", "reward_model")):
        draft.set_model(f"{ours}.model", f"{key}.model.path")
    _set_iteration(draft)
    _set_kl(draft)
    draft.apply_rules()
    return finish(draft, topology, {c: leaves for c, leaves in _offloads(draft).items() if c in where})


def _models(draft: Draft) -> list[str]:
    wanted = draft.value("critic.enable")
    needs_values = draft.value("algorithm.adv_estimator", "gae") == "gae"
    exists = {
        "actor": True,
        "critic": wanted is True or (wanted is None and needs_values),
        "reference": draft.has(f"{_ACTOR}.use_kl_loss") or draft.has("algorithm.use_kl_in_reward"),
        "reward": draft.has("reward_model.enable"),
        "rollout": True,
    }
    return [model for model, there in exists.items() if there]


def _offloads(draft: Draft) -> dict[str, bool]:
    """Engines offload unless it is switched off, models where both parameters and optimizer state do."""
    sleeps = bool(draft.value(f"{_ROLLOUT}.free_cache_engine", True))
    if f"{_ROLLOUT}.free_cache_engine" in draft.given:
        draft.set("rollout.enable_offload", sleeps)
    return {
        "actor": _both(draft, f"{_ACTOR}.fsdp_config", "actor"),
        "critic": _both(draft, "critic.model.fsdp_config", "critic"),
        "reference": draft.has(f"{_REFERENCE}.fsdp_config.param_offload"),
        "reward": draft.has("reward_model.model.fsdp_config.param_offload"),
        "rollout": sleeps,
    }


def _both(draft: Draft, block: str, component: str) -> bool:
    """Parameters and optimizer state move together here."""
    keys = [f"{block}.{part}_offload" for part in ("param", "optimizer")]
    moved = [draft.has(key) for key in keys]
    for key in keys:
        draft.becomes(key, f"{component}.enable_offload")
        if moved[0] != moved[1]:
            draft.unset(f"{component}.enable_offload")
            draft.unmapped(key, f"{component}.enable_offload moves parameters and optimizer state together, or neither")
    return all(moved)


def _set_kl(draft: Draft) -> None:
    """The KL is in the loss or in the reward there, each with a weight and an estimator of its own."""
    loss, reward, control = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
    if draft.has(loss):
        set_kl(draft, "loss", loss, f"{_ACTOR}.kl_loss_coef", 0.001, f"{_ACTOR}.kl_loss_type", "low_var_kl")
    elif draft.has(reward):
        set_kl(draft, "reward", reward, f"{control}.kl_coef", 0.001, "algorithm.kl_penalty", "kl")
        if draft.value(f"{control}.type") == "adaptive":
            draft.derive("algorithm.kl_target", draft.number(f"{control}.target_kl", 0.1), f"{control}.target_kl")
            draft.derive("algorithm.kl_horizon", draft.count(f"{control}.horizon", 10000, 1), f"{control}.horizon")


def _set_iteration(draft: Draft) -> None:
    """Batches are counted in prompts there, each with `rollout.n` answers."""
    answers, minibatch = draft.count(f"{_ROLLOUT}.n", 1, 1), f"{_ACTOR}.ppo_mini_batch_size"
    draft.derive("algorithm.train_batch", draft.count(minibatch, 256, 1) * answers, minibatch)
    for key, ours in (("data.max_prompt_length", "max_prompt_length"), ("data.max_response_length", "max_new_tokens")):
        draft.derive(f"algorithm.{ours}", draft.count(key, 512, 1), key)
