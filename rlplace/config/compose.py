"""Compose configs with Hydra: from a command line to plain mappings, with the file and line of every value."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import (
    Override,
    OverrideType,
    Quote,
    QuotedString,
    ValueType,
)
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from rlplace.codes import config_error, problem
from rlplace.config.composition import (
    Composition,
    composition,
    parse_overrides,
    read_config,
)
from rlplace.config.found import value_at
from rlplace.config.from_environment import of_environment, with_default
from rlplace.config.keys import every_place, takes_list
from rlplace.config.option_keys import read_options
from rlplace.config.options import DASHES, Meaning, OptionParser, apart
from rlplace.config.other_names import LIBRARIES
from rlplace.config.override_words import meant_by
from rlplace.config.paths import at_home, names_config, readable, unquoted
from rlplace.config.unknown_keys import option_of_block, word_meant
from rlplace.config.yaml_text import (
    closes,
    line_sources,
    misread_numbers,
    named_in_defaults,
    not_blocks,
    not_yaml,
    repeated_key,
    root_of,
    scalars,
    show,
    text_of,
)
from rlplace.errors import (
    COMMAND_LINE,
    ConfigError,
    Problem,
    Source,
    did_you_mean,
    source_of,
    suggestion,
)
from rlplace.tables import table

# In a clone, this is a link to the folder beside the package
CONFIG_DIR = (Path(__file__).parents[1] / "configs").resolve()
GOAL = "runner.stop_at_return"
_PRESET = "cluster.component_placement.preset"  # replaces the lines of components
# Keys that choose a task, simulator, model or preset, and a pattern of the keys that belong to the choice. If a later
# file or override chooses anew, the keys that belong to the old choice are dropped.
_CHOICES = (
    (
        ("env.kind", "env.id", "env.task"),
        re.compile(rf"env\.(?:eval_)?kwargs\.[^.\[]+|{re.escape(GOAL)}"),
    ),
    (("actor.model.kind",), re.compile(r"actor\.model\.(?!kind\b)[^.\[]+")),
    ((_PRESET,), re.compile(r"cluster\.component_placement\.(?!preset\b)[^.\[]+")),
)
_DASHES = re.compile(f"[{DASHES}]")
# Names that can stand before the colon in ${name:...}
_RESOLVERS = (
    "oc.env",
    "oc.select",
    "oc.decode",
    "oc.create",
    "oc.deprecated",
    "hydra",
)
# Hydra's config groups of declared clusters and models. The name is that of the subfolder with the files of the group,
# and of the config block that such a file fills.
CLUSTER = "cluster"
MODEL = "model"
# Config groups whose files set keys of any block: an environment with the settings to learn it, and a placement
TASK = "task"
PLACEMENT = "placement"
# Other words for all components in one place -> the name of that placement
_TOGETHER = dict.fromkeys(
    ("colocate", "colocated", "colocate_all", "collocate", "collocate_all", "together"),
    "collocated",
)
# The config that a task completes: `task=hopper`, or `hopper` as the name of a config
OF_TASKS = "ppo"
# Codes of the errors about a name that a group does not have
_UNKNOWN = {
    CLUSTER: "unknown-cluster",
    MODEL: "unknown-model",
    TASK: "undeclared-task",
    PLACEMENT: "unknown-placement",
}
# Keys of Hydra itself that have an effect here; Hydra composes the config, and starts, logs and names nothing
_HYDRA_KEYS = ("hydra.searchpath", "hydra.mode")
_HYDRA_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")  # where Hydra would write
# First lines of a file whose keys are those of the whole config
_WHOLE = re.compile(r"^# *@package +_global_ *$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A config composed by Hydra (files, choices and overrides), in plain Python values.

    `sources`: config key -> file and line in which its value is set. `words`: command-line words that compose this
    config. `goal`: the dropped value of `runner.stop_at_return`, if an override has replaced the environment for which
    this goal was set; None: no goal was dropped.
    """

    name: str
    mapping: Mapping[str, Any]
    sources: Mapping[str, Source]
    words: Sequence[str] = dataclasses.field(default=(), compare=False)
    goal: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """The parsed words of a command line: Hydra's flags, the config, and the overrides.

    `flags`: Hydra's flags. `name`: name of the config; None: the command line does not name one. `folders`: the folders
    with configs, clusters and models: the user's, then the shipped one. `root`: the first of `folders` with the config.
    `task`: the task whose name stands in the place of the config's name; None: a config is named, or nothing.
    """

    flags: argparse.Namespace
    overrides: Sequence[str]
    name: str | None
    folders: Sequence[Path]
    root: Path
    task: str | None = None

    @classmethod
    def of(cls, argv: Sequence[str]) -> CommandLine:
        """Parse the words `argv` of a command line, without the program.

        The config is named by `--config-name`, or else by the first word that is not an override. A name that ends in
        .yaml is the path of a file; the folder of this file is then searched for configs first. The name of a task
        stands for the config of tasks, and so does an override `task=...` without a name. Raises ConfigError for an
        unknown flag.
        """
        words = [readable(word) for word in argv]
        parser = _parser()
        try:
            flags = parser.parse_intermixed_args(words)
        except ConfigError:
            # All unknown options at once
            parser.refuse_unknown(words, FLAGS)
            raise
        given = [
            Path(at_home(folder)).resolve()
            for folder in (*flags.config_dir, flags.config_path)
            if folder
        ]
        # The config's name may stand among the overrides
        overrides: list[str] = flags.overrides
        config: str | None = flags.config_name
        names = [word for word in overrides if names_config(word)]
        if config is None and names:
            config = names[0]
            overrides = [word for word in overrides if word != config]
        # A file brings its folder
        if config is not None and config.endswith(".yaml"):
            file = Path(at_home(config))
            if file.is_file() or (file.parent.is_dir() and file.name != config):
                given = [file.parent.resolve(), *given]
                config = file.name
            config = config.removesuffix(".yaml")
        folders = [*given, CONFIG_DIR]
        having = [folder for folder in folders if (folder / f"{config}.yaml").is_file()]
        # The name of a task, or `task=...` alone
        task = None
        if not having:
            chosen = [word for word in overrides if word.startswith(f"{TASK}=")]
            if config is None and chosen:
                config = OF_TASKS
            elif config in group_names(TASK, folders):
                task = config
                config = OF_TASKS
            having = [each for each in folders if (each / f"{config}.yaml").is_file()]
        root = having[0] if having else folders[0]
        return cls(flags, overrides, config, folders, root, task)

    @property
    def choices(self) -> Sequence[str]:
        """The overrides, and `task=<name>` in front of them if a task's name stands in the place of the config's."""
        chosen = f"{TASK}={self.task}"
        if self.task is None or chosen in self.overrides:
            return self.overrides
        return [chosen, *self.overrides]

    @property
    def swept(self) -> bool:
        """Whether the command line asks for a sweep. Commas in overrides then separate the values of several runs."""
        return bool(self.flags.multirun) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def file(self) -> Path:
        """The path of the config's file. The file may not exist."""
        return self.root / f"{self.name}.yaml"

    @property
    def text(self) -> str:
        """The text of the config's file; "" if the file does not exist. Raises ConfigError if the text is not UTF-8."""
        if self.file.is_file():
            return text_of(self.file, _short(self.file))
        return ""


