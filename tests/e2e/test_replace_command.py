"""`rlplace replace`: a run that goes on takes the request between two iterations, and answers it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlplace.checkpoints.store import LOCK, lock
from rlplace.cli.replace import main
from rlplace.runtime.requests import ANSWER, REQUEST, Requests, answer_of, ask
from tests.e2e.test_changes_inline import MOVE, run
from tests.e2e.test_resume import numbers
from tests.e2e.training import Finished

ENV_AWAY = "cluster.component_placement.env=2-3"


def asked(*words: str) -> tuple[int, str]:
    """Return the exit code of the command and what it prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main(words)
    return code, shown.getvalue()


class Asking:
    """Starts the command while a run is between two iterations, and holds the run until the request is there."""

    command = staticmethod(main)

    def __init__(self, *words: str) -> None:
        self._words = words
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.answer: concurrent.futures.Future[int] | None = None

    def at(self, looks: int) -> Callable[[Requests], Any]:
        """Return a replacement of Requests.take. `looks`: the look at which the request is there."""
        take = Requests.take
        seen: list[int] = []

        def taking(requests: Requests) -> Any:
            folder = requests._folder
            # The first look is that of the start
            if len(seen) == looks:
                words = [str(folder), *self._words]
                self.answer = self._pool.submit(self.command, words)
                until = time.monotonic() + 60.0
                while not (folder / REQUEST).exists() and not self.answer.done():
                    assert time.monotonic() < until
                    time.sleep(0.01)
            seen.append(1)
            return take(requests)

        return taking


def changing(
    output: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[Finished, int]:
    """Return a run of four iterations that is asked after the second one, and the exit code of the command."""
    asking = Asking(*words)
    monkeypatch.setattr(Requests, "take", asking.at(2))
    finished = run(output, "checkpoint.every=100")
    assert asking.answer is not None
    return finished, asking.answer.result(60.0)


def test_a_run_changes_as_if_the_change_had_been_planned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, code = changing(tmp_path / "asked", monkeypatch, ENV_AWAY)
    assert (requested.code, code) == (0, 0), requested.err + requested.out
    monkeypatch.undo()
    planned = run(tmp_path / "planned", MOVE, "checkpoint.every=100")
    assert numbers(requested) == numbers(planned)
    (change,) = requested.summary()["changes"]
    assert (change["after"], change["moved"]) == (2, {"env": ["0", "2-3"]})
    assert requested.folder is not None
    answer = json.loads((requested.folder / ANSWER).read_text(encoding="utf-8"))
    assert answer["outcome"] == "changed"
    assert answer["text"].startswith("change after iteration 2: env 0 -> 2-3; ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["cluster.component_placement.env=0-9"], "accelerator-out-of-range"),
        (["cluster.component_placement.env=0"], "moves no component"),
        (["+cluster.component_placement.env2=0"], "cannot change"),
        (["cluster.component_placement.env=0-2"], "divi"),
    ],
)
def test_a_request_that_cannot_be_planned_moves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    why: str,
) -> None:
    finished, code = changing(tmp_path, monkeypatch, *words)
    assert (finished.code, code) == (0, 2), finished.err
    shown = finished.out + finished.err + capsys.readouterr().err
    assert why in shown
    assert "changes" not in finished.summary()
    assert len(finished.metrics()) == 4


def a_run(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.yaml", LOCK):
        (folder / name).touch()
    return folder


def test_a_run_that_is_not_under_way_is_refused(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "config.yaml").write_text(
        "cluster: {component_placement: {env: 0}}\n", encoding="utf-8"
    )
    code, shown = asked(str(folder), ENV_AWAY)
    assert code == 2
    assert "the run is not under way" in shown
    assert not (folder / REQUEST).exists()
    assert asked(str(tmp_path), ENV_AWAY)[0] == 2


@pytest.mark.parametrize("word", ["runner.seed=3", "env=2-3", ""])
def test_only_places_can_be_asked_for(tmp_path: Path, word: str) -> None:
    folder = a_run(tmp_path / "run")
    code, shown = asked(str(folder), *filter(None, [word]))
    assert code == 2
    assert "[bad-change]" in shown


def test_a_second_request_waits_for_none(tmp_path: Path) -> None:
    first = ask(tmp_path, {"env": "2-3"})
    assert first is not None
    assert ask(tmp_path, {"env": "1"}) is None
    found = json.loads((tmp_path / REQUEST).read_text(encoding="utf-8"))
    assert found == {"name": first.name, "places": {"env": "2-3"}}
    assert [file.name for file in tmp_path.iterdir()] == [REQUEST]


@pytest.mark.parametrize("kind", ["drains", "releases"])
def test_a_request_about_a_node_is_taken_as_it_was_written(
    tmp_path: Path, kind: str
) -> None:
    requests = Requests(tmp_path)
    asked = ask(tmp_path, {}, **{kind: "10.0.0.2"})
    taken = requests.take()
    assert taken == asked
    assert getattr(taken, kind) == "10.0.0.2"


def test_a_request_of_an_earlier_command_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "run")
    request = ask(folder, {"env": "2-3"})
    assert request is not None
    with lock(folder):
        Requests(folder)
        answer = answer_of(folder, request, 10.0)
    assert not isinstance(answer, str)
    assert answer.outcome == "refused"
    assert not (folder / REQUEST).exists()


def test_a_request_is_withdrawn_if_the_run_ends_or_is_late(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    request = ask(folder, {"env": "2-3"})
    assert request is not None
    assert answer_of(folder, request, 10.0) == "ended"
    assert not (folder / REQUEST).exists()
    (folder / "config.yaml").write_text(
        "cluster: {component_placement: {env: 0}}\n", encoding="utf-8"
    )
    with lock(folder):
        code, shown = asked(str(folder), ENV_AWAY, "--timeout", "0")
    assert code == 1
    assert "the run has not taken the request for 0 s" in shown
    assert not (folder / REQUEST).exists()


def test_a_folder_of_runs_stands_for_the_one_that_is_under_way(tmp_path: Path) -> None:
    above = tmp_path / "hopper"
    above.mkdir()
    folders = [a_run(above / name) for name in ("a", "b", "c")]
    for run_of in folders:
        (run_of / "config.yaml").write_text(
            "cluster: {component_placement: {env: 0}}\n", encoding="utf-8"
        )
    code, shown = asked(str(tmp_path), ENV_AWAY)
    assert code == 2
    assert "no run of this folder is under way" in shown
    with lock(folders[1]):
        for folder in (above, tmp_path):
            code, shown = asked(str(folder), ENV_AWAY, "--timeout", "0")
            assert code == 1
            assert str(folders[1]) in shown
        with lock(folders[2]):
            code, shown = asked(str(tmp_path), ENV_AWAY, "--timeout", "0")
    assert code == 2
    assert "a request goes to one of them: hopper/b, hopper/c" in shown
    assert f"fix: {folders[2]}" in shown
