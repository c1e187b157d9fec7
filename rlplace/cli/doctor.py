"""`python -m rlplace.doctor`: report what this machine has and which shipped configs run on it. Starts no worker.

Exit codes: 0 a config can run, 1 none can, 2 wrong usage.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlplace.codes import problem
from rlplace.comm.shared_memory.folder import SHARED_MEMORY, check_space
from rlplace.commands import DONE, FAILED, answered, typed
from rlplace.config import compose
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.config.model_folder import model_folder
from rlplace.config.options import OptionParser
from rlplace.cores import usable_cores
from rlplace.envs.registry import missing_library
from rlplace.errors import ClusterError, Problem, ProblemsError
from rlplace.extras import version_of, versions_of
from rlplace.placement.language.spec import role_of
from rlplace.runtime.prepare import (
    Prepared,
    check_run,
    missing_libraries,
    prepare_composed,
)
from rlplace.tables import chapter, table
from rlplace.tried import installed, untried
from rlplace.units import show_bytes
from rlplace.workers.launch.machines import visible_gpus
from rlplace.workers.launch.reservation import Machine, check_size, node_uses

FORMATS = ("text", "json")
DRIVER = Path("/proc/driver/nvidia/version")
_REASON = ("code", "key", "what", "got", "why", "fix")  # fields of a Problem in JSON
_NOT_OF_RUNS = {"dev", "docs", "peers"}  # extras that runs do not need
# Minimum driver by CUDA version: docs.nvidia.com/cuda/cuda-toolkit-release-notes
_LEAST_DRIVERS = {
    "12": 525,
    "13": 580,
}
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")  # packages in which torch ships NCCL
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory (bytes)": resource.RLIMIT_MEMLOCK,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that rlplace or an extra of rlplace requires.

    `wanted`: the required versions, as in pyproject.toml. `found`: the installed version; None: not installed.
    """

    name: str
    wanted: str
    found: str | None

    @property
    def fits(self) -> bool:
        """Whether the installed version meets the requirement. True if the library is not installed."""
        return self.found is None or SpecifierSet(self.wanted).contains(
            self.found, prereleases=True
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of checking whether a shipped config runs on this machine.

    `config`: name of the config. `problem`: the first problem that prevents a run; None: the config runs. `inline`: if
    the config runs only without Ray, the overrides for this; None otherwise.
    """

    config: str
    problem: Problem | None
    inline: str | None = None

    @property
    def runs(self) -> bool:
        return self.problem is None or self.inline is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the properties of this machine and which shipped configs run on it. Return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    about = "Checks this machine, and shows which of the shipped configs run on it."
    parser = OptionParser(typed("doctor"), description=about)
    parser.add_argument(
        "--format",
        default=FORMATS[0],
        choices=FORMATS,
        help="text (the default) or json",
    )

    def command() -> int:
        options = parser.parse_args(argv)
        found = machine()
        known = libraries()
        verdicts = [examine(name) for name in compose.config_names()]
        print(
            _as_json(found, known, verdicts)
            if options.format == "json"
            else render(found, known, verdicts)
        )
        if any(verdict.runs for verdict in verdicts):
            return DONE
        return FAILED

    return answered(command)


def machine() -> dict[str, str]:
    """Return name of a property of this machine, such as "cores" -> its value as text. Does not import torch."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "Python": f"{platform.python_version()}, {sys.executable}",
        "cores": _cores(),
        "memory": show_bytes(memory),
        "GPUs": _gpus(),
        "driver": _driver(),
        "CUDA of torch": _cuda(),
        "for kernels": lacks_to_compile() or "a C compiler, and Python's headers",
        "NCCL of torch": _nccl(),
        str(SHARED_MEMORY): "missing",
    }
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        found[str(SHARED_MEMORY)] = (
            f"{show_bytes(usage.total)}, {show_bytes(usage.free)} free"
        )
    for name, limit in _LIMITS.items():
        soft, hard = (
            "unlimited" if n == resource.RLIM_INFINITY else f"{n:,}"
            for n in resource.getrlimit(limit)
        )
        found[name] = f"{soft}, at most {hard}"
    folder = model_folder("models")
    names = sorted(config.parent.name for config in folder.glob("*/config.json"))
    found["models"] = f"{folder}: {', '.join(names) or 'none'}"
    return found


def _cores() -> str:
    usable = usable_cores()
    all_of = len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*")))
    if usable < all_of:
        return f"{usable} of {all_of}, by affinity and cgroups"
    return str(usable)


def _gpus() -> str:
    gpus = visible_gpus()
    kinds = [
        f"{g.product or 'unknown'}, {show_bytes(g.memory_bytes) if g.memory_bytes else 'unknown'}"
        for g in gpus
    ]
    return (
        "\n".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        or "none that may be used"
    )


def _first(pattern: str, file: Path) -> str:
    """Return the first match of the regular expression `pattern` in a file; "" without a match or without the file."""
    match = (
        re.search(pattern, file.read_text(encoding="utf-8")) if file.is_file() else None
    )
    if match:
        return match[0]
    return ""


