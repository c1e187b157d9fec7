"""Names of advantage estimators in other libraries -> the algorithm of ours that learns from the same ones."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.draft import Draft
from rlplace.imports.rules import To

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


_OF_VALUES = ("algorithm.gamma", "algorithm.gae_lambda", "algorithm.value_clip")


def set_algorithm(draft: Draft, key: str, default: str) -> None:
    """`default` is theirs. One that has no name here becomes rlhf beside a critic, else grpo, and that is said."""
    estimator = draft.value(key, default)
    name = ALGORITHMS.get(estimator) if isinstance(estimator, str) else None
    if name == "ppo" and "critic" not in draft.placed:
        name = None
    draft.set("algorithm.name", name or ("ppo" if "critic" in draft.placed else "grpo"))
    if "critic" not in draft.placed:
        for setting, rule in draft.rulebook.rules.items():
            if isinstance(rule, To) and rule.keys in _OF_VALUES:
                draft.needless(setting, "there is no critic")
    if name:
        draft.becomes(key, "algorithm.name")
        if key not in draft.given and name != "ppo":
            draft.assume(f"algorithm.name: {name}", f"by the default of {key} there")
    else:
        known = ", ".join(map(str, ALGORITHMS))
        draft.unmapped(key, f"no algorithm here learns from {estimator} with these components; there are {known}")
