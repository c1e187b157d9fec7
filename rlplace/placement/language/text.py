"""Values of the config with their places, so that a problem can mark a column and offer a line to paste."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.other_names import NO_SUCH, PLACEMENT_KEYS, SPLITS
from rlplace.config.yaml_text import quote, show
from rlplace.errors import Problem, Source, did_you_mean, source_of, suggestion

PATH = "cluster.component_placement"
LONGEST = 160  # characters of a text that an error repeats; around the mistake where there are more
MOST_MISTAKES = 8  # reported for one value; further ones usually repeat the first
MOST_COUNTED = 10**6  # processes, accelerators; a larger count is a typing mistake
_ONE_LINE = str.maketrans("\n\r\t", "   ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A value of the config with key path and one-line text. `reject` adds to `problems`, one list for a reading."""

    key: str  # key path
    leaf: str  # the last key verbatim, such as "actor,rollout"
    value: object
    text: str
    # First column, column after the last, and value of each list item; one for a plain value.
    items: tuple[tuple[int, int, object], ...]
    sources: Mapping[str, Source] = dataclasses.field(repr=False)
    problems: list[Problem] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        value: object,
        key: str,
        leaf: str,
        sources: Mapping[str, Source],
        problems: list[Problem],
    ) -> Text:
        """Write `value` on one line; nothing is read yet."""
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            text, items = _written_list(value)
        else:
            text = show(value).translate(_ONE_LINE).strip()
            items = [(0, len(text), value)]
        return cls(
            key=key,
            leaf=leaf,
            value=value,
            text=text,
            items=tuple(items),
            sources=sources,
            problems=problems,
        )

    def child(self, leaf: str | int, value: object = None) -> Text:
        """Return the value of a key of this block, `value` where it has no such key; or an item of this list."""
        if isinstance(leaf, int):
            assert isinstance(self.value, Sequence)
            key = f"{self.key}[{leaf}]"
            item = self.value[leaf]
            return Text.of(item, key, "-", self.sources, self.problems)
        if isinstance(self.value, Mapping):
            value = dict(self.entries()).get(leaf, value)
        return Text.of(value, f"{self.key}.{leaf}", leaf, self.sources, self.problems)

    def entries(self) -> list[tuple[str, object]]:
        """Return the keys of this block, as text, with their values."""
        assert isinstance(self.value, Mapping)
        return [(str(key), value) for key, value in self.value.items()]

    def blocks(self, code: str, why: str, example: object) -> list[Text]:
        """Return the blocks of a list, or the one block that stands for such a list; reject other values."""
        texts = [self]
        if self.value is None:
            texts = []
        elif isinstance(self.value, Sequence) and not isinstance(self.value, str):
            texts = [self.child(i) for i in range(len(self.value))]
        blocks = []
        for text in texts:
            if isinstance(text.value, Mapping):
                blocks.append(text)
            else:
                text.reject(code, "expected a block of keys", why, text.line(example))
        return blocks

    @property
    def source(self) -> Source | None:
        return source_of(self.key, self.sources)

    def reject(
        self,
        code: str,
        what: str,
        why: str,
        fix: str | None = None,
        *,
        span: tuple[int, int] | None = None,
        got: str | None = None,
    ) -> None:
        """Record a problem of the columns `span`, or of the whole value.

        fix: a whole line. got: in place of the value as it was written.
        """
        same_key = [problem for problem in self.problems if problem.key == self.key]
        if len(same_key) >= MOST_MISTAKES:
            return
        if got is None:
            got = self.text
        at = span or (0, len(got))
        if len(got) > LONGEST:
            got, at = _near(got, at)
        problem = Problem(
            code=code,
            key=self.key,
            what=what,
            got=got,
            span=at,
            source=self.source,
            why=why,
            fix=fix,
        )
        self.problems.append(problem)

    def line(self, value: object, remark: str = "") -> str:
        """Write the line to paste instead: `actor: 0-7`. A remark follows in parentheses."""
        line = self._lead + quote(value)
        if remark:
            line += f"        ({remark})"
        return line

    def open_line(self, what: str = "numbers, such as 0-3, or all") -> str:
        """Write the line with a description of the value, where the value that is meant is not known."""
        return f"{self._lead}<{what}>"

    @property
    def _lead(self) -> str:
        if self.leaf == "-":
            return "- "
        return f"{quote(self.leaf)}: "

    def with_parts(self, *parts: tuple[tuple[int, int], str]) -> str:
        """Write the line with other text in some columns, which ascend; of a very long line, only the changes."""
        if len(self.text) > LONGEST:
            changes = []
            for (start, stop), new in parts:
                changes.append(f"write {new} instead of {self.text[start:stop]}")
            return "; ".join(changes)
        text = self.text
        for (start, stop), new in reversed(parts):
            text = text[:start] + new + text[stop:]
        is_list = isinstance(self.value, Sequence) and not isinstance(self.value, str)
        if is_list:
            return self._lead + text
        return self.line(text)

    def joined(
        self, known: Collection[str], *, lists: bool = False
    ) -> dict[str, object]:
        """Return the keys and values of this block, and reject `{placement: 0-3,5-7}`, whose parts are joined again.

        YAML reads it as {placement: 0-3, 5-7: null}. `lists`: keys may be lists of names, which it splits as well.
        """
        assert isinstance(self.value, Mapping)
        whole: dict[str, object] = {}
        # Parts of a value that became keys
        extra: list[str] = []
        last = ""
        for key, given in self.entries():
            continues = last == "node_group" or re.fullmatch(r"[0-9][0-9 :-]*|all", key)
            before = whole.get(last)
            is_part = given is None and key not in known and continues
            if is_part and isinstance(before, str | int):
                extra.append(key)
                whole[last] = f"{before},{key}"
            else:
                last = key
                whole[key] = given
        if extra:
            self._reject_split(whole, extra, lists)
        return whole

    def _reject_split(
        self, whole: Mapping[str, object], extra: Sequence[str], lists: bool
    ) -> None:
        """Reject a block whose values YAML has cut at their commas."""
        assert isinstance(self.value, Mapping)
        keys = ", ".join(extra)
        what = f"YAML ends a value at the comma, so that {keys} became a key"
        why = "inside braces, commas separate entries; a value with a comma is quoted there"
        # A part such as 4:7 has become the number 247.
        remarks = []
        for key in self.value:
            if isinstance(key, int) and key >= 60:
                a, b = divmod(key, 60)
                remarks.append(
                    f"or {a}:{b} instead of {key}: YAML takes it for base 60"
                )
        meant = whole
        if lists:
            meant = _with_lists(whole)
        fix = self.line(meant, ", ".join(remarks))
        self.reject("comma-in-braces", what, why, fix)

    def check_keys(self, known: Collection[str]) -> None:
        """Reject unknown keys."""
        assert isinstance(self.value, Mapping)
        left = [key for key in known if key not in self.value]
        for key in self.joined(known):
            if key in known:
                continue
            # A name of another library, else a near one that is not given yet.
            near: str | None = PLACEMENT_KEYS.get(key)
            if near not in left:
                near = did_you_mean(key, left)
            text = self.child(key)
            shown = quote(text.value).translate(_ONE_LINE)
            what = "unknown key" + suggestion(near)
            why = f"known keys here: {', '.join(known)}"
            if re.split("_", key)[0] in SPLITS:
                why = f"{NO_SUCH}; {why}"
            fix = f"one of the known keys in place of {key}"
            if near:
                fix = f"{near}: {shown}"
            span = (0, max(1, len(key)))
            text.reject("unknown-key", what, why, fix, span=span, got=f"{key}: {shown}")

    def has_no_ranks(self, why: str) -> bool:
        """Reject ranks after a colon, which a segment may have elsewhere."""
        at = self.text.find(":")
        if at < 0:
            return True
        what = "ranks are not given here"
        unquoted = re.sub(r'[\[\]"]', "", self.text)
        fix = self.line(re.sub(r":[^,]*", "", unquoted))
        self.reject("bad-placement", what, why, fix, span=(at, at + 1))
        return False

    def count(self) -> int | None:
        """Read a whole number from 1 to MOST_COUNTED; None where a problem was recorded."""
        value = self.value
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and isinstance(value, int) and 1 <= value <= MOST_COUNTED:
            return value
        what = "expected a whole number of at least 1"
        why = "it counts things"
        if isinstance(value, int) and value > MOST_COUNTED:
            what = "too many"
            why = f"more than {MOST_COUNTED:,} are taken for a typing mistake"
        fix = self.open_line("a number")
        if isinstance(value, str):
            meant = re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", value)
            if meant is not None:
                fix = self.line(int(value))
        self.reject("bad-count", what, why, fix)
        return None


