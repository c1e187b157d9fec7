"""`python -m rlplace.train --config-name hybrid_ppo [key=value ...]`: config, plan, launch, loop.

Exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 3 it does not fit in memory, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from rlplace.config import Config, compose, read_config
from rlplace.errors import ClusterError, ConfigError, Problem, ProblemsError, RlplaceError
from rlplace.model_folder import with_folder
from rlplace.placement import Layout, Plan, make_plan
from rlplace.placement.llm import llm_memory_case, make_llm_layout
from rlplace.placement.memory import memory_case
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import PlanView, view_plan

if TYPE_CHECKING:  # what starts workers waits until the plan was shown
    from rlplace.run import JobSpec

USAGE = """\
Trains a policy on a declared placement.

    {program} --config-name hybrid_ppo                                 train
    {program} --config-name hybrid_ppo dry_run=true                    print the plan, start nothing
    {program} --config-name hybrid_ppo algorithm.gamma=0.98            override any key
    {program} --config-name hybrid_ppo 'cluster.component_placement.env=[0-1,4-5]'
    {program} --config-name hybrid_ppo --cfg job                       print the composed config
    {program} --config-dir my_configs --config-name my_run             a config of your own

configs:
{configs}

exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 3 does not fit, 130 Ctrl-C, 143 SIGTERM"""

Prepared = tuple["PlanView", bool, "Callable[[], JobSpec]"]  # the plan, whether that is all, how it is launched

DONE, FAILED, WRONG, DOES_NOT_FIT = 0, 1, 2, 3


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(usage("python -m rlplace.train", argv))
        return 0
    stop_on_signals()
    try:
        return max((_job(composed) for composed in compose.with_hydra(argv)), default=DONE)
    except (ProblemsError, ClusterError) as error:
        print(_counted(error.problems if isinstance(error, ProblemsError) else [error.problem]), file=sys.stderr)
        return WRONG
    except RlplaceError as error:
        print(error, file=sys.stderr)
        return FAILED
    except Stopped as stopped:
        print(f"stopped by {stopped}", file=sys.stderr)
        return stopped.exit_code
    except SystemExit as done:  # Hydra's own flags and argparse
        return done.code if isinstance(done.code, int) else FAILED


def usage(program: str, argv: Sequence[str]) -> str:
    names = compose.config_names()
    text = USAGE.format(program=program, configs="\n".join(f"    {n:<22}{about}" for n, about in names.items()))
    name = compose.config_name(argv)
    file = compose.config_directory(argv) / f"{name}.yaml"
    return f"{text}\n\n{file.name}:\n\n{file.read_text(encoding='utf-8')}" if file.is_file() else text


def stop_on_signals() -> None:
    """Turns SIGINT and SIGTERM into Stopped, once: while stopping, where every wait is bounded, more are ignored."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def read_plan(composed: compose.Composed) -> tuple[Config, Plan]:
    """The typed config and its plan. Raises ConfigError or PlacementError with every problem; starts nothing."""
    from rlplace.envs import check
    from rlplace.workers.machines import declared_topology

    config = read_config(composed.mapping, composed.sources)
    topology = declared_topology(config.cluster, composed.sources)
    problems = list(check(config.simulator_env, composed.sources))
    try:
        plan = make_plan(config, topology, sources=composed.sources)
    except ProblemsError as error:
        raise type(error)([*error.problems, *problems]) from None
    if problems:
        raise ProblemsError(problems)
    return config, plan


def read_llm_plan(composed: compose.Composed, *, launched: bool) -> tuple[Config, Layout]:
    """The same for a language-model job; `launched`: everything is checked that its launch needs."""
    from rlplace.llm_checks import check_launch, check_sizes
    from rlplace.workers.machines import declared_topology

    sources = composed.sources
    config = with_folder(read_config(composed.mapping, sources), sources)
    if launched and not config.runs:
        raise ConfigError(_plan_only(config, composed))
    layout = make_llm_layout(config, declared_topology(config.cluster, sources), sources)
    check = check_launch if launched else check_sizes
    if config.runs and (problems := check(config, layout, sources)):
        raise ConfigError(problems)
    return config, layout


def _job(composed: compose.Composed) -> int:
    config = read_config(composed.mapping, composed.sources)
    prepare = _language if config.kind == "causal_lm" else _simulated
    report, dry_run, job_spec = prepare(composed)
    _show(render_text(report))
    if not report.fits:
        print(_counted(report.shortages), file=sys.stderr)
        return DOES_NOT_FIT
    if dry_run:
        _show("\ndry run: the plan holds, nothing was started")
        return DONE
    from rlplace.run import run

    run(job_spec(), report, resolved=composed.mapping)
    return DONE


def _show(text: str) -> None:
    """To whoever still reads: `... | head` may have seen enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _simulated(composed: compose.Composed) -> Prepared:
    config, plan = read_plan(composed)

    def job_spec() -> JobSpec:
        from rlplace.ppo_run import ppo_run

        return ppo_run(config, plan)

    return view_plan(plan, memory_case(plan, config, None), name=composed.name), config.dry_run, job_spec


def _language(composed: compose.Composed) -> Prepared:
    dry_run = bool(composed.mapping.get("dry_run", False))
    config, layout = read_llm_plan(composed, launched=not dry_run)

    def job_spec() -> JobSpec:
        from rlplace.llm_run import llm_run

        return llm_run(config, layout)

    return view_plan(layout, llm_memory_case(layout, config), name=composed.name), dry_run, job_spec


def _plan_only(config: Config, composed: compose.Composed) -> list[Problem]:
    """What is still to be written before such a job can run."""
    return [
        Problem(
            code="plan-only",
            key=key,
            what="is required in a run",
            source=composed.sources.get(key),
            why=f"{why}; without it the job is planned only",
            fix=f"{fix}        (or only plan: dry_run: true)",
        )
        for key, (why, fix) in config.missing.items()
    ]


def _counted(problems: Sequence[Problem]) -> str:
    texts = "\n".join(problem.render() for problem in problems)
    return f"{texts}\n\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started"


if __name__ == "__main__":
    sys.exit(main())
