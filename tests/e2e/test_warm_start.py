"""docs/warm_start.md: RLHF starts from models that TRL trains, and begins with better rewards than without."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from rlplace.cli import plan
from tests.pages import ROOT, read_page, shell, typed_in
from tests.tiny_lm import tiny_model


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_starts_from_what_the_page_has_trained(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    tiny_model(tmp_path / "models" / "tiny")
    variables = shell(tmp_path)
    read_page(ROOT / "docs" / "warm_start.md", tmp_path, variables)
    cold = "rlplace train rlhf_tiny env.chat=true actor.model.path=models/tiny reward.model.path=models/reward"
    done = typed_in(
        tmp_path, f"{cold} runner.total_iterations=1 runner.output_dir=cold", variables
    )
    assert done.returncode == 0, done.stdout
    rewards = [_first_reward(tmp_path / where) for where in ("cold", "runs")]
    print(f"first reward from random weights, and after the page: {rewards}")
    assert rewards[1] > rewards[0] + 1


def _first_reward(folder: Path) -> float:
    (metrics,) = folder.glob("rlhf_tiny/*/metrics.jsonl")
    reward: float = json.loads(metrics.read_text(encoding="utf-8").splitlines()[0])[
        "actor/reward"
    ]
    return reward


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CAUSAL_LM", "SEQ_CLS"])
def test_an_adapter_is_refused_and_merged_as_the_error_says(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    component, auto, labels = "actor", transformers.AutoModelForCausalLM, {}
    if kind == "SEQ_CLS":
        component, auto, labels = (
            "reward",
            transformers.AutoModelForSequenceClassification,
            {"num_labels": 1},
        )
    base = tiny_model(tmp_path / "tiny")
    model = get_peft_model(
        auto.from_pretrained(base, **labels), LoraConfig(r=2, task_type=kind)
    ).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(tmp_path / "adapter")

    assert (
        plan.main(["rlhf_tiny", f"{component}.model.path={tmp_path / 'adapter'}"]) == 2
    )
    said = capsys.readouterr().err
    assert f"{component}.model.path: is a LoRA adapter" in said
    (fix,) = re.findall(r"fix: (scripts/merge_adapter \S+ \S+)  ", said)
    done = subprocess.run(
        fix.split(), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    merged = fix.split()[-1]
    tokens = torch.arange(40, 60)[None]
    assert torch.allclose(
        auto.from_pretrained(merged)(tokens).logits, model(tokens).logits, atol=1e-4
    )
    assert transformers.AutoTokenizer.from_pretrained(merged).chat_template
    assert plan.main(["rlhf_tiny", f"{component}.model.path={merged}"]) == 0, (
        capsys.readouterr().err
    )
