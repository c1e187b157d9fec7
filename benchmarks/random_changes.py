"""Random sequences of changes of the placement, with workers that are killed in the middle of changes.

    python benchmarks/random_changes.py [--sequences 100] [--together 5] [--first 0] [--at-once 1] [--limit-s 900]
                                        [--launcher inline] [--address HOST:PORT] [--output runs/random_changes]

A sequence is 12 iterations of `hybrid_ppo` with CartPole on 4 emulated accelerators, on Ray, with its own seed; several
follow each other in one run. Before each iteration, the run may get a request for another placement. About a third of
the requests are wrong: ranks that do not divide, accelerators that do not exist, components that do not fit beside each
other. In most changes, one or two workers get SIGKILL: leavers, stayers or newcomers, at a named moment of the change
or after a random time.

With `--launcher inline`, workers are threads, which cannot be killed. Instead, one or two steps of a change fail: the
end of the workers before, the set-up or the load. `--address` joins a Ray, so that none has to be started.

The memory of an accelerator holds one simulator rank or one rollout rank, not both, so that a worker that starts
before another one has left ends the run. Of each run is checked:

- the run ends in time, with exit code 0; a run whose placement before could not be launched again, either, is resumed
- each iteration counts once: `metrics.jsonl` has all of them in order, each with all of its samples
- before each iteration, the accelerators hold no more than the plan says, and at no time more than they have
- until a simulator is lost in an iteration, the numbers are those of a run that nothing interrupted
- wrong requests are refused, all others are answered, and no process and no shared memory is left
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlplace.json_text import parsed_object

ITERATIONS = 12  # of a sequence
ENVS = 16
STEPS = 16
ACCELERATORS = 4
# One simulator rank takes 256 MiB by default, and one rollout rank 64 MiB
MEMORY = 300 << 20
SEEN = "seen.jsonl"  # in the folder of a run: what was done to it, and what was seen
STACKS = "stacks.txt"  # where the threads of a run were that did not end
MARK = "RLPLACE_RANDOM_CHANGES"
JOB = (
    f"cluster.accelerators_per_node={ACCELERATORS}",
    "cluster.accelerator.kind=emulated",
    f"cluster.accelerator.memory={MEMORY}",
    "memory.verify=stop",
    f"env.total_num_envs={ENVS}",
    "env.id=CartPole-v1",
    f"algorithm.rollout_steps={STEPS}",
    "algorithm.epochs=2",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.lr=0.0001",  # with larger steps, differences of rounding grow soon
    "runner.stop_at_return=null",
    "runner.seed=3",
    "faults.restarts=100",
    "cluster.ray.start_timeout_s=600",  # other programs may take the processors
    "cluster.component_placement.actor=0-3",
    "cluster.component_placement.env=0-1",
    "cluster.component_placement.rollout=2-3",
)
# Moments of a change: class, method before which a worker is killed
MOMENTS = {
    "save": ("rlplace.execution.loop", "Loop", "write_state"),
    "write": ("rlplace.checkpoints.store", "Saver", "start"),
    "lower": ("rlplace.execution.loop", "Loop", "lower"),
    "retire": ("rlplace.workers.launch.cluster", "Cluster", "retire"),
    "start": ("rlplace.workers.ray_launch.launcher", "RayLauncher", "_reports"),
    "setup": ("rlplace.workers.launch.cluster", "Cluster", "_set_up"),
    "follow": ("rlplace.workers.launch.cluster", "Cluster", "follow"),
    "load": ("rlplace.execution.loop", "Loop", "read_state"),
    "restart": ("rlplace.workers.launch.cluster", "Cluster", "restart"),
    "next": ("rlplace.execution.loop", "Loop", "iteration"),
}
ANY_TIME = "any time"
# Steps that fail with workers that are threads
INLINE = ("retire", "setup", "load")
LAST_ASKED = 0.8  # share of the iterations up to which each request is answered
RESUMES = 2  # of a sequence, at most
MOST_STARTS = 10
LONGEST_S = 1.5  # of a random time in a change
RELATIVE = 1e-2  # of numbers that depend on the order of sums over ranks
ABSOLUTE = {"actor/clip_fraction": 0.02}  # samples at a threshold
TIMES = ("time/", "util/", "_s", "_per_s", "_share")
# Metrics that count ranks, or differ by rounding around zero
BY_RANKS = (
    "faults/",
    "rollout/batches",
    "rollout/pull",
    "actor/push",
    "actor/mismatch",
    "actor/policy_loss",
    "env/episodes_cut",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--together", type=int, default=5, help="sequences of a run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of one run")
    parser.add_argument("--launcher", choices=("ray", "inline"), default="ray")
    parser.add_argument("--address", help="of a Ray to join")
    parser.add_argument("--output", type=Path, default=Path("runs/random_changes"))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.sequences)
    words = [f"cluster.launcher={options.launcher}"]
    if options.address:
        words.append(f"cluster.ray.address={options.address}")
    if options.launcher == "inline":
        # A group of learning threads would need processes of its own
        words.append("cluster.component_placement.actor=0")
    found = measure(
        [
            seeds[start : start + options.together]
            for start in range(0, len(seeds), options.together)
        ],
        options.output,
        options.limit_s,
        options.at_once,
        words=words,
        tell=print,
    )
    print()
    print(table(found))
    sys.exit(any(run.wrong for run in found))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was seen of a run.

    `seeds`: those of its sequences. `asked`, `refused`, `made`, `kept`: requests, those refused, changes that were
    made, and changes after which the placement before was kept. `kills`: moment and rank of each kill. `resumed`: how
    often the run had to be resumed. `compared`: iterations whose numbers are promised. `seconds`: of the run.
    `wrong`: what should not have happened.
    """

    seeds: range
    asked: int
    refused: int
    made: int
    kept: int
    kills: tuple[tuple[str, str], ...]
    resumed: int
    compared: int
    seconds: float
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        kills = ", ".join(f"{owner} ({moment})" for moment, owner in self.kills)
        end = "; ".join(self.wrong) or "right"
        resumed = f", {self.resumed} times resumed" if self.resumed else ""
        numbers = f", numbers of {self.compared} iterations"
        return (
            f"{self.seeds.start:4}-{self.seeds[-1]}: {self.made} made, {self.kept} kept, {self.refused} refused; "
            f"killed: {kills or 'none'}{resumed}{numbers}; {self.seconds:.0f} s: {end}"
        )


