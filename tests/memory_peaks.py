"""What a worker at work holds, by torch's own record of allocations, beside what the ledger says of it.

The accelerator is emulated and its memory the host's, so every allocation of the worker's thread is seen, temporary
buffers inside operations included. Ranks are processes with real FSDP and gloo; no launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from rlplace.algo.packing import SampleSizes
from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.weights.host_sync import CopyReceiver
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.demands import Footprint, HostPart
from rlplace.placement.memory.model import read_model
from rlplace.placement.schedule import Residency
from rlplace.runtime.launched import JobSpec, job_spec
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    RETURNS,
    SAMPLES,
    WEIGHTS,
    samples_for,
    scores_of,
)
from rlplace.workers.worker import Rendezvous
from tests.worker_ranks import attached, context_of, in_processes, spec_of

GIB = 1 << 30
VOCABULARY, PROMPT, ANSWER = 8192, 16, 264  # two answers fill a chunk of scores
Blocks = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One stage of one rank, in bytes on its accelerator; the resident ones included."""

    stage: str
    resident: int  # measured
    measured: int
    predicted: int
    at_peak: Mapping[int, int] = dataclasses.field(
        default_factory=dict
    )  # sizes of the tensors made, and their number

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


@dataclasses.dataclass(slots=True)
class Allocations:
    peak_bytes: int = 0  # beyond what was allocated before
    at_peak: dict[int, int] = dataclasses.field(
        default_factory=dict
    )  # size -> how many more than before


@contextlib.contextmanager
def allocations() -> Iterator[Allocations]:
    """Record what this thread allocates and frees in the block."""
    found = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    kineto = recorded.profiler.kineto_results
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]"
    )
    held, sizes = 0, {}
    for _, size in events:
        held += size
        sizes[abs(size)] = sizes.get(abs(size), 0) + (1 if size > 0 else -1)
        if held > found.peak_bytes:
            found.peak_bytes, found.at_peak = (
                held,
                {s: n for s, n in sizes.items() if n},
            )


def freed_in_time() -> None:
    """Make exchanges of gloo give their buffers back to the thread whose record is read.

    Gloo's own thread holds a finished exchange for a moment longer, and what it frees is not recorded.
    """

    def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_wait(*arguments: Any, **settings: Any) -> Any:
            found = collective(*arguments, **settings)
            time.sleep(0.01)
            return found

        return call_and_wait

    for name in (
        "all_reduce",
        "all_to_all_single",
        "all_gather_single",
        "reduce_scatter_single",
    ):
        setattr(dist, name, waiting(getattr(dist, name)))
    DTensor.full_tensor = waiting(DTensor.full_tensor)


class CopiedToHost(saved_tensors_hooks):
    """As torch's `save_on_cpu` between two kinds of memory: here both are the host's, which it would not copy."""

    def __init__(self, **_: Any) -> None:
        super().__init__(torch.clone, torch.clone)


