"""Simulated ranks that generate in a language-model job: env and rollout.

::

    env ── requests ──▶ any rollout rank with room: reads the prompt, decodes ── completions ──▶ env ── samples ──▶

While no answer begins or ends, all steps of an engine cost the same: their seconds are spent as one sum.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rlplace.algo.packing import Division, SampleSizes
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.ranks import Body, Rank, Site
from rlplace.foresight.world import Barrier, Event, Sleep, Work
from rlplace.jobs.language_model.memory import read_again
from rlplace.jobs.language_model.performance.lengths import (
    Answer,
    Graded,
    Group,
    Lengths,
    Request,
)
from rlplace.jobs.language_model.performance.whole import (
    MANY,
    EnvResult,
    WholeIteration,
    computed_as_a_whole,
)
from rlplace.metrics import Metric, Metrics
from rlplace.placement.channels import asked_at_once
from rlplace.placement.language.slots import Slot
from rlplace.placement.plan import Plan
from rlplace.stopwatch import Stopwatch
from rlplace.workers.arguments import (
    COMPLETIONS,
    REQUESTS,
    SAMPLES,
    WEIGHTS,
    TextArguments,
    parts_of,
    samples_for,
)
from rlplace.workers.roles.tails import Tails

# Checks of an engine for new requests (later turns, non-waiting ends) while it decodes up to the next end of an answer
_LOOKS = 16
_END = object()  # marks the end of an iteration
_IN_TURN_S = 0.005  # rewards that take longer are computed by other processes


class JointPasses(NamedTuple):
    """Passes of all ranks of a component over their micro-batches. In each pass, all ranks wait for the slowest one.

    `seconds`: sum over the passes of the seconds of the slowest rank. `own_s`: seconds of each rank's own work; ranks
    that process the same samples count as one. `size`: tokens of the last micro-batch.
    """

    seconds: float
    own_s: tuple[float, ...]
    size: int


class TextSite(Site):
    """State that all simulated ranks of a language-model job share."""

    steady = ("sync",)

    def __init__(
        self, config: LanguageModelJobConfig, plan: Plan, costs: Costs, cores: int
    ) -> None:
        super().__init__(config, plan, costs, cores)
        placement = plan.placement
        ranks = {c: placement.world_size(c) for c in placement.components}
        self.job = TextArguments(
            config=config, ranks=ranks, read_again=read_again(config)
        )
        self.lengths = Lengths(config, costs)
        # Whether engines drop answers in flight at the end of an iteration
        self.drops = config.algorithm.short_rounds > 0
        # Groups of the iteration that no engine has started
        self.untaken = 0
        # Conversations that will request another turn
        self.open = 0
        self._given: dict[tuple[str, int], _Given] = {}
        self._whole: dict[int, WholeIteration] = {}
        self._joint: dict[tuple[str, str, int], tuple[Division, JointPasses]] = {}
        # Component -> whether each of its ranks has accelerators of its own
        self._own_devices: dict[str, bool] = {}
        self._packed: dict[
            tuple[object, int], tuple[SampleSizes, tuple[Division, ...]]
        ] = {}
        algorithm = config.algorithm
        # Whether there are so many samples that equal work of ranks is computed only once
        self.many = (algorithm.prompts or 1) * algorithm.samples_per_prompt >= MANY
        # Whether another component takes groups while others are still generated
        generating = {"env", "rollout"}
        early = {*plan.schedule.active["rollout"]} - generating
        self.taken_early = bool(early) or plan.needs.ahead > 0
        # Whether the actor alone takes them, and begins to learn when it has all groups of an iteration
        self.taken_together = (
            not early and not self.job.scorers and len(parts_of(self.job)) == 1
        )
        # Whether the generation of an iteration is computed as a whole
        self.whole = computed_as_a_whole(self, cores)
        # Between two of these stages, nothing is under way but samples from env to actor.
        apart = plan.schedule.stages == ("sync", "rollout", "learn")
        self.separable = self.whole and apart and not self.taken_early

    def before(self, stage: str, iteration: int, omitted: Collection[str]) -> None:
        if stage != "learn":
            return
        samples = self.channels[SAMPLES]
        if "learn" in omitted:
            while samples.get_nowait() is not None:
                pass
        elif "rollout" in omitted:
            samples.put_all([group for group, _ in self.lengths.groups(iteration)])

    def generation(self, iteration: int) -> WholeIteration:
        """Return the computation of an iteration's generation. All ranks of env and rollout get the same one."""
        if iteration not in self._whole:
            self._whole = {iteration: WholeIteration(self, iteration)}
        return self._whole[iteration]

    def joint(
        self,
        component: str,
        part: str,
        packed: Division,
        make: Callable[[Division, tuple[str, ...]], JointPasses],
        names: tuple[str, ...],
    ) -> JointPasses:
        """Return the passes of all ranks of a component over `packed`. `make` computes them for the first rank."""
        key = (component, part, id(packed))
        if key not in self._joint:
            # A reference to the packing is stored, so that no other packing gets the same id.
            self._joint[key] = packed, make(packed, names)
        return self._joint[key][1]

    def has_own_devices(self, component: str) -> bool:
        """Return whether each rank of a component has accelerators, and no other rank uses them."""
        if component not in self._own_devices:
            placement = self.plan.placement
            held = [
                number
                for other in placement.components
                for slot in placement.slots(other)
                for number in slot.accelerators
            ]
            used = Counter(held)
            own = placement.accelerators(component)
            alone = all(used[number] == 1 for number in own)
            self._own_devices[component] = alone and len(own) > 0
        return self._own_devices[component]

    def packed(
        self,
        name: object,
        sizes: SampleSizes,
        make: Callable[[], tuple[Division, ...]],
    ) -> tuple[Division, ...]:
        """Return the packings of `sizes`. `make` makes them for the first rank; all ranks that give `name` get them."""
        key = name, id(sizes)
        if key not in self._packed:
            # As in `joint`
            self._packed[key] = sizes, make()
        return self._packed[key][1]

    def given(self, component: str, number: int) -> _Given:
        """Return the holder of a value that rank 0 of a component scatters to all ranks of the component.

        `number`: how many scatters of the component came before. All ranks get the same holder for the same number.
        """
        key = (component, number)
        if key not in self._given:
            self._given[key] = _Given(self)
        return self._given[key]


