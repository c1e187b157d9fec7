"""Import of NeMo-RL: the YAML of its GRPO and PPO.

In NeMo-RL, the policy uses the cluster's nodes. Generation shares these nodes (`colocated`), has other nodes, or has
some accelerators of the only node. If policy and engines share accelerators, they are offloaded in turn. The trainer is
DTensor (FSDP2) or Megatron; sizes and optimizer come from the trainer's block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.config.keys import PLACEMENT
from rlplace.config.yaml_text import line_sources
from rlplace.errors import Source
from rlplace.imports.importer import NO_LOWER_BOUND, Draft, Imported, finish
from rlplace.imports.placing import Allocation
from rlplace.imports.settings import Setting, leaves_of, read_block, text_of

_ALONE = "_override_"  # key in a block: the block replaces that of the included file
_DEEPEST = 20  # most files in a chain of `defaults`
_ENGINE_SIZES = {
    "vllm": "policy.generation.vllm_cfg.tensor_parallel_size",
    "sglang": "policy.generation.sglang_cfg.gpus_per_server",
    "megatron": "policy.megatron_cfg.tensor_model_parallel_size",
}
# Setting of an optimizer -> its key here: of DTensor, and of Megatron
_OPTIMIZER = {
    "optimizer.kwargs.lr": "lr",
    "optimizer.kwargs.weight_decay": "weight_decay",
    "optimizer.kwargs.eps": "eps",
}
_MEGATRON = {
    "megatron_cfg.optimizer.lr": "lr",
    "megatron_cfg.optimizer.weight_decay": "weight_decay",
    "megatron_cfg.optimizer.adam_beta1": "beta1",
    "megatron_cfg.optimizer.adam_beta2": "beta2",
    "megatron_cfg.optimizer.adam_eps": "eps",
    "megatron_cfg.scheduler.lr_warmup_iters": "warmup_steps",
    "megatron_cfg.optimizer.optimizer_cpu_offload": "on_host",
}
_SCHEDULES = ("constant", "linear", "cosine")


def read_chain(file: Path) -> list[Setting]:
    """Return the settings of a file and of the files that its `defaults` names, as NeMo-RL merges them.

    Raises ConfigError for a file that is not there or is no YAML.
    """
    mapping, sources = _merged(file, 0)
    return leaves_of(mapping, sources)


def _merged(file: Path, depth: int) -> tuple[dict[str, Any], dict[str, Source]]:
    text = text_of(file)
    mapping = read_block(text, str(file))
    if depth > _DEEPEST:
        raise config_error("import-yaml", "import", str(file), error="no-end")
    included = mapping.pop("defaults", None) or []
    below: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name in [included] if isinstance(included, str) else included:
        other, places = _merged(file.parent / os.path.expanduser(str(name)), depth + 1)
        below = _merge_blocks(below, other)
        sources |= places
    return _merge_blocks(below, mapping), sources | line_sources(text, str(file))


def _merge_blocks(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above` merged into `below`: blocks within are merged, too, unless a block in `above` replaces one."""
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping):
            lower = result.get(key)
            if not isinstance(lower, Mapping) or value.get(_ALONE):
                lower = {}
            block = {k: v for k, v in value.items() if k != _ALONE}
            result[key] = _merge_blocks(lower, block)
        else:
            result[key] = value
    return result


