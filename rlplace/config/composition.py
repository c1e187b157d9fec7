"""Compose a config with Hydra, without the block of Hydra's own settings where the config has no use for it.

The only module that uses private functions of Hydra and OmegaConf. `hydra.compose` merges eight files and a schema of
Hydra's own settings into every config, and parses YAML in Python. Here, the same functions of Hydra merge the files of
the config alone, and libyaml parses them. `hydra.compose` itself composes a config that mentions Hydra, a config with
an error (so that errors are Hydra's own), and every config if the versions of the libraries were not tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import omegaconf
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
)
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from rlplace.tried import untried

_HYDRA = "hydra"
_SEARCHPATH = "hydra.searchpath="
_JOB_NUMBER = "hydra.job.num="
_ERRORS = (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
_HEADER = 512  # characters in which Hydra looks for the line `# @package`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A config that Hydra has composed, without the block `hydra`.

    `choices`: config group -> chosen file, as in `hydra.runtime.choices`, without the groups of Hydra itself.
    `folders`: folders that were searched for configs. `overrides`: overrides as they were written, without those of the
    block `hydra`.
    """

    config: DictConfig
    choices: Mapping[str, str | None]
    folders: Sequence[Path]
    overrides: Sequence[str]


class _MentionsHydra(Exception):
    """A file of the config mentions Hydra, and may use the block of its settings."""


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Return the parsed overrides. Raises OverrideParseException for the first word that Hydra cannot read."""
    return [_parsed_override(word) for word in words]


@functools.lru_cache(maxsize=512)
def _parsed_override(word: str) -> Override:
    """Return the parsed override. A command line is read several times, each time with a parser in Python."""
    (override,) = OverridesParser.create().parse_overrides([word])
    return override


def composition(name: str, overrides: Sequence[str]) -> Composition:
    """Compose the config `name` with overrides. Hydra has to be initialised.

    `overrides`: overrides in Hydra's form. Raises errors of Hydra and OmegaConf.
    """
    found = None
    if _is_tried():
        found = _without_settings(name, overrides)
    if found is None:
        found = _with_settings(name, overrides)
    return found


@functools.cache
def _is_tried() -> bool:
    """Return whether the private functions were tried with the installed versions of Hydra and OmegaConf."""
    versions = {
        "hydra-core": hydra.__version__,
        "omegaconf": omegaconf.__version__,
    }
    return not any(untried(name, version) for name, version in versions.items())


def _with_settings(name: str, overrides: Sequence[str]) -> Composition:
    """Compose a config with `hydra.compose`, and with the block `hydra` for references such as `${hydra:job.num}`."""
    config = hydra.compose(name, [*overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    run = HydraConfig.get()
    folders: list[Path] = []
    for source in run.runtime.config_sources:
        if source.schema == FileConfigSource.scheme():
            folders.append(Path(source.path))
    choices: dict[str, str | None] = {}
    for group, choice in run.runtime.choices.items():
        if not group.startswith(_HYDRA):
            choices[group] = choice
    own_keys = [str(key) for key in config if key != _HYDRA]
    # Overrides as they were written, `${...}` included
    words = OmegaConf.to_container(run.overrides.task)
    assert isinstance(words, list)
    return Composition(
        config=OmegaConf.masked_copy(config, own_keys),
        choices=choices,
        folders=folders,
        overrides=words,
    )


def _without_settings(name: str, overrides: Sequence[str]) -> Composition | None:
    """Compose a config as Hydra's `ConfigLoaderImpl.load_configuration` does, without the block `hydra`.

    Return None if this block may be needed, or if the config has an error or a warning.
    """
    searchpath = [word for word in overrides if word.startswith(_SEARCHPATH)]
    of_hydra = (_SEARCHPATH, _JOB_NUMBER)
    words = [word for word in overrides if not word.startswith(of_hydra)]
    # A reference in an override is checked where Hydra notes the override
    if any(_HYDRA in word or "${" in word for word in words):
        return None
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return _loaded(loader, name, words, searchpath)
    except (*_ERRORS, HydraException, Warning, _MentionsHydra):
        return None


def _loaded(
    loader: ConfigLoaderImpl,
    name: str,
    words: Sequence[str],
    searchpath: Sequence[str],
) -> Composition:
    """Compose the config `name`. `words`: its overrides. `searchpath`: no word, or the override of the search path."""
    loader.ensure_main_config_source_available()
    parsed = parse_overrides(words)
    repository = _CachingRepository(loader.get_search_path())
    loader._process_config_searchpath(name, parse_overrides(searchpath), repository)
    loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
    merged = create_defaults_list(
        repo=repository,
        config_name=name,
        overrides_list=parsed,
        prepend_hydra=False,
        skip_missing=False,
    )
    config = loader._compose_config_from_defaults_list(merged.defaults, repository)
    # Overrides without `+` only change keys that exist
    OmegaConf.set_struct(config, True)
    loader._apply_overrides_to_config(merged.config_overrides, config)
    OmegaConf.set_struct(config, None)
    folders: list[Path] = []
    for source in repository.get_sources():
        if source.scheme() == FileConfigSource.scheme():
            folders.append(Path(source.path))
    return Composition(
        config=config,
        choices=merged.overrides.known_choices,
        folders=folders,
        overrides=words,
    )


class _CachingRepository(CachingConfigRepository):
    """Hydra's repository for the composition of one config, with files that libyaml parses."""

    def __init__(self, searchpath: ConfigSearchPath) -> None:
        # Hydra copies a repository here, with the schemas of all its settings
        self.delegate = _Repository(searchpath)
        self.cache = {}


