"""Hashes of the files that a run reads: data sets, folders of models, and code of the user. A resume compares them.

::

    config ──▶ keys that name a file, a folder or `package.module:Name` ──▶ files ──▶ size and hash of each
                                                                                          │ inputs.json of a checkpoint
    the same config at a resume ─────────────────────────────────────────▶ sizes, hashes ─┴▶ what has changed

Code may open files, too. An existing file counts if its name is a string in the code. A file whose name is computed
while the code runs, a download and a database are not found.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.config.found import value_at
from rlplace.python_code import parse
from rlplace.units import counted, show_bytes

# File in a checkpoint with the sizes and hashes of what a run reads
INPUTS = "inputs.json"
# Blocks of a config that have no influence on the numbers of a run
_WITHOUT_NUMBERS = (
    "cluster",
    "runner",
    "checkpoint",
    "faults",
    "memory",
    "profile",
    "resume",
    "resume_allow",
    "dry_run",
)
# Last words of keys whose value is a file or a folder, such as `path`, `data_dir` and `xmlFile`
_PLACES = {"path", "paths", "file", "files", "folder", "folders", "dir", "directory"}
# Words in keys whose files a run writes itself
_WRITTEN = {"cache", "log", "logs", "out", "output", "record", "save", "temp", "tmp"}
_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.-]*")
# Bytes per key that are hashed completely. Further files are compared by size, by blocks spread over the file, and by
# the time at which they were written
_WHOLE_BYTES = 4 << 30
# The same for a model: it has many gigabytes, and other weights differ in every block
_WHOLE_MODEL_BYTES = 256 << 20
_BLOCKS = 64
_BLOCK_BYTES = 64 << 10
# Most bytes per key that are read at all; further files are compared only by size and time
_MOST_BYTES = 5 << 30
# Text before the time at which a file was written
_WRITTEN_AT = " written at "
# Most files of a folder or program that are compared, in the order of their names
_MOST_FILES = 10_000
# Most keys that a text about compared files names
_SHOWN = 6
# Most changed files that a text names
_NAMED = 4

# Key of the config -> name of a file -> its size and hash
Inputs = Mapping[str, Mapping[str, str]]
# Suffix of a key of code, for the files whose names are strings in the code
NAMED = ": files that its code names"


def inputs_of(
    mapping: Mapping[str, Any], code: Mapping[str, type] | None = None
) -> Inputs:
    """Return what the run of a config reads: key of the config -> name of each file -> its size and hash.

    `mapping`: the config as plain values. `code`: key -> class of the user, for classes that the config does not name.
    Paths that do not exist, code of installed libraries, and files that the run writes itself are left out.
    """
    found: dict[str, dict[str, str]] = {}
    written_in = str(value_at(mapping, "runner.output_dir") or "")
    for key, text in _texts(mapping):
        if _CODE.fullmatch(text):
            _add_program(found, key, text.partition(":")[0], written_in)
        elif _means_file(key, text):
            place = Path(text).expanduser()
            model = _is_model(key)
            files = _files(place, within=not model, without=written_in)
            whole_bytes = _WHOLE_MODEL_BYTES if model else _WHOLE_BYTES
            _add(found, key, files, whole_bytes)
    for key, kind in (code or {}).items():
        _add_program(found, key, kind.__module__, written_in)
    return found


def _add(
    found: dict[str, dict[str, str]],
    key: str,
    files: Sequence[tuple[str, Path]],
    whole_bytes: int,
) -> None:
    """Add the size and hash of each of the `files` of `key` to `found`. `whole_bytes`: bytes to hash completely."""
    if files:
        found.setdefault(key, {}).update(_hashed(files, whole_bytes))


def _add_program(
    found: dict[str, dict[str, str]], key: str, module: str, without: str
) -> None:
    """Add the files of a module to `found`, and the files whose names are strings in its code.

    `key`: config key that names the module. `without`: a folder whose files do not count.
    """
    program = _program(module)
    _add(found, key, program, _WHOLE_BYTES)
    named: dict[str, Path] = {}
    for _, file in program:
        for name, place in _named_files(file):
            if not _lies_in(place, without):
                named[name] = place
    _add(found, f"{key}{NAMED}", sorted(named.items())[:_MOST_FILES], _WHOLE_BYTES)


def shown(inputs: Inputs) -> str:
    """Return a text with the keys whose files a resume compares, and how many files each key has; "" for none."""
    texts = []
    for key, files in inputs.items():
        size = sum(int(each.partition(" ")[0]) for each in files.values())
        count = counted(len(files), "file")
        if len(files) >= _MOST_FILES:
            count = f"the first {count}"
        texts.append(f"{key} ({count}, {show_bytes(size)})")
    if len(texts) > _SHOWN:
        texts[_SHOWN:] = [f"{len(texts) - _SHOWN} more keys"]
    return ", ".join(texts)


def written(inputs: Inputs) -> str:
    """Return sizes and hashes as the text that a checkpoint keeps."""
    return json.dumps(inputs, indent=1, sort_keys=True) + "\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes of the files that one config key names.

    `file`: name of the first changed file. `what`: all changes, in words. `certain`: False if the files were written
    again and their compared parts are equal.
    """

    file: str
    what: str
    certain: bool = True


