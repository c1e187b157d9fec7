"""Shell completion in a real shell: commands, configs, keys of overrides and their values."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.__main__ import COMMANDS
from rlplace.cli import completion
from rlplace.config import compose
from rlplace.config.completions import override_keys

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the completion scripts of all shells, as `completion.bash` and so on."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in completion.SHELLS:
        (folder / f"completion.{shell}").write_text(completion.script(shell), "utf-8")
    return folder


def in_bash(scripts: Path, line: str, folder: Path) -> list[str]:
    """Return what bash offers for a line that has been typed in a folder."""
    asked = subprocess.run(
        [
            "bash",
            "--norc",
            "-c",
            'source "$1"; COMP_LINE=$2; COMP_POINT=${#2}; _rlplace; printf "%s\\n" "${COMPREPLY[@]}"',
            "bash",
            str(scripts / "completion.bash"),
            line,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stderr == ""
    return [word for word in asked.stdout.split("\n") if word]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rlplace tr", ["train "]),
        ("rlplace train hybrid_pp", ["hybrid_ppo ", "hybrid_ppo_cartpole "]),
        ("rlplace train hybrid_ppo actor.opt", ["actor.optimizer."]),
        ("rlplace train hybrid_ppo actor.optimizer.l", ["actor.optimizer.lr="]),
        ("rlplace train hybrid_ppo +algorithm.gam", ["+algorithm.gamma="]),
        # bash splits words at `=`, and takes what stands behind it
        (
            "rlplace train hybrid_ppo actor.optimizer.schedule=",
            ["constant ", "linear ", "cosine "],
        ),
        ("rlplace train hybrid_ppo ++dry_run=", ["true ", "false "]),
        ("rlplace plan hybrid_ppo cluster=8", ["8xH100 "]),
        ("rlplace train hopp", ["hopper "]),
        ("rlplace train task=walk", ["walker2d "]),
        ("rlplace train hopper placement=hy", ["hybrid "]),
        (
            "rlplace plan x cluster.component_placement.env=",
            ["all ", "rest ", "cpu "],
        ),
        ("rlplace train task=hop", ["hopper "]),
        ("rlplace train hop", ["hopper "]),
        ("rlplace train hopper placement=one", ["one_process "]),
        ("rlplace plan hybrid_ppo --fo", ["--format "]),
        ("rlplace plan --format s", ["svg "]),
        ("rlplace runs --format ", ["text ", "json "]),
        ("rlplace plan explain ray-die", ["ray-died "]),
        ("rlplace search x objective=a", ["accelerator_seconds "]),
        ("rlplace evaluate ep", ["episodes="]),
        ("rlplace evaluate ru", ["runs/"]),
        ("rlplace train mi", ["minigrid ", "mine.yaml"]),
        ("rlplace completion f", ["fish "]),
        ("scripts/train hybrid_ppo algorithm.gam", ["algorithm.gamma="]),
        ("rlplace train hybrid_ppo no.such.ke", []),
    ],
)
def test_bash_offers(
    scripts: Path, tmp_path: Path, line: str, offered: list[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    assert sorted(in_bash(scripts, line, tmp_path)) == sorted(offered)


def test_all_commands_configs_and_keys_are_offered(
    scripts: Path, tmp_path: Path
) -> None:
    commands = in_bash(scripts, "rlplace ", tmp_path)
    assert {word.strip() for word in commands} - {"--help", "--version"} == {*COMMANDS}
    first = {word.strip() for word in in_bash(scripts, "rlplace train ", tmp_path)}
    assert {*compose.config_names()} <= first
    assert {"actor.", "cluster.", "cluster=", "dry_run=", "runner."} <= first
    # A config that is named already is not offered again
    assert "hybrid_ppo " not in in_bash(scripts, "rlplace train cartpole ", tmp_path)
    for key in ("algorithm.gamma", "runner.seed", "faults.restarts", "env.id"):
        assert f"{key}=" in in_bash(scripts, f"rlplace plan x {key}", tmp_path)


def test_a_line_is_typed_by_tabs_in_an_interactive_bash(
    scripts: Path, tmp_path: Path
) -> None:
    """`complete` is in force, and the value behind `=` is completed in place."""
    shell, master = pty.fork()
    if shell == 0:
        os.chdir(tmp_path)
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    try:
        os.write(master, f"source {scripts / 'completion.bash'}\n".encode())
        os.write(master, b"rlplace() { printf 'typed: %s\\n' \"$*\"; }\n")
        os.write(master, b"rlplace tr\thybrid_ppo_\tactor.opt\tsc\tcon\t\n")
        line = "train hybrid_ppo_cartpole actor.optimizer.schedule=constant"
        read_until(master, f"\ntyped: {line}\n")
    finally:
        os.close(master)
        os.waitpid(shell, 0)


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal shows until `text` is in it; an AssertionError after DEADLINE_S."""
    shown = ""
    end = time.monotonic() + DEADLINE_S
    while text not in shown.replace("\r", ""):
        left = end - time.monotonic()
        assert left > 0, shown
        if select.select([terminal], [], [], left)[0]:
            shown += os.read(terminal, 4096).decode()
    return shown.replace("\r", "")


def test_fish_offers(scripts: Path, tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    line = "rlplace train hybrid_ppo actor.optimizer.schedule=co"
    asked = subprocess.run(
        [
            fish,
            "--no-config",
            "-c",
            f"source {scripts / 'completion.fish'}; complete -C '{line}'",
        ],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    values = ["constant", "cosine"]
    assert asked.stdout.split() == [
        f"actor.optimizer.schedule={value}" for value in values
    ]


def test_zsh_reads_the_script(scripts: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    read = subprocess.run([zsh, "-n", str(scripts / "completion.zsh")], check=False)
    assert read.returncode == 0


def options_in_help(command: str) -> Iterator[str]:
    """Yield the options that the help of a command lists."""
    shown = subprocess.run(
        [sys.executable, "-m", f"rlplace.{command}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    yield from re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", ["runs", "report", "evaluate", "export", "profile"])
def test_the_options_are_those_of_the_help(command: str) -> None:
    assert {*completion.COMMANDS[command].options} == {*options_in_help(command)}


def test_the_words_of_a_command_are_its_own() -> None:
    assert {*completion.COMMANDS} == {*COMMANDS}
    assert {*completion.COMMANDS["train"].options} <= compose.FLAGS


def test_values_are_those_that_a_config_takes() -> None:
    keys = override_keys()
    assert keys["actor.optimizer.schedule"] == ("constant", "linear", "cosine")
    assert keys["algorithm.normalize_rewards"] == ("true", "false")
    assert keys["algorithm.gamma"] == ()
    assert "cluster.nodes" in keys
    assert not any(key.startswith("cluster.nodes.") for key in keys)


def test_the_script_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from rlplace.cli import completion; completion.script('bash');"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert asked.stdout == "[]\n"
