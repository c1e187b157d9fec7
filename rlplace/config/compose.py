"""Compose configs with Hydra: a command line in, plain mappings with the place of every value out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
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

from rlplace.config.from_environment import of_environment, without_variable
from rlplace.config.keys import all_places, takes_list
from rlplace.config.options import DASHES, OptionParser
from rlplace.config.paths import at_home, names_config, readable
from rlplace.config.read import value_at, word_meant
from rlplace.config.yaml_text import (
    closes,
    line_sources,
    misread_numbers,
    named_in_defaults,
    not_blocks,
    not_yaml,
    repeated_key,
    scalars,
    show,
    text_of,
)
from rlplace.errors import (
    COMMAND_LINE,
    ConfigError,
    Source,
    did_you_mean,
    source_of,
    suggestion,
)

# In a clone, a link to the folder beside the package
CONFIG_DIR = (Path(__file__).parents[1] / "configs").resolve()
GOAL = "runner.stop_at_return"
# Keys that choose something, and the keys that belong to what was chosen: another choice begins without them.
_PRESET = "cluster.component_placement.preset"  # in place of the lines of components
_CHOICES = (
    (
        ("env.kind", "env.id", "env.task"),
        re.compile(rf"env\.(?:eval_)?kwargs\.[^.\[]+|{re.escape(GOAL)}"),
    ),
    (("actor.model.kind",), re.compile(r"actor\.model\.(?!kind\b)[^.\[]+")),
    ((_PRESET,), re.compile(r"cluster\.component_placement\.(?!preset\b)[^.\[]+")),
)
_DASHES = re.compile(f"[{DASHES}]")
CLUSTER = "cluster"
# Folders of declared clusters and models, and the blocks that they fill
MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One composed config, plain Python values only."""

    name: str
    mapping: Mapping[str, Any]
    sources: Mapping[str, Source]  # key path -> where its value was written
    # A command line that composes it
    words: Sequence[str] = dataclasses.field(default=(), compare=False)
    # Return that would end the run of another environment, which an override has
    # replaced
    goal: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags and overrides of a command line, without the program."""

    flags: argparse.Namespace
    overrides: Sequence[str]
    name: str | None  # of the config
    # Where configs, clusters and models are looked for: the user's, then the shipped
    # one
    folders: Sequence[Path]
    root: Path  # the first of them that has the config

    @classmethod
    def of(cls, argv: Sequence[str]) -> CommandLine:
        """Read the words; the first that is no override names the config, as `--config-name` does.

        A name that ends in .yaml is a file: its folder is looked in first. Raises ConfigError for an unknown flag.
        """
        flags = _parser().parse_intermixed_args([readable(word) for word in argv])
        own = [
            Path(at_home(folder)).resolve()
            for folder in (*flags.config_dir, flags.config_path)
            if folder
        ]
        overrides: list[str] = flags.overrides
        config: str | None = flags.config_name
        if config is None and (
            words := [word for word in overrides if names_config(word)]
        ):
            config = words[0]
            overrides = [word for word in overrides if word != words[0]]
        if config is not None and config.endswith(".yaml"):
            file = Path(at_home(config))
            if file.is_file() or (file.parent.is_dir() and file.name != config):
                own = [file.parent.resolve(), *own]
                config = file.name
            config = config.removesuffix(".yaml")
        folders = [*own, CONFIG_DIR]
        root = next(
            (folder for folder in folders if (folder / f"{config}.yaml").is_file()),
            folders[0],
        )
        return cls(flags, overrides, config, folders, root)

    @property
    def swept(self) -> bool:
        """Whether a comma in an override means several runs."""
        return bool(self.flags.multirun) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def file(self) -> Path:
        return self.root / f"{self.name}.yaml"

    @property
    def text(self) -> str:
        """The text of the config's own file; empty where there is none. Raises ConfigError: not UTF-8."""
        if self.file.is_file():
            return text_of(self.file, _short(self.file))
        return ""