class _Given:
    """Holds a value that rank 0 scatters to all ranks. `there`: happens when rank 0 has set `value`."""

    def __init__(self, site: Site) -> None:
        self.there = Event(site.world)
        self.value: object = None


class TextRank(Rank):
    """Base of all simulated ranks of a language-model job."""

    job: LanguageModelJobConfig
    site: TextSite

    def __init__(self, site: Site, slot: Slot) -> None:
        assert isinstance(site, TextSite), "its ranks draw lengths"
        super().__init__(site, slot)

    @property
    def ranks(self) -> int:
        return self.plan.placement.world_size(self.component)

    @property
    def together(self) -> int:
        """The number of ranks that process the same samples (tensor and context parallelism)."""
        return self.plan.placement.spec(self.component).parallel.ranks

    @property
    def barrier(self) -> Barrier:
        return self.site.barrier(self.component)

    def cost(self, size: float, *names: str, laps: float = 1.0) -> Cost:
        """Return the cost of doing a part of a worker method `laps` times, each time with work of this size.

        `names`: possible costs as `<method>/<part>`; the first one that was measured is used.
        """
        name = self.costs.first_known(self.component, names)
        return self.costs.of(name, size, laps=laps)

    def part(self, watch: Stopwatch, part: str, size: float, *methods: str) -> Body:
        """Spend the simulated seconds of `part` once, and record them on `watch` under this name.

        `size`: the size of the work. `methods`: worker methods; the first one with a measured cost of `part` is used.
        """
        yield from self.spend(
            self.cost(size, *(f"{method}/{part}" for method in methods))
        )
        watch.lap(part, size)


