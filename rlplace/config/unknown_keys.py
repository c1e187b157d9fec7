"""Says what is probably meant by a config key that there is not.

A key may be misspelt, belong to another block, have another library's name, or be something that rlplace does not have.
The first of these readings that fits is told.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlplace.config.fields import (
    Field,
    JobName,
    block_at,
    blocks_in,
    fields_of,
    jobs,
    other_job,
    subject_of,
)
from rlplace.config.found import Found, value_at
from rlplace.config.keys import (
    COMPONENTS,
    PLACEMENT,
    all_places,
    is_place,
    item_blocks,
    places_in,
    places_of,
)
from rlplace.config.likely_names import Known, is_said, likely_names, words_of
from rlplace.config.measures import CONVERTED, Given, converted
from rlplace.config.model_folder import model_folder
from rlplace.config.of_job import config_of
from rlplace.config.other_names import (
    ABSENT,
    BELOW,
    ENV_STEPS,
    KEYS,
    MODEL_NAMES,
    MODEL_SIZES,
    NEEDLESS,
    NO_SUCH,
    OFF_POLICY_KEYS,
    OTHER_MODEL_SIZES,
    PARALLEL,
    PLACEMENT_KEYS,
    SPLITS,
    TENSOR,
    another_measure,
    in_our_words,
    in_several_keys,
    key_of,
    meant_word,
)
from rlplace.config.other_names import COMPONENTS as OTHER_COMPONENTS
from rlplace.config.which_job import MARKED
from rlplace.config.yaml_text import show, torn_number, value_of
from rlplace.errors import COMMAND_LINE, Source, did_you_mean, one_of, suggestion

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Options of other programs that are blocks here -> the key of the block that is meant
_OPTIONS = {
    "cluster": "cluster",
    "env": "env.id",
    "model": "actor.model.path",
    "gpus": "cluster.accelerators_per_node",
    "num_gpus": "cluster.accelerators_per_node",
    "nodes": "cluster.num_nodes",
}
# Names of other programs for the configs that a config extends
_BASES = (
    "base",
    "_base_",
    "base_config",
    "inherit",
    "inherits",
    "inherit_from",
    "extends",
    "parent",
    "include",
    "based_on",
)
# Keys that say where a component is: those of a line of component_placement, and names for them
_OWN_PLACES = ("placement", "accelerators", "same_as")
_PLACES = (
    "placement",
    "component_placement",
    *(name for name, ours in PLACEMENT_KEYS.items() if ours == "accelerators"),
    "accelerators",
)
# In the name of a model: the number of its weights, such as 8b
_SIZE = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])")
# Names of other libraries for the folder of a model
_NAMES_OF_MODELS = tuple(
    theirs
    for theirs, ours in MODEL_NAMES.items()
    if ours == "path" and theirs != "name"
)
# Path of an item of a list
_ITEM = re.compile(r"[\w.]+\[[0-9]+\]")
# Words that mean something else in each block
_GENERIC = ("enable", "enabled", "use", "every", "epochs", "mode", "count", "weight")
# Components whose keys are not meant in the block of another component
_SIDE = {"critic", "reference", "teacher", "reward", "agent"}
# Blocks whose keys are not meant elsewhere
_OF_MACHINES = re.compile(
    r"(?:cluster\.(?:elastic|ray|comm|changes|nodes|node_groups)|serve)\."
)
# Keys that are offered to choose from, at most
_MOST_OFFERED = 4
# Blocks of other libraries inside of a component's block, which have no block here
_WITHIN = ("kwargs", "config", "cfg", "args", "settings", "vllm_cfg", "dtensor_cfg")
# Components with a trained model, and all with a model of the same kind
_TRAINED = ("actor", "critic")
_WITH_MODELS = {*_TRAINED, "reference", "reward", "teacher"}
# A key that the configs of the off-policy job alone have
_OF_OFF_POLICY = "replay.capacity"
# Names of errors that do not say which key is meant
_UNCLEAR = (
    "unknown",
    "of-similar-names",
    "of-other-blocks",
    "by-another-name",
    "of-hydra",
    "torn-number",
)
# Removed key -> the name of its error.
_GONE = {
    "cluster.nodes.host": "host-of-nodes",
    "actor.model.path": "policy-file",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKey:
    """A key of a config that its block does not have.

    `key`: its path. `value`: its value. `fields`: the known fields of its block. `written`: the whole config. `job`:
    the kind of job. `config`: the type of the whole config, which is the job's own for a job beside the shipped ones.
    `sources`: config key -> file and line in which its value is set. `called`: the name in the config, if the key is
    read as a known name that is like it.
    """

    key: str
    value: object
    fields: Mapping[str, Field]
    written: Any
    job: JobName
    config: type
    sources: Mapping[str, Source]
    called: str = ""

    @property
    def written_name(self) -> str:
        """The name that the config has, where the key is read as a known name that is like it."""
        return self.called or self.name

    @property
    def places(self) -> tuple[str, ...]:
        """The paths of all keys that its config may have."""
        return places_in(self.config, self.job)

    @property
    def is_of_usual_job(self) -> bool:
        """Whether its config is one of a job that is known by its components, such as PPO on simulators."""
        return self.config is config_of(self.job)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.key.rpartition(".")[2]

    @property
    def above(self) -> str:
        """The path of its block; "" for the whole config."""
        return self.key.rpartition(".")[0]

    @property
    def is_typed(self) -> bool:
        """Whether it is set on the command line."""
        key = f"{self.above}.{self.written_name}".removeprefix(".")
        return str(self.sources.get(key, "")).startswith(COMMAND_LINE)

    def meant(self) -> tuple[str | None, object]:
        """Return (path of the known key that is probably meant, value in the form of that key).

        The path is None if it is not clear which key is meant.
        """
        ours = in_our_words(self.name, self.value)
        if ours is not None and ours[0] in self.places:
            return ours
        place = _place_of(self.key, self.fields, self.places, self.written)
        if place is None or not self.takes(place):
            return None, self.value
        return place, self.worded(place, self.value)

    @property
    def has_replay(self) -> bool:
        """Whether the job learns from a replay memory."""
        return _OF_OFF_POLICY in self.places

    def worded(self, place: str, value: object) -> object:
        """Return the value for the key at a path, in the form that the key takes.

        A word of another library becomes the word of rlplace, and a text such as 5min becomes a number.
        """
        ours = self.in_our_form(place, value)
        refusal = _refusal(place, ours, self)
        return ours if refusal is None else refusal.meant(ours)

    def in_our_form(self, place: str, value: object) -> object:
        """Return the value for the key at a path: a word of another library becomes the word of rlplace."""
        hint = self._hint(place)
        choices = [
            choice
            for option in (hint, *typing.get_args(hint))
            if typing.get_origin(option) is typing.Literal
            for choice in typing.get_args(option)
        ]
        words = [choice for choice in choices if isinstance(choice, str)]
        if isinstance(value, str) and words:
            return meant_word(value, words) or value
        # One item in place of a list
        if isinstance(value, str) and typing.get_origin(hint) is tuple:
            (item, *_) = typing.get_args(hint)
            if dataclasses.is_dataclass(item):
                return [{"name": value}]
            # PEFT's word for all layers: without names, all are meant
            is_all = re.fullmatch("all([-_ ]linear)?", value.lower()) is not None
            if item is str and is_all:
                return []
            if item is str and "," not in value:
                return [value]
        return value

    def takes_list(self, place: str) -> bool:
        """Return whether the key at a path takes a list, a block or the place of a component, and not one value."""
        hint = self._hint(place)
        kinds = {typing.get_origin(option) for option in (hint, *typing.get_args(hint))}
        plain = hint in (int, float, str) or kinds <= {None, typing.Literal}
        return not plain or bool(blocks_in(hint))

    @property
    def roles_left_out(self) -> tuple[str, ...]:
        """The components that the job may have and the config does not place."""
        placed = value_at(self.written, PLACEMENT)
        if not isinstance(placed, Mapping):
            return ()
        return tuple(role for role in COMPONENTS if role not in placed)

    def _hint(self, place: str) -> object:
        """Return the type of the key at a path; None if there is no such key."""
        above, _, name = place.rpartition(".")
        block = block_at(self.config, self.job, above.split(".") if above else ())
        fields = fields_of(block, self.job)
        return fields[name][1] if name in fields else None

    def takes(self, place: str) -> bool:
        """Return whether the key at a path may have the value: a switch or a block is no number, text or list."""
        hint = self._hint(place)
        if hint is None:
            return True
        options = {hint, *typing.get_args(hint)}
        if isinstance(self.value, bool):
            return bool in options
        if isinstance(self.value, Mapping):
            kinds = {typing.get_origin(option) for option in options}
            return bool(blocks_in(hint)) or not kinds.isdisjoint({tuple, Mapping})
        if isinstance(self.value, int | float):
            return not blocks_in(hint)
        return True


class _Reading(NamedTuple):
    """What an unknown key is.

    `error`: name of the error text. `facts`: values for this text. `meant`: the name that is meant instead, if any.
    """

    error: str
    facts: Mapping[str, object] = {}
    meant: str | None = None


def reject_unknown(unknown: UnknownKey, found: Found) -> None:
    """Report an unknown key to `found`, with what is probably meant by it."""
    _reject_read(unknown, _read(unknown), found)


def _reject_read(unknown: UnknownKey, read: _Reading, found: Found) -> None:
    """Report an unknown key to `found`. `read`: what it is."""
    found.reject(
        "unknown-key",
        unknown.key,
        error=read.error,
        got=f"{unknown.name}: {show(unknown.value)}",
        span=(0, len(unknown.name)),
        hint=suggestion(read.meant),
        name=unknown.name,
        known=", ".join(unknown.fields),
        **read.facts,
    )


def _read(unknown: UnknownKey) -> _Reading:
    """Return the first reading of an unknown key that fits: of its name, then of known names that are like it."""
    readings = (
        _of_its_name,
        _of_a_sure_name,
        _of_arguments,
        _of_other_blocks,
        _by_another_name,
        _of_likely_names,
    )
    for reading in readings:
        read = reading(unknown)
        if read is not None:
            return read
    return _Reading("unknown")


def _of_its_name(unknown: UnknownKey) -> _Reading | None:
    """Return the first reading that fits of a name which rlplace or another library has."""
    readings = (
        _torn,
        _removed,
        _of_hydra,
        _of_placement,
        _of_item,
        _of_component,
        _of_tracker,
        _several_keys,
        _converted,
        _in_several_keys,
        _needless,
        _absent,
        _of_prefix,
        _of_trained,
        _one_key,
        _of_model,
        _another_measure,
        _parallel_size,
        _no_such_parallelism,
    )
    for reading in readings:
        read = reading(unknown)
        if read is not None:
            return read
    return None


# ── readings of an unknown key; None: it is something else ────────────────────────────────────────────────────────────


def _torn(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the digits behind a decimal comma."""
    torn = torn_number(unknown.key, unknown.sources)
    if unknown.value is not None or torn is None:
        return None
    path, digits = torn
    whole = value_at(unknown.written, path)
    if type(whole) is not int:
        return None
    leaf = path.rpartition(".")[2]
    return _Reading("torn-number", {"leaf": leaf, "whole": whole, "digits": digits})


