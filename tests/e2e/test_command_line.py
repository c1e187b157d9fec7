"""What `python -m rlplace.train` and `rlplace.plan` say before anything starts; problems end with exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace.cli import plan, train
from rlplace.config import compose

CONFIGS = sorted(compose.config_names())
ROOT = Path(__file__).parents[2]


def problem_codes(text: str) -> list[str]:
    heads = [line.rstrip() for line in text.splitlines() if not line.startswith("    ")]
    return [head.rpartition("[")[2][:-1] for head in heads if head.endswith("]")]


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ([], ["no-config"]),
        (["--config-name", "hybrid_pp"], ["unknown-config"]),
        (["--config-dir", "nowhere", "--config-name", "hybrid_ppo"], ["bad-config"]),
        (["--config-name", "hybrid_ppo", "=3"], ["bad-config"]),
        (
            ["--config-name", "hybrid_ppo", "actor.model.hiden=[8]"],
            ["unknown-key"],
        ),
        (["--config-name", "hybrid_ppo", "zzz=1"], ["unknown-key"]),
        (
            [
                "--config-name",
                "hybrid_ppo",
                "zzz=1",
                "runner.seeed=2",
                "cluster.component_placement.env=0-8",
            ],
            ["unknown-key", "unknown-key", "accelerator-out-of-range"],
        ),
        # what is wrong may say where components are: the placement is read when that is right
        (
            [
                "--config-name",
                "hybrid_ppo",
                "clutser.num_nodes=2",
                "cluster.component_placement.env=0-8",
            ],
            ["unknown-key"],
        ),
        (
            [
                "--config-name",
                "hybrid_ppo",
                "runner.num_nodes=2",
                "cluster.component_placement.env=0-8",
            ],
            ["unknown-key"],
        ),
        (["--config-name", "hybrid_ppo", "++cluster=3"], ["bad-config"]),
        (
            [
                "--config-name",
                "hybrid_ppo",
                "cluster.component_placement.actor=0-1,4-5",
            ],
            ["override-is-sweep"],
        ),
        (
            ["--config-name", "hybrid_ppo", "actor.enable_offload=false"],
            ["residents-clash"],
        ),
        (
            ["--config-name", "hybrid_ppo", "runner.total_env_steps=8192"],
            ["renamed-key"],
        ),
        (["--config-name", "hybrid_ppo", "actor.compute=fp8"], ["unknown-choice"]),
        (
            ["--config-name", "hybrid_ppo", "cluster.accelerator.kind=cuda"],
            ["too-few-accelerators"],
        ),
    ],
)
def test_wrong_input_is_explained_and_nothing_starts(
    words: list[str],
    codes: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train.main(words) == 2
    err = capsys.readouterr().err
    assert problem_codes(err) == codes
    for problem in re.split(r"\n(?=\S)", err)[: len(codes)]:
        assert "    fix: " in problem
    assert "nothing was started" in err


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path", "-cd", "-cp"])
def test_a_config_of_ones_own_goes_before_a_shipped_one(
    flag: str, tmp_path: Path
) -> None:
    """Its own search path and ${hydra:...} hold; the shipped folder stays within reach."""
    (tmp_path / "more" / "cluster").mkdir(parents=True)
    (tmp_path / "more" / "cluster" / "mine.yaml").write_text(
        "num_nodes: 3\n", encoding="utf-8"
    )
    (tmp_path / "hybrid_ppo.yaml").write_text(
        f"hydra: {{searchpath: ['file://{tmp_path}/more']}}\n"
        "defaults: [{/cluster: mine}, collocated_ppo, _self_]\n"
        "runner: {output_dir: '${hydra:job.config_name}'}\n",
        encoding="utf-8",
    )
    (composed,) = compose.with_hydra(
        [flag, str(tmp_path), "--config-name", "hybrid_ppo"]
    )
    assert composed.mapping["runner"]["output_dir"] == "hybrid_ppo"
    assert (
        composed.mapping["cluster"]["num_nodes"] == 1
    )  # of collocated_ppo, which comes after the cluster
    assert str(composed.sources["runner.output_dir"]) == f"{tmp_path}/hybrid_ppo.yaml:3"


def test_a_sweep_composes_every_combination() -> None:
    swept = ["algorithm.gamma=0.5,0.6", "cluster=48xA100,8xH100"]
    composed = compose.with_hydra(
        ["-m", "--config-name", "hybrid_ppo", *swept, "hydra.mode=MULTIRUN"]
    )
    found = [
        (c.mapping["algorithm"]["gamma"], c.mapping["cluster"]["nodes"][0]["count"])
        for c in composed
    ]
    assert found == [(0.5, 6), (0.5, 1), (0.6, 6), (0.6, 1)]


def test_all_problems_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "cluster.component_placement.actor=0-8",
        "env.total_num_envs=12",
        "env.id=InvertedPendulm-v5",
    ]
    assert train.main(["--config-name", "hybrid_ppo", *words]) == 2
    err = capsys.readouterr().err
    assert problem_codes(err) == [
        "accelerator-out-of-range",
        "uneven-envs",
        "unknown-simulator",
    ]
    assert "(command line: env.total_num_envs=12)" in err


def test_a_problem_in_a_file_names_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (compose.CONFIG_DIR / "hybrid_ppo.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        text.replace("rollout: part 2/2 of 8", "rollout: 4–7"), encoding="utf-8"
    )
    assert train.main(["--config-dir", str(tmp_path), "--config-name", "mine"]) == 2
    (line,) = (
        i
        for i, written in enumerate(text.splitlines(), start=1)
        if written.startswith("    rollout: part 2/2 of 8")
    )
    assert f"mine.yaml:{line})" in capsys.readouterr().err


TWO_REWARDS = """
defaults: [{/model@actor.model: tiny}, {/model@reward.math.model: tiny_reward}, _self_]
cluster:
  accelerators_per_node: 2
  component_placement: {actor: 0, rollout: 0, env: 0, reward.math: 1, reward.brief: cpu}
