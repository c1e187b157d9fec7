"""OpenRLHF: the flags of learning that are more than one, or become more than one key; its rules have the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.imports.importer import Draft
from rlplace.imports.learning import set_algorithm
from rlplace.imports.settings import PLACEMENT

_COMPARING = ("rloo", "reinforce_baseline", "group_norm")  # estimators that want several answers to each prompt
_FOR_BOTH = {  # in the older spelling
    "actor.max_norm": "max_grad_norm",
    "actor.adam.weight_decay": "weight_decay",
    "actor.adam.eps": "eps",
}
_ON_CPU = "cpu"


def set_learning(draft: Draft) -> None:
    """Everything but placement and offloads; before the rules are applied."""
    _place_remote_reward(draft)
    _set_dtype(draft)
    _set_length(draft)
    _set_algorithm(draft)
    _set_adam(draft)
    _set_clips(draft)
    if "reference" in draft.placed and draft.has("algo.kl.use_loss"):
        draft.derive("algorithm.kl_in", "loss", "algo.kl.use_loss")
    if draft.has("train.enable_ema"):
        decay = draft.number("train.ema_beta", 0.992)
        draft.derive("actor.ema_decay", decay, "train.enable_ema", "train.ema_beta")
    if draft.has("train.async_enable"):
        ahead = draft.count("train.async_queue_size", 1, 1)
        draft.derive("algorithm.max_staleness", ahead, "train.async_enable", "train.async_queue_size")
    if "data.max_samples" in draft.given:  # otherwise as many as the data has
        samples, rounds = draft.count("data.max_samples", 1, 1), draft.count("train.num_episodes", 1, 1)
        iterations = max(1, samples * rounds // draft.count("rollout.batch_size", 1024, 1))
        draft.derive("runner.total_iterations", iterations, "data.max_samples", "train.num_episodes")
    _set_prompts(draft)
    reward = "reward.model_name_or_path"
    draft.set_model("actor.model", "actor.model_name_or_path")
    draft.set_model("reward.model", reward)
    draft.set_model("critic.model", "critic.model_name_or_path", reward, "actor.model_name_or_path")  # begins as it
    _set_passes(draft)


def _place_remote_reward(draft: Draft) -> None:
    """A reward over HTTP, or a Python file with a function, needs a process and no accelerator."""
    url = draft.value("reward.remote_url")
    if not url or draft.has("train.agent_func_path"):
        return
    text = str(url)
    if "," in text:
        draft.unmapped("reward.remote_url", "several: write a block reward.<name> with a url for each, and place them")
        return
    draft.set(f"{PLACEMENT}.reward", _ON_CPU)
    if not text.endswith(".py"):
        draft.derive("reward.url", text, "reward.remote_url")
        return
    function = f"{text.rpartition('/')[2].removesuffix('.py')}:reward_func"
    draft.derive("reward.function", function, "reward.remote_url")
    why = "called as f(prompts, answers, **kwargs); there, f(queries, prompts, labels)"
    draft.assume(f"reward.function: {function}", why)


def _set_dtype(draft: Draft) -> None:
    """DeepSpeed keeps 16-bit weights, and 32-bit ones with the optimizer state."""
    dtype = "fp16" if draft.value("ds.param_dtype") == "fp16" else "bf16"
    for model in ("actor", "critic"):
        if model in draft.placed:
            draft.set(f"{model}.weights", dtype)
            draft.set(f"{model}.compute", dtype)
            draft.set(f"{model}.optimizer.kind", "adamw_master")
    for key in ("bf16", "ds.param_dtype"):
        draft.becomes(key, "actor.weights", "actor.compute")
    draft.assume("actor.optimizer.kind: adamw_master", "DeepSpeed keeps 32-bit weights with the optimizer state")


def _set_length(draft: Draft) -> None:
    """Of prompt and answer: together in the newer spelling, one flag for each in the older."""
    if draft.value("data.max_len") is None:
        for part, ours in (("prompt_max_len", "max_prompt_length"), ("rollout.max_new_tokens", "max_new_tokens")):
            if part in draft.given:
                draft.derive(f"algorithm.{ours}", draft.count(part, 1024, 1), part)
        return
    length = draft.count("data.max_len", 2048, 2)
    answer = min(length - 1, draft.count("rollout.max_new_tokens", min(1024, length // 2), 1))
    draft.derive("algorithm.sequence_length", length, "data.max_len")
    draft.derive("algorithm.max_new_tokens", answer, "rollout.max_new_tokens")
    draft.set("algorithm.max_prompt_length", length - answer)
    draft.assume(f"algorithm.max_prompt_length: {length - answer}", "what the answer leaves of data.max_len")
    draft.implied("prompt_max_len", "lies within algorithm.sequence_length")


def _set_algorithm(draft: Draft) -> None:
    estimator = draft.value("algo.advantage.estimator", "gae")
    set_algorithm(draft, "algo.advantage.estimator", "gae")
    samples = draft.count("rollout.n_samples_per_prompt", 1, 1)
    if estimator in _COMPARING and samples < 2:
        draft.find(
            "import-batches",
            "rollout.n_samples_per_prompt",
            f"{estimator} compares the answers to a prompt with each other, and there is {samples}",
            got=draft.written("rollout.n_samples_per_prompt") or "--n_samples_per_prompt 1",
            why="there, it is refused with fewer than 2",
            fix="--rollout.n_samples_per_prompt 2",
        )


def _set_adam(draft: Draft) -> None:
    """In the older spelling, one flag sets both models that learn."""
    betas = _two(draft, "actor.adam.betas", (0.9, 0.95))
    for model in ("actor", "critic"):
        own = _two(draft, "critic.adam.betas", betas) if model == "critic" else betas
        if model not in draft.placed or own is None:
            continue
        keys = ("actor.adam.betas", "critic.adam.betas") if model == "critic" else ("actor.adam.betas",)
        for name, value, usual in (("beta1", own[0], 0.9), ("beta2", own[1], 0.999)):
            if value != usual or any(key in draft.given for key in keys):
                draft.derive(f"{model}.optimizer.{name}", value, *keys)
    for key, leaf in _FOR_BOTH.items():
        if "critic" in draft.placed and key in draft.given and not str(draft.given[key]).startswith(f"--{key}"):
            draft.set(f"critic.optimizer.{leaf}", draft.value(key))


def _set_clips(draft: Draft) -> None:
    """The policy's ratio, the scores, and the weights that correct the engine's rounding."""
    both = _two(draft, "actor.eps_clip_low_high", None)
    if both is not None:
        draft.set("algorithm.clip_ratio_low", both[0])
        draft.set("algorithm.clip_ratio_high", both[1])
        draft.becomes("actor.eps_clip_low_high", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    scores = _two(draft, "reward.clip_range", (-10.0, 10.0))
    if scores is not None and scores[0] == -scores[1]:
        draft.derive("algorithm.reward_clip", scores[1], "reward.clip_range")
    elif scores is not None:
        draft.unmapped("reward.clip_range", "algorithm.reward_clip clips alike on both sides of 0")
    enabled, threshold = "algo.advantage.is_correction_enable", "algo.advantage.is_correction_threshold"
    if not draft.has(enabled):
        draft.set("algorithm.tis_cap", None)
        draft.assume("algorithm.tis_cap: null", "the engine's rounding is not corrected there unless it is asked for")
        return
    old = draft.value("vllm_is_truncated_threshold")
    given = old[-1] if isinstance(old, tuple) and old else old
    cap = (_two(draft, threshold, None) or (0.0, given if isinstance(given, int | float) else 2.0))[1]
    draft.derive("algorithm.tis_cap", float(cap), enabled, threshold, "vllm_is_truncated_threshold")


def _set_prompts(draft: Draft) -> None:
    """The data becomes a task of one turn on the CPU; scores come from the reward component, where there is one."""
    path = draft.value("data.prompt_dataset")
    if not isinstance(path, str) or not path:
        return
    draft.set(f"{PLACEMENT}.env", _ON_CPU)
    draft.set("env.kind", "text")
    draft.set("env.task", "prompts")
    asked = draft.value("data.input_key", "input")
    draft.set("env.kwargs", {"path": path, "prompt": asked, "answer": draft.value("data.label_key")})
    draft.set("env.chat", draft.has("data.apply_chat_template"))
    draft.assume(f"{PLACEMENT}.env: {_ON_CPU}", "a process that asks the prompts; it holds no accelerator")
    if rewards := _own_rewards(draft, scored=any(c.partition(".")[0] == "reward" for c in draft.placed)):
        draft.set("env.rewards", rewards)


def _own_rewards(draft: Draft, *, scored: bool) -> Sequence[Mapping[str, object]]:
    """The rewards that the env itself computes."""
    buffer = draft.count("reward.overlong_buffer_len", 0)
    if buffer:
        longest = draft.count("rollout.max_new_tokens", 1024, 1)
        limits = {"free_tokens": max(0, longest - buffer), "longest_tokens": longest}
        weight = draft.number("reward.overlong_penalty_factor", 1.0)
        return [{"name": "length_penalty", "weight": weight, "kwargs": limits}]
    if scored:
        draft.assume("env.rewards: [{name: unscored}]", "the reward component alone scores")
        return [{"name": "unscored"}]
    return []


def _set_passes(draft: Draft) -> None:
    """A run packs its samples, so that a pass has so many tokens; a job that is only planned counts sequences."""
    switch, learned, scored = "train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"
    if "env" not in draft.placed or draft.at("actor.model") is None:
        for key in (switch, learned, scored):
            draft.unmapped(key, "passes are counted in sequences until actor.model and env.task are known")
        return
    longest = draft.at("algorithm.sequence_length")
    if not isinstance(longest, int):
        longest = draft.count("prompt_max_len", 1024, 1) + draft.count("rollout.max_new_tokens", 1024, 1)
    by_tokens, tokens = draft.has(switch), draft.count(learned, 16192, 1)
    largest = 0
    for models, micro, usual, most, keys in (
        (("actor", "critic"), "train.micro_batch_size", 4, tokens, (switch, learned)),
        (("reference", "reward"), "rollout.micro_batch_size", 8, draft.count(scored, tokens, 1), (scored,)),
    ):
        placed = [m for m in models if m in draft.placed and not draft.at(f"{m}.url")]
        draft.implied(micro, "passes are counted in tokens here" if by_tokens else "no such model")
        budget = max(longest, most) if by_tokens else draft.count(micro, usual, 1) * longest
        largest = (
            min(largest, budget) if largest else budget
        )  # larger passes of frozen models than the learners' gain nothing
        for model in placed:
            draft.set(f"{model}.token_budget", largest)
        for key in keys if by_tokens else (micro,):
            if placed:
                draft.becomes(key, *(f"{m}.token_budget" for m in placed))
    if not by_tokens:
        why = f"sequences of a pass x {longest} tokens; of frozen models, at most the learners'"
        draft.assume("token_budget", why)
        for key in (learned, scored):
            draft.implied(key, "counts with use_dynamic_batch only")


def _two(draft: Draft, key: str, default: tuple[float, float] | None) -> tuple[float, float] | None:
    """The two numbers of a flag; anything else is a problem."""
    value = draft.value(key)
    if value is None:
        return default
    numbers = value if isinstance(value, tuple | list) else ()
    if len(numbers) == 2 and all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return float(numbers[0]), float(numbers[1])
    draft.refuse(key, "expected two numbers", "there are two in the original")
    return default
