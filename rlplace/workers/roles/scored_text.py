"""What judges read of a sample: its tokens as they are, or the conversation in another model's words and as plain text.

::

    tokens of the policy ──▶ a reward model with the same tokenizer
    transcript           ──▶ a reward model with another: its chat template, its tokens     the only text that becomes
    transcript, tokens   ──▶ a function: prompts, answers   an endpoint: query, prompts     tokens again, and nothing
                                                                                            of it is ever trained on
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from rlplace.envs.text import Message, Transcript
from rlplace.models.tokenizer import Tokenizer, Tokens
from rlplace.placement.language.spec import role_of
from rlplace.tokens import Sample
from rlplace.workers.llm_job import LlmJob


def reads_text(job: LlmJob, component: str) -> bool:
    """Whether its samples need their transcripts, which an env rank adds for it."""
    if role_of(component) != "reward":
        return False
    block = job.config.reward_of(component)
    own = (block.model or {}).get("path")
    return block.kind != "model" or (own is not None and not same_tokens(job.model, Path(str(own))))


def same_tokens(one: Path, other: Path) -> bool:
    """Whether an id means the same token in both folders."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if one == other or not files[1].is_file() or files[0].read_bytes() == files[1].read_bytes():
        return True  # a folder without a tokenizer was trained with the policy's
    return Tokenizer.load(one).ids == Tokenizer.load(other).ids


def retold(job: LlmJob, folder: Path) -> Callable[[Sample], Tokens]:
    """How the reward model in `folder` is shown an episode. Raises ConfigError: it has no chat template for a chat."""
    if same_tokens(job.model, folder):
        return lambda sample: sample.tokens
    tokenizer, env = Tokenizer.load(folder), job.config.text_env
    if not env.chat:
        return lambda sample: tokenizer.encode(plain(transcript_of(sample), env.system), special=True)
    tokenizer.render([Message("user", "-"), Message("assistant", "-")], answered=True)  # if it refuses, then now
    return lambda sample: tokenizer.chat(conversation(transcript_of(sample), env.system), answered=True)


def transcript_of(sample: Sample) -> Transcript:
    transcript = sample.transcript
    assert isinstance(transcript, Transcript), "env ranks add it for judges that read text"
    return transcript


def conversation(transcript: Transcript, system: str | None = None) -> list[Message]:
    """All that was said, in order."""
    prompt = transcript.prompt
    messages = [] if system is None else [Message("system", system)]
    messages += [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for answer, reply in itertools.zip_longest(transcript.answers, transcript.replies):
        messages.append(Message("assistant", answer))
        messages += [] if reply is None else [Message("user", reply)]
    return messages


def plain(transcript: Transcript, system: str | None = None) -> str:
    """All that was said, without roles."""
    return "\n".join(message.content for message in conversation(transcript, system))


def queries(samples: Sequence[Sample], tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The whole texts of episodes and their prompts, as the policy saw them: special tokens shown."""
    whole = [tokenizer.decode(sample.tokens, special=True) for sample in samples]
    firsts = [int(sample.mask.argmax()) if sample.learned else len(sample.tokens) for sample in samples]
    asked = [tokenizer.decode(s.tokens[:first], special=True) for s, first in zip(samples, firsts, strict=True)]
    return whole, asked
