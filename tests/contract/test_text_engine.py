"""What every engine that generates text must do, whatever is behind it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.envs.registry import named
from rlplace.errors import EngineBusy, NotResident, ProblemsError
from rlplace.models.lora import Factors
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Request
from rlplace.workers.engines.contract import EngineSettings, TextEngine
from tests.pages import write_own_engine
from tests.rollout_stage import Ledger
from tests.tiny_lm import END, Kind, request_of, tiny_model

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
CONTEXT, SLOTS = 64, 6  # tokens, answers at once
CACHE_BYTES = 1 << 20
CLOSE = 1e-3  # largest difference of log-probabilities in fp32
STOPS = tuple(range(3, 40))  # so many that random answers end by one soon
Sampling = EngineSettings  # of a folder that the bench fills in


def sampling_of(stops: tuple[int, ...] = STOPS, **rollout: Any) -> Sampling:
    small = {
        "dtype": "fp32",
        "kv_cache_memory": CACHE_BYTES,
        "step_tokens": 4 * CONTEXT,
        "step_sequences": SLOTS,
    }
    config = TextRolloutConfig(**{**small, "enforce_eager": True, "seed": 5, **rollout})
    return EngineSettings(
        rollout=config, model=Path(), context=CONTEXT, stop_token_ids=stops
    )


# An engine is built for one sampling, which takes seconds: tests of the same one stand together.
PLAIN = sampling_of()
COLD = dataclasses.replace(
    sampling_of(temperature=0.25), held_out=sampling_of(temperature=0.0).rollout
)
NARROW = sampling_of(temperature=1.5, top_k=9, top_p=0.8)
GREEDY = sampling_of(temperature=0.0)
PENALISED = sampling_of(
    (END, *STOPS),
    min_tokens=4,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    temperature=0.8,
)
OPEN = sampling_of((), seed=6)  # answers end by their length alone

ENGINES = {
    "transformers": "rlplace.workers.engines.transformers:TransformersEngine",
    "vllm": "rlplace.workers.engines.vllm:VllmEngine",
    "own": "plain_engine:PlainEngine",  # of docs/own_engine.md
}


class Bench:
    """One engine at a time, its device, and the same models in plain transformers, by policy version."""

    def __init__(self, engine: str, kind: Kind, folder: Path) -> None:
        import transformers

        self._name = ENGINES[engine]
        self._folder = tiny_model(folder / "1", kind, seed=1)
        self.models: dict[int, nn.Module] = {}
        for version in (1, 2):
            there = tiny_model(folder / str(version), kind, seed=version)
            self.models[version] = transformers.AutoModelForCausalLM.from_pretrained(
                there
            ).eval()
        self.device = Ledger()
        self._sampling: Sampling | None = None
        self._engine: TextEngine | None = None

    @property
    def engine(self) -> TextEngine:
        assert self._engine is not None, "ready or born comes first"
        return self._engine

    def born(self, sampling: Sampling = PLAIN) -> TextEngine:
        """OFF and without weights; the one there was is used again where it draws alike."""
        if self._engine is None or sampling != self._sampling:
            self.close()
            self.device = Ledger()
            self._engine = self._build(
                dataclasses.replace(sampling, model=self._folder)
            )
            self._sampling = sampling
        while self._engine.in_flight:
            self._engine.step()
        self._engine.move(OFF)
        return self._engine

    def _build(self, settings: EngineSettings) -> TextEngine:
        engine: TextEngine = named(
            self._name, {}, key="rollout.engine", code="unknown-engine", noun="engine"
        )(settings, device=self.device, owner="rollout rank 0")
        return engine

    def ready(self, sampling: Sampling = PLAIN) -> TextEngine:
        engine = self.born(sampling)
        engine.move(FULL)
        engine.load(self.weights(1), 1)
        return engine

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """As a sync brings them: tied ones under each of their names, all experts of a layer in one."""
        weights: Mapping[str, Tensor] = self.models[version].state_dict()
        return weights

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @torch.no_grad()
    def logits(self, version: int, tokens: Sequence[int]) -> Tensor:
        """[L, V]"""
        logits: Tensor = self.models[version](torch.tensor([list(tokens)])).logits[0]
        return logits

    def logprobs(
        self,
        version: int,
        prompt: Sequence[int],
        answer: Sequence[int],
        sampling: Sampling,
    ) -> Tensor:
        """Of the answer's tokens, by one pass over the whole."""
        drawn = sampling.rollout
        logits = self.logits(version, [*prompt, *answer])[len(prompt) - 1 : -1].clone()
        for place, row in enumerate(logits):
            if place < drawn.min_tokens:
                row[list(sampling.stop_token_ids)] = float("-inf")
            for token in {*prompt, *answer[:place]}:
                row[token] *= (
                    drawn.repetition_penalty
                    if row[token] < 0
                    else 1 / drawn.repetition_penalty
                )
            for token in answer[:place]:
                row[token] -= drawn.frequency_penalty
            for token in {*answer[:place]}:
                row[token] -= drawn.presence_penalty
        logits /= drawn.temperature or 1.0
        if drawn.top_k:
            worst = logits.topk(drawn.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < worst, float("-inf"))
        if drawn.top_p < 1:
            logits = logits.log_softmax(-1)
            ordered, order = logits.sort(descending=True)
            beyond = ordered.exp().cumsum(-1) - ordered.exp() >= drawn.top_p
            logits = logits.masked_fill(
                torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf")
            )
        return logits.log_softmax(-1).gather(-1, torch.tensor(list(answer))[:, None])[
            :, 0
        ]


