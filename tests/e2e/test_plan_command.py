"""`python -m rlplace.plan` as its users call it: every form of output, every sub-command, every exit code."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rlplace import commands
from rlplace.cli import plan
from rlplace.config import compose
from rlplace.placement.memory import families
from tests.e2e.test_command_line import problem_codes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(compose.config_names())
CLUSTERS = sorted(compose.group_names(compose.CLUSTER))
HYBRID = ["--config-name", "hybrid_ppo"]
TOO_LARGE = ["--config-name", "rlhf_ppo_70b_hybrid", "actor.optimizer.on_host=false"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = plan.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_declared_cluster_can_be_chosen(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--config-name", "hybrid_ppo", f"cluster={cluster}")
    assert (code, err) == (0, "")
    counted = {"laptop": "8 accelerators", "8xH100": "8 accelerators"}.get(
        cluster, cluster.split("x")[0] + " acc"
    )
    assert counted in out.splitlines()[0]


def test_a_cluster_replaces_the_one_a_config_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run(capsys, "--config-name", "rlhf_ppo_colocated")[1]
    assert "8 accelerators, 0-7 (1 node x 8), H100" in out
    assert "nodes are numbered" not in out, "one node has no order"
    batch = ["algorithm.prompts=1152", "algorithm.train_batch=192"]
    code, out, _ = run(
        capsys, "--config-name", "rlhf_ppo_colocated", "cluster=48xA100", *batch
    )
    assert (code, "48 accelerators, 0-47 (6 nodes x 8), A100" in out) == (0, True)
    assert out.splitlines()[1].startswith("nodes are numbered ")
    code, out, _ = run(
        capsys,
        "--config-name",
        "hybrid_ppo",
        "cluster=48xA100",
        "cluster.nodes.0.count=2",
    )
    assert (code, "16 accelerators, 0-15 (2 nodes x 8), A100" in out) == (0, True)
    code, _, err = run(
        capsys, "--config-name", "hybrid_ppo", "cluster=48xA100", "cluster.num_nodes=2"
    )
    assert (code, problem_codes(err)) == (2, ["node-count"])


def test_a_cluster_of_ones_own_and_where_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(
        "# Two small ones\nnodes:\n  - {count: 2, acelerators: 4}\n"
    )
    code, _, err = run(
        capsys,
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "hybrid_ppo",
        "cluster=mine",
    )
    assert (code, problem_codes(err)) == (2, ["unknown-key"])
    assert "mine.yaml:3)" in err
    code, _, err = run(
        capsys,
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "hybrid_ppo",
        "cluster=min",
    )
    assert (code, problem_codes(err)) == (2, ["unknown-cluster"])
    assert "Two small ones" in err
    assert "fix: cluster=mine" in err


def test_shipped_clusters_and_models_are_within_reach_of_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = (
        "cluster: {component_placement: {actor: 0-7, rollout: {same_as: actor}}}"
    )
    offload = "actor: {enable_offload: true}\nrollout: {enable_offload: true}"
    (tmp_path / "mine.yaml").write_text(f"{placement}\n{offload}\n", encoding="utf-8")
    for flag in ("--config-dir", "--config-path"):
        words = [
            flag,
            str(tmp_path),
            "--config-name",
            "mine",
            "cluster=8xH100",
            "model@actor.model=llama_3_8b",
        ]
        code, out, err = run(capsys, *words)
        assert (code, err) == (0, "")
        assert "H100-80GB, 79.1 GiB each" in out
        assert "memory: fits; tightest accelerators 0-7" in out
    larger = ["cluster=8xH100", "model@actor.model=llama_3_70b"]
    assert (
        run(
            capsys,
            "--config-dir",
            str(tmp_path),
            "--config-name",
            "rlhf_ppo_colocated",
            *larger,
        )[0]
        == 3
    )
    for component in ("actor", "critic"):
        assert (
            run(
                capsys,
                "--config-name",
                "rlhf_ppo_colocated",
                f"model@{component}.model=null",
            )[0]
            == 0
        )


def test_a_job_that_does_not_fit_can_be_forced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--config-name", "hybrid_ppo", "cluster.accelerator.memory=200MiB"]
    code, out, err = run(capsys, *small)
    assert (code, problem_codes(err)) == (3, ["does-not-fit"])
    forced = run(capsys, *small, "memory.check=warn")
    assert (forced[0], forced[1]) == (0, out)
    assert (
        forced[2]
        == err + "memory.check: warn forces the job: it may end where memory does\n"
    )


@pytest.mark.parametrize(
    "more", ["rollout.kv_cache_memory=null", "rollout.kv_cache_memory=900GiB"]
)
def test_an_engine_without_accelerators_is_planned_like_any_other(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--config-name",
        "rlhf_ppo_70b_hybrid",
        "cluster.component_placement.rollout=cpu",
        more,
    )
    code, out, err = run(capsys, *words)
    assert code in (plan.FITS, commands.WRONG, plan.DOES_NOT_FIT)
    assert bool(out) == (code != commands.WRONG)
    assert (code == plan.FITS) != bool(problem_codes(err))


def test_json_svg_and_html(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(capsys, "--config-name", "hybrid_ppo", "-m", "env.total_num_envs=64,128")[
            1
        ].count("plan: hybrid")
        == 2
    )
    record = json.loads(
        run(capsys, "--config-name", "hybrid_ppo", "--format", "json")[1]
    )
    assert (record["config"], record["fits"], record["savings"]["saved"]) == (
        "hybrid_ppo",
        True,
        8,
    )
    picture = ET.fromstring(
        run(capsys, "--config-name", "hybrid_ppo", "--format=svg")[1]
    )
    assert "hybrid placement" in " ".join(picture.itertext())
    page = run(capsys, "--format", "html", "--config-name", "hybrid_ppo")[1]
    assert page.startswith("<!DOCTYPE html>")
    assert "hybrid_ppo" in page


def test_what_does_not_fit_ends_with_three_and_says_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, *TOO_LARGE)
    assert (code, set(problem_codes(err))) == (3, {"does-not-fit"})
    assert "memory: does not fit" in out
    assert "fix: actor.optimizer.on_host: true" in err
    assert run(capsys, *TOO_LARGE[:2], "--diff", TOO_LARGE[2])[0] == 3
    code, out, _ = run(capsys, "solve", "micro_batch", "actor", *TOO_LARGE)
    assert (code, out.splitlines()[0]) == (
        3,
        "micro_batch: does not fit, not even with 1",
    )


@pytest.mark.parametrize(
    ("other", "named", "marked"),
    [
        ("disaggregated_ppo", "disaggregated_ppo", "mode"),
        ("cluster.component_placement.env=0-1", "cluster.component_placement", "env"),
        ("rlhf_ppo_colocated", "rlhf_ppo_colocated", "critic"),
    ],
)
def test_a_diff_with_another_config_or_with_overrides(
    other: str, named: str, marked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--config-name", "hybrid_ppo", "--diff", other)
    assert (code, err) == (0, "")
    assert named in out.splitlines()[1]
    assert any(line.split()[:2] == ["*", marked] for line in out.splitlines())
    record = json.loads(
        run(capsys, "--config-name", "hybrid_ppo", "--diff", other, "--format", "json")[
            1
        ]
    )
    assert record["left"] == "hybrid_ppo"
    if other == "disaggregated_ppo":  # the cluster goes over to the other config
        out = run(
            capsys, "--config-name", "hybrid_ppo", "cluster=48xA100", "--diff", other
        )[1]
        assert next(
            line for line in out.splitlines() if line.split()[:1] == ["nodes"]
        ).split()[1:] == ["6", "6"]


def test_explain_a_component_an_accelerator_and_a_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(capsys, "explain", "rollout", "--config-name", "hybrid_ppo")[
        1
    ].startswith("rollout: 4 ranks, 4-7")
    assert (
        "number 3 of node 0"
        in run(capsys, "explain", "3", "--config-name", "hybrid_ppo")[1]
    )
    assert run(capsys, "explain", "rank-gap")[1].startswith("rank-gap\n    means:")
    out = run(
        capsys,
        "explain",
        "env",
        "1",
        "rollout",
        "1",
        "--config-name",
        "collocated_ppo_one_process",
    )[1]
    assert out.startswith("env rank 1 and rollout rank 1: same_process")
    out = run(capsys, "explain", "9", "--config-name", "rlhf_ppo_70b_hybrid")[1]
    assert out.startswith("accelerator 9: number 1 of node 1 (A100-80GB, 79.1 GiB)")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--format", "pdf"], "bad-option"),
        (
            [*HYBRID, "-m", "env.total_num_envs=64,128", "--diff", "disaggregated_ppo"],
            "bad-option",
        ),
        ([*HYBRID, "--diff", "disagregated_ppo"], "unknown-config"),
        ([*HYBRID, "--measured", "/nowhere.json"], "not-measurements"),
        ([*HYBRID, "cluster=9xH100"], "unknown-cluster"),
        (
            ["--config-name", "rlhf_ppo_colocated", "model@actor.model=llama_3_7b"],
            "unknown-model",
        ),
        (
            ["--config-name", "rlhf_ppo_colocated", "actor.zero_stage=4"],
            "unknown-choice",
        ),
        (["explain"], "unknown-topic"),
        (["explain", "rank-gp"], "unknown-topic"),
        (["explain", "rolout", *HYBRID], "unknown-topic"),
        (["explain", "8", *HYBRID], "unknown-topic"),
        (["explain", "env", "4", "rollout", "0", *HYBRID], "unknown-topic"),
        (["explain", "env", "0", "rolout", "0", *HYBRID], "unknown-topic"),
        (["solve"], "bad-option"),
        (["solve", "microbatch", "--config-name", "rlhf_ppo_colocated"], "bad-option"),
        (["solve", "micro_batch", *HYBRID], "nothing-to-solve"),
    ],
)
def test_wrong_words_are_explained(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, problem_codes(err), out) == (2, [problem], "")
    assert "    fix: " in err or "    why: choices: " in err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--format", "timelin"], "--format timeline"),
        (["--diff"], "--diff disaggregated_ppo"),
        (["--diff", "disaggregated_ppo", "--format", "svg"], "--format text"),
    ],
)
def test_the_fix_of_an_option_can_be_pasted(
    words: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *HYBRID, *words)
    assert (code, problem_codes(err), out) == (2, ["bad-option"], "")
    assert err.endswith(f"    fix: {fix}\n")


@pytest.mark.parametrize("name", ["rlhf_ppo_colocated", "rlhf_ppo_70b_hybrid"])
@pytest.mark.parametrize(
    "knob", ["micro_batch", "sequence_length", "gpu_memory_utilization"]
)
def test_solve_finds_the_largest_that_fits(
    name: str, knob: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "solve", knob, "--config-name", name)
    assert code == 0
    assert out.startswith(f"{knob}: ")


def test_measured_numbers_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "memory.json"
    file.write_text(
        json.dumps({"rlplace_memory": 1, "components": {"actor": {"full": 20 << 30}}}),
        encoding="utf-8",
    )
    code, out, _ = run(
        capsys, "--config-name", "hybrid_ppo", "cluster=laptop", "--measured", str(file)
    )
    assert (code, "measured: actor" in out) == (3, True)


def test_a_model_that_nothing_can_count_is_planned_by_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        families,
        "_kept",
        lambda keys: {"error": "ValueError: Unrecognized model identifier"},
    )
    words = ["--config-name", "rlhf_tiny", "reference.model=null", "critic.model=null"]
    words += ["~actor.model", "+actor.model={model_type: of_my_own, hidden_size: 64}"]
    code, _, err = run(capsys, *words)
    assert (code, set(problem_codes(err))) == (2, {"unknown-model-family"})
    assert "(or --measured <folder of a run>/memory.json" in err
    gib = 1 << 30
    sizes = {"off": 0, "weights": gib, "full": 2 * gib}
    measured = dict.fromkeys(("actor", "critic", "reference", "rollout"), sizes)
    file = tmp_path / "memory.json"
    for missing, expected in (("rollout", 2), ("", 0)):
        known = {
            component: row
            for component, row in measured.items()
            if component != missing
        }
        file.write_text(
            json.dumps({"rlplace_memory": 1, "components": known}), encoding="utf-8"
        )
        code, out, err = run(capsys, *words, "--measured", str(file))
        assert code == expected, out + err
    assert (
        "actor: its model cannot be counted; known is what an earlier run measured"
        in " ".join(out.split())
    )


def test_a_simulator_is_built_where_asked_for_to_count_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--config-name",
        "hybrid_ppo_cartpole",
        "cluster=laptop",
        "--format",
        "json",
    ]
    blind, seeing = (
        json.loads(run(capsys, *words, *more)[1])["memory"]
        for more in ([], ["--simulator"])
    )
    assert "the policy's weights are not counted" in blind["notes"][0]
    assert seeing["notes"] == []
    parts = {
        h["part"]
        for a in seeing["accelerators"]
        for m in a["moments"]
        for h in m["holds"]
    }
    assert {"parameters", "activations", "optimizer state"} <= parts


def test_schema_is_json_and_help_is_complete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert json.loads(run(capsys, "schema")[1])["title"] == "rlplace config"
    out = run(capsys, "--help")[1]
    assert [
        n
        for n in (*CONFIGS, *CLUSTERS, "explain", "solve", "schema", "import", "--diff")
        if n not in out
    ] == []
