"""The config of a custom job: blocks of the engine, a block for each component, and keys of the user.

::

    cluster:    {num_nodes: 1, component_placement: {actor: 0-7, env: 0-3}}     the engine's, as in every job
    runner:     {total_iterations: 10}
    actor:      {enable_offload: true, memory: {weights: 2GiB, full: 8GiB}, lr: 0.001}
                 └ of the engine                                            └ the worker's own
    anything:   {else: is the user's}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rlplace.codes import problem
from rlplace.config.blocks.engine import (
    CheckpointConfig,
    FaultsConfig,
    MemoryConfig,
    RunnerConfig,
)
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.fields import block, knob
from rlplace.config.paths import with_homes
from rlplace.config.read import read_block
from rlplace.config.yaml_text import show
from rlplace.errors import Problem, Source, did_you_mean, source_of

JOB = "job"  # the key that names a job


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMemory:
    """Bytes that each rank of a component needs on each of its accelerators, and on its host.

    `weights`, `full`: bytes on an accelerator while it holds only the rank's weights, or all of the rank's state.
    `working`: further bytes there while the rank works. `host`: bytes on the host at any time.
    """

    weights: int | None = knob(
        "with its weights alone; null: not known yet", None, minimum=0, unit="bytes"
    )
    full: int | None = knob(
        "with all of its state; null: not known yet", None, minimum=0, unit="bytes"
    )
    working: int = knob("while it works, beside its state", 0, minimum=0, unit="bytes")
    host: int = knob("of the host, wherever its state is", 0, minimum=0, unit="bytes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComponentConfig:
    """The keys of a component's block that rlplace itself reads. All further keys are passed to the workers."""

    enable_offload: bool = knob("leave accelerators that other components need", False)
    through_host: bool | Literal["auto"] = knob(
        "how weights leave it on GPUs; auto: where processes cannot share a GPU's memory",
        "auto",
    )
    memory: DeclaredMemory = block(DeclaredMemory)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The blocks of a custom job's config that rlplace itself reads."""

    cluster: ClusterConfig
    memory: MemoryConfig = block(MemoryConfig)
    runner: RunnerConfig = block(RunnerConfig)
    checkpoint: CheckpointConfig = block(CheckpointConfig)
    faults: FaultsConfig = block(FaultsConfig)
    resume: str | None = knob(
        "auto: go on with the newest checkpoint of this job; or the folder of a run or checkpoint",
        None,
    )
    resume_allow: tuple[str, ...] = knob(
        "keys that may differ from those of the run that is resumed", ()
    )
    profile: str | None = knob("predict seconds from this profile.json", None)
    dry_run: bool = knob("print the plan and stop", False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenConfig:
    """The whole config of a custom job. Immutable.

    `job`: the Job object. `engine`: the blocks that rlplace itself reads. `components`: component -> the keys of its
    block that rlplace reads. `settings`: component -> the keys of its block that its workers get. `settings` also has
    all further top-level keys of the config, with their values.
    """

    job: Any
    engine: EngineConfig
    components: Mapping[str, ComponentConfig]
    settings: Mapping[str, Any]

    @property
    def cluster(self) -> ClusterConfig:
        return self.engine.cluster

    @property
    def memory(self) -> MemoryConfig:
        return self.engine.memory

    @property
    def runner(self) -> RunnerConfig:
        return self.engine.runner

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.engine.checkpoint

    @property
    def faults(self) -> FaultsConfig:
        return self.engine.faults

    @property
    def resume(self) -> str | None:
        return self.engine.resume

    @property
    def resume_allow(self) -> tuple[str, ...]:
        return self.engine.resume_allow

    @property
    def profile(self) -> str | None:
        return self.engine.profile

    @property
    def dry_run(self) -> bool:
        return self.engine.dry_run


def read_open_config(
    mapping: Mapping[str, Any],
    job: Any,
    components: Iterable[str],
    sources: Mapping[str, Source],
) -> tuple[OpenConfig | None, list[Problem]]:
    """Read the config of a custom job. Return (config, all problems); the config is None if it cannot be read.

    `mapping`: the composed config. `job`: the custom job. `components`: names of its components. `sources`: config key
    -> file and line in which its value is set.
    """
    written = with_homes(mapping)
    names = tuple(components)

    # The blocks of the engine.
    engine_keys = {field.name for field in dataclasses.fields(EngineConfig)}
    ours = {key: value for key, value in written.items() if key in engine_keys}
    engine, problems = read_block(EngineConfig, ours, sources=sources)

    # The blocks of components: keys of the engine, and those of the worker.
    blocks: dict[str, ComponentConfig] = {}
    settings: dict[str, Any] = {}
    for name in names:
        value = written.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            problems.append(
                problem(
                    "wrong-type",
                    name,
                    str(value),
                    error="component",
                    source=source_of(name, sources),
                    name=name,
                )
            )
            continue
        blocks[name], settings[name], wrong = _read_component(name, value, sources)
        problems += wrong

    # Further blocks, of the user's own; a name close to a known one is a typing mistake.
    known = [*sorted(engine_keys), *(name for name in names if name not in written)]
    for key, value in written.items():
        if key in engine_keys or key in names or key == JOB:
            continue
        settings[key] = value
        near = did_you_mean(key, known)
        if near is not None:
            text = show(value)
            problems.append(
                problem(
                    "unknown-key",
                    key,
                    f"{key}: {text}",
                    error="block",
                    source=source_of(key, sources),
                    near=near,
                    text=text,
                )
            )
    if engine is None:
        return None, problems
    config = OpenConfig(job=job, engine=engine, components=blocks, settings=settings)
    return config, problems


def _read_component(
    name: str, block: Mapping[str, Any], sources: Mapping[str, Source]
) -> tuple[ComponentConfig, dict[str, Any], list[Problem]]:
    """Return (keys of a component's block that rlplace reads, keys for the component's workers, all problems).

    `name`: the component. `block`: its block of the config. `sources`: config key -> file and line in which its value
    is set.
    """
    known = [field.name for field in dataclasses.fields(ComponentConfig)]
    ours = {key: value for key, value in block.items() if key in known}
    of_worker = {key: value for key, value in block.items() if key not in known}
    found, wrong = read_block(ComponentConfig, ours)
    problems: list[Problem] = []
    for each in wrong:
        key = f"{name}.{each.key}"
        source = source_of(key, sources)
        problems.append(dataclasses.replace(each, key=key, source=source))
    for key, value in of_worker.items():
        near = did_you_mean(str(key), known)
        if near is not None:
            place = f"{name}.{key}"
            text = show(value)
            problems.append(
                problem(
                    "unknown-key",
                    place,
                    f"{key}: {text}",
                    error="of-component",
                    source=source_of(place, sources),
                    near=near,
                    component=name,
                    text=text,
                )
            )
    return found or ComponentConfig(), of_worker, problems
