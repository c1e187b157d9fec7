"""Finds the simulator adapter or the text task that a config names. Only this module has the names
of the shipped ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlplace.codes import config_error, problem
from rlplace.config.blocks.policies import (
    CnnConfig,
    MlpConfig,
    ModuleConfig,
    TransformerConfig,
    VlaConfig,
)
from rlplace.config.fix_lines import in_kwargs
from rlplace.config.yaml_text import quote, show
from rlplace.envs.argument_kinds import Argument, arguments_of, is_unfit, meant
from rlplace.envs.contract import image_size
from rlplace.errors import ConfigError, Problem, did_you_mean, suggestion
from rlplace.extras import install_command

if TYPE_CHECKING:
    from rlplace.config.blocks.language_model import RewardConfig, TextEnvConfig
    from rlplace.config.blocks.simulator import SimulatorEnvConfig, SimulatorJobConfig
    from rlplace.envs.contract import Adapter, Simulator, Spaces
    from rlplace.envs.text.contract import Prompt, Split, TextTask

# Shipped simulator libraries, and text tasks, by the name in a config
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "rlplace.envs.gymnasium_adapter:GymnasiumAdapter",
    "envpool": "rlplace.envs.envpool_adapter:EnvPoolAdapter",
    "pettingzoo": "rlplace.envs.pettingzoo_adapter:PettingZooAdapter",
}
# Suffixes of files that the task `prompts` reads
_DATA = (".jsonl", ".json", ".parquet", ".csv")
# Names of data sets, which are no tasks
_DATA_SETS = re.compile(
    r"gsm|math|aime|amc|dapo|numina|deepscaler|ultra(chat|feedback)|alpaca|dolly|countdown|bench|mmlu|humaneval|mbpp|/"
)
TASKS: Mapping[str, str] = {
    "arithmetic": "rlplace.envs.text.tasks:Arithmetic",
    "prompts": "rlplace.envs.text.tasks:PromptSet",
    "reasoning_gym": "rlplace.envs.text.tasks:ReasoningGym",
    "guess_number": "rlplace.envs.text.tasks:GuessNumber",
    "toy_text": "rlplace.envs.text.tasks:ToyText",
    "text_arena": "rlplace.envs.text.tasks:TextArena",
    "agent": "rlplace.envs.text.agents:AgentTask",
    "verifiers": "rlplace.envs.text.verifiers_tasks:Verifiers",
    "openenv": "rlplace.envs.text.openenv_tasks:OpenEnv",
}
# Modules, and the extra of this package that installs each
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("numpy", "torch"), "run"),
    **dict.fromkeys(("gymnasium", "imageio", "mujoco"), "envs"),
    "transformers": "llm",
    "minigrid": "minigrid",
    "gymnasium_robotics": "robotics",
    "ale_py": "atari",
    "Box2D": "box2d",
    "mani_skill": "maniskill",
}
# Names that different programs have for one argument
_SAME_ARGUMENTS = (
    (
        "path",
        "file",
        "files",
        "data",
        "data_path",
        "data_files",
        "dataset",
        "dataset_name",
    ),
    ("prompt", "question", "input", "input_key", "prompt_key", "problem", "query"),
    ("answer", "solution", "label", "target", "output", "response", "answer_key"),
    ("image", "images", "image_key"),
    ("pixels", "size", "image_size", "resolution"),
    ("digits", "num_digits", "n_digits"),
    ("dataset_split", "split"),
)
# Numbers that the network `nature` needs
_NATURE_LAYERS = 3
_NATURE_PIXELS = 36  # sides of an image, at least

# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(
    name: str,
    shipped: Mapping[str, str],
    *,
    key: str,
    code: str,
    noun: str,
    absent: str = "",
    usual: str = "",
) -> Any:
    """Return the object that a config names: a shipped object, or the user's object `package.module:Name`.

    `name`: the text in the config. `shipped`: short name -> `package.module:Name`. For errors: `key`: config key;
    `code`: code of the error; `noun`: word for such an object, such as "wrapper"; `absent`: code of the error if the
    module does not exist; "": `code`; `usual`: module that is searched for a short name. Raises ConfigError if the
    object cannot be found. If a shipped module lacks a library, raises the ModuleNotFoundError unchanged.
    """
    # A short name stands for a module and a name in it
    module_name, colon, attribute = shipped.get(name, name).partition(":")
    if not colon:
        near = did_you_mean(name, shipped)
        error = "unknown-name"
        # A point in place of the colon: package.module.Name
        above, point, last = name.rpartition(".")
        if near is None and point and f"{above}{last}".replace(".", "").isidentifier():
            near = f"{above}:{last}"
        if near is None and usual:
            near = _in_module(name, usual)
        if near is None and shipped:
            error = "no-such-name"
        raise config_error(
            code,
            key,
            name,
            error=error,
            noun=noun,
            hint=suggestion(near),
            shipped=", ".join(shipped) or "none",
            leaf=key.rpartition(".")[2],
            near=near or "package.module:Name",
        )
    # Import the module; a failure is told by what is missing
    missing: str | None = None
    try:
        module = importlib.import_module(module_name)
        near = did_you_mean(attribute, vars(module))
        kind = "no-attribute"
        if near:
            kind = "misspelt-attribute"
    except ModuleNotFoundError as error:
        # Something that the module imports is missing, not the module itself
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            if name in shipped:
                raise
            raise not_imported(error, name, key=key, code=code, noun=noun) from error
        missing = error.name
        if (extra := _extra_of(error)) is not None:
            why = f"there is no module {missing}"
            raise missing_library(
                why, got=name, extra=extra, key=key, of=f"the {noun}"
            ) from error
        if absent:
            raise config_error(
                absent, key, name, noun=noun, missing=missing, hint=""
            ) from error
        module = None
        near = None
        kind = "no-module"
    except Exception as error:
        if name in shipped:
            raise
        raise not_imported(error, name, key=key, code=code, noun=noun) from error
    if not hasattr(module, attribute):
        raise config_error(
            code,
            key,
            name,
            error=kind,
            noun=noun,
            hint=suggestion(near),
            missing=missing,
            module=module_name,
            attribute=attribute,
            leaf=key.rpartition(".")[2],
            near=near,
        )
    return getattr(module, attribute)


def _in_module(name: str, module: str) -> str | None:
    """Return `module:Name` for a short name that is in a module, or nearly so; None if it is not."""
    classes = [
        word for word in dir(importlib.import_module(module)) if word[:1].isupper()
    ]
    near = did_you_mean(name, classes)
    return None if near is None else f"{module}:{near}"


def unknown_arguments(
    call: Callable[..., Any],
    kwargs: Mapping[str, object],
    *,
    given: tuple[str, ...],
    key: str,
    code: str,
) -> list[Problem]:
    """Return a problem for each argument in `kwargs` that `call` does not accept, or that has a value of another kind.

    `given`: names of arguments that are passed besides `kwargs`. `key`: config key of `kwargs`. `code`: code of the
    problems.
    """
    parameters = inspect.signature(call).parameters
    called = getattr(call, "__name__", type(call).__name__)
    unfit = unfit_arguments(
        arguments_of(call), kwargs, called=called, key=key, code=code
    )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return unfit
    takes = [
        n
        for n, p in parameters.items()
        if n not in given and p.kind is not p.VAR_POSITIONAL
    ]
    unknown = arguments_not_taken(takes, kwargs, called=called, key=key, code=code)
    return [*unknown, *unfit]


def unfit_arguments(
    arguments: Mapping[str, Argument],
    kwargs: Mapping[str, object],
    *,
    called: str,
    key: str,
    code: str,
) -> list[Problem]:
    """Return a problem for each argument in `kwargs` whose value is certainly of another kind than is taken.

    `arguments`: name -> what is known of its values. `called`, `key`, `code`: as for `arguments_not_taken`.
    """
    problems: list[Problem] = []
    for name, value in kwargs.items():
        argument = arguments.get(name)
        if argument is None or not is_unfit(argument, value):
            continue
        fitting = meant(argument, value)
        instead = f"<a {argument.kind}>" if fitting is None else show(fitting)
        # With the quotes of a text that would be a number without them
        shown = quote(value, exact=True)
        unfit = problem(
            code,
            f"{key}.{name}",
            f"{name}: {shown}",
            error="unfit-argument",
            span=(len(name) + 2, len(name) + 2 + len(shown)),
            callable=called,
            name=name,
            kind=argument.kind,
            value=instead,
        )
        problems.append(unfit)
    return problems


def arguments_not_taken(
    takes: Sequence[str],
    kwargs: Mapping[str, object],
    *,
    called: str,
    key: str,
    code: str,
    takes_more: bool = False,
) -> list[Problem]:
    """Return a problem for each argument in `kwargs` that is not in `takes`.

    `called`: name of what is called. `key`: config key of `kwargs`. `code`: code of the problems. `takes_more`: whether
    other arguments may be taken as well; then only misspelt names of `takes` are problems.
    """
    problems: list[Problem] = []
    for name in [n for n in kwargs if n not in takes]:
        near = _argument_meant(str(name), takes)
        error = "unknown-argument"
        if near:
            error = "misspelt-argument"
        elif takes_more:
            continue
        unknown = problem(
            code,
            f"{key}.{name}",
            f"{name}: {kwargs[name]}",
            error=error,
            span=(0, len(str(name))),
            hint=suggestion(near),
            callable=called,
            takes=", ".join(takes) or "none",
            name=name,
            line=in_kwargs(key, near, str(name), kwargs) if near else "",
        )
        problems.append(unknown)
    return problems


def _argument_meant(name: str, takes: Sequence[str]) -> str | None:
    """Return the argument in `takes` that `name` probably misspells, or has as a habit; None if there is none."""
    near = did_you_mean(name, takes)
    begun = [take for take in takes if take.startswith(f"{name}_")]
    if near is None and len(begun) == 1:
        near = begun[0]
    squeezed = {take.replace("_", ""): take for take in takes}
    near = near or squeezed.get(name.replace("_", "").lower())
    for same in _SAME_ARGUMENTS:
        if near is None and name in same:
            near = next((take for take in takes if take in same), None)
    return near


def own_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the arguments of a config, with copies of the lists and mappings in it.

    Each call of the user's code gets such a copy, since the code may change its arguments in place.
    """
    return {name: _own(value) for name, value in kwargs.items()}


