"""How RLinf, verl, slime, SkyRL, ROLL and AReaL place and offload their models.

`per_node`: accelerators of a node; 0: as the original config says.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlplace.config.keys import PLACEMENT
from rlplace.config.yaml_text import show
from rlplace.errors import did_you_mean, suggestion
from rlplace.imports.importer import NO_LOWER_BOUND, ROLES, Draft, Imported, finish
from rlplace.imports.nemo_rl import import_nemo_rl
from rlplace.imports.openrlhf import import_openrlhf
from rlplace.imports.placing import Allocation, place_by_size
from rlplace.imports.settings import Setting
from rlplace.imports.trl import import_trl
from rlplace.placement import Topology
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.topology import Ranges

# ── RLinf ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Its placement is the same language, so its lines go over as they are written. What differs: `inference`, a component
# there, is the actor's own work here (it computes log-probabilities in stage infer); the machines' accelerators are
# counted at the start there, and are a number here: as many as the placement needs, and at least 8.

_RLINF_WIDTH = 8  # accelerators of a machine, where nothing gives another number
_RLINF_SINKS = ("console", "jsonl", "tensorboard")
# Their engines always sleep while others work
_RLINF_TASKS = (
    "reasoning",
    "math",
    "agent",
    "coding",
)
_RLINF_SIMULATED = ("actor", "env", "rollout")  # components of a job with simulators
_RLINF_TENSOR = "rollout.tensor_parallel_size"


def simulated(settings: Sequence[Setting]) -> bool:
    """Return whether the settings of RLinf are a job on simulators. They are if they place the component `env`."""
    return any(
        "env" in _rlinf_names(s.key)
        for s in settings
        if s.key.startswith(f"{PLACEMENT}.")
    )


def import_rlinf(draft: Draft, per_node: int) -> Imported:
    nodes = draft.count("cluster.num_nodes", 1, 1)
    tensor = draft.count(_RLINF_TENSOR, 1, 1)
    lines = [
        setting
        for setting in draft.given.values()
        if setting.key.startswith(f"{PLACEMENT}.")
    ]
    width = (
        per_node
        or draft.count("cluster.num_gpus_per_node", 0)
        or _rlinf_width(draft, lines, nodes)
    )
    draft.set("cluster.num_nodes", nodes)
    draft.set("cluster.accelerators_per_node", width)
    if "cluster.num_gpus_per_node" not in draft.given:
        draft.assume(
            f"cluster.accelerators_per_node: {width}",
            "there, machines are counted at the start",
        )
    draft.set(PLACEMENT, {})
    for setting in lines:
        _rlinf_place(draft, setting, tensor)
    if _RLINF_TENSOR in draft.given and tensor == 1:
        draft.implied(
            "an engine has one accelerator unless its line has another number",
            _RLINF_TENSOR,
        )
    groups = draft.value("cluster.node_groups")
    if isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups):
        draft.set("cluster.node_groups", groups)
    draft.apply_rules()
    if simulated(draft.settings):
        _rlinf_set_rollout(draft)
        _rlinf_set_sinks(draft)
    elif not draft.has("algorithm.importance_sampling_fix"):
        draft.leave_uncorrected()
    return finish(draft, Topology.uniform(nodes, width, "cuda"), _rlinf_offloads(draft))


def _rlinf_names(key: str) -> list[str]:
    return [name.strip() for name in key.removeprefix(f"{PLACEMENT}.").split(",")]


def _rlinf_width(draft: Draft, lines: Sequence[Setting], nodes: int) -> int:
    """Return a number of accelerators per node that is enough for all placement lines, at least `_RLINF_WIDTH`.

    `lines`: settings with the placement lines. `nodes`: number of nodes. If a job on simulators has no number in its
    lines, the result is the largest number up to `_RLINF_WIDTH` that divides the simulators evenly.
    """
    sizes = {"cluster": nodes} | _rlinf_groups(draft)
    width = 0
    for setting in lines:
        block = (
            setting.value
            if isinstance(setting.value, Mapping)
            else {"placement": setting.value}
        )
        joined = block.get("node_group", "cluster")
        labels = ",".join(map(str, joined)) if isinstance(joined, list) else str(joined)
        counts = [sizes.get(label.strip(), 0) for label in labels.split(",")]
        pieces = [
            piece.partition(":")[0]
            for piece in str(block.get("placement", "")).split(",")
        ]
        numbers = [
            int(number)
            for piece in pieces
            for number in re.findall(r"[0-9]{1,6}", piece)
        ]
        if all(counts) and numbers:
            width = max(width, -(-(max(numbers) + 1) // sum(counts)))
    if not width and simulated(draft.settings) and (envs := _rlinf_envs(draft)):
        groups = nodes * draft.count("rollout.pipeline_stage_num", 1, 1)
        return next(
            (
                width
                for width in range(_RLINF_WIDTH, 0, -1)
                if envs % (width * groups) == 0
            ),
            _RLINF_WIDTH,
        )
    return max(_RLINF_WIDTH, width)


def _rlinf_groups(draft: Draft) -> dict[str, int]:
    """Return label -> number of nodes, for each node group of accelerators."""
    found: dict[str, int] = {}
    groups = draft.value("cluster.node_groups")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, Mapping) and "hardware" not in group:
            pieces = re.findall(
                r"([0-9]{1,6})(?:-([0-9]{1,6}))?", str(group.get("node_ranks", ""))
            )
            found[str(group.get("label"))] = sum(
                max(0, int(last or first) - int(first)) + 1 for first, last in pieces
            )
    return found


def _rlinf_envs(draft: Draft) -> int:
    return draft.count("env.train.total_num_envs", draft.count("env.train.num_envs", 0))


def _rlinf_place(draft: Draft, setting: Setting, tensor: int) -> None:
    """Write one placement line of RLinf into the draft (the converted config).

    Components that rlplace does not have are left out and reported.

    `setting`: the line. `tensor`: accelerators of one engine; if above 1, the engines get a placement line of their
    own.
    """
    names = _rlinf_names(setting.key)
    value = setting.value
    by_rule = draft.value("reward.use_reward_model") is False
    roles = _RLINF_SIMULATED if simulated(draft.settings) else ROLES
    ours = [
        name
        for name in names
        if role_of(name) in roles and not (by_rule and role_of(name) == "reward")
    ]
    others = [name for name in names if name not in ours]
    whole = setting.key.removeprefix(f"{PLACEMENT}.")
    lines = {",".join(ours) if others else whole: value} if ours else {}
    if tensor > 1 and "rollout" in ours:
        rest = ",".join(name for name in ours if name != "rollout")
        block = dict(value) if isinstance(value, Mapping) else {"placement": value}
        # The line says how many ranks there are, so engines cannot be set as accelerators of a rank
        spread = ":" in str(block.get("placement", ""))
        key = "tensor_parallel_size" if spread else "accelerators_per_rank"
        lines = ({rest: value} if rest else {}) | {"rollout": block | {key: tensor}}
        draft.becomes(_RLINF_TENSOR, f"{PLACEMENT}.rollout")
    for name, line in lines.items():
        draft.set(f"{PLACEMENT}.{name}", line)
    if lines:
        draft.becomes(setting.key, *(f"{PLACEMENT}.{name}" for name in lines))
    for other in others:
        why = f"no component is called {other} here" + suggestion(
            did_you_mean(other, ROLES)
        )
        if role_of(other) in ROLES:
            why = f"a job with simulators has {', '.join(_RLINF_SIMULATED)} here"
        if by_rule and role_of(other) == "reward":
            why = "no reward model is in use: scores by rules are the env's here, by env.rewards"
        if other == "inference":
            why = "the actor itself computes log-probabilities here, in stage infer; inference has no line of its own"
        if ours:
            draft.find("import-component", setting.key, name=other, reason=why)
        else:
            draft.unmapped(why, setting.key)


def _rlinf_set_rollout(draft: Draft) -> None:
    """Write action chunk, steps and minibatches into the draft (converted config), if RLinf's settings give them."""
    passes = draft.count("algorithm.rollout_epoch", 1, 1)
    chunk = draft.count("actor.model.num_action_chunks", 1, 1)
    chunk_key = "actor.model.num_action_chunks"
    if chunk > 1:
        draft.derive("rollout.action_chunk", chunk, chunk_key)
    steps = draft.count("env.train.max_steps_per_rollout_epoch", 0)
    envs = _rlinf_envs(draft)
    batch = draft.count("actor.global_batch_size", 0)
    key = "actor.global_batch_size"
    total = steps // chunk * passes
    samples = envs * total
    if steps:
        draft.set("algorithm.rollout_steps", total)
    if samples < 1 or batch < 1:
        return
    if samples % batch:
        below = next(n for n in range(min(batch, samples), 0, -1) if samples % n == 0)
        draft.find(
            "import-batches",
            key,
            error="optimizer-steps",
            settings={key: below},
            samples=samples,
            batch=batch,
            envs=envs,
            steps=total,
        )
        draft.unmapped("algorithm.num_minibatches would not be a whole number", key)
    else:
        draft.derive("algorithm.num_minibatches", samples // batch, key)


def _rlinf_set_sinks(draft: Draft) -> None:
    key = "runner.logger.logger_backends"
    backends = draft.value(key)
    if isinstance(backends, list):
        draft.set(
            "runner.sinks",
            [
                sink
                for sink in _RLINF_SINKS
                if sink != "tensorboard" or sink in backends
            ],
        )
        if others := [str(b) for b in backends if b not in _RLINF_SINKS]:
            draft.unmapped(
                f"no sink {' and '.join(others)}; there are {', '.join(_RLINF_SINKS)}",
                key,
            )


def _rlinf_offloads(draft: Draft) -> dict[str, bool]:
    """Return placed component -> whether it leaves its accelerators.

    A component leaves if its `enable_offload` is set, or if weights, optimizer and gradients are all offloaded
    (Megatron). Rollout also leaves if the job has a task for which RLinf's engines always sleep.
    """
    leaves = {c: draft.has(f"{c}.enable_offload") for c in draft.placed}
    for component in ("actor", "critic"):
        parts = [
            f"{component}.offload_{part}" for part in ("weight", "optimizer", "grad")
        ]
        moved = [draft.has(part) for part in parts]
        leaves[component] = leaves.get(component, False) or all(moved)
        if any(moved) and not all(moved):
            draft.unmapped(
                f"{component}.enable_offload moves weights, gradients and optimizer state together",
                *parts,
            )
    task = draft.value("runner.task_type")
    if task in _RLINF_TASKS and not leaves.get("rollout"):
        draft.assume(
            "rollout.enable_offload: true",
            f"in a {task} job the engines sleep by themselves there",
        )
        leaves["rollout"] = True
    return {c: leaves[c] for c in draft.placed}


# ── verl ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# One pool of machines holds every model, and all take turns on it; a reward model may have a pool of its own. Training
# state leaves the accelerators only where `*_offload` is set.

_VERL = "actor_rollout_ref."
_VERL_MODE = f"{_VERL}actor.policy_loss.loss_mode"
_VERL_TENSOR = f"{_VERL}rollout.tensor_model_parallel_size"
_TWO_BOUNDS = re.compile(r"(\d+(?:\.\d+)?)_(\d+(?:\.\d+)?)")
_VERL_BATCH = f"{_VERL}actor.ppo_mini_batch_size"


def import_verl(draft: Draft, per_node: int) -> Imported:
    width = per_node or draft.count("trainer.n_gpus_per_node", 8, 1)
    total = width * draft.count("trainer.nnodes", 1, 1)
    kl_in_loss = draft.has(f"{_VERL}actor.use_kl_loss")
    kl_in_reward = draft.has("algorithm.use_kl_in_reward")
    critic = draft.value("critic.enable")
    exists = {
        "critic": draft.value("algorithm.adv_estimator", "gae") == "gae"
        if critic is None
        else critic is True,
        "reference": kl_in_loss or kl_in_reward,
        "reward": draft.has("reward_model.enable"),
        "rollout": True,
    }
    pool = Allocation(draft, width)
    pool.take("actor", total)
    for component in (component for component, there in exists.items() if there):
        if component == "reward" and draft.has("reward_model.enable_resource_pool"):
            each = draft.count("reward_model.n_gpus_per_node", 8, 1)
            pool.take(component, each * draft.count("reward_model.nnodes", 1, 1))
        else:
            pool.share(component, "actor", total)
    pool.copies["rollout"] = tensor = draft.count(_VERL_TENSOR, 2, 1)
    pool.check_engines(_VERL_TENSOR, tensor, total)
    _place_verl_engines(draft, pool, tensor)
    actor, reference = (_ulysses(f"{_VERL}{block}") for block in ("actor.", "ref."))
    # The reference has the setting of the actor, unless it has its own
    blocks = {
        "reference": (*reference, *actor),
        "actor": actor,
    }
    blocks |= {"critic": _ulysses("critic."), "reward": _ulysses("reward_model.")}
    for component, keys in blocks.items():
        pool.divide_tokens(component, *keys)
    topology = pool.write()
    if _VERL_TENSOR not in draft.given:
        draft.assume(
            f"rollout in engines of {tensor}", f"the default of {_VERL_TENSOR} there"
        )
    if (
        kl_in_reward
        and not kl_in_loss
        and draft.value("algorithm.kl_ctrl.type") == "adaptive"
    ):
        for ours, key in (
            ("kl_target", "algorithm.kl_ctrl.target_kl"),
            ("kl_horizon", "algorithm.kl_ctrl.horizon"),
        ):
            value = (
                draft.number(key, 0.1)
                if ours == "kl_target"
                else draft.count(key, 10000, 1)
            )
            draft.derive(f"algorithm.{ours}", value, key)
    if draft.value(_VERL_MODE) == "gspo":
        draft.implied(
            "there, the loss of gspo has no dual clip", f"{_VERL}actor.clip_ratio_c"
        )
    elif draft.value(_VERL_MODE) == "cispo":
        draft.set("algorithm.surrogate", "cispo")
        draft.becomes(_VERL_MODE, "algorithm.surrogate")
        draft.implied(
            "there, the loss of cispo has no dual clip", f"{_VERL}actor.clip_ratio_c"
        )
        # A weight has no bound below there
        low = f"{_VERL}actor.clip_ratio_low"
        if draft.number(low, 0.2) >= 1:
            draft.set("algorithm.clip_ratio_low", NO_LOWER_BOUND)
            draft.becomes(low, "algorithm.clip_ratio_low")
            draft.implied(
                "clip_ratio_low and clip_ratio_high are given",
                f"{_VERL}actor.clip_ratio",
            )
    schedule = f"{_VERL}actor.optim.lr_scheduler_type"
    if draft.value("model_engine") == "veomni" and schedule not in draft.given:
        draft.set("actor.optimizer.schedule", "cosine")
        draft.assume("actor.optimizer.schedule: cosine", "the default of VeOmni there")
    _set_verl_prompts(draft)
    _set_verl_correction(draft)
    draft.apply_rules()
    _set_verl_loss(draft)
    _set_verl_betas(draft)
    sleeps = bool(draft.value(f"{_VERL}rollout.free_cache_engine", True))
    if f"{_VERL}rollout.free_cache_engine" in draft.given:
        draft.set("rollout.enable_offload", sleeps)
    offload = {
        "actor": _both_offload(draft, f"{_VERL}actor.fsdp_config", "actor"),
        "critic": _both_offload(draft, "critic.model.fsdp_config", "critic"),
        "reference": draft.has(f"{_VERL}ref.fsdp_config.param_offload"),
        "reward": draft.has("reward_model.model.fsdp_config.param_offload"),
        "rollout": sleeps,
    }
    return finish(
        draft, topology, {c: leaves for c, leaves in offload.items() if c in pool.where}
    )


def _place_verl_engines(draft: Draft, pool: Allocation, tensor: int) -> None:
    """Place the engines on accelerators of their own, if verl's recipe for asynchronous training gives them some.

    In such a recipe an iteration has the prompts of a few optimizer steps, and answers may be as old as the recipe
    says. `tensor`: accelerators of an engine.
    """
    nodes = "rollout.nnodes"
    each = "rollout.n_gpus_per_node"
    if nodes not in draft.given and each not in draft.given:
        return
    size = draft.count(each, 8, 1) * draft.count(nodes, 1, 1)
    pool.take("rollout", size - size % tensor or size, tensor if size >= tensor else 1)
    draft.becomes(nodes, f"{PLACEMENT}.rollout")
    draft.becomes(each, f"{PLACEMENT}.rollout")
    stale = "async_training.staleness_threshold"
    batches = "async_training.require_batches"
    asynchronous = any(s.key.startswith("async_training.") for s in draft.settings)
    # A share of an iteration's samples that may be of the version before
    if not asynchronous or draft.number(stale, 0.0) > 0:
        draft.derive("algorithm.max_staleness", 1, stale)
    if not asynchronous:
        draft.assume(
            "algorithm.max_staleness: 1", "one step off policy, as in the original"
        )
        return
    prompts = draft.count(_VERL_BATCH, 256, 1) * draft.count(batches, 1, 1)
    draft.set("algorithm.prompts", prompts)
    draft.becomes(batches, "algorithm.prompts")
    draft.assume(
        f"algorithm.prompts: {prompts}",
        "ppo_mini_batch_size x require_batches: an update there has no other batch",
    )
    draft.unmapped("the trainer waits for whole batches there", "data.train_batch_size")


def _set_verl_correction(draft: Draft) -> None:
    """Write how the probabilities of the engines are corrected.

    A threshold such as 0.5_4.0 has a lower and an upper bound, and weights beyond them are dropped (IcePop).
    """
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    if draft.value("algorithm.rollout_correction.rollout_is"):
        bounds = _TWO_BOUNDS.fullmatch(str(draft.value(threshold, "")))
        if bounds is not None:
            draft.set("algorithm.tis_floor", float(bounds[1]))
            draft.set("algorithm.tis_cap", float(bounds[2]))
            draft.set("algorithm.tis_above", "drop")
            draft.becomes(threshold, "algorithm.tis_cap", "algorithm.tis_floor")
        return
    draft.implied("without rollout_is, nothing is weighed", threshold)
    if draft.number(f"{_VERL}actor.tis_imp_ratio_cap", 0.0) <= 0:
        draft.leave_uncorrected()


def _verl_reward_function(draft: Draft) -> dict[str, object] | None:
    """Return the entry of env.rewards for the user's own reward function; None if the config names none."""
    for block in ("custom_reward_function", "reward.custom_reward_function"):
        if not draft.has(f"{block}.path"):
            continue
        path = str(draft.value(f"{block}.path"))
        # A file, or pkg://package.module
        module = path.rpartition("/")[2].removesuffix(".py")
        name = draft.value(f"{block}.name") or "compute_score"
        entry: dict[str, object] = {"name": f"{module}:{name}"}
        arguments = f"{block}.reward_kwargs."
        kwargs = {
            key.removeprefix(arguments): draft.value(key)
            for key in draft.given
            if key.startswith(arguments)
        }
        if kwargs:
            entry["kwargs"] = kwargs
        named = [f"{block}.path", f"{block}.name", *(arguments + key for key in kwargs)]
        for key in named:
            if key in draft.given:
                draft.becomes(key, "env.rewards")
        return entry
    return None


def _set_verl_filter(draft: Draft, rewards: Sequence[Mapping[str, object]]) -> None:
    """Write the reward by which groups are compared into the draft: `filter_groups.metric`.

    `score` is that of the first of `rewards`, without the penalty for long answers; so is `acc` of functions that come
    with verl. `seq_reward` is the sum. An `acc` of a function of the user is not known here.
    """
    key = "algorithm.filter_groups.metric"
    metric = draft.value(key)
    if not metric or not draft.value("algorithm.filter_groups.enable"):
        return
    first = str(rewards[0]["name"])
    of_first = metric == "score" or (metric == "acc" and ":" not in first)
    if of_first and len(rewards) > 1:
        draft.set("algorithm.dynamic_sampling_by", first.rpartition(":")[2])
        draft.becomes(key, "algorithm.dynamic_sampling_by")
    elif of_first or metric == "seq_reward":
        draft.implied("groups are compared by the sum of the rewards", key)


def _set_verl_prompts(draft: Draft) -> None:
    """Write the data files into the draft as a text task with one turn, placed on CPUs, and its rewards.

    The draft is the converted config. Also write token budgets if verl counts its micro-batches in tokens.
    """
    paths = {key: draft.value(f"data.{key}_files") for key in ("train", "val")}
    files = {
        k: [*v] if isinstance(v, tuple | list) else v for k, v in paths.items() if v
    }
    if "train" not in files:
        return
    files = {
        k: draft.without_references(v, f"data.{k}_files") for k, v in files.items()
    }
    draft.set(f"{PLACEMENT}.env", "cpu")
    draft.assume(
        f"{PLACEMENT}.env: cpu",
        "a process that asks the prompts; it holds no accelerator",
    )
    asked = {
        "prompt": draft.value("data.prompt_key", "prompt"),
        "answer": "reward_model.ground_truth",
    }
    draft.set(
        "env",
        {
            "kind": "text",
            "task": "prompts",
            "kwargs": {"path": files["train"], **asked},
        },
    )
    draft.assume(
        "env.kwargs.answer: reward_model.ground_truth",
        "the column of verl's data sets with the right answer",
    )
    draft.becomes("data.train_files", "env.kwargs")
    draft.becomes("data.prompt_key", "env.kwargs")
    if "val" in files:
        draft.set("env.eval_kwargs", {"path": files["val"]})
        draft.becomes("data.val_files", "env.eval_kwargs")
    modelled = any(c.partition(".")[0] == "reward" for c in draft.placed)
    rewards: list[dict[str, object]] = []
    function = _verl_reward_function(draft)
    if function is not None:
        rewards.append(function)
        why = "called as in the original, f(data_source, solution_str, ...); its folder belongs in PYTHONPATH"
    elif modelled:
        rewards.append({"name": "unscored"})
        why = "the reward model scores"
    else:
        rewards.append({"name": "math_answer"})
        why = "in place of verl's function for each data_source"
    draft.assume(f"env.rewards: {rewards[0]['name']}", why)
    buffer = "reward_model.overlong_buffer."
    if draft.has(f"{buffer}enable"):
        longest = draft.count("data.max_response_length", 512, 1)
        limits = {
            "free_tokens": max(0, longest - draft.count(f"{buffer}len", 0)),
            "longest_tokens": longest,
        }
        weight = draft.number(f"{buffer}penalty_factor", 1.0)
        rewards.append({"name": "length_penalty", "weight": weight, "kwargs": limits})
        for key in ("enable", "len", "penalty_factor"):
            draft.becomes(buffer + key, "env.rewards")
    draft.set("env.rewards", rewards)
    _set_verl_filter(draft, rewards)
    switch = f"{_VERL}actor.use_dynamic_bsz"
    tokens = f"{_VERL}actor.ppo_max_token_len_per_gpu"
    if draft.has(switch):
        # Number of ranks that share one pass
        ranks = max(draft.count(key, 1, 1) for key in _ulysses(f"{_VERL}actor."))
        for model in (m for m in ("actor", "reference") if m in draft.placed):
            draft.set(f"{model}.token_budget", draft.count(tokens, 16384, 1) * ranks)
        draft.becomes(switch, "actor.token_budget")
        draft.becomes(tokens, "actor.token_budget")


def _ulysses(block: str) -> tuple[str, ...]:
    return tuple(
        f"{block}{at}ulysses_sequence_parallel_size"
        for at in ("", "fsdp_config.", "model.fsdp_config.")
    )


def _both_offload(draft: Draft, block: str, component: str) -> bool:
    """Return whether verl offloads both parameters and optimizer state of a component.

    rlplace moves them only together, so offloading one of them is reported. `block`: prefix of the component's
    settings. `component`: its name in rlplace.
    """
    keys = [f"{block}.{part}_offload" for part in ("param", "optimizer")]
    moved = [draft.has(key) for key in keys]
    for key in keys:
        draft.becomes(key, f"{component}.enable_offload")
    if not any(moved):
        draft.implied("stays where it is, as here unless asked", *keys)
    if any(moved) and not all(moved):
        draft.unset(f"{component}.enable_offload")
        draft.unmapped(
            f"{component}.enable_offload moves parameters and optimizer state together, or neither",
            *keys,
        )
    return all(moved)


# ── slime ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The trainer asks for nodes x accelerators; engines share them (`--colocate`) or come after them. The reference lives
# in the actor's processes, and a critic (estimator ppo) has as many accelerators as the actor.


def _set_verl_loss(draft: Draft) -> None:
    """Write into the draft (the converted config) how the losses of tokens are averaged.

    GSPO always averages over sequences; its setting is ignored.
    """
    key = f"{_VERL}actor.loss_agg_mode"
    if draft.value(_VERL_MODE) == "gspo":
        draft.implied("there, the loss of gspo is the mean over sequences", key)
        draft.set("algorithm.loss", "sequence")
        return
    written = str(draft.value(key, "token-mean"))
    means = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum-norm": "constant",
    }
    if written in means:
        draft.derive("algorithm.loss", means[written], key)
    else:
        draft.unmapped(
            "algorithm.loss has no such mean; algorithm.variant takes your own loss",
            key,
        )


