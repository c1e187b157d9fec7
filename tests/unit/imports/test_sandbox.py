"""Launch scripts that are run under bash: what they would launch, and that they reach nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace.errors import ConfigError
from rlplace.imports import sandbox
from rlplace.imports.sandbox import Ran, project_of, run_script
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ulimit -t 10 " in sandbox._LIMITS
    one_second = sandbox._LIMITS.replace("-t 10 ", "-t 1 ")
    monkeypatch.setattr(sandbox, "_LIMITS", one_second)
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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a secret file, which is HOME."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".key").write_text("hidden", encoding="utf-8")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_home_is_no_project(home: Path) -> None:
    (home / ".git").mkdir()
    (home / "jobs").mkdir()
    script = home / "jobs" / "run.sh"
    assert project_of(script) == home / "jobs"
    (home / "jobs" / ".git").mkdir()
    assert project_of(home / "jobs" / "deep" / "run.sh") == home / "jobs"


@isolated
def test_a_script_in_a_home_sees_itself_alone(home: Path) -> None:
    text = 'echo new > own\npython3 --seen "$(echo $(ls -A))" --key "$(cat .key)"\n'
    ran = run_script(write(home, text))
    assert words(ran) == [("--seen", "own run.sh", "--key", "")]
    assert sorted(path.name for path in home.iterdir()) == [".key", "run.sh"]


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize(("owner", "group"), [(1, 1), (0, 1)])
def test_a_script_writes_in_folders_of_another_owner_or_group(
    tmp_path: Path, owner: int, group: int
) -> None:
    folder = tmp_path / "checkout" / "examples"
    folder.mkdir(parents=True)
    (folder.parent / "setup.py").touch()
    os.chown(folder, owner, group)
    text = 'set -e\ncd "$(dirname "$0")"\nmkdir logs\necho a > logs/a\npython3 --a 1\n'
    ran = run_script(write(folder, text))
    assert words(ran) == [("--a", "1")], ran.said
    assert [path.name for path in folder.iterdir()] == ["run.sh"]


@isolated
def test_a_script_that_forks_without_an_end_leaves_its_launches(
    tmp_path: Path,
) -> None:
    text = """python3 --a 1
for N in $(seq 1000); do (read -t 5 LINE <> <(:)) & done
"""
    assert words(run_script(write(tmp_path, text))) == [("--a", "1")]


@isolated
def test_a_limit_that_cannot_be_raised_does_not_end_a_script(tmp_path: Path) -> None:
    text = "set -e\nulimit -n 1048576\nulimit -l unlimited\npython3 --a 1\n"
    assert words(run_script(write(tmp_path, text))) == [("--a", "1")]


def test_a_trusted_script_writes_in_a_folder_that_it_makes(tmp_path: Path) -> None:
    text = (
        f"set -e\nmkdir -p {tmp_path}/logs\necho a > {tmp_path}/logs/a\npython3 --a 1\n"
    )
    assert words(run_script(write(tmp_path, text), trusted=True)) == [("--a", "1")]


def test_ctrl_c_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def communicate(self, *_: Any, **__: Any) -> tuple[bytes, bytes]:
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_script(write(tmp_path, "while :; do :; done\n"), trusted=True)
    assert started[0].wait(30) < 0


def refusal(tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text of the error of a machine whose `unshare` prints a line and ends."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "unshare"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    script = write(tmp_path, "python3 --a 1\n")
    with pytest.raises(ConfigError) as caught:
        run_script(script)
    (problem,) = caught.value.problems
    assert problem.got == str(script)
    assert (problem.fix or "").startswith("leave out --run-script; or use")
    return problem.why or ""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "unshare: unshare failed: Operation not permitted",
            "namespaces are refused here, as in most containers "
            "(unshare: unshare failed: Operation not permitted)",
        ),
        (
            "mount: /x: permission denied.\n  dmesg(1) may have more information",
            "namespaces are refused here, as in most containers "
            "(mount: /x: permission denied.)",
        ),
        (
            "unshare: unrecognized option: kill-child",
            "its namespaces could not be set up: unshare: unrecognized option: kill-child",
        ),
        ("", "its namespaces could not be set up: no reason is given"),
    ],
)
def test_a_refusal_says_what_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, why: str
) -> None:
    monkeypatch.setattr(sandbox, "_SETTINGS", ())
    assert refusal(tmp_path, said, monkeypatch) == why


@isolated
def test_a_machine_with_no_namespaces_left_names_the_setting(tmp_path: Path) -> None:
    script = write(tmp_path, "python3 -m verl.trainer.main_ppo trainer.nnodes=1\n")
    inner = (
        "echo 0 > /proc/sys/user/max_user_namespaces; "
        f"exec {sys.executable} -m rlplace.plan import verl {script} "
    )
    command = ["unshare", "--map-root-user", "bash", "-c"]
    refused = subprocess.run(
        [*command, inner + "--run-script"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "user.max_user_namespaces is 0" in refused.stderr
    assert "sysctl -w user.max_user_namespaces=" in refused.stderr
    for way in ("--run-trusted-script", ""):
        done = subprocess.run(
            [*command, inner + way], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


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


def test_a_script_that_ends_early_says_so(tmp_path: Path) -> None:
    script = write(tmp_path, "python3 -m t a=1\necho too few >&2\nexit 3\n")
    _, notes = read(script)
    assert "It ended with 3: too few; later launches are not known." in notes


def test_a_script_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    endless = "read -t 60 LINE <> <(:)\n"
    _, notes = read(write(tmp_path, f"python3 -m t a=1\n{endless}"))
    assert any(note.startswith("It was ended after") for note in notes)
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path, endless))
    assert (caught.value.problems[0].why or "").startswith("it was ended after")


def test_python_that_reads_a_text_is_no_launch(tmp_path: Path) -> None:
    text = "uv run --frozen --extra math python3 - <<< 'print(1)'\npython3 -m t a=1\n"
    assert read(write(tmp_path, text))[0] == ["a=1"]


def test_the_config_file_beside_a_module_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "library" / "async" / "config"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("a: 1\n", encoding="utf-8")
    launch = f"cd {tmp_path}\npython3 -m library.async.main --config-path=config --config-name=own.yaml b=2\n"
    found = ran_script(write(tmp_path, launch), Reading(runs=True, trusted=True))
    assert found.config is not None
    assert found.config.resolve() == (folder / "own.yaml").resolve()


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