def _own(value: Any) -> Any:
    """Return a deep copy of a list or a mapping; return any other value unchanged."""
    if isinstance(value, dict):
        return own_arguments(value)
    if isinstance(value, list):
        return [_own(each) for each in value]
    return value


def check_named(
    name: str,
    kwargs: Mapping[str, object] | None = None,
    *,
    given: tuple[str, ...] = (),
    key: str,
    code: str,
    noun: str,
    usual: str = "",
    methods: Sequence[str] = (),
) -> list[Problem]:
    """Return the problems of the user's object `name`, a text `package.module:Name`.

    The object must be importable and callable, and must accept `kwargs`. A class must have at least one of `methods`.
    `given`: words for the arguments that are passed before `kwargs`. For the problems: `key`: config key; `code`: code;
    `noun`: word for such an object, such as "wrapper"; `usual`: module that is searched for a short name.
    """
    try:
        found = named(name, {}, key=key, code=code, noun=noun, usual=usual)
    except ConfigError as error:
        return list(error.problems)
    if not callable(found):
        kind = type(found).__name__
        called_with = " and ".join(given)
        return [
            problem(code, key, name, error="not-callable", kind=kind, given=called_with)
        ]
    # The first arguments are passed by place and may have any name
    problems: list[Problem] = []
    if kwargs:
        first = tuple(inspect.signature(found).parameters)[: len(given)]
        problems = unknown_arguments(
            found,
            kwargs,
            given=first,
            key=f"{key.rpartition('.')[0]}.kwargs",
            code=code,
        )
    if not methods or not isinstance(found, type):
        return problems
    # A class needs at least one of the methods; similar names are misspelt
    own = [
        method
        for method in vars(found)
        if not method.startswith("_") and callable(getattr(found, method))
    ]
    misspelt = {}
    for method in own:
        near = did_you_mean(method, methods)
        if method not in methods and near:
            misspelt[method] = near
    for method, near in misspelt.items():
        wrong = problem(
            code,
            key,
            name,
            error="misspelt-method",
            method=method,
            hint=suggestion(near),
            methods=", ".join(methods),
            near=near,
        )
        problems.append(wrong)
    if not misspelt and not any(hasattr(found, method) for method in methods):
        useless = problem(
            code,
            key,
            name,
            error="no-methods",
            methods=", ".join(methods),
            first=methods[0],
        )
        problems.append(useless)
    return problems


