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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rlplace.envs.registry import check_named, missing_library, named, place_of
from rlplace.errors import ConfigError, OutputError, Problem
from rlplace.signals import Stopped

KEY = "runner.sinks"
FOLDER = "trackers"
PROJECT = "rlplace"  # what a tracker files runs under, unless the variables of its library say otherwise
PAUSE_S = 60.0  # before a tracker that has failed is tried again, so that its timeouts delay a run seldom
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"  # how a run has ended
SET_UP = {  # what makes a tracker that has failed work
    "wandb": "wandb login        (or export WANDB_MODE=offline)",
    "mlflow": "unset MLFLOW_TRACKING_URI        (or correct it: files beside the runs need no server)",
    "swanlab": "swanlab login        (or export SWANLAB_MODE=offline)",
    "trackio": "export TRACKIO_DIR=<a folder that you may write to>",
}
FIRST_FILES = ("config.yaml", "plan.svg")
LAST_FILES = ("report.html", "summary.json")

# Takes the number of the iteration, the env steps or answers since the start of the run, and the metrics. Raises
# OutputError if a file cannot take the iteration whole; the file is then unchanged.
# Where it has a method `samples`, it takes those of a language model too, before the metrics of their iteration.
Sink = Callable[[int, int, Mapping[str, float]], object]
Samples = Sequence[
    Mapping[str, Any]
]  # of one iteration of a language model, with the same keys, as samples.jsonl has them


class RunInfo(NamedTuple):
    """What a tracker is told of a run."""

    folder: Path
    config: Mapping[str, Any]  # as config.yaml has it
    run_id: str | None = (
        None  # the tracker's own id of the run, where it has some of it
    )

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
    close: Callable[[str], object]  # takes the state of `state_of`
    table: Callable[[int, Samples], object]