def _set_verl_betas(draft: Draft) -> None:
    """Write the betas of Adam of actor and critic into the draft (the converted config)."""
    settings = {"actor": f"{_VERL}actor.optim.betas", "critic": "critic.optim.betas"}
    for model, key in settings.items():
        betas = draft.value(key)
        if model in draft.placed and isinstance(betas, list) and len(betas) == 2:
            for name, value in zip(("beta1", "beta2"), betas, strict=True):
                draft.derive(f"{model}.optimizer.{name}", value, key)


def import_slime(draft: Draft, per_node: int) -> Imported:
    each = draft.count("actor-num-gpus-per-node", 8, 1)
    width = per_node or draft.count("num-gpus-per-node", each, 1)
    size = each * draft.count("actor-num-nodes", 1, 1)
    together = draft.has("colocate")
    critic = draft.value("advantage-estimator", "grpo") == "ppo"
    pool = Allocation(draft, width)
    pool.take("actor", size)
    if critic and together:
        pool.share("critic", "actor", size)
    elif critic:
        pool.take("critic", size)
    if (
        draft.number("kl-coef", 0)
        or draft.has("use-kl-loss")
        or draft.number("kl-loss-coef", 0)
    ):
        pool.share("reference", "actor", size)
    engine = draft.count("rollout-num-gpus-per-engine", 1, 1)
    engines = draft.count("rollout-num-gpus", size, 1)
    pool.check_engines("rollout-num-gpus-per-engine", engine, engines)
    # 0 if there are too few accelerators for one engine
    whole = engines - engines % engine
    pool.take("rollout", whole or engines, engine if whole else 1, anew=together)
    pool.copies |= dict.fromkeys(
        ("actor", "critic"), draft.count("tensor-model-parallel-size", 1, 1)
    )
    for component in ("actor", "critic", "reference"):
        pool.divide_tokens(component, "context-parallel-size")
    topology = pool.write()
    draft.apply_rules()
    if not draft.has("use-tis"):
        draft.leave_uncorrected()
    draft.set(
        "algorithm.loss",
        "token" if draft.has("calculate-per-token-loss") else "sequence",
    )
    draft.becomes("calculate-per-token-loss", "algorithm.loss")
    # Both leave their accelerators, unless a switch keeps one there
    everything = together or draft.has("offload")
    train = (everything or draft.has("offload-train") or critic) and not draft.has(
        "no-offload-train"
    )
    engines_sleep = (everything or draft.has("offload-rollout")) and not draft.has(
        "no-offload-rollout"
    )
    for component, leaves in (("actor", train), ("rollout", engines_sleep)):
        draft.set(f"{component}.enable_offload", leaves)
    return finish(
        draft,
        topology,
        {
            c: {"rollout": engines_sleep, "reference": True}.get(c, train)
            for c in pool.where
        },
    )