def not_imported(
    error: Exception, name: str, *, key: str, code: str, noun: str
) -> ConfigError:
    """Return the error that the user's module in `name` raised `error` when it was imported.

    `name`: `package.module:Name`. `key`: config key. `code`: code of the error. `noun`: word for the object.
    """
    if (
        isinstance(error, ModuleNotFoundError)
        and (extra := _extra_of(error)) is not None
    ):
        why = f"there is no module {error.name}, which it imports: what is named here could not be checked"
        return missing_library(why, got=name, extra=extra, key=key, of=f"the {noun}")
    return config_error(
        code,
        key,
        name,
        error="import-raised",
        reason=f"{type(error).__name__}: {error}",
        place=place_of(error, name),
    )


def _extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra of rlplace that installs the missing module; None if there is no such extra."""
    return EXTRAS.get(str(error.name).partition(".")[0])


def place_of(error: BaseException, name: str) -> str:
    """Return where an error was raised in the user's module: `file:line` of the last traceback frame in this module.

    `name`: `package.module:Name`; it is returned if the traceback does not reach the module.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    module = "/" + name.partition(":")[0].replace(".", "/")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if _module_path(f.filename).endswith(module)
    ]
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}"
    return name


def _module_path(file: str) -> str:
    """Return the path of a module's file without its suffix; for a package, the path of its folder."""
    return Path(file).with_suffix("").as_posix().removesuffix("/__init__")


