"""What the record of a call keeps of its stopwatches."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict

import pytest

from rlplace.stopwatch import MOST_LAPS, CallRecord, Recorder, Stopwatch


def recorded() -> CallRecord:
    recorder = Recorder("run")
    with recorder:
        outer = Stopwatch("sim", "wait")
        sum(range(200_000))
        outer.lap("sim", 8)
        inner = Stopwatch()
        for _ in range(3):
            time.sleep(0.01)
            inner.lap("exchange")
        outer.lap("wait")
        sum(range(200_000))
        outer.lap("sim", 8)
    return recorder.record()


def test_laps_of_one_part_and_size_are_summed_and_waiting_is_no_processor_time() -> (
    None
):
    record = recorded()
    parts = {part.name: part for part in record.parts}
    assert (parts["sim"].laps, parts["sim"].size) == (2, 8.0)
    assert parts["sim"].least_cpu_s <= parts["sim"].cpu_s / 2 <= parts["sim"].wall_s
    assert parts["exchange"].laps == 3
    assert parts["exchange"].blocked_s > 0.008 > parts["exchange"].cpu_s / 3
    assert record.cpu_s < record.seconds - 0.03
    assert record.process_cpu_s >= record.cpu_s >= parts["sim"].cpu_s


def test_sizes_that_differ_by_less_than_two_digits_are_one_part_of_their_mean() -> None:
    watch = Stopwatch(read=lambda: (0.0, 0.0))
    watch.lap("begin")
    for size in (1001, 1003, 1201):
        watch.lap("learn", size)
    assert [(part.size, part.laps) for part in watch.parts()] == [
        (0.0, 1),
        (1002.0, 2),
        (1201.0, 1),
    ]


def test_laps_after_the_thread_was_off_its_processor_are_parts_of_their_own() -> None:
    #  sim 1 after the begin, a wait with sleep, sim 2 after it, a wait without, sim 3
    times = iter(
        [(0.0, 0.0), (1.0, 1.0), (5.0, 1.5), (7.0, 3.5), (8.0, 4.5), (9.0, 5.5)]
    )
    watch = Stopwatch(read=lambda: next(times))
    for part in ("sim", "wait", "sim", "wait", "sim"):
        watch.lap(part)
    found = [(part.name, part.cold, part.laps, part.cpu_s) for part in watch.parts()]
    assert found == [
        ("sim", True, 2, 3.0),
        ("wait", True, 1, 0.5),
        ("wait", False, 1, 1.0),
        ("sim", False, 1, 1.0),
    ]


def test_spans_are_those_of_each_stopwatch_within_the_call() -> None:
    record = recorded()
    outer, inner = record.spans
    assert [outer.names[which] for which in outer.which] == ["sim", "wait", "sim"]
    assert [inner.names[which] for which in inner.which] == ["exchange"] * 3
    assert record.began_s <= outer.began_s <= outer.ends[0] <= inner.began_s
    assert list(inner.ends) == sorted(inner.ends)
    assert (
        inner.ends[-1]
        <= outer.ends[1]
        <= outer.ends[2]
        <= record.began_s + record.seconds
    )
    assert time.time() - 60 < record.began_s < time.time()


def test_a_stopwatch_of_another_thread_or_after_the_call_belongs_to_no_record() -> None:
    recorder = Recorder("run")
    with recorder:
        other = threading.Thread(target=lambda: Stopwatch().lap("elsewhere"))
        other.start()
        other.join()
    Stopwatch().lap("later")
    assert recorder.record().parts == ()


def test_numbers_of_a_distribution_come_home_with_the_call() -> None:
    recorder = Recorder("run")
    with recorder:
        for watch in (Stopwatch(), Stopwatch()):
            watch.lap("sim")
        for tokens in (3, 5):
            watch.draw("tokens", tokens)
    assert {name: list(values) for name, values in recorder.record().draws.items()} == {
        "tokens": [3.0, 5.0]
    }


def test_metrics_have_the_parts_that_were_announced_and_those_that_came() -> None:
    watch = Stopwatch("sim", "wait")
    watch.lap("put")
    assert {
        name: metric.value > 0 for name, metric in watch.metrics("env").items()
    } == {
        "env/sim_s": False,
        "env/wait_s": False,
        "env/put_s": True,
    }
    assert watch.seconds["put"] == pytest.approx(next(watch.parts()).wall_s)


def test_of_many_laps_short_ones_are_put_together_and_each_part_keeps_its_seconds() -> (
    None
):
    """Two parts take turns, for a millisecond and for two; in their midst is a wait of a fifth of all."""
    steps = [0.001, 0.002] * 50_000
    steps[50_001] += 37.5
    times = itertools.accumulate(steps, initial=0.0)
    watch = Stopwatch(read=lambda: (next(times), 0.0))
    for lap in range(len(steps)):
        watch.lap(("sim", "wait")[lap % 2])
    spans = watch.spans(0.0)
    assert MOST_LAPS / 8 < len(spans.ends) <= MOST_LAPS
    assert list(spans.ends) == sorted(spans.ends)
    assert spans.ends[-1] == pytest.approx(187.5)
    seconds, longest, begin = defaultdict[str, float](float), 0.0, 0.0
    for which, end in zip(spans.which, spans.ends, strict=True):
        seconds[spans.names[which]] += end - begin
        longest = max(longest, (end - begin) % 37.5)
        begin = end
    assert seconds == {"sim": pytest.approx(50.0), "wait": pytest.approx(137.5)}
    assert longest < 187.5 / 500
