"""The rules of all importers: what they name exists, and how the interpreter applies them."""

from __future__ import annotations

import pytest

from rlplace.config.fields import JobName
from rlplace.config.keys import PLACEMENT
from rlplace.config.read import try_config
from rlplace.imports.importer import (
    LANGUAGE_MODEL,
    SIMULATOR,
    Draft,
    MappingResult,
    ordered,
)
from rlplace.imports.rules import Rules, read_rules, shape_of
from rlplace.imports.settings import Setting

LIBRARIES = ("openrlhf", "slime", "rlinf", "verl", "roll", "skyrl", "areal")


@pytest.mark.parametrize(
    ("library", "job"),
    [("rlinf", "simulator"), *((name, "language_model") for name in LIBRARIES)],
)
def test_rules_name_keys_of_ours_and_have_reasons(library: str, job: JobName) -> None:
    rules = read_rules(library, job)
    drafts = [Draft([], rules, target) for target in (SIMULATOR, LANGUAGE_MODEL)]
    for key, rule in [*rules.rules.items(), *rules.groups.items()]:
        for ours in rule.keys:
            plain = PLACEMENT if ours.startswith(f"{PLACEMENT}.") else ours
            assert any(draft.has_key(plain) for draft in drafts), f"{key}: {ours}"
        reasons = [text for text in (rule.why, rule.otherwise, rule.note) if text]
        assert reasons or rule.keys, key
        assert all(text[0].islower() and not text.endswith(".") for text in reasons), (
            key
        )
    assert set(rules.words_after) <= set(rules.rules)
    assert set(rules.spellings.values()) <= set(rules.rules)


RULES = {
    "set": {
        "a.prompts|old_prompts": {"to": "algorithm.prompts", "theirs": 1024},
        "a.micro": ["actor.micro_batch", "critic.micro_batch"],
        "a.dtype": {"to": "actor.compute", "words": {"bf16": "bf16"}, "theirs": "fp8"},
        "a.lr": "actor.optimizer.rate",
        "a.reward": "reward.micro_batch",
        "a.eval": {"to": "runner.eval_every", "least": 1},
        "a.drop": {
            "to": "algorithm.dynamic_sampling",
            "note": "groups are not replaced",
        },
    },
    "part": {"cluster.num_nodes": ["a.nodes"]},
    "holds": {"so it is everywhere": ["a.same"]},
    "holds_for": {
        "a.zero": {"value": 3, "why": "so it is", "otherwise": "it is always 3"}
    },
    "unmapped": {
        "has no key": ["a.name"],
        "has no key, all of b": ["b.*"],
        "has no key, all of b.c": ["b.c.*"],
    },
}


def draft(*settings: tuple[str, object]) -> Draft:
    made = Draft(
        [Setting(key=k, value=v, written=f"{k}={v}") for k, v in settings],
        Rules("x", [RULES]),
    )
    made.set(f"{PLACEMENT}.actor", "0-7")
    return made


def result(key: str, value: object) -> MappingResult:
    made = draft((key, value))
    made.apply_rules()
    return made.results()[0]


@pytest.mark.parametrize(
    ("key", "value", "outcome", "text"),
    [
        ("a.prompts", 8, "equal", "algorithm.prompts: 8"),
        ("a.micro", 2, "equal", "actor.micro_batch: 2"),
        ("a.dtype", "bf16", "equal", "actor.compute: bf16"),
        (
            "a.dtype",
            "int3",
            "unmapped",
            "actor.compute has no word for int3; there are words for bf16",
        ),
        (
            "a.drop",
            True,
            "differs",
            "algorithm.dynamic_sampling: true; groups are not replaced",
        ),
        ("a.eval", 5, "equal", "runner.eval_every: 5"),
        ("a.eval", -1, "implied", "off, as it is here unless it is asked for"),
        ("a.same", 1, "implied", "so it is everywhere"),
        ("a.zero", 3, "implied", "so it is"),
        ("a.zero", 2, "unmapped", "it is always 3"),
        (
            "a.nodes",
            2,
            "unmapped",
            "not enough to decide cluster.num_nodes, which keeps its default",
        ),
        ("a.lr", 1, "unmapped", "no key actor.optimizer.rate in such a job"),
        ("a.name", 1, "unmapped", "has no key"),
        ("a.reward", 1, "unmapped", "the job has no reward"),
        (
            "a.prompts",
            None,
            "unmapped",
            "has no value: algorithm.prompts keeps its default",
        ),
        ("b.x", 1, "unmapped", "has no key, all of b"),
        ("b.c.x", 1, "unmapped", "has no key, all of b.c"),
        ("a.promts", 1, "unknown", "a.prompts"),
        ("old_prompt", 1, "unknown", "old_prompts"),
        ("zzz", 1, "unknown", ""),
        ("$@", None, "unmapped", "filled in by the shell when the script runs"),
    ],
)
def test_results(key: str, value: object, outcome: str, text: str) -> None:
    found = result(key, value)
    assert (found.outcome, found.text) == (outcome, text)


def test_the_last_of_two_wins_and_the_first_is_reported() -> None:
    made = draft(("a.prompts", 8), ("a.prompts", 9))
    made.apply_rules()
    assert [r.outcome for r in made.results()] == ["unmapped", "equal"]
    assert made.at("algorithm.prompts") == 9


def test_their_defaults_are_written_out_where_they_are_not_ours() -> None:
    made = draft()
    made.apply_rules()
    assert made.config["algorithm"] == {"prompts": 1024}
    assert made.assumed == [
        ("algorithm.prompts: 1024", "the default of a.prompts there"),
        (
            "actor.compute: bf16",
            "our default; that of a.dtype there, fp8, has no word here",
        ),
    ]


def test_keys_of_ours() -> None:
    text = Draft([], Rules("x", [{}]))
    simulator = Draft([], Rules("x", [{}]), SIMULATOR)
    assert text.has_key("actor.optimizer.warmup_steps")
    assert not simulator.has_key("actor.optimizer.warmup_steps")
    assert not text.has_key("actor.optimiser")
    assert (
        text.default_of("algorithm.epochs"),
        simulator.default_of("algorithm.epochs"),
    ) == (1, 10)
    assert simulator.default_of("env.id") == ""
    mapping = {"actor": {}, "cluster": {"component_placement": {}, "num_nodes": 1}}
    assert list(ordered(mapping, "simulator")["cluster"]) == [
        "num_nodes",
        "component_placement",
    ]


@pytest.mark.parametrize(
    "name", ["moonlight-16b-a3b", "deepseek-r1", "qwen3-30b-a3b", "llama-3-8b"]
)
def test_the_shape_of_a_known_model_is_accepted(name: str) -> None:
    shape = shape_of(name)
    assert shape is not None
    model = {"kind": "causal_lm", **shape}
    _, problems = try_config({"actor": {"model": model}})
    assert [p.key for p in problems if p.key.startswith("actor.model")] == []