def _written_list(
    value: Sequence[object],
) -> tuple[str, list[tuple[int, int, object]]]:
    """Write a list on one line; return it with the columns and value of each item."""
    text = "["
    items: list[tuple[int, int, object]] = []
    for item in value:
        if items:
            text += ", "
        shown = quote(item).translate(_ONE_LINE)
        start = len(text)
        text += shown
        stop = len(text)
        if isinstance(item, str) and shown[:1] == '"':
            # The columns are those of the letters, without the quotes.
            start += 1
            stop -= 1
        items.append((start, stop, item))
    return f"{text}]", items


def _near(got: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """Cut a long text around `span`; return it with the columns of the span in it."""
    start, stop = span
    cut = max(0, start - LONGEST // 2)
    end = min(len(got), cut + LONGEST)
    shown = got[cut:end]
    shift = -cut
    if cut > 0:
        shown = f"... {shown}"
        shift += len("... ")
    if end < len(got):
        shown = f"{shown} ..."
    return shown, (start + shift, min(stop, end) + shift)


def _with_lists(block: Mapping[str, object]) -> dict[str, object]:
    """Join keys without a value to the next one: {actor: null, env: 0-3} was {actor,env: 0-3}."""
    found: dict[str, object] = {}
    names: list[str] = []
    for key, value in block.items():
        names.append(key)
        if value is not None:
            found[",".join(names)] = value
            names = []
    return found | dict.fromkeys(names)
