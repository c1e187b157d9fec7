"""The env worker of language models: asks prompts, runs conversations, grades them and sends whole groups.

::

    prompts ──▶ requests ──▶ rollout ──▶ completions ──▶ reply? ── yes ──▶ requests (the next turn)
                                                            └ no ──▶ grader ──▶ samples: a group when it is complete
    a reward function over lists grades a group when its last episode is over, any other function each episode at once
    end: every env rank puts Done for rank 0, which then puts one EndOfIteration for each rollout rank
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from rlplace.envs.text import NextTurn, Sampled, Split, TextEpisode, Transcript
from rlplace.envs.text.contract import NoPrompt, text_of
from rlplace.envs.text.failures import NO_USE, Failures
from rlplace.envs.text.graders import grader_of
from rlplace.envs.text.rewards import Case, Reward, find_rewards
from rlplace.errors import (
    ChannelEmpty,
    ChannelFull,
    ChannelTimeout,
    ConfigError,
    RewardError,
)
from rlplace.metrics import DROPPED_PROMPTS, LEFT_OUT, Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import (
    ENDS,
    ROUNDING,
    Completion,
    Episode,
    Files,
    Request,
    Sample,
    Tokens,
    rewards_differ,
)
from rlplace.workers.arguments import (
    COMPLETIONS,
    REQUESTS,
    SAMPLES,
    Done,
    EndOfIteration,
    TextArguments,
    samples_for,
)
from rlplace.workers.roles.env import EnvWorker
from rlplace.workers.roles.kept_groups import Kept, digests, read, write
from rlplace.workers.roles.learn_metrics import unrewarded_metric
from rlplace.workers.roles.prompts import Prompts, splits
from rlplace.workers.roles.replies import Answer, Place, Replies
from rlplace.workers.roles.scorer import reads_text
from rlplace.workers.roles.tails import Tails
from rlplace.workers.roles.unconfined import unconfined
from rlplace.workers.saving import FilesBehind
from rlplace.workers.worker import out_of_step

_GRADING_S = (
    0.05  # interval of checks for rewards from other processes and replies from threads
)
_QUICK_S = 0.001  # short wait: most replies are immediate
_POLL_S = 0.5  # interval at which a wait for replies checks for cancellation
# Options of requests of agents that limit the length of an answer
_LIMITS_OF_ANSWERS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Value of top_k that means all tokens in requests, as in vLLM; rollout.top_k has 0 for it
_ALL_TOKENS = -1
# Options that the config does not have, and the values of them that change nothing
_NEUTRAL = {"min_p": 0.0}
# Offset between the number of a prompt and that of its replacement
_OTHERS = 1 << 22


class TextEnvWorker(EnvWorker):
    """One env rank of a text task: requests answers to prompts, runs conversations, grades them, and sends groups of
    samples.

    Each rank has a block of neighbouring groups. The prompt of a group depends only on the group's number in the run.
    The worker owns its conversations, which end with the iteration, and the processes of its grader. If rollout runs
    ahead of learning, the worker keeps the groups that are not learned yet, so that checkpoints contain them.
    """

    uses_accelerators: ClassVar[bool] = False
    holds: ClassVar[str] = "task"
    follows_plans: ClassVar[bool] = True

    config: TextArguments

    def setup(self) -> None:
        config, model = self.config.config, self.config.model
        self._seed_numbers()
        self.prompts = {
            split: Prompts(config, model, split) for split in splits(config)
        }
        for split, prompts in self.prompts.items():
            if prompts.dropped:
                longest = config.algorithm.max_prompt_length
                self.context.log.warning(
                    "left out %d prompts above %d tokens (%s)",
                    prompts.dropped,
                    longest,
                    split,
                )
        self._readers = {SAMPLES: False} | {
            samples_for(c): reads_text(self.config, c) for c in self.config.scorers
        }
        self.rewards: Sequence[Reward] = find_rewards(
            config.env.rewards,
            self.prompts["train"].task,
            chat=config.env.chat,
        )
        self.failures = Failures(config.faults)
        self.grader = grader_of(
            self.rewards,
            timeout_s=config.env.reward_timeout_s,
            memory_bytes=config.env.reward_memory,
            processes=config.env.reward_processes,
            on_poison=config.faults.on_poison,
            failures=self.failures,
        )
        self._opened.callback(self.grader.close)
        self._kept: Kept = {}
        self._tails = Tails(
            config.algorithm.short_rounds,
            self.config.prompts,
            self.config.groups(self.context.rank),
            first=self.config.first_prompt,
        )
        self._behind = FilesBehind(self.context)
        self._opened.callback(self._behind.close)

    def begin_again(self, iteration: int) -> Metrics:
        self.grader.close()
        self._kept = {}
        return super().begin_again(iteration)

    def run(self, iteration: int) -> Metrics:
        """Generate, grade and send all groups of this rank for `iteration`, and return metrics.

        Groups that were read from a checkpoint are sent first, then each new group as soon as it is complete. Raises
        RewardError for a non-finite reward, ConfigError for a prompt that is too long.
        """
        self._require(Residency.FULL, "run")
        self._seed_numbers(iteration)
        job = self.config
        algorithm = self.config.config.algorithm
        self.failures.begin()
        # Newer groups are within the staleness bound and may still be needed.
        self.forget(iteration - algorithm.max_staleness)
        kept = self._kept.pop(iteration, {})
        more = self._tails.more(iteration)
        groups = {
            group: n
            for group, n in self._tails.asked(iteration).items()
            if group not in kept
        }
        # In a round that does not wait for all, groups get numbers in the order of completion.
        numbers = iter(job.groups(self.context.rank))
        samples: list[Sample] = []
        refills = (
            algorithm.refills if algorithm.only_with_signal and not job.rewards else 0
        )
        play = Pass(self, self.prompts["train"], iteration, refills=refills, more=more)
        for group in itertools.chain(
            kept.values(), play.through(groups, algorithm.samples_per_prompt)
        ):
            if more:
                number = next(numbers)
                group = tuple(
                    dataclasses.replace(sample, group=number) for sample in group
                )
            samples += group
            if algorithm.max_staleness:
                self._kept.setdefault(iteration, {})[group[0].group] = group
            tokens = sum(sample.weight for sample in group)
            oldest = min(
                (int(s.versions[s.mask].min()) for s in group if s.response_tokens),
                default=None,
            )
            for channel, text in self._readers.items():
                item = group
                if not text:
                    item = tuple(sample.without_text() for sample in item)
                # Only the policy replays its own routes
                if channel != SAMPLES:
                    item = tuple(sample.without_routes() for sample in item)
                self.context.channels[channel].put(item, weight=tokens, version=oldest)
        refilled = (
            {"env/groups_refilled": Metric(len(play.refilled), "sum")}
            if refills
            else {}
        )
        if algorithm.short_rounds:
            self._tails.leave(iteration, play.left)
            refilled["env/prompts_left"] = Metric(more, "sum")
        samples += [sample for group in play.refilled for sample in group]
        failed = self.failures.metrics("env")
        return {
            **_metrics("env", samples, self.rewards, play.watch),
            **play.agent_metrics("env"),
            **refilled,
            **failed,
            **self._dropped("env", "train"),
            **unconfined("env", self.rewards),
        }

    def _dropped(self, component: str, split: Split) -> Metrics:
        """Return the number of prompts that were too long and left out, as a metric; {} if there are none.

        `component`: first part of the metric's name.
        """
        dropped = self.prompts[split].dropped
        if not dropped:
            return {}
        longest = self.config.config.algorithm.max_prompt_length
        kind = split.replace("_", "-")
        note = f"left out {dropped} {kind} prompts of more than {longest} tokens: env.long_prompts: drop"
        metric = Metric(dropped, "max", notes=(note,))
        return {f"{component}/{DROPPED_PROMPTS}": metric}

    def forget(self, before: int) -> Metrics:
        """Drop the groups that this rank keeps for checkpoints, of all iterations before `before`, because they have
        been learned.

        Return no metrics.
        """
        self._kept = {
            iteration: groups
            for iteration, groups in self._kept.items()
            if iteration >= before
        }
        return {}

    def write_state(self, folder: str) -> Metrics:
        """Start to write the groups that are generated but not learned yet into `folder`, in the background. Return no
        metrics.
        """
        kept = {
            iteration: list(groups.values()) for iteration, groups in self._kept.items()
        }
        groups = self.config.groups(self.context.rank)
        text = any(self._readers.values())
        tails = copy.deepcopy(self._tails)
        self._behind.start(
            Path(folder),
            lambda: (
                write(Path(folder), groups, self._asked(), kept, text=text)
                + tails.write(Path(folder))
            ),
        )
        return {}

    def read_state(self, folder: str) -> Metrics:
        """Read this rank's groups that were generated but not learned yet from the checkpoint in `folder`.

        Return their number as a metric. `run` sends each of these groups in its iteration. The number of ranks that
        saved the groups does not matter. A group is ignored if the config's task or rewards have changed, or if its
        prompt has changed. Raises ConfigError for an unreadable file.
        """
        self._kept, text = {}, any(self._readers.values())
        self._tails.read(Path(folder))
        for iteration, groups in read(
            Path(folder), self.config.groups(self.context.rank), self._asked()
        ).items():
            for number, group in groups.items():
                asked = self.prompts["train"].episodes(
                    self.config.first_prompt(iteration) + number, len(group)
                )
                prompt, images, dialogues = asked
                # The tokens alone do not show a changed image of the same size.
                seen = digests(images)
                if all(
                    s.images == seen
                    and np.array_equal(prompt, s.tokens[: s.prompt_tokens])
                    for s in group
                ):
                    group = tuple(
                        dataclasses.replace(sample, images=images) for sample in group
                    )
                    taken = _with_text(group, dialogues) if text else group
                    self._kept.setdefault(iteration, {})[number] = taken
        return {"env/groups_kept": Metric(sum(map(len, self._kept.values())), "sum")}

    def _asked(self) -> str:
        algorithm = self.config.config.algorithm
        env = self.config.config.env
        sizes = (
            algorithm.prompts,
            algorithm.samples_per_prompt,
            algorithm.max_staleness,
        )
        # Groups without routes cannot be replayed
        routes = ("routes",) if self.config.config.actor.router_replay else ()
        return repr((*sizes, env.task, env.kwargs, env.max_turns, env.rewards, *routes))

    def evaluate(self, iteration: int) -> Metrics:
        """Request answers to this rank's held-out prompts, grade the answers, and return metrics.

        The config decides whether each prompt gets one greedy answer or several sampled answers. The rollout ranks must
        run `generate(iteration)` at the same time.
        """
        runner = self.config.config.runner
        each = runner.eval_samples
        greedy = not runner.eval_temperature
        if runner.eval_temperature is None:
            greedy = each == 1
        samples, watch = self.answered(iteration, greedy=greedy, each=each)
        metrics = {
            **_metrics("eval", samples, self.rewards, watch),
            **unrewarded_metric("eval", samples),
            **self.failures.metrics("eval"),
            **self._dropped("eval", "held_out"),
        }
        sets = sorted(
            {
                str(s.transcript.facts["data_set"])
                for s in samples
                if "data_set" in s.transcript.facts
            }
        )
        for name in sets:
            of_set = [
                s for s in samples if str(s.transcript.facts.get("data_set")) == name
            ]
            metrics = {
                **metrics,
                **_passed(f"eval/{name}", of_set, each, self.rewards),
                f"eval/{name}/reward": _mean_reward(of_set),
            }
        return {**metrics, **_passed("eval", samples, each, self.rewards)}

    def answered(
        self, iteration: int, *, greedy: bool, each: int = 1
    ) -> tuple[list[Sample], Stopwatch]:
        """Return the graded samples of this rank's held-out prompts, and a stopwatch with the seconds of each part of
        the work.

        `greedy`: answer with the most probable tokens instead of sampled tokens. `each`: number of answers to each
        prompt.
        """
        self._require(Residency.FULL, "evaluate")
        # The budget of failures starts anew for the evaluation.
        self.failures.begin()
        prompts = self.prompts["held_out"]
        due = self.config.held_out(self.context.rank, prompts.asked)
        groups = {group: group for group in due}
        play = Pass(self, prompts, iteration, greedy=greedy)
        return [
            sample for group in play.through(groups, each) for sample in group
        ], play.watch


def _mean_reward(samples: Sequence[Sample]) -> Metric:
    sound = [sample.reward for sample in samples if not sample.poisoned]
    return Metric(sum(sound) / max(1, len(sound)), weight=len(sound))


def _passed(
    prefix: str, samples: Sequence[Sample], each: int, rewards: Sequence[Reward]
) -> Metrics:
    """Return the share of prompts with at least one answer whose reward is 1 or more, as a metric.

    Return an empty mapping if each prompt has only one answer. If the weighted sum of rewards may reach 1 without that
    of the largest weight, or not at all, there is a metric for each reward function too, and a note.

    `prefix`: first part of the metric's name. `each`: number of answers to each prompt. `rewards`: the functions.
    """
    if each == 1:
        return {}
    note = _ambiguous(prefix, rewards)
    found = {f"{prefix}/passed": _share_passed(samples, None, note)}
    if note is not None:
        for reward in rewards:
            name = reward.name
            found[f"{prefix}/passed/{name}"] = _share_passed(samples, name, None)
    return found


def _share_passed(
    samples: Sequence[Sample], reward: str | None, note: str | None
) -> Metric:
    """Return the share of prompts that have an answer whose reward is 1 or more.

    `reward`: the reward function whose reward counts; None: the weighted sum of all. `note`: added to the metric.
    """
    best: dict[int, float] = {}
    for sample in samples:
        number = -math.inf if sample.poisoned else sample.signal(reward)
        best[sample.group] = max(best.get(sample.group, -math.inf), number)
    passed = sum(number >= 1.0 for number in best.values())
    notes = () if note is None else (note,)
    return Metric(passed / max(1, len(best)), weight=len(best), notes=notes)


def _ambiguous(prefix: str, rewards: Sequence[Reward]) -> str | None:
    """Return why a weighted sum of rewards does not tell whether an answer is right; None if it does.

    Each reward function is taken to give at most 1. `prefix`: first part of the names of metrics.
    """
    weights = [reward.weight for reward in rewards if reward.weight > 0]
    if not weights:
        return None
    most = math.fsum(weights)
    why = None
    if most < 1.0 - ROUNDING:
        why = f"and the weights add up to {most:g}: no answer passes if each reward is 1 at most"
    elif most - max(weights) >= 1.0 - ROUNDING:
        why = "which an answer may reach without the reward of the largest weight"
    if why is None:
        return None
    return (
        f"{prefix}/passed counts answers whose weighted rewards add up to 1 or more, {why}; "
        f"{prefix}/passed/<reward> counts those of each reward function"
    )


def _with_text(
    group: tuple[Sample, ...], dialogues: Sequence[TextEpisode]
) -> tuple[Sample, ...]:
    """Return the samples of a group from a checkpoint with complete transcripts.

    `dialogues`: a new episode of the task for each sample. The saved answers are given to this episode; then the prompt
    and the `facts` of the transcript, which a checkpoint does not have, are taken from it.
    """
    found = []
    for sample, dialogue in zip(group, dialogues, strict=True):
        for answer in sample.transcript.answers:
            dialogue.reply(answer)
        text = dataclasses.replace(
            sample.transcript, prompt=dialogue.prompt, facts=dialogue.facts()
        )
        found.append(dataclasses.replace(sample, transcript=text))
    return tuple(found)


def _metrics(
    component: str,
    samples: Sequence[Sample],
    rewards: Sequence[Reward],
    watch: Stopwatch,
) -> Metrics:
    """Return the metrics of graded samples. Means are over episodes; samples with non-finite rewards are left out.

    `component`: first part of the metrics' names. `rewards`: the task's reward functions, whose names become metrics.
    `watch`: seconds of each part of the work.
    """
    answers = len(samples)
    samples = [sample for sample in samples if not sample.poisoned]
    episodes = len(samples)

    def mean(total: float) -> Metric:
        return Metric(total / max(1, episodes), "mean", episodes)

    def mean_of(name: str) -> Metric:
        # As in TRL, an answer to which a function does not apply is left out of the function's mean
        values = [s.rewards[name] for s in samples if name in s.rewards]
        return Metric(sum(values) / max(1, len(values)), "mean", len(values))

    numbers = {
        "reward": mean(sum(sample.reward for sample in samples)),
        **{f"reward/{r.name}": mean_of(r.name) for r in rewards},
        **_parts(samples),
        "answer_tokens": mean(sum(sample.response_tokens for sample in samples)),
        "episode_tokens": mean(sum(sample.weight for sample in samples)),
        "turns": mean(sum(sample.turns for sample in samples)),
        "truncated": mean(sum(sample.truncated for sample in samples)),
        **{
            f"ended/{end}": mean(sum(sample.ended == end for sample in samples))
            for end in ENDS
        },
        "episodes": Metric(episodes, "sum"),
        "sim_s": Metric(
            watch.seconds["sim"] + watch.seconds["reward"], "max"
        ),  # all of this rank's work; the loop reads it
    }
    if episodes < answers:
        left_out = answers - episodes
        note = (
            f"{component}/{LEFT_OUT}: {left_out} of {answers} answers are in no mean, since their reward or "
            "environment failed, or gave no finite number"
        )
        numbers[LEFT_OUT] = Metric(left_out, "sum", notes=(note,))
    return {
        **watch.metrics(component),
        **{f"{component}/{name}": metric for name, metric in numbers.items()},
    }


def _parts(samples: Sequence[Sample]) -> Metrics:
    """Return the means of the parts of the score that a task tells as the fact `parts`: name -> number."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        facts = {} if sample.transcript is None else sample.transcript.facts
        parts = facts.get("parts")
        if not isinstance(parts, Mapping):
            continue
        for name, value in parts.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(f"part/{name}", []).append(float(value))
    return {
        name: Metric(sum(found) / len(found), "mean", len(found))
        for name, found in values.items()
    }


