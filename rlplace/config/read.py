"""Turn a plain mapping into the config, collecting every problem instead of stopping at the first.

::

    mapping ──> replace renamed keys ──> find the kind of job ──> read the blocks ──> Config, problems
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.fields import (
    Field,
    JobName,
    block_at,
    block_below,
    block_in,
    blocks_in,
    default_of,
    fields_of,
    other_job,
    subject_of,
    tag_of,
)
from rlplace.config.fix_lines import without_repeats
from rlplace.config.found import Found, drop, value_at
from rlplace.config.from_environment import decoded
from rlplace.config.keys import (
    COMPONENTS,
    PLACEMENT,
    PRESETS_OF_ALL,
    all_places,
    every_place,
    is_place,
    places_in,
)
from rlplace.config.number_text import as_number, as_thousands
from rlplace.config.of_job import config_of, same_block
from rlplace.config.option_keys import schema_of
from rlplace.config.other_names import (
    BELOW,
    DATA,
    ENV_STEPS,
    LIBRARIES,
    MODEL_SIZES,
    OF_REPLAY,
    OF_SIMULATORS,
    OF_TEXT,
    ON_POLICY,
    as_settings,
    in_several_keys,
    meant_word,
    off_policy,
)
from rlplace.config.own import block_of_name
from rlplace.config.paths import with_homes
from rlplace.config.plausible import implausible
from rlplace.config.schema import Config
from rlplace.config.unknown_keys import (
    UnknownKey,
    key_meant,
    placed_at,
    reject_model_keys,
    reject_unknown,
    similar_lines,
)
from rlplace.config.which_job import MARKED, USUAL, find_job, has_marked_keys
from rlplace.config.yaml_text import quote, show
from rlplace.errors import (
    COMMAND_LINE,
    ConfigError,
    Problem,
    Source,
    one_of,
    source_of,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_T = TypeVar("_T")

# Name of an error -> form of a text that was meant as a key and its value: `prompts:256`, which YAML reads as a text,
# and `prompts 256`, which has no colon
_TORN_LINES = {
    "no-blank": re.compile(r"(\w+):([^\s:].*)"),
    "no-colon": re.compile(r"(\w+) +(\S+)"),
    "equals-for-colon": re.compile(r"(\w+) *= *(\S+)"),
}
MOST_WHOLE = (1 << 63) - 1  # upper bound of whole numbers without another bound
# In the meaning of a key: the value that switches off what the key sets
_OFF_WORDS = (
    "never",
    "none",
    "no",
    "off",
    "disable",
    "disabled",
    "unlimited",
    "infinite",
    "nil",
)
_OFF = re.compile(
    r"\b(null|0): (?:never|none|off|free|from all|all weights|it is constant|as it is)\b"
)
# Keys for partial training; a simulator policy is always trained as a whole.
_CHANGES_TRAINING = (
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "lora_adapter",
)
# Key of a kind of policy -> the key of other kinds that is most like it
_ALIKE = {"hidden": "width", "width": "hidden"}
# Folder of a model; beside a policy that has none, weights to begin with may be meant
_WEIGHTS = "actor.model.path"


@functools.cache
def moved() -> Mapping[str, tuple[str, str]]:
    """Return old key -> (new key, reason), for each renamed config key in moved.toml. The value stays the same."""
    rows = tomllib.loads(
        Path(__file__).with_name("moved.toml").read_text(encoding="utf-8")
    )
    return {old: (new, why) for old, (new, why) in rows.items()}


def read_config(
    mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> Config:
    """Return the Config that a mapping with plain values describes. Raises ConfigError with all problems.

    `sources`: config key -> file and line in which its value is set, for errors.
    """
    config, problems = try_config(mapping, sources)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def try_config(
    mapping: Mapping[str, object], sources: Mapping[str, Source] | None = None
) -> tuple[Config | None, list[Problem]]:
    """Return (config, all problems) of a mapping with plain values. The config is None if it cannot be read.

    `sources`: config key -> file and line in which its value is set, for errors.
    """
    places = sources or {}
    found = Found(sources=sources or {})
    written = with_homes(mapping)
    _spread(written)
    _report_variables(written, found)
    library = _library_of(written, found)
    if library is not None:
        _of_library(library, written, found)
        return None, found.problems
    _replace_renamed(written, found)
    job = find_job(written, found)
    config, problems = read_block(config_of(job), written, job, places)
    if job == MARKED:
        reject_model_keys(written, found)
    if config is not None and config.runs:
        for key, (reason, line) in config.missing.items():
            # Problems of the cluster block are reported by the plan, with all others of that block.
            if not key.startswith("cluster."):
                found.reject(
                    "missing-key", key, error="of-run", reason=reason, line=line
                )
    if config is not None:
        for told in implausible(config):
            found.add(told)
    new = {problem.key: problem for problem in problems}
    # If the new key rejects the value as well, use the fix of that problem.
    for i, problem in enumerate(found.problems):
        if (
            problem.key in moved()
            and (refused := new.get(moved()[problem.key][0])) is not None
        ):
            instead = (
                f"remove {problem.key}" if refused.code == "wrong-kind" else refused.fix
            )
            if (
                moved()[problem.key][0].endswith(".on_host")
                and refused.code == "wrong-type"
            ):
                instead = _switched(problem.key, refused.fix)
            # A value that has become a block: optimizer: adamw is optimizer.kind: adamw
            new_key = moved()[problem.key][0]
            if new_key.startswith(f"{problem.key}.") and instead == refused.fix:
                instead = instead and f"{problem.key.rpartition('.')[2]}: {{{instead}}}"
            found.problems[i] = dataclasses.replace(
                problem, why=refused.what, fix=instead
            )
            problems.remove(refused)
    return config, [*found.problems, *problems]


def read_cluster(cluster: ClusterConfig | Mapping[str, object]) -> ClusterConfig:
    """Return the config block `cluster` as a ClusterConfig. Raises ConfigError with all problems.

    `cluster`: only this block, as a ClusterConfig, a dict or a DictConfig.
    """
    if isinstance(cluster, ClusterConfig):
        return cluster
    config, problems = read_block(
        ClusterConfig, plain_values(cluster), "language_model"
    )
    if config is None or problems:
        raise ConfigError(
            [
                dataclasses.replace(problem, key=f"cluster.{problem.key}")
                for problem in problems
            ]
        )
    return config


def plain_values(value: Any) -> Any:
    """Return a copy of a mapping or sequence, such as a DictConfig, that consists of plain dicts and lists.

    A value of any other type is returned unchanged.
    """
    if isinstance(value, Mapping):
        return {key: plain_values(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_values(each) for each in value]
    return value


def read_block(
    block: type[_T],
    mapping: object,
    job: JobName = USUAL,
    sources: Mapping[str, Source] | None = None,
) -> tuple[_T | None, list[Problem]]:
    """Read a config block. Return (object of the dataclass `block`, all problems); the object is None if unreadable.

    `mapping`: the block as keys and values. `job`: the kind of job. `sources`: config key -> file and line in which its
    value is set, for errors.
    """
    # Imported here, since workers read no configs.
    import pydantic

    from rlplace.config.validate import model_of, plain

    found = Found(sources=sources or {})
    written = _of_job(block, same_block(block, job), mapping, job, "", found)
    try:
        return plain(
            model_of(cast(Any, block), job).model_validate(written)
        ), found.problems
    except pydantic.ValidationError as error:
        for wrong in error.errors(include_url=False):
            _report(block, job, wrong, written, found)
        problems = _without_meant(found.problems)
        return None, without_repeats(problems, cast(Mapping[str, object], written))


def _without_meant(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems without those about a missing key that another problem says how to write.

    A block with a wrong name, such as `placement`, is missing under its right name.
    """
    unknown = [p for p in problems if p.code == "unknown-key"]
    written = set()
    for wrong in unknown:
        above = wrong.key.rpartition(".")[0]
        name = (wrong.fix or "").partition(":")[0]
        written |= {name, f"{above}.{name}"}
        written.add(name.rpartition(".")[0])
        if name == "defaults":
            written.add(PLACEMENT)
    empty = ("missing-key", "wrong-type")
    return [
        p
        for p in problems
        if p.code not in empty
        or p.key not in written
        or (p.code == "wrong-type" and p.got != "null")
    ]


