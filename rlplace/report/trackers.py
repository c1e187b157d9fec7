"""Send the metrics of a run to experiment trackers, each by its own library, and to sinks that the user wrote.

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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rlplace.codes import config_error, problem
from rlplace.envs.registry import check_named, missing_library, named, place_of
from rlplace.errors import ConfigError, OutputError, Problem
from rlplace.json_text import read_object
from rlplace.signals import Stopped

KEY = "runner.sinks"
FOLDER = "trackers"
# Project of the runs in a tracker, unless the variables of its library name another.
PROJECT = "rlplace"
# Before a tracker that has failed is tried again, so that its timeouts delay a run seldom.
PAUSE_S = 60.0
# Seconds of one call of a tracker before a warning says that the run waits for it
SLOW_S = 30.0
# States in which a run ends.
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
# The fix for a tracker that has failed.
SET_UP = {
    "wandb": "wandb login        (or export WANDB_MODE=offline)",
    "mlflow": "unset MLFLOW_TRACKING_URI        (or correct it: files beside the runs need no server)",
    "swanlab": "swanlab login        (or export SWANLAB_MODE=offline)",
    "trackio": "export TRACKIO_DIR=<a folder that you may write to>",
}
FIRST_FILES = ("config.yaml", "plan.svg")
LAST_FILES = ("report.html", "summary.json")

# Takes the number of the iteration, the env steps or answers since the start of the run,
# and the metrics. Raises OutputError if a file cannot take the iteration whole; the file is
# then unchanged. A sink with a method `samples` takes those of a language model too, before
# the metrics of their iteration.
Sink = Callable[[int, int, Mapping[str, float]], object]
# Samples of one iteration of a language model, with the same keys, as samples.jsonl has them.
Samples = Sequence[Mapping[str, Any]]


class RunInfo(NamedTuple):
    """The facts about a run that a tracker needs when it is opened.

    `folder`: the run's folder. `config`: the config, as in config.yaml. `run_id`: the tracker's own id of the run; None
    if the tracker does not know the run yet. `with_steps`: False if the job's steps are its iterations, so that points
    have no number of steps.
    """

    folder: Path
    config: Mapping[str, Any]
    run_id: str | None = None
    with_steps: bool = True

    @property
    def name(self) -> str:
        """Return the name of the run's folder, which is the time at which the run began."""
        return self.folder.resolve().name

    @property
    def group(self) -> str:
        """Return the name of the run's config. It is the name of the folder that contains the run's folder."""
        return self.folder.resolve().parent.name


class Tracker(NamedTuple):
    """A run that is open in a tracker, with the functions that send data to the tracker.

    `id`: the tracker's own id of the run. `page`: an address, or the command that shows or uploads the run.
    `log`: sends metrics. `attach`: sends a file. `close`: ends the run with the state from `state_of`. `table`: sends
    the samples of an iteration.
    """

    id: str
    page: str
    log: Sink
    attach: Callable[[Path], object]
    close: Callable[[str], object]
    table: Callable[[int, Samples], object]


def _points(
    info: RunInfo, env_steps: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return name -> value for the curves at one iteration: all metrics that are finite, and the env steps.

    `env_steps`: number of env steps or answers since the run began; left out if `info` says that steps are iterations.
    """
    points: dict[str, float] = {}
    if info.with_steps:
        points["env_steps"] = float(env_steps)
    for name, value in metrics.items():
        if math.isfinite(value):
            points[name] = value
    return points


def _table(samples: Samples) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the columns and the rows of a table with these samples."""
    columns = list(samples[0])
    rows = [list(sample.values()) for sample in samples]
    return columns, rows


def _wandb(info: RunInfo) -> Tracker:
    """Return an open run of Weights & Biases: the run with the id in `info`, or a new run if there is no id."""
    import wandb

    # The id makes a resumed run go on in the same run of the tracker; nothing is printed.
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        group=info.group,
        name=info.name,
        id=info.run_id or uuid.uuid4().hex[:12],
        resume="allow",
        dir=str(info.folder),
        config=dict(info.config),
        settings=wandb.Settings(console="off", silent=True),
    )

    def log(iteration: int, steps: int, metrics: Mapping[str, float]) -> None:
        run.log(_points(info, steps, metrics), step=iteration)

    def attach(file: Path) -> None:
        run.save(str(file), base_path=str(info.folder), policy="now")

    def close(state: str) -> None:
        run.finish(exit_code=int(state != FINISHED))
        # The library's process would stay as long as this one
        wandb.teardown()

    def table(iteration: int, samples: Samples) -> None:
        run.log({"samples": wandb.Table(*_table(samples))}, step=iteration)

    # Offline there is no page: the command that sends the files stands for it.
    page = str(run.url)
    if run.offline:
        page = f"wandb sync {shlex.quote(str(info.folder / 'wandb'))}/offline-run-*"
    return Tracker(run.id, page, log, attach, close, table)