class _Repository(ConfigRepository):
    """Hydra's repository of configs, with files that libyaml parses."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Make a source of each entry of the search path."""
        super().initialize_sources(config_search_path)
        for number, source in enumerate(self.sources):
            if source.scheme() == FileConfigSource.scheme():
                self.sources[number] = _Files(source.provider, source.path)


class _Files(FileConfigSource):
    """A folder with config files that do not mention Hydra."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file. Raises _MentionsHydra, and errors of libyaml, for which Hydra reads the file again."""
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        text = Path(file).read_text(encoding="utf-8")
        if _HYDRA in text:
            raise _MentionsHydra
        return ConfigResult(
            config=_config(text),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=ConfigSource._get_header_dict(text[:_HEADER]),
        )


def read_config(file: Path, text: str) -> Any:
    """Return the config in a file. `text`: text of the file. Raises errors of OmegaConf.load."""
    if _is_tried():
        with contextlib.suppress(*_ERRORS):
            return _config(text)
    return OmegaConf.load(file)


def _config(text: str) -> Any:
    """Return the config in a YAML text, as `OmegaConf.load` reads it."""
    # A new object: Hydra changes the configs that it has read
    return pickle.loads(_pickled(text))


@functools.lru_cache(maxsize=256)
def _pickled(text: str) -> bytes:
    """Return the pickled config in a YAML text. To unpickle a config takes a tenth of the time to create it."""
    values = yaml.load(text, Loader=_loader(text))
    config = OmegaConf.create() if values is None else OmegaConf.create(values)
    return pickle.dumps(config)


def _loader(text: str) -> Any:
    """Return the class with which OmegaConf reads YAML, with the parser of libyaml, if PyYAML has it.

    libyaml accepts tabs where PyYAML reports an error, so a text with a tab is left to PyYAML.
    """
    if not yaml.__with_libyaml__ or "\t" in text:
        return get_yaml_loader()
    return _fast_loader()


@functools.cache
def _fast_loader() -> Any:
    """Return OmegaConf's class of YAML loaders, with the parser of libyaml in place of PyYAML's."""
    slow = get_yaml_loader()

    # OmegaConf makes its class when it is asked for it, so mypy cannot know this base
    class Loader(yaml.CSafeLoader, slow):  # type: ignore[misc, valid-type]
        """Reads what OmegaConf's loader reads."""

        yaml_implicit_resolvers = slow.yaml_implicit_resolvers
        yaml_constructors = slow.yaml_constructors

    return Loader
