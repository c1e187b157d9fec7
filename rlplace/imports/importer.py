"""Apply the rules: the settings of another library become a config, with a result for each setting.

::

    settings ──> library module (what takes more than one setting: placement, offloads)
             ──> rules (algorithm, KL, models, products of settings; then one setting, one key)
             ──> Imported: config, results, problems of the original, keys that a run still needs
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlplace.checks import partners
from rlplace.codes import config_error, problem
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.fields import Field, JobName, block_in, fields_of
from rlplace.config.keys import PLACEMENT
from rlplace.config.of_job import config_of
from rlplace.config.read import read_config, try_config
from rlplace.config.yaml_text import quote
from rlplace.contract.planning import make_plan
from rlplace.errors import ConfigError, PlacementError, Problem, did_you_mean
from rlplace.imports.rules import Rule, Rules, shape_of
from rlplace.imports.settings import Setting
from rlplace.placement import Plan, Topology, plan_components
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import OPTIONAL, REQUIRED

ROLES = (*REQUIRED, *OPTIONAL)
# Top blocks that are written before all others
_PLACED = ("cluster", *ROLES)
# A number below 1 where whole numbers are due, such as warmup_steps=0.1 of transformers
_A_SHARE = "a share of all steps there: here it is a number, which depends on runner.total_iterations"
Outcome = Literal["equal", "differs", "implied", "unmapped", "unknown"]
# Keys that are written before the components placed on them
_MACHINES = (
    "num_nodes",
    "accelerators_per_node",
)
# Algorithm of rlplace -> estimators of other libraries with the same advantages
_ESTIMATORS = {
    "ppo": ("gae", "ppo"),
    "grpo": ("grpo", "group_norm"),
    "dr_grpo": ("dr_grpo",),
    "rloo": ("rloo",),
    "reinforce_pp": ("reinforce", "reinforce++", "reinforce_plus_plus"),
    "reinforce_pp_baseline": (
        "reinforce_baseline",
        "reinforce++_baseline",
        "reinforce_plus_plus_baseline",
    ),
}
# Lower clip distance for an algorithm of another library without a lower bound of the ratio
NO_LOWER_BOUND = 0.99
_OF_VALUES = {"algorithm.gamma", "algorithm.gae_lambda", "algorithm.value_clip"}
_KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MappingResult:
    """The result of the import for one setting of the original config.

    `outcome` is one of these words. "equal": the converted config has the setting, with the same meaning. "differs":
    the converted config has the setting, with another meaning. "implied": rlplace always does what the setting asks
    for. "unmapped": the setting is known, but rlplace has no key for it. "unknown": the setting is not known. `text`:
    the key and value in the converted config, or the reason why there is none.
    """

    setting: Setting
    outcome: Outcome
    text: str  # such as "actor.optimizer.lr: 5.0e-07"; or why there is no key; or the nearest known name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The kind of job that a config of another library is converted to.

    `tags`: config block -> keys that are always written in it. `whole`: whether all of the config is planned, such as
    batch sizes; False: only the placement.
    """

    job: JobName
    # Config blocks of this job, with the keys that are always written
    tags: Mapping[str, Mapping[str, object]]
    # Whether the plan covers everything, such as batch sizes; otherwise only the placement is planned
    whole: bool


LANGUAGE_MODEL = Target(
    job="language_model",
    tags={"actor.model": {"kind": "causal_lm"}},
    whole=True,
)
SIMULATOR = Target(job="simulator", tags={}, whole=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    library: str
    config: Mapping[str, object]  # only keys of rlplace
    target: Target
    results: tuple[MappingResult, ...]  # one for each original setting, in its order
    # problems of the original, and what is not supported here
    findings: tuple[Problem, ...]
    # (text, reason) for values that no setting asked for
    assumed: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]  # keys that a run still needs
    topology: Topology
    # None if the placement is invalid; `findings` gives the reasons
    layout: Plan | None
    # How launch scripts were read, in lines of text
    notes: tuple[str, ...] = ()


