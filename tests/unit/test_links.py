"""Relative links and pictures of every page lead to files that are there, and to headings that these have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.md"),
    ]
)
FENCES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Return the targets of a page's links, those to other machines left out."""
    found: list[str] = re.findall(r"\]\(([^)\s]+)", FENCES.sub("", text))
    return [link for link in found if not re.match(r"\w+:", link)]


def anchors(page: Path) -> set[str]:
    """Return what a link may name after `#`: headings in small letters, blanks as dashes."""
    heads = re.findall(
        r"^#+ (.*)$", FENCES.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip())
        for head in heads
    }


def broken(page: Path) -> list[str]:
    wrong = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_wrong_file_and_a_wrong_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n[a](#two-words) [b](#three) [c](none.md)\n```\n[d](x)\n```\n",
        encoding="utf-8",
    )
    assert broken(page) == ["#three", "none.md"]
