"""The config edge: Hydra's command line in, one plain mapping with the place of every value out.

Only this module touches Hydra and OmegaConf. Their errors leave it in the form of all other errors, with exit code 2.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlplace.config.keys import key_paths
from rlplace.config.renamed import RENAMED
from rlplace.errors import ConfigError, Problem, Source, did_you_mean, suggestion

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
CLUSTER, MODEL = "cluster", "model"  # folders of declared clusters and models, and the blocks that they fill

# A run keeps its own files (run.py); Hydra should neither change directory nor write.
_QUIET = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One composed config, plain Python values only."""

    name: str
    mapping: Mapping[str, Any]
    sources: Mapping[str, Source]  # key path -> where its value was written


def with_hydra(argv: Sequence[str]) -> list[Composed]:
    """The configs that `argv` (without the program) names: several under `--multirun`, none for `--cfg`.

    Raises ConfigError for a config or override that does not exist or does not parse; SystemExit for Hydra's own flags.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself
    found: list[Composed | ConfigError] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=None)
    def main(composed: DictConfig) -> None:
        try:  # what leaves this function as an error, Hydra would announce in its own words
            found.append(_plain(composed))
        except ConfigError as error:
            found.append(error)
        except OmegaConfBaseException as error:
            found.append(ConfigError([_problem(error, argv)]))

    # argparse wants the overrides side by side; people write them around the flags.
    overrides = [_chosen(word, argv) for word in argv if _is_override(word)]
    flags = [word for word in argv if not _is_override(word)]
    # --config-path replaces the shipped folder; its clusters and models stay within reach.
    beside = [f"hydra.searchpath=[file://{CONFIG_DIR}]"] if _flag(argv, "--config-path", "-cp") else []
    saved = sys.argv
    try:
        with tempfile.TemporaryDirectory() as scratch:  # Hydra keeps a file about every sweep
            sys.argv = [saved[0], *flags, *overrides, *_QUIET, f"hydra.sweep.dir={scratch}", *beside]
            main()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_problem(error, argv)]) from error
    except yaml.YAMLError as error:
        raise ConfigError([_yaml_problem(error)]) from error
    finally:
        sys.argv = saved
    for composed in found:
        if isinstance(composed, ConfigError):
            raise composed
    return [composed for composed in found if isinstance(composed, Composed)]


def config_names(directory: Path = CONFIG_DIR) -> dict[str, str]:
    """The shipped configs and the first comment line of each."""
    names = {}
    for file in sorted(directory.glob("*.yaml")):
        first = file.read_text(encoding="utf-8").split("\n", 1)[0]
        names[file.stem] = first.removeprefix("#").strip()
    return names


def group_names(group: str, argv: Sequence[str] = ()) -> dict[str, str]:
    """What `cluster=<name>` or `model=<name>` can choose, with the command line's own folder."""
    return config_names(CONFIG_DIR / group) | config_names(config_directory(argv) / group)


def config_directory(argv: Sequence[str]) -> Path:
    """Where the primary config of this command line is looked for."""
    chosen = _flag(argv, "--config-dir", "-cd") or _flag(argv, "--config-path", "-cp")
    return Path(chosen).resolve() if chosen else CONFIG_DIR


def directory_words(argv: Sequence[str]) -> list[str]:
    """The words of the command line that say where configs are looked for."""
    flags = ("--config-dir", "-cd", "--config-path", "-cp")
    return [word for flag in flags if (value := _flag(argv, flag)) is not None for word in (flag, value)]


def config_name(argv: Sequence[str]) -> str | None:
    name = _flag(argv, "--config-name", "-cn")
    return name.removesuffix(".yaml") if name else None


def line_sources(text: str, file: str, prefix: str = "") -> dict[str, Source]:
    """Key path -> line for every key of a YAML text. The mark is where the key stands."""
    found: dict[str, Source] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}" if path else str(key.value)
                found[below] = Source(file=file, line=key.start_mark.line + 1)
                visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                found[f"{path}[{i}]"] = Source(file=file, line=value.start_mark.line + 1)
                visit(value, f"{path}[{i}]")

    visit(yaml.compose(text, Loader=yaml.SafeLoader), prefix)
    return found


