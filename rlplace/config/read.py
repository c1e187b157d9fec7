"""Turn a plain mapping into the config, collecting every problem instead of stopping at the first.

The field's type is its rule: `int`, `float`, `bool`, `str`, `Literal`, `X | None`, `tuple[X, ...]`, nested dataclasses,
`Mapping[str, dataclass]` (blocks by name) and `Mapping[str, object]` (kept verbatim). `knob.knob` lists the rules that
narrow it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence

from rlplace.config.keys import block_in, fields_of
from rlplace.config.kinds import find_kind
from rlplace.config.knob import ModelKind
from rlplace.config.renamed import replace_renamed
from rlplace.config.schema import Config
from rlplace.config.show import show
from rlplace.errors import ConfigError, Problem, Source, did_you_mean

_T = typing.TypeVar("_T")
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


class _Missing:
    """Marks a value that was rejected; its problem is already recorded."""


_REJECTED = _Missing()


def read_config(mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None) -> Config:
    """The config of a plain nested mapping (no OmegaConf types).

    `sources` maps key paths to where their values were written. Raises ConfigError with all problems at once.
    """
    config, problems = try_config(mapping, sources)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def try_config(
    mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> tuple[Config | None, list[Problem]]:
    """The config, None where it cannot be read, and every problem of the mapping."""
    reader = Reader(sources=sources or {})
    mapping = replace_renamed(mapping, reader.reject)
    reader.kind, mapping = find_kind(mapping, reader.reject)
    config = reader.read(Config, mapping)
    if config is not None and config.runs:
        for key, (why, fix) in config.missing.items():
            if not key.startswith("cluster."):  # the plan reports it with all else that is wrong there
                reader.reject("missing-key", key, "is required in a run", why=why, fix=fix)
    return config, reader.problems


@dataclasses.dataclass(slots=True)
class Reader:
    """Collects problems while it reads one config. Owns nothing but its list."""

    sources: Mapping[str, Source]  # key path -> where its value stands
    kind: ModelKind = "mlp"  # of the actor's model
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def reject(
        self,
        code: str,
        key: str,
        what: str,
        value: object = _REJECTED,
        *,
        why: str | None = None,
        fix: str | None = None,
    ) -> _Missing:
        got = None if value is _REJECTED else show(value)
        self.problems.append(Problem(code=code, key=key, what=what, got=got, source=self.source(key), why=why, fix=fix))
        return _REJECTED

    def source(self, key: str) -> Source | None:
        """Where `key`, or the nearest key above it, was written."""
        while key:
            if key in self.sources:
                return self.sources[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return None

    def read(self, kind: type[_T], mapping: object, path: str = "") -> _T | None:
        """An instance of the dataclass `kind`, or None when a problem was recorded below `path`."""
        before = len(self.problems)
        value = self._dataclass(kind, mapping, path)
        return None if len(self.problems) > before else typing.cast(_T, value)

    def _dataclass(self, kind: type, mapping: object, path: str) -> object:
        where = path or "config"
        if not isinstance(mapping, Mapping):
            return self.reject("wrong-type", where, "expected a block of keys", mapping, fix=_example(kind, where))
        fields, others = fields_of(kind, self.kind), {f.name: f for f in dataclasses.fields(kind)}
        prefix = f"{path}." if path else ""
        for key in mapping:
            if key not in others:
                self._unknown(str(key), fields, prefix, mapping[key])
            elif key not in fields:
                self._of_other_kind(f"{prefix}{key}", mapping[key], others[key])
        values: dict[str, object] = {}
        for name, (field, hint) in fields.items():
            key = prefix + name
            if name in mapping:
                values[name] = self._value(hint, mapping[name], key, _rules(field))
            elif self.kind == "mlp" and "mlp" in field.metadata:
                values[name] = field.metadata["mlp"]
            elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
                values[name] = self._dataclass(hint, {}, key)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.reject("missing-key", key, "is required", _REJECTED, why=field.metadata.get("doc"))
                values[name] = _REJECTED
        if any(v is _REJECTED for v in values.values()):
            return _REJECTED
        return kind(**values)

    def _of_other_kind(self, key: str, value: object, field: dataclasses.Field[object]) -> None:
        only = field.metadata["only"]
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            default = dataclasses.asdict(default)
        if value == default:
            return  # changes nothing
        why = f"only with actor.model.kind: {only}; this job has {self.kind}"
        self.reject("wrong-kind", key, f"is no key of a job with {self.kind}", value, why=why, fix=f"remove {key}")

    def _unknown(self, key: str, fields: Mapping[str, object], prefix: str, value: object) -> None:
        near = did_you_mean(key, fields)
        known = ", ".join(fields)
        self.problems.append(
            Problem(
                code="unknown-key",
                key=prefix + key,
                what="unknown key" + (f", did you mean {near!r}?" if near else ""),
                got=f"{key}: {show(value)}",
                span=(0, len(key)),
                source=self.source(prefix + key),
                why=f"known keys here: {known}",
                fix=f"{near}: {show(value)}" if near else f"remove {key}",
            )
        )

    def _value(self, hint: object, value: object, key: str, rules: Mapping[str, object]) -> object:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            if value is None and type(None) in args:
                return None
            options = [a for a in args if a is not type(None)]
            literals = [a for a in options if typing.get_origin(a) is typing.Literal]
            if any(value in typing.get_args(a) for a in literals):
                return value
            if literals and isinstance(value, str) and str not in options:
                return self._word_or(options, value, key)
            named = [a for a in options if typing.get_origin(a) is Mapping]
            if named and _has_names(block_in(hint), value):
                return self._value(named[0], value, key, rules)
            return self._value(next(a for a in options if a not in literals), value, key, rules)
        if origin is typing.Literal:
            return self._choice(args, value, key)
        if origin is tuple:
            if not isinstance(value, Sequence) or isinstance(value, str):
                return self.reject("wrong-type", key, "expected a list", value, fix=f"{_leaf(key)}: [{show(value)}]")
            items = tuple(self._value(args[0], v, f"{key}[{i}]", rules) for i, v in enumerate(value))
            return _REJECTED if any(i is _REJECTED for i in items) else items
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                return self.reject("wrong-type", key, "expected a block of keys", value)
            blocks = isinstance(args[1], type) and dataclasses.is_dataclass(args[1])
            return self._named_blocks(args[1], value, key) if blocks else value
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._dataclass(hint, value, key)
        return self._scalar(hint, value, key, rules)

    def _named_blocks(self, kind: type, value: Mapping[object, object], key: str) -> object:
        fields = {f.name for f in dataclasses.fields(kind)}
        names = [str(name) for name, block in value.items() if isinstance(block, Mapping)]
        blocks: dict[str, object] = {}
        for name, block in value.items():
            if name in fields and names and not isinstance(block, Mapping):
                what, why = "stands beside blocks under names", f"there is a block for each of {', '.join(names)}"
                fix = f"{names[0]}: {{{name}: {show(block)}}}        (in each block that it is meant for)"
                blocks[str(name)] = self.reject("wrong-type", f"{key}.{name}", what, block, why=why, fix=fix)
            else:
                blocks[str(name)] = self._dataclass(kind, block, f"{key}.{name}")
        return _REJECTED if any(b is _REJECTED for b in blocks.values()) else blocks

    def _word_or(self, options: Sequence[object], value: str, key: str) -> object:
        """A word where a number or one of a few words is expected."""
        words = [word for a in options for word in typing.get_args(a)]
        near = did_you_mean(value, words)
        return self.reject(
            "unknown-choice",
            key,
            "unknown word" + (f", did you mean {near!r}?" if near else ""),
            value,
            why="takes a number or one of: " + ", ".join(words),
            fix=f"{_leaf(key)}: {near or words[0]}",
        )

    def _choice(self, choices: tuple[object, ...], value: object, key: str) -> object:
        if value in choices:
            return value
        near = did_you_mean(str(value), [str(c) for c in choices])
        return self.reject(
            "unknown-choice",
            key,
            "unknown choice" + (f", did you mean {near!r}?" if near else ""),
            value,
            why="choices: " + ", ".join(show(c) for c in choices),
            fix=f"{_leaf(key)}: {near or show(choices[0])}",
        )

    def _scalar(self, hint: object, value: object, key: str, rules: Mapping[str, object]) -> object:
        if rules.get("unit") == "bytes":
            return self._bytes(value, key)
        if hint is str:
            if isinstance(value, str):
                return value
            return self.reject("wrong-type", key, "expected text", value, fix=f'{_leaf(key)}: "{show(value)}"')
        if hint is bool:
            if isinstance(value, bool):
                return value
            return self.reject("wrong-type", key, "expected true or false", value, fix=f"{_leaf(key)}: true")
        if hint is int:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                return self.reject("wrong-type", key, "expected a whole number", value, fix=_usual(key, rules))
            return self._bounded(value, key, rules, value)
        if hint is float:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                fix = _usual(key, rules)
                if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+[eE][-+]?[0-9]+", value):
                    mantissa, exponent = re.split("[eE]", value)
                    fix = f"{_leaf(key)}: {mantissa}.0e{exponent}"  # YAML 1.1 reads 3e-4 as text
                return self.reject("wrong-type", key, "expected a number", value, fix=fix)
            try:
                number = float(value)
            except OverflowError:  # a whole number beyond the range of a float
                number = math.inf
            if not math.isfinite(number):
                return self.reject("out-of-bounds", key, "must be finite", value)
            return self._bounded(number, key, rules, value)
        raise AssertionError(f"{key}: no rule reads the type {hint!r}")

    def _bounded(self, value: float, key: str, rules: Mapping[str, object], written: object) -> object:
        signs = {"minimum": ">=", "above": ">", "maximum": "<=", "below": "<"}
        bounds = {r: typing.cast(float, rules[r]) for r in signs if r in rules}
        ok = {
            "minimum": lambda b: value >= b,
            "above": lambda b: value > b,
            "maximum": lambda b: value <= b,
            "below": lambda b: value < b,
        }
        if all(ok[r](b) for r, b in bounds.items()):
            return value
        rule = " and ".join(f"{signs[r]} {b}" for r, b in bounds.items())
        return self.reject(
            "out-of-bounds", key, f"must be {rule}", written, fix=f"{_leaf(key)}: {_legal(value, rules)}"
        )

    def _bytes(self, value: object, key: str) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        match = _BYTES.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            why = "a size is a whole number of bytes or a number with a unit: KiB, MiB, GiB, TiB (or kB, MB, GB, TB)"
            return self.reject("bad-size", key, "expected a size", value, why=why, fix=f"{_leaf(key)}: 16GiB")
        return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _has_names(kind: type | None, value: object) -> bool:
    """Whether these are blocks of `kind` under names of their own, rather than one such block."""
    if kind is None or not isinstance(value, Mapping):
        return False
    fields = {f.name for f in dataclasses.fields(kind)}
    return any(name not in fields and isinstance(block, Mapping) for name, block in value.items())


def _rules(field: dataclasses.Field[object]) -> Mapping[str, object]:
    """The field's metadata, and its default where that is a number, for fixes to propose."""
    number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
    return {**field.metadata, "usual": field.default} if number else field.metadata


def _usual(key: str, rules: Mapping[str, object]) -> str | None:
    return f"{_leaf(key)}: {show(rules['usual'])}" if "usual" in rules else None


def _legal(value: float, rules: Mapping[str, object]) -> str:
    """The bound that `value` broke; the usual value where the bound itself is not allowed."""
    limits = {
        rule: typing.cast(float, rules[rule]) for rule in ("minimum", "above", "maximum", "below") if rule in rules
    }
    if "minimum" in limits and value < limits["minimum"]:
        return f"{limits['minimum']}"
    if "maximum" in limits and value > limits["maximum"]:
        return f"{limits['maximum']}"
    if "above" in limits and value <= limits["above"]:
        return show(rules.get("usual", f"<a number above {limits['above']}>"))
    return show(rules.get("usual", f"<a number below {limits['below']}>"))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _example(kind: type, where: str) -> str:
    first = dataclasses.fields(kind)[0].name
    return f"{_leaf(where)}: {{{first}: ...}}"
