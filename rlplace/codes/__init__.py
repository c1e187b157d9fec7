"""Error codes: for each its explanation, and the texts of its errors.

A file `<when>.toml` has the codes that occur at one time. A code has a table:

::

    [uneven-envs]
    means = "what the code says of any job"
    example = "a config, or a value, that causes it"
    advice = "what to do"
    what = "{envs} environments do not divide over {ranks} env ranks"
    why = "each rank holds equally many"
    fix = "total_num_envs: {above}"

`what`, `why` and `fix` are templates of the error form. The check that finds the error gives the values of the names in
braces. A code with several errors has a table for each: `[uneven-envs.<name>]`. A code that occurs at two times has a
table in two files, whose explanations are shown one after the other. Errors that several codes have are in a
table `[shared.<group>.<name>]`, and each of these codes has `groups = ["<group>"]`.

`why` may be a table of reasons, by name. The check says which of them hold; each is a line of the error. A reason that
holds several times has facts of its own each time (`Reason`). A code that has `why` and no `what` has it for all of its
errors. A text that is one name in braces is left out if its value is None.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlplace.errors import ConfigError, Problem, Source

# Files of codes, in the order of a run.
_FILES = (
    "options",
    "reading",
    "planning",
    "running",
    "saving",
    "trained_policy",
    "text_tasks",
    "imports",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The texts of one error. They are templates: names in braces are replaced by values (facts).

    `what`: what is wrong. `why`: the rule that is broken, or reason -> its text. `fix`: lines that the user can paste.
    """

    what: str
    why: str | Mapping[str, str] | None = None
    fix: str | None = None


class Reason(NamedTuple):
    """A reason that holds for an error: its name in the table `why`, and the values that its text needs."""

    name: str
    facts: Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One error code: its explanation and the texts of its errors. Its name never changes.

    `when`: the phase of the program in which it can occur, in words. `means`, `example`, `advice`: its meaning, a
    config or value that causes it, and what to do. `texts`: name of an error -> its texts; the name is "" if there is
    only one. `earlier`: the same code in an earlier phase; None: it occurs in one phase only.
    """

    name: str
    when: str  # the time at which it can occur, in words
    means: str
    example: str
    advice: str
    # Name of an error -> its templates. A code with one error has it under "".
    texts: Mapping[str, Texts]
    # What the code means at an earlier time, if it occurs at two
    earlier: Code | None = None

    def render(self) -> str:
        """Return the explanation of the code as text: its name, then the lines "means", "example", "fix" and "met".

        A code that can occur in two phases of the program, such as planning and running, has these four lines for each
        phase.
        """
        lines = [self.name]
        for code in (self.earlier, self):
            if code is None:
                continue
            rows = (
                ("means", code.means),
                ("example", code.example),
                ("fix", code.advice),
                ("met", code.when),
            )
            for label, text in rows:
                lines.append(f"    {label + ':':<9} {text}")
        return "\n".join(lines)


@functools.cache
def codes() -> Mapping[str, Code]:
    """Return name -> code for all codes. Their files are read on the first call."""
    files = [_tables(file) for file in _FILES]
    # Errors that several codes have, by group
    shared: dict[str, Any] = {}
    for tables in files:
        shared |= tables.pop("shared", {})
    found: dict[str, Code] = {}
    for tables in files:
        when = tables.pop("when")
        for name, table in tables.items():
            for group in table.get("groups", ()):
                table = {**shared[group], **table}
            code = _code(name, when, table)
            earlier = found.get(name)
            if earlier is not None:
                texts = {**earlier.texts, **code.texts}
                code = dataclasses.replace(code, texts=texts, earlier=earlier)
            found[name] = code
    return found


def _tables(file: str) -> dict[str, Any]:
    """Return the tables in a file of codes. `file`: its name without ".toml"."""
    path = Path(__file__).with_name(f"{file}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _code(name: str, when: str, table: Mapping[str, Any]) -> Code:
    """Return the code `name` from its table. `when`: the phase of the program in which it can occur."""
    texts: dict[str, Texts] = {}
    alike: dict[str, Any] = {}
    if "what" in table:
        texts[""] = _texts(table)
    elif "why" in table:
        alike = {"why": table["why"]}
    for error, entry in table.items():
        if isinstance(entry, dict) and error != "why":
            texts[error] = _texts({**alike, **entry})
    return Code(
        name=name,
        when=when,
        means=table["means"],
        example=table["example"],
        advice=table["advice"],
        texts=texts,
    )


def _texts(table: Mapping[str, Any]) -> Texts:
    return Texts(what=table["what"], why=table.get("why"), fix=table.get("fix"))


def problem(
    code: str,
    key: str,
    got: str | None = None,
    *,
    error: str = "",
    span: tuple[int, int] | None = None,
    source: Source | None = None,
    reasons: Iterable[str | Reason] = (),
    **facts: object,
) -> Problem:
    """Return a problem with the texts of an error code.

    `key`: the key path in the config. `got`: the wrong value. `span`: (first column, end column) of the wrong part of
    `got`. `source`: file and line of the value. `error`: the name of the error, for a code that has several. `reasons`:
    the reasons that hold, if `why` is a table of reasons. `facts`: the values that replace the names in the texts.
    Raises KeyError for a code, an error, a reason or a fact that is missing.
    """
    texts = codes()[code].texts[error]
    why: str | None
    if isinstance(texts.why, Mapping):
        lines = [_line(texts.why, reason, facts) for reason in reasons]
        why = "\n".join(lines)
    else:
        why = _filled(texts.why, facts)
    return Problem(
        code=code,
        key=key,
        what=texts.what.format(**facts),
        got=got,
        span=span,
        source=source,
        why=why,
        fix=_filled(texts.fix, facts),
    )


def config_error(
    code: str,
    key: str,
    got: str | None = None,
    *,
    error: str = "",
    span: tuple[int, int] | None = None,
    source: Source | None = None,
    reasons: Iterable[str | Reason] = (),
    **facts: object,
) -> ConfigError:
    """Return a ConfigError with one problem. The arguments are those of `problem`."""
    found = problem(
        code,
        key,
        got,
        error=error,
        span=span,
        source=source,
        reasons=reasons,
        **facts,
    )
    return ConfigError([found])


def _line(
    table: Mapping[str, str], reason: str | Reason, facts: Mapping[str, object]
) -> str:
    """Return the text of a reason that holds.

    `table`: name of a reason -> its text, with names in braces. `facts`: the values that replace these names.
    """
    if isinstance(reason, Reason):
        return table[reason.name].format(**facts, **reason.facts)
    return table[reason].format(**facts)


def _filled(template: str | None, facts: Mapping[str, object]) -> str | None:
    """Return a template (a text with names in braces) with the names replaced by their values, `facts`.

    Return None if `template` is None, or if it is a single name whose value is None.
    """
    if template is None:
        return None
    alone = re.fullmatch(r"{(\w+)}", template)
    if alone and facts[alone[1]] is None:
        return None
    return template.format(**facts)
