"""Launch scripts that are run under bash: what they would launch, and that they reach nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlplace.errors import ConfigError
from rlplace.imports.sandbox import Ran, run_script
from rlplace.imports.scripts import Reading, ran_script
from tests.kernel import lacks_namespaces

SCRIPT = """set -xeuo pipefail
source /nowhere/conda.sh
cd /nowhere/else
pip install nothing
MODEL=${MODEL:-Qwen/Qwen3-8B}
case ${DEVICE:-gpu} in
  npu) TENSOR=4 ;;
  *) TENSOR=2 ;;
esac
WORDS=(trainer.nnodes=$((TENSOR * 2)) data.train_files="['$HOME/a.parquet','b c']")
for SEED in 1 2; do
  python3 -m some.trainer "${WORDS[@]}" seed=$SEED model=$MODEL "$@" 2>&1 | tee log.txt
done
"""


isolated = pytest.mark.skipif(
    lacks_namespaces(), reason="this machine permits no namespaces"
)


def write(folder: Path, text: str) -> Path:
    script = folder / "run.sh"
    script.write_text(text, encoding="utf-8")
    return script


def words(ran: Ran) -> list[tuple[str, ...]]:
    return [launch.words for launch in ran.launches]


@pytest.mark.parametrize("trusted", [True, pytest.param(False, marks=isolated)])
def test_the_words_are_those_that_bash_gives(tmp_path: Path, trusted: bool) -> None:
    script = write(tmp_path, SCRIPT)
    ran = run_script(script, ["x=1 2"], {"MODEL": "mine"}, trusted=trusted)
    files = f"data.train_files=['{Path.home()}/a.parquet','b c']"
    assert ran.code == 0, ran.said
    assert words(ran) == [
        (
            "-m",
            "some.trainer",
            "trainer.nnodes=4",
            files,
            f"seed={n}",
            "model=mine",
            "x=1 2",
        )
        for n in (1, 2)
    ]
    assert {launch.program for launch in ran.launches} == {"python3"}
    assert ran.isolated is not trusted
    assert ran.unknown == ("source /nowhere/conda.sh", "cd /nowhere/else", "pip")


@isolated
def test_an_isolated_script_reaches_nothing_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("hidden", encoding="utf-8")
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    (project / "kept").write_text("whole", encoding="utf-8")
    script = write(
        project,
        f"""
echo changed > kept
rm -f kept
echo new > /tmp/of_a_script; mkdir -p ~/of_a_script
python3 --key "$(cat {tmp_path}/secret/key)" --home "$(ls -A ~)" --variable "$OUTSIDE"
/usr/bin/python3 --program $(ls /usr/bin/python3.* /usr/bin/gcc 2> /dev/null | grep -c gcc)
(echo > /dev/tcp/127.0.0.1/22) 2> /dev/null && ray --network
python3 --processes "$(ls -d /proc/[0-9]* | wc -l | grep -cE '^[0-9]$|^[0-9][0-9]$')"
""",
    )
    os.environ["OUTSIDE"] = "seen"
    try:
        ran = run_script(script)
    finally:
        del os.environ["OUTSIDE"]
    assert words(ran) == [
        ("--key", "", "--home", "of_a_script", "--variable", ""),
        ("--program", "0"),
        ("--processes", "1"),
    ]
    assert (project / "kept").read_text(encoding="utf-8") == "whole"
    assert not Path("/tmp/of_a_script").exists()
    assert not (Path.home() / "of_a_script").exists()


@isolated
def test_a_script_without_an_end_is_ended_and_its_launches_are_kept(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, "python3 --a 1\nwhile true; do :; done\n")
    ran = run_script(script)
    assert ran.code != 0
    assert words(ran) == [("--a", "1")]


def test_a_machine_without_namespaces_refuses_and_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "rlplace.imports.sandbox._found"
    paths = {"bash": "/bin/bash"}
    monkeypatch.setattr(
        found, lambda *names: {n: p for n, p in paths.items() if n in names}
    )
    with pytest.raises(ConfigError) as caught:
        run_script(write(tmp_path, "python3 --a 1\n"))
    (problem,) = caught.value.problems
    assert problem.code == "import-script"
    assert "--run-trusted-script" in (problem.fix or "")


TWO = """python3 prepare.py --out x
python3 -m some.trainer a=1 b=2 c=3
ray start --head --port 1
ray job submit --address x -- python3 -m some.trainer a=2 b=3 c=4 d=5
"""


def read(script: Path, launch: int = 0) -> tuple[list[str], tuple[str, ...]]:
    found = ran_script(script, Reading(runs=True, trusted=True, launch=launch))
    return [word for word, _ in found.words], found.notes


def test_the_launch_with_the_most_options_is_taken_unless_another_is_named(
    tmp_path: Path,
) -> None:
    script = write(tmp_path, TWO)
    chosen, notes = read(script)
    assert chosen == ["a=2", "b=3", "c=4", "d=5"]
    assert any("launches 3 programs; number 3 is taken" in note for note in notes)
    assert read(script, 2)[0] == ["a=1", "b=2", "c=3"]
    with pytest.raises(ConfigError, match="no launch with this number") as caught:
        read(script, 4)
    assert caught.value.problems[0].why == "the script has 3 launches"


def test_a_script_that_launches_nothing_says_why(tmp_path: Path) -> None:
    script = write(tmp_path, ': "${MODEL:?name a model}"\npython3 -m t a=1\n')
    with pytest.raises(ConfigError) as caught:
        read(script)
    (problem,) = caught.value.problems
    assert "name a model" in (problem.why or "")


def test_the_config_file_of_a_launch_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text("a: 1\n", encoding="utf-8")
    launch = (
        f"cd {tmp_path}\npython3 train.py --config-path config --config-name=own b=2\n"
    )
    found = ran_script(write(tmp_path, launch), Reading(runs=True, trusted=True))
    assert [word for word, _ in found.words] == ["b=2"]
    assert found.config is not None
    assert found.config.resolve() == (tmp_path / "config" / "own.yaml").resolve()
    assert [source.line for _, source in found.words] == [2]
