"""`python -m rlplace.plan import ...`: what it reads, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlplace.imports.command import run_import
from rlplace.runtime.prepare import prepare

FLAGS = "--actor_num_gpus_per_node 8 --vllm_num_engines 8 --colocate_all_models --vllm_enable_sleep --pretrin x"


def test_standard_output_is_a_config_as_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_import(["openrlhf", FLAGS]) == 0
    text = capsys.readouterr().out
    assert (
        str(prepare(yaml.safe_load(text)).view.plan.placement.accelerators("rollout"))
        == "0-7"
    )
    assert "did you mean --pretrain?" in text
    assert all(
        line.startswith(("#", " ")) or ":" in line for line in text.splitlines() if line
    )


def test_flags_that_the_shell_has_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(["openrlhf", *FLAGS.split(), "--save_path", "it's here"]) == 0
    split = capsys.readouterr().out
    assert run_import(["openrlhf", FLAGS + ' --save_path "it\'s here"']) == 0
    assert split == capsys.readouterr().out
    assert "--save_path" in split


def test_a_file_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "out.yaml"
    script.write_text(
        f"set -x\npython -m openrlhf.cli.train_ppo_ray {FLAGS}\n", encoding="utf-8"
    )
    assert (
        run_import(
            ["openrlhf", str(script), "--out", str(out), "--accelerators-per-node=16"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "algorithm:" not in said
    assert "train.sh:2)  did you mean" in said
    assert (
        yaml.safe_load(out.read_text(encoding="utf-8"))["cluster"][
            "accelerators_per_node"
        ]
        == 16
    )


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        (
            "verl.yaml",
            "trainer:\n  nnodes: 1\n  n_gpus_per_node: 8\n",
            ["trainer.nnodes=2"],
        ),
        (
            "run.sh",
            "N=2\npython3 -m verl.trainer.main_ppo \\\n trainer.nnodes=$N $@\n",
            [],
        ),
    ],
)
def test_files_of_keys(
    name: str,
    text: str,
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert run_import(["verl", str(tmp_path / name), *more]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["cluster"]["num_nodes"] == 2
    assert ("written again further on" in out) == bool(more)


def test_what_is_typed_counts_before_references_are_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rlinf.yaml"
    file.write_text(
        "n: 8\ncluster:\n  num_nodes: 1\n  component_placement: {actor: '0-${subtract:${n},1}'}\n"
    )
    assert run_import(["rlinf", str(file), "n=16"]) == 0
    cluster = yaml.safe_load(capsys.readouterr().out)["cluster"]
    assert (cluster["accelerators_per_node"], cluster["component_placement"]) == (
        16,
        {"actor": "0-15"},
    )


INCLUDING = """
defaults:
  - env/cube@env.train
  - model/small@actor.model
  - override hydra/job_logging: stdout
hydra:
  searchpath: ["file://${oc.env:NO_SUCH_PLACE}/config/"]
