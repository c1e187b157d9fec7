"""The evaluation of a policy while it trains: whole episodes in simulators that are made for that."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import Spaces
from rlplace.envs.play import Act, play
from rlplace.errors import SimulatorError
from rlplace.metrics import ENDLESS_EPISODES, PLAYED_EPISODES, Metric, Metrics

# Most steps of an episode
_LONGEST_EPISODE = 30_000


def played_metrics(
    env: SimulatorEnvConfig,
    spaces: Spaces,
    act: Act,
    episodes: int,
    states: Sequence[Mapping[str, NDArray[Any]]] = (),
) -> Metrics:
    """Play whole episodes; return the metrics of their returns and lengths, or a note that episodes do not end.

    `act`: function (observations, whether an episode begins with each) -> actions. `states`: as in
    `play`. Raises ConfigError, SimulatorError.
    """
    remarks: list[str] = []
    try:
        played = play(
            env,
            spaces,
            act,
            episodes=episodes,
            seed=env.eval_seed,
            longest=_LONGEST_EPISODE,
            states=states,
            remarks=remarks,
        )
    except SimulatorError as error:
        if error.code != "endless-episode":
            raise
        note = (
            f"no evaluation: an episode has not ended after {_LONGEST_EPISODE:,} "
            "steps; env.max_episode_steps limits it"
        )
        return {ENDLESS_EPISODES: Metric(1.0, "max", notes=(note,))}
    returns = [episode.total for episode in played]
    lengths = [episode.length for episode in played]
    number = len(played)
    return {
        "eval/return": Metric(sum(returns) / number),
        "eval/return_std": Metric(statistics.pstdev(returns)),
        "eval/episode_length": Metric(sum(lengths) / number),
        PLAYED_EPISODES: Metric(number, "sum", notes=tuple(remarks)),
    }