def _of_job(
    ours: type | None,
    theirs: type | None,
    mapping: object,
    job: JobName,
    above: str,
    found: Found,
) -> object:
    """Return a copy of a config block without the keys that only the other kind of job has.

    Each removed key is reported to `found`, unless it has its default value. `ours`: dataclass of the block in the kind
    `job`. `theirs`: dataclass of the block in the other kind of job. `mapping`: the block as keys and values. `above`:
    path of the block with a dot at its end; "" for the whole config.
    """
    if not isinstance(mapping, Mapping) or ours is None:
        return mapping
    other = other_job(job)
    here = fields_of(ours, job)
    there = {} if theirs is None else fields_of(theirs, other)
    kept: dict[str, object] = {}
    for name, value in mapping.items():
        key = f"{above}{name}"
        if (
            name in here
            and len(options := blocks_in(here[name][1])) > 1
            and isinstance(value, Mapping)
        ):
            value = _of_alternative(options, value, job, key, found)
        if name in here or name not in there or _is_another_name(key, value, job):
            inside = [
                block_in(fields[name][1]) if name in fields else None
                for fields in (here, there)
            ]
            kept[str(name)] = _of_job(
                inside[0], inside[1], value, job, f"{key}.", found
            )
        elif value != default_of(there[name][0], other):
            preset = _preset_of(key, found)
            if preset is not None:
                found.reject(
                    "wrong-kind",
                    key,
                    value,
                    error="placement-of-simulators",
                    preset=preset,
                    ours=subject_of(job),
                )
                continue
            # Either the other job was meant, or the key can be removed.
            which = "partial-training" if name in _CHANGES_TRAINING else "other-job"
            unknown = UnknownKey(
                key=key,
                value=value,
                fields=here,
                written={},
                job=job,
                config=config_of(job),
                sources=found.sources,
            )
            similar = similar_lines(unknown) if which == "other-job" else []
            if similar:
                found.reject(
                    "wrong-kind",
                    key,
                    value,
                    error="similar-here",
                    ours=subject_of(job),
                    theirs=subject_of(other),
                    lines=one_of([*similar, f"remove {key}"]),
                )
                continue
            found.reject(
                "wrong-kind",
                key,
                value,
                error=which,
                ours=subject_of(job),
                theirs=subject_of(other),
                path=key,
            )
    return kept


