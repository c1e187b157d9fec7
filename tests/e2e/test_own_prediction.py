"""A job of one's own leaves a profile, its prediction beside what it measured, and is planned and searched from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.cli.plan import main as plan
from rlplace.cli.search import main as search
from rlplace.cli.train import main as train

JOB = '''
"""Two components that talk, and one that learns."""
import time

from rlplace import Channel, Job, Stage, Worker, full


class Env(Worker):
    def play(self, iteration):
        for step in range(4):
            time.sleep(0.004 / self.world_size)
            self.channel("asks").put(self.rank)
            self.channel("answers").get(key=str(self.rank))


class Policy(Worker):
    def answer(self, iteration):
        for _ in range(4 * self.world_size_of("env") // self.world_size):
            rank = self.channel("asks").get()
            time.sleep(0.002)
            self.channel("answers").put(0, key=str(rank))


class Learner(Worker):
    def learn(self, iteration):
        time.sleep(0.01 / self.world_size)


job = Job(
    name="talkers",
    components={"actor": Learner, "env": Env, "rollout": Policy},
    stages=[
        Stage("play", full("env").calls("play"), full("rollout").calls("answer")),
        Stage("train", full("actor").calls("learn")),
    ],
    channels=[
        Channel("asks", "env", "rollout"),
        Channel("answers", "rollout", "env", by_rank=True),
    ],
)
'''
CONFIG = """
job: talkers_of_a_test:job
cluster:
  launcher: inline
  accelerators_per_node: 4
  accelerator: {kind: emulated}
  component_placement: {actor: 0, env: 1-2, rollout: 3}
  allow_resident: [actor, env, rollout]
runner: {total_iterations: 5, sinks: [jsonl]}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "talkers_of_a_test.py").write_text(JOB, encoding="utf-8")
    config = folder / "talkers.yaml"
    runs = f"runner.output_dir={folder / 'runs'}"
    config.write_text(CONFIG, encoding="utf-8")
    sys.path.insert(0, str(folder))
    assert train([str(config), runs]) == 0
    yield config
    sys.path.remove(str(folder))
    sys.modules.pop("talkers_of_a_test", None)


def words(file: Path, *more: str) -> list[str]:
    return [str(file), f"runner.output_dir={file.parent / 'runs'}", *more]


def test_the_summary_has_the_prediction_of_each_stage(file: Path) -> None:
    (folder,) = (file.parent / "runs").glob("*/*/")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    predicted = summary["predicted"]
    assert predicted["from"] == "this run's own profile"
    assert {"iteration", "play", "train", "moves"} <= set(predicted["seconds"])
    for row in predicted["seconds"].values():
        assert set(row) == {"predicted", "measured"}
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    costs = {"env.play/seconds", "rollout.answer/seconds", "actor.learn/seconds"}
    assert costs <= set(profile["costs"])
    assert 0.0 <= profile["counts"]["play/in_turns"] <= 1.0


def test_another_placement_is_planned_with_its_seconds(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "cluster.component_placement.env=0-3"
    assert plan(words(file, "profile=last", place)) == 0
    shown = capsys.readouterr().out
    assert "seconds: predicted from the profile" in shown
    stages = next(
        line for line in shown.splitlines() if "moves " in line and " s," in line
    )
    assert "play " in stages
    assert "train " in stages


def test_a_search_tells_the_lines_of_the_best_placement(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(words(file, "--format", "json", "fix=rollout")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["seconds"] > 0.0
    assert "play" in found["best"]["stages"]