def unknown_choice(
    argument: str,
    got: str,
    known: Iterable[str],
    *,
    why: str,
    example: str | None = None,
) -> ConfigError:
    """Return the error that a task's argument has a value that is not one of the names in `known`.

    `argument`: name of the argument. `got`: its value. `known`: the allowed names. `why`: the rule, for the error.
    `example`: the name to propose if the value resembles none of the allowed names.
    """
    known = list(known)
    near = did_you_mean(got, known)
    return config_error(
        "bad-task-kwargs",
        f"env.kwargs.{argument}",
        got,
        error="choice",
        argument=argument,
        hint=suggestion(near),
        reason=why,
        near=near or example or known[0],
    )


def missing_library(
    why: str, *, got: str, extra: str, key: str = "env.task", of: str = "the task"
) -> ConfigError:
    """Return the error that a library is missing. Its fix is the command that installs `extra`, an extra of rlplace.

    `why`: text that says what is missing. `got`: value of the config that needs the library. `key`: config key of this
    value. `of`: words for the part of the job that needs the library, such as "the task".
    """
    command = install_command(extra)
    # Gymnasium names a library that lacks, and the command that installs it
    theirs = re.findall(r"`(pip install [^`]+)`", why)
    library = why.partition(" ")[0]
    if theirs and (own := EXTRAS.get(library)) is not None:
        command = install_command(own)
    elif theirs and library.lower() not in command:
        command = " && ".join(theirs)
    return config_error(
        "missing-library", key, got, error="extra", of=of, reason=why, command=command
    )


