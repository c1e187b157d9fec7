"""A search for a better placement beside a run, in a process of its own that uses a small share of a core.

::

    driver   config, topology, profile of the run ──▶ process of searches ──▶ plans and their predicted seconds
             goes on with iterations                  at most a share of a core

Each plan of the reply is prepared like a job with this placement alone: with all checks and the memory proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rlplace.config.keys import PLACEMENT
from rlplace.config.open_job import JOB
from rlplace.contract.registry import saved_mapping
from rlplace.errors import ProblemsError, RlplaceError
from rlplace.foresight.loads import Mode
from rlplace.foresight.predict import predict
from rlplace.foresight.probe import changed
from rlplace.foresight.profile import Profile
from rlplace.foresight.search import Search
from rlplace.foresight.show import predicted_seconds
from rlplace.foresight.space import Space
from rlplace.json_text import parsed_object
from rlplace.placement.machines.topology import Topology
from rlplace.placement.plan import Plan
from rlplace.runtime.changes import differing
from rlplace.runtime.prepare import Prepared, check_launch, prepare

SECONDS = 60.0  # most seconds of a search
_LIMIT = 3.0  # times as many, and the process ends
# The share of a core holds for the imports, too
_PROGRAM = """
import sys
from rlplace.cores import use_at_most
use_at_most(float(sys.argv[1]))
from rlplace.runtime import search_beside
with open(int(sys.argv[2]), "rb") as asked, open(int(sys.argv[3]), "r+b") as replied:
    search_beside.main(asked, replied)
"""
_LINE = b"\n"
_KEEP = 8  # plans of a reply
# Keys outside of the placement that a plan may change: none of them changes what is learned
_OFFLOAD = ".enable_offload"
_RESIDENT = "cluster.allow_resident"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a search has to know.

    `mapping`: the config of the run as plain values, with the placement of its start. `name`: title of its plan.
    `topology`: the machines. `now`: config key -> value, the changes from the config to the present placement. `left`:
    such changes for placements that the run has left. `profile`: measured by the run. `seconds`: most seconds of the
    search.
    """

    mapping: Mapping[str, Any]
    name: str
    topology: Topology
    now: Mapping[str, Any]
    left: Sequence[Mapping[str, Any]]
    profile: Profile
    seconds: float = SECONDS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A placement of a reply.

    `changes`: config key -> value, relative to the config of the run; None: the key is removed. `moves`: component ->
    what it has now, and what it would have. `seconds`: predicted for an iteration. `key`: equal for equal placements.
    """

    changes: Mapping[str, Any]
    moves: Mapping[str, Sequence[str]]
    seconds: float
    key: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a search.

    `now_s`: predicted seconds of the present placement. `work`: stage -> predicted seconds of the config's own
    placement. `options`: placements that are predicted to be faster than the present one, best first. `left_s`:
    predicted seconds of the placements in `Request.left`. `proven`: whether no considered placement can be faster than
    the best one. `took_s`: seconds of the search. `cpu_s`: processor seconds of its process since it has started.
    """

    now_s: float
    work: Mapping[str, float]
    options: Sequence[Option]
    left_s: Sequence[float]
    proven: bool
    took_s: float
    cpu_s: float


class SearchFailed(Exception):
    """A search that has ended without a reply. Its text is the reason."""


class SearchProcess:
    """A process that searches, one request after the other. It starts with the first request.

    Requests and replies are in two files without names, which no other process can open. A line in a pipe says that one
    of them is complete. If the run ends in any way, the pipe is closed, and so the process ends.
    """

    def __init__(self, share: float) -> None:
        """Start nothing yet. `share`: share of a core that the process may use, up to 1."""
        self._share = share
        self._files = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._until_s = 0.0

    def ask(self, request: Request) -> None:
        """Start a search. Raises SearchFailed."""
        try:
            if self._process is None:
                self._start()
            assert self._process is not None, "it was started"
            assert self._process.stdin is not None, "it is a pipe"
            _rewrite(self._asked, pickle.dumps(request))
            self._process.stdin.write(_LINE)
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise SearchFailed(f"its process cannot be used: {error}") from error
        self._until_s = time.monotonic() + _LIMIT * request.seconds

    def _start(self) -> None:
        self._asked = self._file()
        self._replied = self._file()
        self._errors = self._file()
        ends = (self._asked.fileno(), self._replied.fileno())
        paths = [path for path in sys.path if path]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(self._share), *map(str, ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=ends,
            env={**os.environ, **variables},
            # Ctrl-C is for the run, which ends this process
            start_new_session=True,
        )

    def _file(self) -> IO[bytes]:
        """Return a file without a name. It is closed by the method `close`."""
        return self._files.enter_context(tempfile.TemporaryFile())

    def reply(self) -> Reply | None:
        """Return the reply to the last request; None if the search goes on. Raises SearchFailed."""
        process = self._process
        assert process is not None, "ask comes first"
        assert process.stdout is not None, "it is a pipe"
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        if not waiting.poll(0):
            if time.monotonic() <= self._until_s:
                return None
            self.close()
            raise SearchFailed("it took too long")
        if not process.stdout.read(len(_LINE)):
            code = process.wait()
            self._errors.seek(0)
            text = self._errors.read().decode("utf-8", "replace").strip()
            self.close()
            last = text.rpartition("\n")[2]
            raise SearchFailed(last or f"its process ended with exit code {code}")
        self._replied.seek(0)
        record = parsed_object(self._replied.read())
        if "failed" in record:
            raise SearchFailed(record["failed"])
        options = [Option(**option) for option in record.pop("options")]
        return Reply(**record, options=options)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "both are pipes"
                # What was not written is of no use any more
                with contextlib.suppress(OSError):
                    pipe.close()
        self._files.close()


