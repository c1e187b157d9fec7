"""The ledger against a model that sees at work: what an actor holds while nearly all tokens are of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.models.families import VISION_FAMILIES
from rlplace.tokens import Sample
from rlplace.workers.arguments import WEIGHTS
from rlplace.workers.worker import Rendezvous
from tests import memory_peaks
from tests.memory_peaks import LmJob, Reading
from tests.tiny_vlm import IMAGE, START, STOP, TURN, png, tiny_vlm
from tests.worker_ranks import in_processes, spec_of

MOST = 1.25  # times what is measured: it is counted as if all tokens were of images
PROMPT, ANSWER, SEEN = 260, 8, 256


def _seen(
    _: int, prompt: int = PROMPT, answer: int = ANSWER
) -> list[tuple[Sample, ...]]:
    """One group of four answers to one image."""
    tokens = np.array(
        [TURN, START, *[IMAGE] * SEEN, STOP, TURN, *[TURN] * answer], np.int32
    )
    mask, image = np.arange(len(tokens)) >= prompt, png(128, 128)
    sampled: dict[str, Any] = {
        "tokens": tokens,
        "mask": mask,
        "versions": np.where(mask, 0, -1).astype(np.int32),
    }
    sampled |= {
        "logprobs": np.where(mask, -3.0, 0.0).astype(np.float32),
        "images": (image,),
    }
    facts: dict[str, Any] = {"group": 0, "turns": 1, "truncated": False, "rewards": {}}
    return [
        tuple(
            Sample(sample=n, reward=float(n % 2), **sampled, **facts) for n in range(4)
        )
    ]


def _rank(job: LmJob, rank: int, rendezvous: Rendezvous, folder: Path) -> list[Reading]:
    memory_peaks.made_up = _seen  # in a process of its own
    return memory_peaks._lm_rank(job, rank, rendezvous, folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_what_is_held_is_foreseen(family: Any, tmp_path: Path) -> None:
    model = tiny_vlm(tmp_path / "model", family, hidden=192, most=SEEN)
    algorithm = {
        "share_prompts": False,
        "max_prompt_length": PROMPT,
        "max_new_tokens": ANSWER,
    }
    job = LmJob(
        model=model,
        trained={"token_budget": 2 * (PROMPT + ANSWER)},
        algorithm=algorithm,
    )
    (readings,) = in_processes(_rank, job, 1, channels=(spec_of(WEIGHTS),))
    (learned,) = (reading for reading in readings if reading.stage == "learn")
    assert learned.measured <= learned.predicted <= MOST * learned.measured
