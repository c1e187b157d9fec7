"""Read a shell command or launch script: the words that follow its Python entry point, each with its line.

Nothing is run. One pass over the text replaces variables (`NAME=value`, arrays, `$NAME`, `${NAME:-default}`), removes
comments and redirections, and marks where commands end; `shlex` splits each command. A variable that is never set and
`$(...)` stay as written, in one word; `$((...))` of whole numbers is computed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.imports.branches import Branch, choose_branches

_END = "\x1e"  # marks the end of a command
_NEWLINE = "\x1f"  # marks a newline in a variable's value, which does not end a line of the text
_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_QUOTED = rf"'[^']*'|\"(?:\\.|{_SUBSTITUTION}|[^\"\\])*+\""
_NAME = r"[A-Za-z_]\w*"
_REFERENCE = rf"\$(?:{_NAME}|\{{(?:{_NAME}|[0-9])(?:\[[@*]\])?(?::?[-=](?:[^{{}}]|\$\{{[^{{}}]*\}})*)?\}})"
_ARRAY = rf"\((?:{_QUOTED}|{_SUBSTITUTION}|(?<!\S)#[^\n]*|\\.|[^()'\"\\])*+\)"
_WORD = rf"(?:{_QUOTED}|{_SUBSTITUTION}|\\.|[^\s;|&()<>'\"\\])*+"
_ASSIGNMENT = rf"{_NAME}\+?=(?:{_ARRAY}|{_WORD})(?![^\s;|&])"
_TOKENS = (
    rf"(?P<continued>\\\n)|(?P<escaped>\\.|\\\Z)|(?P<comment>(?<![^\s;|&()])#[^\n]*)"
    rf"|(?P<quoted>{_QUOTED})|(?P<open>['\"])|(?P<substitution>{_SUBSTITUTION})|(?P<reference>{_REFERENCE})"
    rf"|(?P<redirection>(?:(?<!\S)[0-9&])?(?:<<<|<<-?|>>|[<>]&|[<>])[ \t]*{_WORD})"
    r"|(?P<end>[\n;|&])|(?P<dropped>[()\x1e\x1f])"
)
_TYPED = re.compile(_TOKENS, re.DOTALL)
_SCRIPT = re.compile(
    rf"(?P<assigned>(?:\A|[\n;&|])[ \t]*(?:(?:export|local|declare)[ \t]+)?(?:{_ASSIGNMENT}[ \t]*)+)|{_TOKENS}",
    re.DOTALL,
)
_PARTS = re.compile(
    rf"(?P<name>{_NAME})(?P<more>\+?)=(?P<value>{_ARRAY}|{_WORD})", re.DOTALL
)
_REFERRED = re.compile(
    rf"\$\{{?({_NAME}|[0-9])(?:\[[@*]\])?(?::?([-=])(.*))?\}}?", re.DOTALL
)
_OPTION = re.compile(r"--|[+~]*[\w.@/]+=")
_PROGRAM = re.compile(r"(?:\$\(.*\)|[\w./${}-])+\.py", re.DOTALL)
_IN_QUOTES = re.compile(
    rf"\\(?P<escaped>[$`])|\\.|{_SUBSTITUTION}|(?P<reference>{_REFERENCE})", re.DOTALL
)
_UNSPLIT = re.compile(rf"(?:{_SUBSTITUTION}|\S)+")
_COMMAND_IN_PROSE = re.compile(
    r"^[ \t]*(?:accelerate|python3?|uv|trl|torchrun)[ \t](?:[^\n]*\\\n)*[^\n]*",
    re.MULTILINE,
)
# A variable that is set nowhere, and the values of the arguments of a script
_UNSET = re.compile(rf"\$(?:{_NAME}|\{{{_NAME}\}}|[0-9@*]|\{{[0-9@*]\}})")
_NAMED = re.compile(rf"\$?\{{?({_NAME})\}}?")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _number(node: ast.expr) -> int:
    """Return the value of an arithmetic expression of whole numbers.

    Raises ValueError for any other expression.
    """
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError(ast.dump(node))


class UnclosedQuote(ValueError):
    """Error: a quote that begins in line `line` is never closed."""

    def __init__(self, line: int) -> None:
        super().__init__(f"it opens in line {line}")
        self.line = line


class Word(NamedTuple):
    text: str
    line: int  # 1-based


def entry_words(
    text: str, *, script: bool = True, variables: Mapping[str, str] | None = None
) -> list[Word]:
    """Return the words after the name of the Python script or module in a shell text, each with its line.

    If there are several commands, the one with the most options is used. `script`: True: `name=value` in front of a
    command sets a variable, as in a script; False: it is an ordinary word. `variables`: variables that are set before
    the text begins. Raises UnclosedQuote.
    """
    given = variables or {}
    if script:
        text, _ = taken_branches(text, given)
    commands = [
        nested
        for command in _commands(text, script, given)
        for nested in _unpacked(command)
    ]
    if not commands:
        return []
    command = max(
        commands,
        key=lambda command: sum(bool(_OPTION.match(word.text)) for word in command),
    )
    texts = [word.text.replace("\\\n", " ").replace(_NEWLINE, "\n") for word in command]
    return [
        Word(text, word.line)
        for text, word in list(zip(texts, command, strict=True))[_entry(command) :]
    ]


def taken_branches(text: str, variables: Mapping[str, str]) -> tuple[str, list[Branch]]:
    """Return a script with one branch of each `if` and `case`, and what was chosen.

    `variables`: variables that are set before the script begins.
    """

    def expand(before: str, part: str) -> str | None:
        values = _Variables(variables)
        try:
            values.expand(before, _SCRIPT)
            words = shlex.split(values.expand(part).replace(_END, " "))
        except ValueError:
            return None
        found = _UNSET.sub("", " ".join(words))
        if "$" in found or "`" in found:
            return None
        return found

    return choose_branches(text, expand)


def launch_words(program: str, words: Sequence[str]) -> list[str]:
    """Return the words after the name of the Python script or module in a command whose words are known.

    `program`: the first word of the command. If a quoted word contains a command, as in `bash -c "..."`, and the inner
    command has more options, the inner command is read instead of the outer command.
    """
    text = shlex.join([program, *words])
    return [word.text for word in entry_words(text, script=False)]


def command_words(text: str) -> list[str]:
    """Return the words of the command with the most options in a prose text, such as a docstring; empty without one.

    A command begins a line with the name of a program that starts Python, and goes on while lines end in `\\`.
    """
    found: list[list[str]] = []
    for match in _COMMAND_IN_PROSE.finditer(text):
        try:
            commands = _commands(match[0], True, {})
        except UnclosedQuote:
            continue
        found += [[word.text for word in command] for command in commands]
    launches = [c for c in found if any(_PROGRAM.fullmatch(word) for word in c)]
    return max(launches, key=options_in, default=[])


def options_in(words: Sequence[str]) -> int:
    """Return how many words of a command are options, `--name` or `name=value`."""
    return sum(bool(_OPTION.match(word)) for word in words)


def _unpacked(command: list[Word]) -> Iterator[list[Word]]:
    """Yield the command, and the commands that are within its quoted words, as in `bash -c "..."`."""
    yield command
    for word in command:
        if re.search(r"\s--\w", word.text):
            for inner in _commands(word.text, True, {}):
                yield [Word(w.text, w.line + word.line - 1) for w in inner]


def _entry(command: list[Word]) -> int:
    """Return the index of the first word after the name of the Python script or module.

    If the command names no script or module, return the index of its first option.
    """
    for i in range(len(command) - 1, -1, -1):
        before = command[i - 1].text if i else ""
        value = before.startswith("--") and before != "--"
        if before in ("-m", "--module") or (
            _PROGRAM.fullmatch(command[i].text) and not value
        ):
            return i + 1
    return next(
        (i for i, w in enumerate(command) if w.text.startswith("-") or "=" in w.text),
        len(command),
    )


def _commands(
    text: str, assigns: bool, variables: Mapping[str, str]
) -> list[list[Word]]:
    """Return the commands of a shell text, each as a list of words.

    `assigns`: whether `name=value` in front of a command sets a variable; if not, it is an ordinary word. `variables`:
    variables that are set before the text begins.
    """
    commands: list[list[Word]] = []
    line = 1
    tokens = _SCRIPT if assigns else _TYPED
    for part in _Variables(variables).expand(text, tokens).split(_END):
        lexer = shlex.shlex(part, posix=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        # A blank precedes every newline between words, so that `lineno` is that of the word's last line.
        commands.append(
            [Word(word, line + lexer.lineno - 1 - word.count("\n")) for word in lexer]
        )
        line += part.count("\n")
    return [command for command in commands if command]


class _Variables:
    """Holds the variables of a shell text, and replaces them by their values. An array stands for several words."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._values: dict[str, list[str]] = {
            name: [value] for name, value in variables.items()
        }

    def expand(self, text: str, tokens: re.Pattern[str] = _TYPED) -> str:
        """Return a shell text with variables replaced, comments removed, and `_END` between commands, ready for shlex.

        The result has as many newlines as `text`. `tokens`: the regular expression that finds what to replace.
        """

        def replaced_end(sign: str) -> str:
            return (" \n" if sign == "\n" else " ") + _END

        def replaced(match: re.Match[str]) -> str:
            whole = match[0]
            match match.lastgroup:
                case "assigned":
                    self._assign(whole)
                    end = replaced_end(whole[0]) if whole[0] in "\n;&|" else ""
                    return end + " \n" * whole.count("\n", len(end) > 0)
                case "end":
                    return replaced_end(whole)
                case "continued":
                    return " \n"
                case "comment" | "redirection" | "dropped":
                    return " " + "\n" * whole.count("\n")
                case "quoted" if whole[0] == '"':
                    return self._in_quotes(whole)
                case "open":
                    raise UnclosedQuote(1 + text.count("\n", 0, match.start()))
                case "substitution":
                    return shlex.quote(self._computed(whole))
                case "reference":
                    words = self._referred(whole)
                    split = (
                        [whole]
                        if words is None
                        else words
                        if "[" in whole
                        else _UNSPLIT.findall(" ".join(words))
                    )
                    return " ".join(map(shlex.quote, split))
                case _:
                    if whole == "\\":
                        return ""
                    return whole

        return tokens.sub(replaced, text)

    def _in_quotes(self, whole: str) -> str:
        """Return a text in double quotes with its variables replaced.

        If the text is only an array, `"${NAME[@]}"`, the result is several words.
        """
        if (
            re.fullmatch(r'"\$\{\w+\[@\]\}"', whole)
            and (words := self._referred(whole[1:-1])) is not None
        ):
            return " ".join(map(shlex.quote, words))

        def replaced(match: re.Match[str]) -> str:
            if match["escaped"]:
                return match["escaped"]
            if match[0].startswith("$(("):
                return self._computed(match[0])
            words = self._referred(match[0]) if match["reference"] else None
            if words is None:
                return match[0]
            return re.sub(r'(["\\])', r"\\\1", " ".join(words))

        return _IN_QUOTES.sub(replaced, whole)

    def _computed(self, substitution: str) -> str:
        """Return the number for which `$((...))` stands. Return any other substitution unchanged."""
        if not (substitution.startswith("$((") and substitution.endswith("))")):
            return substitution
        text = _NAMED.sub(
            lambda name: "".join(self._values.get(name[1], [name[0]])),
            substitution[3:-2],
        )
        try:
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return substitution

    def _referred(self, reference: str) -> list[str] | None:
        """Return the words of the variable in a reference, `$NAME` or `${NAME:-default}`, or else of its default.

        Return None if the variable is not set and there is no default.
        """
        found = _REFERRED.fullmatch(reference)
        assert found is not None, reference
        name = found[1]
        default = found[3]
        if name in self._values or default is None:
            words = self._values.get(name)
        else:
            words = self._words(default.removesuffix("}"))
            if found[2] == "=" and words is not None:
                self._values[name] = [" ".join(words)]
        return words and [word.replace("\n", _NEWLINE) for word in words]

    def _assign(self, text: str) -> None:
        for part in _PARTS.finditer(text):
            name = part["name"]
            array = part["value"].startswith("(")
            words = self._words(part["value"][1:-1] if array else part["value"])
            if words is None:
                continue
            before = self._values.get(name, []) if part["more"] else []
            self._values[name] = (
                [*before, *words] if array else ["".join(before) + " ".join(words)]
            )

    def _words(self, text: str) -> list[str] | None:
        """Return the words of a variable's value; None if the value has a quote that is not closed."""
        try:
            return shlex.split(self.expand(text).replace(_END, " "))
        except ValueError:
            return None
