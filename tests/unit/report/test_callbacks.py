"""What a callback answers ends a run or does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.engine import CallbackConfig
from rlplace.config.own import OwnName
from rlplace.report.callbacks import Callbacks


class Says:
    """Answers what it is made with."""

    def __init__(self, folder: Path, config: dict[str, Any], answer: Any) -> None:
        self.answer = answer

    def on_iteration(
        self, iteration: int, env_steps: int, metrics: dict[str, float]
    ) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [True, np.mean([1.0, 2.0]) > 1.0])
def test_a_comparison_of_numpy_ends_a_run_like_one_of_python(
    answer: object, tmp_path: Path
) -> None:
    assert made(tmp_path, answer).on_iteration(1, 8, {})


@pytest.mark.parametrize("answer", [None, False, np.bool_(0)])
def test_a_run_goes_on_after_any_other_answer(answer: object, tmp_path: Path) -> None:
    assert not made(tmp_path, answer).on_iteration(1, 8, {})


def made(folder: Path, answer: object) -> Callbacks:
    config = CallbackConfig(name=OwnName(f"{__name__}:Says"), kwargs={"answer": answer})
    return Callbacks([config], folder, {})