def _plain(composed: DictConfig) -> Composed:
    run = HydraConfig.get()
    name = run.job.config_name
    if name is None:
        raise ConfigError([_no_config()])
    mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(mapping, dict)
    places = [Path(place.path) for place in run.runtime.config_sources if place.schema == "file"]
    parts = {g: choice for g, choice in run.runtime.choices.items() if choice and not g.startswith("hydra")}
    sources: dict[str, Source] = {}
    for group, choice in parts.items():
        folder, _, package = group.partition("@")
        sources.update(_file_sources(places, f"{folder}/{choice}", prefix=package or folder.replace("/", ".")))
    sources.update(_file_sources(places, name.removesuffix(".yaml")))
    for override in run.overrides.task:
        key = override.partition("=")[0].lstrip("+~")
        if key in parts:
            continue
        for below in [k for k in sources if k.startswith((f"{key}.", f"{key}["))]:
            del sources[below]
        sources[key] = Source(file=f"command line: {override.removeprefix('++')}")
    return Composed(name=name, mapping={str(k): v for k, v in mapping.items()}, sources=sources)


def _file_sources(places: Sequence[Path], name: str, prefix: str = "") -> dict[str, Source]:
    """Where the keys of the config file `name` stand, in the last of the folders that has it."""
    files = [file for place in places if (file := place / f"{name}.yaml").is_file()]
    return line_sources(files[-1].read_text(encoding="utf-8"), _short(files[-1]), prefix) if files else {}


def _chosen(word: str, argv: Sequence[str]) -> str:
    """`cluster=<name>` and `model@<block>.model=<name>` as Hydra wants them: added to a config without such a default.

    Raises ConfigError where no such cluster or model is declared.
    """
    key, _, name = word.partition("=")
    group = key.partition("@")[0]
    if key == MODEL:
        raise ConfigError([_renamed_model(name)])
    if key in RENAMED and not key.endswith(".optimizer"):
        return f"++{word}"  # reading the config refuses it, with the line that replaces it
    if group not in (CLUSTER, MODEL):
        return word
    files = [folder / f"{config_name(argv)}.yaml" for folder in (config_directory(argv), CONFIG_DIR)]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    among_defaults = re.search(rf"^ *- *(override +)?/?{key} *:", text, re.MULTILINE)
    known = group_names(group, argv)
    if name in known:
        return word if among_defaults else f"+{word}"
    if group == MODEL and name == "null":
        return f"~{key}" if among_defaults else f"{key.partition('@')[2]}=null"
    raise ConfigError([_unknown_name(key, name, known)])


def _renamed_model(name: str) -> Problem:
    return Problem(
        code="renamed-key",
        key=MODEL,
        what="is now model@actor.model",
        got=f"{MODEL}={name}",
        why="a model belongs to the component that has it: model@actor.model, model@reward.model",
        fix=f"model@actor.model={name}",
    )


def _unknown_name(key: str, name: str, known: Mapping[str, str]) -> Problem:
    near, group = did_you_mean(name, known), key.partition("@")[0]
    return Problem(
        code="unknown-cluster" if group == CLUSTER else "unknown-model",
        key=key,
        what=f"no such {group} is declared" + suggestion(near),
        got=name,
        why=f"declared {group}s:\n" + "\n".join(f"{n:<20} {about}" for n, about in known.items()),
        fix=f"{key}={near or next(iter(known))}        (or declare it: configs/{group}/{name}.yaml)",
    )


