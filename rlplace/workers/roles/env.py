"""Env workers: their common base, and the worker that steps simulators with the actions of the rollout ranks.

::

    group 0   ask ─────── sim ask ─────── sim ask          while group 0 is simulated here,
    group 1       ask ─────── sim ask ─────── sim ask      rollout decides for group 1, and the other way round
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from math import isclose, isfinite, prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlplace.algo.replay import Steps
from rlplace.codes import problem
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.action_bounds import action_remark
from rlplace.envs.contract import (
    ContinuousActions,
    DenoisedActions,
    Discounting,
    DiscreteActions,
    Normalizing,
    Remarking,
    Restorable,
    Simulator,
    Spaces,
    StepResult,
)
from rlplace.envs.image_range import ImageRange
from rlplace.envs.registry import (
    flattens_images,
    make_simulator,
    normalizes_images,
    row_seeds,
    seed_global_numbers,
    seed_torch_numbers,
    without_statistics,
)
from rlplace.errors import SimulatorError
from rlplace.metrics import Metric, Metrics
from rlplace.models import BUILDING
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.trajectory import Array, Trajectory
from rlplace.workers.arguments import TRAJECTORIES, SimulatorArguments, WorkerArguments
from rlplace.workers.roles.episodes import Episodes, read
from rlplace.workers.roles.oracle import ChannelOracle, Decided, DirectOracle, Oracle
from rlplace.workers.roles.used_range import UsedRange
from rlplace.workers.saving import FilesBehind
from rlplace.workers.worker import MoveReport, RoleWorker, WorkerContext

# skipped steps of a rank and iteration that the summary names
_NOTED = 20


class EnvWorker(RoleWorker):
    """Base class of env workers.

    An environment has no weights, so residency WEIGHTS means the same as OFF. `holds`: label of the environment's
    memory in the device's account.
    """

    holds: ClassVar[str]  # label of its memory in the device's account

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._opened.callback(context.device.release, self.holds)

    def move(self, to: Residency) -> MoveReport:
        """Reserve the environment's accelerator memory if `to` is FULL, else release it; return the new residency and
        the bytes.

        The state of the environment always stays in host memory.
        """
        device = self.context.device
        if to == Residency.FULL:
            device.acquire(self.config.config.env.accelerator_memory, self.holds)
        else:
            device.release(self.holds)
        self.residency = to
        return MoveReport(
            residency=to, accelerator_bytes=device.held_bytes(), host_bytes=0
        )

    def _seed_numbers(self, iteration: int | None = None) -> None:
        """Seed the global random numbers of the process, for environments and tasks that use them.

        `iteration`: the iteration that begins; None before the first one.
        """
        # Another thread of this process may initialise a policy with torch's seeded random numbers
        with BUILDING:
            seed_global_numbers(
                self.config.config.runner.seed, self.context.rank, iteration
            )


# ── simulators ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """Arrays for T steps of B environments (rows), filled by blocks of rows: all blocks of step 0, then all of step 1,
    ...

    A recording can make only one trajectory, because `trajectory` passes the arrays on without a copy.
    """

    def __init__(self, *, steps: int, rows: int, spaces: Spaces) -> None:
        actions = spaces.actions
        shape = spaces.observation_shape
        numbers = isinstance(actions, ContinuousActions | DenoisedActions)
        kind = np.float32 if numbers else np.int64
        each = () if isinstance(actions, DiscreteActions) else actions.shape
        self.observations: Array = np.empty(
            (steps + 1, rows, *shape), spaces.observation_dtype
        )
        self.actions: NDArray[Any] = np.empty((steps, rows, *each), kind)
        # Arrays by the names of the fields of Trajectory
        self._arrays: dict[str, NDArray[Any]] = {"actions": self.actions}
        self._arrays |= {
            name: np.empty((steps, rows), np.float32)
            for name in ("logprobs", "values", "rewards")
        }
        self._arrays |= {
            name: np.empty((steps, rows), np.bool_)
            for name in ("terminated", "truncated")
        }
        self._finals: list[Array] = [np.empty((0, *shape), spaces.observation_dtype)]
        # Recurrent memory after the last decision
        self.memory: NDArray[np.float32] = np.zeros((rows, spaces.memory), np.float32)
        # Versions of the policies that decided
        self.versions: set[int] = set()
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []

    def decision(self, step: int, columns: slice, decided: Decided) -> None:
        for name in ("actions", "logprobs", "values"):
            self._arrays[name][step, columns] = getattr(decided, name)
        if decided.memory is not None:
            self.memory[columns] = decided.memory
        self.versions.add(decided.version)

    def result(self, step: int, columns: slice, result: StepResult) -> None:
        self.observations[step + 1, columns] = result.observations
        for name in ("rewards", "terminated", "truncated"):
            self._arrays[name][step, columns] = getattr(result, name)
        # Blocks come in the order of numpy.argwhere(truncated), so they need no sorting.
        self._finals.append(result.final_observations)
        # An agent that was absent from the whole episode has no return
        for total, length in zip(
            result.episode_returns, result.episode_lengths, strict=True
        ):
            if length:
                self.episode_returns.append(total)
                self.episode_lengths.append(length)

    def poisoned(self) -> NDArray[np.bool_]:
        """Return a bool array [steps, rows]: true for each step that was left out because of a non-finite number."""
        return np.isnan(self._arrays["rewards"])

    def transitions(self, begins: NDArray[np.bool_]) -> Steps:
        """Return the steps with the observation after each, for a replay memory.

        A truncated episode has its own last observation there; that of a terminated one is never looked at. `begins`:
        as in `Steps`.
        """
        arrays = self._arrays
        after = self.observations[1:].copy()
        after[arrays["truncated"]] = np.concatenate(self._finals)
        return Steps(
            observations=self.observations[:-1],
            actions=arrays["actions"],
            rewards=arrays["rewards"],
            terminated=arrays["terminated"],
            truncated=arrays["truncated"],
            next_observations=after,
            begins=begins,
        )

    def trajectory(self, *, first_row: int, env_rank: int) -> Trajectory:
        return Trajectory(
            first_row=first_row,
            env_rank=env_rank,
            version_min=min(self.versions),
            version_max=max(self.versions),
            observations=self.observations[:-1],
            last_observations=self.observations[-1],
            final_observations=np.concatenate(self._finals),
            **self._arrays,
        )


def episode_metrics(
    returns: Sequence[float], lengths: Sequence[int]
) -> dict[str, Metric]:
    """Return the metrics of the episodes that ended: their number, and the means of their returns and lengths."""
    episodes = len(returns)
    each = max(1, episodes)
    return {
        "env/return": Metric(sum(returns) / each, "mean", episodes),
        "env/episode_length": Metric(sum(lengths) / each, "mean", episodes),
        "env/episodes": Metric(episodes, "sum"),
    }


@dataclasses.dataclass(slots=True, kw_only=True)
class StageGroup:
    """Neighbouring rows of one env rank whose simulators step together, and the state of their episodes in progress.

    `index`: number of the stage group on its rank. `first_row`: first row, counted over the whole job. `columns`: the
    rows within the rank's arrays. `observations`: for the next step, kept across iterations. `lengths`: steps so far of
    each episode. `owner`, `name`: the rank and the simulator, in errors. `error`: name of the error text about numbers
    that are not finite; "": that of a job that can skip such steps.
    """

    index: int
    first_row: int  # global
    columns: slice  # columns of its rows within the rank's arrays
    simulator: Simulator
    spaces: Spaces
    # [rows, *O], the observations for the next step; kept across iterations
    observations: Array = dataclasses.field(init=False)
    # [rows], steps so far of the episodes in progress
    lengths: NDArray[np.int64] = dataclasses.field(init=False)
    rows: int
    owner: str
    name: str
    error: str = ""

    @classmethod
    def made(
        cls,
        context: WorkerContext,
        env: SimulatorEnvConfig,
        spaces: Spaces,
        rows: range,
        index: int = 0,
        error: str = "",
    ) -> StageGroup:
        """Return a stage group with new simulators, which the caller has to close. Its episodes have to be begun.

        `rows`: rows of the group, counted over the whole job. `index`, `error`: as in the class.
        """
        count = len(rows)
        return cls(
            index=index,
            first_row=rows.start,
            columns=slice(index * count, (index + 1) * count),
            simulator=make_simulator(env, count, spaces.chunk),
            spaces=spaces,
            rows=count,
            owner=context.owner,
            name=env.id or env.kind,
            error=error,
        )

    def begin(self, seed: int, iteration: int = 0) -> None:
        """Start a new episode in every row. Raises SimulatorError if a number is not finite.

        `seed`: the run's seed. The seed of each row's episode is derived from `seed`, `iteration` and the row's global
        number.
        """
        seeds = row_seeds(seed, self.first_row, self.rows, iteration)
        shown = self.simulator.reset(seeds)
        self.require_finite(range(self.rows), shown, "the first observation")
        self.observations = self.remembering(shown)
        self.lengths = np.zeros(self.rows, np.int64)

    def remembering(
        self, shown: Array, memory: NDArray[np.float32] | None = None
    ) -> Array:
        """Return each observation, flattened, with the policy's recurrent memory in front of it: [N, size of a memory +
        size of an observation].

        If the policy has no memory, return `shown` unchanged.

        `shown`: the simulator's observations of N rows, [N, ...]. `memory`: the policy's memory for each row, [N, size
        of a memory]; None: zeros.
        """
        spaces = self.spaces
        if not spaces.memory:
            return shown
        memory = (
            np.zeros((len(shown), spaces.memory), np.float32)
            if memory is None
            else memory
        )
        rows = shown.reshape(len(shown), prod(shown.shape[1:]))
        return np.concatenate([memory.view(spaces.observation_dtype), rows], axis=1)

    def step(self, result: StepResult, memory: NDArray[np.float32]) -> StepResult:
        """Return `result` with the policy's recurrent memory in front of its observations; update the episodes' step
        counts.

        `result`: result of one simulator step. `memory`: the policy's memory after its decision, [rows, size of a
        memory]. Rows whose episode has ended continue with a memory of zeros.
        """
        ended = result.terminated | result.truncated
        self.lengths = np.where(ended, 0, self.lengths + self.spaces.chunk)
        if self.spaces.memory:
            kept = np.where(ended[:, None], np.float32(0), memory)
            finals = self.remembering(
                result.final_observations, memory[result.truncated]
            )
            shown = self.remembering(result.observations, kept)
            result = dataclasses.replace(
                result, observations=shown, final_observations=finals
            )
        self.observations = result.observations
        return result

    def episodes(self) -> Episodes:
        """Return the state of the episodes in progress, from which `go_on` can resume them."""
        simulator = self.simulator
        states = (
            simulator.row_states()
            if isinstance(simulator, Restorable)
            else [{}] * len(self.lengths)
        )
        return Episodes(
            first_row=self.first_row,
            observations=self.observations,
            lengths=self.lengths,
            states=states,
        )

    def go_on(self, saved: Episodes) -> NDArray[np.int64]:
        """Resume the episodes of `saved`; return how many steps were lost, one number for each row that could not be
        resumed.

        If a simulator cannot restore a row, the row keeps the new episode that was started before this call, and the
        steps of its saved episode are lost.
        """
        simulator = self.simulator
        begun = dict(enumerate(self.observations))
        if isinstance(simulator, Restorable):
            begun = {
                row: self.remembering(shown[None])[0]
                for row, shown in simulator.restore(saved.states).items()
            }
        again = list(begun)
        self.observations, self.lengths = (
            saved.observations.copy(),
            saved.lengths.copy(),
        )
        self.lengths[again] = 0
        for row, observation in begun.items():
            self.observations[row] = observation
        return saved.lengths[again]

    def remarks(self, images: ImageRange) -> list[str]:
        """Return what is to be said about the simulator, after a look at its present images."""
        found: list[str] = []
        if isinstance(self.simulator, Remarking):
            found += self.simulator.remarks
        images.look(self.observations)
        found += [each for each in (images.remark, images.flattened) if each]
        return found

    # ── numbers that are not finite ──────────────────────────────────────────────────────────────────────────────────

    def finite_rows(self, observations: Array) -> NDArray[np.bool_]:
        """Return a bool array [rows]: true for each row of the simulator's observations [rows, ...] whose numbers are
        all finite.
        """
        numbers = self.spaces.shown.numbers_in(observations)
        return np.asarray(np.isfinite(numbers).all(axis=tuple(range(1, numbers.ndim))))

    def is_finite(self, result: StepResult) -> bool:
        """Return whether all rewards and observations of a step are finite."""
        shown = (result.observations, result.final_observations)
        return bool(
            np.isfinite(result.rewards).all()
            and all(self.finite_rows(each).all() for each in shown)
        )

    def not_finite(self, result: StepResult) -> dict[int, str]:
        """Return row -> reward and observation, as text, of each row with a number that is not finite.

        `result`: result of one step of the simulator.
        """
        cut = np.flatnonzero(result.truncated)
        wrong = ~(np.isfinite(result.rewards) & self.finite_rows(result.observations))
        wrong[cut] |= ~self.finite_rows(result.final_observations)
        found = {}
        for row in np.flatnonzero(wrong).tolist():
            shown = result.observations[row]
            if row in cut:
                shown = result.final_observations[cut == row][0]
            numbers = self.spaces.shown.numbers_in(shown[None])[0]
            text = np.array2string(numbers, threshold=8)
            found[row] = f"reward {result.rewards[row]}, observation {text}"
        return found

    def require_finite(
        self, rows: Iterable[int], observations: Array, what: str
    ) -> None:
        """Raise SimulatorError if a number of an observation is not finite.

        `rows`: those of `observations`, the simulator's own. `what`: name of these observations.
        """
        shown = self.spaces.shown.numbers_in(observations)
        for row, numbers in zip(rows, shown, strict=True):
            if not np.isfinite(numbers).all():
                raise self.not_finite_error(
                    row, what, np.array2string(numbers, threshold=8)
                )

    def not_finite_error(self, row: int, what: str, got: str) -> SimulatorError:
        """Return the error for a non-finite number of the simulator.

        `row`: row of this group. `what`: description of the number, such as "the first observation". `got`: the numbers
        as text.
        """
        return SimulatorError(
            problem(
                "simulator-not-finite",
                self.owner,
                got,
                error=self.error,
                number=what,
                simulator=self.name,
                row=self.first_row + row,
            )
        )


class VectorEnvWorker(EnvWorker):
    """One env rank of a simulator job. Owns the simulators of its rows: global rows from `rank * rows_per_rank` on.

    Episodes continue across iterations and offloads.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "gymnasium",
        "rlplace.envs.gymnasium_adapter",
        "rlplace.envs.gymnasium_vector",
    )

    holds: ClassVar[str] = "simulator"
    follows_plans: ClassVar[bool] = True

    config: SimulatorArguments
    _new = True  # True unless a state was read: the episodes are those of the start of a run
    # The last iteration that was started, and the episodes that it started from
    _started: tuple[int, Sequence[Episodes]] = (
        -1,
        (),
    )

    def setup(self) -> None:
        config = self.config.config
        context = self.context
        self._enter_plan()
        self._behind = FilesBehind(context)
        self._opened.callback(self._behind.close)
        self._groups: list[StageGroup] = []
        # The part of the action bounds that was used since the start
        self._used = UsedRange(self.config.spaces.taken_actions)
        # Descriptions of the steps skipped in this iteration
        self._poison: list[str] = []
        self._rows = config.env.total_num_envs // context.world_size
        groups = config.rollout.pipeline_stage_num
        rows = self._rows // groups
        # Some environments draw from the random numbers of the process
        self._seed_numbers()
        env = config.env
        self._action_remark = action_remark(
            env.id or env.kind,
            self.config.spaces.taken_actions,
            getattr(config.actor.policy, "initial_log_std", 0.0),
        )
        if self._action_remark is not None:
            context.log.warning("%s", self._action_remark)
        self._images = ImageRange(
            env.id or env.kind,
            self.config.spaces,
            normalizes=normalizes_images(config),
            can_normalize=True,
            flattens=flattens_images(config),
        )
        for index in range(groups):
            first = context.rank * self._rows + index * rows
            group = StageGroup.made(
                context, env, self.config.spaces, range(first, first + rows), index
            )
            self._opened.callback(group.simulator.close)
            # The first simulator may have imported torch
            if index == 0:
                with BUILDING:
                    seed_torch_numbers(config.runner.seed, context.rank)
            group.begin(config.runner.seed)
            self._groups.append(group)
            self._images.look(group.observations)

    def _enter_plan(self) -> None:
        context = self.context
        shares = self.config.routes.observations.sends(context.rank)
        # Rollout rank -> the rows of a stage group that it decides on. All groups are split alike.
        cuts = {
            s.target: slice(s.start - shares[0].start, s.stop - shares[0].start)
            for s in shares
        }
        direct = self.config.routes.direct
        timeout_s = self.config.config.runner.channel_timeout_s
        self._oracle: Oracle = (
            DirectOracle(context, timeout_s) if direct else ChannelOracle(context, cuts)
        )

    def run(self, iteration: int) -> Metrics:
        """Step every environment T times in `iteration`, send the trajectory to the actor ranks, and return metrics.

        Each actor rank gets the piece of the trajectory with its rows. The method returns when the last piece has been
        put.
        """
        self._require(Residency.FULL, "run")
        self._seed_numbers(iteration)
        self._poison = []
        self._new, self._started = (
            False,
            (iteration, [group.episodes() for group in self._groups]),
        )
        watch = Stopwatch("sim", "wait", "put")
        steps = self.config.config.algorithm.rollout_steps
        recording = Recording(steps=steps, rows=self._rows, spaces=self.config.spaces)
        with self._oracle.opened():
            self._step(iteration, steps, recording, watch)
        # A row with only non-finite steps would produce no samples in any later iteration either.
        each = self._groups[0].rows
        for row in np.flatnonzero(recording.poisoned().all(axis=0)).tolist():
            raise self._groups[row // each].not_finite_error(
                row % each,
                f"every step of iteration {iteration + 1}",
                "all of its steps were skipped",
            )
        self._send(recording)
        watch.lap("put", steps * self._rows)
        self._used.add(self.config.spaces.taken_of(recording.actions))
        poisoned = int(recording.poisoned().sum())
        return {
            **episode_metrics(recording.episode_returns, recording.episode_lengths),
            "env/steps": Metric(
                steps * self._rows * self.config.spaces.chunk,
                "sum",
                notes=self._remarks(),
            ),
            **(
                {"env/poisoned": Metric(poisoned, "sum", notes=tuple(self._poison))}
                if poisoned
                else {}
            ),
            **self._used.metrics(),
            **watch.metrics("env"),
        }

    def _step(
        self, iteration: int, steps: int, recording: Recording, watch: Stopwatch
    ) -> None:
        """Step every stage group `steps` times with actions that the rank's oracle gets from the policy, and write the
        decisions and results into `recording`.

        `watch`: measures the seconds of each part of the work.
        """
        for group in self._groups:
            recording.observations[0, group.columns] = group.observations
            self._oracle.ask(group, 0)
        watch.lap("put")
        for step in range(steps):
            for group in self._groups:
                self.context.check_cancelled("run")
                self._oracle.answer(group, step, recording)
                watch.lap("wait")
                # A copy, since a simulator may change its actions in place, and the policy learns from these
                decided = recording.actions[step, group.columns]
                taken = self.config.spaces.taken_of(decided).copy()
                result = group.simulator.step(taken)
                if not group.is_finite(result):
                    result = self._without_poison(
                        group, result, f"step {step} of iteration {iteration + 1}"
                    )
                recording.result(
                    step,
                    group.columns,
                    group.step(result, recording.memory[group.columns]),
                )
                watch.lap("sim", len(group.lengths))
                if step + 1 < steps:
                    self._oracle.ask(group, step + 1)
                    watch.lap("put")

    def write_state(self, folder: str) -> Metrics:
        """Copy the state of all episodes, start to write the copy into `folder` in the background, and return the
        copy's duration.
        """
        began = time.perf_counter()
        groups = [group.episodes() for group in self._groups]
        episodes = Episodes(
            first_row=self.context.rank * self._rows,
            observations=np.concatenate([each.observations for each in groups]),
            lengths=np.concatenate([each.lengths for each in groups]),
            states=[state for each in groups for state in each.states],
        )
        self._behind.start(Path(folder), lambda: [episodes.write(Path(folder))])
        return {"env/save_copy_s": Metric(time.perf_counter() - began, "max")}

    def read_state(self, folder: str) -> Metrics:
        """Resume the episodes of this rank's rows from `folder`; return how many episodes and steps were lost, and the
        duration.

        The number of ranks that saved the state does not matter. Raises ConfigError if the files do not match the
        config.
        """
        began = time.perf_counter()
        self._new = False
        lost = 0
        cut = 0
        for group in self._groups:
            rows = range(group.first_row, group.first_row + len(group.observations))
            saved = self._saved(Path(folder), rows, group)
            steps = group.go_on(saved)
            lost = lost + int(steps.sum())
            cut = cut + int(np.count_nonzero(steps))
        return {
            "env/steps_lost": Metric(lost, "sum"),
            "env/episodes_cut": Metric(cut, "sum"),
            "env/load_s": Metric(time.perf_counter() - began, "max"),
        }

    def _saved(self, folder: Path, rows: range, group: StageGroup) -> Episodes:
        """Return the saved episodes of the rows of a stage group.

        Raises ConfigError if wrappers of the group normalize by statistics that were not saved.
        """
        needed: set[str] = set()
        if isinstance(group.simulator, Normalizing):
            needed = set(group.simulator.statistics)
        if not needed:
            return read(folder, rows, group.observations)
        lacking = not folder.is_dir()
        if not lacking:
            saved = read(folder, rows, group.observations)
            lacking = not all(state.keys() >= needed for state in saved.states)
        if lacking:
            raise without_statistics(self.config.config.env)
        return saved

    def begin_again(self, iteration: int) -> Metrics:
        """Go back to the episodes at the start of `iteration`, and return the number of episodes that were cut short.

        A rank that has not started `iteration` keeps its episodes. A rank that was restarted has lost its episodes: it
        starts new ones, and counts each row as cut short, unless `iteration` is the first.
        """
        began_at, starts = self._started
        back = began_at == iteration
        cut = 0
        new = self._new and iteration > 0
        self._seed_numbers(iteration)
        for number, group in enumerate(self._groups if back or new else ()):
            group.begin(self.config.config.runner.seed, iteration)
            cut += (
                int(np.count_nonzero(group.go_on(starts[number])))
                if back
                else len(group.observations)
            )
        return {"env/episodes_cut": Metric(cut, "sum")}

    def _without_poison(
        self, group: StageGroup, result: StepResult, what: str
    ) -> StepResult:
        """Return `result` with each non-finite step marked: its reward is NaN, and its episode ends. Start new episodes
        in these rows.

        `result`: result of one step of the group's simulator. `what`: description of the step for errors. Raises
        SimulatorError unless the config says that non-finite steps are skipped.
        """
        numbers = group.not_finite(result)
        for row, got in numbers.items():
            error = group.not_finite_error(row, what, got)
            if not self.config.config.skips_poison:
                raise error
            self.context.log.warning("skipped: %s: %s", error.problem.what, got)
            if len(self._poison) < _NOTED:
                self._poison.append(
                    f"{self.context.owner}: {error.problem.what}: {got}"
                )
        rows = list(numbers)
        poisoned = np.zeros(group.rows, np.bool_)
        poisoned[rows] = True
        cut = np.flatnonzero(result.truncated)
        going_on = ~(result.terminated | result.truncated) | ~group.finite_rows(
            result.observations
        )
        again = np.flatnonzero(poisoned & going_on)
        if len(again):
            result.observations[again] = group.simulator.restart(again.tolist())
            group.require_finite(
                again,
                result.observations[again],
                f"the first observation after {what}",
            )
        result.rewards[rows] = np.nan
        result.terminated[rows] = True
        result.truncated[rows] = False
        ended = [
            each
            for each in zip(result.episode_returns, result.episode_lengths, strict=True)
            if isfinite(each[0])
        ]
        return dataclasses.replace(
            result,
            final_observations=result.final_observations[~poisoned[cut]],
            episode_returns=[total for total, _ in ended],
            episode_lengths=[length for _, length in ended],
        )

    def _remarks(self) -> tuple[str, ...]:
        """Return what is to be said about the environments and their spaces, which the run shows once."""
        found: list[str] = []
        if self._action_remark is not None:
            found.append(self._action_remark)
        for group in self._groups:
            found += group.remarks(self._images)
        found += self._discount_remarks()
        return tuple(dict.fromkeys(found))

    def _discount_remarks(self) -> list[str]:
        """Return a text for each wrapper whose discount of rewards is not that of the algorithm."""
        simulator = self._groups[0].simulator
        if not isinstance(simulator, Discounting):
            return []
        env = self.config.config.env
        gamma = self.config.config.algorithm.gamma
        found = []
        for discount in sorted(simulator.reward_discounts):
            if isclose(discount, gamma):
                continue
            other = problem(
                "reward-discount",
                "algorithm.gamma",
                simulator=env.id or env.kind,
                wrapper=f"{discount:g}",
                algorithm=f"{gamma:g}",
            )
            found.append(other.remark())
        return found

    def _send(self, recording: Recording) -> None:
        first_row = self.context.rank * self._rows
        trajectory = recording.trajectory(
            first_row=first_row, env_rank=self.context.rank
        )
        for share in self.config.routes.trajectories.sends(self.context.rank):
            piece = trajectory.split(share.start - first_row, share.stop - first_row)
            self.context.channels[TRAJECTORIES].put(
                piece, key=str(share.target), weight=piece.weight
            )