algorithm: {name: grpo, prompts: 2, samples_per_prompt: 2, max_prompt_length: 64, max_new_tokens: 8}
env: {task: arithmetic, chat: false, enable_offload: true}
actor: {optimizer: {lr: 1.0e-5}, enable_offload: true}
rollout: {engine: transformers, kv_cache_memory: 16MiB, enable_offload: true}
reward: {math: {weight: 1.0, enable_offload: true}, brief: {function: math_answer}}
dry_run: true
"""


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """The flags of a config of one's own, which leaves out most keys."""
    (tmp_path / "mine.yaml").write_text(TWO_REWARDS, encoding="utf-8")
    return ["--config-dir", str(tmp_path), "--config-name", "mine"]


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("actor.lora_rank=8", "actor lora_rank", 8),  # a key that the file has not
        ("env.kwargs.digits=2", "env kwargs digits", 2),
        ("env.kwargs={digits: 2}", "env kwargs digits", 2),
        ("reward.brief.weight=0.5", "reward brief weight", 0.5),
        (
            "cluster.component_placement.reward.math=0-1",
            "cluster component_placement reward.math",
            "0-1",
        ),
        ("model@actor.model=smollm2", "actor model hidden_size", 576),
        ("actor.model.hidden_size=32", "actor model hidden_size", 32),
        ("+actor.model.rope_theta=10", "actor model rope_theta", 10),
    ],
)
def test_an_override_changes_or_adds_a_key(
    word: str, path: str, value: object, mine: list[str]
) -> None:
    (composed,) = compose.with_hydra([*mine, word])
    found: Any = composed.mapping
    for key in path.split():
        found = found[key]
    assert found == value
    source = composed.sources.get(word.partition("=")[0].lstrip("+"))
    assert str(source) == f"command line: {word}" or "@" in word
    assert plan.main([*mine, word]) == 0


@pytest.mark.parametrize(
    ("word", "code", "fix"),
    [
        ("actor.lora_rnk=8", "unknown-key", "actor.lora_rank=8"),
        ("actor.lrr=0.1", "unknown-key", "actor.optimizer.lr=0.1"),
        ("actor.model.hiden_size=32", "unknown-override", "+actor.model.hiden_size=32"),
        (
            "actor.model.layers.foo=1",
            "unknown-override",
            "remove actor.model.layers.foo=1",
        ),
        ("hydra.foo=1", "unknown-key", "leave out hydra.foo=1"),
        (
            "runner.seed=range(1,3)",
            "override-is-sweep",
            "add --multirun, or write one value",
        ),
        (
            "runner.seed=glob(*)",
            "override-is-sweep",
            "add --multirun, or write one value",
        ),
        ("runner.seed=1,2", "override-is-sweep", "-m runner.seed=1,2"),
        (
            "runner.sinks=console,jsonl",
            "override-is-sweep",
            "runner.sinks=[console,jsonl]",
        ),
        (
            "cluster.component_placement.env=0,2",
            "override-is-sweep",
            "cluster.component_placement.env=[0,2]",
        ),
        (
            "cluster.component_placement.env=0-2",
            "accelerator-out-of-range",
            "cluster.component_placement.env=0-1",
        ),
    ],
)
def test_an_override_of_an_unknown_key_is_refused(
    word: str, code: str, fix: str, mine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*mine, word]) == 2
    err = capsys.readouterr().err
    assert problem_codes(err) == [code]
    assert word in err
    assert f"    fix: {fix}\n" in err


