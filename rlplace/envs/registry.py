"""Finds the simulator adapter or text task that a config names; the one place that knows which are shipped."""

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

from rlplace.envs.contract import image_size
from rlplace.errors import ConfigError, Problem, did_you_mean, one_of, suggestion
from rlplace.extras import install_command

if TYPE_CHECKING:
    from rlplace.config.schema import Config, SimulatorEnvConfig, TextEnvConfig
    from rlplace.envs.contract import Adapter, Simulator, Spaces
    from rlplace.envs.text.contract import Split, TextTask

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
EXTRAS: Mapping[str, str] = {  # module -> our extra that has it
    **dict.fromkeys(("numpy", "torch"), "run"),
    **dict.fromkeys(("gymnasium", "imageio", "mujoco"), "envs"),
    "transformers": "llm",
    "minigrid": "minigrid",
    "gymnasium_robotics": "robotics",
    "mani_skill": "maniskill",
}
_MISFIT = "model-misfit"
_NATURE_LAYERS = 3
_NATURE_PIXELS = 36

# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(
    name: str, shipped: Mapping[str, str], *, key: str, code: str, noun: str
) -> Any:
    """Return a shipped object, or the user's package.module:Name. Raises ConfigError.

    Errors at the import of a shipped one pass through: of a library that is not installed.
    """
    module_name, colon, attribute = shipped.get(name, name).partition(":")
    if not colon:
        near = did_you_mean(name, shipped)
        why = f"shipped: {', '.join(shipped) or 'none'}; your own is named package.module:Name"
        fix = f"{key.rpartition('.')[2]}: {near or next(iter(shipped), 'package.module:Name')}"
        raise ConfigError.of(
            code, key, f"unknown {noun}" + suggestion(near), name, why, fix
        )
    try:
        module = importlib.import_module(module_name)
        why = f"module {module_name} has no {attribute}"
        near = did_you_mean(attribute, vars(module))
    except ModuleNotFoundError as error:
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
        fix = "put the folder of your package on PYTHONPATH, or correct the name"
        fix = f"{key.rpartition('.')[2]}: {module_name}:{near}" if near else fix
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
    """Report what of `kwargs` the callable does not take; `given` are arguments it gets from elsewhere."""
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
    """Report a package.module:Name that cannot be imported, does not take `kwargs`, or has none of the `methods`.

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
    problems: list[Problem] = []
    if kwargs:  # what it gets first may be called anything
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
    own = [
        method
        for method in vars(found)
        if not method.startswith("_") and callable(getattr(found, method))
    ]
    wrong = {
        method: near
        for method in own
        if method not in methods and (near := did_you_mean(method, methods))
    }
    for method, near in wrong.items():
        what = f"has a method {method}" + suggestion(near)
        why = f"what is called are {', '.join(methods)}"
        problems += ConfigError.of(
            code, key, what, name, why, f"def {near}(self, ...)"
        ).problems
    if not wrong and not any(hasattr(found, method) for method in methods):
        what = "has nothing that would be called"
        why = f"its methods are to be some of {', '.join(methods)}"
        problems += ConfigError.of(
            code, key, what, name, why, f"def {methods[0]}(self, ...)"
        ).problems
    return problems


def not_imported(
    error: Exception, name: str, *, key: str, code: str, noun: str
) -> ConfigError:
    """Explain what the module of the user's package.module:Name raises when it is imported."""
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
    """Return our extra that has the module which is missing; None for a module of others."""
    return EXTRAS.get(str(error.name).partition(".")[0])


def place_of(error: BaseException, name: str) -> str:
    """Return the last file and line of package.module:Name's own module in a traceback; without any, the name."""
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
    return Path(file).with_suffix("").as_posix().removesuffix("/__init__")


def unknown_choice(
    argument: str,
    got: str,
    known: Iterable[str],
    *,
    why: str,
    example: str | None = None,
) -> ConfigError:
    """Refuse an argument of a task that names none of the library's."""
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
    """Name the extra of this package that installs a library."""
    what = f"a library of {of} is not installed"
    fix = install_command(extra)
    # As Gymnasium names what our extra does not have, such as Box2D
    theirs = re.findall(r"`(pip install [^`]+)`", why)
    if theirs and why.partition(" ")[0].lower() not in fix:
        fix = " && ".join(theirs)
    return ConfigError.of("missing-library", key, what, got, why, fix)


@contextmanager
def needs(
    *modules: str, got: str, extra: str, key: str = "env.task", of: str = "the task"
) -> Iterator[None]:
    """Use a library inside; raises ConfigError where one of `modules` is not installed: any, where none is named."""
    try:
        yield
    except ModuleNotFoundError as error:
        if modules and error.name not in modules:
            raise  # it is there; something that it imports is not
        why = f"there is no module {error.name}" if error.name else str(error)
        raise missing_library(why, got=got, extra=extra, key=key, of=of) from error