def _points(env_steps: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what is drawn: finite numbers."""
    return {"env_steps": float(env_steps)} | {
        name: v for name, v in metrics.items() if math.isfinite(v)
    }


def _table(samples: Samples) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows."""
    return [*samples[0]], [[*sample.values()] for sample in samples]


def _wandb(info: RunInfo) -> Tracker:
    import wandb

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

    def close(state: str) -> None:
        run.finish(exit_code=0 if state == FINISHED else 1)
        wandb.teardown()  # its process, which else stays as long as this one

    return Tracker(
        id=run.id,
        page=f"{run.url}"
        if not run.offline
        else f"wandb sync {shlex.quote(str(info.folder / 'wandb'))}/offline-run-*",
        log=lambda iteration, steps, metrics: run.log(
            _points(steps, metrics), step=iteration
        ),
        attach=lambda file: run.save(
            str(file), base_path=str(info.folder), policy="now"
        ),
        close=close,
        table=lambda iteration, samples: run.log(
            {"samples": wandb.Table(*_table(samples))}, step=iteration
        ),
    )


def _mlflow(info: RunInfo) -> Tracker:
    os.environ.setdefault(
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"
    )  # the library's seven take minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    runs = info.folder.resolve().parent.parent
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    files = None if uri else (runs / "mlartifacts").as_uri()
    uri = uri or f"sqlite:///{runs}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    experiment = (
        found.experiment_id
        if found
        else client.create_experiment(name, artifact_location=files)
    )
    tags = {"group": info.group, "folder": str(info.folder)}
    run = (
        info.run_id
        or client.create_run(experiment, run_name=info.name, tags=tags).info.run_id
    )
    client.update_run(run, "RUNNING")

    def log(iteration: int, env_steps: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        points = _points(env_steps, metrics).items()
        client.log_batch(
            run, [Metric(name, value, now_ms, iteration) for name, value in points]
        )

    page = (
        uri
        if uri.startswith("http")
        else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    )
    return Tracker(
        id=run,
        page=page,
        log=log,
        attach=lambda file: client.log_artifact(run, str(file)),
        close=lambda state: client.set_terminated(
            run, {STOPPED: "KILLED", FAILED: "FAILED"}.get(state, "FINISHED")
        ),
        table=lambda iteration, samples: client.log_text(
            run,
            json.dumps(samples, ensure_ascii=False, indent=1),
            f"samples/{iteration:06}.json",
        ),
    )


def _swanlab(info: RunInfo) -> Tracker:
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
    return Tracker(
        id=run.id,
        page=run.url
        if run.mode == "online"
        else f"swanlab sync {shlex.quote(str(info.folder / 'swanlab'))}/run-*",
        log=lambda iteration, steps, metrics: run.log(
            _points(steps, metrics), step=iteration
        ),
        attach=lambda file: run.save(
            str(file), base_path=str(info.folder), policy="now"
        ),
        close=lambda state: run.finish(
            {STOPPED: "aborted", FAILED: "crashed"}.get(state, "success")
        ),
        table=lambda iteration, samples: run.log(
            {"samples": swanlab.echarts.Table().add(*_table(samples))}, step=iteration
        ),
    )


def _trackio(info: RunInfo) -> Tracker:
    import trackio

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
    return Tracker(
        id=name,
        page=run.url or f"trackio show --project {shlex.quote(project)}",
        log=lambda iteration, steps, metrics: run.log(
            _points(steps, metrics), step=iteration
        ),
        attach=lambda file: run.log_artifact(
            file, name=f"{info.group}-{info.name}-{file.stem}", type="file"
        ),
        close=lambda state: run.finish(),  # it takes no state
        table=lambda iteration, samples: run.log(
            {"samples": trackio.Table(*_table(samples))}, step=iteration
        ),
    )


# The name in runner.sinks, which is also that of the library and of the extra.
TRACKERS: Mapping[str, Callable[[RunInfo], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


def _of_the_users(name: str, run: RunInfo) -> Tracker:
    """Call package.module:Name with the run's folder and config; what it returns may have `close` and `samples`."""
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


def find_sink(name: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """Import package.module:Name. Raises ConfigError; what the module raises passes through."""
    found: Callable[[Path, Mapping[str, Any]], Sink] = named(
        name, {}, key=KEY, code="unknown-sink", noun="sink"
    )
    return found


def check_sinks(names: Iterable[str]) -> list[Problem]:
    """Report libraries of sinks that are not installed, and the user's own that cannot be found."""
    problems: list[Problem] = []
    for name in names:
        if ":" in name:
            problems += check_named(name, key=KEY, code="unknown-sink", noun="sink")
        elif (name in TRACKERS or name == "tensorboard") and not _installed(name):
            extra = name if name in TRACKERS else "run"
            why = f"there is no module {name}"
            problems += missing_library(
                why, got=name, extra=extra, key=KEY, of="the sink"
            ).problems
    return problems


def _installed(name: str) -> bool:
    """Return whether a library is there; a folder of its name without code is not, such as wandb's own output."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class TrackerSink:
    """Send metrics to one tracker or to a sink of the user's own; closed by leaving its context.

    A failure is reported once and does not end the run. A tracker that has failed is tried again after PAUSE_S, a sink
    of the user's own at the next iteration. When a run resumes or returns to a checkpoint, the same run of the tracker
    continues, and iterations that the tracker has are not sent again; a sink of the user's own gets them again.
    """

    def __init__(
        self, name: str, folder: Path, config: Mapping[str, Any], note: str = ""
    ) -> None:
        """Open the tracker. `note`: what a failure adds to its fix. Raises OutputError."""
        self._name = name
        self._folder = folder
        self._config = config
        self._failure_note = note
        self._file = folder / FOLDER / f"{name.replace(':', '.')}.json"
        self._sent: dict[str, Any] = {"id": None, "page": "", "iteration": 0}
        with contextlib.suppress(FileNotFoundError):
            self._sent |= json.loads(self._file.read_text(encoding="utf-8"))
        self._tracker: Tracker | None = None
        self._retry_at_s = 0.0
        self._reported = False
        with self._outlasting():
            self._open()

    def samples(self, iteration: int, samples: Samples) -> None:
        if not self._passes(iteration):
            with self._outlasting():
                self._open().table(iteration, samples)

    def _passes(self, iteration: int) -> bool:
        """Whether a tracker has the iteration, or is not to be tried again yet."""
        return self._name in TRACKERS and (
            iteration <= self._sent["iteration"] or time.monotonic() < self._retry_at_s
        )

    def __call__(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> None:
        if self._passes(iteration):
            return
        with self._outlasting():
            self._open().log(iteration, env_steps, metrics)
            self._sent["iteration"] = iteration
            self._note()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Attach the files of the run's end, and end the tracker's run in the state that the error says."""
        if self._tracker is not None:
            with self._outlasting(), self._quiet():
                self._attach(LAST_FILES)
            with self._outlasting(), self._quiet():
                self._tracker.close(state_of(error))

    def _open(self) -> Tracker:
        if self._tracker is None:
            info = RunInfo(self._folder, self._config, self._sent["id"])
            with self._quiet(), _hooks_kept():
                opened = (
                    TRACKERS[self._name](info)
                    if self._name in TRACKERS
                    else _of_the_users(self._name, info)
                )
            self._tracker = opened
            self._sent |= {"id": opened.id or None, "page": opened.page}
            self._note()
            with self._quiet():
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
        """Discard what a tracker's library prints, and take stdin away, so that a prompt cannot block the run."""
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
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except OutputError:  # the disk, not the tracker
            raise
        except Exception as error:  # noqa: BLE001  # of any library, or the user's: a run does not end with its tracker
            self._retry_at_s = time.monotonic() + PAUSE_S
            if not self._reported:
                self._reported = True
                print(
                    _failure(self._name, error, self._failure_note),
                    file=sys.stderr,
                    flush=True,
                )


def state_of(error: BaseException | None) -> str:
    """Return how a run has ended: FINISHED, STOPPED by a signal, or FAILED."""
    if error is None:
        return FINISHED
    if isinstance(error, Stopped):
        return STOPPED
    return FAILED


def _failure(name: str, error: Exception, note: str) -> ConfigError:
    why = f"{type(error).__name__}: {error}".strip()
    fix = SET_UP[name] if name in SET_UP else f"mend {place_of(error, name)}"
    what = "does not take the metrics; the run goes on without"
    return ConfigError.of("sink-failed", KEY, what, name, why, fix + note)


@contextlib.contextmanager
def _hooks_kept() -> Iterator[None]:
    """Undo what libraries do to Ctrl-C and to the text of errors, which are this program's to handle."""
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
    """Return how to look at the curves of a run: an address or a command for each tracker that has it."""
    files = sorted((folder / FOLDER).glob("*.json"))
    found = [json.loads(file.read_text(encoding="utf-8"))["page"] for file in files]
    events = folder / "tensorboard"
    return [
        *(
            [f"tensorboard --logdir {shlex.quote(str(events))}"]
            if events.is_dir()
            else []
        ),
        *filter(None, found),
    ]
