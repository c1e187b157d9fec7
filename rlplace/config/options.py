"""Command-line options whose errors have the standard error form."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from rlplace.config.paths import at_home
from rlplace.errors import ConfigError, did_you_mean, suggestion

# dashes that word processors and chats write instead of a hyphen
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_NUMBERS = {"int": "is no whole number", "float": "is no number"}


def _at_home(word: str) -> str:
    """Expand the `~` in `--option=~/path`, which a shell does not expand."""
    option, equals, value = word.partition("=")
    if equals and word.startswith("-"):
        return f"{option}={at_home(value)}"
    return word


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError [bad-option] instead of ending the program."""

    words: Sequence[str] = ()  # words of the parsed command line

    def __init__(
        self,
        command: str,
        *,
        word_of: Callable[[str, str], str | None] = lambda name, value: None,
        **options: Any,
    ) -> None:
        """`command`: the command as typed. `word_of`: returns the key=value that an unknown option probably means."""
        super().__init__(prog=command, allow_abbrev=False, **options)
        self._word_of = word_of

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = self.words or (sys.argv[1:] if args is None else [*args])
        for word in self.words:
            if word.startswith(tuple(DASHES)) and self._near(word):
                raise self._unknown(word)
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_at_home(word) for word in words], namespace)

    def refuse_unknown(self, rest: Sequence[str], others: Collection[str]) -> None:
        """Raise ConfigError for an option in `rest` that no other parser knows either."""
        for word in rest:
            if word.startswith("-") and word.partition("=")[0] not in others:
                raise self._unknown(word)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError for an error of argparse."""
        if unknown := re.match(r"unrecognized arguments: (\S*)", message):
            raise self._unknown(unknown[1])
        if missing := re.match(r"the following arguments are required: (.*)", message):
            key = missing[1].partition(", ")[0]
            fix = " ".join([self.prog, *(f"<{name}>" for name in self._positional())])
            raise _wrong(key, "is missing", None, self._takes(), fix)
        if named := re.match(r"argument ([^:]+): (.*)", message):
            option = named[1].partition("/")[0]
            action = next(
                (a for a in self._actions if option in (*a.option_strings, a.metavar)),
                None,
            )
            example = (
                f"{option} {self._example(action)}"
                if action is not None
                else "see --help"
            )
            help_ = None if action is None else action.help
            if (
                action is not None
                and action.choices
                and (got := re.search("invalid choice: (['\"])(.*?)\\1 ", named[2]))
            ):
                near = did_you_mean(got[2], action.choices)
                what = f"no such {option.lstrip('-')}" + suggestion(near)
                why = "one of " + ", ".join(action.choices)
                raise _wrong(
                    option,
                    what,
                    got[2],
                    why,
                    f"{option} {near or next(iter(action.choices))}",
                )
            if got := re.match("invalid (int|float) value: (['\"])(.*)\\2", named[2]):
                raise _wrong(option, _NUMBERS[got[1]], got[3], help_, example)
            if got := re.match("ignored explicit argument (['\"])(.*)\\1", named[2]):
                raise _wrong(
                    option, "takes no value", f"{option}={got[2]}", help_, option
                )
            what = "it has no value" if "expected" in named[2] else named[2]
            raise _wrong(option, what, None, help_, example)
        raise _wrong(self.prog, message, None, self._takes(), "see --help")

    def _unknown(self, word: str) -> ConfigError:
        name, _, value = word.lstrip("-" + DASHES).partition("=")
        after = [*self.words, ""][[*self.words, word].index(word) + 1 :]
        got = word
        following = after[0] if after and not after[0].startswith("-") else ""
        if not value and following:
            value = following
            got = f"{word} {following}"
        near = self._near(word)
        option = word.partition("=")[0]
        if not word.startswith(("-", *(DASHES if near else ""))):
            shown = word or "''"
            return _wrong(
                shown,
                "is one word too many",
                " ".join(self.words),
                self._takes(),
                f"leave out {shown}",
            )
        if (
            near is None
            and (meant := self._word_of(name.replace("-", "_"), value)) is not None
        ):
            return _wrong(
                option,
                "no such option; it is a key",
                got,
                "keys are written key=value, without dashes",
                meant,
            )
        fix = f"{near} {value}".strip() if near else f"leave out {word}"
        choices = next(
            (
                action.choices
                for action in self._actions
                if "--format" in action.option_strings
            ),
            None,
        )
        if near is None and name in (choices or ()):
            near = "--format"
            fix = f"--format {name}"
        return _wrong(
            option, "no such option" + suggestion(near), got, self._takes(), fix
        )

    def _near(self, word: str) -> str | None:
        option = word.partition("=")[0]
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        begun = (
            name
            for name in known
            if option.startswith("--") and len(option) > 2 and name.startswith(option)
        )
        return next(begun, None) or did_you_mean(
            f"--{option.lstrip('-' + DASHES)}", known
        )

    def _takes(self) -> str:
        options = [
            action.option_strings[0]
            for action in self._actions
            if action.option_strings and action.dest != "help"
        ]
        return (
            f"it takes {', '.join([*self._positional(), *options])}; --help says more"
        )

    def _positional(self) -> list[str]:
        return [
            str(action.metavar or action.dest)
            for action in self._actions
            if not action.option_strings
        ]

    @staticmethod
    def _example(action: argparse.Action) -> str:
        if action.choices:
            return str(next(iter(action.choices)))
        if isinstance(action.default, int):
            return f"{action.default}"
        return f"<{action.metavar or action.dest.upper()}>"


def _wrong(
    key: str, what: str, got: str | None, why: str | None, fix: str
) -> ConfigError:
    return ConfigError.of("bad-option", key, what, got, why, fix)