def _parser() -> OptionParser:
    parser = OptionParser("command line", word_of=word_meant, add_help=False)
    for name, short in (("config-name", "cn"), ("config-path", "cp"), ("package", "p")):
        parser.add_argument(f"--{name}", f"-{short}")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    for name, short in (("multirun", "m"), ("run", "r"), ("help", "h")):
        parser.add_argument(f"--{name}", f"-{short}", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("overrides", nargs="*")
    return parser


# Beside overrides
FLAGS = frozenset(
    name for action in _parser()._actions for name in action.option_strings
)


def with_hydra(argv: Sequence[str]) -> list[Composed]:
    """Compose the configs that `argv` (without the program) names: several under `--multirun`, none for `--cfg`.

    Raises ConfigError for a config, a flag or an override that does not exist or does not parse.
    """
    argv = [readable(word) for word in argv]
    line = CommandLine.of(argv)
    for folder in line.folders[:-1]:
        if not folder.is_dir():
            why = "configs are looked for there, then among the shipped ones"
            fix = "--config-dir <a folder of .yaml files>"
            raise ConfigError.of(
                "bad-config",
                "--config-dir",
                "there is no such folder",
                str(folder),
                why,
                fix,
            )
    if not line.file.is_file() and (line.name is not None or not line.flags.cfg):
        names = config_names(line.root)
        near = did_you_mean(
            (line.name or "").rpartition("/")[2].removesuffix(".yml"), names
        )
        code, what = (
            ("no-config", "no config was named")
            if line.name is None
            else ("unknown-config", "no such config")
        )
        why = f"configs in {_short(line.root)}:\n{listed(names) or 'no .yaml file'}"
        fix = near or ("--help" if line.name == "help" else "hybrid_ppo")
        if (
            line.name is not None
            and line.name.endswith(".yml")
            and (near is None or Path(line.name).is_file())
        ):
            what = "the name of a config ends in .yaml"
            fix = f"mv {line.name} {line.name.removesuffix('.yml')}.yaml"
        elif line.name is None or line.flags.config_name is not None:
            fix = f"--config-name {fix}"
        raise ConfigError.of(
            code, "--config-name", what + suggestion(near), line.name, why, fix
        )
    _check_is_block(line)
    try:
        own = (
            OmegaConf.select(OmegaConf.load(line.file), "hydra.searchpath")
            if line.text
            else None
        )
        places = [
            *(own or ()),
            *(f"file://{folder}" for folder in line.folders if folder != line.root),
        ]
        overrides = [
            _for_hydra(o, line, places)
            for o in OverridesParser.create().parse_overrides([*line.overrides])
        ]
        if places:  # an override replaces the search path of the config, so it has both
            overrides.append(f"hydra.searchpath={places}")
        with initialize_config_dir(
            str(line.root), job_name="rlplace", version_base="1.3"
        ):
            if line.flags.cfg:
                _print_config(line, overrides)
                return []
            jobs = [overrides]
            if line.swept:
                parsed = OverridesParser.create().parse_overrides(overrides)
                (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
            flags = [
                word
                for word in argv
                if word not in (*line.overrides, "-m", "--multirun")
            ]
            found = [
                _composed_anyhow(line.name, [*job, f"hydra.job.num={n}"])
                for n, job in enumerate(jobs)
            ]
            given = [
                [w for w in job if not w.startswith("hydra.")]
                if line.swept
                else line.overrides
                for job in jobs
            ]
            return [
                dataclasses.replace(c, words=(*flags, *g))
                for c, g in zip(found, given, strict=True)
            ]
    except ConfigError:
        raise
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
    ) as error:
        # ValueError: an override without a key
        raise _config_error(error, line) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        file = Path(mark.name) if mark else line.file
        twice = (
            repeated_key(file.read_text(encoding="utf-8"), _short(file))
            if "duplicate" in str(error)
            else None
        )
        raise (twice or not_yaml(error, _short(file), "bad-yaml", "config")) from error


def _print_config(line: CommandLine, overrides: list[str]) -> None:
    """Print a composed config as `--cfg`, `--package` and `--resolve` ask for it."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    if line.flags.cfg != "job" or line.name is None:
        hydra.show_cfg(
            line.name, overrides, line.flags.cfg, line.flags.package, line.flags.resolve
        )
        return
    shown, places, task = _job_of(line.name, overrides)
    OmegaConf.set_struct(shown, False)
    for path in _of_another_choice(_with_parents(places, line.name), task):
        above, _, key = path.rpartition(".")
        if isinstance(block := OmegaConf.select(shown, above), DictConfig):
            block.pop(key, None)
    if (package := line.flags.package) not in (None, "_global_"):
        shown = OmegaConf.select(shown, package)
        if shown is None:
            why = "it has " + ", ".join(
                str(key) for key in _job_of(line.name, overrides)[0]
            )
            raise ConfigError.of(
                "bad-option",
                "--package",
                "the config has no such block",
                package,
                why,
                "-p cluster",
            )
    if line.flags.resolve and OmegaConf.is_config(shown):
        OmegaConf.resolve(shown)
    text = (
        OmegaConf.to_yaml(shown).rstrip("\n")
        if OmegaConf.is_config(shown)
        else str(shown)
    )
    sys.stdout.write(f"{text}\n")


def with_defaults(file: Path) -> Composed | None:
    """Compose another program's config with its `defaults`, `${...}` kept; None where one of them is missing."""
    folder = file.parent.resolve()
    try:
        with (
            initialize_config_dir(str(folder), job_name="rlplace", version_base="1.3"),
            warnings.catch_warnings(),
        ):
            # Of style, such as a list without _self_: the file is not ours
            warnings.simplefilter("ignore")
            return _composed(
                file.stem, [f"hydra.searchpath=[file://{folder}]"], resolve=False
            )
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        return None


def _composed_anyhow(name: str | None, overrides: list[str]) -> Composed:
    """Compose a config even where an override puts a block in place of a list: the reader explains it."""
    try:
        return _composed(name, overrides)
    except HydraException as error:
        match = re.match(r"Error merging override \+\+([\w.]+)=", str(error))
        word = next(
            (word for word in overrides if match and word.startswith(f"++{match[1]}=")),
            None,
        )
        if match is None or word is None:
            raise
        at = overrides.index(word)
        return _composed_anyhow(
            name, [*overrides[:at], f"~{match[1]}", word, *overrides[at + 1 :]]
        )


def _composed(
    name: str | None, overrides: list[str], *, resolve: bool = True
) -> Composed:
    assert name is not None, "checked above"
    job, places, task = _job_of(name, overrides)
    run = HydraConfig.get()
    parts = {
        g: choice
        for g, choice in run.runtime.choices.items()
        if choice and not g.startswith("hydra")
    }
    sources: dict[str, Source] = {}
    for group, choice in parts.items():
        folder, _, package = group.partition("@")
        sources |= _file_sources(
            places, f"{folder}/{choice}", prefix=package or folder.replace("/", ".")
        )
    sources |= _file_sources(places, name)
    given = [override.partition("=")[0].lstrip("+~") for override in task]
    for key, override in zip(given, task, strict=True):
        if key not in parts:
            sources = {
                k: source
                for k, source in sources.items()
                if not k.startswith((f"{key}.", f"{key}["))
            }
            source = Source(file=COMMAND_LINE + override.removeprefix("++"))
            blocks = {
                k[: dot.start()] for k in sources for dot in re.finditer(r"[.\[]", k)
            }
            sources[key] = source
            # A value of a file above it is no longer there
            while key := key.rpartition(".")[0]:
                sources[key] = sources.get(key, source) if key in blocks else source
    goal: Any = None
    try:
        mapping = OmegaConf.to_container(job, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        raise _not_resolved(error, OmegaConf.to_container(job), sources) from error
    assert isinstance(mapping, dict)
    if resolve:  # a config of ours
        sources |= of_environment(OmegaConf.to_container(job), sources)
        files = _with_parents(places, name)
        texts = {_short(file): file.read_text(encoding="utf-8") for file in files}
        if misread := [
            p
            for short, text in texts.items()
            for p in misread_numbers(text, short, sources)
        ]:
            raise ConfigError(misread)
        gone = _of_another_choice(files, task)
        goal = OmegaConf.select(job, GOAL) if GOAL in gone else None
        _drop(mapping, gone)
    _join_names(mapping)
    # The command line wins over a line `key.below: ...` of the file
    for key in (key for key in given if "." in key):
        mapping.pop(key, None)
    return Composed(
        name=name,
        mapping={str(k): v for k, v in mapping.items()},
        sources=sources,
        goal=goal,
    )


def _job_of(
    name: str, overrides: list[str]
) -> tuple[DictConfig, list[Path], list[str]]:
    """Compose a config without Hydra's own part; also the folders it is from, and the overrides of the job."""
    config = compose(name, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...}
    run = HydraConfig.get()
    places = [
        Path(place.path)
        for place in run.runtime.config_sources
        if place.schema == "file"
    ]
    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    words = OmegaConf.to_container(run.overrides.task)  # ${...} as it is
    assert isinstance(words, list)
    return job, places, words


def _join_names(mapping: dict[Any, Any]) -> None:
    """Give overrides of `reward.<name>` in the placement to that component: Hydra takes its dot for a block."""
    placement = value_at(mapping, "cluster.component_placement")
    if not isinstance(placement, dict):
        return
    for component in [key for key in placement if "." in str(key)]:
        role, _, name = component.partition(".")
        if isinstance(block := placement.get(role), dict) and name in block:
            placement[component] = block.pop(name)
            if not block:
                del placement[role]


def _file_sources(
    places: Sequence[Path], name: str, prefix: str = ""
) -> dict[str, Source]:
    """Find the lines of the keys of config `name` and of those that it extends, in the first folder that has each."""
    found: dict[str, Source] = {}
    for file in _with_parents(places, name):
        found |= line_sources(file.read_text(encoding="utf-8"), _short(file), prefix)
    return found


def _with_parents(
    places: Sequence[Path], name: str, below: Collection[str] = ()
) -> list[Path]:
    """List the files of the configs that config `name` names in its `defaults`, theirs before, and its own last."""
    file = next(
        (file for place in places if (file := place / f"{name}.yaml").is_file()), None
    )
    if file is None or name in below:  # a circle, which Hydra reports
        return []
    text = text_of(file, _short(file))
    above = name.rpartition("/")[0]
    parents = [
        parent.removeprefix("/")
        if parent.startswith("/")
        else f"{above}/{parent}".removeprefix("/")
        for parent in named_in_defaults(text)
    ]
    return [
        *(
            each
            for parent in parents
            for each in _with_parents(places, parent, (*below, name))
        ),
        file,
    ]


def _drop(mapping: dict[Any, Any], paths: Collection[str]) -> None:
    """Remove these keys, where they are."""
    for path in paths:
        above, _, key = path.rpartition(".")
        if isinstance(block := value_at(mapping, above), dict):
            block.pop(key, None)


def _of_another_choice(files: Sequence[Path], overrides: Sequence[str]) -> set[str]:
    """Find the keys that belong to a task, simulator or model which a later file or override replaces by another.

    Returns their paths, such as `env.kwargs.digits`.
    """
    texts = [file.read_text(encoding="utf-8") for file in files]
    steps = [
        (
            {key: node.value for key, node in scalars(text).items()},
            [*line_sources(text, "")],
        )
        for text in texts
    ]
    given: dict[str, str] = {}
    for word in OverridesParser.create().parse_overrides([*overrides]):
        key = word.key_or_group
        value = None if word.is_delete() else word.value()
        given |= (
            {f"{key}.{name}": str(v) for name, v in value.items()}
            if isinstance(value, dict)
            else {key: str(value)}
        )
    gone: set[str] = set()
    for choosing, belonging in _CHOICES:
        named: dict[str, str] = {}
        kept: set[str] = set()
        for values, keys in [*steps, (given, [*given])]:
            chosen = {key: values[key] for key in choosing if key in values}
            if any(
                named.get(key, "" if key == _PRESET else value) != value
                for key, value in chosen.items()
            ):
                gone = gone | kept
                kept = set()
            named |= chosen
            here = {match[0] for key in keys if (match := belonging.match(key))}
            gone = gone - here
            kept = kept | here
    return gone


def config_names(directory: Path = CONFIG_DIR) -> dict[str, str]:
    """Map the configs of a folder to the first comment line of each."""
    files = sorted(directory.glob("*.yaml"))
    firsts = {
        f.stem: f.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        for f in files
    }
    return {name: first.removeprefix("#").strip() for name, first in firsts.items()}


def group_names(group: str, folders: Sequence[Path] = (CONFIG_DIR,)) -> dict[str, str]:
    """Return what `cluster=<name>` or `model@<block>.model=<name>` can choose in these folders."""
    return {
        name: about
        for folder in reversed(folders)
        for name, about in config_names(folder / group).items()
    }


def listed(names: Mapping[str, str], indent: str = "") -> str:
    width = max((len(name) for name in names), default=0)
    return "\n".join(
        f"{indent}{name:<{width}}  {about}" for name, about in names.items()
    )


def _short(file: Path) -> str:
    """Return the path as the user would type it from here."""
    here = Path.cwd()
    if file.is_relative_to(here):
        return str(file.relative_to(here))
    return str(file)


def override(key: str, value: object) -> str:
    """Write an override as one word of a shell, which gives the key this value."""
    return shlex.quote(f"{key}={_written(value)}")


def _written(value: object) -> str:
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_/.][\w/.-]*", value) and isinstance(
            yaml.safe_load(value), str
        )
        if plain and value.lower() not in ("nan", "inf"):
            return value
        return QuotedString(value, Quote.double).with_quotes()
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"{key}:{_written(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_written, value)) + "]"
    return show(value)