def measure(
    runs: Sequence[range],
    output: Path,
    limit_s: float,
    at_once: int = 1,
    words: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Run sequences, and return what was seen of each run.

    `runs`: the seeds of the sequences of each run. `output`: a folder for the runs. `limit_s`: seconds after which a
    run counts as standing still. `at_once`: runs at the same time. `words`: further overrides. `tell`: called with one
    line for each run.
    """
    output.mkdir(parents=True, exist_ok=True)
    whole = output / "whole"
    longest = max(runs, key=len)
    code, _ = _train(whole, longest, limit_s, words, hurts=False)
    assert code == 0, f"the run without changes has ended with {code}: {whole}"
    expected = _lines(whole)

    def one(seeds: range) -> Outcome:
        folder = output / f"{seeds.start:04}"
        found = outcome(seeds, folder, limit_s, words, expected)
        tell(str(found))
        sys.stdout.flush()
        return found

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, runs))


def outcome(
    seeds: range,
    folder: Path,
    limit_s: float,
    words: Sequence[str],
    expected: Sequence[Mapping[str, Any]],
) -> Outcome:
    """Run sequences in one run, and return what was seen. `expected`: metrics of a run that nothing interrupted."""
    began = time.monotonic()
    code, wrong = _train(folder, seeds, limit_s, words)
    resumed = 0
    most = RESUMES * len(seeds)
    while code == 1 and not wrong and resumed < most and _can_resume(folder):
        resumed += 1
        code, wrong = _train(folder, seeds, limit_s, [*words, "resume=auto"])
    if "Traceback" in (folder / "out.txt").read_text(encoding="utf-8"):
        wrong.append("an error of the program: see out.txt")
    if code != 0:
        wrong.append(f"exit code {code}")
    seen = _seen(folder)
    wrong += [str(each["wrong"]) for each in seen if "wrong" in each]
    kills = [each for each in seen if "killed" in each]
    changes = [each for each in seen if "change" in each]
    answers = [each for each in seen if "answer" in each]
    asked = [each for each in seen if "asked" in each]
    compared = 0
    if code == 0:
        lines = _lines(folder)
        late = asked and asked[-1]["at"] >= LAST_ASKED * len(lines)
        if len(asked) > len(answers) + resumed and not late:
            wrong.append(f"a request was not answered: {asked[-1]}")
        wrong += _miscounted(lines, len(seeds) * ITERATIONS)
        whole = [*itertools.takewhile(_is_promised, lines)]
        compared = len(whole)
        wrong += _differing(whole, expected)
    return Outcome(
        seeds=seeds,
        asked=len(answers),
        refused=sum(each["answer"] == "refused" for each in answers),
        made=sum(not each["change"] for each in changes),
        kept=sum(bool(each["change"]) for each in changes),
        kills=tuple((each["moment"], each["killed"]) for each in kills),
        resumed=resumed,
        compared=compared,
        seconds=time.monotonic() - began,
        wrong=tuple(wrong),
    )


def _train(
    folder: Path,
    seeds: range,
    limit_s: float,
    more: Sequence[str],
    hurts: bool = True,
) -> tuple[int, list[str]]:
    """Run a training as `_train_once` does, and again if Ray does not start on a machine that is overloaded."""
    code, wrong = _train_once(folder, seeds, limit_s, more, hurts)
    tries = 1
    while code == 2 and tries < MOST_STARTS and _ray_did_not_start(folder):
        tries += 1
        code, wrong = _train_once(folder, seeds, limit_s, more, hurts)
    return code, wrong


def _train_once(
    folder: Path, seeds: range, limit_s: float, more: Sequence[str], hurts: bool
) -> tuple[int, list[str]]:
    """Run a training in a process of its own. Return its exit code, and what it has left behind or done wrong.

    `seeds`: of the sequences. `hurts`: whether there are requests and kills.
    """
    folder.mkdir(parents=True, exist_ok=True)
    iterations = f"runner.total_iterations={len(seeds) * ITERATIONS}"
    words = [str(folder), *more, iterations]
    if hurts:
        words += [f"--seed={seed}" for seed in seeds]
    environment = {**os.environ, MARK: str(folder.resolve())}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        (folder / "out.txt").open("a", encoding="utf-8") as out,
    ):
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--one", shared, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=Path(__file__).resolve().parents[1],
        )
        wrong: list[str] = []
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            wrong.append(f"no end after {limit_s:g} s")
            # The threads of the driver write where they are
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            process.kill()
            code = process.wait()
        else:
            if left := os.listdir(shared):
                wrong.append(f"left in shared memory: {', '.join(left)}")
        wrong += [f"left: {text}" for text in _end_marked(environment[MARK])]
    return code, wrong


def _end_marked(mark: str) -> list[str]:
    """End the processes of a run that still live, and return their commands. `mark`: value of their variable MARK."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    # Ray's own processes need a moment
    _, alive = psutil.wait_procs(found, timeout=10.0)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            left.append(" ".join(process.cmdline())[:100])
            process.kill()
    return left


def _ray_did_not_start(folder: Path) -> bool:
    text = (folder / "out.txt").read_text(encoding="utf-8")
    return "[ray-did-not-start]" in text[-1000:]


def _can_resume(folder: Path) -> bool:
    return any(folder.glob("*/*/checkpoints/0*/manifest.json"))


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics of the run in a folder."""
    # A run that could not start has made a folder, too
    file = sorted(folder.glob("*/*/metrics.jsonl"))[-1]
    text = file.read_text(encoding="utf-8")
    return [parsed_object(line) for line in text.splitlines()]


def _seen(folder: Path) -> list[dict[str, Any]]:
    file = folder / SEEN
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [parsed_object(line) for line in text.splitlines()]


def _miscounted(lines: Sequence[Mapping[str, Any]], iterations: int) -> list[str]:
    """Return iterations and samples that are lost or doubled. `iterations`: how many there have to be."""
    wrong = []
    numbers = [line["iteration"] for line in lines]
    if numbers != list(range(1, iterations + 1)):
        wrong.append(f"iterations {numbers}")
    for line in lines:
        whole = ENVS * STEPS
        found = (line["env/steps"], line["actor/samples"], line["env_steps"])
        if found != (whole, whole, whole * line["iteration"]):
            wrong.append(f"iteration {line['iteration']}: steps, samples {found}")
    return wrong


def _is_promised(line: Mapping[str, Any]) -> bool:
    """Return whether the numbers of an iteration are those of a run that nothing interrupted, as those before it are.

    A simulator that was lost in an iteration begins other episodes.
    """
    return not line.get("env/episodes_cut")


def _differing(
    lines: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the first metric that differs from that of a run which nothing interrupted."""
    for line, other in zip(lines, expected, strict=False):
        for name in sorted(line.keys() | other.keys()):
            timed = name.startswith(TIMES) or name.endswith(TIMES)
            if timed or name.startswith(BY_RANKS):
                continue
            got = line.get(name, math.nan)
            due = other.get(name, math.nan)
            # What the simulators have seen is equal, not only close
            relative = 0.0 if name.startswith("env/") else RELATIVE
            absolute = ABSOLUTE.get(name, relative / 10)
            if not math.isclose(got, due, rel_tol=relative, abs_tol=absolute):
                return [f"iteration {line['iteration']}: {name} {got}, not {due}"]
    return []


def table(found: Sequence[Outcome]) -> str:
    """Return the sums over all sequences as text."""
    moments = Counter(moment for each in found for moment, _ in each.kills)
    roles = Counter(owner.split(" ")[0] for each in found for _, owner in each.kills)
    wrong = [each for each in found if each.wrong]
    seconds = sum(each.seconds for each in found)
    lines = [
        f"{sum(len(each.seeds) for each in found)} sequences in {len(found)} runs, {seconds:.0f} s: "
        f"{sum(each.made for each in found)} changes made, "
        f"{sum(each.kept for each in found)} placements kept, {sum(each.refused for each in found)} requests refused",
        f"{sum(len(each.kills) for each in found)} workers killed: "
        + ", ".join(f"{count} {name}" for name, count in roles.most_common()),
        "moments: " + ", ".join(f"{name} {n}" for name, n in moments.most_common()),
        f"{sum(each.resumed for each in found)} times resumed, {sum(each.compared for each in found)} iterations "
        "with the numbers of a run that nothing interrupted",
        f"{len(wrong)} runs with faults: {', '.join(str(each.seeds.start) for each in wrong) or 'none'}",
    ]
    return "\n".join(lines)


# ── the run of a sequence, in its own process ─────────────────────────────────────────────────────────────────────────


class Hurting:
    """Asks a run for changes, and kills its workers in them. It replaces methods of the engine by others that first do
    that.
    """

    def __init__(self, seeds: Sequence[int], file: TextIO) -> None:
        """Prepare; no method is replaced yet.

        `seeds`: of the sequences. `file`: gets one line for each thing that was done or seen.
        """
        self._of_sequence = [random.Random(seed) for seed in seeds]
        self._drawn = self._of_sequence[0]
        self._file = file
        self._cluster: Any = None
        self._at = 0
        self._asked: Any = None
        self._right = True
        self._inline = False
        # (moment, seconds) at which a worker dies in the present change
        self._due: list[tuple[str, float]] = []
        self._lock = threading.Lock()

    def note(self, **seen: object) -> None:
        with self._lock:
            self._file.write(json.dumps(seen) + "\n")
            self._file.flush()

    def install(self) -> None:
        """Replace methods of the engine by others that first ask, kill or look."""
        import importlib

        from rlplace.execution.loop import Loop
        from rlplace.runtime import run
        from rlplace.runtime.replace import Replacing
        from rlplace.runtime.requests import Requests
        from rlplace.workers.launch.cluster import Cluster

        for moment, (module, kind, method) in MOMENTS.items():
            owner = getattr(importlib.import_module(module), kind)
            _before(owner, method, lambda *_, moment=moment: self.moment(moment))
        _before(Cluster, "start", self._found)
        _before(Loop, "iteration", self._held)
        _before(Replacing, "save", lambda *_: self._begin())
        _before(Requests, "take", self._ask)
        change = run._Driver._change

        def changed(driver: Any, due: Any, saved: Any, record: Any) -> None:
            try:
                change(driver, due, saved, record)
            finally:
                self.note(
                    change=record.kept,
                    moves=record.moves,
                    stayed=record.stayed,
                    seconds=record.seconds,
                )

        # The run's own methods go on behind these, which note what they do
        run._Driver._change = changed  # type: ignore[assignment, method-assign]
        answer = Requests.answer

        def answered(requests: Requests, outcome: Any, text: str) -> None:
            if requests._taken is not None:
                self.note(answer=outcome, text=text.partition("\n")[0])
                if outcome == "changed" and not self._right:
                    self.note(wrong=f"a wrong request was taken: {text}")
                nothing = "moves no component" in text
                if outcome == "refused" and self._right and not nothing:
                    self.note(wrong=f"a request was refused: {text}")
            answer(requests, outcome, text)

        Requests.answer = answered  # type: ignore[assignment, method-assign]

    def _found(self, cluster: Any) -> None:
        self._cluster = cluster
        self._inline = cluster.launcher == "inline"

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, requests: Any) -> None:
        """Write a request before the run looks for one."""
        from rlplace.runtime.requests import ask

        if self._cluster is None or self._drawn.random() < 0.5:
            return
        places, self._right = _places(self._drawn)
        if self._inline and "actor" in places:
            places["actor"] = places["actor"][:1]
        if ask(requests._folder, places) is not None:
            self.note(asked=places, right=self._right, at=self._at)

    # ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Draw who dies in the change that begins."""
        drawn = self._drawn
        count = drawn.choices((0, 1, 2), (0.25, 0.55, 0.2))[0]
        self._due = []
        for _ in range(count):
            if self._inline:
                self._due.append((drawn.choice(INLINE), 0.0))
            elif drawn.random() < 0.35:
                self._later(ANY_TIME, drawn.uniform(0.0, LONGEST_S))
            else:
                after_s = drawn.choice((0.0, 0.0, drawn.uniform(0.0, 0.3)))
                self._due.append((drawn.choice([*MOMENTS]), after_s))

    def moment(self, moment: str) -> None:
        for due in [each for each in self._due if each[0] == moment]:
            self._due.remove(due)
            if self._inline:
                self.fail(moment)
            elif due[1]:
                self._later(*due)
            else:
                self.kill(moment)

    def fail(self, moment: str) -> None:
        """Let a step of the change fail, as it does if a worker fails in it, or a node does not answer."""
        from rlplace.codes import problem
        from rlplace.errors import ClusterError, WorkerError

        self.note(killed="a step", moment=moment)
        if moment == "retire":
            raise ClusterError(
                problem("node-lost", "node 1", error="channels", method="clear")
            )
        raise WorkerError(component="env", rank=0, node=0, method=moment, what="fails")

    def _later(self, moment: str, after_s: float) -> None:
        timer = threading.Timer(after_s, self.kill, (moment,))
        timer.daemon = True
        timer.start()

    def kill(self, moment: str) -> None:
        """Kill a worker of this machine that lives, or one that is just starting."""
        known = {
            slot.owner: process
            for slot, process in dict(self._cluster._launcher._processes).items()
        }
        pids = {process.pid for process in known.values()}
        if moment == "start":
            time.sleep(self._drawn.uniform(0.0, 0.3))
            starting = [process for process in _workers() if process.pid not in pids]
            if starting:
                known = {f"newcomer {each.pid}": each for each in starting}
        names = [name for name, process in sorted(known.items()) if _alive(process)]
        if not names:
            return
        name = self._drawn.choice(names)
        with contextlib.suppress(psutil.NoSuchProcess):
            known[name].kill()
            self.note(killed=name, moment=moment)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _held(self, loop: Any, index: int) -> None:
        """Note accelerators that hold more than the plan says for any moment of an iteration. `index`: of the iteration
        that begins.
        """
        self._at = index
        self._drawn = self._of_sequence[index // ITERATIONS]
        ledger = loop.memory._ledger
        launcher = self._cluster._launcher
        if self._inline:
            account = launcher._account
        else:
            account = launcher._channels.account(0, launcher._topology.memory_bytes)
        with account._opened() as held:
            for number, residents in held.items():
                got = sum(residents.values())
                due = 0
                if got:
                    loads = ledger.account(number).loads
                    due = max(load.total_bytes for load in loads)
                if got > due:
                    self.note(
                        wrong=f"accelerator {number} holds {got} bytes, not {due}: {residents}"
                    )


def _places(drawn: random.Random) -> tuple[dict[str, str], bool]:
    """Return component -> its place, at random, and whether the run can have these places."""
    kind = drawn.random()
    if kind < 0.1:
        return {"env": f"0-{ACCELERATORS}"}, False
    if kind < 0.2:
        return {"env": "0-2"}, False
    if kind < 0.25:
        return {"envs": "0"}, False
    if kind < 0.3:
        # Both need the memory of accelerator 1
        return {"env": "0-1", "rollout": "1-2"}, False
    sizes = drawn.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    first = drawn.randrange(ACCELERATORS - sum(sizes) + 1)
    env = range(first, first + sizes[0])
    rollout = range(env.stop, env.stop + sizes[1])
    if drawn.random() < 0.5:
        env, rollout = rollout, env
    ranks = drawn.choice((1, 2, 4))
    start = drawn.randrange(ACCELERATORS - ranks + 1)
    actor = range(start, start + ranks)
    places = {"env": _text(env), "rollout": _text(rollout), "actor": _text(actor)}
    if drawn.random() < 0.5:
        del places["actor"]
    return places, True


def _text(numbers: range) -> str:
    if len(numbers) == 1:
        return str(numbers.start)
    return f"{numbers.start}-{numbers.stop - 1}"


def _before(kind: Any, name: str, act: Callable[..., None]) -> None:
    """Replace a method by one that first calls `act` with its arguments."""
    method = getattr(kind, name)

    def replaced(self: Any, *arguments: Any, **more: Any) -> Any:
        act(self, *arguments)
        return method(self, *arguments, **more)

    setattr(kind, name, replaced)


def _workers() -> list[psutil.Process]:
    """Return the processes of Ray workers below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(
                "ray::RayHost"
            ):
                found.append(process)
    return found


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def one(shared: str, folder: Path, words: Sequence[str]) -> int:
    """Run a training, with the requests and kills of each word `--seed=`, and return the exit code.

    `shared`: folder in shared memory. `words`: overrides, and seeds.
    """
    begin = "--seed="
    seeds = [int(word.removeprefix(begin)) for word in words if word.startswith(begin)]
    with (
        (folder / STACKS).open("a", encoding="utf-8") as stacks,
        (folder / SEEN).open("a", encoding="utf-8") as seen,
    ):
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        every = 0
        if seeds:
            Hurting(seeds, seen).install()
            # Without checkpoints, a lost state is begun anew: many sequences would not end
            often = (0, 1, 3) if len(seeds) == 1 else (1, 3)
            every = random.Random(seeds[0]).choice(often)
        from rlplace.cli.train import main as train

        return train(
            [
                "--config-name",
                "hybrid_ppo",
                f"runner.output_dir={folder}",
                f"cluster.comm.shm_folder={shared}",
                f"checkpoint.every={every}",
                *JOB,
                *(word for word in words if not word.startswith(begin)),
            ]
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.exit(one(sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
    main()
