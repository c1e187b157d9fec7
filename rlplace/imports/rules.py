"""The rules of a library say what becomes of each of its settings. `rules/<library>.toml` has them.

In the tables of such a file, a setting is written as `newest spelling|older spelling`; a trailing * stands for all
settings that begin so. "Key" is a key of rlplace::

    algorithm     the setting that names the advantage estimator, and its default; "": gae beside a critic, else grpo
    kl            one entry for each place of the KL term; the first whose setting `when` (else `switch`) is on counts
    [product]     key = product of the settings in `of`, divided by those in `over`; beside each setting its default;
                  0: without the setting there is no product
    [set]         setting = key, or several keys, with the same value. theirs: default of the library, written out
                  where that of rlplace differs; words: word of the library -> word of rlplace; least, most: below or
                  above it, the setting is off; note: how the meaning differs
    [part]        key = settings from which the library's module derives it; of a model, the setting with its name
    [holds]       reason = settings for which nothing needs to be written
    [holds_for]   the same, for one value of a setting; otherwise: why other values have no key
    [unmapped]    reason = settings that have no key
    [flags]       none, two, many, optional = flags that so many words follow (optional: one or none); one word
                  follows any other flag

Tables below `simulator` or `language_model` hold for that job alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlplace.config.fields import JobName
from rlplace.imports.settings import MANY, OPTIONAL, read_mapping

_RULES = Path(__file__).with_name("rules")
_MODELS = Path(__file__).parents[1] / "configs" / "model"
_WORDS = {
    "none": 0,
    "two": 2,
    "many": MANY,
    "optional": OPTIONAL,
}  # number of words after a flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule for one setting of another library: what becomes of it.

    `action`: "set": written as `keys` of rlplace; "part": one of several settings that give `keys`; "holds": nothing
    needs to be written; "unmapped": there is no key. `why`: the reason, in words. `theirs`: default in the other
    library. `words`: value in the other library -> value in rlplace. `least`, `most`: below or above it, the setting is
    off. `note`: how the meaning differs. `value`, `otherwise`: if `otherwise` is given, `why` is the reason for the
    value `value` alone, and `otherwise` for all other values.
    """

    action: Literal["set", "part", "holds", "unmapped"]
    keys: tuple[str, ...] = ()  # our keys
    why: str = ""
    theirs: object = None  # default in the other library
    words: Mapping[str, object] | None = None
    least: float | None = None
    most: float | None = None
    note: str = ""
    value: object = None  # if `otherwise` is given, `why` is for this value alone
    otherwise: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KlRule:
    """One place where a library may add a KL term, with the settings that control the term.

    `switch`: setting that puts the term into this place. `when`: setting that turns the term on; "": `switch` does.
    `on`: whether it is on by default. `weight`, `coef`: setting of the weight, and its default. `estimator`, `usual`:
    setting of the estimator, and its default.
    """

    place: Literal["loss", "reward"]
    switch: str
    # the setting that turns the term on, if it is not `switch`
    when: str = ""
    on: bool = False  # default of the switch
    weight: str
    coef: float  # default of `weight`
    estimator: str
    usual: str  # default of `estimator`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A rule for a key of rlplace whose value is a product of settings, divided by other settings.

    `of`: setting to multiply -> its default. `over`: setting to divide by -> its default. `round`: how a fraction is
    rounded.
    """

    of: Mapping[str, int]
    over: Mapping[str, int] = dataclasses.field(default_factory=dict)
    round: Literal["up", "down"] = "up"

    @property
    def maps(self) -> str:
        """The one setting of the product that is reported as converted to the key.

        All other settings of the product have keys of their own.
        """
        return next(iter(self.over or self.of))


Table = Mapping[str, Any]  # a table of a TOML file


class Rules:
    """The rules of one library: for each setting, what becomes of it.

    The rule of a group applies to all settings that begin with the group's prefix. If several prefixes match, the
    longest one is used.
    """

    def __init__(self, name: str, tables: Sequence[Table]) -> None:
        self.name = name
        # (setting, default)
        self.algorithm: tuple[str, str] | None = None
        self.kl: list[KlRule] = []
        # by our key
        self.products: dict[str, Product] = {}
        self.rules: dict[str, Rule] = {}
        # older spelling -> newest
        self.spellings: dict[str, str] = {}
        groups: dict[str, Rule] = {}
        for table in tables:
            self.algorithm = (
                tuple(table["algorithm"]) if "algorithm" in table else self.algorithm
            )
            self.kl += [KlRule(**entry) for entry in table.get("kl", ())]
            self.products |= {
                ours: Product(**entry)
                for ours, entry in table.get("product", {}).items()
            }
            for written, rule in _rules(table):
                key, *older = written.split("|")
                self.spellings |= dict.fromkeys(older, key)
                if key.endswith("*"):
                    groups[key[:-1]] = rule
                else:
                    self.rules[key] = rule
        self.groups = dict(sorted(groups.items(), key=lambda item: -len(item[0])))
        self.words_after = {
            key: _WORDS[word]
            for word, keys in tables[0].get("flags", {}).items()
            for key in keys
        }
        parts = {product.maps: ours for ours, product in self.products.items()}
        for kl in self.kl:
            parts |= {kl.switch: "algorithm.kl_in", kl.weight: "algorithm.kl_coef"}
            parts |= {kl.estimator: "algorithm.kl_estimator"}
        parts |= {} if self.algorithm is None else {self.algorithm[0]: "algorithm.name"}
        self.rules = {
            key: Rule(action="part", keys=(ours,)) for key, ours in parts.items()
        } | self.rules

    @property
    def read(self) -> frozenset[str]:
        """The settings whose values are used. For any other flag, it is not known how many words follow it."""
        return frozenset(
            {key for key, rule in self.rules.items() if rule.action in ("set", "part")}
            | {*self.words_after}
        )

    def find(self, key: str) -> Rule | None:
        if key in self.rules:
            return self.rules[key]
        return next(
            (rule for prefix, rule in self.groups.items() if key.startswith(prefix)),
            None,
        )


@functools.cache
def read_rules(library: str, job: JobName = "language_model") -> Rules:
    """Return the rules of a library for a job of the kind `job`."""
    tables = tomllib.loads((_RULES / f"{library}.toml").read_text(encoding="utf-8"))
    return Rules(tables["name"], [tables, tables.get(job, {})])


def _rules(tables: Table) -> Iterator[tuple[str, Rule]]:
    """Yield (setting as written in the file, its rule) for each entry of the tables."""
    for key, entry in tables.get("set", {}).items():
        options = dict(entry) if isinstance(entry, Mapping) else {"to": entry}
        to = options.pop("to")
        yield (
            key,
            Rule(
                action="set",
                keys=(to,) if isinstance(to, str) else tuple(to),
                **options,
            ),
        )
    for key, entry in tables.get("holds_for", {}).items():
        yield key, Rule(action="holds", **entry)
    for part, keys in tables.get("part", {}).items():
        yield from ((key, Rule(action="part", keys=(part,))) for key in keys)
    for action in ("holds", "unmapped"):
        for why, keys in tables.get(action, {}).items():
            yield from ((key, Rule(action=action, why=why)) for key in keys)


def shape_of(name: str) -> Mapping[str, object] | None:
    """Return the config.json keys of a model by its published name, such as `org/Llama-3-8b-sft`.

    Return None if no model of such a name is known.
    """
    shapes: dict[str, Any] = tomllib.loads(
        (_RULES / "models.toml").read_text(encoding="utf-8")
    )
    found = next(
        (
            shape
            for pattern, shape in shapes.items()
            if re.search(pattern, name.lower())
        ),
        None,
    )
    if isinstance(found, str):
        return {
            key: value
            for key, value in shipped_model(found).items()
            if key not in ("kind", "path")
        }
    return found


def shipped_model(file: str) -> dict[str, Any]:
    """Return the content of a model file in configs/model. `file`: its name without the ending."""
    return read_mapping((_MODELS / f"{file}.yaml").read_text(encoding="utf-8"))
