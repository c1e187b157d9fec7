"""Define every error a user can meet, and the standard error format: what is wrong, the value, why, and a fix.

::

    RlplaceError
    ├── ProblemsError (ValueError)      one or more Problems, collected and raised once; exit code 2
    │   ├── ConfigError                 a key or value of the config
    │   └── PlacementError              a placement that the cluster or the job cannot hold
    ├── ClusterError                    the machines are not what the plan needs; exit code 2
    ├── OutputError                     a file of the run cannot be written: disk full, no permission
    ├── ChannelError
    │   ├── ChannelFull                 put_nowait without credit
    │   ├── ChannelEmpty                get_nowait without an item
    │   ├── ChannelTimeout              a deadline passed; the text names both sides
    │   ├── ChannelClosed               put after close
    │   ├── EndOfStream                 get after the last item of a closed channel
    │   ├── ChannelBroken               the peer died or the run was cancelled
    │   └── ChannelMisuse (ValueError)  an undeclared key, an item above the capacity, a batch that cannot be exact
    ├── WeightSyncError                 a push arrived late, incomplete or damaged; the old version stays in use
    ├── WorkerError                     a method failed on a rank: component, rank, node, remote traceback
    ├── WorkerTimeout (TimeoutError)    a deadline passed; names the ranks still working, their calls and nodes
    ├── DivergedError                   an update of the policy is not a finite number
    ├── RewardError                     a reward function raised, hung, died or returned no finite number
    └── AcceleratorError
        ├── AcceleratorOutOfMemory      names the residents and their bytes
        ├── NotResident                 asked to compute while offloaded
        └── EngineBusy                  offloaded with answers in flight
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import functools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file and line of a piece of config text."""

    file: str
    line: int | None = None  # 1-based; None for text without lines, such as a command-line override

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


