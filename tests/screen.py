"""A terminal in memory, which shows what a person would see of text with escape sequences."""

from __future__ import annotations

import io
import re


class Screen(io.StringIO):
    """A terminal that understands what rich writes."""

    def isatty(self) -> bool:
        return True

    @property
    def written(self) -> str:
        """All that was ever written, without styles."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.getvalue())

    @property
    def lines(self) -> list[str]:
        """What is shown now."""
        lines, row = [""], 0
        for word in re.findall(
            r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()
        ):
            if word == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif word.endswith("A") and word[0] == "\x1b":
                row -= int(word[2:-1])
            elif word == "\x1b[2K":
                lines[row] = ""
            elif word[0] not in "\r\x1b":
                lines[row] += word
        return [line.rstrip() for line in lines]