def _rewrite(file: IO[bytes], content: bytes) -> None:
    """Replace the content of an open file."""
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()


def request_of(
    mapping: Mapping[str, Any],
    plan: Plan,
    profile: Profile,
    *,
    name: str,
    now: Mapping[str, Any],
    left: Sequence[Mapping[str, Any]],
) -> Request:
    """Return the request for a search. A job object in the config is replaced by its name.

    `mapping`, `plan`: of the run's start. Other arguments: see `Request`.
    """
    named = dict(mapping)
    if JOB in named:
        named[JOB] = saved_mapping({JOB: named[JOB]})[JOB]
    return Request(
        mapping=named,
        name=name,
        topology=plan.topology,
        now=now,
        left=left,
        # Without what predictions have computed from it
        profile=dataclasses.replace(profile),
    )


def key_of(plan: Plan) -> str:
    """Return a text that is equal for plans with the same places and the same components that are offloaded."""
    leaves = sorted(name for name, leaves in plan.offload.items() if leaves)
    return json.dumps([plan.placement.canonical(), leaves], default=str)


# ── in the process of the search ─────────────────────────────────────────────────────────────────────────────────────


class _Places(Space):
    """The plans that differ from the config in their placement and their offloading alone."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        found = self.model.modes(self)
        return tuple(m for m in found if not self.model.mode_changes(m, self.now))


def searched(request: Request) -> Reply:
    """Search, and return the reply."""
    began = time.monotonic()
    start = _prepared(request, {})
    now = start
    if request.now:
        now = _prepared(request, request.now)

    def over() -> bool:
        return time.monotonic() - began > request.seconds

    search = Search(_Places(start.config, start.plan), request.profile)
    answer = search.run(keep=_KEEP, over=over)
    present = key_of(now.plan)
    options = []
    now_s = _seconds(now, request)
    for found in answer.found:
        if found.seconds >= now_s or not all(map(_places_only, found.changes)):
            continue
        try:
            job = _prepared(request, found.changes)
        except ProblemsError:
            continue
        lacking = job.not_run or check_launch(job.config, job.plan, job.sources)
        if lacking or not job.fits or key_of(job.plan) == present:
            continue
        option = Option(
            changes=found.changes,
            moves=differing(now.plan, job.plan),
            seconds=found.seconds,
            key=key_of(job.plan),
        )
        options.append(option)
    left_s = [_seconds(_prepared(request, each), request) for each in request.left]
    work = predicted_seconds(
        predict(start.config, start.plan, start.case, request.profile)
    )
    del work["iteration"]
    return Reply(
        now_s=now_s,
        work=work,
        options=options,
        left_s=left_s,
        proven=answer.proven,
        took_s=time.monotonic() - began,
        cpu_s=time.process_time(),
    )


def _places_only(key: str) -> bool:
    placed = key.startswith(f"{PLACEMENT}.")
    return placed or key == _RESIDENT or key.endswith(_OFFLOAD)


def _prepared(request: Request, changes: Mapping[str, Any]) -> Prepared:
    mapping = changed(request.mapping, changes)
    return prepare(mapping, name=request.name, topology=request.topology)


def _seconds(job: Prepared, request: Request) -> float:
    return predict(job.config, job.plan, job.case, request.profile).seconds


def main(asked: IO[bytes], replied: IO[bytes]) -> None:
    """Reply to requests until the end of standard input. `asked`, `replied`: files of requests and replies."""
    while sys.stdin.buffer.read(len(_LINE)):
        asked.seek(0)
        request: Request = pickle.load(asked)
        # If the run is killed, nothing else ends a search
        signal.alarm(int(_LIMIT * request.seconds) + 1)
        record: dict[str, Any]
        try:
            # Lines that a check prints are no replies
            with contextlib.redirect_stdout(sys.stderr):
                record = dataclasses.asdict(searched(request))
        except RlplaceError as error:
            record = {"failed": str(error).partition("\n")[0]}
        signal.alarm(0)
        _rewrite(replied, json.dumps(record).encode())
        sys.stdout.buffer.write(_LINE)
        sys.stdout.buffer.flush()
