"""The adapter to Gymnasium: checks ids, arguments and spaces. Imports no NumPy, since the planner uses it too."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error, problem
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
)
from rlplace.envs.registry import (
    EXTRAS,
    arguments_not_taken,
    check_named,
    missing_library,
    named,
    not_imported,
    own_arguments,
    unfit_arguments,
    unknown_arguments,
)
from rlplace.errors import ConfigError, Problem, did_you_mean, suggestion
from rlplace.extras import install_command

if TYPE_CHECKING:
    import gymnasium

    from rlplace.config.blocks.simulator import SimulatorEnvConfig
    from rlplace.envs.gymnasium_vector import GymnasiumVector

# Key of the errors about a simulator and its spaces
_ID = "env.id"
_KWARGS = "env.kwargs"
# Form of an id of another library -> the module that registers it
_PACKAGES = {
    r"ALE/|\w+NoFrameskip-v": "ale_py",
    r"MiniGrid-|BabyAI-": "minigrid",
    r"Fetch(Reach|Push|Slide|Pick)|Hand(Reach|Manip)|(Ant|Point)Maze|Adroit|FrankaK": "gymnasium_robotics",
    r"(Push|Pick|Stack|Poke|Pull|Lift|Roll)\w*(Cube|Ball|Tool|Peg)\w*-v1|PegInsertion": "mani_skill.envs",
    r"Panda(Reach|Push|Slide|Pick|Stack|Flip)": "panda_gym",
    r"(highway|merge|roundabout|parking|intersection|racetrack)(-fast)?-v": "highway_env",
    r"Meta-World/": "metaworld",
    r"dm_control/": "shimmy",
    r"Safety\w+-v": "safety_gymnasium",
}
# Module -> how it is installed, if it has no extra
_INSTALLED = {
    "ale_py": "ale-py",
    "panda_gym": "panda-gym",
    "highway_env": "highway-env",
    "shimmy": "'shimmy[dm-control]'",
}
# Arguments of gymnasium.make that are not the simulator's, and the config key that sets each
_RESERVED = {
    "id": "env.id",
    "max_episode_steps": "env.max_episode_steps",
    "disable_env_checker": None,
}


class GymnasiumAdapter:
    """The adapter to the library Gymnasium.

    A simulator's id has one of three forms: an id of `gymnasium.registry`; `package.module:Id-v0`, an id that the
    module registers when it is imported; or `package.module:function`, a function that returns an environment.
    """

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Return all problems of the config that can be found without building a simulator.

        If Gymnasium is not installed, return an empty list.
        """
        shipped = _registering()
        if shipped is None:
            return []
        # Ids of Gymnasium and of libraries of our extras need no import; others are looked up
        known = f'id="{config.id}"' in shipped or _is_of_extra(config.id, shipped)
        problems: list[Problem] = []
        if not known:
            problems += _id_problems(config.id)
        problems += _reserved_problems(config)
        if config.kwargs and not problems:
            problems += _argument_problems(config, shipped)
        # Wrappers must be importable and callable
        for at, wrapper in enumerate(config.wrappers):
            key = f"env.wrappers[{at}].name"
            noun = "wrapper"
            problems += check_named(
                wrapper.name,
                given=("the simulator",),
                key=key,
                code="unknown-wrapper",
                noun=noun,
                usual="gymnasium.wrappers",
                kwargs=wrapper.kwargs,
            )
        return problems

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Make one environment, and return the spaces of its observations and actions. Raises ConfigError."""
        try:
            with _library(config):
                env = _make(config)
        except ConfigError:
            raise
        except Exception as error:
            # Whatever the simulator raises; without arguments it is a bug of the simulator
            if not config.kwargs:
                raise
            got = ", ".join(f"{name}: {value}" for name, value in config.kwargs.items())
            raise config_error(
                "bad-simulator-kwargs",
                "env.kwargs",
                got,
                error="refused",
                simulator=config.id,
                reason=str(error) or type(error).__name__,
            ) from error
        from rlplace.envs.gymnasium_results import close_all
        from rlplace.envs.gymnasium_state import statistics_of
        from rlplace.envs.kept_numbers import has_statistics

        try:
            _check_start(env)
            spaces = spaces_of(env.observation_space, env.action_space)
            return dataclasses.replace(
                spaces,
                normalized=bool(statistics_of(env)),
                own_statistics=has_statistics(env),
            )
        finally:
            close_all([env], config.id)

    def make(self, config: SimulatorEnvConfig, rows: int) -> GymnasiumVector:
        """Return a simulator with `rows` environments. Raises ConfigError if they cannot be built."""
        from rlplace.envs.gymnasium_vector import GymnasiumVector

        with _library(config):
            # With wrappers, Gymnasium's `TimeLimit` inside them counts: a wrapper may make several steps at once
            limit = None if config.wrappers else _limit(config)
            return GymnasiumVector(
                [_make(config) for _ in range(rows)],
                max_episode_steps=limit,
                name=config.id,
            )


def _registering() -> str | None:
    """Return the source text of the module that registers Gymnasium's own ids; None if Gymnasium is not installed.

    The planner reads the text, because importing Gymnasium is slow.
    """
    library = importlib.util.find_spec("gymnasium")
    if library is None or library.origin is None:
        return None
    file = Path(library.origin).with_name("envs") / "__init__.py"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return ""


def _is_of_extra(name: str, shipped: str) -> bool:
    """Return whether `name` is `module:Id-v0` with a library of an extra of rlplace, which registers the id.

    An id of a library that does not register its ids one by one in its first module counts as registered: the library
    would have to be imported. `shipped`: source text of the module that registers Gymnasium's own ids.
    """
    module, _, registered = name.partition(":")
    library = importlib.util.find_spec(module) if module in EXTRAS else None
    if library is None or library.origin is None:
        return False
    text = shipped
    if module != "gymnasium":
        text = Path(library.origin).read_text(encoding="utf-8")
    return 'id="' not in text or f'id="{registered}"' in text


def made_with_extra(name: str) -> bool:
    """Return whether `name` is an id of Gymnasium for which the libraries of rlplace's extra `envs` are enough.

    An id of which Gymnasium has a newer version is not: an older one may need older libraries.
    """
    text = _registering() or ""
    own = re.search(
        rf'id="{re.escape(name)}",\s+entry_point="gymnasium\.envs\.(\w+)', text
    )
    base, _, version = name.rpartition("-v")
    newer = version.isdigit() and f'id="{base}-v{int(version) + 1}"' in text
    shipped = ("classic_control", "mujoco", "toy_text")
    return own is not None and own[1] in shipped and not newer


@contextmanager
def _library(config: SimulatorEnvConfig) -> Iterator[None]:
    """Check the config's id and arguments, then run the body of the `with` statement.

    Raises ConfigError for a wrong id or argument, and if the body fails because a library is missing.
    """
    with _imports(config.id):
        import gymnasium

        problems = [*_id_problems(config.id), *_reserved_problems(config)]
        if problems:
            raise ConfigError(problems)
        try:
            yield
        except gymnasium.error.DependencyNotInstalled as error:
            raise ModuleNotFoundError(str(error).splitlines()[0]) from error
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            raise _not_loaded(config.id, error) from error


def _not_loaded(name: str, error: ImportError) -> ConfigError:
    """Return the error for the id `name`, whose simulator raised ImportError: `error`.

    Gymnasium raises it for ids that it registers only to say where they are now; others lack a library of the system.
    """
    newest = _versions(name)[-1:]
    if newest and newest != [name]:
        return config_error(
            "unknown-simulator",
            _ID,
            name,
            error="old-version",
            reason=str(error).splitlines()[0],
            newest=newest[0],
        )
    return config_error("missing-library", _ID, name, error="unloadable", reason=error)


def _versions(name: str) -> list[str]:
    """Return the registered ids that differ from the id `name` in the version alone, the newest one last."""
    import gymnasium

    base = re.sub(r"-v\d+$", "", name).lower()
    known = [
        each for each in gymnasium.registry if each.rpartition("-v")[0].lower() == base
    ]
    return sorted(known, key=lambda each: int(each.rpartition("-v")[2]))


@contextmanager
def _imports(got: str) -> Iterator[None]:
    """Run the body of the `with` statement; if it fails because a module is missing, raise ConfigError.

    `got`: the id of the simulator. If an extra of rlplace installs the module, the error proposes this extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        why = f"there is no module {error.name}" if error.name else str(error)
        # Without a name it is a library that Gymnasium reports by text
        if error.name is None or error.name in EXTRAS:
            extra = EXTRAS[error.name or "gymnasium"]
            raise missing_library(
                why, got=got, extra=extra, key="env.id", of="the simulator"
            ) from error
        raise config_error(
            "missing-library", "env.id", got, error="imported", module=error.name
        ) from error


