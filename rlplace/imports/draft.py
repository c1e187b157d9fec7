"""A config of ours while it is being worked out from the settings of another library."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from rlplace.config.knob import ModelKind
from rlplace.errors import ConfigError, Problem, did_you_mean
from rlplace.imports.keys import default_of, has_key
from rlplace.imports.rules import (
    Already,
    Became,
    Fate,
    Into,
    Needless,
    No,
    Rulebook,
    To,
    Unknown,
    Unmapped,
    Words,
    keys_of,
)
from rlplace.imports.settings import Setting
from rlplace.imports.yaml_text import flow
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import OPTIONAL, REQUIRED

PLACEMENT = "cluster.component_placement"
_ROLES = (*REQUIRED, *OPTIONAL)


class Draft:
    """Owns the mapping, the fate of each setting, and what was found wrong with the original.

    `kind` is what the actor trains: an MLP on simulators, or a language model.
    """

    def __init__(
        self, library: str, settings: Sequence[Setting], rulebook: Rulebook, kind: ModelKind = "causal_lm"
    ) -> None:
        self.library = library
        self.kind: ModelKind = kind
        self.settings = settings
        self.rulebook = rulebook
        self.config: dict[str, object] = {}
        self.given = {s.key: s for s in settings}  # the last one wins, as on a command line
        self.findings: list[Problem] = []  # what does not hold in the original
        self.assumed: list[tuple[str, str]] = []  # what is written out though nobody wrote it, and why
        self._fates: dict[int, Fate] = {}  # by position in `settings`
        self._settled: set[str] = set()  # keys that rules are not applied to
        self._wrong: list[Problem] = []  # values that cannot be read at all

    def value(self, key: str, default: object = None) -> object:
        return self.given[key].value if key in self.given else default

    def has(self, key: str) -> bool:
        """Whether a switch is on, or a value given that is more than nothing."""
        return bool(self.value(key))

    def count(self, key: str, default: int, least: int = 0) -> int:
        """A whole number of at least `least`; anything else is a problem, and `default` stands in for it."""
        value = self.value(key, default)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.refuse(key, f"expected a whole number of at least {least}", "it counts machines, accelerators or samples")
        return default

    def number(self, key: str, default: float) -> float:
        value = self.value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if value is not None:
            self.refuse(key, "expected a number", "it is one in the original")
        return default

    def refuse(self, key: str, what: str, why: str, fix: str | None = None) -> None:
        """A value that nothing can be made of. Raised with all others by `finish`."""
        setting = self.given[key]
        if not any(p.code == "import-value" and p.source == setting.source and p.key == key for p in self._wrong):
            got = str(setting)
            if isinstance(setting.value, str) and "$" in setting.value:
                why = "a variable or reference that is set nowhere in what was given; write its value"
            problem = Problem(code="import-value", key=key, what=what, got=got, source=setting.source, why=why, fix=fix)
            self._wrong.append(problem)

    def find(self, code: str, key: str, what: str, *, got: str | None = None, why: str, fix: str | None = None) -> None:
        """Something that does not hold in the original."""
        source = self.given[key].source if key in self.given else None
        problem = Problem(code=code, key=key, what=what, got=got, source=source, why=why, fix=fix)
        self.findings.append(problem)

    def assume(self, text: str, why: str) -> None:
        """Something of ours that no setting asks for."""
        self.assumed.append((text, why))

    def set(self, key: str, value: object) -> None:
        """Writes a key that the config must have."""
        assert self.has_key(PLACEMENT if key.startswith(f"{PLACEMENT}.") else key), f"{key}: no such key"
        *blocks, leaf = _split(key)
        block = self.config
        for name in blocks:
            below = block.setdefault(name, {})
            assert isinstance(below, dict), key
            block = below
        block[leaf] = value

    def unset(self, key: str) -> None:
        """Takes a key out again."""
        *blocks, leaf = _split(key)
        block = self.written(".".join(blocks))
        if isinstance(block, dict):
            block.pop(leaf, None)

    def written(self, key: str) -> object:
        """What stands at a key of ours by now."""
        value: object = self.config
        for name in _split(key):
            if not isinstance(value, Mapping) or name not in value:
                return None
            value = value[name]
        return value

    def derive(self, ours: str, value: object, *keys: str) -> None:
        """Writes a key of ours that is worked out from the settings `keys`, their defaults included."""
        self.set(ours, value)
        for key in keys:
            self.becomes(key, ours)
        if not any(key in self.given for key in keys):
            self.assume(f"{ours}: {flow(value)}", f"by the defaults of {' and '.join(keys)} there")

    @property
    def placed(self) -> tuple[str, ...]:
        """The components that have a line by now."""
        block = self.written(PLACEMENT)
        return tuple(n.strip() for leaf in block for n in str(leaf).split(",")) if isinstance(block, Mapping) else ()

    def has_key(self, key: str) -> bool:
        return has_key(key, self.kind)

    def _counts(self, key: str) -> bool:
        block = key.partition(".")[0]
        return self.has_key(key) and (block not in _ROLES or block in map(role_of, self.placed))

    def becomes(self, key: str, *ours: str) -> None:
        """`key` is in our config, at or within `ours`; may be called before they are complete."""
        self._decide(key, lambda s: Became(setting=s, keys=ours, text=""))

    def unmapped(self, key: str, why: str) -> None:
        self._decide(key, lambda s: Unmapped(setting=s, why=why))

    def needless(self, key: str, why: str) -> None:
        """What `key` asks for holds anyway; its rule is not applied."""
        self._settled.add(key)
        self._decide(key, lambda s: Needless(setting=s, why=why))

    def _decide(self, key: str, fate: Callable[[Setting], Fate]) -> None:
        for i, setting in enumerate(self.settings):
            if setting.key == key:
                self._fates[i] = fate(setting)

    def apply_rules(self) -> None:
        """Keys that go over one by one, and the defaults of the other library where they are not ours."""
        for key, rule in self.rulebook.rules.items():
            if key in self._settled:
                continue
            if isinstance(rule, To | Words) and (targets := [t for t in keys_of(rule) if self._counts(t)]):
                self._apply(key, rule, targets)

    def _apply(self, key: str, rule: To | Words, targets: Sequence[str]) -> None:
        given = key in self.given
        value = self.value(key) if given else rule.default
        if isinstance(rule, Words) and value is not None:
            if value not in rule.words:
                self._no_word(key, rule, targets[0], value)
                return
            value = rule.words[value]
        if value is None:
            return
        for target in targets:
            if given or (self.written(target) is None and value != default_of(target, self.kind)):
                self.set(target, value)
                if not given:
                    self.assume(f"{target}: {flow(value)}", f"the default of {key} there")
        if given:
            self.becomes(key, *targets)

    def _no_word(self, key: str, rule: Words, target: str, value: object) -> None:
        if key in self.given:
            known = ", ".join(map(flow, rule.words))
            self.unmapped(key, f"{target} has no word for {flow(value)}; there are words for {known}")
        else:
            ours = flow(default_of(target, self.kind))
            self.assume(f"{target}: {ours}", f"our default; that of {key} there, {flow(value)}, has no word here")

    def fates(self) -> tuple[Fate, ...]:
        """One per setting, in the order they were written. Raises ConfigError for values that cannot be read."""
        if self._wrong:
            raise ConfigError(self._wrong)
        decided: list[Fate] = []
        for i, setting in enumerate(self.settings):
            fate = self._fates.get(i)
            if self.given[setting.key] is not setting:
                fate = Unmapped(setting=setting, why="written again further on; the last one holds")
            decided.append(self._complete(fate or self._by_rule(setting)))
        return tuple(decided)

    def _by_rule(self, setting: Setting) -> Fate:
        if setting.key.startswith("$"):
            return Unmapped(setting=setting, why="filled in by the shell when the script runs")
        if near := self._misspelt(setting.key):
            return Unknown(setting=setting, near=near)
        match self.rulebook.find(setting.key):
            case None:
                return Unknown(setting=setting, near=did_you_mean(setting.key, self.rulebook.spellings))
            case No(why=why):
                return Unmapped(setting=setting, why=why)
            case Into(part=part):
                return Became(setting=setting, keys=(part,), text="")
            case Already(value=value, why=why, otherwise=otherwise):
                if not otherwise or setting.value == value:
                    return Needless(setting=setting, why=why)
                return Unmapped(setting=setting, why=otherwise)
            case To() | Words() as rule:
                return Unmapped(setting=setting, why=self._why_not(rule))

    def _why_not(self, rule: To | Words) -> str:
        """Why a rule did not apply to a setting that was given."""
        targets = keys_of(rule)
        if not any(map(self.has_key, targets)):
            return f"no key {targets[0]} in such a job yet"
        if not any(map(self._counts, targets)):
            blocks = " and no ".join(dict.fromkeys(target.partition(".")[0] for target in targets))
            return f"the job has no {blocks}"
        return f"says nothing: {targets[0]} keeps its default"

    def _misspelt(self, key: str) -> str | None:
        """The exact key beside this one that it resembles, unless that is written as well."""
        if key in self.rulebook.rules:
            return None
        block, _, leaf = key.rpartition(".")
        beside = {k.rpartition(".")[2]: k for k in self.rulebook.rules if k.rpartition(".")[0] == block}
        near = difflib.get_close_matches(leaf, [n for n, k in beside.items() if k not in self.given], n=1, cutoff=0.85)
        return beside[near[0]] if near and block else None

    def _complete(self, fate: Fate) -> Fate:
        """With the values that our keys have in the end."""
        if not isinstance(fate, Became):
            return fate
        values = {key: self.written(key) for key in fate.keys}
        if all(value is None for value in values.values()):
            return Unmapped(setting=fate.setting, why=f"says too little: {fate.keys[0]} keeps its default")
        texts = [key if value is None or key == PLACEMENT else f"{key}: {flow(value)}" for key, value in values.items()]
        return Became(setting=fate.setting, keys=fate.keys, text=", ".join(texts))


def _split(key: str) -> list[str]:
    """`cluster.component_placement.reward.math` has three parts: names of components may hold a dot."""
    if key.startswith(f"{PLACEMENT}."):
        return [*PLACEMENT.split("."), key.removeprefix(f"{PLACEMENT}.")]
    return key.split(".")
