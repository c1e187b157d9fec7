"""`python -m rlplace.train --config-name hybrid_ppo [key=value ...]`: read a config, plan, start workers, train.

Exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 3 the job does not fit in memory, 128 + number of the
signal that stopped the run: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1, 140 SIGUSR2.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import ANEW, AUTO, find
from rlplace.commands import begin, typed
from rlplace.config import compose
from rlplace.config.open_job import JOB
from rlplace.config.paths import unquoted
from rlplace.contract.job import Job
from rlplace.contract.registry import job_of
from rlplace.errors import (
    ClusterError,
    ConfigError,
    DoesNotFit,
    NodeLost,
    NotSaved,
    Problem,
    ProblemsError,
    RlplaceError,
)
from rlplace.json_text import read_object
from rlplace.placement.flow import DeviceDelivery
from rlplace.placement.language.slots import component_of
from rlplace.placement.show.text import render_short, render_text
from rlplace.report.callbacks import OnIteration
from rlplace.report.typed import Typed, as_typed
from rlplace.runtime.prepare import (
    Prepared,
    check_run,
    planned_only,
    prepare,
    prepare_composed,
    refused_dry,
)
from rlplace.runtime.resume import resumed
from rlplace.signals import Signals, Stopped
from rlplace.tables import table
from rlplace.workers.launch.gpu_sharing import known_obstacle, obstacle
from rlplace.workers.launch.machines import visible_gpus

USAGE = Path(__file__).with_name("train_usage.txt")
COLUMNS_USAGE = Path(__file__).with_name("columns_usage.txt")

DONE = 0
FAILED = 1
WRONG = 2
DOES_NOT_FIT = 3
NOT_SAVED = 4


def main(
    argv: Sequence[str] | None = None,
    job: Job | None = None,
    *,
    called: str = "train",
) -> int:
    """Run the command `train`, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process. `job`: a custom job
    that replaces the `job` of the config; None: the config names the job. `called`: name of the command that was typed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        line = compose.CommandLine.of(argv)
        configs = compose.listed(compose.config_names(), indent="    ")
        usage = USAGE.read_text(encoding="utf-8").format(
            program=typed("train"),
            configs=configs,
            tasks=compose.listed(compose.group_names(compose.TASK), indent="    "),
            placements=compose.listed(
                compose.group_names(compose.PLACEMENT), indent="    "
            ),
            columns=COLUMNS_USAGE.read_text(encoding="utf-8").rstrip(),
        )
        _show(usage.rstrip())
        if line.text:
            _show(f"\n{line.file.name}:\n\n{line.text}")
        return DONE
    with Typed(as_typed(typed(called), argv)) as command:
        return _main(argv, command, job)


def _main(argv: Sequence[str], command: Typed, own: Job | None) -> int:
    signals = Signals()
    signals.listen()
    try:
        with signals.explaining():
            jobs = [
                of_job(c, own)
                for c in compose.with_hydra([*argv, *config_of_the_run(argv)])
            ]
            ended: list[tuple[compose.Composed, Path]] = []
            try:
                return max(
                    (_job(composed, signals, command, ended) for composed in jobs),
                    default=DONE,
                )
            finally:
                if len(jobs) > 1 and ended:
                    _show(f"\n{_table(ended)}")
    except (ProblemsError, ClusterError) as error:
        print(
            _counted(
                error.problems if isinstance(error, ProblemsError) else [error.problem]
            ),
            file=sys.stderr,
        )
        return WRONG
    except RlplaceError as error:
        print(error, *_notes(error), sep="\n", file=sys.stderr)
        if isinstance(error, NotSaved):
            return NOT_SAVED
        return FAILED
    except Stopped as stopped:
        print(f"stopped by {stopped}", *_notes(stopped), sep="\n", file=sys.stderr)
        return stopped.exit_code
    except SystemExit as done:  # from argparse
        if isinstance(done.code, int):
            return done.code
        return FAILED


def of_job(composed: compose.Composed, own: Job | None) -> compose.Composed:
    """Return a copy of the config `composed` with the key `job` set to `own`. If `own` is None, return `composed`."""
    if own is None:
        return composed
    return dataclasses.replace(composed, mapping={**composed.mapping, JOB: own})


def _notes(error: BaseException) -> Sequence[str]:
    """Return the notes that were attached to an error during the run, such as where the policy was saved."""
    return getattr(error, "__notes__", ())


