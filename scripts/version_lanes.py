"""`scripts/lanes [LANE ...] [--python 3.12]`: this project with other versions of its libraries.

Each lane is a virtual environment of its own below .lanes/, where the fast tests are run, and jobs:

    planner    what `pip install -e .` brings, its oldest versions: no torch, no Ray
    oldest     the oldest versions that pyproject.toml admits
    locked     those of requirements/lock.txt, which scripts/setup takes
    newest     the newest that it admits
    existing   a torch with a version of its own, as images have, which must stay as it is

Exit codes: 0 all lanes are green, 1 one is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK, OVERRIDES = (
    ROOT / "requirements/lock.txt",
    ROOT / "requirements/cpu-overrides.txt",
)
EXTRAS = "run,envs,llm,text"
TOOLS = (
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "jsonschema>=4.20",
    "psutil>=6",
)
OWN_TORCH = "2.11.0a0+nv25.11"  # as in an image of NVIDIA's
PLANNER_TESTS = (
    "tests/unit/placement",
    "tests/unit/config",
    "tests/unit/test_doctor.py",
    "tests/unit/test_tried.py",
)
TESTS = (
    *(
        "tests/unit/config",
        "tests/unit/placement/test_plan.py",
        "tests/unit/test_prepare.py",
    ),
    *(
        "tests/unit/test_doctor.py",
        "tests/unit/test_tried.py",
        "tests/unit/test_commands.py",
    ),
    *(
        "tests/unit/algo",
        "tests/unit/envs",
        "tests/unit/comm/network",
        "tests/unit/comm/test_codec.py",
    ),
    *(
        "tests/unit/models/test_causal_lm.py",
        "tests/unit/models/test_packed.py",
        "tests/unit/models/test_checkpoint.py",
    ),
    *("tests/unit/workers/engines/test_transformers.py", "tests/unit/workers/training"),
    *(
        "tests/unit/workers/test_ray_session.py",
        "tests/unit/workers/test_fork.py",
        "tests/unit/workers/test_connections.py",
    ),
)
SHORT = ("runner.total_iterations=2",)
TEST_S, RUN_S = 1200, 300


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A set of versions: what `uv pip install` is given for it."""

    name: str
    arguments: tuple[str, ...]
    project: str = f".[{EXTRAS}]"
    tests: tuple[str, ...] = TESTS
    own_torch: bool = False

    @property
    def plans_only(self) -> bool:
        return self.tests == PLANNER_TESTS


LANES = {
    lane.name: lane
    for lane in (
        Lane(
            name="planner",
            arguments=("--resolution", "lowest-direct"),
            project=".",
            tests=PLANNER_TESTS,
        ),
        Lane(name="oldest", arguments=("--resolution", "lowest-direct")),
        Lane(
            name="locked",
            arguments=("--constraint", str(LOCK), "--overrides", str(OVERRIDES)),
        ),
        Lane(name="newest", arguments=("--upgrade",)),
        Lane(name="existing", arguments=(), own_torch=True),
    )
}


