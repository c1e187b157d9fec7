"""OpenRLHF: flags of its PPO trainer -> placement, offloads and algorithm.

There, each model asks for `num_nodes` x `num_gpus_per_node` accelerators, and three switches say who shares them:
`colocate_all` puts everything on the actor's, `colocate_actor_ref` and `colocate_critic_reward` pair two each. A
reference exists where there is a KL penalty, a critic where advantages are estimated by GAE, a reward model unless a
remote one or an agent judges.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.imports.draft import PLACEMENT, Draft
from rlplace.imports.flags import read_flags
from rlplace.imports.imported import Imported, finish
from rlplace.imports.openrlhf_checks import check_engines, check_partner, check_pool, check_samples, check_sleep
from rlplace.imports.openrlhf_flags import FLAGS, RULES
from rlplace.imports.openrlhf_learning import place_remote_reward, set_learning
from rlplace.imports.pool import place
from rlplace.imports.seating import Seating, first_of
from rlplace.placement.machines.ranges import Ranges

_FLAGS_OF = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}


def import_openrlhf(text: str, file: str = "", per_node: int = 0) -> Imported:
    """A command, its flags alone, or the script around it. `per_node` 0: the most that any model asks of one node.

    `file` is where the text comes from; empty for the command line. Raises ConfigError for what cannot be read.
    """
    draft = Draft("OpenRLHF", read_flags(text, file, FLAGS), RULES)
    absent = _absent(draft)
    per_nodes = {c: draft.count(f"{f}.num_gpus_per_node", 8, 1) for c, f in _FLAGS_OF.items() if c not in absent}
    sizes = {c: n * draft.count(f"{_FLAGS_OF[c]}.num_nodes", 1, 1) for c, n in per_nodes.items()}
    width = per_node or max(per_nodes.values())
    spots = _seat(draft, sizes, width)
    topology = place(draft, spots, {c: _copy(draft, c, len(where)) for c, where in spots.items()}, width)
    for component, why in absent.items():
        for setting in (f"{_FLAGS_OF[component]}.num_nodes", f"{_FLAGS_OF[component]}.num_gpus_per_node"):
            draft.unmapped(setting, why)
    place_remote_reward(draft)
    _set_dtype(draft)
    _set_length(draft)
    set_learning(draft)
    _set_passes(draft)
    draft.apply_rules()
    check_samples(draft, sizes["actor"])
    return finish(draft, topology, _offloads(draft, spots))


def _absent(draft: Draft) -> dict[str, str]:
    """The components that the flags rule out, and why."""
    absent: dict[str, str] = {}
    estimator = draft.value("algo.advantage.estimator", "gae")
    if estimator != "gae":
        absent["critic"] = f"there is no critic: the estimator {estimator} needs no values"
    if draft.number("algo.kl.init_coef", 0.01) <= 0:
        absent["reference"] = "there is no reference: nothing is compared with it while init_kl_coef is 0"
    if draft.has("train.agent_func_path"):
        absent["reward"] = "there is no reward: the agent judges"
    elif draft.has("reward.remote_url"):
        absent["reward"] = "the reward needs no accelerators: it is remote"
    return absent


def _seat(draft: Draft, sizes: Mapping[str, int], width: int) -> dict[str, Ranges]:
    """Component -> accelerators, side by side but for those that share."""
    together = draft.has("train.colocate_all")
    partners = {}
    if together or draft.has("train.colocate_actor_ref"):
        partners["reference"] = "actor"
    if draft.has("train.colocate_critic_reward"):
        partners["reward"] = "critic"
    seating = Seating(width)
    spots: dict[str, Ranges] = {}
    for component, size in sizes.items():
        copy = _copy(draft, component, size)
        leader = partners.get(component, "actor")
        if component in partners and leader in sizes:
            check_partner(draft, component, size, leader, sizes[leader])
        elif together and component != "actor":
            check_pool(draft, component, size, sizes["actor"])
        shares = component != "actor" and (together or (component in partners and leader in spots))
        if shares and not together:
            spots[component] = _beginning(spots[leader], size, seating)
        else:
            spots[component] = first_of(size, copy, width) if shares else seating.take(size, copy)
    spots["rollout"] = _engines(draft, spots["actor"], seating)
    return spots


def _beginning(leader: Ranges, size: int, seating: Seating) -> Ranges:
    """The first of the leader's accelerators; what they are too few for comes after all that is taken."""
    window = range(leader.pieces[0].start, leader.pieces[0].start + size)
    own = leader.within(window)
    return own if len(own) == size else own | seating.take(size - len(own))


def _engines(draft: Draft, actor: Ranges, seating: Seating) -> Ranges:
    engines = draft.count("vllm.num_engines", 0)
    tensor = draft.count("vllm.tensor_parallel_size", 1, 1)
    if engines == 0:
        draft.assume(f"{PLACEMENT}.rollout: {actor}", "without engines the actor itself generates there")
        return actor
    if draft.has("train.colocate_all") and not draft.has("train.async_enable"):
        check_engines(draft, engines, tensor, len(actor))
        return first_of(engines * tensor, tensor, seating.per_node)
    return seating.take(engines * tensor, tensor)


