"""A shell command or script -> the words that follow its Python entry point, each with its line.

Understood is what launch scripts are made of: quotes, comments, continued lines, `NAME=value`, arrays, `$NAME`,
`${NAME:-default}`, here-documents, pipes and redirections. Nothing is run; a variable nobody set stays as written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\})")
_ENDS = {"\n", ";", "|", "&"}
_REDIRECTION = re.compile(r"[0-9&]?(<<<|<<-?|>>|<|>&|>)")


class UnclosedQuote(ValueError):
    """A quote is opened and never closed; `line` is where."""

    def __init__(self, line: int) -> None:
        super().__init__(f"a quote that opens in line {line} is never closed")
        self.line = line


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    line: int  # 1-based


Command = list[Word]


def entry_words(text: str, *, script: bool = True) -> list[Word]:
    """What follows the script or module in the command that has the most options. Raises UnclosedQuote.

    Without `script`, `name=value` in front is a word like all others and sets no variable.
    """
    commands = [nested for command in _Script(text, script).commands() for nested in _unpacked(command)]
    if not commands:
        return []
    command = max(commands, key=_options)
    return command[_entry(command) :]


def _unpacked(command: Command) -> Iterator[Command]:
    """The command, and the commands that it hands over as one quoted word (`bash -c "..."`)."""
    yield command
    for word in command:
        if re.search(r"\s--\w", word.text):
            for inner in _Script(word.text, True).commands():
                yield [Word(w.text, w.line + word.line - 1) for w in inner]


def _options(command: Command) -> int:
    return sum(w.text.startswith("--") or bool(re.match(r"[+~]*[\w.@/]+=", w.text)) for w in command)


def _entry(command: Command) -> int:
    """The first word that belongs to the trainer and not to what launches it."""
    for i in range(len(command) - 1, -1, -1):
        before = command[i - 1].text if i else ""
        value = before.startswith("--") and before != "--"
        if before in ("-m", "--module") or (re.fullmatch(r"[\w./${}-]+\.py", command[i].text) and not value):
            return i + 1
    plain = next((i for i, w in enumerate(command) if w.text.startswith("-") or "=" in w.text), len(command))
    return plain


class _Script:
    """One pass over a text. Owns the variables that were set so far."""

    def __init__(self, text: str, assigns: bool) -> None:
        self._text = text
        self._assigns = assigns
        self._at = 0
        self._line = 1
        self._variables: dict[str, list[str]] = {}

    def commands(self) -> list[Command]:
        done: list[Command] = []
        command: Command = []
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in _ENDS:
                done.append(command)
                command = []
                self._step()
            elif here.isspace() or self._text.startswith("\\\n", self._at):
                self._step(2 if here == "\\" else 1)
            elif here == "#":
                self._comment()
            elif redirection := _REDIRECTION.match(self._text, self._at):
                self._step(len(redirection[0]))
                self._blanks()
                self._word()  # the file, or the end mark of a here-document
            else:
                command += self._words(command)
        return [c for c in [*done, command] if c]

    def _words(self, before: Command) -> Command:
        """The next word; none for an assignment, several for an array."""
        line, start = self._line, self._at
        text, quoted = self._word()
        if self._at == start:
            self._step()  # a bracket that means nothing here
            return []
        leads = self._assigns and all(w.text == "export" for w in before)
        if (match := _ASSIGNMENT.fullmatch(text)) and leads:
            array = not match[3] and self._text.startswith("(", self._at)
            value = self._array() if array else [self._expanded(match[3])]
            self._variables[match[1]] = [*self._variables.get(match[1], []), *value] if match[2] else value
            return []
        whole = _VARIABLE.fullmatch(text)
        name = (whole[1] or whole[2]) if whole else None
        if name in self._variables and "@" in text:
            return [Word(item, line) for item in self._variables[name]]
        expanded = self._expanded(text) if quoted != "'" else text
        if name in self._variables and not quoted:
            return [Word(item, line) for item in expanded.split()]
        return [Word(expanded, line)]

    def _array(self) -> list[str]:
        self._step()
        items: Command = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            here = self._text[self._at]
            if here.isspace() or self._text.startswith("\\\n", self._at):
                self._step(2 if here == "\\" else 1)
            elif here == "#":
                self._comment()
            else:
                items += self._words([Word("(", self._line)])
        self._step()
        return [item.text for item in items]

    def _word(self) -> tuple[str, str]:
        """The text up to the next blank or end, and the quote it is wrapped in as a whole ("" for none)."""
        parts: list[str] = []
        quotes: set[str] = set()
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in "\"'":
                quotes.add(here)
                parts.append(self._quoted(here))
            elif here == "\\":
                if self._text.startswith("\\\n", self._at):
                    break
                parts.append(self._text[self._at + 1 : self._at + 2])
                self._step(2)
            elif here == "$" and self._text[self._at + 1 : self._at + 2] in ("(", "{"):
                parts.append(self._substitution())
            elif here.isspace() or here in _ENDS or here in "()<>":
                break
            else:
                parts.append(here)
                self._step()
        return "".join(parts), quotes.pop() if len(quotes) == 1 else ""

    def _quoted(self, quote: str) -> str:
        opened = self._line
        self._step()
        parts: list[str] = []
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == quote:
                self._step()
                return "".join(parts)
            if here == "\\" and quote == '"' and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(self._text[self._at + 1].replace("\n", " "))
                self._step(2)
            else:
                parts.append(here)
                self._step()
        raise UnclosedQuote(opened)

    def _substitution(self) -> str:
        """`$(...)` or `${...}` as written, with what is inside."""
        close = {"(": ")", "{": "}"}[self._text[self._at + 1]]
        opening, start, depth = self._text[self._at + 1], self._at, 0
        while self._at < len(self._text):
            depth += (self._text[self._at] == opening) - (self._text[self._at] == close)
            self._step()
            if depth == 0 and self._at > start + 1:
                break
        return self._text[start : self._at]

    def _expanded(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            items = self._variables.get(match[1] or match[2])
            if items is not None:
                return " ".join(items)
            return match[0] if match[3] is None else match[3]

        return _VARIABLE.sub(value, text)

    def _comment(self) -> None:
        while self._at < len(self._text) and self._text[self._at] != "\n":
            self._step()

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._step()

    def _step(self, count: int = 1) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count
