"""Makes the libraries for a machine that has a GPU and its own torch but no network: archives to carry there.

    scripts/bundle [--python-version 3.12] [--part-mib 60] [--to FOLDER] base|ray|vllm ...

The groups that are named go into one archive, cut into parts of at most so many MiB; beside them lies `install.sh`,
which unpacks them there into one folder of packages, by Python alone: `bash install.sh TARGET`, then
`PYTHONPATH=TARGET`.

The machine is taken to have torch 2.11 for CUDA 13, transformers 5, NumPy 2 and what these bring, accelerate, peft,
tensorboard, psutil, rich, requests, aiohttp, protobuf, msgpack, imageio: none of it is carried. Of large wheels, what
a Hopper GPU and engines of dense models do not need stays behind: `Wheel.without`. What vLLM imports and only
structured output uses is a stub that says so: `Group.stubs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace.errors import OutputError, Problem

MIB = 2**20
_LARGE = MIB  # bytes of a file from which the slower compression is worth its time
_GLIBC = range(
    35, 16, -1
)  # minor versions of glibc 2 that wheels may ask for, the newest first
_INSTALLER = Path(__file__).with_name("bundle_install.sh")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """`without`: patterns of its files that stay behind. `from_source`: the registry has no wheel of it."""

    requirement: str
    without: Sequence[str] = ()
    from_source: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    wheels: Sequence[Wheel]
    stubs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # path -> text


def _plain(*requirements: str) -> list[Wheel]:
    return [Wheel(requirement=requirement) for requirement in requirements]


STUB = '''"""A stub in place of {package}, which this bundle leaves out for its size; see scripts/bundle.

vLLM imports its names when it starts. Only structured output uses them, which no engine here asks for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{"__init__": _refuse, "__doc__": "A stub: {package} is not in this bundle."}})


def _refuse(self: object, *_: object, **__: object) -> None:
    raise ImportError("{package} is a stub here: structured output needs the package itself")
