"""`rlplace.train(config, overrides)`: run a job in this process, and return its run."""

from __future__ import annotations

import signal
import sys

from rlplace.api.callables import Config, OnIteration, Overrides
from rlplace.api.notebook import curve_of
from rlplace.api.run import Run
from rlplace.api.words import as_called, composed_of
from rlplace.cli.train import run_job
from rlplace.codes import config_error
from rlplace.proxies import keep_local
from rlplace.report.typed import Typed
from rlplace.signals import Signals, Stopped, restored


def train(
    config: Config,
    overrides: Overrides = (),
    *,
    on_iteration: OnIteration | None = None,
) -> Run:
    """Train the job of a config in this process, as the command does, and return its run.

    `config`: name of a shipped config or task, path of a YAML file, or a mapping. `overrides`: `key=value`
    words, or a mapping key -> value.
    `on_iteration`: is called after each iteration with its number, the env steps so far and its metrics; if it returns
    True, the run ends.

    After Ctrl-C the run saves and ends, then KeyboardInterrupt is raised. After another signal that ends a run, the run
    saves and ends, and the signal is raised again for the handler of the calling program. Raises ConfigError,
    PlacementError, ClusterError or another RlplaceError, with a note that says where the policy is, if one was saved.
    """
    composed = composed_of(config, overrides)
    if composed.mapping.get("dry_run"):
        raise config_error(
            "bad-option",
            "dry_run",
            "true",
            error="dry-run-call",
            config=repr(composed.name),
        )
    keep_local()
    functions: list[OnIteration] = []
    curve = curve_of(composed)
    if curve is not None:
        functions.append(curve)
    if on_iteration is not None:
        functions.append(on_iteration)
    signals = Signals()
    try:
        with (
            restored(),
            signals.explaining(),
            Typed(as_called("train", config, overrides)) as command,
        ):
            signals.listen()
            try:
                folder = run_job(composed, signals, command, functions)
            finally:
                # The curve may not show the last values yet
                if curve is not None:
                    curve.draw()
    except Stopped as stopped:
        notes = getattr(stopped, "__notes__", ())
        if stopped.number == signal.SIGINT:
            raise KeyboardInterrupt(*notes) from stopped
        told = "\n".join([f"stopped by {stopped}", *notes])
        sys.stderr.write(f"{told}\n")
        signal.raise_signal(stopped.number)
        raise
    assert folder is not None, "a dry run was refused above"
    return Run(folder)
