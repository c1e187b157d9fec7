"""Simulated ranks that score and learn in a language-model job: actor, critic and scorers.

Rank 0 takes samples for all ranks of its component. The ranks pack the samples by their tokens, as real ranks do, and
wait for each other in every micro-batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from rlplace.algo import packing
from rlplace.algo.packing import Division, SampleSizes, StepSamples
from rlplace.config.blocks.language_model import FrozenConfig, RewardConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.ranks import Body
from rlplace.foresight.world import Sleep
from rlplace.jobs.language_model.performance.lengths import Group, sizes_of
from rlplace.jobs.language_model.performance.ranks import JointPasses, TextRank
from rlplace.metrics import Metrics
from rlplace.placement.flow import block_edges
from rlplace.stopwatch import Stopwatch
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    RETURNS,
    SAMPLES,
    asked_of,
    parts_of,
    samples_for,
    scores_of,
)

_FIRST_PAUSE_S = 0.001
# Longest pause between two looks, as in `workers.training.ranks`
_LONGEST_PAUSE_S = 0.02


# The cost of a scorer's pass over a micro-batch
_SCORED = ("infer/infer",)


@functools.lru_cache(maxsize=16)
def _all_samples(sizes: SampleSizes, budget: int) -> StepSamples:
    """Return an optimizer step with all samples. `budget`: the most tokens of a micro-batch."""
    return StepSamples(sizes, budget)


@functools.lru_cache(maxsize=64)
def pack(sizes: SampleSizes, ranks: int, budget: int) -> Division:
    """Divide samples over `ranks` ranks and into micro-batches of at most `budget` tokens. Results are cached.

    `sizes`: the token counts of the samples.
    """
    return _all_samples(sizes, budget).divided(ranks)


@functools.lru_cache(maxsize=64)
def _pack_steps(
    sizes: SampleSizes,
    epochs: int,
    train_batch: int | None,
    seed: str,
    ranks: int,
    budget: int,
) -> tuple[Division, ...]:
    steps = _steps(sizes, epochs, train_batch, seed, budget)
    return tuple(step.divided(ranks) for step in steps)


@functools.lru_cache(maxsize=16)
def _steps(
    sizes: SampleSizes, epochs: int, train_batch: int | None, seed: str, budget: int
) -> tuple[StepSamples, ...]:
    """Return the optimizer steps of an iteration, as `packing.pack_steps` has them."""
    if train_batch is None or train_batch >= len(sizes.tokens):
        return (_all_samples(sizes, budget),) * epochs
    found = []
    for epoch in range(epochs):
        for picks in packing.optimizer_steps(sizes, train_batch, f"{seed} {epoch}"):
            found.append(StepSamples(sizes, budget, picks))
    return tuple(found)


def seen_after(waited_s: float) -> float:
    """Return the seconds after which a rank that polls sees a value that is there after `waited_s` seconds.

    The first pause between two looks is 1 ms. Each further pause is twice as long as the pause before, up to 20 ms.
    """
    looked_s = 0.0
    pause_s = _FIRST_PAUSE_S
    while looked_s < waited_s and pause_s < _LONGEST_PAUSE_S:
        looked_s += pause_s
        pause_s *= 2
    if looked_s < waited_s:
        pauses = math.ceil((waited_s - looked_s) / _LONGEST_PAUSE_S)
        looked_s += pauses * _LONGEST_PAUSE_S
    return looked_s


class JoinedRank(TextRank):
    """Base of simulated ranks that wait for each other in collective operations."""

    _scattered = 0  # number of values that rank 0 has scattered

    def scatter(self, value: object = None) -> Body:
        """Simulate a scatter: wait until all ranks have the value of rank 0, and return the value.

        `value`: the value of rank 0; ignored on other ranks.
        """
        given = self.site.given(self.component, self._scattered)
        self._scattered += 1
        if self.slot.rank == 0:
            given.value = value
            given.there.set()
        elif not given.there.happened:
            since = self.world.now
            yield given.there
            waited_s = self.world.now - since
            yield Sleep(seen_after(waited_s) - waited_s)
        yield from self.barrier.meet()
        return given.value

    def sizes_of(self, groups: Sequence[Group]) -> SampleSizes:
        """Return the token counts of the groups' samples, in the order of the groups' numbers."""
        again = self.site.job.read_again.get(self.component)
        iterations = {group.number[0] for group in groups}
        every = len(groups) == self.site.job.prompts and len(iterations) == 1
        if every and self.site.whole:
            return self.site.lengths.sizes(iterations.pop(), again)
        ordered = sorted(groups)
        return sizes_of(((g.prompt, g.tokens) for g in ordered), again=again)

    def score(
        self, method: str, packed: Division, sizes: SampleSizes, watch: Stopwatch
    ) -> Body:
        """Simulate scoring on this rank: a forward pass for each micro-batch, then an exchange with all ranks.

        `method`: the worker method whose measured costs are used. `packed`: the micro-batches of all ranks. `sizes`:
        the token counts of the samples. `watch`: records the seconds.
        """
        yield from self.passes(watch, "score", packed, sizes, method, "infer")
        yield from self.exchange(method, watch)

    def passes(
        self,
        watch: Stopwatch,
        part: str,
        packed: Division,
        sizes: SampleSizes,
        *methods: str,
    ) -> Body:
        """Spend the simulated seconds of a pass over each micro-batch of this rank. All ranks wait for each other.

        `watch`, `part`, `methods`: as in `forward`. `packed`: the micro-batches of all ranks. `sizes`: the token counts
        of the samples.
        """
        names = self.names_of(part, *methods)
        if not self.alone(names):
            for picks in packed.packing.ranks[self.slot.rank // self.together]:
                yield from self.forward(watch, part, sizes.size(picks), *methods)
            return
        joint = self.site.joint(self.component, part, packed, self._joint, names)
        yield from self.joined(joint, self.slot.rank // self.together)
        watch.lap(part, joint.size)
        yield from self.barrier.meet()

    def alone(self, names: tuple[str, ...]) -> bool:
        """Return whether passes over micro-batches may be computed as a whole, because no other work is in their way.

        True if there are many samples, and accelerators of this rank's own do the passes. `names`: as for `cost`.
        """
        if not (self.site.many and self.slot.accelerators):
            return False
        return self.cost(0.0, *names, laps=0.0).on_accelerator

    def joined(self, joint: JointPasses, share: int) -> Body:
        """Spend the seconds of all passes of `joint`. `share`: index of this rank's share of the samples."""
        if self.site.has_own_devices(self.component):
            # Nothing delays its own work, which ends before that of the slowest rank.
            yield Sleep(joint.seconds)
            return
        own_s = joint.own_s[share]
        yield from self.spend(Cost(own_s, 0.0, True))
        if joint.seconds > own_s:
            yield Sleep(joint.seconds - own_s)

    def _joint(self, packed: Division, names: tuple[str, ...]) -> JointPasses:
        """Compute the passes of all ranks over their micro-batches, in which they wait for each other.

        `packed`: the micro-batches of all ranks. `names`: as for `cost`.
        """
        name = self.costs.first_known(self.component, names)
        key = "passes", name, packed.tokens
        return self.costs.once(key, lambda costs: _joint_passes(costs, name, packed))

    def names_of(self, part: str, *methods: str) -> tuple[str, ...]:
        """Return the possible names of the cost of a pass: sharded first if there are several ranks."""
        parts = (
            (f"sharded_{part}", part) if self.ranks > 1 else (part, f"sharded_{part}")
        )
        return tuple(f"{method}/{name}" for name in parts for method in methods)

    def forward(self, watch: Stopwatch, part: str, size: float, *methods: str) -> Body:
        """Spend the simulated seconds of one forward pass, then wait until all ranks have done theirs.

        `watch`: records the seconds under the name `part`. `size`: tokens of the micro-batch. `methods`: worker
        methods; the first one with a measured cost of `part` is used.
        """
        yield from self.spend(self.cost(size, *self.names_of(part, *methods)))
        watch.lap(part, size)
        yield from self.barrier.meet()

    def exchange(self, method: str, watch: Stopwatch) -> Body:
        yield from self.part(watch, "exchange", self.ranks, method, "learn")
        yield from self.barrier.meet()


