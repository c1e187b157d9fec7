"""Checkpoints of a run on disk: written by all workers, whole or not at all.

::

    <run>/checkpoints/
        000012/                    after 12 iterations
            manifest.json          format, versions, size and SHA-256 of every other file
            config.yaml plan.json run.json
            actor/  critic/  reference/    safetensors, sharded as torch.distributed.checkpoint does
            env/                   simulators by rows
        000014.part/               is being written, or was when the run ended; never taken for a checkpoint
            actor/rank_00000.json  rank 0 has written its files: their sizes and SHA-256
            actor/rank_00001.failed    rank 1 could not: the text of its error
        latest                     the name of the newest

`store` writes them and removes old ones, `find` looks for the one to resume from, `checkpoint` reads one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

# Of a model's weights in one file, which rank 0 has on its host until it is written.
MODEL_FILE_BYTES = 4 << 30
# Of a rank's tensors in one file, which is in memory twice more while it is written.
STATE_FILE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and hash of a file as it was written."""

    bytes: int
    sha256: str


def record_of(file: Path) -> FileRecord:
    """Read a file and describe it. Raises OSError."""
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return FileRecord(bytes=content.tell(), sha256=digest.hexdigest())


def report_written(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Record that a rank has written these files, and no others, of its component's `folder`. Raises OSError."""
    files = {name: dataclasses.asdict(record_of(folder / name)) for name in names}
    write_whole(folder / f"rank_{rank:05}.json", json.dumps(files))


def report_failed(folder: Path, rank: int, text: str) -> None:
    """Record that a rank could not write its files. Raises OSError."""
    write_whole(folder / f"rank_{rank:05}.failed", text)


def write_whole(file: Path, text: str) -> None:
    """Replace a file by all of `text`, on the disk. Raises OSError; then the file is unchanged."""
    part = file.with_name(file.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def failed(folder: Path) -> tuple[str, str] | None:
    """Return the first rank that could not write its files, and why; None where there is none."""
    for report in sorted(folder.glob("rank_*.failed")):
        return report.stem, report.read_text(encoding="utf-8")
    return None


def written(folder: Path, ranks: int) -> dict[str, FileRecord] | None:
    """Return the files of a component by name, or None while one of its ranks has not reported."""
    reports = [folder / f"rank_{rank:05}.json" for rank in range(ranks)]
    if not all(report.exists() for report in reports):
        return None
    found: dict[str, FileRecord] = {}
    for report in reports:
        files = json.loads(report.read_text(encoding="utf-8"))
        for name, record in files.items():
            found[name] = FileRecord(**record)
    return found
