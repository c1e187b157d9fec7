"""`python -m rlplace.export` gives of a checkpoint what the run itself saves of the same weights, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlplace.checkpoints.store import Contents, Store
from rlplace.cli.export import main
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import TRAJECTORIES
from tests.actor_ranks import Scenario, first_iteration, make_actor
from tests.lm_ranks import iterate, made_up_samples
from tests.rlhf_stage import RlhfStage
from tests.worker_ranks import in_processes, listen, rendezvous_at

PATIENCE_S = 60.0
# The optimizer steps float32 copies of these weights.
ROUNDED = {"weights": "bf16", "compute": "bf16"}


def commit(
    run: Path,
    component: str,
    ranks: int,
    save: Callable[[str], object],
    config: Mapping[str, object],
) -> None:
    """A checkpoint of one component after three iterations, as the driver makes it."""
    run.mkdir()
    store = Store(run, keep_last=1, keep_best=0)
    part = store.begin(3, [component])
    save(str(part / component))
    texts = {"config.yaml": yaml.safe_dump(dict(config))}
    contents = Contents(
        ranks={component: ranks}, texts=texts, version=3, score=None, libraries={}
    )
    store.commit(part, contents, timeout_s=PATIENCE_S, cancelled=threading.Event())


def text_job(model: Path, **blocks: object) -> dict[str, object]:
    base = {
        "cluster": {"component_placement": {"actor": 0, "env": 0, "rollout": 0}},
        "actor": {"model": {"path": str(model)}, "compute": "fp32"},
        "env": {"task": "arithmetic"},
        "runner": {"seed": 7, "total_iterations": 4},
    }
    return base | {
        name: {**base.get(name, {}), **block} for name, block in blocks.items()
    }


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("model", "trained"),
    [
        ("llama", {}),
        ("qwen", ROUNDED),
        ("qwen", {"lora_rank": 3, "weights": "fp32", "compute": "bf16"}),
        ("llama", {"lora_rank": 2, "ema_decay": 0.5}),
    ],
    ids=str,
)
def test_a_language_model(
    actor_of: Callable[..., Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: str,
    trained: dict[str, Any],
) -> None:
    folder: Path = request.getfixturevalue(model)
    actor = actor_of(folder, trained=trained)
    iterate(actor)
    actor.save_model(str(tmp_path / "saved"))
    actor.move(Residency.OFF)
    commit(
        tmp_path / "run", "actor", 1, actor.write_state, text_job(folder, actor=trained)
    )
    assert main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert files(tmp_path / "exported") == files(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert (tmp_path / "saved_ema").exists() == ("ema_decay" in trained)
    if "ema_decay" in trained:
        assert (
            main([str(tmp_path / "run"), str(tmp_path / "exported_ema"), "--ema"]) == 0
        )
        assert files(tmp_path / "exported_ema") == files(tmp_path / "saved_ema")
        assert files(tmp_path / "exported_ema") != files(tmp_path / "exported")


@pytest.mark.parametrize("trained", [{}, {"lora_rank": 3}], ids=str)
def test_a_critic(
    critic_of: Callable[..., Any], qwen: Path, tmp_path: Path, trained: dict[str, Any]
) -> None:
    critic = critic_of(qwen, trained=trained)
    iterate(critic)
    critic.save_model(str(tmp_path / "saved"))
    job = text_job(
        qwen, critic={"compute": "fp32", **trained}, algorithm={"name": "ppo"}
    )
    commit(tmp_path / "run", "critic", 1, critic.write_state, job)
    assert (
        main(
            [str(tmp_path / "run"), str(tmp_path / "exported"), "--component", "critic"]
        )
        == 0
    )
    assert files(tmp_path / "exported") == files(tmp_path / "saved")


SIMULATED = {
    "cluster": {"component_placement": {}},
    "env": {"id": "synthetic", "total_num_envs": 5},
    "actor": {"model": {"hidden": [16, 16]}},
}


def save_policy(folder: Path, rank: int, rendezvous: Any, channels: Path) -> None:
    """One rank of all; the first commits the checkpoint."""
    split = (5,) if channels == folder else (3, 2)
    scenario = Scenario(split=split, algorithm={"normalize_observations": True})
    actor = make_actor(scenario, rank, rendezvous)
    try:
        actor.move(Residency.FULL)
        for share in actor.config.routes.trajectories.receives(rank):
            piece = first_iteration(scenario).split(share.start, share.stop)
            actor.context.channels[TRAJECTORIES].put(
                piece, key=str(rank), weight=piece.weight
            )
        actor.learn(0, 0)
        actor.save_model(str(folder / "saved.safetensors"))
        if rank == 0:
            commit(folder / "run", "actor", len(split), actor.write_state, SIMULATED)
        else:
            actor.write_state(
                str(folder / "run" / "checkpoints" / "000003.part" / "actor")
            )
    finally:
        actor.close()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_simulator_policy(
    tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if ranks == 1:
        save_policy(tmp_path, 0, rendezvous_at(listen()), tmp_path)
    else:
        in_processes(save_policy, tmp_path, ranks)
    assert (
        main([str(tmp_path / "run"), str(tmp_path / "out" / "exported.safetensors")])
        == 0
    )
    for name, near in (
        ("out.onx", "out.onnx"),
        ("out.pth", "out.pt"),
        ("out.gguf", "out"),
    ):
        assert main([str(tmp_path / "run"), str(tmp_path / name)]) == 2
        assert f"    fix: {tmp_path / near}\n" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.*"))
    saved = load_file(tmp_path / "saved.safetensors")
    exported = load_file(tmp_path / "out" / "exported.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        n: t.shape for n, t in saved.items()
    }
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_what_was_exported_is_exported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_policy(tmp_path, 0, rendezvous_at(listen()), tmp_path)
    first, second = tmp_path / "first.best", tmp_path / "second"
    assert main([str(tmp_path / "run"), str(first)]) == 0
    assert main([str(first), str(second)]) == 0
    assert files(second) == files(first)
    assert (
        main([str(second / "policy.safetensors"), str(tmp_path / "alone.safetensors")])
        == 0
    )
    assert (tmp_path / "alone.safetensors").read_bytes() == files(first)[
        "policy.safetensors"
    ]
    cases = {
        (str(first),): f"fix: {tmp_path}/first_2.best",
        (str(tmp_path / "other"), "--ema"): "fix: leave out --ema",
    }
    for words, fix in cases.items():
        assert main([str(second), *words]) == 2
        assert fix in capsys.readouterr().err


def test_a_value_head_on_the_trunk_stays_in_the_checkpoint(
    qwen: Path, tmp_path: Path
) -> None:
    blocks = {"critic": {"on_actor": True}, "algorithm": {"name": "ppo"}}
    with RlhfStage(qwen, ("actor",), **blocks) as stage:
        stage.iterate(made_up_samples())
        actor = stage.workers["actor"]
        actor.move(Residency.WEIGHTS)
        actor.save_model(str(tmp_path / "saved"))
        commit(
            tmp_path / "run", "actor", 1, actor.write_state, text_job(qwen, **blocks)
        )
    assert main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert files(tmp_path / "exported") == files(tmp_path / "saved")


def test_what_cannot_be_exported(
    actor_of: Callable[..., Any],
    qwen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    actor, run, out = actor_of(qwen), tmp_path / "run", tmp_path / "out"
    commit(run, "actor", 1, actor.write_state, text_job(qwen))
    shard = next((run / "checkpoints" / "000003" / "actor").iterdir())
    cases = {
        (str(qwen), str(out)): ("not-a-checkpoint", f"got: {qwen}"),
        (str(tmp_path / "rum"), str(out)): ("resume-not-found", f"fix: {run}"),
        (str(run), str(run)): ("bad-option", "an export overwrites nothing"),
        (str(run), str(out), "--component", "critic"): (
            "bad-option",
            "it has the weights of actor",
        ),
        (str(run), f"{out}.gguf"): (
            "bad-option",
            "a language model is written as a folder",
            f"fix: {out}",
        ),
        (str(run), ""): ("bad-option", "is not the name of a new folder or file"),
        (str(run), str(out), "--ema"): (
            "bad-option",
            "the run kept none: actor.ema_decay",
        ),
    }
    for words, told in cases.items():
        assert main(words) == 2
        error = capsys.readouterr().err
        assert [text for text in (*told, "fix: ") if text not in error] == [], error
    assert main([str(run), str(shard / "out")]) == 1
    assert "OUT: cannot write: " in capsys.readouterr().err
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main([str(run), str(out)]) == 2
    assert f"got: {shard}" in capsys.readouterr().err
    assert not out.exists()
