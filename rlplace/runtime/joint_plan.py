"""Plan several runs that use the same accelerators in turns: checks, joint memory proof, predicted turns.

::

    words of run A ──▶ prepare ─┐
                                ├─▶ checks ─▶ joint proof ─▶ predicted turns ─▶ text
    words of run B ──▶ prepare ─┘             └ does not fit: lines with enable_offload that would make it fit

Each run is planned as it runs alone with `cluster.shared: true`. Nothing is started.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlplace.codes import problem
from rlplace.errors import ConfigError, Problem
from rlplace.execution.arbiter import Share
from rlplace.foresight.show import foreseen
from rlplace.foresight.turns import RunSeconds, StageSeconds, seconds_of
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.memory.joint import JointProof, Sharer, Together, prove
from rlplace.runtime.prepare import Prepared
from rlplace.units import exact_bytes

# How a run with other words is planned: (run, key=value words behind its own) -> the planned job
Planning = Callable[[str, Sequence[str]], Prepared]
_STAGED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run that shares accelerators, with its plan. `name`: unlike those of the others."""

    name: str
    job: Prepared
    share: Share

    @property
    def stages(self) -> dict[str, frozenset[int]]:
        """Stage -> the accelerators that are leased to the run in it."""
        placement = self.job.plan.placement
        of = {c: [*placement.accelerators(c)] for c in placement.components}
        return self.job.plan.schedule.accelerators(of)

    @property
    def sharer(self) -> Sharer:
        return Sharer(
            name=self.name,
            schedule=self.job.plan.schedule,
            stages=self.stages,
            ledger=self.job.view.ledger,
        )

    def seconds(self, tell: Callable[[str], None]) -> RunSeconds | None:
        """Return the predicted seconds of the stages; None if there is no profile of the job. `tell`: is told why."""
        job = self.job
        try:
            prediction = foreseen(job.config, job.plan, job.case, job.words, tell)
        except ConfigError as error:
            why = error.problems[0]
            tell(f"{self.name}: no predicted seconds: {why.key}: {why.what}")
            return None
        stages: Sequence[StageSeconds] = seconds_of(prediction, self.stages)
        found = RunSeconds(name=self.name, stages=stages, share=self.share)
        return found if found.alone_s > 0 else None


def check(runs: Sequence[PlannedRun]) -> list[Problem]:
    """Return the reasons for which runs cannot share accelerators, whatever they hold on them."""
    found: list[Problem] = []
    first = runs[0]
    for run in runs:
        found += _of_run(run)
        if run.job.plan.topology.nodes != first.job.plan.topology.nodes:
            cluster = first.job.config.cluster
            lines = [
                f"cluster.num_nodes={cluster.num_nodes}",
                f"cluster.accelerators_per_node={cluster.accelerators_per_node}",
                f"cluster.accelerator.kind={cluster.accelerator.kind}",
            ]
            found.append(
                problem(
                    "cannot-share",
                    "cluster",
                    error="machines",
                    run=run.name,
                    machines=run.job.view.machines,
                    first=first.name,
                    first_machines=first.job.view.machines,
                    lines=" ".join(lines),
                )
            )
    return found


def _of_run(run: PlannedRun) -> Iterator[Problem]:
    """Yield the reasons for which a run cannot share accelerators with any run."""
    config = run.job.config
    cluster = config.cluster
    if run.job.plan.needs.ahead:
        key = "algorithm.max_staleness"
        yield problem("cannot-share", key, error="ahead", run=run.name, fix=f"{key}=0")
    if cluster.changes:
        key = "cluster.changes"
        fix = "cluster.changes=[]"
        yield problem("cannot-share", key, error="changes", run=run.name, fix=fix)
    if cluster.elastic.mode == "on":
        key = "cluster.elastic"
        fix = "cluster.elastic=advise"
        yield problem("cannot-share", key, error="changes", run=run.name, fix=fix)
    if cluster.launcher == "ray" and cluster.ray.address is not None:
        key = "cluster.ray.address"
        yield problem(
            "cannot-share", key, str(cluster.ray.address), error="joined", run=run.name
        )
    unknown = run.job.view.ledger.uncounted
    if unknown:
        lines = [
            f"{c}: {{memory: {{weights: <bytes>, full: <bytes>}}}}" for c in unknown
        ]
        yield problem(
            "runs-do-not-fit",
            f"{unknown[0]}.memory",
            error="unknown",
            run=run.name,
            components=" and ".join(unknown),
            lines="\n".join(lines),
        )


