"""OpenRLHF: flags of its PPO trainer.

There, each model asks for `num_nodes` x `num_gpus_per_node` accelerators, and three switches decide which share them:
`colocate_all` puts everything on the actor's, `colocate_actor_ref` and `colocate_critic_reward` pair two each. A
reference exists where there is a KL penalty, a critic where advantages are estimated by GAE, a reward model unless a
remote one or an agent scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.importer import Draft, Imported, finish
from rlplace.imports.openrlhf_learning import set_learning
from rlplace.imports.placing import Allocation, nearest_engines, place
from rlplace.imports.settings import PLACEMENT
from rlplace.placement.machines.ranges import Ranges

_FLAGS_OF = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
_USUAL = {"num_nodes": 1, "num_gpus_per_node": 8}


def import_openrlhf(draft: Draft, per_node: int = 0) -> Imported:
    """`per_node` 0: the most that any model asks of one node."""
    absent = _absent(draft)
    per_nodes = {c: draft.count(f"{f}.num_gpus_per_node", 8, 1) for c, f in _FLAGS_OF.items() if c not in absent}
    sizes = {c: n * draft.count(f"{_FLAGS_OF[c]}.num_nodes", 1, 1) for c, n in per_nodes.items()}
    width = per_node or max(per_nodes.values())
    where = _places(draft, sizes, width)
    topology = place(draft, where, {c: _copy(draft, c, len(numbers)) for c, numbers in where.items()}, width)
    for component, why in absent.items():
        for setting in _USUAL:
            draft.unmapped(f"{_FLAGS_OF[component]}.{setting}", why)
    set_learning(draft)
    draft.apply_rules()
    _check_samples(draft, sizes["actor"])
    return finish(draft, topology, {c: leaves for c, leaves in _offloads(draft).items() if c in where})


def _absent(draft: Draft) -> dict[str, str]:
    """The components that the flags rule out, and why."""
    absent: dict[str, str] = {}
    estimator = draft.value("algo.advantage.estimator", "gae")
    if estimator != "gae":
        absent["critic"] = f"there is no critic: the estimator {estimator} needs no values"
    if draft.number("algo.kl.init_coef", 0.01) <= 0:
        absent["reference"] = "there is no reference: nothing is compared with it while init_kl_coef is 0"
    if draft.has("train.agent_func_path"):
        absent["reward"] = "there is no reward: the agent scores"
    elif draft.has("reward.remote_url"):
        absent["reward"] = "the reward needs no accelerators: it is remote"
    return absent


def _places(draft: Draft, sizes: Mapping[str, int], width: int) -> dict[str, Ranges]:
    """Component -> accelerators, side by side but for those that share."""
    together = draft.has("train.colocate_all")
    partners = {}
    if together or draft.has("train.colocate_actor_ref"):
        partners["reference"] = "actor"
    if draft.has("train.colocate_critic_reward"):
        partners["reward"] = "critic"
    accelerators = Allocation(width)
    where: dict[str, Ranges] = {}
    for component, size in sizes.items():
        copy = _copy(draft, component, size)
        leader = partners.get(component, "actor")
        if component in partners and leader in sizes:
            _check_partner(draft, component, size, leader, sizes[leader])
        elif together and size > sizes["actor"]:
            _too_large(draft, component, size, sizes["actor"])
        if component == "actor":
            where[component] = accelerators.take(size, copy)
        elif together:
            where[component] = Allocation(width).take(size, copy)
        elif component in partners and leader in where:  # the first of the leader's, then what comes next
            first = where[leader].pieces[0].start
            own = where[leader].within(range(first, first + size))
            where[component] = own if len(own) == size else own | accelerators.take(size - len(own))
        else:
            where[component] = accelerators.take(size, copy)
    where["rollout"] = _engines(draft, where["actor"], accelerators)
    return where


def _engines(draft: Draft, actor: Ranges, accelerators: Allocation) -> Ranges:
    engines, tensor = draft.count("vllm.num_engines", 0), draft.count("vllm.tensor_parallel_size", 1, 1)
    if engines == 0:
        draft.assume(f"{PLACEMENT}.rollout: {actor}", "without engines the actor itself generates there")
        return actor
    if not draft.has("train.colocate_all") or draft.has("train.async_enable"):
        return accelerators.take(engines * tensor, tensor)
    if engines * tensor != len(actor):
        near, size = nearest_engines(len(actor), engines, tensor)
        draft.find(
            "import-engines",
            "vllm.num_engines",
            f"{engines} engines x {tensor} = {engines * tensor} accelerators, and the actor has {len(actor)}",
            got=draft.written("vllm.num_engines", "vllm.tensor_parallel_size"),
            why="under colocate_all the engines use exactly the actor's accelerators there; here they may use some",
            fix=f"--vllm.num_engines {near} --vllm.tensor_parallel_size {size}",
        )
    return Allocation(accelerators.per_node).take(engines * tensor, tensor)


def _copy(draft: Draft, component: str, size: int) -> int:
    """Accelerators of one copy of the model; 1 where they do not divide `size`."""
    if component == "rollout":
        return draft.count("vllm.tensor_parallel_size", 1, 1) if draft.count("vllm.num_engines", 0) else 1
    copy = draft.count("ds.tensor_parallel_size", 1, 1)
    if size % copy == 0:
        return copy
    draft.find(
        "import-counts",
        "ds.tensor_parallel_size",
        f"{size} accelerators of {component} do not divide into copies of {copy}",
        got=draft.written("ds.tensor_parallel_size"),
        why="a copy of the model takes that many accelerators",
        fix=f"ds.tensor_parallel_size: {next(n for n in range(copy, 0, -1) if size % n == 0)}",
    )
    return 1


def _check_partner(draft: Draft, component: str, size: int, leader: str, leader_size: int) -> None:
    """Two models that share accelerators must ask for the same number there."""
    if size == leader_size:
        return
    flags = _FLAGS_OF[component]
    nodes, each = (draft.value(f"{leader}.{what}", usual) for what, usual in _USUAL.items())
    draft.find(
        "import-partners",
        f"{flags}.num_gpus_per_node",
        f"{component} asks for {size} accelerators and {leader} for {leader_size}, yet they are to share",
        got=draft.written(f"{flags}.num_nodes", f"{flags}.num_gpus_per_node"),
        why="there, both must have the same num_nodes and num_gpus_per_node; here the sizes may differ",
        fix=f"--{flags}.num_nodes {nodes} --{flags}.num_gpus_per_node {each}        (or keep both sizes here)",
    )


def _too_large(draft: Draft, component: str, size: int, pool: int) -> None:
    flags = _FLAGS_OF[component]
    draft.find(
        "import-partners",
        f"{flags}.num_gpus_per_node",
        f"{component} asks for {size} accelerators of {pool}",
        got=draft.written(f"{flags}.num_nodes", f"{flags}.num_gpus_per_node"),
        why=f"colocate_all shares the {pool} accelerators of the actor, and there are no others",
        fix=f"{component} with at most {pool}",
    )


def _check_samples(draft: Draft, actor: int) -> None:
    """Each process of the actor needs a micro-batch of samples; there, fewer are refused at the start."""
    samples = draft.count("rollout.batch_size", 1024, 1) * draft.count("rollout.n_samples_per_prompt", 1, 1)
    micro = draft.count("rollout.micro_batch_size", 1, 1)
    copy = draft.count("ds.tensor_parallel_size", 1, 1) * draft.count("ds.ring_attn_size", 1, 1)
    if samples // micro < actor // copy:
        draft.find(
            "import-batches",
            "rollout.batch_size",
            f"{samples} samples in micro-batches of {micro} are {samples // micro} for {actor // copy} actor processes",
            got=draft.written("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size"),
            why="there, every process must get at least one micro-batch",
            fix=f"--rollout.micro_batch_size {max(1, samples // (actor // copy))}",
        )


def _offloads(draft: Draft) -> dict[str, bool]:
    """Engines sleep only where all models share, never while sampling goes on."""
    sleep, together, ahead = (draft.has(k) for k in ("vllm.enable_sleep", "train.colocate_all", "train.async_enable"))
    if sleep and ahead:
        draft.find(
            "import-sleep",
            "vllm.enable_sleep",
            "engines cannot sleep while they sample on",
            got=draft.written("vllm.enable_sleep", "train.async_enable"),
            why="asynchronous training there keeps the engines busy, and refuses the two together",
            fix="leave out --vllm.enable_sleep or --train.async_enable",
        )
    elif sleep and not together:
        draft.find(
            "import-sleep",
            "vllm.enable_sleep",
            "has no effect without colocate_all",
            got=draft.written("vllm.enable_sleep"),
            why="there it is switched off again where the engines have accelerators of their own",
            fix="add --train.colocate_all, or leave it out",
        )
    if sleep and together and not ahead:
        draft.derive("rollout.sleep_level", 1, "vllm.enable_sleep")
        draft.becomes("vllm.enable_sleep", "rollout.enable_offload", "rollout.sleep_level")
    elif sleep:
        draft.unset("rollout.enable_offload")
        draft.unmapped("vllm.enable_sleep", "does nothing there unless all models share their accelerators in turn")
    asleep = draft.has("ds.enable_sleep")
    old = "ref_reward_offload" in str(draft.given.get("ref.offload", ""))  # speaks for both in the older spelling
    return {
        "actor": asleep,
        "critic": asleep,
        "reference": draft.has("ref.offload"),
        "reward": draft.has("reward.offload") or old,
        "rollout": sleep and together and not ahead,
    }
