"""Finds the simulator adapter or text task that a config names. Only this module knows which are shipped."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlplace.config.policies import CnnConfig, MlpConfig, TransformerConfig
from rlplace.envs.contract import image_size
from rlplace.errors import ConfigError, Problem, did_you_mean, one_of, suggestion
from rlplace.extras import install_command

if TYPE_CHECKING:
    from rlplace.config.schema import Config, SimulatorEnvConfig, TextEnvConfig
    from rlplace.envs.contract import Adapter, Simulator, Spaces
    from rlplace.envs.text.contract import Split, TextTask

# Shipped simulator libraries, and text tasks, by the name in a config
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "rlplace.envs.gymnasium_adapter:GymnasiumAdapter",
    "envpool": "rlplace.envs.envpool_adapter:EnvPoolAdapter",
}
TASKS: Mapping[str, str] = {
    "arithmetic": "rlplace.envs.text.tasks:Arithmetic",
    "prompts": "rlplace.envs.text.tasks:PromptSet",
    "reasoning_gym": "rlplace.envs.text.tasks:ReasoningGym",
    "guess_number": "rlplace.envs.text.tasks:GuessNumber",
    "toy_text": "rlplace.envs.text.tasks:ToyText",
    "text_arena": "rlplace.envs.text.tasks:TextArena",
    "agent": "rlplace.envs.text.agents:AgentTask",
}
# Modules, and the extra of this package that installs each
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("numpy", "torch"), "run"),
    **dict.fromkeys(("gymnasium", "imageio", "mujoco"), "envs"),
    "transformers": "llm",
    "minigrid": "minigrid",
    "gymnasium_robotics": "robotics",
    "mani_skill": "maniskill",
}
_MISFIT = "model-misfit"
# What the network `nature` needs
_NATURE_LAYERS = 3
_NATURE_PIXELS = 36  # sides of an image, at least

# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(
    name: str, shipped: Mapping[str, str], *, key: str, code: str, noun: str
) -> Any:
    """Return a shipped object by its short name, or the user's object `package.module:Name`.

    Raises ConfigError.

    `key`, `code` and `noun` are for the error. An import error in a shipped module passes through: its library is
    missing.
    """
    # A short name stands for a module and a name in it
    module_name, colon, attribute = shipped.get(name, name).partition(":")
    if not colon:
        near = did_you_mean(name, shipped)
        why = f"shipped: {', '.join(shipped) or 'none'}; your own is named package.module:Name"
        fix = f"{key.rpartition('.')[2]}: {near or next(iter(shipped), 'package.module:Name')}"
        raise ConfigError.of(
            code, key, f"unknown {noun}" + suggestion(near), name, why, fix
        )
    # Import the module; a failure is told by what is missing
    try:
        module = importlib.import_module(module_name)
        why = f"module {module_name} has no {attribute}"
        near = did_you_mean(attribute, vars(module))
    except ModuleNotFoundError as error:
        # Something that the module imports is missing, not the module itself
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            if name in shipped:
                raise
            raise not_imported(error, name, key=key, code=code, noun=noun) from error
        why = f"there is no module {error.name}"
        if (extra := _extra_of(error)) is not None:
            raise missing_library(
                why, got=name, extra=extra, key=key, of=f"the {noun}"
            ) from error
        module = None
        near = None
    except Exception as error:
        if name in shipped:
            raise
        raise not_imported(error, name, key=key, code=code, noun=noun) from error
    if not hasattr(module, attribute):
        leaf = key.rpartition(".")[2]
        fix = "put the folder of your package on PYTHONPATH, or correct the name"
        if near:
            fix = f"{leaf}: {module_name}:{near}"
        raise ConfigError.of(
            code,
            key,
            f"no {noun} can be found there" + suggestion(near),
            name,
            why,
            fix,
        )
    return getattr(module, attribute)


def unknown_arguments(
    call: Callable[..., Any],
    kwargs: Mapping[str, object],
    *,
    given: tuple[str, ...],
    key: str,
    code: str,
) -> list[Problem]:
    """Return the problems of `kwargs` that the callable does not accept.

    `given`: arguments that it gets from elsewhere. `key` is that of the kwargs.
    """
    parameters = inspect.signature(call).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    takes = [
        n
        for n, p in parameters.items()
        if n not in given and p.kind is not p.VAR_POSITIONAL
    ]
    problems: list[Problem] = []
    for name in [n for n in kwargs if n not in takes]:
        near = did_you_mean(str(name), takes)
        what = "unknown argument" + suggestion(near)
        got = f"{name}: {kwargs[name]}"
        why = f"{call.__name__} takes " + (", ".join(takes) or "none")
        fix = f"{near}: {kwargs[name]}" if near else f"remove {name}"
        problems += ConfigError.of(
            code, f"{key}.{name}", what, got, why, fix, span=(0, len(str(name)))
        ).problems
    return problems


def check_named(
    name: str,
    kwargs: Mapping[str, object] | None = None,
    *,
    given: tuple[str, ...] = (),
    key: str,
    code: str,
    noun: str,
    methods: Sequence[str] = (),
) -> list[Problem]:
    """Return the problems of a `package.module:Name`: it cannot be imported, does not accept `kwargs`, or lacks
    all `methods`.

    `key` is that of the name. `given`: what it is called with before `kwargs`.
    """
    try:
        found = named(name, {}, key=key, code=code, noun=noun)
    except ConfigError as error:
        return list(error.problems)
    if not callable(found):
        why = f"it is called with {' and '.join(given)} when the run starts"
        what = f"is no class or function: {type(found).__name__}"
        fix = "name: <package.module:Class>"
        return list(ConfigError.of(code, key, what, name, why, fix).problems)
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
        what = f"has a method {method}" + suggestion(near)
        why = f"what is called are {', '.join(methods)}"
        problems += ConfigError.of(
            code, key, what, name, why, f"def {near}(self, ...)"
        ).problems
    if not misspelt and not any(hasattr(found, method) for method in methods):
        what = "has nothing that would be called"
        why = f"its methods are to be some of {', '.join(methods)}"
        problems += ConfigError.of(
            code, key, what, name, why, f"def {methods[0]}(self, ...)"
        ).problems
    return problems


def not_imported(
    error: Exception, name: str, *, key: str, code: str, noun: str
) -> ConfigError:
    """Return the error that importing the user's module of `package.module:Name` has raised."""
    if (
        isinstance(error, ModuleNotFoundError)
        and (extra := _extra_of(error)) is not None
    ):
        why = f"there is no module {error.name}, which it imports: what is named here could not be checked"
        return missing_library(why, got=name, extra=extra, key=key, of=f"the {noun}")
    why = f"{type(error).__name__}: {error}"
    fix = f"mend {place_of(error, name)}"
    return ConfigError.of(code, key, "cannot be imported", name, why, fix)