class LaneError(Exception):
    """A lane is not green; says at what."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/lanes", description="Tries other versions of the libraries."
    )
    parser.add_argument(
        "lanes", nargs="*", metavar="LANE", help=f"{', '.join(LANES)}; none: all"
    )
    about = "3.11, 3.12, 3.13, or an interpreter's path; as in .venv unless given"
    parser.add_argument("--python", default=sys.executable, help=about)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".lanes", help="of the environments"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only find out which versions would be installed",
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args(argv)
    unknown = [name for name in options.lanes if name not in LANES]
    if unknown:
        parser.error(f"no lane {unknown[0]}: {', '.join(LANES)}")
    failed = []
    own = options.python == sys.executable
    label = (
        f"{sys.version_info.major}.{sys.version_info.minor}"
        if own
        else Path(options.python).name
    )
    for name in options.lanes or LANES:
        began, place = time.monotonic(), options.folder / f"{name}-{label}"
        try:
            if options.dry_run:
                said = resolve(LANES[name], place, options.python)
            else:
                said = travel(LANES[name], place, options.python)
        except LaneError as error:
            failed.append(name)
            said = f"FAILED: {error}"
        print(
            f"{name:<9} Python {label}: {said}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if options.dry_run or not options.keep:
            shutil.rmtree(place, ignore_errors=True)
    return 1 if failed else 0


def resolve(lane: Lane, place: Path, python: str) -> str:
    """Find versions for a lane, without installing any."""
    made(place, python)
    listed = install(
        lane, place, ["--dry-run", *lane.arguments, "--editable", lane.project, *TOOLS]
    )
    return f"resolves: {versions(listed)}"


def travel(lane: Lane, place: Path, python: str) -> str:
    """Install a lane, run its tests and its jobs. Raises LaneError at the first that fails."""
    made(place, python)
    if lane.own_torch:
        install(
            lane,
            place,
            [
                "--constraint",
                str(LOCK),
                "--overrides",
                str(OVERRIDES),
                "torch",
                "numpy",
            ],
        )
        rename_torch(place)
    install(lane, place, [*lane.arguments, "--editable", lane.project, *TOOLS])
    if lane.own_torch:
        if torch_folder(place).name != f"torch-{OWN_TORCH}.dist-info":
            raise LaneError("installing this project replaces the torch that is there")
        run(
            [
                *uv(),
                "pip",
                "uninstall",
                "--quiet",
                "--python",
                interpreter(place),
                "rlplace",
            ],
            RUN_S,
        )
        install(
            lane, place, ["--no-deps", "--editable", "."]
        )  # as where nothing else may be touched
    listed = run([*uv(), "pip", "freeze", "--python", interpreter(place)], RUN_S)
    tested = test(lane, place)
    if lane.plans_only:
        plan(place)
        return f"{tested}, a plan; {versions(listed)}"
    train(place, "cartpole", "cluster.launcher=inline")
    train(place, "hybrid_ppo")
    return f"{tested}, inline and Ray runs; {versions(listed)}"


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(place: Path, python: str) -> None:
    shutil.rmtree(place, ignore_errors=True)
    run(
        [
            *uv(),
            "venv",
            "--quiet",
            "--no-python-downloads",
            "--python",
            python,
            str(place),
        ],
        RUN_S,
    )


def install(lane: Lane, place: Path, arguments: Sequence[str]) -> str:
    return run(
        [*uv(), "pip", "install", "--python", interpreter(place), *arguments], TEST_S
    )


def rename_torch(place: Path) -> None:
    """Give the installed torch a version of its own: to resolvers it is another build, which no index has."""
    folder = torch_folder(place)
    metadata = folder / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.unlink()  # the installed file may be a link into a cache
    metadata.write_text(
        re.sub(r"(?m)^Version: .*$", f"Version: {OWN_TORCH}", text, count=1),
        encoding="utf-8",
    )
    folder.rename(folder.with_name(f"torch-{OWN_TORCH}.dist-info"))


def torch_folder(place: Path) -> Path:
    found = sorted(place.glob("lib/python*/site-packages/torch-*.dist-info"))
    if len(found) != 1:
        raise LaneError(f"{len(found)} torches are installed")
    return found[0]


def test(lane: Lane, place: Path) -> str:
    words = [
        interpreter(place),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *lane.tests,
    ]
    *_, last = run(words, TEST_S).strip().splitlines()
    return last.partition(" in ")[0].strip("= ")


def plan(place: Path) -> None:
    text = run([interpreter(place), "-m", "rlplace.plan", "hybrid_ppo"], RUN_S)
    if "actor" not in text:
        raise LaneError("the plan of hybrid_ppo names no actor")


def train(place: Path, config: str, *words: str) -> None:
    runs = f"runner.output_dir={place / 'runs'}"
    run(
        [
            interpreter(place),
            "-m",
            "rlplace.train",
            "--config-name",
            config,
            *SHORT,
            *words,
            runs,
        ],
        RUN_S,
    )


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def uv() -> list[str]:
    return [sys.executable, "-m", "uv"]


def interpreter(place: Path) -> str:
    return str(place / "bin" / "python")


def run(words: Sequence[str], limit_s: float) -> str:
    """Run a program in the clone; return what it prints. Raises LaneError with its last lines where it fails."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    if "PIP_FIND_LINKS" in environment:  # uv reads none of pip's settings
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise LaneError(
            f"{' '.join(words[1:6])} takes more than {limit_s:g} s"
        ) from error
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        raise LaneError(
            f"{' '.join(words[1:6])} ...\n    " + "\n    ".join(lines[-40:]) + "\n "
        )
    return done.stdout


def versions(listed: str) -> str:
    """Name the versions that matter, of what uv lists."""
    named = dict(re.findall(r"(?m)^(?: \+ )?([A-Za-z0-9_.-]+)==(\S+)", listed))
    wanted = (
        "torch",
        "ray",
        "numpy",
        "pydantic",
        "hydra-core",
        "gymnasium",
        "mujoco",
        "transformers",
    )
    return ", ".join(f"{name} {named[name]}" for name in wanted if name in named)


if __name__ == "__main__":
    sys.exit(main())
