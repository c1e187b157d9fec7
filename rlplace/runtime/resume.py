"""Resume from a checkpoint: find and verify it, compare its job with the current job, and refuse another experiment.

::

    resume=auto ── newest checkpoint of the job ── files as written? ── keys that differ ── plans that differ ──▶ launch
                                                    no: refused          another experiment: refused
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rlplace.checkpoints.checkpoint import CONFIG, Checkpoint
from rlplace.checkpoints.find import ANEW, AUTO, find, verify, whole_ones
from rlplace.checks.unplaced import without_unread
from rlplace.codes import problem
from rlplace.config.compose import override
from rlplace.config.open_job import OpenConfig
from rlplace.config.yaml_text import show
from rlplace.contract.reading import read_job
from rlplace.contract.registry import hidden_passwords, job_of, with_job_of
from rlplace.errors import ConfigError, Problem, ProblemsError, source_of
from rlplace.placement.plan import Plan
from rlplace.placement.show.text import render_diff
from rlplace.placement.show.view import PlanView
from rlplace.runtime import inputs
from rlplace.runtime.changes import job_after
from rlplace.runtime.inputs import INPUTS
from rlplace.runtime.prepare import Prepared, prepare
from rlplace.units import clipped

# Patterns of keys. The first list with a matching key counts; a key in no list changes the numbers of what follows.
_SAFE = (
    *(
        "cluster.*",
        "checkpoint.*",
        "memory.*",
        "resume",
        "resume_allow",
        "init_from",
        "profile",
        "dry_run",
    ),
    *("faults.restarts", "faults.*_s", "faults.on_node_loss"),
    *(
        "runner.total_iterations",
        "runner.stop_at_return",
        "runner.eval_*",
        "runner.output_dir",
        "runner.sinks",
    ),
    *(
        "runner.*_s",
        "*.enable_offload",
        "*.accelerator_memory",
        "*.host_memory",
        "*.workspace_memory",
    ),
    *(
        "*.gpu_memory_utilization",
        "*.kv_cache_memory",
        "*.sleep_level",
        "*.enforce_eager",
        "env.reward_*",
    ),
    *(
        "*.sync.verify*",
        "*.through_host",
        "*.checkpointing",
        "*.zero_stage",
        "*.token_budget",
        "*.micro_batch",
    ),
    *(
        "reward.*timeout_s",
        "reward.*retries",
        "reward.*batch",
        "reward.*concurrency",
        "reward.*api_key_env",
    ),
    *(
        "reward.*on_host",
        "reward.*sharded",
        "*.activation_offload",
        "algorithm.share_prompts",
    ),
)
# A changed key here changes the shape of the saved state, so the change cannot be allowed.
_SHAPES = (
    *(
        "actor.model",
        "actor.model.*",
        "critic.model",
        "critic.model.*",
        "critic.on_actor",
    ),
    *(
        "*.lora_rank",
        "*.lora_targets",
        "actor.lora_adapter",
        "env.id",
        "env.total_num_envs",
        "algorithm.normalize_observations",
    ),
)
_EXPERIMENT = (
    *(
        "env",
        "env.*",
        "algorithm.*",
        "reward",
        "reward.*",
        "teacher.coef",
        "teacher.discount",
        "*.model",
        "*.model.*",
        "runner.seed",
    ),
    *("*.lora_alpha", "*.ema_decay", "*.weights"),
)
# keys of the task; resume=auto skips runs of other tasks
_TASK = ("env.kind", "env.id", "env.task")
# Keys of a job of `contract.Job` that are safe. Its `resume_keys` are refused; the changes of all others are told.
_SAFE_OF_CUSTOM = (
    "cluster.*",
    "checkpoint.*",
    "memory.*",
    "resume",
    "resume_allow",
    "profile",
    "dry_run",
    "faults.restarts",
    "faults.*_s",
    "faults.on_node_loss",
    "runner.total_iterations",
    "runner.stop_at_return",
    "runner.eval_*",
    "runner.output_dir",
    "runner.sinks",
    "runner.*_s",
)
# Keys of the engine in the block of each component.
_SAFE_OF_COMPONENT = (
    "enable_offload",
    "memory.weights",
    "memory.full",
    "memory.working",
    "memory.host",
)
_ABSENT = "(none)"  # shown instead of a value if one of the two configs lacks the key
# key -> (value in the checkpoint, value now)
Differences = Mapping[str, tuple[object, object]]
_LONGEST = 40  # most characters of a value that are shown


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A checkpoint from which a job may be resumed.

    `text`: description of the checkpoint, and of what differs between its config and the job. `complete`: whether the
    run has done all iterations of the job, so that nothing is left to do.
    """

    checkpoint: Checkpoint
    text: str  # description of the checkpoint and of the differences
    complete: bool = False


