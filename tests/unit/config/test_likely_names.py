"""Words of names: which known name is meant by an unknown one, and whether it is sure."""

from __future__ import annotations

import pytest

from rlplace.config.likely_names import Known, is_said, likely_names, words_of

KNOWN = [
    Known("algorithm.num_minibatches"),
    Known("algorithm.target_kl"),
    Known("actor.optimizer.lr"),
    Known("actor.optimizer.min_lr_ratio"),
    Known("actor.optimizer.weight_decay"),
    Known("runner.eval_patience"),
    Known("runner.seed"),
    Known("algorithm.max_new_tokens"),
    Known("actor.token_budget"),
    Known(".save_last_checkpoint", is_whole=True),
    Known("replay.buffer_size"),
]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numEnvs", {"number", "env"}),
        ("fcnet_hiddens", {"hidden"}),
        ("cliprange", {"clip", "ratio"}),
        ("warm_up_steps", {"warmup", "step"}),
        ("learning_rate_schedule", {"lr", "schedule"}),
        ("entrpoy_coeff", {"entropy", "coef"}),
    ],
)
def test_the_words_of_a_name_are_those_of_the_field(name: str, words: set[str]) -> None:
    assert words_of(name) == words


@pytest.mark.parametrize(
    ("name", "above", "paths", "is_sure"),
    [
        ("minibatch_count", "algorithm", ["algorithm.num_minibatches"], True),
        ("kl_target", "algorithm", ["algorithm.target_kl"], True),
        ("random_seed", "runner", [], False),
        ("patience", "runner", ["runner.eval_patience"], False),
        ("wd", "actor.optimizer", ["actor.optimizer.weight_decay"], False),
        # A ratio to a rate is no rate
        ("min_lr", "actor.optimizer", ["actor.optimizer.min_lr_ratio"], False),
        # The fewest steps before learning are not the most that are kept
        ("min_size", "replay", [], False),
        ("max_size", "replay", ["replay.buffer_size"], False),
        # In the block itself first
        ("tokens", "actor", ["actor.token_budget"], False),
        # All words of the known name have to be there
        ("last", "checkpoint", [], False),
        ("save_last_ckpt", "runner", [".save_last_checkpoint"], True),
        ("icm_lr", "actor.optimizer", [], False),
        # No word that says anything
        ("per", "algorithm", [], False),
        ("", "algorithm", [], False),
    ],
)
def test_a_name_is_sure_only_if_no_word_is_lost_or_added(
    name: str, above: str, paths: list[str], is_sure: bool
) -> None:
    found = likely_names(name, above, KNOWN)
    assert [likely.known.path for likely in found][: len(paths) or None] == paths
    assert any(likely.is_sure for likely in found) is is_sure


def test_a_meaning_says_a_word_in_another_form() -> None:
    assert is_said("listen", "address at which the server listens")
    assert not is_said("port_of_ray", "address at which the server listens")
    assert not is_said("num", "num")


def test_words_that_the_block_says_anyway_are_no_lost_words() -> None:
    known = [Known("rollout.temperature"), Known("env.max_turns"), Known("actor.lr")]
    for name, above in (
        ("sampling_temperature", "rollout"),
        ("num_turns", "env"),
        ("policy_lr", "actor"),
    ):
        (likely,) = likely_names(name, above, known)
        assert likely.is_sure
    # In another block, the word may mean something
    found = likely_names("sampling_temperature", "algorithm", known)
    assert not any(likely.is_sure for likely in found)
