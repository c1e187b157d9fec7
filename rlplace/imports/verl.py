"""verl: its YAML or overrides -> ours. There, one pool of machines holds every model, and all take turns on it.

A critic exists where advantages are estimated by GAE, a reference where a KL term needs it, a reward model where it is
enabled; that one may have a pool of its own. Training state leaves the accelerators only where `*_offload` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.imports.draft import Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.imported import Imported, finish
from rlplace.imports.pool import check_engine_size, place
from rlplace.imports.seating import first_of
from rlplace.imports.settings import Setting
from rlplace.imports.verl_rules import RULES
from rlplace.placement.machines.ranges import Ranges

_ACTOR, _ROLLOUT, _REFERENCE = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
_TENSOR = f"{_ROLLOUT}.tensor_model_parallel_size"
_TENSOR_DEFAULT = 2


def import_verl(settings: Sequence[Setting], per_node: int = 0) -> Imported:
    """The settings of a composed file, of overrides, or of both. `per_node` 0: trainer.n_gpus_per_node."""
    draft = Draft("verl", settings, RULES)
    width = per_node or draft.count("trainer.n_gpus_per_node", 8, 1)
    total = width * draft.count("trainer.nnodes", 1, 1)
    pool = first_of(total, 1, width)
    spots = dict.fromkeys(_models(draft), pool)
    if "reward" in spots and draft.has("reward_model.enable_resource_pool"):
        own = draft.count("reward_model.n_gpus_per_node", 8, 1) * draft.count("reward_model.nnodes", 1, 1)
        spots["reward"] = Ranges.of([range(total, total + own)])
    tensor = draft.count(_TENSOR, _TENSOR_DEFAULT, 1)
    check_engine_size(draft, _TENSOR, tensor, total)
    topology = place(draft, spots, {"rollout": tensor}, width)
    if _TENSOR not in draft.given:
        draft.assume(f"rollout in engines of {tensor}", f"the default of {_TENSOR} there")
    set_algorithm(draft, "algorithm.adv_estimator", "gae")
    _set_iteration(draft)
    _set_kl(draft)
    draft.apply_rules()
    return finish(draft, topology, _offloads(draft, spots))


def _models(draft: Draft) -> list[str]:
    models = ["actor"]
    wanted = draft.value("critic.enable")
    if wanted is True or (wanted is None and draft.value("algorithm.adv_estimator", "gae") == "gae"):
        models.append("critic")
    if draft.has(f"{_ACTOR}.use_kl_loss") or draft.has("algorithm.use_kl_in_reward"):
        models.append("reference")
    if draft.has("reward_model.enable"):
        models.append("reward")
    return [*models, "rollout"]


def _offloads(draft: Draft, spots: dict[str, Ranges]) -> dict[str, bool]:
    """Who leaves there: engines unless told otherwise, models where parameters and optimizer state are told to."""
    leaves = {
        "actor": _both(draft, f"{_ACTOR}.fsdp_config", "actor"),
        "critic": _both(draft, "critic.model.fsdp_config", "critic"),
        "reference": draft.has(f"{_REFERENCE}.fsdp_config.param_offload"),
        "reward": draft.has("reward_model.model.fsdp_config.param_offload"),
        "rollout": bool(draft.value(f"{_ROLLOUT}.free_cache_engine", True)),
    }
    if f"{_ROLLOUT}.free_cache_engine" in draft.given:
        draft.becomes(f"{_ROLLOUT}.free_cache_engine", "rollout.enable_offload")
        draft.set("rollout.enable_offload", leaves["rollout"])
    return {c: leaves[c] for c in spots}


def _both(draft: Draft, block: str, component: str) -> bool:
    """Parameters and optimizer state move together here."""
    keys = [f"{block}.{part}_offload" for part in ("param", "optimizer")]
    moved = [draft.has(key) for key in keys]
    for key in keys:
        draft.becomes(key, f"{component}.enable_offload")
        if moved[0] != moved[1]:
            draft.unmapped(key, f"{component}.enable_offload moves parameters and optimizer state together, or neither")
    return all(moved)


_KL_WORDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _set_kl(draft: Draft) -> None:
    """The penalty is in the loss or in the reward there, each with a weight and an estimator of its own."""
    loss, reward, adaptive = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl."
    if draft.has(loss):
        draft.derive("algorithm.kl_in", "loss", loss)
        weight, kind, usual = f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type", "low_var_kl"
    elif draft.has(reward):
        draft.derive("algorithm.kl_in", "reward", reward)
        weight, kind, usual = f"{adaptive}kl_coef", "algorithm.kl_penalty", "kl"
        if draft.value(f"{adaptive}type") == "adaptive":
            draft.derive("algorithm.kl_target", draft.number(f"{adaptive}target_kl", 0.1), f"{adaptive}target_kl")
            draft.derive("algorithm.kl_horizon", draft.count(f"{adaptive}horizon", 10000, 1), f"{adaptive}horizon")
    else:
        return
    draft.derive("algorithm.kl_coef", draft.number(weight, 0.001), weight)
    word = draft.value(kind, usual)
    if isinstance(word, str) and word in _KL_WORDS:
        draft.derive("algorithm.kl_estimator", _KL_WORDS[word], kind)
    else:
        draft.unmapped(kind, f"algorithm.kl_estimator has no word for it; there are words for {', '.join(_KL_WORDS)}")


def _set_iteration(draft: Draft) -> None:
    """Batches are counted in prompts there, each with `rollout.n` answers."""
    answers, minibatch = draft.count(f"{_ROLLOUT}.n", 1, 1), f"{_ACTOR}.ppo_mini_batch_size"
    draft.derive("algorithm.train_batch", draft.count(minibatch, 256, 1) * answers, minibatch)
    for key, ours in (("data.max_prompt_length", "max_prompt_length"), ("data.max_response_length", "max_new_tokens")):
        draft.derive(f"algorithm.{ours}", draft.count(key, 512, 1), key)
