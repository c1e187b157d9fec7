"""Define every error a user can meet, and the standard error format: what is wrong, the value, why, and a fix."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

# How like each other a misspelt part of a name and the right one are, of 1
_NEAR = 0.75
_JOINED = 0.9  # the same of names with other numbers of parts
_ROLES = ("actor", "agent", "critic", "env", "reference", "reward", "rollout")
# Begins the source of what is no file's, before the word
COMMAND_LINE = "command line: "
_FIX = re.compile(r"((?:or: |and: )?)([a-z_][\w.]*): (.+?)( {8}.*)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file and line of a piece of config text."""

    file: str
    # 1-based; None for text without lines, such as a command-line override
    line: int | None = None
    # ${...} that gave the value
    written: str | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"


def source_of(key: str, sources: Mapping[str, Source]) -> Source | None:
    """Return where `key`, or the nearest key above it, was written."""
    while key:
        if key in sources:
            return sources[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `code` is stable; `span` is the half-open column range of `got` the caret marks."""

    code: str
    key: str
    what: str
    got: str | None = None
    span: tuple[int, int] | None = None
    source: Source | None = None
    why: str | None = None
    fix: str | None = None

    def render(self) -> str:
        """Return `key: what [code]`, then got with a caret, why and fix, where they are known."""
        got = self.got
        at = None
        if got is None:
            at = None if self.source is None else str(self.source)
        else:
            got += f"     ({self.source})" if self.source else ""
            start, end = self.span or (0, 0)
            got += (
                ""
                if self.span is None
                else "\n" + " " * start + "^" * max(1, end - start)
            )
        rows = (("got", got), (" at", at), ("why", self.why), ("fix", self.pasted))
        below = [
            f"    {label}: " + text.replace("\n", "\n" + " " * 9)
            for label, text in rows
            if text is not None
        ]
        return "\n".join([f"{f'{self.key}: {self.what}':<74} [{self.code}]", *below])

    @property
    def pasted(self) -> str | None:
        """The fix as it can be pasted: lines of a config, or words of the command line where it gave the value."""
        if (
            self.fix is None
            or self.source is None
            or not self.source.file.startswith(COMMAND_LINE)
        ):
            return self.fix
        return "\n".join(_as_word(self.key, line) for line in self.fix.split("\n"))


def _as_word(key: str, line: str) -> str:
    """Write a line of a config, `last part of the key: value` or `path: value`, as a word of a command line.

    Other lines stay as they are; so does a line of the config that is no YAML for one key.
    """
    whole = key.partition("[")[0]  # a list is given whole
    match = _FIX.fullmatch(line)
    if match is None:
        return line
    lead, name, value, remark = match.groups("")
    path = whole if f".{whole}".endswith(f".{name}") else name
    # Instead of the misspelt one
    if whole.rpartition(".")[0].endswith("component_placement") and name in _ROLES:
        path = f"{whole.rpartition('.')[0]}.{name}"
    block = whole.rpartition(".")[0]
    if (
        path != whole
        and "." not in path
        and block.rpartition(".")[0].endswith("component_placement")
    ):
        path = f"{block}.{name}"  # another key of the same line
    plain = value[0] not in "[{\"'<"
    if ("." not in path and path != whole) or (plain and ": " in value):
        return line
    if "<" in value or "..." in value:  # to be filled in
        return f"{lead}{path}={value}{remark}"
    if plain and not re.fullmatch(r"[\w/.:+%*@ -]+", value):
        value = '"' + value.replace('"', '\\"') + '"'
    remark = "" if "a line without indent" in remark else remark
    return f"{lead}{shlex.quote(f'{path}={value}')}{remark}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` misspells, or None: with another number or another part it is another word."""
    names = {name.lower(): name for name in reversed(list(known))}
    near = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    return next((names[name] for name in near if _misspells(word.lower(), name)), None)


def _misspells(word: str, name: str) -> bool:
    """Compare part by part, of names in lower case: `pipeline_size` does not misspell `data_size`."""
    if re.findall("[0-9]+", word) != re.findall("[0-9]+", name) or not re.search(
        "[a-z]", name
    ):
        return False
    parts = [re.split("[^a-z0-9]+", text) for text in (word, name)]
    if len(parts[0]) != len(parts[1]):
        return _likeness("".join(parts[0]), "".join(parts[1])) > _JOINED
    return all(
        sorted(a) == sorted(b) or _likeness(a, b) > _NEAR
        for a, b in zip(*parts, strict=True)
    )


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def one_of(lines: Iterable[str]) -> str:
    """Return the fix of a problem where only the user knows which of these lines is meant."""
    return "one of\n" + "\n".join(lines)


def suggestion(near: str | None) -> str:
    """Return the end of an error's first line that offers the nearest known word; "" for None."""
    if near:
        return f", did you mean {near!r}?"
    return ""


class RlplaceError(Exception):
    """Base of all errors raised on purpose by this package."""


class ProblemsError(RlplaceError, ValueError):
    """One or more problems of a config, collected and raised once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ProblemsError needs at least one problem"
        super().__init__(problems)
        self.problems = tuple(problems)

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
    ) -> Self:
        """Return the error of one problem."""
        return cls(
            [
                Problem(
                    code=code,
                    key=key,
                    what=what,
                    got=got,
                    span=span,
                    source=source,
                    why=why,
                    fix=fix,
                )
            ]
        )

    def __str__(self) -> str:
        return "\n".join(p.render() for p in self.problems)

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(p.code for p in self.problems)


class ConfigError(ProblemsError):
    """A key or a value of the config is wrong."""


class PlacementError(ProblemsError):
    """The placement does not fit the cluster or the job."""


class _OneProblem(RlplaceError):
    """An error that carries exactly one Problem; `str()` is its rendered form."""

    @classmethod
    def about(
        cls,
        code: str,
        key: str,
        what: str,
        *,
        got: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> Self:
        """Return the error of a problem with these fields."""
        return cls(Problem(code=code, key=key, what=what, got=got, why=why, fix=fix))

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem.render()

    @property
    def code(self) -> str:
        return self.problem.code


class ClusterError(_OneProblem):
    """The machines that were found are not what the plan needs."""


class OutputError(_OneProblem):
    """A file of the run cannot be written."""

    @classmethod
    def of(
        cls,
        path: Path,
        error: OSError,
        key: str = "runner.output_dir",
        place: str = "a folder",
    ) -> OutputError:
        """Report what the operating system raised about `path`, which `key` names, with the free space of its disk."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return cls(
            Problem(
                code="disk-full" if full else "cannot-write",
                key=key,
                what="the disk is full"
                if full
                else f"cannot write: {error.strerror or error}",
                got=str(path),
                why=_free_space(path),
                fix=f"{key}=<{place} with free space that you may write to>",
            )
        )


