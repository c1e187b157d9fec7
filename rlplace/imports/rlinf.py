"""RLinf: its YAML -> ours. The placement is the same language, so its lines go over as they are written.

What differs: `inference`, a component there, is the actor's own work here (it computes log-probabilities in stage
infer); the machines' accelerators are counted at the start there, and are a number here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rlplace.errors import did_you_mean
from rlplace.imports.batches import set_minibatches
from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.imported import Imported, finish
from rlplace.imports.rlinf_rules import LLM_RULES, RULES
from rlplace.imports.settings import Setting
from rlplace.placement import Topology
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import OPTIONAL, REQUIRED

_USUAL_WIDTH = 8  # accelerators of a machine, where nothing says another number
_SINKS = ("console", "jsonl", "tensorboard")
_ENGINE_TASKS = ("reasoning", "math", "agent", "coding")  # their engines always sleep while others work
_PARTS = ("actor.offload_weight", "actor.offload_optimizer", "actor.offload_grad")


def import_rlinf(settings: Sequence[Setting], per_node: int = 0) -> Imported:
    """The settings of a composed file. `per_node` 0: as many as the placement needs, and at least 8."""
    simulated = any("env" in _names(s.key) for s in settings if s.key.startswith(f"{PLACEMENT}."))
    draft = Draft("RLinf", settings, RULES if simulated else LLM_RULES, "mlp" if simulated else "causal_lm")
    nodes = draft.count("cluster.num_nodes", 1, 1)
    draft.set("cluster.num_nodes", nodes)
    width = per_node or draft.count("cluster.num_gpus_per_node", 0) or _width(draft, nodes)
    draft.set("cluster.accelerators_per_node", width)
    if "cluster.num_gpus_per_node" not in draft.given:
        draft.assume(f"cluster.accelerators_per_node: {width}", "there, machines are counted at the start")
    _place(draft)
    groups = draft.value("cluster.node_groups")
    if isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups):
        draft.set("cluster.node_groups", groups)
    if simulated:
        draft.apply_rules()
        _set_rollout(draft)
        _set_sinks(draft)
    else:
        set_algorithm(draft, "algorithm.adv_type", "gae")
        _set_iteration(draft)
        draft.apply_rules()
    return finish(draft, Topology.uniform(nodes, width, "cuda"), _offloads(draft))


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.removeprefix(f"{PLACEMENT}.").split(",")]


def _width(draft: Draft, nodes: int) -> int:
    """Enough for the largest number of the cluster that a line names."""
    largest = -1
    for _, value in _lines(draft):
        if isinstance(value, Mapping):  # numbers of a node group
            continue
        for piece in str(value).split(","):
            largest = max([largest, *map(int, re.findall(r"[0-9]{1,6}", piece.partition(":")[0]))])
    return max(_USUAL_WIDTH, -(-(largest + 1) // nodes))


def _lines(draft: Draft) -> Iterator[tuple[Setting, object]]:
    for setting in draft.given.values():
        if setting.key.startswith(f"{PLACEMENT}."):
            yield setting, setting.value


def _place(draft: Draft) -> None:
    """The lines as they are, less the components that do not exist here."""
    draft.set(PLACEMENT, {})
    tensor = draft.count("rollout.tensor_parallel_size", 1, 1)
    for setting, value in _lines(draft):
        leaf = setting.key.removeprefix(f"{PLACEMENT}.")
        names = _names(setting.key)
        ours = [name for name in names if role_of(name) in (*REQUIRED, *OPTIONAL)]
        others = [name for name in names if name not in ours]
        lines = {",".join(ours) if others else leaf: value} if ours else {}
        if tensor > 1 and "rollout" in ours:
            rest = ",".join(name for name in ours if name != "rollout")
            whole = dict(value) if isinstance(value, Mapping) else {"placement": value}
            lines = ({rest: value} if rest else {}) | {"rollout": whole | {"tensor_parallel_size": tensor}}
            draft.becomes("rollout.tensor_parallel_size", f"{PLACEMENT}.rollout")
        for name, line in lines.items():
            draft.set(f"{PLACEMENT}.{name}", line)
        if lines:
            draft.becomes(setting.key, *(f"{PLACEMENT}.{name}" for name in lines))
        for other in others:
            _leave_out(draft, setting, other, alone=len(others) == len(names))
    if "rollout.tensor_parallel_size" in draft.given and tensor == 1:
        draft.needless("rollout.tensor_parallel_size", "an engine has one accelerator unless its line says otherwise")


def _leave_out(draft: Draft, setting: Setting, name: str, *, alone: bool) -> None:
    known = (*REQUIRED, *OPTIONAL)
    near = did_you_mean(name, known)
    why = f"no component is called {name} here" + (f"; did you mean {near}?" if near else "")
    if name == "inference":
        why = "the actor itself computes log-probabilities here, in stage infer; inference has no line of its own"
    if alone:
        draft.unmapped(setting.key, why)
    else:
        draft.find("import-component", setting.key, f"{name} is left out", got=str(setting), why=why)


def _set_iteration(draft: Draft) -> None:
    """A step takes its part of all answers."""
    prompts, answers, steps = "data.rollout_batch_size", "algorithm.group_size", "algorithm.n_minibatches"
    if prompts in draft.given:
        samples = draft.count(prompts, 1, 1) * draft.count(answers, 1, 1)
        draft.derive("algorithm.train_batch", -(-samples // draft.count(steps, 1, 1)), steps)


def _set_rollout(draft: Draft) -> None:
    """Steps of an iteration, its optimizer steps, and the end of the run, where the file says enough for each."""
    passes = draft.count("algorithm.rollout_epoch", 1, 1)
    chunk = draft.count("actor.model.num_action_chunks", 1, 1)
    steps = draft.count("env.train.max_steps_per_rollout_epoch", 0)
    envs = draft.count("env.train.total_num_envs", draft.count("env.train.num_envs", 0))
    if not steps:
        return
    total = steps // chunk * passes
    draft.set("algorithm.rollout_steps", total)
    for key in ("algorithm.rollout_epoch", "env.train.max_steps_per_rollout_epoch", "actor.model.num_action_chunks"):
        draft.becomes(key, "algorithm.rollout_steps")
    batch = draft.count("actor.global_batch_size", 0)
    if envs and batch:
        why = f"{envs} environments x {total} steps"
        set_minibatches(draft, envs * total, batch, "actor.global_batch_size", why)
    epochs = draft.count("runner.max_epochs", 0)
    if envs and epochs:
        draft.set("runner.total_iterations", epochs)
        draft.becomes("runner.max_epochs", "runner.total_iterations")


def _set_sinks(draft: Draft) -> None:
    backends = draft.value("runner.logger.logger_backends")
    if not isinstance(backends, list):
        return
    ours = [sink for sink in _SINKS if sink != "tensorboard" or sink in backends]
    draft.set("runner.sinks", ours)
    if others := [str(b) for b in backends if b not in _SINKS]:
        why = f"no sink {' and '.join(others)}; there are {', '.join(_SINKS)}"
        draft.unmapped("runner.logger.logger_backends", why)


def _offloads(draft: Draft) -> dict[str, bool]:
    """Who leaves: by `enable_offload`, by the three parts of a Megatron actor, or because engines of that kind do."""
    task = draft.value("runner.task_type")
    leaves = {c: draft.has(f"{c}.enable_offload") for c in ("env", "rollout", "actor", "critic", "reward", "reference")}
    parts = [draft.has(key) for key in _PARTS]
    if all(parts):
        leaves["actor"] = True
    elif any(parts):
        for key in _PARTS:
            draft.unmapped(key, "actor.enable_offload moves weights, gradients and optimizer state together")
    critics = [draft.has(f"critic.{part}") for part in ("offload_weight", "offload_optimizer", "offload_grad")]
    leaves["critic"] |= all(critics)
    if task in _ENGINE_TASKS and not leaves["rollout"]:
        draft.assume("rollout.enable_offload: true", f"in a {task} job the engines sleep by themselves there")
        leaves["rollout"] = True
    return {c: leaves.get(c, False) for c in draft.placed}
