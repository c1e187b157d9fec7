"""What workers at work hold by torch's own record of allocations, beside what the ledger says of it.

Frozen scorers, both engines of language models, simulator policies. The accelerator is emulated and its memory the
host's, so every allocation of the worker's thread is seen, temporary buffers inside operations included. Ranks are
processes with real FSDP and gloo; no launcher.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file

from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.weights.host_sync import WeightSender
from rlplace.comm.weights.shards import Shard, row_blocks
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.placement.flow import deliver_by_rank
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.demands import Footprint
from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import JobSpec, job_spec
from rlplace.tokens import Request
from rlplace.trajectory import Observation, Trajectory
from rlplace.workers.arguments import (
    ACTIONS,
    COMPLETIONS,
    OBSERVATIONS,
    REFERENCE_WEIGHTS,
    REQUESTS,
    TRAJECTORIES,
    WEIGHTS,
    EndOfIteration,
    SimulatorArguments,
    samples_for,
    scores_of,
)
from rlplace.workers.worker import Rendezvous
from tests.memory_peaks import (
    GIB,
    VOCABULARY,
    Blocks,
    Reading,
    Stages,
    freed_in_time,
    made_up,
)
from tests.memory_peaks import language_model as without_tokenizer
from tests.tiny_lm import tiny_tokenizer
from tests.worker_ranks import attached, context_of, in_processes, spec_of

PROMPT, ANSWER = 64, 192


def language_model(folder: Path, **config: Any) -> Path:
    tiny_tokenizer(VOCABULARY).save_pretrained(folder)
    return without_tokenizer(folder, **config)


def reward_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_labels": 1}
    LlamaForSequenceClassification(LlamaConfig(**sizes, **heads)).save_pretrained(
        folder
    )
    tiny_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


OBSERVED, ROWS, STEPS = 376, 64, 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenJob:
    """A language-model job of which a component without an optimizer works: reference, reward or rollout."""

    model: Path  # of the component
    component: str = "reference"
    ranks: int = 1
    prompts: int = 4
    longest: int = ANSWER  # tokens that an answer may have
    answer: int | None = None  # those that an engine really answers with, if fewer
    block: Blocks = dataclasses.field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        everywhere = f"0-{self.ranks - 1}"
        components = {"actor", "env", "rollout", self.component}
        blocks: dict[str, Any] = {
            component: {"enable_offload": True} for component in components
        }
        files = {
            **json.loads((self.model / "config.json").read_text()),
            "path": str(self.model),
        }
        blocks["actor"]["model"] = files
        blocks["env"] |= {"task": "arithmetic"}
        if self.component == "reward":
            blocks["reward"]["model"] = files
        own: dict[str, Any] = {"dtype": "fp32"}
        own |= (
            {"token_budget": 1024}
            if self.component != "rollout"
            else {"engine": "transformers", "kv_cache_memory": 32 << 20}
        )
        blocks[self.component] |= own | dict(self.block)
        config = read_config(
            {
                "cluster": {
                    "accelerators_per_node": self.ranks,
                    "accelerator": {"memory": 4 * GIB},
                    "component_placement": dict.fromkeys(components, everywhere)
                    | {"env": "0"},
                },
                "algorithm": {
                    "name": "grpo",
                    "prompts": self.prompts,
                    "samples_per_prompt": 4,
                    "max_prompt_length": PROMPT,
                    "max_new_tokens": self.longest,
                },
                **blocks,
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )
        return job_spec(
            config,
            make_plan(config, Topology.uniform(1, self.ranks, "emulated", 4 * GIB)),
        )


def scorer_readings(job: FrozenJob) -> list[list[Reading]]:
    """By rank."""
    return in_processes(_scorer_rank, job, job.ranks)


def _scorer_rank(
    job: FrozenJob, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[Reading]:
    freed_in_time()
    spec, component = job.spec, job.component
    (footprint,) = spec.case.ledger().footprints[component]
    channels: dict[str, Channel] = {
        name: LocalChannel(spec_of(name))
        for name in (samples_for(component), scores_of(component))
    }
    if "refresh_every" in job.block:
        channels[REFERENCE_WEIGHTS] = LocalChannel(spec_of(REFERENCE_WEIGHTS))
    context = context_of(
        component, rank, job.ranks, rendezvous, channels, folder=folder
    )
    worker: Any = spec.workers[component](spec.arguments[component], context)
    worker.setup()
    stages = Stages(worker, footprint)
    groups = made_up(4 * job.prompts, PROMPT, ANSWER)
    mine = (
        groups
        if rank == 0 and worker._sharded
        else groups[rank :: job.ranks]
        if not worker._sharded
        else []
    )
    for iteration in range(2):
        for group in mine:
            channels[samples_for(component)].put(group, key="")
        stages("infer", Residency.FULL, lambda i=iteration: worker.infer(i, i))
        worker.move(Residency.OFF)
    if REFERENCE_WEIGHTS in channels:
        refresh(
            job,
            stages,
            worker,
            WeightSender(
                channels[REFERENCE_WEIGHTS], rank=0, deliveries=deliver_by_rank(1)
            ),
        )
    worker.close()
    return list(stages.found.values())


def refresh(job: FrozenJob, stages: Stages, worker: Any, sender: WeightSender) -> None:
    """Another thread sends, whose allocations are not of the record."""
    shards = [
        Shard(
            names=(name,),
            dtype="float32",
            shape=tuple(weight.shape),
            blocks=row_blocks(weight.shape, 1),
            data=weight,
        )
        for name, weight in load_file(job.model / "model.safetensors").items()
    ]
    for iteration in (1, 2):
        with ThreadPoolExecutor(1) as thread:
            pushing = thread.submit(sender.push, iteration, shards)
            stages(
                "refresh", Residency.WEIGHTS, lambda i=iteration: worker.refresh(i, i)
            )
            pushing.result()
    sender.close()


class _AllocatorState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((f"of_{place}", ctypes.c_size_t) for place in range(10))


def allocated_bytes() -> int:
    """What this process has allocated and not freed, by any library: of the C allocator's own count."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _AllocatorState
    state = count()
    return int(state.of_7 + state.of_4)  # of its arenas (uordblks), and mapped (hblkhd)


