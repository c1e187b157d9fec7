"""OpenRLHF: what its flags say of learning -> algorithm, optimizers, models, prompts and rewards.

Here stands what takes more than one flag or becomes more than one key; `openrlhf_flags` has the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.known_models import shape_of

_COMPARING = ("rloo", "reinforce_baseline", "group_norm")  # estimators that want several answers to each prompt
_OFF_BELOW_ONE = ("critic.freezing_steps", "eval.steps")
_FOR_BOTH = {  # in the older spelling
    "actor.max_norm": "max_grad_norm",
    "actor.adam.weight_decay": "weight_decay",
    "actor.adam.eps": "eps",
}
_ON_CPU = "cpu"


def set_learning(draft: Draft) -> None:
    """Everything but placement, sizes of passes and dtypes; before the rules are applied."""
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
    for key in _OFF_BELOW_ONE:
        if key in draft.given and draft.number(key, -1) < 1:
            draft.needless(key, "off, as it is here unless it is asked for")
    _set_iterations(draft)
    _set_prompts(draft)
    _set_models(draft)


def place_remote_reward(draft: Draft) -> None:
    """A reward that is asked over HTTP, or a Python file with a function, needs a process and no accelerator."""
    url = draft.value("reward.remote_url")
    if not url or draft.has("train.agent_func_path"):
        return
    text = str(url)
    if "," in text:
        draft.unmapped("reward.remote_url", "several: write a block reward.<name> with a url for each, and place them")
        return
    draft.set(f"{PLACEMENT}.reward", _ON_CPU)
    if text.endswith(".py"):
        function = f"{text.rpartition('/')[2].removesuffix('.py')}:reward_func"
        draft.derive("reward.function", function, "reward.remote_url")
        draft.assume(
            f"reward.function: {function}",
            "called as f(prompts, answers, **kwargs); there, f(queries, prompts, labels)",
        )
    else:
        draft.derive("reward.url", text, "reward.remote_url")


def _set_algorithm(draft: Draft) -> None:
    estimator = draft.value("algo.advantage.estimator", "gae")
    set_algorithm(draft, "algo.advantage.estimator", "gae")
    samples = draft.count("rollout.n_samples_per_prompt", 1, 1)
    if estimator in _COMPARING and samples < 2:
        draft.find(
            "import-batches",
            "rollout.n_samples_per_prompt",
            f"{estimator} compares the answers to a prompt with each other, and there is {samples}",
            got=str(draft.given.get("rollout.n_samples_per_prompt", "--n_samples_per_prompt 1")),
            why="there, it is refused with fewer than 2",
            fix="--rollout.n_samples_per_prompt 2",
        )


def _set_adam(draft: Draft) -> None:
    """In the older spelling, one flag speaks for both models that learn."""
    betas = _two(draft, "actor.adam.betas", (0.9, 0.95))
    for model in ("actor", "critic"):
        own = _two(draft, "critic.adam.betas", betas) if model == "critic" else betas
        if model in draft.placed and own is not None:
            keys = ("actor.adam.betas", "critic.adam.betas") if model == "critic" else ("actor.adam.betas",)
            for name, value in zip(("beta1", "beta2"), own, strict=True):
                if value != {"beta1": 0.9, "beta2": 0.999}[name] or any(key in draft.given for key in keys):
                    draft.derive(f"{model}.optimizer.{name}", value, *keys)

    for key, leaf in _FOR_BOTH.items():
        if "critic" in draft.placed and key in draft.given and not str(draft.given[key]).startswith(f"--{key}"):
            draft.set(f"critic.optimizer.{leaf}", draft.value(key))


def _set_clips(draft: Draft) -> None:
    """The policy's ratio, the scores, and the weights that correct the engine's rounding."""
    both = _two(draft, "actor.eps_clip_low_high", None)
    if both is not None:
        draft.derive("algorithm.clip_ratio_low", both[0], "actor.eps_clip_low_high")
        draft.derive("algorithm.clip_ratio_high", both[1], "actor.eps_clip_low_high")
        draft.becomes("actor.eps_clip_low_high", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    scores = _two(draft, "reward.clip_range", (-10.0, 10.0))
    if scores is not None and scores[0] == -scores[1]:
        draft.derive("algorithm.reward_clip", scores[1], "reward.clip_range")
    elif scores is not None:
        draft.unmapped("reward.clip_range", "algorithm.reward_clip clips alike on both sides of 0")
    enabled = "algo.advantage.is_correction_enable"
    if not draft.has(enabled):
        draft.set("algorithm.tis_cap", None)
        draft.assume("algorithm.tis_cap: null", "the engine's rounding is not corrected there unless it is asked for")
        return
    threshold = "algo.advantage.is_correction_threshold"
    old = draft.value("vllm_is_truncated_threshold")
    given = old[-1] if isinstance(old, tuple) and old else old
    cap = (_two(draft, threshold, None) or (0.0, given if isinstance(given, int | float) else 2.0))[1]
    draft.derive("algorithm.tis_cap", float(cap), enabled, threshold, "vllm_is_truncated_threshold")


def _set_iterations(draft: Draft) -> None:
    """Known only where the number of samples is given: otherwise it is that of the data."""
    if "data.max_samples" in draft.given:
        prompts = draft.count("rollout.batch_size", 1024, 1)
        samples, rounds = draft.count("data.max_samples", 1, 1), draft.count("train.num_episodes", 1, 1)
        iterations = max(1, samples * rounds // prompts)
        draft.derive("runner.total_iterations", iterations, "data.max_samples", "train.num_episodes")


def _set_prompts(draft: Draft) -> None:
    """The data becomes a task of one turn on the CPU; scores come from the reward component, where there is one."""
    path = draft.value("data.prompt_dataset")
    if not isinstance(path, str) or not path:
        return
    label = draft.value("data.label_key")
    draft.set(f"{PLACEMENT}.env", _ON_CPU)
    draft.set("env.task", "prompts")
    asked = draft.value("data.input_key", "input")
    draft.set("env.kwargs", {"path": path, "prompt": asked, "answer": label})
    draft.set("env.chat", draft.has("data.apply_chat_template"))
    for key in ("data.prompt_dataset", "data.input_key", "data.label_key"):
        draft.becomes(key, "env.kwargs")
    draft.becomes("data.apply_chat_template", "env.chat")
    draft.assume(f"{PLACEMENT}.env: {_ON_CPU}", "a process that asks; it holds no accelerator")
    if rewards := _own_rewards(draft, scored=any(c.partition(".")[0] == "reward" for c in draft.placed)):
        draft.set("env.rewards", rewards)


def _own_rewards(draft: Draft, *, scored: bool) -> Sequence[Mapping[str, object]]:
    """What the env itself says of an answer."""
    buffer = draft.count("reward.overlong_buffer_len", 0)
    if buffer:
        longest = draft.count("rollout.max_new_tokens", 1024, 1)
        limits = {"free_tokens": max(0, longest - buffer), "longest_tokens": longest}
        for key in ("reward.overlong_buffer_len", "reward.overlong_penalty_factor"):
            draft.becomes(key, "env.rewards")
        weight = draft.number("reward.overlong_penalty_factor", 1.0)
        return [{"name": "length_penalty", "weight": weight, "kwargs": limits}]
    if scored:
        draft.assume("env.rewards: [{name: unscored}]", "the reward component alone scores")
        return [{"name": "unscored"}]
    return []


def _set_models(draft: Draft) -> None:
    """The keys of models whose names are known; a critic begins as the reward model there."""
    names = {"actor.model": "actor.model_name_or_path", "reward.model": "reward.model_name_or_path"}
    names["critic.model"] = (
        "critic.model_name_or_path"
        if "critic.model_name_or_path" in draft.given
        else ("reward.model_name_or_path" if "reward.model_name_or_path" in draft.given else "actor.model_name_or_path")
    )
    for ours, key in names.items():
        name, role = draft.value(key), ours.partition(".")[0]
        if not isinstance(name, str) or role not in draft.placed:
            continue
        if (shape := shape_of(name)) is None:
            continue
        draft.set(ours, {"path": name, **shape})
        draft.assume(f"{ours}: keys of config.json", f"by its name, {name}; path must become a folder before a run")
        if ours != "critic.model" or key == "critic.model_name_or_path":
            draft.becomes(key, f"{ours}.path")


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