def _make(config: SimulatorEnvConfig) -> gymnasium.Env[Any, Any]:
    """Return one environment, inside the wrappers that the config names.

    The time limit is where `gymnasium.make` puts it: around the environment, inside the wrappers. Without wrappers it
    is not added, since `GymnasiumVector` counts the steps. Gymnasium's checks are not added. Raises ConfigError if a
    wrapper fails.
    """
    import gymnasium
    from gymnasium.wrappers import TimeLimit

    # Make the environment: a registered id, or a function
    env: gymnasium.Env[Any, Any]
    module, _, name = config.id.rpartition(":")
    # Copies of the arguments, since an environment may change them in place
    given = own_arguments(config.kwargs)
    if name in gymnasium.registry:
        # Wrappers of the library itself, such as ManiSkill's, may take -1 literally: give them the limit
        wrapped = config.wrappers or gymnasium.registry[name].additional_wrappers
        limit = _limit(config) if wrapped else None
        try:
            env = gymnasium.make(
                config.id,
                max_episode_steps=limit or -1,
                disable_env_checker=True,
                **given,
            )
        except TypeError:
            _require_made(name, config)
            raise
    else:
        env = getattr(importlib.import_module(module), name)(**given)
        _require_env(env, config.id)
        if config.wrappers and config.max_episode_steps is not None:
            env = TimeLimit(env, config.max_episode_steps)
    _check_limit(env, config)
    from rlplace.envs.layers import with_own_rewards

    # `env/return` is the sum of these rewards, even if wrappers change rewards
    env = with_own_rewards(env, outside=bool(config.wrappers))
    # Put it into its wrappers, the first one innermost
    for at, wrapper in enumerate(config.wrappers):
        key = f"env.wrappers[{at}]"
        wrap = named(
            wrapper.name, {}, key=f"{key}.name", code="unknown-wrapper", noun="wrapper"
        )
        # YAML has lists only; wrappers may want tuples
        kwargs = {
            name: tuple(v) if isinstance(v, list) else v
            for name, v in own_arguments(wrapper.kwargs).items()
        }
        try:
            env = wrap(env, **kwargs)
        except (TypeError, ValueError, AssertionError) as error:
            arguments = [f"{name}: {value}" for name, value in wrapper.kwargs.items()]
            got = ", ".join(arguments) or "no arguments"
            raise config_error(
                "bad-wrapper", key, got, name=wrapper.name, reason=error
            ) from error
    return env


