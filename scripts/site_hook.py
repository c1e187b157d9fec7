"""Hook of mkdocs: pages from outside docs/ and generated ones become part of the site, and links lead to them there.

The hook also makes the frame of a Chinese page Chinese, shows the version, and adds words to the search.
"""

from __future__ import annotations

import copy
import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import site_reference
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section

from rlplace import __version__

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
    "reference/hyperparameters.md": {"boost": 0.9},
    "reference/config.md": {"boost": 0.9},
    "reference/": {"boost": 0.5},
    "changelog.md": {"boost": 0.1},
    "license.md": {"exclude": True},
    "reports.md": {"boost": 0.3},
    "zh/": {"boost": 0.5},
}
CONFIG_ENTRIES = "reference/config/#"  # start of the locations of config keys
WORDS = site_reference.ROOT / "docs" / "search_words.toml"

# The languages of the site: start of the paths of their pages, the theme's name, and what a switch calls them.
ENGLISH = ("", "en", "English")
CHINESE = ("zh/", "zh", "中文")
CHINESE_SECTION = CHINESE[2]
# Names of the palette's switch: what a click changes to.
CHINESE_THEME = {"Dark": "深色", "Light": "浅色", "As the browser": "跟随浏览器"}
CHINESE_DESCRIPTION = "强化学习任务在加速器上的放置，启动之前先检查"


def on_config(config: Any) -> Any:
    """Show the version on each page; leave out links to a repository if none is known."""
    config.copyright = f"rlplace {__version__} · {config.copyright}"
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, text in site_reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name, page in FROM_ROOT.items():
        text = (site_reference.ROOT / name).read_text(encoding="utf-8")
        text = text if name.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_nav(nav: Navigation, config: Any, **_: Any) -> Navigation:
    """Give each language a navigation of its own: the Chinese one is the section of that name."""
    (section,) = (
        item
        for item in nav.items
        if isinstance(item, Section) and item.title == CHINESE_SECTION
    )
    nav.items.remove(section)
    for item in section.children:
        item.parent = None
    chinese = Navigation(section.children, nav.pages)
    chinese.homepage = next(
        page for page in nav.pages if page.file.src_uri == "zh/index.md"
    )
    config.extra["chinese_nav"] = chinese
    for page in nav.pages:
        # The last page of a language does not lead to the first page of the other
        if page.next_page and language_of(page) != language_of(page.next_page):
            page.next_page.previous_page = None
            page.next_page = None
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links between files of the repository lead to their pages; say how far up a search shows this one."""
    at = page.file.src_uri
    page.meta["search"] = next(
        (how for begin, how in SEARCHED.items() if at.startswith(begin)), {}
    )
    source = next(
        (name for name, made in FROM_ROOT.items() if made == at), f"docs/{at}"
    )
    page.edit_url = edit_url(source, config)
    pieces = FENCE.split(markdown)  # texts and, between them, code
    pieces[::2] = [
        LINK.sub(lambda link: f"]({link_on_site(link[1], source, at)}", text)
        for text in pieces[::2]
    ]
    return "".join(pieces)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """List the blocks of the config beside its page, without the keys of each: they are too many for a margin."""
    if page.file.src_uri == "reference/config.md":
        for block in page.toc.items[0].children:
            block.children = []
    return html


def on_page_context(
    context: dict[str, Any], page: Any, config: Any, **_: Any
) -> dict[str, Any]:
    """Give a page the frame of its language, and a switch to the same page in the other language."""
    own = copy.copy(config)
    own.extra = {**config.extra, "alternate": alternates(page, config)}
    if language_of(page) == CHINESE:
        own.theme = copy.deepcopy(config.theme)
        own.theme["language"] = CHINESE[1]
        for palette in own.theme["palette"]:
            palette["toggle"]["name"] = CHINESE_THEME[palette["toggle"]["name"]]
        own.site_description = CHINESE_DESCRIPTION
        context["nav"] = config.extra["chinese_nav"]
    context["config"] = own
    return context


@event_priority(-100)  # after the search has written its index
def on_post_build(config: Any) -> None:
    """Add the words of docs/search_words.toml to the entries of the search that answer them; rank keys of the config.

    Of two keys that have the words of a query, the one with fewer other words in its name comes first.
    """
    file = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    entries = {entry["location"]: entry for entry in index["docs"]}
    for location, entry in entries.items():
        key = location.removeprefix(CONFIG_ENTRIES)
        if key != location:
            entry["boost"] = 0.8 + 1 / len(re.split(r"[._]", key))
    for location, words in tomllib.loads(WORDS.read_text(encoding="utf-8")).items():
        if location not in entries:
            raise PluginError(f"{WORDS.name}: the site has no {location!r}")
        entries[location]["tags"] = words
    file.write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def language_of(page: Any) -> tuple[str, str, str]:
    """Return the language of a page."""
    if page.file.src_uri.startswith(CHINESE[0]):
        return CHINESE
    return ENGLISH


def alternates(page: Any, config: Any) -> list[dict[str, str]]:
    """Return the links of the language switch: to this page in each language, or to that language's first page."""
    known = {each.file.src_uri: each for each in config.extra["chinese_nav"].pages}
    name = page.file.src_uri.removeprefix(language_of(page)[0])
    links = []
    for prefix, language, called in (ENGLISH, CHINESE):
        target = known.get(f"{prefix}{name}") or known[f"{prefix}index.md"]
        links.append({"name": called, "link": target.url or "./", "lang": language})
    return links


def edit_url(source: str, config: Any) -> str | None:
    """Return the address at which a file of the repository is edited; None if it is generated or no address is known.

    `source`: path of the file in the repository.
    """
    generated = source in {f"docs/{name}" for name in site_reference.pages()}
    if generated or not config.edit_uri:
        return None
    path = posixpath.normpath(posixpath.join(config.edit_uri, "..", source))
    return urljoin(config.repo_url.rstrip("/") + "/", path)


def link_on_site(link: str, source: str, at: str) -> str:
    """Return a link of the repository's file `source` as one of the page `at`."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    page = ELSEWHERE.get(target) or target.removeprefix("docs/")
    return posixpath.relpath(page, posixpath.dirname(at) or ".")