# ── overrides ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _for_hydra(override: Override, line: CommandLine, places: Sequence[str]) -> str:
    """Let an override add a key that the file leaves out: the reader refuses those that no config has.

    Only keys of a language model have to be there, because the reader takes any key of a config.json.
    """
    word = str(override.input_line)
    key = override.get_key_element()
    group = override.key_or_group
    value = word.partition("=")[2]
    if (
        key == "profile"
        and override.value_type is ValueType.SIMPLE_CHOICE_SWEEP
        and not line.swept
    ):
        return f"++{key}={QuotedString(value, Quote.double).with_quotes()}"  # files with commas between
    if override.is_sweep_override() and not line.swept:
        if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP:
            what = "is a sweep over several values"
            why = "range(), choice(), glob() and the like mean one run for each"
            raise ConfigError.of(
                "override-is-sweep",
                key,
                what,
                word,
                why,
                "add --multirun, or write one value",
            )
        what = "a comma on the command line means a sweep over several values"
        why = "Hydra splits at the comma, and each value is a run of its own"
        fix = f"-m {word}"
        if takes_list(key):
            why = "Hydra splits at the comma; write a list to mean one value with several pieces"
            fix = f"{key}=[{value}]"
        raise ConfigError.of("override-is-sweep", key, what, word, why, fix)
    if key == MODEL:
        why = "a model belongs to the component that has it: model@actor.model, model@reward.model"
        fix = f"model@actor.model={value}"
        raise ConfigError.of(
            "renamed-key", MODEL, "is now model@actor.model", word, why, fix
        )
    of_model = (
        ".model." in key
        and not key.startswith("actor.model.kwargs.")
        and key not in all_places("mlp")
    )
    of_model = of_model and _may_have_language_model(line)
    if (
        override.type is not OverrideType.CHANGE
        or override.is_hydra_override()
        or of_model
    ):
        return word
    if group in (CLUSTER, MODEL):
        return _declared(key, value, line)
    folders = [
        *line.folders,
        *(Path(place.removeprefix("file://")) for place in places),
    ]
    if any((folder / group).is_dir() for folder in folders):
        return word
    return f"++{word}"


