"""What becomes of one setting of another library: a rule says it beforehand, a fate afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from rlplace.imports.settings import Setting


@dataclasses.dataclass(frozen=True, slots=True)
class To:
    """The same value under a key of ours, or several; where the config has no such key (yet), that is said.

    `default` is what the other library does when nothing is written. It is written out where it differs from ours.
    """

    keys: str | tuple[str, ...]
    default: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Words:
    """A word of theirs for a word of ours; other words have none."""

    keys: str | tuple[str, ...]
    words: Mapping[object, object]
    default: object = None  # theirs


@dataclasses.dataclass(frozen=True, slots=True)
class Into:
    """One of the things that a part of our config is worked out from."""

    part: str


@dataclasses.dataclass(frozen=True, slots=True)
class Already:
    """Nothing to write: it is so here. With `otherwise`, for `value` alone; it is then why others cannot be mapped."""

    why: str
    value: object = None
    otherwise: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class No:
    """Cannot be mapped."""

    why: str


def keys_of(rule: To | Words) -> tuple[str, ...]:
    return (rule.keys,) if isinstance(rule.keys, str) else rule.keys


Rule = To | Words | Into | Already | No


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """The setting is in our config, at `keys` or within what stands there."""

    setting: Setting
    keys: tuple[str, ...]
    text: str  # "actor.optimizer.lr: 5.0e-07"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needless:
    """What the setting asks for holds here without being asked for."""

    setting: Setting
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmapped:
    """A known setting that our config cannot say."""

    setting: Setting
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A setting that this importer does not know of."""

    setting: Setting
    near: str | None  # what may have been meant


Fate = Became | Needless | Unmapped | Unknown


class Rulebook:
    """The rules of one library by exact key; `groups` say it for all keys that begin alike, the longest first.

    `spellings` are names beside the keys, for "did you mean".
    """

    def __init__(
        self, rules: Mapping[str, Rule], groups: Mapping[str, Rule] | None = None, spellings: Iterable[str] = ()
    ) -> None:
        self.rules = rules
        self.spellings = (*rules, *spellings)
        self.groups = dict(sorted((groups or {}).items(), key=lambda item: -len(item[0])))

    def find(self, key: str) -> Rule | None:
        if key in self.rules:
            return self.rules[key]
        return next((rule for prefix, rule in self.groups.items() if key.startswith(prefix)), None)
