"""How the model of a task writes calls of tools: by the config, or as the model's chat template tells."""

from __future__ import annotations

from rlplace.envs.registry import named
from rlplace.envs.text.tool_calls import FORMATS, Parser, format_of


class CallFormat:
    """The reader of the calls of a model, for a task.

    `parser`: None until it is known.
    """

    def __init__(self, name: str | None) -> None:
        """Take the format of the config. Raises ConfigError if there is none with this name.

        `name`: a key of FORMATS, or a function of the user's, (answer, tools) -> Parsed; None: `read_example` finds it.
        """
        self.parser: Parser | None = None
        if name is not None:
            self.parser = _named(name)

    def read_example(self, written: str) -> None:
        """Find the format by the text that the chat template makes of EXAMPLE_CALL, unless the config names one."""
        form = format_of(written)
        if self.parser is None and form is not None:
            self.parser = FORMATS[form]


def _named(name: str) -> Parser:
    """Return the reader of calls with this name. Raises ConfigError if there is none."""
    shipped = {each: f"rlplace.envs.text.tool_calls:{each}" for each in FORMATS}
    found: Parser = named(
        name,
        shipped,
        key="env.kwargs.tool_format",
        code="unknown-task",
        noun="form of calls",
    )
    return found
