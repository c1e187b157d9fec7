"""The result of an import: a config of ours, the fate of every setting, and what does not hold in the original."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rlplace.config import ClusterConfig, read_config
from rlplace.config.knob import ModelKind
from rlplace.errors import ConfigError, PlacementError, Problem
from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.keys import find_refusals, ordered
from rlplace.imports.rules import Fate
from rlplace.imports.yaml_text import flow
from rlplace.placement import Layout, Topology, make_layout
from rlplace.placement.language.spec import role_of
from rlplace.placement.llm import make_llm_layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What came over. Never changes."""

    library: str
    config: Mapping[str, object]  # keys of ours only
    fates: tuple[Fate, ...]  # one per setting of the original, in its order
    findings: tuple[Problem, ...]  # what does not hold in the original, or not here
    assumed: tuple[tuple[str, str], ...]  # what nobody wrote and is written out now, and why
    missing: tuple[str, ...]  # keys a run still needs
    kind: ModelKind = "causal_lm"  # of the actor's model
    topology: Topology
    layout: Layout | None  # None where the placement does not hold; `findings` say why


def finish(draft: Draft, topology: Topology, offload: Mapping[str, bool]) -> Imported:
    """The result of a draft whose placement is complete. `offload`: who leaves the accelerators in the original.

    Components that stay where others work are written into `cluster.allow_resident`, for so it was meant. Raises
    ConfigError for values of the original that cannot be read, or when nothing is placed.
    """
    for component, leaves in offload.items():
        key = f"{role_of(component)}.enable_offload"
        if leaves and draft.has_key(key):
            draft.set(key, True)
    if draft.kind == "causal_lm":
        actor = draft.config.setdefault("actor", {})
        assert isinstance(actor, dict), actor
        actor["model"] = {"kind": "causal_lm"} | (actor.get("model") or {})
    fates = draft.fates()
    if not draft.written(PLACEMENT):
        raise ConfigError([_nothing_placed(draft.library)])
    layout, problems = _lay_out(draft, topology, offload)
    if staying := [p.key.removesuffix(".enable_offload") for p in problems if p.code == "residents-clash"]:
        draft.set("cluster.allow_resident", staying)
        draft.assume(f"cluster.allow_resident: {flow(staying)}", "they stay on accelerators that others use, as there")
        layout, problems = _lay_out(draft, topology, offload)
    missing, refused = find_refusals(draft.config)
    return Imported(
        library=draft.library,
        kind=draft.kind,
        config=ordered(draft.config, draft.kind),
        fates=fates,
        findings=(*draft.findings, *problems, *refused),
        assumed=tuple(draft.assumed),
        missing=tuple(missing),
        topology=topology,
        layout=layout,
    )


def _nothing_placed(library: str) -> Problem:
    return Problem(
        code="import-empty",
        key=PLACEMENT,
        what="nothing says who has which accelerators",
        why=f"the settings that do so in {library} are not among those that were given",
        fix="import the whole file or command, the composed one where it includes others",
    )


def _lay_out(draft: Draft, topology: Topology, offload: Mapping[str, bool]) -> tuple[Layout | None, Sequence[Problem]]:
    """The layout and its problems; without regard to batches where only they are wrong."""
    problems: Sequence[Problem] = ()
    if draft.kind == "causal_lm":
        try:
            return make_llm_layout(read_config(draft.config), topology), ()
        except PlacementError as error:
            problems = error.problems
        except ConfigError:
            pass  # told with the other refused values
    groups = draft.written("cluster.node_groups") or ()
    residents = draft.written("cluster.allow_resident") or ()
    block = draft.written(PLACEMENT)
    assert isinstance(block, Mapping), block
    assert isinstance(groups, list | tuple), groups
    assert isinstance(residents, list | tuple), residents
    cluster = ClusterConfig(component_placement=block, node_groups=tuple(groups), allow_resident=tuple(residents))
    try:
        return make_layout(cluster, topology, offload=offload), problems
    except (PlacementError, ConfigError) as error:
        return None, problems or error.problems
