"""What a config or a command line that cannot be composed is told: the key, the file and line, a line that mends it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlplace.config.compose import (
    CONFIG_DIR,
    Composed,
    override,
    with_defaults,
    with_hydra,
)
from rlplace.config.read import try_config
from rlplace.errors import ConfigError, Problem
from rlplace.runtime.prepare import prepare_composed
from tests.absent import needs

SHIPPED = (CONFIG_DIR / "hybrid_ppo.yaml").read_text(encoding="utf-8")


def composed(tmp_path: Path, old: str = "", new: str = "", *overrides: str) -> Composed:
    """The shipped config with one piece of its text replaced."""
    assert old in SHIPPED
    (tmp_path / "job.yaml").write_text(SHIPPED.replace(old, new, 1), encoding="utf-8")
    (job,) = with_hydra(
        ["--config-dir", str(tmp_path), "--config-name", "job", *overrides]
    )
    return job


def refused(tmp_path: Path, old: str = "", new: str = "", *overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        composed(tmp_path, old, new, *overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("value", "what", "fix"),
    [
        (
            "${algorithm.gae_lamda}",
            "the config has no key 'algorithm.gae_lamda', did you mean 'algorithm.gae_lambda'?",
            "gamma: ${algorithm.gae_lambda}",
        ),
        (
            "${algorithm.gama}",
            "the config has no key 'algorithm.gama'",
            "gamma: <a value>",
        ),  # not itself
        (
            "${oc.env:NO_SUCH_VARIABLE}",
            "the environment has no NO_SUCH_VARIABLE",
            "export NO_SUCH_VARIABLE=<a value>        (or gamma: ${oc.env:NO_SUCH_VARIABLE,<a default>})",
        ),
        (
            "${algorithm.gae_lambda",
            "cannot read this: no viable alternative at input '${algorithm.gae_lambda'",
            "gamma: <a value>",
        ),
        ("???", "has no value yet", "algorithm.gamma=<a value>"),
    ],
)
def test_a_reference_that_leads_nowhere_is_told_with_its_line(
    tmp_path: Path, value: str, what: str, fix: str
) -> None:
    problem = refused(tmp_path, "gamma: 0.99", f"gamma: {value}")
    assert (problem.code, problem.key, problem.what) == (
        "bad-config",
        "algorithm.gamma",
        what,
    )
    assert (problem.got, problem.fix) == (f"gamma: {value}", fix)
    line = 1 + SHIPPED[: SHIPPED.index("gamma: 0.99")].count("\n")
    assert str(problem.source).endswith(f"job.yaml:{line}")


def test_the_fix_of_a_reference_mends_it(tmp_path: Path) -> None:
    fix = refused(tmp_path, "gamma: 0.99", "gamma: ${algorithm.gae_lamda}").fix
    assert (
        composed(tmp_path, "gamma: 0.99", str(fix)).mapping["algorithm"]["gamma"]
        == 0.95
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "defaults: [_self_, hybrid_ppo]\nalgorithm: {gamma: 0.5}\n",
            [("algorithm.gamma", "defaults: [hybrid_ppo, _self_]")],
        ),
        # The same value, and a key that the other file does not set
        ("defaults: [_self_, hybrid_ppo]\nalgorithm: {gamma: 0.99}\n", []),
        ("defaults: [_self_, hybrid_ppo]\nenv: {eval_seed: 3}\n", []),
        ("defaults: [hybrid_ppo, _self_]\nalgorithm: {gamma: 0.5}\n", []),
    ],
)
def test_a_key_that_a_later_config_of_defaults_undoes_is_told(
    text: str, told: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    found = []
    try:
        with_hydra(["--config-dir", str(tmp_path), "--config-name", "job"])
    except ConfigError as error:
        found = [(problem.key, problem.fix) for problem in error.problems]
    assert found == told


def test_a_key_that_stands_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    problem = refused(tmp_path, "  epochs: 5", "  gamma: 0.98\n  epochs: 5")
    first = 1 + SHIPPED[: SHIPPED.index("  gamma:")].count("\n")
    second = 1 + SHIPPED[: SHIPPED.index("  epochs: 5")].count("\n")
    assert (problem.code, problem.key, problem.got) == (
        "bad-yaml",
        "algorithm.gamma",
        "gamma: 0.98",
    )
    assert problem.fix == f"remove line {first} or line {second}"
    assert str(problem.source).endswith(f"job.yaml:{second}")


@pytest.mark.parametrize(
    "word",
    [
        "cluster.component_placement.env={placement: 0-3,5-7}",
        "cluster.component_placement={actor: 0-7, env: 0-3,5-7, rollout: 4}",
        "cluster.component_placement.env={placement: 0-2:0-2,5, process: own}",
    ],
)
def test_commas_in_the_braces_of_an_override_are_quoted_by_the_fix(
    tmp_path: Path, word: str
) -> None:
    problem = refused(tmp_path, "", "", word)
    assert (problem.code, problem.key, problem.got) == (
        "bad-config",
        word.partition("=")[0],
        word,
    )
    (pasted,) = shlex.split(str(problem.fix))
    placement = composed(tmp_path, "", "", pasted).mapping["cluster"][
        "component_placement"
    ]["env"]
    assert (placement["placement"] if isinstance(placement, dict) else placement) in (
        "0-3,5-7",
        "0-2:0-2,5",
    )


@pytest.mark.parametrize(
    ("word", "pasted"),
    [
        ("rollout.stop=</answer>", 'rollout.stop=["</answer>"]'),
        ("rollout.stop=[</answer>, <x>]", 'rollout.stop=["</answer>","<x>"]'),
        ("env.system=Is it <x>?", 'env.system="Is it <x>?"'),
    ],
)
def test_text_that_hydra_cannot_read_is_quoted_by_the_fix(
    tmp_path: Path, word: str, pasted: str
) -> None:
    problem = refused(tmp_path, "", "", word)
    assert shlex.split(str(problem.fix)) == [pasted]
    key, _, value = pasted.partition("=")
    block, _, leaf = key.partition(".")
    assert composed(tmp_path, "", "", pasted).mapping[block][leaf] == yaml.safe_load(
        value
    )


def test_an_override_that_cannot_be_read_names_its_key(tmp_path: Path) -> None:
    problem = refused(tmp_path, "", "", "env.total_num_envs=[1")
    assert (problem.key, problem.what) == (
        "env.total_num_envs",
        "cannot read the override",
    )
    assert problem.fix == "'env.total_num_envs=[1]'"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0.1, 1e-06, [64, 64], {"a": 1, "b": [{"name": "c, d"}]}),
        *(
            "runs/a b",
            "null",
            "1e3",
            "off",
            "",
            "nan",
            'it\'s "(so)", or: \n\\d+ not\\',
        ),
    ],
)
def test_a_written_override_is_one_word_and_has_the_value(value: object) -> None:
    (word,) = shlex.split(override("some.key", value))
    assert OverridesParser.create().parse_override(word).value() == value


# ── the config's name or file as a word ──────────────────────────────────────────────────────────────────────────────

EXTENDS = "defaults:\n  - {parent}\n  - _self_\nalgorithm:\n  gamma: {gamma}\n"


def extends(folder: Path, parent: str = "hybrid_ppo", gamma: str = "0.9") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "mine.yaml"
    file.write_text(EXTENDS.format(parent=parent, gamma=gamma), encoding="utf-8")
    return file


def only_problem(*words: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        with_hydra(words)
    (problem,) = caught.value.problems
    return problem


def test_the_first_word_that_is_no_override_names_the_config() -> None:
    (short,) = with_hydra(["algorithm.gamma=0.5", "hybrid_ppo"])
    (long,) = with_hydra(["--config-name", "hybrid_ppo", "algorithm.gamma=0.5"])
    assert short == long


@pytest.mark.parametrize("word", ["runs/mine.yaml", "--config-name=runs/mine.yaml"])
def test_a_file_is_a_config_and_its_folder_is_looked_in(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extends(tmp_path / "runs")
    (tmp_path / "runs" / "cluster").mkdir()
    (tmp_path / "runs" / "cluster" / "own.yaml").write_text(
        "num_nodes: 3\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    (job,) = with_hydra([word, "cluster=own"])
    assert (
        job.name,
        job.mapping["algorithm"]["gamma"],
        job.mapping["cluster"]["num_nodes"],
    ) == ("mine", 0.9, 3)
    assert str(job.sources["algorithm.gamma"]) == "runs/mine.yaml:5"


def test_a_file_of_the_current_folder_goes_before_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extends(tmp_path / "here", gamma="0.7")
    extends(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    (job,) = with_hydra(["mine.yaml", "--config-dir", "../there"])
    assert job.mapping["algorithm"]["gamma"] == 0.7


def test_the_nearest_config_stands_before_a_short_list_of_names() -> None:
    with pytest.raises(ConfigError) as caught:
        with_hydra(["hybrid_pp0"])
    (problem,) = caught.value.problems
    assert problem.fix == "hybrid_ppo"
    assert problem.why is not None
    assert "cartpole, cartpole_memory" in problem.why
    assert "\n" not in problem.why


def test_a_folder_without_configs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".hidden.yaml").write_text("a: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra(["./nope.yaml"])
    (problem,) = caught.value.problems
    assert problem.why == "there is no .yaml file in the folder ."


def test_a_file_that_does_not_exist_is_told_with_the_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_pole.yaml").write_text(
        "defaults: [cartpole, _self_]\n", encoding="utf-8"
    )
    for typed, fix in (("nope.yaml", "<a config>"), ("my_polle.yaml", "my_pole.yaml")):
        with pytest.raises(ConfigError) as caught:
            with_hydra([typed])
        (problem,) = caught.value.problems
        assert problem.got == typed
        assert problem.what.startswith("there is no such file")
        assert problem.why is not None
        assert problem.why.endswith("in the folder of this path: my_pole.yaml")
        assert problem.fix is not None
        assert problem.fix.startswith(f"{fix}  ")


@pytest.mark.parametrize(
    ("old", "new", "key", "fix"),
    [
        (
            "runner:\n  total_iterations",
            "runner:\n  eval_every:5\nx:\n  total_iterations",
            "runner",
            "eval_every: 5",
        ),
        (
            "cluster:\n",
            "reference: model: tiny\ncluster:\n",
            "config",
            "reference: {model: tiny}",
        ),
    ],
)
def test_missing_blanks_and_braces_are_written(
    tmp_path: Path, old: str, new: str, key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_composed(composed(tmp_path, old, new))
    problem = next(p for p in caught.value.problems if p.key == key)
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["hybrid_pppo"], "no such config, did you mean 'hybrid_ppo'?", "hybrid_ppo"),
        (["hybrid_pp0"], "no such config, did you mean 'hybrid_ppo'?", "hybrid_ppo"),
        (
            ["hybrid_ppo", "--total-timesteps", "8192"],
            "no such option",
            "runner.total_iterations=2",
        ),
        (
            ["--config-name=hybrid_pppo"],
            "no such config, did you mean 'hybrid_ppo'?",
            "--config-name hybrid_ppo",
        ),
        (["mine.yml"], "the name of a config ends in .yaml", "mv mine.yml mine.yaml"),
        (["hybrid_ppo", "rollout"], "is no override", "rollout=<a value>"),
        (
            ["--config-name", "hybrid_ppo", "rollout"],
            "is no override",
            "rollout=<a value>",
        ),
    ],
)
def test_a_word_that_is_neither_config_nor_override_is_explained(
    words: list[str], what: str, fix: str
) -> None:
    problem = only_problem(*words)
    assert (problem.what, problem.fix) == (what, fix)


@pytest.mark.parametrize(
    ("wrong", "right", "code"),
    [
        ("hybrid_pppo", "hybrid_ppo", "unknown-config"),
        ("/cluster: laptopp", "/cluster: laptop", "unknown-cluster"),
        ("/model@actor.model: smolm2", "/model@actor.model: smollm2", "unknown-model"),
    ],
)
def test_a_misspelt_name_in_defaults_is_told_with_its_line(
    wrong: str, right: str, code: str, tmp_path: Path
) -> None:
    """Also of the config that a config extends."""
    file = extends(tmp_path, parent=wrong)
    (tmp_path / "child.yaml").write_text("defaults: [mine, _self_]\n", encoding="utf-8")
    for words in (["mine"], ["child"]):
        problem = only_problem("--config-dir", str(tmp_path), *words)
        assert (problem.code, problem.got, problem.fix) == (
            code,
            f"- {wrong}",
            f"- {right}",
        )
        assert str(problem.source) == f"{file}:2"


def test_another_model_replaces_the_one_that_an_extended_config_names(
    tmp_path: Path,
) -> None:
    extends(tmp_path, parent="hybrid_grpo_llm")
    (tmp_path / "child.yaml").write_text("defaults: [mine, _self_]\n", encoding="utf-8")
    for name in ("mine", "child"):
        (job,) = with_hydra(
            ["--config-dir", str(tmp_path), name, "model@actor.model=tiny"]
        )
        assert job.mapping["actor"]["model"]["path"] == "models/tiny"


def test_a_reference_into_the_extended_config_has_its_line_and_a_suggestion(
    tmp_path: Path,
) -> None:
    file = extends(tmp_path, gamma="${algorithm.gae_lamda}")
    problem = only_problem(str(file))
    assert (str(problem.source), problem.fix) == (
        f"{file}:5",
        "gamma: ${algorithm.gae_lambda}",
    )
    (job,) = with_hydra([str(extends(tmp_path))])
    assert (
        str(job.sources["algorithm.gae_lambda"])
        .partition(":")[0]
        .endswith("configs/hybrid_ppo.yaml")
    )


# ── another task than the extended config's ──────────────────────────────────────────────────────────────────────────

PARENT = "env: {task: arithmetic, kwargs: {digits: 1, operations: []}, eval_kwargs: {digits: 2}, chat: false}\n"


def env_of(folder: Path, child: str, *overrides: str) -> dict[str, object]:
    (folder / "parent.yaml").write_text(PARENT, encoding="utf-8")
    (folder / "child.yaml").write_text(
        f"defaults: [parent, _self_]\n{child}", encoding="utf-8"
    )
    (job,) = with_hydra([str(folder / "child.yaml"), *overrides])
    env: dict[str, object] = job.mapping["env"]
    return env


@pytest.mark.parametrize(
    ("child", "words", "kwargs"),
    [
        ("env: {task: prompts, kwargs: {path: a}}", [], {"path": "a"}),
        (
            "env: {task: prompts, kwargs: {path: a, digits: 3}}",
            [],
            {"path": "a", "digits": 3},
        ),
        (
            "env.task: prompts\nenv.kwargs: {path: a}",
            [],
            {},
        ),  # its line is read later, over the block
        ("", ["env.task=prompts", "env.kwargs.path=a"], {"path": "a"}),
        ("", ["env.kwargs={path: a}", "env.task=prompts"], {"path": "a"}),
        (
            "",
            ["env.task=prompts", "~env.kwargs", "+env.kwargs={path: a}"],
            {"path": "a"},
        ),
        ("env: {kwargs: {path: a}}", ["env.task=prompts"], {}),
        (
            "env: {task: arithmetic, kwargs: {digits: 3}}",
            [],
            {"digits": 3, "operations": []},
        ),
        (
            "",
            ["env.task=arithmetic", "env.kwargs.digits=3"],
            {"digits": 3, "operations": []},
        ),
    ],
)
def test_another_task_drops_the_arguments_of_the_one_before(
    child: str, words: list[str], kwargs: dict[str, object], tmp_path: Path
) -> None:
    env = env_of(tmp_path, child, *words)
    same = "operations" in kwargs
    assert (env["kwargs"], env["eval_kwargs"]) == (
        kwargs,
        {"digits": 2} if same else {},
    )
    assert env["chat"] is False


@pytest.mark.parametrize(
    ("child", "words", "placed"),
    [
        (
            "",
            ["cluster.component_placement.preset=colocate_all"],
            {"preset": "colocate_all"},
        ),
        (
            "",
            ["cluster.component_placement={preset: hybrid, actor: 4}"],
            {"preset": "hybrid", "actor": 4},
        ),
        (
            "cluster: {component_placement: {preset: hybrid, actor: 4}}",
            [],
            {"preset": "hybrid", "actor": 4},
        ),
        (
            "cluster: {component_placement: {preset: hybrid}}",
            ["cluster.component_placement.preset=disaggregated"],
            {"preset": "disaggregated"},
        ),
    ],
)
def test_a_preset_takes_the_place_of_the_lines_that_are_extended(
    child: str, words: list[str], placed: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [hybrid_ppo, _self_]\n{child}\n", encoding="utf-8"
    )
    (job,) = with_hydra([str(tmp_path / "mine.yaml"), *words])
    assert job.mapping["cluster"]["component_placement"] == placed


def test_a_shipped_config_takes_the_task_of_the_guide(tmp_path: Path) -> None:
    child = "defaults: [hybrid_grpo_llm, _self_]\nenv:\n  task: guess_number\n  kwargs: {most: 20}\n"
    (tmp_path / "mine.yaml").write_text(child, encoding="utf-8")
    (job,) = with_hydra([str(tmp_path / "mine.yaml")])
    assert job.mapping["env"]["kwargs"] == {"most": 20}


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("actor: {model: {kind: cnn, network: impala}}", []),
        ("", ["actor.model={kind: cnn, network: impala}"]),
        ("", ["actor.model.kind=cnn", "+actor.model.network=impala"]),
        (
            "actor: {model: {kind: cnn, hidden: [8]}}",
            ["actor.model={kind: cnn, network: impala}", "~actor.model.hidden"],
        ),
    ],
)
def test_another_kind_of_model_begins_without_the_keys_of_the_one_before(
    child: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [hybrid_ppo_cartpole, _self_]\n{child}", encoding="utf-8"
    )
    (job,) = with_hydra([str(tmp_path / "mine.yaml"), *words])
    assert job.mapping["actor"]["model"] == {"kind": "cnn", "network": "impala"}


def test_the_same_kind_of_model_keeps_the_keys_of_the_one_before() -> None:
    (job,) = with_hydra(["hybrid_ppo_cartpole", "actor.model={kind: mlp, hidden: [8]}"])
    others = {"activation": "tanh", "memory": "none", "initial_log_std": 0.0}
    assert job.mapping["actor"]["model"] == {"kind": "mlp", "hidden": [8], **others}


# ── numbers that YAML reads as others ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("old", "line", "what", "fix"),
    [
        (
            "epochs: 5",
            "epochs: 010",
            "YAML reads 010 as 8",
            'epochs: 10        (or in quotes, if it is text: "010")',
        ),
        (
            "seed: 0",
            "seed: 1:30",
            "YAML reads 1:30 as 90",
            'seed: 90        (or in quotes, if it is text: "1:30")',
        ),
        (
            "hidden: [64, 64]",
            "hidden: [064, 64]",
            "YAML reads 064 as 52",
            '64        (or in quotes, if it is text: "064")',
        ),
    ],
)
def test_a_number_that_yaml_reads_as_another_is_refused(
    old: str, line: str, what: str, fix: str, tmp_path: Path
) -> None:
    problem = refused(tmp_path, old, line)
    assert (problem.code, problem.what, problem.fix) == ("misread-number", what, fix)
    number = 1 + SHIPPED[: SHIPPED.index(old)].count("\n")
    assert str(problem.source).endswith(f"job.yaml:{number}")


def test_numbers_that_are_replaced_or_text_are_not_refused(tmp_path: Path) -> None:
    job = composed(
        tmp_path,
        "epochs: 5",
        "epochs: 010",
        "algorithm.epochs=4",
        "env.kwargs.code=010",
    )
    assert job.mapping["algorithm"]["epochs"] == 4
    assert composed(
        tmp_path, "  kwargs: {}", '  kwargs: {code: "010", none: 00, hex: 0x10}'
    ).mapping["env"]["kwargs"] == {
        "code": "010",
        "none": 0,
        "hex": 16,
    }


def test_a_goal_ends_with_the_environment_that_it_was_written_for(
    tmp_path: Path,
) -> None:
    def goal(*words: str) -> tuple[object, float | None]:
        (found,) = with_hydra(words)
        return found.mapping["runner"].get("stop_at_return"), found.goal

    assert goal("cartpole") == goal("cartpole", "env.id=CartPole-v1") == (475.0, None)
    assert goal("cartpole", "env.id=Acrobot-v1") == (None, 475.0)
    assert goal("cartpole", "env.id=Acrobot-v1", "runner.stop_at_return=-90") == (
        -90,
        None,
    )
    text = "defaults: [cartpole, _self_]\nenv: {id: Acrobot-v1}\nrunner: {stop_at_return: -80}\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert goal(str(tmp_path / "mine.yaml")) == (-80, None)


def test_what_an_override_puts_in_place_of_a_value_is_of_the_command_line() -> None:
    (found,) = with_hydra(["hybrid_ppo", "runner.seed.x=1"])
    assert str(found.sources["runner.seed"]) == "command line: runner.seed.x=1"
    assert "hybrid_ppo.yaml" in str(found.sources["runner"])


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        (
            "defaults: [cartpole, _self_]\nrunner:\n  - seed: 3\n",
            "wrong-type",
            "runner: {seed: 3}",
        ),
        ("defaults: cartpole\n", "bad-config", "defaults: [cartpole, _self_]"),
        (
            "defaults: [cartpole, _self_]\nrunner: {seed: 3\n",
            "bad-yaml",
            "close it with '}'",
        ),
        (
            "defaults: [cartpole, _self_]\nrunner:\n seed: 3\n   output_dir: x\n",
            "bad-yaml",
            "indent this line",
        ),
        ("defaults:\n  - cartpole\n  -_self_\n", "bad-yaml", "key: value"),
        (
            "defaults: [cartpole, _self_]\nalgorithm: {gamma: 0,99}\n",
            "unknown-key",
            "gamma: 0.99",
        ),
        (
            "defaults: [cartpole, _self_]\nalgorithm: {gamma: 0,075}\n",
            "unknown-key",
            "gamma: 0.075",
        ),
    ],
)
def test_a_file_that_is_no_config_has_a_fix(
    text: str, code: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        text, encoding="utf-8", errors="surrogateescape"
    )
    with pytest.raises(ConfigError) as caught:
        prepare_composed(with_hydra([str(tmp_path / "mine.yaml")])[0])
    (problem,) = caught.value.problems
    assert problem.code == code
    assert str(problem.fix).startswith(fix)


@pytest.mark.parametrize("encoding", ["UTF-16", "ISO-8859-1"])
@pytest.mark.parametrize("wrong", ["mine", "base"])
def test_a_file_that_is_not_utf_8_is_by_its_fix(
    encoding: str, wrong: str, tmp_path: Path
) -> None:
    """Also one that the named file extends."""
    texts = {
        "mine": "defaults: [base, _self_]\n",
        "base": "# caf\xe9\ndefaults: [cartpole, _self_]\nrunner: {seed: 3}\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_bytes(
            f"# \xe9\n{text}".encode(encoding if name == wrong else "UTF-8")
        )
    with pytest.raises(
        ConfigError, match=f"{wrong}.yaml: is no text in UTF-8"
    ) as caught:
        with_hydra([str(tmp_path / "mine.yaml")])
    subprocess.run(
        str(caught.value.problems[0].fix).partition("   ")[0],
        shell=True,
        check=True,
        cwd=Path.cwd(),
    )
    assert with_hydra([str(tmp_path / "mine.yaml")])[0].mapping["runner"]["seed"] == 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_a_file_of_another_editor_is_read(begin: str, end: str, tmp_path: Path) -> None:
    text = f"{begin}defaults: [cartpole, _self_]{end}runner: {{seed: 3}}{end}"
    (tmp_path / "mine.yaml").write_bytes(text.encode())
    assert with_hydra([str(tmp_path / "mine.yaml")])[0].mapping["runner"]["seed"] == 3


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["cartpole", "runner.seed", "=", "3"], "runner.seed=3"),
        (["cartpole", "runner.seed: 3"], "runner.seed=3"),
        (["cartpole.yml"], "cartpole"),
        (["configs/cartpole.yaml"], "cartpole"),
        (["help"], "--help"),
        (["cartpole", "resume=true"], "resume=auto"),
        (["cartpole", "runner.sinks=none"], "'runner.sinks=[]'"),
        pytest.param(
            ["cartpole", "env.id=cartpole"],
            "env.id=CartPole-v1",
            marks=needs("gymnasium"),
        ),
        pytest.param(
            ["cartpole", "env.id=CartPole-v7"],
            "env.id=CartPole-v1",
            marks=needs("gymnasium"),
        ),
    ],
)
def test_words_that_are_typed_wrong_have_a_fix_that_works(
    words: list[str], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepare_composed(with_hydra(words)[0])
    assert [problem.pasted for problem in caught.value.problems] == [fix]
    if fix != "--help":
        pasted = shlex.split(fix)
        with_hydra(pasted if len(words) == 1 else ["cartpole", *pasted])


@pytest.mark.parametrize("start", ["${oc.env:NO_SUCH_PLACE}/", "", "./"])
def test_a_config_of_another_program_names_folders_of_its_project(
    tmp_path: Path, start: str
) -> None:
    for folder, text in (("config/model", "size: 7\n"), ("tests/e2e", "")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "small.yaml").write_text(text, encoding="utf-8")
    file = tmp_path / "tests" / "e2e" / "own.yaml"
    file.write_text(
        f"defaults: [model/small@actor.model]\nhydra:\n  searchpath: ['file://{start}config']\n",
        encoding="utf-8",
    )
    composed = with_defaults(file)
    assert composed is not None
    assert composed.mapping["actor"] == {"model": {"size": 7}}


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("hydra.run.dir=outputs/x", "runner.output_dir=outputs/x"),
        ("hydra.sweep.dir=out", "runner.output_dir=out"),
        ("hydra.job.name=mine", "leave out hydra.job.name=mine"),
        ("hydra/launcher=joblib", "leave out hydra/launcher=joblib"),
        ("+hydra.job.chdir=true", "leave out +hydra.job.chdir=true"),
    ],
)
def test_a_key_of_hydra_without_effect_is_refused(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_hydra(["hybrid_ppo", word])
    (problem,) = caught.value.problems
    assert (problem.what, problem.fix) == ("has no effect", fix)


def test_keys_of_hydra_in_a_file_are_refused_with_their_lines(tmp_path: Path) -> None:
    """But for the folders that are searched for configs."""
    text = "defaults: [hybrid_ppo, _self_]\nhydra:\n  run: {dir: outputs}\n  searchpath: []\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra([str(tmp_path / "mine.yaml")])
    (problem,) = caught.value.problems
    assert problem.key == "hydra.run.dir"
    assert str(problem.source).endswith("mine.yaml:3")
    assert str(problem.fix).startswith("runner.output_dir: outputs  ")


LINES = "    - actor: 0-7\n    - env: 0-3\n    - rollout: 4-7\n"


@pytest.mark.parametrize(
    "lines",
    [LINES, LINES.replace("- ", "- '", 3).replace("\n", "'\n")],
    ids=["blocks", "texts"],
)
def test_a_placement_written_as_a_list_over_defaults_becomes_a_block(
    lines: str, tmp_path: Path
) -> None:
    above = "defaults: [hybrid_ppo, _self_]\ncluster:\n"
    file = tmp_path / "mine.yaml"
    file.write_text(f"{above}  component_placement:\n{lines}", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra([str(file)])
    (problem,) = caught.value.problems
    assert problem.key == "cluster.component_placement"
    assert problem.fix == "component_placement: {actor: 0-7, env: 0-3, rollout: 4-7}", (
        problem
    )
    file.write_text(f"{above}  {problem.fix}\n", encoding="utf-8")
    (job,) = with_hydra([str(file)])
    assert prepare_composed(job).plan.placement.world_size("actor") == 8


@pytest.mark.parametrize("place", ["0-3", "all", "part 1/2 of 8"])
def test_a_component_that_is_placed_at_the_top_of_a_file(
    place: str, tmp_path: Path
) -> None:
    """`actor: 0-3` over defaults: the block of the component is meant to stay, and its place to change."""
    file = tmp_path / "mine.yaml"
    above = "defaults: [hybrid_ppo, _self_]\n"
    file.write_text(f"{above}actor: {place}\n", encoding="utf-8")
    (job,) = with_hydra([str(file)])
    with pytest.raises(ConfigError) as caught:
        prepare_composed(job)
    (problem,) = caught.value.problems
    assert problem.key == "actor"
    line, remark = str(problem.fix).split(" " * 8)
    assert line == f"cluster.component_placement.actor: {place}"
    assert remark == "(a line without indent, in place of actor)"
    file.write_text(f"{above}{line}\n", encoding="utf-8")
    (mended,) = with_hydra([str(file)])
    assert mended.mapping["actor"]["optimizer"]["lr"] == 3.0e-3
    prepare_composed(mended)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("actor=0-3", "cluster.component_placement.actor=0-3"),
        ("cluster.env=4-7", "cluster.component_placement.env=4-7"),
        ("rollout.gpus=4-7", "cluster.component_placement.rollout=4-7"),
    ],
)
def test_a_place_that_is_typed_for_a_component(word: str, fix: str) -> None:
    (job,) = with_hydra(["hybrid_ppo", word])
    with pytest.raises(ConfigError) as caught:
        prepare_composed(job)
    assert [problem.fix for problem in caught.value.problems] == [fix]
    (mended,) = with_hydra(["hybrid_ppo", fix])
    prepare_composed(mended)


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("algorithm:\n  gamma = 0.98", "gamma: 0.98"),
        ("algorithm.gamma = 0.98", "algorithm.gamma: 0.98"),
        ("algorithm:\n  gamma:0.98\n  epochs:3", "gamma: 0.98\nepochs: 3"),
        ("algorithm:\n  gamma = 0.98\n  epochs = 3", "gamma: 0.98\nepochs: 3"),
        ("algorithm:\n  epochs: 3// passes", "epochs: 3"),
        ("runner:\n  output_dir: $HOME/runs", "output_dir: ${oc.env:HOME}/runs"),
        ("runner:\n  output_dir: ${HOME}/runs", "output_dir: ${oc.env:HOME}/runs"),
        ("runner:\n  output_dir: ${env:HOME}/runs", "output_dir: ${oc.env:HOME}/runs"),
        ("actor: {model: {memory: no}}", "memory: none"),
        ("actor: {sync: {verify_every: off}}", "verify_every: 0"),
        ("---\nalgorithm: {gamma: 0.9}", "remove the line ---"),
        ("```yaml\nalgorithm: {gamma: 0.9}", "remove the lines with ```"),
        ("algorithm:\n\u00a0\u00a0gamma: 0.98", "replace them by blanks"),
    ],
)
def test_slips_of_yaml_have_a_fix(lines: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [hybrid_ppo, _self_]\n{lines}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        prepare_composed(*with_hydra([str(file)]))
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        ("defaults: {config: hybrid_ppo}", "defaults: [hybrid_ppo, _self_]"),
        (
            "defaults:\n  - ppo\n  - task: hopper\n  - _self_",
            "- override task: hopper",
        ),
    ],
)
def test_defaults_in_another_form_have_a_fix(
    lines: str, fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{lines}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra([str(file)])
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("Qwen/Qwen3-32B", True),
        ("/data/Qwen3-8B-mine", False),
        ("models/finetuned", False),
    ],
)
def test_a_model_of_another_size_does_not_keep_declared_sizes(
    path: str, refused: bool
) -> None:
    """The plan would be that of the model whose sizes are declared."""
    (job,) = with_hydra(["grpo_qwen3_8b", f"actor.model.path={path}"])
    _, problems = try_config(job.mapping, job.sources)
    assert [problem.key for problem in problems] == ["actor.model.path"] * refused
    (mended,) = with_hydra(["grpo_qwen3_8b", "model@actor.model=llama_3_8b"])
    assert try_config(mended.mapping, mended.sources)[1] == []
