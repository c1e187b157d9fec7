"""The rules of a library: what becomes of each of its settings. `rules/<library>.toml` holds them.

Tables of such a file, each from their keys (`newest|older` spelling; a trailing * is for all that begin so):

    [set]         the same value under a key of ours, or several. theirs: their default, written out where ours differs;
                  words: their word -> ours; least: below it the setting is off; note: how ours differs
    [part]        a key of ours <- the settings that it is derived from, in the library's module
    [holds]       why nothing needs to be written <- settings
    [holds_for]   likewise, for one value; otherwise: why other values have no key
    [unmapped]    why there is no key of ours <- settings
    [flags]       how many words follow a flag: none, two, many; else one

Tables below `mlp` or `causal_lm` hold for jobs whose actor trains that kind of model.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlplace.config.fields import ModelKind
from rlplace.imports.settings import Setting

_FOLDER = Path(__file__).with_name("rules")
_WORDS = {"none": 0, "two": 2, "many": -1}  # after a flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of one setting."""

    action: Literal["set", "part", "holds", "unmapped"]
    keys: tuple[str, ...] = ()  # ours
    why: str = ""
    theirs: object = None  # their default
    words: Mapping[str, object] | None = None
    least: float | None = None
    note: str = ""
    value: object = None  # `why` is for it alone where there is an `otherwise`
    otherwise: str = ""


Table = Mapping[str, Any]  # of a TOML file
Outcome = Literal["equal", "differs", "implied", "unmapped", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MappingResult:
    """What became of one setting of the original.

    equal: it is in our config; differs: likewise, with another meaning; implied: it holds here without being asked for;
    unmapped: a known setting without a key of ours; unknown: no setting that the rules have.
    """

    setting: Setting
    outcome: Outcome
    text: str  # "actor.optimizer.lr: 5.0e-07", or why not, or the nearest known name


class Rules:
    """The rules of one library by key. Groups hold for all keys that begin alike, the longest first."""

    def __init__(self, name: str, tables: Sequence[Table]) -> None:
        self.name = name
        self.rules: dict[str, Rule] = {}
        self.spellings: dict[str, str] = {}  # older -> newest
        groups: dict[str, Rule] = {}
        for written, rule in (found for table in tables for found in _rules(table)):
            key, *older = written.split("|")
            self.spellings |= dict.fromkeys(older, key)
            if key.endswith("*"):
                groups[key[:-1]] = rule
            else:
                self.rules[key] = rule
        self.groups = dict(sorted(groups.items(), key=lambda item: -len(item[0])))
        self.words_after = {key: _WORDS[word] for word, keys in tables[0].get("flags", {}).items() for key in keys}

    def find(self, key: str) -> Rule | None:
        if key in self.rules:
            return self.rules[key]
        return next((rule for prefix, rule in self.groups.items() if key.startswith(prefix)), None)


@functools.cache
def read_rules(library: str, kind: ModelKind = "causal_lm") -> Rules:
    """The rules of a library for jobs whose actor trains that kind of model."""
    tables = tomllib.loads((_FOLDER / f"{library}.toml").read_text(encoding="utf-8"))
    return Rules(tables["name"], [tables, tables.get(kind, {})])


def _rules(tables: Table) -> Iterator[tuple[str, Rule]]:
    """Written key and rule of every entry."""
    for key, entry in tables.get("set", {}).items():
        options = dict(entry) if isinstance(entry, Mapping) else {"to": entry}
        to = options.pop("to")
        yield key, Rule(action="set", keys=(to,) if isinstance(to, str) else tuple(to), **options)
    for key, entry in tables.get("holds_for", {}).items():
        yield key, Rule(action="holds", **entry)
    for part, keys in tables.get("part", {}).items():
        yield from ((key, Rule(action="part", keys=(part,))) for key in keys)
    for why, keys in tables.get("holds", {}).items():
        yield from ((key, Rule(action="holds", why=why)) for key in keys)
    for why, keys in tables.get("unmapped", {}).items():
        yield from ((key, Rule(action="unmapped", why=why)) for key in keys)
