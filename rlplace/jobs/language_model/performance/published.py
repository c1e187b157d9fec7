"""Makes a profile of a language-model job from published rates of its accelerators, without measurements.

A pass over tokens takes three kinds of time. Each follows from a published rate, and from the share that software
reaches:

    multiplying     2 operations for each weight and token (Kaplan et al. 2020, arXiv:2001.08361), and attention's
    reading         memory traffic of layers between multiplications: a multiple of the stored activations
    gathering       FSDP's weights over the links, overlapped with the work of the layer before

Learning takes a forward pass, a second one if layers are recomputed, and a backward pass, which takes as long as two
forward passes. A decoding step reads the weights that its answers use, and the keys and values of all answers in
flight.

The shares that software reaches, and the seconds of processors, are assumed: every cost is marked *assumed*.
`docs/validation_seconds.md` compares predictions with published seconds.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlplace.codes import config_error
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.foresight.profile import (
    ACCELERATOR,
    AS_PUBLISHED,
    ASSUMED,
    PROCESSOR,
    Curve,
    Point,
    Profile,
)
from rlplace.jobs.language_model.memory import model_of
from rlplace.placement.language.spec import role_of
from rlplace.placement.machines.products import known_name
from rlplace.placement.machines.topology import Node
from rlplace.placement.memory.layers import Weight
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.memory.model import ModelShape
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency

# Shares of the published rates that software reaches
_MULTIPLYING = 0.7
_ATTENTION = 0.4
_MEMORY = 0.75
_LINK = 0.7
# A matrix of this width reaches half the rate of a wide one. Experts and layers of small models have such matrices
_NARROW = 1024
# Memory traffic of a forward pass, as a multiple of the activations that a layer stores for the backward pass
_TRAFFIC = 4.0
# Memory traffic of logits in a forward pass, as a multiple of their size in float32
_LOGITS = 4.0
# Fixed seconds of a pass for each layer
_LAYER_S = 1e-4
_STEP_S = 0.003  # other seconds of an engine's decoding step
_KERNELS_S = 7e-5  # seconds of a decoding step for the kernels of a layer; twice as many with experts
_SEQUENCE_S = 2e-5  # seconds of a decoding step for each answer: sampling, and passing on the token
_REDUCE_S = 1.5e-5  # an exchange of a few bytes between accelerators
_CALL_S = 0.001  # seconds of a process for a Ray call
_LAP_S = 1e-4  # seconds of a message, a reward, or a turn of an environment
_REST_S = 2e-3  # seconds of a call outside of its measured parts
_IN_FLIGHT = (1, 16, 64, 256, 1024)
_TOKENS = (64, 1024, 8192, 65536)
# Numbers of ranks for which costs are given, if costs depend on the number of ranks
_RANKS = tuple(2**n for n in range(18))
# Assumed lengths of answers, as shares of the longest
_ENDED = (0.2, 0.4, 0.6, 0.8, 1.0)
_BF16 = 2  # bytes per number
_FLOAT32 = 4


class Rates(NamedTuple):
    """Published rates of one accelerator, per second.

    `operations`: floating-point operations. `memory_bytes`: bytes from the accelerator's own memory. `host_bytes`:
    bytes between accelerator and host. `link_bytes`: bytes between accelerators. `near_bytes`: bytes between
    accelerators of one node.
    """

    operations: float
    memory_bytes: float
    host_bytes: float
    link_bytes: float
    near_bytes: float


class TextLengths(NamedTuple):
    """Lengths of texts in tokens: prompts, and answers at their quantiles."""

    prompt: float
    answers: Sequence[float]

    @property
    def sample(self) -> float:
        """The mean length of samples, weighted by their tokens: the length of the text in which a random token is."""
        whole = [self.prompt + answer for answer in self.answers]
        return sum(n * n for n in whole) / sum(whole)

    @property
    def context(self) -> float:
        """The mean number of tokens before a generated token."""
        answers = sum(self.answers)
        return self.prompt + sum(n * n for n in self.answers) / answers / 2


@functools.cache
def published() -> Mapping[str, Sequence[float]]:
    """Return accelerator model, without spaces -> its rates, as in published.toml.

    The rates are dense bf16 TFLOP/s, and GB/s of memory, of a link to another accelerator (0: over PCIe) and to the
    host.
    """
    rows = tomllib.loads(
        Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    )
    return {name.replace(" ", ""): row for name, row in rows.items()}


def published_profile(
    config: LanguageModelJobConfig,
    plan: Plan,
    case: MemoryCase,
    lengths: TextLengths | None = None,
) -> Profile:
    """Return a profile of a language-model job with costs that are computed from published rates of its accelerators.

    `lengths`: lengths of its texts; None: prompts as long as may be, answers of 0.2 to 1.0 of the longest. Raises
    ConfigError for accelerators without published rates.
    """
    longest = config.algorithm.max_new_tokens
    texts = lengths or TextLengths(
        config.algorithm.max_prompt_length, [longest * share for share in _ENDED]
    )
    rates = _rates(plan.topology.nodes)
    costs = dict[str, Curve]()
    ledger = case.ledger()
    for component in plan.placement.components:
        host = _host_costs(role_of(component))
        costs |= {
            f"{component}.{name}": _curve(points, PROCESSOR)
            for name, points in host.items()
        }
        for part, points, on in _costs(config, plan, component, rates, texts):
            costs[f"{component}.{part}"] = _curve(points, on)
        costs |= {
            f"{component}.{name}": curve
            for name, curve in _moves(ledger, component, rates)
        }
        costs[f"{component}/ray_call"] = _curve([(0, _CALL_S)], PROCESSOR)
    return Profile(
        machine={"processor": AS_PUBLISHED, "cores": 64},
        versions={},
        subjects={},
        costs=costs | {"driver/ray_call": _curve([(0, _CALL_S)], PROCESSOR)},
        samples={
            "rollout.answer_tokens": tuple(texts.answers),
            "env.prompt_tokens": (float(texts.prompt),),
        },
    )


def _rates(nodes: Sequence[Node]) -> Rates:
    """Return the lowest rate of each kind over all nodes.

    Raises ConfigError for accelerators without published rates.
    """
    products = {run.product for node in nodes for run in node.alike}
    unknown = [
        product for product in products if known_name(product) not in published()
    ]
    if unknown:
        raise config_error(
            "nothing-published",
            "profile",
            ", ".join(unknown) or "emulated",
            error="accelerators",
        )
    rows = [published()[known_name(product)] for product in products]
    # Links as the config declares them, else as they are published
    host = min(
        (node.pcie_gb_per_s for node in nodes if node.pcie_gb_per_s),
        default=min(row[3] for row in rows),
    )
    linked = min(row[2] for row in rows) or host
    near = min((node.nvlink_gb_per_s or linked for node in nodes), default=host)
    # Accelerators of a node send over all of its connections at once.
    far = min(
        (
            node.network_gb_per_s * max(1, node.accelerators)
            for node in nodes
            if node.network_gb_per_s
        ),
        default=near,
    )
    link = near if len(nodes) == 1 else min(near, far)
    return Rates(
        min(row[0] for row in rows) * 1e12,
        min(row[1] for row in rows) * 1e9,
        host * 1e9,
        link * _LINK * 1e9,
        near * _LINK * 1e9,
    )


def _costs(
    config: LanguageModelJobConfig,
    plan: Plan,
    component: str,
    rates: Rates,
    lengths: TextLengths,
) -> Iterator[tuple[str, Sequence[tuple[float, float]], str]]:
    """Yield each cost of a component as (name, points, kind of device).

    The name is `<worker method>/<part of the method>`. The points are pairs (size of the work, seconds). The device is
    the one that does the work: accelerator or processor.
    """
    role = role_of(component)
    if role == "env":
        return
    if role == "reward" and config.reward_of(component).kind != "model":
        return
    block = config.block_of(component)
    own = (
        block.language_model
        if isinstance(block, TrainedConfig)
        else getattr(block, "model", None)
    )
    model = model_of(config, own, component)
    if model is None:
        raise config_error("nothing-published", "profile", component, error="sizes")
    spec = plan.placement.spec(component)
    each = max(spec.parallel.ranks, *(s.accelerators_per_rank for s in spec.segments))
    work = _Work(model, rates, lengths, each)
    if role == "rollout":
        decoding = [(n, work.decode_s(n)) for n in _IN_FLIGHT]
        reading = [(n, _STEP_S + work.forward_s(n)) for n in _TOKENS]
        pulled = _BF16 * model.parameters / each / rates.link_bytes
        yield "generate/decode", decoding, ACCELERATOR
        yield "generate/prefill", reading, ACCELERATOR
        yield "pull_weights/rest", [(0, pulled)], ACCELERATOR
        return
    for method in ("infer", "learn"):
        for part in ("score", "infer"):
            alone = [(n, work.forward_s(n)) for n in _TOKENS]
            sharded = [(n, max(s, work.gathered_s)) for n, s in alone]
            yield f"{method}/{part}", alone, ACCELERATOR
            yield f"{method}/sharded_{part}", sharded, ACCELERATOR
    if role in ("actor", "critic"):
        assert isinstance(block, TrainedConfig), "actors and critics learn"
        alone = [(n, work.learn_s(n, block)) for n in _TOKENS]
        # Weights are gathered for both passes, and gradients summed.
        sharded = [(n, max(s, 3 * work.gathered_s)) for n, s in alone]
        yield "learn/micro_batch", alone, ACCELERATOR
        yield "learn/sharded_micro_batch", sharded, ACCELERATOR
        # A step reads and writes float32 weights and two moments of the rank's share.
        stepped = 2 * 3 * _FLOAT32 * model.parameters * (not block.lora_rank)
        rate = rates.memory_bytes * _MEMORY
        if block.optimizer.on_host:
            rate = rates.host_bytes * _LINK
        steps = [(n, stepped / n / rate) for n in _RANKS]
        yield "learn/exchange", steps, ACCELERATOR
        yield "infer/exchange", [(1, 0.0), (_RANKS[-1], 0.0)], ACCELERATOR
        yield "learn/step", [(0, 0.0)], ACCELERATOR
        pushed = _BF16 * model.parameters / each / rates.link_bytes
        yield "push_weights/rest", [(0, pushed)], ACCELERATOR


class _Work:
    """Seconds of one rank's work on a model.

    `gathered_s`: seconds of gathering all weights from the other ranks once.
    """

    def __init__(
        self, model: ModelShape, rates: Rates, lengths: TextLengths, each: int
    ) -> None:
        """Prepare the work of one rank. `each`: accelerators that split the model for the same tokens."""
        self._model = model
        self._rates = rates
        self._lengths = lengths
        self._each = each
        # Seconds of all multiplications of a token
        self._multiplied_s = sum(
            2 * w.elements * w.met * copies / _reached(w.shape)
            for w, copies in self._matrices()
        ) / (rates.operations * _MULTIPLYING)
        experts = any(w.met < 1 for w, _ in model.weights())
        self._kernels_s = model.layers * _KERNELS_S * (2 if experts else 1)
        self.gathered_s = _BF16 * model.parameters / each / rates.link_bytes

    def _matrices(self) -> Iterator[tuple[Weight, int]]:
        """Yield (matrix, number of layers that have it) for each matrix that a token is multiplied with.

        The input embedding is left out, since a token is looked up in it. Tied weights count once, for the logits.
        """
        model = self._model
        vocabulary = (model.vocabulary, model.hidden)
        looked_up = sum(w.shape == vocabulary for w in model.root) - 1
        for weight, copies in model.weights():
            if len(weight.shape) < 2:
                continue
            if weight.shape == vocabulary and looked_up > 0:
                looked_up -= 1
                continue
            yield weight, copies

    def forward_s(self, tokens: float, *, adapted: bool = False) -> float:
        """Return the seconds of a pass without gradients over `tokens` tokens of one rank.

        `adapted`: whether the factors of LoRA are applied beside each linear layer.
        """
        model = self._model
        rates = self._rates
        attention = model.attention
        # Attention scores and weighted sums of values; on average over half of the text
        width = attention.heads * attention.head_dim
        attending = 4 * model.layers * width * self._lengths.sample / 2
        kept = sum(b.layers * b.saved.bytes_per_token(_BF16, 1) for b in model.blocks)
        passed = _TRAFFIC * kept + _LOGITS * _FLOAT32 * model.vocabulary
        if adapted:
            # Inputs of linear layers are read once more, and outputs read and written.
            passed += sum(
                _BF16 * (w.shape[-1] + 2 * w.shape[-2]) * copies
                for w, copies in self._matrices()
                if w.projection
            )
        token_s = (
            self._multiplied_s
            + attending / (rates.operations * _ATTENTION)
            + passed / (rates.memory_bytes * _MEMORY)
        )
        return (
            model.layers * _LAYER_S
            + tokens * token_s / self._each
            + self._summed_s(tokens)
        )

    def learn_s(self, tokens: float, block: TrainedConfig) -> float:
        """Return the seconds of a forward and a backward pass over `tokens` tokens of one rank."""
        # Frozen weights need no gradients, which are half of a backward pass.
        passes = 1 + block.checkpointing + (1 if block.lora_rank else 2)
        seconds = passes * self.forward_s(tokens, adapted=bool(block.lora_rank))
        if block.activation_offload:
            kept = 2 * _BF16 * self._model.layers * self._model.hidden / self._each
            seconds += tokens * kept / (self._rates.host_bytes * _LINK)
        return seconds

    def decode_s(self, answers: int) -> float:
        """Return the seconds of a step in which an engine draws one token for each of `answers` answers."""
        rates = self._rates
        memory = rates.memory_bytes * _MEMORY * self._each
        # For a mixture of experts, only experts that at least one answer uses
        used = sum(
            w.elements * copies * (1 - (1 - w.met) ** answers)
            for w, copies in self._matrices()
        )
        multiplied_s = self._multiplied_s * answers
        context = round(self._lengths.context)
        kept = sum(layers.of(context, 1, 1) for layers in self._model.kv)
        return (
            _STEP_S
            + self._kernels_s
            + answers * _SEQUENCE_S
            + max(_BF16 * used / memory, multiplied_s / self._each)
            + _BF16 * kept * answers / memory
            + self._summed_s(answers)
        )

    def _summed_s(self, tokens: float) -> float:
        """Return the seconds of the all-reduces over accelerators that split the model: two in each layer."""
        if self._each == 1:
            return 0.0
        moved = 2 * _BF16 * self._model.hidden * tokens / self._rates.near_bytes
        return 2 * self._model.layers * (_REDUCE_S + moved)


def _reached(shape: Sequence[int]) -> float:
    """Return the rate of operations for a matrix of this shape, as a share of the rate for a wide matrix."""
    width = min(shape[-2:])
    return width / (width + _NARROW)


def _host_costs(role: str) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Return the assumed costs of a component's work on processors: name -> points (size of the work, seconds).

    Their size comes from measured runs of tiny models: 0.03 to 0.5 ms for a message or a reward.
    """
    call = [(0.0, _LAP_S)]
    rest = [(0.0, _REST_S)]
    match role:
        case "env":
            parts = dict.fromkeys(("sim", "reward", "put", "wait"), call)
            return {f"run/{part}": points for part, points in parts.items()} | {
                "run/rest": rest
            }
        case "rollout":
            # Answers that end in the same step are sent together.
            put = [(1.0, 2 * _LAP_S), (256.0, 32 * _LAP_S)]
            return {
                "generate/wait": call,
                "generate/put": put,
                "generate/rest": rest,
            }
        case _:
            parts = dict.fromkeys(("infer_wait", "wait", "rest"), rest)
            # Rewards without a model
            texts = [(1.0, _LAP_S), (65536.0, 100 * _LAP_S)]
            return {
                **{f"infer/{part}": points for part, points in parts.items()},
                "infer/infer": texts,
                "learn/wait": rest,
                "learn/rest": rest,
                "compute_advantages/rest": rest,
                "accumulate/accumulate_wait": rest,
                "refresh/rest": rest,
            }


def _moves(
    ledger: MemoryLedger, component: str, rates: Rates
) -> Iterator[tuple[str, Curve]]:
    """Yield the name and the cost curve of a component's move to each residency (off, weights or full)."""
    held = {residency: ledger.bytes(component, residency) for residency in Residency}
    for residency in Residency:
        moved = max(abs(held[residency] - other) for other in held.values())
        yield (
            f"move_{residency.word}/rest",
            _curve([(0, moved / (rates.host_bytes * _LINK))], ACCELERATOR),
        )


def _curve(points: Sequence[tuple[float, float]], on: str) -> Curve:
    made = (
        Point(size=size, laps=1, cpu_s=seconds, least_cpu_s=seconds, blocked_s=0.0)
        for size, seconds in points
    )
    return Curve(points=tuple(made), source=ASSUMED, on=on)