def _copy(draft: Draft, component: str, size: int) -> int:
    """Accelerators of one copy of the model; 1 where they do not divide `size`."""
    if component == "rollout":
        engines = draft.count("vllm.num_engines", 0)
        return draft.count("vllm.tensor_parallel_size", 1, 1) if engines else 1
    copy = draft.count("ds.tensor_parallel_size", 1, 1)
    if size % copy:
        draft.find(
            "import-counts",
            "ds.tensor_parallel_size",
            f"{size} accelerators of {component} do not divide into copies of {copy}",
            got=str(draft.given["ds.tensor_parallel_size"]),
            why="a copy of the model takes that many accelerators",
            fix=f"ds.tensor_parallel_size: {next(n for n in range(copy, 0, -1) if size % n == 0)}",
        )
        return 1
    return copy


def _offloads(draft: Draft, spots: Mapping[str, Ranges]) -> dict[str, bool]:
    """Who leaves its accelerators there. Engines sleep only where all models share, never while sampling goes on."""
    sleeping = draft.has("train.colocate_all") and not draft.has("train.async_enable")
    old = "ref_reward_offload" in str(draft.given.get("ref.offload", ""))
    asleep = draft.has("ds.enable_sleep")
    leaves = {
        "actor": asleep,
        "critic": asleep,
        "reference": draft.has("ref.offload"),
        "reward": draft.has("reward.offload") or old,
        "rollout": draft.has("vllm.enable_sleep") and sleeping,
    }
    check_sleep(draft)
    if draft.has("vllm.enable_sleep") and sleeping:
        draft.derive("rollout.sleep_level", 1, "vllm.enable_sleep")
        draft.becomes("vllm.enable_sleep", "rollout.enable_offload", "rollout.sleep_level")
    elif draft.has("vllm.enable_sleep"):
        draft.unset("rollout.enable_offload")
        draft.unmapped("vllm.enable_sleep", "does nothing there unless all models share their accelerators in turn")
    return {c: leaves[c] for c in spots}


def _set_dtype(draft: Draft) -> None:
    """DeepSpeed keeps 16-bit weights, and 32-bit ones with the optimizer state."""
    dtype = "fp16" if draft.value("ds.param_dtype") == "fp16" else "bf16"
    given = [key for key in ("bf16", "ds.param_dtype") if key in draft.given]
    for model in ("actor", "critic"):
        if model in draft.placed:
            draft.set(f"{model}.weights", dtype)
            draft.set(f"{model}.compute", dtype)
            draft.set(f"{model}.optimizer.kind", "adamw_master")
    for key in given:
        draft.becomes(key, "actor.weights", "actor.compute")
    draft.assume("actor.optimizer.kind: adamw_master", "DeepSpeed keeps 32-bit weights with the optimizer state")
    if draft.count("ds.lora.rank", 0) == 0 and "ds.lora.rank" in draft.given:
        draft.needless("ds.lora.rank", "all weights are trained unless a rank is given")


def _set_length(draft: Draft) -> None:
    """Of prompt and answer: together in the newer spelling, one flag for each in the older."""
    if draft.value("data.max_len") is None:
        for part, ours in (("prompt_max_len", "max_prompt_length"), ("rollout.max_new_tokens", "max_new_tokens")):
            if part in draft.given:
                draft.derive(f"algorithm.{ours}", draft.count(part, 1024, 1), part)
        return
    length = draft.count("data.max_len", 2048, 2)
    answer = min(length - 1, draft.count("rollout.max_new_tokens", min(1024, length // 2), 1))
    draft.derive("algorithm.sequence_length", length, "data.max_len")
    draft.derive("algorithm.max_new_tokens", answer, "rollout.max_new_tokens")
    draft.set("algorithm.max_prompt_length", length - answer)
    draft.assume(f"algorithm.max_prompt_length: {length - answer}", "what the answer leaves of data.max_len")
    draft.needless("prompt_max_len", "lies within algorithm.sequence_length")


def _set_passes(draft: Draft) -> None:
    """A run packs its samples, so that a pass has so many tokens; a job that is only planned counts sequences."""
    dynamic = ("train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
    if "env" not in draft.placed or draft.written("actor.model") is None:
        for key in dynamic:
            draft.unmapped(key, "passes are counted in sequences until model and env.task are known")
        return
    longest = draft.written("algorithm.sequence_length")
    if not isinstance(longest, int):
        longest = draft.count("prompt_max_len", 1024, 1) + draft.count("rollout.max_new_tokens", 1024, 1)
    by_tokens = draft.has("train.dynamic_batch_enable")
    learned = draft.count(dynamic[1], 16192, 1)
    sizes = {
        ("actor", "critic"): ("train.micro_batch_size", 4, learned, dynamic[:2]),
        ("reference", "reward"): ("rollout.micro_batch_size", 8, draft.count(dynamic[2], learned, 1), dynamic[2:]),
    }
    largest = 0
    for models, (micro, usual, tokens, keys) in sizes.items():
        placed = [m for m in models if m in draft.placed and not draft.written(f"{m}.url")]
        draft.needless(micro, "passes are counted in tokens here" if by_tokens else "no such model")
        budget = max(longest, tokens) if by_tokens else draft.count(micro, usual, 1) * longest
        largest = min(largest, budget) if largest else budget  # a judge gains nothing by passes above the learners'
        for model in placed:
            draft.set(f"{model}.token_budget", largest)
        for key in keys if by_tokens else (micro,):
            if placed:
                draft.becomes(key, *(f"{m}.token_budget" for m in placed))
    if not by_tokens:
        draft.assume("token_budget", f"sequences of a pass x {longest} tokens; of judges, at most the learners'")
        for key in dynamic[1:]:
            draft.needless(key, "counts with use_dynamic_batch only")
