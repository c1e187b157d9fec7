"""`python -m rlplace.train --config-name hybrid_ppo [key=value ...]`: config, plan, launch, loop.

Exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 3 it does not fit in memory, 130 and 143 stopped by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rlplace.config import compose
from rlplace.errors import ClusterError, ConfigError, Problem, ProblemsError, RlplaceError
from rlplace.placement.show.text import render_text
from rlplace.prepare import check_launch, planned_only, prepare_composed

USAGE = Path(__file__).with_name("train_usage.txt")

DONE, FAILED, WRONG, DOES_NOT_FIT = 0, 1, 2, 3


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        line = compose.CommandLine.of(argv)
        configs = compose.listed(compose.config_names(), indent="    ")
        usage = USAGE.read_text(encoding="utf-8").format(program="python -m rlplace.train", configs=configs)
        _show(usage.rstrip())
        if line.text:
            _show(f"\n{line.file.name}:\n\n{line.text}")
        return DONE
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
    except SystemExit as done:  # of argparse
        return done.code if isinstance(done.code, int) else FAILED


def stop_on_signals() -> None:
    """Turn SIGINT and SIGTERM into Stopped, once: while stopping, where every wait is bounded, more are ignored."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def _job(composed: compose.Composed) -> int:
    job = prepare_composed(composed)
    if not job.config.dry_run:
        lacking = job.not_run or check_launch(job.config, job.plan, job.sources)
        if lacking:
            raise ConfigError(lacking)
    _show(render_text(job.view))
    if job.not_run:
        _show(planned_only(job.not_run))
    if job.refused:
        print(_counted(job.view.shortages), file=sys.stderr)
        return DOES_NOT_FIT
    if job.shortages:
        print(job.shortages, file=sys.stderr)
    if job.config.dry_run:
        _show("\ndry run: the plan holds, nothing was started")
        return DONE
    from rlplace.run import job_spec, run

    run(job_spec(job.config, job.plan), job.view, resolved=job.mapping)
    return DONE


def _show(text: str) -> None:
    """Print unless the pipe is closed: `... | head` may have seen enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _counted(problems: Sequence[Problem]) -> str:
    texts = "\n".join(problem.render() for problem in problems)
    return f"{texts}\n\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started"


if __name__ == "__main__":
    sys.exit(main())