def source_of(key: str, sources: Mapping[str, Source]) -> Source | None:
    """Return where `key`, or the nearest key above it, was written."""
    while key:
        if key in sources:
            return sources[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `render` is the standard error format of this package.

    `code` is stable and asserted by tests; `span` is the half-open column range of `got` the caret marks.
    """

    code: str
    key: str
    what: str
    got: str | None = None
    span: tuple[int, int] | None = None
    source: Source | None = None
    why: str | None = None
    fix: str | None = None

    def render(self) -> str:
        """The standard error format: `key: what [code]`, then got with a caret, why and fix, where they are known."""
        lines = [f"{f'{self.key}: {self.what}':<74} [{self.code}]"]
        if self.got is not None:
            where = f"     ({self.source})" if self.source else ""
            lines.append(_indent("    got: ", self.got) + where)
            if self.span is not None:
                start, end = self.span
                lines.append(" " * (len("    got: ") + start) + "^" * max(1, end - start))
        elif self.source is not None:
            lines.append(f"     at: {self.source}")
        if self.why is not None:
            lines.append(_indent("    why: ", self.why))
        if self.fix is not None:
            lines.append(_indent("    fix: ", self.fix))
        return "\n".join(lines)


def _indent(label: str, text: str) -> str:
    return label + text.replace("\n", "\n" + " " * len(label))


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the nearest known word, or None when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def suggestion(near: str | None) -> str:
    """Return the end of an error's first line that offers the nearest known word; "" for None."""
    return f", did you mean {near!r}?" if near else ""


class RlplaceError(Exception):
    """Base of all errors raised on purpose by this package."""


class ProblemsError(RlplaceError, ValueError):
    """One or more problems of a config, collected and raised once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise AssertionError("a ProblemsError needs at least one problem")
        self.problems = tuple(problems)
        super().__init__("\n".join(p.render() for p in self.problems))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(p.code for p in self.problems)

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(ProblemsError):
    """A key or a value of the config is wrong."""

    @classmethod
    def of(
        cls,
        code: str,
        key: str,
        what: str,
        got: str | None,
        why: str | None,
        fix: str | None,
        *,
        span: tuple[int, int] | None = None,
        source: Source | None = None,
    ) -> ConfigError:
        """Return the error of one problem."""
        return cls([Problem(code=code, key=key, what=what, got=got, span=span, source=source, why=why, fix=fix)])


class PlacementError(ProblemsError):
    """The placement does not fit the cluster or the job."""


class _OneProblem(RlplaceError):
    """An error that carries exactly one Problem; `str()` is its rendered form."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.render())

    @property
    def code(self) -> str:
        return self.problem.code

    def __reduce__(self) -> tuple[type[_OneProblem], tuple[Any, ...]]:
        return type(self), (self.problem,)


class ClusterError(_OneProblem):
    """The machines that were found are not what the plan needs."""


class OutputError(_OneProblem):
    """A file of the run cannot be written."""

    @classmethod
    def of(cls, path: Path, error: OSError, key: str = "runner.output_dir", place: str = "a folder") -> OutputError:
        """Report what the operating system raised about `path`, which `key` names, with the free space of its disk."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return cls(
            Problem(
                code="disk-full" if full else "cannot-write",
                key=key,
                what="the disk is full" if full else f"cannot write: {error.strerror or error}",
                got=str(path),
                why=_free_space(path),
                fix=f"{key}=<{place} with free space that you may write to>",
            )
        )


def _free_space(path: Path) -> str | None:
    """Describe the bytes left where `path` is or would be; None when that cannot be found out."""
    there = next((p for p in (path, *path.parents) if p.exists()), None)
    if there is None:
        return None
    try:
        return f"{shutil.disk_usage(there).free:,} bytes are free in {there if there.is_dir() else there.parent}"
    except OSError:
        return None


class ChannelError(_OneProblem):
    """Base of the errors of a channel."""


class ChannelFull(ChannelError):
    """`put_nowait` found no credit."""


class ChannelEmpty(ChannelError):
    """`get_nowait` found no item."""


class ChannelTimeout(ChannelError, TimeoutError):
    """The deadline of a `put` or `get` passed."""


class ChannelClosed(ChannelError):
    """An item was put into a closed channel."""


class EndOfStream(ChannelError):
    """The channel is closed and its last item was taken."""


class ChannelBroken(ChannelError):
    """The peer died or the run was cancelled; what was in the channel is lost."""


class ChannelMisuse(ChannelError, ValueError):
    """A call that this channel can never serve, however long it waits."""


class WeightSyncError(_OneProblem):
    """The pushed weights are not the requested version, or are incomplete or damaged."""


class DivergedError(_OneProblem):
    """An update of the policy is not a finite number; the weights are those of before it."""


class RewardError(_OneProblem):
    """A reward function returned no finite number for an episode; nothing was learned from it."""


class AcceleratorError(_OneProblem):
    """Base of the errors of an accelerator."""


class AcceleratorOutOfMemory(AcceleratorError):
    """More memory is wanted than an accelerator has left; the text names the components that hold it.

    `accelerator` is its global number, `lacking_bytes` what is wanted beyond what is free, as far as it is known.
    """

    def __init__(self, problem: Problem, accelerator: int | None = None, lacking_bytes: int = 0) -> None:
        super().__init__(problem)
        self.accelerator = accelerator
        self.lacking_bytes = lacking_bytes

    def __reduce__(self) -> tuple[type[AcceleratorOutOfMemory], tuple[Any, ...]]:
        return type(self), (self.problem, self.accelerator, self.lacking_bytes)


class NotResident(AcceleratorError):
    """A worker was asked to compute while its state was not on the accelerator."""


class EngineBusy(AcceleratorError):
    """A generation engine was asked to release its cache while answers are in flight."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class WorkerError(RlplaceError):
    """A worker's method failed, or its process died."""

    component: str
    rank: int
    node: int
    accelerators: tuple[int, ...] = ()
    method: str
    what: str
    stage: str | None = None
    version: int | None = None
    remote_traceback: str | None = None  # on the worker's side
    cause: BaseException | None = None  # the exception raised there; None when the process died

    def __post_init__(self) -> None:
        super().__init__(self.render())

    def render(self) -> str:
        on = f"node {self.node}"
        on += f", accelerators {','.join(map(str, self.accelerators))}" if self.accelerators else ""
        on += f", stage {self.stage}" if self.stage is not None else ""
        on += f", policy version {self.version}" if self.version is not None else ""
        lines = [f"{self.component} rank {self.rank} ({on}): {self.method} failed: {self.what}"]
        if self.remote_traceback:
            lines += ["  on the worker:", *("    " + line for line in self.remote_traceback.rstrip().splitlines())]
        return "\n".join(lines)

    def at(self, *, stage: str, version: int) -> WorkerError:
        """Return the same failure with the stage and policy version in which it happened."""
        return dataclasses.replace(self, stage=stage, version=version)

    def explained_by(self, cause: RlplaceError) -> WorkerError:
        """Return the same failure with `cause` as its text, for a cause that only the driver can name."""
        error = dataclasses.replace(self, what=str(cause), cause=cause)
        error.__cause__ = cause
        return error

    def __reduce__(self) -> tuple[functools.partial[WorkerError], tuple[()]]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(WorkerError, **fields), ()


class WorkerTimeout(_OneProblem, TimeoutError):
    """Ranks did not finish a method before the caller's deadline. They are still working on it."""