def config_of_the_run(argv: Sequence[str]) -> list[str]:
    """Return further words for the command line: the config name and folder of the checkpoint in `resume=<folder>`.

    Return an empty list if the command line `argv` has a config name, or does not have `resume=<folder>`.
    """
    words = [
        unquoted(word.removeprefix("resume="))
        for word in argv
        if word.startswith("resume=")
    ]
    # The last override counts.
    resume = words[-1] if words else AUTO
    if resume in (AUTO, "null") or compose.CommandLine.of(argv).name is not None:
        return []
    try:
        found = find(resume, Path())
    except ConfigError as error:
        anew = f"{ANEW} --config-name <name>"
        raise ConfigError(
            [
                dataclasses.replace(p, fix=p.fix and p.fix.replace(ANEW, anew))
                for p in error.problems
            ]
        ) from error
    assert found is not None, "a checkpoint that is named is found, or it is an error"
    return ["--config-dir", str(found.folder), "--config-name", "config"]


def _job(
    composed: compose.Composed,
    signals: Signals,
    command: Typed,
    ended: list[tuple[compose.Composed, Path]],
) -> int:
    """Run one composed config, and return the exit code. After the run, append (config, folder of the run) to `ended`.

    `signals`: turns signals into the end of the run. `command`: records the command line and its output in the run's
    folder.
    """
    try:
        folder = run_job(composed, signals, command)
    except DoesNotFit as error:
        print(_counted(error.problems), file=sys.stderr)
        return DOES_NOT_FIT
    if folder is not None:
        ended.append((composed, folder))
    return DONE


def run_job(
    composed: compose.Composed,
    signals: Signals,
    command: Typed,
    on_iteration: Sequence[OnIteration] = (),
) -> Path | None:
    """Run one composed config, and return the folder of its run; None for a dry run.

    With `dry_run`, only the plan is made and checked. `signals`: turns signals into the end of the run. `command`:
    records the command line and its output in the run's folder. `on_iteration`: functions that are called after each
    iteration; if one of them returns True, the run ends. Raises DoesNotFit, and the errors of `prepare` and `run`.
    """
    command.job(composed.words)
    job = _reached(prepare_composed(composed))
    if composed.goal is not None:
        gone = f"{compose.GOAL}: {composed.goal:g} of {composed.name} is a goal of another environment, and was dropped"
        _show(f"{gone}; one for this: {compose.GOAL}=<a return>\n")
    lacking = check_run(job)
    if wrong := refused_dry(lacking) if job.config.dry_run else lacking:
        raise ConfigError(wrong)
    if job.config.resume not in (None, AUTO):
        # A path without a checkpoint is told alone, not below a plan
        find(job.config.resume, Path(job.config.runner.output_dir) / job.view.name)
    if job.config.dry_run or job.refused:
        _show(render_text(job.view) + _seconds(job))
    else:
        _show(
            f"{render_short(job.view)}{_seconds(job)}\nthe whole plan: plan.txt in the run's folder, or dry_run=true"
        )
    if job.changes:
        whole = job.config.dry_run or job.refused
        _show(f"\n{job.changes_text}" if whole else job.changes_short)
    if lacking:
        _show(planned_only(lacking))
    if job.refused:
        raise DoesNotFit(job.all_shortages)
    if job.shortages:
        print(job.shortages, file=sys.stderr)
    found = resumed(job)
    if job.config.resume is not None:
        _show(
            "\nno checkpoint of this job yet: it starts anew"
            if found is None
            else f"\n{found.text}"
        )
    if found is not None and found.complete:
        _show(job_of(job.config).last_line(found.checkpoint.run))
        return found.checkpoint.run
    if job.config.dry_run:
        _show("\ndry run: the plan holds, nothing was started")
        return None
    checkpoint = None if found is None else found.checkpoint
    return _run(job, checkpoint, signals, command, on_iteration)


def _reached(job: Prepared) -> Prepared:
    """Return the job, changed to send weights through the host if processes here cannot share GPU memory.

    Otherwise, the job is returned unchanged. A dry run does not test the GPUs: it only looks at environment variables
    and at the version of the kernel.
    """
    past_host = any(
        isinstance(delivery, DeviceDelivery) for delivery in job.plan.deliveries
    )
    if not past_host or not visible_gpus():
        return job
    keys = job_of(job.config).through_host(job.config, job.plan)
    if not keys:
        return job
    why = known_obstacle() if job.config.dry_run else obstacle()
    if why is None:
        return job
    _show(
        f"{', '.join(keys)}: true, since processes of this machine cannot share a GPU's memory: {why}\n"
    )
    mapping = job.mapping
    for key in keys:
        mapping = _with(mapping, key.split("."), True)
    return prepare(mapping, name=job.view.name, sources=job.sources, words=job.words)


