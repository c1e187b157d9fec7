"""How fast a language model learns on this machine's GPU: `python -m benchmarks.gpu_learning learning-0.6b`.

As `benchmarks.gpu_tries`: lines that begin with `@` are measurements, the last line is the figure, 77 means that a
library is not here; with `--emulated` a CPU stands in for the GPU, with tiny sizes, and nothing is compared.

`learning-...`: one iteration of GRPO by the actor's own worker, against a plain loop of transformers over padded
batches: autocast, SDPA, the whole vocabulary's scores, AdamW in one kernel. Both make the same update of the same
random weights on the same samples, within the same tokens for each pass, and recompute each layer.

A token counts once for each sample that has it, padding does not. Operations of the model: 6 for each weight and token,
the head's included and the table of embeddings not, and those of attention; 4 for each frozen weight. Those that are
made twice, since layers are recomputed, count once. So the share of the peak is what is called model FLOPs utilisation.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu_measure import (
    DEVICE,
    GIB,
    ON_CPU,
    best,
    expect,
    matrix_rate,
    models_folder,
    show,
    synchronize,
    try_named_on_command_line,
)
from benchmarks.random_models import model_config, parameters
from rlplace.tokens import Sample

BUDGET = 256 if ON_CPU else 8192  # tokens of a forward and backward pass
STEPS = 2 if ON_CPU else 3  # of each loop; the first warms up
LEARNING_RATE = 1e-5
LORA_LEARNING_RATE = 1e-3
COMPUTE = "bf16"
DTYPE = torch.bfloat16
COMPILER = "aot_eager" if ON_CPU else "inductor"  # a C++ compiler would take minutes
CLIP = 1.0  # of the gradient norm
Groups = Sequence[Sequence[Sample]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    size: str  # of random_models.SIZES
    lora_rank: int | None = None  # trains factors alone
    groups: int = 8  # of samples
    answers: int = 8  # of a group

    def written(self, folder: Path) -> Path:
        """Write it with random weights in bfloat16, made on the GPU: those of random_models repeat themselves."""
        from transformers import AutoConfig, AutoModelForCausalLM

        from tests.tiny_lm import tiny_tokenizer

        config = AutoConfig.for_model(**{**self.keys, "dtype": "bfloat16"})
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        model.save_pretrained(folder)
        tiny_tokenizer(320).save_pretrained(
            folder
        )  # by which some samples are shown as text
        return folder

    @property
    def keys(self) -> dict[str, Any]:
        return dict(model_config("emulated" if ON_CPU else self.size))

    @property
    def vocabulary(self) -> int:
        return int(self.keys["vocab_size"])

    @property
    def learning_rate(self) -> float:
        if self.lora_rank is None:
            return LEARNING_RATE
        return LORA_LEARNING_RATE

    @property
    def weights(self) -> int:
        """Weights that multiply each token, those of the head too, which is the table of embeddings."""
        return parameters("emulated" if ON_CPU else self.size)

    def operations(self, lengths: Sequence[int]) -> float:
        """Forward and backward, of sequences of these lengths."""
        each = 6 if self.lora_rank is None else 4
        keys = self.keys
        width = keys["num_attention_heads"] * keys["head_dim"]
        attention = 6 * keys["num_hidden_layers"] * width * sum(n * n for n in lengths)
        return float(each * self.weights * sum(lengths) + attention)


MODELS: Mapping[str, Model] = {
    "0.6b": Model(size="Qwen3-0.6B"),
    "1.7b": Model(size="Qwen3-1.7B", groups=4),
    "4b-lora": Model(size="Qwen3-4B", lora_rank=16, groups=4),
}
if ON_CPU:
    MODELS = {
        name: dataclasses.replace(model, groups=2, answers=4)
        for name, model in MODELS.items()
    }


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def learning(name: str) -> str:
    """Tokens per second of the actor, with prompts of groups shared and without, and of the plain loop."""
    model = MODELS[name]
    peak = matrix_rate()
    shared = made_up(model, shared=True)
    apart = made_up(model, shared=False)
    with model_folder(model) as folder:
        # The plain loop first: its log-probabilities go into the samples, so that ratios begin at one and nothing is
        # clipped.
        plain = Plain(folder, model)
        shared = plain.scored(shared)
        apart = plain.scored(apart)
        theirs = Steps([plain.step(apart) for _ in range(STEPS)], most_allocated())
        del plain
        collect()
        # Then the actor, on the same samples and from the same weights.
        actor = Actor(folder, model)
        began = actor.digest_of_one()
        ours = Steps([actor.step(apart) for _ in range(STEPS)], most_allocated())
        sharing = Steps([actor.step(shared) for _ in range(2)], most_allocated())
        changed = actor.digest_of_one() - began
        actor.close()
    # Both must have learned, and the same.
    if (
        not all(steps.finite for steps in (theirs, ours, sharing))
        or not math.isfinite(changed)
        or not changed
    ):
        sys.exit(
            f"weights changed by {changed:g}; losses {[step.loss for step in ours.steps]}"
        )
    if model.lora_rank is None:  # factors begin with other random values in both
        ratio = ours.steps[0].norm / theirs.steps[0].norm
        expect(
            "gradient norm of the first step, of the plain loop's",
            ratio,
            0.9,
            1.1,
            " x",
        )
    show(
        "loss of the first and the last step",
        f"{ours.steps[0].loss:.5f}, {ours.steps[-1].loss:.5f}",
    )
    return _compared(model, peak, apart, ours=ours, sharing=sharing, theirs=theirs)


def _compared(
    model: Model,
    peak: float,
    samples: Groups,
    *,
    ours: Steps,
    sharing: Steps,
    theirs: Steps,
) -> str:
    """Print speeds beside each other, and what they are bounded by; return the figure."""
    lengths = [sample.weight for group in samples for sample in group]
    tokens = sum(lengths)
    operations = model.operations(lengths)
    show("matrix products in bfloat16", f"{peak / 1e12:.0f} TFLOP/s")
    for what, steps in {"plain loop": theirs, "prompts apart": ours}.items():
        rate = f"{tokens / steps.seconds:,.0f} tokens/s"
        show(what, rate, f"{share(operations, steps.seconds, peak)} of the peak")
    faster = f"{ours.seconds / sharing.seconds:.2f} x"
    show("prompts shared", f"{tokens / sharing.seconds:,.0f} tokens/s", faster)
    show(
        "most allocated",
        f"{ours.most_bytes / GIB:.1f} GiB",
        f"plain loop {theirs.most_bytes / GIB:.1f} GiB",
    )
    for part, value in ours.steps[-1].parts.items():
        show(f"  {part}", f"{value:.3g} s")
    expect(
        "tokens per second, of the plain loop's",
        theirs.seconds / ours.seconds,
        least=1.0,
        unit=" x",
    )
    expect("share of the bf16 peak", operations / ours.seconds / peak, least=0.2)
    return (
        f"{tokens / ours.seconds:,.0f} tokens/s, {theirs.seconds / ours.seconds:.2f} x the plain loop, "
        f"{share(operations, ours.seconds, peak)} of the peak; prompts shared {tokens / sharing.seconds:,.0f} tokens/s"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    seconds: float
    norm: float
    loss: float
    parts: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  # seconds by name


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one loop on the same samples; the first warms up."""

    steps: Sequence[Step]
    most_bytes: int  # allocated on the GPU until now, since the loop began

    @property
    def seconds(self) -> float:
        """Of the fastest."""
        return min(step.seconds for step in self.steps[1:])

    @property
    def finite(self) -> bool:
        return all(
            math.isfinite(step.norm) and math.isfinite(step.loss) for step in self.steps
        )