@contextmanager
def needs(
    *modules: str, got: str, extra: str, key: str = "env.task", of: str = "the task"
) -> Iterator[None]:
    """Run the body of the `with` statement; if it fails because a module is missing, raise ConfigError.

    `modules`: names of the modules for which to do so; without names, for all modules. `got`: value of the config that
    needs the modules. `extra`: the extra of rlplace that installs them. `key`: config key of the value. `of`: words for
    the part of the job that needs the modules, such as "the task".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # The library is there, but something that it imports is missing
        if modules and error.name not in modules:
            raise
        why = f"there is no module {error.name}" if error.name else str(error)
        raise missing_library(why, got=got, extra=extra, key=key, of=of) from error


# ── simulators ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_adapter(name: str) -> Adapter:
    """Return the adapter that `name` means: a shipped adapter, or the user's `package.module:Class`.

    The simulator library itself is not imported. Raises ConfigError.
    """
    kind = named(
        name, ADAPTERS, key="env.kind", code="unknown-adapter", noun="simulator library"
    )
    return cast("Adapter", kind())


def check(config: SimulatorEnvConfig) -> Sequence[Problem]:
    """Return the problems of the config block `env` that can be found without building a simulator.

    If the simulator's library is not installed, return an empty list, since a plan does not need the library.
    """
    try:
        return find_adapter(config.kind).check(config)
    except ConfigError as error:
        return error.problems


def wrappers_problems(config: SimulatorEnvConfig) -> list[Problem]:
    """Return a problem if the config has wrappers of Gymnasium for simulators that take none; else an empty list."""
    if not config.wrappers:
        return []
    names = ", ".join(wrapper.name for wrapper in config.wrappers)
    return [problem("wrappers-not-applied", "env.wrappers", names, kind=config.kind)]


def surely_made(config: SimulatorEnvConfig) -> bool:
    """Return whether building the simulator cannot fail.

    That is so for Gymnasium's own simulators of the extra `envs`, without arguments and wrappers.
    """
    from rlplace.envs.gymnasium_adapter import made_with_extra

    return (
        config.kind == "gymnasium"
        and not config.kwargs
        and not config.wrappers
        and made_with_extra(config.id)
    )


def describe(config: SimulatorEnvConfig) -> Spaces:
    """Build one simulator, and return the spaces of its observations and actions. Raises ConfigError."""
    return find_adapter(config.kind).describe(config)


def make_simulator(config: SimulatorEnvConfig, rows: int, chunk: int) -> Simulator:
    """Return a simulator with `rows` environments that takes `chunk` actions in each step.

    Raises ConfigError if it cannot be built.
    """
    simulator = find_adapter(config.kind).make(config, rows)
    if chunk == 1:
        return simulator
    from rlplace.envs.chunks import in_chunks

    return in_chunks(simulator, chunk)


def normalized_by(config: SimulatorEnvConfig) -> tuple[str, str]:
    """Return (config key, value) for errors about the statistics with which a simulator normalizes.

    The key is that of the wrappers; or that of the simulator, if the config has no wrappers.
    """
    if config.wrappers:
        return "env.wrappers", ", ".join(wrapper.name for wrapper in config.wrappers)
    return "env.id", config.id or config.kind


def without_statistics(config: SimulatorEnvConfig) -> ConfigError:
    """Return the error that statistics are missing with which the simulator normalized in the training."""
    key, got = normalized_by(config)
    return config_error("no-statistics", key, got)


def with_wrapper(
    config: SimulatorEnvConfig, name: str, kwargs: Mapping[str, object]
) -> str:
    """Return the wrappers of a config as YAML, with a wrapper as the outermost one. Others of its name are left out.

    `name`, `kwargs`: of the wrapper.
    """
    wrappers: list[Mapping[str, object]] = []
    for wrapper in config.wrappers:
        if wrapper.name == name:
            continue
        described: dict[str, object] = {"name": wrapper.name}
        if wrapper.kwargs:
            described["kwargs"] = wrapper.kwargs
        wrappers.append(described)
    return show([*wrappers, {"name": name, "kwargs": kwargs}])


def without_texts(config: SimulatorEnvConfig, spaces: Spaces) -> str:
    """Return how the observations of a simulator can do without texts: a line for the config, where there is one."""
    if config.kind != "gymnasium":
        return "return observations without texts"
    # Entries of an inner Dict are kept or left out with it
    texts = {part.name.partition(".")[0] for part in spaces.texts}
    entries = dict.fromkeys(part.name.partition(".")[0] for part in spaces.parts)
    kept = [entry for entry in entries if entry not in texts]
    name = "gymnasium.wrappers:FilterObservation"
    return f"env.wrappers: {with_wrapper(config, name, {'filter_keys': kept})}"


def normalizes_images(config: SimulatorJobConfig) -> bool:
    """Return whether a policy normalises images of float32 numbers, or may do so: a module of the user."""
    own = isinstance(config.actor.policy, ModuleConfig)
    return config.algorithm.normalize_observations or own


def flattens_images(config: SimulatorJobConfig) -> bool:
    """Return whether a policy takes images as one row of numbers, as an MLP does."""
    return isinstance(config.actor.policy, MlpConfig)


def spaces_of_job(config: SimulatorJobConfig) -> Spaces:
    """Return the spaces of a job's policy: those of the simulator, with the policy's memory and chunks of actions.

    Raises ConfigError if the job's model cannot take the simulator's observations.
    """
    spaces = describe(config.env)
    # An MLP takes numbers only
    pictures = [part for part in spaces.entries if part.dtype == "uint8"]
    model = config.actor.policy
    got = ", ".join(f"{part.name} {list(part.shape)}".strip() for part in pictures)
    # Texts are for models that read them
    if spaces.texts and not isinstance(model, ModuleConfig | VlaConfig):
        images = any(part.dtype == "uint8" for part in spaces.images)
        raise config_error(
            "model-misfit",
            "actor.model.kind",
            spaces.texts[0].name,
            error="text" if images else "text-alone",
            wrappers=without_texts(config.env, spaces),
        )
    if isinstance(model, MlpConfig) and pictures:
        raise config_error("model-misfit", "actor.model.kind", got, error="images")
    # A CNN takes images, with as many layers and pixels as its network needs
    if isinstance(model, CnnConfig) and not spaces.images:
        got = str(spaces.observation_shape)
        raise config_error("model-misfit", "actor.model.kind", got, error="no-image")
    if (
        isinstance(model, CnnConfig)
        and model.channels
        and model.network == "nature"
        and len(model.channels) != _NATURE_LAYERS
    ):
        raise config_error(
            "model-misfit",
            "actor.model.channels",
            str(list(model.channels)),
            error="channels",
            layers=_NATURE_LAYERS,
        )
    small = [part for part in spaces.images if sorted(part.shape)[-2] < _NATURE_PIXELS]
    if isinstance(model, CnnConfig) and model.network == "nature" and small:
        raise config_error(
            "model-misfit",
            "actor.model.network",
            str(list(small[0].shape)),
            error="small-image",
            pixels=_NATURE_PIXELS,
        )
    # A transformer splits tokens into heads and images into patches
    if isinstance(model, TransformerConfig) and model.width % model.heads:
        above = -(-model.width // model.heads) * model.heads
        raise config_error(
            "model-misfit",
            "actor.model.width",
            f"width: {model.width}, heads: {model.heads}",
            error="heads",
            above=above,
        )
    sides = [size for part in spaces.images for size in image_size(part.shape)[1:]]
    narrow = min(sides, default=0)
    if isinstance(model, TransformerConfig) and 0 < narrow < model.patch:
        raise config_error(
            "model-misfit",
            "actor.model.patch",
            f"patch: {model.patch}",
            error="patch",
            narrow=narrow,
        )
    chunk = config.rollout.action_chunk
    spaces = spaces.remembering(model.remembered).chunked(chunk)
    if isinstance(model, VlaConfig) and model.head == "flow":
        return spaces.denoised(model.denoising_steps)
    return spaces


def row_seeds(
    seed: int, first_row: int, rows: int, iteration: int = 0
) -> Sequence[int]:
    """Return the seeds of `rows` rows of the job, from `first_row` on. They do not depend on the placement.

    `seed`: seed of the run. `iteration`: iteration in which the episodes begin; 0 for the start of a run.
    """
    begun = f"/{iteration}" if iteration else ""
    seeds = []
    for row in range(first_row, first_row + rows):
        seeds.append(random.Random(f"{seed}/{row}{begun}").getrandbits(31))
    return seeds


def seed_global_numbers(seed: int, rank: int, iteration: int | None = None) -> None:
    """Seed the global random numbers of Python, NumPy and torch in this process, for environments that use them.

    `seed`: seed of the run. `rank`: rank of the env worker. `iteration`: the iteration that begins; None before the
    first one. Each iteration has its own seed, so a resumed run draws the same numbers.
    """
    import numpy as np

    drawn = _global_seed(seed, rank, iteration)
    random.seed(drawn)
    np.random.seed(drawn)
    seed_torch_numbers(seed, rank, iteration)


def seed_torch_numbers(seed: int, rank: int, iteration: int | None = None) -> None:
    """Seed the global random numbers of torch in this process, if the process has imported torch.

    rlplace does not import torch in env ranks; an environment may. The arguments are those of `seed_global_numbers`.
    """
    # Another thread may be importing torch at this moment
    seed_torch = getattr(sys.modules.get("torch"), "manual_seed", None)
    if seed_torch is not None:
        seed_torch(_global_seed(seed, rank, iteration))


def _global_seed(seed: int, rank: int, iteration: int | None) -> int:
    """Return the seed for global random numbers. The arguments are those of `seed_global_numbers`."""
    return random.Random(f"{seed}/global/{rank}/{iteration}").getrandbits(32)


@contextlib.contextmanager
def own_global_numbers(seed: int, rank: int, iteration: int) -> Iterator[None]:
    """Seed global random numbers for the body of a `with` statement, and restore their earlier state at its end.

    The arguments are those of `seed_global_numbers`.
    """
    import numpy as np

    of_python = random.getstate()
    of_numpy = np.random.get_state()
    torch: Any = sys.modules.get("torch")
    of_torch = None
    if torch is not None:
        of_torch = torch.get_rng_state()
    seed_global_numbers(seed, rank, iteration)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_torch is not None:
            torch.set_rng_state(of_torch)


# ── text tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_task(name: str) -> Callable[..., TextTask]:
    """Return the class of a text task. `name`: a shipped name, or `package.module:Class`. Raises ConfigError."""
    if name not in TASKS and Path(name).suffix in _DATA:
        raise config_error(
            "unknown-task", "env.task", name, error="data-of-prompts", path=name
        )
    is_data = ":" not in name and _DATA_SETS.search(name.lower()) is not None
    if name not in TASKS and is_data and did_you_mean(name, TASKS) is None:
        raise config_error(
            "unknown-task", "env.task", name, error="data-set", name=name
        )
    found = named(name, TASKS, key="env.task", code="unknown-task", noun="text task")
    return cast("Callable[..., TextTask]", found)


def make_task(config: TextEnvConfig, *, seed: int, split: Split) -> TextTask:
    """Return the text task of a config, with the prompts of `split`: for training, or held out for evaluation.

    Raises ConfigError for an unknown name, wrong arguments, or a damaged or empty data set.
    """
    try:
        return _make_task(config, seed, split)
    except ConfigError as error:
        if split == "train" or not config.eval_kwargs:
            raise
        # The problem may be in the arguments for held-out prompts alone
        problems = [_of_held_out(p, config.eval_kwargs) for p in error.problems]
        raise ConfigError(problems) from error


def _of_held_out(problem: Problem, given: Mapping[str, object]) -> Problem:
    """Return a problem of the task for held-out prompts, with the key env.eval_kwargs in place of env.kwargs.

    `given`: the values of env.eval_kwargs. If the problem is about an argument that is not among them, return it
    unchanged.
    """
    leaf = problem.key.removeprefix("env.kwargs").removeprefix(".")
    if not problem.key.startswith("env.kwargs") or (
        leaf and leaf.partition(".")[0] not in given
    ):
        return problem
    key = problem.key.replace("env.kwargs", "env.eval_kwargs", 1)
    fix = problem.fix and re.sub(r"\b(env\.)?kwargs\b", r"\1eval_kwargs", problem.fix)
    return dataclasses.replace(problem, key=key, fix=fix)


def _make_task(config: TextEnvConfig, seed: int, split: Split) -> TextTask:
    """Return the text task of a config, with the prompts of `split`. Raises ConfigError with keys below env.kwargs."""
    name = config.task
    assert name is not None, "a run has a task"
    kind = find_task(name)
    # Held-out prompts may change some arguments
    kwargs = dict(config.kwargs)
    if split == "held_out":
        kwargs |= config.eval_kwargs
    problems = unknown_arguments(
        kind, kwargs, given=("seed", "split"), key="env.kwargs", code="bad-task-kwargs"
    )
    if problems:
        raise ConfigError(problems)
    shown = ", ".join(f"{key}: {value}" for key, value in kwargs.items()) or "none"
    try:
        # A copy, since the tasks of both splits get these arguments, and a task may change them
        task = kind(seed=seed, split=split, **own_arguments(kwargs))
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise config_error(
            "bad-task-kwargs",
            "env.kwargs",
            shown,
            error="raised",
            name=name,
            reason=str(error),
        ) from error
    # A task must have prompts, and those for evaluation must differ from those for training
    if task.size == 0:
        raise config_error("empty-dataset", "env.kwargs", shown, name=name)
    if split == "held_out" and task.size is not None and not config.eval_kwargs:
        raise config_error(
            "nothing-held-out", "env.eval_kwargs", "{}", name=name, size=task.size
        )
    return task


def check_task(
    config: TextEnvConfig,
    *,
    seed: int,
    evaluated: bool,
    components: Mapping[str, RewardConfig] | None = None,
    own: bool = True,
    samples_per_prompt: int = 1,
    eval_samples: int = 1,
    eval_prompts: int | None = None,
    rendered: Callable[[Prompt], str] | None = None,
) -> list[Problem]:
    """Return the problems of a text task and its reward functions; the task is made to find them.

    If the task has no problems, the reward functions are called for one row of the task. `evaluated`: whether the task
    for held-out prompts is checked too; its warnings are among the problems. `components`: config key -> block, for
    each reward component with a function. `own`: whether functions of the user are called, too. `samples_per_prompt`,
    `eval_samples`: number of answers to a prompt, in training and in an evaluation. `eval_prompts`: number of held-out
    prompts of an evaluation; None: all. `rendered`: returns a prompt as the text that the model reads; None: the texts
    of its messages are looked at.
    """
    from rlplace.envs.text.held_out import held_out_warnings
    from rlplace.envs.text.probe import (
        WARNINGS,
        column_warnings,
        form_warnings,
        probe_problems,
        reader,
        row_problems,
    )
    from rlplace.envs.text.rewards import find_rewards, named_reward

    problems: list[Problem] = []
    tasks: dict[str, TextTask] = {}
    seeds: dict[Split, int] = {"train": seed}
    if evaluated:
        seeds["held_out"] = config.eval_seed
    for split, of_split in seeds.items():
        try:
            task = make_task(config, seed=of_split, split=split)
            tasks[split] = task
            rewards = list(find_rewards(config.rewards, task, chat=config.chat))
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
            continue
        problems += row_problems(rewards, task)
        if split != "train" or problems:
            continue
        for key, block in (components or {}).items():
            # A wrong name is a problem of the component
            with contextlib.suppress(ConfigError):
                rewards.append(
                    named_reward(
                        str(block.function), block.kwargs, key=key, chat=config.chat
                    )
                )
        problems += probe_problems(
            rewards,
            task,
            timeout_s=config.reward_timeout_s,
            memory_bytes=config.reward_memory,
            own=own,
            samples=samples_per_prompt,
            eval_samples=eval_samples if evaluated else None,
        )
        if all(problem.code in WARNINGS for problem in problems):
            read = reader(rendered, config.system)
            problems += form_warnings(rewards, task, read)
            problems += column_warnings(task, read)
    sound = all(problem.code in WARNINGS for problem in problems)
    if evaluated and len(tasks) == len(seeds) and sound:
        problems += held_out_warnings(
            tasks["train"], tasks["held_out"], eval_prompts, rendered
        )
    return problems
