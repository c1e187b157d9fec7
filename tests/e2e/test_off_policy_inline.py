"""Runs of the off-policy job in this process: counts, resumes, evaluations, and configs that are refused in words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from safetensors.numpy import load_file

import rlplace
from rlplace.algo.replay import ReplayMemory
from rlplace.cli.evaluate import main as evaluate
from rlplace.cli.export import main as export
from rlplace.cli.plan import main as plan
from rlplace.cli.profile import main as profile
from rlplace.cli.search import main as search
from rlplace.workers.off_policy.learners import DqnLearner, SacLearner
from tests.e2e.test_resume import numbers
from tests.e2e.training import INLINE_LAUNCHER, Finished, train
from tests.unit.envs.test_kept_numbers import Plain

TINY = (
    INLINE_LAUNCHER,
    "cluster.accelerators_per_node=2",
    "cluster.accelerator.kind=emulated",
    "actor.hidden=[16]",
    "algorithm.batch_size=16",
    "algorithm.learning_starts=32",
    "algorithm.steps_per_iteration=48",
    "replay.capacity=120",
)
SAC = ("sac", (*TINY, "env.total_num_envs=2"))
# Two ranks of rollout and replay, priorities, and sums of rewards over the ends of episodes
DQN = (
    "dqn",
    (
        *TINY,
        "env.total_num_envs=4",
        "algorithm.sync_every=4",
        "algorithm.n_step=3",
        "algorithm.target_every=3",
        "replay.sampling=prioritised",
        "cluster.component_placement.rollout=0-1",
        "cluster.component_placement.replay={node_group: node, placement: '0:0-1'}",
        "cluster.allow_resident=[actor,rollout]",
    ),
)
TD3 = ("td3", (*TINY, "env.total_num_envs=2", "algorithm.n_step=2"))
CROSSQ = ("crossq", (*TINY, "env.total_num_envs=2", "actor.critic_hidden=[24]"))
Job = tuple[str, tuple[str, ...]]


def offline(name: str, folder: Path) -> Job:
    """Return a job that learns by an offline algorithm from 50 steps, which are written into `folder`."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    steps = 50
    np.savez(
        folder / "steps.npz",
        observations=random.normal(size=(steps, 3)),
        next_observations=random.normal(size=(steps, 3)),
        actions=random.uniform(-2, 2, size=(steps, 1)),
        rewards=random.normal(size=steps),
        terminated=np.zeros(steps, bool),
        truncated=np.zeros(steps, bool),
    )
    shown = f"+replay.demonstrations={folder / 'steps.npz'}"
    return "td3", (*SAC[1], f"algorithm.name={name}", shown)


def each_algorithm(folder: Path) -> dict[str, Job]:
    """Return a small job of each algorithm. `folder`: of the recorded steps."""
    jobs = {"sac": SAC, "crossq": CROSSQ, "td3": TD3, "dqn": DQN}
    return jobs | {name: offline(name, folder) for name in ("td3_bc", "iql")}


def run(job: Job, output: Path, iterations: int, *more: str) -> Finished:
    name, words = job
    last = f"runner.total_iterations={iterations}"
    found = train(name, output, *words, last, *more)
    assert found.code == 0, found.out + found.err
    return found


def weights(run: Finished) -> dict[str, np.ndarray]:
    assert run.folder is not None
    return load_file(run.folder / "policy.safetensors")


