"""Text tasks: prompts, conversations and rewards for language models; importing this imports no library of theirs."""

from rlplace.envs.text.contract import Message, OneTurn, Prompt, Split, TextEpisode, TextTask, Transcript
from rlplace.envs.text.registry import check, find_task, make_task

__all__ = [
    "Message",
    "OneTurn",
    "Prompt",
    "Split",
    "TextEpisode",
    "TextTask",
    "Transcript",
    "check",
    "find_task",
    "make_task",
]