def resumed(job: Prepared) -> Resumed | None:
    """Return the checkpoint that the config key `resume` names, after a check of its files, and a text about it.

    Return None if `resume` is null, or if `resume` is "auto" and the job has no checkpoint yet. Raises ConfigError if
    no checkpoint is complete, if the checkpoint belongs to another experiment, or if it is named and has no iterations
    left.
    """
    config = job.config
    if config.resume is None:
        return None
    checkpoint = find(config.resume, Path(config.runner.output_dir) / job.view.name)
    if checkpoint is None:
        return None
    # The search for "auto" has verified the files already.
    if config.resume != AUTO:
        verify(checkpoint)
    mapping = with_job_of(yaml.safe_load(checkpoint.text(CONFIG)), job.mapping)
    # An older version has saved blocks that nothing reads
    mapping = dict(without_unread(mapping, job.plan.warnings))
    # Passwords of addresses are not saved, so they are not compared.
    differences = _differences(
        read_job(hidden_passwords(mapping)), read_job(hidden_passwords(job.mapping))
    )
    rules = _rules(config)
    task = [key for key in rules.task if key in differences]
    if config.resume == AUTO and task:
        raise ConfigError(
            [_other_task(job, checkpoint, key, *differences[key]) for key in task]
        )
    changed = _changed_inputs(job, checkpoint, differences)
    problems = list(_other_experiment(job, differences, changed))
    over = list(_over(job, checkpoint))
    # With "auto" one command line serves for every start, also for one after the last iteration
    if over and not problems and config.resume == AUTO:
        more = f"runner.total_iterations=<more than {checkpoint.iteration}>"
        done = f"{checkpoint.folder}: all {checkpoint.iteration} iterations are done"
        text = f"nothing is left to do: {done}        (for more: {more})"
        text = "\n".join([*checkpoint.chosen, text])
        return Resumed(checkpoint=checkpoint, text=text, complete=True)
    if problems or over:
        raise ConfigError([*problems, *over])
    text = _text(job, checkpoint, differences, mapping, changed)
    return Resumed(checkpoint=checkpoint, text=text)


