"""All errors that rlplace raises for users, and their standard form: what is wrong, the value, why, and a fix."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

# Smallest similarity, from 0 to 1, at which a part of a misspelt name counts as the known part.
_NEAR = 0.75
# Smallest similarity of two whole names that have different numbers of parts.
_JOINED = 0.9
_ROLES = (
    "actor",
    "agent",
    "critic",
    "env",
    "reference",
    "reward",
    "rollout",
    "teacher",
)
# Beginning of the source of a value that was given on the command line; the word follows
COMMAND_LINE = "command line: "
# A line of a fix: lead word, key, value, remark behind eight blanks
_FIX = re.compile(r"((?:or: |and: )?)([a-z_][\w.]*): (.+?)( {8}.*)?")
# A line of a traceback that names a file
_FRAME = re.compile(r'\s+File "(.+)", line \d+')
_PACKAGE = Path(__file__).parent
_SHIPPED = (_PACKAGE / "configs").resolve()
# Overrides in one line: algorithm.target_every=1 algorithm.policy_delay=2
_OVERRIDES = re.compile(r"(?:^| )(?=[a-z_]+(?:\.\w+)+=)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place where a config value is set, or where code is: file and line.

    `line`: counted from 1; None for a text without lines, such as a command-line override. `written`: the text of the
    value before its references `${...}` were replaced; None: it had no references. `is_dotted`: whether the key stands
    at the top of a file with its whole path, such as `actor.optimizer.lr: 0.001`.
    """

    file: str
    line: int | None = None
    written: str | None = dataclasses.field(default=None, compare=False)
    is_dotted: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}"


