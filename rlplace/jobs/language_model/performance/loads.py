"""Lower bounds of the work of a language-model job's ranks between two synchronizations of the loop.

Lengths of prompts and answers are the lengths that a prediction draws. A component that has all samples at once packs
them as in a run, so its work is known. A component that gets samples bit by bit may pack them in any way; its bound is
the number of tokens times the least cost of a token in any micro-batch. The bound of an engine's steps is found in the
same way, by sequences in place of tokens.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.algo.packing import Division, SampleSizes
from rlplace.config.blocks.language_model import (
    FrozenConfig,
    LanguageModelJobConfig,
    RewardConfig,
)
from rlplace.config.blocks.training import TrainedConfig
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.loads import (
    Load,
    Loads,
    Mode,
    Options,
    Size,
    Sizes,
    Stages,
    least_of,
)
from rlplace.jobs.language_model.memory import read_again
from rlplace.jobs.language_model.performance.learners import pack
from rlplace.jobs.language_model.performance.lengths import (
    Lengths,
    sizes_of,
)
from rlplace.placement.flow import block_edges
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import FROZEN
from rlplace.workers.arguments import SCORERS, asked_of


class _Drawn(NamedTuple):
    """Token counts of an iteration. Each field is the minimum over the iterations from which bounds are computed.

    `answers`: generated tokens of all answers. `tokens`: tokens of all samples, including prompts. `together`: tokens
    of all samples if each group computes its prompt once. `longest`: tokens of the longest answer. `shortest`: tokens
    of the shortest sample. `shortest_answer`: tokens of the shortest answer.
    """

    answers: int
    tokens: int
    together: int
    longest: int
    shortest: int
    shortest_answer: int


class _Passes(NamedTuple):
    """The cost of one pass over all samples: the sum over all micro-batches of the pass.

    `ranks`: number of ranks that share the samples. `longest_s`: seconds of the most loaded rank. `cpu_s`: processor
    seconds of all ranks in sum.
    """

    ranks: int
    longest_s: float
    cpu_s: float

    @property
    def of_each(self) -> Cost:
        cpu_s = self.cpu_s / self.ranks
        return Cost(cpu_s, max(0.0, self.longest_s - cpu_s))

    def times(self, count: int) -> _Passes:
        return _Passes(self.ranks, self.longest_s * count, self.cpu_s * count)


class TextStages(Stages):
    """Lower bounds of the work in each stage of a language-model job.

    If engines on lent accelerators help with generation ahead of learning, the rollout stage has no bound.
    """

    _config: LanguageModelJobConfig

    def __init__(
        self,
        config: LanguageModelJobConfig,
        costs: Costs,
        together: Mapping[str, int],
        counted: range,
        *,
        lent: bool = False,
        undisturbed: int | None = None,
    ) -> None:
        """Prepare the bounds.

        `together`: component -> number of ranks that process the same samples (tensor and context parallelism).
        `counted`: the iterations that a prediction counts. `lent`: whether engines are on lent accelerators.
        `undisturbed`: the most ranks of all components together, if each has a processor of its own in every plan;
        None: ranks may wait for processors.
        """
        super().__init__(config, costs)
        self._together, self._again = together, read_again(config)
        ahead = config.algorithm.max_staleness
        self._ahead = ahead > 0
        self._counted = counted
        self._undisturbed = undisturbed
        # The iterations of which the generation lies within the counted ones, from begin to end
        self._generated = counted[ahead:]
        self.names = ("sync", "rollout", "infer", "learn")
        if ahead and lent:
            self.names = ("sync", "infer", "learn")
        elif ahead:
            self.ahead = "rollout"
            self.ahead_share = len(self._generated) / len(counted)
        self._algorithm = config.algorithm
        self._groups = config.algorithm.prompts or 1
        self._samples = self._groups * config.algorithm.samples_per_prompt
        self._asked = asked_of(config)
        self._placed = config.placed
        self.scoring = (
            () if ahead else tuple(c for c in self._placed if role_of(c) in FROZEN)
        )
        if any(role_of(component) in SCORERS for component in self._placed):
            self.names = (*self.names, "advantages")

    def depends(self, stage: str) -> tuple[str, ...]:
        roles = {
            "sync": ("actor",) if self._ahead else ("actor", "rollout"),
            "rollout": ("env", "rollout"),
            "infer": ("actor", "critic") if self._asked else ("critic",),
            "advantages": ("actor",),
            "learn": ("actor", "critic"),
        }
        return tuple(c for c in self._placed if c in roles[stage])

    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        if stage == "sync":
            if not self._ahead:
                return self._sync({c: sizes[c].ranks for c in ("actor", "rollout")})
            return {
                "actor": self._load(
                    "actor",
                    [self._of("actor.push_weights/rest")] * sizes["actor"].ranks,
                )
            }, 0.0
        if stage == "rollout" and stage not in self.names:
            return {}, 0.0
        loads = {c: self._one(stage, c, sizes[c]) for c in active}
        both = stage == "rollout" and {"env", "rollout"} <= {*active}
        return loads, self._tail(
            sizes["env"].ranks, sizes["rollout"].ranks
        ) if both else 0.0

    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        """Yield a single lower bound of the loads in a stage that is valid for any combination of `sizes`.

        `sizes`: component -> the sizes that it may have. Each number in the load of a component is the minimum over
        these sizes.
        """
        components = self.depends(stage)
        found: dict[str, Load] = {}
        for component in components:
            several = [self._alone(stage, component, size) for size in sizes[component]]
            ranks, calls, longest_s, cpu_s, least_s, meets = (
                min(values) for values in zip(*several, strict=True)
            )
            found[component] = Load(
                int(ranks), int(calls), longest_s, cpu_s, least_s, bool(meets)
            )
        chain_s = 0.0
        if stage == "rollout" and len(components) == 2:
            ranks = itertools.product(
                *({size.ranks for size in sizes[c]} for c in ("env", "rollout"))
            )
            chain_s = min(self._tail(*pair) for pair in ranks)
        yield Options(
            found,
            chain_s,
            {c: max(size.accelerators for size in sizes[c]) for c in components},
        )

    def _alone(self, stage: str, component: str, size: Size) -> Load:
        if stage == "sync":
            method = "push_weights" if component == "actor" else "pull_weights"
            return self._load(
                component, [self._of(f"{component}.{method}/rest")] * size.ranks
            )
        return self._one(stage, component, size)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  it lives as long as a search
    def _one(self, stage: str, component: str, size: Size) -> Load:
        ranks = size.ranks
        # The prompts of a round depend on timing, so nothing is known.
        if self._algorithm.short_rounds:
            return self._load(component, [Cost(0.0)] * ranks)
        match role_of(component), stage:
            case "env", _:
                return self._env(component, ranks)
            case "rollout", _:
                work = self._generate(ranks)
            case (("reference" | "teacher" | "reward"), _):
                return self._score(stage, component, ranks)
            case _, "infer":
                return self._infer(component, ranks)
            case _, "learn":
                return self._learn(component, ranks)
            case _, "advantages":  # on rank 0
                rest = self._of(f"{component}.compute_advantages/rest")
                return self._load(component, [rest, *[Cost(0.0)] * (ranks - 1)])
            case _:  # the actor starts to learn while answers are still generated
                work = Cost(0.0)
        return self._shared(component, work, ranks)

    def _shared(self, component: str, work: Cost, ranks: int) -> Load:
        """Return the load of a component if the work of its ranks is known on average only.

        `work`: the cost of one rank, as the mean over all ranks. The least loaded rank may have no work at all.
        """
        return self._load(component, [work] * ranks)._replace(least_s=0.0)

    def _joined(self, component: str, passes: _Passes, rest: Cost) -> Load:
        """Return the load of a component with ranks that wait for each other in each micro-batch.

        `passes`: the seconds of the micro-batches. `rest`: the cost of each rank beyond the micro-batches.
        """
        one = self._load(component, [rest] * passes.ranks)
        longest_s = one.longest_s + passes.longest_s
        cpu_s = one.cpu_s + passes.cpu_s
        return one._replace(longest_s=longest_s, cpu_s=cpu_s, least_s=0.0, meets=True)

    @functools.lru_cache(maxsize=64)  # noqa: B019  it lives as long as a search
    def _wholes(self, again: float | None) -> Sequence[SampleSizes]:
        """Return the token counts of the samples, for each iteration from which bounds are computed.

        Return an empty sequence for episodes of several turns. `again`: the cost of a shared prompt token for each
        sample that reads it, as a fraction of the cost of computing a token; None: prompts are not shared.
        """
        several = self._config.env.max_turns > 1
        if several:
            return ()
        return [self._sizes(self._lengths[at], again) for at in self._counted]

    def _sizes(
        self, samples: Sequence[tuple[int, int]], again: float | None
    ) -> SampleSizes:
        each = self._algorithm.samples_per_prompt
        groups = (
            samples[first : first + each] for first in range(0, len(samples), each)
        )
        return sizes_of(((g[0][0], [*map(sum, g)]) for g in groups), again=again)

    @functools.cached_property
    def _lengths(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Return counted iteration -> (prompt tokens, tokens of the first answer) of each sample.

        The samples of a group follow each other.
        """
        lengths = Lengths(self._config, self._costs)
        return {
            index: [
                (group.prompt, answer)
                for group, answers in lengths.groups(index)
                for answer in answers
            ]
            for index in self._counted
        }

    @functools.lru_cache(maxsize=64)  # noqa: B019  it lives as long as a search
    def _drawn(self, again: float | None = None) -> _Drawn:
        found = []
        for samples in self._lengths.values():
            answers = [answer for _, answer in samples]
            sizes = self._sizes(samples, again)
            # Cut at whole groups
            units = sizes.units(range(len(samples)), len(samples), sum(sizes.tokens))
            found.append(
                (
                    sum(answers),
                    sum(sizes.tokens),
                    sum(map(sizes.size, units)),
                    max(answers),
                    min(sizes.tokens),
                    min(answers),
                )
            )
        return _Drawn(*(min(values) for values in zip(*found, strict=True)))

    @functools.cached_property
    def _read(self) -> Cost:
        """Return the cost of the prefill of all prompts of an iteration, one prompt after the other."""
        first = self._lengths[self._counted.start]
        prompts = (prompt for prompt, _ in first[:: self._algorithm.samples_per_prompt])
        return Cost(0.0).plus(
            *(self._of("rollout.generate/prefill", prompt) for prompt in prompts)
        )

    def _env(self, component: str, ranks: int) -> Load:
        run = "env.run/"
        each = self._algorithm.samples_per_prompt
        sim, reward, put, wait = (
            self._of(run + part) for part in ("sim", "reward", "put", "wait")
        )
        edges = block_edges(self._groups, ranks)
        work = list[Cost]()
        for first, stop in itertools.pairwise(edges):
            groups = stop - first
            asked = sim.times(groups * (1 + each)).plus(
                put.times(2 * groups), self._of(run + "rest")
            )
            work.append(
                asked.plus(reward.times(2 * groups * each), wait.times(groups * each))
            )
        return self._load(component, work)

    @functools.lru_cache(maxsize=4096)  # noqa: B019  it lives as long as a search
    def _tail(self, envs: int, engines: int) -> float:
        """Return a lower bound of the seconds of the slowest env rank, including its wait for the answers.

        Each answer is assumed to arrive as early as possible: after the prefill of its prompt and one decoding step for
        each token. `envs`, `engines`: the numbers of ranks. Returns 0 for episodes of several turns and for short
        rounds, since their work depends on timing.
        """
        if self._config.env.max_turns > 1 or self._algorithm.short_rounds:
            return 0.0
        each = self._algorithm.samples_per_prompt
        found = list[float]()
        run = "env.run/"
        generate = "rollout.generate/"

        def of(name: str, size: float = 0.0) -> float:
            return self._of(name, size).seconds

        step_s = self._decode(self._at_once(engines)).seconds
        vllm = self._config.rollout.engine == "vllm"
        asked_s = (
            self._around("env").seconds
            + of(run + "sim")
            + of(run + "put")
            + of(generate + "wait")
        )
        judged_s = of(run + "wait") + of(run + "sim") + 2 * of(run + "reward")
        over_s = of(run + "rest")
        for index in self._generated:
            samples = self._lengths[index]
            longest_s = 0.0
            for first, stop in itertools.pairwise(block_edges(self._groups, envs)):
                ends = [
                    (step_s if vllm else of(generate + "prefill", prompt))
                    + (tokens - 1) * step_s
                    for prompt, tokens in samples[first * each : stop * each]
                ]
                left = (
                    (end + at * judged_s)
                    for at, end in enumerate(sorted(ends, reverse=True), 1)
                )
                longest_s = max(longest_s, max(left, default=0.0))
            found.append(longest_s)
        return asked_s + statistics.fmean(found) + over_s

    def _at_once(self, ranks: int) -> int:
        """Return the largest number of answers that one of `ranks` engines can generate at the same time."""
        # A group's samples are taken together.
        taken = -(-self._samples // ranks) - 1 + self._algorithm.samples_per_prompt
        return min(taken, self._config.rollout.step_sequences)

    def _decode(self, at_once: int) -> Cost:
        """Return the least cost of a decoding step over all batches of 1 to `at_once` answers.

        A vLLM step that processes prompts decodes answers as well. If such a step is cheaper, its cost is returned.
        """
        decode = self._least("rollout.generate/decode", 1, at_once)
        if self._config.rollout.engine != "vllm":
            return decode
        return least_of([decode, self._reading])

    def _generate(self, ranks: int) -> Cost:
        """Return the cost of one of `ranks` engines that generates an even share of the answers.

        At least one engine has this cost or a higher one.
        """
        generate = "rollout.generate/"
        at_once = self._at_once(ranks)
        decode = self._decode(at_once)
        token = self._least(generate + "decode", 1, at_once, each=True)
        drawn = self._drawn()
        # The first token of an answer comes with its prompt.
        tokens = drawn.answers - self._samples
        steps = drawn.longest - 1
        if self._config.rollout.engine == "vllm":
            # More of these steps decode no more: the least cost is that of none, or of as many as decode all
            reading = min(self._most_reading, tokens / at_once)
            left = token.times(tokens - reading * at_once)
            work = least_of(
                [token.times(tokens), left.plus(self._reading.times(reading))]
            )
        else:
            work = token.times(tokens).plus(self._read)
        work = work.times(1.0 / ranks)
        longest_s = max(
            work.seconds, steps * decode.seconds, self._taken_at_once(ranks)
        )
        return Cost(work.cpu_s, longest_s - work.cpu_s).plus(
            self._of(generate + "rest")
        )

    @functools.cached_property
    def _reading(self) -> Cost:
        """Return the least cost of a vLLM step that processes prompts, which decodes the answers in flight as well."""
        most = max(2, self._config.rollout.step_tokens)
        return self._least("rollout.generate/prefill", 1, most)

    @property
    def _most_reading(self) -> int:
        """The most vLLM steps that process prompts, of all engines together: each of them begins an answer."""
        return self._samples * self._config.env.max_turns

    def _taken_at_once(self, ranks: int) -> float:
        """Return the least mean seconds of `ranks` engines, if they take all requests before the first answer ends.

        An engine then has no more groups than it has room for at once, and decodes at least as often as the longest
        answer of its groups has tokens. Over all engines, the sum of these longest answers is least if groups with long
        answers are together. Return 0 if an engine may take further requests later.
        """
        each = self._algorithm.samples_per_prompt
        room = min(-(-self._samples // ranks), self._config.rollout.step_sequences)
        groups = -(-room // each)
        if groups * ranks < self._groups or not self._soon_taken(ranks):
            return 0.0
        at_once = self._at_once(ranks)
        name = "rollout.generate/decode"
        inner = (size for size in self._costs.sizes(name) if size < at_once)
        sizes = [0.0, 1e-6, 1.0, at_once, *inner]
        step_s, token_s = _line_below(
            sizes, [self._of(name, size).seconds for size in sizes]
        )
        steps = statistics.fmean(
            sum(longest - 1 for longest in self._longest[index][::groups])
            for index in self._generated
        )
        tokens = self._drawn().answers - self._samples
        seconds = step_s * steps + token_s * tokens
        if self._config.rollout.engine == "vllm":
            # Instead of a decoding step
            saved_s = step_s + token_s * at_once - self._reading.seconds
            seconds -= max(0.0, saved_s) * self._most_reading
        return max(0.0, seconds) / ranks

    def _soon_taken(self, ranks: int) -> bool:
        """Return whether `ranks` engines certainly begin, and env sends all requests, before the first answer may end.

        That is so if each rank has a processor of its own, and the driver can send and take all messages meanwhile. A
        rank has at most two calls at the same time.
        """
        if self._undisturbed is None or self._config.env.max_turns > 1:
            return False
        call_s = self._of(f"driver/{self._config.cluster.launcher}_call").seconds
        asked = self._of("env.run/sim").plus(self._of("env.run/put"))
        weights = [
            self._of(name)
            for name in ("actor.push_weights/rest", "rollout.pull_weights/rest")
        ]
        begun_s = 4 * self._undisturbed * call_s
        begun_s += sum(cost.seconds for cost in weights)
        begun_s += self._around("env").seconds + self._around("rollout").seconds
        begun_s += self._groups * asked.seconds
        step_s = self._decode(self._at_once(ranks)).seconds
        return begun_s < (self._drawn().shortest_answer - 1) * step_s

    @functools.cached_property
    def _longest(self) -> Mapping[int, Sequence[int]]:
        """Return counted iteration -> tokens of the longest answer of each group, the longest first."""
        each = self._algorithm.samples_per_prompt
        found = {}
        for index, samples in self._lengths.items():
            answers = [answer for _, answer in samples]
            groups = (
                answers[first : first + each] for first in range(0, len(answers), each)
            )
            found[index] = sorted(map(max, groups), reverse=True)
        return found

    def _passes(
        self,
        cost: str,
        budget: float,
        ranks: int,
        *,
        steps: int = 1,
        whole: bool = True,
    ) -> _Passes:
        """Return the seconds of one pass of all ranks over all samples.

        `cost`: name of the cost of a micro-batch. `budget`: most tokens of a micro-batch. `steps`: number of optimizer
        steps in the pass. `whole`: whether all samples are packed at once. If not, or if token counts are not known,
        the result is a lower bound: each optimizer step has at least one micro-batch, and the cost of a micro-batch is
        at least a linear function of its tokens that lies below all measured costs.
        """
        component = cost.rpartition("/")[0].rpartition(".")[0]
        again = self._again.get(component)
        if whole and (wholes := self._wholes(again)):
            each = self._together[component]
            found = [
                self._packed(cost, pack(sizes, ranks // each, int(budget)))
                for sizes in wholes
            ]
            longest_s, cpu_s = (
                statistics.fmean(values) for values in zip(*found, strict=True)
            )
            return _Passes(ranks, longest_s, cpu_s * each)
        drawn = self._drawn(again)
        most = max(budget, self._algorithm.longest, drawn.shortest + 1)
        tokens = drawn.together / ranks
        sizes = [
            0.0,
            1e-6,
            most,
            *(size for size in self._costs.sizes(cost) if size < most),
        ]
        costs = [self._of(cost, size) for size in sizes]
        number = max(steps, tokens / most)
        seconds = list[float]()
        for values in ([c.cpu_s for c in costs], [c.seconds for c in costs]):
            base, slope = _line_below(sizes, values)
            seconds.append(number * base + slope * tokens)
        return _Passes(ranks, max(seconds), seconds[0] * ranks)

    def _packed(self, cost: str, packed: Division) -> tuple[float, float]:
        """Return (seconds, processor seconds) of micro-batches in which the ranks wait for each other.

        `cost`: name of the cost of a micro-batch. `packed`: the micro-batches of all ranks. Seconds: the sum over the
        micro-batches, with the slowest rank of each. Processor seconds: the sum over the micro-batches of all ranks.
        """
        longest_s = 0.0
        cpu_s = 0.0
        for together in zip(*packed.tokens, strict=True):
            costs = [self._of(cost, size) for size in together]
            longest_s += max(c.seconds for c in costs)
            cpu_s += sum(c.cpu_s for c in costs)
        return longest_s, cpu_s

    def _score(self, stage: str, component: str, ranks: int) -> Load:
        block = self._config.block_of(component)
        assert isinstance(block, FrozenConfig), "it is not trained"
        cost = f"{component}.infer/infer"
        model = not isinstance(block, RewardConfig) or block.kind == "model"
        rest = self._of(f"{component}.infer/rest")
        if (
            model
            and stage == "infer"
            and (block.sharded or self._together[component] > 1 or ranks == 1)
        ):
            rest = rest.plus(self._of(f"{component}.infer/wait"))
            return self._joined(
                component, self._passes(cost, block.token_budget, ranks), rest
            )
        budget = block.token_budget if model else self._drawn().tokens
        passes = self._passes(cost, budget, ranks, whole=False)
        return self._shared(component, passes.of_each.plus(rest), ranks)

    def _infer(self, component: str, ranks: int) -> Load:
        count = (
            1
            if component == "critic"
            else ("reference" in self._asked) + bool(self._asked - {"reference"})
        )
        infer = f"{component}.infer/"
        if not count:
            return self._load(component, [Cost(0.0)] * ranks)
        passes = self._passes(
            self._forward(component, "score", ranks, "infer"),
            self._budget(component),
            ranks,
        )
        rest = (
            self._exchange(component, ranks)
            .times(count)
            .plus(self._of(infer + "infer_wait"), self._of(infer + "rest"))
        )
        return self._joined(component, passes.times(count), rest)

    def _learn(self, component: str, ranks: int) -> Load:
        algorithm = self._algorithm
        learn = f"{component}.learn/"
        # Optimizer steps of an epoch
        each = -(-self._samples // (algorithm.train_batch or self._samples))
        step = self._of(learn + "exchange", ranks).plus(self._of(learn + "step"))
        rest = step.times(algorithm.epochs * each).plus(
            self._of(learn + "wait"), self._of(learn + "rest", ranks)
        )
        passes = _Passes(ranks, 0.0, 0.0)
        if not algorithm.accumulate_early:
            cost = self._forward(component, "micro_batch", ranks, "learn", "accumulate")
            passes = self._passes(
                cost, self._budget(component), ranks, steps=each, whole=each == 1
            )
        return self._joined(component, passes.times(algorithm.epochs), rest)

    def _forward(self, component: str, part: str, ranks: int, *methods: str) -> str:
        """Return the name of the cost of a forward pass: `<component>.<method>/<part>`.

        `methods`: worker methods; the first one with a measured cost is chosen. With several ranks, the cost of a
        sharded forward pass is preferred to the cost of an unsharded one; with one rank, the other way round.
        """
        parts = (f"sharded_{part}", part) if ranks > 1 else (part, f"sharded_{part}")
        names = [f"{component}.{method}/{name}" for name in parts for method in methods]
        return next(
            (name for name in names if name in self._costs.profile.costs), names[0]
        )

    def _exchange(self, component: str, ranks: int) -> Cost:
        own = f"{component}.infer/exchange"
        known = (
            own if own in self._costs.profile.costs else f"{component}.learn/exchange"
        )
        return self._of(known, ranks)

    def _budget(self, component: str) -> int:
        block = self._config.block_of(component)
        assert isinstance(block, TrainedConfig), "it learns"
        return block.token_budget


def _line_below(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of a line that is below all `values` of sizes from 1 on, one value for each size."""
    base = min(values)
    slope = min(
        (value - base) / size
        for size, value in zip(sizes, values, strict=True)
        if size >= 1.0
    )
    return base, slope
