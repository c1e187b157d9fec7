"""Save a run: a checkpoint every few iterations, one when it ends, and what can be saved of a run that fails.

::

    iteration 9 │ copy to host │ iteration 10            │ iteration 11
                               └ workers write their files ─▶ manifest, rename ─▶ result is printed
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlplace.checkpoints.checkpoint import RUN, Checkpoint
from rlplace.checkpoints.store import Contents, Saver, Store
from rlplace.codes import problem
from rlplace.contract.job import Job
from rlplace.errors import NotSaved, OutputError, RlplaceError
from rlplace.execution.faults import Recovery, StateLost
from rlplace.execution.loop import Loop
from rlplace.extras import versions_of
from rlplace.placement.language.slots import component_of
from rlplace.placement.language.spec import role_of
from rlplace.placement.plan import Plan
from rlplace.report.sinks import metric_files
from rlplace.report.summary import Progress

_LIBRARIES = (
    "rlplace",
    "torch",
    "ray",
    "transformers",
    "vllm",
    "gymnasium",
    "mujoco",
    "numpy",
)
# between two questions to the ranks that write the state for other workers
_ASK_S = 0.5
# seconds to wait for a checkpoint with a lost rank: the rank has written its part by now, or never will
_DEAD_S = 5.0


class Saving:
    """Saves and restores the state of a run. The workers of its loop write and read their parts of the state.

    All checkpoints of the run are written by this object.
    """

    def __init__(
        self,
        job: Job,
        config: Any,
        plan: Plan,
        loop: Loop,
        folder: Path,
        texts: Mapping[str, str],
        progress: Progress,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the saving of a run, without writing anything.

        `job`: the job of `config`, from which the workers have their arguments. `folder`: the run's folder. `texts`:
        file name -> text that is written into each checkpoint. `arguments`: component -> config of its workers, from
        which the job knows what else a checkpoint keeps.
        """
        self._config = config.checkpoint
        self._loop = loop
        self._folder = folder
        self._texts = texts
        self._job = job
        self._optional = self._job.optional_state(config)
        stateful = self._job.stateful(config, plan)
        self._ranks = {c: plan.placement.world_size(c) for c in stateful}
        self._store = Store(
            folder, keep_last=self._config.keep_last, keep_best=self._config.keep_best
        )
        # Longest time for writing files, in seconds.
        self._longest_s = config.runner.stage_timeout_s
        self._saver = Saver(self._store, timeout_s=self._longest_s)
        # Number of faults seen so far.
        self._faults = 0
        self._progress = progress
        self._run_state = partial(self._job.run_state, config, arguments or {})
        self._start = self._driver_state()
        # Iteration after which the last checkpoint was started.
        self._saved = -1
        self._newest: Checkpoint | None = None
        # Seconds for which the run stood still to save.
        self._seconds = 0.0

    def load(self, checkpoint: Checkpoint, staying: Collection[str] = ()) -> str:
        """Make the workers load a checkpoint, except those of the components `staying`, which have this state.

        Return a text for the user: which state starts anew, and what happens to samples that were generated ahead of
        learning. The text is "" if nothing starts anew and no samples were generated ahead.
        """
        # The state of those that stay may be in no file: then the run cannot go back to this checkpoint
        if checkpoint.ranks.keys() >= self._ranks.keys() or not staying:
            self._saved = checkpoint.iteration
            self._newest = checkpoint
        loading = [c for c in self._ranks if c not in staying]
        kept = tuple(
            c for c in loading if c not in self._optional or c in checkpoint.ranks
        )
        anew = set(loading) - set(kept)
        numbers = self._loop.read_state(checkpoint.folder, kept, anew)
        ahead = ""
        if not staying:
            groups = int(numbers.get("env/groups_kept", 0))
            ahead = self._go_on_ahead(checkpoint, groups)
        return ahead + self._job.loaded_text(numbers, kept)

    def _go_on_ahead(self, checkpoint: Checkpoint, kept: int) -> str:
        """Give the loop the metrics of the samples that were generated ahead of learning before the save.

        Return a text that says whether these samples are used. `kept`: number of groups of these samples that the env
        workers have loaded.
        """
        generated = checkpoint.values(RUN).get("generated", {})
        if kept:
            self._loop.generated = {
                int(index): numbers for index, numbers in generated.items()
            }
            return f"; {kept} groups that were generated ahead are learned next"
        self._loop.generated = {}
        if generated == {}:
            return ""
        return "; what was generated ahead is asked again"

    @property
    def newest(self) -> Path:
        """The folder of the newest checkpoint that this run has made or loaded; the run's folder if there is none."""
        if self._newest is None:
            return self._folder
        return self._newest.folder

    def record(self) -> dict[str, Any]:
        """Return entries for the run's summary: the path of the newest checkpoint, and the seconds that saving took."""
        newest = None if self._newest is None else str(self._newest.folder)
        return {"checkpoint": newest, "save_s": self._seconds}

    def after_iteration(self, *, best: bool = False) -> None:
        """Handle the result of the earlier checkpoint if it is complete, then start a new checkpoint if one is due.

        `best`: whether no evaluated version is better than the present one. Such a version is saved if the config keeps
        the best ones.
        """
        self._said(wait_s=_DEAD_S if self._writer_was_replaced() else 0.0)
        if not self._config.every:
            return
        keeps = best and self._config.keep_best > 0
        if keeps or self._progress.iterations % self._config.every == 0:
            self._begin(tuple(self._ranks))

    def last(self) -> None:
        """Write the checkpoint after the last iteration, and wait until the checkpoint is complete."""
        self._begin(tuple(self._ranks))
        self._said(wait_s=self._longest_s)

    def require_last(self) -> None:
        """Raise NotSaved if the state after the last iteration is in no checkpoint. Call this after `last`."""
        newest = self._newest
        if newest is None:
            nothing = problem(
                "last-state-not-saved",
                "runner.output_dir",
                str(self._folder),
                error="nothing",
                iterations=self._progress.iterations,
            )
            raise NotSaved(nothing)
        if newest.iteration != self._progress.iterations:
            older = problem(
                "last-state-not-saved",
                "runner.output_dir",
                str(self._folder),
                error="older",
                iterations=self._progress.iterations,
                saved=newest.iteration,
                run=shlex.quote(str(self._folder)),
            )
            raise NotSaved(older)

    def hand_over(
        self, folder: Path, staying: Collection[str] = ()
    ) -> Checkpoint | None:
        """Save the state for other workers that continue from it, and wait until it is complete.

        Return the checkpoint: the one of this moment that the run has made already, or a new one below `folder`. Return
        None, after the reason is printed, if the state cannot be written. `folder`: where only the new workers look for
        it; no other checkpoint is removed. `staying`: components whose state is left out. Raises StateLost.
        """
        self._finish()
        iterations = self._progress.iterations
        newest = self._newest
        is_now = newest is not None and self._saved == newest.iteration == iterations
        if newest is not None and is_now and newest.ranks.keys() >= self._ranks.keys():
            return newest
        store = Store(folder, keep_last=1, keep_best=0)
        saver = Saver(store, timeout_s=self._longest_s)
        components = tuple(c for c in self._ranks if c not in staying)
        try:
            part = store.begin(iterations, components)
        except OutputError as error:
            print(f"no state for other workers: {error}", file=sys.stderr)
            return None
        self._loop.write_state(part, components)
        saver.start(part, self._contents(components))
        until = time.monotonic() + self._longest_s
        saved = saver.finish_within(_ASK_S)
        while saved is None and time.monotonic() < until:
            # A rank that has died writes nothing, and is noticed only if it is asked
            try:
                self._loop.ask(components)
            except StateLost:
                saver.finish(0.0)
                raise
            if self._writer_was_replaced():
                break
            saved = saver.finish_within(_ASK_S)
        if saved is None:
            saved = saver.finish(0.0)
        if saved is not None and saved.error is not None:
            print(saved.error, file=sys.stderr)
        return None if saved is None else saved.checkpoint

    def follow(self, before: Saving, *, from_copy: bool) -> None:
        """Continue the records of another Saving of the same run, after the state was loaded.

        `from_copy`: whether the state was loaded from a copy that is removed. The newest checkpoint is then the one of
        `before`.
        """
        if from_copy:
            self._newest = before._newest
            self._saved = -1 if self._newest is None else self._newest.iteration
        self._start = before._start
        self._seconds += before._seconds

    def keep(self, copy: Checkpoint) -> None:
        """Make a checkpoint of the run from a copy of the state elsewhere. If this fails, only print the reason."""
        try:
            self._newest = self._store.adopt(copy)
            self._saved = self._newest.iteration
        except OutputError as error:
            print(f"no checkpoint of {copy.folder}: {error}", file=sys.stderr)

    def rescue(self, *, ending: bool = False) -> None:
        """After a failure, save the state after the last complete iteration, for all components except env.

        If this state can no longer be saved, only print a message. `ending`: whether all workers are ending, so that
        their files are there soon or never.
        """
        if self._progress.iterations and self._saved != self._progress.iterations:
            self._rescue(tuple(c for c in self._ranks if role_of(c) != "env"))
        wait_s = self._config.grace_s / 2
        self._said(wait_s=min(wait_s, _DEAD_S) if ending else wait_s)

    def without_state(self, lost: Collection[str]) -> set[str]:
        """Return the components whose state is not in the newest checkpoint; all components if there is no checkpoint.

        First wait for the checkpoint that is being written; only briefly if one of the components in `lost` writes to
        it. `lost`: components with lost ranks.
        """
        self._finish(lost)
        return set(self._ranks) - set(self._newest.ranks if self._newest else ())

    def go_back(self, recovery: Recovery) -> Mapping[str, int]:
        """Take the run back to its newest checkpoint, or to its start if it has no checkpoint.

        Return metric file -> its size in bytes at that point of the run. `recovery`: object that replaces lost workers;
        the records of the faults in it are completed. Raises StateLost if more state is lost meanwhile; the caller then
        has to call the method again.
        """
        state = self._start
        saved = self._newest
        if saved is not None:
            state = saved.values(RUN)
        iteration = int(state["progress"]["iterations"])
        anew = ""

        def load() -> None:
            nonlocal anew
            anew = "" if saved is None else self.load(saved)

        self._loop.go_back(iteration, load)
        before_s = self._progress.train_s
        self._progress.go_back(state["progress"])
        for fault in recovery.went_back(before_s - self._progress.train_s):
            self._loop.count(fault)
        print(f"continues after iteration {iteration}{anew}", flush=True)
        return dict(state["files"])

    def _rescue(self, kept: tuple[str, ...]) -> None:
        if (
            not self._loop.can_save(kept)
            or self._loop.version != self._progress.iterations
        ):
            print(
                "no checkpoint of this moment: what learns has begun another update",
                file=sys.stderr,
            )
            return
        try:
            self._begin(kept)
        except (RlplaceError, StateLost) as error:
            print(f"no checkpoint: {error}", file=sys.stderr)

    def _begin(self, components: tuple[str, ...]) -> None:
        iterations = self._progress.iterations
        if self._saved == iterations:
            return
        # Only one checkpoint is written at a time.
        self._finish()
        began = time.perf_counter()
        try:
            part = self._store.begin(iterations, components)
        except OutputError as error:
            print(
                f"no checkpoint after iteration {iterations}: {error}", file=sys.stderr
            )
            return
        self._loop.write_state(part, components)
        self._saver.start(part, self._contents(components))
        self._saved = iterations
        self._seconds += time.perf_counter() - began

    def _contents(self, components: tuple[str, ...]) -> Contents:
        """Return what a checkpoint of this moment has beside the state of `components`."""
        # Metrics of samples generated ahead; None if not all components are saved.
        generated = (
            self._loop.generated if len(components) == len(self._ranks) else None
        )
        return Contents(
            ranks={c: self._ranks[c] for c in components},
            texts={
                **self._texts,
                RUN: json.dumps(
                    self._driver_state() | {"generated": generated}, indent=1
                ),
            },
            version=self._loop.version,
            score=self._progress.score,
            libraries=versions_of(_LIBRARIES),
        )

    def _driver_state(self) -> dict[str, Any]:
        return {
            "progress": self._progress.state(),
            "files": metric_files(self._folder),
            "job": dict(self._run_state(self._progress.iterations)),
        }

    def _writer_was_replaced(self) -> bool:
        """Return whether a rank whose state is saved was replaced since the last call of this method."""
        faults = self._loop.recovery.faults if self._loop.recovery is not None else []
        recent = faults[self._faults :]
        self._faults = len(faults)
        return any(
            component_of(owner) in self._ranks
            for fault in recent
            for owner in fault.replaced
        )

    def _finish(self, lost: Collection[str] = ()) -> None:
        """Wait for the checkpoint that is being written.

        Wait only briefly if a rank that writes to this checkpoint was replaced or is lost. `lost`: components with lost
        ranks.
        """
        in_vain = self._writer_was_replaced() or not self._ranks.keys().isdisjoint(lost)
        self._said(wait_s=_DEAD_S if in_vain else self._longest_s)

    def _said(self, wait_s: float = 0.0) -> None:
        """Wait up to `wait_s` seconds for the checkpoint that is being written; with 0, do not wait.

        A complete checkpoint becomes the newest checkpoint. The error of a failed checkpoint is printed.
        """
        saved = self._saver.finish(wait_s) if wait_s else self._saver.poll()
        if saved is not None and saved.checkpoint is not None:
            self._newest = saved.checkpoint
        if saved is not None and saved.error is not None:
            print(saved.error, file=sys.stderr)
