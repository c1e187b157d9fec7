"""Place components by their sizes: accelerators are assigned side by side, and each model replica stays on one node."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config.keys import PLACEMENT
from rlplace.imports.importer import Draft
from rlplace.placement import Topology
from rlplace.placement.machines.topology import Ranges

# Component -> the settings whose product is its size: nodes, accelerators of each node
Asks = Mapping[str, tuple[str, str]]


class Allocation:
    """Places components on a cluster of equal nodes. Each component gets the next free accelerators."""

    def __init__(self, draft: Draft, width: int) -> None:
        self.where: dict[str, Ranges] = {}
        # Accelerators of one model replica, if more than one
        self.copies: dict[str, int] = {}
        # Replicas that split the tokens of the same samples (context parallelism)
        self.tokens: dict[str, int] = {}
        self._draft = draft
        self._width = width
        self._next = 0

    def take(
        self, component: str, count: int, copy: int = 1, *, anew: bool = False
    ) -> None:
        """Place a component on the next `count` accelerators.

        `copy`: accelerators of a model replica. A replica stays on one node; a replica larger than a node starts at the
        first accelerator of a node. `anew`: whether to start at accelerator 0, on accelerators that other components
        also use.
        """
        pieces: list[range] = []
        at = 0 if anew else self._next
        for _ in range(count // copy):
            on_node = at % self._width
            if on_node and on_node + copy > self._width:
                at += self._width - on_node
            pieces.append(range(at, at + copy))
            at += copy
        self._next = self._next if anew else at
        self.where[component] = Ranges.of(pieces)
        self.copies[component] = copy

    def share(self, component: str, leader: str, count: int) -> None:
        """Place a component on the first `count` accelerators of the component `leader`.

        If the leader has fewer than `count`, the component also gets the next free accelerators.
        """
        own = Ranges.of(range(n, n + 1) for n in [*self.where[leader]][:count])
        self.take(component, count - len(own))
        self.where[component] |= own

    def take_engines(
        self, number: str, engines: int, size: str, each: int, *, together: bool
    ) -> None:
        """Place `engines` engines, each on `each` accelerators.

        `number`, `size`: names of the settings that give `engines` and `each`. `together`: whether the engines use the
        actor's accelerators; then a problem is reported if they need more or fewer than the actor has.
        """
        there = len(self.where["actor"])
        if together and engines * each != there:
            divides = there % each == 0 or not engines or there % engines
            near = _nearest_divisor(there, each) if divides else there // engines
            self._draft.find(
                "import-engines",
                number,
                size,
                error="beside-actor",
                settings={number: there // near, size: near},
                engines=engines,
                each=each,
                product=engines * each,
                there=there,
            )
        self.take("rollout", engines * each, each, anew=together)

    def check_engines(self, key: str, size: int, accelerators: int) -> None:
        """Report a problem if `accelerators` accelerators cannot be divided into engines of `size` accelerators.

        `key`: name of the setting with the size of an engine.
        """
        if accelerators % size:
            self._draft.find(
                "import-engines",
                key,
                error="uneven",
                settings={key: _nearest_divisor(accelerators, size)},
                accelerators=accelerators,
                size=size,
            )

    def divide_tokens(self, component: str, *keys: str) -> None:
        """Set how many replicas of a component split the tokens of a long sequence.

        The number is the value of the first setting of `keys` that is given and is not 1. If it does not divide the
        number of replicas, a problem is reported.
        """
        given = [key for key in keys if key in self._draft.given]
        # A library may have an old and a new name for one setting, and 1 as the default of both
        key = next(
            (k for k in given if self._draft.value(k) != 1), next(iter(given), None)
        )
        if key is None or component not in self.where:
            return
        there = len(self.where[component])
        copy = self.copies.get(component, 1)
        size = self._draft.count(key, 1, 1)
        self._draft.becomes(key, f"{PLACEMENT}.{component}")
        if there % (size * copy):
            error = "token-groups"
            if copy > 1:
                error = "token-groups-of-copies"
            self._draft.find(
                "import-counts",
                key,
                error=error,
                settings={key: _nearest_divisor(max(1, there // copy), size)},
                there=there,
                component=component,
                size=size,
                copy=copy,
            )
        else:
            self.tokens[component] = size

    def write(self, nodes: int = 1) -> Topology:
        """Write the placement lines and the machines, and return the machines. `nodes`: the least number of nodes.

        An engine is written as one rank with all accelerators of its replica, so that the job can run. A job can only
        be planned if a trained model has a replica on several accelerators, or if an engine is larger than a node.
        """
        used = max(
            (numbers.pieces[-1].stop for numbers in self.where.values() if numbers),
            default=1,
        )
        topology = Topology.uniform(
            max(nodes, -(-used // self._width)), self._width, "cuda"
        )
        self._draft.set("cluster.num_nodes", topology.num_nodes)
        self._draft.set("cluster.accelerators_per_node", self._width)
        for component, numbers in self.where.items():
            line: dict[str, object] = {"placement": str(numbers)}
            copy = self.copies.get(component, 1)
            if copy > 1 and len(numbers) % copy == 0:
                one_rank = component == "rollout" and copy <= self._width
                line[
                    "accelerators_per_rank" if one_rank else "tensor_parallel_size"
                ] = copy
                line |= (
                    {"tensor_parallel_across_nodes": True} if copy > self._width else {}
                )
            size = self.tokens.get(component, 1)
            line |= {"context_parallel_size": size} if size > 1 else {}
            self._draft.set(
                f"{PLACEMENT}.{component}", line if len(line) > 1 else str(numbers)
            )
        return topology


def place_by_size(
    draft: Draft,
    asks: Asks,
    usual: int,
    per_node: int,
    partners: Mapping[str, str],
    *,
    together: bool,
    copy: int = 1,
) -> Allocation:
    """Place components side by side by their sizes, and return the allocation.

    `asks`: component -> its settings for the number of nodes and of accelerators per node. `usual`: default number of
    accelerators per node. `per_node`: accelerators of a node; 0: the largest number that a component asks for.
    `partners`: component -> the component whose accelerators it shares. `together`: whether all components share the
    actor's accelerators. `copy`: accelerators of a model replica.
    """
    wide = {c: draft.count(each, usual, 1) for c, (_, each) in asks.items()}
    sizes = {c: wide[c] * draft.count(nodes, 1, 1) for c, (nodes, _) in asks.items()}
    pool = Allocation(draft, per_node or max(wide.values()))
    for component, size in sizes.items():
        paired = partners.get(component) in sizes
        leader = partners[component] if paired else "actor" if together else component
        if size > sizes[leader] or (paired and size < sizes[leader]):
            nodes, each = asks[component]
            error = "colocated"
            if paired:
                error = "paired"
            draft.find(
                "import-partners",
                each,
                nodes,
                error=error,
                settings={nodes: sizes[leader] // wide[leader], each: wide[leader]},
                component=component,
                size=size,
                leader=leader,
                leader_size=sizes[leader],
            )
        fitting = copy if size % copy == 0 else 1
        if paired and not together:
            pool.share(component, leader, size)
        else:
            pool.take(component, size, fitting, anew=together and component != "actor")
        pool.copies[component] = fitting
    return pool


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return min(divisors, key=lambda n: (abs(n - wanted), n))