PACKED = (
    2 * VOCABULARY * 256 * 4
)  # that vLLM adds on a CPU: the embedding and the head, packed for its products


def vllm_block(sleep_level: int) -> Blocks:
    sizes = {"kv_cache_memory": 64 << 20, "step_tokens": 512, "step_sequences": 16}
    return {
        "engine": "vllm",
        "enforce_eager": True,
        "sleep_level": sleep_level,
        **sizes,
    }


def engine_readings(job: FrozenJob) -> list[list[Reading]]:
    """Of the stages; then, after a first iteration, of the process at each residency, beside what it has when off."""
    return in_processes(_engine_rank, job, 1, channels=(spec_of(WEIGHTS),))


def _engine_rank(
    job: FrozenJob, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[Reading]:
    """Weights come from a real actor in the same process."""
    spec = job.spec
    (footprint,) = spec.case.ledger().footprints["rollout"]
    channels: dict[str, Channel] = {
        name: LocalChannel(spec_of(name)) for name in (REQUESTS, COMPLETIONS)
    }
    ends = [
        attached(WEIGHTS, folder, f"{component} rank 0")
        for component in ("actor", "rollout")
    ]
    of_actor = context_of("actor", 0, 1, rendezvous, {WEIGHTS: ends[0]}, folder=folder)
    actor: Any = spec.workers["actor"](spec.arguments["actor"], of_actor)
    actor.setup()
    actor.move(Residency.FULL)
    context = context_of(
        "rollout", 0, 1, rendezvous, channels | {WEIGHTS: ends[1]}, folder=folder
    )
    worker: Any = spec.workers["rollout"](spec.arguments["rollout"], context)
    worker.setup()
    stages = Stages(worker, footprint)
    rng = np.random.default_rng(0)

    def generate(iteration: int, answer: int = job.answer or job.longest) -> None:
        for group in range(job.prompts):
            tokens = rng.integers(2, VOCABULARY, PROMPT).astype(np.int32)
            sizes = {"samples": 4, "first_sample": 0, "max_new_tokens": answer}
            request = Request(
                iteration=iteration,
                env_rank=0,
                group=group,
                turn=0,
                tokens=tokens,
                **sizes,
            )
            channels[REQUESTS].put(request)
        channels[REQUESTS].put(EndOfIteration(iteration=iteration))
        worker.generate(iteration)

    for iteration in range(2):
        actor.push_weights(iteration)
        stages("sync", Residency.WEIGHTS, lambda i=iteration: worker.pull_weights(i))
        stages("rollout", Residency.FULL, lambda i=iteration: generate(i))
        worker.move(Residency.OFF)
    # Once more by the allocator's count: torch's record does not see what vLLM packs.
    actor.push_weights(2)
    works = {
        Residency.WEIGHTS: lambda: worker.pull_weights(2),
        Residency.FULL: lambda: generate(2, answer=1),
    }
    gc.collect()
    held, off = list[Reading](), allocated_bytes()
    for residency in (Residency.WEIGHTS, Residency.FULL, Residency.OFF):
        resident = worker.move(residency).accelerator_bytes
        works.get(residency, lambda: None)()
        gc.collect()
        measured, predicted = (
            allocated_bytes() - off,
            sum(footprint.held[residency].values()),
        )
        held.append(
            Reading(
                stage=residency.word,
                resident=resident,
                measured=measured,
                predicted=predicted,
            )
        )
    worker.close()
    if (
        dist.is_initialized()
    ):  # vLLM has ended the group of its process, which was the actor's too
        actor.close()
    return [*stages.found.values(), *held]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJob:
    """PPO of a simulator, of which the actor or a rollout rank works."""

    ranks: int = 1
    hidden: tuple[int, ...] = (1024, 1024)
    blocks: Blocks = dataclasses.field(default_factory=dict)

    @property
    def spaces(self) -> Spaces:
        actions = ContinuousActions(shape=(17,), low=(-1.0,) * 17, high=(1.0,) * 17)
        return Spaces(observation_shape=(OBSERVED,), actions=actions)

    @property
    def made(self) -> tuple[SimulatorArguments, dict[str, tuple[Footprint, ...]]]:
        everywhere = f"0-{self.ranks - 1}"
        given: dict[str, Any] = {
            "cluster": {
                "accelerators_per_node": self.ranks,
                "component_placement": dict.fromkeys(
                    ("actor", "env", "rollout"), everywhere
                ),
            },
            "env": {"id": "synthetic", "total_num_envs": ROWS, "enable_offload": True},
            "actor": {"model": {"hidden": list(self.hidden)}, "enable_offload": True},
            "rollout": {"enable_offload": True},
            "algorithm": {"rollout_steps": STEPS, "epochs": 2, "num_minibatches": 4},
            "runner": {"seed": 7, "total_iterations": 4},
        }
        for block, keys in self.blocks.items():
            given[block] = {**given[block], **keys}
        config = read_config(given)
        plan = make_plan(config, Topology.uniform(1, self.ranks, "emulated", 4 * GIB))
        arguments = SimulatorArguments(
            config=config,
            ranks=dict.fromkeys(("actor", "env", "rollout"), self.ranks),
            deliveries=plan.deliveries,
            spaces=self.spaces,
            routes=plan.row_routes,
        )
        return arguments, dict(
            memory_case(plan, config, self.spaces).ledger().footprints
        )


def trajectory(rows: int, first_row: int, version: int) -> Trajectory:
    rng = np.random.default_rng([5, version])
    normal = rng.standard_normal((STEPS + 1, rows, OBSERVED)).astype(np.float32)
    ended = rng.random((STEPS, rows)) < 0.05
    actions = rng.standard_normal((STEPS, rows, 17)).astype(np.float32)
    return Trajectory(
        first_row=first_row,
        env_rank=0,
        version_min=version,
        version_max=version,
        observations=normal[:-1],
        actions=actions,
        logprobs=(-0.5 * actions**2).sum(-1) - 17 * 0.92,
        values=np.zeros((STEPS, rows), np.float32),
        rewards=normal[:-1, :, 0],
        terminated=np.zeros_like(ended),
        truncated=ended,
        last_observations=normal[-1],
        final_observations=rng.standard_normal((int(ended.sum()), OBSERVED)).astype(
            np.float32
        ),
    )


class Sink(LocalChannel):
    """Its items are on the host, where no accelerator is emulated."""

    def put(self, item: Any, *, key: str = "", weight: int = 1, **_: Any) -> None:
        pass


def policy_readings(job: PolicyJob) -> list[list[Reading]]:
    return in_processes(_policy_rank, job, job.ranks, channels=(spec_of(WEIGHTS),))


def _policy_rank(
    job: PolicyJob, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[Reading]:
    """The actor's stages, then on rank 0 those of a rollout rank that takes its weights."""
    from rlplace.workers.roles.actor import PolicyActor
    from rlplace.workers.roles.rollout import VectorRolloutWorker

    freed_in_time()
    arguments, footprints = job.made
    (held_by_actor,), (held_by_rollout,) = footprints["actor"], footprints["rollout"]
    channels: dict[str, Channel] = {
        name: LocalChannel(spec_of(name)) for name in (TRAJECTORIES, OBSERVATIONS)
    }
    channels[ACTIONS] = Sink(spec_of(ACTIONS))
    ends = [
        attached(WEIGHTS, folder, f"{component} rank {rank}")
        for component in ("actor", "rollout")
    ]
    context = context_of(
        "actor",
        rank,
        job.ranks,
        rendezvous,
        channels | {WEIGHTS: ends[0]},
        folder=folder,
    )
    actor = PolicyActor(arguments, context)
    actor.setup()
    context = context_of(
        "rollout",
        rank,
        job.ranks,
        rendezvous,
        channels | {WEIGHTS: ends[1]},
        folder=folder,
    )
    rollout = VectorRolloutWorker(arguments, context)
    rollout.setup()
    learning, acting = Stages(actor, held_by_actor), Stages(rollout, held_by_rollout)
    rows = ROWS // job.ranks
    for index in range(2):
        learning("sync", Residency.WEIGHTS, lambda i=index: actor.push_weights(i))
        acting("sync", Residency.WEIGHTS, lambda i=index: rollout.pull_weights(i))
        for step in range(STEPS):
            observed = np.zeros((rows, OBSERVED), np.float32)
            item = Observation(
                env_rank=rank,
                stage_group=0,
                step=step,
                first_row=rank * rows,
                observations=observed,
            )
            channels[OBSERVATIONS].put(item, key=str(rank))
        acting("rollout", Residency.FULL, lambda i=index: rollout.generate(i))
        rollout.move(Residency.OFF)
        channels[TRAJECTORIES].put(trajectory(rows, rank * rows, index), key=str(rank))
        learning("learn", Residency.FULL, lambda i=index: actor.learn(i, i))
        actor.move(Residency.OFF)
    rollout.close()
    actor.close()
    return [*learning.found.values(), *acting.found.values()]
