"""What all libraries have under names of their own: the advantage estimator and the KL from the reference."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.importer import Draft

# Their estimator -> the algorithm of ours that learns from the same advantages.
ALGORITHMS: Mapping[object, str] = {
    "gae": "ppo",
    "ppo": "ppo",
    "grpo": "grpo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "reinforce++_baseline": "reinforce_pp_baseline",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_OF_VALUES = {"algorithm.gamma", "algorithm.gae_lambda", "algorithm.value_clip"}
_KL_WORDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def set_algorithm(draft: Draft, key: str, default: str) -> None:
    """Write the algorithm. An estimator without a name here becomes ppo beside a critic, else grpo, and is reported."""
    critic = "critic" in draft.placed
    estimator = draft.value(key, default)
    name = ALGORITHMS.get(estimator) if isinstance(estimator, str) else None
    name = None if name == "ppo" and not critic else name
    draft.set("algorithm.name", name or ("ppo" if critic else "grpo"))
    if not critic:
        for setting, rule in draft.rules.rules.items():
            if rule.action == "set" and _OF_VALUES & {*rule.keys}:
                draft.implied(setting, "there is no critic")
    if name is None:
        known = ", ".join(map(str, ALGORITHMS))
        draft.unmapped(key, f"no algorithm here learns from {estimator} with these components; there are {known}")
        return
    draft.becomes(key, "algorithm.name")
    if key not in draft.given and name != "ppo":
        draft.assume(f"algorithm.name: {name}", f"by the default of {key} there")


def set_kl(draft: Draft, where: str, switch: str, weight: str, default: float, estimator: str, usual: str) -> None:
    """Write the KL in the `where`, "loss" or "reward", that `switch` asks for, with its weight and estimator."""
    if "reference" not in draft.placed:
        return
    draft.derive("algorithm.kl_in", where, switch)
    draft.derive("algorithm.kl_coef", draft.number(weight, default), weight)
    word = draft.value(estimator, usual)
    if isinstance(word, str) and word in _KL_WORDS:
        draft.derive("algorithm.kl_estimator", _KL_WORDS[word], estimator)
    elif estimator in draft.given:
        known = ", ".join(_KL_WORDS)
        draft.unmapped(estimator, f"algorithm.kl_estimator has no word for it; there are words for {known}")
