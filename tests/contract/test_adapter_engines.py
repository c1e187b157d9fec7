"""Engines that apply LoRA factors beside their weights: as merged weights do, and never with what was cached before."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import NotResident
from rlplace.models.lora import Factors
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion
from rlplace.workers.engines.contract import AdapterSettings, EngineSettings
from tests.contract.test_text_engine import ENGINES, run
from tests.rollout_stage import Ledger
from tests.tiny_lm import Kind, request_of, tiny_model

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
SCALE, RANK, CLOSE = 2.0, 3, 1e-3
TARGETS = ("q_proj", "down_proj")
TOKENS = [40 + 7 * i for i in range(30)]


class Bench:
    """An engine with the base model of a folder, and models with merged factors in plain transformers, by version."""

    def __init__(
        self,
        name: str,
        folder: Path,
        targets: tuple[str, ...],
        tensor_parallel: int = 1,
        kind: Kind = "qwen3",
    ) -> None:
        import transformers

        from rlplace.envs.registry import named

        folder = tiny_model(folder, kind, seed=1)
        self.base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.targets = targets
        config = TextRolloutConfig(
            engine=name,
            dtype="fp32",
            kv_cache_memory=1 << 20,
            step_tokens=256,
            step_sequences=6,
            enforce_eager=True,
            seed=5,
        )
        adapter = AdapterSettings(rank=RANK, scale=SCALE, targets=targets)
        settings = EngineSettings(
            rollout=config,
            model=folder,
            context=64,
            adapter=adapter,
            tensor_parallel=tensor_parallel,
        )
        self.device = Ledger()
        self.engine: Any = named(
            ENGINES[name],
            {},
            key="rollout.engine",
            code="unknown-engine",
            noun="engine",
        )(settings, device=self.device, owner="rollout rank 0")
        self._merged: dict[int, Any] = {}

    def factors(self, version: int) -> Mapping[str, Factors]:
        generator = torch.Generator().manual_seed(version)
        found = {}
        for name, weight in self.base.named_parameters():
            last = name.removesuffix(".weight").rpartition(".")[2]
            adapted = last in self.targets if self.targets else last.endswith("_proj")
            # Experts of a layer are one weight, and get no factors
            if adapted and weight.ndim == 2:
                rows, columns = weight.shape
                a = torch.randn(RANK, columns, generator=generator) / 9
                b = torch.randn(rows, RANK, generator=generator) / 9
                found[name] = Factors(a=a, b=b, scale=SCALE)
        return found

    @torch.no_grad()
    def expected(self, version: int, tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of all tokens but the first, by merged weights."""
        if version not in self._merged:
            model = copy.deepcopy(self.base)
            parameters = dict(model.named_parameters())
            for name, pair in self.factors(version).items():
                parameters[name] += SCALE * pair.b @ pair.a
            self._merged[version] = model
        logits = self._merged[version](torch.tensor([list(tokens)])).logits[0, :-1]
        chosen = torch.tensor(list(tokens)[1:])[:, None]
        found: np.ndarray = logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
        return found

    def check(self, version: int, answer: Completion, prompt: Sequence[int]) -> None:
        """Compare the log-probabilities of the tokens that were sampled by a version."""
        of_version = answer.versions == version
        whole = self.expected(version, [*prompt, *answer.tokens])[len(prompt) - 1 :]
        differences = np.abs(answer.logprobs - whole)[of_version]
        assert differences.max() < CLOSE


@pytest.fixture(
    scope="module",
    params=[
        ("transformers", TARGETS),
        ("transformers", ()),
        ("transformers", (), 1, "qwen3_moe"),
        pytest.param(("vllm", TARGETS), marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param(("vllm", ()), marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param(("vllm", (), 2), marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
    ids=[
        "transformers-some",
        "transformers-all",
        "transformers-experts",
        "vllm-some",
        "vllm-all",
        "vllm-in-two-processes",
    ],
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    name, targets, *parts = request.param
    bench = Bench(name, tmp_path_factory.mktemp("model"), targets, *parts)
    yield bench
    bench.engine.close()


def ready(bench: Bench) -> Any:
    """Version 1 is loaded, after the engine had no weights."""
    engine = bench.engine
    engine.drop()
    engine.move(OFF)
    engine.move(FULL)
    engine.load(bench.base.state_dict(), 1, bench.factors(1))
    return engine


def difference(bench: Bench, version: int) -> float:
    found = np.array(bench.engine.logprobs(TOKENS))
    return float(np.abs(found - bench.expected(version, TOKENS)).max())


def test_factors_beside_the_weights_count_as_merged_ones(bench: Bench) -> None:
    engine = ready(bench)
    base = {n: w.clone() for n, w in bench.base.state_dict().items()}
    assert difference(bench, 1) < CLOSE
    for version in (2, 3, 1):
        # What was given is the caller's, which changes it afterwards
        given = bench.factors(version)
        engine.load_factors(given, version)
        for pair in given.values():
            pair.a.fill_(7)
        assert engine.version == version
        assert difference(bench, version) < CLOSE
    assert difference(bench, 2) > 0.01
    assert all(torch.equal(w, base[n]) for n, w in bench.base.state_dict().items())


def test_keys_of_older_factors_are_never_used(bench: Bench) -> None:
    """The same long prompt under each version; answers in flight go on by the new factors."""
    engine = ready(bench)
    asked = request_of(0, length=40, longest=6)
    prompt = asked.tokens.tolist()
    for version in (1, 2):
        if version > 1:
            engine.load_factors(bench.factors(version), version)
        (answer,) = run(engine, asked)
        assert set(answer.versions.tolist()) == {version}
        bench.check(version, answer, prompt)
    engine.submit(request_of(1, length=40, longest=12))
    for _ in range(4):
        assert list(engine.step()) == []
    engine.load_factors(bench.factors(3), 3)
    (answer,) = run(engine)
    assert set(answer.versions.tolist()) == {2, 3}
    for version in (2, 3):
        bench.check(version, answer, request_of(1, length=40).tokens.tolist())


def test_an_engine_without_its_weights_takes_no_factors(bench: Bench) -> None:
    engine = ready(bench)
    for residency in (WEIGHTS, FULL):
        engine.move(residency)
        assert difference(bench, 1) < CLOSE if residency is FULL else True
    held = engine.move(WEIGHTS)
    assert bench.device.held_bytes() <= held
    engine.move(OFF)
    engine.move(WEIGHTS)
    with pytest.raises(NotResident, match="before weights were loaded"):
        engine.load_factors(bench.factors(2), 2)
    engine.load(bench.base.state_dict(), 2, bench.factors(2))
    engine.move(FULL)
    assert difference(bench, 2) < CLOSE


def test_factors_that_do_not_fit_are_refused_and_change_nothing(bench: Bench) -> None:
    engine = ready(bench)
    factors = dict(bench.factors(2))
    name = next(iter(factors))
    pair = factors[name]
    factors[name] = dataclasses.replace(pair, a=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="version 2 do not fit the model"):
        engine.load_factors(factors, 2)
    assert engine.version == 1
    assert difference(bench, 1) < CLOSE