def _extra_of(error: ModuleNotFoundError) -> str | None:
    """Return our extra that installs the missing module; None if no extra has it."""
    return EXTRAS.get(str(error.name).partition(".")[0])


def place_of(error: BaseException, name: str) -> str:
    """Return file:line of the last frame of a traceback in the module of `package.module:Name`; the name if there
    is none.
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
    """Return the path of a module's file without its ending, also for a package."""
    return Path(file).with_suffix("").as_posix().removesuffix("/__init__")


def unknown_choice(
    argument: str,
    got: str,
    known: Iterable[str],
    *,
    why: str,
    example: str | None = None,
) -> ConfigError:
    """Return the error for an argument of a task that names nothing in the library."""
    known = list(known)
    near = did_you_mean(got, known)
    what = f"unknown {argument}" + suggestion(near)
    fix = f"{argument}: {near or example or known[0]}"
    return ConfigError.of(
        "bad-task-kwargs", f"env.kwargs.{argument}", what, got, why, fix
    )


def missing_library(
    why: str, *, got: str, extra: str, key: str = "env.task", of: str = "the task"
) -> ConfigError:
    """Return the error that a library is missing; its fix is the extra of this package that installs it."""
    what = f"a library of {of} is not installed"
    fix = install_command(extra)
    # Gymnasium names the command for libraries that our extras lack, such as Box2D
    theirs = re.findall(r"`(pip install [^`]+)`", why)
    if theirs and why.partition(" ")[0].lower() not in fix:
        fix = " && ".join(theirs)
    return ConfigError.of("missing-library", key, what, got, why, fix)


