"""Env workers: what all share, and the one that steps simulators by the rollout ranks' actions.

::

    group 0   ask ─────── sim ask ─────── sim ask          while group 0 is simulated here,
    group 1       ask ─────── sim ask ─────── sim ask      rollout decides for group 1, and the other way round
"""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.envs import find_adapter, row_seeds
from rlplace.envs.contract import DiscreteActions, Simulator, Spaces, StepResult
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation, Trajectory
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS, TRAJECTORIES, WorkerArguments
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, cancelled, not_resident, out_of_step


@dataclasses.dataclass(slots=True)
class Seconds:
    """What one iteration spent in each part."""

    sim: float = 0.0  # simulators; of a text task prompts, replies and their tokens
    reward: float = 0.0  # of a text task: rewards that are calculated here, and waiting for the others
    wait: float = 0.0  # for actions or answers
    put: float = 0.0


class EnvWorker(Worker):
    """Base of env workers. An environment is either on its accelerators or not: WEIGHTS counts as OFF."""

    config: WorkerArguments
    holds: ClassVar[str]  # label of its memory in the device's account

    _residency = Residency.OFF

    def move(self, to: Residency) -> MoveReport:
        """Account for the environment's memory. Its state stays on the host."""
        began, device = time.perf_counter(), self.context.device
        if to == Residency.FULL:
            device.acquire(self.config.config.env.accelerator_memory, self.holds)
        else:
            device.release(self.holds)
        self._residency = to
        seconds = time.perf_counter() - began
        return MoveReport(residency=to, accelerator_bytes=device.held_bytes(), host_bytes=0, seconds=seconds)

    def _require_full(self, method: str) -> None:
        if self._residency != Residency.FULL:
            raise not_resident(self.context.owner, method, has=self._residency, needs=Residency.FULL)

    def close(self) -> None:
        self.context.device.release(self.holds)


