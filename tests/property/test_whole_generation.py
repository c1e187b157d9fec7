"""Generation that is computed engine by engine has the results of a simulation step by step, for any requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.foresight.costs import Costs
from rlplace.foresight.profile import ACCELERATOR, Curve, Point, Profile
from rlplace.jobs.language_model.performance.lengths import Group
from rlplace.jobs.language_model.performance.whole import (
    EngineResult,
    EnvResult,
    GeneratedIteration,
    GenerationInputs,
)

_PARTS = ("sim", "reward", "put", "wait")


@dataclasses.dataclass
class Answer:
    """An answer in flight or waiting. `ends`: engine step in which it ends; None if it is not started."""

    request: int
    tokens: int
    ends: int | None = None


@dataclasses.dataclass
class Engine:
    """`answers`: those that were taken and have not ended, in the order in which they were taken."""

    rank: int
    now: float
    answers: list[Answer] = dataclasses.field(default_factory=list)
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0

    @property
    def active(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ends is not None]

    @property
    def waiting(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ends is None]


class StepByStep:
    """Simulates env ranks and engines as simply as possible: always the engine with the earliest time does one step."""

    def __init__(self, inputs: GenerationInputs, costs: Costs) -> None:
        self.inputs = inputs
        self.costs = costs
        self.ended: list[tuple[float, int]] = []  # (time, request) of each answer
        asked = []
        ranks = zip(inputs.envs, inputs.numbers, strict=True)
        for (env, when), numbers in ranks:
            for number in numbers:
                when += self.of("env.run/sim")
                asked.append((when, env, *inputs.texts[number]))
                when += self.of("env.run/put")
        self.asked = sorted(asked, key=lambda request: request[0])
        self.following = 0
        share = math.ceil(len(asked) * inputs.samples / len(inputs.engines))
        self.limit = min(share, inputs.step_sequences)

    def of(self, name: str, size: float = 0.0) -> float:
        return self.costs.of(name, size).seconds

    def engines(self) -> dict[int, EngineResult]:
        left = [Engine(rank, began) for rank, began in self.inputs.engines]
        found = {}
        while left:
            engine = min(left, key=lambda each: (each.now, each.rank))
            self.take(engine)
            if engine.answers:
                self.step(engine)
            elif self.following == len(self.asked):
                left.remove(engine)
                found[engine.rank] = EngineResult(
                    engine.now, engine.prefill_s, engine.decode_s, engine.tokens
                )
        return found

    def take(self, engine: Engine) -> None:
        while self.following < len(self.asked) and len(engine.answers) < self.limit:
            when, _, _, answers = self.asked[self.following]
            if when > engine.now and engine.answers:
                return
            if not engine.answers:
                engine.now = max(engine.now, when) + self.of("rollout.generate/wait")
            engine.answers += [Answer(self.following, tokens) for tokens in answers]
            engine.tokens += sum(answers)
            self.following += 1

    def step(self, engine: Engine) -> None:
        room = self.inputs.step_sequences - len(engine.active)
        begin = engine.waiting[:room]
        in_flight = len(engine.active)
        decode_s = self.of("rollout.generate/decode", in_flight) if in_flight else 0.0
        if begin:
            if self.inputs.mixed:
                decode_s = 0.0
            self.read(engine, begin, decode_s)
        else:
            self.decode(engine, decode_s)
        over = [answer for answer in engine.active if answer.ends == engine.steps]
        if over:
            engine.now += self.of("rollout.generate/put", len(over))
            requests = sorted(answer.request for answer in over)
            self.ended += [(engine.now, request) for request in requests]
            engine.answers = [a for a in engine.answers if a not in over]

    def read(self, engine: Engine, begin: list[Answer], decode_s: float) -> None:
        engine.steps += 1
        prompts = []
        for answer in begin:
            answer.ends = engine.steps + answer.tokens - 1
        for number in dict.fromkeys(answer.request for answer in begin):
            prompts.append(self.asked[number][2].prompt)
        most = self.inputs.step_tokens
        if self.inputs.mixed:
            whole, rest = divmod(sum(prompts), most)
            prompts = [most] * whole + [rest] * bool(rest)
        seconds = sum(self.of("rollout.generate/prefill", size) for size in prompts)
        engine.decode_s += decode_s
        engine.prefill_s += seconds
        engine.now += decode_s + seconds

    def decode(self, engine: Engine, once_s: float) -> None:
        steps = min(a.ends for a in engine.active if a.ends is not None) - engine.steps
        room = len(engine.answers) < self.limit
        if self.following < len(self.asked) and room and once_s:
            arrives_s = self.asked[self.following][0] - engine.now
            steps = max(1, min(steps, math.ceil(arrives_s / once_s)))
        engine.steps += steps
        engine.decode_s += once_s * steps
        engine.now += once_s * steps

    def envs(self) -> dict[int, EnvResult]:
        sim_s, reward_s, put_s, wait_s = (self.of(f"env.run/{p}") for p in _PARTS)
        each = self.inputs.samples
        found = {}
        for (env, began), numbers in zip(
            self.inputs.envs, self.inputs.numbers, strict=True
        ):
            now = began + len(numbers) * (sim_s + put_s)
            groups = []
            count: dict[int, int] = {}
            own = [one for one in self.ended if self.asked[one[1]][1] == env]
            for when, request in sorted(own, key=lambda ended: ended[0]):
                now = max(now, when) + wait_s + sim_s + 2 * reward_s
                count[request] = count.get(request, 0) + 1
                if count[request] == each:
                    groups.append((now, self.asked[request][2]))
                    now += put_s
            answers = len(numbers) * each
            grading_s = answers * (wait_s + sim_s + 2 * reward_s)
            asking_s = len(numbers) * (sim_s + put_s)
            found[env] = EnvResult(
                ended_s=now,
                groups=groups,
                sim_s=(len(numbers) + answers) * sim_s,
                reward_s=2 * answers * reward_s,
                cpu_s=asking_s + grading_s + len(numbers) * put_s,
            )
        return found


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles with odd seconds, so that two engines hardly ever come to the same time."""
    rng = random.Random(draw(st.integers(0, 1_000_000)))
    costs = {f"env.run/{part}": [(0.0, rng.uniform(1e-5, 1e-3))] for part in _PARTS}
    costs["rollout.generate/wait"] = [(0.0, rng.uniform(1e-5, 1e-3))]
    for part, most in (("decode", 16.0), ("put", 4.0), ("prefill", 64.0)):
        low = rng.uniform(1e-4, 1e-2)
        high = low * rng.uniform(1.0, 5.0)
        costs[f"rollout.generate/{part}"] = [(1.0, low), (most, high)]
    curves = {}
    for name, points in costs.items():
        measured = tuple(
            Point(size=size, laps=1, cpu_s=s, least_cpu_s=s, blocked_s=0.0)
            for size, s in points
        )
        curves[name] = Curve(points=measured, on=ACCELERATOR)
    return Profile(machine={}, versions={}, subjects={}, costs=curves)


