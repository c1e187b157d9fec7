"""How fast values travel between processes of one node, beside other libraries and the machine's own limits.

The other columns promise less: PUSH/PULL sockets of pyzmq (pickle 5, arrays out of band) have no keys, ends, deadlines
or recovery and run one to one; multiprocessing.Queue (bounded) has none of these either and copies arrays in band; the
Ray-actor channel has keys and loses everything with its actor.

    python benchmarks/comm.py                      the whole table: medians of 5 repetitions, everything in turns
    python benchmarks/comm.py --quick --rows small round-trip
    python benchmarks/comm.py --json comm.json     the figures as well

Read ratios, not absolutes: what else the machine does meets all columns alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import comm_jobs as jobs
from benchmarks.comm_sides import Queues, RayActors, Shared, Side, Sockets

MIB = 1 << 20
Measure = Callable[
    [Side, float], float
]  # side, and how much of the full number of messages to send


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a figure should be: itself, or as a ratio in which more is better."""

    absolute: float | None = None
    to_ray: float | None = None
    to_limit: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    what: str
    unit: str
    ours: Measure
    ray: Measure | None = None
    one_to_one: bool = True  # whether sockets and queues of other libraries can do it
    limit: Measure | None = None
    limit_is: str = ""
    goal: Goal

    @property
    def less_is_better(self) -> bool:
        return self.unit in ("µs", "% of a core")


