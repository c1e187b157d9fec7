"""slime: its flags. The trainer asks for nodes x accelerators; engines share them (`--colocate`) or come after them.

The reference lives in the actor's processes there, and a critic (estimator ppo) has as many accelerators as the actor.
"""

from __future__ import annotations

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.learning import set_algorithm, set_kl
from rlplace.imports.placing import Allocation, check_engine_size, place
from rlplace.placement.machines.ranges import Ranges


def import_slime(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: --num-gpus-per-node, else the actor's."""
    each = draft.count("actor-num-gpus-per-node", 8, 1)
    width = per_node or draft.count("num-gpus-per-node", each, 1)
    size = each * draft.count("actor-num-nodes", 1, 1)
    together = draft.has("colocate")
    accelerators = Allocation(width)
    where: dict[str, Ranges] = {"actor": accelerators.take(size)}
    if draft.value("advantage-estimator", "grpo") == "ppo":
        where["critic"] = where["actor"] if together else accelerators.take(size)
    if draft.number("kl-coef", 0) or draft.has("use-kl-loss") or draft.number("kl-loss-coef", 0):
        where["reference"] = where["actor"]
    engine = draft.count("rollout-num-gpus-per-engine", 1, 1)
    engines = draft.count("rollout-num-gpus", size, 1)
    check_engine_size(draft, "rollout-num-gpus-per-engine", engine, engines)
    whole = engines - engines % engine or engines
    copy = engine if whole % engine == 0 else 1
    where["rollout"] = (Allocation(width) if together else accelerators).take(whole, copy)
    tensor = draft.count("tensor-model-parallel-size", 1, 1)
    topology = place(draft, where, {"rollout": copy, "actor": tensor, "critic": tensor}, width)
    set_algorithm(draft, "advantage-estimator", "grpo")
    draft.set_model("actor.model", "hf-checkpoint")
    if draft.has("use-kl-loss"):
        set_kl(draft, "loss", "use-kl-loss", "kl-loss-coef", 0.0, "kl-loss-type", "k1")
    elif draft.number("kl-coef", 0):
        set_kl(draft, "reward", "kl-coef", "kl-coef", 0.0, "kl-loss-type", "k1")
    samples = draft.count("rollout-batch-size", 0) * draft.count("n-samples-per-prompt", 1, 1)
    if "num-steps-per-rollout" in draft.given and samples:
        batch = samples // draft.count("num-steps-per-rollout", 1, 1)
        draft.derive("algorithm.train_batch", batch, "num-steps-per-rollout")
    draft.apply_rules()
    leaves = _offloads(draft, together)
    offload = {c: leaves["rollout" if c == "rollout" else "actor"] or c == "reference" for c in where}
    return finish(draft, topology, offload)


def _offloads(draft: Draft, together: bool) -> dict[str, bool]:
    """`--colocate` means both unless one is switched off; a critic makes the trainers offload as well."""
    everything = together or draft.has("offload")
    train = everything or draft.has("offload-train") or draft.value("advantage-estimator") == "ppo"
    leaves = {
        "actor": train and not draft.has("no-offload-train"),
        "rollout": (everything or draft.has("offload-rollout")) and not draft.has("no-offload-rollout"),
    }
    for component, gone in leaves.items():
        draft.set(f"{component}.enable_offload", gone)
    return leaves
