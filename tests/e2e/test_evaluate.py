"""What can be done with the policy of a run: it is played, loaded in Python and exported; errors say what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rlplace
from rlplace.checkpoints.find import folders_of
from rlplace.cli.evaluate import main
from rlplace.cli.export import main as export
from rlplace.errors import ConfigError
from rlplace.jobs.language_model.evaluate import _around, _identity
from tests.e2e.language import INLINE as LM_INLINE
from tests.e2e.language import tiny
from tests.e2e.training import INLINE, placed, train
from tests.gyms import Script

CORNER = ("env.id=tests.gyms:Corner-v0", "env.max_episode_steps=6")
IMAGES = "actor.model={kind: cnn, network: impala, channels: [4], hidden: [16]}"


def trained(output: Path, *overrides: str) -> Path:
    run = train(
        "hybrid_ppo_cartpole",
        output,
        *INLINE,
        *placed("0", "0", "0"),
        "runner.total_iterations=2",
        *overrides,
    )
    assert run.folder is not None, run.err
    return run.folder


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "a b")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("drawn"),
        "env.id=tests.gyms:Drawn-v0",
        "env.max_episode_steps=6",
    )


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actions of two numbers, in [-1, 1] and [0, 0.5]."""
    script = (
        "env.id=tests.gyms:Script-v0",
        "env.max_episode_steps=6",
        "+env.kwargs.action_space=box",
    )
    return trained(tmp_path_factory.mktemp("box"), *script)