def _require_env(made: object, name: str) -> None:
    """Raise ConfigError unless `made`, which the id `name` has made, is a single environment of Gymnasium.

    Environments of Gym, its predecessor, and of PettingZoo look alike and have other spaces and methods.
    """
    import gymnasium

    if isinstance(made, gymnasium.Env):
        return
    library = _library_of(type(made))
    kind = "none"
    if library in ("gym", "pettingzoo"):
        kind = library
    elif isinstance(made, gymnasium.vector.VectorEnv):
        kind = "vector"
    raise config_error(
        "not-an-environment",
        _ID,
        name,
        error=kind,
        made=f"{type(made).__module__}.{type(made).__qualname__}",
        callable=name.rpartition(":")[2],
    )


def _require_made(name: str, config: SimulatorEnvConfig) -> None:
    """Raise ConfigError if the registered id `name` makes something that is no environment of Gymnasium.

    To be called after `gymnasium.make` has raised TypeError, which may have other causes: these come up again here.
    """
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    spec = gymnasium.registry[name]
    create: Any = spec.entry_point
    if isinstance(create, str):
        create = load_env_creator(create)
    made = create(**{**spec.kwargs, **config.kwargs})
    _require_env(made, config.id)
    made.close()


def _library_of(kind: type) -> str | None:
    """Return the library, of those with other environments, that has a base class of `kind`; None if there is none."""
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library in ("gym", "pettingzoo"):
            return library
    return None


