"""The shipped configs: each is valid, plans the same by every command, and the main ones explain every key."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from rlplace.cli import plan, train
from rlplace.config import compose
from rlplace.config.validate import config_schema

CONFIGS = sorted(compose.config_names())
MAIN = ("hybrid_ppo", "hybrid_grpo_llm", "rlhf_tiny")  # one for each kind of job
VALIDATOR = jsonschema.Draft202012Validator(config_schema())
FITTING = (
    *(*MAIN, "hybrid_ppo_cartpole", "hybrid_llm_multiturn"),
    *("collocated_ppo", "collocated_ppo_one_process", "collocated_grpo_llm"),
)
PARTS = ("plan: ", "stages: ", "routes: ", "savings: ", "memory: fits")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_is_planned_and_fits(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["--config-name", name]) == 0
    planned = capsys.readouterr()
    assert [part for part in PARTS if part not in planned.out] == []
    assert planned.err == ""
    assert train.main(["--config-name", name, "dry_run=true"]) == 0
    dry = capsys.readouterr().out
    assert dry.startswith(planned.out)
    assert "nothing was started" in dry


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", FITTING)
def test_the_main_configs_take_the_gpus_there_are(
    name: str,
    gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a program in place of nvidia-smi lists them."""
    rows = [f"echo NVIDIA L40S, 46068, GPU-{number}" for number in range(gpus)]
    (tmp_path / "nvidia-smi").write_text(
        "\n".join(["#!/bin/sh", *rows, ""]), encoding="utf-8"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert train.main([name, "dry_run=true"]) == 0
    out, err = capsys.readouterr()
    assert re.match(rf"plan: \w+, {gpus} accelerators?, .* L40S, ", out)
    assert err == ""


@pytest.mark.parametrize(
    ("name", "count"), [("hybrid_ppo", 8), ("hybrid_grpo_llm", 3), ("rlhf_tiny", 3)]
)
def test_the_main_configs_emulate_accelerators_where_there_is_no_gpu(
    name: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan.main([name]) == 0
    assert re.match(
        rf"plan: hybrid, {count} accelerators, .* emulated, ", capsys.readouterr().out
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_is_valid_and_says_what_it_is(name: str) -> None:
    text = (compose.CONFIG_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert [
        error.message for error in VALIDATOR.iter_errors(yaml.safe_load(text))
    ] == []


@pytest.mark.parametrize("name", MAIN)
def test_the_main_configs_explain_every_key(name: str) -> None:
    lines = (
        (compose.CONFIG_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    )
    keys = [line for line in lines if re.match(r" *[a-z_]+: *[^ #]", line)]
    assert [line for line in keys if "  # " not in line] == []