cluster: {num_nodes: 1, component_placement: {"actor,env,rollout": 0-3}}
env: {train: {total_num_envs: 64}}
algorithm: {adv_type: gae, loss_type: actor_critic}
"""


def test_what_a_file_includes_is_read_where_it_stands_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "main": INCLUDING,
        "env/cube": "total_num_envs: 8\nmax_episode_steps: 200\n",
        "model/small": "precision: bf16\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    assert run_import(["rlinf", str(tmp_path / "main.yaml")]) == 0
    whole = capsys.readouterr().out
    config = yaml.safe_load(whole)
    assert (config["env"], config["actor"]["compute"]) == (
        {"total_num_envs": 64, "max_episode_steps": 200},
        "bf16",
    )
    assert "defaults" not in whole
    prepared = prepare(config)
    assert [(p.code, p.key) for p in prepared.not_run] == [("plan-only", "env.id")]
    (tmp_path / "model/small.yaml").unlink()
    assert run_import(["rlinf", str(tmp_path / "main.yaml")]) == 0
    rest = capsys.readouterr().out
    assert "max_episode_steps" not in rest
    assert "is not beside this file" in rest


def test_words_of_a_launch_choose_files_that_its_config_includes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = "actor_rollout_ref: {{actor: {{optim: {{lr_scheduler_type: {}}}}}}}\n"
    for name, text in {
        "main": "defaults: [engine: dp, _self_]\ntrainer: {nnodes: 1}\n",
        "engine/dp": "# @package _global_\n" + schedule.format("constant"),
        "engine/veomni": "# @package _global_\n" + schedule.format("cosine"),
    }.items():
        file = tmp_path / "library" / "config" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    script = tmp_path / "run.sh"
    launch = "python3 -m library.train --config-path=config --config-name=main"
    for words, schedule in (("", "constant"), (" engine=veomni", "cosine")):
        script.write_text(
            f"cd {tmp_path}\n{launch} trainer.n_gpus_per_node=8{words}\n",
            encoding="utf-8",
        )
        assert run_import(["verl", str(script), "--run-trusted-script"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert config["actor"]["optimizer"]["schedule"] == schedule


def test_a_model_in_a_folder_is_read_by_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 320, **keys})
    )
    words = f"trainer.nnodes=1 trainer.n_gpus_per_node=8 actor_rollout_ref.model.path={tmp_path}"
    assert run_import(["verl", *words.split()]) == 0
    prepared = prepare(yaml.safe_load(capsys.readouterr().out))
    assert prepared.config.model is not None
    assert prepared.config.model["hidden_size"] == 64


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(["--help"]) == 0
    assert run_import([]) == 2
    assert capsys.readouterr().out.count("import openrlhf") == 6


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["opnrlhf", "x"], "import-library", "import openrlhf"),
        (["openrlhf"], "import-source", "import openrlhf FILE"),
        (["openrlhf", "missing.sh"], "import-source", "no such file"),
        (["rlinf", "."], "import-source", "is a directory"),
        (["openrlhf", "--zero_stage"], "import-flag-value", "--zero_stage VALUE"),
        (["openrlhf", "--a 'b"], "import-quote", "close the quote"),
        (["openrlhf", "--out"], "import-flag-value", "nothing follows it"),
        (
            ["openrlhf", FLAGS, "--accelerators-per-node", "0"],
            "import-value",
            "at least 1",
        ),
        (
            ["openrlhf", FLAGS, "--out", "/nowhere/x.yaml"],
            "cannot-write",
            "No such file",
        ),
        (["rlinf", "cluster.num_nodes=1"], "import-empty", "RLinf"),
    ],
)
def test_refusals(
    words: list[str], code: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import(words) == 2
    said = capsys.readouterr()
    assert f"[{code}]" in said.err
    assert part in said.err
    assert said.out == ""


def test_files_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text("", encoding="utf-8")
    assert run_import(["openrlhf", str(tmp_path / "trian.sh")]) == 2
    assert f"fix: {tmp_path / 'train.sh'}" in capsys.readouterr().err
    file = tmp_path / "x.yaml"
    for content, part in (
        (b"\xff\xfe", "is not text"),
        (b"cluster:\n\tnum_nodes: 1\n", "x.yaml:2"),
    ):
        file.write_bytes(content)
        assert run_import(["rlinf", str(file)]) == 2
        assert part in capsys.readouterr().err


MANY = " ".join(
    [
        *(f"data.unknown_{n}=1" for n in range(20)),
        *(f"trainer.resume_{n}=1" for n in range(3)),
        "trainer.logger=x actor_rollout_ref.ref.a=1 critic.b=1 ray_kwargs.c=1",
        "reward_model.d=1 global_profiler.e=1 transfer_queue.f=1 hydra.g=1 algorithm.h=1",
        "actor_rollout_ref.rollout.i=1 actor_rollout_ref.model.j=1 trainer.k=1",
        "actor_rollout_ref.actor.optim.l=1 trainer.total_epochs=1",
    ]
)


def test_settings_without_a_key_are_counted_by_reason_in_ten_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def section(text: str) -> list[str]:
        lines = text.split("Not mapped", 1)[1].splitlines()[1:]
        return lines[: next(i for i, line in enumerate(lines) if not line.strip("# "))]

    words = [f"trainer.n_gpus_per_node=8 {MANY}"]
    assert run_import(["verl", *words]) == 0
    short = section(capsys.readouterr().out)
    assert len(short) == 10
    assert short[0].split()[1:3] == ["20", "unknown_0,"]
    assert "other reasons" in short[-1]
    assert run_import(["verl", *words, "--all"]) == 0
    every = section(capsys.readouterr().out)
    assert len(every) == len(MANY.split())
    out = tmp_path / "out.yaml"
    assert run_import(["verl", *words, "--out", str(out)]) == 0
    assert f"{out} lists each" in capsys.readouterr().out
    assert len(section(out.read_text(encoding="utf-8"))) == len(every)


def test_a_script_is_run_only_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "NODES=$(echo 2)\n"
        'if [ "$SIZE" = large ]; then WIDTH=16; else WIDTH=8; fi\n'
        "python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES trainer.n_gpus_per_node=$WIDTH seed=$1\n",
        encoding="utf-8",
    )
    assert run_import(["verl", str(script)]) == 2
    assert "set nowhere" in capsys.readouterr().err
    assert run_import(["verl", str(script), "trainer.nnodes=1"]) == 0
    text = capsys.readouterr().out
    assert "nothing was run" in text
    assert 'line 2: [ "$SIZE" = large ]: else' in text
    words = ["--run-trusted-script", "--variable", "SIZE=large", "--", "7"]
    assert run_import(["verl", str(script), *words]) == 0
    text = capsys.readouterr().out
    cluster = yaml.safe_load(text)["cluster"]
    assert (cluster["num_nodes"], cluster["accelerators_per_node"]) == (2, 16)
    assert "not isolated" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variable", "NODES"], "expected NAME=VALUE"),
        (["--launch", "0"], "at least 1"),
        (["--launch"], "its value is missing"),
    ],
)
def test_options_of_scripts_that_have_a_wrong_form(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import(["verl", "trainer.nnodes=1", *words]) == 2
    assert said in capsys.readouterr().err