def report(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code = main([*map(str, words), "--format", "json"])
    told = capsys.readouterr()
    assert code == 0, told.err
    found: dict[str, Any] = json.loads(told.out)
    return found


def test_a_policy_is_played_with_the_statistics_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(
        tmp_path,
        "+env.wrappers=[{name: gymnasium.wrappers:NormalizeObservation}]",
        "checkpoint.every=1",
    )
    first = report(capsys, run, "episodes=4")
    assert report(capsys, run, "episodes=4")["returns"] == first["returns"]
    # Checkpoints have the statistics, the file with the weights has not.
    shutil.rmtree(run / "checkpoints")
    assert main([str(run)]) != 0
    assert "no-statistics" in capsys.readouterr().err


def test_a_run_is_played_and_summed_up(
    cartpole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, cartpole, "episodes=21", "seed=3")
    returns = found["returns"]
    assert len(returns) == found["episodes"] == 21
    assert found["lengths"] == returns, "CartPole rewards each step by one"
    assert found["return"] == pytest.approx(
        {
            "mean": np.mean(returns),
            "std": np.std(returns),
            "min": min(returns),
            "max": max(returns),
        }
    )
    assert (
        found["policy"]
        == f"after 2 iterations, policy version 2: {cartpole}/checkpoints/000002"
    )
    assert report(capsys, cartpole, "episodes=21", "seed=3")["returns"] == returns
    assert report(capsys, cartpole, "episodes=21", "seed=4")["returns"] != returns
    drawn = report(capsys, cartpole, "episodes=21", "seed=3", "deterministic=false")[
        "returns"
    ]
    assert drawn != returns
    assert (
        report(capsys, cartpole, "episodes=21", "seed=3", "deterministic=false")[
            "returns"
        ]
        == drawn
    )
    assert main([str(cartpole), "episodes=2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("policy", "env", "return", "length", "seconds"),
    ]
    assert main([str(cartpole), "episodes=1"]) == 0
    assert "CartPole-v1, 1 episode, " in capsys.readouterr().out


def test_gymnasium_itself_gives_the_same_returns(
    cartpole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row by row, with the seeds of an evaluation and Gymnasium's own time limit."""
    from rlplace.envs.registry import row_seeds

    policy, env, returns = (
        rlplace.load_policy(cartpole),
        gymnasium.make("CartPole-v1"),
        [],
    )
    for seed in row_seeds(0, 0, 4, -1):
        observation, over = env.reset(seed=seed)[0], False
        returns.append(0.0)
        while not over:
            observation, reward, terminated, truncated, _ = env.step(
                policy.act(observation)
            )
            returns[-1] += float(reward)
            over = terminated or truncated
    assert report(capsys, cartpole, "episodes=4")["returns"] == returns


def test_each_row_plays_as_many_episodes_and_the_time_limit_is_that_of_training(
    drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The episodes of a row have 3, 5 and 7 steps, of which 6 are allowed."""
    assert sorted(report(capsys, drawn, "episodes=16")["lengths"]) == [3] * 16
    assert sorted(report(capsys, drawn, "episodes=33")["lengths"]) == [3] * 16 + [
        5
    ] * 16 + [6]


def test_a_policy_is_loaded_from_all_that_keeps_it(
    cartpole: Path, tmp_path: Path
) -> None:
    assert export([str(cartpole), str(tmp_path / "exported")]) == 0
    assert export([str(cartpole), str(tmp_path / "exported.safetensors")]) == 0
    alone = tmp_path / "alone"  # a run that kept no checkpoint
    shutil.copytree(cartpole, alone, ignore=shutil.ignore_patterns("checkpoints"))
    observations = np.random.default_rng(1).normal(size=(7, 4))
    (newest,) = folders_of(cartpole)
    first = rlplace.load_policy(cartpole).act(observations)
    assert (first.dtype, first.shape) == (np.int64, (7,))
    for path in (newest, cartpole / "policy.safetensors", tmp_path / "exported", alone):
        assert (
            rlplace.load_policy(str(path)).act(observations).tolist() == first.tolist()
        ), path
    saved, exported = (
        load_file(f)
        for f in (cartpole / "policy.safetensors", tmp_path / "exported.safetensors")
    )
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    single = rlplace.load_policy(newest).act(observations[2])
    assert (single.shape, int(single)) == ((), first[2])


def test_actions_are_those_of_the_weights_with_normalised_observations(
    cartpole: Path,
) -> None:
    weights = {
        name: tensor.double().numpy()
        for name, tensor in load_file(cartpole / "policy.safetensors").items()
    }
    observations = np.random.default_rng(2).normal(size=(50, 4)) * 2
    scaled = (observations - weights["normalizer.mean"]) / np.sqrt(
        weights["normalizer.var"] + 1e-8
    )
    hidden = np.clip(scaled, -10, 10)
    for layer in (0, 2):
        hidden = np.tanh(
            hidden @ weights[f"policy.{layer}.weight"].T
            + weights[f"policy.{layer}.bias"]
        )
    logits = hidden @ weights["policy.4.weight"].T + weights["policy.4.bias"]
    policy = rlplace.load_policy(cartpole, seed=5)
    assert policy.act(observations).tolist() == logits.argmax(axis=1).tolist()
    likely = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))  # of action 1
    drawn = np.mean(
        [policy.act(observations, deterministic=False) for _ in range(2000)], axis=0
    )
    assert drawn == pytest.approx(likely, abs=0.06)


def test_continuous_actions_stay_within_their_bounds(box: Path) -> None:
    policy = rlplace.load_policy(box)
    observations = np.random.default_rng(0).normal(size=(200, 4)) * 100
    drawn = policy.act(observations, deterministic=False)
    assert (drawn.dtype, drawn.shape) == (np.float32, (200, 2))
    assert drawn.min(axis=0).tolist() == [-1.0, 0.0]
    assert drawn.max(axis=0).tolist() == [1.0, 0.5]
    likeliest = policy.act(observations)
    assert policy.act(observations[3]) == pytest.approx(likeliest[3], abs=1e-6)
    assert np.ptp(likeliest[:, 0]) < np.ptp(drawn[:, 0]), "without noise"


@pytest.mark.parametrize("form", [".pt", ".onnx"])
@pytest.mark.parametrize("run", ["cartpole", "box"])
def test_exported_programs_decide_alike(
    run: str, form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, out = request.getfixturevalue(run), tmp_path / f"policy{form}"
    given = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32) * 3
    if form == ".pt":
        assert export([str(folder), str(out)]) == 0
        found = torch.jit.load(out)(torch.tensor(given)).numpy()
    else:
        reference = pytest.importorskip("onnx.reference")
        assert export([str(folder), str(out)]) == 0
        (found,) = reference.ReferenceEvaluator(str(out)).run(
            ["actions"], {"observations": given}
        )
    expected = rlplace.load_policy(folder).act(given)
    assert found.dtype == expected.dtype
    assert found == pytest.approx(expected, abs=1e-6)


class Choosy(Script):
    """Takes only actions of its space."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return super().step(action)


@pytest.mark.parametrize("space", ["from_five", "pair_from_five"])
def test_actions_begin_where_their_space_begins(
    space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = f"+env.kwargs={{action_space: {space}}}"
    run = trained(
        tmp_path / "runs",
        f"env.id={__name__}:Choosy",
        kwargs,
        "env.max_episode_steps=6",
    )
    env = Choosy(action_space=space)
    given = np.random.default_rng(0).normal(size=(9, 4))
    policy = rlplace.load_policy(run)
    for deterministic in (True, False):
        for action in policy.act(given, deterministic=deterministic):
            assert env.action_space.contains(action)
    assert env.action_space.contains(policy.act(given[0]))
    assert len(report(capsys, run, "episodes=3")["returns"]) == 3
    assert export([str(run), str(tmp_path / "policy.pt")]) == 0
    exported = torch.jit.load(tmp_path / "policy.pt")(torch.tensor(given).float())
    assert exported.tolist() == policy.act(given).tolist()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes images of bytes by convolutions, and makes two choices at once."""
    return trained(
        tmp_path_factory.mktemp("seeing"), *CORNER, IMAGES, "+env.kwargs.split=true"
    )


@pytest.mark.slow
def test_a_policy_of_images_is_played_and_exported(
    seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(report(capsys, seeing, "episodes=3")["returns"]) == 3
    policy = rlplace.load_policy(seeing)
    given = np.random.default_rng(0).integers(
        0, 255, (5, *policy.spaces.observation_shape), np.uint8
    )
    assert policy.act(given).shape == (5, 2)
    assert policy.act(given[1]).tolist() == policy.act(given)[1].tolist()
    with pytest.raises(ValueError, match="observation-shape"):
        policy.act(given / 255)
    assert export([str(seeing), str(tmp_path / "policy.pt")]) == 0
    assert (
        torch.jit.load(tmp_path / "policy.pt")(torch.tensor(given)).tolist()
        == policy.act(given).tolist()
    )


@pytest.mark.slow
def test_a_network_of_ones_own_with_single_numbers_is_loaded_played_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "actor.model={kind: module, name: tests.own_network:Own}"
    run = trained(
        tmp_path / "runs", "env.id=tests.gyms:Script-v0", "env.max_episode_steps=6", own
    )
    (newest,) = folders_of(run)[-1:]
    assert len(report(capsys, run, "episodes=3")["returns"]) == 3
    assert export([str(run), str(tmp_path / "out")]) == 0
    given = np.random.default_rng(0).normal(size=(5, 4))
    found = [rlplace.load_policy(path) for path in (run, newest, tmp_path / "out")]
    assert all(
        policy.network.state_dict()["network.scale"].shape == () for policy in found
    )
    assert all(
        policy.act(given).tolist() == found[0].act(given).tolist() for policy in found
    )


@pytest.mark.slow
def test_entries_of_a_dict_are_put_in_a_row_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlplace.envs.observations import encoding_of

    run = trained(tmp_path / "runs", *CORNER, IMAGES, "+env.kwargs.beside=true")
    policy, env = (
        rlplace.load_policy(run),
        gymnasium.make("tests.gyms:Corner-v0", beside=True),
    )
    encoding = encoding_of(env.observation_space)
    assert encoding is not None
    assert encoding.encode is not None
    assert policy.act(encoding.encode(env.reset(seed=1)[0])).shape == ()
    assert export([str(run), str(tmp_path / "policy.pt")]) == 2
    error = capsys.readouterr().err
    assert "[not-traceable]" in error
    assert f"fix: {tmp_path}/policy " in error


def test_without_onnx_its_extra_is_named(
    cartpole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert export([str(cartpole), str(tmp_path / "policy.onnx")]) == 2
    error = capsys.readouterr().err
    assert "[missing-library]" in error
    assert "onnx" in error.partition("fix: pip install")[2]
    assert not list(tmp_path.iterdir())


def test_an_animated_image_shows_the_episodes_of_the_first_row(
    drawn: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from PIL import Image

    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    video = tmp_path / "new" / "film.gif"
    assert report(capsys, drawn, "episodes=18", f"video={video}")["video"] == str(video)
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"  # pygame looks for no screen
    with Image.open(video) as film:
        grey = []
        for frame in range(film.n_frames):
            film.seek(frame)
            grey.append(np.asarray(film.convert("L")).mean().round())
    # Two episodes of 3 and 5 steps, 50 frames a second, of which an animated image has every third.
    assert grey == [
        20 * step + 10 * episode for step, episode in ((0, 1), (0, 2), (3, 2))
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ("bad-option", "one policy is evaluated at a time")),
        (["{run}", "epsodes=3"], ("bad-option", "fix: episodes=3")),
        (["{run}", "episodes=0"], ("bad-option", "a whole number from 1 to")),
        (["{run}", "episodes=many"], ("bad-option", "fix: episodes=20")),
        (["{run}", "seed=-1"], ("bad-option", "fix: seed=0")),
        (["{run}", "seed=99999999999999999999"], ("bad-option", "2**63 - 1")),
        (["{run}", "seed=1", "seed=2"], ("bad-option", "fix: seed=2")),
        (["{run}", "deterministic"], ("bad-option", "it has no value")),
        (["{run}", "deterministic=maybe"], ("bad-option", "fix: deterministic=true")),
        (["{run}", "video=film.avi"], ("bad-option", "fix: video=film.mp4")),
        (["{run}", "--format", "yaml"], ("bad-option", "one of text, json")),
        (["{run}x"], ("resume-not-found", "fix: '{run}'")),
        (["{run}/../.."], ("not-a-checkpoint", "fix: '{run}/checkpoints/000002'")),
        (["{run}/tensorboard"], ("not-a-checkpoint", "a checkpoint has manifest.json")),
    ],
    ids=str,
)
def test_wrong_usage(
    cartpole: Path,
    words: list[str],
    told: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([word.format(run=cartpole) for word in words]) == 2
    error = capsys.readouterr().err
    assert f"[{told[0]}]" in error
    assert told[1].format(run=cartpole) in error
    assert "fix: " in error


def test_of_several_runs_the_fix_plays_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / name for name in ("a", "b b", "c")]
    for run, time in zip(runs, (1, 3, 2), strict=True):
        run.mkdir()
        os.utime(run, (time, time))
    assert main([*map(str, runs), "episodes=3"]) == 2
    assert (
        f"fix: python -m rlplace.evaluate '{runs[1]}' episodes=3"
        in capsys.readouterr().err
    )


def test_what_cannot_be_drawn(
    cartpole: Path,
    drawn: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(
        run: Path, code: str, *, kwargs: str = "{}", film: str = "film.gif"
    ) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        export([str(run), str(copy)])
        config = copy / "config.yaml"
        config.write_text(
            config.read_text(encoding="utf-8").replace(
                "  kwargs: {}", f"  kwargs: {kwargs}", 1
            )
        )
        assert main([str(copy), "episodes=1", f"video={tmp_path / film}"]) == 2
        error = capsys.readouterr().err
        assert f"[{code}]" in error
        assert not (tmp_path / film).exists()
        return error

    assert "OSError: no display" in refused(
        drawn, "cannot-draw", kwargs="{picture: none}"
    )
    flat = refused(drawn, "cannot-draw", kwargs="{picture: flat}")
    assert "(32, 48) of uint8" in flat
    assert "render_mode=None" in flat  # how an environment of one's own is made to draw
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert "there is no module imageio_ffmpeg" in refused(
        drawn, "missing-library", film="film.mp4"
    )
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert "pip install" in refused(cartpole, "missing-library")


def test_weights_that_are_not_whole_or_not_of_this_simulator(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(cartpole, damaged)
    shard = next((damaged / "checkpoints" / "000002" / "actor").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main([str(damaged)]) == 2
    assert f"got: {shard}" in capsys.readouterr().err

    other = tmp_path / "other"
    assert export([str(cartpole), str(other)]) == 0
    config = (other / "config.yaml").read_text(encoding="utf-8")
    (other / "config.yaml").write_text(
        config.replace("CartPole-v1", "Acrobot-v1"), encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        rlplace.load_policy(other)
    assert caught.value.codes == ("other-state",)
    assert "Acrobot-v1" in str(caught.value)
    (other / "config.yaml").write_text("- a\n", encoding="utf-8")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.yaml").write_text(config, encoding="utf-8")
    (tmp_path / "cut" / "policy.safetensors").write_bytes(
        (other / "policy.safetensors").read_bytes()[:100]
    )
    for folder in (other, tmp_path / "cut"):
        with pytest.raises(ConfigError) as caught:
            rlplace.load_policy(folder)
        assert caught.value.codes == ("checkpoint-damaged",), folder


def test_a_run_that_saved_nothing_has_no_policy(
    cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(
        cartpole,
        tmp_path / "run",
        ignore=shutil.ignore_patterns("checkpoints", "policy.safetensors"),
    )
    assert main([str(tmp_path / "run")]) == 2
    assert "[no-checkpoint]" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 4), ()], ids=str)
def test_observations_of_another_shape(cartpole: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="observation-shape"):
        rlplace.load_policy(cartpole).act(np.zeros(shape))


@pytest.mark.parametrize(
    "given",
    [{"a": 1}, ["a", "b", "c", "d"], [0.0, np.nan, 0.0, 0.0], [0.0, np.inf, 0.0, 0.0]],
    ids=str,
)
def test_observations_that_are_no_numbers(cartpole: Path, given: Any) -> None:
    with pytest.raises(ValueError, match="observation-shape"):
        rlplace.load_policy(cartpole).act(given)


# ── language models ──────────────────────────────────────────────────────────────────────────────────────────────────


def answered(model: Path, output: Path, *overrides: str) -> Path:
    asked = (
        "runner.total_iterations=2",
        "runner.eval_every=1",
        "runner.eval_prompts=12",
        *overrides,
    )
    run = train("hybrid_grpo_llm", output, *LM_INLINE, *tiny(model), *asked)
    assert run.folder is not None, run.err
    assert run.code == 0, run.err
    return run.folder


@pytest.fixture(scope="module")
def language(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answered(model, tmp_path_factory.mktemp("language"))


@pytest.mark.parametrize(
    "trained_by", [(), ("actor.lora_rank=2",)], ids=["whole", "lora"]
)
def test_a_language_model_has_the_reward_of_the_evaluation_of_its_run(
    trained_by: tuple[str, ...],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = answered(model, tmp_path, *trained_by)
    found = report(capsys, run)
    evaluations = json.loads((run / "summary.json").read_text(encoding="utf-8"))[
        "evaluations"
    ]
    assert found["reward"] == pytest.approx(evaluations["2"], abs=1e-6)
    assert found["prompts"] == 12
    said = [
        json.loads(line)
        for line in Path(found["transcripts"]).read_text(encoding="utf-8").splitlines()
    ]
    assert Path(found["transcripts"]) == run / "evaluation_000002.jsonl"
    rewards = [each["reward"] for each in said]
    assert found["reward"] == pytest.approx(np.mean(rewards))
    around = 1.96 * np.std(rewards, ddof=1) / np.sqrt(12)
    assert found["confidence_95"] == pytest.approx(
        [found["reward"] - around, found["reward"] + around]
    )
    assert found["tokens"] == pytest.approx(np.mean([each["tokens"] for each in said]))
    assert all(each["prompt"] and len(each["answers"]) == 1 for each in said)


def test_an_interval_is_of_different_prompts() -> None:
    few = [("a", 0.7), ("b", 0.8), ("c", 0.9)]
    around = 1.96 * np.std([0.7, 0.8, 0.9], ddof=1) / np.sqrt(3)
    assert _around(few) == pytest.approx(around)
    assert _around(few * 10) == pytest.approx(around)
    # A plain text equals one message of the user
    text = {"prompt": "a"}
    message = {"prompt": [{"role": "user", "content": "a"}]}
    assert _identity(text) == _identity(message) != _identity({"prompt": "b"})
    assert _around([("a", 1.0)] * 4) is None
    assert _around([]) is None


def test_rows_that_repeat_a_prompt_are_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n % 3}", "answer": "1"} for n in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run = answered(
        model,
        tmp_path / "runs",
        "env.task=prompts",
        f"+env.kwargs={{path: {data}}}",
        f"env.eval_kwargs={{path: {data}}}",
    )
    found = report(capsys, run)
    assert (found["prompts"], found["prompts_different"]) == (12, 3)
    assert main([str(run)]) == 0
    assert "12 held-out prompts (3 different ones)" in capsys.readouterr().out


def test_more_prompts_and_answers_that_are_drawn(
    language: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> list[Any]:
        found = report(
            capsys, language, f"transcripts={tmp_path / 'said.jsonl'}", *words
        )
        assert found["transcripts"] == str(tmp_path / "said.jsonl")
        lines = (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()
        return [
            (json.loads(line)["prompt"], json.loads(line)["answers"]) for line in lines
        ]

    likely, drawn = said("episodes=20"), said("episodes=20", "deterministic=false")
    assert len(likely) == 20
    assert said("episodes=12") == likely[:12]
    assert [prompt for prompt, _ in drawn] == [prompt for prompt, _ in likely]
    assert drawn != likely
    assert (
        said("episodes=20", "deterministic=false")
        == drawn
        != said("episodes=20", "deterministic=false", "seed=1")
    )
    assert main([str(language), "episodes=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "policy",
        "task",
        "reward",
        "answers",
        "seconds",
    ]
    assert "(95 % confidence: " in lines[2]


def test_what_a_kind_of_policy_cannot_do(
    language: Path, cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(language), "video=film.gif"]) == 2
    assert "[bad-option]" in capsys.readouterr().err
    assert main([str(cartpole), "transcripts=said.jsonl"]) == 2
    assert "[bad-option]" in capsys.readouterr().err
    assert main([str(language), "episodes=2", f"transcripts={tmp_path}"]) == 1
    assert "transcripts: cannot write: " in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        rlplace.load_policy(language)
    assert caught.value.codes == ("wrong-kind",)
    assert "python -m rlplace.export" in str(caught.value)
