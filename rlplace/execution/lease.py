"""A run's side of the arbiter: before a stage, the run waits until the accelerators of this stage are leased to it.

::

    run       {"ask": [0, 1], "stage": "rollout"} ──▶ arbiter        the run's other accelerators are given back
    arbiter   {"granted": 0.8} ────────────────────▶ run             or {"refused": "<why>"}
    run       {"keep": [0]} ───────────────────────▶ arbiter         no answer
    run       {"end": true} ───────────────────────▶ arbiter         the workers have ended; no answer

Messages are lines of JSON on a pair of sockets without an address, which `rlplace share` made before it started the
run. Processes of workers do not have it. If `rlplace share` ends in any way, the run reads the end of the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.errors import SharingEnded
from rlplace.json_text import parsed_object

# Set by `rlplace share` for the run alone; a run removes it from its environment.
VARIABLE = "RLPLACE_SHARE"
# Set for all processes of a run, which are found by it if the run is killed
MARK = "RLPLACE_SHARE_RUN"
_LONGEST = 1 << 16
_CODE = "sharing-ended"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a run has to know to take part.

    `descriptor`: its end of the pair of sockets. `run`: its name. `account`: folder with the memory accounts of the
    emulated accelerators, which all runs use. `timeout_s`: longest wait for a lease.
    """

    descriptor: int
    run: str
    account: str
    timeout_s: float

    def text(self) -> str:
        """Return the value of the environment variable `VARIABLE`."""
        return json.dumps(dataclasses.asdict(self))


class Lease:
    """The accelerators that are leased to this run."""

    def __init__(self, end: socket.socket, invitation: Invitation) -> None:
        """Use the connected socket `end`. Nothing is leased yet."""
        self.run = invitation.run
        self.account = Path(invitation.account)
        # Seconds that were spent with waiting so far
        self.waited_s = 0.0
        self._timeout_s = invitation.timeout_s
        self._end = end
        self._read = b""
        self._stages: Mapping[str, Collection[int]] = {}
        self._every: Set[int] = frozenset()

    @classmethod
    def from_environment(cls) -> Lease | None:
        """Return the lease of a run that `rlplace share` has started; None for any other run.

        Later calls in this process, and processes that it starts, find none.
        """
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return None
        invitation = Invitation(**parsed_object(text))
        os.set_inheritable(invitation.descriptor, False)
        end = socket.socket(fileno=invitation.descriptor)
        return cls(end, invitation)

    def plan(self, stages: Mapping[str, Collection[int]], every: Set[int]) -> None:
        """Set the accelerators of the run. `stages`: stage -> those on which it works. `every`: all of the run."""
        self._stages = stages
        self._every = every

    def take_all(self, why: str, *, keeping: bool = False) -> None:
        """Wait until all accelerators of the run are leased to it. `why`: what it does with them, in a word.

        `keeping`: give nothing back while waiting, since the state of the workers is not known. Raises SharingEnded.
        """
        self._take(self._every, why, keeping=keeping)

    def enter(self, before: str | None, stage: str) -> None:
        """Wait until the accelerators of a stage are leased to the run. All others are given back before.

        On these, the run holds what it keeps between its stages. `before`: the stage before. None: it is the very first
        one, in which all components come to where they stay, so that the run keeps what it has. Raises SharingEnded.
        """
        if before is None:
            return
        accelerators = self._stages[stage]
        if before == stage:
            # The run goes on in it after an evaluation or a recovery
            self._send({"keep": sorted(accelerators)})
        else:
            self._take(accelerators, stage)

    def _take(
        self, accelerators: Collection[int], stage: str, *, keeping: bool = False
    ) -> None:
        """Wait until `accelerators` are leased to this run. Raises SharingEnded if `rlplace share` has ended, if the
        request is refused, or if the wait takes longer than its deadline.
        """
        asked: dict[str, Any] = {"ask": sorted(accelerators), "stage": stage}
        self._send(asked | ({"keeping": True} if keeping else {}))
        answer = self._answer()
        if "refused" in answer:
            why = str(answer["refused"])
            refused = problem(_CODE, self.run, error="refused", stage=stage, why=why)
            raise SharingEnded(refused)
        self.waited_s += float(answer["granted"])

    def close(self) -> None:
        """Give back everything: the workers of the run have ended."""
        with contextlib.suppress(SharingEnded):
            self._send({"end": True})
        self._end.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error

    def _answer(self) -> dict[str, Any]:
        """Wait for a line of the arbiter, and return it."""
        # The arbiter refuses a wait that is too long; this deadline is for an arbiter that does not answer at all
        self._end.settimeout(self._timeout_s + 60.0)
        while b"\n" not in self._read:
            try:
                more = self._end.recv(_LONGEST)
            except TimeoutError as error:
                silent = problem(
                    _CODE, self.run, error="silent", seconds=self._timeout_s
                )
                raise SharingEnded(silent) from error
            except OSError as error:
                raise self._gone() from error
            if not more:
                raise self._gone()
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return parsed_object(line)

    def _gone(self) -> SharingEnded:
        return SharingEnded(problem(_CODE, self.run, error="gone"))
