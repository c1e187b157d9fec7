"""Checkpoints for tests, as a driver and its workers write them; run as a script, a run that is killed over and over.

`python -m tests.checkpoint_writer RUN KILLS`: in RUN, processes save one checkpoint after another; each is killed by
SIGKILL at a moment drawn by its number: at one of its calls that touch files, or after some time. Two of ten deaths
are set: one between two saves, one before a commit. After each death the newest checkpoint must be whole. Prints the
moments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rlplace.checkpoints import report_written
from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import find, verify
from rlplace.checkpoints.store import Contents, Store

RANKS = {"actor": 2, "env": 1}
TEXTS = {"config.yaml": "seed: 1\n", "plan.json": "{}\n", "run.json": "{}\n"}
WATCHED = ("open", "os.", "shutil.")  # audit events
CALLS_OF_A_SAVE = 120  # about as many events has one
PATIENCE_S = 20.0


def contents(
    version: int = 1, score: float | None = None, texts: Mapping[str, str] = TEXTS
) -> Contents:
    return Contents(
        ranks=RANKS,
        texts=texts,
        version=version,
        score=score,
        libraries={"rlplace": "0.1.0"},
    )


def write_ranks(part: Path, size: int = 5000) -> None:
    """What the workers do."""
    content = random.Random(part.name)
    for component, ranks in RANKS.items():
        for rank in range(ranks):
            file = part / component / f"shard_{rank}.bin"
            file.write_bytes(content.randbytes(size + rank))
            report_written(part / component, rank, [file.name])


def save(
    store: Store, iteration: int, *, score: float | None = None, size: int = 5000
) -> Checkpoint:
    """One checkpoint, and what is kept after it."""
    part = store.begin(iteration, RANKS)
    write_ranks(part, size)
    of = contents(version=iteration, score=score)
    checkpoint = store.commit(
        part, of, timeout_s=PATIENCE_S, cancelled=threading.Event()
    )
    store.retain(checkpoint)
    return checkpoint


def killed(run: Path, number: int, first: int, told: int) -> str:
    """Save until death, and write the number of each whole checkpoint to `told`."""
    store = Store(run, keep_last=1, keep_best=0)
    if number % 10 == 0:
        os.write(told, f"{number} between two saves\n".encode())
        save(store, first)
        signal.raise_signal(signal.SIGKILL)
    if number % 10 == 1:
        os.write(told, f"{number} before a commit\n".encode())
        write_ranks(store.begin(first, RANKS))
        signal.raise_signal(signal.SIGKILL)
    moment = random.Random(number)
    if moment.random() < 0.25:
        delay_s = moment.uniform(0.001, 0.05)
        os.write(told, f"{number} after {delay_s:.4f} s\n".encode())
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        left = moment.randrange(CALLS_OF_A_SAVE * 2)
        os.write(told, f"{number} at call {left}\n".encode())

        def count(event: str, arguments: object) -> None:
            nonlocal left
            if event.startswith(WATCHED):
                left -= 1
                if left < 0:
                    signal.raise_signal(signal.SIGKILL)  # which is no watched call

        sys.addaudithook(count)
    deadline_s, iteration = time.monotonic() + PATIENCE_S, first
    while time.monotonic() < deadline_s:
        save(store, iteration)
        os.write(told, f"= {iteration}\n".encode())
        iteration += 1
    return "the moment never came"


def main(run: Path, kills: int) -> None:
    newest = 0
    for number in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            sys.exit(killed(run, number, newest + 1, writing))
        os.close(writing)
        with open(reading, encoding="utf-8") as told:
            lines = told.read().splitlines()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, (number, status)
        committed = [
            int(line.removeprefix("= ")) for line in lines if line.startswith("= ")
        ]
        newest = max([newest, *committed])
        found = find("auto", run.parent)
        if found is None:
            assert newest == 0, f"{lines}: nothing is left of {newest}"
        else:
            assert found.iteration in (newest, newest + 1), (
                f"{lines}: {found.folder} of {newest}"
            )
            assert not found.notes, found.notes
            verify(found)
            newest = found.iteration
        parts = sorted(f.name for f in (run / "checkpoints").glob("*.part"))
        print(lines[0], "| newest", newest, "| left", *parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
