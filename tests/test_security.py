"""What docs/security.md says and no other test shows: data runs no code, and who may read and reach what."""

from __future__ import annotations

import ast
import ipaddress
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlplace.config.compose import with_hydra
from rlplace.errors import ConfigError
from rlplace.models.causal_lm import CausalLm, FrozenLm
from rlplace.models.tokenizer import Message, Tokenizer
from rlplace.runtime.run import make_folder
from tests.sources import nodes
from tests.tiny_lm import tiny_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")

# Calls that can run what the bytes say, and the modules that may make them: between processes of one job, all but one.
RUNS_CODE = {
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "cloudpickle.load",
        "cloudpickle.loads",
    ),
    *(
        "torch.load",
        "torch.jit.load",
        "marshal.load",
        "marshal.loads",
        "shelve.open",
        "dill.load",
        "joblib.load",
    ),
    *(
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "eval",
        "exec",
    ),
}
ALLOWED = {
    "comm/codec.py": {"pickle.loads"},  # items of channels
    "comm/network/connection.py": {"pickle.loads"},  # of a server with the job's key
    "comm/network/server.py": {"pickle.loads"},  # of clients with the job's key
    "comm/network/stream.py": {"pickle.loads"},  # of who has the keys of the stream
    "comm/shared_memory/channel.py": {
        "pickle.loads"
    },  # in the job's private folder, like the next
    "comm/weights/buffer.py": {"pickle.loads"},
    # of this process, and a subclass of the loader that makes only values
    "config/composition.py": {"pickle.loads", "yaml.load"},
    "config/yaml_text.py": {"yaml.load"},  # by the safe loader of libyaml
    # answers of the model and their tests, in processes apart
    "envs/text/code/answer.py": {"exec"},
    "envs/text/code/trial.py": {"exec"},
    # of the run itself, in a file without a name that its search process has inherited
    "runtime/search_beside.py": {"pickle.load"},
    "workers/launch/host.py": {"pickle.loads"},  # an exception of the job's own worker
    "workers/ray_launch/actors.py": {
        "cloudpickle.loads"
    },  # the job's own workers, by Ray
    "workers/ray_launch/connections.py": {
        "cloudpickle.loads"
    },  # the same, by sockets in the job's private folder
}


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of functions that are called by a name, with this name, such as "torch.load"."""
    for node in nodes(source):
        if isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            yield name, node


def dotted(called: ast.expr) -> str | None:
    if isinstance(called, ast.Name):
        return called.id
    if isinstance(called, ast.Attribute):
        owner = dotted(called.value)
        return None if owner is None else f"{owner}.{called.attr}"
    return None


def test_what_can_run_code_is_called_on_messages_of_the_job_alone() -> None:
    """By their usual names, which imports may not change: `from pickle import loads` would hide one."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "rlplace").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for name, call in calls(text):
            safe = name == "torch.load" and "weights_only=True" in ast.unparse(call)
            if name in RUNS_CODE and not safe:
                found.setdefault(
                    file.relative_to(ROOT / "rlplace").as_posix(), set()
                ).add(name)
            assert name not in (
                "np.load",
                "numpy.load",
            ) or "allow_pickle=False" in ast.unparse(call), (file, name)
            # Calls are written out where the word is there at all, which is slow
            if "trust_remote_code" in text:
                assert "trust_remote_code=True" not in ast.unparse(call), file
        for node in nodes(text):
            if isinstance(node, ast.ImportFrom) and node.module in (
                "pickle",
                "cloudpickle",
                "marshal",
                "yaml",
            ):
                assert (
                    not {f"{node.module}.{alias.name}" for alias in node.names}
                    & RUNS_CODE
                ), file
    assert found == ALLOWED


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self._file, "w")


def opened(folder: Path) -> FrozenLm[CausalLm]:
    return FrozenLm(CausalLm, folder, "fp32", None, torch.device("cpu"))


def test_a_model_without_safetensors_is_refused_and_not_unpickled(
    tmp_path: Path,
) -> None:
    folder, touched = tiny_model(tmp_path / "model"), tmp_path / "touched"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises(ConfigError, match="it has neither model"):
        opened(folder)
    assert not touched.exists()


def test_code_that_comes_with_a_model_is_not_imported(tmp_path: Path) -> None:
    folder, touched = tiny_model(tmp_path / "model"), tmp_path / "touched"
    (folder / "evil.py").write_text(
        f"open({str(touched)!r}, 'w')\nclass Evil: pass\n", encoding="utf-8"
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = dict.fromkeys(
        ("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil"
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    opened(folder)
    assert not touched.exists()


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_a_chat_template_cannot_leave_its_sandbox(
    tmp_path: Path, template: str
) -> None:
    folder = tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(folder).chat([Message("user", "Hi")])
    assert caught.value.codes == ("chat-template-refused",)


def test_yaml_makes_plain_values_only(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    touched, file = tmp_path / "touched", tmp_path / "configs" / "hybrid_ppo.yaml"
    text = (
        file.read_text(encoding="utf-8")
        + f"\nx: !!python/object/apply:builtins.open [{touched}, w]\n"
    )
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        with_hydra(["--config-path", str(file.parent), "--config-name", "hybrid_ppo"])
    assert caught.value.codes == ("bad-yaml",)
    assert not touched.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755)])
def test_who_may_read_a_run_is_decided_by_the_umask(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        folder = make_folder(tmp_path / "runs")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


LISTENING = """
import psutil
from rlplace.config.blocks.machines import RayConfig
from rlplace.workers.ray_launch.session import RaySession

session = RaySession(RayConfig())
session.start()
try:
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(connection.laddr.ip)
finally:
    session.close()
"""


@pytest.mark.slow
def test_ray_that_is_started_for_a_run_is_reached_from_this_machine_only() -> None:
    # In a process of its own: Ray decides where to listen when it is imported, as it may have been here.
    ran = subprocess.run(
        [sys.executable, "-c", LISTENING],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    listening = [ipaddress.ip_address(line) for line in ran.stdout.splitlines()]
    assert listening, "it serves its workers"
    for address in listening:
        inside = getattr(address, "ipv4_mapped", None) or address
        assert inside.is_loopback


def test_the_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
    for row in PAGE.splitlines():
        if row.startswith("| ") and "::" not in row:
            assert row.startswith(("| what", "|---", "| not protected:")), (
                f"no test shows this: {row}"
            )
