"""GenerationEngine: a shipped engine in a worker of a user's own, in few lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace import (
    AcceleratorConfig,
    Cluster,
    GenerationEngine,
    HybridComponentPlacement,
    Residency,
    Worker,
    WorkerError,
    WorkerGroup,
    facts_of,
    reduce_metrics,
    wait_all,
)
from tests.pages import write_own_engine
from tests.tiny_lm import END, Kind, tiny_model

CONTEXT = 48
CLOSE = 1e-3  # largest difference of log-probabilities in fp32
SMALL = {"dtype": "fp32", "kv_cache_memory": "1MiB", "seed": 3, "enforce_eager": True}
PROMPTS = [[5, 60, 7, 80], [9, 200, 31]]
PATIENCE_S = 120.0


def module_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(module: Any, tokens: list[int]) -> Any:
    """Of each token but the first, by a plain pass."""
    given = torch.tensor(tokens)
    with torch.no_grad():
        scores = module(given[None, :-1]).logits[0].log_softmax(-1)
    return scores.gather(-1, given[1:, None])[:, 0].numpy()


class Learner(Worker):
    """`config`: a model's folder."""

    def setup(self) -> None:
        self.model = module_of(self.config)
        self.offload(self.model)
        self.weights_of(self.model)

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def score(self, tokens: list[int]) -> Any:
        return logprobs_of(self.model, tokens)


class Sampler(Worker):
    """`config`: arguments of the engine."""

    def setup(self) -> None:
        self.engine = GenerationEngine(self, **self.config)
        self.weights_of(self.engine)

    def answer(self, prompts: Any = PROMPTS, **options: Any) -> Any:
        return self.engine.generate(prompts, **options)

    def score(self, tokens: list[int]) -> Any:
        return self.engine.logprobs(tokens)

    def score_all(self, sequences: Any, **options: Any) -> Any:
        return self.engine.logprobs_of(sequences, **options)

    def passes(self, sequences: Any, token_budget: int) -> list[tuple[int, int]]:
        """Rows and tokens of each forward pass of transformers."""
        shapes: list[tuple[int, int]] = []
        engine: Any = self.engine._engine
        hook = engine._model.register_forward_pre_hook(
            lambda model, args, given: shapes.append((*given["input_ids"].shape,)),
            with_kwargs=True,
        )
        self.engine.logprobs_of(sequences, token_budget=token_budget)
        hook.remove()
        return shapes

    def state(self) -> tuple[Residency, int | None]:
        return self.engine.residency, self.engine.version


VLLM = [pytest.mark.vllm]


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", "transformers"),
        ("llama", "transformers"),
        ("qwen3", "own"),
        ("llama", "own"),
        pytest.param(("qwen3", "vllm"), marks=VLLM),
        pytest.param(("llama", "vllm"), marks=[*VLLM, pytest.mark.slow]),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[Kind, str]:
    """The family of the model and the engine. Llama's head is tied."""
    family, engine = request.param
    return family, engine


