"""A state that was saved and loaded by new workers goes on as if they had never ended, in any number of ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.checkpoints import written
from rlplace.errors import ConfigError
from rlplace.placement.schedule import Residency
from tests.actor_ranks import run_ranks, state_digest
from tests.contract.test_actor_ranks import CONTINUOUS, SPLITS, numbers
from tests.lm_ranks import ADAM, LmScenario, iterate, make_lm_worker, run_lm_ranks
from tests.worker_ranks import Session, listen, rendezvous_at

POLICY = dataclasses.replace(CONTINUOUS, iterations=3)
# By number of ranks: rows of each, of which some have none; weights of 5 rows and of 1 have empty shards too.
SPLIT = {**SPLITS, 3: (4, 0, 8)}


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("ranks", "offload"),
    [
        (1, False),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(8, True, marks=pytest.mark.slow),
    ],
)
def test_as_many_ranks_go_on_to_the_bit(
    ranks: int, offload: bool, tmp_path: Path
) -> None:
    folder = new(tmp_path / "actor")
    session = Session(save=folder, save_after=1)
    whole = dataclasses.replace(
        POLICY, split=SPLIT[ranks], offload=offload, session=session
    )
    uninterrupted = run_ranks(whole)
    assert written(folder, ranks)
    resumed = run_ranks(
        dataclasses.replace(whole, session=Session(first=1, load=folder))
    )
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert after.state_digest == before.state_digest
        assert numbers(after) == numbers(before)[1:]


@pytest.mark.parametrize(
    "chain", [(3, 1, 2), pytest.param((8, 2, 1, 8), marks=pytest.mark.slow)]
)
def test_other_numbers_of_ranks_go_on_nearly_alike(
    chain: tuple[int, ...], tmp_path: Path
) -> None:
    policy = dataclasses.replace(POLICY, iterations=len(chain))
    (expected,), load = run_ranks(dataclasses.replace(policy, split=SPLIT[1])), None
    for index, ranks in enumerate(chain):
        folder = new(tmp_path / str(index))
        session = Session(first=index, load=load, save=folder, save_after=index + 1)
        part = dataclasses.replace(
            policy, split=SPLIT[ranks], iterations=index + 1, session=session
        )
        outcomes, load = run_ranks(part), folder
        for found, alone in zip(
            numbers(outcomes[0]), numbers(expected)[index:], strict=False
        ):
            assert found == pytest.approx(alone, rel=1e-3, abs=1e-6)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(
            outcomes[0].weights[name], weight, rtol=2e-4, atol=2e-6, err_msg=name
        )


# ── language models ──────────────────────────────────────────────────────────────────────────────────────────────────

LORA: dict[str, Any] = {
    "algorithm": {
        "kl_coef": 0.1,
        "kl_in": "reward",
        "kl_target": 0.01,
        "kl_horizon": 100,
        "normalize_rewards": True,
        "train_batch": 5,
    },
    "trained": {"lora_rank": 3, "optimizer": ADAM | {"lr": 1e-2}},
    "reference": {"share_actor": True},
}
KINDS: Mapping[str, dict[str, Any]] = {
    "factors": LORA,
    "average": {"trained": {"ema_decay": 0.9}},
    "moments on the host": {"trained": {"optimizer": ADAM | {"on_host": True}}},
    "moments of 8 bits": {"trained": {"optimizer": ADAM | {"kind": "adamw_8bit"}}},
    "16-bit weights": {"trained": {"weights": "bf16", "compute": "bf16"}},
    "16-bit weights, float32 copies": {
        "trained": {
            "weights": "bf16",
            "compute": "bf16",
            "optimizer": ADAM | {"kind": "adamw_master"},
        }
    },
    "critic": {"component": "critic"},
}


def shown(worker: Any) -> dict[str, Any]:
    """All that the next iteration follows from, on one rank that is resident."""
    average = worker._trainer.average
    return {
        "weights and optimizer": state_digest(worker),
        "steps": worker._trainer.steps_made,
        "average": [] if average is None else [a.tolist() for a in average.averages],
        "carried": {name: value.tolist() for name, value in worker._carried().items()},
    }


def wait_for(folder: Path, ranks: int = 1) -> None:
    deadline = time.monotonic() + 20.0
    while written(folder, ranks) is None:
        assert time.monotonic() < deadline, sorted(
            file.name for file in folder.iterdir()
        )
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_goes_on_to_the_bit(
    kind: str, qwen: Path, tmp_path: Path
) -> None:
    scenario = LmScenario(model=qwen, **KINDS[kind])
    one = make_lm_worker(scenario, 0, rendezvous_at(listen()))
    iterate(one, 0)
    for residency in (Residency.OFF, Residency.FULL):  # the same at any: nothing moves
        one.move(residency)
        one.write_state(str(new(tmp_path / residency.name)))
        assert one.move(residency).residency == residency
    iterate(one, 1)  # while it is written
    expected = shown(one)
    wait_for(tmp_path / "FULL")
    one.close()
    for residency in (Residency.FULL, Residency.OFF):
        other = make_lm_worker(
            dataclasses.replace(scenario), 0, rendezvous_at(listen())
        )
        other.move(residency)
        other.read_state(str(tmp_path / residency.name))
        assert other.residency == residency
        iterate(other, 1)
        assert shown(other) == expected
        other.close()


def test_without_room_for_a_copy_the_state_is_written_before_it_returns(
    qwen: Path, tmp_path: Path
) -> None:
    scenario = LmScenario(model=qwen)
    one = make_lm_worker(scenario, 0, rendezvous_at(listen()))
    one.config = dataclasses.replace(one.config, copies_checkpoints=False)
    iterate(one, 0)
    one.move(Residency.OFF)
    one.write_state(str(tmp_path))
    assert written(tmp_path, 1)
    iterate(one, 1)
    expected = shown(one)
    one.close()
    other = make_lm_worker(scenario, 0, rendezvous_at(listen()))
    other.read_state(str(tmp_path))
    iterate(other, 1)
    assert shown(other) == expected
    other.close()


def test_what_is_frozen_is_left_to_the_folder_of_the_model(
    qwen: Path, tmp_path: Path
) -> None:
    worker = make_lm_worker(LmScenario(model=qwen, **LORA), 0, rendezvous_at(listen()))
    worker.write_state(str(tmp_path))
    wait_for(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    factors = sum(shard.nbytes for shard in worker._model.trained_shards())
    worker.close()
    assert 3 * factors <= size < 3 * factors + 20_000


@pytest.mark.parametrize(
    "kind",
    [
        "factors",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "moments of 8 bits",
                "16-bit weights, float32 copies",
                "critic",
            )
        ),
    ],
)
def test_ranks_of_a_language_model_go_on_from_those_of_other_numbers(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    scenario = LmScenario(model=llama, iterations=2, **KINDS[kind])
    atol = {"1": 1e-2, "m": 0.1 * ADAM["lr"]}.get(
        kind[0], 2e-5
    )  # other blocks are packed: a tenth of a step at most
    session = Session(save=new(tmp_path / "3"), save_after=1)
    expected = run_lm_ranks(dataclasses.replace(scenario, ranks=3, session=session))[0]
    again = Session(first=1, load=session.save)
    same = run_lm_ranks(dataclasses.replace(scenario, ranks=3, session=again))[0]
    assert same.digest == expected.digest
    fewer = run_lm_ranks(dataclasses.replace(scenario, ranks=2, session=again))[0]
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(
            fewer.weights[name], weight, rtol=1e-4, atol=atol, err_msg=name
        )


# ── what cannot be saved or loaded ───────────────────────────────────────────────────────────────────────────────────


def test_the_state_of_something_else_is_refused_and_changes_nothing(
    qwen: Path, tmp_path: Path
) -> None:
    worker = make_lm_worker(
        LmScenario(model=qwen, trained={"ema_decay": 0.9}), 0, rendezvous_at(listen())
    )
    worker.write_state(str(tmp_path))
    wait_for(tmp_path)
    worker.close()
    other = make_lm_worker(LmScenario(model=qwen), 0, rendezvous_at(listen()))
    other.move(Residency.FULL)
    before = shown(other)
    other.move(Residency.OFF)
    with pytest.raises(ConfigError, match=r"average\..* has float32") as caught:
        other.read_state(str(tmp_path))
    assert caught.value.codes == ("other-state",)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        other.read_state(str(tmp_path))
    assert caught.value.codes == ("checkpoint-damaged",)
    file.unlink()
    with pytest.raises(ConfigError, match="has nothing"):
        other.read_state(str(tmp_path))
    other.move(Residency.FULL)
    assert shown(other) == before
    other.close()


def test_a_save_that_fails_is_reported_and_ends_nothing(
    qwen: Path, tmp_path: Path
) -> None:
    worker = make_lm_worker(LmScenario(model=qwen), 0, rendezvous_at(listen()))
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").mkdir()  # in its way
    worker.write_state(str(tmp_path))
    worker._files._behind.wait()
    assert written(tmp_path, 1) is None
    assert "cannot write" in (tmp_path / "rank_00000.failed").read_text()
    iterate(worker, 0)
    worker.close()