def _preset_of(key: str, found: Found) -> str | None:
    """Return the preset that is meant by a file of configs/placement, which places simulators; None for other files.

    `key`: a key that the file sets. `found`: knows where keys are set.
    """
    source = source_of(key, found.sources)
    if source is None:
        return None
    file = Path(source.file)
    if file.parts[-3:-1] != ("configs", "placement"):
        return None
    return meant_word(file.stem, PRESETS_OF_ALL)


def _is_another_name(key: str, value: object, job: JobName) -> bool:
    """Return whether a key of the other kind of job has the meaning of another library: `env.task` may mean `env.id`.

    The value decides: the id of an environment ends with a version.
    """
    above, _, name = key.rpartition(".")
    ours = BELOW.get(above, {}).get(name)
    return ours in all_places(job) and bool(re.search(r"-v[0-9]+$", str(value)))


def _of_alternative(
    options: Sequence[type],
    mapping: Mapping[Any, object],
    job: JobName,
    above: str,
    found: Found,
) -> Mapping[Any, object]:
    """Return a copy of a config block without keys that belong to alternatives that its `kind` does not select.

    Each removed key is reported to `found`, unless it has its default value. `options`: dataclasses of the
    alternatives. `mapping`: the block as keys and values. `job`: the kind of job. `above`: path of the block.
    """
    block = next(
        (option for option in options if tag_of(option) == mapping.get("kind")),
        options[0],
    )
    kept: dict[Any, object] = {}
    for name, value in mapping.items():
        others = {
            tag_of(o): fields_of(o, job)[name][0]
            for o in options
            if name in fields_of(o, job)
        }
        usuals = [default_of(field, job) for field in others.values()]
        if not others or tag_of(block) in others:
            kept[name] = value
        elif not any(
            value in (usual, list(usual) if isinstance(usual, tuple) else usual)
            for usual in usuals
        ):
            key = f"{above}.{name}"
            # The same size, which has another name in this kind
            alike = _ALIKE.get(name, "")
            sizes = value if isinstance(value, list) else [value]
            if alike in fields_of(block, job) and len(sizes) == 1:
                found.reject(
                    "wrong-kind",
                    key,
                    value,
                    error="alike-of-model",
                    above=above,
                    kind=tag_of(block),
                    kinds=", ".join(others),
                    name=alike,
                    line=f"{above}.{alike}={show(sizes[0])}"
                    if _is_typed(key, found)
                    else f"{alike}: {show(sizes[0])}",
                )
                continue
            # Weights of a policy may be meant
            error = "policy-file" if key == _WEIGHTS else "other-model"
            found.reject(
                "wrong-kind",
                key,
                value,
                error=error,
                above=above,
                kinds=", ".join(others),
                kind=tag_of(block),
                path=key,
            )
    return kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wrong:
    """An error of pydantic about a key of a config.

    `details`: the error itself. `path`, `key`: path of the key, as steps and as text. `block`: dataclass of the block
    with the key. `block_of_all`: dataclass of the block that is read. `job`: the kind of job. `written`: the whole
    config.
    """

    details: ErrorDetails
    path: Sequence[int | str]
    key: str
    block: type
    block_of_all: type
    job: JobName
    written: Any

    @property
    def leaf(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def fields(self) -> Mapping[str, Field]:
        """The known fields of the block."""
        return fields_of(self.block, self.job)

    @property
    def is_item(self) -> bool:
        """Whether the value is an item of a list."""
        return bool(self.path) and isinstance(self.path[-1], int)


def _report(
    block: type, job: JobName, details: ErrorDetails, written: Any, found: Found
) -> None:
    """Report an error of pydantic to `found`. `block`: dataclass of the whole config. `written`: the config."""
    # The path without the steps that name alternatives of a type.
    path = [step for step in details["loc"] if not str(step).startswith("<")]
    key = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in path
    ).removeprefix(".")
    wrong = _Wrong(
        details=details,
        path=path,
        key=key or "config",
        block=block_at(block, job, details["loc"][:-1]),
        block_of_all=block,
        job=job,
        written=written,
    )
    value = details["input"]
    match details["type"]:
        case "missing":
            field, _ = wrong.fields[str(path[-1])]
            leaf = wrong.leaf
            found.reject(
                "missing-key",
                wrong.key,
                error="placement" if wrong.key == PLACEMENT else "without-default",
                about=field.metadata.get("doc"),
                leaf=leaf,
            )
        # A key may also be a number, or a word that YAML reads as one
        case "extra_forbidden" | "invalid_key":
            unknown = UnknownKey(
                key=wrong.key,
                value=value,
                fields=wrong.fields,
                written=written,
                job=job,
                config=_whole_config(block, job),
                sources=found.sources,
            )
            reject_unknown(unknown, found)
        case "model_type":
            _report_no_block(wrong, found)
        case "several_values":
            _report_several_values(wrong, found)
        case _ if wrong.key == "cluster.nodes" and type(value) is int:
            found.reject(
                "wrong-type", wrong.key, value, error="list-of-nodes", number=value
            )
        case _:
            _report_value(wrong, found)


