"""A parser of command-line options with errors in the standard form of rlplace."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from rlplace.codes import config_error
from rlplace.config.paths import at_home
from rlplace.errors import ConfigError, Problem, did_you_mean

# dashes that word processors and chats write instead of a hyphen
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


_CONFIG_NAME = "--config-name"
# Options of other programs for a config's file
_CONFIG_OPTIONS = ("config", "config_name", "config_file", "cfg_file", "yaml")
# Names of the argument with the folder of a run
_FOLDERS = ("run", "checkpoint", "folder", "path", "ckpt", "model", "dir", "name")


def _at_home(word: str) -> str:
    """Return a command-line word with `~` expanded in `--option=~/path`, since a shell does not expand it there."""
    option, equals, value = word.partition("=")
    if equals and word.startswith("-"):
        return f"{option}={at_home(value)}"
    return word


class Meaning(NamedTuple):
    """What is meant by an unknown option.

    `fix`: what to type in its place. `reason`: why, if it is more than another spelling.
    """

    fix: str
    reason: str | None = None


# Unknown option of a command line -> what is meant by it
Meanings = Mapping[str, Meaning]


def of_other_programs(
    words: Sequence[str], meant: Callable[[str, str], Meaning | None]
) -> Meanings:
    """Return what is meant by the options of a command line, for a command that has no config.

    `words`: the words of the command line. `meant`: a function that takes name and value of an option, and returns what
    is meant by it, or None. A name has no dashes at its beginning; a value may be empty.
    """
    found: dict[str, Meaning] = {}
    _, options = apart(words, (), lambda word: False)
    for option, values in options.items():
        meaning = meant(option.lstrip("-").replace("-", "_"), " ".join(values[:1]))
        if meaning is not None:
            found[option] = meaning
    return found


def apart(
    words: Sequence[str], known: Collection[str], is_config: Callable[[str], bool]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return (words without unknown options, unknown option -> its values).

    `known`: the known options. `is_config`: whether a word names a config; such a word is the value of no option.
    """
    kept: list[str] = []
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if _is_option(word):
            option, equals, value = word.partition("=")
            values = None
            if option in known:
                kept.append(word)
                continue
            values = options.setdefault(option, [])
            if equals:
                values.append(value)
                values = None
        elif values is None or "=" in word or is_config(word):
            values = None
            kept.append(word)
        else:
            values.append(word)
    return kept, options


def _is_option(word: str) -> bool:
    """Return whether a word is an option: it begins with a dash, and is no number."""
    return word.startswith("-") and not re.match(r"-\.?[0-9]", word)


