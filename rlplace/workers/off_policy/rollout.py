"""Rollout of the off-policy job: each rank steps its own environments by the policy, and hands the steps to replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.metrics import Metric, Metrics
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
    from rlplace.workers.roles.env import Recording

    # (step of a piece, observations) -> actions of this rank's rows
    Explore = Callable[[int, NDArray[Any]], NDArray[Any]]

_NOISE = 1  # number of this module's random numbers among those of a run


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
        from rlplace.envs.registry import seed_global_numbers
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
        env = given.blocks.env
        self._group = StageGroup.made(
            self.context, env, given.spaces, self._rows, error="stepped"
        )
        self.context.opened.callback(self._group.simulator.close)
        self._group.begin(given.seed)
        # A policy of this job does not normalise
        self._images = ImageRange(
            self._group.name,
            given.spaces,
            normalizes=False,
            can_normalize=False,
            flattens=True,
        )
        self._images.look(self._group.observations)
        # Rows whose next step does not follow their last one
        self._begins = np.zeros(len(self._rows), np.bool_)
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
        import numpy as np

        from rlplace.envs.contract import Wrapped
        from rlplace.envs.registry import seed_global_numbers
        from rlplace.models import BUILDING
        from rlplace.workers.roles.env import episode_metrics

        if not self._pieces.acts:
            return {"env/steps": Metric(0, "sum")}
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
                recording = self._act(iteration, piece)
            with self.timer("put"):
                self._put(piece, recording.transitions(self._begins))
            self._begins = np.zeros_like(self._begins)
            returns += recording.episode_returns
            lengths += recording.episode_lengths
        steps = self._pieces.count * self._pieces.steps // self.world_size
        if isinstance(self._group.simulator, Wrapped):
            self._group.simulator.remark_on_kept_steps()
        remarks = tuple(self._group.remarks(self._images))
        return {
            **episode_metrics(returns, lengths),
            "env/steps": Metric(steps, "sum", notes=remarks),
        }

    def _take_policy(self, piece: int) -> None:
        """Wait for the policy after the updates of an earlier piece, and take its weights."""
        import torch

        from rlplace.models.off_policy import sent_tensors, set_numbers

        _, numbers = self.channel(POLICY).get(key=str(self.rank))
        set_numbers(sent_tensors(self._acting.network), torch.from_numpy(numbers))

    def _act(self, iteration: int, piece: int) -> Recording:
        """Step the environments through one piece, and return its steps. Raises SimulatorError."""
        import numpy as np

        from rlplace.workers.roles.env import Recording

        group = self._group
        every = slice(None)
        nothing = np.zeros((group.rows, 0), np.float32)
        steps = self._pieces.steps // self.config.blocks.env.total_num_envs
        explore = self._exploration(iteration, piece, steps)
        recording = Recording(steps=steps, rows=group.rows, spaces=self.config.spaces)
        recording.observations[0] = group.observations
        for step in range(steps):
            actions = explore(step, group.observations)
            recording.actions[step] = actions
            result = group.simulator.step(self._acting.scaled(actions))
            if not group.is_finite(result):
                row, got = next(iter(group.not_finite(result).items()))
                what = f"a step of iteration {iteration + 1}"
                raise group.not_finite_error(row, what, got)
            recording.result(step, every, group.step(result, nothing))
        return recording

    def _exploration(self, iteration: int, piece: int, steps: int) -> Explore:
        """Return the function that chooses the actions of a piece, with the exploration of the algorithm.

        Random numbers belong to piece and row, so they are the same in each placement, and after a resume.
        """
        import numpy as np

        from rlplace.envs.contract import DiscreteActions

        algorithm = self.config.blocks.algorithm
        acting = self._acting
        total = self.config.blocks.env.total_num_envs
        number = self._pieces.number(iteration, piece)
        random = np.random.default_rng([self.config.seed, _NOISE, number])
        mine = slice(self._rows.start, self._rows.stop)
        random_alone = self._pieces.acts_randomly(iteration, piece)
        actions = self.config.spaces.actions
        if isinstance(actions, DiscreteActions):
            choices = random.integers(actions.n, size=(steps, total))[:, mine]
            chances = random.random((steps, total))[:, mine]
            before = self._pieces.steps_before(iteration, piece)

            def choose(step: int, shown: NDArray[Any]) -> NDArray[Any]:
                if random_alone:
                    return choices[step]
                epsilon = algorithm.epsilon(before + step * total)
                return np.where(
                    chances[step] < epsilon, choices[step], acting.decide(shown)
                )

            return choose
        size = (steps, total, *actions.shape)
        if random_alone:
            uniform = random.uniform(-1.0, 1.0, size)[:, mine].astype(np.float32)
            return lambda step, shown: uniform[step]
        noise = random.standard_normal(size, np.float32)[:, mine]
        if algorithm.draws:
            return lambda step, shown: acting.decide(shown, noise[step])
        noise *= algorithm.exploration_noise
        return lambda step, shown: (acting.decide(shown) + noise[step]).clip(-1.0, 1.0)

    def _put(self, piece: int, steps: Steps) -> None:
        """Put the steps of each row into the channel of the replay rank that keeps this row."""
        for shard in range(self.world_size_of("replay")):
            shared = shared_rows(self._rows, self.config.rows("replay", shard))
            if not shared:
                continue
            first = self._rows.start
            part = steps.of_rows(slice(shared.start - first, shared.stop - first))
            item = ((piece, shared.start), (part.arrays, part.begins))
            self.channel(TRANSITIONS).put(item, key=str(shard))

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, iteration: int) -> Metrics:
        """Play whole episodes without exploration, on rank 0, in simulators made for that. Return metrics."""
        from rlplace.workers.roles.played import played_metrics

        if self.rank:
            return {}
        given = self.config

        def act(shown: NDArray[Any], begins: NDArray[Any]) -> NDArray[Any]:
            self.context.check_cancelled("evaluate")
            return self._acting.choose(shown)

        return played_metrics(
            given.blocks.env,
            given.spaces,
            act,
            given.eval_episodes,
            self._group.episodes().states,
        )

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