def _driver() -> str:
    """Return the version of the GPU driver as text, with a warning if torch's CUDA version needs a newer driver."""
    found = _first(r"\b\d{3}\.\d+(?:\.\d+)?\b", DRIVER)
    cuda = _cuda()
    least = _LEAST_DRIVERS.get(cuda.partition(".")[0], 0)
    if not found or int(found.partition(".")[0]) >= least:
        return found or "none found"
    return f"{found}\nwarning: CUDA {cuda} of torch needs {least} or later"


def lacks_to_compile() -> str:
    """Return a text with what is missing on this machine for Triton to compile kernels; "" if nothing is missing.

    Triton needs a C compiler and Python's header files.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = (
        ("a C compiler", compiler is not None),
        ("Python's headers", headers.is_file()),
    )
    return " and ".join(f"no {what}" for what, there in lacking if not there)


def _cuda() -> str:
    """Return the CUDA version of the installed torch, read from its version.py without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "no torch"
    written = Path(torch.origin).with_name("version.py")
    return (
        _first(r"(?m)(?<=^cuda: Optional\[str\] = ')[\d.]+", written)
        or "none: for CPUs"
    )


def _nccl() -> str:
    return (
        ", ".join(f"{name} {version}" for name, version in versions_of(_NCCL).items())
        or "none found"
    )


def libraries() -> list[Library]:
    """Return the libraries that rlplace and its extras require for runs, sorted by name.

    The list is empty if rlplace is not installed as a package.
    """
    try:
        about = importlib.metadata.metadata("rlplace")
    except importlib.metadata.PackageNotFoundError:
        return []
    extras = {"", *(about.get_all("Provides-Extra") or ())} - _NOT_OF_RUNS
    wanted: dict[str, SpecifierSet] = {}
    for needed in map(Requirement, about.get_all("Requires-Dist") or ()):
        marker = needed.marker
        if needed.name != "rlplace" and (
            marker is None or any(marker.evaluate({"extra": e}) for e in extras)
        ):
            wanted[needed.name] = (
                wanted.get(needed.name, SpecifierSet()) & needed.specifier
            )
    return [
        Library(name=name, wanted=str(wanted[name]), found=version_of(name))
        for name in sorted(wanted, key=str.lower)
    ]


# ── the shipped configs ──────────────────────────────────────────────────────────────────────────────────────────────


def examine(name: str) -> Verdict:
    """Check whether a shipped config runs on this machine, and return the result.

    `name`: name of the config. The function makes the checks that `train` makes before a start, and checks whether the
    machine is large enough for the job.
    """
    lacking, job = _lacking([name])
    problem = next(iter(lacking), None)
    # One download command for all missing models of the config
    if problem is not None:
        fixes = [
            (p.fix or "").partition(" " * 8)[0]
            for p in lacking
            if p.code == problem.code
        ]
        together = len(fixes) > 1 and all(fix.startswith("scripts/") for fix in fixes)
        problem = (
            dataclasses.replace(problem, fix=" && ".join(dict.fromkeys(fixes)))
            if together
            else problem
        )
    return Verdict(
        config=name,
        problem=problem,
        inline=None if job is None else _without_ray(name, job),
    )


def _lacking(words: Sequence[str]) -> tuple[list[Problem], Prepared | None]:
    """Return the problems that prevent a run of a config on this machine, and the prepared job.

    `words`: words of a command line that names the config. The job is None if the config cannot be planned.
    """
    job = None
    try:
        (composed,) = compose.with_hydra(words)
        job = prepare_composed(composed)
        lacking = check_run(job)
        if job.refused:
            lacking += job.view.shortages
        if not lacking:
            lacking += _without_simulator(job)
        if not lacking:
            _check_machine(job)
    except ProblemsError as error:
        lacking = [*error.problems]
    except ClusterError as error:
        lacking = [error.problem]
    return lacking, job


def _without_simulator(job: Prepared) -> list[Problem]:
    """Return one problem if the job needs Gymnasium but it is not installed. Otherwise, return an empty list."""
    env = job.config.env
    if (
        not isinstance(env, SimulatorEnvConfig)
        or env.kind == "envpool"
        or ":" in env.kind
    ):
        return []
    if importlib.util.find_spec("gymnasium") is not None:
        return []
    why = "there is no module gymnasium"
    return list(
        missing_library(
            why, got=env.id, extra="envs", key="env.id", of="the simulator"
        ).problems
    )


def _without_ray(name: str, job: Prepared) -> str | None:
    """Return overrides with which the job runs without Ray, in threads of one process.

    Return None if no library is missing, so that these overrides are not needed, or if the job cannot run in threads.
    `name`: name of the config.
    """
    if not missing_libraries(job.config):
        return None
    words = ["cluster.launcher=inline"]
    # Ranks of a process group need a process each.
    for component in job.plan.placement.components:
        if (
            role_of(component) not in ("env", "rollout")
            and job.plan.placement.world_size(component) > 1
        ):
            words.append(f"cluster.component_placement.{component}=0")
    if _lacking([name, *words])[0]:
        return None
    return " ".join(words)