class Draft:
    """A config under construction. It also records what became of each setting, and the problems found so far."""

    def __init__(
        self,
        settings: Sequence[Setting],
        rules: Rules,
        target: Target = LANGUAGE_MODEL,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.target = target
        self.config: dict[str, object] = {}
        # The last value of a key counts, as on a command line.
        self.given = {s.key: s for s in settings}
        self.findings: list[Problem] = []
        self.assumed: list[tuple[str, str]] = []
        # Settings to which the rules do not apply: outcome, and an explanation or the keys of rlplace
        self._decided: dict[str, tuple[Outcome, str | tuple[str, ...]]] = {}
        # Values that cannot be read
        self._wrong: dict[str, Problem] = {}

    # ── what the original has ────────────────────────────────────────────────────────────────────────────────────────

    def value(self, key: str, default: object = None) -> object:
        if key in self.given:
            return self.given[key].value
        return default

    def has(self, key: str) -> bool:
        """Return whether the original config has a setting, with a value that is neither false nor empty."""
        return bool(self.value(key))

    def count(self, key: str, default: int, least: int = 0) -> int:
        """Return the value of a setting that must be a whole number of at least `least`; `default` if it is not given.

        For any other value, record a problem and return `default`.
        """
        value = self.value(key, default)
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and (key not in self.given or value >= least)
        ):
            return value
        if value is not None:
            self.refuse(key, "whole-number", least=least)
        return default

    def number(self, key: str, default: float) -> float:
        value = self.value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if value is not None:
            self.refuse(key, "number")
        return default

    def refuse(self, key: str, error: str, **facts: Any) -> None:
        """Record a problem: the value of the setting `key` cannot be used.

        `error`: name of the problem's text. `facts`: values to be filled into the text. The method `results` raises all
        these problems together.
        """
        setting = self.given[key]
        reason = "known"
        way = None
        if isinstance(setting.value, str) and "$" in setting.value:
            reason = "variable"
            name = re.search(r"\$\{?([A-Za-z_]\w*)", setting.value)
            if name is not None:
                way = f"--variable {name[1]}=<its value>, behind the script"
        self._wrong[key] = problem(
            "import-value",
            key,
            str(setting),
            error=error,
            source=setting.source,
            reasons=[reason],
            way=way,
            **facts,
        )

    def find(
        self,
        code: str,
        *keys: str,
        error: str = "",
        settings: Mapping[str, object] | None = None,
        **facts: Any,
    ) -> None:
        """Record a problem of the settings `keys` of the original config.

        `code`: code of the problem. `error`: name of the problem's text, for a code with several. `settings`: setting
        -> better value, which the text suggests. `facts`: further values for the text.
        """
        words = []
        for key, value in (settings or {}).items():
            if self.rules.words_after:
                words.append(f"--{key} {value}")
            else:
                words.append(f"{key}={value}")
        got = (
            " ".join(
                str(s)
                for s in self.settings
                if s.key in keys and self.given[s.key] is s
            )
            or None
        )
        source = self.given[keys[0]].source if keys[0] in self.given else None
        found = problem(
            code,
            keys[0],
            got,
            error=error,
            source=source,
            words=" ".join(words),
            **facts,
        )
        self.findings.append(found)

    # ── what becomes of it ───────────────────────────────────────────────────────────────────────────────────────────

    def assume(self, text: str, why: str) -> None:
        """Record a value that the converted config has although no setting asks for it.

        `text`: key and value. `why`: the reason for the value.
        """
        # Two settings may name the same model
        if (text, why) not in self.assumed:
            self.assumed.append((text, why))

    def leave_uncorrected(self) -> None:
        self.set("algorithm.tis_cap", None)
        self.assume(
            "algorithm.tis_cap: null",
            "the engine's rounding is not corrected there unless it is asked for",
        )

    def without_references(self, value: object, key: str) -> object:
        """Return a text or list of texts in which each `${NAME}` is written `$NAME`.

        In the converted config, `${NAME}` would be a reference to another key. If a variable is left, a run needs its
        value, which is reported. `key`: the setting that has the value.
        """
        if isinstance(value, list):
            return [self.without_references(item, key) for item in value]
        if not isinstance(value, str) or "$" not in value:
            return value
        text = re.sub(r"\$\{(\w+)\}", r"$\1", value)
        for name in dict.fromkeys(re.findall(r"\$\w+", text)):
            self.assume(
                name,
                f"a variable that is set nowhere: {key} has it; write it before a run",
            )
        return text

    def set(self, key: str, value: object) -> None:
        assert self.has_key(PLACEMENT if key.startswith(f"{PLACEMENT}.") else key), (
            f"{key}: no such key"
        )
        *blocks, leaf = key.split(".", 2)
        block = self.config
        for name in blocks:
            below = block.setdefault(name, {})
            assert isinstance(below, dict), key
            block = below
        block[leaf] = value

    def unset(self, key: str) -> None:
        block = self.at(key.rpartition(".")[0])
        if isinstance(block, dict):
            block.pop(key.rpartition(".")[2], None)

    def at(self, key: str) -> object:
        """Return the value that a key has so far in the converted config; None if the key is not written.

        The third part of the key may contain dots, as in cluster.component_placement.reward.math.
        """
        value: object = self.config
        for name in key.split(".", 2):
            if not isinstance(value, Mapping) or name not in value:
                return None
            value = value[name]
        return value

    def derive(self, ours: str, value: object, *keys: str) -> None:
        """Write a key of the converted config whose value was computed from the settings `keys`.

        `ours`: the key. If none of the settings is given, `value` comes from their defaults. It is then written only if
        it differs from the default of rlplace.
        """
        given = any(key in self.given for key in keys)
        if given or value != self.default_of(ours):
            self.set(ours, value)
            for key in keys:
                self.becomes(key, ours)
            if not given:
                self.assume(
                    f"{ours}: {quote(value)}",
                    f"by the defaults of {' and '.join(keys)} there",
                )

    def becomes(self, key: str, *ours: str) -> None:
        """Record that the setting `key` of the original becomes the keys or blocks `ours` of the converted config.

        The keys or blocks may be written later.
        """
        self._decided[key] = ("equal", ours)

    def unmapped(self, why: str, *keys: str) -> None:
        self._decided |= dict.fromkeys(keys, ("unmapped", why))

    def implied(self, why: str, *keys: str) -> None:
        """Record that the settings `keys` ask for what rlplace always does. `why`: what that is, in words."""
        self._decided |= dict.fromkeys(keys, ("implied", why))

    # ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def placed(self) -> tuple[str, ...]:
        """The names of the components that are placed so far."""
        block = self.at(PLACEMENT)
        if isinstance(block, Mapping):
            return tuple(n.strip() for leaf in block for n in str(leaf).split(","))
        return ()

    def has_key(self, key: str) -> bool:
        """Return whether configs of rlplace have a key or block with the dotted name `key`."""
        return self._field(key) is not None

    def default_of(self, key: str) -> object:
        """Return the default that a key of rlplace has in this kind of job; None if it has no default."""
        found = self._field(key)
        assert found is not None, key
        default = found[0].metadata.get(self.target.job, found[0].default)
        if default is dataclasses.MISSING:
            return None
        return default

    def _field(self, key: str) -> Field | None:
        block: type | None = config_of(self.target.job)
        found: Field | None = None
        for name in key.split("."):
            found = None
            if block is not None:
                found = fields_of(block, self.target.job).get(name)
            block = block_in(found[1]) if found is not None else None
        return found

    def _used(self, key: str) -> bool:
        block = key.partition(".")[0]
        return self.has_key(key) and (
            block not in ROLES or block in map(role_of, self.placed)
        )

    # ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply_rules(self) -> None:
        """Write all keys of the converted config whose values follow from the rules of the library.

        Keys of settings that are not given are written, too, if the other library's default differs from rlplace's
        default.
        """
        if self.rules.algorithm is not None:
            self._set_algorithm(*self.rules.algorithm)
        for ours in ("actor.model", "reward.model", "critic.model"):
            if keys := [
                key for key, rule in self.rules.rules.items() if rule.keys == (ours,)
            ]:
                self.set_model(ours, *keys)
        self._set_kl()
        for ours, product in self.rules.products.items():
            total = math.prod(
                self.count(key, usual, 1) for key, usual in product.of.items()
            )
            parts = math.prod(
                self.count(key, usual, 1) for key, usual in product.over.items()
            )
            if total and parts:
                self.derive(
                    ours,
                    total // parts if product.round == "down" else -(-total // parts),
                    product.maps,
                )
        for key, rule in self.rules.rules.items():
            if key in self._decided or rule.action != "set":
                continue
            value = self.value(key, rule.theirs)
            number = value if isinstance(value, int | float) else None
            below = (
                rule.least is not None and number is not None and number < rule.least
            )
            above = rule.most is not None and number is not None and number > rule.most
            if rule.least == 1 and number is not None and 0 < number < 1:
                self.unmapped(_A_SHARE, key)
            elif below or above:
                self.implied("off, as it is here unless it is asked for", key)
            elif targets := [target for target in rule.keys if self._used(target)]:
                self._apply(key, rule, targets, value)

    def _set_algorithm(self, key: str, usual: str) -> None:
        """Write the name of the algorithm. For an unknown estimator, write ppo if there is a critic, else grpo.

        `key`: setting that names the advantage estimator. `usual`: default of this setting.
        """
        critic = "critic" in self.placed
        estimator = self.value(key, usual or ("gae" if critic else "grpo"))
        name = next(
            (ours for ours, theirs in _ESTIMATORS.items() if estimator in theirs), None
        )
        name = None if name == "ppo" and not critic else name
        self.set("algorithm.name", name or ("ppo" if critic else "grpo"))
        if not critic:
            of_values = [
                k
                for k, rule in self.rules.rules.items()
                if rule.action == "set" and _OF_VALUES & {*rule.keys}
            ]
            self.implied("there is no critic", *of_values)
        if name is None:
            known = ", ".join(
                name for theirs in _ESTIMATORS.values() for name in theirs
            )
            self.unmapped(
                f"no algorithm here learns from {estimator} with these components; there are {known}",
                key,
            )
            return
        self.becomes(key, "algorithm.name")
        if key not in self.given and name != "ppo":
            self.assume(f"algorithm.name: {name}", f"by the default of {key} there")

    def set_model(self, ours: str, *keys: str) -> None:
        """Write a model: its path, and the keys of its config.json if the model's name is known.

        `ours`: key of the converted config, such as actor.model. `keys`: settings that may name the model; the first
        one that is given is used.
        """
        key = next((key for key in keys if key in self.given), keys[0])
        name = self.value(key)
        if not isinstance(name, str) or ours.partition(".")[0] not in self.placed:
            return
        # A local folder has a config.json, which the plan reads itself.
        folder = os.path.isfile(Path(name) / "config.json")
        shape = {} if folder else shape_of(name)
        if shape is not None:
            self.set(ours, {"path": name, **shape})
        if shape:
            self.assume(
                f"{ours}: keys of config.json",
                f"by its name, {name}; path must become a folder before a run",
            )
        if key == keys[0] and shape is not None:
            self.becomes(key, f"{ours}.path")
        elif key == keys[0]:
            self.unmapped(
                f"no model of a known name: write {ours}: {{path: <its folder>}}, or config.json's keys",
                key,
            )

    def _set_kl(self) -> None:
        """Write place, weight and estimator of the KL term. They come from the first KL rule that is switched on."""
        kl = next(
            (kl for kl in self.rules.kl if self.value(kl.when or kl.switch, kl.on)),
            None,
        )
        if kl is None or "reference" not in self.placed:
            return
        self.derive("algorithm.kl_in", kl.place, kl.switch)
        self.derive("algorithm.kl_coef", self.number(kl.weight, kl.coef), kl.weight)
        word = self.value(kl.estimator, kl.usual)
        if isinstance(word, str) and word in _KL_ESTIMATORS:
            self.derive("algorithm.kl_estimator", _KL_ESTIMATORS[word], kl.estimator)
        elif kl.estimator in self.given:
            known = ", ".join(_KL_ESTIMATORS)
            self.unmapped(
                f"algorithm.kl_estimator has no word for it; there are words for {known}",
                kl.estimator,
            )

    def _apply(
        self, key: str, rule: Rule, targets: Sequence[str], value: object
    ) -> None:
        given = key in self.given
        if value is None:
            return
        if given and isinstance(value, str) and "${" in value:
            self.unmapped(
                f"what it refers to is not among what was given; {targets[0]} keeps its default",
                key,
            )
            return
        if rule.words is not None:
            if quote(value) not in rule.words:
                ours = quote(self.default_of(targets[0]))
                known = ", ".join(rule.words)
                if given:
                    self.unmapped(
                        f"{targets[0]} has no word for {quote(value)}; there are words for {known}",
                        key,
                    )
                else:
                    why = f"our default; that of {key} there, {quote(value)}, has no word here"
                    self.assume(f"{targets[0]}: {ours}", why)
                return
            value = rule.words[quote(value)]
        for target in targets:
            if given or (self.at(target) is None and value != self.default_of(target)):
                self.set(target, value)
                if not given:
                    self.assume(
                        f"{target}: {quote(value)}", f"the default of {key} there"
                    )
        if given:
            self._decided[key] = ("differs" if rule.note else "equal", tuple(targets))

    # ── the results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def results(self) -> tuple[MappingResult, ...]:
        """Return what became of each setting, in the order of the original config.

        Raises ConfigError for values that cannot be used.
        """
        if self._wrong:
            raise ConfigError([*self._wrong.values()])
        return tuple(
            MappingResult(setting=s, outcome=o, text=t)
            for s in self.settings
            for o, t in [self._result(s)]
        )

    def _result(self, setting: Setting) -> tuple[Outcome, str]:
        key = setting.key
        if self.given[key] is not setting:
            return "unmapped", "written again further on; the last one holds"
        if key in self._decided:
            outcome, text = self._decided[key]
            if isinstance(text, str):
                return (outcome, text)
            return self._complete(key, outcome, text)
        if key.startswith("$"):
            return "unmapped", "filled in by the shell when the script runs"
        rule = self.rules.find(key)
        near = self._misspelt(key)
        if near or rule is None:
            return "unknown", near or did_you_mean(
                key, [*self.rules.rules, *self.rules.spellings]
            ) or ""
        match rule.action:
            case "part":
                return self._complete(key, "equal", rule.keys)
            case "holds" if not rule.otherwise or setting.value == rule.value:
                return "implied", rule.why
            case "set" if not any(map(self.has_key, rule.keys)):
                return "unmapped", f"no key {rule.keys[0]} in such a job"
            case "set" if not any(map(self._used, rule.keys)):
                blocks = " and no ".join(
                    dict.fromkeys(target.partition(".")[0] for target in rule.keys)
                )
                return "unmapped", f"the job has no {blocks}"
            case "set":
                return "unmapped", f"has no value: {rule.keys[0]} keeps its default"
        return "unmapped", rule.otherwise or rule.why

    def _misspelt(self, key: str) -> str | None:
        """Return the known setting that `key` probably misspells; None if there is none.

        The known setting is in the same block and is not given itself.
        """
        block, _, leaf = key.rpartition(".")
        if key in self.rules.rules or not block:
            return None
        beside = {
            k.rpartition(".")[2]: k
            for k in self.rules.rules
            if k.rpartition(".")[0] == block
        }
        near = difflib.get_close_matches(
            leaf,
            [n for n, k in beside.items() if k not in self.given],
            n=1,
            cutoff=0.85,
        )
        if near:
            return beside[near[0]]
        return None

    def _complete(
        self, key: str, outcome: Outcome, ours: Sequence[str]
    ) -> tuple[Outcome, str]:
        """Return the outcome of a setting that becomes the keys `ours`, and a text with the values of these keys.

        The outcome is "unmapped" if none of the keys was written; else it is `outcome`.
        """
        values = {name: self.at(name) for name in ours}
        if all(value is None for value in values.values()):
            return (
                "unmapped",
                f"not enough to decide {ours[0]}, which keeps its default",
            )
        bare = {
            name for name, value in values.items() if value is None or name == PLACEMENT
        }
        text = ", ".join(
            name if name in bare else f"{name}: {quote(value)}"
            for name, value in values.items()
        )
        rule = self.rules.find(key)
        return outcome, text + (
            f"; {rule.note}" if rule is not None and outcome == "differs" else ""
        )