def source_of(key: str, sources: Mapping[str, Source]) -> Source | None:
    """Return the file and line in which a config key is set; None if it is not set.

    If `key` itself is not in `sources`, the nearest enclosing key is used: for `a.b.c`, `a.b` and then `a`. `sources`:
    config key -> file and line, for each key that is set.
    """
    while key:
        if key in sources:
            return sources[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, in the standard form of errors.

    `code`: name of the kind of problem, equal in all versions. `key`: path of the config key, or the option, with the
    problem. `what`: what is wrong. `got`: the wrong value. `span`: (first column, end column) of the part of `got` that
    carets mark. `source`: file and line of the value. `why`: the rule that is broken. `fix`: the suggested remedy, as
    lines to paste.
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
        """Return the problem as text.

        The first line is `key: what [code]`. Below it follow `got` with a caret, `why` and `fix`; fields that are None
        are left out.
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

    def remark(self) -> str:
        """Return the problem as one line, as a run says it: key, what is wrong, why, and the fix."""
        return f"{self.key}: {self.what}: {self.why}; {self.fix}"

    @property
    def pasted(self) -> str | None:
        """`fix` in the form to paste: overrides if the wrong value came from a command line, else config lines.

        Files that are shipped are not edited, so overrides stay overrides there.
        """
        if self.fix is None or self.source is None:
            return self.fix
        lines = self.fix.split("\n")
        if self.source.file.startswith(COMMAND_LINE):
            word = self.source.file.removeprefix(COMMAND_LINE)
            words = [
                _corrected(self, line, word) or _as_word(self.key, line, word)
                for line in lines
            ]
            return "\n".join(words)
        if Path(self.source.file).is_relative_to(_SHIPPED):
            return "\n".join(_as_word(self.key, line, "") for line in lines)
        lines = [_as_lines(self.key, line) for line in lines]
        if self.source.is_dotted:
            lines = [_with_path(self.key, line) for line in lines]
        return "\n".join(lines)


def with_sources(
    problems: Iterable[Problem], sources: Mapping[str, Source]
) -> list[Problem]:
    """Return the problems without duplicates, and with the file and line at which the value of their key was written.

    `sources`: key -> file and line of its value.
    """
    return list(
        dict.fromkeys(
            dataclasses.replace(p, source=p.source or source_of(p.key, sources))
            for p in problems
        )
    )


def _as_word(key: str, line: str, typed: str) -> str:
    """Return a line of a suggested remedy as a command-line override `path=value`.

    `key`: path of the config key of the problem. `line`: a config line `name: value`; the name is the last part of
    `key`, or a full path. `typed`: the override with the problem. A line that cannot be written as one override is
    returned unchanged.
    """
    match = _FIX.fullmatch(line)
    if match is None:
        return line
    lead, name, value, remark = match.groups("")
    # An item of a list is replaced with its whole list
    whole = key.partition("[")[0]
    block = whole.rpartition(".")[0]
    path = whole if f".{whole}".endswith(f".{name}") else name
    # The fix names a component that was misspelt
    if block.endswith("component_placement") and name in _ROLES:
        path = f"{block}.{name}"
    # The fix is for another key in the block of the same component
    in_placement = block.rpartition(".")[0].endswith("component_placement")
    # The whole line of the component
    if in_placement and block.endswith(f".{name}"):
        path = block
    if path != whole and "." not in path and in_placement:
        path = f"{block}.{name}"
    # Another argument, if the override sets no further ones
    sets_one = typed.startswith(f"{key}=") or (
        typed.startswith(f"{block}={{") and "," not in typed
    )
    if path != whole and "." not in path and block.endswith("kwargs") and sets_one:
        path = f"{block}.{name}"
    # A key of an item, which is typed with the number of the item
    of_item = re.sub(r"\[(\d+)\]", r".\1", key)
    if of_item.endswith(f".{name}") and typed.startswith(f"{of_item}="):
        path = of_item
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


def _corrected(problem: Problem, line: str, typed: str) -> str | None:
    """Return an override with the wrong key and value replaced inside it, such as a name in a list of blocks.

    `line`: a line of the fix, for this key or another one of its block. `typed`: the override. None is returned unless
    the wrong value occurs once in it, below its key.
    """
    above, _, value = typed.partition("=")
    block, _, leaf = problem.key.rpartition(".")
    fix = re.fullmatch(r"'?([\w.\[\]]+)(?:: |=)(.*?)'?", line.partition(" " * 8)[0])
    if fix is None:
        return None
    path, new = fix.groups()
    name = path.rpartition(".")[2]
    is_beside = path == name or path == f"{block}.{name}"
    wrong = (problem.got or "").removeprefix(f"{leaf}: ")
    is_below = re.sub(r"\[(\d+)\]", r".\1", problem.key).startswith(f"{above}.")
    if not is_below or not is_beside or not wrong or "<" in new:
        return None
    # A text may have quotes of either kind
    bare = re.escape(wrong.strip('"'))
    written = rf"(['\"]?){bare}\1(?=\s*[,}}])"
    form = re.compile(rf"(?<=: ){written}")
    if name != leaf:
        form = re.compile(rf"(?<=[{{ ,]){leaf}: ?{written}")
        new = f"{name}: {new}"
    if len(form.findall(value)) != 1:
        return None
    return shlex.quote(f"{above}={form.sub(lambda _: new, value)}")


def _as_lines(key: str, line: str) -> str:
    """Return a line of a suggested remedy with config lines in place of overrides `path=value`.

    `key`: path of the config key of the problem. A line that does not consist of overrides is returned unchanged.
    """
    fix, blanks, remark = line.partition(" " * 8)
    words = [word for word in _OVERRIDES.split(fix) if word]
    found = []
    for word in words:
        path, equals, value = word.partition("=")
        is_path = re.fullmatch(r"[a-z_]+(?:\.\w+)+", path) is not None
        # Words behind a value are no part of it
        if not is_path or not equals or (" " in value and value[0] not in "[{\"'<"):
            return line
        name = path.rpartition(".")[2] if path == key else path
        found.append(f"{name}: {value}")
    return "\n".join(found) + blanks + remark


def _with_path(key: str, line: str) -> str:
    """Return a config line with the whole path of its key. `key`: path of a key in the same block.

    A line that has a path, or is no config line, is returned unchanged.
    """
    match = _FIX.fullmatch(line)
    block = key.rpartition(".")[0]
    if match is None or not block or "." in match[2]:
        return line
    lead, name, value, remark = match.groups("")
    return f"{lead}{block}.{name}: {value}{remark}"


# Digits that look like letters
_LETTERS = str.maketrans("01", "ol")


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the word in `known` that `word` probably misspells; None if `word` does not resemble any of them.

    A word that differs in a number, or in a whole part between separators, does not count as misspelt.
    """
    names = {name.lower(): name for name in reversed(list(known))}
    near = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)
    for name in near:
        if _misspells(word.lower(), name):
            return names[name]
    return None


