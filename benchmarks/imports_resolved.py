"""Print the settings of one file of another library as the library itself resolves them: `@@` and JSON.

    python benchmarks/imports_resolved.py LIBRARY CHECKOUT FILE [WORD ...]

WORD: the words of the launch, for a script. The parser of the library runs; what it imports and is not installed is a
stub that takes everything. Without a network and without a GPU. `benchmarks/imports.py` calls it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class Stub(types.ModuleType):
    """A module that has everything, and none of it does anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return ()
        made = type(name, (), {}) if name[:1].isupper() else MagicMock()
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for every module that is not installed. `real`: beginnings of names that are never stubs."""

    def __init__(self, *real: str) -> None:
        self.real = real

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == r or fullname.startswith(f"{r}.") for r in self.real):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def container(config: Any) -> Any:
    """Return an OmegaConf config as plain values, each reference resolved where it can be."""
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(config, resolve=False)


def by_hydra(folder: Path, name: str, overrides: Sequence[str], path: str) -> Any:
    """Return the config that Hydra composes. `path`: a further folder in which it looks."""
    words = [w for w in overrides if "=" in w and not w.startswith("-")]
    if path:
        words.append(f"hydra.searchpath=[file://{path}]")
    with initialize_config_dir(str(folder), version_base=None):
        return container(compose(name, overrides=words))


def verl(root: Path, file: Path, words: Sequence[str]) -> Any:
    folder = root / "verl" / "trainer" / "config"
    name = "ppo_trainer"
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option == "--config-name":
            name = (value or words[at + 1]).strip("'\"").removesuffix(".yaml")
    text = file.read_text(encoding="utf-8", errors="replace")
    if "ppo_megatron_trainer" in text:
        name = "ppo_megatron_trainer"
    for found in (folder, *root.rglob("config")):
        if (found / f"{name}.yaml").is_file():
            return by_hydra(found, name, words, str(folder))
    raise SystemExit(f"no {name}.yaml in the checkout")


def of_yaml(root: Path, file: Path, words: Sequence[str]) -> Any:
    """Of RLinf and ROLL: a file of Hydra."""
    OmegaConf.register_new_resolver("multiply", lambda a, b: a * b)
    OmegaConf.register_new_resolver("int_div", lambda a, b: a // b)
    OmegaConf.register_new_resolver("subtract", lambda a, b: a - b)
    OmegaConf.register_new_resolver("not", lambda a: not bool(a))
    os.environ.setdefault("EMBODIED_PATH", str(root / "examples" / "embodiment"))
    os.environ.setdefault("REPO_PATH", str(root))
    return by_hydra(file.parent, file.stem, (), "")


def nemo_rl(root: Path, file: Path, words: Sequence[str]) -> Any:
    module = by_file(root / "nemo_rl" / "utils" / "config.py", "nemo_config")
    for name, function in {
        "mul": lambda a, b: a * b,
        "add": lambda a, b: a + b,
        "div": lambda a, b: a / b,
        "max": lambda a, b: max(a, b),
    }.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    return container(module.load_config(str(file)))


def by_file(file: Path, name: str) -> types.ModuleType:
    """Return the module in a file, without the package that it is in."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def areal(root: Path, file: Path, words: Sequence[str]) -> Any:
    sys.meta_path.append(Stubs())
    by_file(root / "areal" / "utils" / "constants.py", "areal.utils.constants")
    packing = Stub("areal.utils.seqpack")
    vars(packing)["PACKING_ALGORITHMS"] = ("ffd", "kk")
    sys.modules[packing.__name__] = packing
    sys.meta_path.insert(0, Only("areal"))
    module = by_file(root / "areal" / "api" / "cli_args.py", "areal_cli_args")
    config = OmegaConf.load(file)
    reason = ""
    for kind in ("PPOConfig", "GRPOConfig"):
        try:
            made = module.to_structured_cfg(config, getattr(module, kind))
            plain = container(made)
            # What the file does not have and the class has as a default block is no component
            for part in ("critic", "ref"):
                if part not in config:
                    plain.pop(part, None)
            return plain
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")
    raise SystemExit(reason)


def skyrl(root: Path, file: Path, words: Sequence[str]) -> Any:
    sys.meta_path.insert(0, Only("skyrl"))
    sys.meta_path.append(Stubs())
    module = by_file(root / "skyrl" / "train" / "config" / "config.py", "skyrl_config")
    overrides = [w for w in words if "=" in w and not w.startswith("-")]
    made = module.SkyRLTrainConfig.from_cli_overrides(overrides)
    return dataclasses.asdict(made)


def openrlhf(root: Path, file: Path, words: Sequence[str]) -> Any:
    found: dict[str, Any] = {}

    def keep(self: argparse.ArgumentParser, *a: Any, **k: Any) -> Any:
        known, _ = self.parse_known_args(list(words))
        found.update(vars(known))
        raise SystemExit(0)

    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, Only("openrlhf"))
    argparse.ArgumentParser.parse_args = keep  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        runpy.run_path(
            str(root / "openrlhf" / "cli" / "train_ppo_ray.py"), run_name="__main__"
        )
    return {k: v for k, v in found.items() if isinstance(v, int | float | str | list)}


class Only(Stubs):
    """Stubs for all of one library and for what is not installed."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in (self.real[0], "ray", "vllm", "deepspeed", "torch", "transformers"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None


_LIBRARIES = {
    "verl": verl,
    "rlinf": of_yaml,
    "roll": of_yaml,
    "nemo_rl": nemo_rl,
    "areal": areal,
    "skyrl": skyrl,
    "openrlhf": openrlhf,
}


def main(words: list[str]) -> int:
    library, root, file, *rest = words
    if library not in _LIBRARIES:
        raise SystemExit(f"{library} has no parser that runs here")
    mapping = _LIBRARIES[library](Path(root), Path(file), rest)
    print("\n@@" + json.dumps(mapping, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