def _with(
    mapping: Mapping[str, Any], path: Sequence[str], value: object
) -> dict[str, Any]:
    """Return a copy of `mapping` in which the key at `path` has `value`; blocks on the path may be missing."""
    first, *rest = path
    if not rest:
        return {**mapping, first: value}
    return {**mapping, first: _with(mapping.get(first) or {}, rest, value)}


def _table(ended: Sequence[tuple[compose.Composed, Path]]) -> str:
    """Return a table with a row for each run of a sweep: last return, folder, and the overrides that differ.

    `ended`: (config, folder of the run) of each run.
    """
    given = [
        [w.lstrip("+") for w in composed.words if "=" in w and not w.startswith("-")]
        for composed, _ in ended
    ]
    own = [
        " ".join(word for word in words if any(word not in others for others in given))
        for words in given
    ]
    rows = [("result", "folder", "overrides")]
    for (_, folder), words in zip(ended, own, strict=True):
        summary = read_object(folder / "summary.json", "runner.output_dir")
        result = summary.get("return_last")
        rows.append(("-" if result is None else f"{result:,.3f}", str(folder), words))
    return "\n".join(table(rows))


def _seconds(job: Prepared) -> str:
    """Return the predicted seconds of the stages as text; "" if the config does not name a profile."""
    if job.config.profile is None:
        return ""
    from rlplace.foresight.show import foreseen, render_prediction

    return (
        f"\n\n{render_prediction(foreseen(job.config, job.plan, job.case, job.words))}"
    )


def _run(
    job: Prepared,
    checkpoint: Checkpoint | None,
    signals: Signals,
    command: Typed,
    on_iteration: Sequence[OnIteration],
) -> Path:
    """Run a job, and return the run's folder.

    After the loss of a node, the run continues from its newest checkpoint, in the way that `faults.on_node_loss` says.
    `checkpoint`: the checkpoint to resume from; None: a new run. `signals`: turns signals into the end of the run.
    `command`: records the command line and its output in the run's folder. `on_iteration`: functions that are called
    after each iteration.
    """
    from rlplace.execution.faults import History
    from rlplace.runtime.launched import job_spec
    from rlplace.runtime.node_loss import go_on
    from rlplace.runtime.run import run

    spec = job_spec(job.config, job.plan)
    history = History()
    lost: NodeLost | None = None
    while True:
        since: RlplaceError | None = None
        try:
            return run(
                spec,
                job.view,
                resolved=job.mapping,
                signals=signals,
                resumed=checkpoint,
                history=history,
                command=command,
                on_iteration=on_iteration,
                changes=job.changes,
            )
        except NodeLost as error:
            signals.check()
            lost = error
        except (ProblemsError, ClusterError) as refused:
            if lost is None:
                raise
            # Whether the cluster became too small: another node was lost meanwhile
            gone = (
                isinstance(refused, ClusterError)
                and refused.code == "cluster-too-small"
            )
            if not (gone and job.config.faults.on_node_loss == "wait"):
                raise lost.noted(f"the run could not go on: {refused}") from refused
            since = refused
        job, found = go_on(job, lost, history, tell=_show, since=since)
        checkpoint = found.checkpoint
        spec = dataclasses.replace(
            job_spec(job.config, job.plan), progress=spec.progress
        )


def _show(text: str) -> None:
    print(text, flush=True)


def _counted(problems: Sequence[Problem]) -> str:
    texts = "\n".join(problem.render() for problem in problems)
    return f"{texts}\n\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started"


def program(command: Callable[[], int] = main) -> NoReturn:
    """Run `command` with the command line of this process, then end the process with its exit code."""
    # Output errors (such as a closed terminal) must not end the run.
    begin()
    codes = [FAILED]
    # Registered first, so that it runs last.
    atexit.register(_leave, codes)
    codes.append(command())
    sys.exit(codes[-1])


def _leave(codes: Sequence[int]) -> None:
    """If threads of this process still run as workers, end the process immediately, with the last exit code in `codes`.

    A normal end of the process would stop these threads inside torch, which would abort the process.
    """
    if any(component_of(thread.name) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[-1])