def _misspells(word: str, name: str) -> bool:
    """Return whether `word` is probably a misspelling of `name`. Both have to be in lower case.

    The parts between separators are compared one by one. So `pipeline_size` is not a misspelling of `data_size`.
    """
    if word.translate(_LETTERS) == name.translate(_LETTERS):
        return True
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
    """Return the text of a suggested remedy that offers several lines to choose from: "one of", then the lines."""
    return "one of\n" + "\n".join(lines)


def suggestion(near: str | None) -> str:
    """Return the text `, did you mean '<near>'?`, to be appended to an error; "" if `near` is None."""
    if near:
        return f", did you mean {near!r}?"
    return ""


class RlplaceError(Exception):
    """Base of all errors that this package raises on purpose."""


class ProblemsError(RlplaceError, ValueError):
    """An error with all problems that a check has found, at least one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ProblemsError needs at least one problem"
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(p.render() for p in self.problems)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all problems, in the order of the problems."""
        return tuple(p.code for p in self.problems)


class ConfigError(ProblemsError):
    """A key or a value of the config is wrong."""


class PlacementError(ProblemsError):
    """The placement does not fit the cluster or the job."""


class DoesNotFit(PlacementError):
    """The job does not fit into the memory of the machines, and `memory.check` does not allow to try it."""


class _OneProblem(RlplaceError):
    """Base of errors with exactly one Problem. `str()` of the error is the rendered problem."""

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
    """The available machines are not the machines that the plan needs."""


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
        """Return the error for a file that cannot be written, with the reason and the free space of the disk.

        `path`: the file. `error`: the error of the operating system. `key`: the config key or option that names the
        path. `place`: the noun for the path in the suggested remedy, such as "a folder".
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


class NotSaved(OutputError):
    """A run has done all its iterations, but its last state was not saved."""


def _free_space(path: Path) -> str | None:
    """Return a text with the free bytes of the disk of `path`; None if the number cannot be read.

    If `path` does not exist, the disk is that of the nearest existing parent folder.
    """
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is None:
            return None
        folder = there if there.is_dir() else there.parent
        return f"{shutil.disk_usage(there).free:,} bytes are free in {folder}"
    except OSError:
        return None


class CallbackError(_OneProblem):
    """A callback of the user raised an error. The state of the run before the callback is saved."""


class ChannelError(_OneProblem):
    """Base of all errors of channels."""


class ChannelFull(ChannelError):
    """`put_nowait` found the channel full."""


class ChannelEmpty(ChannelError):
    """`get_nowait` found no item."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A `put` or `get` did not end before its deadline."""


class ChannelClosed(ChannelError):
    """An item was put into a closed channel."""


class EndOfStream(ChannelError):
    """The channel is closed and its last item was taken."""


class ChannelBroken(ChannelError):
    """The peer died or the run was cancelled. The items in the channel are lost."""


class ChannelMisuse(ChannelError, ValueError):
    """A channel was called in a way that can never succeed, such as with a wrong key. Waiting does not help."""


class WorkerMisuse(_OneProblem, ValueError):
    """A worker class is wrong, or a worker has called a method of its base class in a way that can never succeed."""


class NotSent(_OneProblem, TypeError):
    """An item, an argument or a result has a part that cannot be sent to another process."""


class WeightSyncError(_OneProblem):
    """The pushed weights do not have the requested version, are incomplete, or are damaged."""


class DivergedError(_OneProblem):
    """A policy update contains NaN or infinity. The policy keeps the weights that it had before the update."""


class SimulatorError(_OneProblem):
    """A simulator returned NaN or infinity. The policy was not trained on this number."""


class RewardError(_OneProblem):
    """A reward function did not return a finite number for an episode. The policy was not trained on the episode.

    `own`: whether the error is certainly one of the function itself, so that it would happen on every machine.
    """

    own = False


