"""Rollout workers: pull weights into a generation engine, then generate until the iteration ends.

`VectorRolloutWorker` decides on actions for simulators. `TextRolloutWorker` continues the token sequences of language
models::

    requests ──▶ take while there is room ──▶ engine.step() ──▶ completions, each as soon as it has finished
                          ▲                        │
                          └── newer weights? load ─┘   no answer waits for a batch

If the actor learns while answers are in flight, the rest of an answer is sampled by newer weights than its beginning
(a partial rollout: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298). Each token carries its version.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlplace.codes import config_error, problem
from rlplace.envs.contract import ContinuousActions
from rlplace.errors import ChannelEmpty, DivergedError
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.channels import asked_at_once
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion
from rlplace.trajectory import ActionChunk, Array, Observation
from rlplace.workers.arguments import (
    ACTIONS,
    COMPLETIONS,
    OBSERVATIONS,
    REQUESTS,
    WEIGHTS,
    EndOfIteration,
    SimulatorArguments,
    TextArguments,
)
from rlplace.workers.engines.build import build_engine
from rlplace.workers.engines.contract import (
    AdapterEngine,
    AdapterSettings,
    Engine,
    EngineSettings,
    TextEngine,
)
from rlplace.workers.threads import threads
from rlplace.workers.worker import MoveReport, RoleWorker, out_of_step

if TYPE_CHECKING:
    from rlplace.comm.weights.version import ReceivedWeights
    from rlplace.workers.engines.torch import Decision, TorchEngine
    from rlplace.workers.engines.weights import SyncProbe

# steps of noise kept, since env ranks drift apart by a few steps; older steps are drawn again
_KEPT_STEPS = 8
# Label of the simulators of an evaluation in the device's account
_PLAYED = "simulators of an evaluation"


class RolloutWorker(RoleWorker):
    """Base class of rollout workers. Owns a generation engine, and the receiver of the actor's weights.

    A subclass creates both in `setup`, with `_open`, and defines `generate`.
    """

    _probe: SyncProbe | None = None

    def _open(self, engine: Engine) -> None:
        # Imported here: the driver imports this module too.
        import torch

        torch.set_num_threads(threads())
        self.engine = engine
        self._opened.callback(engine.close)
        self._enter_plan()

    def _enter_plan(self) -> None:
        from rlplace.workers.engines.weights import KeptWeights
        from rlplace.workers.weights import open_receiver

        actor = self.config.config.actor
        context = self.context
        self._receiver = open_receiver(
            context, WEIGHTS, deliveries=self.config.deliveries, engine=self.engine
        )
        self._of_plan.callback(self._receiver.close)
        scale = None
        if actor.sync.factors_apart and actor.lora_rank:
            scale = actor.lora_alpha / actor.lora_rank
        keeps = actor.sync.mode in ("trainable", "lora")
        if actor.sync.mode == "adapter":
            keeps = self._drops_weights()
        self._kept = KeptWeights(context.owner, keeps=keeps, scale=scale)
        self._of_plan.callback(self._kept.close)

    def _drops_weights(self) -> bool:
        """Return whether the engine may lose its weights between two syncs. A simulator's engine keeps none apart."""
        return True

    def move(self, to: Residency) -> MoveReport:
        return MoveReport(
            residency=to,
            accelerator_bytes=self.engine.move(to),
            host_bytes=self.engine.host_bytes,
        )

    def begin_again(self, iteration: int) -> Metrics:
        self._receiver.begin_again()
        self._kept.close()
        return super().begin_again(iteration)

    def pull_weights(self, version: int, source: str | None = None) -> Metrics:
        """Receive policy version `version` of the weights, verify and load it into the engine, and return metrics.

        `source`: component that sends the weights; only "actor" and None are allowed, and None means "actor". If this
        raises WeightSyncError or an error of a channel, the engine keeps its earlier weights. An engine that had begun
        to load a sync window by window then has no weights, and refuses to generate until the next sync.
        """
        from rlplace.workers.weights import pull_metrics

        assert source in (None, "actor"), "a rollout takes the weights of the actor"
        began = time.perf_counter()
        received = self._receiver.pull(version)
        if self._probe is not None:
            self._probe.take(received.tensors)
        pulled = time.perf_counter()
        if not self._take_factors(received):
            with self._kept.completed(received) as (weights, factors):
                if not received.loaded:
                    self.engine.load(weights, version, factors)
        loading_s = time.perf_counter() - pulled
        moved = pull_metrics(
            "rollout", received, waited_s=pulled - began, loading_s=loading_s
        )
        return {**moved, **(self._probe.compare() if self._probe is not None else {})}

    def _take_factors(self, received: ReceivedWeights) -> bool:
        """Give the engine the LoRA factors of a version that has only them, if it applies factors beside its weights.

        Return whether it was done. The base class returns False.
        """
        return False


