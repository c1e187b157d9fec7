"""Stand-ins for the libraries of trackers: the calls that `report.trackers` makes, with their real argument names.

What is sent is kept in POINTS and FILES; with DOWN, all calls fail, as those of a tracker that cannot be reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

POINTS: list[tuple[int, dict[str, Any]]] = []
TABLES: list[tuple[int, dict[str, Any]]] = []
FILES: list[str] = []
RUNS: list[
    str
] = []  # ids of runs that were opened, and of those that were ended with a minus before
STATES: list[object] = []  # that runs were ended in, in a tracker's own words
DOWN: list[bool] = []


def _up() -> None:
    if DOWN:
        raise ConnectionError("the tracker is down")


class _Run:
    """A run of wandb, SwanLab or Trackio."""

    offline, mode, url = True, "offline", None

    def __init__(self, name: str) -> None:
        self.id = name
        assert sys.stdin.read() == ""  # nobody answers a prompt
        _up()
        RUNS.append(name)

    def log(self, data: dict[str, Any], step: int) -> None:
        _up()
        (TABLES if "samples" in data else POINTS).append((step, data))

    def save(self, glob_str: str, base_path: str, policy: str) -> None:
        _up()
        assert Path(glob_str).is_relative_to(base_path)
        assert policy in ("now", "end", "live")
        FILES.append(Path(glob_str).name)

    def log_artifact(self, artifact_or_path: Path, name: str, type: str) -> None:
        _up()
        FILES.append(artifact_or_path.name)

    def finish(self, state: str | None = None, exit_code: int | None = None) -> None:
        _up()
        RUNS.append(f"-{self.id}")
        STATES.append(state if exit_code is None else exit_code)


def _wandb_init(
    *,
    project: str,
    group: str,
    name: str,
    id: str,
    resume: str,
    dir: str,
    config: dict[str, Any],
    settings: object,
) -> _Run:
    return _Run(id)


def _swanlab_init(
    *,
    project: str,
    group: str,
    name: str,
    id: str,
    resume: str,
    log_dir: str,
    config: dict[str, Any],
) -> _Run:
    return _Run(id)


def _trackio_init(
    *,
    project: str,
    name: str,
    group: str,
    config: dict[str, Any],
    resume: str,
    embed: bool,
    auto_log_cpu: bool,
    auto_log_gpu: bool,
) -> _Run:
    return _Run(name)


class _MlflowClient:
    def __init__(self, tracking_uri: str) -> None:
        _up()

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: str) -> str:
        return "1"

    def create_run(
        self, experiment_id: str, run_name: str, tags: dict[str, str]
    ) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id: str, status: str) -> None:
        RUNS.append(run_id)

    def log_batch(self, run_id: str, metrics: list[SimpleNamespace]) -> None:
        _up()
        POINTS.append((metrics[0].step, {m.key: m.value for m in metrics}))

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        _up()
        rows = json.loads(text)
        assert artifact_file.startswith("samples/")
        TABLES.append(
            (
                int(artifact_file[8:14]),
                {"samples": ([*rows[0]], [[*row.values()] for row in rows])},
            )
        )

    def log_artifact(self, run_id: str, local_path: str) -> None:
        _up()
        FILES.append(Path(local_path).name)

    def set_terminated(self, run_id: str, status: str) -> None:
        _up()
        STATES.append(status)
        RUNS.append(f"-{run_id}")


def _metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
    return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)


def _table(
    columns: list[str], data: list[list[Any]]
) -> tuple[list[str], list[list[Any]]]:
    return columns, data


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in of a library in its place, with nothing sent yet."""
    for kept in (POINTS, TABLES, FILES, RUNS, STATES, DOWN):
        kept.clear()
    modules = {
        "wandb": {
            "wandb": {
                "init": _wandb_init,
                "Settings": lambda console, silent: None,
                "Table": _table,
                "teardown": lambda: None,
            }
        },
        "swanlab": {
            "swanlab": {
                "init": _swanlab_init,
                "echarts": SimpleNamespace(
                    Table=lambda: SimpleNamespace(
                        add=lambda headers, rows: (headers, rows)
                    )
                ),
            }
        },
        "trackio": {"trackio": {"init": _trackio_init, "Table": _table}},
        "mlflow": {
            "mlflow": {"MlflowClient": _MlflowClient},
            "mlflow.entities": {"Metric": _metric},
        },
    }
    for module, names in modules[name].items():
        made = ModuleType(module)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module, made)
