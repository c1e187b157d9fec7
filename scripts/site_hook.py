"""Hook of mkdocs: pages from outside docs/ and generated ones become part of the site, and links lead to them there."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import site_reference
from mkdocs.structure.files import File, Files

# Files of the repository outside docs/ -> their pages; and a folder that pages link to.
FROM_ROOT = {
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "LICENSE": "license.md",
}
ELSEWHERE = FROM_ROOT | {
    "docs/decisions": "decisions/index.md",
    "configs": "reference/configs.md",
}
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


# Pages whose hits come after those of the guides, by the start of their path; the search of the theme reads it.
SEARCHED = {
    "decisions/": {"boost": 0.1},
    "architecture.md": {"boost": 0.3},
    "reference/": {"boost": 0.5},
    "changelog.md": {"boost": 0.1},
    "license.md": {"exclude": True},
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, text in site_reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name, page in FROM_ROOT.items():
        text = (site_reference.ROOT / name).read_text(encoding="utf-8")
        text = text if name.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between files of the repository lead to their pages; say how far up a search shows this one."""
    at = page.file.src_uri
    page.meta["search"] = next(
        (how for begin, how in SEARCHED.items() if at.startswith(begin)), {}
    )
    source = next(
        (name for name, made in FROM_ROOT.items() if made == at), f"docs/{at}"
    )
    pieces = FENCE.split(markdown)  # texts and, between them, code
    pieces[::2] = [
        LINK.sub(lambda link: f"]({link_on_site(link[1], source, at)}", text)
        for text in pieces[::2]
    ]
    return "".join(pieces)


def link_on_site(link: str, source: str, at: str) -> str:
    """Return a link of the repository's file `source` as one of the page `at`."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    page = ELSEWHERE.get(target) or target.removeprefix("docs/")
    return posixpath.relpath(page, posixpath.dirname(at) or ".")