def import_nemo_rl(draft: Draft, per_node: int) -> Imported:
    """Return the converted config from settings of NeMo-RL.

    `per_node`: accelerators of a node; 0: as the original config says.
    """
    width = per_node or draft.count("cluster.gpus_per_node", 8, 1)
    nodes = draft.count("cluster.num_nodes", 1, 1)
    total = width * nodes
    shared = bool(draft.value("policy.generation.colocated.enabled", True))
    critic = any(s.key.startswith("ppo.") for s in draft.settings)
    block = "env.reward_model.resources."
    scored = f"{block}gpus_per_node" in draft.given
    scorers = 0
    if scored:
        each = draft.count(f"{block}gpus_per_node", 1, 1)
        scorers = each * draft.count(f"{block}num_nodes", 1, 1)
    engines = 0 if shared else _engines(draft, nodes, width)
    trained = total - engines - scorers
    if trained < 1:
        draft.find(
            "import-counts",
            "cluster.num_nodes",
            error="accelerators",
            settings={"cluster.num_nodes": -(-(engines + scorers + 1) // width)},
            used=engines + scorers + 1,
            there=total,
        )
        trained = 1
    pool = Allocation(draft, width)
    pool.take("actor", trained)
    megatron = draft.has("policy.megatron_cfg.enabled")
    trainer = "megatron_cfg" if megatron else "dtensor_cfg"
    tensor = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    if critic:
        pool.share("critic", "actor", trained)
    if draft.number("loss_fn.reference_policy_kl_penalty", 0.01) > 0:
        pool.share("reference", "actor", trained)
    backend = str(draft.value("policy.generation.backend", "vllm"))
    size_key = _ENGINE_SIZES.get(backend, _ENGINE_SIZES["vllm"])
    size = draft.count(size_key, 1, 1)
    there = trained if shared else engines
    pool.check_engines(size_key, size, there)
    draft.becomes(size_key, f"{PLACEMENT}.rollout")
    pool.take("rollout", there, size if there % size == 0 else 1, anew=shared)
    if scored:
        pool.take("reward", scorers)
    for component, theirs in (
        ("actor", "policy"),
        ("critic", "value"),
        ("reference", "policy"),
    ):
        if component not in pool.where:
            continue
        key = f"{theirs}.{trainer}.{tensor}"
        copy = draft.count(key, 1, 1)
        if trained % copy == 0:
            pool.copies[component] = copy
        draft.becomes(key, f"{PLACEMENT}.{component}")
        pool.divide_tokens(component, f"{theirs}.{trainer}.context_parallel_size")
    topology = pool.write(nodes)
    _set_lengths(draft)
    _set_correction(draft)
    _set_trainer(draft, "actor", "policy", megatron=megatron)
    if critic:
        _set_trainer(draft, "critic", "value", megatron=megatron)
    for block in ("grpo.async_grpo", "ppo.async_ppo"):
        if draft.has(f"{block}.enabled"):
            age = f"{block}.max_trajectory_age_steps"
            draft.derive(
                "algorithm.max_staleness",
                draft.count(age, 1, 1),
                f"{block}.enabled",
                age,
            )
        else:
            draft.implied(
                "off, as it is here unless it is asked for",
                f"{block}.enabled",
                f"{block}.max_trajectory_age_steps",
            )
    if draft.value("checkpointing.enabled", True):
        every = draft.count("checkpointing.save_period", 0)
        if every:
            draft.derive("checkpoint.every", every, "checkpointing.save_period")
    draft.apply_rules()
    _set_bounds(draft)
    _set_baseline(draft)
    leaves = dict.fromkeys(pool.where, shared) | {"reference": True, "reward": False}
    if shared:
        draft.assume(
            "enable_offload: true of actor and rollout",
            "generation and training leave in turn there",
        )
    return finish(draft, topology, {c: leaves[c] for c in pool.where})


def _engines(draft: Draft, nodes: int, width: int) -> int:
    """Return the number of accelerators that generation has alone. `nodes`, `width`: nodes, accelerators of each."""
    block = "policy.generation.colocated.resources."
    each = draft.count(f"{block}gpus_per_node", 1 if nodes == 1 else width, 1)
    return each * (1 if nodes == 1 else draft.count(f"{block}num_nodes", 1, 1))


def _set_lengths(draft: Draft) -> None:
    """Write the longest answer and the longest prompt. In NeMo-RL, each may be as long as a whole sequence."""
    longest = draft.count("policy.max_total_sequence_length", 0)
    answer = draft.count("policy.generation.max_new_tokens", longest or 1024, 1)
    prompt = draft.count("data.max_input_seq_length", longest or 1024, 1)
    if longest > 1:
        answer = min(answer, longest - 1)
        prompt = min(prompt, longest)
    draft.derive("algorithm.max_new_tokens", answer, "policy.generation.max_new_tokens")
    draft.derive("algorithm.max_prompt_length", prompt, "data.max_input_seq_length")


def _set_correction(draft: Draft) -> None:
    """Write how the engine's probabilities are corrected."""
    block = "loss_fn.truncated_importance_sampling_"
    switch = "loss_fn.use_importance_sampling_correction"
    if not draft.has(switch):
        draft.leave_uncorrected()
        draft.implied(
            "without use_importance_sampling_correction, nothing is weighed",
            *(f"{block}{name}" for name in ("ratio", "type", "ratio_min")),
        )
        return
    cap = draft.number(f"{block}ratio", 0.0)
    draft.set("algorithm.tis_cap", cap or 1e6)
    draft.becomes(switch, "algorithm.tis_cap")
    draft.becomes(f"{block}ratio", "algorithm.tis_cap")
    if not cap:
        draft.assume("algorithm.tis_cap: 1e6", "weights have no cap there")
    kind = draft.value(f"{block}type", "tis")
    floor = draft.number(f"{block}ratio_min", 0.0)
    if kind == "icepop":
        draft.set("algorithm.tis_above", "drop")
        draft.becomes(f"{block}type", "algorithm.tis_above")
        if floor > 0:
            draft.set("algorithm.tis_floor", floor)
            draft.becomes(f"{block}ratio_min", "algorithm.tis_floor")
    elif kind == "seq-mask-tis":
        draft.unmapped(
            "answers are left out by their own mean there; tis_level: sequence compares products",
            f"{block}type",
        )


def _set_bounds(draft: Draft) -> None:
    """Write the lower bound of the ratio. A distance of 1 or more is no bound in NeMo-RL, since no ratio is below 0."""
    key = "loss_fn.ratio_clip_min"
    if draft.number(key, 0.2) >= 1:
        draft.set("algorithm.clip_ratio_low", NO_LOWER_BOUND)
        draft.becomes(key, "algorithm.clip_ratio_low")
        draft.assume(
            f"algorithm.clip_ratio_low: {NO_LOWER_BOUND}", "there is no lower bound"
        )


def _set_baseline(draft: Draft) -> None:
    """Write the algorithm with the baseline of NeMo-RL's GRPO.

    NeMo-RL may leave out the division by the standard deviation, or the own answer from the baseline.
    """
    if draft.at("algorithm.name") != "grpo":
        return
    deviation = bool(draft.value("grpo.normalize_rewards", True))
    apart = bool(draft.value("grpo.use_leave_one_out_baseline", False))
    keys = [
        f"grpo.{at}{name}"
        for at in ("", "adv_estimator.")
        for name in ("normalize_rewards", "use_leave_one_out_baseline")
    ]
    if not deviation:
        name = "rloo" if apart else "dr_grpo"
        draft.set("algorithm.name", name)
        draft.assume(
            f"algorithm.name: {name}", "scores are not divided by their deviation there"
        )
    elif apart:
        draft.assume(
            "algorithm.name: grpo",
            "differs: the mean there leaves out the answer itself",
        )
    for key in keys:
        draft.becomes(key, "algorithm.name")


def _set_trainer(draft: Draft, model: str, theirs: str, *, megatron: bool) -> None:
    """Write dtypes, optimizer, recomputation and passes of a trained model.

    `model`: component of the model. `theirs`: block of the model in NeMo-RL. `megatron`: whether Megatron trains the
    model; otherwise DTensor.
    """
    trainer = f"{theirs}.{'megatron_cfg' if megatron else 'dtensor_cfg'}"
    if megatron:
        draft.set(f"{model}.weights", "bf16")
        draft.set(f"{model}.optimizer.kind", "adamw_master")
        draft.assume(
            f"{model}.optimizer.kind: adamw_master",
            "Megatron keeps 32-bit weights with the optimizer state",
        )
    for key, ours in (_MEGATRON if megatron else _OPTIMIZER).items():
        value = draft.value(f"{theirs}.{key}")
        if value is not None and draft.has_key(f"{model}.optimizer.{ours}"):
            draft.set(f"{model}.optimizer.{ours}", _number_of(value))
            draft.becomes(f"{theirs}.{key}", f"{model}.optimizer.{ours}")
    betas = draft.value(f"{theirs}.optimizer.kwargs.betas")
    if not megatron and isinstance(betas, list) and len(betas) == 2:
        for name, value in zip(("beta1", "beta2"), betas, strict=True):
            draft.set(f"{model}.optimizer.{name}", value)
        draft.becomes(f"{theirs}.optimizer.kwargs.betas", f"{model}.optimizer")
    style = draft.value(f"{trainer}.scheduler.lr_decay_style")
    if megatron and style in _SCHEDULES:
        draft.set(f"{model}.optimizer.schedule", style)
        draft.becomes(
            f"{trainer}.scheduler.lr_decay_style", f"{model}.optimizer.schedule"
        )
    if not megatron:
        _set_warmup(draft, model, theirs)
    recomputed = f"{trainer}.activation_checkpointing"
    draft.derive(f"{model}.checkpointing", draft.has(recomputed), recomputed)
    lora = f"{trainer}.{'peft' if megatron else 'lora_cfg'}"
    if draft.has(f"{lora}.enabled"):
        draft.set(f"{model}.lora_rank", draft.count(f"{lora}.dim", 8, 1))
        draft.set(f"{model}.lora_alpha", draft.number(f"{lora}.alpha", 32))
        draft.becomes(f"{lora}.enabled", f"{model}.lora_rank")
        draft.becomes(f"{lora}.dim", f"{model}.lora_rank")
        draft.becomes(f"{lora}.alpha", f"{model}.lora_alpha")
    for way in ("dynamic_batching", "sequence_packing"):
        switch, tokens = f"{theirs}.{way}.enabled", f"{theirs}.{way}.train_mb_tokens"
        value = draft.value(tokens)
        if draft.has(switch) and isinstance(value, int | float) and value >= 1:
            draft.set(f"{model}.token_budget", int(value))
            draft.becomes(switch, f"{model}.token_budget")
            draft.becomes(tokens, f"{model}.token_budget")
        else:
            draft.implied("counts where it is enabled", switch, tokens)


def _number_of(value: object) -> object:
    """Return the number of a text such as 1e-8, which YAML reads as a text; any other value unchanged."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _set_warmup(draft: Draft, model: str, theirs: str) -> None:
    """Write the warm-up of a list of torch schedulers: a LinearLR of growing factors, with its steps."""
    key = f"{theirs}.scheduler"
    steps = draft.value(key)
    if not isinstance(steps, list):
        return
    for step in steps:
        kwargs = step.get("kwargs") if isinstance(step, Mapping) else None
        if not isinstance(kwargs, Mapping) or "LinearLR" not in str(step.get("name")):
            continue
        count = kwargs.get("total_iters")
        start = kwargs.get("start_factor", 1 / 3)
        if isinstance(count, int) and isinstance(start, int | float) and start < 1:
            draft.set(f"{model}.optimizer.warmup_steps", count)
            draft.becomes(key, f"{model}.optimizer.warmup_steps")
            return