def changes(before: Inputs, now: Inputs) -> Mapping[str, Change]:
    """Return key of the config -> what has changed of its files. Keys whose files are as before are left out.

    A key that only one of `before` and `now` has is left out too: the config itself is another one there.
    """
    found = {}
    for key, old in before.items():
        new = now.get(key)
        if new is None and key.endswith(NAMED):
            # The code still exists, but all files that it names are gone
            new = {}
        if new is None or new == old:
            continue
        names = [
            name for name in sorted({*old, *new}) if old.get(name) != new.get(name)
        ]
        texts = [_change(name, old.get(name), new.get(name)) for name in names[:_NAMED]]
        if len(names) > _NAMED:
            texts.append(f"{len(names) - _NAMED} more")
        certain = any(_is_certain(old.get(name), new.get(name)) for name in names)
        found[key] = Change(file=names[0], what=", ".join(texts), certain=certain)
    return found


def _is_certain(old: str | None, new: str | None) -> bool:
    """Return whether the content of a file has certainly changed. `old`, `new`: as for `_change`."""
    if old is None or new is None:
        return True
    return old.partition(_WRITTEN_AT)[0] != new.partition(_WRITTEN_AT)[0]


def _change(name: str, old: str | None, new: str | None) -> str:
    """Return what has happened to a file, in words. `old`, `new`: its size and hash; None if there was no such file."""
    if old is None:
        return f"{name} is new"
    if new is None:
        return f"{name} is gone"
    before = int(old.partition(" ")[0])
    after = int(new.partition(" ")[0])
    if not _is_certain(old, new):
        return f"{name} may have other content: it was written again, and only a part of it is compared"
    if before == after:
        return f"{name} has other content"
    return f"{name} has {after:,} bytes instead of {before:,}"


def config_key_of(key: str) -> str:
    """Return the config key that belongs to a key of `Inputs`: the key without the suffix `NAMED`."""
    return key.removesuffix(NAMED)


def affects_learning(key: str) -> bool:
    """Return whether files of `key` certainly affect what is learned: data sets, models and code of shipped jobs.

    Other files, such as those of a simulator's arguments or those that code names, may be files that the run writes
    itself.
    """
    if key.endswith(NAMED):
        return False
    return key in ("env.kwargs.path", "env.eval_kwargs.path") or ".kwargs." not in key


# ── the files that a key names ───────────────────────────────────────────────────────────────────────────────────────


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key path, text) for each text in a config. Items of a list have the key path of the list, without numbers.

    The keys of a mapping that are no names, such as paths of data sets with weights, are yielded as texts too.
    """
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, below in value.items():
            if not key and name in _WITHOUT_NUMBERS:
                continue
            if not str(name).isidentifier():
                yield key, str(name)
                continue
            yield from _texts(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence):
        for below in value:
            yield from _texts(below, key)


def _means_file(key: str, text: str) -> bool:
    """Return whether a text at `key` certainly is the path of a file or folder that the run reads.

    The name of the key decides. A text at another key counts if it has a folder or a suffix and such a file exists:
    there, "." and "train" need not mean folders.
    """
    if key.endswith(".path"):
        return True
    if "kwargs." not in key:
        return False
    name = key.rpartition(".")[2]
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
    if not _WRITTEN.isdisjoint(words):
        return False
    if words and words[-1] in _PLACES:
        return True
    place = os.path.expanduser(text)
    return bool(os.path.dirname(text) or Path(text).suffix) and os.path.isfile(place)


def _is_model(key: str) -> bool:
    return key.endswith("model.path")


def _files(path: Path, *, within: bool, without: str) -> list[tuple[str, Path]]:
    """Return (name, path) of a file, or of each file in a folder; [] if the path does not exist.

    `within`: whether subfolders count. `without`: a folder that is left out with all its content. Hidden files and
    folders, whose names begin with a dot, are left out. At most `_MOST_FILES` files are returned, in the order of their
    names.
    """
    if os.path.isfile(path):
        return [(path.name, path)]
    left_out = os.path.abspath(without) if without else ""
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if within
            and not name.startswith(".")
            and os.path.abspath(os.path.join(folder, name)) != left_out
        )
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and os.path.isfile(file):
                found.append((str(file.relative_to(path)), file))
            if len(found) == _MOST_FILES:
                return found
    return found


def _program(module: str) -> list[tuple[str, Path]]:
    """Return (name, path) of the file of a module, and of all modules that it imports from the same place.

    Return [] for a module that cannot be found, and for modules of installed libraries and of rlplace.
    """
    file = _file_of(module)
    if file is None:
        return []
    # The folder from which the outermost package is imported
    root = file.parent
    above = 0 if module == "__main__" else module.count(".")
    if file.name == "__init__.py":
        above += 1
    for _ in range(above):
        root = root.parent
    if _installed(root):
        return []
    found: dict[Path, None] = {}
    left = [file]
    while left and len(found) < _MOST_FILES:
        one = left.pop()
        if one in found:
            continue
        found[one] = None
        left += _imported(one, root)
    return sorted((str(one.relative_to(root)), one) for one in found)


def _file_of(module: str) -> Path | None:
    """Return the source file of a module of the user; None if there is none."""
    if module.partition(".")[0] == "rlplace":
        return None
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, AttributeError, ValueError):
            return None
        if spec is None:
            return None
        loaded = spec.origin
    if loaded is None or not loaded.endswith(".py") or not os.path.isfile(loaded):
        return None
    return Path(loaded).absolute()


def _installed(root: Path) -> bool:
    """Return whether modules in the folder `root` are those of Python or of an installed library."""
    paths = sysconfig.get_paths()
    places = {Path(paths[name]).absolute() for name in ("purelib", "platlib", "stdlib")}
    return root in places


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files of all modules below the folder `root` that the program in `file` imports, wherever it does."""
    package = file.parent.relative_to(root).parts
    for node in _nodes(file):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - (node.level - 1)] if node.level else ()
            within = tuple(node.module.split(".")) if node.module else ()
            names = [(*above, *within)]
            names += [(*above, *within, alias.name) for alias in node.names]
        for name in names:
            if name and name[0] != "rlplace":
                yield from _of_module(name, root)


