"""Rollout of the off-policy job: each rank steps its own environments by the policy, and hands the steps to replay."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.codes import problem
from rlplace.errors import SimulatorError
from rlplace.metrics import ENDLESS_EPISODES, PLAYED_EPISODES, Metric, Metrics
from rlplace.workers.off_policy.arguments import (
    POLICY,
    TRANSITIONS,
    OffPolicyArguments,
)
from rlplace.workers.off_policy.pieces import shared_rows
from rlplace.workers.worker import Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlplace.algo.replay import Steps
    from rlplace.envs.contract import StepResult

_NOISE = 1  # number of this module's random numbers among those of a run
_LONGEST_EPISODE = 100_000  # steps of an episode in an evaluation


class OffPolicyRollout(Worker):
    """Owns the environments of its rows, whose episodes go on from one iteration to the next."""

    imports: ClassVar[tuple[str, ...]] = (
        "torch",
        "gymnasium",
        "rlplace.envs.gymnasium_vector",
        "rlplace.models.off_policy",
    )

    config: OffPolicyArguments

    def setup(self) -> None:
        import numpy as np

        from rlplace.envs.image_range import ImageRange
        from rlplace.envs.registry import make_simulator, seed_global_numbers
        from rlplace.models import BUILDING
        from rlplace.models.off_policy import Acting, new_policy
        from rlplace.workers.roles.env import StageGroup
        from rlplace.workers.saving import FilesBehind

        given = self.config
        self._pieces = given.pieces
        self._rows = given.rows("rollout", self.rank)
        # Some environments draw from the random numbers of the process
        with BUILDING:
            seed_global_numbers(given.seed, self.rank)
        count = len(self._rows)
        simulator = make_simulator(given.blocks.env, count, 1)
        self.context.opened.callback(simulator.close)
        self._group = StageGroup(
            index=0,
            first_row=self._rows.start,
            columns=slice(0, count),
            simulator=simulator,
            spaces=given.spaces,
            rows=count,
        )
        self._group.begin(given.seed)
        # A policy of this job does not normalise
        env = given.blocks.env
        self._images = ImageRange(env.id or env.kind, given.spaces, normalizes=False)
        self._images.look(self._group.observations)
        first = self._group.observations
        wrong = first[~np.isfinite(first)]
        if len(wrong):
            raise self._not_finite(f"{wrong[0]}", "the first observation")
        # Rows whose next step does not follow their last one
        self._begins = np.zeros(count, np.bool_)
        self._behind = FilesBehind(self.context)
        self.context.opened.callback(self._behind.close)
        # The policy
        algorithm = given.blocks.algorithm
        device = self.context.device.torch_name
        network = new_policy(
            given.spaces, algorithm.name, given.blocks.actor, given.seed
        ).to(device)
        network.requires_grad_(False)
        self._acting = Acting(network, given.spaces, device)
        self.offload(network)
        self.weights_of(network)

    # ── acting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def act(self, iteration: int) -> Metrics:
        """Step the environments through all pieces of an iteration; return the metrics of the episodes that ended."""
        from rlplace.envs.registry import seed_global_numbers
        from rlplace.models import BUILDING

        with BUILDING:
            seed_global_numbers(self.config.seed, self.rank, iteration)
        returns: list[float] = []
        lengths: list[int] = []
        for piece in range(self._pieces.count):
            self.context.check_cancelled("act")
            if self._pieces.syncs_before(iteration, piece):
                with self.timer("wait"):
                    self._take_policy(piece)
            with self.timer("act"):
                steps = self._act(iteration, piece, returns, lengths)
            with self.timer("put"):
                self._put(piece, steps)
        episodes = len(returns)
        steps_done = self._pieces.count * self._pieces.steps // self.world_size
        return {
            "env/return": Metric(sum(returns) / max(1, episodes), "mean", episodes),
            "env/episode_length": Metric(
                sum(lengths) / max(1, episodes), "mean", episodes
            ),
            "env/episodes": Metric(episodes, "sum"),
            "env/steps": Metric(steps_done, "sum", notes=self._remarks()),
        }

    def _take_policy(self, piece: int) -> None:
        """Wait for the policy after the updates of an earlier piece, and take its weights."""
        import torch

        _, numbers = self.channel(POLICY).get(key=str(self.rank))
        flat = torch.from_numpy(numbers)
        first = 0
        for parameter in self._acting.network.parameters():
            part = flat[first : first + parameter.numel()]
            parameter.data.copy_(part.view_as(parameter))
            first += parameter.numel()

    def _act(
        self, iteration: int, piece: int, returns: list[float], lengths: list[int]
    ) -> Steps:
        """Step the environments through one piece. Add returns and lengths of the episodes that ended to the lists."""
        import numpy as np

        from rlplace.algo.replay import Steps
        from rlplace.envs.contract import DiscreteActions

        spaces = self.config.spaces
        group = self._group
        rows = len(self._rows)
        count = self._pieces.steps // self.config.blocks.env.total_num_envs
        discrete = isinstance(spaces.actions, DiscreteActions)
        shape = () if discrete else spaces.actions.shape  # type: ignore[union-attr]
        explore = self._exploration(iteration, piece, count)
        observations = []
        next_observations = []
        actions = np.empty((count, rows, *shape), np.int64 if discrete else np.float32)
        rewards = np.empty((count, rows), np.float32)
        terminated = np.empty((count, rows), np.bool_)
        truncated = np.empty((count, rows), np.bool_)
        for step in range(count):
            shown = group.observations
            actions[step] = explore(step, shown)
            result = group.simulator.step(self._acting.scaled(actions[step]))
            self._require_finite(result, iteration)
            after = result.observations
            # The last observation of a truncated episode; that of a terminated one is never looked at
            if len(result.final_observations):
                after = after.copy()
                after[result.truncated] = result.final_observations
            observations.append(shown)
            next_observations.append(after)
            rewards[step] = result.rewards
            terminated[step] = result.terminated
            truncated[step] = result.truncated
            for total, length in zip(
                result.episode_returns, result.episode_lengths, strict=True
            ):
                if length:
                    returns.append(total)
                    lengths.append(length)
            group.step(result, np.zeros((rows, 0), np.float32))
        begins = self._begins
        self._begins = np.zeros(rows, np.bool_)
        return Steps(
            observations=np.stack(observations),
            actions=actions,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            next_observations=np.stack(next_observations),
            begins=begins,
        )

    def _exploration(self, iteration: int, piece: int, count: int) -> Any:
        """Return a function (step, observations) -> actions of this rank's rows, with the exploration of the algorithm.

        Random numbers belong to piece and row, so they are the same in each placement, and after a resume.
        """
        import numpy as np

        from rlplace.envs.contract import DiscreteActions

        algorithm = self.config.blocks.algorithm
        spaces = self.config.spaces
        total = self.config.blocks.env.total_num_envs
        number = self._pieces.number(iteration, piece)
        random = np.random.default_rng([self.config.seed, _NOISE, number])
        mine = slice(self._rows.start, self._rows.stop)
        random_alone = self._pieces.acts_randomly(iteration, piece)
        if isinstance(spaces.actions, DiscreteActions):
            choices = random.integers(spaces.actions.n, size=(count, total))[:, mine]
            chances = random.random((count, total))[:, mine]
            before = self._pieces.steps_before(iteration, piece)

            def choose(step: int, shown: NDArray[Any]) -> NDArray[Any]:
                done = min(1.0, (before + step * total) / algorithm.epsilon_steps)
                fallen = algorithm.epsilon_end - algorithm.epsilon_start
                epsilon = algorithm.epsilon_start + done * fallen
                if random_alone:
                    return choices[step]
                best = self._acting.decide(shown)
                return np.where(chances[step] < epsilon, choices[step], best)

            return choose
        size = (count, total, *spaces.actions.shape)
        if random_alone:
            uniform = random.uniform(-1.0, 1.0, size)[:, mine].astype(np.float32)
            return lambda step, shown: uniform[step]
        noise = random.standard_normal(size, np.float32)[:, mine]
        if algorithm.name == "sac":
            return lambda step, shown: self._acting.decide(shown, noise[step])

        def disturbed(step: int, shown: NDArray[Any]) -> NDArray[Any]:
            added = algorithm.exploration_noise * noise[step]
            return (self._acting.decide(shown) + added).clip(-1.0, 1.0)

        return disturbed

    def _put(self, piece: int, steps: Steps) -> None:
        """Put the steps of each row into the channel of the replay rank that keeps this row."""
        for shard in range(self.world_size_of("replay")):
            shared = shared_rows(self._rows, self.config.rows("replay", shard))
            if not shared:
                continue
            first = self._rows.start
            part = steps.of_rows(slice(shared.start - first, shared.stop - first))
            item = (piece, shared.start, part.arrays, part.begins)
            self.channel(TRANSITIONS).put(item, key=str(shard))

    def _require_finite(self, result: StepResult, iteration: int) -> None:
        """Raise SimulatorError if a number of a step is not finite."""
        import numpy as np

        arrays = {
            "rewards": result.rewards,
            "observations": result.observations,
            "final observations": result.final_observations,
        }
        for name, numbers in arrays.items():
            wrong = numbers[~np.isfinite(numbers)]
            if len(wrong):
                raise self._not_finite(
                    f"{wrong[0]} in {name}", f"a step of iteration {iteration + 1}"
                )

    def _not_finite(self, got: str, what: str) -> SimulatorError:
        """Return the error about a number that is not finite. `got`: the number and its place. `what`: the step."""
        env = self.config.blocks.env
        return SimulatorError(
            problem(
                "simulator-not-finite",
                self.context.owner,
                got,
                error="stepped",
                step=what,
                simulator=env.id or env.kind,
            )
        )

    def _remarks(self) -> tuple[str, ...]:
        from rlplace.envs.contract import Remarking, Wrapped

        found: list[str] = []
        if isinstance(self._group.simulator, Wrapped):
            self._group.simulator.remark_on_kept_steps()
        if isinstance(self._group.simulator, Remarking):
            found += self._group.simulator.remarks
        self._images.look(self._group.observations)
        if self._images.remark is not None:
            found.append(self._images.remark)
        return tuple(found)

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, iteration: int) -> Metrics:
        """Play whole episodes without exploration, on rank 0, in simulators made for that. Return metrics."""
        from rlplace.envs.play import play

        if self.rank:
            return {}
        given = self.config
        remarks: list[str] = []
        try:
            episodes = play(
                given.blocks.env,
                given.spaces,
                lambda shown, begins: self._acting.choose(shown),
                episodes=given.eval_episodes,
                seed=given.blocks.env.eval_seed,
                longest=_LONGEST_EPISODE,
                states=self._group.episodes().states,
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
        returns = [episode.total for episode in episodes]
        lengths = [episode.length for episode in episodes]
        return {
            "eval/return": Metric(statistics.fmean(returns)),
            "eval/return_std": Metric(statistics.pstdev(returns)),
            "eval/episode_length": Metric(statistics.fmean(lengths)),
            PLAYED_EPISODES: Metric(len(episodes), "sum", notes=tuple(remarks)),
        }

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write_state(self, folder: str) -> Metrics:
        """Copy the state of the episodes, and write it into `folder` in the background."""
        episodes = self._group.episodes()
        self._behind.start(Path(folder), lambda: [episodes.write(Path(folder))])
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Go on with the episodes in `folder`, which any number of ranks may have written; return how many were cut."""
        import numpy as np

        from rlplace.workers.roles.episodes import read

        saved = read(Path(folder), self._rows, self._group.observations)
        lost = self._group.go_on(saved)
        cut = len(lost)
        # Rows of a simulator that cannot be restored begin anew
        self._begins = np.logical_and(saved.lengths > 0, self._group.lengths == 0)
        return {
            "env/steps_lost": Metric(int(lost.sum()), "sum"),
            "env/episodes_cut": Metric(cut and int(np.count_nonzero(lost)), "sum"),
        }
