"""Print the settings of one file of another library as the library itself resolves them: `@@` and JSON.

    python benchmarks/imports_resolved.py LIBRARY CHECKOUT FILE [WORD ...]
    python benchmarks/imports_resolved.py LIBRARY CHECKOUT

WORD: the words of the launch, for a script. Without FILE, each line of the input is a JSON list [file for the output,
FILE, WORD, ...]; what the library imports is imported once, and an exit code is printed for each line. The parser of
the library runs; what it imports and is not installed is a stub that takes everything. Without a network and without a
GPU. `benchmarks/imports.py` calls it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
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
    utils = Stub("skyrl.backends.skyrl_train.inference_servers.utils")
    vars(utils)["_uses_lora_weight_sync"] = skyrl_syncs_adapters
    sys.modules[utils.__name__] = utils
    module = by_file(root / "skyrl" / "train" / "config" / "config.py", "skyrl_config")
    overrides = [w for w in words if "=" in w and not w.startswith("-")]
    made = module.SkyRLTrainConfig.from_cli_overrides(overrides)
    return dataclasses.asdict(made)


def skyrl_syncs_adapters(config: Any) -> bool:
    """Return whether SkyRL sends LoRA adapters to its engines, as the function does whose module is a stub."""
    policy = config.trainer.policy
    if policy.model.lora.rank <= 0:
        return False
    if config.trainer.strategy == "megatron":
        return not policy.megatron_config.lora_config.merge_lora
    return True


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


class Absent(Stubs):
    """Stubs for packages that are not installed. `packages`: their names."""

    def __init__(self, *packages: str) -> None:
        super().__init__()
        self.packages = {p for p in packages if importlib.util.find_spec(p) is None}

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return super().find_spec(fullname)


# ── slime ────────────────────────────────────────────────────────────────────────────────────────────────────────────


# Packages that slime and Megatron import, and that may not be installed
_SLIME_ABSENT = ("sglang", "sglang_router", "wandb")


class ServerArguments:
    """The arguments of SGLang's server that a launch of slime most often sets, in place of SGLang's own class."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, **_: Any) -> None:
        for name, kind in (("mem-fraction-static", float), ("context-length", int)):
            parser.add_argument(f"--{name}", type=kind, default=None)


class Machine:
    """`os` for slime's arguments: every folder of a model is there."""

    environ = os.environ

    class path:
        join = staticmethod(os.path.join)
        exists = staticmethod(lambda _: True)
        isdir = staticmethod(lambda _: False)


@functools.cache
def slime_parsers(root: Path) -> tuple[Any, Any]:
    """Return the modules of the arguments of slime, and of Megatron in slime.

    The folder of Megatron-LM is the variable MEGATRON_LM. SGLang's arguments are those of `ServerArguments`.
    """
    if "MEGATRON_LM" not in os.environ:
        raise SystemExit("slime's parser is built on Megatron's: set MEGATRON_LM")
    sys.path[:0] = [str(root), os.environ["MEGATRON_LM"]]
    sys.meta_path.append(Absent(*_SLIME_ABSENT))
    # Megatron is written for Python 3.12
    vars(typing).setdefault("override", lambda method: method)
    for name, kind in (
        ("sglang.srt.server_args", "ServerArgs"),
        ("sglang_router.launch_router", "RouterArgs"),
    ):
        module = Stub(name)
        router = type(kind, (), {"add_cli_args": staticmethod(lambda *a, **k: None)})
        vars(module)[kind] = ServerArguments if kind == "ServerArgs" else router
        sys.modules[name] = module
    # Without what the packages themselves import, which no parser needs
    for name, folder in (
        ("megatron.training", Path(os.environ["MEGATRON_LM"]) / "megatron/training"),
        ("slime.backends.megatron_utils", root / "slime/backends/megatron_utils"),
    ):
        package = Stub(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    transformers = importlib.import_module("transformers")
    transformers.AutoConfig.from_pretrained = lambda *a, **k: None
    arguments = importlib.import_module("slime.utils.arguments")
    vars(arguments)["os"] = Machine
    of_megatron = importlib.import_module("slime.backends.megatron_utils.arguments")
    return arguments, of_megatron


def slime(root: Path, file: Path, words: Sequence[str]) -> Any:
    """Parse the words of a launch with slime's parser and its checks, on top of Megatron's."""
    arguments, of_megatron = slime_parsers(root)
    sys.argv = ["train.py", *words]
    adds = arguments.get_slime_extra_args_provider()
    before = arguments._pre_parse_mode()
    engines = vars(arguments.sglang_parse_args())
    made = of_megatron.megatron_parse_args(extra_args_provider=adds)
    for block in (vars(before), engines):
        for name, value in block.items():
            setattr(made, name, value)
    arguments.slime_validate_args(made)
    kept = (bool, int, float, str, list)
    return {
        name.replace("_", "-"): value
        for name, value in vars(made).items()
        if isinstance(value, kept)
    }


# ── TRL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trl(root: Path, file: Path, words: Sequence[str]) -> Any:
    """Run a script of TRL up to its trainer, and return the config and the arguments that the trainer gets.

    TRL's own parser reads the command in the docstring of a script that takes its config from the command line. The
    launcher's own parser reads the processes. Data sets, models and what is not installed are stubs.
    """
    sys.path.insert(0, str(root))
    text = file.read_text(encoding="utf-8")
    sys.meta_path.append(Absent(*imported_packages(text)))
    launch: list[str] = []
    if file.suffix == ".yaml":
        words = ["--config", str(file)]
        file = root / "trl" / "scripts" / "grpo.py"
    elif "TrlParser" in text or "HfArgumentParser" in text:
        launch, words = trl_command(text)
    processes = accelerate_settings(root, launch)
    without_devices(int(processes.get("num_processes", 1)))
    taken: dict[str, Any] = {}

    class Trainer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            taken.update(kwargs, trainer=self.name)  # type: ignore[attr-defined]
            raise SystemExit(0)

    library = importlib.import_module("trl")
    transfer = "trl.experimental.async_grpo.weight_transfer"
    sys.modules[transfer] = Stub(transfer)
    modules = [library, importlib.import_module("trl.experimental.async_grpo")]
    for module in modules:
        for name in ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer"):
            if name in getattr(module, "__all__", ()) or hasattr(module, name):
                setattr(module, name, type(name, (Trainer,), {"name": name}))
    sys.argv = [str(file), *words]
    os.chdir(root)
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(file), run_name="__main__")
    if "trainer" not in taken:
        raise SystemExit("the script makes no trainer")
    return trl_settings(taken) | processes