def _check_machine(job: Prepared) -> None:
    """Raise ClusterError if a job that starts its own Ray needs more than this machine has.

    Checked are processor cores, GPUs and the space of the folder for shared memory.
    """
    cluster = job.config.cluster
    placement = job.plan.placement
    if cluster.launcher != "ray" or cluster.ray.address is not None:
        return
    slots = [
        slot
        for component in placement.components
        for slot in placement.slots(component)
    ]
    total = {"CPU": float(usable_cores()), "GPU": float(len(visible_gpus()))}
    here = Machine(id="", address="this machine", total=total)
    check_size(node_uses(slots, job.plan.topology), [here], "this machine")
    folder = Path(cluster.comm.shm_folder or SHARED_MEMORY)
    if not folder.is_dir():
        raise ClusterError(
            problem("shm-folder", "cluster.comm.shm_folder", str(folder), error="none")
        )
    check_space(folder, job.case.ledger().shared_bytes(0))


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────


def render(
    found: Mapping[str, str], known: Sequence[Library], verdicts: Sequence[Verdict]
) -> str:
    """Return the report as text with three chapters: machine, libraries and shipped configs.

    `found`: name of a property of the machine -> its value. `known`: the required libraries. `verdicts`: whether each
    shipped config runs.
    """
    rows = [
        (name if at == 0 else "", line)
        for name, text in found.items()
        for at, line in enumerate(text.split("\n"))
    ]
    named = {
        library.name: library.found for library in known if library.found
    } or installed()
    present = ", ".join(f"{name} {version}" for name, version in named.items())
    absent = ", ".join(library.name for library in known if library.found is None)
    lines = textwrap.wrap(f"installed: {present}", 116, subsequent_indent="  ")
    lines += (
        []
        if known
        else [
            "rlplace itself is not installed here: its modules are those of this folder"
        ]
    )
    lines += (
        textwrap.wrap(f"not installed: {absent}", 116, subsequent_indent="  ")
        if absent
        else []
    )
    for library in known:
        if not library.fits:
            wanted = f"{library.name}{library.wanted}"
            lines.append(
                f"warning: {library.name} {library.found} is not {wanted}: pip install '{wanted}'"
            )
    for name, note in notes().items():
        lines += textwrap.wrap(f"not tried: {name} {note}", 116, subsequent_indent="  ")
    shown = [row for verdict in verdicts for row in _rows(verdict)]
    chapters = (
        ("machine", table(rows)),
        ("libraries", lines),
        ("shipped configs", table(shown)),
    )
    return "\n\n".join(chapter(title, lines) for title, lines in chapters)


def notes() -> dict[str, str]:
    """Return library -> note, for each installed library in a version with which rlplace was not tested.

    The note names the installed version and the tested versions, and says what an untested version may cause.
    """
    said = {}
    for name, version in installed().items():
        if (window := untried(name, version)) is not None:
            newest = window.newest.removesuffix(".99")
            said[name] = f"{version} ({window.oldest} to {newest} were): {window.means}"
    return said


def _rows(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the table rows (config, result) for one config: the result, then a row for each line of its remedy."""
    problem = verdict.problem
    if verdict.inline is not None:
        return [(verdict.config, f"runs without Ray: {verdict.inline}")]
    if problem is None:
        return [(verdict.config, "runs")]
    # Not a fault of this machine: the config is an example of a plan
    if problem.code == "plan-only":
        what = f"can only be planned: {problem.key} {problem.what} [{problem.code}]"
        return [(verdict.config, what), ("", f"{typed('plan')} {verdict.config}")]
    what = f"does not run: {problem.key}: {problem.what} [{problem.code}]"
    rows = [(verdict.config, what)]
    if problem.fix:
        first, *others = problem.fix.split("\n")
        rows.append(("", f"fix: {first}"))
        rows += [("", f"     {line}") for line in others]
    return rows


def _as_json(
    found: Mapping[str, str], known: Sequence[Library], verdicts: Sequence[Verdict]
) -> str:
    """Return the report as JSON text.

    `found`: name of a property of the machine -> its value. `known`: the required libraries. `verdicts`: whether each
    shipped config runs.
    """
    configs = {}
    for verdict in verdicts:
        problem = verdict.problem
        reason = (
            None
            if problem is None
            else {name: getattr(problem, name) for name in _REASON}
        )
        configs[verdict.config] = {
            "runs": verdict.runs,
            "problem": reason,
            "inline": verdict.inline,
        }
    versions = {
        library.name: {**dataclasses.asdict(library), "fits": library.fits}
        for library in known
    }
    told = {
        "machine": found,
        "libraries": versions,
        "not tried": notes(),
        "configs": configs,
    }
    return json.dumps(told, indent=1)
