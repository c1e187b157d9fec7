"""Requests to a run that goes on: files in its folder, written by `rlplace replace` and `rlplace drain`.

::

    the command   writes replace.request.json ──────▶ waits ─────────────────────────▶ prints the answer
    the run       between two iterations: takes it ─▶ plans, proves ─▶ changes ─▶ writes replace.answer.json
                                                      └ refused: nothing has moved ─┘

A request is a whole file or none. The run removes it when it takes it, so it is taken once. A request from before the
start of the run's present command is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlplace.checkpoints import write_whole
from rlplace.checkpoints.store import in_use
from rlplace.json_text import parsed_object

REQUEST = "replace.request.json"
ANSWER = "replace.answer.json"
_LOOK_S = 0.1
# The run has taken the request: planning and the change itself have limits of their own
_TAKEN_S = 900.0

Outcome = Literal["changed", "refused", "failed"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to change the placement, or to empty a node, or to use it again.

    `name`: unlike that of any other request. `places`: component -> its place, as in `cluster.component_placement`.
    `drains`: the number or address of a node that is to leave; `releases`: of one that is to be used again; "": none.
    """

    name: str
    places: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drains: str = ""
    releases: str = ""

    def record(self) -> dict[str, Any]:
        """Return the request as the content of its file."""
        if self.drains:
            return {"name": self.name, "drains": self.drains}
        if self.releases:
            return {"name": self.name, "releases": self.releases}
        return {"name": self.name, "places": dict(self.places)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a request.

    `request`: its name. `outcome`: "changed"; "refused": nothing has moved; "failed": the run keeps its placement after
    an attempt. `text`: what was done, or why not.
    """

    request: str
    outcome: Outcome
    text: str


# ── the run's side ────────────────────────────────────────────────────────────────────────────────────────────────────


class Requests:
    """The requests to one run. Its driver takes and answers them, between two iterations."""

    def __init__(self, folder: Path) -> None:
        """Refuse a request that waits in the run's folder: it was meant for an earlier command of the run."""
        self._folder = folder
        self._taken: Request | None = None
        if self.take() is not None:
            self.answer("refused", "the run has been started since the request")

    def take(self) -> Request | None:
        """Return the request that waits, and remove its file; None if there is none. A damaged file is removed."""
        file = self._folder / REQUEST
        try:
            text = file.read_bytes()
            file.unlink()
        except OSError:
            return None
        try:
            found = parsed_object(text)
            self._taken = Request(
                name=str(found["name"]),
                places=dict(found.get("places", {})),
                drains=str(found.get("drains", "")),
                releases=str(found.get("releases", "")),
            )
        except (ValueError, KeyError, TypeError):
            return None
        return self._taken

    def answer(self, outcome: Outcome, text: str) -> None:
        """Answer the request that was taken last, once. Do nothing if there is none.

        An answer that cannot be written is dropped: the run goes on without it.
        """
        taken = self._taken
        self._taken = None
        if taken is None:
            return
        answer = Answer(request=taken.name, outcome=outcome, text=text)
        with contextlib.suppress(OSError):
            write_whole(
                self._folder / ANSWER, json.dumps(dataclasses.asdict(answer)) + "\n"
            )


# ── the side of the command ───────────────────────────────────────────────────────────────────────────────────────────


def ask(
    folder: Path, places: Mapping[str, Any], *, drains: str = "", releases: str = ""
) -> Request | None:
    """Write a request into a run's folder, and return it; None if another request waits there. Raises OSError.

    The arguments are those of Request.
    """
    request = Request(
        name=uuid.uuid4().hex, places=places, drains=drains, releases=releases
    )
    part = folder / f"{REQUEST}.{request.name}"
    part.write_text(json.dumps(request.record()) + "\n", encoding="utf-8")
    try:
        # Unlike a rename, a link does not replace another request
        os.link(part, folder / REQUEST)
    except FileExistsError:
        return None
    finally:
        part.unlink()
    return request


def answer_of(
    folder: Path, request: Request, timeout_s: float
) -> Answer | Literal["ended", "late"]:
    """Wait for the answer to a request.

    Return "ended" if the run has ended without an answer, and "late" if it has not taken the request after `timeout_s`
    seconds. In both cases the request is withdrawn.
    """
    until = time.monotonic() + timeout_s
    waits = True
    while True:
        # Asked first: an answer may be the last thing that a run writes
        runs = in_use(folder)
        answer = _written_answer(folder)
        if answer is not None and answer.request == request.name:
            return answer
        if not runs:
            _withdraw(folder, request)
            return "ended"
        if time.monotonic() >= until:
            if not waits or _withdraw(folder, request):
                return "late"
            waits = False
            until = time.monotonic() + _TAKEN_S
        time.sleep(_LOOK_S)


def _withdraw(folder: Path, request: Request) -> bool:
    """Remove the file of a request. Return whether it was still there."""
    try:
        found = parsed_object((folder / REQUEST).read_bytes())
        if found.get("name") != request.name:
            return False
        (folder / REQUEST).unlink()
    except (OSError, ValueError):
        return False
    return True


def _written_answer(folder: Path) -> Answer | None:
    """Return the answer in a run's folder; None if there is none, or if it cannot be read."""
    try:
        found = parsed_object((folder / ANSWER).read_bytes())
        return Answer(
            request=str(found["request"]),
            outcome=found["outcome"],
            text=str(found["text"]),
        )
    except (OSError, ValueError, KeyError):
        return None
