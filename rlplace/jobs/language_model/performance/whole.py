"""Generation of an iteration computed as a whole, for predictions with many samples.

::

    env ranks    requests, one after the other ──▶ the earliest engine with room takes one
    engines      prefill, then decode up to the next end of an answer ──▶ env ranks grade the answers in order

The simulated ranks of `ranks` exchange a message for each answer. Here the same steps are computed in one loop, without
messages. It is right where nothing else is in their way: each rank has a processor and accelerators to itself. A test
holds that both differ by 1 % at most.
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


class _Asked(NamedTuple):
    """A request of an env rank. `when`: seconds at which it is in the channel. `answers`: tokens of each answer."""

    when: float
    env: int
    group: Group
    answers: tuple[int, ...]


@dataclasses.dataclass
class _Engine:
    """An engine in the computation.

    `active`: heap of (step in which the answer ends, number of the request). `waiting`: the same of answers that no
    step has begun, with their tokens in place of the step.
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
class Answered:
    """What an engine has done in an iteration: when it ended, its seconds, and the number of generated tokens."""

    ended_s: float
    prefill_s: float
    decode_s: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Judged:
    """What an env rank has done in an iteration.

    `ended_s`: when it has its last answer. `groups`: when each group is complete, in order. `sim_s`, `reward_s`: its
    seconds in the environment and in rewards. `cpu_s`: processor seconds of all its work.
    """

    ended_s: float
    groups: Sequence[tuple[float, Group]]
    sim_s: float
    reward_s: float
    cpu_s: float


class WholeIteration:
    """Computes the generation of one iteration, as soon as all env and rollout ranks have begun it.

    `known`: happens when the results are there. `answered`: rollout rank -> result. `judged`: env rank -> result.
    """

    def __init__(self, site: TextSite, iteration: int) -> None:
        self._site = site
        self._iteration = iteration
        self._envs: dict[int, float] = {}
        self._engines: dict[int, float] = {}
        self.known = Event(site.world)
        self.answered: Mapping[int, Answered] = {}
        self.judged: Mapping[int, Judged] = {}

    def begin(self, component: str, rank: int) -> Event:
        """Note that a rank has begun. Return the event that the results are known."""
        began = self._envs if component == "env" else self._engines
        began[rank] = self._site.world.now
        ranks = self._site.job.ranks
        if len(self._envs) == ranks["env"] and len(self._engines) == ranks["rollout"]:
            asked = self._asked()
            ends = self._generate(asked)
            self.judged = {env: self._judge(env, ends[env]) for env in self._envs}
            self.known.set()
        return self.known

    def _of(self, name: str, size: float = 0.0) -> float:
        return self._site.costs.of(name, size).seconds

    def _asked(self) -> list[_Asked]:
        """Return all requests in the order in which they come into the channel."""
        texts = self._site.lengths.groups(self._iteration)
        sim_s = self._of(_RUN + "sim")
        put_s = self._of(_RUN + "put")
        found: list[_Asked] = []
        for env, began_s in self._envs.items():
            when_s = began_s
            for number in self._site.job.groups(env):
                when_s += sim_s
                group, answers = texts[number]
                found.append(_Asked(when_s, env, group, answers))
                when_s += put_s
        found.sort(key=lambda asked: asked.when)
        return found

    def _generate(
        self, asked: Sequence[_Asked]
    ) -> dict[int, list[tuple[float, int, Group]]]:
        """Compute what the engines do.

        Return env rank -> (when, count of answers, group) of the answers that came together.
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
        answered: dict[int, Answered] = {}
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
                answered[rank] = Answered(
                    now, engine.prefill_s, engine.decode_s, engine.tokens
                )
                continue
            room = job.rollout.step_sequences - len(engine.active)
            if engine.waiting and room > 0:
                # A step that reads prompts
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
                # Steps up to the next end, or until a request comes that there is room for
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
        self.answered = answered
        return ends

    def _judge(self, env: int, ends: list[tuple[float, int, Group]]) -> Judged:
        """Compute what an env rank does: it asks for its groups first, then grades answers in the order they come."""
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
        return Judged(
            ended_s=now,
            groups=whole,
            sim_s=(groups + answers) * sim_s,
            reward_s=2 * answers * reward_s,
            cpu_s=asking_s + graded_s + groups * put_s,
        )


class _Decoding:
    """Seconds of an engine's steps by the number of answers. Counts the steps, and records their costs at the end."""

    def __init__(self, site: TextSite) -> None:
        self._costs = site.costs
        self._most = site.job.config.rollout.step_tokens
        self._once: dict[int, float] = {}
        self._laps = Counter[int]()

    def step_s(self, answers: int, steps: int) -> float:
        """Return the seconds of `steps` steps; of one step if `steps` is 0, which is then not counted."""
        once = self._once.get(answers)
        if once is None:
            once = self._costs.of(_GENERATE + "decode", answers).seconds
            self._once[answers] = once
            # This step is recorded already.
            self._laps[answers] -= 1
        self._laps[answers] += steps
        return once * (steps or 1)

    def read_s(self, prompts: Sequence[int], *, whole: bool) -> float:
        """Return the seconds of reading prompts. `whole`: whether an engine step reads all of them together."""
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
    """Return whether generation may be computed as a whole: many samples, and nothing in the way of a rank.

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