def _may_have_language_model(line: CommandLine) -> bool:
    """Whether a config or one that it extends says so anywhere: models of simulators have none of these words."""
    words = ("causal_lm", "model_type", "path:", f"{MODEL}@")
    files = _with_parents(line.folders, str(line.name)) if line.name is not None else ()
    texts = [*line.overrides, *(file.read_text(encoding="utf-8") for file in files)]
    return any(word in text for text in texts for word in words)


def _declared(key: str, name: str, line: CommandLine) -> str:
    """Write `cluster=<name>` or `model@<block>.model=<name>` for Hydra: added where no file of the config has it.

    Raises ConfigError where no such cluster or model is declared.
    """
    group, _, block = key.partition("@")
    default = re.compile(rf"defaults\[\d+\]\.(override +)?/?{re.escape(key)}")
    texts = [
        file.read_text(encoding="utf-8")
        for file in _with_parents(line.folders, str(line.name))
    ]
    among_defaults = any(
        default.fullmatch(path) for text in texts for path in line_sources(text, "")
    )
    known = group_names(group, line.folders)
    if all(choice in known for choice in (name.split(",") if line.swept else [name])):
        if among_defaults:
            return f"{key}={name}"
        return f"+{key}={name}"
    if group == MODEL and name == "null":
        if among_defaults:
            return f"~{key}"
        return f"++{block}=null"
    near = did_you_mean(name, known)
    what = f"no such {group} is declared" + suggestion(near)
    why = f"declared {group}s:\n{listed(known)}"
    fix = f"{key}={near or next(iter(known))}        (or declare it: configs/{group}/{name}.yaml)"
    code = "unknown-cluster" if group == CLUSTER else "unknown-model"
    raise ConfigError.of(code, key, what, name, why, fix)


