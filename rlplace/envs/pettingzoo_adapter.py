"""The adapter to parallel environments of PettingZoo. Each agent is one row.

Imports no NumPy, since the planner uses it too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error, problem
from rlplace.envs.contract import Spaces
from rlplace.envs.gymnasium_adapter import spaces_of
from rlplace.envs.registry import not_imported, own_arguments, wrappers_problems
from rlplace.errors import ConfigError, Problem, did_you_mean, suggestion

if TYPE_CHECKING:
    from rlplace.config.blocks.simulator import SimulatorEnvConfig
    from rlplace.envs.pettingzoo_vector import PettingZooVector

_ID = "env.id"
# Name of the function in PettingZoo's modules that makes a parallel environment
_MAKE = "parallel_env"
# Name of the function that makes an environment whose agents act one after the other (AEC)
_MAKE_IN_TURNS = "env"
# Methods of a parallel environment
_METHODS = ("reset", "step", "observation_space", "action_space", "close")


class PettingZooAdapter:
    """The adapter to parallel environments of PettingZoo: each agent is one row, and all agents have one policy.

    A simulator's id is `package.module`, where the module has a function `parallel_env`, or `package.module:function`.
    All agents must have the same spaces.
    """

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Return the problems that can be found without importing PettingZoo. The import takes long."""
        return wrappers_problems(config)

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Make one environment, and return the spaces of an agent, and the number of agents. Raises ConfigError."""
        env = _make(config)
        try:
            agents = list(env.possible_agents)
            seen = env.observation_space(agents[0])
            taken = env.action_space(agents[0])
            problems = []
            for agent in agents[1:]:
                if env.observation_space(agent) != seen:
                    got = (
                        f"{agents[0]}: {seen}, {agent}: {env.observation_space(agent)}"
                    )
                    pads = "pad_observations_v0"
                    problems.append(_unequal(got, "observation", pads))
                if env.action_space(agent) != taken:
                    got = f"{agents[0]}: {taken}, {agent}: {env.action_space(agent)}"
                    problems.append(_unequal(got, "action", "pad_action_space_v0"))
                if problems:
                    raise ConfigError(problems)
            return spaces_of(seen, taken, together=len(agents))
        finally:
            env.close()

    def make(self, config: SimulatorEnvConfig, rows: int) -> PettingZooVector:
        """Return a simulator with `rows` rows: all agents of the environments. Raises ConfigError.

        `rows` must be a multiple of the number of agents of an environment.
        """
        from rlplace.envs.pettingzoo_vector import PettingZooVector

        first = _make(config)
        agents = len(first.possible_agents)
        if rows % agents:
            first.close()
            raise config_error(
                "agents-misfit",
                "env.total_num_envs",
                f"{rows} rows",
                agents=agents,
                simulator=config.id,
                above=-(-rows // agents) * agents,
            )
        others = [_make(config) for _ in range(rows // agents - 1)]
        return PettingZooVector(
            [first, *others],
            max_episode_steps=config.max_episode_steps,
            name=config.id,
        )


def _unequal(got: str, kind: str, pads: str) -> Problem:
    """Return the problem that two agents have different spaces.

    `kind`: "observation" or "action". `pads`: name of SuperSuit's wrapper that makes the spaces equal.
    """
    return problem("unsupported-space", _ID, got, error="agents", kind=kind, wrap=pads)


def _make(config: SimulatorEnvConfig) -> Any:
    """Return a new parallel environment. Raises ConfigError if the id is unknown or makes something else."""
    module_name, _, name = config.id.partition(":")
    name = name or _MAKE
    with _imports(config.id):
        module = importlib.import_module(module_name)
    make = getattr(module, name, None)
    if not callable(make):
        if name == _MAKE and callable(getattr(module, _MAKE_IN_TURNS, None)):
            raise config_error(
                "unknown-simulator",
                _ID,
                config.id,
                error="turns-of-pettingzoo",
                module=module_name,
            )
        known = [each for each, made in vars(module).items() if callable(made)]
        near = did_you_mean(name, known)
        raise config_error(
            "unknown-simulator",
            _ID,
            config.id,
            error="pettingzoo",
            module=module_name,
            function=name,
            hint=suggestion(near),
            near=near or _MAKE,
        )
    try:
        # A copy of the arguments, since an environment may change them in place
        env = make(**own_arguments(config.kwargs))
    except TypeError as error:
        if not config.kwargs:
            raise
        got = ", ".join(f"{key}: {value}" for key, value in config.kwargs.items())
        raise config_error(
            "bad-simulator-kwargs",
            "env.kwargs",
            got,
            error="refused",
            simulator=config.id,
            reason=error,
        ) from error
    _require_parallel(env, config.id, name)
    return env


@contextmanager
def _imports(name: str) -> Iterator[None]:
    """Run the body of the `with` statement, which imports the module of the id `name`.

    Raises ConfigError if the import fails.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        of_library = (error.name or "").partition(".")[0] == "pettingzoo"
        raise config_error(
            "missing-library",
            _ID,
            name,
            error="pettingzoo" if of_library else "imported",
            module=error.name,
        ) from error
    except Exception as error:  # whatever the user's module raises when it is imported
        raise not_imported(
            error, name, key=_ID, code="unknown-simulator", noun="simulator"
        ) from error


def _require_parallel(env: Any, name: str, function: str) -> None:
    """Raise ConfigError unless `env`, which the function of the id `name` has made, is a parallel environment."""
    error = None
    if hasattr(env, "agent_iter"):
        # An AEC environment: its agents act one after the other
        error = "turns"
    elif not all(callable(getattr(env, method, None)) for method in _METHODS):
        error = "parallel"
    elif not getattr(env, "possible_agents", None):
        error = "agents"
    if error is not None:
        raise config_error(
            "not-an-environment",
            _ID,
            name,
            error=error,
            made=f"{type(env).__module__}.{type(env).__qualname__}",
            callable=function,
        )