def _joint_passes(costs: Costs, name: str, packed: Division) -> JointPasses:
    """Return the passes of all ranks over `packed`. `name`: the cost of a micro-batch, by its tokens."""
    own_s = [0.0] * len(packed.tokens)
    seconds = 0.0
    for together in zip(*packed.tokens, strict=True):
        each_s = [costs.of(name, size).seconds for size in together]
        own_s = [before + now for before, now in zip(own_s, each_s, strict=True)]
        seconds += max(each_s)
    last = packed.tokens[-1]
    return JointPasses(seconds, tuple(own_s), last[-1] if last else 0)


class TrainedRank(JoinedRank):
    """Base of simulated ranks of components that learn."""

    @property
    def budget(self) -> int:
        block = self.job.block_of(self.component)
        assert isinstance(block, TrainedConfig), "it learns"
        return block.token_budget

    def pack(self, sizes: SampleSizes) -> Division:
        """Return the micro-batches of all ranks for one forward pass over all samples."""

        def make() -> tuple[Division, ...]:
            return (pack(sizes, self.ranks // self.together, self.budget),)

        return self.site.packed(self.component, sizes, make)[0]

    def steps(self, sizes: SampleSizes, iteration: int) -> tuple[Division, ...]:
        """Return the micro-batches of all ranks for each optimizer step of an iteration."""
        algorithm = self.job.algorithm
        seed = f"{self.job.runner.seed} {iteration}"

        def make() -> tuple[Division, ...]:
            return _pack_steps(
                sizes,
                algorithm.epochs,
                algorithm.train_batch,
                seed,
                self.ranks // self.together,
                self.budget,
            )

        return self.site.packed((self.component, iteration), sizes, make)

    def differentiate(
        self, method: str, packed: Division, sizes: SampleSizes, watch: Stopwatch
    ) -> Body:
        yield from self.passes(
            watch, "micro_batch", packed, sizes, method, "learn", "accumulate"
        )

    def update(
        self, packings: Sequence[Division], sizes: SampleSizes, watch: Stopwatch
    ) -> Body:
        for packed in packings:
            yield from self.differentiate("learn", packed, sizes, watch)
            yield from self.step(watch)

    def step(self, watch: Stopwatch) -> Body:
        yield from self.exchange("learn", watch)
        yield from self.part(watch, "step", 0, "learn")


class LmActorRank(TrainedRank):
    """Simulates the worker `LmActor`.

    On rank 0, `_groups` has the groups that were taken in this iteration, and `_experience` the token counts of the
    samples for which advantages are computed. None: there are none yet.
    """

    _groups: list[Group] | None = None
    _experience: SampleSizes | None = None

    def infer(self, iteration: int, version: int) -> Body:
        asked = asked_of(self.job)
        if not asked:
            return dict[str, Metrics]()
        watch, inner = self.watch("infer_wait", "infer"), self.watch()
        sizes = (
            self.sizes_of((yield from self._take(None)))
            if self.slot.rank == 0
            else None
        )
        sizes = yield from self.scatter(sizes)
        yield from self.part(watch, "infer_wait", 0, "infer")
        for _ in range(("reference" in asked) + bool(asked - {"reference"})):
            yield from self.score("infer", self.pack(sizes), sizes, inner)
        watch.lap("infer")
        yield from self.lap("infer", "rest")
        return watch.metrics("actor")

    def compute_advantages(self, iteration: int) -> Body:
        if self.slot.rank == 0:
            self._experience = yield from self._gather(None)
            yield from self.lap("compute_advantages", "rest")
        return dict[str, Metrics]()

    def accumulate(self, iteration: int, version: int) -> Body:
        watch, inner = self.watch("accumulate_wait", "accumulate"), self.watch()
        arriving = self.site.job.prompts
        self._groups = []
        held = 0
        while True:
            wave: SampleSizes | None = None
            while self.slot.rank == 0 and wave is None and arriving:
                group = yield from self.site.channels[SAMPLES].get()
                arriving = arriving - 1
                size = self.sizes_of([group]).size(range(len(group.tokens)))
                if self._groups and held + size > self.budget * (
                    self.ranks // self.together
                ):
                    wave = self.sizes_of(self._groups)
                    self._groups = []
                    held = 0
                self._groups.append(group)
                held += size
            wave = yield from self.scatter(wave)
            yield from self.spend(
                self.cost(0, "accumulate/accumulate_wait", "learn/wait")
            )
            watch.lap("accumulate_wait")
            if wave is None:
                return watch.metrics("actor")
            yield from self.differentiate("accumulate", self.pack(wave), wave, inner)
            watch.lap("accumulate")

    def learn(self, iteration: int, version: int) -> Body:
        watch, inner = self.watch("wait", "learn"), self.watch()
        algorithm = self.job.algorithm
        for part in parts_of(self.site.job):
            sizes: SampleSizes | None = None
            if self.slot.rank == 0:
                sizes = self._experience or (yield from self._gather(part))
                self._groups = self._experience = None
            sizes = yield from self.scatter(sizes)
            yield from self.part(watch, "wait", 0, "learn")
            assert sizes is not None, "rank 0 gives some"
            if algorithm.accumulate_early:
                yield from self.differentiate("learn", self.pack(sizes), sizes, inner)
                yield from self.step(inner)
            else:
                packings = self.steps(sizes, iteration)
                if (
                    algorithm.tis_cap is not None
                    and len(packings) > 1
                    and "old" not in asked_of(self.job)
                ):
                    for packed in packings[: len(packings) // algorithm.epochs]:
                        yield from self.score("learn", packed, sizes, inner)
                yield from self.update(packings, sizes, inner)
            watch.lap("learn")
        yield from self.lap("learn", "rest", self.ranks)
        return watch.metrics("actor")

    def refresh(self, iteration: int, version: int) -> Body:
        if self.site.job.refreshes(iteration):
            yield from self.lap("refresh", "rest")
            self.site.push(REFERENCE_WEIGHTS, version)[1].set()
        return dict[str, Metrics]()

    def _take(self, part: int | None) -> Body:
        """Take groups from the channel `samples` and return them.

        If some groups of this iteration were taken before, return these groups and take no more. `part`: number of
        groups to take; None: all groups of the iteration.
        """
        if self._groups is None:
            due = part or self.site.job.prompts
            self._groups = self.site.channels[SAMPLES].take_all(due)
            while len(self._groups) < due:
                self._groups.append((yield from self.site.channels[SAMPLES].get()))
        return self._groups

    def _gather(self, part: int | None) -> Body:
        """Take groups and all scores of their samples, then put the returns into the critic's channel.

        `part`: number of groups to take; None: all groups of the iteration. Returns the token counts of the samples.
        """
        sizes = self.sizes_of((yield from self._take(part)))
        for scorer in self.site.job.scorers:
            scored = 0
            while scored < len(sizes.tokens):
                scored += yield from self.site.channels[scores_of(scorer)].get()
        if "critic" in self.site.job.ranks:
            for _ in range(self.site.job.prompts):
                yield from self.site.channels[RETURNS].put(None)
        return sizes


class CriticRank(TrainedRank):
    """Simulates the worker `Critic`."""

    _inferred = SampleSizes(())  # sizes of all samples

    def infer(self, iteration: int, version: int) -> Body:
        watch, inner = self.watch("infer_wait", "infer"), self.watch()
        groups: list[Group] = []
        while self.slot.rank == 0 and len(groups) < self.site.job.prompts:
            groups.append((yield from self.site.channels[samples_for("critic")].get()))
        self._inferred = yield from self.scatter(self.sizes_of(groups))
        yield from self.part(watch, "infer_wait", 0, "infer")
        yield from self.score("infer", self.pack(self._inferred), self._inferred, inner)
        watch.lap("infer")
        yield from self.lap("infer", "rest")
        for group in groups:
            yield from self.site.channels[scores_of("critic")].put(len(group.tokens))
        return watch.metrics("critic")

    def learn(self, iteration: int, version: int) -> Body:
        watch, inner = self.watch("wait", "learn"), self.watch()
        for _ in range(self.site.job.prompts if self.slot.rank == 0 else 0):
            yield from self.site.channels[RETURNS].get()
        yield from self.scatter()
        yield from self.part(watch, "wait", 0, "learn")
        yield from self.update(
            self.steps(self._inferred, iteration), self._inferred, inner
        )
        watch.lap("learn")
        yield from self.lap("learn", "rest", self.ranks)
        return watch.metrics("critic")


class ScorerRank(JoinedRank):
    """Simulates the worker of a reference, a teacher or a reward, which is a model, a function or an endpoint."""

    def infer(self, iteration: int, version: int) -> Body:
        watch = self.watch("infer", "wait")
        block = self.job.block_of(self.component)
        assert isinstance(block, FrozenConfig), "it is not trained"
        model = not isinstance(block, RewardConfig) or block.kind == "model"
        sharded = model and (block.sharded or self.together > 1) and self.ranks > 1
        first, stop = block_edges(self.site.job.prompts, self.ranks)[self.slot.rank :][
            :2
        ]
        due = self.site.job.prompts if sharded else stop - first
        share = self.slot.rank // self.together if sharded else 0
        while due:
            packed: Division | None = None
            if not sharded or self.slot.rank == 0:
                taken = yield from self._take(due)
                yield from self.part(watch, "wait", 0, "infer")
                due = due - len(taken)
                sizes = self.sizes_of(taken)
                budget = block.token_budget if model else sum(sizes.tokens)
                packed = pack(
                    sizes, self.ranks // self.together if sharded else 1, budget
                )
            if sharded:
                due, packed = yield from self.scatter((due, packed))
            assert packed is not None, "rank 0 gives micro-batches to all"
            if model:
                yield from self.part(watch, "wait", 0, "infer")
            score = self._score_whole if self.alone(_SCORED) else self._score
            yield from score(packed, share, watch, sharded=sharded)
        yield from self.lap("infer", "rest")
        return watch.metrics(self.component)

    def refresh(self, iteration: int, version: int) -> Body:
        if self.site.job.refreshes(iteration):
            yield self.site.push(REFERENCE_WEIGHTS, version)[1]
            yield from self.lap("refresh", "rest")
        return dict[str, Metrics]()

    def _score(
        self, packed: Division, share: int, watch: Stopwatch, *, sharded: bool
    ) -> Body:
        """Score micro-batches, and send the scores of each.

        `packed`: the micro-batches of all ranks that score together; `share`: which of them are this rank's. `watch`:
        records the seconds. `sharded`: whether all ranks wait for each other in each micro-batch.
        """
        batches = zip(packed.counts(share), packed.tokens[share], strict=True)
        for samples, size in batches:
            yield from self.part(watch, "infer", size, "infer")
            if sharded:
                yield from self.barrier.meet()
            if samples and self._sends:
                yield from self.site.channels[scores_of(self.component)].put(samples)
                yield from self.part(watch, "wait", 0, "infer")

    def _score_whole(
        self, packed: Division, share: int, watch: Stopwatch, *, sharded: bool
    ) -> Body:
        """Do the same as `_score`, with the passes of all micro-batches as one sum.

        The actor computes nothing before it has all scores, so all are sent with the last ones.
        """
        if sharded:
            joint = self.site.joint(
                self.component, "infer", packed, self._joint, _SCORED
            )
        else:
            joint = self._joint(packed, _SCORED)
        yield from self.joined(joint, share)
        watch.lap("infer", joint.size)
        scored = [samples for samples in packed.counts(share) if samples]
        if scored and self._sends:
            sent = self.cost(0, "infer/wait", laps=len(scored) - 1)
            yield from self.spend(sent)
            self.site.channels[scores_of(self.component)].put_all(scored)
            yield from self.part(watch, "wait", 0, "infer")

    @property
    def _sends(self) -> bool:
        """Whether this rank sends its scores. Ranks that process the same samples send their scores once."""
        return self.slot.rank % self.together == 0

    def _take(self, due: int) -> Body:
        """Wait until a group arrives, then take all groups in the channel, at most `due`, and return them."""
        channel = self.site.channels[samples_for(self.component)]
        taken: list[Group] = [(yield from channel.get())]
        while len(taken) < due and (group := channel.get_nowait()) is not None:
            taken.append(group)
        return taken