def proof_of(runs: Sequence[PlannedRun]) -> JointProof:
    """Return what the runs hold together."""
    return prove([run.sharer for run in runs])


def shortages(
    runs: Sequence[PlannedRun],
    proof: JointProof,
    planning: Planning,
    command: Callable[[Mapping[str, Sequence[str]]], str],
) -> list[Problem]:
    """Return a problem for each kind of accelerators or hosts that the runs exceed together.

    `planning`: plans a run with further words. `command`: returns the command line with further words of each run.
    """
    found: list[Problem] = []
    fix = ""
    if not all(each.fits for each in proof.accelerators):
        fix = _fix(runs, proof, planning, command)
    for each in proof.accelerators:
        if not each.fits:
            found.append(_short(each, "accelerators", fix))
    for each in proof.hosts:
        if not each.fits:
            found.append(_short(each, "hosts", ""))
    return found


def _short(each: Together, error: str, fix: str) -> Problem:
    staying = []
    for name, sizes in each.staying.items():
        for component, size in sizes.items():
            if size:
                staying.append(f"{component} of {name} stays with {exact_bytes(size)}")
    return problem(
        "runs-do-not-fit",
        "memory",
        error=error,
        numbers=listed(each.numbers),
        total=exact_bytes(each.total_bytes),
        room=exact_bytes(each.room_bytes),
        works=each.works,
        work=exact_bytes(each.work_bytes),
        staying="\n".join(staying),
        fix=fix,
    )


def _fix(
    runs: Sequence[PlannedRun],
    proof: JointProof,
    planning: Planning,
    command: Callable[[Mapping[str, Sequence[str]]], str],
) -> str:
    """Return a command with which the runs fit: some components leave their accelerators between their stages.

    Each proposal is planned and proven before it is made; the one that changes the fewest components is taken.
    """
    lines: list[tuple[str, str]] = []
    by_name = {run.name: run for run in runs}
    for each in proof.accelerators:
        for name, sizes in each.staying.items():
            case = by_name[name].job.case
            for component, size in sizes.items():
                line = (name, f"{case.block(component)}.enable_offload=true")
                can_leave = not case.offload.get(component, False)
                if size and not each.fits and can_leave and line not in lines:
                    lines.append(line)
    every = len(lines)
    for count in dict.fromkeys((*range(1, min(_STAGED, every) + 1), every)):
        for chosen in itertools.combinations(lines, count):
            more: dict[str, list[str]] = {}
            for name, line in chosen:
                more.setdefault(name, []).append(line)
            if chosen and _fits_with(runs, more, planning):
                return command(more)
    return "place the runs on other accelerators: cluster.component_placement.<component>=<place>"


def _fits_with(
    runs: Sequence[PlannedRun], more: Mapping[str, Sequence[str]], planning: Planning
) -> bool:
    """Return whether the runs fit together if some of them have further words. `more`: run -> its further words."""
    changed: list[PlannedRun] = []
    for run in runs:
        job = run.job
        if run.name in more:
            try:
                job = planning(run.name, more[run.name])
            except ConfigError:
                return False
        changed.append(dataclasses.replace(run, job=job))
    return proof_of(changed).fits


def listed(numbers: Sequence[int] | frozenset[int]) -> str:
    """Return numbers of accelerators as text, such as 0-3,5."""
    return str(Ranges.of(range(n, n + 1) for n in numbers))