def _config_error(error: Exception, line: CommandLine) -> ConfigError:
    """Convert an error of Hydra or OmegaConf to the standard format."""
    if isinstance(error, OverrideParseException):
        return _not_an_override(error.override, line.overrides)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_part(error, line)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return _not_resolved(
            error, yaml.safe_load(line.text), line_sources(line.text, _short(line.file))
        )
    if isinstance(error, UnicodeDecodeError):
        # Reads each file, and says which it is
        _with_parents(line.folders, str(line.name))
    if isinstance(
        wrong := not_blocks(line.text, _short(line.file), all_places), ConfigError
    ):
        return wrong
    first, _, rest = str(error).strip().partition("\n")
    word = next(
        (
            word
            for word in line.overrides
            if f"Could not override '{word.partition('=')[0]}'" in first
        ),
        None,
    )
    if word is None:
        return ConfigError.of(
            "bad-config",
            "config",
            first or type(error).__name__,
            None,
            rest.strip() or None,
            "see --help",
        )
    key = word.partition("=")[0]
    block, _, leaf = key.rpartition(".")
    known = [path for path in line_sources(line.text, "") if not path.endswith("]")]
    leaves = [
        path
        for path in known
        if not any(other.startswith(f"{path}.") for other in known)
    ]
    beside = did_you_mean(
        leaf,
        [
            path.removeprefix(f"{block}.")
            for path in leaves
            if path.rpartition(".")[0] == block
        ],
    )
    near = beside and f"{block}.{beside}"
    what = "the config has no such key to override" + suggestion(near)
    why = "an override changes a key that the config has; +key=value adds one"
    adds = block.endswith(".model")  # which takes any key of a config.json
    fix = (
        word.replace(key, near, 1) if near else f"+{word}" if adds else f"remove {word}"
    )
    return ConfigError.of("unknown-override", key, what, word, why, fix)