def _parser() -> OptionParser:
    """Return a parser of Hydra's flags. For an unknown flag, its error proposes the flag or key that may be meant."""
    parser = OptionParser(
        "command line", word_of=word_of, reader=options_meant, add_help=False
    )
    for name, short in (("config-name", "cn"), ("config-path", "cp"), ("package", "p")):
        parser.add_argument(f"--{name}", f"-{short}")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    for name, short in (("multirun", "m"), ("run", "r"), ("help", "h")):
        parser.add_argument(f"--{name}", f"-{short}", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("overrides", nargs="*")
    return parser


def word_of(name: str, value: str) -> str | None:
    """Return the override that is probably meant by the unknown option `--name=value`; None if this is not clear."""
    return word_of_group(name, value) or word_meant(name, value)


def word_of_group(name: str, value: str) -> str | None:
    """Return the override that the option `--name=value` means: a task, a placement, a model; None if unknown."""
    if name == MODEL and value in group_names(MODEL):
        return f"{MODEL}@actor.model={value}"
    if name in (TASK, PLACEMENT):
        names = group_names(name)
        chosen = value if value in names else did_you_mean(value, names)
        if chosen is not None:
            return f"{name}={chosen}"
    return option_of_block(name, value)


def options_meant(words: Sequence[str]) -> Mapping[str, Meaning]:
    """Return unknown option -> what is meant by it in the config that a command line names. `words`: its words."""
    kept, options = apart(words, FLAGS, _is_config)
    if not options:
        return {}
    try:
        composed = with_hydra(kept)
    except ConfigError:
        return {}
    if len(composed) != 1:
        return {}
    return read_options(options, composed[0].mapping, word_of_group)


def _is_config(word: str) -> bool:
    """Return whether a word names a config or a task, or is a file of one."""
    return word.endswith(".yaml") or word in config_names() or word in group_names(TASK)


# Hydra's flags, which may stand beside overrides
FLAGS = frozenset(
    name for action in _parser()._actions for name in action.option_strings
)


def with_hydra(argv: Sequence[str]) -> list[Composed]:
    """Return the composed configs of a command line: one, or several with `--multirun`.

    `argv`: words of the command line, without the program. With `--cfg`, the config is printed and the result is empty.
    Raises ConfigError for a config, a flag or an override that does not exist or cannot be parsed.
    """
    argv = [readable(word) for word in argv]
    line = CommandLine.of(argv)
    # The folders and the config must exist.
    for folder in line.folders[:-1]:
        if not folder.is_dir():
            raise config_error(
                "bad-config", "--config-dir", str(folder), error="no-folder"
            )
    if not line.file.is_file() and (line.name is not None or not line.flags.cfg):
        raise _unknown_config(line)
    _check_is_block(line)
    try:
        # The search path: first that of the config, then the folders of the command line.
        in_file = None
        if line.text:
            in_file = OmegaConf.select(
                read_config(line.file, line.text), "hydra.searchpath"
            )
        places = list(in_file or ())
        for folder in line.folders:
            if folder != line.root:
                places.append(f"file://{folder}")
        parsed = parse_overrides(line.choices)
        overrides = [_for_hydra(override, line, places) for override in parsed]
        # An override replaces the search path of the config, so it lists both.
        if places:
            overrides.append(f"hydra.searchpath={places}")
        with initialize_config_dir(
            str(line.root),
            job_name="rlplace",
            version_base="1.3",
        ):
            _check_blocks(parsed, line)
            if line.flags.cfg:
                _print_config(line, overrides)
                return []
            return _composed_jobs(argv, line, overrides)
    except ConfigError:
        raise
    # ValueError: an override without a key
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _config_error(error, line) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        file = Path(mark.name) if mark else line.file
        text = file.read_text(encoding="utf-8", errors="replace")
        twice = None
        if "duplicate" in str(error):
            twice = repeated_key(text, _short(file))
        raise (
            twice or not_yaml(error, _short(file), "bad-yaml", "config", text)
        ) from error


def _composed_jobs(
    argv: Sequence[str],
    line: CommandLine,
    overrides: list[str],
) -> list[Composed]:
    """Return the composed config; with `--multirun`, a composed config for each combination of the overrides' values.

    `argv`: words of the command line. `line`: these words, parsed. `overrides`: overrides in Hydra's form. Hydra has to
    be initialised.
    """
    jobs = [overrides]
    if line.swept:
        parsed = parse_overrides(overrides)
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    # The flags of a single run
    dropped = (*line.overrides, "-m", "--multirun")
    flags = [word for word in argv if word not in dropped]
    composed: list[Composed] = []
    for number, job in enumerate(jobs):
        config = _composed_despite_lists(line.name, [*job, f"hydra.job.num={number}"])
        given = line.overrides
        if line.swept:
            given = [word for word in job if not word.startswith("hydra.")]
        composed.append(dataclasses.replace(config, words=(*flags, *given)))
    return composed


# Name of an algorithm -> words with a shipped config and its settings
_OF_TEXT = "hybrid_grpo_llm algorithm.name="
_CONFIG_OF = {
    "iql": "sac algorithm.name=iql 'replay.demonstrations=<a file of recorded steps>'",
    "td3_bc": "td3 algorithm.name=td3_bc 'replay.demonstrations=<a file of recorded steps>'",
    **dict.fromkeys(("ddqn", "double_dqn"), "dqn"),
    "grpo": "hybrid_grpo_llm",
    **{
        name: f"{_OF_TEXT}{name}"
        for name in ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo")
    },
    **dict.fromkeys(
        ("distill", "distillation", "gkd"),
        f"{_OF_TEXT}distill 'teacher.model.path=<a folder>' 'cluster.component_placement.teacher=<numbers, such as 0>'",
    ),
    **dict.fromkeys(("sft", "finetune"), "sft_tiny"),
    **dict.fromkeys(("rlhf", "ppo_rlhf"), "rlhf_tiny"),
    **dict.fromkeys(("vla", "openvla"), "vla_reach"),
}
_ALGORITHM = re.compile("[-+ .]+")


def _unknown_config(line: CommandLine) -> ConfigError:
    """Return the error for a command line without a config name, or with the name of a config that does not exist."""
    names = config_names(line.root)
    tasks = group_names(TASK, line.folders)
    word = (line.name or "").rpartition("/")[2].removesuffix(".yml")
    near = did_you_mean(word, [*names, *tasks]) or _task_of(word, tasks)
    folder = _short(line.root)
    shown = listed(names) or "no .yaml file"
    if line.name is None:
        # As an override: config-name=hybrid_ppo
        for typed in line.overrides:
            option, _, named = typed.partition("=")
            if re.fullmatch("config[-_](name|file)", option) and named:
                return config_error(
                    "bad-option",
                    option,
                    typed,
                    error="key",
                    meant=f"--config-name {named}",
                )
        return config_error(
            "no-config",
            "--config-name",
            folder=folder,
            names=shown,
            tasks=", ".join(tasks),
        )
    # A file that ends in .yml is not found
    if line.name.endswith(".yml") and (near is None or Path(line.name).is_file()):
        return config_error(
            "unknown-config",
            "--config-name",
            line.name,
            error="yml",
            hint=suggestion(near),
            folder=folder,
            names=shown,
            name=line.name,
            stem=line.name.removesuffix(".yml"),
        )
    file = Path(line.name)
    link = Path(f"{line.name}.yaml")
    if link.is_symlink():
        return config_error(
            "unknown-config",
            "--config-name",
            str(link),
            error="broken-link",
            target=str(link.readlink()),
        )
    if file.suffix in (".json", ".py", ".txt", ".toml") and file.is_file():
        which = "other-file" if file.suffix != ".py" else "python-file"
        return config_error(
            "unknown-config",
            "--config-name",
            line.name,
            error=which,
            name=line.name,
            stem=line.name.removesuffix(file.suffix),
        )
    # A path: the name alone would hide that a file was looked for
    typed = line.flags.config_name
    if typed is None:
        typed = next((word for word in line.flags.overrides if names_config(word)), "")
    if typed.endswith(".yaml") and near is None and names:
        beside = Path(at_home(typed)).parent
        there = [f"{beside / found}.yaml" for found in config_names(beside)]
        close = did_you_mean(typed, there)
        return config_error(
            "unknown-config",
            "--config-name",
            typed,
            error="no-path",
            hint=suggestion(close),
            cwd=Path.cwd(),
            there=", ".join(there) or "none",
            instead=close or "<a config>",
        )
    # The word to paste: the name alone, as it was given, or with its flag
    fallback = "--help" if line.name == "help" else "<one of these names>"
    of_algorithm = _CONFIG_OF.get(_ALGORITHM.sub("_", word.lower()))
    if near is None and of_algorithm is not None:
        return config_error(
            "unknown-config",
            "--config-name",
            line.name,
            error="algorithm",
            folder=folder,
            names=", ".join(names),
            tasks=", ".join(tasks),
            instead=of_algorithm,
        )
    instead = near or fallback
    if line.flags.config_name is not None:
        instead = f"--config-name {instead}"
    error = "no-file"
    if near is not None:
        # The names alone: a table of all configs would hide the one that is meant
        error = "misspelt"
        shown = ", ".join(names)
    elif not names:
        error = "empty-folder"
        instead = instead.replace(fallback, "hybrid_ppo")
    return config_error(
        "unknown-config",
        "--config-name",
        line.name,
        error=error,
        hint=suggestion(near),
        folder=folder,
        names=shown,
        tasks=", ".join(tasks),
        instead=instead,
    )


def _print_config(line: CommandLine, overrides: list[str]) -> None:
    """Print the composed config, as the flags `--cfg`, `--package` and `--resolve` in `line` say.

    `overrides`: overrides in Hydra's form.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    if line.flags.cfg != "job" or line.name is None:
        hydra.show_cfg(
            line.name,
            overrides,
            line.flags.cfg,
            line.flags.package,
            line.flags.resolve,
        )
        return
    # Without the keys that belong to a task or model which another has replaced
    composed = composition(line.name, overrides)
    shown = composed.config
    OmegaConf.set_struct(shown, False)
    files = _merged(composed, line.name)
    for path in _of_another_choice(files, composed.overrides):
        above, _, key = path.rpartition(".")
        block = OmegaConf.select(shown, above)
        if isinstance(block, DictConfig):
            block.pop(key, None)
    # Only one block of it
    package = line.flags.package
    if package not in (None, "_global_"):
        shown = OmegaConf.select(shown, package)
        if shown is None:
            keys = composition(line.name, overrides).config
            raise config_error(
                "bad-option",
                "--package",
                package,
                error="no-block",
                blocks=", ".join(str(key) for key in keys),
            )
    if line.flags.resolve and OmegaConf.is_config(shown):
        OmegaConf.resolve(shown)
    text = str(shown)
    if OmegaConf.is_config(shown):
        text = OmegaConf.to_yaml(shown).rstrip("\n")
    sys.stdout.write(f"{text}\n")


def _searchpath(file: Path) -> Iterator[Path]:
    """Yield the folders that `hydra.searchpath` of a config file of another program names, if they exist.

    A folder of this list may begin with a variable of the program's environment, or be relative to its project. It is
    looked for in the folders above the file.
    """
    try:
        mapping = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    block = mapping.get("hydra") if isinstance(mapping, Mapping) else None
    written = block.get("searchpath") if isinstance(block, Mapping) else None
    for entry in written if isinstance(written, list) else ():
        path = str(entry).removeprefix("file://")
        path = re.sub(r"^\$\{oc\.env:[^}]*\}/?", "", path)
        if not path or path.startswith(("pkg:", "$")):
            continue
        for above in file.resolve().parents:
            if (above / path).is_dir():
                yield above / path
                break


def with_defaults(file: Path, choices: Sequence[str] = ()) -> Composed | None:
    """Compose a config file of another program with the files in its `defaults`. References `${...}` stay as they are.

    These files are looked for beside the file, and in the folders of its `hydra.searchpath`. `choices`: overrides of
    these files, such as `engine=large`. Return None if Hydra cannot compose the config, for example because a file in
    `defaults` is missing.
    """
    folder = file.parent.resolve()
    searched = ",".join(f"file://{path}" for path in (folder, *_searchpath(file)))
    try:
        with (
            initialize_config_dir(str(folder), job_name="rlplace", version_base="1.3"),
            warnings.catch_warnings(),
        ):
            # Hydra's warnings about style: the file belongs to another program
            warnings.simplefilter("ignore")
            return _composed(
                file.stem,
                [f"hydra.searchpath=[{searched}]", *choices],
                resolve=False,
            )
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        return None


def _composed_despite_lists(name: str | None, overrides: list[str]) -> Composed:
    """Return the composed config `name`, even if an override gives a block for a key with a list.

    Hydra refuses to merge a block into a list. Here, the block replaces the list, so that `read_config` can explain the
    mistake. `overrides`: overrides in Hydra's form.
    """
    try:
        return _composed(name, overrides)
    except HydraException as error:
        match = re.match(r"Error merging override \+\+([\w.]+)=", str(error))
        if match is None:
            raise
        key = match[1]
        words = [word for word in overrides if word.startswith(f"++{key}=")]
        if not words:
            raise
        # Remove the list before the override adds the block
        at = overrides.index(words[0])
        removed_first = [*overrides[:at], f"~{key}", *overrides[at:]]
        return _composed_despite_lists(name, removed_first)


def _composed(
    name: str | None,
    overrides: list[str],
    *,
    resolve: bool = True,
) -> Composed:
    """Return the composed config `name` with the overrides. Hydra has to be initialised.

    `resolve`: whether to replace references `${...}` by values.
    """
    assert name is not None, "checked above"
    composed = composition(name, overrides)
    job = composed.config
    task = composed.overrides
    # Where each value was written: files of groups, then the config's files, then overrides
    parts: dict[str, str] = {}
    for group, choice in composed.choices.items():
        if choice:
            parts[group] = choice
    sources: dict[str, Source] = {}
    for group, choice in parts.items():
        folder, _, package = group.partition("@")
        prefix = package or folder.replace("/", ".")
        sources |= _file_sources(
            _with_parents(composed.folders, f"{folder}/{choice}"), prefix
        )
    merged = _merged(composed, name)
    sources |= _file_sources(merged)
    given = [override.partition("=")[0].lstrip("+~") for override in task]
    for key, override in zip(given, task, strict=True):
        if key in parts:
            continue
        # An override replaces everything below its key
        below = (f"{key}.", f"{key}[")
        sources = {k: s for k, s in sources.items() if not k.startswith(below)}
        source = Source(file=COMMAND_LINE + override.removeprefix("++"))
        blocks: set[str] = set()
        for path in sources:
            for dot in re.finditer(r"[.\[]", path):
                blocks.add(path[: dot.start()])
        sources[key] = source
        # The same key as errors name it: nodes[0].memory
        sources[re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)] = source
        # A key above that was a plain value in a file is a block now, made by the override
        above = key.rpartition(".")[0]
        while above:
            if above not in blocks:
                sources[above] = source
            sources.setdefault(above, source)
            above = above.rpartition(".")[0]
    # Plain values
    goal: Any = None
    try:
        mapping = OmegaConf.to_container(job, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        raise _not_resolved(error, OmegaConf.to_container(job), sources) from error
    assert isinstance(mapping, dict)
    if resolve:
        # A config of rlplace: values from the environment, misread numbers, keys of replaced choices
        sources |= of_environment(OmegaConf.to_container(job), sources)
        misread: list[Problem] = []
        for file in merged:
            text = file.read_text(encoding="utf-8")
            misread += misread_numbers(text, _short(file), sources)
            misread += _of_hydra(text, _short(file))
            misread += _undone(text, _short(file), composed.folders)
        if misread:
            raise ConfigError(misread)
        gone = _of_another_choice(merged, task)
        if GOAL in gone:
            goal = OmegaConf.select(job, GOAL)
        _drop(mapping, gone)
    _join_names(mapping)
    # The command line wins over a line `key.below: ...` of the file
    for key in given:
        if "." in key:
            mapping.pop(key, None)
    if name == OF_TASKS:
        name = parts.get(TASK, name)
    return Composed(
        name=name,
        mapping={str(k): v for k, v in mapping.items()},
        sources=sources,
        goal=goal,
    )


def _join_names(mapping: dict[Any, Any]) -> None:
    """Restore the placement keys `reward.<name>` that Hydra has read as nested blocks in overrides.

    Hydra reads the dot in such an override as a block: `reward: {<name>: ...}`. `mapping`: the composed config; its
    placement is changed in place.
    """
    placement = value_at(mapping, "cluster.component_placement")
    if not isinstance(placement, dict):
        return
    for component in [key for key in placement if "." in str(key)]:
        role, _, name = component.partition(".")
        block = placement.get(role)
        if isinstance(block, dict) and name in block:
            placement[component] = block.pop(name)
            if not block:
                del placement[role]


def _file_sources(files: Sequence[Path], prefix: str = "") -> dict[str, Source]:
    """Return config key -> file and line, for all keys of the files. A later file wins.

    `prefix`: path of the block that the files fill; "" for the whole config.
    """
    found: dict[str, Source] = {}
    for file in files:
        found |= line_sources(file.read_text(encoding="utf-8"), _short(file), prefix)
    return found


def _merged(composed: Composition, name: str) -> list[Path]:
    """Return the files whose keys are those of the whole config, in the order of merging.

    They are the files of config `name` and of the configs in its `defaults`, and the chosen files of groups that fill
    the whole config, such as that of the task. A choice in `defaults` comes before the config's own keys, and a choice
    that only the command line makes comes after them. `composed`: the config as Hydra has composed it.
    """
    files = _with_parents(composed.folders, name)
    among_defaults: list[Path] = []
    added: list[Path] = []
    for group, choice in composed.choices.items():
        if not choice:
            continue
        chosen = _with_parents(composed.folders, f"{group}/{choice}")
        if not chosen or not _WHOLE.search(chosen[-1].read_text(encoding="utf-8")):
            continue
        if _chooses(files, group):
            among_defaults += chosen
        else:
            added += chosen
    return [*files[:-1], *among_defaults, *files[-1:], *added]


def _chooses(files: Sequence[Path], group: str) -> bool:
    """Return whether one of the config files makes a choice of the group in its `defaults`."""
    default = re.compile(rf"defaults\[\d+\]\.(override +)?/?{re.escape(group)}")
    for file in files:
        text = file.read_text(encoding="utf-8")
        if any(default.fullmatch(path) for path in line_sources(text, "")):
            return True
    return False


def _with_parents(
    places: Sequence[Path],
    name: str,
    below: Collection[str] = (),
) -> list[Path]:
    """Return the files of config `name` and of the configs in its `defaults`, in the order of merging.

    `places`: the folders that are searched for configs. `below`: names of the configs that have led to `name` by their
    `defaults`. If `name` is in `below`, the result is empty: Hydra reports such a circle as an error.
    """
    files = [place / f"{name}.yaml" for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None or name in below:
        return []
    text = text_of(file, _short(file))
    folder = name.rpartition("/")[0]
    found: list[Path] = []
    for parent in named_in_defaults(text):
        # A name without a leading slash is relative to the folder of this config
        path = parent if parent.startswith("/") else f"{folder}/{parent}"
        found += _with_parents(places, path.removeprefix("/"), (*below, name))
    return [*found, file]


def _drop(mapping: dict[Any, Any], paths: Collection[str]) -> None:
    """Remove the keys at the paths from the config `mapping`. Paths that the config does not have are ignored."""
    for path in paths:
        above, _, key = path.rpartition(".")
        block = value_at(mapping, above)
        if isinstance(block, dict):
            block.pop(key, None)


def _of_another_choice(files: Sequence[Path], overrides: Sequence[str]) -> set[str]:
    """Return the paths of keys that belong to a task, simulator, model or preset that was replaced later.

    For example, `env.kwargs.digits` belongs to the task, which a later file or an override may replace. `files`: files
    of the config in the order of merging. `overrides`: overrides as they were written.
    """
    # What each step sets: values by key, and all key paths; the overrides are the last step
    steps: list[tuple[dict[str, str], list[str]]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        values = {key: node.value for key, node in scalars(text).items()}
        steps.append((values, [*line_sources(text, "")]))
    given: dict[str, str] = {}
    for word in parse_overrides(overrides):
        key = word.key_or_group
        value = None if word.is_delete() else word.value()
        if isinstance(value, dict):
            given |= {f"{key}.{name}": str(v) for name, v in value.items()}
        else:
            given[key] = str(value)
    steps.append((given, [*given]))
    gone: set[str] = set()
    for choosing, belonging in _CHOICES:
        named: dict[str, str] = {}
        kept: set[str] = set()
        for values, keys in steps:
            chosen = {key: values[key] for key in choosing if key in values}
            # Another choice than before ends the validity of the keys so far. A first choice does too for a preset,
            # which stands in place of the keys.
            replaces = False
            for key, value in chosen.items():
                unnamed = "" if key == _PRESET else value
                if named.get(key, unnamed) != value:
                    replaces = True
            if replaces:
                gone = gone | kept
                kept = set()
            named |= chosen
            # Keys of this step belong to the choice that holds now
            here: set[str] = set()
            for path in keys:
                match = belonging.match(path)
                if match:
                    here.add(match[0])
            gone = gone - here
            kept = kept | here
    return gone


def config_names(directory: Path = CONFIG_DIR) -> dict[str, str]:
    """Return name -> description, for each config file in a folder. The description is the comment in line 1.

    In a file that begins with `# @package`, which Hydra reads, it is the comment in line 2.
    """
    names: dict[str, str] = {}
    for file in sorted(directory.glob("[!.]*.yaml")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline()
            if _WHOLE.match(first):
                first = lines.readline()
        names[file.stem] = first.removeprefix("#").strip()
    return names


def group_names(group: str, folders: Sequence[Path] = (CONFIG_DIR,)) -> dict[str, str]:
    """Return name -> description, for each declared cluster, model, task or placement.

    The names are the choices for `cluster=<name>`, `task=<name>`, `placement=<name>` or `model@<block>.model=<name>`.
    `group`: "cluster", "model", "task" or "placement": name of the subfolder with the declarations. `folders`: the
    folders that have the subfolder; if a name occurs in several, the first folder counts.
    """
    names: dict[str, str] = {}
    # Earlier folders win
    for folder in reversed(folders):
        names |= config_names(folder / group)
    return names


def _task_of(word: str, tasks: Collection[str]) -> str | None:
    """Return the task that a part of its name means, or the id of an environment, such as `Walker2d-v5`; or None."""
    meant = re.sub(r"(-v\d+)$|[-_]", "", word.lower())
    for task in tasks:
        name = task.replace("_", "")
        if meant and (name.startswith(meant) or meant.startswith(name)):
            return task
    return None


def listed(names: Mapping[str, str], indent: str = "") -> str:
    """Return a text with a table: one line for each name, with its description.

    `names`: name -> description. `indent`: text in front of each line.
    """
    return "\n".join(indent + line for line in table(names.items(), gap=2))


def _short(file: Path) -> str:
    """Return the path of a file, relative to the current folder if the file is below it."""
    here = Path.cwd()
    if file.is_relative_to(here):
        return str(file.relative_to(here))
    return str(file)


def override(key: str, value: object) -> str:
    """Return the override `key=value` as one word for a command line, with quotes for the shell if necessary."""
    return shlex.quote(override_word(key, value))


def override_word(key: str, value: object) -> str:
    """Return the override `key=value` as one word, without quotes for a shell."""
    return f"{key}={_written(value)}"


def _written(value: object) -> str:
    """Return a value as text in the syntax of Hydra's overrides."""
    if isinstance(value, str):
        is_word = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", value) is not None
        # Without quotes it must stay text: `true` and `nan` would not
        if (
            is_word
            and isinstance(yaml.safe_load(value), str)
            and value.lower() not in ("nan", "inf")
        ):
            return value
        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, Mapping):
        pairs = [f"{key}:{_written(each)}" for key, each in value.items()]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_written, value)) + "]"
    return show(value)