# ── one pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn that the policy answers. `more`: the tokens behind the answer that the turn follows, or its prompt."""

    turn: NextTurn
    more: Tokens


@dataclasses.dataclass(slots=True)
class OpenEpisode:
    """A conversation in progress: as text for the task, and as tokens for the learner.

    `tokens`: the conversation as tokens. `dialogue`: the task's side of the conversation. `answers`: texts of the
    policy. `replies`: texts of the environment. `submitted_s`: time at which the episode went to the grader, in seconds
    of `time.perf_counter()`. `tries`: number of restarts after an error of the task. `ended`: one of ENDS, why the
    episode is over; "" while it is in progress. `left`: turns that the task has asked and that wait. `asked`: turns
    that the policy is answering, with their tokens; empty: it answers the prompt. `arrived`: their answers, by turn.
    """

    tokens: Episode
    dialogue: TextEpisode
    answers: list[str] = dataclasses.field(default_factory=list)
    replies: list[str] = dataclasses.field(default_factory=list)
    opened: str = ""  # the tag with which the chat template begins answers
    submitted_s: float = 0.0  # when it went to the grader, by the performance counter
    tries: int = 0  # number of restarts after a failed reply or failed facts
    ended: str = ""
    left: deque[NextTurn] = dataclasses.field(default_factory=deque)
    asked: list[AskedTurn] = dataclasses.field(default_factory=list)
    arrived: dict[int, Completion] = dataclasses.field(default_factory=dict)

    @property
    def due(self) -> int:
        """Number of answers that the policy is making."""
        return max(1, len(self.asked))

    def expects(self, turn: int) -> bool:
        """Return whether the answer of this turn is due."""
        first = len(self.answers)
        return first <= turn < first + self.due and turn not in self.arrived

    def transcript(self, *, failed: bool = False) -> Transcript:
        """Return the transcript of the conversation.

        `failed`: whether the task has failed in this episode. The transcript then has empty `facts`, because the task
        is not asked for them.
        """
        completions = self.tokens.answers
        return Transcript(
            prompt=self.dialogue.prompt,
            answers=tuple(self.answers),
            replies=tuple(self.replies),
            facts={} if failed else self.dialogue.facts(),
            tokens=sum(len(completion.tokens) for completion in completions),
            truncated=completions[-1].finish == "length",
            opened=self.opened,
        )