class Actor:
    """The worker of an actor, alone. It stays: to pin as much host memory takes longer than what is measured."""

    def __init__(self, folder: Path, model: Model) -> None:
        from rlplace.comm.ends import LocalChannel
        from rlplace.placement.schedule import Residency
        from rlplace.workers.arguments import SAMPLES, WEIGHTS
        from rlplace.workers.launch.devices import CudaDevice
        from rlplace.workers.roles.actor import LmActor
        from rlplace.workers.worker import MoveReport
        from tests.lm_ranks import LmScenario
        from tests.worker_ranks import context_of, listen, rendezvous_at, spec_of

        class Staying(LmActor):
            def move(self, to: Residency) -> MoveReport:
                return super().move(Residency.FULL)

        adam: dict[str, Any] = {
            "lr": model.learning_rate,
            "eps": 1e-8,
            "max_grad_norm": CLIP,
        }
        own: dict[str, Any] = {
            "compute": COMPUTE,
            "token_budget": BUDGET,
            "optimizer": adam,
        }
        if model.lora_rank is not None:
            own |= {
                "lora_rank": model.lora_rank,
                "weights": "bf16",
                "optimizer": adam | {"kind": "adamw_master"},
            }
        sizes = {"prompts": model.groups, "samples_per_prompt": model.answers}
        job = LmScenario(model=folder, algorithm=sizes, trained=own).job
        channels = {name: LocalChannel(spec_of(name)) for name in (SAMPLES, WEIGHTS)}
        device = None if ON_CPU else CudaDevice()
        self.worker = Staying(
            job,
            context_of("actor", 0, 1, rendezvous_at(listen()), channels, device=device),
        )
        self.worker.setup()

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.worker._model.module
        return module

    def step(self, groups: Groups) -> Step:
        """One iteration, from samples to other weights."""
        from tests.lm_ranks import iterate

        synchronize()
        began = time.perf_counter()
        metrics = iterate(self.worker, 0, groups)
        synchronize()
        seconds = time.perf_counter() - began
        found = {name: metric.value for name, metric in metrics.items()}
        parts = {
            name: value
            for name, value in found.items()
            if name.endswith("_s") and "per_s" not in name
        }
        return Step(
            seconds=seconds,
            norm=found["actor/grad_norm"],
            loss=found["actor/loss"],
            parts=parts,
        )

    def digest_of_one(self) -> float:
        """The sum of what is trained, absolute: it changes where that changes, and is finite where that is."""
        shards = self.worker._model.trained_shards()
        return float(
            sum(shard.detach().double().abs().sum().item() for shard in shards)
        )

    def close(self) -> None:
        self.worker.close()
        collect()


