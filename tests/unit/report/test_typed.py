"""What a run's folder keeps of its command: the words, the commit, and the screen."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace.report.typed import (
    COMMAND,
    SCREEN,
    Typed,
    as_typed,
    commands,
    commit_of,
    without_passwords,
)


def test_each_run_of_a_command_has_what_was_shown_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    folders = [tmp_path / "first", tmp_path / "second"]
    with Typed(as_typed("rlplace train", ["pole", "-m", "env.name=a b,c"])) as command:
        for folder, value in zip(folders, ("a b", "c"), strict=True):
            folder.mkdir()
            command.job(["--config-name", "pole", f"+env.name={value}"])
            print(f"the \x1b[1mplan\x1b[0m of {value}")
            command.into(folder, {"versions": {"python": "3"}})
            command.into(folder, {})  # goes on after a lost machine
            print("an error", file=sys.stderr)
    assert isinstance(sys.stdout, io.StringIO), "the streams are put back"
    assert (
        screen.getvalue()
        == "the \x1b[1mplan\x1b[0m of a b\nthe \x1b[1mplan\x1b[0m of c\n"
    )
    assert [(f / SCREEN).read_text() for f in folders] == [
        "the plan of a b\nan error\n",
        "the plan of c\nan error\n",
    ]
    ((first,), (second,)) = map(commands, folders)
    assert first["typed"] == second["typed"] == "rlplace train pole -m 'env.name=a b,c'"
    assert (first["overrides"], second["overrides"]) == (
        ["env.name=a b"],
        ["env.name=c"],
    )
    assert (first["folder"], first["versions"]) == (str(Path.cwd()), {"python": "3"})


def test_a_command_that_goes_on_with_a_run_is_added(tmp_path: Path) -> None:
    for text in ("train pole", "train pole resume=auto"):
        with Typed(text) as command:
            command.job([])
            command.into(tmp_path, {})
    assert [each["typed"] for each in commands(tmp_path)] == [
        "train pole",
        "train pole resume=auto",
    ]
    (tmp_path / COMMAND).write_text('[{"typed"')
    assert commands(tmp_path) == []


def test_passwords_of_addresses_are_not_recorded(tmp_path: Path) -> None:
    word = "runner.sinks.db.uri=postgresql://me:hid@den@host:5432/runs"
    with Typed(f"train pole {word}") as command:
        command.job([word, "cluster.ray.address=10.0.0.7:6379"])
        command.into(tmp_path, {})
    text = (tmp_path / COMMAND).read_text(encoding="utf-8")
    assert "hid" not in text
    (entry,) = commands(tmp_path)
    assert entry["typed"].endswith("postgresql://***@host:5432/runs")
    assert entry["overrides"][1] == "cluster.ray.address=10.0.0.7:6379"


@pytest.mark.parametrize(
    "text",
    ["http://host:5000/a@b", "git@host:a/b", "https://host:1?m=a:b@c", "a: b@c"],
)
def test_what_is_no_password_is_recorded(text: str) -> None:
    assert without_passwords(text) == text


def test_a_commit_says_whether_something_is_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True
        )

    git("init")
    assert commit_of(tmp_path) is None
    (file := tmp_path / "own.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "one")
    found = commit_of(tmp_path)
    assert found is not None
    assert len(found["id"]) == 40
    assert found["changed"] is False
    file.write_text("a = 2\n")
    assert commit_of(tmp_path) == found | {"changed": True}
