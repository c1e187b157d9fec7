"""One pass of an env rank over its groups: asks while there is room, takes answers as they come, sends whole groups."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rlplace.envs.text.graders import Grader
from rlplace.envs.text.rewards import Case
from rlplace.errors import ChannelFull
from rlplace.tokens import Completion, Request, Sample
from rlplace.workers.llm_job import COMPLETIONS, REQUESTS, Done, EndOfIteration
from rlplace.workers.roles.prompts import Prompts
from rlplace.workers.roles.text_episodes import Dialogues, OpenEpisode
from rlplace.workers.worker import WorkerContext, cancelled, out_of_step

Group = tuple[Sample, ...]  # in the order of their numbers


@dataclasses.dataclass(slots=True)
class Clock:
    """Where the time of one pass went, in seconds."""

    sim_s: float = 0.0  # prompts, replies and their tokens
    reward_s: float = 0.0  # rewards that are calculated here, and waiting for the others
    wait_s: float = 0.0  # for answers
    put_s: float = 0.0


class Pass:
    """Used once. Owns the dialogues; the grader comes back idle."""

    def __init__(
        self,
        context: WorkerContext,
        dialogues: Dialogues,
        grader: Grader,
        weights: Mapping[str, float],  # of the rewards, by name
        *,
        iteration: int,
        greedy: bool = False,
    ) -> None:
        self._context, self._dialogues, self._grader, self._weights = context, dialogues, grader, weights
        self._iteration, self._greedy = iteration, greedy
        self._key = str(context.rank)
        self._unasked: deque[Request] = deque()
        self._due = 0  # answers that were asked for and are not here
        self._grading: dict[tuple[int, int], OpenEpisode] = {}
        self._done_ranks = 0  # other env ranks that said so to this one
        self.clock = Clock()

    def through(
        self, groups: Mapping[int, int], prompts: Prompts, samples: int, deliver: Callable[[Group], None]
    ) -> None:
        """Plays `samples` episodes of each group, whose prompt has the number that `groups` gives for it.

        Calls `deliver` with each group as soon as it is whole. Never waits for room while answers are due: they come
        through a channel with limits of its own.
        """
        left = deque(groups.items())
        whole: dict[int, list[Sample]] = {group: [] for group in groups}
        while left or self._unasked or self._due or self._grading:
            if self._context.cancelled.is_set():
                raise cancelled(self._context.owner, "run")
            if left and not self._unasked:
                self._begin(*left.popleft(), prompts, samples)
            if self._unasked and self._ask(self._unasked[0]):
                self._unasked.popleft()
                continue
            if self._due:
                self._take()
            for sample in self._graded(wait=not self._due and not self._unasked):
                whole[sample.group].append(sample)
                if len(whole[sample.group]) == samples:
                    self._deliver(whole.pop(sample.group), deliver)

    def end(self, *, env_ranks: int, rollout_ranks: int) -> None:
        """Tells the rollout ranks that nothing more will be asked, once that is true of all env ranks."""
        began, context = time.perf_counter(), self._context
        if context.rank:
            done = Done(iteration=self._iteration, env_rank=context.rank)
            context.channels[COMPLETIONS].put(done, key="0", weight=done.weight)
        else:
            while self._done_ranks < env_ranks - 1:
                self._take()
            for _ in range(rollout_ranks):
                end = EndOfIteration(iteration=self._iteration)
                context.channels[REQUESTS].put(end, weight=end.weight)
        self.clock.put_s += time.perf_counter() - began

    def _begin(self, group: int, number: int, prompts: Prompts, samples: int) -> None:
        began = time.perf_counter()
        prompt, dialogues = prompts.episodes(number, samples)
        self._unasked.append(self._dialogues.begin(group, prompt, dialogues, greedy=self._greedy))
        self.clock.sim_s += time.perf_counter() - began

    def _ask(self, request: Request) -> bool:
        """Whether there was room for it; with no answer due, waits until there is."""
        began, channel = time.perf_counter(), self._context.channels[REQUESTS]
        try:
            if self._due:
                channel.put_nowait(request, weight=request.weight)
            else:
                channel.put(request, weight=request.weight)
        except ChannelFull:
            return False
        finally:
            self.clock.put_s += time.perf_counter() - began
        self._due += request.samples
        return True

    def _take(self) -> None:
        """Waits for one answer, and goes on with its episode."""
        began = time.perf_counter()
        item: Completion | Done = self._context.channels[COMPLETIONS].get(key=self._key)
        arrived = time.perf_counter()
        self.clock.wait_s += arrived - began
        if isinstance(item, Done):
            self._count(item)
            return
        try:
            following = self._dialogues.take(item, greedy=self._greedy)
        except KeyError as error:
            raise self._unexpected(item) from error
        self._due -= 1
        played = time.perf_counter()
        self.clock.sim_s += played - arrived
        if isinstance(following, Request):
            self._unasked.append(following)
            return
        self._grading[item.group, item.sample] = following
        self._grader.submit(Case(group=item.group, sample=item.sample, transcript=following.transcript()))
        self.clock.reward_s += time.perf_counter() - played

    def _count(self, done: Done) -> None:
        if done.iteration != self._iteration:
            got, expected = f"the end of iteration {done.iteration}", f"iteration {self._iteration}"
            raise out_of_step(self._context.owner, "an env rank is elsewhere", got=got, expected=expected)
        self._done_ranks += 1

    def _graded(self, *, wait: bool) -> list[Sample]:
        began = time.perf_counter()
        finished = []
        for case, rewards in self._grader.done(wait=wait):
            episode = self._grading.pop((case.group, case.sample))
            sample = episode.tokens.finish(rewards, self._weights)
            finished.append(dataclasses.replace(sample, transcript=case.transcript))
        self.clock.reward_s += time.perf_counter() - began
        return finished

    def _deliver(self, samples: Sequence[Sample], deliver: Callable[[Group], None]) -> None:
        began = time.perf_counter()
        deliver(tuple(sorted(samples, key=lambda sample: sample.sample)))
        self.clock.put_s += time.perf_counter() - began

    def _unexpected(self, completion: Completion) -> Exception:
        place = f"group {completion.group}, sample {completion.sample}, turn {completion.turn}"
        waiting = ", ".join(f"{group}/{sample}" for group, sample in sorted(self._dialogues.open)[:8]) or "none"
        return out_of_step(
            self._context.owner,
            "got an answer that nobody waits for",
            got=place,
            expected=f"an answer to the last turn of one of the open samples: {waiting}",
        )
