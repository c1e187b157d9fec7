"""SkyRL: its YAML or overrides. Roles ask for nodes x accelerators; switches decide which roles share them.

`colocate_all` puts policy, critic, reference, reward and the engines on the policy's accelerators; policy and critic
then leave them in turn, and the engines sleep. Else `colocate_policy_ref` and `colocate_critic_reward` pair two each.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.learning import set_algorithm, set_kl
from rlplace.imports.placing import Allocation, nearest_engines, place
from rlplace.placement.machines.ranges import Ranges

_ROLES = {"actor": "policy", "critic": "critic", "reference": "ref", "reward": "reward"}
_ALGORITHM, _PLACED = "trainer.algorithm.", "trainer.placement."
_ENGINES, _TENSOR = "generator.num_inference_engines", "generator.inference_engine_tensor_parallel_size"
_PAIRED = {  # with which role, by which switch, and its default
    "reference": ("actor", "colocate_policy_ref", True),
    "reward": ("critic", "colocate_critic_reward", False),
}


def import_skyrl(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: the most that a role asks of a node."""
    kl = bool(draft.value(f"{_ALGORITHM}use_kl_loss", True))
    in_reward = draft.has(f"{_ALGORITHM}use_kl_in_reward")
    exists = {
        "actor": True,
        "critic": draft.has("trainer.critic.model.path"),
        "reference": kl or in_reward,
        "reward": draft.has("trainer.reward.model.path"),
    }
    present = [role for role, there in exists.items() if there]
    wide = {c: draft.count(f"{_PLACED}{_ROLES[c]}_num_gpus_per_node", 4, 1) for c in present}
    sizes = {c: n * draft.count(f"{_PLACED}{_ROLES[c]}_num_nodes", 1, 1) for c, n in wide.items()}
    width = per_node or max(wide.values())
    tensor = draft.count(_TENSOR, 4, 1)
    together = bool(draft.value(f"{_PLACED}colocate_all", True))
    where = _colocated(draft, sizes, tensor, width) if together else _side_by_side(draft, sizes, tensor, width)
    topology = place(draft, where, {"rollout": tensor}, width)
    for component in _ROLES.keys() - {*present}:
        for what in ("num_nodes", "num_gpus_per_node"):
            draft.unmapped(f"{_PLACED}{_ROLES[component]}_{what}", f"there is no {component} in this job")
    set_algorithm(draft, f"{_ALGORITHM}advantage_estimator", "grpo")
    for ours, key in (("actor", "policy"), ("critic", "critic"), ("reward", "reward")):
        draft.set_model(f"{ours}.model", f"trainer.{key}.model.path")
    if kl or in_reward:
        switch, estimator = f"{_ALGORITHM}use_kl_{'loss' if kl else 'in_reward'}", f"{_ALGORITHM}kl_estimator_type"
        set_kl(draft, "loss" if kl else "reward", switch, f"{_ALGORITHM}kl_loss_coef", 0.001, estimator, "k3")
    answers, step = draft.count("generator.n_samples_per_prompt", 5, 1), "trainer.policy_mini_batch_size"
    draft.derive("algorithm.train_batch", draft.count(step, 256, 1) * answers, step)  # counted in prompts there
    draft.apply_rules()
    leaves = dict.fromkeys(where, together)
    scorers = [c for c in ("reference", "reward") if c in where]
    leaves |= {c: draft.has(f"trainer.{_ROLES[c]}.fsdp_config.cpu_offload") for c in scorers}
    if together:
        draft.assume("enable_offload: true of actor and rollout", "under colocate_all they leave in turn there")
    return finish(draft, topology, leaves)


def _colocated(draft: Draft, sizes: Mapping[str, int], tensor: int, width: int) -> dict[str, Ranges]:
    """Everything from accelerator 0 on."""
    engines = draft.count(_ENGINES, 1, 1)
    if engines * tensor != sizes["actor"]:
        near, size = nearest_engines(sizes["actor"], engines, tensor)
        draft.find(
            "import-engines",
            _ENGINES,
            f"{engines} engines x {tensor} = {engines * tensor} accelerators, and the policy has {sizes['actor']}",
            why="under colocate_all the engines use just the policy's accelerators there; here they may use some",
            fix=f"{_ENGINES}={near} {_TENSOR}={size}",
        )
    where = {component: Allocation(width).take(size) for component, size in sizes.items()}
    return where | {"rollout": Allocation(width).take(engines * tensor, tensor)}


def _side_by_side(draft: Draft, sizes: Mapping[str, int], tensor: int, width: int) -> dict[str, Ranges]:
    accelerators = Allocation(width)
    where: dict[str, Ranges] = {}
    for component, size in sizes.items():
        leader, switch, usual = _PAIRED.get(component, ("", "", False))
        if leader not in where or not draft.value(f"{_PLACED}{switch}", usual):
            where[component] = accelerators.take(size)
            continue
        where[component] = where[leader]
        if size != sizes[leader]:
            draft.find(
                "import-partners",
                f"{_PLACED}{_ROLES[component]}_num_gpus_per_node",
                f"{component} asks for {size} accelerators and {leader} for {sizes[leader]}, yet they are to share",
                why=f"there, {switch} needs the same number for both; here {component} gets those of {leader}",
                fix=f"{_PLACED}{_ROLES[component]}_num_gpus_per_node={sizes[leader]}",
            )
    return where | {"rollout": accelerators.take(draft.count(_ENGINES, 1, 1) * tensor, tensor)}