def finish(draft: Draft, topology: Topology, offload: Mapping[str, bool]) -> Imported:
    """Return the result of an import, from a draft whose placement is complete.

    `topology`: the machines. `offload`: component -> whether the component leaves its accelerators in the original
    library. Components that stay on accelerators of other components are written into `cluster.allow_resident`. Raises
    ConfigError for values of the original that cannot be used, or if nothing is placed.
    """
    for component, leaves in offload.items():
        key = f"{role_of(component)}.enable_offload"
        if leaves and draft.has_key(key):
            draft.set(key, True)
    for key, tags in draft.target.tags.items():
        written = draft.at(key)
        draft.set(key, {**tags, **(written if isinstance(written, dict) else {})})
    results = draft.results()
    if not draft.at(PLACEMENT):
        raise config_error("import-empty", PLACEMENT, library=draft.rules.name)
    layout, problems = _lay_out(draft, topology, offload)
    if staying := [
        p.key.removesuffix(".enable_offload")
        for p in problems
        if p.code == "residents-clash"
    ]:
        draft.set("cluster.allow_resident", staying)
        draft.assume(
            f"cluster.allow_resident: {quote(staying)}",
            "they stay on accelerators that others use, as in the original",
        )
        layout, problems = _lay_out(draft, topology, offload)
    config, wrong = try_config(draft.config)
    missing = [p.key for p in wrong if p.code == "missing-key"] + list(
        config.missing if config is not None else ()
    )
    return Imported(
        library=draft.rules.name,
        config=ordered(draft.config, draft.target.job),
        target=draft.target,
        results=results,
        findings=(
            *draft.findings,
            *problems,
            *(p for p in wrong if p.code != "missing-key"),
        ),
        assumed=tuple(draft.assumed),
        missing=tuple(dict.fromkeys(missing)),
        topology=topology,
        layout=layout,
    )


