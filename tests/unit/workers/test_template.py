"""Modules that the template of a node imports before it is forked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from rlplace.config.compose import with_hydra
from rlplace.contract.registry import job_of
from rlplace.runtime.prepare import prepare_composed
from rlplace.workers.ray_launch.template import modules_of
from rlplace.workers.roles.env import VectorEnvWorker
from rlplace.workers.worker import Worker


class Custom(Worker):
    """A worker of a user."""

    imports = ("json",)


def test_shipped_workers_name_their_own_modules() -> None:
    found = modules_of([VectorEnvWorker])
    assert found == [*VectorEnvWorker.imports, "rlplace.workers.roles.env"]


def test_custom_workers_bring_the_libraries_that_are_imported_here() -> None:
    import torch

    assert torch.__name__ in sys.modules
    found = modules_of([VectorEnvWorker, Custom])
    assert {"json", "rlplace.workers.worker", "torch"} <= {*found}
    assert not any(name.startswith("tests") for name in found)
    assert "torch" in modules_of(())


def test_without_libraries_nothing_is_imported_early() -> None:
    code = (
        "from rlplace.workers.ray_launch.template import modules_of\n"
        "print([name for name in modules_of(()) if name != 'numpy'])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "torch" not in shown.stdout


@pytest.mark.parametrize(
    ("words", "vllm"),
    [
        (["hybrid_grpo_llm", "cluster.accelerator.kind=emulated"], True),
        (["hybrid_grpo_llm", "rollout.engine=transformers"], False),
        (["grpo_qwen3_8b"], False),
        (["sft_tiny"], False),
        (["hybrid_ppo"], False),
    ],
)
def test_jobs_whose_engines_are_vllm_on_processors_import_it_once(
    words: list[str], vllm: bool
) -> None:
    (composed,) = with_hydra(["--config-name", *words])
    prepared = prepare_composed(composed)
    config = prepared.config
    found = job_of(config).large_modules(config, prepared.plan)
    assert bool(found) is vllm
    for name in found:
        assert importlib.util.find_spec(name) is not None