def _whole_config(block: type, job: JobName) -> type:
    """Return the type of the whole config: `block`, or the job's config if `block` is read alone.

    A job beside the shipped ones, such as the off-policy job, has a config of its own.
    """
    if "cluster" in fields_of(block, job):
        return block
    return config_of(job)


def _report_no_block(wrong: _Wrong, found: Found) -> None:
    """Report to `found` a value that stands where a block of keys has to be."""
    path = wrong.path
    leaf = wrong.leaf
    value = wrong.details["input"]
    below = block_below(wrong.block, wrong.job, path[-1]) if path else wrong.block
    known = fields_of(below, wrong.job)
    if wrong.details["loc"][-2:-1] == ("<names>",) and leaf in known:
        beside = functools.reduce(lambda of, step: of[step], path[:-1], wrong.written)
        names = [name for name in beside if name not in known]
        found.reject(
            "wrong-type",
            wrong.key,
            value,
            error="beside-names",
            names=", ".join(map(str, names)),
            first=names[0],
            leaf=leaf,
            shown=show(value),
        )
        return
    # The place of a component: actor: 0-7
    if len(path) == 1 and leaf in COMPONENTS and is_place(value):
        line = placed_at(leaf, value, wrong.written)
        error = "place-of-component"
        if str(found.sources.get(wrong.key, "")).startswith(COMMAND_LINE):
            error = "place-as-override"
            line = shlex.quote(line.replace(": ", "=", 1))
        found.reject(
            "wrong-type",
            wrong.key,
            value,
            error=error,
            name=leaf,
            line=line,
        )
        return
    text = value if isinstance(value, str) else ""
    # Several lines, which YAML joins by blanks
    pairs = re.findall(r"(\w+)(?:: *| *= *)(\S+)", text)
    joined = re.fullmatch(r"(?:\w+(?:: *| *= *)\S+(?: +|$)){2,}", text)
    if joined is not None and {name for name, _ in pairs} <= {*known}:
        lines = "\n".join(f"{name}: {written}" for name, written in pairs)
        found.reject("wrong-type", wrong.key, value, error="torn-lines", lines=lines)
        return
    for error, form in _TORN_LINES.items():
        torn = form.fullmatch(text)
        if torn is not None and torn[1] in known:
            found.reject(
                "wrong-type",
                wrong.key,
                value,
                error=error,
                name=torn[1],
                written=torn[2],
            )
            return
    line = f"{leaf}: {block_of_name(below, value)}"
    if wrong.is_item:
        # All names of the list at once
        items = functools.reduce(lambda of, step: of[step], path[:-1], wrong.written)
        texts = [
            block_of_name(below, item) if isinstance(item, str) else quote(item)
            for item in items
        ]
        texts[int(path[-1])] = block_of_name(below, value)
        line = f"{path[-2]}: [{', '.join(texts)}]"
    found.reject("wrong-type", wrong.key, value, error="block-by-name", line=line)


