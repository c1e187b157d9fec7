"""The env worker: steps stage groups of simulators in turn by the rollout ranks' actions; the actor gets what happened.

::

    group 0   ask ─────── sim ask ─────── sim ask          while group 0 is simulated here,
    group 1       ask ─────── sim ask ─────── sim ask      rollout decides for group 1, and the other way round
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.envs import find_adapter, row_seeds
from rlplace.envs.contract import Simulator, StepResult
from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import Share
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.job import ACTIONS, OBSERVATIONS, TRAJECTORIES, Job
from rlplace.workers.recording import Recording
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, cancelled, not_resident, out_of_step

_SIMULATOR = "simulator"


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
    key: str  # of the actions channel
    simulator: Simulator
    observations: NDArray[np.float32]  # [rows, *O], what comes next; kept from one iteration to the next


@dataclasses.dataclass(slots=True)
class Clock:
    """Where the time of one `run` went, in seconds."""

    sim_s: float = 0.0
    wait_s: float = 0.0
    put_s: float = 0.0


class EnvWorker(Worker):
    """Owns its simulators; their episodes go on across iterations and offloads.

    Env rank e holds the global rows from e * rows_per_rank on: its stage groups one after the other.
    """

    config: Job

    def __init__(self, config: Job, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._residency = Residency.OFF
        self._groups: list[StageGroup] = []
        self._to_actor: Sequence[Share] = config.routes.trajectories.sends(context.rank)

    @property
    def _rows(self) -> int:
        return self.config.config.simulator_env.total_num_envs // self.context.world_size

    def setup(self) -> None:
        config = self.config.config
        adapter = find_adapter(config.simulator_env.kind)
        rows = self._rows // config.torch_rollout.pipeline_stage_num
        for index in range(config.torch_rollout.pipeline_stage_num):
            first_row = self.context.rank * self._rows + index * rows
            simulator = adapter.make(config.simulator_env, rows)
            group = StageGroup(
                index=index,
                first_row=first_row,
                columns=slice(index * rows, (index + 1) * rows),
                pieces=self._pieces(first_row),
                key=f"{self.context.rank}/{index}",
                simulator=simulator,
                observations=simulator.reset(row_seeds(config.runner.seed, first_row, rows)),
            )
            self._groups.append(group)

    def _pieces(self, first_row: int) -> tuple[Piece, ...]:
        """Every stage group of this rank is cut over the rollout ranks alike."""
        shares = self.config.routes.observations.sends(self.context.rank)
        block = shares[0].start  # first group row of this rank
        return tuple(
            Piece(
                key=str(share.target),
                first_row=first_row + share.start - block,
                rows=slice(share.start - block, share.stop - block),
            )
            for share in shares
        )

    def move(self, to: Residency) -> MoveReport:
        """A simulator is either here or not: WEIGHTS counts as OFF. The episodes stay on the host."""
        began, device = time.perf_counter(), self.context.device
        if to == Residency.FULL:
            device.acquire(self.config.config.simulator_env.accelerator_memory, _SIMULATOR)
        else:
            device.release(_SIMULATOR)
        self._residency = to
        seconds = time.perf_counter() - began
        return MoveReport(residency=to, accelerator_bytes=device.held_bytes(), host_bytes=0, seconds=seconds)

    def run(self, iteration: int) -> Metrics:
        """Steps every environment T times and sends one trajectory; returns when its last piece is put."""
        if self._residency != Residency.FULL:
            raise not_resident(self.context.owner, "run", has=self._residency, needs=Residency.FULL)
        steps, clock = self.config.config.algorithm.rollout_steps, Clock()
        recording = Recording(steps=steps, rows=self._rows, spaces=self.config.spaces)
        for group in self._groups:
            recording.begin(group.columns, group.observations)
            self._ask(group, 0, clock)
        for step in range(steps):
            for group in self._groups:
                if self.context.cancelled.is_set():
                    raise cancelled(self.context.owner, "run")
                self._receive(group, step, recording, clock)
                recording.result(
                    step, group.columns, self._simulate(group, recording.actions[step, group.columns], clock)
                )
                if step + 1 < steps:
                    self._ask(group, step + 1, clock)
        self._send(recording, clock)
        return _metrics(recording, clock)

    def _ask(self, group: StageGroup, step: int, clock: Clock) -> None:
        """Puts the group's observations to the rollout ranks that decide on them."""
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
        clock.put_s += time.perf_counter() - began

    def _receive(self, group: StageGroup, step: int, recording: Recording, clock: Clock) -> None:
        """Waits for the answers of all rollout ranks to the group's observations, in whatever order they come."""
        began, channel = time.perf_counter(), self.context.channels[ACTIONS]
        due = {piece.first_row: piece.rows.stop - piece.rows.start for piece in group.pieces}
        while due:
            chunk: ActionChunk = channel.get(key=group.key)
            rows = due.pop(chunk.first_row, None)
            if rows != len(chunk.actions) or chunk.step != step or chunk.stage_group != group.index:
                raise out_of_step(
                    self.context.owner,
                    "got an answer to something else",
                    got=_spoken(chunk.stage_group, chunk.step, chunk.first_row),
                    expected=_spoken(group.index, step, *due, *([] if rows is None else [chunk.first_row])),
                )
            start = group.columns.start + chunk.first_row - group.first_row
            recording.decision(step, slice(start, start + len(chunk.actions)), chunk)
        clock.wait_s += time.perf_counter() - began

    def _simulate(self, group: StageGroup, actions: NDArray[np.generic], clock: Clock) -> StepResult:
        began = time.perf_counter()
        result = group.simulator.step(actions)
        group.observations = result.observations
        clock.sim_s += time.perf_counter() - began
        return result

    def _send(self, recording: Recording, clock: Clock) -> None:
        began, first_row = time.perf_counter(), self.context.rank * self._rows
        trajectory = recording.trajectory(first_row=first_row, env_rank=self.context.rank)
        for share in self._to_actor:
            piece = trajectory.split(share.start - first_row, share.stop - first_row)
            self.context.channels[TRAJECTORIES].put(piece, key=str(share.target), weight=piece.weight)
        clock.put_s += time.perf_counter() - began

    def close(self) -> None:
        for group in self._groups:
            group.simulator.close()
        self._groups = []
        self.context.device.release(_SIMULATOR)


def _spoken(stage_group: int, step: int, *first_rows: int) -> str:
    return f"stage group {stage_group}, step {step}, rows from {' or '.join(map(str, sorted(first_rows))) or 'none'}"


def _metrics(recording: Recording, clock: Clock) -> Metrics:
    returns, lengths = recording.episode_returns, recording.episode_lengths
    episodes = len(returns)
    return {
        "env/return": Metric(sum(returns) / max(1, episodes), "mean", episodes),
        "env/episode_length": Metric(sum(lengths) / max(1, episodes), "mean", episodes),
        "env/episodes": Metric(episodes, "sum"),
        "env/steps": Metric(recording.rewards.size, "sum"),
        "env/sim_s": Metric(clock.sim_s, "max"),
        "env/wait_s": Metric(clock.wait_s, "max"),
        "env/put_s": Metric(clock.put_s, "max"),
    }
