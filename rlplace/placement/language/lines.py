"""One line of `component_placement` -> what it asks for, whichever of the forms it is written in.

::

    actor: 0-7                                                 numbers: int, text, list; "rest"; "1/2"
    actor: {node_group: a800, placement: 0-63}                 numbers of a node group
    actor: {accelerators: [0, 1, 4], ranks_per_accelerator: 2} ranks spread by a rule
    actor: {accelerators: 4}                                   how many; the engine picks them
    rollout: {same_as: actor, tensor_parallel_size: 4}         where another component is
    rollout: {same_as: env, process: shared}                   and in its processes
    reward: cpu                                                on no accelerator: a process of the first node
    reward: {node_group: node, placement: "1:0-3"}             four processes of node 1
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source
from rlplace.placement.language.fit import check_fit
from rlplace.placement.language.grammar import read_segments
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.spec import CPU, Parallel, Segment
from rlplace.placement.language.spreading import respread
from rlplace.placement.language.written import PATH, Written, check_keys, count_at, write_down
from rlplace.placement.machines.pools import ANY_NODE, WHOLE_CLUSTER, Pool
from rlplace.placement.machines.ranges import Mistake
from rlplace.structure import show

KEYS = (
    "node_group",
    "placement",
    "accelerators",
    "same_as",
    "ranks_per_accelerator",
    "accelerators_per_rank",
    "tensor_parallel_size",
    "data_parallel_size",
    "tensor_parallel_across_nodes",
    "process",
)
WHERE = ("placement", "accelerators", "same_as")  # exactly one of them
_SHARED, _OWN = "shared", "own"
_FRACTION = re.compile(r"\s*([1-9][0-9]{0,8})\s*/\s*([1-9][0-9]{0,8})\s*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """These ranks on these numbers."""

    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """That many numbers nobody else has; `why` says where the count comes from."""

    count: int
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """All numbers that nobody with numbers or a count of its own has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameAs:
    """Where another component is."""

    component: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, read; `asked` still has to be answered unless it is numbers."""

    names: tuple[str, ...]
    whole: Written  # key and value as they stand in `component_placement`
    where: Written  # the part that says where
    pool: Pool
    asked: Numbers | Count | Rest | SameAs
    each: int = 1  # accelerators_per_rank
    sharing: int = 1  # ranks_per_accelerator
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    shares_process: bool = False  # with the other lines that say so and are at the same place

    @property
    def unit(self) -> int:
        """How many accelerators belong together on one node."""
        together = 1 if self.parallel.across_nodes else self.parallel.tensor_parallel_size
        return max(self.each, together)


def names_of(leaf: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in leaf.split(","))


def read_line(
    leaf: str, value: object, groups: NodeGroups, sources: Mapping[str, Source]
) -> tuple[Line | None, list[Problem]]:
    """A line, or every problem of it that can be seen without the other lines."""
    whole = write_down(PATH, leaf, value, sources)
    if isinstance(value, str) and value.strip() == CPU:
        value = {"node_group": ANY_NODE, "placement": 0}
    if not isinstance(value, Mapping):
        asked, problems = _read_where(whole, groups[WHOLE_CLUSTER])
        if isinstance(asked, Numbers) and not problems:
            problems = check_fit(whole, asked.segments, groups[WHOLE_CLUSTER])
        if asked is None or problems:
            return None, problems
        return Line(names=names_of(leaf), whole=whole, where=whole, pool=groups[WHOLE_CLUSTER], asked=asked), []
    return _read_block(whole, value, groups, sources)


def _read_block(
    whole: Written, block: Mapping[str, object], groups: NodeGroups, sources: Mapping[str, Source]
) -> tuple[Line | None, list[Problem]]:
    path = whole.key
    problems = check_keys(block, KEYS, path, sources)
    pool: Pool | None = groups[WHOLE_CLUSTER]
    if "node_group" in block:
        pool, wrong = groups.read(write_down(path, "node_group", block["node_group"], sources))
        problems += wrong
    counts, wrong = _read_counts(block, path, sources)
    problems += wrong
    shares_process, wrong = _read_process(block.get("process", _OWN), path, sources)
    problems += wrong
    chosen = [k for k in WHERE if k in block]
    if len(chosen) != 1:
        problems.append(_not_one(whole, block, chosen))
    if len(chosen) != 1 or pool is None:
        return None, problems
    where = write_down(path, chosen[0], block[chosen[0]], sources)
    asked, wrong = _read_where(where, pool)
    problems += wrong
    each, sharing = counts.get("accelerators_per_rank", 1), counts.get("ranks_per_accelerator", 1)
    if each > 1 and sharing > 1:
        why = "a rank has several accelerators, or several ranks share one"
        fix = "remove one of accelerators_per_rank and ranks_per_accelerator"
        problems.append(whole.whole("bad-placement", "spreads its ranks both ways", why, fix))
    if asked is None or problems:
        return None, problems
    parallel = Parallel(
        tensor_parallel_size=counts.get("tensor_parallel_size", 1),
        data_parallel_size=counts.get("data_parallel_size"),
        across_nodes=bool(block.get("tensor_parallel_across_nodes")),
    )
    if isinstance(asked, Numbers):
        segments, problems = _fitting(where, asked.segments, pool, each, sharing)
        asked = Numbers(segments=segments)
    line = Line(
        names=names_of(whole.leaf),
        whole=whole,
        where=where,
        pool=pool,
        asked=asked,
        each=each,
        sharing=sharing,
        parallel=parallel,
        shares_process=shares_process,
    )
    return None if problems else line, problems


def _fitting(
    where: Written, segments: Sequence[Segment], pool: Pool, each: int, sharing: int
) -> tuple[tuple[Segment, ...], list[Problem]]:
    """The segments, spread by the rule where there is one, and what is wrong with them."""
    problems = check_fit(where, segments, pool)
    if problems or each * sharing == 1:
        return tuple(segments), problems
    if ":" in where.text:
        at = where.text.index(":")
        why = "ranks_per_accelerator and accelerators_per_rank say how ranks spread; accelerators:ranks says it again"
        text = ",".join(part.split(":")[0] for part in where.text.strip("[]").split(","))
        mistake = Mistake(code="bad-placement", what="the ranks are given twice", span=(at, at + 1), why=why)
        return (), [where.problem(mistake, fix=where.line(text))]
    return respread(where, [s.accelerators for s in segments], pool, each, sharing)


def _read_where(where: Written, pool: Pool) -> tuple[Numbers | Count | Rest | SameAs | None, list[Problem]]:
    value = where.value
    if where.leaf == "same_as":
        if isinstance(value, str) and value.strip():
            return SameAs(component=value.strip()), []
        return None, [where.whole("bad-placement", "expected a component", "it names one", "same_as: actor")]
    if where.leaf == "accelerators" and isinstance(value, int | str) and re.fullmatch(r"-?[0-9]{1,12}", str(value)):
        if isinstance(value, bool) or int(value) < 1:
            why = f"it is how many {pool.noun}s are wanted"
            return None, [where.whole("bad-count", "expected at least 1", why, "accelerators: 1")]
        return Count(count=int(value), why=f"asked for are {int(value)} {pool.noun}s"), []
    if isinstance(value, str):
        if value.strip() == "rest":
            return Rest(), []
        if match := _FRACTION.fullmatch(value):
            return _fraction(where, int(match[1]), int(match[2]), pool)
    segments, problems = read_segments(where, pool)
    return (None if problems else Numbers(segments=segments)), problems


def _fraction(where: Written, part: int, whole: int, pool: Pool) -> tuple[Count | None, list[Problem]]:
    if part <= whole and pool.count * part % whole == 0:
        count = pool.count * part // whole
        return Count(count=count, why=f"{part}/{whole} of {pool.count} {pool.noun}s are {count}"), []
    what, fix = f"{part}/{whole} is more than all there is", f"{where.leaf}: all"
    if part <= whole:
        what = f"{part}/{whole} of {pool.count} {pool.noun}s is no whole number"
        near = f"accelerators: {max(1, pool.count * part // whole)}"
        fix = near if where.leaf == "accelerators" else f"{where.leaf}: {{{near}}}"
    return None, [where.whole("uneven-fraction", what, pool.describe(), fix)]


def _read_counts(
    block: Mapping[str, object], path: str, sources: Mapping[str, Source]
) -> tuple[dict[str, int], list[Problem]]:
    counts: dict[str, int] = {}
    problems: list[Problem] = []
    for key in ("ranks_per_accelerator", "accelerators_per_rank", "tensor_parallel_size", "data_parallel_size"):
        if key in block:
            count = count_at(path, key, block[key], sources)
            if isinstance(count, int):
                counts[key] = count
            else:
                problems.append(count)
    across = block.get("tensor_parallel_across_nodes", False)
    if not isinstance(across, bool):
        written = write_down(path, "tensor_parallel_across_nodes", across, sources)
        fix = "tensor_parallel_across_nodes: true"
        problems.append(written.whole("bad-placement", "expected true or false", "it is a permission", fix))
    return counts, problems


def _read_process(value: object, path: str, sources: Mapping[str, Source]) -> tuple[bool, list[Problem]]:
    if value in (_SHARED, _OWN):
        return value == _SHARED, []
    written = write_down(path, "process", value, sources)
    why = "own: each rank has a process; shared: with the rank of another component that is at the same place"
    return False, [written.whole("bad-placement", f"expected {_SHARED} or {_OWN}", why, f"process: {_SHARED}")]


def _not_one(whole: Written, block: Mapping[str, object], chosen: Sequence[str]) -> Problem:
    rest = {k: v for k, v in block.items() if k in KEYS and k not in chosen[1:]}
    if not chosen:
        rest["placement"] = "all"
    what = "says where twice: " + " and ".join(chosen) if chosen else "does not say where"
    why = "one of " + ", ".join(WHERE) + " says it"
    return whole.whole("bad-placement", what, why, f"{whole.leaf}: {show(rest)}")
