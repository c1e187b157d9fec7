"""Modules of special types, which the code of a script seems to use, travel by their names."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch.distributed
from ray import cloudpickle

from rlplace.workers.ray_launch.modules import let_modules_travel


class Special(ModuleType):
    """Like the modules that hold torch's settings."""


def test_a_special_module_is_the_one_that_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Special("a_special_module")
    monkeypatch.setitem(sys.modules, "a_special_module", module)
    let_modules_travel()
    assert cloudpickle.loads(cloudpickle.dumps(module)) is module


def test_torch_settings_travel() -> None:
    settings = sys.modules["torch.distributed.config"]
    assert type(settings) is not ModuleType
    let_modules_travel()
    assert cloudpickle.loads(cloudpickle.dumps(settings)) is settings
    assert torch.distributed is not None


def test_a_module_that_is_not_imported_is_refused() -> None:
    let_modules_travel()
    with pytest.raises(TypeError, match="not imported under any name"):
        cloudpickle.dumps(Special("another_special_module"))