# ── overrides ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _for_hydra(override: Override, line: CommandLine, places: Sequence[str]) -> str:
    """Return an override in Hydra's form. It gets the prefix `++`, so that it may set a key that is not in the file.

    Unknown keys are refused later, when the config is read. Keys of a language model do not get the prefix: the reader
    accepts any key there, so Hydra has to check that the file has the key. `line`: the command line. `places`: further
    folders with configs. Raises ConfigError for a sweep without `--multirun`, and for renamed keys.
    """
    word = str(override.input_line)
    key = override.get_key_element()
    group = override.key_or_group
    value = word.partition("=")[2]
    is_comma_list = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP
    # The value of `profile` is a list of files with commas between them
    if key == "profile" and is_comma_list and not line.swept:
        return f"++{key}={QuotedString(value, Quote.double).with_quotes()}"
    if override.is_hydra_override() and key not in _HYDRA_KEYS:
        raise config_error(
            "unknown-key",
            key,
            word,
            error="folder-of-hydra" if key in _HYDRA_FOLDERS else "of-hydra-itself",
            name=word,
            line=override_word("runner.output_dir", unquoted(value)),
        )
    if re.fullmatch("[A-Z][A-Z0-9_]*_[A-Z0-9_]+", key) and key not in every_place():
        raise config_error(
            "unknown-key",
            key,
            word,
            error="of-environment",
            name=key,
            value=shlex.quote(value),
        )
    # An unknown key with a comma in its value is told as an unknown key
    named = "." in key or "@" in key or "/" in key or key in every_place()
    if is_comma_list and not named and not line.swept and group not in _UNKNOWN:
        return f"++{key}={QuotedString(value, Quote.double).with_quotes()}"
    # A sweep needs --multirun
    if override.is_sweep_override() and not line.swept:
        which = "comma"
        if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP:
            which = "function"
        elif takes_list(key):
            which = "comma-of-list"
        elif re.fullmatch("0,[0-9]{2,}", value):
            which = "decimal-comma"
            value = value.replace(",", ".")
        elif ", " in value:
            which = "text"
            word = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
        numbers = re.fullmatch(r"range\((?:([0-9]+), *)?([0-9]+)\)", value)
        if numbers is not None and key.startswith("cluster.component_placement."):
            first = int(numbers[1] or 0)
            last = int(numbers[2]) - 1
            if first <= last:
                which = "range-of-place"
                value = f"{first}-{last}"
        raise config_error(
            "override-is-sweep",
            key,
            str(override.input_line),
            error=which,
            word=shlex.quote(word),
            path=key,
            value=value,
        )
    of_component = key.endswith(f".{MODEL}") and "@" not in key
    if of_component and value in group_names(MODEL, line.folders):
        raise config_error(
            "renamed-key", key, word, error="name-of-model", path=key, value=value
        )
    if key == "preset":
        raise config_error(
            "renamed-key", key, word, error="preset", path=_PRESET, value=value
        )
    if key == MODEL:
        # A folder, or a name with its owner
        is_path = "/" in value and value not in group_names(MODEL, line.folders)
        error = "model-of-hub" if is_path else "model-group"
        raise config_error("renamed-key", MODEL, word, error=error, value=value)
    # Overrides that Hydra takes as they are
    is_model_key = ".model." in key and not key.startswith("actor.model.kwargs.")
    block, _, leaf = key.rpartition(".")
    # Each model has a path, also where the config has no block of this component yet
    is_path = leaf == "path" and block.endswith(f".{MODEL}")
    known = key in every_place() or (is_path and block in every_place())
    is_ours = key.partition(".")[0] not in LIBRARIES
    of_language_model = (
        is_model_key and is_ours and not known and _may_have_language_model(line)
    )
    changes = override.type is OverrideType.CHANGE
    if not changes or override.is_hydra_override() or of_language_model:
        return word
    if group in _UNKNOWN:
        return _declared(key, value, line)
    # A config group of the user's
    folders = [*line.folders]
    folders += [Path(place.removeprefix("file://")) for place in places]
    if any((folder / group).is_dir() for folder in folders):
        return word
    return f"++{word}"