def _nodes(file: Path) -> Iterator[ast.AST]:
    """Yield all parts of the program in `file`; none if it cannot be read."""
    try:
        tree = parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    yield from ast.walk(tree)


def _named_files(program: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of each existing file that a string in a program names.

    A relative name is looked up in the working folder and in the folder of the program. Python files are left out: they
    are found by imports.
    """
    for name in _names_in(program):
        if not (os.path.dirname(name) or Path(name).suffix):
            continue
        written = Path(os.path.expanduser(name))
        for place in (Path(os.path.abspath(written)), program.parent / written):
            if place.suffix == ".py" or not os.path.isfile(place):
                continue
            yield str(name), place
            break


def _names_in(program: Path) -> Iterator[str]:
    """Yield each string in a program, and each path that `/` or a call such as `os.path.join` joins from strings."""
    for node in _nodes(program):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            continue
        parts: Sequence[ast.expr] = ()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = _divided(node)
        elif isinstance(node, ast.Call):
            parts = node.args
        texts: list[str] = []
        for part in reversed(parts):
            if not isinstance(part, ast.Constant) or not isinstance(part.value, str):
                break
            texts.insert(0, part.value)
        if len(texts) > 1:
            yield os.path.join(*texts)


def _divided(node: ast.BinOp) -> list[ast.expr]:
    """Return the parts of `a / "b" / "c"` in their order."""
    parts = [node.right]
    left = node.left
    while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
        parts.insert(0, left.right)
        left = left.left
    return [left, *parts]


def _lies_in(place: Path, folder: str) -> bool:
    """Return whether a file lies in a folder, at any depth; never in a folder "" without a name."""
    return bool(folder) and place.is_relative_to(os.path.abspath(folder))


def _of_module(name: Sequence[str], root: Path) -> Iterator[Path]:
    """Yield the files of a module below `root`: its own, and the `__init__.py` of each package that it is in."""
    for length in range(1, len(name) + 1):
        place = root.joinpath(*name[:length])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                yield file


def _hashed(
    files: Sequence[tuple[str, Path]], whole_bytes: int
) -> Iterator[tuple[str, str]]:
    """Yield (name, size and hash) of each file that can be read. After `_MOST_BYTES` the hash is left out.

    `whole_bytes`: bytes that are hashed completely. For further files, the time at which they were written is added.
    """
    left = whole_bytes
    read = 0
    for name, file in files:
        try:
            status = file.stat()
            size = status.st_size
            left -= size
            whole = left >= 0 or size <= _BLOCKS * _BLOCK_BYTES
            read += size if whole else _BLOCKS * _BLOCK_BYTES
            if read > _MOST_BYTES:
                text = f"{size} not read"
            else:
                text = f"{size} {_hash(file, whole=whole)}"
        except OSError:
            continue
        if not whole or read > _MOST_BYTES:
            text += f"{_WRITTEN_AT}{status.st_mtime_ns}"
        yield name, text


def _hash(file: Path, *, whole: bool) -> str:
    """Return the SHA-256 of a file, or that of blocks which are spread over the file. Raises OSError.

    `whole`: whether all of the file counts; a file that is smaller than all blocks counts as a whole in any case.
    """
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        if whole or size <= _BLOCKS * _BLOCK_BYTES:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256()
        for block in range(_BLOCKS):
            # The first block begins the file, and the last one ends it
            content.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(content.read(_BLOCK_BYTES))
        return digest.hexdigest()
