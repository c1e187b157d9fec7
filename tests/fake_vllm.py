"""vLLM's engine on a GPU, as far as its sleep goes: what it refuses is refused, and so is what it would only log.

After vllm 0.32: v1/engine/core.py (sleep, wake_up, release_kv_cache_memory), v1/executor/abstract.py and
v1/core/sched/scheduler.py (has_requests). `tests/contract/test_vllm_engine.py` has the same steps taken by vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rlplace.workers.engines.vllm_memory import Held

WEIGHTS, CACHE = "weights", "kv_cache"


class Allocation:
    def __init__(self, tag: str) -> None:
        self.tag, self.is_asleep = tag, False
        self.handle = [0, 1]  # each its own
        self.cpu_backup_tensor: object | None = None


class OlderVllm:
    """A vLLM without `release_kv_cache_memory`, with one worker: what is unmapped twice, or mapped twice, is an error.

    After vllm 0.26: v1/worker/gpu_worker.py (sleep, wake_up), device_allocator/cumem.py and sleep_mode_backend.py.
    """

    def __init__(self) -> None:
        self.pointer_to_data = {
            1: Allocation(WEIGHTS),
            2: Allocation(CACHE),
            3: Allocation(WEIGHTS),
        }
        self.forgotten = False  # its scheduler knows of no block in the cache
        self.copied: list[str] = []

    @property
    def mapped(self) -> set[str]:
        return {
            each.tag for each in self.pointer_to_data.values() if not each.is_asleep
        }

    def unmap(self, each: Allocation) -> None:
        assert not each.is_asleep, f"{each.tag} is unmapped twice"

    def collective_rpc(
        self,
        method: Callable[..., Any] | str,
        /,
        *,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        step = (
            getattr(self, method) if isinstance(method, str) else partial(method, self)
        )
        return [step(*args, **kwargs)]

    def reset_prefix_cache(self) -> bool:
        self.forgotten = True
        return True

    def sleep(self, level: int) -> None:
        """Of the worker."""
        for each in self.pointer_to_data.values():
            self.unmap(each)
            each.is_asleep = True
            if level == 1 and each.tag == WEIGHTS:
                self.copied.append(each.tag)

    def wake_up(self, tags: list[str]) -> None:
        """Of the worker."""
        for each in self.pointer_to_data.values():
            if each.tag in tags:
                assert each.is_asleep, f"{each.tag} is mapped twice"
                each.is_asleep = False


class FakeVllm:
    """Awake, with weights that mean something once they are loaded. Raises RuntimeError for a step out of order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._asleep, self._paused = set[str](), False
        self._loaded = False  # the weights are those of a version
        self._cached = False  # keys and values may be there, of these weights
        self._told = True  # the workers know which requests have finished

    def collective_rpc(
        self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        return [Held(weights=1, cache=1, accelerator=2, host=0)]

    def step(self) -> list[Any]:
        self.calls.append(("step",))
        self._told = True
        return []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))
        self._paused = True
        if level:
            self._legal(
                WEIGHTS not in self._asleep,
                "the executor is already sleeping: a second sleep does nothing",
            )
            self._asleep, self._cached = {WEIGHTS, CACHE}, False
            self._loaded &= level == 1

    def release_kv_cache_memory(self) -> None:
        self.calls.append(("release_kv_cache_memory",))
        self._legal(
            self._paused and self._told,
            "release_kv_cache_memory() requires a completed pause first",
        )
        self._legal(
            not self._asleep,
            "release_kv_cache_memory() requires all executor memory to be resident",
        )
        self._asleep, self._cached = {CACHE}, False

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", *(tags or ())))
        for tag in tags or ():
            self._legal(
                tag in self._asleep,
                f"tag {tag} does not sleep: to wake it does nothing",
            )
            self._asleep.discard(tag)
        self._paused = bool(self._asleep)
        return not self._asleep

    def update(self) -> None:
        """Load weights, and drop what was computed by those before, as the engine does in one."""
        self._legal(
            WEIGHTS not in self._asleep,
            "weights are loaded into memory that is not mapped",
        )
        self._loaded, self._cached = True, False

    def answer(self) -> None:
        self._legal(
            not self._asleep and not self._paused,
            "a request is queued until the scheduler is resumed",
        )
        self._legal(self._loaded, "the weights are random")
        self._cached, self._told = True, False

    def _legal(self, holds: bool, why: str) -> None:
        if not holds:
            raise RuntimeError(why)
