"""Data flow checked before launch: every environment has a rank, every rank has work, no minibatch is empty."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from rlplace.config import Config
from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.flow import block_edges
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.schedule import Needs, Residency, makes_room

_ENVS = "env.total_num_envs"
_MINIBATCHES = "algorithm.num_minibatches"
_SYNC_MODE = "actor.sync.mode"
_SOME_WEIGHTS = ("trainable", "lora")  # sync modes that build on what the rollout ranks have


def check_data_flow(
    config: Config, placement: HybridComponentPlacement, sources: Mapping[str, Source]
) -> list[Problem]:
    """Problems between the placement and the sizes of the config, as far as the components are placed."""
    problems: list[Problem] = []
    envs, groups = config.simulator_env.total_num_envs, config.torch_rollout.pipeline_stage_num
    sizes = {c: placement.world_size(c) for c in placement.components}
    if "env" in sizes and envs % (sizes["env"] * groups):
        problems.append(_uneven_envs(envs, sizes["env"], groups, sources))
    for component, rows, of_what in (
        ("rollout", envs // groups, f"a stage group has {envs} / {groups} = {envs // groups} environments"),
        ("actor", envs, f"there are {envs} environments"),
    ):
        if sizes.get(component, 0) > rows:
            least = sizes[component] * (groups if component == "rollout" else 1)
            block = groups * sizes.get("env", 1)
            problems.append(
                _without_rows(component, sizes[component], of_what, -(-least // block) * block, envs, sources)
            )
    samples = envs * config.algorithm.rollout_steps
    if config.algorithm.num_minibatches > samples:
        problems.append(
            Problem(
                code="empty-minibatches",
                key=_MINIBATCHES,
                what=f"{config.algorithm.num_minibatches} minibatches of {samples} samples: some would be empty",
                got=f"num_minibatches: {config.algorithm.num_minibatches}",
                source=sources.get(_MINIBATCHES),
                why=f"an iteration has total_num_envs {envs} x rollout_steps {config.algorithm.rollout_steps} samples",
                fix=f"num_minibatches: {samples}        (or fewer)",
            )
        )
    return problems


def check_sync(
    config: Config, placement: HybridComponentPlacement, needs: Needs, sources: Mapping[str, Source]
) -> list[Problem]:
    """Some of the weights are no help to a rollout that drops all of them between two syncs."""
    mode = config.actor.sync.mode
    if mode not in _SOME_WEIGHTS or not config.torch_rollout.enable_offload or "rollout" not in placement.components:
        return []
    away = [stage for stage in needs.stages if needs.of(stage, "rollout") is Residency.OFF]
    if not away or not makes_room(placement, needs, "rollout"):
        return []
    return [
        Problem(
            code="sync-without-base",
            key=_SYNC_MODE,
            what="the rollout would get some weights while it has lost the others",
            got=f"mode: {mode}",
            source=sources.get(_SYNC_MODE),
            why=f"rollout leaves its accelerators in {' and '.join(away)} and drops its weights; "
            f"only the first sync of mode {mode} sends all of them",
            fix=f"{_SYNC_MODE}: all        (or keep them: rollout.enable_offload: false)",
        )
    ]


def check_names(
    allow_resident: tuple[str, ...], components: tuple[str, ...], sources: Mapping[str, Source]
) -> list[Problem]:
    """Names in `cluster.allow_resident` that are no component."""
    key = "cluster.allow_resident"
    problems: list[Problem] = []
    for i, name in enumerate(allow_resident):
        if name not in components:
            near = did_you_mean(name, components)
            problems.append(
                Problem(
                    code="unknown-component",
                    key=key,
                    what=f"no component is called {name!r}" + (f", did you mean {near!r}?" if near else ""),
                    got="[" + ", ".join(allow_resident) + "]",
                    span=(start := 1 + sum(len(n) + 2 for n in allow_resident[:i]), start + len(name)),
                    source=sources.get(key),
                    why="the components of this algorithm are " + ", ".join(components),
                    fix=f"allow_resident: [{near or components[0]}]",
                )
            )
    return problems


def find_idle(placement: HybridComponentPlacement) -> list[Problem]:
    """Accelerators that no component uses."""
    topology = placement.topology
    idle = topology.all - placement.used
    if not idle:
        return []
    many = len(idle) > 1
    return [
        Problem(
            code="idle-accelerators",
            key="cluster.component_placement",
            what=f"no component uses accelerator{'s' * many} {idle}",
            why=f"this cluster has {topology.describe()}",
            fix=f"give {'them' if many else 'it'} to a component, or plan a smaller cluster",
        )
    ]


def find_warnings(config: Config, placement: HybridComponentPlacement) -> tuple[Problem, ...]:
    """What works but wastes machines."""
    warnings = find_idle(placement)
    envs, groups = config.simulator_env.total_num_envs, config.torch_rollout.pipeline_stage_num
    for component, rows in (("rollout", envs // groups), ("actor", envs)):
        ranks = placement.world_size(component)
        edges = block_edges(rows, ranks)
        most = edges[1] - edges[0]
        if rows % ranks:
            even = lcm(groups * placement.world_size("env"), ranks * (groups if component == "rollout" else 1))
            warnings.append(
                Problem(
                    code="uneven-shares",
                    key=_ENVS,
                    what=f"some {component} ranks get {most} rows, others {most - 1}",
                    got=f"total_num_envs: {envs}",
                    why=f"{rows} rows over {ranks} {component} ranks; all wait for the fullest, "
                    f"{1 - rows / (ranks * most):.0%} of their time is lost",
                    fix=f"total_num_envs: {-(-envs // even) * even}",
                )
            )
    return tuple(warnings)


def _uneven_envs(envs: int, ranks: int, groups: int, sources: Mapping[str, Source]) -> Problem:
    block = ranks * groups
    below, above = envs // block * block, -(-envs // block) * block
    return Problem(
        code="uneven-envs",
        key=_ENVS,
        what=f"{envs} environments do not divide over {ranks} env ranks x {groups} stage groups",
        got=f"total_num_envs: {envs}",
        source=sources.get(_ENVS),
        why=f"each stage group of each env rank holds equally many; a multiple of {ranks} x {groups} = {block} does it",
        fix=f"total_num_envs: {above}" + (f"        (or: {below})" if below else ""),
    )


def _without_rows(
    component: str, ranks: int, of_what: str, least: int, envs: int, sources: Mapping[str, Source]
) -> Problem:
    return Problem(
        code="rank-without-rows",
        key=_ENVS,
        what=f"too few for {ranks} {component} ranks: some would have nothing to do",
        got=f"total_num_envs: {envs}",
        source=sources.get(_ENVS),
        why=f"{of_what}, and each {component} rank takes at least one",
        fix=f"total_num_envs: {least}        (or fewer {component} ranks)",
    )
