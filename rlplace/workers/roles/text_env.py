"""The env worker of language models: asks prompts, plays conversations, has them rewarded; the actor gets whole groups.

::

    prompts ──▶ requests ──▶ rollout ──▶ completions ──▶ reply? ── yes ──▶ requests (the next turn)
                                                            └ no ──▶ grader ──▶ samples: a group when it is whole
    end: every env rank says Done to rank 0, which then puts one EndOfIteration for each rollout rank
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rlplace.envs.text.graders import Grader, grader_of
from rlplace.envs.text.registry import make_task
from rlplace.envs.text.rewards import Reward, find_rewards
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.llm_job import SAMPLES, LlmJob, samples_for
from rlplace.workers.roles.prompts import Prompts, conversation_of, prompts_of
from rlplace.workers.roles.scored_text import reads_text
from rlplace.workers.roles.text_episodes import Dialogues, Limits
from rlplace.workers.roles.text_pass import Clock, Group, Pass
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, not_resident

_TASK = "task"


class TextEnvWorker(Worker):
    """Owns its conversations, none of which outlives an iteration, and the processes of its grader.

    Env rank e has a block of neighbouring groups; which prompt a group asks follows from its number in the whole run.
    """

    config: LlmJob

    def __init__(self, config: LlmJob, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._residency = Residency.OFF
        self._grader: Grader | None = None
        self._held_out: Prompts | None = None

    def setup(self) -> None:
        config, model = self.config.config, self.config.model
        self._tokenizer = Tokenizer.load(model)
        self._conversation = conversation_of(config, self._tokenizer)
        self._prompts = prompts_of(config, model, "train")
        if config.runner.eval_every:
            self._held_out = prompts_of(config, model, "held_out")
        self._say_dropped()
        task = make_task(config.text_env, seed=config.runner.seed, split="train")
        self._readers = {SAMPLES: False} | {samples_for(c): reads_text(self.config, c) for c in self.config.judges}
        self._rewards: Sequence[Reward] = find_rewards(config.text_env.rewards, task)
        self._grader = grader_of(
            self._rewards,
            timeout_s=config.text_env.reward_timeout_s,
            memory_bytes=config.text_env.reward_memory,
            processes=config.text_env.reward_processes,
        )

    def _say_dropped(self) -> None:
        for split, prompts in (("train", self._prompts), ("held_out", self._held_out)):
            if prompts is not None and prompts.dropped:
                longest = self.config.config.algorithm.max_prompt_length
                self.context.log.warning("left out %d prompts above %d tokens (%s)", prompts.dropped, longest, split)

    def move(self, to: Residency) -> MoveReport:
        """A task is either here or not: WEIGHTS counts as OFF. On the CPU it holds nothing."""
        began, device = time.perf_counter(), self.context.device
        if to == Residency.FULL:
            device.acquire(self.config.config.text_env.accelerator_memory, _TASK)
        else:
            device.release(_TASK)
        self._residency = to
        seconds = time.perf_counter() - began
        return MoveReport(residency=to, accelerator_bytes=device.held_bytes(), host_bytes=0, seconds=seconds)

    def run(self, iteration: int) -> Metrics:
        """Plays this rank's groups of one iteration; returns when the last group is put.

        Raises RewardError for a reward that is no number; ConfigError for a prompt that is too long.
        """
        self._require_full("run")
        job, first = self.config, iteration * self.config.prompts
        groups = {group: first + group for group in job.groups(self.context.rank)}
        samples: list[Sample] = []

        def deliver(group: Group) -> None:
            samples.extend(group)
            tokens = sum(sample.weight for sample in group)
            oldest = min((int(s.versions[s.mask].min()) for s in group if s.learned), default=None)
            bare = tuple(sample.without_text() for sample in group)
            for channel, text in self._readers.items():
                self.context.channels[channel].put(group if text else bare, weight=tokens, version=oldest)

        clock = self._play(iteration, groups, self._prompts, job.config.algorithm.samples_per_prompt, deliver)
        return _metrics("env", samples, self._rewards, clock)

    def evaluate(self, iteration: int) -> Metrics:
        """Answers this rank's held-out prompts once each, greedily, the same at every call; nothing is learned of it.

        Needs `generate(iteration)` of the rollout ranks at the same time, as `run` does.
        """
        self._require_full("evaluate")
        assert self._held_out is not None, "runner.eval_every says whether there is something held out"
        samples: list[Sample] = []
        groups = {group: group for group in self.config.held_out(self.context.rank)}
        clock = self._play(iteration, groups, self._held_out, 1, samples.extend, greedy=True)
        return _metrics("eval", samples, self._rewards, clock)

    def _play(
        self,
        iteration: int,
        groups: Mapping[int, int],
        prompts: Prompts,
        samples: int,
        deliver: Callable[[Group], None],
        *,
        greedy: bool = False,
    ) -> Clock:
        """One pass of this rank, and its part in ending it for all."""
        assert self._grader is not None, "setup comes first"
        job, algorithm = self.config, self.config.config.algorithm
        limits = Limits(
            turns=job.config.text_env.max_turns, new_tokens=algorithm.max_new_tokens, tokens=algorithm.longest
        )
        rank = self.context.rank
        dialogues = Dialogues(self._tokenizer, self._conversation, limits, env_rank=rank, iteration=iteration)
        weights = {reward.name: reward.weight for reward in self._rewards}
        play = Pass(self.context, dialogues, self._grader, weights, iteration=iteration, greedy=greedy)
        play.through(groups, prompts, samples, deliver)
        play.end(env_ranks=job.env_ranks, rollout_ranks=job.rollout_ranks)
        return play.clock

    def _require_full(self, method: str) -> None:
        if self._residency != Residency.FULL:
            raise not_resident(self.context.owner, method, has=self._residency, needs=Residency.FULL)

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
        self.context.device.release(_TASK)


def _metrics(component: str, samples: Sequence[Sample], rewards: Sequence[Reward], clock: Clock) -> Metrics:
    """Means are over episodes, so ranks with more of them count more."""
    episodes = len(samples)

    def mean(total: float) -> Metric:
        return Metric(total / max(1, episodes), "mean", episodes)

    numbers = {
        "reward": mean(sum(sample.reward for sample in samples)),
        **{f"reward/{r.name}": mean(sum(sample.rewards[r.name] for sample in samples)) for r in rewards},
        "answer_tokens": mean(sum(sample.learned for sample in samples)),
        "episode_tokens": mean(sum(sample.weight for sample in samples)),
        "turns": mean(sum(sample.turns for sample in samples)),
        "truncated": mean(sum(sample.truncated for sample in samples)),
        "episodes": Metric(episodes, "sum"),
        "sim_s": Metric(clock.sim_s + clock.reward_s, "max"),  # all work of the environment: the loop reads it
        "reward_s": Metric(clock.reward_s, "max"),
        "wait_s": Metric(clock.wait_s, "max"),
        "put_s": Metric(clock.put_s, "max"),
    }
    return {f"{component}/{name}": metric for name, metric in numbers.items()}
