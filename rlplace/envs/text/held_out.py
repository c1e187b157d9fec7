"""Compares the held-out prompts of a text task with those for training, and with the number that is asked for."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator

from rlplace.codes import problem
from rlplace.config.blocks.engine import ENDLESS_HELD_OUT
from rlplace.envs.text.contract import (
    Image,
    Prompt,
    TextTask,
    episode_identity,
    prompt_identity,
)
from rlplace.envs.text.tasks import PromptSet
from rlplace.errors import ConfigError, Problem
from rlplace.units import clipped

# Codes of the problems of this module, with which a job can run
WARNINGS = ("held-out-in-training", "few-held-out")
# Training episodes of an endless task that are compared
_COMPARED = 256
# Most prompts that are rendered for the comparison. The chat template takes 0.1 ms for each
_RENDERED = 50_000


def held_out_warnings(
    train: TextTask,
    held_out: TextTask,
    asked: int | None,
    rendered: Callable[[Prompt], str] | None = None,
) -> Iterator[Problem]:
    """Yield a warning if training prompts are in the held-out set, and one if there are too few held-out prompts.

    `train`, `held_out`: the task with the prompts of each split. `asked`: number of held-out prompts of an evaluation;
    None: all of them. `rendered`: returns a prompt as the text that the model reads, or raises ConfigError. Prompts are
    compared by this text; if `rendered` is None, or if there are very many prompts, by their messages.
    """
    size = held_out.size
    if size is not None and asked is not None and asked > size:
        yield problem(
            "few-held-out",
            "runner.eval_prompts",
            f"eval_prompts: {asked}",
            size=size,
        )
    if not (hasattr(train, "identity") or isinstance(train, PromptSet)):
        # The episodes of a custom task may take long to begin.
        return
    # An endless task is compared by its first episodes.
    tested = range(size if size is not None else asked or ENDLESS_HELD_OUT)
    learned = range(train.size if train.size is not None else _COMPARED)
    # Digests are stored in place of texts: they take about a tenth of the memory
    shown = prompt_identity
    if rendered is not None and len(tested) + len(learned) <= _RENDERED:
        shown = functools.partial(_as_read, rendered)
    trained = {_digest(identity) for identity in _identities(train, learned, shown)}
    if not trained:
        return
    different = dict.fromkeys(_identities(held_out, tested, shown))
    both = [identity for identity in different if _digest(identity) in trained]
    if both:
        yield problem(
            "held-out-in-training",
            "env.eval_kwargs",
            repr(clipped(both[0], 60)),
            both=len(both),
            different=len(different),
        )


def _digest(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode(errors="replace"), digest_size=16).digest()


def _as_read(rendered: Callable[[Prompt], str], prompt: Prompt) -> str:
    """Return a prompt as the text that the model reads, with the sources of its images."""
    try:
        text = rendered(prompt)
    except ConfigError:
        # Another check reports this error
        return prompt_identity(prompt)
    images: list[Image] = []
    if not isinstance(prompt, str):
        images = [image for message in prompt for image in message.images]
    if not images:
        return text
    return f"{text}{images!r}"


def _identities(
    task: TextTask, numbers: Iterable[int], shown: Callable[[Prompt], str]
) -> Iterator[str]:
    """Yield a text for each episode: equal episodes have equal texts. Yield nothing if the task has no such texts.

    `shown`: returns the text of a prompt.
    """
    identities = (episode_identity(task, number, shown) for number in numbers)
    for identity in itertools.takewhile(lambda found: found is not None, identities):
        assert identity is not None, "takewhile has ended before it"
        yield identity
