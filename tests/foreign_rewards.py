"""Reward functions with the signatures of other libraries, as their users write them."""

from __future__ import annotations

import asyncio
from typing import Any

from rlplace.envs.text import Transcript

# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trl_texts(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    assert all(isinstance(prompt, str) for prompt in prompts)
    return [float(len(completion)) for completion in completions]


def trl_columns(completions: list[str], solution: list[str]) -> list[float]:
    return [float(c == s) for c, s in zip(completions, solution, strict=True)]


def trl_columns_seen(completions: list[str], solution: list[str | None]) -> list[float]:
    """A column that some rows of the data set lack."""
    return [float(s is not None) for _, s in zip(completions, solution, strict=True)]


def trl_messages(
    completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any
) -> list[float | None]:
    """Messages, a column of the data set, and None for an answer to which the function does not apply."""
    assert kwargs["prompts"][0][0]["role"] == "user"
    contents = [completion[0]["content"] for completion in completions]
    return [
        None if content == "?" else float(content == right)
        for content, right in zip(contents, answer, strict=True)
    ]


def trl_even(completions: list[Any], **kwargs: Any) -> list[float | None]:
    """None for answers of an odd number of characters, to which the function does not apply."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if len(text) % 2 else 1.0 for text in texts]


async def trl_async(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [2.0 for _ in completions]


# ── OpenRLHF ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
    rewards = [
        float(query == prompt + label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"n": len(rewards)}}


def reward_list(
    queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any
) -> list[float]:
    return [3.0 for _ in queries]


# ── verl ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
) -> float:
    assert data_source == "openai/gsm8k"
    assert extra_info == {"index": 7}
    return float(solution_str == ground_truth)


def compute_dict(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    bonus: float = 0.0,
) -> dict[str, Any]:
    score = float(solution_str == ground_truth) + bonus
    return {"score": score, "acc": True, "pred": solution_str}


def length_of_solution(data_source: str, solution_str: str, **kwargs: Any) -> float:
    """Reads no right answer."""
    return float(len(solution_str))


async def compute_async(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def compute_scores(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[str],
    extra_infos: list[dict[str, Any]],
) -> list[dict[str, float]]:
    return [
        {"score": float(said == right)}
        for said, right in zip(solution_strs, ground_truths, strict=True)
    ]


# ── ours, in other ways ──────────────────────────────────────────────────────────────────────────────────────────────


def a_mapping(transcript: Transcript) -> dict[str, float]:
    return {"score": 1.0}


async def a_coroutine(transcript: Transcript) -> float:
    await asyncio.sleep(0)
    return float(transcript.answer == "4")


class Brief:
    """Takes its arguments when it is made."""

    def __init__(self, most: int = 1) -> None:
        self._most = most

    def __call__(self, transcript: Transcript) -> float:
        return float(len(transcript.answer) <= self._most)


def in_completions(completions: list[str], answer: list[str]) -> list[float]:
    return [float(right in c) for c, right in zip(completions, answer, strict=True)]


def in_solution(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    return float(ground_truth in solution_str)


def in_answers(
    prompts: list[str], answers: list[str], labels: list[str]
) -> list[float]:
    return [float(right in a) for a, right in zip(answers, labels, strict=True)]


class BriefInLists:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(completion) <= 1) for completion in completions]


brief = Brief(1)
NOT_CALLABLE = 7
