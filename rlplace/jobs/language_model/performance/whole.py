"""Computes the generation of a whole iteration in one loop, for predictions with many samples.

::

    env ranks    requests, one after the other ──▶ the earliest engine with room takes one
    engines      prefill, then decode up to the next end of an answer ──▶ env ranks grade the answers in order

The simulated ranks of the module `ranks` exchange a message for each answer. This module computes the same steps in one
loop, without messages. The result is right if each rank has a processor and accelerators of its own. By a test, both
results differ by at most 1 %.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import operator
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlplace.foresight.costs import Costs
from rlplace.foresight.profile import ACCELERATOR
from rlplace.foresight.world import Event
from rlplace.jobs.language_model.performance.lengths import Group

if TYPE_CHECKING:
    from rlplace.jobs.language_model.performance.ranks import TextSite

# From this number of samples on, generation is computed as a whole
MANY = 1024
_RUN = "env.run/"
_GENERATE = "rollout.generate/"
_DIGITS = 9  # times at which ranks begin are rounded to nanoseconds


class _QueuedRequest(NamedTuple):
    """A request of an env rank. `when`: time of its arrival in the channel. `answers`: tokens of each answer."""

    when: float
    env: int
    group: Group
    answers: tuple[int, ...]


@dataclasses.dataclass
class _Engine:
    """The state of a simulated engine.

    `active`: heap of (step in which the answer ends, number of the request). `waiting`: (tokens of the answer, number
    of the request) for answers that are not started.
    """

    active: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    waiting: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.active) + len(self.waiting)


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """The result of an engine in an iteration: when it ended, its seconds, and the number of generated tokens."""

    ended_s: float
    prefill_s: float
    decode_s: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class EnvResult:
    """The result of an env rank in an iteration.

    `ended_s`: time at which the rank has its last answer. `groups`: (time at which the group is complete, group), in
    order. `sim_s`, `reward_s`: seconds of the rank in the environment and in rewards. `cpu_s`: processor seconds of all
    its work.
    """

    ended_s: float
    groups: Sequence[tuple[float, Group]]
    sim_s: float
    reward_s: float
    cpu_s: float


class WholeIteration:
    """Computes the generation of one iteration, as soon as all env and rollout ranks have begun it.

    `known`: event that is set when the results are computed. `engine_results`: rollout rank -> result. `env_results`:
    env rank -> result.
    """

    def __init__(self, site: TextSite, iteration: int) -> None:
        self._site = site
        self._iteration = iteration
        self._envs: dict[int, float] = {}
        self._engines: dict[int, float] = {}
        self.known = Event(site.world)
        self.engine_results: Mapping[int, EngineResult] = {}
        self.env_results: Mapping[int, EnvResult] = {}

    def begin(self, component: str, rank: int) -> Event:
        """Record that a rank has begun the iteration. Return the event that is set when the results are computed."""
        began = self._envs if component == "env" else self._engines
        began[rank] = self._site.world.now
        ranks = self._site.job.ranks
        if len(self._envs) == ranks["env"] and len(self._engines) == ranks["rollout"]:
            self._compute()
            self.known.set()
        return self.known

    def _compute(self) -> None:
        """Compute the results, or take those of a prediction in which the ranks began in the same way."""
        job = self._site.job.config
        texts = self._site.lengths.groups(self._iteration)
        since_s = min([*self._envs.values(), *self._engines.values()])
        inputs = _Inputs(
            texts=texts,
            numbers=tuple(tuple(self._site.job.groups(env)) for env in self._envs),
            envs=_after(since_s, self._envs),
            engines=_after(since_s, self._engines),
            samples=job.algorithm.samples_per_prompt,
            step_sequences=job.rollout.step_sequences,
            step_tokens=job.rollout.step_tokens,
            mixed=job.rollout.engine == "vllm",
        )
        # The texts of an iteration are one object, which the key keeps: it stands for their lengths.
        key = inputs._replace(texts=()), _Same(texts)
        engines, envs = self._site.costs.once(
            key, lambda costs: _Simulated(inputs, costs).results()
        )
        self.engine_results = {
            rank: dataclasses.replace(found, ended_s=since_s + found.ended_s)
            for rank, found in engines.items()
        }
        self.env_results = {
            rank: dataclasses.replace(
                found,
                ended_s=since_s + found.ended_s,
                groups=[(since_s + when_s, group) for when_s, group in found.groups],
            )
            for rank, found in envs.items()
        }


def _after(since_s: float, began: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return (rank, seconds from `since_s` until the rank began) for each rank, rounded to nanoseconds.

    Rounded, the seconds are equal in all iterations in which the ranks began in the same way.
    """
    return tuple(
        (rank, round(began_s - since_s, _DIGITS)) for rank, began_s in began.items()
    )


