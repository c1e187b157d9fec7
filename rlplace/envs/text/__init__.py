"""Text tasks: prompts, conversations and rewards for language models. Importing this imports no other library."""

from rlplace.envs.text.contract import (
    Image,
    Message,
    OneTurn,
    Prompt,
    Split,
    TextEpisode,
    TextTask,
    Transcript,
)

__all__ = [
    "Image",
    "Message",
    "OneTurn",
    "Prompt",
    "Split",
    "TextEpisode",
    "TextTask",
    "Transcript",
]
