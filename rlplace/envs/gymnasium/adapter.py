"""Gymnasium and MuJoCo simulators: checks ids, arguments and spaces, without numpy so that a planner can ask."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlplace.envs.spaces import ContinuousActions, DiscreteActions, Spaces
from rlplace.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    import gymnasium

    from rlplace.config import SimulatorEnvConfig
    from rlplace.envs.gymnasium.vector import GymnasiumVector

# Arguments of gymnasium.make that are not the simulator's own, and the key of the config that says the same.
_RESERVED = {
    "id": "env.id",
    "max_episode_steps": "env.max_episode_steps",
    "disable_env_checker": None,
}


class GymnasiumAdapter:
    """The ids of `gymnasium.registry`, and `package.module:Id-v0` for what `package.module` registers when imported."""

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        try:
            import gymnasium  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "gymnasium":
                raise
            return []
        return [*_id_problems(config.id), *_reserved_problems(config)]

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        _require(config)
        env = _make_described(config)
        try:
            problems = _observation_problems(env.observation_space) + _action_problems(env.action_space)
            if problems:
                raise ConfigError(problems)
            return Spaces(
                observation_shape=tuple(env.observation_space.shape or ()),
                actions=_actions(env.action_space),
                max_episode_steps=_limit(config),
            )
        finally:
            env.close()

    def make(self, config: SimulatorEnvConfig, rows: int) -> GymnasiumVector:
        from rlplace.envs.gymnasium.vector import GymnasiumVector

        _require(config)
        return GymnasiumVector([_make(config) for _ in range(rows)], max_episode_steps=_limit(config))


def _require(config: SimulatorEnvConfig) -> None:
    """Raises ConfigError unless the library is there and knows the id."""
    try:
        import gymnasium  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise ConfigError([_missing("gymnasium", config)]) from error
    problems = [*_id_problems(config.id), *_reserved_problems(config)]
    if problems:
        raise ConfigError(problems)


def _make(config: SimulatorEnvConfig) -> gymnasium.Env[Any, Any]:
    """One environment without Gymnasium's time limit and passive checks: the vector counts steps itself."""
    import gymnasium

    return gymnasium.make(config.id, max_episode_steps=-1, disable_env_checker=True, **config.kwargs)


def _make_described(config: SimulatorEnvConfig) -> gymnasium.Env[Any, Any]:
    """One environment, with what goes wrong at building told as a problem of the config."""
    import gymnasium

    try:
        return _make(config)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError([_missing(str(error).splitlines()[0], config)]) from error
    except ModuleNotFoundError as error:
        raise ConfigError([_missing(error.name or str(error), config)]) from error
    except (TypeError, ValueError, OSError) as error:
        if not config.kwargs:
            raise  # the simulator's own bug
        raise ConfigError([_kwargs_problem(config, error)]) from error


def _limit(config: SimulatorEnvConfig) -> int | None:
    import gymnasium

    return config.max_episode_steps or gymnasium.registry[config.id.rpartition(":")[2]].max_episode_steps


def _id_problems(name: str) -> list[Problem]:
    import gymnasium

    module_name, _, registered = name.rpartition(":")
    if module_name:
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            why = f"{registered} should be registered by {module_name}, and there is no module {error.name}"
            fix = "install it, put its folder on PYTHONPATH, or correct the name"
            what = "the simulator's module cannot be imported"
            span = (0, len(module_name))
            return [Problem(code="unknown-simulator", key="env.id", what=what, got=name, span=span, why=why, fix=fix)]
    if registered in gymnasium.registry:
        return []
    near = did_you_mean(registered, gymnasium.registry)
    prefix = f"{module_name}:" if module_name else ""
    return [
        Problem(
            code="unknown-simulator",
            key="env.id",
            what="unknown simulator" + (f", did you mean {near!r}?" if near else ""),
            got=name,
            span=(len(prefix), len(name)),
            why=f"it is none of the {len(gymnasium.registry)} ids known to Gymnasium {gymnasium.__version__}",
            fix=f"id: {prefix}{near}" if near else "id: package.module:Name-v0, where package.module registers Name-v0",
        )
    ]


def _reserved_problems(config: SimulatorEnvConfig) -> list[Problem]:
    return [
        Problem(
            code="reserved-simulator-kwarg",
            key=f"env.kwargs.{name}",
            what="is not an argument of the simulator",
            got=f"{name}: {config.kwargs[name]}",
            span=(0, len(name)),
            why=f"{key} says it" if key else "environments are always built unchecked",
            fix=f"remove it here and set {key}" if key else "remove it",
        )
        for name, key in _RESERVED.items()
        if name in config.kwargs
    ]


def _missing(what: str, config: SimulatorEnvConfig) -> Problem:
    return Problem(
        code="missing-library",
        key="env.id",
        what="a library of the simulator is not installed",
        got=config.id,
        why=what,
        fix="pip install 'rlplace[envs]'",
    )


def _kwargs_problem(config: SimulatorEnvConfig, error: Exception) -> Problem:
    return Problem(
        code="bad-simulator-kwargs",
        key="env.kwargs",
        what="the simulator does not take these arguments",
        got=", ".join(f"{name}: {value}" for name, value in config.kwargs.items()),
        why=f"{config.id} says: {error}",
        fix="kwargs: {}",
    )


def _observation_problems(space: gymnasium.Space[Any]) -> list[Problem]:
    from gymnasium.spaces import Box

    if isinstance(space, Box):
        return []
    why = "policies take one array of numbers per step"
    fix = "wrap it with gymnasium.wrappers.FlattenObservation where you register it"
    return [_unsupported("shows observations that are not one array", space, why, fix)]


def _action_problems(space: gymnasium.Space[Any]) -> list[Problem]:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete) or (isinstance(space, Box) and space.dtype.kind == "f"):
        return []
    why = "policies choose one of n (Discrete) or a vector of floating-point numbers (Box)"
    return [
        _unsupported("takes actions no policy gives", space, why, "wrap it with an ActionWrapper where you register it")
    ]


def _unsupported(what: str, space: gymnasium.Space[Any], why: str, fix: str) -> Problem:
    return Problem(
        code="unsupported-space", key="env.id", what=f"the simulator {what}", got=str(space), why=why, fix=fix
    )


def _actions(space: gymnasium.Space[Any]) -> DiscreteActions | ContinuousActions:
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        return DiscreteActions(n=int(space.n))
    assert isinstance(space, Box)
    low, high = (tuple(float(bound) for bound in side.ravel()) for side in (space.low, space.high))
    return ContinuousActions(shape=space.shape, low=low, high=high)