@contextmanager
def needs(
    *modules: str, got: str, extra: str, key: str = "env.task", of: str = "the task"
) -> Iterator[None]:
    """Use a library inside.

    Raises ConfigError if one of `modules` is not installed; if none is named, any missing module.
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
    """Return a shipped adapter, or that of `package.module:Class`, without importing its library.

    Raises ConfigError.
    """
    kind = named(
        name, ADAPTERS, key="env.kind", code="unknown-adapter", noun="simulator library"
    )
    return cast("Adapter", kind())


def check(config: SimulatorEnvConfig) -> Sequence[Problem]:
    """Return the problems of `env` that show without building a simulator; none if its library is missing, which a
    plan does not need.
    """
    try:
        return find_adapter(config.kind).check(config)
    except ConfigError as error:
        return error.problems


def surely_made(config: SimulatorEnvConfig) -> bool:
    """Return whether the simulator cannot fail: one of Gymnasium's own, without arguments and wrappers."""
    from rlplace.envs.gymnasium_adapter import made_with_extra

    return (
        config.kind == "gymnasium"
        and not config.kwargs
        and not config.wrappers
        and made_with_extra(config.id)
    )


def describe(config: SimulatorEnvConfig) -> Spaces:
    """Return the shapes of observations and actions, by building one simulator. Raises ConfigError."""
    return find_adapter(config.kind).describe(config)


def make_simulator(config: SimulatorEnvConfig, rows: int, chunk: int) -> Simulator:
    """Make a simulator that takes `chunk` actions at once. Raises ConfigError."""
    simulator = find_adapter(config.kind).make(config, rows)
    if chunk == 1:
        return simulator
    from rlplace.envs.chunks import in_chunks

    return in_chunks(simulator, chunk)


def spaces_of_job(config: Config) -> Spaces:
    """Return the spaces for the policy of a job, its memory and action chunks included.

    Raises ConfigError if the job's model cannot take these observations.
    """
    spaces = describe(config.simulator_env)
    # An MLP takes numbers only
    pictures = [part for part in spaces.entries if part.dtype == "uint8"]
    model = config.actor.policy
    got = ", ".join(f"{part.name} {list(part.shape)}".strip() for part in pictures)
    if isinstance(model, MlpConfig) and pictures:
        why = "an MLP takes numbers, and pixels only as one row of them"
        fix = one_of(
            [
                "kind: cnn",
                "env.wrappers: [{name: gymnasium.wrappers:FlattenObservation}]",
            ]
        )
        raise ConfigError.of(
            _MISFIT, "actor.model.kind", "the simulator shows images", got, why, fix
        )
    # A CNN takes images, with as many layers and pixels as its network needs
    if isinstance(model, CnnConfig) and not spaces.images:
        why = "its convolutions are for images, which the simulator shows none of"
        got = str(spaces.observation_shape)
        raise ConfigError.of(
            _MISFIT,
            "actor.model.kind",
            "there is no image to look at",
            got,
            why,
            "kind: mlp",
        )
    if (
        isinstance(model, CnnConfig)
        and model.channels
        and model.network == "nature"
        and len(model.channels) != _NATURE_LAYERS
    ):
        got = str(list(model.channels))
        why = f"nature has {_NATURE_LAYERS} layers of convolutions"
        what = "not one number of channels for each layer"
        raise ConfigError.of(
            _MISFIT, "actor.model.channels", what, got, why, "channels: [32, 64, 64]"
        )
    small = [part for part in spaces.images if sorted(part.shape)[-2] < _NATURE_PIXELS]
    if isinstance(model, CnnConfig) and model.network == "nature" and small:
        got = str(list(small[0].shape))
        why = f"its three convolutions take {_NATURE_PIXELS} pixels each way or more"
        raise ConfigError.of(
            _MISFIT,
            "actor.model.network",
            "the image is too small",
            got,
            why,
            "network: impala",
        )
    # A transformer splits tokens into heads and images into patches
    if isinstance(model, TransformerConfig) and model.width % model.heads:
        got = f"width: {model.width}, heads: {model.heads}"
        why = "each head attends to its share of a token"
        fix = f"width: {-(-model.width // model.heads) * model.heads}"
        raise ConfigError.of(
            _MISFIT, "actor.model.width", "no multiple of heads", got, why, fix
        )
    sides = [size for part in spaces.images for size in image_size(part.shape)[1:]]
    narrow = min(sides, default=0)
    if isinstance(model, TransformerConfig) and 0 < narrow < model.patch:
        got = f"patch: {model.patch}"
        why = f"the image has {narrow} pixels one way"
        raise ConfigError.of(
            _MISFIT,
            "actor.model.patch",
            "larger than the image",
            got,
            why,
            f"patch: {narrow}",
        )
    chunk = config.torch_rollout.action_chunk
    return spaces.remembering(model.remembered).chunked(chunk)