def _of_hydra(text: str, file: str) -> Iterator[Problem]:
    """Yield a problem for each key below `hydra` in the text of a config file that has no effect.

    `file`: name of the file.
    """
    places = line_sources(text, file)
    for key, node in scalars(text).items():
        of_hydra = key.startswith("hydra.")
        if not of_hydra or key.startswith(_HYDRA_KEYS):
            continue
        leaf = key.rpartition(".")[2]
        yield problem(
            "unknown-key",
            key,
            f"{leaf}: {node.value}",
            error="folder-of-hydra" if key in _HYDRA_FOLDERS else "of-hydra-itself",
            source=places.get(key),
            name=key,
            line=f"runner.output_dir: {node.value}        (a line without indent, in place of {key})",
        )


def _undone(text: str, file: str, folders: Sequence[Path]) -> Iterator[Problem]:
    """Yield a problem for each key of a config file that a config behind `_self_` in its `defaults` sets otherwise.

    `text`: text of the file. `file`: its name. `folders`: the folders that are searched for configs.
    """
    own = scalars(text)
    listed = re.compile(r"defaults\[\d+\]")
    names = [node.value for key, node in own.items() if listed.fullmatch(key)]
    if "_self_" not in names or names[-1] == "_self_":
        return
    places = line_sources(text, file)
    names.remove("_self_")
    is_plain = not any(re.match(r"defaults\[\d+\]\.", key) for key in own)
    later = [node.value for key, node in own.items() if listed.fullmatch(key)]
    for parent in later[later.index("_self_") + 1 :]:
        theirs: dict[str, str] = {}
        for path in _with_parents(folders, parent):
            of_file = scalars(path.read_text(encoding="utf-8"))
            theirs |= {key: node.value for key, node in of_file.items()}
        for key, node in own.items():
            if key.startswith("defaults") or theirs.get(key, node.value) == node.value:
                continue
            shown = [*names, "_self_"] if is_plain else ["...", "_self_"]
            yield problem(
                "bad-config",
                key,
                f"{key.rpartition('.')[2]}: {node.value}",
                error="self-first",
                source=places.get(key),
                parent=parent,
                names=", ".join(shown),
            )


