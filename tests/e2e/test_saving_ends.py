"""Saving that is interrupted, in runs on Ray: the driver is killed in the middle of it, or the disk is full."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import AUTO, find, verify
from tests.e2e.training import (
    PLACEMENTS,
    SMALL,
    finish,
    placed,
    read_until,
    start,
    train,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

JOB = (
    *SMALL,
    *placed(*PLACEMENTS["hybrid_ppo"]),
    *(
        "actor.optimizer.schedule=constant",
        "env.id=CartPole-v1",
        "runner.stop_at_return=null",
    ),
    *("checkpoint.every=1", "actor.model.hidden=[256, 256]"),
)
ENDLESS = "runner.total_iterations=390625"
MOMENTS = 5


def newest(output: Path) -> Checkpoint:
    """Return the newest checkpoint, every byte of which was read."""
    checkpoint = find(AUTO, output / "hybrid_ppo")
    assert checkpoint is not None
    verify(checkpoint)
    return checkpoint


def test_a_driver_that_is_killed_while_it_saves_needs_resume_auto_alone(
    tmp_path: Path,
) -> None:
    moments, done = random.Random("while it saves"), 0
    for _ in range(MOMENTS):
        process = start("hybrid_ppo", tmp_path, *JOB, ENDLESS, "resume=auto")
        seen = read_until(
            process, f"{done + 2:5} "
        )  # what an earlier run has left is swept by now
        assert not done or f"continues after iteration {done}\n" in seen
        (checkpoints,) = tmp_path.glob("*/*/checkpoints")
        while not [*checkpoints.glob("*.part")]:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        left = [part.name for part in checkpoints.glob("*.part")]
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        before, done = done, newest(tmp_path).iteration
        print(
            f"killed after {before} iterations and more: {done} are saved, {left} was being written"
        )
        assert done > before
    run = train(
        "hybrid_ppo",
        tmp_path,
        *JOB,
        "resume=auto",
        f"runner.total_iterations={done + 2}",
    )
    assert run.code == 0, run.err
    assert [line["iteration"] for line in run.metrics()] == list(range(1, done + 3))


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of `size`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_only(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "24m") as output:
        process = start("hybrid_ppo", output, *JOB, ENDLESS)
        seen, done = read_until(process, "    3 "), 3
        (folder,) = output.glob("*/*")
        ballast = folder.parent / "ballast"
        space = os.statvfs(output)
        ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - (256 << 10)))
        kept = newest(output)
        seen += read_until(process, f"{(done := done + 5):5} ")
        assert newest(output).iteration - kept.iteration <= 1, (
            "one may have been all but written"
        )
        ballast.unlink()
        seen += read_until(process, f"{(done := done + 5):5} ")
        assert newest(output).iteration > kept.iteration + 1
        process.send_signal(signal.SIGINT)
        run = finish(process, output, seen)
        assert run.code == 128 + signal.SIGINT
        assert "the disk is full" in run.err
        assert "bytes are free in" in run.err
        assert len(run.metrics()) == run.summary()["iterations"] >= done
        assert newest(output).iteration == run.summary()["iterations"]