def _removed(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one that an older version had."""
    gone = _GONE.get(re.sub(r"\[\d+\]", "", unknown.key))
    return None if gone is None else _Reading(gone)


def _of_hydra(unknown: UnknownKey) -> _Reading | None:
    """Read the key as `defaults`, which Hydra takes out of the config."""
    is_near = did_you_mean(unknown.name, ("defaults", *unknown.fields)) == "defaults"
    is_base = unknown.name in _BASES and isinstance(unknown.value, str | list)
    if unknown.above or unknown.is_typed or not (is_near or is_base):
        return None
    value = unknown.value if isinstance(unknown.value, list) else [unknown.value]
    if is_base and "_self_" not in value:
        value = [*value, "_self_"]
    return _Reading("of-hydra", {"line": f"defaults: {show(value)}"})


def _of_placement(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the place of a component: `cluster.actor: 0-7`, or `rollout.gpus: 4-7`."""
    if not is_place(unknown.value):
        return None
    item = _ITEM.fullmatch(unknown.above)
    if item is not None and "component_placement" in unknown.fields:
        return _of_change(unknown)
    if unknown.above == "cluster":
        component = OTHER_COMPONENTS.get(unknown.name, unknown.name)
    elif unknown.name in _PLACES and isinstance(unknown.value, str | list):
        component = unknown.above
    else:
        return None
    if component not in COMPONENTS:
        return None
    line = placed_at(component, unknown.value, unknown.written)
    if unknown.is_typed:
        line = shlex.quote(line.replace(": ", "=", 1))
        return _Reading("meant", {"line": line})
    return _Reading("of-placement", {"line": line})


def _of_change(unknown: UnknownKey) -> _Reading | None:
    """Read the key of a change of the placement as the place of a component: `{after: 50, env: 0-7}`.

    All components of the change are named in one line.
    """
    path, index = unknown.above.removesuffix("]").split("[")
    changes = value_at(unknown.written, path)
    change = changes[int(index)] if isinstance(changes, list) else {}
    places = dict(change.get("component_placement") or {})
    for name, place in change.items():
        component = OTHER_COMPONENTS.get(name, name)
        if component in COMPONENTS and is_place(place):
            places[component] = place
    if OTHER_COMPONENTS.get(unknown.name, unknown.name) not in places:
        return None
    return _Reading("meant", {"line": f"component_placement: {show(places)}"})


def _of_item(unknown: UnknownKey) -> _Reading | None:
    """Read the key of an item of a list as another name for one of its keys: `{func: math_answer, coef: 0.5}`."""
    if _ITEM.fullmatch(unknown.above) is None:
        return None
    path = unknown.above.partition("[")[0]
    ours = BELOW.get(path, {}).get(unknown.name)
    if ours not in unknown.fields or ours in _item_at(unknown.written, unknown.above):
        return None
    return _set(f"{unknown.above}.{ours}", unknown.value, unknown)


def _of_arguments(unknown: UnknownKey) -> _Reading | None:
    """Read the key of an item that names code as an argument of it: `{name: my:Wrapper, weight: 5.0}`."""
    item = _item_at(unknown.written, unknown.above)
    arguments = {
        name: value for name, value in item.items() if name not in unknown.fields
    }
    if "kwargs" not in unknown.fields or "kwargs" in item or "name" not in item:
        return None
    if unknown.is_typed or len(arguments) != 1:
        return None
    return _Reading("meant", {"line": f"kwargs: {show(arguments)}"})


def placed_at(component: str, place: object, written: object) -> str:
    """Return the config line that places a component. `place`: its accelerators. `written`: the whole config.

    Parallel sizes and other settings that stand beside the place so far are kept.
    """
    path = f"{PLACEMENT}.{component}"
    before = value_at(written, path) if isinstance(written, Mapping) else None
    if not isinstance(before, Mapping):
        return f"{path}: {show(place)}"
    others = {key: value for key, value in before.items() if key not in _OWN_PLACES}
    return f"{path}: {show({'placement': place, **others})}"


def _of_component(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the block of a component under another library's name: `ref: {micro_batch: 4}`."""
    component = OTHER_COMPONENTS.get(unknown.name)
    if unknown.above or not component or not isinstance(unknown.value, Mapping):
        return None
    pairs: list[tuple[str, object]] = []
    for name, value in _leaves_of(unknown.value):
        path = _in_our_blocks(f"{component}.{name}", unknown.places)
        steps = path.rpartition(".")[0].split(".")
        fields = fields_of(block_at(unknown.config, unknown.job, steps), unknown.job)
        place = path
        if path not in unknown.places:
            place = _place_of(path, fields, unknown.places, unknown.written) or ""
        if place not in unknown.places:
            return None
        pairs.append((place, unknown.worded(place, value)))
    if not pairs:
        return None
    return _Reading("of-many-elsewhere", {"line": _lines(pairs, unknown)})


def _leaves_of(block: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return (path, value) of each plain value in a block."""
    leaves: list[tuple[str, object]] = []
    for name, value in block.items():
        if isinstance(value, Mapping) and value:
            leaves += [(f"{name}.{path}", of) for path, of in _leaves_of(value)]
        else:
            leaves.append((name, value))
    return leaves


def _of_tracker(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the block of a tracker, such as `wandb: {project: rl}`: its settings are variables."""
    ours = in_our_words(unknown.name, unknown.value)
    if not isinstance(unknown.value, Mapping) or ours is None:
        return None
    place, value = ours
    if place not in unknown.places:
        return None
    name = unknown.name.upper()
    settings = [
        f"{name}_{key.upper()}={show(of)}"
        for key, of in unknown.value.items()
        if isinstance(of, str)
    ]
    facts = {
        "line": _lines([(place, value)], unknown),
        "settings": " ".join(settings) or f"{name}_PROJECT",
    }
    return _Reading("tracker", facts)


def _several_keys(unknown: UnknownKey) -> _Reading | None:
    """Read the key as a block whose keys are all known."""
    lines = _lines_of_block(unknown)
    if not lines:
        return None
    if unknown.is_typed:
        words = [shlex.quote(_override(line, unknown.above)) for line in lines]
        return _Reading("meant", {"line": " ".join(words)})
    beside = any(line.partition(":")[0] in unknown.fields for line in lines)
    return _Reading(
        "of-many" if beside else "meant-elsewhere", {"line": "\n".join(lines)}
    )


def _in_several_keys(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of another library that says what several keys say here."""
    role = unknown.key.partition(".")[0]
    lines = []
    for place, value in in_several_keys(unknown.name, unknown.value).items():
        path = place
        if place.startswith("."):
            path = f"{role if role in COMPONENTS else 'actor'}{place}"
            # The off-policy job has no block of the optimizer
            if path not in unknown.places:
                path = path.replace(".optimizer.", ".")
        if path not in unknown.places:
            return None
        if path.partition(".")[0] in unknown.roles_left_out:
            continue
        lines.append((path, value))
    if not lines:
        return None
    return _Reading("of-many-elsewhere", {"line": _lines(lines, unknown)})


def _of_model(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of a language model, which stands in the block `model` of its component."""
    ours = MODEL_NAMES.get(unknown.name, unknown.name)
    # The name of a component itself, or of its function
    if unknown.name == "name":
        return None
    block = f"{unknown.above or 'actor'}.model"
    takes_any = unknown.job == MARKED and block in unknown.places
    if ours not in MODEL_SIZES or not takes_any:
        return None
    line = _lines([(f"{block}.{ours}", unknown.value)], unknown)
    return _Reading("of-many-elsewhere", {"line": line})


def _converted(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of another library whose value can be converted by other values of the config."""
    given = Given(
        name=unknown.name,
        role=unknown.key.partition(".")[0],
        value=unknown.value,
        written=unknown.written,
        config=unknown.config,
        job=unknown.job,
    )
    meant = converted(given)
    if meant is None:
        return None
    for place in meant.keys:
        # Components and arguments of a task have any name
        has_any = place.startswith((f"{PLACEMENT}.", "env.kwargs."))
        if place not in unknown.places and not has_any:
            return None
    place = next(iter(meant.keys))
    line = _lines([*meant.keys.items()], unknown)
    return _Reading("converted", {"place": place, "reason": meant.reason, "line": line})


def _similar_key(unknown: UnknownKey) -> tuple[str, str]:
    """Return (path of the similar key, difference) for a key of another library; ("", "") for other keys."""
    place, reason = another_measure().get(unknown.name, ("", ""))
    role = unknown.key.partition(".")[0]
    passes = unknown.name == "epochs" or KEYS.get(unknown.name) == "algorithm.epochs"
    if unknown.has_replay and passes and role != "runner":
        return (
            "algorithm.updates_per_step",
            "there, passes over the samples of an iteration; here, updates for each step",
        )
    if unknown.name == "num_gpus" and role in COMPONENTS:
        return PLACEMENT, "there, GPUs are counted; here, accelerators are named"
    of_role = place.replace("actor.", f"{role}.", 1)
    if of_role in unknown.places:
        return of_role, reason
    return place, reason


def _lines(pairs: Sequence[tuple[str, object]], unknown: UnknownKey) -> str:
    """Return the lines, or the overrides, that set keys to values in place of an unknown key.

    `pairs`: (path, value) of each key.
    """
    if unknown.is_typed:
        words = [shlex.quote(f"{path}={_typed(value)}") for path, value in pairs]
        return " ".join(words)
    lines = [f"{path}: {show(value)}" for path, value in pairs]
    form = "a line" if len(lines) == 1 else "lines"
    return (
        "\n".join(lines)
        + f"        ({form} without indent, in place of {unknown.written_name})"
    )


def _typed(value: object) -> str:
    """Return a value in the form of an override: texts in lists and blocks get quotes for Hydra, if they need any."""
    if isinstance(value, Mapping):
        pairs = [f"{key}: {_inside(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inside, value)) + "]"
    return show(value)


def _inside(item: object) -> str:
    """Return an item of a list or block in the form of an override."""
    if isinstance(item, str) and ":" in item:
        return f'"{item}"'
    return _typed(item)


def _one_key(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one that is misspelt, in another block, or called by another library's name."""
    place, value = unknown.meant()
    return None if place is None else _set(place, value, unknown)


def _set(place: str, value: object, unknown: UnknownKey) -> _Reading:
    """Read an unknown key as the key at the path `place`. `value`: its value there."""
    above = unknown.above
    block, _, near = place.rpartition(".")
    error = "meant"
    if unknown.is_typed and isinstance(value, list) and not unknown.takes_list(place):
        # One run for each value
        runs = f"-m {place}={','.join(map(show, value))}"
        return _Reading(error, {"line": runs}, place.removeprefix(f"{above}."))
    line = f"{near}: {show(value)}"
    if unknown.is_typed:
        line = shlex.quote(f"{place}={_typed(value)}")
    elif (
        block != above
        and block.rpartition(".")[0] == above
        and value_at(unknown.written, block) is None
    ):
        line = f"{block.rpartition('.')[2]}: {{{near}: {show(value)}}}"
    elif block != above or _stands(unknown.written, place):
        error = "meant-elsewhere"
        line = f"{place}: {show(value)}"
        # Beside entries that stay
        beside = value_at(unknown.written, place)
        if beside and isinstance(beside, Mapping) and isinstance(value, Mapping):
            line = "\n".join(f"{place}.{k}: {show(v)}" for k, v in value.items())
    return _Reading(error, {"line": line}, place.removeprefix(f"{above}."))


def _another_measure(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of another library whose values mean something else here."""
    place, reason = _similar_key(unknown)
    # A block of another library that has such a key
    if not place and isinstance(unknown.value, Mapping):
        for name in unknown.value:
            place, reason = another_measure().get(name, ("", ""))
            if place:
                break
    if place not in unknown.places:
        return None
    return _Reading("another-measure", {"place": place, "reason": reason})


def _parallel_size(unknown: UnknownKey) -> _Reading | None:
    """Read the key as a parallel size, which stands beside the placement."""
    size = PARALLEL.get(unknown.name)
    if size is None:
        return None
    # At the top of the config: engines are split by tensors, the actor by tokens
    usual = "rollout" if size == TENSOR else "actor"
    component = unknown.above or usual
    line = _placed_with(component, size, unknown.value, unknown.written)
    if line is None:
        return None
    if unknown.is_typed:
        line = shlex.quote(line.replace(": ", "=", 1))
        return _Reading("meant", {"line": line})
    return _Reading("size-of-placement", {"line": line, "component": component})


def _no_such_parallelism(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the size of a parallelism for which there is no key."""
    if unknown.name.partition("_")[0] not in SPLITS:
        return None
    return _Reading("no-such-parallelism", {"reason": NO_SUCH})


def _needless(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of another library that has no counterpart, since nothing can be chosen there."""
    if isinstance(unknown.value, Mapping) and {*unknown.value} <= {*NEEDLESS}:
        reasons = [NEEDLESS[name] for name in unknown.value]
        return _Reading("needless", {"reason": reasons[0]}) if reasons else None
    name = unknown.name
    # In a block: optimizer.name
    if name in ("name", "type", "kind"):
        name = f"{unknown.above.rpartition('.')[2]}_{name}"
    is_named = (
        key_of(unknown.above, name) if name == unknown.name else unknown.meant()[0]
    )
    if name not in NEEDLESS or is_named is not None:
        return None
    return _Reading("needless", {"reason": NEEDLESS[name]})


def _absent(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of another library for what rlplace does not have, or chooses elsewhere."""
    if unknown.name not in ABSENT or unknown.meant()[0] is not None:
        return None
    # A block with a key that is similar to one here says more
    inside = unknown.value if isinstance(unknown.value, Mapping) else {}
    if any(another_measure().get(name, ("",))[0] in unknown.places for name in inside):
        return None
    return _Reading("absent", {"reason": ABSENT[unknown.name]})


def _of_prefix(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of a component, whose name is the first part of it: critic_learning_rate."""
    if unknown.above or _place_known(unknown):
        return None
    if in_our_words(unknown.name, unknown.value) is not None:
        return None
    for theirs in (*COMPONENTS, *OTHER_COMPONENTS):
        name = unknown.name.removeprefix(f"{theirs}_")
        role = OTHER_COMPONENTS.get(theirs, theirs)
        if name == unknown.name or not role:
            continue
        below = dataclasses.replace(unknown, key=f"{role}.{name}", fields={})
        place, value = below.meant()
        names_model = name in ("model", *_NAMES_OF_MODELS)
        if names_model and isinstance(value, str) and f"{role}.model" in unknown.places:
            return _model_of(role, value, unknown)
        if place is None or not place.startswith(f"{role}."):
            continue
        if role in unknown.roles_left_out:
            reason = f"the config places no {role}"
            return _Reading("absent", {"reason": reason})
        return _Reading(
            "of-many-elsewhere", {"line": _lines([(place, value)], unknown)}
        )
    return None


def _model_of(role: str, path: str, unknown: UnknownKey) -> _Reading:
    """Read an unknown key as the folder of a component's model, which is placed with it if it has no place yet."""
    pairs: list[tuple[str, object]] = [(f"{role}.model.path", path)]
    if role in unknown.roles_left_out:
        pairs.append((f"{PLACEMENT}.{role}", "<its accelerators, such as 0>"))
    return _Reading("of-many-elsewhere", {"line": _lines(pairs, unknown)})


def _place_known(unknown: UnknownKey) -> bool:
    """Return whether the whole name of a key is that of another library for a key of the job."""
    ours = KEYS.get(unknown.name)
    if unknown.has_replay:
        ours = OFF_POLICY_KEYS.get(unknown.name, ours)
    return ours is not None and (ours.startswith(".") or ours in unknown.places)


def _of_trained(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one of all trained models: zero_stage=3 beside a critic."""
    if unknown.above:
        return None
    ours = key_of("", unknown.name)
    if ours is not None and ours.startswith("."):
        having = [place for place in unknown.places if place.endswith(ours)]
    elif ours is None:
        having = [p for p in unknown.places if p.rpartition(".")[2] == unknown.name]
    else:
        return None
    roles = {place.partition(".")[0] for place in having}
    # Engines and simulators have keys of the same name
    if ours is None and not roles <= _WITH_MODELS:
        return None
    left_out = unknown.roles_left_out
    having = [
        place
        for place in having
        if place.partition(".")[0] in _TRAINED
        and place.partition(".")[0] not in left_out
    ]
    if len(roles) < 2 or not having or not all(map(unknown.takes, having)):
        return None
    pairs = [(place, unknown.worded(place, unknown.value)) for place in having]
    return _Reading("of-many-elsewhere", {"line": _lines(pairs, unknown)})


def _of_other_blocks(unknown: UnknownKey) -> _Reading | None:
    """Read the key as one that several other blocks have."""
    having = (
        places_of(unknown.name)
        if unknown.is_of_usual_job
        else [p for p in unknown.places if p.rpartition(".")[2] == unknown.name]
    )
    places = [place for place in having if place != unknown.key]
    if not places:
        return None
    return _Reading("of-other-blocks", {"places": ", ".join(places)})


def _by_another_name(unknown: UnknownKey) -> _Reading | None:
    """Read the key as another library's name of a key of the other kind of job."""
    ours = KEYS.get(unknown.name)
    if ours is None or not unknown.is_of_usual_job:
        return None
    other = other_job(unknown.job)
    having = [place for place in all_places(other) if place.endswith(ours)]
    if not having:
        return None
    jobs_of = {"theirs": subject_of(other), "ours": subject_of(unknown.job)}
    return _Reading("by-another-name", {"place": having[0], **jobs_of})


def _of_a_sure_name(unknown: UnknownKey) -> _Reading | None:
    """Read the key as the known name that has the same words, if there is one."""
    readings, is_sure = _likely_readings(unknown)
    return next(iter(readings.values())) if is_sure and len(readings) == 1 else None


def _of_likely_names(unknown: UnknownKey) -> _Reading | None:
    """Ask which one of a few known names is meant, each with some of the words of the key."""
    readings, _ = _likely_readings(unknown)
    lines = [line for line in readings if line != "leave out"]
    lines = lines or _lines_by_meaning(unknown)
    if not lines:
        return None
    lines = [*dict.fromkeys(line.partition(" " * 8)[0] for line in lines)]
    return _Reading(
        "of-similar-names", {"lines": one_of([*lines, f"leave out {unknown.name}"])}
    )


def _lines_by_meaning(unknown: UnknownKey) -> list[str]:
    """Return the lines that set keys of the same block whose meaning has all words of an unknown name."""
    lines = []
    for name, (field, hint) in unknown.fields.items():
        place = f"{unknown.above}.{name}".removeprefix(".")
        doc = str(field.metadata.get("doc", ""))
        if blocks_in(hint) or not is_said(unknown.name, doc):
            continue
        value = unknown.worded(place, unknown.value)
        if unknown.takes(place) and _accepts(place, value, unknown):
            lines.append(str(_set(place, value, unknown).facts["line"]))
    return lines if len(lines) < _MOST_OFFERED else []


def similar_lines(unknown: UnknownKey) -> list[str]:
    """Return the lines that set keys of the job with the words of a key that only another kind of job has."""
    called = dataclasses.replace(unknown, called=unknown.name)
    readings, _ = _likely_readings(called)
    return [
        line.partition(" " * 8)[0] for line in readings if not line.startswith("leave")
    ]


def _likely_readings(unknown: UnknownKey) -> tuple[Mapping[str, _Reading], bool]:
    """Return (what is told -> reading, whether the words are the same) for the known names that may be meant.

    A line is told only if its key takes the value.
    """
    readings: dict[str, _Reading] = {}
    is_sure = False
    # A key that other kinds of jobs have is not misspelt
    is_known = not unknown.called and unknown.key in places_of(unknown.name)
    if isinstance(unknown.value, Mapping) or is_known:
        return readings, is_sure
    known = _known_names(unknown)
    # Names with the same words may not take the value; then others are looked at
    for _ in range(2):
        refused: list[Known] = []
        for likely in likely_names(unknown.name, unknown.above, known):
            read = _as_known(likely.known, unknown)
            if read is None:
                refused.append(likely.known)
                continue
            told = str(read.facts.get("line", "leave out"))
            is_sure = is_sure or (likely.is_sure and "<" not in told)
            readings.setdefault(told, read)
            if len(readings) == _MOST_OFFERED:
                break
        if readings or not refused:
            break
        known = [each for each in known if each not in refused]
    return readings, is_sure


def _known_names(unknown: UnknownKey) -> Sequence[Known]:
    """Return the names that an unknown key may mean: keys of its config, and names of other libraries for them."""
    role = unknown.key.partition(".")[0] if unknown.above else ""
    words = words_of(unknown.name)
    left_out = unknown.roles_left_out
    known = []
    for place in unknown.places:
        component = place.partition(".")[0]
        # A block has no value; a list of blocks has items
        is_block = any(p.startswith(f"{place}.") for p in unknown.places)
        of_machines = _OF_MACHINES.match(place)
        is_of_machines = of_machines and role not in ("cluster", component)
        is_other = component in COMPONENTS and component != role and bool(role)
        is_side = component in _SIDE and component != role
        if is_block or is_of_machines or component in left_out:
            continue
        if (is_other or is_side) and component not in words:
            continue
        if not place.startswith(item_blocks()):
            known.append(Known(place))
    for theirs, ours in _aliases(unknown.has_replay).items():
        block = ours.rpartition(".")[0]
        component = ours.partition(".")[0]
        if component in left_out or (
            component in COMPONENTS and role not in ("", component)
        ):
            continue
        of_block = block and not ours.startswith(".")
        path = f"{block}.{theirs}" if of_block else f".{theirs}"
        known.append(Known(path, is_whole=theirs in {*NEEDLESS, *ABSENT}))
    return known


@functools.cache
def _aliases(has_replay: bool) -> Mapping[str, str]:
    """Return name of another library -> key of rlplace, or ".<name>" for a name that is read in any block.

    `has_replay`: whether the names of the off-policy job come first.
    """
    # A single word, such as time, says too little
    said = [name for name in (*NEEDLESS, *ABSENT) if len(words_of(name)) > 1]
    aliases = {name: f".{name}" for name in (*said, *CONVERTED)}
    aliases |= {theirs: ours for theirs, (ours, _) in another_measure().items()}
    aliases |= KEYS
    if has_replay:
        aliases |= OFF_POLICY_KEYS
    return aliases


def _as_known(known: Known, unknown: UnknownKey) -> _Reading | None:
    """Return what an unknown key is if a known name is meant; None if the name does not take the value."""
    if known.path in unknown.places:
        value = unknown.in_our_form(known.path, unknown.value)
        if isinstance(value, bool) and not unknown.takes(known.path):
            return _switch_of_number(known.path, unknown)
        if not unknown.takes(known.path) or not _accepts(known.path, value, unknown):
            return None
        return _set(known.path, value, unknown)
    key = f"{unknown.above}.{known.name}".removeprefix(".")
    renamed = dataclasses.replace(unknown, key=key, called=unknown.name)
    read = _of_its_name(renamed)
    place, value = renamed.meant()
    if read is not None and read.error in ("meant", "meant-elsewhere"):
        # A value of another kind, such as 64 for a list, is not converted where the name is not sure
        form = renamed.in_our_form(place, unknown.value) if place else value
        is_taken = place is not None and (
            _accepts(place, form, unknown) or _is_number_in_text(form, value)
        )
        if not is_taken and in_our_words(known.name, unknown.value) is None:
            return None
    if read is None and isinstance(unknown.value, bool):
        place = _place_of(key, unknown.fields, unknown.places, unknown.written)
        return None if place is None else _switch_of_number(place, unknown)
    return read


def _is_number_in_text(text: object, value: object) -> bool:
    """Return whether a text became a number: 5min."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(text, str) and is_number


def _switch_of_number(place: str, unknown: UnknownKey) -> _Reading | None:
    """Read a switch as a key with a number: use_lora as lora_rank. None if the key takes no number, or is never off."""
    hint = unknown._hint(place)
    options = {hint, *typing.get_args(hint)}
    if unknown.value is False and NoneType in options:
        return _set(place, None, unknown)
    if unknown.value is True and int in options:
        return _set(place, "<a whole number, such as 8>", unknown)
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why a key does not take a value. `fits`: a value that is probably meant, as YAML; None if there is none.

    `what`: what the key takes, such as "a whole number"; "" if it is not said.
    """

    fits: str | None
    what: str

    def meant(self, value: object) -> object:
        """Return the value that is meant by `value`: another one, or words to be replaced by one."""
        if self.fits is not None:
            return value_of(self.fits.partition(" " * 8)[0])
        is_plain = isinstance(value, str) and not value.startswith("<")
        return f"<{self.what}>" if self.what and is_plain else value


def _accepts(place: str, value: object, unknown: UnknownKey) -> bool:
    """Return whether the key at a path takes a value, by its type and its bounds."""
    return _refusal(place, value, unknown) is None


def _refusal(place: str, value: object, unknown: UnknownKey) -> _Refusal | None:
    """Return why the key at a path does not take a value, by its type and its bounds; None if it takes the value."""
    # Imported here, since workers read no configs.
    import pydantic

    from rlplace.config.validate import model_of

    config: Any = copy.deepcopy(unknown.written)
    steps = place.split(".")
    block = config
    for step in steps[:-1]:
        if not isinstance(block, dict):
            return None
        if not isinstance(block.get(step), dict):
            block[step] = {}
        block = block[step]
    block[steps[-1]] = value
    try:
        model_of(unknown.config, unknown.job).model_validate(config)
    except pydantic.ValidationError as error:
        for wrong in error.errors(include_url=False):
            path = [s for s in wrong["loc"] if not str(s).startswith("<")]
            if path[: len(steps)] == steps:
                return _refusal_of(wrong, is_below=path != steps)
    return None


def _refusal_of(wrong: ErrorDetails, *, is_below: bool) -> _Refusal:
    """Return the refusal that an error of pydantic says. `is_below`: whether a key inside of the value is refused."""
    context: Mapping[str, Any] = wrong.get("ctx", {})
    what = str(context.get("what", ""))
    if is_below or not what:
        return _Refusal(fits=None, what="")
    is_kind = what.startswith("expected ")
    return _Refusal(
        fits=context.get("fix"), what=what.removeprefix("expected ") if is_kind else ""
    )


# ── config lines with what is meant ───────────────────────────────────────────────────────────────────────────────────


def _lines_of_block(unknown: UnknownKey) -> list[str]:
    """Return config lines for the keys of an unknown block, such as `lora_rank: 16` for `lora: {rank: 16}`.

    Return no line if one of the keys has no known place.
    """
    block = unknown.value
    if not isinstance(block, Mapping) or not block:
        return []
    if unknown.meant()[0] == PLACEMENT:
        return []
    above = unknown.above
    # On the command line, each key is looked up by itself
    place = None if unknown.is_typed else unknown.meant()[0]
    lines = []
    for inner, below in block.items():
        at = f"{above}.{inner}".removeprefix(".")
        if place is not None and _stands(unknown.written, place):
            # A second block with a misspelt name, or another library's
            target: str | None = f"{place}.{inner}"
            if target not in unknown.places:
                target = _place_of(f"{place}.{inner}", {}, unknown.places)
        elif f"{unknown.name}_{inner}" in unknown.fields:
            target = f"{above}.{unknown.name}_{inner}".removeprefix(".")
        elif place is None and key_of(above, f"{unknown.name}_{inner}") is not None:
            whole = f"{above}.{unknown.name}_{inner}".removeprefix(".")
            target = _place_of(whole, unknown.fields, unknown.places, unknown.written)
        elif place is None and inner in BELOW.get(unknown.key, {}):
            target = BELOW[unknown.key][inner]
        elif place is None and inner in unknown.fields and above:
            target = at
        elif place is None and in_our_words(inner, below) is not None:
            target, below = in_our_words(inner, below) or (None, below)
        elif place is None and key_of(at.rpartition(".")[0], inner) is not None:
            target = _place_of(at, unknown.fields, unknown.places, unknown.written)
        else:
            target = None
        if target is None:
            more = _converted_in_block(unknown, inner, below)
            if not more:
                return []
            lines += [line for line in more if line not in lines]
            continue
        if target not in unknown.places:
            return []
        below = unknown.worded(target, below)
        if target.rpartition(".")[0] == above and not _stands(unknown.written, target):
            target = target.rpartition(".")[2]
        lines.append(f"{target}: {show(below)}")
    return lines


def _converted_in_block(unknown: UnknownKey, inner: str, value: object) -> list[str]:
    """Return config lines for a key of an unknown block whose value can be converted: `data: {path: rows.jsonl}`.

    The key may need the name of its block to be understood: `data_path`. Return no line if it is not understood.
    `inner`: the key. `value`: its value.
    """
    for name in (inner, f"{unknown.name}_{inner}"):
        given = Given(
            name=name,
            role=unknown.key.partition(".")[0],
            value=value,
            written=unknown.written,
            config=unknown.config,
            job=unknown.job,
        )
        meant = converted(given)
        if meant is not None:
            return [f"{place}: {show(of)}" for place, of in meant.keys.items()]
    return []


def _override(line: str, above: str) -> str:
    """Return the override `key=value` of a config line `key: value`. `above`: path of the line's block."""
    target, _, value = line.partition(": ")
    if "." not in target:
        target = f"{above}.{target}".removeprefix(".")
    return f"{target}={value}"


def _placed_with(component: str, key: str, size: object, written: Any) -> str | None:
    """Return a config line with the placement of a component and its parallel size, to be suggested in an error.

    `key`: name of the parallel size. `size`: value of the parallel size. `written`: the config. Return None if the
    component is not placed, or if `size` is not a whole number.
    """
    placed = value_at(written, f"{PLACEMENT}.{component}")
    if placed is None or not isinstance(size, int):
        return None
    block = {
        **(placed if isinstance(placed, Mapping) else {"placement": placed}),
        key: size,
    }
    return f"{PLACEMENT}.{component}: {show(block)}"


def _stands(mapping: Mapping[str, object], path: str) -> bool:
    """Return whether a config sets the key at a path. A key with the value null counts as set."""
    above, _, name = path.rpartition(".")
    block = value_at(mapping, above) if above else mapping
    return isinstance(block, Mapping) and name in block


# ── where a key belongs ───────────────────────────────────────────────────────────────────────────────────────────────


def _place_of(
    key: str,
    fields: Mapping[str, Field],
    known: Sequence[str],
    written: object = None,
) -> str | None:
    """Return the path of the known key that an unknown key probably means; None if this is not clear.

    The unknown key may be the name in a different library, a misspelling, or a key that belongs to a different block.
    `key`: path of the unknown key. `fields`: the known fields of its block. `known`: the paths of all keys of the
    config. `written`: the whole config, whose components count if a key of a component stands outside of all
    components.
    """
    path = key.replace("/", ".")
    if path != key and path in known:
        return path
    above, _, name = key.rpartition(".")
    role = key.partition(".")[0]
    of_block = BELOW.get(above, {}).get(name)
    if _OF_OFF_POLICY in known and of_block in known:
        return of_block
    if _OF_OFF_POLICY in known and OFF_POLICY_KEYS.get(name) in known:
        return OFF_POLICY_KEYS[name]
    # Updates of a network there, and no iterations
    if _OF_OFF_POLICY in known and name == "num_updates":
        return None
    ours = key_of(above, name)
    # A key that only another kind of model has
    if ours is not None and above.endswith(".model") and fields:
        block, _, leaf = ours.rpartition(".")
        ours = None if block == above and leaf not in fields else ours
    if ours is not None:
        places = [ours]
        if ours.startswith("."):
            # Look below the component first; if only one component has the key, take that one.
            places = [role + ours]
            having = [place for place in known if place.endswith(ours)]
            # A block of settings is none of a component: algorithm.per_device_train_batch_size
            outside = "" if role not in COMPONENTS else above
            having = _of_components(having, outside, written)
            if len(having) == 1:
                places += having
        if (
            place := next((place for place in places if place in known), None)
        ) is not None:
            return place
    if name in _GENERIC and above:
        return None
    # Of an item of a list, such as a description of a machine
    if "[" in above:
        of_items = BELOW.get(re.sub(r"\[[0-9]+\]", "", above), {})
        theirs = of_items.get(name, PLACEMENT_KEYS.get(name))
        if theirs in fields and theirs not in _item_at(written, above):
            return f"{above}.{theirs}"
    # A ratio to a value is not the value: min_lr, min_lr_ratio
    begun = [
        field
        for field in fields
        if field.startswith(name) and not field.endswith("_ratio")
    ]
    if (
        near := begun[0] if len(begun) == 1 else did_you_mean(name, fields)
    ) is not None:
        return f"{above}.{near}".removeprefix(".")
    # A key of an item of a list is meant in an item alone
    same = [
        place
        for place in known
        if place.rpartition(".")[2] == name
        and place != key
        and not place.startswith(item_blocks())
    ]
    if "[" in above:
        same = []
    same = _of_components(same, above if role in COMPONENTS else "", written)
    # Settings of changes during a run, or of the connections, are meant in their block alone
    if above and not above.startswith("cluster"):
        same = [place for place in same if not _OF_MACHINES.match(place)]
    # The only key of this name may be that of a component of another kind
    is_other = len(same) == 1 and same[0].partition(".")[0] in _SIDE - {role}
    if role in COMPONENTS and is_other:
        same = []
    beside = [place for place in same if place.startswith(f"{above}.")] or same
    if not beside:
        below = {p.rpartition(".")[2]: p for p in known if p.startswith(f"{above}.")}
        beside = (
            [below[near]]
            if above and (near := did_you_mean(name, below)) is not None
            else []
        )
    if len(beside) == 1:
        return beside[0]
    return None


def _item_at(written: object, path: str) -> Mapping[str, object]:
    """Return an item of a list of blocks, such as `cluster.nodes[0]`; an empty one if there is none."""
    block, _, index = path.removesuffix("]").partition("[")
    items = value_at(written, block) if isinstance(written, Mapping) else None
    if not isinstance(items, list | tuple) or not index.isdecimal():
        return {}
    item = items[int(index)] if int(index) < len(items) else None
    return item if isinstance(item, Mapping) else {}


def _of_components(places: list[str], above: str, written: object) -> list[str]:
    """Return the key paths without those of components that a config does not place.

    All paths are returned if the key stands within a block, or if they are not all keys of components. `above`: path of
    the block with the key. `written`: the config.
    """
    roles = {place.partition(".")[0] for place in places}
    placed = value_at(written, PLACEMENT) if isinstance(written, Mapping) else None
    if above or not roles <= {*COMPONENTS} or not isinstance(placed, Mapping):
        return places
    return [place for place in places if place.partition(".")[0] in placed]


class KeyMeant(NamedTuple):
    """The config key that is meant by an option of another program.

    `fix`: what to type in place of the option, or which word to leave out. `reason`: how the values differ, or why
    there is no such key; None: the key has the same values.
    """

    fix: str
    reason: str | None = None


def key_meant(
    name: str, value: object, written: Mapping[str, Any], job: JobName, config: type
) -> KeyMeant | None:
    """Return the key that is meant by an option `--name value`, or by a key of another library; None if not clear.

    `written`: the whole config, with the options as keys at its top. `job`, `config`: kind and type of the config.
    """
    places = places_in(config, job)
    typed = name
    name = _in_our_blocks(name, places)
    component = name.partition(".")[0]
    placed = value_at(written, PLACEMENT)
    is_left_out = isinstance(placed, Mapping) and component not in placed
    if "." in name and component in COMPONENTS and is_left_out:
        reason = f"the config places no {component}"
        return KeyMeant(f"leave out {typed}", reason)
    role, _, leaf = name.partition(".model.")
    if leaf and job == MARKED and f"{role}.model" in places:
        size = MODEL_NAMES.get(leaf, leaf)
        if size in MODEL_SIZES:
            line = f"{role}.model.{size}={show(value)}"
            return KeyMeant(shlex.quote(line))
        # A setting of the component: actor.model.lora_rank
        name = f"{role}.{leaf}"
    if name in places and not any(place.startswith(f"{name}.") for place in places):
        return KeyMeant(shlex.quote(f"{name}={show(value)}"))
    above = name.rpartition(".")[0]
    fields: Mapping[str, Field] = {}
    if not above or above in places:
        steps = above.split(".") if above else ()
        fields = fields_of(block_at(config, job, steps), job)
    unknown = UnknownKey(
        key=name,
        value=value,
        fields=fields,
        written=written,
        job=job,
        config=config,
        sources={name: Source(file=f"{COMMAND_LINE}{name}={show(value)}")},
    )
    read = _read(unknown)
    if read.error in _UNCLEAR:
        return None
    found = Found(sources={})
    _reject_read(unknown, read, found)
    (told,) = found.problems
    fix = told.fix or ""
    if read.error == "another-measure":
        # A line of a file; on a command line, an override
        fix = shlex.quote(fix.replace(": ", "=", 1))
    return KeyMeant(fix, told.why if "reason" in read.facts else None)


def _in_our_blocks(name: str, places: Sequence[str]) -> str:
    """Return a path with the names of blocks here: actor.optim.lr is actor.optimizer.lr."""
    *above, leaf = name.split(".")
    path = ""
    for step in above:
        if not path and OTHER_COMPONENTS.get(step):
            path = OTHER_COMPONENTS[step]
            continue
        at = f"{path}.{step}".removeprefix(".")
        # A block of settings of another library, within one of ours
        if path and at not in places and step in _WITHIN:
            continue
        ours = key_of(path, step)
        if at not in places and ours is not None:
            translated = f"{path}{ours}" if ours.startswith(".") else ours
            at = translated if translated in places else at
        path = at
    return f"{path}.{leaf}".removeprefix(".")


def option_of_block(name: str, value: str) -> str | None:
    """Return the override that is meant by an option whose name is that of a block: `--model <path>`; else None."""
    # Numbers of GPUs: the first ones, or those that a variable makes visible
    ids = value.split(",")
    if name in ("gpus", "gpu", "devices") and len(ids) > 1:
        if ids == [str(number) for number in range(len(ids))]:
            return f"cluster.accelerators_per_node={len(ids)}"
        return None
    if name in _OPTIONS and value:
        return f"{_OPTIONS[name]}={value}"
    if name == "resume" and not value:
        return "resume=auto"
    return None


@functools.cache
def word_meant(name: str, value: str) -> str | None:
    """Return the override `key=value` that is probably meant by the unknown option `--name=value`; None if not clear.

    `name`: name of the option: path of a config key, last part of it, or a name of the key in a different library.
    `value`: value of the option; "" without a value.
    """
    for job in jobs():
        # A switch has no value: --wandb
        ours = in_our_words(name.rpartition(".")[2], value or True)
        if ours is not None and ours[0] in all_places(job):
            return shlex.quote(f"{ours[0]}={show(ours[1])}")
    if name in ENV_STEPS:
        # How many iterations that is depends on the config
        steps = value or "steps"
        return f"runner.total_iterations=<{steps} / (total_num_envs x rollout_steps)>"
    for job in jobs():
        places = all_places(job)
        found = (
            name
            if name in places
            else _place_of(name, fields_of(config_of(job), job), places)
        )
        # No block
        if found is not None and not any(
            place.startswith(f"{found}.") for place in places
        ):
            above, _, last = found.rpartition(".")
            switch = not above and fields_of(config_of(job), job)[last][1] is bool
            return f"{found}={value or ('true' if switch else '<a value>')}"
    return None


# ── keys of a language model ──────────────────────────────────────────────────────────────────────────────────────────


def reject_model_keys(written: Mapping[str, Any], found: Found) -> None:
    """Report keys of language models to `found` that are misspelt, or that belong to the component's block.

    A model's block takes any key of a config.json, so a misspelt key would have no effect. `written`: the config.
    """
    for role, block in written.items():
        model = block.get("model") if isinstance(block, Mapping) else None
        if not isinstance(model, Mapping):
            continue
        _reject_other_sizes(role, model, found)
        for name, value in model.items():
            # The sizes may be a whole config.json, which has a dtype too
            if name in ("dtype", "torch_dtype") and "model_type" in model:
                continue
            key = f"{role}.model.{name}"
            meant = MODEL_NAMES.get(name)
            if meant is None and name not in (*MODEL_SIZES, *OTHER_MODEL_SIZES):
                meant = did_you_mean(str(name), MODEL_SIZES)
            if str(name).startswith("lora_"):
                meant = f"{role}.{name}"
            if meant is None:
                meant = _key_of_component(role, str(name))
            if meant is None and name in NEEDLESS:
                found.reject(
                    "unknown-key",
                    key,
                    error="needless",
                    got=f"{name}: {show(value)}",
                    span=(0, len(str(name))),
                    reason=NEEDLESS[name],
                    name=name,
                )
            if meant is None:
                continue
            if meant in model:
                # One of the two keys has no effect
                meant = f"{role}.model.{meant}"
            line = f"{meant}: {show(value)}"
            found.reject(
                "unknown-key",
                key,
                error="meant-elsewhere" if "." in meant else "meant",
                got=f"{name}: {show(value)}",
                span=(0, len(str(name))),
                hint=suggestion(meant),
                known=f"{', '.join(MODEL_SIZES)}, and the rest of a config.json",
                name=name,
                line=line,
            )


def _reject_other_sizes(role: str, model: Mapping[str, Any], found: Found) -> None:
    """Report the folder of a model to `found` if the sizes beside it come from the file of a model of another size.

    The names tell it: `Qwen/Qwen3-32B` beside the sizes in `configs/model/qwen3_8b.yaml`. A folder that exists is left
    out, since its config.json is read in place of the sizes. `role`: the component. `model`: the block of its model.
    """
    path = str(model.get("path"))
    declared = found.sources.get(f"{role}.model.hidden_size")
    if declared is None or os.path.isdir(model_folder(path)):
        return
    file = os.path.basename(declared.file).lower()
    named = _SIZE.search(os.path.basename(path).lower())
    sized = _SIZE.search(file)
    if named is None or sized is None or float(named[1]) == float(sized[1]):
        return
    found.reject(
        "missing-key",
        f"{role}.model.path",
        path,
        error="sizes-of-another-model",
        file=declared.file,
        role=role,
    )


def _key_of_component(role: str, name: str) -> str | None:
    """Return the path of the key of a component that stands in the block of its model; None for another key.

    The name may be that of another library. `role`: the component. `name`: the key.
    """
    ours = KEYS.get(name, "")
    places = [f"{role}{ours}"] if ours.startswith(".") else [f"{role}.{name}"]
    return next((place for place in places if place in all_places(MARKED)), None)