def _may_have_language_model(line: CommandLine) -> bool:
    """Return whether the config may have a language model.

    The overrides and the texts of the config's files are searched for words that do not occur in configs of simulator
    policies.
    """
    words = re.compile(rf"causal_lm|model_type|\bpath:\s*(?!null\b)\S|\.path=|{MODEL}@")
    files: list[Path] = []
    if line.name is not None:
        files = _with_parents(line.folders, line.name)
    written = [file.read_text(encoding="utf-8") for file in files]
    # A remark on a key may name kinds that the config does not have
    texts = [re.sub(r"(?m)(?:^|\s)#.*$", "", text) for text in written]
    return any(words.search(text) for text in [*line.overrides, *texts])


def _declared(key: str, name: str, line: CommandLine) -> str:
    """Return an override such as `cluster=<name>`, `task=<name>` or `model@<block>.model=<name>` in Hydra's form.

    The override replaces the choice in the config's `defaults`; if they do not have a choice, it adds one. `key`: the
    part before `=`. `name`: the chosen cluster, task, placement or model. Raises ConfigError if the group has no file
    of this name.
    """
    group, _, block = key.partition("@")
    among_defaults = _chooses(_with_parents(line.folders, str(line.name)), key)
    known = group_names(group, line.folders)
    choices = name.split(",") if line.swept else [name]
    if all(choice in known for choice in choices):
        if among_defaults:
            return f"{key}={name}"
        return f"+{key}={name}"
    # A component without a model of its own
    if group == MODEL and name == "null":
        if among_defaults:
            return f"~{key}"
        return f"++{block}=null"
    near = did_you_mean(name, known)
    same = [other for other in known if other.lower() == name.lower()]
    if group == CLUSTER and not same:
        sized = _cluster_of_size(name, line.folders)
        if sized is not None:
            raise config_error(
                "unknown-cluster",
                key,
                name,
                error="other-size",
                known=listed(known),
                overrides=sized,
            )
        of_product = name.partition("x")[2].lower()
        # Another product is another cluster
        if near is not None and near.partition("x")[2].lower() != of_product:
            near = None
        # A product alone, or in front of the number: the smallest of it
        product = re.sub(r"^[0-9]+x|x[0-9]+$", "", name.lower())
        number = re.search("x([0-9]+)$", name.lower())
        of_kind = [other for other in known if other.lower().endswith(f"x{product}")]
        if number is not None:
            of_kind = [o for o in of_kind if o.startswith(f"{number[1]}x")]
        if near is None and of_kind and not name[:1].isdigit():
            near = min(of_kind, key=lambda other: (len(other), other))
    if group == PLACEMENT:
        near = _TOGETHER.get(name.lower(), near)
    # A name that goes on: hybrid_ppo
    begun = [other for other in known if name.lower().startswith(f"{other.lower()}_")]
    if near is None and len(begun) == 1:
        near = begun[0]
    # A name that ends early
    longer = [other for other in known if other.lower().startswith(name.lower())]
    if near is None and len(longer) == 1:
        near = longer[0]
    if near is None and group == TASK:
        near = _task_of(name, known)
    raise config_error(
        _UNKNOWN[group],
        key,
        name,
        error="not-declared" if near else "none-declared",
        group=group,
        hint=suggestion(near),
        known=listed(known),
        path=key,
        near=near,
        name=name,
    )


