"""Threads of torch in a worker."""

from __future__ import annotations

import pytest

from rlplace.workers.threads import threads


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 1), ("4", 4), ("4,2", 4), ("0", 1), ("many", 1)]
)
def test_threads_are_those_of_the_variable(
    value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads() == expected