class TextEnvRank(TextRank):
    """Simulates the worker `TextEnvWorker`. A prompt that is asked again gets answers of the same lengths."""

    def __init__(self, site: Site, slot: Slot) -> None:
        super().__init__(site, slot)
        job = self.site.job
        self._tails = Tails(
            job.config.algorithm.short_rounds, job.prompts, job.groups(slot.rank)
        )

    def run(self, iteration: int) -> Body:
        prompts = self.site.job.prompts
        samples = self.job.algorithm.samples_per_prompt
        groups = [
            divmod(number, prompts) for number in self._tails.asked(iteration).values()
        ]
        readers = [SAMPLES, *map(samples_for, self.site.job.scorers)]
        if self.site.whole:
            return (yield from self._grade_whole(iteration, readers))
        return (
            yield from self._play(
                iteration, groups, samples, readers, self._tails.more(iteration)
            )
        )

    def evaluate(self, iteration: int) -> Body:
        runner = self.site.job.config.runner
        each = runner.eval_samples
        prompts = runner.usual_eval_prompts
        groups = [
            (iteration, group)
            for group in self.site.job.held_out(self.slot.rank, prompts)
        ]
        return (yield from self._play(iteration, groups, each, ()))

    def _play(
        self,
        iteration: int,
        groups: Sequence[tuple[int, int]],
        samples: int,
        readers: Sequence[str],
        more: int = 0,
    ) -> Body:
        """Simulate `Pass.through`: request answers, take answers as they come, and put complete groups into channels.

        `groups`: for each group, the iteration that owns its prompt, and the group's index in that iteration.
        `samples`: samples of each group. `readers`: channels that get complete groups. `more`: the rank stops when this
        number of groups is still incomplete. Returns the metrics.
        """
        watch = self.watch("sim", "reward", "wait", "put")
        lengths = self.site.lengths
        rank = self.slot.rank
        requests = self.site.channels[REQUESTS]
        left = deque(groups)
        whole = {group: list[int]() for group in groups}
        to_ask = deque[Request]()
        due = 0
        ended = 0
        self.site.untaken += len(whole)
        while len(whole) > more:
            if left and not to_ask:
                group = left.popleft()
                prompt = lengths.prompt(*group)
                to_ask.append(
                    Request(iteration, group[0], rank, group[1], 0, samples, 0, prompt)
                )
                self.site.open += sum(
                    lengths.turns(*group, sample) > 1 for sample in range(samples)
                )
                yield from self.part(watch, "sim", 0, "run")
            if to_ask and not (due and requests.full):
                yield from requests.put(to_ask[0])
                due += to_ask.popleft().samples
                yield from self.part(watch, "put", 0, "run")
                continue
            item = yield from self._take(watch)
            if item is _END:
                ended += 1
                continue
            # An answer of an earlier round, which did not wait for it
            if item.request.asked != iteration:
                continue
            if isinstance(item, Answer):
                due -= 1
                yield from self.part(watch, "sim", 0, "run")
                following = self._following(item)
                if following is not None:
                    to_ask.append(following)
                    yield from self.part(watch, "reward", 0, "run")
                    continue
                yield from self.part(watch, "reward", 0, "run")
                item = self._submit(item)
            if item is None:
                continue
            yield from self.part(watch, "reward", 0, "run")
            group = item.request.iteration, item.request.group
            whole[group].append(item.tokens)
            if len(whole[group]) == samples:
                put = Group(group, lengths.prompt(*group), tuple(whole.pop(group)))
                for channel in readers:
                    yield from self.site.channels[channel].put(put)
                yield from self.part(watch, "put", 0, "run")
        if more:
            self._tails.leave(
                iteration, [of * self.site.job.prompts + group for of, group in whole]
            )
        yield from self._end(watch, ended)
        return self._metrics(watch)

    def _grade_whole(self, iteration: int, readers: Sequence[str]) -> Body:
        """Do the same as `_play`, with the results of `WholeIteration`.

        `readers`: channels to which complete groups are sent.
        """
        watch = self.watch("sim", "reward", "wait", "put")
        generation = self.site.generation(iteration)
        yield generation.begin(self.component, self.slot.rank)
        judged = generation.env_results[self.slot.rank]
        if self._may_send_late:
            yield from self._send_together(judged, readers)
        elif self.site.taken_early:
            yield from self._send_in_time(judged, readers)
        else:
            # No rank takes a group before the stage has ended.
            worked_s = max(0.0, min(judged.cpu_s, judged.ended_s - self.world.now))
            yield Work(self._cores, self._process, worked_s)
            for channel in readers:
                groups = [group for _, group in judged.groups]
                self.site.channels[channel].put_all(groups)
        if judged.ended_s > self.world.now:
            yield Sleep(judged.ended_s - self.world.now)
        watch.lap("wait")
        yield from self._end(watch, 0)
        watch.seconds["wait"] -= judged.sim_s + judged.reward_s
        watch.seconds["sim"] += judged.sim_s
        watch.seconds["reward"] += judged.reward_s
        return self._metrics(watch)

    @property
    def _may_send_late(self) -> bool:
        """Whether it makes no difference if all groups come with the last one.

        That is so if no rank takes a group before, the items of channels are not counted, and the rank's work does not
        delay other ranks.
        """
        site = self.site
        alone = self._cores.owned_by(self._process)
        together = site.taken_early and site.taken_together
        return together and alone and not site.counts_items

    def _send_together(self, judged: EnvResult, readers: Sequence[str]) -> Body:
        """Put all groups into the channels `readers` at the time at which the last one is complete."""
        if not judged.groups:
            return
        last_s, _ = judged.groups[-1]
        if last_s > self.world.now:
            yield Sleep(last_s - self.world.now)
        for channel in readers:
            self.site.channels[channel].put_all([group for _, group in judged.groups])

    def _send_in_time(self, judged: EnvResult, readers: Sequence[str]) -> Body:
        """Put each group into the channels `readers` at the time at which it is complete."""
        each_s = judged.cpu_s / max(1, len(judged.groups))
        left_s = 0.0
        for when_s, group in judged.groups:
            # The work of the rank lies within the time up to its last answer
            left_s += each_s
            worked_s = max(0.0, min(left_s, when_s - self.world.now))
            left_s -= worked_s
            yield Work(self._cores, self._process, worked_s)
            if when_s > self.world.now:
                yield Sleep(when_s - self.world.now)
            for channel in readers:
                yield from self.site.channels[channel].put(group)

    def _take(self, watch: Stopwatch) -> Body:
        """Wait for the next item for this rank, and return it: an answer, a graded sample, or _END of an env rank.

        `watch`: records the seconds.
        """
        answer = yield from self.site.channels[COMPLETIONS].get(str(self.slot.rank))
        yield from self.part(watch, "wait", 0, "run")
        return answer

    def _following(self, answer: Answer) -> Request | None:
        """Return the request for the turn that follows an answer; None if the episode is over."""
        asked = answer.request
        sample = answer.sample
        lengths = self.site.lengths
        if asked.turn + 1 >= lengths.turns(asked.iteration, asked.group, sample):
            return None
        tokens = (
            asked.tokens
            + answer.tokens
            + lengths.reply(asked.iteration, asked.group, sample, asked.turn)
        )
        if tokens >= self.job.algorithm.longest:
            self.site.open -= 1
            return None
        return asked._replace(
            first=sample, samples=1, turn=asked.turn + 1, tokens=tokens
        )

    def _submit(self, answer: Answer) -> Graded | None:
        """Return the sample of an answer that ends an episode, with its reward.

        Return None if the reward takes long: a separate process computes the reward, and later puts the sample into the
        channel of this rank.
        """
        asked = answer.request
        graded = Graded(asked, asked.tokens + answer.tokens)
        seconds = self.site.lengths.reward_s(
            asked.iteration, asked.group, answer.sample
        )
        if seconds < _IN_TURN_S:
            return graded
        self.world.spawn(self._grade(graded, seconds))
        return None

    def _grade(self, graded: Graded, seconds: float) -> Body:
        yield Sleep(seconds)
        yield from self.site.channels[COMPLETIONS].put(graded, str(self.slot.rank))

    def _end(self, watch: Stopwatch, ended: int) -> Body:
        """Report to env rank 0 that this rank has all its answers.

        On rank 0: wait for the reports of all env ranks, then tell the engines that the iteration has ended. `watch`:
        records the seconds. `ended`: on rank 0, the number of reports that have arrived before.
        """
        yield from self.spend(self.cost(0, "run/rest"))
        if self.slot.rank:
            yield from self.site.channels[COMPLETIONS].put(_END, "0")
        else:
            while ended < self.ranks - 1:
                ended += (yield from self._take(watch)) is _END
            if self.site.drops:
                while self.site.channels[REQUESTS].get_nowait() is not None:
                    pass
                self.site.untaken = self.site.open = 0
            for _ in range(self.site.job.ranks["rollout"]):
                yield from self.site.channels[REQUESTS].put(_END)
        yield from self.part(watch, "put", 0, "run")

    def _metrics(self, watch: Stopwatch) -> Metrics:
        seconds = watch.seconds["sim"] + watch.seconds["reward"]
        return {**watch.metrics("env"), "env/sim_s": Metric(seconds, "max")}


