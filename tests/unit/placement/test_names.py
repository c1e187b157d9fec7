"""The names of the placement package: all are there, and asking for one does not import them all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlplace import placement
from tests.absent import needs


def test_the_python_api_is_found_by_name_and_nothing_else_is() -> None:
    assert {name: getattr(placement, name).__name__ for name in placement.__all__} == {
        n: n for n in placement.__all__
    }
    with pytest.raises(AttributeError, match="no attribute 'render_pdf'"):
        placement.render_pdf  # noqa: B018  to ask for it raises


@needs("ray")
def test_a_worker_imports_neither_the_memory_proof_nor_what_draws_plans() -> None:
    code = (
        "import sys, rlplace.workers.ray_launch.actors, "
        "rlplace.workers.roles.env, rlplace.comm.shared_memory.channel;"
    )
    code += "print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "rlplace.placement.language.slots" in found
    unwanted = {
        "rlplace.placement.memory",
        "rlplace.placement.plan",
        "rlplace.comm.network",
        "zmq",
        "torch",
    }
    assert not unwanted & set(found)
