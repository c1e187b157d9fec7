"""Steps parallel environments of PettingZoo: each agent is one row.

::

    environment 0   agent a  ●────●────●────●   row 0      agent b of row 1 has ended: the row shows zeros
                    agent b  ●────●────○────○   row 1      and gets 0; the episodes of both rows end when no agent is
    environment 1   agent a  ●────●────●────●   row 2      left, or at the time limit, and all agents begin anew
                    agent b  ●────●────●────●   row 3

PettingZoo does the same: an environment is reset when no agent is left. So does SuperSuit's wrapper `black_death`.
PettingZoo gives no access to the state of an episode, so all episodes begin anew after a resume.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import StepResult
from rlplace.envs.entries import Unfit, in_words
from rlplace.envs.given_actions import GivenActions
from rlplace.envs.gymnasium_results import (
    Bounds,
    Ends,
    Results,
    close_all,
    flag,
    reward_of,
)
from rlplace.envs.observations import encoding_of
from rlplace.envs.owned import disown, own
from rlplace.envs.precision import Precision
from rlplace.envs.random_numbers import RandomNumbers

_STEP = "step()"
_RESET = "reset()"
_VALUES_OF_STEP = 5
# Steps between two comparisons of observations with their bounds
_LOOK_EVERY = 64


class PettingZooVector:
    """A simulator that owns several parallel environments of one kind, and steps them one after the other.

    Row e * A + a is agent a of environment e, where A is the number of agents.
    """

    def __init__(
        self, envs: Sequence[Any], *, max_episode_steps: int | None, name: str
    ) -> None:
        """Take environments with the same agents, all with the same spaces.

        `max_episode_steps`: None: no time limit. `name`: of the environments, for errors.
        """
        self._envs = list(envs)
        self._agents = list(envs[0].possible_agents)
        self._results = Results(name)
        try:
            own(envs)
        except Unfit as unfit:
            raise self._results.refused(unfit, "the constructor") from None
        seen = envs[0].observation_space(self._agents[0])
        encoding = encoding_of(seen)
        assert encoding is not None, "describe has refused it"
        self._read = encoding.read
        # Finds different numbers that are equal as float32, in a few steps of this vector
        self._precision = Precision(encoding)
        self._clock = 0
        self._exact: list[Any] = []
        # What the vector of Gymnasium's environments compares as well: lengths of episodes, bounds of observations and
        # random numbers; None: no longer
        self._ends = Ends()
        self._bounds: Bounds | None = Bounds(encoding.low, encoding.high)
        self._random: RandomNumbers | None = None
        rows = len(self._envs) * len(self._agents)
        self._shape = (rows, *encoding.whole.shape)
        self._dtype = np.dtype(encoding.whole.dtype)
        self._limit = sys.maxsize
        if max_episode_steps is not None:
            self._limit = max_episode_steps
        self._given = GivenActions(envs[0].action_space(self._agents[0]))
        # Steps of each environment since its reset
        self._steps = [0] * len(self._envs)
        # For each row: the observation, whether its agent is alive, how the agent ended, and its return and length
        self._shown = np.zeros(self._shape, self._dtype)
        self._alive = np.zeros(rows, np.bool_)
        self._terminated = np.zeros(rows, np.bool_)
        self._left_out = np.zeros(rows, np.bool_)
        self._returns = np.zeros(rows)
        self._lengths = np.zeros(rows, np.int64)
        # For each row, the last observation while its agent was alive. Afterwards `_shown` has zeros
        self._last = np.zeros(self._shape, self._dtype)

    @property
    def remarks(self) -> Sequence[str]:
        """Texts about unusual results of the environments that were accepted. Equal texts are here once."""
        return self._results.remarks

    def reset(self, seeds: Sequence[int]) -> NDArray[Any]:
        """Begin an episode in every row, and return the first observations [B, *O].

        `seeds`: one seed for each row; an environment uses the seed of its first agent's row.
        """
        for number in range(len(self._envs)):
            self._begin(number, seeds[number * len(self._agents)])
        given = seeds[:: len(self._agents)][:2]
        if len(set(given)) == len(given):
            self._random = RandomNumbers(self._envs)
        self._look()
        return self._shown.copy()

    def restart(self, rows: Sequence[int]) -> NDArray[Any]:
        """Begin a new episode in the rows `rows`, and return the first observations [len(rows), *O].

        An environment is reset if all its agents are in `rows`. Otherwise its other agents go on, and the agents of
        `rows` count as dead until the episode of the environment ends.
        """
        asked = set(rows)
        for number in range(len(self._envs)):
            of_env = set(self._rows(number))
            if of_env <= asked:
                self._begin(number)
                continue
            left_out = sorted(of_env & asked)
            self._left_out[left_out] = True
            self._alive[left_out] = False
            # The episode of such a row has no later observation, and its return and length do not count
            self._terminated[left_out] = True
            self._returns[left_out] = 0.0
            self._lengths[left_out] = 0
            self._shown[left_out] = 0
        return self._shown[list(rows)]

    def step(self, actions: NDArray[Any]) -> StepResult:
        """Step all environments with the actions [B, *A], and return the result.

        An environment whose agents have all ended is reset in the same step. Raises SimulatorError for a result that is
        not in the spaces of the agents.
        """
        rows = len(self._shown)
        rewards = np.zeros(rows, np.float32)
        terminated = np.zeros(rows, np.bool_)
        truncated = np.zeros(rows, np.bool_)
        ended: list[int] = []
        finals = []
        returns: list[float] = []
        lengths: list[int] = []
        taken = self._given.of(actions)
        self._clock += 1
        self._exact.clear()
        for number in range(len(self._envs)):
            self._step(number, taken, rewards)
            of_env = list(self._rows(number))
            limited = self._steps[number] >= self._limit
            if self._envs[number].agents and not limited:
                continue
            # The episodes of all agents end together
            ended += of_env
            for row in of_env:
                if self._terminated[row]:
                    terminated[row] = True
                else:
                    truncated[row] = True
                    finals.append(self._last[row].copy())
                returns.append(float(self._returns[row]))
                lengths.append(int(self._lengths[row]))
            if self._lengths[of_env].any():
                length = int(self._lengths[of_env].max())
                ends = bool(terminated[of_env].all())
                self._results.ended(self._ends, length, terminated=ends)
            self._begin(number)
        final_observations = np.empty((0, *self._shape[1:]), self._dtype)
        if finals:
            final_observations = np.array(finals)
        if self._clock == 1 or self._clock % _LOOK_EVERY == 0:
            self._look()
        if self._exact:
            self._results.lost(self._precision.add(self._clock, self._exact))
        return StepResult(
            observations=self._shown.copy(),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_observations=final_observations,
            episode_returns=returns,
            episode_lengths=lengths,
        )

    def close(self) -> None:
        """Close all environments."""
        disown(self._envs)
        close_all(self._envs, self._results.name)

    def _look(self) -> None:
        """Add a remark, once, if numbers that living agents see are outside of the bounds of their space."""
        living = self._shown[self._alive]
        if self._bounds is None or not len(living):
            return
        outside = self._bounds.outside(living)
        if outside is not None:
            number, low, high = outside
            self._bounds = None
            self._results.remark_of_kind(
                "outside", f"{number:g}", low=f"{low:g}", high=f"{high:g}"
            )

    def _rows(self, number: int) -> range:
        """Return the rows of the agents of environment `number`."""
        first = number * len(self._agents)
        return range(first, first + len(self._agents))

    def _begin(self, number: int, seed: int | None = None) -> None:
        """Reset environment `number`, and begin the episodes of its rows. Raises SimulatorError.

        `seed`: seed of the environment; None: the environment keeps its random number generator.
        """
        env = self._envs[number]
        watched = self._random
        if watched is None or seed is not None or number:
            shown = self._results.first(env, seed)
        else:
            before = watched.before_later()
            shown = self._results.first(env)
            for how, generator in watched.after_later(before):
                self._results.remark_of_kind(how, generator)
            if not watched.more:
                self._random = None
        rows = self._rows(number)
        for kept in (self._alive, self._left_out, self._returns, self._lengths):
            kept[rows.start : rows.stop] = 0
        self._terminated[rows.start : rows.stop] = False
        self._steps[number] = 0
        self._shown[rows.start : rows.stop] = 0
        for row, agent in zip(rows, self._agents, strict=True):
            if agent in env.agents:
                self._see(row, agent, shown, _RESET)
            else:
                # This agent is absent from the beginning, so its row has no final observation
                self._terminated[row] = True

    def _step(
        self, number: int, taken: Sequence[Any], rewards: NDArray[np.float32]
    ) -> None:
        """Step environment `number`, and read the results of its agents. Raises SimulatorError.

        `taken`: the action of each row. `rewards`: the rewards of living agents are written into this array.
        """
        env = self._envs[number]
        rows = dict(zip(self._agents, self._rows(number), strict=True))
        living = list(env.agents)
        made = env.step({agent: taken[rows[agent]] for agent in living})
        self._steps[number] += 1
        if not isinstance(made, tuple | list) or len(made) != _VALUES_OF_STEP:
            raise self._results.refused(Unfit("step", in_words(made)), _STEP)
        shown, earned, terminations, truncations, _ = made
        self._look_for_late_rewards(earned, living)
        try:
            for agent in living:
                row = rows[agent]
                # `restart` has excluded this row from the present episode
                if self._left_out[row]:
                    continue
                number_of_agent = reward_of(self._entry(earned, agent))
                rewards[row] = number_of_agent
                self._returns[row] += number_of_agent
                self._lengths[row] += 1
                self._see(row, agent, shown, _STEP)
                dies = flag(self._entry(terminations, agent))
                leaves = flag(self._entry(truncations, agent))
                if dies or leaves or agent not in env.agents:
                    self._terminated[row] = dies or not leaves
                    self._alive[row] = False
                    self._shown[row] = 0
            # Agents that join in the middle of an episode
            for agent in env.agents:
                row = rows[agent]
                if agent not in living and not self._left_out[row]:
                    self._terminated[row] = False
                    self._see(row, agent, shown, _STEP)
        except Unfit as unfit:
            raise self._results.refused(unfit, _STEP) from None

    def _look_for_late_rewards(self, earned: Any, living: Sequence[Any]) -> None:
        """Add a remark, once, if an agent that took no action in this step gets a reward: it counts nowhere.

        `earned`: agent -> reward, as `step` returned it. `living`: the agents that have acted.
        """
        if not isinstance(earned, Mapping) or len(earned) <= len(living):
            return
        for agent in earned:
            if agent in living or agent not in self._agents:
                continue
            try:
                is_lost = reward_of(earned[agent]) != 0
            except Unfit:
                # Such as None: nothing is lost
                continue
            if is_lost:
                self._results.remark_of_kind("late-reward", f"{agent}: {earned[agent]}")

    def _see(self, row: int, agent: Any, shown: Any, method: str) -> None:
        """Store the observation of an agent in its row. Raises SimulatorError if the observation is invalid.

        `shown`: agent -> observation, as `method` returned it.
        """
        try:
            seen = self._entry(shown, agent)
            self._shown[row] = self._read(seen)
        except Unfit as unfit:
            raise self._results.refused(unfit, method) from None
        if method == _STEP and self._clock >= self._precision.looks_at:
            self._exact.append(self._precision.values_of(seen))
        self._last[row] = self._shown[row]
        self._alive[row] = True

    def _entry(self, values: Any, agent: Any) -> Any:
        """Return the value of `agent` in `values`, a mapping of agents. Raises Unfit if there is none."""
        if not isinstance(values, Mapping) or agent not in values:
            raise Unfit("agent", in_words(values), agent=agent)
        return values[agent]
