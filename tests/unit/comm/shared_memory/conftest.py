"""Folders of jobs, in short paths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one, whatever the name of the user and of the test: sockets are made in job folders."""
    with tempfile.TemporaryDirectory(prefix="job_", dir="/tmp") as folder:
        yield Path(folder)
