"""Reward functions as users write them, on bad days too."""

from __future__ import annotations

import os
import re
from typing import Any

from rlplace.envs.text import Transcript


def length(transcript: Transcript, *, times: float = 1.0) -> float:
    return times * len(transcript.answer)


def process(transcript: Transcript) -> int:
    """Which process this is."""
    return os.getpid()


def not_a_number(transcript: Transcript) -> float:
    return float("nan")


def text(transcript: Transcript) -> Any:
    return "very good"


def raises(transcript: Transcript) -> float:
    return float({}[transcript.answer])


def hangs(transcript: Transcript) -> float:
    """In C code that lets no other thread run."""
    return float(bool(re.fullmatch(r"(a+)+", "a" * 50 + "b")))


def hangs_on_x(transcript: Transcript) -> float:
    return hangs(transcript) if transcript.answer == "x" else 1.0


def eats_memory(transcript: Transcript) -> float:
    return float(len(bytearray(2 << 30)))


def exits(transcript: Transcript) -> float:
    os._exit(3)