def _limit(config: SimulatorEnvConfig) -> int | None:
    """Return the greatest number of steps of an episode; None if there is no limit.

    The number is taken from the config, else from the registration of the simulator's id.
    """
    import gymnasium

    spec = gymnasium.registry.get(config.id.rpartition(":")[2])
    if config.max_episode_steps:
        return config.max_episode_steps
    if spec is None:
        return None
    return spec.max_episode_steps


def _error_of_module(module: str, registered: str) -> str:
    """Return the name of the error about an id of a module that is missing. `registered`: the id in the module."""
    import gymnasium

    if module != "gym":
        return "module"
    # Gymnasium has an environment of the same name
    is_known = registered in gymnasium.registry
    return "known-without-gym" if is_known else "module-of-gym"


def _id_problems(name: str) -> Sequence[Problem]:
    """Return the problems of a simulator's id: its module cannot be imported, or the id is not registered."""
    import gymnasium

    # PettingZoo's environments have another adapter
    if name.partition(".")[0] == "pettingzoo":
        found = problem(
            "unknown-simulator",
            _ID,
            name,
            error="of-pettingzoo",
            proposed=name.removesuffix(":parallel_env").replace(":env", ""),
        )
        return [found]
    # Import the user's module, which may register the id
    module_name, _, registered = name.rpartition(":")
    own: list[str] = []
    if module_name:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if extra := EXTRAS.get(str(error.name)):
                why = f"there is no module {error.name}"
                return missing_library(
                    why, got=name, extra=extra, key="env.id", of="the simulator"
                ).problems
            unregistered = problem(
                "unknown-simulator",
                "env.id",
                name,
                error=_error_of_module(str(error.name), registered),
                span=(0, len(module_name)),
                registered=registered,
                module=module_name,
                missing=error.name,
            )
            return [unregistered]
        except Exception as error:  # noqa: BLE001  # whatever the user's module raises when it is imported
            return not_imported(
                error, name, key="env.id", code="unknown-simulator", noun="simulator"
            ).problems
        # A function or class makes the environment itself
        if callable(getattr(module, registered, None)):
            return []
        own = [
            word
            for word, made in vars(module).items()
            if callable(made) and not word.startswith("_")
        ]
    if registered in gymnasium.registry:
        return []
    # Gym, the predecessor of Gymnasium, has a registry of its own
    gym = sys.modules.get("gym")
    if registered in getattr(getattr(gym, "envs", None), "registry", ()):
        return config_error(
            "unknown-simulator",
            _ID,
            name,
            error="of-gym",
            registered=registered,
        ).problems
    # Unknown: propose another version of the id, else a similar name
    versions = _versions(registered)
    if versions:
        near: str | None = versions[-1]
    else:
        near = did_you_mean(registered, [*own, *gymnasium.registry])
    prefix = ""
    name_of_error = "unknown-id"
    if module_name:
        prefix = f"{module_name}:"
        name_of_error = "not-registered"
    proposed = "<package.module:Class, or package.module:Name-v0, which it registers>"
    if near:
        proposed = f"{prefix}{near}"
    package = _package_of(registered)
    if package is not None and package != module_name:
        top = package.partition(".")[0]
        command = f"pip install {_INSTALLED.get(top, top)}"
        if top in EXTRAS:
            command = install_command(EXTRAS[top])
        return [
            problem(
                "unknown-simulator",
                _ID,
                name,
                error="of-another-package",
                module=package,
                proposed=f"{package}:{registered}",
                command=command,
            )
        ]
    unknown = problem(
        "unknown-simulator",
        "env.id",
        name,
        error=name_of_error,
        span=(len(prefix), len(name)),
        hint=suggestion(near),
        count=len(gymnasium.registry),
        version=gymnasium.__version__,
        module=module_name,
        registered=registered,
        proposed=proposed,
    )
    return [unknown]


