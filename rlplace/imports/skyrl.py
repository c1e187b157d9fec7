"""SkyRL: its YAML or overrides -> ours. Roles ask for nodes x accelerators; switches say who shares them.

`colocate_all` puts policy, critic, reference, reward and the engines on the policy's accelerators; policy and critic
then leave them in turn, and the engines sleep. Else `colocate_policy_ref` and `colocate_critic_reward` pair two each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.imports.draft import Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.imported import Imported, finish
from rlplace.imports.pool import place
from rlplace.imports.rules import Into, No, Rulebook, To, Words
from rlplace.imports.seating import Seating, first_of, nearest_engines
from rlplace.imports.settings import Setting
from rlplace.placement.machines.ranges import Ranges

_PLACE = "cluster.component_placement"
_ROLES = {"actor": "policy", "critic": "critic", "reference": "ref", "reward": "reward"}
_MODEL = No("has no key yet")
_LEARN = No("how a language model learns is no part of a plan yet")
_NAMED = No("memory is counted once model has the keys of its config.json")
_ENGINE = No("options of a generation engine have no keys yet")
_TRAINING = No("an option of a training library; the actor trains with FSDP2")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_RUN = No("has no key in a job with language models")
_P, _ALGORITHM, _SEATS = "trainer.policy.", "trainer.algorithm.", "trainer.placement."
_ENGINES, _TENSOR = "generator.num_inference_engines", "generator.inference_engine_tensor_parallel_size"

RULES = Rulebook(
    {
        f"{_SEATS}{theirs}_{what}": Into(f"{_PLACE}.{ours}")
        for ours, theirs in _ROLES.items()
        for what in ("num_nodes", "num_gpus_per_node")
    }
    | {
        f"{_SEATS}colocate_all": Into(_PLACE),
        f"{_SEATS}colocate_policy_ref": Into(_PLACE),
        f"{_SEATS}colocate_critic_reward": Into(_PLACE),
        _ENGINES: Into(f"{_PLACE}.rollout"),
        _TENSOR: Into(f"{_PLACE}.rollout"),
        "generator.gpu_memory_utilization": To("rollout.gpu_memory_utilization", 0.8),
        f"{_P}optimizer_config.lr": To("actor.optimizer.lr"),
        f"{_P}optimizer_config.weight_decay": To("actor.optimizer.weight_decay"),
        f"{_P}optimizer_config.max_grad_norm": To("actor.optimizer.max_grad_norm"),
        f"{_P}fsdp_config.cpu_offload": _TRAINING,
        "trainer.ref.fsdp_config.cpu_offload": To("reference.enable_offload"),
        "trainer.reward.fsdp_config.cpu_offload": To("reward.enable_offload"),
        f"{_ALGORITHM}advantage_estimator": Into("algorithm.name"),
        f"{_ALGORITHM}gamma": To("algorithm.gamma"),
        f"{_ALGORITHM}lambd": To("algorithm.gae_lambda"),
        f"{_ALGORITHM}value_clip": To("algorithm.value_clip"),
        f"{_ALGORITHM}eps_clip_low": To("algorithm.clip_ratio_low"),
        f"{_ALGORITHM}eps_clip_high": To("algorithm.clip_ratio_high"),
        f"{_ALGORITHM}advantage_batch_normalize": To("algorithm.normalize_advantages"),
        "trainer.update_epochs_per_batch": To("algorithm.epochs"),
        "trainer.seed": To("runner.seed"),
        "trainer.export_path": To("runner.output_dir"),
        "trainer.bf16": Words(("actor.compute", "critic.compute"), {True: "bf16", False: "fp32"}, True),
        "trainer.train_batch_size": To("algorithm.prompts", 1024),
        "trainer.policy_mini_batch_size": Into("algorithm.train_batch"),
        "trainer.micro_train_batch_size_per_gpu": To(("actor.micro_batch", "critic.micro_batch")),
        "trainer.micro_forward_batch_size_per_gpu": To(("reference.micro_batch", "reward.micro_batch")),
        "trainer.gradient_checkpointing": To(("actor.checkpointing", "critic.checkpointing"), True),
        "trainer.max_prompt_length": Into("algorithm.sequence_length"),
        "generator.sampling_params.max_generate_length": Into("algorithm.sequence_length"),
        "generator.n_samples_per_prompt": To("algorithm.samples_per_prompt", 5),
        "generator.max_num_batched_tokens": To("rollout.step_tokens", 8192),
        "generator.max_num_seqs": To("rollout.step_sequences", 1024),
        "trainer.policy.model.path": _NAMED,
        "trainer.critic.model.path": _NAMED,
        "trainer.reward.model.path": _NAMED,
    },
    {
        _ALGORITHM: No("a variant of the algorithm that has no key yet"),
        f"{_P}model.": _MODEL,
        _P: _TRAINING,
        "trainer.critic.": No("has no key in the critic block"),
        "trainer.ref.": No("has no key in the reference block"),
        "trainer.reward.": No("has no key in the reward block"),
        "trainer.ckpt": No("checkpoints have no keys yet"),
        "trainer.resume": No("checkpoints have no keys yet"),
        "trainer.eval": No("evaluation has no keys yet"),
        "trainer.logger": _RUN,
        "trainer.": _RUN,
        "generator.": _ENGINE,
        "environment.": No("an environment of prompts and answers has no keys yet"),
        "data.": _DATA,
        "deepspeed_config.": _TRAINING,
        "defaults": No("a line for Hydra: import the composed config (--cfg job) to bring in what it includes"),
    },
)


def import_skyrl(settings: Sequence[Setting], per_node: int = 0) -> Imported:
    """The settings of a composed file, of overrides, or of both. `per_node` 0: the most that a role asks of a node."""
    draft = Draft("SkyRL", settings, RULES)
    present = _present(draft)
    wide = {c: draft.count(f"{_SEATS}{_ROLES[c]}_num_gpus_per_node", 4, 1) for c in present}
    sizes = {c: n * draft.count(f"{_SEATS}{_ROLES[c]}_num_nodes", 1, 1) for c, n in wide.items()}
    width = per_node or max(wide.values())
    tensor = draft.count(_TENSOR, 4, 1)
    spots = _seat(draft, sizes, tensor, width)
    topology = place(draft, spots, {"rollout": tensor}, width)
    for component in set(_ROLES) - set(present):
        for what in ("num_nodes", "num_gpus_per_node"):
            draft.unmapped(f"{_SEATS}{_ROLES[component]}_{what}", f"there is no {component} in this job")
    set_algorithm(draft, f"{_ALGORITHM}advantage_estimator", "grpo")
    _set_iteration(draft)
    draft.apply_rules()
    together = _together(draft)
    leaves = dict.fromkeys(spots, together)
    judges = [c for c in ("reference", "reward") if c in spots]
    leaves |= {c: draft.has(f"trainer.{_ROLES[c]}.fsdp_config.cpu_offload") for c in judges}
    if together:
        draft.assume("enable_offload: true of actor and rollout", "under colocate_all they leave in turn there")
    return finish(draft, topology, leaves)


def _together(draft: Draft) -> bool:
    return bool(draft.value(f"{_SEATS}colocate_all", True))


def _present(draft: Draft) -> list[str]:
    roles = ["actor"]
    if draft.has("trainer.critic.model.path"):
        roles.append("critic")
    if draft.value(f"{_ALGORITHM}use_kl_loss", True) or draft.has(f"{_ALGORITHM}use_kl_in_reward"):
        roles.append("reference")
    if draft.has("trainer.reward.model.path"):
        roles.append("reward")
    return roles


def _seat(draft: Draft, sizes: Mapping[str, int], tensor: int, width: int) -> dict[str, Ranges]:
    engines = draft.count(_ENGINES, 1, 1)
    seating = Seating(width)
    if _together(draft):
        spots = {component: first_of(size, 1, width) for component, size in sizes.items()}
        if engines * tensor != sizes["actor"]:
            near, size = nearest_engines(sizes["actor"], engines, tensor)
            draft.find(
                "import-engines",
                _ENGINES,
                f"{engines} engines x {tensor} = {engines * tensor} accelerators, and the policy has {sizes['actor']}",
                why="under colocate_all the engines use just the policy's accelerators there; here they may use some",
                fix=f"{_ENGINES}={near} {_TENSOR}={size}",
            )
        return spots | {"rollout": first_of(engines * tensor, tensor, width)}
    paired = {
        "reference": ("actor", "colocate_policy_ref", True),
        "reward": ("critic", "colocate_critic_reward", False),
    }
    taken: dict[str, Ranges] = {}
    for component, size in sizes.items():
        leader, switch, usual = paired.get(component, ("", "", False))
        if leader in taken and draft.value(f"{_SEATS}{switch}", usual):
            if size != sizes[leader]:
                draft.find(
                    "import-partners",
                    f"{_SEATS}{_ROLES[component]}_num_gpus_per_node",
                    f"{component} asks for {size} accelerators and {leader} for {sizes[leader]}, yet they are to share",
                    why=f"there, {switch} needs the same number for both; here {component} gets those of {leader}",
                )
            taken[component] = taken[leader]
        else:
            taken[component] = seating.take(size)
    return taken | {"rollout": seating.take(engines * tensor, tensor)}


def _set_iteration(draft: Draft) -> None:
    """Batches are counted in prompts there, each with `n_samples_per_prompt` answers."""
    answers, step = draft.count("generator.n_samples_per_prompt", 5, 1), "trainer.policy_mini_batch_size"
    draft.derive("algorithm.train_batch", draft.count(step, 256, 1) * answers, step)
    lengths = {"trainer.max_prompt_length": 512, "generator.sampling_params.max_generate_length": 1024}
    total = sum(draft.count(key, usual, 1) for key, usual in lengths.items())
    draft.derive("algorithm.sequence_length", total, *lengths)
