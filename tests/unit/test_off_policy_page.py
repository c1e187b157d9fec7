"""The page of the off-policy job states its lines as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lines(folder: str) -> int:
    """Return the number of lines of all modules in a folder of the package."""
    modules = (ROOT / "rlplace" / folder).glob("*.py")
    return sum(len(module.read_text("utf-8").splitlines()) for module in modules)


def test_the_page_states_the_lines_of_the_job() -> None:
    page = (ROOT / "docs" / "off_policy.md").read_text("utf-8")
    job = lines("jobs/off_policy")
    workers = lines("workers/off_policy")
    stated = re.search(
        r"The job has ([\d,]+) lines: ([\d,]+) in `jobs/off_policy`, ([\d,]+) in `workers/off_policy`",
        page,
    )
    assert stated is not None
    found = [int(number.replace(",", "")) for number in stated.groups()]
    assert found == [job + workers, job, workers]
    parts = re.search(
        r"updates\s+of the six algorithms are (\d+) lines, and predicted seconds (\d+)",
        page,
    )
    assert parts is not None
    files = ("workers/off_policy/learners.py", "jobs/off_policy/performance.py")
    texts = [(ROOT / "rlplace" / file).read_text("utf-8") for file in files]
    assert [*map(int, parts.groups())] == [len(text.splitlines()) for text in texts]
