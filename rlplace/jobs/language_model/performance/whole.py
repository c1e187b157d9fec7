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
import sys
from collections import Counter, defaultdict, deque
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

    `active`: heap of the answers in flight; an answer is the step in which it ends, times the number of all requests,
    plus the index of its request. `waiting`: (tokens of the answer, index of the request) for answers that are not
    started.
    """

    active: list[int] = dataclasses.field(default_factory=list)
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
        inputs = GenerationInputs(
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
            key, lambda costs: GeneratedIteration(inputs, costs).results()
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


class GenerationInputs(NamedTuple):
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


# Answers of one request that end in the same engine step: the time at which they are in the channel, the request, and
# the number of answers. A plain tuple, since an iteration has thousands.
_Ended = tuple[float, int, int]


class GeneratedIteration:
    """Simulates the env ranks and engines of one iteration, from the time at which the first of them begins.

    `_asked`: all requests in the order of their arrival; a request is named by its index there. `_ended`: the answers
    that have ended, engine by engine.
    """

    def __init__(self, inputs: GenerationInputs, costs: Costs) -> None:
        self._inputs = inputs
        self._costs = costs
        self._prefill = _Laps(costs, "prefill")
        self._decode = _Laps(costs, "decode")
        self._put = _Laps(costs, "put")
        self._asked = self._requests()
        self._ended: list[_Ended] = []

    def results(self) -> tuple[dict[int, EngineResult], dict[int, EnvResult]]:
        """Return rollout rank -> result, and env rank -> result."""
        engines = self._generate()
        envs = self._grade()
        for laps in (self._prefill, self._decode, self._put):
            laps.record()
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
        """Simulate the engines until all requests are answered. Return rollout rank -> result.

        Engines meet only where they take requests. So an engine is simulated on its own until it has room for a
        request. Requests are taken in the order of these times.
        """
        asked = self._asked
        share = len(asked) * self._inputs.samples / len(self._inputs.engines)
        limit = min(math.ceil(share), self._inputs.step_sequences)
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
            if following < len(asked):
                arrives = math.inf
                if engine.in_flight < limit:
                    arrives = asked[following].when
                now = self._work(engine, now, limit, arrives)
                heapq.heappush(queue, (now, rank))
                continue
            # Nothing more can come from other ranks
            if engine.waiting:
                now = self._work(engine, now, 0, math.inf)
            now = self._answer_rest(engine, now)
            results[rank] = EngineResult(
                now, engine.prefill_s, engine.decode_s, engine.tokens
            )
        return results

    def _work(self, engine: _Engine, now: float, limit: int, arrives: float) -> float:
        """Simulate steps of an engine that takes no request, and return the time of their end.

        They end when fewer than `limit` answers are in flight. With a limit of 0, they end when all answers have begun.
        `arrives`: time at which a request arrives for which there is room; infinite without such a request.
        """
        active = engine.active
        waiting = engine.waiting
        most = self._inputs.step_sequences
        count = len(self._asked)
        decode = self._decode
        decode_laps = decode.laps
        put_s = self._put[1]
        put_laps = self._put.laps
        ended = self._ended.append
        while True:
            room = most - len(active)
            if waiting and room > 0:
                now = self._read(engine, room, now)
            else:
                # Decoding steps until the next answer ends, or until the request arrives
                in_flight = len(active)
                once_s = decode[in_flight]
                steps = active[0] // count - engine.steps
                if arrives < math.inf and once_s:
                    steps = max(1, min(steps, math.ceil((arrives - now) / once_s)))
                decode_laps[in_flight] += steps
                seconds = once_s * steps
                engine.decode_s += seconds
                now += seconds
                engine.steps += steps
            # The first answer that does not end in this step has at least this value
            following = (engine.steps + 1) * count
            if active and active[0] < following:
                over = heapq.heappop(active) % count
                if active and active[0] < following:
                    several = [over]
                    while active and active[0] < following:
                        several.append(heapq.heappop(active) % count)
                    now = self._end(several, now)
                else:
                    now += put_s
                    put_laps[1] += 1
                    ended((now, over, 1))
            if len(active) + len(waiting) < limit or not (limit or waiting):
                return now

    def _read(self, engine: _Engine, room: int, now: float) -> float:
        """Simulate a prefill step, and return the time of its end. `room`: the most answers that may begin in it."""
        active = engine.active
        waiting = engine.waiting
        count = len(self._asked)
        if not self._inputs.mixed and active:
            in_flight = len(active)
            self._decode.laps[in_flight] += 1
            seconds = self._decode[in_flight]
            engine.decode_s += seconds
            now += seconds
        engine.steps += 1
        read: list[int] = []
        before = -1
        for _ in range(min(room, len(waiting))):
            tokens, request = waiting.popleft()
            if request != before:
                read.append(self._asked[request].group.prompt)
                before = request
            heapq.heappush(active, (engine.steps + tokens - 1) * count + request)
        if self._inputs.mixed:
            # One engine step processes all of them, as far as it has room for their tokens.
            full, rest = divmod(sum(read), self._inputs.step_tokens)
            read = [self._inputs.step_tokens] * full
            if rest:
                read.append(rest)
        seconds = 0.0
        for tokens in read:
            self._prefill.laps[tokens] += 1
            seconds += self._prefill[tokens]
        engine.prefill_s += seconds
        return now + seconds

    def _answer_rest(self, engine: _Engine, now: float) -> float:
        """Simulate decoding until all answers of an engine have ended, and return this time.

        No request and no prompt is left, so the engine does not depend on other ranks.
        """
        count = len(self._asked)
        decode = self._decode
        decode_laps = decode.laps
        put_s = self._put[1]
        put_laps = self._put.laps
        ended = self._ended.append
        ordered = sorted(engine.active)
        in_flight = len(ordered)
        # Stands for an answer that ends later than all others
        ordered.append(sys.maxsize)
        decode_s = engine.decode_s
        steps = engine.steps
        at = 0
        while in_flight:
            end, over = divmod(ordered[at], count)
            decode_laps[in_flight] += end - steps
            seconds = decode[in_flight] * (end - steps)
            decode_s += seconds
            now += seconds
            steps = end
            at += 1
            following = (end + 1) * count
            if ordered[at] >= following:
                now += put_s
                put_laps[1] += 1
                ended((now, over, 1))
                in_flight -= 1
                continue
            # Several answers end in this step
            several = [over]
            while ordered[at] < following:
                several.append(ordered[at] % count)
                at += 1
            now = self._end(several, now)
            in_flight -= len(several)
        engine.decode_s = decode_s
        engine.steps = steps
        engine.active = []
        return now

    def _end(self, over: Sequence[int], now: float) -> float:
        """Simulate how an engine puts several answers into the channel, and return the time of the end.

        `over`: for each answer that has ended, its request; in ascending order.
        """
        self._put.laps[len(over)] += 1
        now += self._put[len(over)]
        self._ended += [(now, *each) for each in Counter(over).items()]
        return now

    def _grade(self) -> dict[int, EnvResult]:
        """Simulate the env ranks, and return env rank -> result.

        A rank sends all its requests first, then grades answers in the order of their arrival.
        """
        sim_s, reward_s, put_s, wait_s = (
            self._of(_RUN + part) for part in ("sim", "reward", "put", "wait")
        )
        each = self._inputs.samples
        grading_s = wait_s + sim_s + 2 * reward_s
        # Env rank -> time at which it has graded the latest answer
        now: dict[int, float] = {}
        complete: dict[int, list[tuple[float, Group]]] = {}
        ranks = [*zip(self._inputs.envs, self._inputs.numbers, strict=True)]
        for (env, began_s), numbers in ranks:
            now[env] = began_s + len(numbers) * (sim_s + put_s)
            complete[env] = []
        left = [each] * len(self._asked)
        for when, request, count in sorted(self._ended, key=operator.itemgetter(0)):
            _, env, group, _ = self._asked[request]
            graded = max(now[env], when) + count * grading_s
            left[request] -= count
            if not left[request]:
                complete[env].append((graded, group))
                graded += put_s
            now[env] = graded

        results: dict[int, EnvResult] = {}
        for (env, _), numbers in ranks:
            groups = len(numbers)
            answers = groups * each
            results[env] = EnvResult(
                ended_s=now[env],
                groups=complete[env],
                sim_s=(groups + answers) * sim_s,
                reward_s=2 * answers * reward_s,
                cpu_s=groups * (sim_s + put_s) + answers * grading_s + groups * put_s,
            )
        return results


class _Laps(dict[int, float]):
    """Size of the work -> seconds of one lap of a part of the worker method `generate`; computed when first asked for.

    `laps`: size -> number of laps. The simulation counts them here; `record` records their costs.
    """

    def __init__(self, costs: Costs, part: str) -> None:
        super().__init__()
        self._costs = costs
        self._name = _GENERATE + part
        self.laps: dict[int, int] = defaultdict(int)

    def __missing__(self, size: int) -> float:
        self[size] = self._costs.of(self._name, size).seconds
        # This lap is recorded already.
        self.laps[size] -= 1
        return self[size]

    def record(self) -> None:
        """Record the costs of all counted laps, so that the search knows which costs matter."""
        for size, laps in self.laps.items():
            self._costs.of(self._name, size, laps=laps)


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
    if site.plan.needs.ahead and site.plan.needs.lent:
        # Engines on lent accelerators join while the others generate.
        return False
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
