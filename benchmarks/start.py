"""Start workers: seconds from nothing to all being set up, and the memory that they hold together.

    python benchmarks/start.py [--workers 16] [--repeat 3] [--only fork plain actors forkserver]
    python benchmarks/start.py --job hybrid_grpo_llm [--repeat 3] [--beside ROOT] [words of the config]

The second command starts a whole job, from its command to the line that says that all workers are ready, and ends it
there. It prints the seconds, and the processor seconds of each kind of process. On a machine that other programs use,
only the processor seconds can be compared. `--beside` is the folder of another version of rlplace, which is started in
turns with this one. Each version is started once more before, so that Python has compiled all modules. A language model
has to be in each folder: scripts/get_model smollm2.

The first command starts the workers of a simulator job.
In turns, each in a process of its own: the workers of a simulator job as forks and each with its own imports
(`cluster.ray.start`), as many plain Ray actors that import torch and FSDP, and as many processes of Python's
multiprocessing with a forkserver that has imported them. All but the last start Ray; the seconds have that too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MODULES = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor")
NAMES = {
    "fork": "workers, forks of a template",
    "plain": "workers, each with its own imports",
    "actors": "plain Ray actors that import torch",
    "forkserver": "multiprocessing, forkserver with torch",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--job", metavar="CONFIG", help="start this job instead")
    parser.add_argument("--beside", metavar="ROOT", type=Path)
    parser.add_argument("words", nargs="*", help="words of the job's config")
    options = parser.parse_args()
    if options.job:
        words = ["--config-name", options.job, *options.words]
        compare_jobs([ROOT, options.beside], words, options.repeat)
        return
    if options.one:
        print(json.dumps(MEASURES[options.one](options.one, options.workers)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for _ in range(options.repeat):
        for name in options.only:
            command = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--workers",
                str(options.workers),
            ]
            answer = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
            )
            found[name].append(json.loads(answer.stdout.splitlines()[-1]))
    seconds = {
        name: statistics.median(run["seconds"] for run in runs)
        for name, runs in found.items()
    }
    print(f"| {options.workers} of | seconds | of plain actors | MiB together |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        ratio = (
            f"{seconds[name] / seconds['actors']:.2f}" if "actors" in seconds else "-"
        )
        mib = statistics.median(run["mib"] for run in runs)
        print(f"| {NAMES[name]} | {seconds[name]:.1f} | {ratio} | {mib:,.0f} |")


# ── a whole job ───────────────────────────────────────────────────────────────────────────────────────────────────────

READY = "ready after"
MARK = "RLPLACE_BENCHMARK_OF_START"
LOOK_S = 0.1
# What the command line of a process contains -> its kind. Ray names its workers and agents.
KINDS = {
    "--template": "template",
    "ray::": "",
    "gcs_server": "Ray's servers and agents",
    "raylet": "Ray's servers and agents",
    "-m rlplace.train": "driver",
}


def compare_jobs(roots: list[Path | None], words: list[str], repeat: int) -> None:
    """Start a job of each version of rlplace in turns, and print a table of each."""
    found: dict[Path, list[dict[str, float]]] = {root: [] for root in roots if root}
    for root in found:
        start_job(root, words)
    for _ in range(repeat):
        for root, runs in found.items():
            runs.append(start_job(root, words))
    kinds = list(
        dict.fromkeys(kind for runs in found.values() for run in runs for kind in run)
    )
    print("| version | runs | " + " | ".join(kinds) + " |")
    print("|---|---" + "|---" * len(kinds) + "|")
    for root, runs in found.items():
        medians = [
            statistics.median(run.get(kind, 0.0) for run in runs) for kind in kinds
        ]
        shown = " | ".join(f"{median:.1f}" for median in medians)
        print(f"| {root} | {len(runs)} | {shown} |")


def start_job(root: Path, words: list[str]) -> dict[str, float]:
    """Start a job, end it when it is ready; return its seconds, and the processor seconds of each kind of process.

    `root`: folder of the version of rlplace. `words`: words of the job's config.
    """
    mark = f"{MARK}={time.time_ns()}"
    name, _, value = mark.partition("=")
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        name: value,
    }
    # It would keep Python from storing compiled modules
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    watch = Processes(mark)
    with tempfile.TemporaryDirectory() as folder:
        own = [f"runner.output_dir={folder}", "runner.total_iterations=1"]
        began = time.perf_counter()
        job = subprocess.Popen(
            [sys.executable, "-m", "rlplace.train", *words, *own],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        found: dict[str, float] = {}
        with job, watch:
            assert job.stdout is not None
            for line in job.stdout:
                if line.startswith(READY):
                    found["seconds"] = time.perf_counter() - began
                    found |= watch.seconds()
                    job.send_signal(signal.SIGINT)
    if not found:
        raise SystemExit(f"{root}: the job ended before it was ready")
    return found


class Processes:
    """Watches the processes that have inherited a variable, and adds up their processor time until `seconds`."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        # Number and start time of a process -> its kind and its processor seconds
        self._seen: dict[tuple[int, int], tuple[str, float]] = {}
        self._others: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self) -> dict[str, float]:
        """Return the processor seconds so far: of all processes, and of each kind."""
        self._look()
        found = {"processor": sum(seconds for _, seconds in self._seen.values())}
        for kind, seconds in self._seen.values():
            found[kind] = found.get(kind, 0.0) + seconds
        return found

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for folder in Path("/proc").glob("[0-9]*"):
                # A process may end meanwhile
                with contextlib.suppress(OSError):
                    self._add(folder)

    def _add(self, folder: Path) -> None:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        key = (int(folder.name), int(fields[19]))
        if key in self._others:
            return
        if (
            key not in self._seen
            and self._mark.encode() not in (folder / "environ").read_bytes()
        ):
            self._others.add(key)
            return
        ticks = int(fields[11]) + int(fields[12])
        words = (
            (folder / "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
        self._seen[key] = (kind_of(words), ticks / os.sysconf("SC_CLK_TCK"))


def kind_of(words: str) -> str:
    """Return the kind of a process. `words`: its command line."""
    for part, kind in KINDS.items():
        if part not in words:
            continue
        if kind:
            return kind
        # Ray's name of a worker is the worker, such as `ray::actor rank 0`
        name = words.partition(part)[2].partition(" ")[0]
        return KINDS["raylet"] if name.endswith("Agent") else name
    return "others"


# ── sixteen workers ───────────────────────────────────────────────────────────────────────────────────────────────────


def ours(how: str, workers: int) -> dict[str, float]:
    from rlplace.config import compose
    from rlplace.runtime.launched import job_spec, launch
    from rlplace.runtime.prepare import prepare_composed
    from rlplace.workers.launch.cluster import Cluster
    from rlplace.workers.ray_launch.launcher import RayLauncher

    half = workers // 2
    quarter = workers // 4
    where = (
        f"{{actor: 0-{half - 1}, env: 0-{quarter - 1}, rollout: {quarter}-{half - 1}}}"
    )
    words = [
        f"cluster.component_placement={where}",
        f"cluster.ray.start={how}",
        f"cluster.accelerators_per_node={half}",
    ]
    (composed,) = compose.with_hydra(["--config-name", "hybrid_ppo", *words])
    prepared = prepare_composed(composed)
    job = job_spec(prepared.config, prepared.plan)
    began = time.perf_counter()
    with Cluster.from_config(
        job.config.cluster, job.plan.topology, workers=job.workers.values()
    ) as cluster:
        launch(cluster, job)
        seconds = time.perf_counter() - began
        assert isinstance(cluster._launcher, RayLauncher)
        return measured(
            seconds, [process.pid for process in cluster._launcher._processes.values()]
        )


class Plain:
    """What a user writes who has no launcher."""

    def up(self) -> int:
        return up()


def up() -> int:
    for name in MODULES:
        __import__(name)
    return os.getpid()


def actors(how: str, workers: int) -> dict[str, float]:
    from rlplace.workers.ray_launch.session import ray_environment

    with ray_environment(None):
        began = time.perf_counter()
        import ray

        ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)
    made: Any = ray.remote(Plain)
    started = [made.options(num_cpus=0).remote() for _ in range(workers)]
    pids = ray.get([actor.up.remote() for actor in started])
    found = measured(time.perf_counter() - began, pids)
    ray.shutdown()
    return found


def forkserver(how: str, workers: int) -> dict[str, float]:
    began = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    ready = context.Queue()
    go = context.Event()
    processes = [
        context.Process(target=answer, args=(ready, go)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    pids = [ready.get() for _ in processes]
    found = measured(time.perf_counter() - began, pids)
    go.set()
    for process in processes:
        process.join()
    return found


def answer(ready: Any, go: Any) -> None:
    ready.put(up())
    go.wait()


def measured(seconds: float, pids: list[int]) -> dict[str, float]:
    """Add the memory of processes, what several share divided by their number."""
    rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    kib = sum(
        int(line.split()[1])
        for rollup in rollups
        for line in rollup.splitlines()
        if line.startswith("Pss:")
    )
    return {"seconds": seconds, "mib": kib / 1024}


MEASURES: dict[str, Callable[[str, int], dict[str, float]]] = {
    "fork": ours,
    "plain": ours,
    "actors": actors,
    "forkserver": forkserver,
}

if __name__ == "__main__":
    main()
