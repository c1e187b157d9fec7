"""Text tasks: prompts, conversations and rewards for language models; importing this imports no library of theirs."""

from rlplace.envs.text.contract import Message, OneTurn, Prompt, Split, TextEpisode, TextTask, Transcript

__all__ = ["Message", "OneTurn", "Prompt", "Split", "TextEpisode", "TextTask", "Transcript"]
