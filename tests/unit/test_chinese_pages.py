"""The pages in Chinese: punctuation, spaces and terms by one rule, and every page that a first user needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.zh.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]
HAN = "一-鿿"
FULL_WIDTH = "，。：；、？！（）《》“”"
# What a first user reads, by the names of the English pages.
NEEDED = {
    "after_training",
    "checkpoints",
    "cluster",
    "environments",
    "faults",
    "installing",
    "llm",
    "metrics",
    "own_code",
    "own_environment",
    "own_job",
    "placement",
    "python",
    "report",
    "search",
    "tour",
    "troubleshooting",
}
# A term -> words for the same that no page uses.
TERMS = {
    "模拟器": ("仿真器", "仿真环境"),
    "加速器": ("加速卡", "计算卡"),
    "检查点": ("检查站", "断点续训", "存档点"),
    "提示词": ("题目", "提示语"),
    "卸载": ("让位", "让出"),
    "回合": ("剧集", "幕数"),
    "奖励": ("报酬", "奖赏"),
    "观测": ("观察值",),
    "配置": ("设定档",),
}


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of blocks of code, with `code` in place of code and no targets of links."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            line = re.sub(r"`[^`]*`", "`code`", line)
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def found(page: Path, pattern: str) -> list[str]:
    """Return the lines of prose in which the pattern is, with their numbers."""
    return [
        f"{number}: {line[max(0, match.start() - 15) : match.end() + 15]}"
        for number, line in prose(page)
        if (match := re.search(pattern, line))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_punctuation_is_full_width_and_has_no_spaces(page: Path) -> None:
    near = rf"[{HAN}`\]*]"
    assert found(page, rf"{near}[,;:?!()]|[,;:?()]\s*[{HAN}]") == []
    assert found(page, rf"(?<=\S) +[{FULL_WIDTH}]|[{FULL_WIDTH}] +(?=[^| ])") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_space_separates_chinese_and_latin(page: Path) -> None:
    latin = "[A-Za-z0-9`]"
    assert found(page, rf"[{HAN}]\**\[?{latin}|{latin}\]?\**\[?[{HAN}]") == []
    assert found(page, rf"[{HAN}] +[{HAN}]") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_broken_within(page: Path) -> None:
    """A line break is a space in HTML, which Chinese does not have between words."""
    begins = re.compile(r"\s*([-*|#>]|\d+\. |!\[|$)")
    previous = ""
    broken = []
    for number, line in prose(page):
        if not begins.match(line) and previous and not previous.startswith(("|", "#")):
            broken.append(f"{number}: {line[:30]}")
        previous = line
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_thing_has_one_name(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    others = [word for words in TERMS.values() for word in words if word in text]
    assert others == []


def test_the_pages_of_a_first_user_are_there() -> None:
    assert NEEDED - {page.stem for page in PAGES} == set()
