"""Import of OpenRLHF: the flags of its PPO trainer.

In OpenRLHF, each model asks for `num_nodes` x `num_gpus_per_node` accelerators, and three switches decide which models
share them: `colocate_all` puts all models on the actor's accelerators, `colocate_actor_ref` and
`colocate_critic_reward` two models each. There is a reference if there is a KL penalty, a critic if advantages are
estimated by GAE, and a reward model unless a remote reward or an agent scores. Flags of learning are converted here if
several flags become one key, or one flag becomes several keys; the rules convert the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlplace.config.keys import PLACEMENT
from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.placing import Allocation, place_by_size

_FLAGS_OF = {
    "actor": "actor",
    "critic": "critic",
    "reference": "ref",
    "reward": "reward",
}
_ALL_LINEAR = ("all-linear", ("all-linear",), ["all-linear"])
_ALL_SAMPLES = 10**8  # stands for all there are
_SCHEDULE = "cosine_with_min_lr"  # the default of both models that learn
# Settings of an evaluation: key of rlplace, default of OpenRLHF, name in OpenRLHF
_EVALUATED = (
    ("eval_samples", 4, "n_samples_per_prompt"),
    ("eval_temperature", 0.6, "temperature"),
)
# Estimators that want several answers to each prompt
_COMPARING = (
    "rloo",
    "reinforce_baseline",
    "group_norm",
)


def import_openrlhf(draft: Draft, per_node: int) -> Imported:
    """Return the converted config from flags of OpenRLHF's PPO trainer.

    `per_node`: accelerators of a node; 0: the most that any model asks for on one node.
    """
    asks = {
        c: (f"{flags}.num_nodes", f"{flags}.num_gpus_per_node")
        for c, flags in _FLAGS_OF.items()
    }
    for component, why in _absent(draft).items():
        draft.unmapped(why, *asks.pop(component))
    pool = _place(draft, asks, per_node)
    for component in _FLAGS_OF:
        pool.divide_tokens(component, "ds.ring_attn_size")
    topology = pool.write()
    _place_remote_reward(draft)
    _set_dtype(draft)
    _set_lengths(draft)
    _set_betas(draft)
    _set_clips(draft)
    _set_schedule(draft)
    _set_prompts(draft)
    reward = "reward.model_name_or_path"
    draft.set_model("actor.model", "actor.model_name_or_path")
    draft.set_model("reward.model", reward)
    # Without a model of its own, the critic begins as the reward model or the actor
    draft.set_model(
        "critic.model", "critic.model_name_or_path", reward, "actor.model_name_or_path"
    )
    _set_passes(draft)
    draft.apply_rules()
    for model in (m for m in ("actor", "critic") if m in draft.placed):
        # The word for what LoRA takes without this flag
        if draft.at(f"{model}.lora_targets") in _ALL_LINEAR:
            draft.unset(f"{model}.lora_targets")
            draft.implied("all linear layers", "ds.lora.target_modules")
        if draft.at(f"{model}.optimizer.schedule") == "cosine":
            own = draft.value(
                f"{model}.lr_scheduler", draft.value("actor.lr_scheduler", _SCHEDULE)
            )
            least = (
                draft.number(f"{model}.min_lr_ratio", 0.1) if own == _SCHEDULE else 0.0
            )
            draft.derive(
                f"{model}.optimizer.min_lr_ratio", least, f"{model}.min_lr_ratio"
            )
        # Warms up by default; how many steps that is depends on the length of the run
        ratio = f"{model}.lr_warmup_ratio"
        if ratio not in draft.given and "actor.lr_warmup_ratio" not in draft.given:
            draft.assume(
                f"no {model}.optimizer.warmup_steps",
                f"there 3 % of the steps, the default of {ratio}: write their number",
            )
    for ours, usual, theirs in _EVALUATED:
        if draft.at("runner.eval_every") and draft.at(f"runner.{ours}") is None:
            draft.set(f"runner.{ours}", usual)
            draft.assume(
                f"runner.{ours}: {usual}", f"the default of eval.{theirs} there"
            )
    gspo = draft.value("actor.policy_loss_type") == "gspo"
    draft.set("algorithm.loss", "sequence" if gspo else "token")
    draft.assume(
        f"algorithm.loss: {draft.at('algorithm.loss')}",
        "the mean that its losses are there, whatever the estimator",
    )
    _check_samples(draft, len(pool.where["actor"]))
    return finish(
        draft,
        topology,
        {c: leaves for c, leaves in _offloads(draft).items() if c in pool.where},
    )


def _absent(draft: Draft) -> dict[str, str]:
    """Return component -> reason in words, for each component that a job with these flags does not have."""
    absent: dict[str, str] = {}
    estimator = draft.value("algo.advantage.estimator", "gae")
    if estimator != "gae":
        absent["critic"] = (
            f"there is no critic: the estimator {estimator} needs no values"
        )
    if draft.number("algo.kl.init_coef", 0.01) <= 0:
        absent["reference"] = (
            "there is no reference: nothing is compared with it while init_kl_coef is 0"
        )
    if draft.has("train.agent_func_path"):
        absent["reward"] = "there is no reward: the agent scores"
    elif draft.has("reward.remote_url"):
        absent["reward"] = "the reward needs no accelerators: it is remote"
    return absent


# ── placement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(
    draft: Draft, asks: Mapping[str, tuple[str, str]], per_node: int
) -> Allocation:
    """Place the models by their sizes, then the engines, and return the allocation.

    `asks`: component -> its flags for the number of nodes and of accelerators per node. `per_node`: accelerators of a
    node; 0: as the flags say.
    """
    together = draft.has("train.colocate_all")
    key = "ds.tensor_parallel_size"
    pairs = (
        ("reference", "actor", "colocate_actor_ref"),
        ("reward", "critic", "colocate_critic_reward"),
    )
    partners = {
        c: leader for c, leader, switch in pairs if draft.has(f"train.{switch}")
    }
    partners |= {"reference": "actor"} if together else {}
    copy = draft.count(key, 1, 1)
    pool = place_by_size(
        draft, asks, 8, per_node, partners, together=together, copy=copy
    )
    for component, numbers in pool.where.items():
        size = len(numbers)
        if size % copy:
            near = next(n for n in range(copy, 0, -1) if size % n == 0)
            draft.find(
                "import-counts",
                key,
                error="copies",
                settings={key: near},
                size=size,
                component=component,
                copy=copy,
            )
    number = "vllm.num_engines"
    size_key = "vllm.tensor_parallel_size"
    if engines := draft.count(number, 0):
        alone = not together or draft.has("train.async_enable")
        pool.take_engines(
            number, engines, size_key, draft.count(size_key, 1, 1), together=not alone
        )
    else:
        pool.share("rollout", "actor", len(pool.where["actor"]))
        draft.assume(
            f"{PLACEMENT}.rollout: {pool.where['actor']}",
            "without engines the actor itself generates there",
        )
    return pool


def _check_samples(draft: Draft, actor: int) -> None:
    """Report a problem if there are fewer micro-batches than actor processes; OpenRLHF refuses to start such a job.

    `actor`: number of accelerators of the actor.
    """
    keys = (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "rollout.micro_batch_size",
    )
    prompts, answers, micro = (
        draft.count(key, usual, 1)
        for key, usual in zip(keys, (1024, 1, 1), strict=True)
    )
    copy = draft.count("ds.tensor_parallel_size", 1, 1) * draft.count(
        "ds.ring_attn_size", 1, 1
    )
    samples = prompts * answers
    processes = actor // copy
    if samples // micro < processes:
        settings = {keys[2]: samples // processes}
        if samples < processes:
            # No micro-batch is small enough
            settings = {keys[0]: math.ceil(processes / answers), keys[2]: 1}
        draft.find(
            "import-batches",
            *keys,
            error="micro-batches",
            settings=settings,
            samples=samples,
            micro=micro,
            count=samples // micro,
            processes=processes,
        )


def _offloads(draft: Draft) -> dict[str, bool]:
    """Return component -> whether it leaves its accelerators in OpenRLHF. Also write how the engines sleep.

    Engines sleep only if all models share their accelerators and sampling does not continue during training.
    """
    key = "vllm.enable_sleep"
    sleep, together, ahead = (
        draft.has(k) for k in (key, "train.colocate_all", "train.async_enable")
    )
    if sleep and together and not ahead:
        draft.set("rollout.sleep_level", 1)
        draft.becomes(key, "rollout.enable_offload", "rollout.sleep_level")
    elif sleep:
        error = "alone"
        if ahead:
            error = "ahead"
        draft.find("import-sleep", key, "train.async_enable", error=error)
        draft.unset("rollout.enable_offload")
        draft.unmapped(
            "does nothing there unless all models share their accelerators in turn", key
        )
    # In the older spelling, one flag is for reference and reward
    old = "ref_reward_offload" in str(draft.given.get("ref.offload", ""))
    return {
        "actor": draft.has("ds.enable_sleep"),
        "critic": draft.has("ds.enable_sleep"),
        "reference": draft.has("ref.offload"),
        "reward": draft.has("reward.offload") or old,
        "rollout": sleep and together and not ahead,
    }


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place_remote_reward(draft: Draft) -> None:
    """Place a reward that is an HTTP endpoint or a Python file. It needs a process, but no accelerator."""
    key = "reward.remote_url"
    if not draft.has(key) or draft.has("train.agent_func_path"):
        return
    url = str(draft.value(key))
    if "," in url:
        draft.unmapped(
            "several: write a block reward.<name> with a url for each, and place them",
            key,
        )
        return
    draft.set(f"{PLACEMENT}.reward", "cpu")
    if url.endswith(".py"):
        function = f"{url.rpartition('/')[2].removesuffix('.py')}:reward_func"
        draft.derive("reward.function", function, key)
        why = "called as in the original, f(queries, prompts, labels); its folder belongs in PYTHONPATH"
        draft.assume(f"reward.function: {function}", why)
    else:
        draft.derive("reward.url", url, key)


def _set_dtype(draft: Draft) -> None:
    """Write the dtypes into the draft (the converted config).

    They are 16-bit weights, and 32-bit master weights in the optimizer, as DeepSpeed keeps them.
    """
    dtype = "fp16" if draft.value("ds.param_dtype") == "fp16" else "bf16"
    for model in ("actor", "critic"):
        if model in draft.placed:
            draft.set(f"{model}.weights", dtype)
            draft.set(f"{model}.compute", dtype)
            draft.set(f"{model}.optimizer.kind", "adamw_master")
    for key in ("bf16", "ds.param_dtype"):
        draft.becomes(key, "actor.weights", "actor.compute")
    draft.assume(
        "actor.optimizer.kind: adamw_master",
        "DeepSpeed keeps 32-bit weights with the optimizer state",
    )


def _set_lengths(draft: Draft) -> None:
    """Write the lengths of prompt and answer into the draft (the converted config).

    Newer versions of OpenRLHF have one flag for the sum of the two lengths, older versions one flag for each.
    """
    if draft.value("data.max_len") is None:
        for part, ours in (
            ("prompt_max_len", "max_prompt_length"),
            ("rollout.max_new_tokens", "max_new_tokens"),
        ):
            if part in draft.given:
                draft.derive(f"algorithm.{ours}", draft.count(part, 1024, 1), part)
        return
    length = draft.count("data.max_len", 2048, 2)
    answer = min(
        length - 1, draft.count("rollout.max_new_tokens", min(1024, length // 2), 1)
    )
    draft.derive("algorithm.sequence_length", length, "data.max_len")
    draft.derive("algorithm.max_new_tokens", answer, "rollout.max_new_tokens")
    draft.set("algorithm.max_prompt_length", length - answer)
    draft.assume(
        f"algorithm.max_prompt_length: {length - answer}",
        "what the answer leaves of data.max_len",
    )
    draft.implied("lies within algorithm.sequence_length", "prompt_max_len")


def _set_betas(draft: Draft) -> None:
    """Write the betas of Adam into the draft (the converted config).

    In OpenRLHF's older spelling, one flag sets the betas of actor and critic.
    """
    keys: tuple[str, ...] = ()
    betas: tuple[float, float] | None = (0.9, 0.95)
    for model in ("actor", "critic"):
        keys = (*keys, f"{model}.adam.betas")
        betas = _two(draft, keys[-1], betas)
        for name, value in zip(("beta1", "beta2"), betas or (), strict=False):
            if model in draft.placed:
                draft.derive(f"{model}.optimizer.{name}", value, *keys)


def _set_clips(draft: Draft) -> None:
    """Write limits into the draft (the converted config).

    They limit the policy's probability ratio, the scores, and the weights of the importance-sampling correction.
    """
    if both := _two(draft, "actor.eps_clip_low_high", None):
        ours = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
        for key, value in zip(ours, both, strict=True):
            draft.set(key, value)
        draft.becomes("actor.eps_clip_low_high", *ours)
    scores = _two(draft, "reward.clip_range", (-10.0, 10.0))
    if scores is not None and scores[0] == -scores[1]:
        draft.derive("algorithm.reward_clip", scores[1], "reward.clip_range")
    elif scores is not None:
        draft.unmapped(
            "algorithm.reward_clip clips alike on both sides of 0", "reward.clip_range"
        )
    enabled = "algo.advantage.is_correction_enable"
    threshold = "algo.advantage.is_correction_threshold"
    if not draft.has(enabled):
        draft.leave_uncorrected()
        return
    old = draft.value("vllm_is_truncated_threshold")
    given = old[-1] if isinstance(old, tuple) and old else old
    # The default of newer versions, which spell it so
    usual = 5.0 if "is_correction_enable" in str(draft.given[enabled]) else 2.0
    cap = (
        _two(draft, threshold, None)
        or (0.0, given if isinstance(given, int | float) else usual)
    )[1]
    draft.derive(
        "algorithm.tis_cap",
        float(cap),
        enabled,
        threshold,
        "vllm_is_truncated_threshold",
    )
    kind = "algo.advantage.is_correction_type"
    if draft.value(kind) == "icepop":
        floor = (_two(draft, threshold, None) or (0.5, 0.0))[0]
        draft.set("algorithm.tis_above", "drop")
        draft.set("algorithm.tis_floor", floor)
        draft.becomes(kind, "algorithm.tis_above", "algorithm.tis_floor")


def _set_schedule(draft: Draft) -> None:
    """Write settings of training into the draft (the converted config).

    They are averaged weights, staleness, number of iterations, and whether the KL term is in the loss. Report a problem
    if the advantage estimator compares answers and each prompt has only one answer.
    """
    if "reference" in draft.placed and draft.has("algo.kl.use_loss"):
        draft.derive("algorithm.kl_in", "loss", "algo.kl.use_loss")
    if draft.has("train.enable_ema"):
        decay = draft.number("train.ema_beta", 0.992)
        draft.derive("actor.ema_decay", decay, "train.enable_ema", "train.ema_beta")
    if draft.has("train.async_enable"):
        ahead = draft.count("train.async_queue_size", 1, 1)
        draft.derive(
            "algorithm.max_staleness",
            ahead,
            "train.async_enable",
            "train.async_queue_size",
        )
    # Without data.max_samples, the data decides how many iterations there are
    samples = draft.count("data.max_samples", _ALL_SAMPLES, 1)
    if samples < _ALL_SAMPLES:
        rounds = draft.count("train.num_episodes", 1, 1)
        iterations = max(
            1, samples * rounds // draft.count("rollout.batch_size", 1024, 1)
        )
        draft.derive(
            "runner.total_iterations",
            iterations,
            "data.max_samples",
            "train.num_episodes",
        )
    estimator = draft.value("algo.advantage.estimator", "gae")
    key = "rollout.n_samples_per_prompt"
    if estimator in _COMPARING and (samples := draft.count(key, 1, 1)) < 2:
        draft.find(
            "import-batches",
            key,
            error="one-answer",
            settings={key: 2},
            estimator=estimator,
            samples=samples,
        )


def _set_prompts(draft: Draft) -> None:
    """Write the data into the draft (the converted config) as a text task with one turn, placed on CPUs.

    If there is a reward component, the scores come from it.
    """
    path = draft.value("data.prompt_dataset")
    if not isinstance(path, str) or not path:
        return
    draft.set(f"{PLACEMENT}.env", "cpu")
    asked = draft.value("data.input_key", "input")
    columns = {"path": path, "prompt": asked, "answer": draft.value("data.label_key")}
    chat = draft.has("data.apply_chat_template")
    draft.set(
        "env", {"kind": "text", "task": "prompts", "kwargs": columns, "chat": chat}
    )
    draft.assume(
        f"{PLACEMENT}.env: cpu",
        "a process that asks the prompts; it holds no accelerator",
    )
    if buffer := draft.count("reward.overlong_buffer_len", 0):
        longest = draft.count("rollout.max_new_tokens", 1024, 1)
        limits = {"free_tokens": max(0, longest - buffer), "longest_tokens": longest}
        weight = draft.number("reward.overlong_penalty_factor", 1.0)
        draft.set(
            "env.rewards",
            [{"name": "length_penalty", "weight": weight, "kwargs": limits}],
        )
    elif any(c.partition(".")[0] == "reward" for c in draft.placed):
        draft.assume(
            "env.rewards: [{name: unscored}]", "the reward component alone scores"
        )
        draft.set("env.rewards", [{"name": "unscored"}])


def _set_passes(draft: Draft) -> None:
    """Write into the draft (the converted config) how many tokens a pass of each model has.

    If no run is possible yet, nothing is written.

    A run needs prompts and the actor's model.
    """
    switch = "train.dynamic_batch_enable"
    learned = "train.max_tokens_per_gpu"
    scored = "rollout.max_tokens_per_gpu"
    if "env" not in draft.placed or draft.at("actor.model") is None:
        why = "passes are counted in sequences until actor.model and env.task are known"
        draft.unmapped(why, switch, learned, scored)
        return
    longest = draft.at("algorithm.sequence_length")
    if not isinstance(longest, int):
        longest = draft.count("prompt_max_len", 1024, 1) + draft.count(
            "rollout.max_new_tokens", 1024, 1
        )
    by_tokens = draft.has(switch)
    tokens = draft.count(learned, 16192, 1)
    # Frozen models gain nothing by larger passes than those of the models that learn
    largest: int | None = None
    for models, micro, usual, most, keys in (
        (("actor", "critic"), "train.micro_batch_size", 4, tokens, (switch, learned)),
        (
            ("reference", "reward"),
            "rollout.micro_batch_size",
            8,
            draft.count(scored, tokens, 1),
            (scored,),
        ),
    ):
        budget = (
            max(longest, most) if by_tokens else draft.count(micro, usual, 1) * longest
        )
        largest = budget if largest is None else min(largest, budget)
        placed = [m for m in models if m in draft.placed and not draft.at(f"{m}.url")]
        draft.implied(
            "passes are counted in tokens here" if by_tokens else "no such model", micro
        )
        for model in placed:
            draft.set(f"{model}.token_budget", largest)
        for key in keys if by_tokens else (micro,):
            if placed:
                draft.becomes(key, *(f"{m}.token_budget" for m in placed))
    if not by_tokens:
        why = f"sequences of a pass x {longest} tokens; of frozen models, at most the learners'"
        draft.assume("token_budget", why)
        draft.implied("counts with use_dynamic_batch only", learned, scored)


def _two(
    draft: Draft, key: str, default: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the two numbers of a flag; `default` if the flag is not given.

    For any other value, record a problem and return `default`.
    """
    value = draft.value(key)
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and {type(number) for number in value} <= {int, float}
    ):
        return float(value[0]), float(value[1])
    if value is not None:
        draft.refuse(key, "two-numbers")
    return default
