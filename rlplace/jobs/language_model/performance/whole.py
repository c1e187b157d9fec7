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
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlplace.foresight.profile import ACCELERATOR
from rlplace.foresight.world import Event
from rlplace.jobs.language_model.performance.lengths import Group

if TYPE_CHECKING:
    from rlplace.jobs.language_model.performance.ranks import TextSite

# From this number of samples on, generation is computed as a whole
MANY = 1024
_RUN = "env.run/"
_GENERATE = "rollout.generate/"


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
            asked = self._asked()
            ends = self._generate(asked)
            self.env_results = {env: self._grade(env, ends[env]) for env in self._envs}
            self.known.set()
        return self.known

    def _of(self, name: str, size: float = 0.0) -> float:
        return self._site.costs.of(name, size).seconds

    def _asked(self) -> list[_QueuedRequest]:
        """Return all requests in the order in which they arrive in the channel."""
        texts = self._site.lengths.groups(self._iteration)
        sim_s = self._of(_RUN + "sim")
        put_s = self._of(_RUN + "put")
        found: list[_QueuedRequest] = []
        for env, began_s in self._envs.items():
            when_s = began_s
            for number in self._site.job.groups(env):
                when_s += sim_s
                group, answers = texts[number]
                found.append(_QueuedRequest(when_s, env, group, answers))
                when_s += put_s
        found.sort(key=lambda asked: asked.when)
        return found

    def _generate(
        self, asked: Sequence[_QueuedRequest]
    ) -> dict[int, list[tuple[float, int, Group]]]:
        """Simulate the engines.

        Return env rank -> list of (time, count of answers, group). The answers of an entry end in the same engine step.
        """
        job = self._site.job.config
        limit = min(
            math.ceil(
                len(asked) * job.algorithm.samples_per_prompt / len(self._engines)
            ),
            job.rollout.step_sequences,
        )
        mixed = job.rollout.engine == "vllm"
        decoding = _Decoding(self._site)
        engines = {rank: _Engine() for rank in self._engines}
        ends: dict[int, list[tuple[float, int, Group]]] = {e: [] for e in self._envs}
        queue = [(began_s, rank) for rank, began_s in self._engines.items()]
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
                engine.waiting.extend((n, following) for n in request.answers)
                engine.tokens += sum(request.answers)
                following += 1
            if not engine.in_flight:
                results[rank] = EngineResult(
                    now, engine.prefill_s, engine.decode_s, engine.tokens
                )
                continue
            room = job.rollout.step_sequences - len(engine.active)
            if engine.waiting and room > 0:
                # A prefill step
                if not mixed and engine.active:
                    seconds = decoding.step_s(len(engine.active), 1)
                    engine.decode_s += seconds
                    now += seconds
                engine.steps += 1
                read: list[int] = []
                before = -1
                for _ in range(min(room, len(engine.waiting))):
                    tokens, number = engine.waiting.popleft()
                    if number != before:
                        read.append(asked[number].group.prompt)
                        before = number
                    heapq.heappush(engine.active, (engine.steps + tokens - 1, number))
                seconds = decoding.read_s(read, whole=mixed)
                engine.prefill_s += seconds
                now += seconds
            else:
                # Decoding steps until the next answer ends, or until a request arrives and there is room for it
                steps = engine.active[0][0] - engine.steps
                once_s = decoding.step_s(len(engine.active), 0)
                if following < len(asked) and engine.in_flight < limit and once_s:
                    until = math.ceil((asked[following].when - now) / once_s)
                    steps = max(1, min(steps, until))
                seconds = decoding.step_s(len(engine.active), steps)
                engine.decode_s += seconds
                now += seconds
                engine.steps += steps
            over = Counter[int]()
            while engine.active and engine.active[0][0] <= engine.steps:
                over[heapq.heappop(engine.active)[1]] += 1
            if over:
                now += self._of(_GENERATE + "put", over.total())
            for number, count in over.items():
                group = asked[number].group
                ends[asked[number].env].append((now, count, group))
            heapq.heappush(queue, (now, rank))
        decoding.record()
        self.engine_results = results
        return ends

    def _grade(self, env: int, ends: list[tuple[float, int, Group]]) -> EnvResult:
        """Simulate an env rank: it sends all its requests first, then grades answers in the order of their arrival."""
        sim_s, reward_s, put_s, wait_s = (
            self._of(_RUN + part) for part in ("sim", "reward", "put", "wait")
        )
        each = self._site.job.config.algorithm.samples_per_prompt
        groups = len(self._site.job.groups(env))
        asking_s = groups * (sim_s + put_s)
        now = self._envs[env] + asking_s
        left = Counter[tuple[int, int]]()
        whole: list[tuple[float, Group]] = []
        for when_s, count, group in sorted(ends, key=lambda end: end[0]):
            now = max(now, when_s) + count * (wait_s + sim_s + 2 * reward_s)
            left[group.number] += count
            if left[group.number] == each:
                whole.append((now, group))
                now += put_s
        answers = groups * each
        graded_s = answers * (wait_s + sim_s + 2 * reward_s)
        return EnvResult(
            ended_s=now,
            groups=whole,
            sim_s=(groups + answers) * sim_s,
            reward_s=2 * answers * reward_s,
            cpu_s=asking_s + graded_s + groups * put_s,
        )


class _Decoding:
    """Gives the seconds of engine steps by the number of answers. Counts the steps to record their costs at the end."""

    def __init__(self, site: TextSite) -> None:
        self._costs = site.costs
        self._most = site.job.config.rollout.step_tokens
        self._once: dict[int, float] = {}
        self._laps = Counter[int]()

    def step_s(self, answers: int, steps: int) -> float:
        """Return the seconds of `steps` steps, and count them; if `steps` is 0, the seconds of one step, uncounted."""
        once = self._once.get(answers)
        if once is None:
            once = self._costs.of(_GENERATE + "decode", answers).seconds
            self._once[answers] = once
            # This step is recorded already.
            self._laps[answers] -= 1
        self._laps[answers] += steps
        return once * (steps or 1)

    def read_s(self, prompts: Sequence[int], *, whole: bool) -> float:
        """Return the seconds of the prefill of prompts. `whole`: whether one engine step processes all of them."""
        name = _GENERATE + "prefill"
        if not whole:
            return sum(self._costs.of(name, n).seconds for n in prompts)
        full, rest = divmod(sum(prompts), self._most)
        seconds = 0.0
        if full:
            seconds += self._costs.of(name, self._most, laps=full).seconds
        if rest:
            seconds += self._costs.of(name, rest).seconds
        return seconds

    def record(self) -> None:
        """Record the costs of all counted steps, so that the search knows which costs matter."""
        for answers, laps in self._laps.items():
            self._costs.of(_GENERATE + "decode", answers, laps=laps)


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