def _report_several_values(wrong: _Wrong, found: Found) -> None:
    """Report to `found` a list of numbers for a key that takes one: probably, one run for each is meant."""
    value = wrong.details["input"]
    is_typed = str(found.sources.get(wrong.key, "")).startswith(COMMAND_LINE)
    pair = _in_several_lines(wrong, found)
    if pair is not None:
        sweep = f"-m {wrong.key}={','.join(map(show, value))}"
        found.reject(
            "wrong-type",
            wrong.key,
            value,
            error="pair-for-number",
            lines=one_of([pair, sweep]) if is_typed else pair,
        )
        return
    found.reject(
        "wrong-type",
        wrong.key,
        value,
        error="sweep-in-brackets" if is_typed else "list-for-number",
        path=wrong.key,
        leaf=wrong.leaf,
        values=",".join(map(show, value)),
    )


def _report_value(wrong: _Wrong, found: Found) -> None:
    """Report to `found` a value that its key does not take."""
    value = wrong.details["input"]
    if wrong.key == "algorithm.name" and "learning_starts" in wrong.fields:
        typed = str(found.sources.get(wrong.key, "")).startswith(COMMAND_LINE)
        if _report_algorithm(value, typed=typed, found=found):
            return
    kind = wrong.details["type"]
    leaf = wrong.leaf
    context = wrong.details["ctx"]
    text = context["fix"] or _such_as(
        wrong.block, wrong.job, wrong.details["loc"], context, value
    )
    fits = text and f"{leaf}: {text}"
    if text and wrong.is_item:
        # The fix shows the whole list, without a remark on the item
        item = text.partition(" " * 8)[0]
        fits = _whole_list(wrong.path, item, wrong.written)
    source = found.sources.get(wrong.key)
    if source is not None and source.written is not None and kind == "wrong-type":
        fits = decoded(leaf, source.written, fits=context["fix"] is not None)
    why = context["why"]
    if not wrong.is_item:
        fits = _in_several_lines(wrong, found) or fits
    if value == 0 and kind == "out-of-bounds" and not wrong.is_item:
        field, _ = wrong.fields[leaf]
        why, fits = field.metadata.get("zero", (why, fits))
    if str(value).lower() in _OFF_WORDS and not wrong.is_item:
        meant = _off_by_word(wrong)
        fits = f"{leaf}: {meant}" if meant else fits
    if kind == "out-of-bounds" and value in (0, -1) and not wrong.is_item:
        meant = _switched_off(value, wrong)
        fits = f"{leaf}: {meant}" if meant else fits
    told = dataclasses.replace(
        context["told"], key=wrong.key, got=show(value), why=why, fix=fits
    )
    found.add(told)


def _in_several_lines(wrong: _Wrong, found: Found) -> str | None:
    """Return the lines that say what a value of another library says in one: lr: lin_3e-4; None for another value."""
    several = in_several_keys(wrong.leaf, wrong.details["input"])
    role = wrong.key.partition(".")[0]
    known = places_in(_whole_config(wrong.block_of_all, wrong.job), wrong.job)
    lines = []
    for place, value in several.items():
        path = f"{role}{place}" if place.startswith(".") else place
        if path not in known:
            path = path.replace(".optimizer.", ".")
        if path not in known:
            return None
        lines.append((path, value))
    if not lines:
        return None
    if _is_typed(wrong.key, found):
        words = [shlex.quote(f"{path}={show(value)}") for path, value in lines]
        return " ".join(words)
    block = wrong.key.rpartition(".")[0]
    shown = [
        f"{path.removeprefix(f'{block}.')}: {show(value)}" for path, value in lines
    ]
    return "\n".join(shown)