def _changed_inputs(
    job: Prepared, checkpoint: Checkpoint, differences: Differences
) -> Mapping[str, inputs.Change]:
    """Return key -> what has changed since the checkpoint of the files that the key names: data, models and code.

    Keys in `differences` are left out: they name something else now. A checkpoint of an older version has no record of
    files.
    """
    if INPUTS not in checkpoint.files:
        return {}
    code: Mapping[str, type] = {}
    if isinstance(job.config, OpenConfig):
        code = job_of(job.config).workers(job.config, job.plan)
    before = checkpoint.values(INPUTS)
    changed = inputs.changes(before, inputs.inputs_of(job.mapping, code))
    return {
        key: change
        for key, change in changed.items()
        if not _is_within(inputs.config_key_of(key), tuple(differences))
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """Patterns of config keys, sorted by the effect that a change of the key has on a resumed run.

    `safe`: the run has the same results as without the change. `safe_if_set`: it has the same results if both configs
    have a value. `shapes`: the saved state cannot be loaded. `shapes_if_unset`: it cannot be loaded if one of the
    configs has no value. `experiment`: the run becomes another experiment. `task`: the run trains on another task.
    """

    safe: Sequence[str]
    # Keys that are safe if both configs have a value.
    safe_if_set: Sequence[str]
    shapes: Sequence[str]
    # Keys that count as `shapes` if one of the two configs has no value.
    shapes_if_unset: Sequence[str]
    experiment: Sequence[str]
    task: Sequence[str]


def _rules(config: Any) -> _Rules:
    """Return the rules for the keys of a config, which are different for shipped jobs and for custom jobs."""
    if not isinstance(config, OpenConfig):
        return _Rules(
            safe=_SAFE,
            safe_if_set=("reward.*url",),
            shapes=_SHAPES,
            shapes_if_unset=("*.ema_decay",),
            experiment=_EXPERIMENT,
            task=_TASK,
        )
    own = [f"{name}.{key}" for name in config.components for key in _SAFE_OF_COMPONENT]
    keys = job_of(config).resume_keys()
    return _Rules(
        safe=(*_SAFE_OF_CUSTOM, *own),
        safe_if_set=(),
        shapes=keys.shapes,
        shapes_if_unset=(),
        experiment=keys.experiment,
        task=keys.task,
    )


def _differences(before: Any, now: Any) -> Differences:
    old = _written(before)
    new = _written(now)
    keys = (
        key
        for key in dict.fromkeys((*old, *new))
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    )
    return {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys}


def _written(config: Any) -> dict[str, object]:
    """Return key path -> value, for all keys of a config. The key paths are those of a YAML file."""
    if not isinstance(config, OpenConfig):
        return dict(_flat(config))
    # A component has keys of the engine, in `components`, and keys of its worker, in `settings`.
    found = dict(_flat(config.engine))
    for name, block in (*config.components.items(), *config.settings.items()):
        found |= _flat(block, name)
    return found


def _flat(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key path, value) for each value in a config block. Key paths have at most four parts.

    `value`: the block. `key`: key path of the block; "" for a whole config. Lists, and mappings at a key path
    of four parts, are yielded as values.
    """
    if isinstance(value, tuple):
        value = [
            dict(_flat(each)) if dataclasses.is_dataclass(each) else each
            for each in value
        ]
    elif dataclasses.is_dataclass(value):
        value = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping) and key.count(".") < 3:
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _is(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _safe(rules: _Rules, key: str, old: object, new: object) -> bool:
    """Return whether the results of the run stay the same after a change of the value of `key` from `old` to `new`.

    `rules`: patterns of keys, by the effect of their changes.
    """
    moved = _is(key, rules.safe_if_set) and None not in (old, new)
    return ".kwargs." not in key and (moved or _is(key, rules.safe))


def _shapes(rules: _Rules, key: str, old: object, new: object) -> bool:
    """Return whether the saved state cannot be loaded after a change of the value of `key` from `old` to `new`.

    `rules`: patterns of keys, by the effect of their changes. Return False for the path of a model (`*.model.path`).
    """
    averaged = _is(key, rules.shapes_if_unset) and None in (old, new)
    return averaged or (_is(key, rules.shapes) and not key.endswith(".model.path"))


def _other_experiment(
    job: Prepared,
    differences: Differences,
    changed: Mapping[str, inputs.Change] | None = None,
) -> Iterator[Problem]:
    """Yield a problem for each key that makes the job another experiment, unless `resume_allow` names the key.

    `differences`: key -> (value in the checkpoint, value in the job). `changed`: key -> what has changed of the files
    that the key names.
    """
    allowed = job.config.resume_allow
    rules = _rules(job.config)
    # Of a custom job, only its workers know what its files mean
    custom = isinstance(job.config, OpenConfig)
    edited = []
    for key, change in (changed or {}).items():
        unknown = custom and not _is(key, rules.experiment)
        told = unknown or not inputs.affects_learning(key)
        told = told or not change.certain
        if not told and not _is_within(key, allowed):
            edited.append(key)
    shaping = [
        key for key, values in differences.items() if _shapes(rules, key, *values)
    ]
    refused = [
        key
        for key, values in differences.items()
        if key not in shaping
        and not _safe(rules, key, *values)
        and _is(key, rules.experiment)
        and not _is_within(key, allowed)
    ]
    to_allow = ",".join((*allowed, *refused, *edited))
    for key in (*shaping, *refused):
        old, new = differences[key]
        error = "value"
        if old == _ABSENT:
            error = "key"
        if key in shaping:
            error = "state"
            if old == _ABSENT:
                error = "key-of-state"
        yield problem(
            "other-experiment",
            key,
            _short(new),
            error=error,
            source=source_of(key, job.sources),
            name=key,
            before=_short(old),
            word=override(key, old),
            allowed=to_allow,
        )
    for key in edited:
        assert changed is not None, "what is edited is among what has changed"
        yield problem(
            "other-experiment",
            key,
            changed[key].file,
            error="files",
            source=source_of(key, job.sources),
            changed=changed[key].what,
            allowed=to_allow,
        )


def _is_within(key: str, blocks: Sequence[str]) -> bool:
    """Return whether `key` is one of `blocks`, which are keys, or lies within one of them."""
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _other_task(
    job: Prepared, newest: Checkpoint, key: str, old: object, new: object
) -> Problem:
    """Return the problem that "auto" has found a checkpoint of a run of another task.

    `newest`: the checkpoint. `key`: the key that differs, with its value `old` in the checkpoint and `new` in the job.
    The problem offers the newest run that can be resumed.
    """
    fix = ANEW
    seen = set[Path]()
    for checkpoint in whole_ones(newest.run.parent):
        # Only the newest checkpoint of each run counts.
        if checkpoint.run in seen:
            continue
        seen.add(checkpoint.run)
        try:
            saved = yaml.safe_load(checkpoint.text(CONFIG))
            then = read_job(hidden_passwords(with_job_of(saved, job.mapping)))
        except ConfigError:  # of another version
            continue
        now = read_job(hidden_passwords(job.mapping))
        differences = _differences(then, now)
        if not (
            any(_other_experiment(job, differences)) or any(_over(job, checkpoint))
        ):
            fix = shlex.quote(f"resume={checkpoint.run}")
            break
    return problem(
        "other-experiment",
        key,
        _short(new),
        error="newest",
        source=source_of(key, job.sources),
        run=newest.run,
        before=_short(old),
        word=fix,
    )


def _over(job: Prepared, checkpoint: Checkpoint) -> Iterator[Problem]:
    last = job.config.runner.total_iterations
    done = checkpoint.iteration
    if done >= last:
        yield problem(
            "nothing-left",
            "runner.total_iterations",
            str(last),
            error="iterations",
            source=source_of("runner.total_iterations", job.sources),
            folder=checkpoint.folder,
            done=done,
            more=2 * done,
        )


def _text(
    job: Prepared,
    checkpoint: Checkpoint,
    differences: Differences,
    mapping: Mapping[str, Any],
    changed: Mapping[str, inputs.Change],
) -> str:
    """Return a text about the checkpoint, the keys, files and plans that differ, and the effect of each difference.

    `differences`: key -> (value in the checkpoint, value in the job). `mapping`: the config of the checkpoint.
    `changed`: key -> what has changed of the files that the key names.
    """
    total = job.config.runner.total_iterations
    lines = [
        *checkpoint.notes,
        *checkpoint.chosen,
        f"resumes {checkpoint.folder}: {checkpoint.iteration} of {total} iterations are done",
    ]
    rules = _rules(job.config)
    for key, (old, new) in differences.items():
        # Keys that only say what this command does are no differences of the job.
        if key not in ("resume", "resume_allow", "dry_run"):
            note = (
                ""
                if _safe(rules, key, old, new)
                else "        changes the numbers of what follows"
            )
            lines.append(f"    {key}: {_short(old)} -> {_short(new)}{note}")
    for key, change in changed.items():
        note = "        changes the numbers of what follows"
        if not change.certain:
            note = ""
        lines.append(f"    {key}: {change.what}{note}")
    lines += job_of(job.config).resume_notes(
        job.config, differences, checkpoint.iteration
    )
    if any(key.startswith("cluster.") for key in differences):
        lines += _placements(job, mapping, checkpoint.iteration)
    elif job.changes:
        lines += _holding(job, checkpoint.iteration)
    return "\n".join(lines)


def _holding(job: Prepared, iteration: int) -> list[str]:
    """Return lines of text that say which of the job's placements holds after `iteration` iterations."""
    done = [change.after for change in job.changes if change.after <= iteration]
    if not done:
        return []
    return [f"    the placement is that of the change after iteration {done[-1]}"]


def _placements(job: Prepared, mapping: Mapping[str, Any], iteration: int) -> list[str]:
    """Return lines of text that compare the plan of the checkpoint with the plan of the job.

    `mapping`: the config of the checkpoint. `iteration`: iterations that are done, which decide which of the changes of
    the placement hold. Further lines name the components whose state or data is now divided among
    a different number of ranks.
    """
    try:
        old = prepare(mapping, name="saved")
    except ProblemsError as error:  # machines or folders of then are not those of now
        return [f"    the plan of then cannot be made here: {error.problems[0].what}"]
    old = job_after(old, iteration)
    new = job_after(job, iteration)
    view: PlanView = dataclasses.replace(new.view, name="now")
    return [
        *_holding(job, iteration),
        render_diff(old.view, view),
        *_cut_anew(old.plan, new.plan, job_of(job.config).divided()),
    ]


def _cut_anew(old: Plan, new: Plan, divided: Mapping[str, str]) -> list[str]:
    """Return lines of text about components whose number of ranks differs between the plans `old` and `new`.

    `divided`: component -> a phrase that says what the component divides among its ranks.
    """
    lines = []
    for component, what in divided.items():
        if component not in old.placement.components:
            continue
        if component not in new.placement.components:
            continue
        before = old.placement.world_size(component)
        now = new.placement.world_size(component)
        if before != now:
            ranks = "rank" if now == 1 else "ranks"
            lines.append(
                f"    {component}: its {what} {now} {ranks} instead of {before}"
            )
    if lines:
        lines.append(
            "    sums over ranks are added in another order: numbers agree to rounding, not to the bit"
        )
    return lines


def _short(value: object) -> str:
    return clipped(show(value), _LONGEST, "...")
