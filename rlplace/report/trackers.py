"""Send the metrics of a run to experiment trackers, each by its own library, and to sinks of the user's own.

::

    open ─▶ config, plan picture ─▶ a point per iteration ... ─▶ report ─▶ close
      └ trackers/<name>.json in the run's folder: the tracker's id of the run, how to open it, the last point it has
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlplace.envs.registry import missing_library, named
from rlplace.errors import ConfigError, OutputError, Problem

KEY = "runner.sinks"
FOLDER = "trackers"
PROJECT = "rlplace"  # what a tracker files runs under, unless the variables of its library say otherwise
PAUSE_S = 60.0  # without a tracker that has failed, so that a run waits for it seldom
FIRST_FILES, LAST_FILES = ("config.yaml", "plan.svg"), ("report.html", "summary.json")

# Takes the number of the iteration, the env steps or answers since the start of the run, and the metrics. Raises
# OutputError if a file cannot take the iteration whole; the file is then unchanged.
Sink = Callable[[int, int, Mapping[str, float]], object]


class Followed(NamedTuple):
    """A run, as a tracker sees it."""

    folder: Path
    config: Mapping[str, Any]  # as config.yaml has it
    known: str | None = None  # the tracker's own id of the run, where it has some of it

    @property
    def name(self) -> str:
        """Return the name of the run's folder: when it began."""
        return self.folder.resolve().name

    @property
    def group(self) -> str:
        """Return the name of its config."""
        return self.folder.resolve().parent.name


class Tracker(NamedTuple):
    """A run that a tracker has opened."""

    id: str
    page: str  # an address, or the command that shows or sends it
    log: Sink
    attach: Callable[[Path], object]
    close: Callable[[], object]


