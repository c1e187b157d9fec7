"""`python -m rlplace.completion bash|zsh|fish`: print a script that completes commands, configs, keys and values.

The script has all words in it, so that a completion starts no Python. Exit codes: 0 printed, 2 wrong usage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace import __version__
from rlplace.cli import evaluate, plan, search
from rlplace.codes import codes
from rlplace.commands import DONE, answered, typed
from rlplace.config import compose
from rlplace.config.completions import override_keys
from rlplace.config.keys import COMPONENTS
from rlplace.config.options import OptionParser
from rlplace.foresight.search import OBJECTIVES
from rlplace.imports.libraries import LIBRARIES
from rlplace.placement.memory.solve import Knob

SHELLS = ("bash", "zsh", "fish")
_SCRIPTS = Path(__file__).parent


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """What can follow a command.

    `options`: its options. `words`: first words and `key=` words. `after`: word -> the words that can follow it.
    `config`: whether the command takes a config and overrides.
    """

    options: tuple[str, ...] = ("--help",)
    words: tuple[str, ...] = ()
    after: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    config: bool = False


# The name of a task stands in the place of a config's
_CONFIGS = tuple(compose.config_names() | compose.group_names(compose.TASK))
_HYDRA = ("--config-name", "--config-dir", "--cfg", "--multirun", "--help")
_AFTER_HYDRA = {"--config-name": _CONFIGS, "--cfg": ("job", "hydra", "all")}
_TEXT_OR_JSON = {"--format": ("text", "json")}
COMMANDS: Mapping[str, Words] = {
    "train": Words(options=_HYDRA, after=_AFTER_HYDRA, config=True),
    "init": Words(),
    "plan": Words(
        options=(*_HYDRA, "--format", "--diff", "--measured", "--simulator"),
        words=("explain", "solve", "schema", "import"),
        after={
            **_AFTER_HYDRA,
            "--format": plan.FORMATS,
            "--diff": _CONFIGS,
            "explain": (*COMPONENTS, *codes()),
            "solve": tuple(knob.value for knob in Knob),
            "import": tuple(LIBRARIES),
        },
        config=True,
    ),
    "profile": Words(
        options=("--out", "--iterations", "--config-name", "--help"),
        after={"--config-name": _CONFIGS},
        config=True,
    ),
    "search": Words(
        options=(*_HYDRA, "--format", "--apply", "--probe"),
        words=tuple(f"{word}=" for word in search.WORDS),
        after={**_AFTER_HYDRA, "--format": search.FORMATS},
        config=True,
    ),
    "runs": Words(options=("--format", "--help"), after=_TEXT_OR_JSON),
    "replace": Words(
        options=("--timeout", "--help"),
        words=tuple(f"cluster.component_placement.{name}=" for name in COMPONENTS),
    ),
    "drain": Words(options=("--release", "--timeout", "--help")),
    "share": Words(
        options=("--plan", "--weights", "--priorities", "--timeout", "--help"),
        config=True,
    ),
    "report": Words(options=("--diff", "--out", "--open", "--help")),
    "evaluate": Words(
        options=("--format", "--help"),
        words=tuple(f"{word}=" for word in evaluate.WORDS),
        after=_TEXT_OR_JSON,
    ),
    "doctor": Words(options=("--format", "--help"), after=_TEXT_OR_JSON),
    "serve": Words(options=_HYDRA, after=_AFTER_HYDRA, config=True),
    "export": Words(
        options=("--adapter", "--component", "--ema", "--help"),
        after={"--component": ("actor", "critic")},
    ),
    "completion": Words(words=SHELLS),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the completion script of a shell, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    parser = OptionParser(
        typed("completion"),
        description="Prints a script with which a shell completes commands, configs, keys of overrides and values.",
    )
    parser.add_argument(
        "shell", metavar="SHELL", choices=SHELLS, help="bash, zsh, fish"
    )

    def command() -> int:
        print(script(parser.parse_args(argv).shell), end="")
        return DONE

    return answered(command)


def script(shell: str) -> str:
    """Return the completion script of a shell: "bash", "zsh" or "fish"."""
    lists = {
        "VERSION": __version__,
        "COMMANDS": " ".join(COMMANDS),
        "WITH_CONFIG": " ".join(name for name, has in COMMANDS.items() if has.config),
        "CONFIGS": " ".join(_CONFIGS),
        "KEYS": " ".join(sorted(_keys())),
    }
    cases = {
        "OPTIONS": {name: has.options for name, has in COMMANDS.items()},
        "WORDS": {name: has.words for name, has in COMMANDS.items() if has.words},
        "VALUES": {key: values for key, values in _values().items() if values},
        "AFTER": _after(),
    }
    case = _fish_case if shell == "fish" else _bash_case
    template = "fish" if shell == "fish" else "bash"
    text = (_SCRIPTS / f"completion.{template}.txt").read_text(encoding="utf-8")
    for name, words in lists.items():
        text = text.replace(f"@{name}@", words)
    for name, found in cases.items():
        text = text.replace(f"@{name}@", "\n".join(map(case, found, found.values())))
    if shell == "zsh":
        begin = "#compdef rlplace\nautoload -U +X bashcompinit && bashcompinit\n"
        return begin + text
    return text


def _keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of overrides, each with its values; no values: any value."""
    keys = override_keys()
    for component in COMPONENTS:
        keys[f"cluster.component_placement.{component}"] = ("all", "rest", "cpu")
    for group in (compose.CLUSTER, compose.TASK, compose.PLACEMENT):
        keys[group] = tuple(compose.group_names(group))
    keys["resume"] = ("auto",)
    return keys


def _values() -> dict[str, tuple[str, ...]]:
    """Return the values of every key and of the words `objective=`, `fix=` and `deterministic=` of commands."""
    return {
        **_keys(),
        "objective": tuple(OBJECTIVES),
        "fix": COMPONENTS,
        "deterministic": ("true", "false"),
    }


def _after() -> dict[str, tuple[str, ...]]:
    """Return the words that can follow a word of a command, by the command and that word with a space between."""
    return {
        f"{command} {word}": words
        for command, has in COMMANDS.items()
        for word, words in has.after.items()
    }


def _bash_case(name: str, words: Sequence[str]) -> str:
    return f"        '{name}') echo '{' '.join(words)}' ;;"


def _fish_case(name: str, words: Sequence[str]) -> str:
    return f"        case '{name}'\n            echo {' '.join(words)}"