# ── SkyRL ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# `colocate_all` puts policy, critic, reference, reward and the engines on the policy's accelerators; policy and critic
# then leave them in turn, and the engines sleep. Else `colocate_policy_ref` and `colocate_critic_reward` pair two each.

_SKYRL_ROLES = {
    "actor": "policy",
    "critic": "critic",
    "reference": "ref",
    "reward": "reward",
}
_SKYRL_ENGINES = "generator.inference_engine.num_engines"
_SKYRL_TENSOR = "generator.inference_engine.tensor_parallel_size"
_SKYRL_COPIES = "generator.inference_engine.data_parallel_size"
_SKYRL_MEGATRON = "trainer.policy.megatron_config.tensor_model_parallel_size"
_SKYRL_CORRECTION = "trainer.algorithm.off_policy_correction."
# Component, the component whose accelerators it shares, the switch for this, and the switch's default
_SKYRL_PAIRS = (
    ("reference", "actor", "colocate_policy_ref", True),
    ("reward", "critic", "colocate_critic_reward", False),
)


def import_skyrl(draft: Draft, per_node: int) -> Imported:
    kl_in_loss = bool(draft.value("trainer.algorithm.use_kl_loss", True))
    exists = {
        "actor": True,
        "critic": draft.has("trainer.critic.model.path"),
        "reference": kl_in_loss or draft.has("trainer.algorithm.use_kl_in_reward"),
        "reward": draft.has("trainer.reward.model.path"),
    }
    asks: dict[str, tuple[str, str]] = {}
    for component, theirs in _SKYRL_ROLES.items():
        keys = (
            f"trainer.placement.{theirs}_num_nodes",
            f"trainer.placement.{theirs}_num_gpus_per_node",
        )
        if exists[component]:
            asks[component] = keys
        else:
            draft.unmapped(f"there is no {component} in this job", *keys)
    together = bool(draft.value("trainer.placement.colocate_all", True))
    partners = {
        component: leader
        for component, leader, switch, usual in _SKYRL_PAIRS
        if not together and draft.value(f"trainer.placement.{switch}", usual)
    }
    # Newer versions have a block for engines, and 1 as the default where older ones have 4
    newer = any("generator.inference_engine." in s.written for s in draft.settings)
    usual = 1 if newer else 4
    pool = place_by_size(draft, asks, usual, per_node, partners, together=together)
    engines = draft.count(_SKYRL_ENGINES, 1, 1) * draft.count(_SKYRL_COPIES, 1, 1)
    tensor = draft.count(_SKYRL_TENSOR, usual, 1)
    if draft.value("trainer.strategy") == "megatron":
        copy = draft.count(_SKYRL_MEGATRON, 1, 1)
        pool.copies["actor"] = copy if len(pool.where["actor"]) % copy == 0 else 1
    pool.take_engines(_SKYRL_ENGINES, engines, _SKYRL_TENSOR, tensor, together=together)
    for component in ("actor", "critic", "reference"):
        block = f"trainer.{_SKYRL_ROLES[component]}"
        context = f"{block}.megatron_config.context_parallel_size"
        pool.divide_tokens(component, f"{block}.sequence_parallel_size", context)
    topology = pool.write()
    draft.apply_rules()
    _set_skyrl_correction(draft)
    bound = "trainer.algorithm.clip_ratio_c"
    if draft.value("trainer.algorithm.policy_loss_type") == "dual_clip":
        draft.derive("algorithm.dual_clip", draft.number(bound, 3.0), bound)
    else:
        draft.implied("counts with policy_loss_type: dual_clip alone there", bound)
    _set_skyrl_evaluation(draft)
    _set_skyrl_critic(draft)
    _set_skyrl_graphs(draft)
    if (
        draft.at("algorithm.name") == "grpo"
        and draft.value("trainer.algorithm.grpo_norm_by_std", True) is False
    ):
        draft.set("algorithm.name", "dr_grpo")
        draft.becomes("trainer.algorithm.grpo_norm_by_std", "algorithm.name")
    scorers = [c for c in ("reference", "reward") if c in pool.where]
    offload = dict.fromkeys(pool.where, together)
    offload |= {
        c: draft.has(f"trainer.{_SKYRL_ROLES[c]}.fsdp_config.cpu_offload")
        for c in scorers
    }
    if together:
        draft.assume(
            "enable_offload: true of actor and rollout",
            "under colocate_all they leave in turn there",
        )
    return finish(draft, topology, offload)