@pytest.fixture(scope="module")
def sac(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four iterations with an evaluation after each second one."""
    evaluated = ("runner.eval_every=2", "+runner.eval_episodes=2")
    output = tmp_path_factory.mktemp("sac")
    return run(SAC, output, 4, *evaluated)


def test_the_ratio_of_updates_to_steps_is_kept_exactly(sac: Finished) -> None:
    lines = sac.metrics()[1:]
    # 8 updates for 8 steps; the first 32 steps are random, and 16 more follow in the first iteration
    assert [line["actor/updates"] for line in lines] == [16, 48, 48, 48]
    assert [line["env/steps"] for line in lines] == [48] * 4
    # The ring keeps 120 steps
    assert [line["replay/steps"] for line in lines] == [48, 96, 120, 120]
    for name in ("critic_loss", "policy_loss", "temperature", "entropy", "value"):
        assert f"actor/{name}" in lines[-1]
    assert [i for i, line in enumerate(lines) if "eval/return" in line] == [1, 3]
    assert sac.summary()["env_steps"] == 192


class OneInAll(gymnasium.Env[Any, Any]):
    """Rewards the first and the last step of an episode, by two numbers that are 1 together."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        self._first = float(self.np_random.normal())
        self._length = int(self.np_random.integers(2, 9))
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        ended = self._steps == self._length
        reward = 0.0
        if self._steps == 1:
            reward = self._first
        elif ended:
            reward = 1.0 - self._first
        return np.zeros(2, np.float32), reward, ended, False, {}


def test_a_return_has_the_first_and_the_last_reward_of_its_episode(
    tmp_path: Path,
) -> None:
    """Also where an episode goes on from one piece, or one iteration, to the next."""
    name, words = SAC
    job = (name, (*words, f"env.id={__name__}:OneInAll", "runner.eval_every=1"))
    for line in run(job, tmp_path, 2).metrics()[1:]:
        assert line["env/episodes"] > 5
        assert line["env/return"] == pytest.approx(1.0, abs=1e-5)
        assert line["eval/return"] == pytest.approx(1.0, abs=1e-5)


def test_a_ratio_below_one_is_kept_over_iterations(tmp_path: Path) -> None:
    job = (
        "sac",
        (*SAC[1], "algorithm.updates_per_step=0.25", "algorithm.sync_every=3"),
    )
    lines = run(job, tmp_path, 3).metrics()
    # Pieces of 12 steps with 3 updates; the third piece is the first after 32 steps
    assert [line["actor/updates"] for line in lines] == [6, 12, 12]


def test_the_policy_is_saved_and_played(
    sac: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sac.folder is not None
    assert evaluate([str(sac.folder), "episodes=1"]) == 0
    assert "1 episode," in capsys.readouterr().out
    policy = rlplace.load_policy(sac.folder)
    seen = np.zeros((5, 3), np.float32)
    actions = policy.act(seen)
    assert actions.shape == (5, 1)
    assert np.abs(actions).max() <= 2.0
    # A checkpoint and the file at the end have the same policy
    copied = sac.folder.parent / "exported"
    copied.mkdir()
    for name in ("policy.safetensors", "config.yaml"):
        (copied / name).write_bytes((sac.folder / name).read_bytes())
    assert np.array_equal(rlplace.load_policy(copied).act(seen), actions)


def test_the_policy_is_exported_as_weights_and_as_a_program(
    sac: Finished, tmp_path: Path
) -> None:
    assert sac.folder is not None
    seen = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    expected = rlplace.load_policy(sac.folder).act(seen)
    for name in ("folder", "policy.pt", "policy.safetensors"):
        assert export([str(sac.folder), str(tmp_path / name)]) == 0
    program = torch.jit.load(tmp_path / "policy.pt")
    assert np.allclose(program(torch.from_numpy(seen)).numpy(), expected, atol=1e-6)
    assert np.array_equal(rlplace.load_policy(tmp_path / "folder").act(seen), expected)
    for name, array in weights(sac).items():
        assert np.array_equal(load_file(tmp_path / "policy.safetensors")[name], array)
    # An exported folder is exported again
    assert export([str(tmp_path / "folder"), str(tmp_path / "again.pt")]) == 0


@pytest.mark.parametrize(
    "job", [SAC, DQN, TD3, CROSSQ], ids=["sac", "dqn", "td3", "crossq"]
)
def test_the_policy_is_exported_to_onnx(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("onnx.reference")
    exported_to_onnx(run(job, tmp_path, 2), {"dqn": 4}.get(job[0], 3))


def exported_to_onnx(run: Finished, elements: int) -> None:
    """Export the policy of a run, and compare its actions. `elements`: numbers of an observation."""
    from onnx.reference import ReferenceEvaluator

    assert run.folder is not None
    policy = rlplace.load_policy(run.folder)
    seen = np.random.default_rng(0).normal(size=(7, elements)).astype(np.float32)
    expected = policy.act(seen)
    assert len(np.unique(expected)) > 1, "equal actions would compare nothing"
    out = run.folder.parent / "policy.onnx"
    assert export([str(run.folder), str(out)]) == 0
    (found,) = ReferenceEvaluator(str(out)).run(["actions"], {"observations": seen})
    assert found.dtype == expected.dtype
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "seen",
    [np.zeros(2), np.zeros((2, 2, 3)), ["0", "0", "0"], [0.0, 0.0, np.nan]],
    ids=["shape", "batch", "text", "nan"],
)
def test_observations_that_the_policy_was_not_trained_on_are_refused(
    seen: Any, sac: Finished
) -> None:
    assert sac.folder is not None
    with pytest.raises(ValueError, match="observation-shape"):
        rlplace.load_policy(sac.folder).act(seen)


def test_a_policy_without_random_actions_is_not_said_to_draw_them(
    sac: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dqn = run(DQN, tmp_path, 1)
    assert dqn.folder is not None
    assert sac.folder is not None
    assert evaluate([str(dqn.folder), "episodes=1", "deterministic=false"]) == 2
    assert "dqn draws no actions" in capsys.readouterr().err
    assert evaluate([str(dqn.folder), "episodes=1", "deterministic=true"]) == 0
    assert evaluate([str(sac.folder), "episodes=1", "deterministic=false"]) == 0
    assert "drawn as in training" in capsys.readouterr().out


@pytest.mark.parametrize(
    "job", [SAC, DQN, TD3, CROSSQ], ids=["sac", "dqn", "td3", "crossq"]
)
def test_a_resumed_run_has_the_same_numbers(job: Job, tmp_path: Path) -> None:
    whole = run(job, tmp_path / "whole", 4)
    first = run(job, tmp_path / "parts", 2)
    assert first.folder is not None
    resumed = run(job, tmp_path / "parts", 4, f"resume={first.folder}")
    lines = [*numbers(first), *numbers(resumed)]
    assert [line["iteration"] for line in numbers(whole)] == [1, 2, 3, 4]
    whole_lines = {line["iteration"]: line for line in numbers(whole)}
    for line in lines:
        expected = whole_lines[line["iteration"]]
        for name, value in expected.items():
            if name.startswith(("actor/", "env/", "replay/")):
                assert line[name] == value, (line["iteration"], name)
    for name, array in weights(whole).items():
        assert np.array_equal(array, weights(resumed)[name]), name


@pytest.mark.slow  # tests/unit/algo/test_replay.py deals a memory to other ranks
@pytest.mark.parametrize("ranks", ["0", "0-3"])
def test_a_resume_deals_the_memory_to_other_replay_ranks(
    ranks: str, tmp_path: Path
) -> None:
    first = run(DQN, tmp_path, 2)
    place = f"{{node_group: node, placement: '0:{ranks}'}}"
    words = (f"cluster.component_placement.replay={place}", f"resume={first.folder}")
    resumed = run(DQN, tmp_path, 4, *words)
    steps = [line["replay/steps"] for line in numbers(resumed)]
    assert steps == [48, 96, 120, 120]
    updates = [line["actor/updates"] for line in numbers(resumed)]
    assert updates[1:] == [updates[1]] * 3
    # The files of the new ranks are resumed in their turn
    again = run(DQN, tmp_path, 5, words[0], f"resume={resumed.folder}")
    assert [line["replay/steps"] for line in numbers(again)] == [*steps, 120]


@pytest.mark.slow  # by default, each algorithm is resumed under the same placement
@pytest.mark.parametrize(
    ("name", "accelerators"),
    [
        ("sac", "0"),
        ("crossq", "0"),
        ("td3", "0-1"),
        ("dqn", "0"),
        ("td3_bc", "0"),
        ("iql", "0-1"),
    ],
)
def test_a_resume_under_another_placement_has_the_same_numbers(
    name: str, accelerators: str, tmp_path: Path
) -> None:
    """Rollout goes to the accelerator of the actor. The ranks of td3 and iql become two, those of dqn one."""
    job = each_algorithm(tmp_path)[name]
    whole = run(job, tmp_path / "whole", 4)
    first = run(job, tmp_path / "parts", 2)
    other = (
        "cluster.component_placement.actor=0",
        f"cluster.component_placement.rollout={accelerators}",
        "cluster.allow_resident=[actor,rollout]",
        f"resume={first.folder}",
    )
    moved = run(job, tmp_path / "parts", 4, *other)
    lines = {line["iteration"]: line for line in numbers(whole)}
    # Matrix products of another number of rows are rounded otherwise
    rounded = 1e-3 if name in ("td3", "dqn") else 0.0
    names = ("actor/critic_loss", "actor/value", "actor/updates", "env/steps")
    for line in numbers(moved):
        for metric in (*names, "env/return", "replay/steps"):
            expected = lines[line["iteration"]].get(metric)
            if expected is not None:
                expected = pytest.approx(expected, rel=rounded, abs=rounded)
            assert line.get(metric) == expected, (line["iteration"], metric)
    for weight, array in weights(whole).items():
        found = weights(moved)[weight]
        assert found == pytest.approx(array, abs=rounded), weight


def test_steps_of_another_environment_or_algorithm_are_not_resumed(
    sac: Finished, tmp_path: Path
) -> None:
    """The replay memory would mix the rewards of both."""
    words = (
        *SAC[1],
        f"resume={sac.folder}",
        "runner.total_iterations=5",
        "dry_run=true",
    )
    changed = {
        "env.kwargs={g: 3.0}": "env.kwargs.g",
        "algorithm.gamma=0.5": "algorithm.gamma",
        "replay.capacity=240": "replay.capacity",
        "actor.hidden=[8]": "actor.hidden",
    }
    refused = train("sac", tmp_path, *words, *changed)
    assert refused.code == 2, refused.out
    assert refused.err.count("other-experiment") == len(changed)
    for key in changed.values():
        assert key in refused.err
    # What can be loaded may be allowed
    fixed = train(
        "sac",
        tmp_path,
        *words,
        "env.kwargs={g: 3.0}",
        "algorithm.gamma=0.5",
        "resume_allow=[env.kwargs.g,algorithm.gamma]",
    )
    assert fixed.code == 0, fixed.err
    # A learning rate may change
    other = train("sac", tmp_path, *words, "actor.lr=1e-4")
    assert other.code == 0, other.err


def test_segments_without_new_steps_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplace.algo.replay.SEGMENT_SLOTS", 16)
    job = ("sac", (*SAC[1], "replay.capacity=400", "checkpoint.every=1"))
    ran = run(job, tmp_path, 3)
    assert ran.folder is not None
    older, newer = sorted((ran.folder / "checkpoints").glob("0*"))
    files = [folder / "replay" / "memory_00000_0.npz" for folder in (older, newer)]
    assert files[0].samefile(files[1])
    last = [folder / "replay" / "memory_00000_32.npz" for folder in (older, newer)]
    assert not last[0].samefile(last[1])


def test_half_of_each_batch_is_drawn_from_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 9
    np.savez(
        tmp_path / "steps.npz",
        observations=np.zeros((steps, 3)),
        next_observations=np.zeros((steps, 3)),
        actions=np.zeros((steps, 1)),
        rewards=np.full(steps, 777.0),
        terminated=np.zeros(steps, bool),
        truncated=np.zeros(steps, bool),
    )
    shown = []
    update = SacLearner.update

    def counting(self: SacLearner, batch: Any, random: Any) -> Any:
        shown.append(int((batch["rewards"] == 777.0).sum()))
        return update(self, batch, random)

    monkeypatch.setattr(SacLearner, "update", counting)
    words = (*SAC[1], f"+replay.demonstrations={tmp_path / 'steps.npz'}")
    run(("sac", words), tmp_path / "runs", 1)
    assert shown == [8] * 16


def test_weights_of_all_replay_ranks_are_scaled_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of a rank whose draws are all likely count less than those of another rank."""
    drawn: list[list[Any]] = []
    learned: list[Any] = []
    sample = ReplayMemory.sample
    update = DqnLearner.update

    def sampling(self: ReplayMemory, *given: Any, **more: Any) -> Any:
        batch = sample(self, *given, **more)
        # Of 4 updates; as if each step of the second rank were drawn twice as likely
        batch["weights"] *= 1.0 if not len(drawn) % 2 else 0.5
        drawn.append(batch["weights"].reshape(4, -1))
        return batch

    def updating(self: DqnLearner, batch: Any, random: Any) -> Any:
        learned.append(np.sort(batch["weights"].numpy()))
        return update(self, batch, random)

    monkeypatch.setattr(ReplayMemory, "sample", sampling)
    monkeypatch.setattr(DqnLearner, "update", updating)
    run(DQN, tmp_path, 1)
    assert len(learned) == 4 * len(drawn) // 2 > 0
    pieces = zip(drawn[::2], drawn[1::2], strict=True)
    joined = [np.concatenate(pair, axis=1) for pair in pieces]
    for weights_of_update, found in zip(np.concatenate(joined), learned, strict=True):
        expected = np.sort(weights_of_update / weights_of_update.max())
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["td3_bc", "iql"])
def test_an_offline_algorithm_takes_no_steps_but_in_evaluations(
    name: str, tmp_path: Path
) -> None:
    words = (
        *offline(name, tmp_path)[1],
        "runner.eval_every=2",
        "+runner.eval_episodes=2",
    )
    whole = run(("td3", words), tmp_path / "whole", 4)
    # The first line is that of an evaluation before the first iteration
    lines = whole.metrics()[1:]
    assert [line["actor/updates"] for line in lines] == [48] * 4
    assert {line["env/steps"] for line in lines} == {0}
    assert {line["replay/steps"] for line in lines} == {0}
    assert {line["replay/demonstrations"] for line in lines} == {50}
    assert [i for i, line in enumerate(lines) if "eval/return" in line] == [1, 3]
    assert whole.summary()["env_steps"] == 0
    size = whole.summary()["memory"]["actor"]["full"]
    assert size["measured"] == pytest.approx(size["predicted"], rel=0.05)
    if importlib.util.find_spec("onnx") is not None:
        exported_to_onnx(whole, 3)
    # A resumed run has the same policy
    first = run(("td3", words), tmp_path / "parts", 2)
    resumed = run(("td3", words), tmp_path / "parts", 4, f"resume={first.folder}")
    for weight, array in weights(whole).items():
        assert np.array_equal(array, weights(resumed)[weight]), weight


def test_demonstrations_with_gaps_are_refused_for_sums_of_rewards(
    tmp_path: Path,
) -> None:
    places = np.arange(27.0).reshape(9, 3)
    np.savez(
        tmp_path / "steps.npz",
        observations=places,
        next_observations=places + 1,
        actions=np.zeros((9, 1)),
        rewards=np.ones(9),
        terminated=np.zeros(9, bool),
        truncated=np.zeros(9, bool),
    )
    shown = f"+replay.demonstrations={tmp_path / 'steps.npz'}"
    dry = (*SAC[1], shown, "runner.total_iterations=1", "dry_run=true")
    refused = train("sac", tmp_path, *dry, "algorithm.n_step=2")
    assert refused.code == 2
    assert "bad-demonstrations" in refused.err
    fixed = train("sac", tmp_path, *dry, "algorithm.n_step=1")
    assert fixed.code == 0, fixed.err


def test_other_rewards_of_demonstrations_are_said_before_the_start(
    tmp_path: Path,
) -> None:
    env = gymnasium.make("Pendulum-v1")
    shown = env.reset(seed=4)[0]
    action = np.zeros(1, np.float32)
    after, reward, *_ = env.step(action)
    np.savez(
        tmp_path / "steps.npz",
        observations=[shown] * 9,
        next_observations=[after] * 9,
        actions=[action] * 9,
        rewards=[-float(reward)] * 9,
        terminated=np.zeros(9, bool),
        truncated=np.zeros(9, bool),
    )
    # The same state in each step of the environment
    still = f"+env.wrappers=[{{name: '{__name__}:Still', kwargs: {{seed: 4}}}}]"
    given = f"+replay.demonstrations={tmp_path / 'steps.npz'}"
    found = run(("sac", (*SAC[1], still, given)), tmp_path / "runs", 1)
    said, _, rest = found.out.partition("starting")
    assert "demonstrated-rewards" in said
    assert "opposite sign" in said
    assert "demonstrated-rewards" not in rest


class Still(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins a new episode with the same seed before each step."""

    def __init__(self, env: Any, seed: int) -> None:
        super().__init__(env)
        self._seed = seed
        self._shown: Any = None

    def step(self, action: Any) -> Any:
        _, reward, *rest = self.env.step(action)
        self._shown, _ = self.env.reset(seed=self._seed)
        return self._shown, reward, *rest

    def reset(self, **options: Any) -> Any:
        return self.env.reset(**{**options, "seed": self._seed})


class Counting(Plain):
    """Normalizes by plain numbers, and tells of how many observations they are when an episode begins."""

    begun: ClassVar[list[int]] = []

    def reset(self, **options: Any) -> Any:
        self.begun.append(self.n)
        return super().reset(**options)


def test_a_wrapper_with_running_statistics_is_refused(tmp_path: Path) -> None:
    of = "tests.unit.envs.test_kept_numbers:WithObject"
    words = (*SAC[1], "runner.total_iterations=1", "dry_run=true")
    refused = train("sac", tmp_path, *words, f"env.wrappers=[{{name: '{of}'}}]")
    assert refused.code == 2
    assert "off-policy-misfit" in refused.err
    assert "older statistics" in refused.err
    fixed = train("sac", tmp_path, *words, "env.wrappers=[]")
    assert fixed.code == 0, fixed.err


def test_numbers_of_a_users_wrapper_are_told_and_used_in_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Counting.begun.clear()
    wrapped = f"env.wrappers=[{{name: '{__name__}:Counting'}}]"
    short = ("env.max_episode_steps=10", "runner.eval_every=1")
    job = ("sac", (*SAC[1], wrapped, *short, "+runner.eval_episodes=2"))
    found = run(job, tmp_path, 1)
    assert "older steps of the replay memory" in found.out
    # Two rows of the training begin without numbers, and those of the evaluation with numbers of the training
    assert Counting.begun.count(0) == 2
    Counting.begun.clear()
    assert found.folder is not None
    assert evaluate([str(found.folder), "episodes=2"]) == 0
    capsys.readouterr()
    assert Counting.begun
    assert min(Counting.begun) >= 20


def test_a_run_that_ends_before_its_first_update_is_refused(tmp_path: Path) -> None:
    words = (*SAC[1], "algorithm.learning_starts=96", "dry_run=true")
    refused = train("sac", tmp_path, *words, "runner.total_iterations=2")
    assert refused.code == 2
    assert "no-updates" in refused.err
    assert "runner.total_iterations=3" in refused.err
    fixed = train("sac", tmp_path, *words, "runner.total_iterations=3")
    assert fixed.code == 0, fixed.err


class Breaking(gymnasium.Env[Any, Any]):
    """Shows nan at a step, counted from 0 at the reset."""

    def __init__(self, at: int) -> None:
        self.observation_space = Box(-1, 1, (2,))
        self.action_space = Box(-1, 1, (1,))
        self._at = at
        self._steps = 0

    def _shown(self) -> Any:
        return np.full(2, np.nan if self._steps == self._at else 0.5, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._shown(), 1.0, False, self._steps == 9, {}


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (0, "the first observation of"),
        (4, "reward 1.0, observation [nan nan]"),
        (9, "reward 1.0, observation [nan nan]"),
    ],
)
def test_a_number_that_is_not_finite_is_named_with_its_place(
    at: int, said: str, tmp_path: Path
) -> None:
    words = (*SAC[1], f"env.id={__name__}:Breaking", f"env.kwargs={{at: {at}}}")
    found = train("sac", tmp_path, *words, "runner.total_iterations=1")
    assert found.code == 1
    assert "simulator-not-finite" in found.err
    assert said in found.err
    assert "in row 0" in found.err


def test_ppo_without_the_job_names_the_config_of_an_off_policy_algorithm(
    tmp_path: Path,
) -> None:
    found = train("hybrid_ppo", tmp_path, INLINE_LAUNCHER, "algorithm.name=sac")
    assert found.code == 2
    assert "--config-name sac" in found.err


def test_the_saved_config_names_the_job(sac: Finished) -> None:
    assert sac.folder is not None
    saved = yaml.safe_load((sac.folder / "config.yaml").read_text())
    assert saved["job"] == "off_policy"


@pytest.mark.parametrize("job", [SAC, TD3, CROSSQ], ids=["sac", "td3", "crossq"])
def test_the_memory_of_learners_that_never_move_is_measured_after_updates(
    job: Job, tmp_path: Path
) -> None:
    """Gradients and Adam's state exist from the first update on, and are part of the prediction."""
    run_ = run(job, tmp_path, 3)
    size = run_.summary()["memory"]["actor"]["full"]
    assert size["measured"] == pytest.approx(size["predicted"], rel=0.05)
    assert run_.folder is not None
    kept = yaml.safe_load((run_.folder / "memory.json").read_text(encoding="utf-8"))
    assert kept["components"]["actor"]["full"] == size["measured"]


@pytest.mark.slow
def test_a_profile_of_the_job_is_planned_and_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, words = SAC
    file = tmp_path / "profile.json"
    config = ("--config-name", name, *words, f"runner.output_dir={tmp_path / 'runs'}")
    assert profile([*config, "--iterations", "4", "--out", str(file)]) == 0
    measured = capsys.readouterr().out
    for cost in ("actor.learn", "rollout.act", "replay.serve"):
        assert cost in measured
    assert plan([*config, f"profile={file}"]) == 0
    assert "seconds: predicted from the profile" in capsys.readouterr().out
    assert search([*config, f"profile={file}"]) == 0
    # The places of the best plan; which one it is follows from the measured seconds
    found = capsys.readouterr().out
    assert re.search(r"^  actor \S+; rollout \S+; replay cpu", found, re.MULTILINE)