class Plain:
    """A loop as one writes it by transformers and torch alone."""

    def __init__(self, folder: Path, model: Model) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if model.lora_rank is None else DTYPE
        lm: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
        lm.to(DEVICE)
        lm.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if model.lora_rank is not None:
            from peft import LoraConfig, get_peft_model

            lm.enable_input_require_grads()
            factors = LoraConfig(
                r=model.lora_rank,
                lora_alpha=16,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            torch.manual_seed(0)
            lm = get_peft_model(lm, factors)
        self.lm = lm.train()
        self.trained = [
            parameter for parameter in self.lm.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=model.learning_rate, weight_decay=0.0, fused=True
        )

    def scored(self, groups: Groups) -> list[tuple[Sample, ...]]:
        """The same samples, with the log-probabilities that the model gives their tokens."""
        samples = [sample for group in groups for sample in group]
        found: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for batch in self._batches(samples):
                for sample, logprobs in zip(
                    batch, self._logprobs(batch)[0].float().cpu().numpy(), strict=True
                ):
                    own = np.concatenate([[0.0], logprobs[: sample.weight - 1]])
                    found[id(sample)] = np.where(sample.mask, own, 0.0).astype(
                        np.float32
                    )
        return [
            tuple(dataclasses.replace(one, logprobs=found[id(one)]) for one in group)
            for group in groups
        ]

    def step(self, groups: Groups) -> Step:
        samples = [sample for group in groups for sample in group]
        advantages = {
            id(sample): advantage
            for group in groups
            for sample, advantage in advantages_of(group)
        }
        learned = sum(sample.response_tokens for sample in samples)
        synchronize()
        began = time.perf_counter()
        total = torch.zeros((), device=DEVICE)
        for batch in self._batches(samples):
            logprobs, mask = self._logprobs(batch)
            old = padded([torch.tensor(sample.logprobs) for sample in batch])[:, 1:]
            advantage = torch.tensor(
                [advantages[id(sample)] for sample in batch], device=DEVICE
            )[:, None]
            ratio = torch.exp((logprobs - old) * mask)
            surrogate = torch.minimum(
                ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
            )
            loss = -(surrogate * mask).sum() / learned
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = norm.item()
        loss_of_step = total.item()
        synchronize()
        return Step(seconds=time.perf_counter() - began, norm=found, loss=loss_of_step)

    @staticmethod
    def _batches(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
        """Neighbours in length: as many as fit the budget when all are as long as the longest."""
        batch: list[Sample] = []
        for sample in sorted(samples, key=lambda s: s.weight):
            if batch and sample.weight * (len(batch) + 1) > BUDGET:
                yield batch
                batch = []
            batch.append(sample)
        yield batch

    def _logprobs(self, batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Of all tokens but the first, by the whole vocabulary; and which are learned."""
        ids = padded(
            [torch.tensor(sample.tokens, dtype=torch.int64) for sample in batch]
        )
        # Padding stands behind: no token sees it, and without a mask SDPA takes its fast kernel.
        with torch.autocast(DEVICE.type, dtype=DTYPE):
            logits = self.lm(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[
            ..., 0
        ]
        return logprobs, padded([torch.tensor(sample.mask) for sample in batch])[:, 1:]


def advantages_of(group: Sequence[Sample]) -> list[tuple[Sample, float]]:
    rewards = np.array([sample.reward for sample in group])
    deviation = rewards.std(ddof=1)
    return [
        (s, float(r))
        for s, r in zip(
            group, (rewards - rewards.mean()) / (deviation + 1e-6), strict=True
        )
    ]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(DEVICE)


def made_up(model: Model, *, shared: bool) -> list[tuple[Sample, ...]]:
    """Groups of sequences of 512 to 1024 tokens, a quarter of the shortest of them prompt.

    Not `shared`: prompts of a group differ from their first token on.
    """
    draws = np.random.default_rng(0)
    least, most, prompt_tokens = (16, 48, 8) if ON_CPU else (512, 1024, 128)
    groups = []
    for group in range(model.groups):
        prompt = draws.integers(3, model.vocabulary, prompt_tokens)
        samples = []
        for number in range(model.answers):
            begin = prompt if shared else np.concatenate([[3 + number], prompt[1:]])
            answer = draws.integers(
                3, model.vocabulary, draws.integers(least, most) - prompt_tokens
            )
            mask = np.arange(len(begin) + len(answer)) >= len(begin)
            reward = float(number % 2)
            sample = Sample(
                group=group,
                sample=number,
                tokens=np.concatenate([begin, answer]).astype(np.int32),
                mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                reward=reward,
                rewards={"made up": reward},
                turns=1,
                truncated=False,
            )
            samples.append(sample)
        groups.append(tuple(samples))
    return groups


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention_speed() -> str:
    """Forward and backward, of packed sequences by ours and of padded ones by SDPA: 16 heads of 128, 8 of keys."""
    from rlplace.models.packed import Packed, attention

    draws = np.random.default_rng(0)
    figures = []
    shapes = (
        {"short": (4, 16, 32), "long": (2, 48, 64)}
        if ON_CPU
        else {"short": (32, 256, 1024), "long": (4, 6144, 8192)}
    )
    heads, key_heads, width = (4, 2, 32) if ON_CPU else (16, 8, 128)
    dtype = torch.float32 if ON_CPU else DTYPE
    for name, (count, least, most) in shapes.items():
        lengths = [*map(int, draws.integers(least, most, count))]
        alike = [
            (i // 4, least // 2) for i in range(count)
        ]  # four sequences begin alike
        nowhere = [np.zeros(n, bool) for n in lengths]
        pieces = [np.arange(n) for n in lengths]
        operations = (
            3.5 * 2 * heads * width * sum(n * n for n in lengths)
        )  # forward 1, backward 2.5
        made = {
            "packed": Packed.of(pieces, nowhere, DEVICE),
            "shared": Packed.of(pieces, nowhere, DEVICE, alike),
        }
        seconds: dict[str, float] = {}
        for way, packed in made.items():
            total = len(packed.tokens)
            sizes = (
                (1, heads, total, width),
                (1, key_heads, total, width),
                (1, key_heads, total, width),
            )
            inputs = [
                torch.randn(size, device=DEVICE, dtype=dtype, requires_grad=True)
                for size in sizes
            ]
            attend = partial(attention, nn.Module(), attention_mask=None, packed=packed)
            seconds[way] = per_pass(lambda *qkv: attend(*qkv)[0], inputs)  # noqa: B023  called at once
        size = (count, heads, max(lengths), width)
        fewer = (count, key_heads, max(lengths), width)
        inputs = [
            torch.randn(of, device=DEVICE, dtype=dtype, requires_grad=True)
            for of in (size, fewer, fewer)
        ]
        causal = partial(
            functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
        )
        seconds["padded"] = per_pass(causal, inputs)
        for way, taken in seconds.items():
            show(
                f"{name}, {way}",
                f"{operations / taken / 1e12:.0f} TFLOP/s",
                f"{1e3 * taken:.2f} ms",
            )
        expect(
            f"{name} sequences, speed of padded ones",
            seconds["padded"] / seconds["packed"],
            least=1.0,
            unit=" x",
        )
        figures.append(f"{name} {operations / seconds['packed'] / 1e12:.0f} TFLOP/s")
    return "; ".join(figures)


def per_pass(work: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """Seconds of a forward and a backward pass."""
    gradient = torch.randn_like(work(*inputs))

    def once() -> None:
        torch.autograd.grad(work(*inputs), inputs, gradient)

    once()
    return best(once, 3)


# ── what fusing and compiling would give ─────────────────────────────────────────────────────────────────────────────


def fused() -> str:
    """Ratios of tokens per second of our step of the smallest model, with parts of the layers compiled; no bounds."""
    model = MODELS["0.6b"]
    groups = made_up(model, shared=False)
    with model_folder(model) as folder:
        actor = Actor(folder, model)
        if not ON_CPU:
            for name, taken in optimizers(actor.worker._model.trained_shards()).items():
                show(f"AdamW, {name}", f"{1e3 * taken:.1f} ms")
        actor.step(groups)
        before = min(actor.step(groups).seconds for _ in range(2))
        for what, spent in kernels(lambda: actor.step(groups)):
            show(f"  {what}", f"{100 * spent:.0f} %")
        figures = []
        for name, change in COMPILED.items():
            change(actor.module)
            began = time.perf_counter()
            try:
                actor.step(groups)
            except RuntimeError as error:  # of the compiler, whatever it is
                show(name, "failed", str(error).strip().partition("\n")[0][:80])
                break
            compiled_s = time.perf_counter() - began
            after = min(actor.step(groups).seconds for _ in range(2))
            show(name, f"{before / after:.2f} x", f"compiled in {compiled_s:.0f} s")
            figures.append(f"{name} {before / after:.2f} x")
        actor.close()
    return "; ".join(figures) or "nothing could be compiled"


def compile_norms(module: nn.Module) -> None:
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.compile(dynamic=True, backend=COMPILER)


def compile_feed_forward(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if name.endswith(".mlp"):
            part.compile(dynamic=True, backend=COMPILER)


def compile_rotary(module: nn.Module) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    modeling_qwen3.apply_rotary_pos_emb = torch.compile(
        modeling_qwen3.apply_rotary_pos_emb, dynamic=True, backend=COMPILER
    )


# One after the other: each comes on top of those before it.
COMPILED: Mapping[str, Callable[[nn.Module], None]] = {
    "norms": compile_norms,
    "and feed-forward": compile_feed_forward,
    "and rotary positions": compile_rotary,
}


def optimizers(shards: Sequence[Tensor]) -> dict[str, float]:
    """Seconds of a step of as many weights."""
    found = {}
    for name, one_kernel in {"fused, as ours": True, "foreach": False}.items():
        weights = [torch.zeros_like(shard) for shard in shards]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        found[name] = best(
            torch.optim.AdamW(
                weights, lr=1e-6, fused=one_kernel, foreach=not one_kernel
            ).step,
            3,
        )
        del weights
        collect()
    return found


def kernels(work: Callable[[], object], most: int = 8) -> list[tuple[str, float]]:
    """The kernels that take most, by their share of the time of all; nothing on a CPU."""
    if ON_CPU:
        work()
        return []
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize()
    whole = time.perf_counter() - began
    events = sorted(
        profiler.key_averages(), key=lambda event: -event.self_device_time_total
    )
    busy = sum(event.self_device_time_total for event in events) or 1.0  # microseconds
    found = [
        (event.key[:60].replace("\t", " "), event.self_device_time_total / busy)
        for event in events[:most]
    ]
    return [("busy, of the step (profiled)", busy / 1e6 / whole), *found]


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def collect() -> None:
    gc.collect()
    if not ON_CPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def most_allocated() -> int:
    if ON_CPU:
        return 0
    return torch.cuda.max_memory_allocated()


def share(operations: float, seconds: float, peak: float) -> str:
    return f"{100 * operations / seconds / peak:.0f} %"


@contextmanager
def model_folder(model: Model) -> Iterator[Path]:
    """A folder with the model."""
    with models_folder() as folder:
        written = model.written(Path(folder))
        collect()
        yield written


TRIES: Mapping[str, Callable[[], str]] = {
    "learning-0.6b": partial(learning, "0.6b"),
    "learning-1.7b": partial(learning, "1.7b"),
    "learning-4b-lora": partial(learning, "4b-lora"),
    "attention-speed": attention_speed,
    "fused": fused,
}

if __name__ == "__main__":
    try_named_on_command_line(TRIES)
