"""The errors of a worker that is asked for something it cannot do now, in the house form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlplace.errors import (
    ConfigError,
    DivergedError,
    EngineBusy,
    NotResident,
    Problem,
    RewardError,
    WeightSyncError,
)
from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.tokens import Completion, Scores


def no_weights(owner: str, method: str) -> NotResident:
    return NotResident(
        Problem(
            code="no-weights",
            key=owner,
            what=f"{method} was called on weights that nobody loaded",
            why="offloading a rollout rank drops its weights, since the next sync brings all of them",
            fix="run the sync stage first: actor.push_weights(version) and rollout.pull_weights(version)",
        )
    )


def engine_busy(owner: str, in_flight: int, to: Residency) -> EngineBusy:
    return EngineBusy(
        Problem(
            code="engine-busy",
            key=owner,
            what=f"it cannot move to {to.word} while it generates",
            got=f"{in_flight} answers in flight",
            why="their tokens stand in the cache that would be given back",
            fix="step() until all have finished, or abort() and submit them again later",
        )
    )


def cache_below_one_answer(owner: str, cache_bytes: int, answer_bytes: int, context: int) -> ConfigError:
    return ConfigError(
        [
            Problem(
                code="kv-cache-too-small",
                key="rollout.kv_cache_memory",
                what=f"{owner}: not one answer fits",
                got=str(cache_bytes),
                why=f"this model keeps {answer_bytes} bytes for {context} tokens of prompt and answer",
                fix=f"rollout.kv_cache_memory: {answer_bytes}",
            )
        ]
    )


def prompt_too_long(owner: str, length: int, context: int) -> ConfigError:
    return ConfigError(
        [
            Problem(
                code="prompt-too-long",
                key=owner,
                what="a prompt leaves no room for an answer",
                got=f"{length} tokens",
                why=f"the engine was built for {context} tokens of prompt and answer together",
                fix="a shorter prompt, or a larger algorithm.max_prompt_length",
            )
        ]
    )


def share_of_nothing() -> ConfigError:
    return ConfigError(
        [
            Problem(
                code="share-of-nothing",
                key="rollout.gpu_memory_utilization",
                what="an engine on emulated accelerators needs its KV cache in bytes",
                why="there it would be a share of all of this machine's memory",
                fix="rollout.kv_cache_memory: 256MiB",
            )
        ]
    )


def some_weights(owner: str, version: int) -> WeightSyncError:
    return WeightSyncError(
        Problem(
            code="some-weights",
            key=owner,
            what=f"only some of the weights of version {version} came, and the others never did",
            why="what a sync leaves out is what the first one brought, and this rank has had none",
            fix="actor.sync.mode: all",
        )
    )


def logprob_not_finite(owner: str, completion: Completion) -> DivergedError:
    answer = f"group {completion.group}, sample {completion.sample}, turn {completion.turn}"
    versions = ", ".join(str(version) for version in sorted(set(completion.versions.tolist())))
    return DivergedError(
        Problem(
            code="logprob-not-finite",
            key=owner,
            what="a token was drawn from what is no distribution",
            got=f"log-probabilities that are not finite in {answer}",
            why=f"the weights of version {versions} are not finite, or their logits overflow in rollout.dtype",
            fix="actor.optimizer.lr: <smaller>, or rollout.dtype: fp32",
        )
    )


def attention_not_full(owner: str, model: str) -> ConfigError:
    return ConfigError(
        [
            Problem(
                code="attention-not-full",
                key="rollout.engine",
                what=f"{owner}: layers of {model} do not attend to all tokens before",
                got="transformers",
                why="this engine keeps every token of an answer in the cache of every layer",
                fix="rollout.engine: vllm",
            )
        ]
    )


def diverged(
    owner: str, numbers: Mapping[str, float], *, iteration: int, rate: str = "actor.optimizer.lr"
) -> DivergedError:
    """`rate`: key of the learning rate."""
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return DivergedError(
        Problem(
            code="diverged",
            key=owner,
            what=f"the update of iteration {iteration} is not a finite number",
            got=shown,
            why="a reward or observation was not finite, or the policy left the range of its numbers",
            fix=f"{rate}=<smaller>, or look for nan in what the simulator returns",
        )
    )


def score_not_finite(component: str, score: Scores) -> RewardError:
    return RewardError(
        Problem(
            code="score-not-finite",
            key=component,
            what=f"its score of sample {score.sample} of group {score.group} is not a finite number",
            got=str(score.values[:8].tolist()) + (" ..." if len(score.values) > 8 else ""),
            why="nothing can be learned from nan or infinity; its weights are damaged, or overflow in its dtype",
            fix=f"{component}.dtype: fp32, or another model",
        )
    )