class Pass:
    """One pass of an env rank over its groups, which `through` runs. Each pass needs a new object.

    The pass requests answers while the channel has room, handles answers as they arrive, and yields complete groups. It
    owns the open episodes. At the end of the pass, the grader has no work left.
    """

    def __init__(
        self,
        worker: TextEnvWorker,
        prompts: Prompts,
        iteration: int,
        *,
        greedy: bool = False,
        refills: int = 0,
        more: int = 0,
    ) -> None:
        """Prepare the pass; nothing is requested yet.

        `worker`: the env rank. `greedy`: answer with the most probable tokens instead of sampled tokens. `refills`: how
        often a group may be replaced by a group of another prompt if its rewards are all equal or unknown. `more`:
        number of groups whose answers the pass does not wait for. After the pass, `left` has the prompt numbers of the
        incomplete groups.
        """
        self._worker = worker
        self._context = worker.context
        self._grader = worker.grader
        self._refills = refills
        # Name of the reward that groups are compared by; None: the sum of all
        self._compared = worker.config.config.algorithm.dynamic_sampling_by
        # Samples of replaced groups
        self.refilled = list[list[Sample]]()
        self._more = more
        self.left = list[int]()
        # Whether passes may end before their last answer
        self._early = worker.config.config.algorithm.short_rounds > 0
        self._prompts = prompts
        self._iteration = iteration
        self._greedy = greedy
        self._to_ask: deque[Request] = deque()
        # Requested answers that have not arrived
        self._due = 0
        # Open episodes by (group, sample)
        self._open: dict[tuple[int, int], OpenEpisode] = {}
        self._grading: dict[tuple[int, int], OpenEpisode] = {}
        # Number of episodes in progress of each group, which the grader waits for
        self._unfinished: dict[int, int] = {}
        # Samples that were left out after a failed reply
        self._left_out: list[Sample] = []
        # Prompt number of each group
        self._numbers: dict[int, int] = {}
        settings = worker.config.config.env
        together = (
            0
            if getattr(prompts.task, "replies_alone", False)
            else settings.replies_together
        )
        self._replies = Replies(together=together, timeout_s=settings.reply_timeout_s)
        # Number of other env ranks that have sent Done
        self._done_ranks = 0
        # Number of answers that have arrived, and of those that were cut at a length limit
        self._answers = 0
        self._cut_answers = 0
        # Of episodes that a program leads: their number, their conversations, and how many asked for one more answer
        # than they may have
        self._led = 0
        self._conversations = 0
        self._refused = 0
        # Answers with calls of tools that could not be read
        self._unread = 0
        # Options of requests of agents that have no effect
        self._unheeded = set[str]()
        # sim: prompts, replies and their tokens; reward: rewards computed here, and waiting for the others
        self.watch = Stopwatch("sim", "reward", "wait", "put")

    def through(
        self, groups: Mapping[int, int], samples: int
    ) -> Iterator[tuple[Sample, ...]]:
        """Run the episodes of each group, yield the samples of each group when it is complete, and then end the
        iteration.

        `groups`: group number -> prompt number. `samples`: number of episodes of each group; a yielded group is in the
        order of its sample numbers. While answers are expected, the pass does not block on a full channel of requests.
        Otherwise env and rollout ranks could wait for each other forever, because the channel of answers is bounded
        too.
        """
        left = deque((group, number, 0) for group, number in groups.items())
        # Refills so far, by group
        tried: dict[int, int] = {}
        whole: dict[int, list[Sample]] = {group: [] for group in groups}
        while len(whole) > self._more:
            self._context.check_cancelled("run")
            if left and not self._to_ask:
                group, number, tried[group] = left.popleft()
                self._numbers[group] = number + tried[group] * _OTHERS
                try:
                    prompt, images, dialogues = self._prompts.episodes(
                        self._numbers[group], samples
                    )
                except NoPrompt as error:  # the same prompt would fail again; training asks another one
                    self._worker.failures.again(error, NO_USE, samples)
                    if self._prompts.held_out:
                        # Another prompt would count twice.
                        del whole[group]
                    else:
                        left.append((group, number, tried[group] + 1))
                    continue
                opened = self._prompts.opened(prompt)
                self._unfinished[group] = samples
                for sample, dialogue in enumerate(dialogues):
                    tokens = Episode(
                        group=group, sample=sample, prompt=prompt, images=images
                    )
                    self._open[group, sample] = OpenEpisode(
                        tokens, dialogue, opened=opened
                    )
                # One request for all samples, so the engine processes the prompt once
                asked = self._request(group, 0, samples, 0, prompt, images)
                self._to_ask.append(asked)
                self.watch.draw("prompt_tokens", len(prompt))
                self.watch.lap("sim")
            if self._to_ask and self._ask():
                continue
            if self._due:
                self._take()
            idle = not self._due and not self._to_ask
            self._hear(0.0 if not idle else _GRADING_S if self._grading else _POLL_S)
            for graded in self._graded(
                wait=idle and not self._to_ask and not self._replies.in_flight
            ):
                whole[graded.group].append(graded)
                group, sampled = graded.group, whole[graded.group]
                if len(sampled) < samples:
                    continue
                # Rewards of the samples that can be learned
                by = self._compared
                rewards = [each.signal(by) for each in sampled if not each.poisoned]
                if tried[group] < self._refills and not rewards_differ(rewards):
                    self.refilled.append(sampled)
                    whole[group] = []
                    left.append((group, groups[group], tried[group] + 1))
                    continue
                yield tuple(sorted(whole.pop(group), key=lambda each: each.sample))
                self.watch.lap("put")
                if len(whole) == self._more:
                    break
        self._leave([self._numbers.get(group, groups[group]) for group in whole])
        self._end()

    def _leave(self, numbers: list[int]) -> None:
        """Drop the episodes of the incomplete groups, and store `numbers` in `left`.

        `numbers`: prompt numbers of the incomplete groups.
        """
        self.left = numbers
        self._to_ask.clear()
        self._open.clear()
        self._replies.forget()
        # The grader waits for no episode of these groups any more
        for group in self._unfinished:
            self._grader.whole(group)
        self._unfinished.clear()
        while self._grading:
            self._graded(wait=True)

    def _end(self) -> None:
        """Report that this rank has all its answers. Once all env ranks have reported, rank 0 ends the iteration for
        rollout.

        Each rank but 0 puts a message Done for rank 0. Rank 0 waits for all these messages, and then puts one message
        EndOfIteration for each rollout rank.
        """
        channels = self._context.channels
        ranks = self._worker.config.ranks
        if self._context.rank:
            channels[COMPLETIONS].put(
                Done(iteration=self._iteration, env_rank=self._context.rank), key="0"
            )
        else:
            while self._done_ranks < ranks["env"] - 1:
                self._take()
            # Requests of any env rank that no engine has taken
            if self._early:
                with contextlib.suppress(ChannelEmpty):
                    while True:
                        channels[REQUESTS].get_nowait()
            for _ in range(ranks["rollout"]):
                channels[REQUESTS].put(
                    EndOfIteration(iteration=self._iteration, drop=self._early)
                )
        self.watch.lap("put")

    def _ask(self) -> bool:
        """Put the next request into the channel of requests, and return whether the channel had room.

        If no answer is expected, block until there is room.
        """
        channel = self._context.channels[REQUESTS]
        request = self._to_ask[0]
        try:
            if self._due:
                channel.put_nowait(request, weight=request.weight)
            else:
                channel.put(request, weight=request.weight)
        except ChannelFull:
            return False
        finally:
            self.watch.lap("put")
        self._due += self._to_ask.popleft().samples
        return True

    def _take(self) -> None:
        """Wait for one answer from the rollout ranks, and give it to the task, which continues or ends the episode.

        While other episodes wait for grading or replies, this waits only a short time, so that a long answer does not
        delay them. An answer to a dropped group is ignored.
        """
        owner = self._context.owner
        rank = self._context.rank
        try:
            busy = bool(self._grading) or self._replies.in_flight > 0
            patience_s = _GRADING_S if busy else None
            item: Completion | Done = self._context.channels[COMPLETIONS].get(
                key=str(rank), timeout_s=patience_s
            )
        except ChannelTimeout:
            if not busy:
                raise
            return
        finally:
            self.watch.lap("wait")
        if isinstance(item, Done):
            if item.iteration != self._iteration:
                got = f"the end of iteration {item.iteration + 1}"
                expected = f"iteration {self._iteration + 1}"
                raise out_of_step(owner, "env-rank", got=got, expected=expected)
            self._done_ranks += 1
            return
        asked = (item.iteration, item.held_out) == (
            self._iteration,
            self._prompts.held_out,
        )
        # An answer of an earlier round, or of a group that was dropped
        if self._early and (not asked or not self._open):
            return
        place = (item.group, item.sample)
        episode = self._open.get(place)
        if episode is None or not episode.expects(item.turn):
            waiting = (
                ", ".join(
                    f"{group}/{sample}" for group, sample in sorted(self._open)[:8]
                )
                or "none"
            )
            raise out_of_step(
                owner,
                "episode",
                got=f"group {item.group}, sample {item.sample}, turn {item.turn}",
                expected=f"an answer to the last turn of one of the open samples: {waiting}",
            )
        self._due -= 1
        self._answers += 1
        self._cut_answers += item.finish == "length"
        episode.arrived[item.turn] = item
        if len(episode.arrived) == episode.due:
            self._replies.ask(place, episode.dialogue, self._answered(episode))
        self._hear(_QUICK_S)

    def _answered(self, episode: OpenEpisode) -> list[Answer]:
        """Add the answers that have arrived to an episode, in the order of their turns, and return them."""
        answers: list[Answer] = []
        several = hasattr(episode.dialogue, "replies")
        asked = iter(episode.asked)
        for number in sorted(episode.arrived):
            item = episode.arrived[number]
            # There is none for the prompt of the episode
            turn = next(asked, None)
            if turn is not None:
                episode.tokens.asked(turn.turn.after, turn.more)
                episode.replies.append(text_of(turn.turn.messages))
            text = self._prompts.tokenizer.decode_answer(item.tokens)
            told = getattr(episode.dialogue, "sampled", None)
            sampled: Sampled | None = None
            if several or told:
                sampled = self._sampled(item, episode.tokens.context)
            if told and not several:
                told(sampled)
            cut = getattr(episode.dialogue, "cut", None)
            if cut is not None and item.finish == "length":
                why = (
                    "the method cut() of a text episode: sampled(answer) is called for each answer, with "
                    "answer.is_cut"
                )
                warnings.warn(why, DeprecationWarning, stacklevel=1)
                cut()
            episode.tokens.answered(item)
            episode.answers.append(text)
            answers.append((text, sampled))
        episode.asked.clear()
        episode.arrived.clear()
        return answers

    def agent_metrics(self, component: str) -> Metrics:
        """Return the metrics of conversations that a program leads; {} for other tasks.

        `component`: first part of the metrics' names.
        """
        if not self._led:
            return {}
        cut = Metric(self._cut_answers / max(1, self._answers), "mean", self._answers)
        conversations = Metric(
            self._conversations / max(1, self._led), "mean", self._led
        )
        refused = Metric(self._refused / self._led, "mean", self._led)
        note = (
            f"{component}/unread_calls: answers have calls of tools that cannot be read, which agents get as text: "
            "env.kwargs.tool_format names the form of calls"
        )
        notes = (note,) if self._unread else ()
        if self._unheeded:
            names = ", ".join(sorted(self._unheeded))
            unheeded = (
                f"requests of agents set {names} to other values than the config of the run, which alone decides how "
                "answers are drawn: rollout.temperature, rollout.stop, algorithm.max_new_tokens, env.template"
            )
            notes = (*notes, unheeded)
        share = self._unread / max(1, self._answers)
        return {
            f"{component}/unread_calls": Metric(
                share, "mean", self._answers, notes=notes
            ),
            f"{component}/cut_answers": cut,
            f"{component}/conversations": conversations,
            f"{component}/refused_agents": refused,
        }

    def _without_effect(self, asked: Mapping[str, Sequence[object]]) -> set[str]:
        """Return the names of the options that agents have set to values by which answers would be others.

        `asked`: options of requests that have no effect, name -> values.
        """
        return {
            name
            for name, values in asked.items()
            if not all(self._is_so(name, value) for value in values)
        }

    def _is_so(self, name: str, value: object) -> bool:
        """Return whether answers are already as an option of a request wants them."""
        config = self._worker.config.config
        usual = getattr(config.rollout, name, _NEUTRAL.get(name))
        is_so = bool(value == usual)
        if name == "stop":
            texts = value if isinstance(value, list) else [value]
            is_so = all(map(self._ends_answers, texts))
        elif name in _LIMITS_OF_ANSWERS and isinstance(value, int | float):
            # Answers are never longer
            is_so = value >= config.algorithm.max_new_tokens
        elif name == "chat_template_kwargs" and isinstance(value, Mapping):
            is_so = value.items() <= dict(config.env.template).items()
        elif name == "top_k" and value == _ALL_TOKENS:
            is_so = usual == 0
        return is_so

    def _ends_answers(self, text: object) -> bool:
        """Return whether a text ends answers: a stop text of the config, or the text of a token that ends answers."""
        tokenizer = self._prompts.tokenizer
        if text in self._worker.config.config.rollout.stop:
            return True
        stops, _ = tokenizer.stops((), chat=True)
        ends = [tokenizer.decode([stop], special=True) for stop in stops]
        return text in ends

    def _sampled(self, item: Completion, context: Tokens) -> Sampled:
        """Return an answer as the engine sampled it. `context`: the tokens that it follows."""
        tokenizer = self._prompts.tokenizer
        return Sampled(
            text=tokenizer.decode_written(item.tokens),
            prompt=context.tolist(),
            tokens=item.tokens.tolist(),
            logprobs=item.logprobs.tolist(),
            is_cut=item.finish == "length",
            decode=functools.partial(tokenizer.decode, special=True),
        )

    def _hear(self, wait_s: float) -> None:
        """Handle the replies of the task that have arrived: continue their episodes, or give ended episodes to the
        grader.

        `wait_s`: the most seconds to wait for the first reply.
        """
        over: list[Place] = []
        for reply in self._replies.done(wait_s):
            if reply.error is not None:
                self._failed(reply.place, reply.error)
                continue
            try:
                following = self._continued(self._open[reply.place], reply.said)
            except (
                ConfigError
            ) as error:  # a reply that is not text, or that the chat template rejects
                self._failed(reply.place, error)
                continue
            self.watch.lap("sim")
            if following:
                self._to_ask += following
                continue
            over.append(reply.place)
            episode = self._open[reply.place]
            if end := getattr(episode.dialogue, "end", None):
                end(episode.ended)
                self._led += 1
                self._conversations += len(episode.tokens.conversations)
                self._refused += reply.said is not None
                self._unread += getattr(episode.dialogue, "unread_calls", 0)
                self._unheeded |= self._without_effect(
                    getattr(episode.dialogue, "unheeded", {})
                )
        for place in over:
            episode = self._open[place]
            try:
                transcript = episode.transcript()
            except Exception as error:  # noqa: BLE001  # whatever the facts of the task raise
                self._failed(place, error)
                continue
            self._grading[place] = self._open.pop(place)
            episode.submitted_s = time.perf_counter()
            self.watch.draw("turns", len(episode.answers))
            group, sample = place
            case = Case(
                group=group,
                sample=sample,
                transcript=transcript,
                seed=self._seed_of(group, sample),
            )
            self._grader.submit(case)
            self._over(group)
            self.watch.lap("reward")
        self.watch.lap("sim")

    def _seed_of(self, group: int, sample: int) -> str:
        """Return the text from which random numbers of the sample's reward functions follow, in every placement."""
        split = "held_out" if self._prompts.held_out else "train"
        seed = self._worker.config.config.runner.seed
        return f"{seed}/rewards/{split}/{self._numbers[group]}/{sample}"

    def _over(self, group: int) -> None:
        """Count an episode of `group` that is over or left out. After the last one, tell the grader about it."""
        self._unfinished[group] -= 1
        if self._unfinished[group]:
            return
        del self._unfinished[group]
        if self._grader.by_group:
            # Functions over lists begin now
            now_s = time.perf_counter()
            for (of_group, _), episode in self._grading.items():
                if of_group == group:
                    episode.submitted_s = now_s
        self._grader.whole(group)

    def _failed(self, place: Place, error: Exception) -> None:
        """Restart the episode at `place` with the same prompt, or leave it out of its group if the config allows no
        more tries.

        `place`: (group number, index of the sample in the group). `error`: the error that the task raised; it is raised
        here if `faults` says that the run stops.
        """
        (group, sample), episode = place, self._open.pop(place)
        # A RewardError already names the episode.
        if not isinstance(error, RewardError):
            error.add_note(f"for sample {sample} of group {group}")
        if self._worker.failures.again(error, episode.tries):
            try:
                prompt, images, (dialogue,) = self._prompts.episodes(
                    self._numbers[group], 1
                )
            except NoPrompt as again:
                episode.tries += 1
                self._open[place] = episode
                return self._failed(place, again)
            tokens = Episode(group=group, sample=sample, prompt=prompt, images=images)
            self._open[place] = OpenEpisode(
                tokens,
                dialogue,
                opened=self._prompts.opened(prompt),
                tries=episode.tries + 1,
            )
            return self._to_ask.append(
                self._request(group, sample, 1, 0, prompt, images)
            )
        unknown = {reward.name: math.nan for reward in self._worker.rewards}
        left_out = episode.tokens.finish(unknown, dict.fromkeys(unknown, 1.0))
        self._left_out.append(
            dataclasses.replace(left_out, transcript=episode.transcript(failed=True))
        )
        self._over(group)

    def _continued(
        self,
        episode: OpenEpisode,
        reply: str | NextTurn | Sequence[NextTurn] | None,
    ) -> list[Request]:
        """Add the environment's reply to the episode, and return the requests for the policy's next answers.

        Return an empty list if the episode is over: `reply` is None, the last answer was cut at its length limit and
        the reply is a text, or the episode has its largest number of turns or tokens. Several turns are requested at
        the same time if their answers fit with any length; the others wait.
        """
        settings = self._worker.config.config
        algorithm = settings.algorithm
        last = len(episode.answers) - 1
        completion = episode.tokens.answers[last]
        # A cut answer is incomplete: the environment gets it as it is, and the episode ends.
        if completion.finish != "stop" and (reply is None or isinstance(reply, str)):
            episode.ended = "cut_answer"
            return []
        if reply is None:
            episode.ended = "task"
            return []
        if isinstance(reply, str):
            episode.left.append(NextTurn(messages=reply, after=last))
        elif isinstance(reply, NextTurn):
            episode.left.append(reply)
        else:
            episode.left += reply
        conversation = self._prompts.conversation
        requests: list[Request] = []
        # Tokens that the answers of the turns before may add
        reserved = 0
        followed = set[int]()
        while episode.left:
            turn = episode.left[0]
            if len(episode.answers) + len(requests) >= settings.env.max_turns:
                episode.ended = "max_turns"
                break
            if turn.after is None:
                more = conversation.first(turn.messages)
            else:
                before = episode.tokens.answers[turn.after]
                more = conversation.reply(before.tokens, turn.messages)
            tokens, total = episode.tokens.after(turn.after, more)
            used = total + reserved
            # The second turn after an answer repeats what is before it
            if turn.after in followed:
                used += len(tokens) - len(more)
            if requests and used + algorithm.max_new_tokens > algorithm.longest:
                break
            if used >= algorithm.longest:
                episode.ended = "sequence_length"
                break
            episode.left.popleft()
            episode.asked.append(AskedTurn(turn, more))
            self.watch.draw("reply_tokens", len(more))
            request = self._request(
                completion.group,
                completion.sample,
                1,
                completion.turn + 1 + len(requests),
                tokens,
                episode.tokens.images,
                used=used,
            )
            requests.append(request)
            reserved = used - episode.tokens.weight + request.max_new_tokens
            if turn.after is not None:
                followed.add(turn.after)
        # What did not fit is asked again after the answers of the others
        if requests:
            episode.ended = ""
        return requests

    def _request(
        self,
        group: int,
        first: int,
        samples: int,
        turn: int,
        tokens: Tokens,
        images: Files,
        used: int | None = None,
    ) -> Request:
        """Return a request for the next answer of samples.

        `used`: number of tokens of all conversations of the episode; None: it has one, of `tokens`.
        """
        algorithm = self._worker.config.config.algorithm
        return Request(
            env_rank=self._context.rank,
            iteration=self._iteration,
            group=group,
            first_sample=first,
            samples=samples,
            turn=turn,
            tokens=tokens,
            max_new_tokens=min(
                algorithm.max_new_tokens,
                algorithm.longest - (len(tokens) if used is None else used),
            ),
            greedy=self._greedy,
            held_out=self._prompts.held_out,
            images=images,
        )

    def _graded(self, *, wait: bool) -> list[Sample]:
        weights = {reward.name: reward.weight for reward in self._worker.rewards}
        finished = self._left_out
        self._left_out = []
        for case, rewards in self._grader.done(wait=wait):
            episode = self._grading.pop((case.group, case.sample))
            self.watch.draw("reward_s", time.perf_counter() - episode.submitted_s)
            sample = episode.tokens.finish(rewards, weights)
            finished.append(
                dataclasses.replace(
                    sample, transcript=case.transcript, ended=episode.ended
                )
            )
        self.watch.lap("reward")
        return finished
