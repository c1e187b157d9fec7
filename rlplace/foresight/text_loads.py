"""What the ranks of a job with language models do between two moments at which its loop waits for all, at least.

Lengths are those that a prediction draws. A pass over samples takes as many tokens however it is packed: it costs at
least their number times the least that any micro-batch takes for a token. So do steps of an engine, for each sequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.config.schema import Config, FrozenConfig, RewardConfig, TrainedConfig
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.loads import Load, Loads, Mode, Options, Size, Sizes, Stages, added
from rlplace.foresight.text import Lengths, Request
from rlplace.placement.flow import block_edges
from rlplace.placement.language.spec import role_of
from rlplace.workers.roles.actor import asked_of

_INDEXES = (1, 2)  # iterations of a prediction that are counted, where nothing is generated ahead


class _Drawn(NamedTuple):
    """Of the iteration with least of each."""

    answers: int  # tokens of all
    tokens: int  # of all samples, prompts included
    longest: int  # answer
    shortest: int  # sample


class TextStages(Stages):
    """Of a job with language models. Of one that generates ahead, what learns."""

    def __init__(self, config: Config, costs: Costs) -> None:
        super().__init__(config, costs)
        ahead = config.algorithm.max_staleness > 0
        self.names = ("sync", "infer", "learn") if ahead else ("sync", "rollout", "infer", "learn")
        self._ahead, self._algorithm = ahead, config.algorithm
        self._groups = config.algorithm.prompts or 1
        self._samples = self._groups * config.algorithm.samples_per_prompt
        self._asked = asked_of(config)
        self._placed = config.placed

    def depends(self, stage: str) -> tuple[str, ...]:
        roles = {
            "sync": ("actor",) if self._ahead else ("actor", "rollout"),
            "rollout": ("env", "rollout"),
            "infer": ("actor", "critic") if self._asked else ("critic",),
            "learn": ("actor", "critic"),
        }
        return tuple(c for c in self._placed if c in roles[stage])

    def loads(self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes) -> tuple[Loads, float]:
        if stage == "sync":
            if not self._ahead:
                return self._sync({c: sizes[c].ranks for c in ("actor", "rollout")})
            return {"actor": self._load("actor", [self._of("actor.push_weights/rest")] * sizes["actor"].ranks)}, 0.0
        if self._ahead and stage == "rollout":
            return {}, 0.0
        return {c: self._one(stage, c, sizes[c]) for c in active}, 0.0

    def options(self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]) -> Iterator[Options]:
        """Give one: of each component the least that any of its sizes has."""
        components = self.depends(stage)
        found: dict[str, Load] = {}
        for component in components:
            several = [self._alone(stage, component, size) for size in sizes[component]]
            ranks, calls, *seconds = (min(values) for values in zip(*several, strict=True))
            found[component] = Load(int(ranks), int(calls), *seconds)
        yield Options(found, 0.0, {c: max(size.accelerators for size in sizes[c]) for c in components})

    def _alone(self, stage: str, component: str, size: Size) -> Load:
        if stage == "sync":
            method = "push_weights" if component == "actor" else "pull_weights"
            return self._load(component, [self._of(f"{component}.{method}/rest")] * size.ranks)
        return self._one(stage, component, size)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  it lives as long as a search
    def _one(self, stage: str, component: str, size: Size) -> Load:
        ranks = size.ranks
        match role_of(component), stage:
            case "env", _:
                return self._env(component, ranks)
            case "rollout", _:
                work = self._generate(ranks)
            case (("reference" | "reward"), _):
                work = self._score(component, ranks)
            case _, "infer":
                work = self._infer(component, ranks)
            case _, "learn":
                work = self._learn(component, ranks)
            case _:  # the actor begins to learn while others generate
                work = Cost(0.0)
        return self._shared(component, work, ranks)

    def _shared(self, component: str, work: Cost, ranks: int) -> Load:
        """Return a load of which each rank has as much on average: some of them may have nothing."""
        return self._load(component, [work] * ranks)._replace(least_s=0.0)

    @functools.cached_property
    def _drawn(self) -> _Drawn:
        lengths, each = Lengths(self._config, self._costs), self._algorithm.samples_per_prompt
        found = []
        for index in _INDEXES:
            prompts = [lengths.prompt(index, group) for group in range(self._groups)]
            answers = [
                [lengths.answer(Request(index, 0, group, 0, each, 0, prompts[group]), sample) for sample in range(each)]
                for group in range(self._groups)
            ]
            wholes = [prompts[g] + n for g, row in enumerate(answers) for n in row]
            flat = [n for row in answers for n in row]
            found.append((sum(flat), sum(wholes), max(flat), min(wholes)))
        return _Drawn(*(min(values) for values in zip(*found, strict=True)))

    @functools.cached_property
    def _read(self) -> Cost:
        """Return what it takes to read all prompts, each by itself."""
        lengths, read = Lengths(self._config, self._costs), Cost(0.0)
        for group in range(self._groups):
            read = added(read, self._of("rollout.generate/prefill", lengths.prompt(_INDEXES[0], group)))
        return read

    def _env(self, component: str, ranks: int) -> Load:
        run, each = "env.run/", self._algorithm.samples_per_prompt
        sim, reward, put, wait = (self._of(run + part) for part in ("sim", "reward", "put", "wait"))
        edges, work = block_edges(self._groups, ranks), list[Cost]()
        for first, stop in itertools.pairwise(edges):
            groups = stop - first
            asked = added(added(sim.times(groups * (1 + each)), put.times(2 * groups)), self._of(run + "rest"))
            work.append(added(asked, added(reward.times(2 * groups * each), wait.times(groups * each))))
        return self._load(component, work)

    def _generate(self, ranks: int) -> Cost:
        """Return the work of an engine that has its share; some engine has as much."""
        generate, block = "rollout.generate/", self._config.text_rollout
        taken = -(-self._samples // ranks) - 1 + self._algorithm.samples_per_prompt  # of a group all are taken at once
        at_once = min(taken, block.step_sequences)
        decode = self._least(generate + "decode", 1, at_once)
        token = self._least(generate + "decode", 1, at_once, each=True)
        drawn, read = self._drawn, Cost(0.0)
        steps = drawn.longest - 1
        if block.engine == "vllm":  # a step that reads prompts decodes as well
            reading = self._least(generate + "prefill", 1, max(2, block.step_tokens))
            decode, token = _less(decode, reading), _less(token, reading.times(1.0 / at_once))
        else:
            read = self._read.times(1.0 / ranks)
        decoded = token.times((drawn.answers - self._samples) / ranks)
        work = added(decoded, read)
        longest_s = max(work.cpu_s + work.blocked_s, steps * (decode.cpu_s + decode.blocked_s))
        return added(Cost(work.cpu_s, longest_s - work.cpu_s), self._of(generate + "rest"))

    def _pass(self, cost: str, budget: int, ranks: int, steps: int = 1) -> Cost:
        """Return a pass of one rank over its share of all samples, in so many optimizer steps.

        A micro-batch takes at least a line from its least cost on; each step has one, and none has more than `most`.
        """
        most, tokens = max(budget, self._algorithm.longest, self._drawn.shortest + 1), self._drawn.tokens / ranks
        ends = [size * off for size in self._costs.sizes(cost) for off in (1 - 1e-6, 1.0, 1 + 1e-6)]
        sizes = [0.0, 1e-6, most, *(size for size in ends if size < most)]
        costs, number, seconds = [self._of(cost, size) for size in sizes], max(steps, tokens / most), list[float]()
        for values in ([c.cpu_s for c in costs], [c.cpu_s + c.blocked_s for c in costs]):
            base = min(values)
            slope = min((value - base) / size for size, value in zip(sizes, values, strict=True) if size >= 1.0)
            seconds.append(number * base + slope * tokens)
        return Cost(seconds[0], max(0.0, seconds[1] - seconds[0]))

    def _score(self, component: str, ranks: int) -> Cost:
        block = self._config.block_of(component)
        assert isinstance(block, FrozenConfig), "it is not trained"
        model = not isinstance(block, RewardConfig) or block.kind == "model"
        work = self._pass(f"{component}.infer/infer", block.token_budget if model else self._drawn.tokens, ranks)
        return added(work, self._of(f"{component}.infer/rest"))

    def _infer(self, component: str, ranks: int) -> Cost:
        passes = 1 if component == "critic" else ("reference" in self._asked) + bool(self._asked - {"reference"})
        if not passes:
            return Cost(0.0)
        infer = f"{component}.infer/"
        once = added(self._pass(infer + "score", self._budget(component), ranks), self._exchange(component, ranks))
        return added(once.times(passes), added(self._of(infer + "infer_wait"), self._of(infer + "rest")))

    def _learn(self, component: str, ranks: int) -> Cost:
        algorithm, learn = self._algorithm, f"{component}.learn/"
        steps = algorithm.epochs * -(-self._samples // (algorithm.train_batch or self._samples))
        work = added(self._of(learn + "exchange", ranks), self._of(learn + "step")).times(steps)
        if not algorithm.accumulate_early:
            once = self._pass(learn + "micro_batch", self._budget(component), ranks, steps // algorithm.epochs)
            work = added(work, once.times(algorithm.epochs))
        return added(work, added(self._of(learn + "wait"), self._of(learn + "rest", ranks)))

    def _exchange(self, component: str, ranks: int) -> Cost:
        own = f"{component}.infer/exchange"
        known = own if own in self._costs.profile.costs else f"{component}.learn/exchange"
        return self._of(known, ranks)

    def _budget(self, component: str) -> int:
        block = self._config.block_of(component)
        assert isinstance(block, TrainedConfig), "it learns"
        return block.token_budget


def _less(one: Cost, other: Cost) -> Cost:
    """Return a cost that is above neither, of processors and in all."""
    cpu_s = min(one.cpu_s, other.cpu_s)
    return Cost(cpu_s, min(one.cpu_s + one.blocked_s, other.cpu_s + other.blocked_s) - cpu_s)