@pytest.fixture(
    scope="module",
    params=[
        ("transformers", "qwen3"),
        ("transformers", "llama"),
        ("own", "qwen3"),
        pytest.param(("vllm", "qwen3"), marks=pytest.mark.vllm),
        pytest.param(
            ("vllm", "qwen3_moe"), marks=[pytest.mark.vllm, pytest.mark.slow]
        ),  # likewise
        pytest.param(
            ("vllm", "llama"), marks=[pytest.mark.vllm, pytest.mark.slow]
        ),  # short in test_vllm_engine.py
    ],
    ids="-".join,
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(write_own_engine(folder))
        bench = Bench(*request.param, folder)
        yield bench
        bench.close()


def run(engine: TextEngine, *requests: Request) -> list[Completion]:
    """Submits and steps until nothing is in flight; answers as they finished."""
    for request in requests:
        engine.submit(request)
    finished: list[Completion] = []
    for _ in range(1000):
        if not engine.in_flight:
            return finished
        finished += engine.step()
    raise AssertionError("an engine without an end")


def by_number(completions: Iterable[Completion]) -> Mapping[tuple[int, int], list[int]]:
    return {(c.group, c.sample): c.tokens.tolist() for c in completions}


def check_greedy(bench: Bench, request: Request, answer: Completion) -> None:
    inputs = torch.tensor(request.tokens[None].astype(np.int64))
    model: Any = bench.models[1]
    generated = model.generate(
        inputs,
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=list(STOPS),
        attention_mask=torch.ones_like(inputs),
    )
    assert answer.tokens.tolist() == generated[0, request.tokens.size :].tolist()
    expected = bench.logprobs(1, request.tokens.tolist(), answer.tokens.tolist(), PLAIN)
    assert np.abs(answer.logprobs - expected.numpy()).max() < CLOSE


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_greedy_answer_is_the_likeliest_one(bench: Bench) -> None:
    engine = bench.ready()
    request = request_of(0, greedy=True)
    answers = run(engine, request, request_of(1, samples=4))
    check_greedy(bench, request, next(a for a in answers if a.group == 0))


def test_samples_of_a_prompt_are_numbered_and_differ(bench: Bench) -> None:
    answers = run(
        bench.ready(),
        request_of(0, samples=5, first_sample=2),
        request_of(1, samples=2),
    )
    assert sorted((a.group, a.sample) for a in answers) == [
        *((0, s) for s in range(2, 7)),
        (1, 0),
        (1, 1),
    ]
    assert len({tuple(a.tokens) for a in answers}) == len(answers)


def test_what_is_drawn_follows_from_the_seed_and_not_from_the_batch(
    bench: Bench,
) -> None:
    requests = [
        request_of(group, length=4 + 7 * group, samples=2) for group in range(3)
    ]
    engine = bench.ready()
    together = by_number(run(engine, *requests))
    assert (
        by_number(
            [
                answer
                for request in reversed(requests)
                for answer in run(engine, request)
            ]
        )
        == together
    )
    for other in ({"iteration": 1}, {"turn": 1}, {"first_sample": 7}):
        answers = run(engine, dataclasses.replace(requests[0], **other))
        assert {tuple(a.tokens) for a in answers}.isdisjoint(
            map(tuple, together.values())
        )


# ── how answers begin and end ────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_ends_with_a_stop_token_or_at_its_length(bench: Bench) -> None:
    answers = run(
        bench.ready(), *(request_of(group, samples=4, longest=15) for group in range(6))
    )
    assert {a.finish for a in answers} == {"stop", "length"}
    for answer in answers:
        stops = np.isin(answer.tokens, STOPS)
        assert not stops[:-1].any()
        assert answer.finish == ("stop" if stops[-1] else "length")
        assert len(answer.tokens) == 15 or answer.finish == "stop"


def test_a_prompt_that_fills_the_context_is_refused(bench: Bench) -> None:
    engine = bench.ready()
    assert list(engine.step()) == []
    with pytest.raises(ProblemsError) as caught:
        engine.submit(request_of(0, length=CONTEXT))
    assert caught.value.codes == ("prompt-too-long",)
    assert engine.in_flight == 0


def test_a_prompt_is_computed_once_for_all_samples(bench: Bench) -> None:
    engine = bench.ready()
    before = engine.cached_tokens
    run(engine, request_of(0, length=40, samples=3))
    assert engine.cached_tokens - before > 40


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_loaded_weights_are_those_of_the_model(bench: Bench) -> None:
    engine = bench.ready()
    tokens = request_of(0, length=30).tokens.tolist()
    for version in (1, 2, 1):
        engine.load(bench.weights(version), version)
        assert engine.version == version
        expected = bench.logprobs(version, tokens[:1], tokens[1:], PLAIN)
        assert (
            np.abs(np.array(engine.logprobs(tokens)) - expected.numpy()).max() < CLOSE
        )
        (answer,) = run(engine, request_of(1))
        prompt = request_of(1).tokens.tolist()
        sampled = bench.logprobs(version, prompt, answer.tokens.tolist(), PLAIN)
        assert np.abs(answer.logprobs - sampled.numpy()).max() < CLOSE


def test_weights_that_do_not_fit_are_refused_and_change_nothing(bench: Bench) -> None:
    engine = bench.ready()
    tokens = request_of(0).tokens.tolist()
    before = engine.logprobs(tokens)
    weights = dict(bench.weights(2))
    missing, reshaped = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    weights["stranger"] = weights.pop(missing)
    weights[reshaped] = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="version 2 do not fit the model") as caught:
        engine.load(weights, 2)
    for part in (
        f"{missing} is missing",
        "stranger is not the model's",
        f"{reshaped} is [1, 2], expected [128, 64]",
    ):
        assert part in str(caught.value)
    assert engine.version == 1
    assert np.abs(np.array(engine.logprobs(tokens)) - np.array(before)).max() < 1e-6


