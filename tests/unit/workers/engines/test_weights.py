"""Completing a version by kept weights, and checking weights against a checkpoint."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlplace.comm.weights.version import ReceivedWeights
from rlplace.errors import WeightSyncError
from rlplace.workers.engines.weights import (
    EMBEDDING,
    HEAD,
    ExpectedWeights,
    KeptWeights,
    SharedBucket,
    check_fit,
    in_buckets,
)

A, B = "q_proj.lora_A.weight", "q_proj.lora_B.weight"
OWNER = "rollout rank 0"


class Sent:
    """A version, and what became of it."""

    def __init__(
        self, version: int, *, partial: bool = False, **tensors: torch.Tensor
    ) -> None:
        self.alive = [weakref.ref(tensor) for tensor in tensors.values()]
        self.back: list[bool] = []
        self.left = -1  # tensors that were still alive when it was given back
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.received = ReceivedWeights(
            version=version,
            tensors=named,
            partial=partial,
            transports={},
            give_back=self._give_back,
        )

    def _give_back(self, loaded: bool) -> None:
        self.received.tensors.clear()
        self.back.append(loaded)
        self.left = sum(ref() is not None for ref in self.alive)


def load(kept: KeptWeights, sent: Sent) -> dict[str, float]:
    """The sums of what an engine is given."""
    with kept.completed(sent.received) as (weights, factors):
        on = torch.device("cpu")
        return {
            name: float(
                factors[name].added_to(weight, on).sum()
                if name in factors
                else weight.sum()
            )
            for name, weight in weights.items()
        }


def test_where_nothing_is_left_out_nothing_outlives_the_load() -> None:
    """On a GPU it is a second copy of the weights, and others need the room."""
    kept, sent = (
        KeptWeights(OWNER, keeps=False),
        Sent(1, a=torch.ones(3), b=torch.ones(4)),
    )
    assert load(kept, sent) == {"a": 3.0, "b": 4.0}
    assert (sent.back, sent.left) == ([True], 0)


def test_what_is_trained_takes_the_place_of_what_was_kept() -> None:
    kept = KeptWeights(OWNER, keeps=True)
    first = Sent(0, a=torch.ones(3), b=torch.ones(4))
    assert load(kept, first) == {"a": 3.0, "b": 4.0}
    second, third = (
        Sent(1, partial=True, b=torch.zeros(4)),
        Sent(2, partial=True, a=torch.zeros(3)),
    )
    assert load(kept, second) == {"a": 3.0, "b": 0.0}
    assert load(kept, third) == {"a": 0.0, "b": 4.0}
    assert (first.back, second.back, third.back) == ([], [True], [True])
    kept.close()
    assert first.back == [True]


def test_factors_are_added_to_what_was_kept() -> None:
    kept = KeptWeights(OWNER, keeps=True, scale=2.0)
    first = Sent(0, q_proj__weight=torch.ones(2, 2), norm=torch.ones(2))
    first.received.tensors.update({A: torch.ones(1, 2), B: torch.zeros(2, 1)})
    assert load(kept, first) == {"q_proj.weight": 4.0, "norm": 2.0}
    for version, factor in ((1, 3.0), (2, 1.0)):
        sent = Sent(version, partial=True)
        sent.received.tensors.update(
            {A: torch.ones(1, 2), B: torch.full((2, 1), factor)}
        )
        assert load(kept, sent) == {
            "q_proj.weight": 4.0 + 4 * 2.0 * factor,
            "norm": 2.0,
        }


def test_a_new_whole_version_replaces_the_kept_one() -> None:
    kept, first, second = (
        KeptWeights(OWNER, keeps=True),
        Sent(0, a=torch.ones(1)),
        Sent(1, a=torch.zeros(1)),
    )
    load(kept, first)
    load(kept, second)
    assert (first.back, second.back) == ([True], [])


def test_what_was_not_loaded_is_given_back_and_not_kept() -> None:
    kept, first = KeptWeights(OWNER, keeps=True), Sent(0, a=torch.ones(1))
    with (
        pytest.raises(ValueError, match="does not fit"),
        kept.completed(first.received),
    ):
        raise ValueError("does not fit")
    assert first.back == [False]
    later = Sent(1, partial=True, a=torch.ones(1))
    with pytest.raises(WeightSyncError) as caught:
        load(kept, later)
    assert caught.value.code == "some-weights"
    assert later.back == [False]


# ── names and shapes ──────────────────────────────────────────────────────────────────────────────────────────────────


NORM = "model.norm.weight"


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        EMBEDDING: torch.zeros(8, 4, dtype=torch.bfloat16),
        NORM: torch.zeros(4, dtype=torch.bfloat16),
    } | more


def problems(expected: ExpectedWeights, given: dict[str, torch.Tensor]) -> list[str]:
    try:
        check_fit(expected.complete(given), expected.shapes, owner=OWNER, version=1)
    except ValueError as error:
        return str(error).partition("the model: ")[2].split("; ")
    return []


def folder(path: Path, stored: dict[str, torch.Tensor], tied: bool) -> Path:
    """A checkpoint in one file per weight."""
    for number, (name, weight) in enumerate(stored.items()):
        save_file({name: weight}, path / f"model-{number}.safetensors")
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return path


def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    stored = weights() | {
        HEAD: torch.ones(8, 4),
        "layers.0.rotary_emb.inv_freq": torch.zeros(2),
    }
    expected = ExpectedWeights.of_folder(folder(tmp_path, stored, tied=False))
    assert expected.shapes == {EMBEDDING: (8, 4), NORM: (4,), HEAD: (8, 4)}
    assert not expected.tied
    assert expected.elements == 68
    assert problems(expected, weights(**{HEAD: torch.zeros(8, 4)})) == []
    assert problems(expected, weights()) == [f"{HEAD} is missing"]


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_tied_head_counts_once_and_may_be_left_out(
    tmp_path: Path, stored_twice: bool
) -> None:
    stored = weights() | ({HEAD: torch.zeros(8, 4)} if stored_twice else {})
    expected = ExpectedWeights.of_folder(folder(tmp_path, stored, tied=stored_twice))
    assert expected.tied
    assert expected.elements == 36
    given = weights()
    assert expected.complete(given)[HEAD] is given[EMBEDDING]
    both = weights(**{HEAD: torch.zeros(8, 4)})
    assert expected.complete(both) is both
    assert problems(expected, given) == []


def test_every_mistake_is_named(tmp_path: Path) -> None:
    expected = ExpectedWeights.of_folder(folder(tmp_path, weights(), tied=True))
    assert problems(
        expected, {EMBEDDING: torch.zeros(8, 5), "stranger": torch.zeros(1)}
    ) == [
        f"{NORM} is missing",
        "stranger is not the model's",
        f"{HEAD} is [8, 5], expected [8, 4]",
        f"{EMBEDDING} is [8, 5], expected [8, 4]",
    ]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        ExpectedWeights.of_folder(tmp_path)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    made = folder(tmp_path, weights(), tied=True)
    file = next(made.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(OSError, match=file.name):
        ExpectedWeights.of_folder(made)


# ── to workers that are other processes ──────────────────────────────────────────────────────────────────────────────


def test_weights_in_buckets_arrive_equal_and_only_one_bucket_is_there_at_a_time() -> (
    None
):
    """Among them weights larger than a bucket, of other types, without elements, not contiguous."""
    sent = {
        "a": torch.randn(5, 30),
        "large": torch.randn(40, 40),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "half": torch.randn(7).bfloat16(),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(6, 9).t(),
        "mask": torch.tensor([True, False]),
    }
    names, before, seen = list[str](), _memory_files(), list[SharedBucket]()
    for bucket in in_buckets(iter(sent.items()), 1000):
        assert _memory_files() == before + 1
        found = bucket.open()
        assert len(found) == 1 or bucket.size_bytes <= 1000
        for name, weight in found:
            assert (weight.dtype, weight.shape) == (sent[name].dtype, sent[name].shape)
            assert torch.equal(weight, sent[name])
            weight.zero_()  # reaches nobody else
            names.append(name)
        del found, weight  # which keep the memory
        assert all(torch.equal(weight, sent[name]) for name, weight in bucket.open())
        seen.append(bucket)
    assert names == list(sent)
    assert len(seen) == 3
    assert _memory_files() == before
    with pytest.raises(FileNotFoundError):
        seen[0].open()


def _memory_files() -> int:
    """Those that this process has open, however often."""
    links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return len(
        {file.stat().st_ino for file in links if "rlplace weights" in os.readlink(file)}
    )
