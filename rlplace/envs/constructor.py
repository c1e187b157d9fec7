"""What the constructor of a simulator takes, read from its source: importing a library of simulators is slow."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rlplace.envs.argument_kinds import Argument, argument_of

# Base classes of Gymnasium that take no arguments of the simulator
_WITHOUT_ARGUMENTS = ("Env", "object", "Generic", "EzPickle")
# Classes of bases, one above the other, that are read at most
_MOST_BASES = 6


class Takes(NamedTuple):
    """The arguments of a constructor.

    `called`: its class or function. `names`: names of arguments. `more`: whether it may take others, too. `values`:
    name -> what is known of its values.
    """

    called: str
    names: tuple[str, ...]
    more: bool
    values: Mapping[str, Argument]


def takes_of(entry_point: str) -> Takes | None:
    """Return the arguments of `package.module:Class`, or of a function; None if its source cannot be read.

    Arguments that a class passes on by `**kwargs` are those of its bases, if they are in the same folder.
    """
    module, _, name = entry_point.partition(":")
    file = _file_of(module)
    if file is None:
        return None
    made = _found(file, name)
    if made is None:
        return None
    if isinstance(made, ast.FunctionDef):
        names, more = _arguments(made)
        return Takes(name, names, more, _values(made))
    return Takes(name, *_of_class(made, file, _MOST_BASES))


def _file_of(module: str) -> Path | None:
    """Return the source file of a module of an installed library; None if there is none. Imports nothing."""
    package, *rest = module.split(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    if not rest:
        return Path(found.origin)
    path = Path(found.origin).parent.joinpath(*rest)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _found(file: Path, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the class or function of a name in a source file; None if the file has none."""
    text = file.read_text(encoding="utf-8")
    if f"class {name}" not in text and f"def {name}" not in text:
        return None
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    return None


def _of_class(
    made: ast.ClassDef, file: Path, bases: int
) -> tuple[tuple[str, ...], bool, Mapping[str, Argument]]:
    """Return (names of the arguments of a class, whether it may take more, what is known of their values).

    `bases`: how many bases may be read.
    """
    init = None
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            init = node
    names: tuple[str, ...] = ()
    values: Mapping[str, Argument] = {}
    if init is not None:
        names, passes_on = _arguments(init)
        values = _values(init)
        if not passes_on:
            return names, False, values
    more = False
    for base in _names_of_bases(made):
        if base in _WITHOUT_ARGUMENTS:
            continue
        above = _base(base, file) if bases else None
        if above is None:
            more = True
            continue
        of_base, base_takes_more, base_values = _of_class(*above, bases - 1)
        further = tuple(name for name in of_base if name not in names)
        names += further
        known = {name: base_values[name] for name in further if name in base_values}
        values = {**values, **known}
        more = more or base_takes_more
    return names, more, values


def _names_of_bases(made: ast.ClassDef) -> Iterator[str]:
    """Yield the names of the bases of a class, without their modules."""
    for base in made.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Attribute):
            yield named.attr
        elif isinstance(named, ast.Name):
            yield named.id
        else:
            yield ""


def _base(name: str, file: Path) -> tuple[ast.ClassDef, Path] | None:
    """Return a class of a name, and its file, in the folder of a source file; None if there is none."""
    for beside in (file, *sorted(file.parent.glob("*.py"))):
        found = _found(beside, name) if name else None
        if isinstance(found, ast.ClassDef):
            return found, beside
    return None


def _arguments(of: ast.FunctionDef) -> tuple[tuple[str, ...], bool]:
    """Return (names of the arguments of a function without `self`, whether it takes more by `**kwargs`)."""
    given = [*of.args.posonlyargs, *of.args.args, *of.args.kwonlyargs]
    names = tuple(one.arg for one in given if one.arg != "self")
    return names, of.args.kwarg is not None


def _values(of: ast.FunctionDef) -> Mapping[str, Argument]:
    """Return name -> what is known of its values, for the arguments of a function of which something is known."""
    places = [*of.args.posonlyargs, *of.args.args]
    defaults: list[ast.expr | None] = [None] * (len(places) - len(of.args.defaults))
    defaults += of.args.defaults
    given = [*zip(places, defaults, strict=True)]
    given += zip(of.args.kwonlyargs, of.args.kw_defaults, strict=True)
    found = {}
    for one, default in given:
        annotation = ""
        if one.annotation is not None:
            annotation = ast.unparse(one.annotation)
        argument = argument_of(annotation, _constant(default))
        if argument is not None:
            found[one.arg] = argument
    return found


def _constant(default: ast.expr | None) -> object:
    """Return the value of a default that is written as a constant; None for any other."""
    if default is None:
        return None
    try:
        value: object = ast.literal_eval(default)
    except ValueError:
        return None
    return value