def _points(env_steps: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what is drawn: finite numbers."""
    return {"env_steps": float(env_steps)} | {name: v for name, v in metrics.items() if math.isfinite(v)}


def _wandb(run: Followed) -> Tracker:
    import wandb

    kept = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        group=run.group,
        name=run.name,
        id=run.known or uuid.uuid4().hex[:12],
        resume="allow",
        dir=str(run.folder),
        config=dict(run.config),
        settings=wandb.Settings(console="off", silent=True),
    )

    def close() -> None:
        kept.finish()
        wandb.teardown()  # its process, which else stays as long as this one

    return Tracker(
        id=kept.id,
        page=f"{kept.url}"
        if not kept.offline
        else f"wandb sync {shlex.quote(str(run.folder / 'wandb'))}/offline-run-*",
        log=lambda iteration, steps, metrics: kept.log(_points(steps, metrics), step=iteration),
        attach=lambda file: kept.save(str(file), base_path=str(run.folder), policy="now"),
        close=close,
    )


def _mlflow(run: Followed) -> Tracker:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the library's seven take minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    runs, uri = run.folder.resolve().parent.parent, os.environ.get("MLFLOW_TRACKING_URI")
    files = None if uri else (runs / "mlartifacts").as_uri()
    uri = uri or f"sqlite:///{runs}/mlflow.db"
    client, name = MlflowClient(tracking_uri=uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=files)
    tags = {"group": run.group, "folder": str(run.folder)}
    kept = run.known or client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
    client.update_run(kept, "RUNNING")

    def log(iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        now_ms, points = int(time.time() * 1000), _points(env_steps, metrics).items()
        client.log_batch(kept, [Metric(name, value, now_ms, iteration) for name, value in points])

    page = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    return Tracker(
        kept, page, log, lambda file: client.log_artifact(kept, str(file)), lambda: client.set_terminated(kept)
    )


def _swanlab(run: Followed) -> Tracker:
    import swanlab

    kept = swanlab.init(
        project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
        group=run.group,
        name=run.name,
        id=run.known or uuid.uuid4().hex[:12],
        resume="allow",
        log_dir=str(run.folder / "swanlab"),
        config=dict(run.config),
    )
    return Tracker(
        id=kept.id,
        page=kept.url if kept.mode == "online" else f"swanlab sync {shlex.quote(str(run.folder / 'swanlab'))}/run-*",
        log=lambda iteration, steps, metrics: kept.log(_points(steps, metrics), step=iteration),
        attach=lambda file: kept.save(str(file), base_path=str(run.folder), policy="now"),
        close=kept.finish,
    )


def _trackio(run: Followed) -> Tracker:
    import trackio

    name, project = f"{run.group}/{run.name}", os.environ.get("TRACKIO_PROJECT", PROJECT)
    kept = trackio.init(
        project=project,
        name=name,
        group=run.group,
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    return Tracker(
        id=name,
        page=kept.url or f"trackio show --project {shlex.quote(project)}",
        log=lambda iteration, steps, metrics: kept.log(_points(steps, metrics), step=iteration),
        attach=lambda file: kept.log_artifact(file, name=f"{run.group}-{run.name}-{file.stem}", type="file"),
        close=kept.finish,
    )


# The name in runner.sinks, which is also that of the library and of the extra.
TRACKERS: Mapping[str, Callable[[Followed], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


def _of_the_users(name: str, run: Followed) -> Tracker:
    """Call package.module:Name with the run's folder and config; what it returns may have a `close`."""
    sink = find_sink(name)(run.folder, run.config)
    return Tracker(id="", page="", log=sink, attach=lambda file: None, close=getattr(sink, "close", lambda: None))


def find_sink(name: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """Import package.module:Name. Raises ConfigError; what the module raises passes through."""
    found: Callable[[Path, Mapping[str, Any]], Sink] = named(name, {}, key=KEY, code="unknown-sink", noun="sink")
    return found


def check_sinks(names: Iterable[str]) -> list[Problem]:
    """Report libraries of sinks that are not installed, and the user's own that cannot be found."""
    problems: list[Problem] = []
    for name in names:
        try:
            if ":" in name:
                find_sink(name)
            elif (name in TRACKERS or name == "tensorboard") and importlib.util.find_spec(name) is None:
                extra = name if name in TRACKERS else "run"
                raise missing_library(f"there is no module {name}", got=name, extra=extra, key=KEY, of="the sink")
        except ConfigError as error:
            problems += error.problems
    return problems


class TrackerSink:
    """A sink that outlasts its tracker: a failure is said once, and the tracker is left alone for PAUSE_S.

    A run that goes on, or goes back to a checkpoint, goes on with the same run of the tracker. Iterations that this has
    already are not sent again.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._name, self._folder, self._config = name, folder, config
        self._file = folder / FOLDER / f"{name.replace(':', '.')}.json"
        self._sent: dict[str, Any] = {"id": None, "page": "", "iteration": 0}
        with contextlib.suppress(FileNotFoundError):
            self._sent |= json.loads(self._file.read_text(encoding="utf-8"))
        self._tracker: Tracker | None = None
        self._until_s, self._said = 0.0, False
        with self._outlasting(), self._quiet():
            self._open()

    def __call__(self, iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        if iteration <= self._sent["iteration"] or time.monotonic() < self._until_s:
            return
        with self._outlasting():
            self._open().log(iteration, env_steps, metrics)
            self._sent["iteration"] = iteration
            self._note()

    def close(self) -> None:
        """Attach what the run has left at its end, and end the tracker's run."""
        if self._tracker is not None:
            with self._outlasting(), self._quiet():
                self._attach(LAST_FILES)
            with self._outlasting(), self._quiet():
                self._tracker.close()

    def _open(self) -> Tracker:
        if self._tracker is None:
            run = Followed(self._folder, self._config, self._sent["id"])
            with _hooks_kept():
                opened = TRACKERS[self._name](run) if self._name in TRACKERS else _of_the_users(self._name, run)
            self._tracker = opened
            self._sent |= {"id": opened.id or None, "page": opened.page}
            self._note()
            self._attach(FIRST_FILES)
        return self._tracker

    def _attach(self, names: Iterable[str]) -> None:
        for file in (self._folder / name for name in names):
            if self._tracker is not None and file.is_file():
                self._tracker.attach(file)

    def _note(self) -> None:
        try:
            self._file.parent.mkdir(exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(self._sent), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            raise OutputError.of(self._file, error) from error

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Drop what a tracker's library says, for `page` has it, and let it ask for nothing: who would answer?"""
        if self._name not in TRACKERS:
            yield
            return
        said, stdin = io.StringIO(), sys.stdin
        try:
            sys.stdin = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                yield
        finally:
            sys.stdin = stdin

    @contextlib.contextmanager
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except OutputError:  # the disk, not the tracker
            raise
        except Exception as error:  # noqa: BLE001  # of any library, or the user's: a run does not end with its tracker
            self._until_s = time.monotonic() + PAUSE_S
            if not self._said:
                self._said = True
                print(ConfigError.of(*_failure(self._name, error)), file=sys.stderr, flush=True)


def _failure(name: str, error: Exception) -> tuple[str, str, str, str, str, str]:
    why, own = f"{type(error).__name__}: {error}".strip(), ":" in name
    fix = f"mend {place_of(error)}" if own else "see the tracker's own settings: docs/trackers.md"
    what = "does not take the metrics; the run goes on without"
    return ("sink-failed", KEY, what, name, why, f"{fix}        (metrics.jsonl has every iteration)")


def place_of(error: BaseException) -> str:
    """Return the file and line where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its code"


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Undo what libraries do to Ctrl-C and to the text of errors, which are this program's to handle."""
    main = threading.current_thread() is threading.main_thread()
    before, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        if main and signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)


def pages(folder: Path) -> list[str]:
    """Return how to look at the curves of a run: an address or a command for each tracker that has it."""
    files = sorted((folder / FOLDER).glob("*.json"))
    found = [json.loads(file.read_text(encoding="utf-8"))["page"] for file in files]
    events = folder / "tensorboard"
    return [*([f"tensorboard --logdir {shlex.quote(str(events))}"] if events.is_dir() else []), *filter(None, found)]
