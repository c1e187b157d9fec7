"""The last lines of a run at any width of the terminal: no path is broken within, and commands can be pasted."""

from __future__ import annotations

import pytest

from rlplace.tables import with_whole_word

PATH = "runs/cartpole/2026-11-28_22-03-02/checkpoints/000002"


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (80, [f"checkpoint {PATH}"]),
        (63, [f"checkpoint {PATH}"]),
        (62, ["checkpoint", PATH]),  # no room for the indent
        (40, [f"checkpoint {PATH}"]),  # no line has room for it
    ],
)
def test_a_path_is_whole(
    columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert with_whole_word("checkpoint", PATH, indent=11).splitlines() == lines


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (120, [f"curves     tensorboard --logdir {PATH}"]),
        (80, ["curves     tensorboard --logdir \\", f"           {PATH}"]),
        (60, ["curves     tensorboard --logdir \\", PATH]),
    ],
)
def test_a_command_is_joined_by_a_backslash(
    columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    line = with_whole_word(
        "curves     tensorboard --logdir", PATH, indent=11, joined=" \\"
    )
    assert line.splitlines() == lines
