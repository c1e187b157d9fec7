"""Whether processes can share a GPU's memory: what is known without a try, and the try, of memory of the host."""

from __future__ import annotations

import pytest

from rlplace.cli import train
from rlplace.workers.launch import gpu_sharing
from rlplace.workers.launch.gpu_sharing import known_obstacle, obstacle
from rlplace.workers.launch.machines import Gpu


@pytest.mark.parametrize(
    ("environment", "release", "words"),
    [
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"
            },
            "6.1",
            "expandable_segments",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:true"},
            "6.1",
            "PYTORCH_ALLOC_CONF",
        ),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5c2"}, "6.1", "MIG"),
        ({}, "5.15.90.1-microsoft-standard-WSL2", "WSL"),
        (
            {
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
                "CUDA_VISIBLE_DEVICES": "0",
            },
            "6.1",
            None,
        ),
    ],
)
def test_what_is_known_without_a_try(
    environment: dict[str, str], release: str, words: str | None
) -> None:
    found = known_obstacle(environment, release)
    assert found is None if words is None else words in str(found)


def test_a_try_shares_a_tensor_between_two_processes() -> None:
    assert obstacle("cpu") is None


def test_a_try_that_fails_or_hangs_says_why() -> None:
    assert "no-such-device" in str(obstacle("no-such-device"))
    assert "after 0.01 s" in str(obstacle("cpu", deadline_s=0.01))


WORDS = [
    "hybrid_ppo",
    "cluster.accelerator.kind=cuda",
    "cluster.accelerators_per_node=8",
    "dry_run=true",
]
WORDS += ["cluster.ray.address=10.0.0.1:6379"]  # GPUs that are not here


@pytest.mark.parametrize(
    ("setting", "asked"), [("auto", True), ("false", False), ("true", False)]
)
def test_weights_go_through_the_host_where_memory_cannot_be_shared(
    setting: str,
    asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of simulators and language models alike; the plan that is shown has it, and the reason."""
    monkeypatch.setattr(train, "visible_gpus", lambda: (Gpu(),))
    for why in (None, "it is a sandbox"):
        monkeypatch.setattr(train, "known_obstacle", lambda why=why: why)
        monkeypatch.setattr(
            train, "obstacle", lambda: pytest.fail("a dry run tries nothing")
        )
        assert train.main([*WORDS, f"actor.sync.through_host={setting}"]) == 0
        told = capsys.readouterr().out
        assert ("cannot share a GPU's memory: it is a sandbox" in told) == (
            asked and why is not None
        )
        past_the_host = setting != "true" and not (asked and why is not None)
        assert ("4 copies on accelerators" in told) == past_the_host


def test_the_words_of_the_try_are_those_of_its_last_line() -> None:
    assert gpu_sharing.__name__ == gpu_sharing._MODULE
