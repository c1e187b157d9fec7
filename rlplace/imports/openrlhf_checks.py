"""What OpenRLHF itself would refuse or quietly change in a set of its flags, with the nearest values that it takes."""

from __future__ import annotations

from rlplace.imports.draft import Draft
from rlplace.imports.seating import nearest_engines

_USUAL = {"num_nodes": 1, "num_gpus_per_node": 8}


def check_partner(draft: Draft, component: str, size: int, leader: str, leader_size: int) -> None:
    """Two models that share accelerators must ask for the same number there."""
    if size != leader_size:
        flags = "ref" if component == "reference" else component
        nodes, each = (draft.value(f"{leader}.{what}", usual) for what, usual in _USUAL.items())
        draft.find(
            "import-partners",
            f"{flags}.num_gpus_per_node",
            f"{component} asks for {size} accelerators and {leader} for {leader_size}, yet they are to share",
            got=_written(draft, f"{flags}.num_nodes", f"{flags}.num_gpus_per_node"),
            why="there, both must have the same num_nodes and num_gpus_per_node; here the sizes may differ",
            fix=f"--{flags}.num_nodes {nodes} --{flags}.num_gpus_per_node {each}        (or keep both sizes here)",
        )


def check_pool(draft: Draft, component: str, size: int, pool: int) -> None:
    """Under colocate_all there are as many accelerators as the actor asks for."""
    if size > pool:
        draft.find(
            "import-partners",
            f"{component}.num_gpus_per_node",
            f"{component} asks for {size} accelerators of {pool}",
            got=_written(draft, f"{component}.num_nodes", f"{component}.num_gpus_per_node"),
            why=f"colocate_all shares the {pool} accelerators of the actor, and there are no others",
            fix=f"{component} with at most {pool}",
        )


def check_engines(draft: Draft, engines: int, tensor: int, actor: int) -> None:
    """Under colocate_all, engines x their size must be the actor's accelerators."""
    if engines * tensor != actor:
        near, size = nearest_engines(actor, engines, tensor)
        draft.find(
            "import-engines",
            "vllm.num_engines",
            f"{engines} engines x {tensor} = {engines * tensor} accelerators, and the actor has {actor}",
            got=_written(draft, "vllm.num_engines", "vllm.tensor_parallel_size"),
            why="under colocate_all the engines use exactly the actor's accelerators there; here they may use some",
            fix=f"--vllm.num_engines {near} --vllm.tensor_parallel_size {size}",
        )


def check_sleep(draft: Draft) -> None:
    """Sleep flags without what they need."""
    if draft.has("vllm.enable_sleep") and draft.has("train.async_enable"):
        draft.find(
            "import-sleep",
            "vllm.enable_sleep",
            "engines cannot sleep while they sample on",
            got=_written(draft, "vllm.enable_sleep", "train.async_enable"),
            why="asynchronous training there keeps the engines busy, and refuses the two together",
            fix="leave out --vllm.enable_sleep or --train.async_enable",
        )
    elif draft.has("vllm.enable_sleep") and not draft.has("train.colocate_all"):
        draft.find(
            "import-sleep",
            "vllm.enable_sleep",
            "has no effect without colocate_all",
            got=_written(draft, "vllm.enable_sleep"),
            why="there it is switched off again where the engines have accelerators of their own",
            fix="add --train.colocate_all, or leave it out",
        )


def check_samples(draft: Draft, actor: int) -> None:
    """Each process of the actor needs a micro-batch of samples; there, fewer are refused at the start."""
    samples = draft.count("rollout.batch_size", 1024, 1) * draft.count("rollout.n_samples_per_prompt", 1, 1)
    micro = draft.count("rollout.micro_batch_size", 1, 1)
    copy = draft.count("ds.tensor_parallel_size", 1, 1) * draft.count("ds.ring_attn_size", 1, 1)
    if samples // micro < actor // copy:
        draft.find(
            "import-batches",
            "rollout.batch_size",
            f"{samples} samples in micro-batches of {micro} are {samples // micro} for {actor // copy} actor processes",
            got=_written(draft, "rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size"),
            why="there, every process must get at least one micro-batch",
            fix=f"--rollout.micro_batch_size {max(1, samples // (actor // copy))}",
        )


def _written(draft: Draft, *keys: str) -> str | None:
    return " ".join(str(draft.given[key]) for key in keys if key in draft.given) or None
