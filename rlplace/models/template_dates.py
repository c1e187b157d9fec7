"""Warns of chat templates that write the present date into prompts, so that prompts change every day (Llama 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.codes import problem
from rlplace.envs.text.contract import Message
from rlplace.errors import ConfigError, Problem

if TYPE_CHECKING:  # imports NumPy, and every command imports this module
    from rlplace.models.tokenizer import Tokenizer

# Code of the warning
WARNING = "template-writes-date"
# Variable by which templates of Llama 3 take another date
_VARIABLE = "date_string"


def date_problems(folder: Path, arguments: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a warning if the chat template of a model writes the present date or time into prompts.

    Prompts of a resumed run and of a later evaluation then differ from those of the training. `folder`: the model's
    folder. `arguments`: values for the template, `env.template` of the config.
    """
    from rlplace.models.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder)
        template = tokenizer.chat_template
        if template is None or not _writes_date(tokenizer, arguments):
            return
    # Other checks report a tokenizer or a template that does not work
    except (ConfigError, ModuleNotFoundError):
        return
    error = "variable" if _VARIABLE in template else "file"
    yield problem(
        WARNING,
        "env.template",
        "strftime_now(...)",
        error=error,
        folder=folder,
        variable=_VARIABLE,
    )


def _writes_date(tokenizer: Tokenizer, arguments: Mapping[str, object]) -> bool:
    """Return whether the template asks for the present date in a chat of one message. Raises ConfigError."""
    asked: list[str] = []

    def strftime_now(form: str) -> str:
        asked.append(form)
        return form

    values = {**arguments, "strftime_now": strftime_now}
    tokenizer.render([Message("user", "1 + 1?")], arguments=values)
    return bool(asked)
