"""What a release has: types, facts for the index, tests in the sdist, the check on GitHub, an image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import rlplace

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(rlplace.__file__).parent / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["rlplace"]
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_every_file_that_the_package_reads_is_installed_with_it() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    package = ROOT / "rlplace"
    installed = set()
    for name, patterns in data.items():
        for pattern in patterns:
            installed |= set(ROOT.joinpath(*name.split(".")).glob(pattern))
    # Configs are a link: builds copy what it leads to
    beside = [
        path
        for path in package.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and "configs" not in path.parts
    ]
    assert len(beside) > 20
    assert set(beside) <= installed


def test_the_classifiers_name_the_versions_of_python_that_are_allowed() -> None:
    least, below = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    named = []
    for classifier in PROJECT["project"]["classifiers"]:
        named += re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", classifier)
    assert [int(minor) for minor in named] == list(range(int(least), int(below)))
    assert PROJECT["project"]["keywords"]


def test_every_file_names_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["project"]["version"] == rlplace.__version__
    assert citation["version"] == rlplace.__version__


def test_the_readme_of_the_package_page_has_absolute_links_alone() -> None:
    address = "https://example.org/owner/name"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "package_readme.py"), address],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    version = rlplace.__version__
    assert f"]({address}/raw/v{version}/docs/plan.svg)" in done.stdout
    assert f"]({address}/blob/v{version}/docs/llm.md#on-gpus)" in done.stdout
    targets = re.findall(r"\]\(([^)\s]+)\)", done.stdout)
    assert len(targets) > 50
    assert [target for target in targets if not target.startswith("https://")] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "```yaml" in done.stdout
    assert done.stdout.count("```") == readme.count("```")


def test_github_runs_the_check_that_people_run() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_the_image_has_dependencies_in_a_layer_before_the_code_and_a_user() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    before, copied, after = text.partition("\nCOPY . .\n")
    assert copied
    assert "-r pyproject.toml" in before
    assert "--no-deps -e ." in after
    assert re.search(r"^USER ", after, re.MULTILINE)
    extras = re.findall(r"--extra (\w+)", before)
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_sdist_has_the_tests_and_what_they_read(tmp_path: Path) -> None:
    # A copy: a build writes files beside the source
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    files = {name for name in tracked if name}
    source = tmp_path / "source"
    for name in files:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
        else:
            target.unlink()
            target.symlink_to((ROOT / name).readlink())
    call = f"build_meta.build_sdist({str(tmp_path)!r})"
    build = f"from setuptools import build_meta; {call}"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, check=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert files - packed <= {"rlplace/configs"}
    assert "rlplace/configs/hybrid_ppo.yaml" in packed
