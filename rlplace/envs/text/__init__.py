"""Text tasks: prompts, conversations and rewards for language models. Importing this imports no other library."""

from rlplace.envs.text.contract import (
    Image,
    Message,
    NextTurn,
    OneTurn,
    Prompt,
    RawText,
    Sampled,
    Split,
    TextEpisode,
    TextTask,
    ToolCall,
    Transcript,
)

__all__ = [
    "Image",
    "Message",
    "NextTurn",
    "OneTurn",
    "Prompt",
    "RawText",
    "Sampled",
    "Split",
    "TextEpisode",
    "TextTask",
    "ToolCall",
    "Transcript",
]