def rate(
    size_bytes: int,
    count: int,
    *,
    pairs: int = 1,
    take: Callable[..., float] = jobs.get_all,
) -> Measure:
    """Messages per second, or MiB/s, from `pairs` producers to as many consumers of one channel."""
    capacity = max(4, min(1024, 4 * MIB // (size_bytes or 1)))
    warm_up = capacity + 2  # as many as can be under way

    def measure(side: Side, share: float) -> float:
        each = max(4, int(count * share))
        channel = side.channel(capacity)
        try:
            takers = [(take, channel, warm_up, each)] * pairs
            putters = [(jobs.put_all, channel, size_bytes, warm_up, each)] * pairs
            return sum(side.run(*takers, *putters)[:pairs]) * (
                size_bytes / MIB if size_bytes else 1
            )
        finally:
            channel.destroy()

    return measure


def latency(side: Side, share: float) -> float:
    channel = side.channel(16)
    count = max(50, int(1000 * share))
    try:
        return float(
            side.run(
                (jobs.get_paced, channel, count), (jobs.put_paced, channel, count)
            )[0]
        )
    finally:
        channel.destroy()


def round_trip(
    side: Side,
    share: float,
    *,
    ask: Callable = jobs.ask,
    answer: Callable = jobs.answer,
) -> float:
    there = side.channel(4)
    back = side.channel(4)
    count = max(50, int(2000 * share))
    try:
        return float(
            side.run((ask, there, back, count), (answer, there, back, count))[0]
        )
    finally:
        there.destroy()
        back.destroy()


def one_at_a_time(side: Side, share: float) -> float:
    """Microseconds of one way of a ping-pong, as the socket's beside it."""
    return round_trip(side, share, ask=jobs.ask_small, answer=jobs.answer_small) / 2


def idle(side: Side, share: float) -> float:
    channel = side.channel(4)
    try:
        return float(side.run((jobs.wait_in_vain, channel, max(2.0, 5.0 * share)))[0])
    finally:
        channel.destroy()


def weight_sync(*, load: bool) -> Measure:
    """1 GiB from 2 actor ranks to 2 rollout ranks, each byte counted once."""

    def measure(side: Side, share: float) -> float:
        channel = side.channel(100)
        versions = 4 if share < 1 else 6
        assert isinstance(side, Shared)
        folder = Path(
            tempfile.mkdtemp(dir=side.folder)
        )  # versions of one board only go up
        pushes = [
            (jobs.push, channel, folder, rank, 2, 1 << 30, versions) for rank in (0, 1)
        ]
        pulls = [
            (jobs.pull, channel, folder, rank, 2, versions, load) for rank in (0, 1)
        ]
        try:
            *ended, begun, begun_too = side.run(*pulls, *pushes)
        finally:
            channel.destroy()
            shutil.rmtree(folder)
        moments = zip(
            *ended, begun, begun_too, strict=True
        )  # of one version: two ends, two beginnings
        taken = [max(moment[:2]) - min(moment[2:]) for moment in moments]
        return 1024 / statistics.median(
            taken[2:]
        )  # both buffers have been written once then

    return measure


def memcpy(size_bytes: int) -> Measure:
    return lambda side, share: float(side.run((jobs.copy_memory, size_bytes))[0])


def socket_ping(side: Side, share: float) -> float:
    return statistics.fmean(
        _through_sockets(side, jobs.ping, max(50, int(2000 * share)))
    )


def socket_pour(side: Side, share: float) -> float:
    return _through_sockets(side, jobs.pour, max(100, int(50_000 * share)))[1]


def _through_sockets(side: Side, job: Callable[..., float], count: int) -> list[float]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        return side.run((job, one, True, count), (job, other, False, count))


def rows() -> list[Row]:
    ping: dict[str, Any] = {"limit": socket_ping, "limit_is": "socket, one way"}
    pour: dict[str, Any] = {"limit": socket_pour, "limit_is": "socket, 300 B each"}
    found = [
        Row(name="latency", what="small dict, one at a time, one way", unit="µs", ours=one_at_a_time,
            ray=one_at_a_time, **ping, goal=Goal(absolute=100, to_ray=20)),
        Row(name="latency-asleep", what="to a consumer that slept 2 ms", unit="µs", ours=latency, ray=latency, **ping,
            goal=Goal(absolute=100, to_ray=20)),
        Row(name="small", what="small dicts 1→1", unit="msg/s", ours=rate(0, 30_000), ray=rate(0, 30_000), **pour,
            goal=Goal(absolute=30_000, to_ray=20)),
        Row(name="small-4", what="small dicts 4→4", one_to_one=False, unit="msg/s", ours=rate(0, 8_000, pairs=4),
            ray=rate(0, 8_000, pairs=4), **pour, goal=Goal(absolute=20_000)),
        Row(name="round-trip", what="env → rollout → env, 64 envs", unit="µs", ours=round_trip, ray=round_trip, **ping,
            goal=Goal(absolute=300)),
    ]  # fmt: skip
    for size, label, count in ((64 << 10, "64 KiB", 4000), (MIB, "1 MiB", 1000)):
        measure = rate(size, count)
        found.append(Row(name=label, what=f"{label} arrays 1→1, owned", unit="MiB/s", ours=measure, ray=measure,
                         limit=memcpy(size), limit_is="memcpy",
                         goal=Goal(absolute=500 if size < MIB else 3000)))  # fmt: skip
    measure = rate(MIB, 250, pairs=4)
    found.append(Row(name="1 MiB-4", what="1 MiB arrays 4→4, owned", one_to_one=False, unit="MiB/s", ours=measure,
                     ray=measure, limit=memcpy(MIB), limit_is="memcpy",
                     goal=Goal(absolute=2000, to_ray=5)))  # fmt: skip
    for mib, count in ((16, 100), (256, 10)):
        measure = rate(mib * MIB, count)
        found.append(Row(name=f"{mib} MiB", what=f"{mib} MiB arrays 1→1, owned", unit="MiB/s", ours=measure,
                         ray=measure, limit=memcpy(mib * MIB), limit_is="memcpy",
                         goal=Goal(to_limit=0.45)))  # fmt: skip
    return [
        *found,
        Row(name="weights", one_to_one=False,
            what="weight sync 2→2, 1 GiB, mapped", unit="MiB/s", ours=weight_sync(load=False),
            limit=memcpy(64 * MIB), limit_is="memcpy", goal=Goal(to_limit=0.7)),
        Row(name="weights-loaded", one_to_one=False,
            what="and copied into 2 engines", unit="MiB/s", ours=weight_sync(load=True),
            limit=memcpy(64 * MIB), limit_is="memcpy", goal=Goal()),
        Row(name="idle", one_to_one=False,
            what="a consumer that waits in vain", unit="% of a core", ours=idle, goal=Goal(absolute=1)),
    ]  # fmt: skip


# ── running and telling ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians. Ratios: more is better, whatever the unit."""

    row: Row
    ours: float
    zmq: float | None
    queue: float | None
    ray: float | None
    limit: float | None

    def ratio(self, other: float | None) -> float | None:
        if other is None:
            return None
        if self.row.less_is_better:
            return other / self.ours
        return self.ours / other

    @property
    def verdicts(self) -> list[tuple[str, bool]]:
        """Each part of the goal, and whether it was reached."""
        goal = self.row.goal
        found = []
        if goal.absolute is not None:
            less = self.row.less_is_better
            met = self.ours <= goal.absolute if less else self.ours >= goal.absolute
            found.append((f"{'≤' if less else '≥'} {goal.absolute:,g}", met))
        for ratio, least, name in (
            (self.ratio(self.ray), goal.to_ray, "Ray"), (self.ratio(self.limit), goal.to_limit, "limit")
        ):  # fmt: skip
            if least is not None and ratio is not None:
                found.append((f"≥ {least:g} × {name}", ratio >= least))
        return found


def measure(
    chosen: Sequence[Row], repetitions: int, share: float, *, with_ray: bool
) -> list[Result]:
    ours = Shared(8)
    sockets = Sockets(2)
    queues = Queues()
    ray = RayActors(8) if with_ray else None
    figures: dict[str, list[tuple[float | None, ...]]] = {
        row.name: [] for row in chosen
    }
    try:
        for _ in range(repetitions):
            for row in chosen:
                limit = row.limit(ours, share) if row.limit else None
                found = row.ours(ours, share)
                # fewer messages where each takes a thousand times as long
                baseline = (
                    row.ray(ray, share * (0.03 if "MiB/s" not in row.unit else 0.3))
                    if row.ray and ray
                    else None
                )
                zmq = row.ours(sockets, share) if row.one_to_one else None
                queue = row.ours(queues, share * 0.3) if row.one_to_one else None
                figures[row.name].append((found, zmq, queue, baseline, limit))
                print(".", end="", file=sys.stderr, flush=True)
    finally:
        ours.close()
        sockets.close()
        if ray is not None:
            ray.close()
    print(file=sys.stderr)
    return [Result(row=row, **_medians(figures[row.name])) for row in chosen]


_COLUMNS = ("ours", "zmq", "queue", "ray", "limit")


def _medians(figures: Sequence[tuple[float | None, ...]]) -> dict[str, Any]:
    columns = zip(_COLUMNS, zip(*figures, strict=True), strict=True)
    return {
        name: None if column[0] is None else statistics.median(column)
        for name, column in columns
    }


def table(results: Sequence[Result]) -> str:
    lines = [
        (
            "what",
            "",
            "ours",
            "pyzmq",
            "×",
            "mp.Queue",
            "×",
            "Ray actor",
            "×",
            "limit",
            "of it",
            "",
            "goal",
            "",
        )
    ]
    for r in results:
        goals = ", ".join(text for text, _ in r.verdicts)
        met = all(met for _, met in r.verdicts)
        lines.append((
            r.row.what, r.row.unit, _number(r.ours), _number(r.zmq), _number(r.ratio(r.zmq)),
            _number(r.queue), _number(r.ratio(r.queue)), _number(r.ray), _number(r.ratio(r.ray)), _number(r.limit),
            _number(r.ratio(r.limit)), r.row.limit_is, goals, ("reached" if met else "MISSED") if goals else "",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = "<<>>>>>>>>><<<"
    return "\n".join(
        "  ".join(
            f"{cell:{to}{width}}"
            for cell, to, width in zip(line, aligned, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def main(arguments: Sequence[str]) -> None:
    every = rows()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in every], metavar="ROW",
                        help="of: " + ", ".join(row.name for row in every))  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="one repetition of a fifth of the messages"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--no-ray", action="store_true", help="leave the Ray-actor channel out"
    )
    parser.add_argument(
        "--json", type=Path, help="write the figures to this file as well"
    )
    options = parser.parse_args(arguments)
    chosen = [row for row in every if options.rows is None or row.name in options.rows]
    repetitions, share = (1, 0.2) if options.quick else (options.repetitions, 1.0)
    results = measure(chosen, repetitions, share, with_ray=not options.no_ray)
    print(table(results))
    if options.json:
        figures = {
            r.row.name: {"unit": r.row.unit}
            | {name: getattr(r, name) for name in _COLUMNS}
            for r in results
        }
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