def _cluster_of_size(name: str, folders: Sequence[Path]) -> str | None:
    """Return overrides for a cluster such as 64xH100: a declared one of this product, and the number of its machines.

    Return None if no cluster of the product is declared, or if its machines cannot have so many accelerators together.
    `folders`: folders with configs.
    """
    number, _, product = name.partition("x")
    # The smallest first
    declared = sorted(group_names(CLUSTER, folders), key=lambda of: (len(of), of))
    for known in declared:
        if known.partition("x")[2].lower() != product.lower() or not number.isdecimal():
            continue
        files = [folder / CLUSTER / f"{known}.yaml" for folder in folders]
        file = next(file for file in files if file.is_file())
        each = scalars(file.read_text(encoding="utf-8")).get("nodes[0].accelerators")
        if each is not None and int(number) and int(number) % int(each.value) == 0:
            machines = int(number) // int(each.value)
            return f"{CLUSTER}={known} {CLUSTER}.nodes.0.count={machines}"
    return None


def _config_error(error: Exception, line: CommandLine) -> ConfigError:
    """Return a ConfigError for an error of Hydra or OmegaConf. `line`: the command line that has caused the error."""
    if isinstance(error, OverrideParseException):
        return _not_an_override(error.override, line.overrides)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_part(error, line)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return _not_resolved(
            error,
            yaml.safe_load(line.text),
            line_sources(line.text, _short(line.file)),
        )
    if isinstance(error, UnicodeDecodeError):
        # Reads each file, and raises an error that names the one that is not UTF-8
        _with_parents(line.folders, str(line.name))
    wrong = not_blocks(line.text, _short(line.file), every_place, takes_list)
    if isinstance(wrong, ConfigError):
        return wrong
    # The override that Hydra could not apply, if it was that
    first, _, rest = str(error).strip().partition("\n")
    twice = re.search("To override a value use '(override .+)'", first)
    if twice is not None:
        return config_error(
            "bad-config",
            "defaults",
            error="override-of-default",
            message=first.partition(". To")[0],
            line=twice[1],
        )
    refused = _refused_prefix(first, line)
    if refused is not None:
        return refused
    word = None
    for each in line.overrides:
        if f"Could not override '{each.partition('=')[0]}'" in first:
            word = each
            break
    if word is None:
        return config_error(
            "bad-config",
            "config",
            error="of-library",
            message=first or type(error).__name__,
            more=rest.strip() or None,
        )
    # The key beside it that was meant
    key = word.partition("=")[0]
    block, _, leaf = key.rpartition(".")
    known = [path for path in line_sources(line.text, "") if not path.endswith("]")]
    beside: list[str] = []
    for path in known:
        is_leaf = not any(other.startswith(f"{path}.") for other in known)
        if is_leaf and path.rpartition(".")[0] == block:
            beside.append(path.removeprefix(f"{block}."))
    meant = did_you_mean(leaf, beside)
    if meant:
        near = f"{block}.{meant}"
        return config_error(
            "unknown-override",
            key,
            word,
            error="misspelt-key",
            near=near,
            corrected=word.replace(key, near, 1),
        )
    # The block of a model takes any key of a config.json
    which = "key-of-model" if block.endswith(".model") else "no-key"
    return config_error("unknown-override", key, word, error=which, word=word)