def _mlflow(info: RunInfo) -> Tracker:
    """Return an open run of MLflow: the run with the id in `info`, or a new run if there is no id.

    Without the variable MLFLOW_TRACKING_URI, data is written to a file next to the runs.
    """
    # The library's seven tries take minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    # Server or file, and the folder of artifacts where there is no server.
    runs = info.folder.resolve().parent.parent
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None
    if not uri:
        uri = f"sqlite:///{runs}/mlflow.db"
        artifacts = (runs / "mlartifacts").as_uri()
    client = MlflowClient(tracking_uri=uri)

    run = info.run_id
    if not run:
        experiment = _mlflow_experiment(client, artifacts)
        tags = {"group": info.group, "folder": str(info.folder)}
        made = client.create_run(experiment, run_name=info.name, tags=tags)
        run = made.info.run_id
    client.update_run(run, "RUNNING")

    def log(iteration: int, steps: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        points = []
        for metric, value in _points(info, steps, metrics).items():
            points.append(Metric(metric, value, now_ms, iteration))
        client.log_batch(run, points)

    def close(state: str) -> None:
        ended = {STOPPED: "KILLED", FAILED: "FAILED"}.get(state, "FINISHED")
        client.set_terminated(run, ended)

    def table(iteration: int, samples: Samples) -> None:
        text = json.dumps(samples, ensure_ascii=False, indent=1)
        client.log_text(run, text, f"samples/{iteration:06}.json")

    def attach(file: Path) -> None:
        client.log_artifact(run, str(file))

    page = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    if uri.startswith("http"):
        page = uri
    return Tracker(run, page, log, attach, close, table)


def _mlflow_experiment(client: Any, artifacts: str | None) -> str:
    """Return the id of the MLflow experiment of this project. If there is none, create it.

    `client`: the client of MLflow. `artifacts`: URI of the folder for the files of a new experiment; None: MLflow's
    server chooses the folder.
    """
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=artifacts))


def _swanlab(info: RunInfo) -> Tracker:
    """Return an open run of SwanLab: the run with the id in `info`, or a new run if there is no id."""
    import swanlab

    run = swanlab.init(
        project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
        group=info.group,
        name=info.name,
        id=info.run_id or uuid.uuid4().hex[:12],
        resume="allow",
        log_dir=str(info.folder / "swanlab"),
        config=dict(info.config),
    )

    def log(iteration: int, steps: int, metrics: Mapping[str, float]) -> None:
        run.log(_points(info, steps, metrics), step=iteration)

    def attach(file: Path) -> None:
        run.save(str(file), base_path=str(info.folder), policy="now")

    def close(state: str) -> None:
        run.finish({STOPPED: "aborted", FAILED: "crashed"}.get(state, "success"))

    def table(iteration: int, samples: Samples) -> None:
        rows = swanlab.echarts.Table().add(*_table(samples))
        run.log({"samples": rows}, step=iteration)

    # As with wandb: offline, the command that sends the files.
    page = run.url
    if run.mode != "online":
        page = f"swanlab sync {shlex.quote(str(info.folder / 'swanlab'))}/run-*"
    return Tracker(run.id, page, log, attach, close, table)


def _trackio(info: RunInfo) -> Tracker:
    """Return an open run of Trackio: the run with the same name, or a new run if there is none."""
    import trackio

    # Trackio knows a run by its name, so the name has both config and time.
    name = f"{info.group}/{info.name}"
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(
        project=project,
        name=name,
        group=info.group,
        config=dict(info.config),
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )

    def log(iteration: int, steps: int, metrics: Mapping[str, float]) -> None:
        run.log(_points(info, steps, metrics), step=iteration)

    def attach(file: Path) -> None:
        artifact = f"{info.group}-{info.name}-{file.stem}"
        run.log_artifact(file, name=artifact, type="file")

    def close(state: str) -> None:
        # The library takes no state
        run.finish()

    def table(iteration: int, samples: Samples) -> None:
        run.log({"samples": trackio.Table(*_table(samples))}, step=iteration)

    page = run.url or f"trackio show --project {shlex.quote(project)}"
    return Tracker(name, page, log, attach, close, table)


