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
    items: tuple[
        tuple[int, int, object], ...
    ]  # columns and value of each list item; one for a plain value
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
        items: list[tuple[int, int, object]] = []
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            text = "["
            for item in value:
                text += ", " if items else ""
                shown = quote(item).translate(_ONE_LINE)
                quotes = int(isinstance(item, str) and shown[:1] == '"')
                items.append(
                    (len(text) + quotes, len(text) + len(shown) - quotes, item)
                )
                text += shown
            text += "]"
        else:
            text = show(value).translate(_ONE_LINE).strip()
            items.append((0, len(text), value))
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
            return Text.of(
                self.value[leaf],
                f"{self.key}[{leaf}]",
                "-",
                self.sources,
                self.problems,
            )
        if isinstance(self.value, Mapping):
            value = dict(self.entries()).get(leaf, value)
        return Text.of(value, f"{self.key}.{leaf}", leaf, self.sources, self.problems)

    def entries(self) -> list[tuple[str, object]]:
        """Return the keys of this block, as text, with their values."""
        assert isinstance(self.value, Mapping)
        return [(str(key), value) for key, value in self.value.items()]

    def blocks(self, code: str, why: str, example: object) -> list[Text]:
        """Return the blocks of a list, or the one block that stands for such a list; record what is no block."""
        texts = [self] if self.value is not None else []
        if isinstance(self.value, Sequence) and not isinstance(self.value, str):
            texts = [self.child(i) for i in range(len(self.value))]
        for text in (text for text in texts if not isinstance(text.value, Mapping)):
            text.reject(code, "expected a block of keys", why, text.line(example))
        return [text for text in texts if isinstance(text.value, Mapping)]

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
        """Record a problem of the columns `span`, or of the whole value. `fix` is a whole line."""
        if sum(p.key == self.key for p in self.problems) >= MOST_MISTAKES:
            return
        got = self.text if got is None else got
        start, stop = span or (0, len(got))
        if len(got) > LONGEST:  # what is near the span is shown
            cut = max(0, start - LONGEST // 2)
            end = min(len(got), cut + LONGEST)
            shift = (4 if cut else 0) - cut
            got = "... " * (cut > 0) + got[cut:end] + " ..." * (end < len(got))
            start = start + shift
            stop = min(stop, end) + shift
        at = (start, stop)
        source = self.source
        self.problems.append(
            Problem(
                code=code,
                key=self.key,
                what=what,
                got=got,
                span=at,
                source=source,
                why=why,
                fix=fix,
            )
        )

    def line(self, value: object, remark: str = "") -> str:
        """Write the line to paste instead: `actor: 0-7`. A remark follows in parentheses."""
        return self._lead + quote(value) + (f"        ({remark})" if remark else "")

    def open_line(self, what: str = "numbers, such as 0-3, or all") -> str:
        """Write the line with what has to be filled in, where nobody knows what is meant."""
        return f"{self._lead}<{what}>"

    @property
    def _lead(self) -> str:
        if self.leaf == "-":
            return "- "
        return f"{quote(self.leaf)}: "

    def with_parts(self, *parts: tuple[tuple[int, int], str]) -> str:
        """Write the line with other text in some columns, which ascend; of a very long one, what to replace there."""
        if len(self.text) > LONGEST:
            return "; ".join(
                f"write {new} instead of {self.text[start:stop]}"
                for (start, stop), new in parts
            )
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
        extra: list[str] = []
        last = ""
        for key, given in self.entries():
            continues = last == "node_group" or re.fullmatch(r"[0-9][0-9 :-]*|all", key)
            if (
                given is None
                and key not in known
                and continues
                and isinstance(whole.get(last), str | int)
            ):
                extra.append(key)
                whole[last] = f"{whole[last]},{key}"
            else:
                last = key
                whole[key] = given
        if extra:
            what = f"YAML ends a value at the comma, so that {', '.join(extra)} became a key"
            why = "inside braces, commas separate entries; a value with a comma is quoted there"
            numbers = [
                divmod(key, 60)
                for key in self.value
                if isinstance(key, int) and key >= 60
            ]
            remark = ", ".join(
                f"or {a}:{b} instead of {60 * a + b}: YAML takes it for base 60"
                for a, b in numbers
            )
            self.reject(
                "comma-in-braces",
                what,
                why,
                self.line(_with_lists(whole) if lists else whole, remark),
            )
        return whole

    def check_keys(self, known: Collection[str]) -> None:
        """Reject unknown keys."""
        assert isinstance(self.value, Mapping)
        for key in (k for k in self.joined(known) if k not in known):
            left = [k for k in known if k not in self.value]
            near = (
                PLACEMENT_KEYS[key]
                if PLACEMENT_KEYS.get(key) in left
                else did_you_mean(key, left)
            )
            text = self.child(key)
            shown = quote(text.value).translate(_ONE_LINE)
            what = "unknown key" + suggestion(near)
            why = "known keys here: " + ", ".join(known)
            fix = (
                f"{near}: {shown}"
                if near
                else f"one of the known keys in place of {key}"
            )
            why = NO_SUCH + "; " + why if re.split("_", key)[0] in SPLITS else why
            span = (0, max(1, len(key)))
            text.reject("unknown-key", what, why, fix, span=span, got=f"{key}: {shown}")

    def has_no_ranks(self, why: str) -> bool:
        """Reject ranks after a colon, which a segment may have elsewhere."""
        at = self.text.find(":")
        if at >= 0:
            plain = re.sub(r":[^,]*", "", re.sub(r'[\[\]"]', "", self.text))
            self.reject(
                "bad-placement",
                "ranks are not given here",
                why,
                self.line(plain),
                span=(at, at + 1),
            )
        return at < 0

    def count(self) -> int | None:
        """Read a whole number from 1 to MOST_COUNTED."""
        if (
            isinstance(self.value, int)
            and not isinstance(self.value, bool)
            and 1 <= self.value <= MOST_COUNTED
        ):
            return self.value
        what = "expected a whole number of at least 1"
        why = "it counts things"
        if isinstance(self.value, int) and self.value > MOST_COUNTED:
            what = "too many"
            why = f"more than {MOST_COUNTED:,} are taken for a typing mistake"
        meant = isinstance(self.value, str) and re.fullmatch(
            r"\s*0*[1-9][0-9]{0,5}\s*", self.value
        )
        self.reject(
            "bad-count",
            what,
            why,
            self.line(int(str(self.value))) if meant else self.open_line("a number"),
        )
        return None


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
