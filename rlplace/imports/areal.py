"""AReaL: its YAML. One word there gives the accelerators of each model, and how the model is cut.

::

    allocation_mode: sglang:d4t2+fsdp:d8                engines on 4 x 2, then the actor on 8 others
    allocation_mode: sglang[rollout]:d8|fsdp[actor]:d8  the same 8 in turn
    rollout.backend: sglang:d4     actor.backend: fsdp:d4           the newer form, one word each

Letters are sizes: d data, t tensor, p pipeline, c context; e (experts) lies within the others. A critic or reference
with `scheduling_strategy: {type: colocation, target: actor}` is where the actor is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.learning import set_algorithm
from rlplace.imports.placing import Allocation, place
from rlplace.placement.machines.ranges import Ranges

_MODE = "allocation_mode"
_PART = re.compile(r"(?:([a-z]+)(?:\[(\w+)\])?:)?\(?(?:attn:)?((?:[dptce][0-9]+)+)(?:\|ffn:[^)]*)?\)?")
_BESIDE = r"(?![^()]*\))"  # not inside brackets


class _Places:
    """Reads the sizes. Owns where each component is, and the accelerators of its copies."""

    def __init__(self, draft: Draft, width: int) -> None:
        self.draft = draft
        self.accelerators = Allocation(width)
        self.where: dict[str, Ranges] = {}
        self.copies: dict[str, int] = {}

    def read(self) -> None:
        draft = self.draft
        if draft.has(_MODE):
            for shared in re.split(rf"\+{_BESIDE}", str(draft.value(_MODE))):
                self._place(_MODE, re.split(rf"\|{_BESIDE}", shared))
        else:
            for component in ("rollout", "actor"):
                if draft.has(f"{component}.backend"):
                    self._place(f"{component}.backend", [str(draft.value(f"{component}.backend"))], component)
        for component, key in (("critic", "critic"), ("reference", "ref")):
            written = any(s.key.startswith(f"{key}.") for s in draft.settings)
            if written and component not in self.where and "actor" in self.where:
                apart = draft.value(f"{key}.scheduling_strategy.type") not in (None, "colocation")
                actor = self.where["actor"]
                self.where[component] = self.accelerators.take(len(actor)) if apart else actor

    def _place(self, key: str, parts: Sequence[str], component: str | None = None) -> None:
        """Put the models of `parts` on the same next accelerators."""
        shared: Ranges | None = None
        for text in parts:
            match = _PART.fullmatch(text.strip())
            if match is None:
                why = "it is BACKEND:SIZES, sizes being letters d, t, p, c, e with a number each"
                self.draft.refuse(key, f"cannot read {text!r}", why, "sglang:d4t1+fsdp:d4")
                return
            sizes = {letter: int(number) for letter, number in re.findall(r"([dptce])([0-9]+)", match[3])}
            count = math.prod(size for letter, size in sizes.items() if letter != "e")
            name = component or self._component(match[1], match[2])
            self.copies[name] = sizes.get("t", 1)
            if shared is None:
                shared = self.accelerators.take(count, self.copies[name])
            first = shared.pieces[0].start if shared else 0
            self.where[name] = shared if len(shared) == count else shared.within(range(first, first + count))

    def _component(self, backend: str | None, name: str | None) -> str:
        """By the name in brackets, else by what the backend is for; a trainer without a name is the actor."""
        if name:
            return {"ref": "reference", "gen": "rollout"}.get(name, name)
        generates = backend in ("sglang", "vllm") or (backend is None and "actor" in self.where)
        return "rollout" if generates else "actor"


def import_areal(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: cluster.n_gpus_per_node."""
    width = per_node or draft.count("cluster.n_gpus_per_node", 8, 1)
    places = _Places(draft, width)
    places.read()
    nodes = draft.count("cluster.n_nodes", 1, 1)
    topology = place(draft, places.where, places.copies, width, nodes)
    used = topology.num_accelerators
    if "cluster.n_nodes" in draft.given and nodes * width < used:
        draft.find(
            "import-counts",
            "cluster.n_nodes",
            f"the sizes need {used} accelerators, and there are {nodes * width}",
            got=str(draft.given["cluster.n_nodes"]),
            why="models that do not share need accelerators of their own",
            fix=f"cluster.n_nodes: {used // width}",
        )
    set_algorithm(draft, "actor.adv_estimator", "gae" if "critic" in draft.placed else "grpo")
    draft.set_model("actor.model", "actor.path")
    draft.set_model("critic.model", "critic.path")
    prompts, steps = "train_dataset.batch_size", "actor.ppo_n_minibatches"
    if prompts in draft.given:
        samples = draft.count(prompts, 1, 1) * draft.count("gconfig.n_samples", 1, 1)
        draft.derive("algorithm.train_batch", -(-samples // draft.count(steps, 4, 1)), steps)
    draft.apply_rules()
    return finish(draft, topology, dict.fromkeys(places.where, draft.has("enable_offload")))