# The name in runner.sinks, which is also that of the library and of the extra.
TRACKERS: Mapping[str, Callable[[RunInfo], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


def _of_the_users(name: str, run: RunInfo) -> Tracker:
    """Return a tracker that passes all data to the sink that the user wrote.

    The sink is made with the run's folder and config. It may have methods `close` and `samples`. `name`:
    `package.module:Name`, from `runner.sinks`.
    """
    sink = find_sink(name)(run.folder, run.config)
    close = getattr(sink, "close", lambda: None)
    samples = getattr(sink, "samples", lambda iteration, samples: None)
    return Tracker(
        id="",
        page="",
        log=sink,
        attach=lambda file: None,
        close=lambda state: close(),
        table=samples,
    )


def _opened(name: str, info: RunInfo) -> Tracker:
    """Return an opened tracker, or the user's own sink. `name`: a value of `runner.sinks`. `info`: the run to send."""
    if name in TRACKERS:
        return TRACKERS[name](info)
    return _of_the_users(name, info)


def find_sink(name: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """Return the user's object `package.module:Name`, a class or function that makes a sink.

    Raises ConfigError if the object cannot be found. Other exceptions from the import are not caught.
    """
    found: Callable[[Path, Mapping[str, Any]], Sink] = named(
        name, {}, key=KEY, code="unknown-sink", noun="sink"
    )
    return found


def check_sinks(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each sink with a missing library, and for each user's sink that cannot be found.

    `names`: the values of `runner.sinks`.
    """
    problems: list[Problem] = []
    for name in names:
        if ":" in name:
            problems += check_named(name, key=KEY, code="unknown-sink", noun="sink")
        elif name in TRACKERS:
            problems += _check_library(name, extra=name)
        elif name == "tensorboard":
            problems += _check_library(name, extra="run")
    return problems


def _check_library(name: str, extra: str) -> Sequence[Problem]:
    """Return a list with a problem if the library `name` is not installed; else an empty list.

    `extra`: the extra of rlplace that installs the library.
    """
    if _installed(name):
        return ()
    why = f"there is no module {name}"
    error = missing_library(why, got=name, extra=extra, key=KEY, of="the sink")
    return error.problems


def _installed(name: str) -> bool:
    """Return whether the library `name` is installed.

    A folder of this name without code does not count. The library wandb, for example, writes its output to a folder
    `wandb`.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class TrackerSink:
    """Sends the metrics of a run to one tracker, or to a sink that the user wrote, during the `with` statement.

    A failure is reported once and does not end the run. After a failure, a tracker is tried again when PAUSE_S has
    passed; a user's sink, at the next iteration. If a run is resumed or returns to a checkpoint, it stays the same run
    in the tracker. Iterations are then repeated. A tracker does not get them a second time; a user's sink does.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        note: str = "",
        *,
        with_steps: bool = True,
    ) -> None:
        """Open the tracker, or make the user's sink.

        `name`: a value of `runner.sinks`. `folder`, `config`: the run's folder and config. `note`: text to add to the
        error that is printed if the sink fails, at the end of its suggested remedy. `with_steps`: as in `RunInfo`.
        Raises OutputError if the file with the tracker's state cannot be written.
        """
        self._name = name
        self._with_steps = with_steps
        self._folder = folder
        self._config = config
        self._failure_note = note
        self._file = folder / FOLDER / f"{name.replace(':', '.')}.json"
        self._sent: dict[str, Any] = {"id": None, "page": "", "iteration": 0}
        with contextlib.suppress(FileNotFoundError):
            self._sent |= read_object(self._file, "runner.sinks")
        self._tracker: Tracker | None = None
        self._retry_at_s = 0.0
        self._reported = False
        self._told_slow = False
        with self._catching_errors():
            self._open()

    def samples(self, iteration: int, samples: Samples) -> None:
        """Send the samples of an iteration. This has to be called before the metrics of the iteration are sent."""
        if not self._passes(iteration):
            with self._catching_errors():
                self._open().table(iteration, samples)

    def _passes(self, iteration: int) -> bool:
        """Return whether to skip an iteration: the tracker has it already, or failed less than PAUSE_S seconds ago."""
        if self._name not in TRACKERS:
            return False
        has_it = bool(iteration <= self._sent["iteration"])
        return has_it or time.monotonic() < self._retry_at_s

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        if self._passes(iteration):
            return
        with self._catching_errors():
            self._open().log(iteration, env_steps, metrics)
            self._sent["iteration"] = iteration
            self._note()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Attach the last files, and end the tracker's run as finished, stopped or failed.

        `error`: the exception that ended the run; None if there was none.
        """
        if self._tracker is not None:
            with self._catching_errors(), self._quiet():
                self._attach(LAST_FILES)
            with self._catching_errors(), self._quiet():
                self._tracker.close(state_of(error))

    def _open(self) -> Tracker:
        """Return the tracker. Open it first if it is not open, and attach the first files."""
        if self._tracker is not None:
            return self._tracker
        info = RunInfo(
            self._folder,
            self._config,
            run_id=self._sent["id"],
            with_steps=self._with_steps,
        )
        with self._quiet(), _hooks_kept():
            opened = _opened(self._name, info)
        self._tracker = opened
        self._sent |= {"id": opened.id or None, "page": opened.page}
        self._note()
        with self._quiet():
            self._attach(FIRST_FILES)
        return opened

    def _attach(self, names: Iterable[str]) -> None:
        if self._tracker is None:
            return
        for name in names:
            file = self._folder / name
            if file.is_file():
                self._tracker.attach(file)

    def _note(self) -> None:
        """Write the state of the tracker, such as its id of the run, to the file in which it is kept.

        If that fails, the file keeps its old content, and OutputError is raised.
        """
        try:
            self._file.parent.mkdir(exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(self._sent), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            raise OutputError.of(self._file, error) from error

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """During the `with` statement, discard the output of the tracker's library, and make stdin empty.

        With an empty stdin, a question of the library cannot block the run.
        """
        if self._name not in TRACKERS:
            yield
            return
        said = io.StringIO()
        stdin = sys.stdin
        try:
            sys.stdin = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                yield
        finally:
            sys.stdin = stdin

    @contextlib.contextmanager
    def _catching_errors(self) -> Iterator[None]:
        """Catch exceptions of the tracker during the `with` statement. OutputError is not caught.

        Only the first exception is printed. After each one, the tracker is not used for PAUSE_S seconds. If the
        statement takes longer than SLOW_S, a warning says once that the run waits for the tracker.
        """
        slow = threading.Timer(SLOW_S, self._warn_slow)
        slow.daemon = True
        slow.start()
        try:
            yield
        except OutputError:  # the disk, not the tracker
            raise
        except Exception as error:  # noqa: BLE001  # of any library, or the user's: a run does not end with its tracker
            self._retry_at_s = time.monotonic() + PAUSE_S
            if not self._reported:
                self._reported = True
                failure = _failure(self._name, error, self._failure_note)
                print(failure, file=sys.stderr, flush=True)
        finally:
            slow.cancel()

    def _warn_slow(self) -> None:
        """Print once that the run waits for the tracker: a call of a library cannot be cancelled from outside."""
        if self._told_slow:
            return
        self._told_slow = True
        waits = problem("sink-slow", KEY, self._name, waited_s=SLOW_S)
        print(f"warning: {waits.render()}", file=sys.stderr, flush=True)


def state_of(error: BaseException | None) -> str:
    """Return how a run has ended: FINISHED, FAILED, or STOPPED by a signal.

    `error`: the exception that ended the run; None if there was none.
    """
    if error is None:
        return FINISHED
    if isinstance(error, Stopped):
        return STOPPED
    return FAILED


def _failure(name: str, error: Exception, note: str) -> ConfigError:
    """Return the error to print when a sink fails.

    `name`: name of the sink. `error`: the exception that the sink raised. `note`: text to add to the suggested remedy
    in the error.
    """
    remedy = SET_UP.get(name)
    if remedy is None:
        remedy = f"mend {place_of(error, name)}"
    return config_error(
        "sink-failed",
        KEY,
        name,
        reason=f"{type(error).__name__}: {error}".strip(),
        remedy=remedy,
        note=note,
    )


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """When the `with` statement ends, restore the handlers of Ctrl-C and of uncaught exceptions.

    Libraries of trackers replace these handlers.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        if main and signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)


def pages(folder: Path) -> list[str]:
    """Return lines that say how to see the curves of a run: an address or a command for TensorBoard and each tracker.

    `folder`: the run's folder.
    """
    found = []
    events = folder / "tensorboard"
    if events.is_dir():
        found.append(f"tensorboard --logdir {shlex.quote(str(events))}")
    for file in sorted((folder / FOLDER).glob("*.json")):
        try:
            page = read_object(file, "runner.sinks").get("page")
        except ConfigError as error:
            page = f"{file} cannot be read: {error.problems[0].why}"
        if page:
            found.append(page)
    return found