def test_loading_copies(bench: Bench) -> None:
    engine = bench.ready()
    weights = {name: weight.clone() for name, weight in bench.weights(2).items()}
    engine.load(weights, 2)
    tokens = request_of(0).tokens.tolist()
    before = engine.logprobs(tokens)
    for weight in weights.values():
        weight.fill_(5)
    assert np.abs(np.array(engine.logprobs(tokens)) - np.array(before)).max() < 1e-6


@torch.no_grad()
def test_factors_are_added_in_loading_to_weights_that_stay_as_they_are(
    bench: Bench,
) -> None:
    engine = bench.ready()
    model = copy.deepcopy(bench.models[1])
    weights = {name: weight.clone() for name, weight in bench.weights(1).items()}
    factors = {}
    for name, parameter in model.named_parameters():
        if name.endswith(
            ("q_proj.weight", "down_proj.weight")
        ):  # one of three that vLLM packs, and one alone
            rows, columns = parameter.shape
            factors[name] = Factors(
                a=torch.randn(3, columns) / 9, b=torch.randn(rows, 3) / 9, scale=2.0
            )
            parameter += 2.0 * factors[name].b @ factors[name].a
    tokens = request_of(0, length=30).tokens.tolist()
    expected = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    assert np.abs(np.array(engine.logprobs(tokens)) - expected).max() > 0.01
    for version in (
        2,
        3,
    ):  # again from the same weights: what was added before is not in it
        engine.load(weights, version, factors)
        assert np.abs(np.array(engine.logprobs(tokens)) - expected).max() < CLOSE
    assert all(
        torch.equal(weights[name], weight) for name, weight in bench.weights(1).items()
    )


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_residency_holds_more_than_the_one_below(bench: Bench) -> None:
    engine = bench.born()
    held = {to: engine.move(to) for to in (OFF, WEIGHTS, FULL)}
    weights = sum(
        w.nbytes for w in {w.data_ptr(): w for w in bench.weights(1).values()}.values()
    )
    assert held[WEIGHTS] - held[OFF] >= weights
    assert 0 < held[FULL] - held[WEIGHTS] <= CACHE_BYTES
    for to in (FULL, WEIGHTS, OFF, OFF, FULL, OFF, WEIGHTS, FULL):
        assert engine.move(to) == held[to]
        assert engine.residency == to
        assert bench.device.held_bytes() == held[to] - held[OFF]