def _set_skyrl_evaluation(draft: Draft) -> None:
    """Write how held-out prompts are answered. Without a block for these prompts, SkyRL takes the likeliest token."""
    block = "generator.eval_sampling_params."
    if any(s.key.startswith(block) for s in draft.settings):
        defaults = {"temperature": 1.0, "top_p": 1.0}
    elif draft.count("generator.eval_n_samples_per_prompt", 1, 1) > 1:
        defaults = {"temperature": 0.0}
    else:
        # rlplace takes the likeliest token, too
        return
    for name, default in defaults.items():
        if f"{block}{name}" not in draft.given:
            key = f"runner.eval_{name}"
            draft.set(key, default)
            draft.assume(f"{key}: {default}", f"the default of {block}{name}")


def _set_skyrl_critic(draft: Draft) -> None:
    """Write SkyRL's defaults of a job with a critic that differ from those of rlplace."""
    if "critic" not in draft.placed:
        return
    defaults: tuple[tuple[str, str, object], ...] = (
        ("trainer.algorithm.lambd", "algorithm.gae_lambda", 1.0),
        (
            "trainer.algorithm.advantage_batch_normalize",
            "algorithm.normalize_advantages",
            False,
        ),
        ("trainer.critic.optimizer_config.lr", "critic.optimizer.lr", 5e-6),
    )
    for theirs, ours, default in defaults:
        if theirs not in draft.given:
            draft.set(ours, default)
            draft.assume(f"{ours}: {show(default)}", f"the default of {theirs}")


