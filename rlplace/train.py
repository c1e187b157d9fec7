"""`python -m rlplace.train --config-name hybrid_ppo [key=value ...]`: config, plan, launch, loop.

Exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from rlplace import compose
from rlplace.config import RunConfig, read_config
from rlplace.errors import ClusterError, ProblemsError, RlplaceError
from rlplace.placement import Plan, make_plan, render_text

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

exit codes: 0 done, 1 failure, 2 wrong usage, config or placement, 130 Ctrl-C, 143 SIGTERM"""


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
        for composed in compose.with_hydra(argv):
            _job(composed)
    except (ProblemsError, ClusterError) as error:
        print(_counted(error), file=sys.stderr)
        return 2
    except RlplaceError as error:
        print(error, file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped by {stopped}", file=sys.stderr)
        return stopped.exit_code
    except SystemExit as done:  # Hydra's own flags and argparse
        return done.code if isinstance(done.code, int) else 1
    return 0


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


def read_plan(composed: compose.Composed) -> tuple[RunConfig, Plan]:
    """The typed config and its plan. Raises ConfigError or PlacementError with every problem; starts nothing."""
    from rlplace.envs import check
    from rlplace.workers.machines import declared_topology

    config = read_config(composed.mapping, composed.sources)
    topology = declared_topology(config.cluster)
    problems = list(check(config.env, composed.sources))
    try:
        plan = make_plan(config, topology, sources=composed.sources)
    except ProblemsError as error:
        raise type(error)([*error.problems, *problems]) from None
    if problems:
        raise ProblemsError(problems)
    return config, plan


def _job(composed: compose.Composed) -> None:
    config, plan = read_plan(composed)
    print(render_text(plan), flush=True)
    if config.dry_run:
        print("\ndry run: the plan holds, nothing was started")
        return
    from rlplace.run import run

    run(config, plan, name=composed.name, resolved=composed.mapping)


def _counted(error: ProblemsError | ClusterError) -> str:
    count = len(error.problems) if isinstance(error, ProblemsError) else 1
    return f"{error}\n\n{count} problem{'s' if count > 1 else ''}; nothing was started"


if __name__ == "__main__":
    sys.exit(main())