# ── simulators ────────────────────────────────────────────────────────────────────────────────────────────────────────


class VectorRolloutWorker(RolloutWorker):
    """Answers all observations of an iteration with sampled actions, in the order in which the observations arrive.

    By default one forward pass handles the observations of one message of an env rank, so the actions do not depend on
    timing. With `rollout.merge_requests`, one forward pass handles all messages that have arrived. This is faster, but
    the actions may differ in their last bits from run to run, because matrix products round differently for other batch
    sizes.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.policy_networks",
        "rlplace.workers.engines.torch",
        "rlplace.workers.engines.weights",
        "rlplace.workers.weights",
    )

    follows_plans: ClassVar[bool] = True

    config: SimulatorArguments
    engine: TorchEngine

    def setup(self) -> None:
        from rlplace.models.mlp import noise_shape
        from rlplace.models.policy_networks import build_policy
        from rlplace.workers.engines.torch import TorchEngine

        config, context, spaces = self.config.config, self.context, self.config.spaces
        context.device.verify()
        policy = build_policy(
            spaces, config.actor, config.algorithm, config.runner.seed
        )
        workspace = config.rollout.workspace_memory
        self._open(
            TorchEngine(
                policy,
                device=context.device,
                owner=context.owner,
                workspace_bytes=workspace,
            )
        )
        self._noise = RowNoise(
            seed=config.runner.seed,
            rows=config.env.total_num_envs,
            shape=noise_shape(spaces.actions),
            uniform=not isinstance(spaces.taken_actions, ContinuousActions),
        )

    def generate(self, iteration: int) -> Metrics:
        """Decide on actions for all observations that this rank gets in `iteration`, and return metrics.

        Returns when the actions of the last observation have been sent. If the policy was lent to the env rank of the
        same process, returns when that env rank has given it back.
        """
        watch = Stopwatch("policy", "wait", "put")
        answer = self._lend if self.config.routes.direct else self._answer_all
        batches = answer(iteration, watch)
        return {**watch.metrics("rollout"), "rollout/batches": Metric(batches, "sum")}

    def evaluate(self, iteration: int) -> Metrics:
        """Run whole episodes with the most probable actions of the loaded weights, and return metrics.

        Rank 0 runs all episodes, so the metrics do not depend on the placement. It creates separate simulators for
        this, so the state of training does not change.
        """
        from rlplace.models.policy import Policy
        from rlplace.models.policy_networks import build_policy
        from rlplace.workers.roles.played import played_metrics

        config = self.config.config
        spaces = self.config.spaces
        if self.context.rank:
            return {}
        network = build_policy(
            spaces, config.actor, config.algorithm, config.runner.seed
        )
        self.engine.copy_to(network)
        network.requires_grad_(False).eval()
        policy = Policy(network, spaces, config, seed=0).eval()

        def act(observations: NDArray[Any], begins: NDArray[np.bool_]) -> NDArray[Any]:
            self.context.check_cancelled("evaluate")
            return policy.choose(observations, begins=begins)

        device = self.context.device
        try:
            device.acquire(config.evaluation_memory(self.config.ranks["env"]), _PLAYED)
            return played_metrics(config.env, spaces, act, config.runner.eval_episodes)
        finally:
            device.release(_PLAYED)

    def _answer_all(self, iteration: int, watch: Stopwatch) -> int:
        """Answer all observations from this rank's channel in `iteration`, and return the number of batches.

        `watch`: measures the seconds of each part of the work.
        """
        context = self.context
        config = self.config.config.rollout
        source = context.channels[OBSERVATIONS]
        key = str(context.rank)
        # Number of rows that this rank has to answer
        due = sum(
            share.stop - share.start
            for share in self.config.routes.observations.receives(context.rank)
        )
        due *= self.config.config.algorithm.rollout_steps * config.pipeline_stage_num
        batches = 0
        while due:
            context.check_cancelled("generate")
            arrived = (
                source.get_batch(due, key=key)
                if config.merge_requests
                else [source.get(key=key)]
            )
            watch.lap("wait")
            places = [(o.step, o.first_row, len(o.observations)) for o in arrived]
            decision = self._decide(
                iteration, places, np.concatenate([o.observations for o in arrived])
            )
            watch.lap("policy", len(decision.values))
            self._answer(arrived, decision)
            watch.lap("put")
            due -= len(decision.values)
            batches += 1
        return batches

    def _lend(self, iteration: int, watch: Stopwatch) -> int:
        """Lend this rank's policy to the env rank of the same process, and return the number of decisions.

        All decisions are computed in the env rank's thread, while this thread waits.

        `watch`: measures the seconds of each part of the work.
        """
        import torch

        context = self.context
        batches = 0

        def decide(step: int, first_row: int, observations: Array) -> Decision:
            nonlocal batches
            context.check_cancelled("generate")
            if not batches:
                # `_open` set the number for its own thread only; torch keeps it for each thread.
                torch.set_num_threads(threads())
            watch.lap("wait")
            # torch warns about arrays that are not writable.
            writable = np.require(observations, requirements=("C", "W"))
            decision = self._decide(
                iteration, [(step, first_row, len(observations))], writable
            )
            watch.lap("policy", len(observations))
            batches += 1
            return decision

        context.lending.lend(
            context.slot.process,
            decide,
            owner=context.owner,
            timeout_s=self.config.config.runner.channel_timeout_s,
            check=lambda: context.check_cancelled("generate"),
        )
        watch.lap("wait")
        return batches

    def _decide(
        self,
        iteration: int,
        places: Sequence[tuple[int, int, int]],
        observations: Array,
    ) -> Decision:
        """Return the policy's decisions on all observations, from one forward pass.

        `places`: for each message whose rows are in `observations`, in order: (step, first global row, number of rows).
        The sampling noise depends on these three numbers.
        """
        noise = np.concatenate(
            [self._noise.rows(iteration, *place) for place in places]
        )
        return self.engine.decide(observations, noise)

    def _answer(self, observations: Sequence[Observation], decision: Decision) -> None:
        start = 0
        for observation in observations:
            stop = start + len(observation.observations)
            chunk = ActionChunk(
                stage_group=observation.stage_group,
                step=observation.step,
                first_row=observation.first_row,
                actions=decision.actions[start:stop],
                logprobs=decision.logprobs[start:stop],
                values=decision.values[start:stop],
                version=decision.version,
                memory=None if decision.memory is None else decision.memory[start:stop],
            )
            key = f"{observation.env_rank}/{observation.stage_group}"
            self.context.channels[ACTIONS].put(
                chunk, key=key, weight=observation.weight
            )
            start = stop

    def digest(self) -> str:
        """Return the SHA-256 of the loaded weights. It is equal on two ranks if their weights are equal bit by bit."""
        return self.engine.digest()


class RowNoise:
    """Random numbers for sampling the actions of all environments (rows) of a job.

    A row's numbers depend only on the seed, the iteration, the step and the global row, so every rank draws the same
    numbers without communication. Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") has a
    256-bit counter. Each step of each iteration has its own 2^64 counter values, so no number is drawn twice, and a
    step can be drawn without the earlier steps. A step is drawn for all rows at once, which takes microseconds.
    """

    def __init__(
        self, *, seed: int, rows: int, shape: tuple[int, ...], uniform: bool
    ) -> None:
        """Create the generator.

        `seed`: key of the generator. `rows`: number of environments of the job. `shape`: shape of one row's numbers.
        `uniform`: whether to draw from the uniform distribution over [0, 1) instead of the standard normal
        distribution.
        """
        self._philox = np.random.Philox(key=seed)
        # The state is set for each draw; making a new Philox takes four times as long.
        self._state: Any = self._philox.state
        generator = np.random.Generator(self._philox)
        draw: Any = generator.random if uniform else generator.standard_normal
        self._fresh = functools.partial(draw, (rows, *shape), dtype=np.float32)
        self._step = functools.lru_cache(maxsize=_KEPT_STEPS)(self._draw)

    def rows(
        self, iteration: int, step: int, first: int, count: int
    ) -> NDArray[np.float32]:
        """Return the random numbers of `count` global rows, from row `first` on, for one step: [count, *shape], a
        read-only view.
        """
        return self._step(iteration, step)[first : first + count]

    def _draw(self, iteration: int, step: int) -> NDArray[np.float32]:
        # 64-bit words, lowest first
        self._state["state"]["counter"][:] = (
            0,
            step,
            iteration,
            0,
        )
        self._philox.state = self._state
        drawn: NDArray[np.float32] = self._fresh()
        drawn.flags.writeable = False
        return drawn


# ── language models ───────────────────────────────────────────────────────────────────────────────────────────────────


class Counts:
    """Counters of a rollout rank's work in one iteration; `metrics` returns them as metrics."""

    def __init__(self, cached_tokens: int) -> None:
        self.began = time.perf_counter()
        self.watch = Stopwatch("prefill", "decode", "wait", "put")
        self.cached_before = cached_tokens
        # Generated answers and tokens
        self.answers = self.tokens = 0
        # Prompt tokens, counted once for each answer
        self.prompt_tokens = 0
        # Engine steps; answers in flight, summed over steps
        self.steps = self.in_flight = 0
        # Weight updates while answers were in flight
        self.updates = 0
        # Whether prompts are held-out ones; lengths of their answers are not reported as those of samples
        self.held_out = False

    def metrics(self, cached_tokens: int) -> Metrics:
        cached = cached_tokens - self.cached_before
        seconds = time.perf_counter() - self.began
        parts = self.watch.seconds
        return {
            "rollout/answers": Metric(self.answers, "sum"),
            "rollout/tokens": Metric(self.tokens, "sum"),
            "rollout/tokens_per_s": Metric(self.tokens / seconds, "sum"),
            "rollout/batch": Metric(
                self.in_flight / max(1, self.steps), "mean", self.steps
            ),
            "rollout/prompt_cached": Metric(
                cached / max(1, self.prompt_tokens), "mean", self.prompt_tokens
            ),
            **(
                {"rollout/updates": Metric(self.updates, "max")} if self.updates else {}
            ),
            **self.watch.metrics("rollout"),
            "rollout/policy_s": Metric(parts["prefill"] + parts["decode"], "max"),
        }


