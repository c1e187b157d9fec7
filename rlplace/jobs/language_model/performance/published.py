"""A profile of a language-model job from published rates of its accelerators, for use before anything is measured.

A forward pass takes 2 operations for each weight and token, a backward pass 4 (Kaplan et al. 2020, arXiv:2001.08361).
A decoding step reads all weights, and the keys and values of all answers in flight. Software reaches only a part of the
published rates. The size of this part is an assumption, so every cost is marked *assumed*: such costs serve to compare
placements and give the order of magnitude, but not the seconds.
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
from rlplace.placement.memory.ledger import MemoryCase, MemoryLedger
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency

# Shares of the published rates.
_TRAINING = 0.4
_READING = 0.5
_MEMORY = 0.6
_LINK = 0.7
_STEP_S = 0.003  # other seconds of an engine's decoding step
_CALL_S = 0.001  # seconds of a process for a Ray call
_IN_FLIGHT = (1, 32, 256, 1024)
_TOKENS = (64, 1024, 8192, 65536)
# assumed lengths of answers, as shares of the longest
_ENDED = (0.2, 0.4, 0.6, 0.8, 1.0)
_BF16 = 2  # bytes per number


class Rates(NamedTuple):
    """Published rates of one accelerator, per second.

    `operations`: floating-point operations. `memory_bytes`: bytes from the accelerator's own memory. `host_bytes`:
    bytes between accelerator and host. `link_bytes`: bytes between accelerators.
    """

    operations: float
    memory_bytes: float
    host_bytes: float
    link_bytes: float


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
    config: LanguageModelJobConfig, plan: Plan, case: MemoryCase
) -> Profile:
    """Return a profile of a language-model job with costs that are computed from published rates of its accelerators.

    Raises ConfigError for accelerators without published rates.
    """
    rates = _rates(plan.topology.nodes)
    costs = dict[str, Curve]()
    ledger = case.ledger()
    for component in plan.placement.components:
        for part, points, on in _costs(config, plan, component, rates):
            costs[f"{component}.{part}"] = _curve(points, on)
        costs |= {
            f"{component}.{name}": curve
            for name, curve in _moves(ledger, component, rates)
        }
        costs[f"{component}/ray_call"] = _curve([(0, _CALL_S)], PROCESSOR)
    longest = config.algorithm.max_new_tokens
    return Profile(
        machine={"processor": AS_PUBLISHED, "cores": 64},
        versions={},
        subjects={},
        costs=costs | {"driver/ray_call": _curve([(0, _CALL_S)], PROCESSOR)},
        samples={
            "rollout.answer_tokens": tuple(longest * share for share in _ENDED),
            "env.prompt_tokens": (float(config.algorithm.max_prompt_length),),
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
    far = min(
        (node.network_gb_per_s for node in nodes if node.network_gb_per_s), default=near
    )
    link = near if len(nodes) == 1 else min(near, far)
    return Rates(
        min(row[0] for row in rows) * 1e12,
        min(row[1] for row in rows) * 1e9,
        host * 1e9,
        link * _LINK * 1e9,
    )


def _costs(
    config: LanguageModelJobConfig, plan: Plan, component: str, rates: Rates
) -> Iterator[tuple[str, Sequence[tuple[float, float]], str]]:
    """Yield each cost of a component as (name, points, kind of device).

    The name is `<worker method>/<part of the method>`. The points are pairs (size of the work, seconds). The device is
    the one that does the work: accelerator or processor.
    """
    role = role_of(component)
    ranks = plan.placement.world_size(component)
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
    weights = model.parameters
    gathered_s = (
        2 * _BF16 * weights / rates.link_bytes * (ranks > 1)
        if role != "rollout"
        else 0.0
    )

    def forward(tokens: float, share: float, passes: int = 1) -> float:
        return 2 * model.met * tokens * passes / (rates.operations * share * each)

    if role == "rollout":
        kept = (
            sum(layers.of(config.algorithm.longest // 2, 1, 1) for layers in model.kv)
            * _BF16
        )
        read = [
            (
                n,
                _STEP_S
                + (_BF16 * weights + n * kept) / (rates.memory_bytes * _MEMORY * each),
            )
            for n in _IN_FLIGHT
        ]
        yield (
            "generate/decode",
            [(n, max(s, forward(n, _READING))) for n, s in read],
            ACCELERATOR,
        )
        yield (
            "generate/prefill",
            [(n, _STEP_S + forward(n, _READING)) for n in _TOKENS],
            ACCELERATOR,
        )
        yield (
            "pull_weights/rest",
            [(0, _BF16 * weights / each / rates.link_bytes)],
            ACCELERATOR,
        )
        return
    for method in ("infer", "learn"):
        yield (
            f"{method}/score",
            [(n, forward(n, _READING) + gathered_s / 2) for n in _TOKENS],
            ACCELERATOR,
        )
        yield (
            f"{method}/infer",
            [(n, forward(n, _READING) + gathered_s / 2) for n in _TOKENS],
            ACCELERATOR,
        )
    if role in ("actor", "critic"):
        assert isinstance(block, TrainedConfig), "actors and critics learn"
        again = 4 if block.checkpointing else 3
        token_s = (
            2
            * _BF16
            * model.layers
            * model.hidden
            / each
            / (rates.host_bytes * _LINK)
            * block.activation_offload
        )
        yield (
            "learn/micro_batch",
            [
                (n, forward(n, _TRAINING, again) + 1.5 * gathered_s + n * token_s)
                for n in _TOKENS
            ],
            ACCELERATOR,
        )
        yield (
            "learn/step",
            [(0, 16 * weights / ranks / (rates.memory_bytes * _MEMORY))],
            ACCELERATOR,
        )
        yield (
            "push_weights/rest",
            [(0, _BF16 * weights / ranks / rates.link_bytes)],
            ACCELERATOR,
        )


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
