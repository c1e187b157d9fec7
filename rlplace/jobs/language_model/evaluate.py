"""Have a trained language model answer held-out prompts, as the evaluations of a run do."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.checkpoints import write_whole
from rlplace.codes import config_error
from rlplace.contract.requests import Evaluation, EvaluationRequest
from rlplace.errors import OutputError
from rlplace.trained import Trained

# Standard errors on each side of a mean: 95 % of a normal distribution
_CONFIDENCE = 1.96


def evaluate(trained: Trained, request: EvaluationRequest) -> Evaluation:
    """Answer held-out prompts with a trained model, write the transcripts, and return a summary of the rewards.

    Raises ConfigError, OutputError, WorkerError.
    """
    if request.video is not None:
        raise config_error(
            "bad-option", "video", str(request.video), error="video-of-language-model"
        )
    from rlplace.workers.roles.evaluation import answers

    assert trained.checkpoint is not None, (
        "of a language model, only checkpoints are found"
    )
    began = time.perf_counter()
    found = trained.checkpoint
    samples = answers(
        trained.config,
        trained.weights,
        prompts=request.episodes or trained.config.runner.eval_prompts,
        greedy=request.deterministic,
        seed=request.seed,
    )
    file = request.transcripts or found.run / f"evaluation_{found.iteration:06}.jsonl"
    try:
        write_whole(
            file,
            "".join(
                json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples
            ),
        )
    except OSError as error:
        raise OutputError.of(file, error, "transcripts", "a file") from error
    scored = [sample for sample in samples if sample["reward"] is not None]
    rewards = [sample["reward"] for sample in scored]
    mean = statistics.fmean(rewards) if rewards else None
    around = _around([(_identity(sample), sample["reward"]) for sample in scored])
    report: dict[str, Any] = {
        "policy": trained.text,
        "task": trained.config.env.task,
        "prompts": len(samples),
        "prompts_different": len({_identity(sample) for sample in samples}),
        "prompts_asked_for": request.episodes,
        "deterministic": request.deterministic,
        "seed": request.seed,
        "reward": mean,
        "confidence_95": None
        if mean is None or around is None
        else [mean - around, mean + around],
        "poisoned": len(samples) - len(rewards),
        "tokens": statistics.fmean(sample["tokens"] for sample in samples),
        "transcripts": str(file),
        "seconds": time.perf_counter() - began,
    }
    return Evaluation(report=report, rows=_rows(report))


def _identity(sample: Mapping[str, Any]) -> str:
    """Return a text that is equal for samples of equal prompts. A plain text equals one message of the user."""
    prompt = sample["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return json.dumps(prompt, sort_keys=True)


def _around(rewards: Sequence[tuple[str, float]]) -> float | None:
    """Return how far a confidence interval reaches to each side of the mean reward; None for fewer than two prompts.

    `rewards`: (prompt, reward) of each sample. Samples of equal prompts are one observation, since an answer to the
    same prompt says nothing of other prompts: the interval is of different prompts (a cluster-robust standard error).
    """
    mean = statistics.fmean(reward for _, reward in rewards) if rewards else 0.0
    deviations: dict[str, float] = {}
    for prompt, reward in rewards:
        deviations[prompt] = deviations.get(prompt, 0.0) + reward - mean
    different = len(deviations)
    if different < 2:
        return None
    spread = sum(deviation**2 for deviation in deviations.values())
    variance = spread * different / (different - 1) / len(rewards) ** 2
    return _CONFIDENCE * math.sqrt(variance)


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    drawn = (
        "the most likely answers"
        if report["deterministic"]
        else f"answers drawn as in training, seed {report['seed']}"
    )
    prompts = f"{report['prompts']} held-out prompts"
    if report["prompts_different"] < report["prompts"]:
        prompts += f" ({report['prompts_different']} different ones)"
    wanted = report["prompts_asked_for"]
    if wanted is not None and wanted > report["prompts"]:
        prompts += f" (there are no {wanted} different ones)"
    between = report["confidence_95"]
    reward = (
        "none: no answer has a reward"
        if report["reward"] is None
        else f"{report['reward']:.3f}"
    )
    if between is not None:
        reward += f"   (95 % confidence: {between[0]:.3f} to {between[1]:.3f})"
    rows = [
        ("policy", report["policy"]),
        ("task", f"{report['task']}, {prompts}, {drawn}"),
        ("reward", reward),
        *(
            [("poisoned", f"{report['poisoned']} left out: not finite")]
            if report["poisoned"]
            else []
        ),
        (
            "answers",
            f"{report['tokens']:,.1f} tokens in the mean; what was said: {report['transcripts']}",
        ),
        ("seconds", f"{report['seconds']:.1f}"),
    ]
    return rows
