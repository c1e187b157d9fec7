"""What the configuration of an adapter tells before its base model is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.models.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    read_adapter,
)

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules beside"),
        ({"rank_pattern": {"q_proj": 2}}, "rank of their own"),
        ({"init_lora_weights": "pissa_niter_16"}, "a changed base model"),
        ({"init_lora_weights": "lora_ga"}, "a changed base model"),
    ],
    ids=str,
)
def test_factors_that_are_no_plain_ones_are_refused_by_their_configuration(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    config = json.dumps({**PLAIN, **more})
    (tmp_path / ADAPTER_CONFIG).write_text(config, encoding="utf-8")
    (tmp_path / ADAPTER_WEIGHTS).touch()
    with pytest.raises(ConfigError) as caught:
        read_adapter(str(tmp_path), tmp_path, "actor.lora_adapter")
    assert caught.value.codes == ("unfit-adapter",)
    assert said in str(caught.value)
