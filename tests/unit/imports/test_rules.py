"""The tables of all importers: what they name exists, and what they do not know is told with what may be meant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlplace.imports import areal, openrlhf_flags, rlinf_rules, roll, skyrl, slime, verl_rules
from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.keys import default_of, find_refusals, has_key, ordered
from rlplace.imports.rules import Already, Became, Into, Needless, No, Rulebook, To, Unknown, Unmapped, Words, keys_of
from rlplace.imports.settings import Setting

BOOKS = {
    "openrlhf": openrlhf_flags.RULES,
    "rlinf": rlinf_rules.RULES,
    "rlinf llm": rlinf_rules.LLM_RULES,
    "verl": verl_rules.RULES,
    "roll": roll.RULES,
    "skyrl": skyrl.RULES,
    "areal": areal.RULES,
    "slime": slime.RULES,
}


def named(book: Rulebook) -> Iterator[str]:
    for rule in [*book.rules.values(), *book.groups.values()]:
        if isinstance(rule, To | Words):
            yield from keys_of(rule)
        elif isinstance(rule, Into):
            yield rule.part


@pytest.mark.parametrize("library", BOOKS)
def test_every_key_that_a_rule_names_is_one_of_ours(library: str) -> None:
    later = {"rollout.gpu_memory_utilization"}  # of simulated jobs, once their engines have a share
    for key in named(BOOKS[library]):
        plain = PLACEMENT if key.startswith(f"{PLACEMENT}.") else key
        assert has_key(plain, "mlp") or has_key(plain, "causal_lm") or key in later, key


@pytest.mark.parametrize("library", BOOKS)
def test_reasons_are_sentences_without_a_stop(library: str) -> None:
    for rule in [*BOOKS[library].rules.values(), *BOOKS[library].groups.values()]:
        if isinstance(rule, No | Already):
            assert rule.why
            assert rule.why[0].islower()
            assert not rule.why.endswith(".")


def draft(*settings: tuple[str, object], rules: Rulebook | None = None) -> Draft:
    book = rules or Rulebook(
        {
            "a.prompts": To("algorithm.prompts", 1024),
            "a.micro": To(("actor.micro_batch", "critic.micro_batch")),
            "a.dtype": Words("actor.compute", {"bf16": "bf16"}, "fp8"),
            "a.zero": Already("so it is", 3, "it is always 3"),
            "a.lr": To("algorithm.rollout_steps"),
            "a.name": No("has no key"),
            "a.reward": To("reward.micro_batch"),
        },
        {"b.": No("has no key, all of b"), "b.c.": No("has no key, all of b.c")},
        spellings=["old_prompts"],
    )
    made = Draft("x", [Setting(key=k, value=v, written=f"{k}={v}") for k, v in settings], book)
    made.set(f"{PLACEMENT}.actor", "0-7")
    return made


def fate(key: str, value: object) -> Became | Needless | Unmapped | Unknown:
    made = draft((key, value))
    made.apply_rules()
    return made.fates()[0]


@pytest.mark.parametrize(
    ("key", "value", "kind", "text"),
    [
        ("a.prompts", 8, Became, "algorithm.prompts: 8"),
        ("a.micro", 2, Became, "actor.micro_batch: 2"),
        ("a.dtype", "bf16", Became, "actor.compute: bf16"),
        ("a.dtype", "int3", Unmapped, "actor.compute has no word for int3; there are words for bf16"),
        ("a.zero", 3, Needless, "so it is"),
        ("a.zero", 2, Unmapped, "it is always 3"),
        ("a.lr", 1, Unmapped, "no key algorithm.rollout_steps in such a job yet"),
        ("a.name", 1, Unmapped, "has no key"),
        ("a.reward", 1, Unmapped, "the job has no reward"),
        ("a.prompts", None, Unmapped, "says nothing: algorithm.prompts keeps its default"),
        ("b.x", 1, Unmapped, "has no key, all of b"),
        ("b.c.x", 1, Unmapped, "has no key, all of b.c"),
        ("a.promts", 1, Unknown, "a.prompts"),
        ("old_prompt", 1, Unknown, "old_prompts"),
        ("zzz", 1, Unknown, None),
        ("$@", None, Unmapped, "filled in by the shell when the script runs"),
    ],
)
def test_fates(key: str, value: object, kind: type, text: str | None) -> None:
    found = fate(key, value)
    assert isinstance(found, kind)
    said = found.text if isinstance(found, Became) else found.near if isinstance(found, Unknown) else found.why
    assert said == text


def test_the_last_of_two_wins_and_the_first_is_told() -> None:
    made = draft(("a.prompts", 8), ("a.prompts", 9))
    made.apply_rules()
    first, second = made.fates()
    assert isinstance(first, Unmapped)
    assert first.why.startswith("written again")
    assert isinstance(second, Became)
    assert made.written("algorithm.prompts") == 9


def test_their_defaults_are_written_out_where_they_are_not_ours() -> None:
    made = draft()
    made.apply_rules()
    assert made.config["algorithm"] == {"prompts": 1024}
    assert made.assumed == [
        ("algorithm.prompts: 1024", "the default of a.prompts there"),
        ("actor.compute: bf16", "our default; that of a.dtype there, fp8, has no word here"),
    ]


def test_keys_of_ours() -> None:
    assert has_key("algorithm.rollout_steps", "mlp")
    assert has_key("cluster.component_placement", "mlp")
    assert not has_key("algorithm.rollout_steps", "causal_lm")
    assert not has_key("actor.optimiser", "mlp")
    assert (default_of("algorithm.epochs", "mlp"), default_of("algorithm.epochs", "causal_lm")) == (10, 1)
    assert default_of("env.id", "mlp") is None
    assert list(ordered({"actor": {}, "cluster": {"component_placement": {}, "num_nodes": 1}}, "mlp")) == [
        "cluster",
        "actor",
    ]
    missing, refused = find_refusals({"cluster": {"component_placement": {}}, "algorithm": {"gamma": 2}})
    assert missing == ["env.id"]
    assert [p.code for p in refused] == ["out-of-bounds"]