class TextRolloutRank(TextRank):
    """Simulates the worker `TextRolloutWorker` and its engine."""

    def __init__(self, site: Site, slot: Slot) -> None:
        super().__init__(site, slot)
        # A heap of (step in which the answer ends, number, answer)
        self._active: list[tuple[int, int, Answer]] = []
        # Requests that no step has started
        self._waiting = deque[Answer]()
        self._steps = self._begun = 0
        # Newest loaded version of the weights
        self._held = -1
        algorithm = self.job.algorithm
        answers = (
            asked_at_once(self.site.job.prompts, algorithm.short_rounds)
            * algorithm.samples_per_prompt
        )
        self._share = math.ceil(answers / self.ranks)

    @property
    def in_flight(self) -> int:
        return len(self._active) + len(self._waiting)

    @property
    def _room(self) -> bool:
        return self.in_flight < min(self._share, self.job.rollout.step_sequences)

    @property
    def _may_begin(self) -> bool:
        return len(self._active) < self.job.rollout.step_sequences

    def pull_weights(self, version: int) -> Body:
        if version <= self._held:
            return dict[str, Metrics]()
        self._held = version
        return (yield from super().pull_weights(version))

    def generate(self, iteration: int) -> Body:
        watch = self.watch("prefill", "decode", "wait", "put")
        if self.site.whole:
            tokens = yield from self._answer_whole(iteration, watch)
        else:
            tokens = yield from self._answer_all(watch)
        yield from self.spend(self.cost(0, "generate/rest"))
        seconds = watch.seconds["prefill"] + watch.seconds["decode"]
        return {
            **watch.metrics("rollout"),
            "rollout/policy_s": Metric(seconds, "max"),
            "rollout/tokens": Metric(tokens, "sum"),
        }

    def _answer_whole(self, iteration: int, watch: Stopwatch) -> Body:
        """Do the same as `_answer_all`, with the results of `WholeIteration`. Return the number of tokens.

        `watch`: records the seconds.
        """
        generation = self.site.generation(iteration)
        yield generation.begin(self.component, self.slot.rank)
        answered = generation.engine_results[self.slot.rank]
        if answered.ended_s > self.world.now:
            yield Sleep(answered.ended_s - self.world.now)
        watch.lap("decode")
        # This lap includes the prefill steps
        watch.seconds["prefill"] += answered.prefill_s
        watch.seconds["decode"] = answered.decode_s
        yield from self._update(watch)
        item = yield from self.site.channels[REQUESTS].get()
        assert item is _END, "no request is sent"
        yield from self.part(watch, "wait", 0, "generate")
        return answered.tokens

    def _answer_all(self, watch: Stopwatch) -> Body:
        """Answer requests until the env ranks have ended the iteration. Return the number of generated tokens.

        `watch`: records the seconds.
        """
        tokens = 0
        asking = True
        while asking or self.in_flight:
            if asking:
                asking = yield from self._take(watch)
            if not self.in_flight:
                continue
            yield from self._update(watch)
            yield from (
                self._begin(watch)
                if self._waiting and self._may_begin
                else self._decode(watch, asking)
            )
            ended = []
            while self._active and self._active[0][0] <= self._steps:
                ended.append(heapq.heappop(self._active)[2])
            for answer in ended:
                yield from self.spend(
                    self.cost(len(ended), "generate/put", laps=1 / len(ended))
                )
                yield from self.site.channels[COMPLETIONS].put(
                    answer, str(answer.request.env)
                )
                tokens += answer.tokens
            if ended:
                watch.lap("put")
        return tokens

    def _take(self, watch: Stopwatch) -> Body:
        """Take requests until the engine is full or no request is left. If the engine is idle, wait for a request.

        Return whether further requests may come in this iteration. `watch`: records the seconds.
        """
        requests = self.site.channels[REQUESTS]
        while self._room:
            item = (
                requests.get_nowait() if self.in_flight else (yield from requests.get())
            )
            if item is None:
                break
            if not self.in_flight:
                yield from self.part(watch, "wait", 0, "generate")
            if item is _END:
                if self.site.drops:
                    self._active.clear()
                    self._waiting.clear()
                return False
            self._count(item)
            for sample in range(item.first, item.first + item.samples):
                self._waiting.append(
                    Answer(item, sample, self.site.lengths.answer(item, sample))
                )
        return True

    def _count(self, request: Request) -> None:
        """Update the counts `untaken` and `open` of the site: the request is taken by this rank."""
        self.site.untaken -= request.turn == 0
        turns = self.site.lengths.turns(request.iteration, request.group, request.first)
        self.site.open -= request.turn > 0 and request.turn + 1 == turns

    def _update(self, watch: Stopwatch) -> Body:
        """Simulate loading all weight versions that the actor has pushed during generation.

        `watch`: records the seconds.
        """
        while self._held >= 0 and self.site.push(WEIGHTS, self._held + 1)[1].happened:
            self._held += 1
            yield from self.spend(self.cost(0, "generate/update", "pull_weights/rest"))
            watch.lap("update")

    def _begin(self, watch: Stopwatch) -> Body:
        """Simulate an engine step that processes the prompts of waiting requests.

        A vLLM step also decodes the answers in flight; prompts with too many tokens for one step take several steps.
        `watch`: records the seconds.
        """
        room = self.job.rollout.step_sequences - len(self._active)
        read = 0
        mixed = self.job.rollout.engine == "vllm"
        if self._active and not mixed:
            yield from self.part(watch, "decode", len(self._active), "generate")
        self._steps += 1
        before: Request | None = None
        while self._waiting and room:
            answer = self._waiting.popleft()
            if answer.request is not before:
                before = answer.request
                read += before.tokens
                if not mixed:
                    yield from self.part(watch, "prefill", before.tokens, "generate")
            heapq.heappush(
                self._active, (self._steps + answer.tokens - 1, self._begun, answer)
            )
            self._begun = self._begun + 1
            room = room - 1
        if mixed:
            whole, rest = divmod(read, most := self.job.rollout.step_tokens)
            if whole:
                yield from self.spend(self.cost(most, "generate/prefill", laps=whole))
            if rest:
                yield from self.spend(self.cost(rest, "generate/prefill"))
            watch.lap("prefill", read)

    def _decode(self, watch: Stopwatch, asking: bool) -> Body:
        """Simulate decoding steps until the next answer ends.

        If the engine has room for a request that may come before, simulate fewer steps, down to 1. `watch`: records the
        seconds. `asking`: whether further requests may come in this iteration.
        """
        steps = self._active[0][0] - self._steps
        if asking and self._room and self.site.untaken:
            steps = 1
        elif asking and self._room and (self.site.open or self.site.drops):
            steps = max(1, steps // _LOOKS)
        yield from self.spend(
            self.cost(len(self._active), "generate/decode", laps=steps)
        )
        watch.lap("decode", len(self._active))
        self._steps += steps
