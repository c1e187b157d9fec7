"""Tensor and data parallel sizes against the placement: copies are whole, on accelerators of their own, on one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source
from rlplace.placement.language.lines import Line
from rlplace.placement.language.spec import Segment, parts
from rlplace.placement.language.written import write_down
from rlplace.placement.machines.pools import Pool
from rlplace.placement.machines.ranges import show_range

_TENSOR, _DATA = "tensor_parallel_size", "data_parallel_size"


def check_parallel(line: Line, pool: Pool, segments: Sequence[Segment], sources: Mapping[str, Source]) -> list[Problem]:
    """Problems of a line's parallel sizes on the segments it got. Linear in segments and the nodes they cover."""
    parallel = line.parallel
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    if tensor == 1 and data is None:
        return []
    path = line.whole.key
    if not pool.holds_accelerators:
        written = write_down(path, _TENSOR if tensor > 1 else _DATA, max(tensor, data or 1), sources)
        why = f"a model is sliced over accelerators, and {pool.describe()}"
        return [written.whole("parallel-sizes", f"there are only {pool.noun}s here", why, f"remove {written.leaf}")]
    total = sum(len(s.accelerators) for s in segments)
    written = write_down(path, _TENSOR, tensor, sources)
    sharing = max(s.ranks_per_accelerator for s in segments)
    if sharing > 1 and tensor > 1:
        what = f"{sharing} ranks share each accelerator"
        why = "a copy that is sliced over several accelerators has each of them for itself"
        return [written.whole("parallel-sizes", what, why, f"{_TENSOR}: 1        (or one rank per accelerator)")]
    if total % tensor:
        below = next(n for n in range(min(tensor, total), 0, -1) if total % n == 0)
        what = f"{total} accelerators do not divide into copies of {tensor}"
        why = f"{line.names[0]} is on {total} accelerators; each copy takes {tensor} of them"
        return [written.whole("parallel-sizes", what, why, f"{_TENSOR}: {below}")]
    if data is not None and data * tensor != total:
        written = write_down(path, _DATA, data, sources)
        what = f"{data} copies x {tensor} = {data * tensor} accelerators, placed on {total}"
        why = f"the copies together use exactly the {total} accelerators that {line.names[0]} has"
        return [written.whole("parallel-sizes", what, why, f"{_DATA}: {total // tensor}")]
    return _cut_copy(line, pool, segments, tensor, sources)


def _cut_copy(
    line: Line, pool: Pool, segments: Sequence[Segment], tensor: int, sources: Mapping[str, Source]
) -> list[Problem]:
    """A copy with parts on two nodes, or a rank whose accelerators belong to two copies."""
    written = write_down(line.whole.key, _TENSOR, tensor, sources)
    for segment in segments:
        each = segment.accelerators_per_rank
        if each % tensor and tensor % each:
            what = f"ranks of {each} accelerators do not divide into copies of {tensor}"
            why = "a rank holds whole copies, or a copy is made of whole ranks"
            return [written.whole("parallel-sizes", what, why, f"{_TENSOR}: {each}")]
    if line.parallel.across_nodes:
        return []
    filled, began = 0, -1  # accelerators of the copy under way, and the node it is on
    for segment in sorted(segments, key=lambda s: s.ranks.start):
        for stretch, numbers in parts(segment, pool):
            if filled and stretch.node != began:
                what = f"a copy of {tensor} would lie on nodes {began} and {stretch.node}"
                why = (
                    f"node {stretch.node} starts at accelerator {stretch.first} of {show_range(segment.accelerators)}; "
                    "slices of one layer talk all the time, over the network slowly"
                )
                fewer = next(n for n in range(tensor - 1, 0, -1) if _fits(pool, segments, n))
                fix = f"{_TENSOR}: {fewer}        (or accept it: tensor_parallel_across_nodes: true)"
                return [written.whole("copy-spans-nodes", what, why, fix)]
            filled, began = (filled + len(numbers)) % tensor, stretch.node
    return []


def _fits(pool: Pool, segments: Sequence[Segment], tensor: int) -> bool:
    """Whether every stretch holds whole copies of `tensor`."""
    return all(len(numbers) % tensor == 0 for s in segments for _, numbers in parts(s, pool))