class TextRolloutWorker(RolloutWorker):
    """Generates a language model's answers to requests.

    All ranks take requests from one queue, and a rank with room takes the next request. Each rank has at most its even
    share of an iteration's answers in flight. So a rank with a large KV cache cannot take all requests while other
    ranks idle.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.workers.engines.transformers",
        "rlplace.workers.engines.weights",
        "rlplace.workers.weights",
    )

    follows_plans: ClassVar[bool] = True

    config: TextArguments
    engine: TextEngine
    # Last version that was loaded during generation, before `pull_weights` was called for it
    _ahead = -1

    def setup(self) -> None:
        from rlplace.workers.engines.weights import SyncProbe

        algorithm = self.config.config.algorithm
        answers = (
            asked_at_once(self.config.prompts, algorithm.short_rounds)
            * algorithm.samples_per_prompt
        )
        # An agent asks for several answers at once
        if self.config.config.env.is_led:
            answers *= self.config.config.env.max_turns
        self._share = math.ceil(answers / self.config.ranks["rollout"])
        self._open(build_engine(self._settings(), self.context))
        self._probe = SyncProbe(self.engine, self.config, self.context.owner)

    def _enter_plan(self) -> None:
        super()._enter_plan()
        self._ahead = -1

    def _settings(self) -> EngineSettings:
        """Return the settings of the generation engine, from the config and the tokenizer."""
        job = self.config
        stop_token_ids, stop_texts = Tokenizer.load(job.model).stops(
            job.config.rollout.stop, chat=job.config.env.chat
        )
        rollout = job.config.rollout
        runner = job.config.runner
        temperature = runner.eval_temperature
        top_p = runner.eval_top_p
        held_out = dataclasses.replace(
            rollout,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=top_p or rollout.top_p,
        )
        actor = job.config.actor
        adapter = None
        if actor.sync.mode == "adapter" and actor.lora_rank is not None:
            adapter = AdapterSettings(
                rank=actor.lora_rank,
                scale=actor.lora_alpha / actor.lora_rank,
                targets=actor.lora_targets,
            )
        return EngineSettings(
            adapter=adapter,
            rollout=rollout,
            held_out=None if held_out == rollout else held_out,
            model=job.model,
            context=job.config.algorithm.longest,
            stop_token_ids=stop_token_ids,
            stop_texts=stop_texts,
            emulated_memory=job.config.cluster.accelerator.memory,
            tensor_parallel=len(self.context.slot.accelerators),
            env=job.config.env,
            routes=actor.router_replay,
        )

    def _drops_weights(self) -> bool:
        rollout = self.config.config.rollout
        on_host = rollout.engine == "vllm" and rollout.sleep_level == 1
        return rollout.enable_offload and not on_host

    def _take_factors(self, received: ReceivedWeights) -> bool:
        actor = self.config.config.actor
        complete = not received.partial or self.engine.version is None
        if complete or actor.sync.mode != "adapter":
            return False
        # Imported here: the driver imports this module too
        from rlplace.models.lora import take_factors

        assert actor.lora_rank is not None, "other weights are never partial here"
        assert isinstance(self.engine, AdapterEngine), "the plan refuses other engines"
        scale = actor.lora_alpha / actor.lora_rank
        with received:
            _, factors = take_factors(received.tensors, scale)
            self.engine.load_factors(factors, received.version)
        return True

    def begin_again(self, iteration: int) -> Metrics:
        self.engine.drop()
        self._ahead = -1
        return super().begin_again(iteration)

    def pull_weights(self, version: int, source: str | None = None) -> Metrics:
        """Receive and load each version of the weights that is not loaded yet, up to `version`; return metrics of the
        last one.

        Do nothing and return no metrics if `generate` has loaded `version` already.

        `source`: component that sends the weights; only "actor" and None are allowed, and None means "actor".
        """
        metrics: Metrics = {}
        if version > self._ahead:
            held = self.engine.version
            for due in range(
                version if held is None else min(held + 1, version), version + 1
            ):
                metrics = super().pull_weights(due, source)
        return metrics

    def generate(self, iteration: int) -> Metrics:
        """Answer requests until the message EndOfIteration arrives, and return metrics.

        Answers in flight are then finished, or dropped if the message says so.
        """
        assert self._probe is not None, "setup comes first"
        verified = self._probe.compare()
        counts = Counts(self.engine.cached_tokens)
        while self._take(iteration, counts):
            self._step(counts)
        # Nothing is in flight if the end arrives after the last answer.
        while self.engine.in_flight:
            self._step(counts)
        return {**counts.metrics(self.engine.cached_tokens), **verified}

    def _take(self, iteration: int, counts: Counts) -> bool:
        """Take requests from the channel and submit them to the engine, as long as the engine has room.

        If no answer is in flight, wait for a request. Return False after the message EndOfIteration, else True.

        `counts`: counters of the iteration, which are updated.
        """
        self.context.check_cancelled("generate")
        requests = self.context.channels[REQUESTS]
        while self.engine.room and self.engine.in_flight < self._share:
            try:
                item = (
                    requests.get_nowait() if self.engine.in_flight else requests.get()
                )
            except ChannelEmpty:
                break
            if not self.engine.in_flight:
                counts.watch.lap("wait")
            if item.iteration != iteration:
                got = f"iteration {item.iteration + 1}"
                expected = f"iteration {iteration + 1}"
                raise out_of_step(
                    self.context.owner,
                    "request",
                    got=got,
                    expected=expected,
                )
            if isinstance(item, EndOfIteration):
                if item.drop:
                    self.engine.drop()
                return False
            self.engine.submit(item)
            counts.held_out = item.held_out
            counts.prompt_tokens += item.samples * len(item.tokens)
        return True

    def _step(self, counts: Counts) -> None:
        # The actor has started to push new weights; answers in flight continue with them.
        while self._receiver.announced():
            held = self.engine.version
            assert held is not None, "nothing is generated without weights"
            super().pull_weights(held + 1)
            self._ahead = held + 1
            counts.updates += 1
            counts.watch.lap("update")
        counts.steps += 1
        counts.in_flight += self.engine.in_flight
        finished = self.engine.step(counts.watch)
        for completion in finished:
            if not np.isfinite(completion.logprobs).all():
                self._note_not_finite(completion)
            if completion.routes is None and not completion.held_out:
                self._check_routes()
            self.context.channels[COMPLETIONS].put(
                completion, key=str(completion.env_rank)
            )
            counts.tokens += len(completion.tokens)
            if not counts.held_out:
                counts.watch.draw("answer_tokens", len(completion.tokens))
        if finished:
            counts.answers += len(finished)
            counts.watch.lap("put", len(finished))

    def _check_routes(self) -> None:
        """Raise ConfigError if answers to be learned must have routes. Only a custom engine can lack them."""
        if self.config.config.actor.router_replay:
            raise config_error(
                "no-routes",
                "actor.router_replay",
                self.config.config.rollout.engine,
                owner=self.context.owner,
            )

    def _note_not_finite(self, completion: Completion) -> None:
        """Raise DivergedError for an answer with numbers that are not finite; log it if the config skips such ones."""
        error = _not_finite(self.context.owner, completion)
        if not self.config.config.skips_poison:
            raise error
        self.context.log.warning(
            "skipped: %s: %s", error.problem.what, error.problem.got
        )


def _not_finite(owner: str, completion: Completion) -> DivergedError:
    versions = ", ".join(map(str, np.unique(completion.versions)))
    got = (
        f"group {completion.group}, sample {completion.sample}, turn {completion.turn}"
    )
    error = "learned"
    # All tokens are from version 0: nothing has been learned yet.
    if not completion.versions.any():
        error = "folder"
    infinite = problem("logprob-not-finite", owner, got, error=error, versions=versions)
    return DivergedError(infinite)
