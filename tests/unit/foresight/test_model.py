"""What the performance model asks of jobs: it knows none of them by name."""

from __future__ import annotations

import ast
from pathlib import Path

import rlplace.foresight
from rlplace.contract.registry import SHIPPED, shipped_job
from rlplace.foresight.model import PerformanceModel

_KINDS = {"mlp", "causal_lm", "simulator", "language_model"}


def test_the_performance_model_compares_no_job() -> None:
    for file in Path(rlplace.foresight.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            word = node.value if isinstance(node, ast.Constant) else None
            assert word not in _KINDS, f"{file.name}:{node.lineno} names a job"


def test_both_shipped_jobs_give_a_model() -> None:
    for name in SHIPPED:
        assert isinstance(shipped_job(name).performance_model(), PerformanceModel)
