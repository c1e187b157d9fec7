"""The adapter to EnvPool: finds a simulator and describes its spaces. Imports no NumPy, since the
planner uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error
from rlplace.envs.contract import Spaces
from rlplace.envs.gymnasium_adapter import spaces_of
from rlplace.envs.registry import needs, wrappers_problems
from rlplace.errors import Problem, did_you_mean, suggestion

if TYPE_CHECKING:
    from rlplace.config.blocks.simulator import SimulatorEnvConfig
    from rlplace.envs.envpool_vector import EnvPoolVector


class EnvPoolAdapter:
    """The adapter to the library EnvPool. A simulator's id is one of `envpool.list_all_envs()`."""

    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        """Return a problem if the config has wrappers: EnvPool's environments take none.

        Only EnvPool knows its ids, and importing EnvPool takes seconds: `describe` reports problems of the id and the
        arguments.
        """
        return wrappers_problems(config)

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        """Make a pool of one environment, and return the spaces of its observations and actions. Raises ConfigError."""
        pool = make_pool(config, [0])
        try:
            return spaces_of(
                pool.observation_space,
                pool.action_space,
                arrays="id: <one that shows a single array>",
            )
        finally:
            pool.close()

    def make(self, config: SimulatorEnvConfig, rows: int) -> EnvPoolVector:
        """Return a simulator. Its number of rows is decided later, by the number of seeds that `reset` gets."""
        from rlplace.envs.envpool_vector import EnvPoolVector

        return EnvPoolVector(lambda seeds: make_pool(config, seeds), config.id)


def make_pool(config: SimulatorEnvConfig, seeds: Sequence[int]) -> Any:
    """Return an EnvPool pool with one environment for each seed.

    Raises ConfigError if EnvPool is missing, or if the id or an argument is unknown.
    """
    with needs(got=config.id, extra="envpool", key="env.id", of="the simulator"):
        import envpool
    # The id must be one of EnvPool's
    known = envpool.list_all_envs()
    if config.id not in known:
        near = did_you_mean(config.id, known)
        raise config_error(
            "unknown-simulator",
            "env.id",
            config.id,
            error="envpool",
            hint=suggestion(near),
            count=len(known),
            near=near or known[0],
        )
    # Arguments of ours and of the user; a name given twice is a TypeError
    limit = {}
    if config.max_episode_steps is not None:
        limit["max_episode_steps"] = config.max_episode_steps
    kwargs = {"num_threads": 1, **config.kwargs}
    try:
        return envpool.make_gymnasium(
            config.id,
            num_envs=len(seeds),
            batch_size=len(seeds),
            seed=list(seeds),
            **limit,
            **kwargs,
        )
    except TypeError as error:
        got = ", ".join(f"{k}: {v}" for k, v in kwargs.items())
        raise config_error(
            "bad-simulator-kwargs",
            "env.kwargs",
            got,
            error="refused",
            simulator=config.id,
            reason=error,
        ) from error
