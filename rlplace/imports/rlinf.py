"""RLinf: its YAML. The placement is the same language, so its lines go over as they are written.

What differs: `inference`, a component there, is the actor's own work here (it computes log-probabilities in stage
infer); the machines' accelerators are counted at the start there, and are a number here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlplace.config.fields import ModelKind
from rlplace.errors import did_you_mean, suggestion
from rlplace.imports.importer import ROLES, Draft, Imported, finish
from rlplace.imports.settings import PLACEMENT, Setting
from rlplace.placement import Topology
from rlplace.placement.language.spec import role_of

_USUAL_WIDTH = 8  # accelerators of a machine, where nothing gives another number
_SINKS = ("console", "jsonl", "tensorboard")
_ENGINE_TASKS = ("reasoning", "math", "agent", "coding")  # their engines always sleep while others work
_TENSOR = "rollout.tensor_parallel_size"


def kind_of(settings: Sequence[Setting]) -> ModelKind:
    """A job that places simulators trains an MLP here."""
    simulated = any("env" in _names(s.key) for s in settings if s.key.startswith(f"{PLACEMENT}."))
    return "mlp" if simulated else "causal_lm"


def import_rlinf(draft: Draft, per_node: int) -> Imported:
    """`per_node` 0: as many as the placement needs, and at least 8."""
    nodes, tensor = draft.count("cluster.num_nodes", 1, 1), draft.count(_TENSOR, 1, 1)
    lines = [setting for setting in draft.given.values() if setting.key.startswith(f"{PLACEMENT}.")]
    width = per_node or draft.count("cluster.num_gpus_per_node", 0) or _width(lines, nodes)
    draft.set("cluster.num_nodes", nodes)
    draft.set("cluster.accelerators_per_node", width)
    if "cluster.num_gpus_per_node" not in draft.given:
        draft.assume(f"cluster.accelerators_per_node: {width}", "there, machines are counted at the start")
    draft.set(PLACEMENT, {})
    for setting in lines:
        _place(draft, setting, tensor)
    if _TENSOR in draft.given and tensor == 1:
        draft.implied("an engine has one accelerator unless its line has another number", _TENSOR)
    groups = draft.value("cluster.node_groups")
    if isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups):
        draft.set("cluster.node_groups", groups)
    draft.apply_rules()
    if draft.kind == "mlp":
        _set_rollout(draft)
        _set_sinks(draft)
    return finish(draft, Topology.uniform(nodes, width, "cuda"), _offloads(draft))


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.removeprefix(f"{PLACEMENT}.").split(",")]


def _width(lines: Sequence[Setting], nodes: int) -> int:
    """Enough for the largest number of the cluster in any line; a block has numbers of a node group."""
    texts = [str(setting.value) for setting in lines if not isinstance(setting.value, Mapping)]
    pieces = [piece.partition(":")[0] for text in texts for piece in text.split(",")]
    largest = max((int(number) for piece in pieces for number in re.findall(r"[0-9]{1,6}", piece)), default=-1)
    return max(_USUAL_WIDTH, -(-(largest + 1) // nodes))


def _place(draft: Draft, setting: Setting, tensor: int) -> None:
    """Write a line as it is, without the components that do not exist here; engines have a line of their own."""
    names, value = _names(setting.key), setting.value
    ours = [name for name in names if role_of(name) in ROLES]
    others = [name for name in names if name not in ours]
    whole = setting.key.removeprefix(f"{PLACEMENT}.")
    lines = {",".join(ours) if others else whole: value} if ours else {}
    if tensor > 1 and "rollout" in ours:
        rest = ",".join(name for name in ours if name != "rollout")
        block = dict(value) if isinstance(value, Mapping) else {"placement": value}
        spread = ":" in str(block.get("placement", ""))  # the ranks are given, so that engines cannot be
        key = "tensor_parallel_size" if spread else "accelerators_per_rank"
        lines = ({rest: value} if rest else {}) | {"rollout": block | {key: tensor}}
        draft.becomes(_TENSOR, f"{PLACEMENT}.rollout")
    for name, line in lines.items():
        draft.set(f"{PLACEMENT}.{name}", line)
    if lines:
        draft.becomes(setting.key, *(f"{PLACEMENT}.{name}" for name in lines))
    for other in others:
        why = f"no component is called {other} here" + suggestion(did_you_mean(other, ROLES))
        if other == "inference":
            why = "the actor itself computes log-probabilities here, in stage infer; inference has no line of its own"
        if ours:
            draft.find("import-component", f"{other} is left out", setting.key, why=why)
        else:
            draft.unmapped(why, setting.key)


def _set_rollout(draft: Draft) -> None:
    """Steps of an iteration and its optimizer steps, where the file has enough for each."""
    passes = draft.count("algorithm.rollout_epoch", 1, 1)
    chunk = draft.count("actor.model.num_action_chunks", 1, 1)
    steps = draft.count("env.train.max_steps_per_rollout_epoch", 0)
    envs = draft.count("env.train.total_num_envs", draft.count("env.train.num_envs", 0))
    batch, key = draft.count("actor.global_batch_size", 0), "actor.global_batch_size"
    total = steps // chunk * passes
    samples = envs * total
    if steps:
        draft.set("algorithm.rollout_steps", total)
    if samples < 1 or batch < 1:
        return
    if samples % batch:
        below = next(n for n in range(min(batch, samples), 0, -1) if samples % n == 0)
        what = f"{samples} samples do not divide into optimizer steps of {batch}"
        why = f"an iteration has {envs} environments x {total} steps = {samples} samples, and nothing is dropped here"
        draft.find("import-batches", what, key, why=why, fix={key: below})
        draft.unmapped("algorithm.num_minibatches would not be a whole number", key)
    else:
        draft.derive("algorithm.num_minibatches", samples // batch, key)


def _set_sinks(draft: Draft) -> None:
    key = "runner.logger.logger_backends"
    backends = draft.value(key)
    if isinstance(backends, list):
        draft.set("runner.sinks", [sink for sink in _SINKS if sink != "tensorboard" or sink in backends])
        if others := [str(b) for b in backends if b not in _SINKS]:
            draft.unmapped(f"no sink {' and '.join(others)}; there are {', '.join(_SINKS)}", key)


def _offloads(draft: Draft) -> dict[str, bool]:
    """By `enable_offload`, by the three parts of a Megatron actor, or because engines of that kind always do."""
    leaves = {c: draft.has(f"{c}.enable_offload") for c in draft.placed}
    for component in ("actor", "critic"):
        parts = [f"{component}.offload_{part}" for part in ("weight", "optimizer", "grad")]
        moved = [draft.has(part) for part in parts]
        leaves[component] = leaves.get(component, False) or all(moved)
        if any(moved) and not all(moved):
            draft.unmapped(f"{component}.enable_offload moves weights, gradients and optimizer state together", *parts)
    task = draft.value("runner.task_type")
    if task in _ENGINE_TASKS and not leaves.get("rollout"):
        draft.assume("rollout.enable_offload: true", f"in a {task} job the engines sleep by themselves there")
        leaves["rollout"] = True
    return {c: leaves[c] for c in draft.placed}