def language_model(folder: Path, **config: Any) -> Path:
    """Large enough that its tensors outweigh what no formula names."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**{**sizes, **heads, **config}, dtype="float32")
    )
    model.save_pretrained(folder)
    return folder


def made_up(
    samples: int, prompt: int = PROMPT, answer: int = ANSWER, alike: int = 0
) -> list[tuple[Sample, ...]]:
    """Groups of four equally long answers, whose first `alike` tokens are the same."""
    rng = np.random.default_rng(0)
    mask = np.arange(prompt + answer) >= prompt
    begins = rng.integers(0, VOCABULARY, alike)
    return [
        tuple(
            Sample(
                group=group,
                sample=number,
                tokens=np.concatenate(
                    [begins, rng.integers(0, VOCABULARY, len(mask) - alike)]
                ).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=float(number % 2),
                rewards={"made up": float(number % 2)},
                turns=1,
                truncated=False,
            )
            for number in range(4)
        )
        for group in range(samples // 4)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmJob:
    """A language-model job of which one trained component works, on so many ranks."""

    model: Path
    component: str = "actor"
    ranks: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    prompts: int = 1  # of four samples
    prompt: int = PROMPT  # tokens, as answer
    answer: int = ANSWER
    alike: bool = False  # samples have their prompt in common
    value_head: bool = False
    refreshes: bool = False  # a reference
    kind: str = "emulated"  # of accelerators, as their memory
    memory_bytes: int = 16 * GIB
    trained: Blocks = dataclasses.field(default_factory=dict)
    algorithm: Blocks = dataclasses.field(default_factory=dict)

    @property
    def budget(self) -> int:
        """Two samples, or all of those that have something in common."""
        whole = self.prompt + self.answer
        if not self.alike:
            return 2 * whole
        again = read_model(
            json.loads((self.model / "config.json").read_text())
        ).read_again
        return SampleSizes((whole,) * 4, (self.prompt,) * 4, (0,) * 4, again).size(
            range(4)
        )

    @property
    def spec(self) -> JobSpec:
        critic = self.component == "critic"
        name = "ppo" if critic or self.value_head else "grpo"
        everywhere = f"0-{self.ranks - 1}"
        sizes = {
            "tensor_parallel_size": self.tensor_parallel,
            "context_parallel_size": self.context_parallel,
        }
        cut = {self.component: {"placement": everywhere, **sizes}}
        components = ["actor", "env", "rollout", *(["critic"] if critic else [])]
        blocks: dict[str, Any] = {
            "actor": {
                "model": {
                    **json.loads((self.model / "config.json").read_text()),
                    "path": str(self.model),
                }
            }
        }
        own = {
            "compute": "fp32",
            "token_budget": self.budget,
            "enable_offload": True,
            **self.trained,
        }
        blocks[self.component] = blocks.get(self.component, {}) | own
        if self.value_head:
            blocks["critic"] = {"on_actor": True}
        if self.refreshes:
            components.append("reference")
            blocks["reference"] = {"refresh_every": 1}
        for component in components:
            blocks.setdefault(component, {})["enable_offload"] = True
        sizes = {"prompts": self.prompts, "samples_per_prompt": 4}
        lengths = {"max_prompt_length": self.prompt, "max_new_tokens": self.answer}
        blocks["env"] |= {"task": "arithmetic"}
        config = read_config(
            {
                "cluster": {
                    "accelerators_per_node": self.ranks,
                    "component_placement": dict.fromkeys(components, everywhere)
                    | {"env": "0"}
                    | cut,
                },
                "algorithm": {"name": name, **sizes, **lengths, **self.algorithm},
                **blocks,
                "runner": {
                    "seed": 7,
                    "total_iterations": 4,
                    "samples": 0,
                },  # there is no tokenizer
            }
        )
        return job_spec(
            config,
            make_plan(
                config, Topology.uniform(1, self.ranks, self.kind, self.memory_bytes)
            ),
        )


def lm_models(folder: Path) -> Path:
    """Make the models of `lm_cases`: with queries as wide as states, four times as wide, and of these, one key head."""
    language_model(folder / "usual")
    language_model(folder / "wide", head_dim=128, num_key_value_heads=8)
    language_model(folder / "one key head", head_dim=128, num_key_value_heads=1)
    return folder


def lm_cases(models: Path) -> dict[str, LmJob]:
    """One of everything that changes what a trained language model holds. Two micro-batches, unless it says one."""
    bf16: Blocks = {"compute": "bf16"}
    rounded = {**bf16, "weights": "bf16", "optimizer": {"kind": "adamw_master"}}
    job = functools.partial(LmJob, model=models / "usual")
    wide = functools.partial(LmJob, model=models / "wide")
    shared = {"prompt": 192, "answer": 64, "alike": True}
    whole: Blocks = {"checkpointing": False}
    cut = functools.partial(job, ranks=2, tensor_parallel=2, prompts=2)
    longer: Blocks = {
        "token_budget": 4 * (PROMPT + ANSWER)
    }  # whose scores fill a chunk of half the vocabulary
    return {
        "float32": job(),
        "float32, one micro-batch": job(
            trained={"token_budget": 4 * (PROMPT + ANSWER)}
        ),
        "float32, two ranks": job(ranks=2, prompts=2),
        "nothing recomputed": job(trained=whole),
        "inputs of layers on the host": job(
            trained={**longer, "activation_offload": True}
        ),
        "computed in bfloat16": job(ranks=2, prompts=2, trained=bf16),
        "weights in bfloat16": job(ranks=2, prompts=2, trained=rounded),
        "Adam in bfloat16": job(trained={**bf16, "weights": "bf16"}),
        "low-rank factors": job(ranks=2, prompts=2, trained={"lora_rank": 8, **bf16}),
        "factors, and a reference refreshed": job(
            refreshes=True, trained={"lora_rank": 8}
        ),
        "Adam on the host": job(trained={"optimizer": {"on_host": True}}),
        "gathered once": job(ranks=2, prompts=2, trained={"zero_stage": 2}),
        "cut between two ranks": cut(trained=longer),
        "cut, computed in bfloat16": cut(trained={**longer, **bf16}),
        "cut, low-rank factors": cut(trained={**longer, "lora_rank": 8, **bf16}),
        "tokens between two ranks": job(ranks=2, context_parallel=2, trained=longer),
        "tokens between two ranks, factors": job(
            ranks=2, context_parallel=2, trained={**longer, "lora_rank": 8, **bf16}
        ),
        "tokens between two ranks, nothing recomputed": job(
            ranks=2, context_parallel=2, trained=whole
        ),
        "cut, a critic, nothing recomputed": cut(component="critic", trained=whole),
        "value head": job(value_head=True),
        "critic": job(component="critic"),
        "critic, nothing recomputed": job(
            component="critic", ranks=2, prompts=2, trained=whole
        ),
        "wide heads": wide(trained=longer),
        "wide heads, nothing recomputed": wide(trained=whole),
        "wide heads, a critic": wide(component="critic"),
        "wide heads, cut": wide(ranks=2, tensor_parallel=2, prompts=2, trained=longer),
        "wide heads, tokens between two ranks that copy their key head": LmJob(
            model=models / "one key head", ranks=2, context_parallel=2, trained=whole
        ),
        "a prompt in common": job(**shared),
        "wide heads, a prompt in common, nothing recomputed": wide(
            **shared, trained=whole
        ),
    }


def lm_readings(job: LmJob) -> list[list[Reading]]:
    """By rank."""
    return in_processes(_lm_rank, job, job.ranks, channels=(spec_of(WEIGHTS),))


def _lm_rank(
    job: LmJob, rank: int, rendezvous: Rendezvous, folder: Path
) -> list[Reading]:
    freed_in_time()
    torch.autograd.graph.save_on_cpu = CopiedToHost  # in a process of its own
    spec, component = job.spec, job.component
    (footprint,) = spec.case.ledger().footprints[component]
    names = (
        (SAMPLES, WEIGHTS)
        if component == "actor"
        else (samples_for("critic"), scores_of("critic"), RETURNS)
    )
    channels: dict[str, Channel] = {name: LocalChannel(spec_of(name)) for name in names}
    if job.refreshes:
        channels |= {
            name: LocalChannel(spec_of(name))
            for name in (REFERENCE_WEIGHTS, scores_of("reference"))
        }
        channels[samples_for("reference")] = LocalChannel(
            spec_of(samples_for("reference"))
        )
    if component == "actor":
        channels[WEIGHTS] = attached(WEIGHTS, folder, f"actor rank {rank}")
    context = context_of(
        component, rank, job.ranks, rendezvous, channels, folder=folder
    )
    worker: Any = spec.workers[component](spec.arguments[component], context)
    worker.setup()
    stages = Stages(worker, footprint)
    groups = made_up(
        4 * job.prompts, job.prompt, job.answer, job.prompt if job.alike else 0
    )
    receiver = None
    for iteration in range(2):  # the optimizer's state is made in the first step
        if component == "actor":
            receiver = receiver or CopyReceiver(channels[WEIGHTS], rank, folder=folder)
            stages(
                "sync", Residency.WEIGHTS, lambda i=iteration: worker.push_weights(i)
            )
            with receiver.pull(iteration):
                pass
        if rank == 0:
            for group in groups:
                channels[
                    SAMPLES if component == "actor" else samples_for("critic")
                ].put(group, key="")
        if component == "critic" or spec.config.actor_infers:
            stages("infer", Residency.FULL, lambda i=iteration: worker.infer(i, i))
        if component == "actor" and spec.config.actor_infers:
            worker.compute_advantages(iteration)
        scored = (
            RETURNS
            if component == "critic"
            else scores_of("reference")
            if job.refreshes
            else None
        )
        if scored is not None and rank == 0:
            for group in groups:
                values = [
                    Scores(
                        group=s.group, sample=s.sample, values=s.logprobs[s.mask] * 0
                    )
                    for s in group
                ]
                channels[scored].put(tuple(values), key="")
        there = footprint.host[Residency.FULL].get(HostPart.ACTIVATIONS, 0)
        stages(
            "learn", Residency.FULL, lambda i=iteration: worker.learn(i, i), host=there
        )
        worker.move(Residency.OFF)
    if job.refreshes:
        refresh(stages, worker, CopyReceiver(channels[REFERENCE_WEIGHTS], 0))
    if component == "actor":
        save(job, rank, stages, worker, folder)
    if receiver is not None:
        receiver.close()
    worker.close()
    return list(stages.found.values())


def refresh(stages: Stages, worker: Any, receiver: CopyReceiver) -> None:
    for iteration in (1, 2):
        stages("refresh", Residency.WEIGHTS, lambda i=iteration: worker.refresh(i, i))
        with receiver.pull(iteration):
            pass
    receiver.close()


def save(job: LmJob, rank: int, stages: Stages, worker: Any, folder: Path) -> None:
    """Rank 0 has the weights on its host until they are written, where the record sees them too."""
    worker.move(Residency.WEIGHTS)
    sizes = [weight.nbytes for _, weight in worker._model.whole_weights()]
    last = (
        max(sizes) if job.ranks > 1 else 0
    )  # the head: not there yet while it is put together
    for _ in range(2):
        there = 0 if rank else stages.saved - last
        stages(
            "save_model",
            Residency.WEIGHTS,
            lambda: worker.save_model(str(folder / "saved")),
            host=there,
        )
        copied = max(
            0, max(sizes) - stages.working("digest")
        )  # of one weight, after it is whole
        stages("digest", Residency.WEIGHTS, worker.digest, host=copied)
    worker.move(Residency.OFF)


class Stages:
    """Has a worker do its stages and keeps the smallest reading of each."""

    def __init__(self, worker: Any, footprint: Footprint) -> None:
        self._worker, self._footprint = worker, footprint
        self.found: dict[str, Reading] = {}

    def working(self, stage: str) -> int:
        return sum(self._footprint.working.get(stage, {}).values())

    @property
    def saved(self) -> int:
        return self._footprint.host[Residency.FULL][HostPart.SAVED]

    def __call__(
        self,
        stage: str,
        residency: Residency,
        work: Callable[[], object],
        *,
        host: int = 0,
    ) -> None:
        """`host`: bytes that the work has on its host, which the record sees too."""
        resident = self._worker.move(residency).accelerator_bytes
        with allocations() as made:
            work()
        predicted = (
            sum(self._footprint.held[residency].values()) + self.working(stage) + host
        )
        reading = Reading(
            stage=stage,
            resident=resident,
            measured=resident + made.peak_bytes,
            predicted=predicted,
            at_peak=made.at_peak,
        )
        # Alike in each iteration; another thread that frees late can only add to one of them.
        if stage not in self.found or reading.measured < self.found[stage].measured:
            self.found[stage] = reading