def test_a_placement_that_is_no_block_is_refused(
    mine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*mine, "cluster.component_placement=0.5"]) == 2
    assert problem_codes(capsys.readouterr().err) == ["wrong-type"]


TEXT = ["--config-name", "rlhf_tiny"]
PARALLEL = (
    "cluster.component_placement.actor={placement: 0-1, accelerators_per_rank: 2}"
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (
            ["--config-name", "hybrid_ppo", "env.id=InvertedPendulm-v5"],
            "unknown-simulator",
        ),
        (
            ["--config-name", "hybrid_ppo", "env.kind=gymnasum:Adapter"],
            "unknown-adapter",
        ),
        ([*TEXT, "env.task=arithmetik"], "unknown-task"),
        ([*TEXT, "algorithm.sequence_length=8"], "context-too-short"),
    ],
)
def test_what_one_command_refuses_all_refuse(
    words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        (plan.main, words),
        (train.main, [*words, "dry_run=true"]),
        (train.main, words),
    ]
    assert [
        (main(argv), problem_codes(capsys.readouterr().err)) for main, argv in commands
    ] == [(2, [code])] * 3


NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, spaces, width=32):
        super().__init__()

class Halved:
    def __init__(self, env, by=2): ...

class Watch:
    def __init__(self, folder, config): ...
    def on_end(self, state): ...

class Loss:
    def __init__(self, algorithm): ...
    def policy_loss(self, logprobs, samples): ...

def sink(folder, config): ...

def brevity(transcript): return 1.0