def ordered(
    mapping: Mapping[str, object], job: JobName, root: type | None = None
) -> dict[str, object]:
    """Return a config or block with its keys in the usual order of rlplace's configs.

    `job`: the kind of job that the config is for. `root`: the dataclass whose fields are the keys of the mapping;
    None: that of the whole config.
    """
    fields = sorted(
        fields_of(root or config_of(job), job).items(),
        key=lambda item: (item[0] not in _MACHINES, item[0] not in _PLACED),
    )
    found: dict[str, object] = {}
    for name, (_, hint) in fields:
        if name in mapping:
            value = mapping[name]
            block = block_in(hint)
            found[name] = (
                ordered(value, job, block)
                if block is not None and isinstance(value, Mapping)
                else value
            )
    return found


def _lay_out(
    draft: Draft, topology: Topology, offload: Mapping[str, bool]
) -> tuple[Plan | None, Sequence[Problem]]:
    """Return the plan of a draft and its problems. The plan is None if the placement is wrong.

    If only other parts of the config are wrong, the plan is made from the placement alone. `offload`: component ->
    whether it leaves its accelerators.
    """
    problems: Sequence[Problem] = ()
    if draft.target.whole:
        try:
            return make_plan(read_config(draft.config), topology), ()
        except PlacementError as error:
            problems = error.problems
        except ConfigError:
            # Reported with the other unusable values
            pass
    written: Any = draft.config["cluster"]
    cluster = ClusterConfig(
        component_placement=written["component_placement"],
        node_groups=tuple(written.get("node_groups", ())),
        allow_resident=tuple(written.get("allow_resident", ())),
    )
    try:
        leaving = [component for component, leaves in offload.items() if leaves]
        plan = plan_components(
            cluster, topology, offload=leaving, rules=partners.OF_BLOCK
        )
        return plan, problems
    except (PlacementError, ConfigError) as error:
        return None, problems or error.problems
