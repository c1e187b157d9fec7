"""Drawing tokens from logits, against distributions small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlplace.workers.engines.contract import Sampling, answer_seed
from rlplace.workers.engines.token_choice import choose, draw
from tests.tiny_lm import request_of

HALF_THIRD_SIXTH = torch.tensor([math.log(p) for p in (1 / 6, 1 / 2, 1 / 3)])


@pytest.mark.parametrize(
    ("sampling", "uniform", "token", "probability"),
    [
        # The distribution stands in the order of the vocabulary: 1/6, 1/2, 1/3.
        (Sampling(), 0.0, 0, 1 / 6),
        (Sampling(), 0.166, 0, 1 / 6),
        (Sampling(), 0.167, 1, 1 / 2),
        (Sampling(), 0.667, 2, 1 / 3),
        (Sampling(), 1 - 2**-53, 2, 1 / 3),
        # Squared and renormalised: 1/14, 9/14, 4/14.
        (Sampling(temperature=0.5), 0.07, 0, 1 / 14),
        (Sampling(temperature=0.5), 0.71, 1, 9 / 14),
        (Sampling(temperature=0.5), 0.72, 2, 4 / 14),
        # What is cut off: the likeliest stand first, 3/5 and 2/5.
        (Sampling(top_k=2), 0.59, 1, 3 / 5),
        (Sampling(top_k=2), 0.61, 2, 2 / 5),
        (Sampling(top_k=1), 0.99, 1, 1.0),
        (Sampling(top_k=50), 0.99, 2, 1 / 3),
        (Sampling(top_p=0.6), 0.99, 2, 2 / 5),
        (Sampling(top_p=0.4), 0.99, 1, 1.0),
        (Sampling(top_p=1e-9), 0.99, 1, 1.0),
        # First top_k, then the nucleus of what it left: 3/5 alone is above 0.55.
        (Sampling(top_k=2, top_p=0.55), 0.99, 1, 1.0),
    ],
)
def test_the_token_at_a_point_of_the_distribution(
    sampling: Sampling, uniform: float, token: int, probability: float
) -> None:
    tokens, logprobs = draw(HALF_THIRD_SIXTH[None], sampling, [uniform])
    assert tokens.tolist() == [token]
    assert logprobs.tolist() == pytest.approx([math.log(probability)], abs=1e-6)


def test_rows_are_drawn_by_their_own_numbers() -> None:
    logits = HALF_THIRD_SIXTH.expand(3, -1)
    tokens, logprobs = choose(logits, Sampling(), [0.9, None, 0.1])
    assert tokens.tolist() == [2, 1, 0]
    assert logprobs.exp().tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 6])


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    impossible = float("-inf")
    logits = torch.tensor([[impossible, 0.0, impossible, 0.0, impossible]])
    drawn = {int(draw(logits, Sampling(), [k / 97])[0]) for k in range(97)} | {int(draw(logits, Sampling(), [0.5])[0])}
    assert drawn == {1, 3}


def test_a_greedy_row_keeps_the_logprob_of_the_model_where_others_are_cut_off() -> None:
    logits = HALF_THIRD_SIXTH.expand(2, -1)
    _, logprobs = choose(logits, Sampling(temperature=0.1, top_k=1), [None, 0.5])
    assert logprobs.exp().tolist() == pytest.approx([1 / 2, 1.0])


def test_every_answer_has_a_seed_of_its_own() -> None:
    seeds = {
        answer_seed(seed, request_of(group, iteration=iteration, turn=turn), sample)
        for seed in range(3)
        for group in range(3)
        for iteration in range(3)
        for turn in range(3)
        for sample in range(3)
    }
    assert len(seeds) == 3**5
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert answer_seed(0, request_of(0), 0) == answer_seed(0, request_of(0, env_rank=1, longest=9), 0)