def _set_skyrl_graphs(draft: Draft) -> None:
    """Write that vLLM captures graphs if it has LoRA adapters. SkyRL then turns `enforce_eager` off."""
    lora = draft.count("trainer.policy.model.lora.rank", 0)
    if draft.value("trainer.strategy") == "megatron":
        merged = "trainer.policy.megatron_config.lora_config.merge_lora"
        lora = 0 if draft.value(merged, True) else lora
    block = "generator.inference_engine."
    eager = f"{block}enforce_eager"
    if lora and draft.value(f"{block}backend", "vllm") == "vllm" and draft.has(eager):
        draft.set("rollout.enforce_eager", False)
        draft.becomes(eager, "rollout.enforce_eager")
        draft.assume(
            "rollout.enforce_eager: false", "turned off there for LoRA adapters"
        )


def _set_skyrl_correction(draft: Draft) -> None:
    """Write how the probabilities of the engines are corrected."""
    level = draft.value(f"{_SKYRL_CORRECTION}tis_ratio_type")
    if level in ("token", "sequence"):
        key = f"{_SKYRL_CORRECTION}{level}_tis_ratio_clip_high"
        cap = draft.number(key, 2.0 if level == "token" else 5.0)
        draft.set("algorithm.tis_cap", cap)
        draft.set("algorithm.tis_level", level)
        draft.becomes(key, "algorithm.tis_cap")
        draft.becomes(f"{_SKYRL_CORRECTION}tis_ratio_type", "algorithm.tis_level")
    elif draft.has("trainer.algorithm.use_tis"):
        cap = draft.number("trainer.algorithm.tis_imp_ratio_cap", 2.0)
        if cap > 0:
            draft.derive(
                "algorithm.tis_cap",
                cap,
                "trainer.algorithm.use_tis",
                "trainer.algorithm.tis_imp_ratio_cap",
            )
    else:
        draft.leave_uncorrected()