def _no_such_part(error: MissingConfigException, line: CommandLine) -> ConfigError:
    """Explain a name in `defaults` that no config, cluster or model has."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    known = group_names(group, line.folders)
    near = did_you_mean(name, known)
    by = re.match(r"In '(.+?)'", str(error))
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    got = name
    source = None
    for file in _with_parents(line.folders, by[1] if by else str(line.name))[-1:]:
        text = file.read_text(encoding="utf-8")
        for key, place in line_sources(text, _short(file)).items():
            row = text.splitlines()[(place.line or 1) - 1].strip()
            if source is None and key.startswith("defaults[") and word.search(row):
                got = row
                source = place
    what = f"there is no {group or 'config'} {name!r}" + suggestion(near)
    why = f"{group or 'config'}s that can be named here:\n{listed(known) or 'none'}"
    fix = word.sub(near, got) if near else "a name that is listed above"
    code = {CLUSTER: "unknown-cluster", MODEL: "unknown-model"}.get(
        group, "unknown-config"
    )
    return ConfigError.of(code, "defaults", what, got, why, fix, source=source)


def _check_is_block(line: CommandLine) -> None:
    """Raise ConfigError for a config that is a list; what is no YAML is told elsewhere."""
    with contextlib.suppress(yaml.YAMLError):
        if isinstance(yaml.compose(line.text), yaml.SequenceNode):
            why = "a config has keys with values, such as runner: {seed: 1}"
            fix = "defaults: [hybrid_ppo, _self_]        (and your keys below)"
            raise ConfigError.of(
                "bad-config",
                line.file.name,
                "is a list, not a block of keys",
                None,
                why,
                fix,
            )


def _not_an_override(word: str, words: Sequence[str]) -> ConfigError:
    """Explain an override that Hydra's grammar does not read; quote lists of numbers, such as 0-3,5-7 in braces."""
    quoted = re.sub(
        r"(:\s*)([0-9][0-9:-]*(?:\s*,\s*[0-9][0-9:-]*)+)(?=\s*[,}])", r'\1"\2"', word
    )
    if word != (plain := _DASHES.sub("-", word)):
        why = "it has a dash where a hyphen is meant, as word processors and chats write it"
        return ConfigError.of(
            "bad-config",
            word.partition("=")[0],
            "cannot read the override",
            word,
            why,
            plain,
        )
    rest = words[words.index(word) :] if word in words else [word]
    joined = next(
        (text for n in range(2, len(rest) + 1) if closes(text := " ".join(rest[:n]))),
        None,
    )
    if not closes(word) and joined is not None:
        what = "the shell has split it at a blank"
        why = "what has blanks is quoted there"
        return ConfigError.of(
            "bad-config", word.partition("=")[0], what, word, why, shlex.quote(joined)
        )
    fix = "quote text with commas, and close brackets and braces"
    if quoted != word:
        with contextlib.suppress(OverrideParseException):
            OverridesParser.create().parse_overrides([quoted])
            fix = shlex.quote(quoted)
    if "=" not in word:
        why = "an override is key=value, and the config is named already"
        fix = f"leave out {word}" if word in config_names() else f"{word}=<a value>"
        if pair := re.fullmatch(
            r"([\w.]+)(?:: *| += *)(\S+)",
            " ".join(rest[:3] if rest[1:2] == ["="] else [word]),
        ):
            fix = f"{pair[1]}={pair[2]}"
        return ConfigError.of("bad-config", word, "is no override", word, why, fix)
    what = "cannot read the override"
    why = "inside braces, commas separate entries; a value with a comma is quoted there"
    if (in_quotes := _as_text(word)) is not None:
        why = "Hydra reads text with characters such as < and > where it is quoted"
        fix = shlex.quote(in_quotes)
    return ConfigError.of(
        "bad-config", word.partition("=")[0].lstrip("+~"), what, word, why, fix
    )


