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


VLLM = "rlplace.workers.engines.vllm_modules"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hybrid_grpo_llm", "cluster.accelerator.kind=emulated"], [VLLM]),
        (
            [
                "hybrid_grpo_llm",
                "cluster.accelerator.kind=emulated",
                "actor.lora_rank=4",
            ],
            ["peft", VLLM],
        ),
        (["hybrid_grpo_llm", "rollout.engine=transformers"], []),
        (["grpo_qwen3_8b"], []),
        (["sft_tiny"], []),
        (["sft_tiny", "actor.lora_rank=4"], ["peft"]),
        (["hybrid_ppo"], []),
    ],
)
def test_a_job_imports_the_libraries_that_it_needs_once(
    words: list[str], expected: list[str]
) -> None:
    (composed,) = with_hydra(["--config-name", *words])
    prepared = prepare_composed(composed)
    config = prepared.config
    found = job_of(config).large_modules(config, prepared.plan)
    assert list(found) == expected
    for name in found:
        assert importlib.util.find_spec(name) is not None
