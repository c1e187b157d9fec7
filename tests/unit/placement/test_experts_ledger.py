"""The bytes of recorded experts: in channels, on hosts and on accelerators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlplace.comm import codec
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.jobs.language_model.memory import routes_of, text_items
from rlplace.placement import Topology
from rlplace.placement.memory.demands import HostPart, Part
from rlplace.placement.memory.ledger import MemoryLedger
from rlplace.placement.memory.model import read_model
from rlplace.tokens import Completion
from tests.unit.placement.memory_cases import llama_3

EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
PER_TOKEN = 6 * 4  # layers, experts of a token, a byte each
LONGEST, SAMPLES, BUDGET = 96, 4, 512


def config(
    *, replay: bool = False, parts: int = 1, actor: Any = None, **model: Any
) -> Config:
    return read_config(
        {
            "cluster": {
                "component_placement": {
                    "actor": {"placement": "0-1", "context_parallel_size": parts},
                    "env": "2",
                    "rollout": "2",
                    "reference": "0-1",
                },
                "allow_resident": ["actor", "reference"],
            },
            "algorithm": {
                "name": "grpo",
                "prompts": 3,
                "samples_per_prompt": SAMPLES,
                "max_prompt_length": 32,
                "max_new_tokens": LONGEST - 32,
                "kl_coef": 0.1,
            },
            "env": {"task": "arithmetic"},
            "rollout": {"engine": "transformers", "kv_cache_memory": 1 << 24},
            "actor": {
                "model": EXPERTS | model,
                "token_budget": BUDGET,
                "router_replay": replay,
                **(actor or {}),
            },
            "runner": {"total_iterations": 1},
        }
    )


def ledger_of(job: Config) -> MemoryLedger:
    plan = make_plan(job, Topology.uniform(1, 3, "emulated", 1 << 30))
    return memory_case(plan, job).ledger()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, PER_TOKEN),
        ({"num_experts": 128}, PER_TOKEN),
        ({"num_experts": 129}, 2 * PER_TOKEN),
        ({"mlp_only_layers": [0, 5]}, 4 * 4),
        ({"decoder_sparse_step": 2}, 3 * 4),
    ],
)
def test_layers_with_a_router_have_a_record(
    keys: dict[str, Any], expected: int
) -> None:
    assert read_model(EXPERTS | keys).route_bytes == expected


def test_a_dense_model_has_none() -> None:
    assert read_model(llama_3("8b")).route_bytes == 0


def test_answers_and_samples_of_the_actor_have_routes() -> None:
    items = {}
    for replay in (False, True):
        job = config(replay=replay)
        plan = make_plan(job, Topology.uniform(1, 3, "emulated", 1 << 30))
        items[replay] = text_items(plan, job.algorithm, 0, route_bytes=routes_of(job))
    more = {name: items[True][name] - size for name, size in items[False].items()}
    assert {name: size for name, size in more.items() if size} == {
        "completions": LONGEST * PER_TOKEN,
        "samples": SAMPLES * LONGEST * PER_TOKEN,
    }
    # The largest answer that an engine gives is not larger
    completion = Completion(
        env_rank=0,
        iteration=0,
        held_out=False,
        group=0,
        sample=0,
        turn=0,
        tokens=np.zeros(LONGEST - 1, np.int32),
        logprobs=np.zeros(LONGEST - 1, np.float32),
        versions=np.zeros(LONGEST - 1, np.int32),
        finish="length",
        routes=np.zeros((LONGEST - 1, 6, 4), np.int8),
    )
    pieces = codec.Packer(-1).pack(completion)
    sent = sum(memoryview(piece).nbytes for piece in pieces)
    assert LONGEST * PER_TOKEN < sent <= items[True]["completions"]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_pass_holds_the_routes_of_all_its_tokens(parts: int) -> None:
    without = ledger_of(config(replay=False, parts=parts)).footprints["actor"][0]
    found = ledger_of(config(replay=True, parts=parts)).footprints["actor"][0]
    for stage in ("infer", "learn"):
        more = (
            found.working[stage][Part.ACTIVATIONS]
            - without.working[stage][Part.ACTIVATIONS]
        )
        assert more == BUDGET * PER_TOKEN
    assert found.held == without.held


def test_an_engine_keeps_the_routes_of_answers_in_flight_on_its_host() -> None:
    without = ledger_of(config(replay=False)).footprints["rollout"][0]
    found = ledger_of(config(replay=True)).footprints["rollout"][0]
    for residency, parts in found.host.items():
        kept = parts.get(HostPart.ROUTES, 0)
        before = without.host[residency]
        assert HostPart.ROUTES not in before
        rest = {part: size for part, size in parts.items() if part != HostPart.ROUTES}
        assert rest == dict(before)
        if kept:
            assert kept == (3 * SAMPLES + 1) * LONGEST * PER_TOKEN
    assert any(HostPart.ROUTES in parts for parts in found.host.values())


@pytest.mark.parametrize(("checkpointing", "layers"), [(True, 1), (False, 6)])
def test_the_auxiliary_loss_saves_the_probabilities_of_experts(
    checkpointing: bool, layers: int
) -> None:
    found = []
    for coefficient in (0.0, 0.1):
        keys = {"router_loss_coef": coefficient, "checkpointing": checkpointing}
        # Wide experts, so that the peak is in a layer
        job = config(actor=keys, moe_intermediate_size=512)
        footprint = ledger_of(job).footprints["actor"][0]
        found.append(footprint.working["learn"][Part.ACTIVATIONS])
    assert found[1] - found[0] == layers * BUDGET * 16 * 4