# ── simulators ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_adapter(name: str) -> Adapter:
    """Return a shipped adapter or `package.module:Class`, without importing its library. Raises ConfigError."""
    kind = named(
        name, ADAPTERS, key="env.kind", code="unknown-adapter", noun="simulator library"
    )
    return cast("Adapter", kind())


def check(config: SimulatorEnvConfig) -> Sequence[Problem]:
    """Report what is wrong with `env` without a simulator; silent where its library is missing: a plan needs none."""
    try:
        return find_adapter(config.kind).check(config)
    except ConfigError as error:
        return error.problems


def surely_made(config: SimulatorEnvConfig) -> bool:
    """Whether nothing can be wrong with a simulator that is not known already: one of Gymnasium's own, as it is."""
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
    """Make a simulator that takes so many actions at once. Raises ConfigError."""
    simulator = find_adapter(config.kind).make(config, rows)
    if chunk == 1:
        return simulator
    from rlplace.envs.chunks import in_chunks

    return in_chunks(simulator, chunk)


def spaces_of_job(config: Config) -> Spaces:
    """Return the shapes that the policy of a job has to do with. Raises ConfigError where its model takes others."""
    spaces = describe(config.simulator_env)
    pictures = [part for part in spaces.entries if part.dtype == "uint8"]
    model = config.actor.policy
    got = ", ".join(f"{part.name} {list(part.shape)}".strip() for part in pictures)
    if model.kind == "mlp" and pictures:
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
    if model.kind == "cnn" and not spaces.images:
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
        model.kind == "cnn"
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
    if model.kind == "cnn" and model.network == "nature" and small:
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
    if model.kind == "transformer" and model.width % model.heads:
        got = f"width: {model.width}, heads: {model.heads}"
        why = "each head attends to its share of a token"
        fix = f"width: {-(-model.width // model.heads) * model.heads}"
        raise ConfigError.of(
            _MISFIT, "actor.model.width", "no multiple of heads", got, why, fix
        )
    narrow = min(
        (size for part in spaces.images for size in image_size(part.shape)[1:]),
        default=0,
    )
    if model.kind == "transformer" and 0 < narrow < model.patch:
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
    return spaces.remembering(model.remembered).chunked(
        config.torch_rollout.action_chunk
    )


def row_seeds(
    seed: int, first_row: int, rows: int, iteration: int = 0
) -> Sequence[int]:
    """Seeds of the simulators of global rows first_row..first_row + rows - 1: the same simulator in every placement.

    `iteration`: in which their episodes begin; not again those with which the run began.
    """
    begun = f"/{iteration}" if iteration else ""
    return [
        random.Random(f"{seed}/{row}{begun}").getrandbits(31)
        for row in range(first_row, first_row + rows)
    ]


# ── text tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_task(name: str) -> Callable[..., TextTask]:
    """Return the class called `name`: a shipped one, or `package.module:Class` of your own. Raises ConfigError."""
    return cast(
        "Callable[..., TextTask]",
        named(name, TASKS, key="env.task", code="unknown-task", noun="text task"),
    )


def make_task(config: TextEnvConfig, *, seed: int, split: Split) -> TextTask:
    """Make the task of one split. Raises ConfigError: unknown, wrong arguments, a broken or empty data set."""
    try:
        return _make_task(config, seed, split)
    except ConfigError as error:
        if split == "train" or not config.eval_kwargs:
            raise
        raise ConfigError(
            [_of_held_out(problem, config.eval_kwargs) for problem in error.problems]
        ) from error


def _of_held_out(problem: Problem, given: Mapping[str, object]) -> Problem:
    """Return the problem by the key of what held-out prompts have of their own."""
    leaf = problem.key.removeprefix("env.kwargs").removeprefix(".")
    if not problem.key.startswith("env.kwargs") or (
        leaf and leaf.partition(".")[0] not in given
    ):
        return problem
    key = problem.key.replace("env.kwargs", "env.eval_kwargs", 1)
    fix = problem.fix and re.sub(r"\b(env\.)?kwargs\b", r"\1eval_kwargs", problem.fix)
    return dataclasses.replace(problem, key=key, fix=fix)


def _make_task(config: TextEnvConfig, seed: int, split: Split) -> TextTask:
    name = config.task
    assert name is not None, "a run has a task"
    kind = find_task(name)
    kwargs = {**config.kwargs, **(config.eval_kwargs if split == "held_out" else {})}
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
    """Report what is wrong with the task and its rewards, by making them; `evaluated`: with held-out prompts."""
    from rlplace.envs.text.rewards import find_rewards

    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if evaluated else ("train",)
    for split in splits:
        try:
            find_rewards(config.rewards, make_task(config, seed=seed, split=split))
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    return problems
