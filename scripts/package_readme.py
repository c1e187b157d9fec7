"""`python scripts/package_readme.py ADDRESS`: print README.md with absolute links, for the page of the package.

An index shows the README alone: relative links and pictures lead nowhere there. ADDRESS: the repository, such as
https://example.org/owner/name. The links lead to the files of the tag v<version>.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import urljoin

from rlplace import __version__

ROOT = Path(__file__).parents[1]
# A picture or a link: an optional "!", the text in brackets, the target in parentheses.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def with_absolute_links(text: str, address: str, version: str) -> str:
    """Return a page in Markdown with absolute links; blocks of code stay.

    `text`: the page, with links relative to the top of the repository. `address`: the repository. `version`: the
    version whose files the links lead to.
    """

    def absolute(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if re.match(r"\w+:|#", target):
            return link.group()
        # Pictures are loaded from the raw file, pages are shown by the repository's site.
        kind = "raw" if mark else "blob"
        base = f"{address.rstrip('/')}/{kind}/v{version}/"
        return f"{mark}[{words}]({urljoin(base, target)})"

    parts = _FENCE.split(text)
    return "".join(
        part if part.startswith("```") else _LINK.sub(absolute, part) for part in parts
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://"):
        sys.exit(__doc__)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sys.stdout.write(with_absolute_links(readme, sys.argv[1], __version__))