def _short(file: Path) -> str:
    """The path as the user would type it from here."""
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _flag(argv: Sequence[str], *names: str) -> str | None:
    for i, word in enumerate(argv):
        for name in names:
            if word == name and i + 1 < len(argv):
                return argv[i + 1]
            if word.startswith(name + "="):
                return word.partition("=")[2]
    return None


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _no_config() -> Problem:
    names = config_names()
    return Problem(
        code="no-config",
        key="--config-name",
        what="no config was named",
        why="shipped configs:\n" + "\n".join(f"{n:<20} {about}" for n, about in names.items()),
        fix="--config-name hybrid_ppo",
    )


def _problem(error: Exception, argv: Sequence[str]) -> Problem:
    """One of Hydra's own complaints in our form."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "primary config" in text:
        wanted, directory = config_name(argv) or "", config_directory(argv)
        names = config_names(directory) if directory.is_dir() else {}
        near = did_you_mean(wanted, names)
        return Problem(
            code="unknown-config",
            key="--config-name",
            what="no such config" + suggestion(near),
            got=wanted,
            why=f"{_short(directory)} holds: " + (", ".join(names) or "no .yaml file"),
            fix=f"--config-name {near or 'hybrid_ppo'}",
        )
    overrides = [w for w in argv if _is_override(w)]
    if "Ambiguous value" in text:
        bad = next((w for w in overrides if w in first), overrides[0] if overrides else "")
        key, _, value = bad.partition("=")
        return Problem(
            code="override-is-sweep",
            key=key,
            what="a comma on the command line means a sweep over several values",
            got=bad,
            why="Hydra splits at the comma; write a list to mean one value with several pieces",
            fix=f"{key}=[{value}]",
        )
    if "Could not override" in text or "not in struct" in text:
        key = first.partition("'")[2].partition("'")[0].rstrip(".")
        bad = next((w for w in overrides if w.partition("=")[0] == key), key)
        return Problem(
            code="unknown-override",
            key=key,
            what="the config has no such key to override",
            got=bad,
            why="an override changes a key that the YAML file has; +key=value adds one",
            fix=_override_fix(key, bad, argv),
        )
    return Problem(code="bad-config", key="config", what=first, why=text.removeprefix(first).strip() or None)


def _override_fix(key: str, bad: str, argv: Sequence[str]) -> str:
    name, directory = config_name(argv), config_directory(argv)
    file = directory / f"{name}.yaml"
    known = line_sources(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else {}
    paths = key_paths()
    parent, _, leaf = key.rpartition(".")
    value = bad.partition("=")[2]
    if key in known and key not in paths:  # a name with a dot, which Hydra takes for two
        above = max((path for path, free in paths.items() if free and key.startswith(f"{path}.")), key=len)
        return f"'{above}={{{key.removeprefix(f'{above}.')}: {value}}}'"
    if key in known:  # a block: what is new in it is added key by key
        added = value.strip("{} ").partition(":")
        return f"+{key}.{added[0].strip()}={added[2].partition(',')[0].strip()}"
    block = parent.rpartition(".")[0] if parent in known and parent not in paths else parent  # a block under a name
    if f"{block}.{leaf}" in paths:
        return f"+{bad}"
    free, first = paths.get(parent, False), key.partition(".")[0]
    beside = [k for k in (*paths, *known) if k.startswith(f"{parent if free else first}.")]
    leaves = {k.rpartition(".")[2]: k for k in (beside if beside or free else (*paths, *known))}
    near = did_you_mean(leaf, leaves)
    if near is None:
        return f"+{bad}" if free else f"remove {bad}"
    return bad.replace(key, leaves[near] if leaves[near] in known else f"+{leaves[near]}", 1)


def _yaml_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or "is not YAML"
    tab = "found character '\\t'" in str(error)
    return Problem(
        code="bad-yaml",
        key="config",
        what=what,
        got=(mark.get_snippet().strip().splitlines()[0] if mark and mark.buffer else None),
        source=Source(file=_short(Path(mark.name)), line=mark.line + 1) if mark else None,
        why="YAML indents with blanks only, never with tabs" if tab else getattr(error, "context", None),
        fix="replace the tab by blanks" if tab else "see the line named above",
    )