def row_seeds(
    seed: int, first_row: int, rows: int, iteration: int = 0
) -> Sequence[int]:
    """Return the seeds of the global rows first_row .. first_row + rows - 1.

    They do not depend on the placement.

    `iteration`: the one in which the episodes begin; 0 gives the episodes at the start of a run.
    """
    begun = f"/{iteration}" if iteration else ""
    seeds = []
    for row in range(first_row, first_row + rows):
        seeds.append(random.Random(f"{seed}/{row}{begun}").getrandbits(31))
    return seeds


# ── text tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_task(name: str) -> Callable[..., TextTask]:
    """Return the class of the task `name`: a shipped one, or `package.module:Class`. Raises ConfigError."""
    found = named(name, TASKS, key="env.task", code="unknown-task", noun="text task")
    return cast("Callable[..., TextTask]", found)


def make_task(config: TextEnvConfig, *, seed: int, split: Split) -> TextTask:
    """Make the task of one split.

    Raises ConfigError: unknown name, wrong arguments, a damaged or empty data set.
    """
    try:
        return _make_task(config, seed, split)
    except ConfigError as error:
        if split == "train" or not config.eval_kwargs:
            raise
        # The problem may be in what the held-out prompts have of their own
        problems = [_of_held_out(p, config.eval_kwargs) for p in error.problems]
        raise ConfigError(problems) from error


def _of_held_out(problem: Problem, given: Mapping[str, object]) -> Problem:
    """Return the problem with the key env.eval_kwargs if that key gave the value; else unchanged."""
    leaf = problem.key.removeprefix("env.kwargs").removeprefix(".")
    if not problem.key.startswith("env.kwargs") or (
        leaf and leaf.partition(".")[0] not in given
    ):
        return problem
    key = problem.key.replace("env.kwargs", "env.eval_kwargs", 1)
    fix = problem.fix and re.sub(r"\b(env\.)?kwargs\b", r"\1eval_kwargs", problem.fix)
    return dataclasses.replace(problem, key=key, fix=fix)


def _make_task(config: TextEnvConfig, seed: int, split: Split) -> TextTask:
    """Make the task of one split. Raises ConfigError, with keys below env.kwargs."""
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
        task = kind(seed=seed, split=split, **kwargs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        what = "the task does not take these arguments"
        fix = "correct what it names, or kwargs: {}"
        raise ConfigError.of(
            "bad-task-kwargs", "env.kwargs", what, shown, f"{name}: {error}", fix
        ) from error
    # A task must have prompts, and other ones for evaluation than for training
    if task.size == 0:
        why = f"{name} has to ask something"
        fix = "path: <a file or folder with at least one row>"
        raise ConfigError.of(
            "empty-dataset", "env.kwargs", "there is no prompt in it", shown, why, fix
        )
    if split == "held_out" and task.size is not None and not config.eval_kwargs:
        what = "the held-out prompts would be those that are trained on"
        why = f"{name} has {task.size} prompts, and no key names which of them, or which others, to evaluate on"
        fix = "eval_kwargs: {path: <other prompts>}        (or: runner.eval_every: 0)"
        raise ConfigError.of(
            "nothing-held-out", "env.eval_kwargs", what, "{}", why, fix
        )
    return task


def check_task(config: TextEnvConfig, *, seed: int, evaluated: bool) -> list[Problem]:
    """Return the problems of the task and its rewards, found by making them.

    `evaluated`: also the held-out prompts.
    """
    from rlplace.envs.text.rewards import find_rewards

    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if evaluated else ("train",)
    for split in splits:
        try:
            find_rewards(config.rewards, make_task(config, seed=seed, split=split))
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    return problems
