"""Errors of generation engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.errors import ConfigError, EngineBusy, NotResident, Problem, WeightSyncError
from rlplace.placement.schedule import Residency
from rlplace.workers.worker import not_resident

if TYPE_CHECKING:
    from rlplace.workers.engines.contract import Engine


def require(engine: Engine, owner: str, method: str, *, needs: Residency, loaded: bool = True) -> None:
    """Raise NotResident while the engine is below `needs`, or without weights where they must be loaded."""
    if engine.residency < needs:
        raise not_resident(owner, method, has=engine.residency, needs=needs)
    if loaded and engine.version is None:
        raise NotResident(
            Problem(
                code="no-weights",
                key=owner,
                what=f"{method} was called before weights were loaded",
                why="offloading a rollout rank drops its weights, since the next sync brings all of them",
                fix="run the sync stage first: actor.push_weights(version) and rollout.pull_weights(version)",
            )
        )


def engine_busy(owner: str, in_flight: int, to: Residency) -> EngineBusy:
    return EngineBusy(
        Problem(
            code="engine-busy",
            key=owner,
            what=f"the engine cannot move to {to.word} while it generates",
            got=f"{in_flight} answers in flight",
            why="their tokens are in the cache that would be given back",
            fix="step() until all have finished",
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
            what=f"only some of the weights of version {version} arrived, and the others never did",
            why="a partial sync completes the first full one, and this rank has received none",
            fix="actor.sync.mode: all",
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
