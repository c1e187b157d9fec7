"""The command that a missing library's error proposes, from what the installed package says of its extras."""

from __future__ import annotations

import importlib.metadata

import pytest

from rlplace.envs.registry import missing_library
from rlplace.extras import install_command, version_of
from tests.absent import needs

LINES = [
    "PyYAML>=6",
    'ray[default]==2.60.0; extra == "run"',
    'torch==2.13.0; extra == "run"',
    'numpy==2.3.5; python_version > "3" and extra == "llm"',
    'rlplace[run,llm]; extra == "vllm"',
    'vllm==0.32.0; extra == "vllm"',
    'torch==2.13.0; extra == "vllm"',
]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("run", "pip install 'ray[default]==2.60.0' torch==2.13.0"),
        ("llm", "pip install numpy==2.3.5"),
        (
            "vllm",
            "pip install 'ray[default]==2.60.0' torch==2.13.0 numpy==2.3.5 vllm==0.32.0",
        ),
        ("absent", "pip install -e '.[absent]'        (in the clone)"),
    ],
)
def test_the_command_names_what_the_extra_stands_for(
    extra: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: LINES)
    assert install_command(extra) == command


def test_a_package_that_is_not_installed_has_a_clone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("run") == "pip install -e '.[run]'        (in the clone)"


@needs("rlplace")
def test_a_library_that_no_extra_has_is_installed_as_its_own_error_says() -> None:
    why = 'Simulator is not installed, run `pip install swig` followed by `pip install "gymnasium[simulator]"`'
    fix = missing_library(why, got="Simulator-v3", extra="envs").problems[0].fix
    assert fix == 'pip install swig && pip install "gymnasium[simulator]"'
    why = 'MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`'
    assert missing_library(why, got="Hopper-v5", extra="envs").problems[
        0
    ].fix == install_command("envs")


def test_a_library_that_an_extra_has_is_installed_by_this_extra() -> None:
    why = 'Box2D is not installed, run `pip install swig` followed by `pip install "gymnasium[box2d]"`'
    fix = missing_library(why, got="LunarLander-v3", extra="envs").problems[0].fix
    assert fix == install_command("box2d")


@pytest.mark.parametrize("library", ["PyYAML", "pydantic", "hydra-core", "pytest"])
def test_a_version_is_that_of_the_installed_library(library: str) -> None:
    assert version_of(library) == importlib.metadata.version(library)


def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert version_of("no-such-library-here") is None