class _Same:
    """A key that is equal only to a key of the same object, which it keeps alive."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Inputs(NamedTuple):
    """Everything on which the generation of an iteration depends, besides the costs of a profile.

    `texts`: each group, and the tokens of its answers. `numbers`: for each env rank, the numbers of its groups. `envs`,
    `engines`: (rank, seconds at which it begins). `samples`: answers of a group. `step_sequences`, `step_tokens`: most
    answers and most prompt tokens of an engine step. `mixed`: whether a step processes prompts and answers together.
    """

    texts: Sequence[tuple[Group, tuple[int, ...]]]
    numbers: tuple[tuple[int, ...], ...]
    envs: tuple[tuple[int, float], ...]
    engines: tuple[tuple[int, float], ...]
    samples: int
    step_sequences: int
    step_tokens: int
    mixed: bool


_Ends = dict[int, list[tuple[float, int, Group]]]


class _Simulated:
    """Simulates the env ranks and engines of one iteration, from the time at which the first of them begins.

    `_ends`: env rank -> list of (time, count of answers, group). The answers of an entry end in the same engine step.
    """

    def __init__(self, inputs: _Inputs, costs: Costs) -> None:
        self._inputs = inputs
        self._costs = costs
        self._laps = _Laps(costs)
        self._asked = self._requests()
        self._ends: _Ends = {env: [] for env, _ in inputs.envs}

    def results(self) -> tuple[dict[int, EngineResult], dict[int, EnvResult]]:
        """Return rollout rank -> result, and env rank -> result."""
        engines = self._generate()
        envs = {
            env: self._grade(began_s, len(numbers), self._ends[env])
            for (env, began_s), numbers in zip(
                self._inputs.envs, self._inputs.numbers, strict=True
            )
        }
        self._laps.record()
        return engines, envs

    def _of(self, name: str) -> float:
        return self._costs.of(name).seconds

    def _requests(self) -> list[_QueuedRequest]:
        """Return all requests in the order in which they arrive in the channel."""
        sim_s = self._of(_RUN + "sim")
        put_s = self._of(_RUN + "put")
        found: list[_QueuedRequest] = []
        ranks = zip(self._inputs.envs, self._inputs.numbers, strict=True)
        for (env, began_s), numbers in ranks:
            when_s = began_s
            for number in numbers:
                when_s += sim_s
                group, answers = self._inputs.texts[number]
                found.append(_QueuedRequest(when_s, env, group, answers))
                when_s += put_s
        found.sort(key=lambda asked: asked.when)
        return found

    def _generate(self) -> dict[int, EngineResult]:
        """Simulate the engines until all requests are answered. Return rollout rank -> result."""
        asked = self._asked
        laps = self._laps
        most = self._inputs.step_sequences
        share = len(asked) * self._inputs.samples / len(self._inputs.engines)
        limit = min(math.ceil(share), most)
        engines = {rank: _Engine() for rank, _ in self._inputs.engines}
        queue = [(began_s, rank) for rank, began_s in self._inputs.engines]
        heapq.heapify(queue)
        results: dict[int, EngineResult] = {}
        following = 0
        waited_s = self._of(_GENERATE + "wait")
        while queue:
            now, rank = heapq.heappop(queue)
            engine = engines[rank]
            # Take requests while there is room
            while following < len(asked) and engine.in_flight < limit:
                request = asked[following]
                if request.when > now and engine.in_flight:
                    break
                if not engine.in_flight:
                    now = max(now, request.when) + waited_s
                engine.waiting.extend(zip(request.answers, itertools.repeat(following)))
                engine.tokens += sum(request.answers)
                following += 1
            if following == len(asked) and not engine.waiting:
                # Nothing more can come from other ranks
                now = self._answer_rest(engine, now)
                results[rank] = EngineResult(
                    now, engine.prefill_s, engine.decode_s, engine.tokens
                )
                continue
            room = most - len(engine.active)
            if engine.waiting and room > 0:
                now = self._read(engine, room, now)
            else:
                # Decoding steps until the next answer ends, or until a request arrives and there is room for it
                steps = engine.active[0][0] - engine.steps
                once_s = laps.once_s("decode", len(engine.active))
                if following < len(asked) and engine.in_flight < limit and once_s:
                    until = math.ceil((asked[following].when - now) / once_s)
                    steps = max(1, min(steps, until))
                seconds = laps.seconds("decode", len(engine.active), steps)
                engine.decode_s += seconds
                now += seconds
                engine.steps += steps
            over: list[int] = []
            while engine.active and engine.active[0][0] <= engine.steps:
                over.append(heapq.heappop(engine.active)[1])
            if over:
                now = self._put(over, now)
            heapq.heappush(queue, (now, rank))
        return results

    def _read(self, engine: _Engine, room: int, now: float) -> float:
        """Simulate a prefill step, and return the time of its end. `room`: the most answers that may begin in it."""
        if not self._inputs.mixed and engine.active:
            seconds = self._laps.seconds("decode", len(engine.active), 1)
            engine.decode_s += seconds
            now += seconds
        engine.steps += 1
        read: list[int] = []
        before = -1
        for _ in range(min(room, len(engine.waiting))):
            tokens, number = engine.waiting.popleft()
            if number != before:
                read.append(self._asked[number].group.prompt)
                before = number
            heapq.heappush(engine.active, (engine.steps + tokens - 1, number))
        if self._inputs.mixed:
            # One engine step processes all of them, as far as it has room for their tokens.
            full, rest = divmod(sum(read), self._inputs.step_tokens)
            seconds = 0.0
            if full:
                seconds += self._laps.seconds("prefill", self._inputs.step_tokens, full)
            if rest:
                seconds += self._laps.seconds("prefill", rest, 1)
        else:
            seconds = sum(self._laps.seconds("prefill", n, 1) for n in read)
        engine.prefill_s += seconds
        return now + seconds

    def _answer_rest(self, engine: _Engine, now: float) -> float:
        """Simulate decoding until all answers of an engine have ended, and return this time.

        No request and no prompt is left, so the engine does not depend on other ranks.
        """
        left = len(engine.active)
        ordered = sorted(engine.active)
        for end, ending in itertools.groupby(ordered, operator.itemgetter(0)):
            seconds = self._laps.seconds("decode", left, end - engine.steps)
            engine.decode_s += seconds
            engine.steps = end
            over = [number for _, number in ending]
            now = self._put(over, now + seconds)
            left -= len(over)
        engine.active = []
        return now

    def _put(self, over: Sequence[int], now: float) -> float:
        """Simulate how an engine puts answers into the channel, and return the time of the end.

        `over`: for each answer that has ended, the number of its request.
        """
        now += self._laps.seconds("put", len(over), 1)
        if len(over) == 1:
            counts: Mapping[int, int] = {over[0]: 1}
        else:
            counts = Counter(over)
        for number, count in counts.items():
            request = self._asked[number]
            self._ends[request.env].append((now, count, request.group))
        return now

    def _grade(
        self, began_s: float, groups: int, ends: list[tuple[float, int, Group]]
    ) -> EnvResult:
        """Simulate an env rank: it sends all its requests first, then grades answers in the order of their arrival.

        `groups`: number of its groups. `ends`: its entries of `_ends`; they are sorted here.
        """
        sim_s, reward_s, put_s, wait_s = (
            self._of(_RUN + part) for part in ("sim", "reward", "put", "wait")
        )
        each = self._inputs.samples
        asking_s = groups * (sim_s + put_s)
        grading_s = wait_s + sim_s + 2 * reward_s
        now = began_s + asking_s
        left: dict[tuple[int, int], int] = {}
        whole: list[tuple[float, Group]] = []
        ends.sort(key=operator.itemgetter(0))
        for when_s, count, group in ends:
            now = max(now, when_s) + count * grading_s
            graded = left.get(group.number, 0) + count
            left[group.number] = graded
            if graded == each:
                whole.append((now, group))
                now += put_s
        answers = groups * each
        return EnvResult(
            ended_s=now,
            groups=whole,
            sim_s=(groups + answers) * sim_s,
            reward_s=2 * answers * reward_s,
            cpu_s=asking_s + answers * grading_s + groups * put_s,
        )


class _Laps:
    """Gives the seconds of parts of the generation, and counts them to record their costs at the end."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        # (part, size) -> seconds of one lap, and number of laps
        self._once: dict[tuple[str, int], float] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def once_s(self, part: str, size: int) -> float:
        """Return the seconds of one lap of `part`, a part of the worker method `generate`. The lap is not counted."""
        key = part, size
        if key not in self._once:
            self._once[key] = self._costs.of(_GENERATE + part, size).seconds
            # This lap is recorded already.
            self._counts[key] = -1
        return self._once[key]

    def seconds(self, part: str, size: int, laps: int) -> float:
        """Return the seconds of `laps` laps of `part` with work of this size, and count them."""
        key = part, size
        once_s = self._once.get(key)
        if once_s is None:
            once_s = self.once_s(part, size)
        self._counts[key] += laps
        return once_s * laps

    def record(self) -> None:
        """Record the costs of all counted laps, so that the search knows which costs matter."""
        for (part, size), laps in self._counts.items():
            self._costs.of(_GENERATE + part, size, laps=laps)