def _report_algorithm(value: object, *, typed: bool, found: Found) -> bool:
    """Report the name of an algorithm without replay memory, or of one with settings of its own, to `found`.

    Return whether it is such a name. `typed`: whether it stands on the command line.
    """
    settings = as_settings(value, typed=typed, among=OF_REPLAY)
    if settings is None and value not in ON_POLICY:
        return False
    error = "on-policy" if settings is None else "settings-of-another"
    found.reject(
        "unknown-choice", "algorithm.name", value, error=error, settings=settings
    )
    return True


def _switched_off(value: object, wrong: _Wrong) -> str | None:
    """Return the value that switches off what a key sets, if 0 or -1 is written for it; None if it has no such value.

    The meaning of the key says which value that is: `null: never`, `0: none`.
    """
    field, _ = wrong.fields[wrong.leaf]
    off = _OFF.search(field.metadata.get("doc", ""))
    # Of a key that may be null, -1 is a habit for it
    if off is None and value == -1:
        off = re.search(r"\b(null): ", field.metadata.get("doc", ""))
    if off is None or (off[1] == "0" and value == 0):
        return None
    return off[1]


def _off_by_word(wrong: _Wrong) -> str | None:
    """Return the value that switches off what a key sets, if a word such as `never` is written for it; else None."""
    field, hint = wrong.fields[wrong.leaf]
    off = _OFF.search(field.metadata.get("doc", ""))
    if off is not None:
        return off[1]
    return "null" if type(None) in get_args(hint) else None


def _such_as(
    block: type,
    job: JobName,
    path: Sequence[int | str],
    wrong: Mapping[str, Any],
    value: object,
) -> str | None:
    """Return a text about the valid values of a key, such as `<a whole number, such as 8>`; None for an unknown key.

    `block`: dataclass of the block with the key. `path`: path of the key. `wrong`: context of the pydantic error about
    the wrong value. `value`: the wrong value.
    """
    name = str(
        next(
            step
            for step in reversed(path)
            if isinstance(step, str) and not step.startswith("<")
        )
    )
    if name not in (fields := fields_of(block, job)):
        return None
    what = wrong["what"].removeprefix("expected ")
    why = wrong["why"] or ""
    if wrong["what"].startswith("must be "):
        what = (
            "a value "
            + what.removeprefix("must be ").partition(f" and <= {MOST_WHOLE}")[0]
        )
        what = "a finite number" if what == "a value finite" else what
    elif why.startswith("choices: "):
        return f"<one of {why.removeprefix('choices: ')}>"
    elif what == wrong["what"]:
        what = "a value"
    field, _ = fields[name]
    # The meaning of the key shows a block that has the value: lend: actor
    meaning = f"{why} {field.metadata.get('doc')}"
    shown = re.search(r"such as ([a-z_]+): ([a-z_]+)", meaning)
    in_block = shown.groups() if shown is not None else ()
    if what == "a block of keys" and in_block and value in (True, *in_block):
        return f"{{{in_block[0]}: {in_block[1]}}}"
    usual = "16GiB" if field.metadata.get("unit") == "bytes" else default_of(field, job)
    plain = (
        isinstance(usual, (int, float, str))
        and not isinstance(usual, bool)
        and usual != ""
    )
    if plain:
        return f"<{what}, such as {quote(usual)}>"
    return f"<{what}>"


def _whole_list(path: Sequence[int | str], text: str, written: Any) -> str:
    """Return a config line with a complete list. The text `text` replaces the list item at `path`.

    `written`: the config with the list. `path`: ends with the key of the list and the index of the item.
    """
    items = functools.reduce(lambda of, step: of[step], path[:-1], written)
    return f"{path[-2]}: [{', '.join(text if i == path[-1] else quote(item) for i, item in enumerate(items))}]"


def _is_block(name: str, mapping: Mapping[str, object]) -> bool:
    """Return whether a name is that of a block of the shipped jobs, or of one that the config has."""
    return name in every_place() or isinstance(mapping.get(name), Mapping)