@st.composite
def iterations(draw: st.DrawFn) -> GenerationInputs:
    """Requests of some env ranks to some engines, which all begin within 10 ms."""
    samples = draw(st.integers(1, 5))
    count = draw(st.integers(1, 12))
    tokens = st.lists(st.integers(1, 40), min_size=samples, max_size=samples)
    texts = []
    for number in range(count):
        prompt = draw(st.integers(1, 60))
        answers = tuple(draw(tokens))
        whole = tuple(prompt + answer for answer in sorted(answers))
        texts.append((Group((1, number), prompt, whole), answers))
    envs = draw(st.integers(1, 3))
    numbers = tuple(tuple(range(env, count, envs)) for env in range(envs))
    engines = draw(st.integers(1, 4))
    rng = random.Random(draw(st.integers(0, 1_000_000)))
    return GenerationInputs(
        texts=texts,
        numbers=numbers,
        envs=tuple((env, rng.uniform(0.0, 1e-2)) for env in range(envs)),
        engines=tuple((rank, rng.uniform(0.0, 1e-2)) for rank in range(engines)),
        samples=samples,
        step_sequences=draw(st.integers(1, 12)),
        step_tokens=draw(st.integers(20, 80)),
        mixed=draw(st.booleans()),
    )


@settings(deadline=None)
@given(inputs=iterations(), profile=profiles())
def test_engine_by_engine_is_step_by_step(
    inputs: GenerationInputs, profile: Profile
) -> None:
    quick = Costs(profile)
    engines, envs = GeneratedIteration(inputs, quick).results()
    slow = Costs(profile)
    reference = StepByStep(inputs, slow)
    assert_same(engines, reference.engines())
    assert_same(envs, reference.envs())


def assert_same(
    found: dict[int, EngineResult] | dict[int, EnvResult],
    expected: dict[int, EngineResult] | dict[int, EnvResult],
) -> None:
    """Compare numbers up to rounding, and everything else exactly."""
    assert list(found) == list(expected) or sorted(found) == sorted(expected)
    for rank, one in found.items():
        mine = numbers_of(dataclasses.astuple(one))
        theirs = numbers_of(dataclasses.astuple(expected[rank]))
        for a, b in zip(mine, theirs, strict=True):
            assert math.isclose(a, b, rel_tol=1e-11, abs_tol=1e-15), (one, expected)


def numbers_of(value: object) -> list[float]:
    """Return all numbers of nested sequences, in their order."""
    if isinstance(value, int | float):
        return [float(value)]
    assert isinstance(value, tuple | list)
    return [*itertools.chain.from_iterable(map(numbers_of, value))]
