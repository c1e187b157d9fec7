"""`from rlplace import ...`: the public names are there, and cost nothing until they are asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import rlplace

HEAVY = ("torch", "ray", "gymnasium", "hydra")


def test_every_public_name_is_there_and_no_other() -> None:
    for name in rlplace.__all__:
        # The names of commands are their modules, which can be called
        named = f"rlplace.{name}" if name in rlplace._CALLED else name
        assert getattr(rlplace, name).__name__ == named
        assert callable(getattr(rlplace, name))
    assert set(rlplace.__all__) <= set(dir(rlplace))
    assert not hasattr(rlplace, "Clustr")


def test_type_checkers_see_the_names_that_are_imported_when_asked_for() -> None:
    tree = ast.parse(Path(rlplace.__file__).read_text(encoding="utf-8"))
    imported = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.col_offset == 4
        for alias in node.names
        if alias.name not in ("Policy", "load_policy")
        and not alias.name.endswith("Module")
    }
    lazy = {(m, n) for m, names in rlplace._MODULES.items() for n in names}
    assert imported == lazy
    names = {name for _, name in lazy} | {*rlplace._CALLED}
    assert names | {"load_policy"} == set(rlplace.__all__)


def after(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has imported for a statement."""
    script = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_none_of_its_modules() -> None:
    assert {
        name for name in after("import rlplace") if name.startswith("rlplace.")
    } == set()


def test_the_names_of_a_driver_come_without_heavy_libraries() -> None:
    imported = after("from rlplace import *")
    assert "rlplace.workers.launch.cluster" in imported
    assert imported.isdisjoint(HEAVY)
