"""The worker's side of a call: makes the worker, runs its methods, turns what goes wrong into a value."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.comm.address import ChannelAddress, Place, ProcessChannels
from rlplace.comm.channel import Channel
from rlplace.comm.waiting import report, view
from rlplace.errors import ChannelTimeout, RlplaceError
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.devices import Device, cuda_out_of_memory
from rlplace.workers.worker import Rendezvous, Worker, WorkerContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Everything a worker is made from."""

    worker: type[Worker]
    config: Any
    slot: Slot
    world_size: int
    device: Device
    channels: Mapping[str, Channel | ChannelAddress]
    seed: int
    folder: Path | None = None  # see WorkerContext


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A method returned `value`, after so many seconds."""

    value: Any
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A method raised. Pickling keeps `cause` when it survives a round trip, else only the texts."""

    what: str
    traceback: str
    cause: BaseException | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The innermost frames matter to the reader: this module's own are left out."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        lines = traceback.format_exception(type(error), error, frames)
        text = str(error) if isinstance(error, RlplaceError) else f"{type(error).__name__}: {error}"
        return cls(what=text, traceback="".join(lines), cause=error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revived, (self.what, self.traceback, _pickled(self.cause))


Outcome = Done | Failure


def _pickled(error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 -- runs an arbitrary class's __reduce__ and constructor; the text is kept anyway
        return None
    return data


def _revived(what: str, text: str, cause: bytes | None) -> Failure:
    error = None
    if cause is not None:
        try:
            error = pickle.loads(cause)
        except Exception:  # noqa: BLE001 -- the class may not exist on this side; the text is kept anyway
            error = None
    return Failure(what=what, traceback=text, cause=error)


def _end(channel: Channel | ChannelAddress, place: Place) -> Channel:
    return channel.connect(place) if isinstance(channel, ChannelAddress) else channel


class WorkerHost:
    """Holds one worker. `build` and `call` come from one thread, `cancel` and `where` from any other."""

    def __init__(self, ends: ProcessChannels | None = None) -> None:
        """`ends`: what the hosts of one process have in common."""
        self._ends = ends or ProcessChannels()
        self._context: WorkerContext | None = None
        self._worker: Worker | None = None
        self._unborn: Failure | None = None
        self._cancelled = threading.Event()
        self._running: tuple[int, str] | None = None  # thread and method

    def build(self, birth: Birth, rendezvous: Rendezvous) -> None:
        """A constructor that raises is told to the first call, so that nobody needs to wait in between."""
        slot = birth.slot
        place = Place(node=slot.node, process=slot.process, ends=self._ends)
        try:
            owner = f"{slot.component} rank {slot.rank}"
            self._context = WorkerContext(
                slot=slot,
                world_size=birth.world_size,
                device=birth.device,
                rendezvous=rendezvous,
                channels={name: _end(at, place).named(owner) for name, at in birth.channels.items()},
                seed=birth.seed,
                folder=birth.folder,
                cancelled=self._cancelled,
            )
            self._worker = birth.worker(birth.config, self._context)
        except BaseException as error:  # noqa: BLE001 -- the boundary of the process: it travels as a value
            self._unborn = Failure.of(error)

    def refuse(self, error: BaseException) -> None:
        """There will be no worker; every call answers with `error`."""
        self._unborn = Failure.of(error)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        if self._unborn is not None:
            return self._unborn
        assert self._worker is not None, f"{method} was called before build"
        self._running = (threading.get_ident(), method)
        began = time.perf_counter()
        try:
            value = getattr(self._worker, method)(*args, **kwargs)
            return Done(value, time.perf_counter() - began)
        except ChannelTimeout as late:
            assert self._context is not None
            late.add_note(report(view(self._context.channels)) or "nobody else waits")  # before the failure breaks them
            return Failure.of(late)
        except BaseException as error:  # noqa: BLE001 -- the boundary of the process: it travels as a value
            return Failure.of(self._named(error))
        finally:
            self._running = None

    def _named(self, error: BaseException) -> BaseException:
        """A GPU that is full says so in the house form, with the place where it happened."""
        assert self._context is not None, "there was a worker to call"
        full = cuda_out_of_memory(error, self._context.slot)
        return error if full is None else full.with_traceback(error.__traceback__)

    def close(self) -> Outcome:
        """Closes the worker, once; without one there is nothing to close."""
        if self._worker is None:
            return Done(None)
        outcome = self.call("close", (), {})
        self._worker, self._unborn = None, Failure.of(RuntimeError("the worker is closed"))
        return outcome

    def cancel(self) -> None:
        self._cancelled.set()

    def where(self) -> str:
        """The method that runs and the lines it is at, "" when none: `generate, at rollout.py:83 in generate, ...`."""
        running = self._running
        if running is None:
            return ""
        frame = sys._current_frames().get(running[0])
        lines: list[str] = []
        while frame is not None and frame.f_code.co_filename != __file__:
            code = frame.f_code
            if not code.co_filename.startswith(os.path.dirname(threading.__file__)):
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        outermost = lines[-1:] + lines[-2:-1]  # the worker's own line and what it called
        return f"{running[1]}, at " + ", ".join(outermost) if lines else running[1]