def _refused_prefix(message: str, line: CommandLine) -> ConfigError | None:
    """Return the error about `+key` for a key that exists, or about `~key` for a key that does not exist; else None.

    `message`: what Hydra says. `line`: the command line.
    """
    exists = re.search(r"Could not append to config.*'([\w.@/]+)'", message)
    if exists:
        for word in line.overrides:
            if word.startswith(f"+{exists[1]}="):
                plain = word.lstrip("+")
                return config_error(
                    "bad-config", exists[1], word, error="exists", plain=plain
                )
    lacking = re.search(r"Could not delete from config. '([\w.@/]+)'", message)
    if lacking is None:
        return None
    key = lacking[1]
    block, _, leaf = key.rpartition(".")
    beside = [p.rpartition(".")[2] for p in every_place() if p.startswith(f"{block}.")]
    near = did_you_mean(leaf, beside)
    if near is None:
        return config_error("bad-config", key, f"~{key}", error="not-there", word=key)
    meant = f"{block}.{near}"
    return config_error(
        "bad-config", key, f"~{key}", error="misspelt-not-there", near=meant
    )


def _no_such_part(error: MissingConfigException, line: CommandLine) -> ConfigError:
    """Return the error about a name in `defaults` for which no config, cluster or model exists."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = group_names(group, line.folders)
    near = did_you_mean(name, known)
    by = re.match(r"In '(.+?)'", str(error))
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    # The line of the config that names it
    got = name
    source = None
    config = by[1] if by else str(line.name)
    for file in _with_parents(line.folders, config)[-1:]:
        text = file.read_text(encoding="utf-8")
        for key, place in line_sources(text, _short(file)).items():
            row = text.splitlines()[(place.line or 1) - 1].strip()
            if source is None and key.startswith("defaults[") and word.search(row):
                got = row
                source = place
    code = _UNKNOWN.get(group, "unknown-config")
    return config_error(
        code,
        "defaults",
        got,
        error="misspelt-part" if near else "no-part",
        source=source,
        noun=group or "config",
        name=name,
        near=near,
        known=listed(known) or "none",
        line=word.sub(near, got) if near else None,
    )


def _check_blocks(overrides: Sequence[Override], line: CommandLine) -> None:
    """Raise ConfigError if an override writes a word or a number over a block of a custom job's config.

    The blocks of shipped jobs are checked when the config is read.
    """
    written: Any = None
    for override in overrides:
        key = override.key_or_group
        if override.is_delete() or "@" in key or "/" in key or key in every_place():
            continue
        if not isinstance(override.value(), str | int | float):
            continue
        # Reading the file takes longer than all other checks: not without a line that may begin such a block
        leaf = key.rpartition(".")[2]
        begins = rf"^\s*{re.escape(leaf)}\s*:\s*(?:[{{#]|$)"
        if not leaf or not re.search(begins, line.text, re.MULTILINE):
            continue
        if written is None:
            written = read_config(line.file, line.text)
        block = OmegaConf.select(written, key)
        if isinstance(block, DictConfig) and len(block):
            raise config_error(
                "wrong-type",
                key,
                str(override.input_line),
                error="block-of-own",
                path=key,
                keys=", ".join(map(str, block)),
                first=next(iter(block)),
            )


def _check_is_block(line: CommandLine) -> None:
    """Raise ConfigError if the config's file is a YAML list. A file that is not YAML is ignored."""
    for number, row in enumerate(line.text.splitlines(), start=1):
        if "\u00a0" in row[: len(row) - len(row.lstrip())]:
            source = Source(file=_short(line.file), line=number)
            raise config_error(
                "bad-yaml", "config", row.strip(), error="no-break-space", source=source
            )
    with contextlib.suppress(yaml.YAMLError):
        if isinstance(root_of(line.text), yaml.SequenceNode):
            raise config_error("bad-config", line.file.name, error="list")