def _free_space(path: Path) -> str | None:
    """Describe the bytes left where `path` is or would be; None when that cannot be found out."""
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is None:
            return None
        return f"{shutil.disk_usage(there).free:,} bytes are free in {there if there.is_dir() else there.parent}"
    except OSError:
        return None


class CallbackError(_OneProblem):
    """A callback of the user's raised an error; what was trained before is saved."""


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


class WorkerMisuse(_OneProblem, ValueError):
    """A worker class, or a call of one of the worker's tools, that cannot work, however long it waits."""


class WeightSyncError(_OneProblem):
    """The pushed weights are not the requested version, or are incomplete or damaged."""


class DivergedError(_OneProblem):
    """An update of the policy is not a finite number; the weights are those of before it."""


class SimulatorError(_OneProblem):
    """A simulator gave a number that is not finite; nothing was learned from it."""


class RewardError(_OneProblem):
    """A reward function returned no finite number for an episode; nothing was learned from it."""


class AcceleratorOutOfMemory(_OneProblem):
    """More memory is wanted than an accelerator has left; the text names the components that hold it.

    `accelerator` is its global number, `lacking_bytes` what is wanted beyond what is free, as far as it is known.
    """

    def __init__(
        self, problem: Problem, accelerator: int | None = None, lacking_bytes: int = 0
    ) -> None:
        super().__init__(problem)
        self.accelerator = accelerator
        self.lacking_bytes = lacking_bytes


class NotResident(_OneProblem):
    """A worker was asked to compute while its state was not on the accelerator."""


class EngineBusy(_OneProblem):
    """A generation engine was asked to release its cache while answers are in flight."""


class EngineError(_OneProblem):
    """A generation engine that is a server gave no answer, or has other weights than it was sent."""


class NodeLost(_OneProblem):
    """Machines of a run are gone, and its workers were ended. `nodes` are their ranks.

    `folder`: of the checkpoint that the run goes on with; of the run where it has none.
    """

    def __init__(self, problem: Problem, nodes: Collection[int], folder: Path) -> None:
        super().__init__(problem)
        self.nodes = nodes
        self.folder = folder

    def noted(self, note: str) -> NodeLost:
        """Return the same error with a note in its text."""
        why = "\n".join(filter(None, [self.problem.why, note]))
        noted = NodeLost(
            dataclasses.replace(self.problem, why=why), self.nodes, self.folder
        )
        noted.__notes__ = [*getattr(self, "__notes__", ())]  # what is told behind it
        return noted


@dataclasses.dataclass(eq=False, repr=False)
class WorkerError(RlplaceError):
    """A worker's method failed, or its process died."""

    component: str
    rank: int
    node: int
    method: str
    what: str
    accelerators: tuple[int, ...] = ()
    stage: str | None = None
    version: int | None = None
    remote_traceback: str | None = None  # on the worker's side
    # The exception raised there; None when the process died
    cause: BaseException | None = None
    output: str | None = None  # the file on the worker's node of all that it printed

    def __post_init__(self) -> None:
        # What is pickled
        super().__init__(
            *(getattr(self, field.name) for field in dataclasses.fields(self))
        )

    def __str__(self) -> str:
        on = f"node {self.node}"
        on += (
            f", accelerators {','.join(map(str, self.accelerators))}"
            if self.accelerators
            else ""
        )
        on += f", stage {self.stage}" if self.stage is not None else ""
        on += f", policy version {self.version}" if self.version is not None else ""
        lines = [
            f"{self.component} rank {self.rank} ({on}): {self.method} failed: {self.what}"
        ]
        lines += [f"  its output: {self.output}"] if self.output else []
        if self.remote_traceback:
            lines += [
                "  on the worker:",
                *(
                    "    " + line
                    for line in self.remote_traceback.rstrip().splitlines()
                ),
            ]
        return "\n".join(lines)

    def at(self, *, stage: str, version: int) -> WorkerError:
        """Return the same failure with the stage and policy version in which it happened."""
        return dataclasses.replace(self, stage=stage, version=version)

    def explained_by(self, cause: RlplaceError) -> WorkerError:
        """Return the same failure with `cause` as its text, for a cause that only the driver can name."""
        error = dataclasses.replace(self, what=str(cause), cause=cause)
        error.__cause__ = cause
        return error


class WorkerTimeout(_OneProblem, TimeoutError):
    """Ranks did not finish a method before the caller's deadline. They are still working on it."""