def imported_packages(text: str) -> set[str]:
    """Return the packages that a Python script imports. `text`: the script."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def trl_command(text: str) -> tuple[list[str], list[str]]:
    """Return (words of the launcher, words of the script) of the command in the docstring of a script."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    lines = re.sub(r"\\\s*\n", " ", docstring).split("\n")
    found = [shlex.split(line) for line in lines if re.search(r"\.py\b.*\s--", line)]
    command = max(found, key=len, default=[])
    at = next((n for n, word in enumerate(command) if word.endswith(".py")), -1)
    return command[:at], command[at + 1 :] if at >= 0 else []


def without_devices(processes: int) -> None:
    """Let data sets and models be stubs, and the config be made as on machines with GPUs. `processes`: their number."""
    transformers = importlib.import_module("transformers")
    arguments = importlib.import_module("transformers.training_args")
    for name in ("AutoProcessor", "AutoTokenizer", "AutoModelForCausalLM"):
        getattr(transformers, name).from_pretrained = MagicMock()
    vars(arguments)["is_torch_bf16_gpu_available"] = lambda: True
    arguments.TrainingArguments.world_size = property(lambda _: processes)
    datasets = importlib.import_module("datasets")
    halves = (MagicMock(), MagicMock())
    vars(datasets)["load_dataset"] = lambda *a, split=None, **k: (
        halves if isinstance(split, list) else MagicMock()
    )


def trl_settings(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run of TRL. `taken`: what the trainer gets."""
    config = taken.get("args")
    found = dict(vars(config)) if config is not None else {}
    found["trainer"] = taken["trainer"]
    model = taken.get("model")
    found["model_name_or_path"] = model if isinstance(model, str) else None
    adapter = taken.get("peft_config")
    if adapter is not None:
        found |= {
            "use_peft": True,
            "lora_r": adapter.r,
            "lora_alpha": adapter.lora_alpha,
            "lora_target_modules": sorted(adapter.target_modules or ()),
        }
    kept = (bool, int, float, str, list)
    return {k: v for k, v in found.items() if v is None or isinstance(v, kept)}


def accelerate_settings(root: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return what accelerate's own parser, and its reader of config files, take from the words of the launcher."""
    if list(words[:2]) != ["accelerate", "launch"]:
        return {}
    launcher = importlib.import_module("accelerate.commands.launch")
    reader = importlib.import_module("accelerate.commands.config.config_args")
    known, _ = launcher.launch_command_parser().parse_known_args(
        [*words[2:], "script.py"]
    )
    found = {"num_processes": known.num_processes}
    if known.config_file:
        file = reader.load_config_from_file(str(root / known.config_file))
        found["num_processes"] = known.num_processes or file.num_processes
        stage = (file.deepspeed_config or {}).get("zero_stage")
        if stage is not None:
            found["zero_stage"] = stage
    return {key: value for key, value in found.items() if value is not None}


class Only(Stubs):
    """Stubs for all of one library and for what is not installed."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in (self.real[0], "ray", "vllm", "deepspeed", "torch", "transformers"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None


_IMPORTED_ONCE = {
    "trl": ("torch", "datasets", "transformers.training_args", "peft", "accelerate"),
}
_LIBRARIES = {
    "verl": verl,
    "rlinf": of_yaml,
    "roll": of_yaml,
    "nemo_rl": nemo_rl,
    "areal": areal,
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "slime": slime,
    "trl": trl,
}


def serve(library: str, root: Path) -> None:
    """Resolve the files that the input names, each in a process that is forked once the library is imported."""
    for name in _IMPORTED_ONCE.get(library, ()):
        importlib.import_module(name)
    if library == "slime":
        slime_parsers(root)
    for line in sys.stdin:
        into, *words = json.loads(line)
        child = os.fork()
        if child == 0:
            output = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 1
            try:
                code = main([library, str(root), *words])
            except SystemExit as error:
                print(error)
            except BaseException:  # noqa: BLE001 - any fault of another library
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def main(words: list[str]) -> int:
    library, root, *rest = words
    if library not in _LIBRARIES:
        raise SystemExit(f"{library} has no parser that runs here")
    if not rest:
        serve(library, Path(root))
        return 0
    file, *rest = rest
    mapping = _LIBRARIES[library](Path(root), Path(file), rest)
    print("\n@@" + json.dumps(mapping, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