def nested(mapping: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of a config in which top-level keys with dots, such as `cluster.changes`, are in their blocks."""
    copy: dict[str, Any] = plain_values(mapping)
    _spread(copy)
    return copy


def _spread(mapping: dict[str, Any]) -> None:
    """Move top-level keys with dots, such as `actor.micro_batch: 4`, into the blocks that the dots name.

    A moved value replaces the present value in the block; two blocks are merged. `mapping`: the config, which is
    changed in place.
    """
    for path in [
        path
        for path in mapping
        if "." in str(path) and _is_block(str(path).partition(".")[0], mapping)
    ]:
        value = mapping.pop(path)
        keys = mapping
        above, _, component = path.partition(f"{PLACEMENT}.")
        steps = (
            [*PLACEMENT.split("."), component]
            if component and not above
            else path.split(".")
        )
        for step in steps[:-1]:
            keys[step] = keys = keys[step] if isinstance(keys.get(step), dict) else {}
        old = keys.get(steps[-1])
        keys[steps[-1]] = (
            {**old, **value}
            if isinstance(old, dict) and isinstance(value, dict)
            else value
        )


def _library_of(written: Mapping[str, object], found: Found) -> str | None:
    """Return the library of which a config has a block; None if it has none.

    A block that several libraries have tells it only on a command line, where each key is read by itself.
    """
    for block, library in LIBRARIES.items():
        if block in written and (block != DATA or _is_typed(block, found)):
            return library
    return None


def _of_library(library: str, written: Mapping[str, object], found: Found) -> None:
    """Report one problem to `found`: the config `written` is a config of the library `library`, not of rlplace."""
    theirs = [key for key in written if key in LIBRARIES]
    # Words of a command line: each has a key of its own
    if all(_is_typed(key, found) for key in theirs):
        rest = {key: value for key, value in written.items() if key not in LIBRARIES}
        schema = schema_of(rest)
        for key in theirs:
            for path, value in _leaves(key, written[key]):
                # A block of settings of the run has no block here
                name = path.removeprefix("actor_rollout_ref.")
                name = re.sub(r"^(?:trainer|grpo|loss_fn)\.", "", name)
                if name.startswith("model."):
                    name = f"actor.{name}"
                meant = None
                if schema is not None:
                    meant = key_meant(name, value, written, *schema)
                error = "no-word-of-library"
                if meant is not None:
                    because = meant.reason is not None
                    error = "measure-of-library" if because else "word-of-library"
                found.reject(
                    "unknown-key",
                    path,
                    value,
                    error=error,
                    library=library,
                    line=meant and _left_out(meant.fix, path),
                    name=path,
                    reason=meant and meant.reason,
                )
        return
    found.reject(
        "unknown-key",
        theirs[0],
        error="block-of-library" if len(theirs) == 1 else "blocks-of-library",
        library=library,
        blocks=", ".join(theirs),
    )


def _left_out(fix: str, path: str) -> str:
    """Return the fix of a key of another library; a key that is to be left out is named with its whole path."""
    return f"leave out {path}" if fix.startswith("leave out ") else fix


def _report_variables(written: Mapping[str, object], found: Found) -> None:
    """Report each text to `found` that begins with a variable of the shell, such as `$HOME/runs`: it stays as it is."""
    for name, block in written.items():
        for path, value in _leaves(name, block):
            # At its beginning, or as a part of a path or an address
            form = re.compile(r"(?:(?<=[/:@])|^)\$([A-Z_][A-Z0-9_]*)(?=[/:.@]|$)")
            if not isinstance(value, str) or form.search(value) is None:
                continue
            leaf = path.rpartition(".")[2]
            filled = form.sub(r"${oc.env:\1}", value)
            found.reject(
                "bad-config",
                path,
                value,
                error="variable-of-shell",
                line=f"{leaf}: {filled}",
            )


def _is_typed(key: str, found: Found) -> bool:
    """Return whether a key is set on the command line. `found`: knows where keys are set."""
    source = source_of(key, found.sources)
    return source is not None and source.file.startswith(COMMAND_LINE)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield (path, value) for each plain value below a key. `path`: path of the key. `value`: its value."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, below in value.items():
        yield from _leaves(f"{path}.{name}", below)


# ── renamed keys ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _replace_renamed(new: dict[str, Any], found: Found) -> None:
    """Replace old names of renamed keys in a config by their new names, and report each old name to `found`.

    `new`: the config, which is changed in place.
    """
    written: dict[str, object] = {}
    meant: dict[str, object] = {}
    doubled: dict[str, str] = {}
    joined = {
        old
        for old in moved()
        if old.endswith(".adam") and isinstance(value_at(new, moved()[old][0]), dict)
    }
    for old, (path, _) in moved().items():
        role, _, leaf = old.rpartition(".")
        keys = new.get(role) if role else new
        if (
            isinstance(keys, dict)
            and leaf in keys
            and (leaf != "optimizer" or isinstance(keys[leaf], str))
        ):
            written[old] = value = keys.pop(leaf)
            if leaf in ENV_STEPS:
                value = _iterations(value, new)
            elif old == "model":
                # A name alone is the folder of the model
                named = {"path": value} if isinstance(value, str) else {}
                block = value if isinstance(value, dict) else named
                # A block with keys of a policy alone stays one of a simulator's
                of_language = not block or not {*block}.isdisjoint(MODEL_SIZES)
                if of_language or has_marked_keys(new):
                    block = {"kind": "causal_lm"} | block
                value = block
            meant[old] = value
            if ".optimizer." in path:
                # The fix shows the whole block with this value.
                drop(new, path)
            elif not isinstance(value_at(new, path), (dict, NoneType)):
                doubled[old] = (
                    f"{path}: {show(value)}        (a line without indent, in place of {leaf})"
                )
            _put(new, path, value)
    for old, value in written.items():
        path, reason = moved()[old]
        # The block of the optimizer is replaced as a whole.
        key = ".".join(path.split(".")[:2])
        name = (
            key.rpartition(".")[2]
            if old.partition(".")[0] == key.partition(".")[0]
            else key
        )
        beside = (
            " " * 8 + f"(and remove {old.rpartition('.')[2]})" if old in joined else ""
        )
        line = doubled.get(old) or f"{name}: {show(value_at(new, key))}{beside}"
        if (
            source := source_of(old, found.sources)
        ) is not None and source.file.startswith(COMMAND_LINE):
            # The block is merged into the one of the file.
            line = f"{path}: {show(meant[old])}"
        found.reject(
            "renamed-key",
            old,
            value,
            error="moved",
            path=path,
            reason=reason,
            line=line,
        )
    algorithm = new.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") == "rlhf":
        found.reject("renamed-key", "algorithm.name", "rlhf", error="algorithm-rlhf")
        algorithm["name"] = "ppo"
        _put(new, "actor.model", {"kind": "causal_lm"})
    elif isinstance(algorithm, dict):
        text = has_marked_keys(new)
        source = source_of("algorithm.name", found.sources)
        typed = source is not None and source.file.startswith(COMMAND_LINE)
        chosen = algorithm.get("name")
        settings = as_settings(
            chosen, typed=typed, among=OF_TEXT if text else OF_SIMULATORS
        )
        if settings is not None or (off_policy(chosen) and not text):
            found.reject(
                "unknown-choice",
                "algorithm.name",
                chosen,
                error="off-policy" if settings is None else "settings-of-another",
                settings=settings,
            )
            algorithm["name"] = "grpo" if text else "ppo"


def _switched(old: str, fix: str | None) -> str:
    """Return a remedy, as text, for the renamed key `old` if its new key needs true or false, but the value is neither.

    `fix`: config line with the value that is probably meant. None: this is not clear; the result then offers a line
    with true and a line with false.
    """
    lines = [
        f"{moved()[old][0]}: {meant}"
        for meant in (fix.partition(": ")[2:] if fix else ("true", "false"))
    ]
    if fix:
        return f"{lines[0]}        (a line without indent, in place of {old})"
    return one_of(lines)


def _put(keys: Any, path: str, value: object) -> None:
    """Set the key at `path` in the config `keys` to `value`. A key that already has a value is not changed.

    If both values are blocks, the blocks are merged.
    """
    name, _, below = path.partition(".")
    if not isinstance(keys, dict):
        return
    if below:
        if keys.get(name) is None:
            keys[name] = {}
        _put(keys[name], below, value)
    elif keys.get(name) is None:
        keys[name] = value
    elif isinstance(value, dict) and isinstance(keys[name], dict):
        keys[name] = keys[name] | value if name == "optimizer" else value | keys[name]


def _iterations(written: object, mapping: Mapping[str, Any]) -> object:
    """Return the number of iterations that a run needs for `written` environment steps, rounded up.

    `mapping`: the config. Return 100 if `written`, or the number of environments or steps in the config, is not a
    number above 0. A text such as `1e6` is a number too.
    """
    if isinstance(written, str):
        thousands = as_thousands(written, "")
        text = as_number(written, int) or (thousands and thousands.number)
        written = int(text) if text else None
    keys = (("env", "total_num_envs"), ("algorithm", "rollout_steps"))
    numbers = [
        (block if isinstance(block := mapping.get(role), dict) else {}).get(key, 64)
        for role, key in keys
    ]
    if not all(
        isinstance(number, (int, float)) and number > 0
        for number in (written, *numbers)
    ):
        return 100
    return math.ceil(written / math.prod(numbers))
