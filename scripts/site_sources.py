"""Print a sum of all that the documentation site is built from; `scripts/site` leaves it beside the pages.

The tests of the site take a built one whose sum is that of the sources now, and build one otherwise.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders and files that pages, their reference and their frame are made of, of ROOT.
FOLDERS = ("configs", "docs", "rlplace", "scripts")
FILES = ("*.md", "LICENSE", "mkdocs.yml")
BUILDERS = ("mkdocs", "mkdocs-material")
LEFT_IN = "sources.sha256"  # file of a built site; each build begins by removing it
ADDRESS = "SITE_REPOSITORY"  # variable with the address of the repository


def sum_of_sources(address: str) -> str:
    """Return the SHA-256 of sources and builders of a site.

    `address`: of the repository to which the pages lead; empty if they lead to none.
    """
    total = hashlib.sha256(address.encode())
    for builder in BUILDERS:
        total.update(f"{builder} {version(builder)}".encode())
    files = [file for name in FILES for file in ROOT.glob(name)]
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*")
    for file in sorted(files):
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(ROOT)} {content}\n".encode())
    return total.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"{sum_of_sources(os.environ.get(ADDRESS, ''))}\n")