class OptionParser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError with the code bad-option instead of ending the program.

    `words`: the words of the parsed command line.
    """

    words: Sequence[str] = ()
    _check: Callable[[str], object] | None = None

    def __init__(
        self,
        command: str,
        *,
        word_of: Callable[[str, str], str | None] = lambda name, value: None,
        reader: Callable[[Sequence[str]], Meanings] = lambda words: {},
        check: Callable[[str], object] | None = None,
        formats: Collection[str] = (),
        **options: Any,
    ) -> None:
        """Create a parser without options.

        `command`: the command as the user has typed it. `word_of`: a function that takes name and value of an unknown
        option, and returns the override `key=value` that the user probably means, or None. `reader`: a function that
        takes the words of a command line, and returns unknown option -> what is meant by it in the config that these
        words name. `check`: a function that
        takes the first argument, and raises ConfigError if nothing of this name exists; its problems are told together
        with those of the options. `formats`: values of the option --format, if argparse does not know them. `options`:
        further arguments for `argparse.ArgumentParser`.
        """
        super().__init__(prog=command, allow_abbrev=False, **options)
        self._word_of = word_of
        self._reader = reader
        self._read: Meanings | None = None
        self._check = check
        self._of_format = formats
        self._others: Collection[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = self.words or (sys.argv[1:] if args is None else [*args])
        for word in self.words:
            if word.startswith(tuple(DASHES)) and self._near(word):
                raise self._unknown(word)
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_at_home(word) for word in words], namespace)

    def refuse_unknown(self, rest: Sequence[str], others: Collection[str]) -> None:
        """Raise ConfigError if `rest` contains an unknown option.

        `rest`: words that this parser has not consumed. `others`: names of the options that a second parser, such as
        Hydra's, will consume.
        """
        self._others = others
        self._read = self._reader(rest)
        problems: list[Problem] = []
        for word in rest:
            if word.startswith("-") and word.partition("=")[0] not in others:
                problems += self._unknown(word).problems
        if problems:
            raise ConfigError(problems)

    def error(self, message: str) -> NoReturn:
        """Raise the ConfigError for an error of argparse. `message`: the error text of argparse."""
        raise self.with_missing(self._error_of(message))

    def with_missing(self, error: ConfigError) -> ConfigError:
        """Return an error about options, with the problem of a first argument that does not exist behind it."""
        first = self._first_argument()
        if self._check is None or first is None:
            return error
        try:
            self._check(first)
        except ConfigError as missing:
            return ConfigError([*error.problems, *missing.problems])
        return error

    def _first_argument(self) -> str | None:
        """Return the first word that is no option and no value of one; None without such a word.

        A word behind an unknown option is probably its value. If there is no other, it is the argument.
        """
        options: dict[str, argparse.Action] = {}
        for action in self._actions:
            options |= dict.fromkeys(action.option_strings, action)
        behind_unknown: list[str] = []
        before = ""
        for word in self.words:
            action_before = options.get(before)
            is_option = word.startswith("-")
            is_value = before.startswith("-") and "=" not in before
            before = word
            if is_option or "=" in word:
                continue
            if not is_value or (action_before is not None and action_before.nargs == 0):
                return word
            if action_before is None:
                behind_unknown.append(word)
        # An argument that may be left out is not looked for there
        if any(
            action.nargs == "?" for action in self._actions if not action.option_strings
        ):
            return None
        return next(iter(behind_unknown), None)

    def _error_of(self, message: str) -> ConfigError:
        """Return the ConfigError for an error of argparse. `message`: the error text of argparse."""
        if unknown := re.match(r"unrecognized arguments: (\S*)", message):
            return self._unknown(unknown[1])
        if missing := re.match(r"the following arguments are required: (.*)", message):
            names = [f"<{name}>" for name in self._positional()]
            return config_error(
                "bad-option",
                missing[1].partition(", ")[0],
                error="missing",
                takes=self._takes(),
                usage=" ".join([self.prog, *names]),
            )
        if named := re.match(r"argument ([^:]+): (.*)", message):
            return self._of_argument(named[1].partition("/")[0], named[2])
        return config_error(
            "bad-option",
            self.prog,
            error="of-command",
            message=message,
            takes=self._takes(),
        )

    def _of_argument(self, option: str, message: str) -> ConfigError:
        """Return the error about the option `option`. `message`: the error text of argparse."""
        action = None
        for known in self._actions:
            if option in (*known.option_strings, known.metavar):
                action = known
                break
        example = "see --help"
        explained = None
        if action is not None:
            example = f"{option} {self._example(action)}"
            explained = action.help
            wrong = re.search("invalid choice: (['\"])(.*?)\\1 ", message)
            if action.choices and wrong:
                return _not_a_choice(option, wrong[2], list(action.choices))
        if got := re.match("invalid int value: (['\"])(.*)\\1", message):
            return config_error(
                "bad-option",
                option,
                got[2],
                error="int",
                help=explained,
                example=example,
            )
        if got := re.match("ignored explicit argument (['\"])(.*)\\1", message):
            return config_error(
                "bad-option",
                option,
                f"{option}={got[2]}",
                error="without-value",
                help=explained,
                option=option,
            )
        error = "of-argument"
        if "expected" in message:
            error = "no-value"
        return config_error(
            "bad-option",
            option,
            error=error,
            message=message,
            help=explained,
            example=example,
        )

    def _unknown(self, word: str) -> ConfigError:
        name, _, value = word.lstrip("-" + DASHES).partition("=")
        after = [*self.words, ""][[*self.words, word].index(word) + 1 :]
        got = word
        following = "".join(after[:1])
        is_value = not _is_option(following) and "=" not in following
        if following and not value and is_value:
            value = following
            got = f"{word} {following}"
        near = self._near(word)
        option = word.partition("=")[0]
        # A word that is not an option
        dashes = ["-"]
        if near:
            dashes += DASHES
        if not word.startswith(tuple(dashes)):
            shown = word or "''"
            return config_error(
                "bad-option",
                shown,
                " ".join(self.words),
                error="word",
                takes=self._takes(),
                word=shown,
            )
        # A key with dashes, in the config of this command line
        if self._read is None:
            self._read = self._reader(self.words)
        meaning = self._read.get(option)
        if near is None and meaning is not None:
            error = "key-because" if meaning.reason else "key"
            return config_error(
                "bad-option",
                option,
                got,
                error=error,
                meant=meaning.fix,
                reason=meaning.reason,
            )
        key = None
        if near is None:
            key = self._word_of(name.replace("-", "_"), value)
        if key is not None:
            return config_error("bad-option", option, got, error="key", meant=key)
        # An option for what is an argument without one: --run runs/a
        if near is None and value and self._is_argument(name):
            return config_error(
                "bad-option", option, got, error="argument", value=value
            )
        # A format without its option
        meant = f"{near} {value}".strip()
        if near is None and name in self._formats():
            near = "--format"
            meant = f"--format {name}"
        error = "option"
        if near:
            error = "misspelt-option"
        return config_error(
            "bad-option",
            option,
            got,
            error=error,
            takes=self._takes(),
            word=word,
            near=near,
            meant=meant,
        )

    def _formats(self) -> Collection[str]:
        """Return the allowed values of the option --format; empty if the parser does not have this option."""
        if self._of_format:
            return self._of_format
        for action in self._actions:
            if "--format" in action.option_strings:
                return [str(choice) for choice in action.choices or ()]
        return ()

    def _is_argument(self, name: str) -> bool:
        """Return whether the name of an unknown option is that of an argument, or another word for it."""
        arguments = {argument.lower() for argument in self._positional()}
        if not arguments.isdisjoint(_FOLDERS):
            arguments |= {*_FOLDERS}
        return name.lower() in arguments

    def _near(self, word: str) -> str | None:
        option = word.partition("=")[0]
        plain = option.lstrip("-" + DASHES).replace("-", "_")
        if plain in _CONFIG_OPTIONS and _CONFIG_NAME in self._others:
            return _CONFIG_NAME
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
            if not action.option_strings and action.help != argparse.SUPPRESS
        ]

    @staticmethod
    def _example(action: argparse.Action) -> str:
        if action.choices:
            return str(next(iter(action.choices)))
        if isinstance(action.default, int):
            return f"{action.default}"
        return f"<{action.metavar or action.dest.upper()}>"


def _not_a_choice(option: str, got: str, choices: Sequence[Any]) -> ConfigError:
    """Return the error that `got` is not an allowed value of an option. `choices`: the allowed values."""
    near = did_you_mean(got, choices)
    error = "choice"
    if option in ("--cfg", "-c") and near is None:
        return config_error("bad-option", option, got, error="config", name=got)
    if near:
        error = "misspelt-choice"
    return config_error(
        "bad-option",
        option,
        got,
        error=error,
        name=option.lstrip("-"),
        choices=", ".join(choices),
        option=option,
        first=choices[0],
        near=near,
    )