@pytest.fixture(scope="module")
def folder(case: tuple[Kind, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _ = case
    return tiny_model(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def engine(
    case: tuple[Kind, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """`own` is that of docs/own_engine.md."""
    _, name = case
    if name == "own":
        modules = write_own_engine(tmp_path_factory.mktemp("own"))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(modules))
            yield "plain_engine:PlainEngine"
        return
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    yield name


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    accelerator = AcceleratorConfig(kind="emulated", memory=1 << 30)
    with Cluster(1, 4, accelerator=accelerator, launcher="inline") as cluster:
        yield cluster


def launched(
    cluster: Cluster,
    kinds: dict[str, tuple[type[Worker], Any]],
    places: dict[str, str],
    weights: tuple[tuple[str, str], ...] = (("learner", "sampler"),),
) -> dict[str, WorkerGroup]:
    placement = HybridComponentPlacement({"component_placement": places}, cluster)
    facts = facts_of(placement, weights=list(weights))
    return {
        name: kind.create_group(config, facts=facts).launch(
            cluster, name=name, placement_strategy=placement.get_strategy(name)
        )
        for name, (kind, config) in kinds.items()
    }


def pair(
    cluster: Cluster, folder: Path, place: str = "1", **options: Any
) -> tuple[WorkerGroup, WorkerGroup]:
    """A module that learns, and an engine of the same model with other weights; both on the accelerators."""
    config = {"model": folder, "context": CONTEXT, **SMALL, **options}
    groups = launched(
        cluster,
        {"learner": (Learner, folder), "sampler": (Sampler, config)},
        {"learner": "0", "sampler": place},
    )
    wait_all([group.onload() for group in groups.values()], timeout_s=PATIENCE_S)
    return groups["learner"], groups["sampler"]


def sync(learner: WorkerGroup, sampler: WorkerGroup, version: int) -> None:
    wait_all(
        [learner.push_weights(version), sampler.pull_weights(version)],
        timeout_s=PATIENCE_S,
    )


def test_a_worker_answers_with_the_weights_that_it_pulled(
    cluster: Cluster, folder: Path, engine: str
) -> None:
    learner, sampler = pair(cluster, folder, engine=engine)
    for version in range(2):
        learner.change().wait()
        sync(learner, sampler, version)
        (found,) = sampler.answer(samples=3, max_new_tokens=6).wait()
        assert [len(answers) for answers in found] == [3, 3]
        for prompt, answers in zip(PROMPTS, found, strict=True):
            assert [answer.sample for answer in answers] == [0, 1, 2]
            for answer in answers:
                tokens = answer.tokens.tolist()
                assert answer.finish == "length" or tokens[-1] == END
                assert set(answer.versions) == {version}
                (expected,) = learner.score([*prompt, *tokens]).wait()
                (scored,) = sampler.score([*prompt, *tokens]).wait()
                assert np.abs(scored - expected).max() < CLOSE
                drawn = expected[len(prompt) - 1 :]
                assert np.abs(answer.logprobs - drawn).max() < CLOSE
    metrics = reduce_metrics(sampler.take_metrics().wait())
    assert metrics["sampler/generated_tokens"] > 12
    assert metrics["sampler/generate_s"] > 0


def test_an_engine_leaves_and_comes_with_its_component(
    cluster: Cluster, folder: Path, engine: str
) -> None:
    config = {"model": folder, "context": CONTEXT, **SMALL, "engine": engine}
    groups = launched(
        cluster,
        {"learner": (Learner, folder), "sampler": (Sampler, config)},
        {"learner": "0", "sampler": "1"},
    )
    sampler = groups["sampler"]
    assert sampler.state().wait() == [(Residency.OFF, None)]
    held = {
        residency: sampler.move(residency).wait()[0].accelerator_bytes
        for residency in (Residency.OFF, Residency.WEIGHTS, Residency.FULL)
    }
    assert held[Residency.OFF] == 0
    weights_bytes = sum(
        parameter.nbytes for parameter in module_of(folder).parameters()
    )
    assert held[Residency.WEIGHTS] >= weights_bytes
    assert held[Residency.FULL] - held[Residency.WEIGHTS] > 900_000  # its cache
    assert sampler.move(Residency.OFF).wait()[0].accelerator_bytes == 0


def test_a_frozen_engine_has_the_weights_of_its_folder(
    cluster: Cluster, folder: Path, engine: str
) -> None:
    config = {"model": folder, "context": CONTEXT, **SMALL, "engine": engine}
    groups = launched(
        cluster,
        {"sampler": (Sampler, {**config, "frozen": True})},
        {"sampler": "1"},
        weights=(),
    )
    sampler = groups["sampler"]
    tokens = [*PROMPTS[0], 17, 130]
    expected = logprobs_of(module_of(folder), tokens)
    for _ in range(2):
        sampler.onload().wait()
        (scored,) = sampler.score(tokens).wait()
        assert np.abs(scored - expected).max() < CLOSE
        sampler.offload().wait()


SEQUENCES = [[*PROMPTS[0], 17, 130], [9], PROMPTS[1], [7, 8, 9, 10, 11, 12, 13], [3, 4]]


def test_sequences_scored_together_have_the_values_of_each_alone(
    cluster: Cluster, folder: Path, engine: str
) -> None:
    learner, sampler = pair(cluster, folder, engine=engine)
    sync(learner, sampler, 0)
    alone: list[Any] = []
    for sequence in SEQUENCES:
        (scores,) = sampler.score(sequence).wait() if len(sequence) > 1 else ((),)
        alone.append(scores)
        if len(sequence) > 1:
            (expected,) = learner.score(sequence).wait()
            assert np.abs(scores - expected).max() < CLOSE
    for token_budget in (1, 8, 14, 1000):
        (together,) = sampler.score_all(SEQUENCES, token_budget=token_budget).wait()
        assert [len(scores) for scores in together] == [len(s) - 1 for s in SEQUENCES]
        for one, scores in zip(alone, together, strict=True):
            assert np.allclose(scores, one, rtol=0, atol=1e-5), token_budget
    assert sampler.score_all([]).wait() == [[]]


def test_sequences_share_passes_up_to_the_budget(cluster: Cluster, qwen: Path) -> None:
    learner, sampler = pair(cluster, qwen, engine="transformers")
    sync(learner, sampler, 0)
    passes = sampler.passes(SEQUENCES, 14).wait()
    assert passes == [[(2, 7), (3, 3)]]
    assert sampler.passes(SEQUENCES, 1).wait() == [
        [(1, 7), (1, 6), (1, 3), (1, 2), (1, 1)]
    ]
    assert sampler.passes(SEQUENCES, 1000).wait() == [[(5, 7)]]


def test_draws_follow_from_seed_iteration_and_rank(
    cluster: Cluster, qwen: Path
) -> None:
    learner, sampler = pair(cluster, qwen, "1-2", engine="transformers")
    sync(learner, sampler, 0)

    def answered(**options: Any) -> list[Any]:
        alike = [PROMPTS[0], PROMPTS[0]]
        found = sampler.answer(alike, max_new_tokens=8, **options).wait()
        return [a[0].tokens.tolist() for answers in found for a in answers]

    first = answered(iteration=0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert answered(iteration=0) == first
    assert answered(iteration=1) != first
    assert answered() != answered()
    greedy = answered(greedy=True)
    assert greedy == [greedy[0]] * 4


def test_an_answer_ends_with_the_context(cluster: Cluster, qwen: Path) -> None:
    learner, sampler = pair(cluster, qwen, engine="transformers", min_tokens=CONTEXT)
    sync(learner, sampler, 0)
    (found,) = sampler.answer().wait()
    for prompt, (answer,) in zip(PROMPTS, found, strict=True):
        assert len(prompt) + len(answer.tokens) == CONTEXT
        assert answer.finish == "length"


def refused(call: Any) -> Any:
    """The problem that a call ends with."""
    with pytest.raises(WorkerError) as error:
        call.wait()
    cause: Any = error.value.cause
    return cause.problem


def test_a_prompt_without_tokens_is_refused(cluster: Cluster, qwen: Path) -> None:
    learner, sampler = pair(cluster, qwen, engine="transformers")
    sync(learner, sampler, 0)
    assert refused(sampler.answer([[5], []])).code == "bad-prompt"


def test_weights_of_another_model_are_refused(
    cluster: Cluster, qwen: Path, tmp_path: Path
) -> None:
    other = tiny_model(tmp_path / "other", hidden=96)
    config = {"model": qwen, "context": CONTEXT, **SMALL, "engine": "transformers"}
    groups = launched(
        cluster,
        {"learner": (Learner, other), "sampler": (Sampler, config)},
        {"learner": "0", "sampler": "1"},
    )
    wait_all([group.onload() for group in groups.values()], timeout_s=PATIENCE_S)
    pushed = groups["learner"].push_weights(0)
    problem = refused(groups["sampler"].pull_weights(0))
    assert problem.code == "weight-names"
    assert "model.embed_tokens.weight is [320, 96], expected [320, 64]" in problem.got
    assert pushed is not None


def test_an_engine_sends_no_weights(cluster: Cluster, qwen: Path) -> None:
    config = {"model": qwen, "context": CONTEXT, **SMALL, "engine": "transformers"}
    groups = launched(
        cluster,
        {"learner": (Learner, qwen), "sampler": (Sampler, config)},
        {"learner": "0", "sampler": "1"},
        weights=(("sampler", "learner"),),
    )
    wait_all([group.onload() for group in groups.values()], timeout_s=PATIENCE_S)
    assert refused(groups["sampler"].push_weights(0)).code == "bad-weights"


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({"temperatur": 0.5}, "unknown-key", "temperatur"),
        ({"top_p": 2.0}, "out-of-bounds", "top_p"),
        (
            {"gpu_memory_utilization": "auto"},
            "unknown-choice",
            "gpu_memory_utilization",
        ),
        ({"engine": "no_such:Engine"}, "unknown-engine", "rollout.engine"),
        ({"model": "/nowhere"}, "no-model-folder", "GenerationEngine"),
    ],
)
def test_wrong_options_are_told_with_their_key(
    cluster: Cluster, qwen: Path, options: dict[str, Any], code: str, key: str
) -> None:
    config = {"model": qwen, "context": CONTEXT, "engine": "transformers", **options}
    with pytest.raises(WorkerError) as error:
        launched(cluster, {"sampler": (Sampler, config)}, {"sampler": "1"}, weights=())
    cause: Any = error.value.cause
    (problem,) = cause.problems
    assert (problem.code, problem.key) == (code, key)