def _argument_problems(config: SimulatorEnvConfig, shipped: str) -> Sequence[Problem]:
    """Return a problem for each name in `env.kwargs` that the simulator's constructor does not take, or not so.

    If it is not known what the constructor takes, return an empty list. `shipped`: source text of the module that
    registers Gymnasium's own ids.
    """
    from rlplace.envs.constructor import takes_of

    own = re.search(rf'id="{re.escape(config.id)}",\s+entry_point="([^"]+)"', shipped)
    module, _, name = config.id.rpartition(":")
    entry: object = own and own[1]
    if own is None and module in sys.modules:
        # A class or function of the user's, or an id that the module registers
        entry = getattr(sys.modules[module], name, None)
        if entry is None and "gymnasium" in sys.modules:
            spec = sys.modules["gymnasium"].registry.get(name)
            entry = spec and spec.entry_point
    if callable(entry):
        return unknown_arguments(
            entry, config.kwargs, given=(), key=_KWARGS, code="bad-simulator-kwargs"
        )
    takes = takes_of(entry) if isinstance(entry, str) else None
    if takes is None:
        return []
    code = "bad-simulator-kwargs"
    unknown = arguments_not_taken(
        takes.names,
        config.kwargs,
        called=takes.called,
        key=_KWARGS,
        code=code,
        takes_more=takes.more,
    )
    unfit = unfit_arguments(
        takes.values, config.kwargs, called=takes.called, key=_KWARGS, code=code
    )
    return [*unknown, *unfit]


def _package_of(name: str) -> str | None:
    """Return the module that registers an id of another library, such as `minigrid`; None if it is not known."""
    for form, module in _PACKAGES.items():
        if re.match(form, name):
            return module
    return None


def _reserved_problems(config: SimulatorEnvConfig) -> list[Problem]:
    """Return a problem for each name in `env.kwargs` that is an argument of `gymnasium.make`, not of the simulator."""
    problems: list[Problem] = []
    for name in _RESERVED:
        if name not in config.kwargs:
            continue
        key = _RESERVED[name]
        error = "unchecked"
        if key:
            error = "another-key"
        reserved = problem(
            "reserved-simulator-kwarg",
            f"env.kwargs.{name}",
            f"{name}: {config.kwargs[name]}",
            error=error,
            span=(0, len(name)),
            other=key,
        )
        problems.append(reserved)
    return problems


def _check_start(env: gymnasium.Env[Any, Any]) -> None:
    """Raise ConfigError if shimmy has converted an action space of gym that begins elsewhere to one that begins at 0.

    The environment would get other actions than it expects.
    """
    converted = env.unwrapped
    inner = getattr(converted, "gym_env", None)
    if inner is None or not type(converted).__module__.startswith("shimmy."):
        return
    start = getattr(inner.action_space, "start", 0)
    if start != getattr(converted.action_space, "start", 0):
        raise config_error(
            "unsupported-space",
            _ID,
            str(inner.action_space),
            error="lost-start",
            start=start,
        )


