"""docs/reports.md: each report names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")


def test_each_report_names_tests_that_exist() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ")]
    reports = [row for row in rows if not row.startswith("| what is seen")]
    assert len(reports) > 60
    for row in reports:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test holds this: {row}"
        for file, name in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in text, (file, name)