def computed_as_a_whole(site: TextSite, cores: int) -> bool:
    """Return whether generation may be computed as a whole: for many samples, if no rank waits for another's processor.

    `cores`: number of processors of each node.
    """
    config = site.job.config
    algorithm = config.algorithm
    samples = (algorithm.prompts or 1) * algorithm.samples_per_prompt
    if samples < MANY or config.env.max_turns > 1 or algorithm.short_rounds:
        return False
    if config.cluster.launcher == "inline":
        return False
    placement = site.plan.placement
    costs = site.costs.profile.costs
    # Engines work on accelerators of their own, environments on processors.
    engines = [_GENERATE + part for part in ("decode", "prefill")]
    if not all(name in costs and costs[name].on == ACCELERATOR for name in engines):
        return False
    if not placement.accelerators("rollout") or any(
        curve.on == ACCELERATOR
        for name, curve in costs.items()
        if name.startswith(_RUN)
    ):
        return False
    # Rewards that take long are computed by other processes.
    if any(site.costs.profile.samples.get("env.reward_s", ())):
        return False
    # The driver is on node 0.
    on = Counter({0: 1})
    at_work = site.plan.schedule.active["rollout"]
    if site.plan.needs.ahead:
        at_work = placement.components
    for component in at_work:
        on.update(placement.locations(component).node)
    return max(on.values()) <= cores