# ── ROLL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Every group of workers lists its devices by number, so the placement goes over as it is. A group without a
# `device_mapping` runs on CPUs and takes no accelerators. States leave the accelerators after every step by themselves.

_ROLL_ROLES = {
    "actor_train": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward": "reward",
    "actor_infer": "rollout",
}
# Settings of context parallelism: for Megatron, for others
_ROLL_CONTEXT = (
    "strategy_args.strategy_config.context_parallel_size",
    "model_args.ulysses_size",
)
_ROLL_BATCH = "actor_train.training_args.per_device_train_batch_size"
_ROLL_STEPS = "actor_train.training_args.gradient_accumulation_steps"


def import_roll(draft: Draft, per_node: int) -> Imported:
    width = per_node or draft.count("num_gpus_per_node", 8, 1)
    pool = Allocation(draft, width)
    pool.where |= _roll_devices(draft)
    parallel = "strategy_args.strategy_config.tensor"
    engine = max(
        draft.count("actor_infer.num_gpus_per_worker", 1, 1),
        draft.count(f"actor_infer.{parallel}_parallel_size", 1, 1),
    )
    tensor = draft.count(f"actor_train.{parallel}_model_parallel_size", 1, 1)
    pool.copies |= {"rollout": engine, "actor": tensor}
    pool.check_engines(
        "actor_infer.num_gpus_per_worker", engine, len(pool.where.get("rollout", ()))
    )
    for theirs, component in _ROLL_ROLES.items():
        pool.divide_tokens(component, *(f"{theirs}.{key}" for key in _ROLL_CONTEXT))
    topology = pool.write()
    copies = len(pool.where.get("actor", ())) // (tensor * pool.tokens.get("actor", 1))
    # A step takes what each copy of the model accumulates
    if _ROLL_BATCH in draft.given and copies:
        batch = draft.count(_ROLL_BATCH, 1, 1)
        draft.set("actor.micro_batch", batch)
        draft.derive(
            "algorithm.train_batch",
            batch * draft.count(_ROLL_STEPS, 1, 1) * copies,
            _ROLL_BATCH,
            _ROLL_STEPS,
        )
        draft.becomes(_ROLL_BATCH, "actor.micro_batch", "algorithm.train_batch")
    if draft.has("dual_clip_loss"):
        # The bound is a function of the clip there
        bound = round(1 + 2 * draft.number("pg_clip", 0.2), 6)
        draft.derive("algorithm.dual_clip", bound, "dual_clip_loss")
    draft.apply_rules()
    draft.assume("enable_offload: true of all", "states leave after every step there")
    return finish(draft, topology, dict.fromkeys(pool.where, True))