def _not_an_override(word: str, words: Sequence[str]) -> ConfigError:
    """Return the error about a word that Hydra cannot read as an override. The error proposes a correct word.

    `word`: the wrong word. `words`: all words of the command line.
    """
    key = word.partition("=")[0]
    # A dash of a word processor
    plain = _DASHES.sub("-", word)
    if word != plain:
        return config_error("bad-config", key, word, error="dash", plain=plain)
    # A value with blanks that the shell has split: join words until all brackets are closed
    rest = words[words.index(word) :] if word in words else [word]
    joined = None
    for number in range(2, len(rest) + 1):
        text = " ".join(rest[:number])
        if closes(text):
            joined = text
            break
    # A list without commas: [console wandb]
    if joined is not None and re.fullmatch(r"[^=]+=\[[\w.-]+( [\w.-]+)+\]", joined):
        joined = joined.replace(" ", ",")
    if not closes(word) and joined is not None:
        return config_error(
            "bad-config", key, word, error="split", joined=shlex.quote(joined)
        )
    # What a wrong form or a missing bracket means
    meant = meant_by(word, words, _parses)
    if meant is not None:
        facts: dict[str, Any] = {
            name: text if name in ("name", "value") else shlex.quote(text)
            for name, text in meant.facts.items()
        }
        return config_error("bad-config", key, word, error=meant.error, **facts)
    # No override at all
    if "=" not in word:
        # `key: value`, `key = value` or `key= value`
        pair_text = " ".join(rest[:3]) if rest[1:2] == ["="] else word
        pair = re.fullmatch(r"([\w.]+)(?:: *| += *)(\S+)", pair_text)
        if pair:
            return config_error(
                "bad-config", word, word, error="pair", name=pair[1], value=pair[2]
            )
        which = "second-config" if word in config_names() else "without-value"
        return config_error("bad-config", word, word, error=which, word=word)
    changed = key.lstrip("+~")
    # Text that needs quotes
    in_quotes = _as_text(word)
    if in_quotes is not None:
        return config_error(
            "bad-config",
            changed,
            word,
            error="text-without-quotes",
            quoted=shlex.quote(in_quotes),
        )
    # Lists of numbers in braces, such as 0-3,5-7, need quotes
    quoted = re.sub(
        r"(:\s*)([0-9][0-9:-]*(?:\s*,\s*[0-9][0-9:-]*)+)(?=\s*[,}])",
        r'\1"\2"',
        word,
    )
    if quoted != word:
        with contextlib.suppress(OverrideParseException):
            parse_overrides([quoted])
            return config_error(
                "bad-config",
                changed,
                word,
                error="commas-without-quotes",
                quoted=shlex.quote(quoted),
            )
    # A sentence with braces or brackets in it
    value = word.partition("=")[2]
    whole = f'{key}="{value}"'
    if re.match(r"[A-Za-z]", value) and '"' not in value and _parses(whole):
        return config_error(
            "bad-config",
            changed,
            word,
            error="text-without-quotes",
            quoted=shlex.quote(whole),
        )
    return config_error("bad-config", changed, word, error="unread")


def _parses(word: str) -> bool:
    """Return whether Hydra can read a word as an override."""
    try:
        parse_overrides([word])
    except OverrideParseException:
        return False
    return True


def _as_text(word: str) -> str | None:
    """Return the override `word` with quotes around its value, or around each item of a list.

    Return None if Hydra still cannot read the override.
    """
    key, _, value = word.partition("=")
    listed = re.fullmatch(r"\[(.+)\]", value)
    texts = [value]
    if listed:
        texts = [text.strip() for text in listed[1].split(",")]
    if any(not text or re.search(r"[\[\]{}\"'\\$]", text) for text in texts):
        return None
    quoted = ",".join(f'"{text}"' for text in texts)
    is_list = listed or takes_list(key.lstrip("+"))
    found = f"{key}=[{quoted}]" if is_list else f"{key}={quoted}"
    try:
        parse_overrides([found])
    except OverrideParseException:
        return None
    return found


def _not_resolved(
    error: OmegaConfBaseException,
    written: object,
    sources: Mapping[str, Source],
) -> ConfigError:
    """Return the error about a value that OmegaConf cannot resolve.

    Such a value refers to a missing key, cannot be parsed, or is `???` (a value that has to be given). `written`: the
    config before references `${...}` were replaced. `sources`: config key -> file and line in which its value is set.
    """
    key = str(error.full_key)
    leaf = key.rpartition(".")[2]
    value = None
    if isinstance(written, dict):
        value = value_at(written, key)
    got = None
    if value is not None:
        got = f"{leaf}: {value}"
    message = str(error).partition("\n")[0]
    # What is said if nothing more is known
    which = "unresolved"
    facts: dict[str, Any] = {
        "leaf": leaf,
        "path": key,
        "message": message.rpartition("interpolation: ")[2],
    }
    # A clearer text for each kind of error
    if isinstance(error, MissingMandatoryValue):
        which = "no-value-yet"
    elif isinstance(error, GrammarParseError):
        which = "not-closed"
        facts["message"] = message
    elif isinstance(error, InterpolationKeyError):
        match = re.search(r"'(.+)'", message)
        if match:
            near = _referred_key(match[1], key, value, sources)
            which = "referred-key"
            facts |= {"name": match[1], "hint": suggestion(near)}
            if match[1].isupper() and match[1] in os.environ:
                which = "reference-to-variable"
                facts["corrected"] = str(value).replace(
                    f"${{{match[1]}}}", f"${{oc.env:{match[1]}}}"
                )
                near = None
            if near and value:
                which = "misspelt-referred-key"
                facts["corrected"] = str(value).replace(match[1], near)
    elif variable := re.search(r"Environment variable '(.+)' not found", message):
        which = "no-variable"
        facts["name"] = variable[1]
        if value:
            which = "no-variable-or-default"
            facts["other"] = with_default(str(value), variable[1])
    elif isinstance(error, UnsupportedInterpolationType):
        match = re.search(r"type (\S+)", message)
        if match:
            near = did_you_mean(match[1], _RESOLVERS)
            if match[1] in ("env", "ENV", "environ"):
                near = "oc.env"
            which = "resolver"
            facts |= {"name": match[1], "near": near}
            if near:
                which = "misspelt-resolver"
                facts["corrected"] = str(value).replace(match[1], near)
    return config_error(
        "bad-config",
        key,
        got,
        error=which,
        source=source_of(key, sources),
        **facts,
    )


def _referred_key(
    name: str,
    key: str,
    value: object,
    sources: Mapping[str, Source],
) -> str | None:
    """Return the key that is probably meant by the reference `${<name>}` in the value of `key`.

    Return None if no key resembles `name`. `value`: the value of `key`, as it was written. `sources`: the known keys.
    """
    block, _, word = name.rpartition(".")
    # ${.word} refers to a key of the same block
    same_block = f"${{.{word}" in str(value)
    beside = key.rpartition(".")[0] if same_block else block
    others = [path for path in sources if path != key]
    names = [p.rpartition(".")[2] for p in others if p.rpartition(".")[0] == beside]
    near = did_you_mean(word, names)
    if near:
        return f"{block}.{near}".removeprefix(".")
    return did_you_mean(name, others)
