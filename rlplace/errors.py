"""All errors that a user can meet, and the standard error form: what is wrong, the value, why, and a fix."""

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

# Smallest similarity, from 0 to 1, at which a part of a misspelt name counts as the known part.
_NEAR = 0.75
# The same for whole names that have different numbers of parts.
_JOINED = 0.9
_ROLES = ("actor", "agent", "critic", "env", "reference", "reward", "rollout")
# Begins the source of a value that was given on the command line; the word follows
COMMAND_LINE = "command line: "
# A line of a fix: lead word, key, value, remark behind eight blanks
_FIX = re.compile(r"((?:or: |and: )?)([a-z_][\w.]*): (.+?)( {8}.*)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file and line of a piece of config text."""

    file: str
    # 1-based; None for text without lines, such as a command-line override
    line: int | None = None
    # The text with ${...} that gave the value
    written: str | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"


def source_of(key: str, sources: Mapping[str, Source]) -> Source | None:
    """Return where `key`, or the nearest key above it, was written; None if no such key was."""
    while key:
        if key in sources:
            return sources[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem in the standard error form.

    `code` is stable over versions. `span`: half-open range of columns of `got` that a caret marks.
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
        """Return the problem as text: `key: what [code]`, then got with a caret, why and fix, as far as they are
        known.
        """
        # Without a value, only the source is shown
        got = self.got
        at = None
        if got is None:
            if self.source is not None:
                at = str(self.source)
        else:
            if self.source:
                got += f"     ({self.source})"
            if self.span is not None:
                start, end = self.span
                got += "\n" + " " * start + "^" * max(1, end - start)
        # Further lines of a field stand below its text
        lines = [f"{f'{self.key}: {self.what}':<74} [{self.code}]"]
        fields = (("got", got), (" at", at), ("why", self.why), ("fix", self.pasted))
        for label, text in fields:
            if text is not None:
                indented = text.replace("\n", "\n" + " " * 9)
                lines.append(f"    {label}: {indented}")
        return "\n".join(lines)

    @property
    def pasted(self) -> str | None:
        """The fix in the form to paste: lines of a config, or words of a command line if the value came from
        there.
        """
        if (
            self.fix is None
            or self.source is None
            or not self.source.file.startswith(COMMAND_LINE)
        ):
            return self.fix
        return "\n".join(_as_word(self.key, line) for line in self.fix.split("\n"))


def _as_word(key: str, line: str) -> str:
    """Return a line of a fix, `last part of the key: value` or `path: value`, as a word of a command line.

    A line of another form is returned unchanged, as is one whose value is not YAML for one key.
    """
    match = _FIX.fullmatch(line)
    if match is None:
        return line
    lead, name, value, remark = match.groups("")
    # An item of a list is replaced with its whole list
    whole = key.partition("[")[0]
    block = whole.rpartition(".")[0]
    path = whole if f".{whole}".endswith(f".{name}") else name
    # The right name of a misspelt component
    if block.endswith("component_placement") and name in _ROLES:
        path = f"{block}.{name}"
    # Another key in the line of a component
    in_placement = block.rpartition(".")[0].endswith("component_placement")
    if path != whole and "." not in path and in_placement:
        path = f"{block}.{name}"
    is_plain = value[0] not in "[{\"'<"
    has_no_path = "." not in path and path != whole
    if has_no_path or (is_plain and ": " in value):
        return line
    # A value that the user fills in needs no quotes
    if "<" in value or "..." in value:
        return f"{lead}{path}={value}{remark}"
    if is_plain and not re.fullmatch(r"[\w/.:+%*@ -]+", value):
        escaped = value.replace('"', '\\"')
        value = f'"{escaped}"'
    if "a line without indent" in remark:
        remark = ""
    word = shlex.quote(f"{path}={value}")
    return f"{lead}{word}{remark}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` misspells, or None.

    Words that differ in a number or in a whole part are different words, not misspelt ones.
    """
    names = {name.lower(): name for name in reversed(list(known))}
    near = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    for name in near:
        if _misspells(word.lower(), name):
            return names[name]
    return None


def _misspells(word: str, name: str) -> bool:
    """Whether `word` misspells `name`, both in lower case, part by part: `pipeline_size` does not misspell
    `data_size`.
    """
    same_numbers = re.findall("[0-9]+", word) == re.findall("[0-9]+", name)
    has_letters = re.search("[a-z]", name) is not None
    if not same_numbers or not has_letters:
        return False
    word_parts = re.split("[^a-z0-9]+", word)
    name_parts = re.split("[^a-z0-9]+", name)
    if len(word_parts) != len(name_parts):
        return _likeness("".join(word_parts), "".join(name_parts)) > _JOINED
    for a, b in zip(word_parts, name_parts, strict=True):
        same_letters = sorted(a) == sorted(b)
        if not same_letters and _likeness(a, b) <= _NEAR:
            return False
    return True


def _likeness(a: str, b: str) -> float:
    """Return how similar two texts are, from 0 to 1."""
    return difflib.SequenceMatcher(None, a, b).ratio()


def one_of(lines: Iterable[str]) -> str:
    """Return a fix that lists these lines, for a problem where only the user knows which one is meant."""
    return "one of\n" + "\n".join(lines)


def suggestion(near: str | None) -> str:
    """Return the end of an error's first line that suggests a known word; "" for None."""
    if near:
        return f", did you mean {near!r}?"
    return ""


class RlplaceError(Exception):
    """Base of all errors that this package raises on purpose."""


class ProblemsError(RlplaceError, ValueError):
    """Problems that were found together and are raised as one error."""

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
        """Return an error with one problem."""
        problem = Problem(
            code=code,
            key=key,
            what=what,
            got=got,
            span=span,
            source=source,
            why=why,
            fix=fix,
        )
        return cls([problem])

    def __str__(self) -> str:
        return "\n".join(p.render() for p in self.problems)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all problems, in their order."""
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
        """Return an error with a problem of these fields."""
        return cls(Problem(code=code, key=key, what=what, got=got, why=why, fix=fix))

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem.render()

    @property
    def code(self) -> str:
        """The code of the problem."""
        return self.problem.code


class ClusterError(_OneProblem):
    """The available machines differ from those that the plan needs."""


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
        """Return the error of a path that cannot be written, with the reason and the free space of its disk.

        `key`: the config key that names the path. `place`: noun for it in the fix.
        """
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = "cannot-write"
        what = f"cannot write: {error.strerror or error}"
        if full:
            code = "disk-full"
            what = "the disk is full"
        problem = Problem(
            code=code,
            key=key,
            what=what,
            got=str(path),
            why=_free_space(path),
            fix=f"{key}=<{place} with free space that you may write to>",
        )
        return cls(problem)


def _free_space(path: Path) -> str | None:
    """Return a text about the free space of the disk where `path` is or would be; None if it cannot be found out."""
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is None:
            return None
        folder = there if there.is_dir() else there.parent
        return f"{shutil.disk_usage(there).free:,} bytes are free in {folder}"
    except OSError:
        return None


class CallbackError(_OneProblem):
    """A callback of the user raised an error; the state before the callback is saved."""


class ChannelError(_OneProblem):
    """Base of the errors of a channel."""


class ChannelFull(ChannelError):
    """`put_nowait` found the channel full."""


class ChannelEmpty(ChannelError):
    """`get_nowait` found no item."""


class ChannelTimeout(ChannelError, TimeoutError):
    """The deadline of a `put` or `get` passed."""


class ChannelClosed(ChannelError):
    """An item was put into a closed channel."""


class EndOfStream(ChannelError):
    """The channel is closed and its last item was taken."""


class ChannelBroken(ChannelError):
    """The peer died or the run was cancelled; the items in the channel are lost."""


class ChannelMisuse(ChannelError, ValueError):
    """A call that this channel can never fulfil, however long it waits."""


class WorkerMisuse(_OneProblem, ValueError):
    """A worker class, or a call of one of the worker's tools, that cannot work, however long it waits."""


class NotSent(_OneProblem, TypeError):
    """An item, an argument or a result has a part that cannot be sent to another process."""


class WeightSyncError(_OneProblem):
    """The pushed weights have another version than the requested one, or are incomplete or damaged."""


class DivergedError(_OneProblem):
    """A policy update has NaN or infinite numbers; the weights are those before the update."""


class SimulatorError(_OneProblem):
    """A simulator returned NaN or infinity; nothing was learned from it."""


class RewardError(_OneProblem):
    """A reward function returned NaN, infinity or no number for an episode; nothing was learned from it."""


class AcceleratorOutOfMemory(_OneProblem):
    """More memory is requested than an accelerator has left; the text names the components that hold the rest.

    `accelerator`: global number. `lacking_bytes`: requested minus free bytes; 0 if unknown.
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
    """A generation engine on a server did not answer, or has other weights than those that were sent to it."""


class NodeLost(_OneProblem):
    """Machines of a run are gone, and the run's workers were ended.

    `nodes`: ranks of the machines. `folder`: of the checkpoint from which the run resumes; the run's folder if there
    is no checkpoint.
    """

    def __init__(self, problem: Problem, nodes: Collection[int], folder: Path) -> None:
        super().__init__(problem)
        self.nodes = nodes
        self.folder = folder

    def noted(self, note: str) -> NodeLost:
        """Return the same error with a note added to its text."""
        why = "\n".join(filter(None, [self.problem.why, note]))
        noted = NodeLost(
            dataclasses.replace(self.problem, why=why), self.nodes, self.folder
        )
        # Notes that were added to the exception itself
        noted.__notes__ = [*getattr(self, "__notes__", ())]
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
    # Traceback in the worker
    remote_traceback: str | None = None
    # The exception in the worker; None if its process died
    cause: BaseException | None = None
    # File on the worker's node with everything that the worker printed
    output: str | None = None

    def __post_init__(self) -> None:
        # The arguments are what an exception pickles
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        super().__init__(*values)

    def __str__(self) -> str:
        # Where it happened
        places = [f"node {self.node}"]
        if self.accelerators:
            numbers = ",".join(map(str, self.accelerators))
            places.append(f"accelerators {numbers}")
        if self.stage is not None:
            places.append(f"stage {self.stage}")
        if self.version is not None:
            places.append(f"policy version {self.version}")
        on = ", ".join(places)
        lines = [
            f"{self.component} rank {self.rank} ({on}): {self.method} failed: {self.what}"
        ]
        # How to find out more
        if self.output:
            lines.append(f"  its output: {self.output}")
        if self.remote_traceback:
            lines.append("  on the worker:")
            for line in self.remote_traceback.rstrip().splitlines():
                lines.append(f"    {line}")
        return "\n".join(lines)

    def at(self, *, stage: str, version: int) -> WorkerError:
        """Return the same failure with the stage and policy version in which it happened."""
        return dataclasses.replace(self, stage=stage, version=version)

    def explained_by(self, cause: RlplaceError) -> WorkerError:
        """Return the same failure with the text of `cause`, for a cause that only the driver knows."""
        error = dataclasses.replace(self, what=str(cause), cause=cause)
        error.__cause__ = cause
        return error


class WorkerTimeout(_OneProblem, TimeoutError):
    """Ranks did not finish a method before the caller's deadline. They still work on it."""