def _roll_devices(draft: Draft) -> Iterator[tuple[str, Ranges]]:
    """Yield (component, numbers of its accelerators) for each component that ROLL places on accelerators.

    An entry of `rewards` becomes a component `reward.NAME`.
    """
    keys = {f"{theirs}.device_mapping": ours for theirs, ours in _ROLL_ROLES.items()}
    keys |= {
        key: f"reward.{key.split('.')[1]}"
        for key in draft.given
        if key.startswith("rewards.")
    }
    for key, ours in keys.items():
        if key.endswith(".world_size"):
            draft.unmapped(
                f"{ours} runs on CPUs there; only what has accelerators is placed here",
                key,
            )
        if not key.endswith(".device_mapping") or (value := draft.value(key)) is None:
            continue
        try:
            numbers = _device_numbers(ast.parse(str(value), mode="eval").body)
        except (SyntaxError, ValueError):
            draft.refuse(key, "device-numbers", name=key)
            continue
        if numbers:
            draft.becomes(key, f"{PLACEMENT}.{ours}")
            yield ours, Ranges.of(range(n, n + 1) for n in numbers)


def _device_numbers(node: ast.expr) -> list[int]:
    """Return the numbers of a Python expression such as `list(range(0, 8)) + [12]`.

    Raises ValueError for an expression of any other form.
    """
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [number for item in items for number in _device_numbers(item)]
        case ast.Constant(value=int(number)):
            return [number]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _device_numbers(left) + _device_numbers(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _device_numbers(inner)
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]) if (
            1 <= len(bounds) <= 3
        ):
            window = range(
                *(number for bound in bounds for number in _device_numbers(bound))
            )
            if len(window) > 10**6:
                raise ValueError("more devices than any cluster has")
            return list(window)
    raise ValueError(ast.dump(node))


# ── AReaL ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# One word gives the accelerators of each model, and how the model is cut.
#
#     allocation_mode: sglang:d4t2+fsdp:d8                engines on 4 x 2, then the actor on 8 others
#     allocation_mode: sglang[rollout]:d8|fsdp[actor]:d8  the same 8 in turn
#     rollout.backend: sglang:d4     actor.backend: fsdp:d4           the newer form, one word each
#
# Letters are sizes: d data, t tensor, p pipeline, c context; e (experts) lies within the others. A critic or reference
# with `scheduling_strategy: {type: colocation, target: actor}` is where the actor is.

_AREAL_PART = re.compile(
    r"(?:([a-z]+)(?:\[(\w+)\])?:)?\(?(?:attn:)?((?:[dptce][1-9][0-9]*)+)(?:\|ffn:[^)]*)?\)?"
)
_AREAL_REJECTION = ("metric", "upper", "lower", "level", "action")
_NO_CAP = 1e6  # upper bound of a weight for a library without an upper bound
_AREAL_BESIDE = r"(?![^()]*\))"  # not inside brackets