def _as_text(word: str) -> str | None:
    """Return an override with its text, or the texts of its list, in quotes; None where that cannot be read either."""
    key, _, value = word.partition("=")
    listed = re.fullmatch(r"\[(.+)\]", value)
    texts = [text.strip() for text in listed[1].split(",")] if listed else [value]
    if any(not text or re.search(r"[\[\]{}\"'\\$]", text) for text in texts):
        return None
    quoted = ",".join(f'"{text}"' for text in texts)
    found = (
        f"{key}=[{quoted}]"
        if listed or takes_list(key.lstrip("+"))
        else f"{key}={quoted}"
    )
    try:
        OverridesParser.create().parse_overrides([found])
    except OverrideParseException:
        return None
    return found


def _not_resolved(
    error: OmegaConfBaseException, written: object, sources: Mapping[str, Source]
) -> ConfigError:
    """Explain a value that refers to nothing, cannot be read, or is still to be given (???)."""
    key = str(error.full_key)
    message = str(error).partition("\n")[0]
    leaf = key.rpartition(".")[2]
    value = value_at(written, key) if isinstance(written, dict) else None
    what = message.rpartition("interpolation: ")[2]
    why = "${...} stands for the value of another key"
    fix = f"{leaf}: <a value>"
    if isinstance(error, MissingMandatoryValue):
        what = "has no value yet"
        why = "??? stands for a value that is given elsewhere"
        fix = f"{key}=<a value>"
    elif isinstance(error, GrammarParseError):
        what = f"cannot read this: {message}"
        why = f"{why}, and its braces are closed"
    elif isinstance(error, InterpolationKeyError) and (
        match := re.search(r"'(.+)'", message)
    ):
        block, _, word = match[1].rpartition(".")
        # ${.word}: of the same block
        beside = key.rpartition(".")[0] if f"${{.{word}" in str(value) else block
        names = [
            p.rpartition(".")[2]
            for p in sources
            if p != key and p.rpartition(".")[0] == beside
        ]
        near = did_you_mean(word, names)
        near = (
            f"{block}.{near}".removeprefix(".")
            if near
            else did_you_mean(match[1], [p for p in sources if p != key])
        )
        what = f"the config has no key {match[1]!r}" + suggestion(near)
        fix = f"{leaf}: {value}".replace(match[1], near) if near and value else fix
    elif variable := re.search(r"Environment variable '(.+)' not found", message):
        what, why, fix = without_variable(leaf, value, variable[1])
    elif isinstance(error, UnsupportedInterpolationType) and (
        match := re.search(r"type (\S+)", message)
    ):
        near = did_you_mean(
            match[1],
            ("oc.env", "oc.select", "oc.decode", "oc.create", "oc.deprecated", "hydra"),
        )
        what = f"there is no {match[1]!r} that gives values" + suggestion(near)
        fix = f"{leaf}: {value}".replace(match[1], near) if near else fix
    got = None if value is None else f"{leaf}: {value}"
    return ConfigError.of(
        "bad-config", key, what, got, why, fix, source=source_of(key, sources)
    )