'''

_XGRAMMAR = STUB.format(package="xgrammar")

GROUPS: Mapping[str, Group] = {
    "base": Group(
        wheels=[
            Wheel(requirement="antlr4-python3-runtime==4.9.3", from_source=True),
            *_plain("hydra-core==1.3.8", "omegaconf==2.3.1"),
            *_plain(
                "pydantic==2.14.4",
                "pydantic-core==2.50.5",
                "annotated-types==0.8.0",
                "typing-inspection==0.4.5",
            ),
            *_plain("pyzmq==27.3.0", "gymnasium==1.4.0", "farama-notifications==0.0.6"),
            *_plain("mujoco==3.3.0", "glfw==2.11.0", "pyopengl==3.1.10"),
        ]
    ),
    "ray": Group(
        wheels=[
            Wheel(
                requirement="ray==2.60.0",
                without=[
                    "ray/jars/*",  # of Java programs
                    "ray/dashboard/client/*",  # the dashboard's pages
                    *(
                        f"ray/{part}/*"
                        for part in (
                            "rllib",
                            "tune",
                            "train",
                            "serve",
                            "data",
                            "air",
                            "llm",
                        )
                    ),
                ],
            ),
            *_plain(
                "jsonschema==4.26.0",
                "jsonschema-specifications==2025.9.1",
                "referencing==0.37.0",
            ),
            *_plain("rpds-py==2026.9.1"),
        ]
    ),
    "vllm": Group(
        wheels=[
            Wheel(
                requirement="vllm==0.26.0",  # the newest for torch 2.11
                without=[
                    "vllm/vllm_flash_attn/_vllm_fa2_C.*",  # FlashAttention 2: Hopper has 3
                    "vllm/vllm_flash_attn/cute/*",  # FlashAttention 4: Blackwell
                    "vllm/vllm-rs",  # a server
                    "vllm/_rust_tool_parser.*",
                    "vllm/_flashmla*",  # attention of DeepSeek
                    "vllm/_qutlass*",  # 4-bit weights on Blackwell
                    "vllm/_moe_C*",  # experts
                    "vllm/third_party/deep_gemm/*",
                    "vllm/third_party/fmha_sm100/*",
                    "vllm/third_party/tml_fa4/*",
                    "vllm/entrypoints/serve/instrumentator/static/*",
                    "vllm/distributed/kv_transfer/*.jpg",
                ],
            ),
            *_plain(
                "cbor2==6.3.0",
                "openai-harmony==0.0.8",
                "openai==3.57.0",
                "httpx2==2.16.2",
                "sniffio==1.3.1",
            ),
            *_plain(
                "msgspec==0.22.0",
                "pybase64==1.5.1",
                "cachetools==8.0.2",
                "llguidance==1.7.6",
            ),
        ],
        stubs={
            "xgrammar/__init__.py": _XGRAMMAR,
            "xgrammar/openai_tool_call_schema.py": _XGRAMMAR,
            "xgrammar/structural_tag.py": _XGRAMMAR,
        },
    ),
}


PYTHONS = ("3.11", "3.12", "3.13")
_BRINGS = "base: for runs in one process; ray: for several processes; vllm: for NVIDIA GPUs of the Hopper kind"


def _mib(text: str) -> float:
    size = float(text)
    if not size > 0.0:
        raise argparse.ArgumentTypeError(f"{text} MiB is no size of a part")
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the parts and their sizes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bundle",
        description="Makes the libraries for a machine without a network.",
    )
    parser.add_argument(
        *("--python-version",),
        default="3.12",
        choices=PYTHONS,
        help="the machine's Python; default 3.12",
    )
    parser.add_argument(
        "--part-mib", type=_mib, default=60.0, help="most MiB of a part; default 60"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("build/bundle"),
        help="folder; default build/bundle",
    )
    parser.add_argument(
        "groups", nargs="+", choices=[*GROUPS], metavar="group", help=_BRINGS
    )
    asked = parser.parse_args(argv)
    try:
        parts = make(
            asked.groups, asked.to, asked.python_version, int(asked.part_mib * MIB)
        )
    except OutputError as error:
        print(error, file=sys.stderr)
        return 2
    for part in parts:
        print(f"{part.stat().st_size / MIB:7.1f} MiB  {part}")
    print(
        f"there: bash install.sh TARGET        (Python {asked.python_version}; then PYTHONPATH=TARGET)"
    )
    return 0


def make(groups: Sequence[str], to: Path, python: str, part_bytes: int) -> list[Path]:
    """Make the archive of these groups in `to`; return its parts. Raises OutputError where a wheel cannot be had."""
    name = "-".join(groups)
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob(f"{name}.zip*"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="bundle-") as scratch:
        archive = Path(scratch) / f"{name}.zip"
        carried = []
        with zipfile.ZipFile(archive, "w") as out:
            for group in groups:
                for wheel in GROUPS[group].wheels:
                    file = fetch(wheel, Path(scratch), python)
                    carried.append(file.name)
                    pack(file, wheel.without, out)
                    file.unlink()
                for path, text in GROUPS[group].stubs.items():
                    out.writestr(path, text, zipfile.ZIP_DEFLATED)
        parts = cut(archive, to, part_bytes)
    # What the installer needs to know, and whoever wonders what is in the archive.
    note = {
        "python": python,
        "wheels": carried,
        "stubs": sorted(
            {path.partition("/")[0] for group in groups for path in GROUPS[group].stubs}
        ),
        "parts": [{"file": part.name, "sha256": _digest(part)} for part in parts],
    }
    (to / f"{name}.json").write_text(
        json.dumps(note, indent=1) + "\n", encoding="utf-8"
    )
    shutil.copy(_INSTALLER, to / "install.sh")
    return parts


def fetch(wheel: Wheel, folder: Path, python: str) -> Path:
    """Download a wheel for Linux on x86-64, or build one, by pip. Raises OutputError."""
    into = folder / "wheel"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if wheel.from_source:
        command = [
            *pip,
            "wheel",
            "--no-deps",
            "--wheel-dir",
            str(into),
            wheel.requirement,
        ]
    else:
        platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + [
            "manylinux2014_x86_64",
            "manylinux1_x86_64",
        ]
        command = [
            *pip,
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--implementation=cp",
            "--dest",
            str(into),
        ]
        command += [
            f"--python-version={python}",
            *(f"--platform={p}" for p in platforms),
            wheel.requirement,
        ]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        why = "\n".join(tried.stderr.strip().splitlines()[-3:])
        fix = "on a machine that reaches a package registry, or pip's settings for one that is near"
        problem = Problem(
            code="bundle-wheel",
            key="bundle",
            what="a wheel cannot be had",
            got=wheel.requirement,
            why=why,
            fix=fix,
        )
        raise OutputError(problem)
    (made,) = into.glob("*.whl")
    return made


def pack(wheel: Path, without: Sequence[str], out: zipfile.ZipFile) -> None:
    """Put the files of a wheel where they lie once it is installed. Scripts and headers stay behind."""
    with zipfile.ZipFile(wheel) as source:
        for member in source.infolist():
            place = _installed(member.filename)
            if (
                member.is_dir()
                or place is None
                or any(fnmatch.fnmatch(place, pattern) for pattern in without)
            ):
                continue
            packed = zipfile.ZipInfo(
                place
            )  # without a time: the same wheels make the same archive
            packed.external_attr = member.external_attr  # with its right to be executed
            # The kernels of one library are much alike over long distances, which only this finds.
            packed.compress_type = (
                zipfile.ZIP_LZMA if member.file_size >= _LARGE else zipfile.ZIP_DEFLATED
            )
            out.writestr(packed, source.read(member), compresslevel=9)


def _installed(path: str) -> str | None:
    """Return where a file of a wheel goes below the folder of packages; None: nowhere."""
    top, _, below = path.partition("/")
    if not top.endswith(".data"):
        return path
    kind, _, rest = below.partition("/")
    if kind in ("purelib", "platlib", "data"):
        return rest
    return None


def cut(archive: Path, to: Path, part_bytes: int) -> list[Path]:
    """Cut a file into as few even parts as there can be; one that needs no cut keeps its name."""
    size = archive.stat().st_size
    count = math.ceil(size / part_bytes)
    if count == 1:
        return [Path(shutil.copy(archive, to))]
    parts = []
    with archive.open("rb") as source:
        for number in range(1, count + 1):
            part = to / f"{archive.name}.{number}of{count}"
            part.write_bytes(source.read(math.ceil(size / count)))
            parts.append(part)
    return parts


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