def import_areal(draft: Draft, per_node: int) -> Imported:
    width = per_node or draft.count("cluster.n_gpus_per_node", 8, 1)
    pool = Allocation(draft, width)
    mode = "allocation_mode"
    if draft.has(mode):
        words = [
            (mode, part, "")
            for part in re.split(rf"\+{_AREAL_BESIDE}", str(draft.value(mode)))
        ]
    else:
        backends = {f"{c}.backend": c for c in ("rollout", "actor")}
        words = [
            (key, str(draft.value(key)), c)
            for key, c in backends.items()
            if draft.has(key)
        ]
    for key, word, component in words:
        leader = ""
        for text in re.split(rf"\|{_AREAL_BESIDE}", word) if key == mode else [word]:
            match = _AREAL_PART.fullmatch(text.strip())
            if match is None:
                draft.refuse(key, "backend-sizes", text=text)
                break
            sizes = {
                letter: int(number)
                for letter, number in re.findall(r"([dptce])([0-9]+)", match[3])
            }
            count = math.prod(size for letter, size in sizes.items() if letter != "e")
            name = component or _areal_component(
                match[1], match[2], "actor" in pool.where
            )
            if leader:
                pool.share(name, leader, count)
            else:
                pool.take(name, count, sizes.get("t", 1))
            leader = leader or name
            pool.copies[name] = sizes.get("t", 1)
            pool.tokens |= {name: sizes.get("c", 1)} if name != "rollout" else {}
    for component, key in (("critic", "critic"), ("reference", "ref")):
        written = any(s.key.startswith(f"{key}.") for s in draft.settings)
        # The reference is made where the KL has a weight
        if component == "reference" and draft.number("actor.kl_ctl", 0.1) <= 0:
            draft.implied(
                "there is no reference while actor.kl_ctl is 0", f"{key}.path"
            )
            continue
        if written and component not in pool.where and "actor" in pool.where:
            if draft.value(f"{key}.scheduling_strategy.type") in (None, "colocation"):
                pool.share(component, "actor", len(pool.where["actor"]))
            else:
                pool.take(component, len(pool.where["actor"]))
            pool.tokens[component] = pool.tokens["actor"]
    nodes = draft.count("cluster.n_nodes", 1, 1)
    topology = pool.write(nodes)
    used = topology.num_accelerators
    if "cluster.n_nodes" in draft.given and nodes * width < used:
        draft.find(
            "import-counts",
            "cluster.n_nodes",
            error="accelerators",
            settings={"cluster.n_nodes": used // width},
            used=used,
            there=nodes * width,
        )
    # Blocks of both engines may be written; one is in use
    engines = f"{draft.value('rollout.backend')} {draft.value(mode)}"
    idle = "sglang" if "vllm" in engines else "vllm"
    draft.implied(
        "of an engine that is not in use",
        {
            "sglang": "sglang.mem_fraction_static",
            "vllm": "vllm.gpu_memory_utilization",
        }[idle],
    )
    _set_areal_correction(draft)
    _set_areal_norms(draft)
    _set_areal_warmup(draft)
    draft.apply_rules()
    draft.set("algorithm.loss", "token")
    draft.assume(
        "algorithm.loss: token",
        "the mean that its losses are there, whatever the estimator",
    )
    return finish(
        draft, topology, dict.fromkeys(pool.where, draft.has("enable_offload"))
    )


def _set_areal_correction(draft: Draft) -> None:
    """Write the importance weights of samples from older versions and from the engine, and which samples are left out.

    AReaL uses weights only with `use_decoupled_loss`. A sample whose weight is above the bound is left out (mask), or
    its weight is reduced to the bound (clamp).
    """
    switch = "actor.use_decoupled_loss"
    block = "actor.rejection_sampling."
    cap, mode = "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"
    ours = ("algorithm.tis_cap", "algorithm.tis_above", "algorithm.tis_level")
    if not draft.has(switch):
        draft.leave_uncorrected()
        draft.implied(
            "without use_decoupled_loss, nothing is weighed", switch, cap, mode
        )
        return
    upper = draft.value(f"{block}upper", draft.value(cap))
    if draft.value(f"{block}metric", "ratio") != "ratio" or not _is_number(upper):
        draft.set("algorithm.tis_cap", _NO_CAP)
        draft.assume(
            f"algorithm.tis_cap: {_NO_CAP:g}", "weights have no cap there by a ratio"
        )
        draft.becomes(switch, "algorithm.tis_cap")
        return
    level, _, action = str(draft.value(mode, "token_mask")).partition("_")
    action = {"truncate": "clamp"}.get(action, action)
    action = str(draft.value(f"{block}action", action))
    level = str(draft.value(f"{block}level", level))
    draft.set("algorithm.tis_cap", upper)
    draft.set("algorithm.tis_above", "drop" if action == "mask" else "cap")
    if level == "sequence":
        draft.set("algorithm.tis_level", level)
    if _is_number(floor := draft.value(f"{block}lower")):
        draft.set("algorithm.tis_floor", floor)
    for key in (switch, cap, mode, *(f"{block}{k}" for k in _AREAL_REJECTION)):
        draft.becomes(key, *ours)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _set_areal_norms(draft: Draft) -> None:
    """Write whether advantages are normalized, and the algorithm that computes the advantages of a group alike."""
    block = "actor.adv_norm."
    levels = [draft.value(f"{block}{part}_level", "batch") for part in ("mean", "std")]
    written = any(s.key.startswith(block) for s in draft.settings)
    if written and levels == ["batch", "batch"]:
        draft.set("algorithm.normalize_advantages", True)
        for part in ("mean", "std"):
            draft.becomes(f"{block}{part}_level", "algorithm.normalize_advantages")
    elif not written:
        draft.set("algorithm.normalize_advantages", False)
        draft.assume(
            "algorithm.normalize_advantages: false", "there is no actor.adv_norm"
        )


def _set_areal_warmup(draft: Draft) -> None:
    """Write the steps of the warm-up, which AReaL gives as a share of all steps."""
    total = draft.count("total_train_steps", 0)
    for model in ("actor", "critic"):
        key = f"{model}.optimizer.warmup_steps_proportion"
        if key not in draft.given or model not in draft.placed:
            continue
        share = draft.number(key, 0.0)
        if not total and share:
            draft.unmapped(
                "a share of all steps, and runner.total_iterations is not known", key
            )
            continue
        steps = int(share * total) * draft.count("actor.ppo_n_minibatches", 4, 1)
        draft.derive(f"{model}.optimizer.warmup_steps", steps, key)


def _areal_component(backend: str | None, name: str | None, actor_placed: bool) -> str:
    """Return the component for which a part of AReaL's allocation stands.

    `name`: the name in brackets, which decides if there is one; None: no name. `backend`: "sglang" and "vllm" are the
    rollout, any other backend is the actor; None: no backend. `actor_placed`: whether the actor is placed already; then
    a part without name and backend is the rollout.
    """
    if name:
        return {"ref": "reference", "gen": "rollout"}.get(name, name)
    generates = backend in ("sglang", "vllm") or (backend is None and actor_placed)
    if generates:
        return "rollout"
    return "actor"


LIBRARIES: Mapping[str, Callable[[Draft, int], Imported]] = {
    "openrlhf": import_openrlhf,
    "slime": import_slime,
    "rlinf": import_rlinf,
    "verl": import_verl,
    "roll": import_roll,
    "skyrl": import_skyrl,
    "areal": import_areal,
    "nemo_rl": import_nemo_rl,
    "trl": import_trl,
}