def test_weights_outlive_the_cache_but_not_off(bench: Bench) -> None:
    engine = bench.ready()
    expected = by_number(run(engine, request_of(0)))
    engine.move(WEIGHTS)
    assert engine.version == 1
    engine.move(FULL)
    assert by_number(run(engine, request_of(0))) == expected
    engine.move(OFF)
    assert engine.version is None
    engine.move(WEIGHTS)
    engine.load(bench.weights(1), 3)
    engine.move(FULL)
    (answer,) = run(engine, request_of(0))
    assert (answer.tokens.tolist(), set(answer.versions)) == (expected[0, 0], {3})


def test_moving_away_from_answers_in_flight_is_refused(bench: Bench) -> None:
    engine = bench.ready()
    expected = by_number(run(engine, request_of(0, samples=2)))
    engine.submit(request_of(0, samples=2))
    for to in (WEIGHTS, OFF):
        with pytest.raises(EngineBusy) as caught:
            engine.move(to)
        assert caught.value.code == "engine-busy"
        assert "2 answers in flight" in str(caught.value)
    assert by_number(run(engine)) == expected


def test_what_is_asked_too_early_is_refused(bench: Bench) -> None:
    engine = bench.ready()
    ask = functools.partial(engine.submit, request_of(0))
    early: list[tuple[Residency, Callable[[], object], str]] = [
        (WEIGHTS, ask, "not-resident"),
        (OFF, ask, "not-resident"),
        (OFF, lambda: engine.load(bench.weights(1), 1), "not-resident"),
        (FULL, ask, "no-weights"),  # which OFF has dropped
        (FULL, lambda: engine.logprobs([1, 2, 3]), "no-weights"),
    ]
    for residency, call, code in early:
        engine.move(residency)
        with pytest.raises(NotResident) as caught:
            call()
        assert caught.value.code == code