# ── simulators ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """T steps of B rows, filled block by block: in the order of steps, and within a step in the order of rows.

    A new one per iteration: the arrays of the last belong to the receiver of its trajectory.
    """

    def __init__(self, *, steps: int, rows: int, spaces: Spaces) -> None:
        discrete = isinstance(spaces.actions, DiscreteActions)
        action_shape = () if isinstance(spaces.actions, DiscreteActions) else spaces.actions.shape
        self.observations = np.empty((steps + 1, rows, *spaces.observation_shape), np.float32)
        self.actions = np.empty((steps, rows, *action_shape), np.int64 if discrete else np.float32)
        self.rewards, self._logprobs, self._values = (np.empty((steps, rows), np.float32) for _ in range(3))
        self._terminated, self._truncated = (np.empty((steps, rows), np.bool_) for _ in range(2))
        self._finals = [np.empty((0, *spaces.observation_shape), np.float32)]
        self.versions: set[int] = set()  # of the policies that decided
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []

    def decision(self, step: int, columns: slice, chunk: ActionChunk) -> None:
        self.actions[step, columns] = chunk.actions
        self._logprobs[step, columns] = chunk.logprobs
        self._values[step, columns] = chunk.values
        self.versions.add(chunk.version)

    def result(self, step: int, columns: slice, result: StepResult) -> None:
        self.observations[step + 1, columns] = result.observations
        self.rewards[step, columns] = result.rewards
        self._terminated[step, columns] = result.terminated
        self._truncated[step, columns] = result.truncated
        # Blocks come in the order of numpy.argwhere(truncated), so these need no sorting.
        self._finals.append(result.final_observations)
        self.episode_returns += result.episode_returns
        self.episode_lengths += result.episode_lengths

    def trajectory(self, *, first_row: int, env_rank: int) -> Trajectory:
        return Trajectory(
            first_row=first_row,
            env_rank=env_rank,
            version_min=min(self.versions),
            version_max=max(self.versions),
            observations=self.observations[:-1],
            actions=self.actions,
            logprobs=self._logprobs,
            values=self._values,
            rewards=self.rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            last_observations=self.observations[-1],
            final_observations=np.concatenate(self._finals),
        )


class Piece(NamedTuple):
    """Rows of a stage group that one rollout rank decides on."""

    key: str  # of the observations channel
    first_row: int  # global
    rows: slice  # within the group


@dataclasses.dataclass(slots=True, kw_only=True)
class StageGroup:
    """Neighbouring rows that step together, with the episodes in progress."""

    index: int
    first_row: int  # global
    columns: slice  # its rows within the rank
    pieces: tuple[Piece, ...]
    simulator: Simulator
    observations: NDArray[np.float32]  # [rows, *O], what comes next; kept from one iteration to the next


class VectorEnvWorker(EnvWorker):
    """Owns its simulators; their episodes go on across iterations and offloads.

    Env rank e holds the global rows from e * rows_per_rank on: its stage groups one after the other.
    """

    holds: ClassVar[str] = "simulator"

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._groups: list[StageGroup] = []
        self._rows = config.config.simulator_env.total_num_envs // context.world_size

    def setup(self) -> None:
        config, rank = self.config.config, self.context.rank
        adapter = find_adapter(config.simulator_env.kind)
        shares = self.config.routes.observations.sends(rank)
        block = shares[0].start  # first group row of this rank; every stage group is cut over rollout ranks alike
        rows = self._rows // config.torch_rollout.pipeline_stage_num
        for index in range(config.torch_rollout.pipeline_stage_num):
            first_row = rank * self._rows + index * rows
            cuts = [(str(share.target), share.start - block, share.stop - block) for share in shares]
            simulator = adapter.make(config.simulator_env, rows)
            group = StageGroup(
                index=index,
                first_row=first_row,
                columns=slice(index * rows, (index + 1) * rows),
                pieces=tuple(Piece(key, first_row + start, slice(start, stop)) for key, start, stop in cuts),
                simulator=simulator,
                observations=simulator.reset(row_seeds(config.runner.seed, first_row, rows)),
            )
            self._groups.append(group)

    def run(self, iteration: int) -> Metrics:
        """Step every environment T times and send one trajectory; return when its last piece is put."""
        self._require_full("run")
        steps, seconds = self.config.config.algorithm.rollout_steps, Seconds()
        recording = Recording(steps=steps, rows=self._rows, spaces=self.config.spaces)
        for group in self._groups:
            recording.observations[0, group.columns] = group.observations
            self._ask(group, 0, seconds)
        for step in range(steps):
            for group in self._groups:
                if self.context.cancelled.is_set():
                    raise cancelled(self.context.owner, "run")
                self._receive(group, step, recording, seconds)
                began = time.perf_counter()
                result = group.simulator.step(recording.actions[step, group.columns])
                seconds.sim += time.perf_counter() - began
                group.observations = result.observations
                recording.result(step, group.columns, result)
                if step + 1 < steps:
                    self._ask(group, step + 1, seconds)
        self._send(recording, seconds)
        returns, lengths = recording.episode_returns, recording.episode_lengths
        episodes = len(returns)
        return {
            "env/return": Metric(sum(returns) / max(1, episodes), "mean", episodes),
            "env/episode_length": Metric(sum(lengths) / max(1, episodes), "mean", episodes),
            "env/episodes": Metric(episodes, "sum"),
            "env/steps": Metric(recording.rewards.size, "sum"),
            "env/sim_s": Metric(seconds.sim, "max"),
            "env/wait_s": Metric(seconds.wait, "max"),
            "env/put_s": Metric(seconds.put, "max"),
        }

    def _ask(self, group: StageGroup, step: int, seconds: Seconds) -> None:
        """Put the group's observations to the rollout ranks that decide on them."""
        began, channel = time.perf_counter(), self.context.channels[OBSERVATIONS]
        for piece in group.pieces:
            observation = Observation(
                env_rank=self.context.rank,
                stage_group=group.index,
                step=step,
                first_row=piece.first_row,
                observations=group.observations[piece.rows],
            )
            channel.put(observation, key=piece.key, weight=observation.weight)
        seconds.put += time.perf_counter() - began

    def _receive(self, group: StageGroup, step: int, recording: Recording, seconds: Seconds) -> None:
        """Wait for the answers of all rollout ranks to the group's observations, in any order."""
        began, channel = time.perf_counter(), self.context.channels[ACTIONS]
        due = {piece.first_row: piece.rows.stop - piece.rows.start for piece in group.pieces}
        while due:
            chunk: ActionChunk = channel.get(key=f"{self.context.rank}/{group.index}")
            rows = due.pop(chunk.first_row, None)
            if rows != len(chunk.actions) or chunk.step != step or chunk.stage_group != group.index:
                raise out_of_step(
                    self.context.owner,
                    "got an answer to something else",
                    got=_place(chunk.stage_group, chunk.step, chunk.first_row),
                    expected=_place(group.index, step, *due, *([] if rows is None else [chunk.first_row])),
                )
            start = group.columns.start + chunk.first_row - group.first_row
            recording.decision(step, slice(start, start + len(chunk.actions)), chunk)
        seconds.wait += time.perf_counter() - began

    def _send(self, recording: Recording, seconds: Seconds) -> None:
        began, first_row = time.perf_counter(), self.context.rank * self._rows
        trajectory = recording.trajectory(first_row=first_row, env_rank=self.context.rank)
        for share in self.config.routes.trajectories.sends(self.context.rank):
            piece = trajectory.split(share.start - first_row, share.stop - first_row)
            self.context.channels[TRAJECTORIES].put(piece, key=str(share.target), weight=piece.weight)
        seconds.put += time.perf_counter() - began

    def close(self) -> None:
        for group in self._groups:
            group.simulator.close()
        super().close()


def _place(stage_group: int, step: int, *first_rows: int) -> str:
    return f"stage group {stage_group}, step {step}, rows from {' or '.join(map(str, sorted(first_rows))) or 'none'}"