def _check_limit(env: gymnasium.Env[Any, Any], config: SimulatorEnvConfig) -> None:
    """Raise ConfigError if a `TimeLimit` of `env` ends episodes before the limit that the config asks for.

    Such a limit comes from a function of the user's that calls `gymnasium.make`. `env`: without the wrappers of the
    config.
    """
    from gymnasium.wrappers import TimeLimit

    from rlplace.envs.layers import wrappers_of

    asked = config.max_episode_steps
    limits = [
        int(wrapper._max_episode_steps)
        for wrapper in wrappers_of(env)
        if isinstance(wrapper, TimeLimit)
    ]
    if asked is None or not limits or min(limits) >= asked:
        return
    raise config_error(
        "limit-without-effect",
        "env.max_episode_steps",
        str(asked),
        simulator=config.id,
        limit=min(limits),
    )


def spaces_of(
    seen: gymnasium.Space[Any],
    taken: gymnasium.Space[Any],
    *,
    arrays: str | None = None,
    together: int = 1,
) -> Spaces:
    """Convert Gymnasium's observation space `seen` and action space `taken` to `Spaces`.

    `arrays`: None if observations may be Dicts or Tuples. Otherwise observations must be single arrays, and `arrays` is
    the fix that the error proposes for another space. `together`: number of rows of one environment. Raises ConfigError
    for spaces that the policies of rlplace cannot handle.
    """
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    from rlplace.envs.observations import encoding_of

    # Observations must be numbers, in entries with different names
    problems: list[Problem] = []
    encoding = encoding_of(seen)
    if encoding is None or (arrays is not None and encoding.encode is not None):
        wrap = arrays or _wrap("an ObservationWrapper")
        problems.append(
            problem("unsupported-space", _ID, str(seen), error="entries", wrap=wrap)
        )
    names = []
    if encoding is not None:
        names = [part.name for part in encoding.parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        wrap = _wrap("an ObservationWrapper")
        alike = problem(
            "unsupported-space", _ID, str(seen), error="names", name=twice, wrap=wrap
        )
        problems.append(alike)
    # There must be something to see, and something to do
    if encoding is not None and encoding.whole.size == 0:
        nothing = problem(
            "unsupported-space",
            _ID,
            str(seen),
            error="nothing-shown",
            wrap=arrays or _wrap("an ObservationWrapper"),
        )
        problems.append(nothing)
    if 0 in (taken.shape or ()):
        nothing = problem(
            "unsupported-space",
            _ID,
            str(taken),
            error="nothing-taken",
            wrap=arrays or _wrap("an ActionWrapper"),
        )
        problems.append(nothing)
    # Actions must be choices or floating-point numbers
    choices = isinstance(taken, Discrete | MultiDiscrete | MultiBinary)
    if not (choices or (isinstance(taken, Box) and taken.dtype.kind == "f")):
        wrap = arrays or _wrap("an ActionWrapper")
        problems.append(
            problem("unsupported-space", _ID, str(taken), error="actions", wrap=wrap)
        )
    if problems:
        raise ConfigError(problems)
    # Describe the actions
    assert encoding is not None
    actions: Actions
    if isinstance(taken, Discrete):
        actions = DiscreteActions(n=int(taken.n), first=int(taken.start))
    elif isinstance(taken, MultiDiscrete):
        first = tuple(map(int, taken.start.ravel()))
        actions = MultiDiscreteActions(
            n=tuple(map(int, taken.nvec.ravel())),
            shape=tuple(taken.shape),
            first=first if any(first) else (),
        )
    elif isinstance(taken, MultiBinary):
        actions = MultiDiscreteActions(
            n=(2,) * math.prod(taken.shape), shape=tuple(taken.shape)
        )
    else:
        assert isinstance(taken, Box)
        low = tuple(float(bound) for bound in taken.low.ravel())
        high = tuple(float(bound) for bound in taken.high.ravel())
        actions = ContinuousActions(shape=taken.shape, low=low, high=high)
    whole = encoding.whole
    return Spaces(
        observation_shape=whole.shape,
        observation_dtype=whole.dtype,
        parts=encoding.parts,
        actions=actions,
        together=together,
    )


def _wrap(wrapper: str) -> str:
    """Return a text that proposes the wrapper class `wrapper`, as the fix of an error."""
    return f"wrap it with {wrapper} where you register it"