class AcceleratorOutOfMemory(_OneProblem):
    """More memory was requested than is free on an accelerator. The text lists the components that use its memory.

    `accelerator`: number of the accelerator in the cluster; None if unknown. `lacking_bytes`: requested bytes minus
    free bytes; 0 if unknown.
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
    """A generation engine was asked to release its KV cache while it still generates answers."""


class EngineError(_OneProblem):
    """A generation engine behind a server did not answer, or does not have the weights that were sent to it."""


class RayDied(_OneProblem):
    """A process of Ray itself has died that the run depends on. What can still be saved is saved, and the run ends.

    `calls_go_on`: whether workers live on for a while and can save.
    """

    def __init__(self, problem: Problem, *, calls_go_on: bool) -> None:
        super().__init__(problem)
        self.calls_go_on = calls_go_on


class SharingEnded(_OneProblem):
    """A run that shares accelerators with other runs cannot have its turn any more. It saves what it can, and ends."""


class NodeLost(_OneProblem):
    """Machines of a run were lost, and all workers of the run were ended.

    `nodes`: numbers of the lost machines. `folder`: folder of the checkpoint from which the run can resume; without a
    checkpoint, the folder of the run.
    """

    def __init__(self, problem: Problem, nodes: Collection[int], folder: Path) -> None:
        super().__init__(problem)
        self.nodes = nodes
        self.folder = folder

    def noted(self, note: str) -> NodeLost:
        """Return a copy of the error with the line `note` at the end of its text."""
        why = "\n".join(filter(None, [self.problem.why, note]))
        noted = NodeLost(
            dataclasses.replace(self.problem, why=why), self.nodes, self.folder
        )
        # Notes that were added to the exception itself
        noted.__notes__ = [*getattr(self, "__notes__", ())]
        return noted


@dataclasses.dataclass(eq=False, repr=False)
class WorkerError(RlplaceError):
    """A method of a worker failed, or the worker's process died.

    `component`, `rank`, `node`, `accelerators`: the worker and its place. `method`: the method that failed. `what`: the
    text of the error. `version`: policy version. `remote_traceback`: traceback in the worker. `cause`: the exception in
    the worker; None if its process died. `output`: file on the worker's node with everything that the worker printed.
    """

    component: str
    rank: int
    node: int
    method: str
    what: str
    accelerators: tuple[int, ...] = ()
    stage: str | None = None
    version: int | None = None
    remote_traceback: str | None = None
    cause: BaseException | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        # An exception is pickled by its arguments
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
        frames = self._shown_traceback()
        if frames:
            lines.append("  on the worker:")
        for line in frames:
            lines.append(f"    {line}")
        return "\n".join(lines)

    def _shown_traceback(self) -> list[str]:
        """Return the lines of the worker's traceback that say more than `what`.

        If the cause is an error of rlplace, its text at the end of the traceback would be `what` again. If all frames
        are files of rlplace too, there is nothing else in the traceback.
        """
        text = (self.remote_traceback or "").rstrip()
        what = self.what.rstrip()
        if not isinstance(self.cause, RlplaceError) or not text.endswith(what):
            return text.splitlines()
        frames = text.removesuffix(what).splitlines()[:-1]
        files = [found[1] for line in frames if (found := _FRAME.match(line))]
        if all(_PACKAGE in Path(file).parents for file in files):
            return []
        return frames

    def at(self, *, stage: str, version: int) -> WorkerError:
        """Return a copy of the error with the stage and the policy version in which the failure happened."""
        return dataclasses.replace(self, stage=stage, version=version)

    def explained_by(self, cause: RlplaceError) -> WorkerError:
        """Return a copy of the error in which text and cause are replaced by `cause`, an error with more information.

        The driver makes `cause` from facts that the worker does not know.
        """
        error = dataclasses.replace(self, what=str(cause), cause=cause)
        error.__cause__ = cause
        return error


class WorkerTimeout(_OneProblem, TimeoutError):
    """Ranks did not finish a method before the caller's deadline. The method still runs on these ranks."""