# ── other samplings ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, NARROW, COLD, PENALISED],
    ids=["plain", "narrow", "cold", "penalised"],
)
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    bench: Bench, sampling: Sampling
) -> None:
    """By one pass of the model over the whole."""
    engine = bench.ready(sampling)
    asked = {
        group: request_of(group, length=3 + 5 * group, samples=3, env_rank=group)
        for group in range(4)
    }
    answers = run(engine, *asked.values())
    assert len(answers) == 12
    for answer in answers:
        expected = bench.logprobs(
            1, asked[answer.group].tokens.tolist(), answer.tokens.tolist(), sampling
        )
        assert np.abs(answer.logprobs - expected.numpy()).max() < CLOSE
        assert (answer.tokens.dtype, answer.logprobs.dtype, answer.versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        assert answer.versions.tolist() == [1] * len(answer.tokens)
        assert (answer.turn, answer.env_rank) == (0, answer.group)
        assert len(answer.tokens) > sampling.rollout.min_tokens


def test_tokens_come_as_often_as_they_are_likely(bench: Bench) -> None:
    """Of the likeliest token at a temperature where it takes a large share."""
    engine = bench.ready(COLD)
    request = request_of(0, samples=400, longest=1)
    answers = run(engine, request)
    probabilities = (
        bench.logits(1, request.tokens.tolist())[-1] / COLD.rollout.temperature
    ).softmax(-1)
    share, token = probabilities.max(-1)
    seen = np.mean([answer.tokens[0] == int(token) for answer in answers])
    assert float(share) > 0.05
    assert (
        abs(seen - float(share))
        < 4 * (float(share * (1 - share)) / len(answers)) ** 0.5
    )


def test_held_out_answers_are_drawn_as_evaluation_says(bench: Bench) -> None:
    engine = bench.ready(COLD)
    alone = by_number(run(engine, request_of(1, samples=3)))
    held_out = request_of(3, samples=2, held_out=True)
    answers = run(engine, request_of(1, samples=3), held_out)
    assert by_number(a for a in answers if not a.held_out) == alone
    for answer in (a for a in answers if a.held_out):
        check_greedy(bench, held_out, answer)


def test_temperature_zero_is_greedy(bench: Bench) -> None:
    request = request_of(3, samples=2)
    for answer in run(bench.ready(GREEDY), request):
        check_greedy(bench, request, answer)


def test_an_answer_ends_with_the_token_that_completes_a_text(bench: Bench) -> None:
    """Made of two tokens here; `least` holds it back."""
    tokenizer, request = (
        Tokenizer.load(bench._folder),
        request_of(0, samples=6, longest=30),
    )
    whole = by_number(run(bench.ready(OPEN), request))
    pairs = (
        tokenizer.decode(tokens[at : at + 2])
        for tokens in whole.values()
        for at in range(8, 29)
    )
    text = next(
        pair
        for pair in pairs
        if pair.isascii() and pair.isprintable() and len(pair) > 1
    )
    for least in (0, 29):
        stopping = dataclasses.replace(
            sampling_of((), seed=6, min_tokens=least), stop_texts=(text, "never there")
        )
        answers, ended = run(bench.ready(stopping), request), 0
        for answer in answers:
            made = whole[0, answer.sample]
            said = [tokenizer.decode(made[:at]).count(text) for at in range(31)]
            end = next(
                (at for at in range(least + 1, 31) if said[at] > said[at - 1]), None
            )
            assert answer.tokens.tolist() == made[:end]
            assert answer.finish == ("length" if end is None else "stop")
            ended += end is not None
        assert (0 < ended < len(answers)) == (least == 0)


# ── answers of a known length ────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_ends_where_the_context_does(bench: Bench) -> None:
    (answer,) = run(bench.ready(OPEN), request_of(0, length=CONTEXT - 3, longest=20))
    assert (len(answer.tokens), answer.finish) == (3, "length")


def test_a_short_answer_leaves_before_a_long_one_that_began_earlier(
    bench: Bench,
) -> None:
    engine = bench.ready(OPEN)
    engine.submit(request_of(0, longest=30))
    early = [answer for _ in range(5) for answer in engine.step()]
    assert (
        early,
        [answer.group for answer in run(engine, request_of(1, longest=4))],
    ) == ([], [1, 0])


def test_passes_are_timed_by_the_prompts_they_read_and_by_the_answers_in_flight(
    bench: Bench,
) -> None:
    engine, watch = (
        bench.ready(OPEN),
        Stopwatch(read=lambda: (time.perf_counter(),) * 2),
    )  # never off the processor
    engine.submit(request_of(0, samples=3, longest=6))
    while engine.in_flight:
        engine.step(watch)
    assert [(part.name, part.size, part.laps) for part in watch.parts()] == [
        ("prefill", 9, 1),
        ("decode", 3, 5),
    ]


def test_answers_without_room_wait_for_it(bench: Bench) -> None:
    engine = bench.ready(OPEN)
    assert engine.room == SLOTS
    engine.submit(request_of(0, samples=SLOTS - 1, longest=4))
    assert (engine.room, engine.in_flight) == (1, SLOTS - 1)
    engine.submit(request_of(1, samples=SLOTS, longest=4))
    assert (engine.room, engine.in_flight) == (0, 2 * SLOTS - 1)
    answers = run(engine)
    assert len(answers) == 2 * SLOTS - 1
    assert {a.group for a in answers[: SLOTS - 1]} == {0}
    assert (engine.room, engine.in_flight) == (SLOTS, 0)


def test_a_load_with_answers_in_flight_keeps_them_and_goes_on_by_the_new_weights(
    bench: Bench,
) -> None:
    engine = bench.ready(OPEN)
    asked = [request_of(0, samples=2, longest=12), request_of(1, length=20, longest=12)]
    for request in asked:
        engine.submit(request)
    for _ in range(4):
        assert list(engine.step()) == []
    engine.load(bench.weights(2), 2)
    answers = run(engine)
    assert len(answers) == 3
    for answer in answers:
        prompt, tokens = asked[answer.group].tokens.tolist(), answer.tokens.tolist()
        old = int((answer.versions == 1).sum())
        assert answer.versions.tolist() == [1] * old + [2] * (12 - old)
        assert 1 <= old <= 4
        before = bench.logprobs(1, prompt, tokens, PLAIN).numpy()[:old]
        after = bench.logprobs(2, prompt, tokens, PLAIN).numpy()[old:]
        assert np.abs(answer.logprobs[:old] - before).max() < CLOSE
        assert np.abs(answer.logprobs[old:] - after).max() < CLOSE


def test_dropped_answers_never_come_and_leave_their_room(bench: Bench) -> None:
    engine = bench.ready(OPEN)
    expected = by_number(run(engine, request_of(0, samples=2, longest=6)))
    engine.submit(request_of(1, samples=SLOTS, longest=30))
    engine.submit(request_of(2, samples=2, longest=30))  # they wait
    engine.step()
    engine.drop()
    assert (engine.in_flight, engine.room) == (0, SLOTS)
    assert by_number(run(engine, request_of(0, samples=2, longest=6))) == expected
    engine.move(OFF)  # refused with answers in flight


def test_closing_frees_everything_also_with_answers_in_flight(bench: Bench) -> None:
    engine = bench.ready(OPEN)
    engine.submit(request_of(0))
    engine.close()
    assert bench.device.held == {}
    engine.close()
    bench.close()
