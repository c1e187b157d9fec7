"""The names of the placement package: all are there, and asking for one does not import them all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rlplace import placement


def test_every_name_is_found_where_its_import_says() -> None:
    assert placement.__file__ is not None
    tree = ast.parse(Path(placement.__file__).read_text(encoding="utf-8"))
    imported = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{placement.__name__}.")
        for alias in node.names
    }
    assert imported == {(name, f"{placement.__name__}.{module}") for name, module in placement._MODULE_OF.items()}
    assert {name for name, _ in imported} == set(placement.__all__)
    assert all(getattr(placement, name) is not None for name in placement.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'render_pdf'"):
        placement.render_pdf  # noqa: B018


def test_a_worker_imports_neither_the_memory_proof_nor_what_draws_plans() -> None:
    code = (
        "import sys, rlplace.workers.ray_launch.actors, rlplace.workers.roles.env, rlplace.comm.shared_memory.channel;"
    )
    code += "print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rlplace.placement.language.slots" in found
    unwanted = {"rlplace.placement.memory", "rlplace.placement.show.svg", "rlplace.comm.network", "zmq", "torch"}
    assert not unwanted & set(found)