number = 3
"""


@pytest.mark.parametrize(
    ("words", "code", "fix"),
    [
        (
            ["cartpole", "actor.model={kind: module, name: 'own_nets:Nett'}"],
            "unknown-module",
            "own_nets:Net",
        ),
        (
            ["cartpole", "actor.model={kind: module, name: 'own_nets:Watch'}"],
            "unknown-module",
            "<package.module:Class>",
        ),
        (
            [
                "cartpole",
                "actor.model={kind: module, name: 'own_nets:Net'}",
                "actor.model.kwargs={wdith: 3}",
            ],
            "bad-module-kwargs",
            "actor.model.kwargs={width: 3}",
        ),
        (
            ["cartpole", "env.wrappers=[{name: 'own_nets:Halfed'}]"],
            "unknown-wrapper",
            "name: own_nets:Halved",
        ),
        (
            ["cartpole", "runner.callbacks=[{name: 'own_nets:Wacth'}]"],
            "unknown-callback",
            "own_nets:Watch",
        ),
        (
            ["cartpole", "runner.sinks=[console, 'own_nets:snik']"],
            "unknown-sink",
            "own_nets:sink",
        ),
        (
            ["cartpole", "algorithm.variant.name=own_nets:Losss"],
            "unknown-variant",
            "own_nets:Loss",
        ),
        (
            ["cartpole", "env.id=own_nets:Halfed"],
            "unknown-simulator",
            "env.id=own_nets:Halved",
        ),
        (
            ["cartpole", "env.kind=own_nets:Halfed"],
            "unknown-adapter",
            "env.kind=own_nets:Halved",
        ),
        (
            ["hybrid_grpo_llm", "env.rewards=[{name: 'own_nets:brevty'}]"],
            "unknown-reward",
            "own_nets:brevity",
        ),
        (
            ["hybrid_grpo_llm", "env.task=own_nets:Losss"],
            "unknown-task",
            "env.task=own_nets:Loss",
        ),
        (
            ["hybrid_grpo_llm", "rollout.engine=own_nets:Watcch"],
            "unknown-engine",
            "rollout.engine=own_nets:Watch",
        ),
        (
            ["hybrid_grpo_llm", "rollout.engine=own_nets:Watch"],
            "unknown-engine",
            "def move(self, ...)",
        ),
        (["cartpole", "env.id=own_broken:Env"], "unknown-simulator", "own_broken.py:1"),
        (["cartpole", "env.kind=own_broken:Env"], "unknown-adapter", "own_broken.py:1"),
        (
            ["hybrid_grpo_llm", "env.task=own_broken:Task"],
            "unknown-task",
            "own_broken.py:1",
        ),
        (
            ["hybrid_grpo_llm", "env.rewards=[{name: 'own_broken:r'}]"],
            "unknown-reward",
            "own_broken.py:1",
        ),
    ],
)
def test_what_is_brought_and_cannot_be_used_is_refused_by_plan_and_dry_run(
    words: list[str],
    code: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    (tmp_path / "own_nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "own_broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for main, more in ((plan.main, []), (train.main, ["dry_run=true"])):
        assert main([*words, *more]) == 2
        err = capsys.readouterr().err
        assert (problem_codes(err), fix in err.rpartition("fix: ")[2]) == (
            [code],
            True,
        ), err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["cartpole", "env.kwargs={no_such: 1}"], "bad-simulator-kwargs"),
        (
            [
                "cartpole",
                "actor.model={kind: cnn}",
                "env.wrappers=[]",
                "env.kind=tests.gyms:NoSuch",
            ],
            "unknown-adapter",
        ),
        (
            ["hybrid_grpo_llm", "env.task=prompts", "+env.kwargs.path=nowhere.jsonl"],
            "no-dataset",
        ),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    words: list[str], code: str, capsys: Any
) -> None:
    assert train.main([*words, "dry_run=true"]) == 2
    assert problem_codes(capsys.readouterr().err) == [code]


def test_a_library_that_code_of_ones_own_imports_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where only the planner is installed: it plans, and says what it could not check."""
    (tmp_path / "own_light.py").write_text("import mani_skill\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    assert plan.main(["cartpole", "runner.callbacks=[{name: 'own_light:Watch'}]"]) == 0
    out = capsys.readouterr().out
    assert "planned, not run" in out
    assert "could not be checked" in out


@pytest.mark.parametrize(
    "words", [[*TEXT, PARALLEL], [*TEXT, "actor.zero_stage=1"], ["rlhf_ppo_colocated"]]
)
def test_what_can_be_planned_and_not_run_is_said_by_both(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config-name", *words] if len(words) == 1 else words
    assert plan.main(words) == 0
    planned = capsys.readouterr().out
    assert "planned, not run" in planned
    assert train.main([*words, "dry_run=true"]) == 0
    assert capsys.readouterr().out.startswith(planned)
    assert train.main([*words, "dry_run=false"]) == 2
    refused = capsys.readouterr().err
    assert set(problem_codes(refused)) == {"plan-only"}
    assert set(problem_codes(refused)) <= set(problem_codes(planned))


@pytest.mark.parametrize(
    "words", [["train", "dry_run=true"], ["plan", "--format", "html"]], ids=" ".join
)
def test_a_plan_may_be_read_in_part(words: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        f"rlplace.{words[0]}",
        "--config-name",
        "hybrid_ppo",
        *words[1:],
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout is not None
        reading.stdout.close()
        _, err = reading.communicate(timeout=120)
    assert (reading.returncode, err) == (0, "")


def test_tabs_in_yaml_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tab.yaml").write_text("cluster:\n\tnum_nodes: 1\n", encoding="utf-8")
    assert train.main(["--config-dir", str(tmp_path), "--config-name", "tab"]) == 2
    err = capsys.readouterr().err
    assert problem_codes(err) == ["bad-yaml"]
    assert "tab.yaml:2" in err


def test_help_lists_configs_and_exit_codes_and_cfg_prints_the_composed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train.main(["--help", "--config-name", "hybrid_ppo"]) == 0
    out = capsys.readouterr().out
    assert [
        text
        for text in (*CONFIGS, "exit codes: 0 done", "hybrid_ppo.yaml:")
        if text not in out
    ] == []
    assert (
        train.main(
            ["--config-name", "hybrid_ppo", "algorithm.gamma=0.98", "--cfg", "job"]
        )
        == 0
    )
    assert "gamma: 0.98" in capsys.readouterr().out


def test_cfg_prints_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments of the task that an override replaces are not there, as they are not in a run."""
    words = ["hybrid_grpo_llm", "env.task=prompts", "+env.kwargs.path=x.jsonl"]
    assert train.main([*words, "--cfg", "job", "-p", "env.kwargs"]) == 0
    assert capsys.readouterr().out == "path: x.jsonl\n"
    (composed,) = compose.with_hydra(words)
    assert composed.mapping["env"]["kwargs"] == {"path": "x.jsonl"}
    assert (
        train.main(
            [
                "hybrid_ppo",
                "--cfg",
                "job",
                "-p",
                "cluster.accelerators_per_node",
                "--resolve",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == "auto\n"
    assert train.main(["hybrid_ppo", "--cfg", "job", "-p", "nowhere"]) == 2
    assert "fix: -p cluster" in capsys.readouterr().err


# One configuration of each kind of job, in a process for both: what either imports is there at the end
PLANNED = (
    ["--config-name", "hybrid_ppo"],
    [
        "--config-name",
        "rlhf_tiny",
        "actor.model.path=models/absent",
        "reward.model.path=models/absent",
    ],
)


@pytest.mark.parametrize(
    "call", ["plan.main(words)", "train.main([*words, 'dry_run=true'])"]
)
def test_planning_imports_nothing_heavy(call: str) -> None:
    code = (
        f"import sys; from rlplace import plan, train; codes = [{call} for words in {PLANNED}];"
        "heavy = ('ray', 'torch', 'numpy', 'urllib3', 'ssl', 'gymnasium', 'mujoco', 'vllm', 'transformers');"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr); sys.exit(max(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
