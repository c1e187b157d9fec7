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

from rlplace.json_text import parsed_object

# Most bytes of a file of a model's weights. Rank 0 keeps them on its host until the file is written.
MODEL_FILE_BYTES = 4 << 30
# Most bytes of a file of a rank's tensors. While the file is written, its bytes are in memory twice more.
STATE_FILE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file at the time it was written."""

    bytes: int
    sha256: str


def record_of(file: Path) -> FileRecord:
    """Read a whole file and return its size and hash. Raises OSError."""
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return FileRecord(bytes=content.tell(), sha256=digest.hexdigest())


def report_written(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Write a report that the rank has written all its files. Raises OSError.

    `folder`: the folder of the rank's component in the checkpoint. `names`: the files that the rank has written there.
    """
    files = {name: dataclasses.asdict(record_of(folder / name)) for name in names}
    write_whole(folder / f"rank_{rank:05}.json", json.dumps(files))


def report_failed(folder: Path, rank: int, text: str) -> None:
    """Write a report that the rank could not write its files. Raises OSError.

    `folder`: the folder of the rank's component in the checkpoint. `text`: the reason.
    """
    write_whole(folder / f"rank_{rank:05}.failed", text)


def write_whole(file: Path, text: str) -> None:
    """Replace the content of a file by `text`, and wait until the content is on the disk.

    If this fails, raise OSError; the file is then unchanged.
    """
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
    """Return the name and the reason of the first rank that could not write its files; None if there is no such rank.

    `folder`: the folder of a component. A name is for example "rank_00001".
    """
    for report in sorted(folder.glob("rank_*.failed")):
        return report.stem, report.read_text(encoding="utf-8")
    return None


def written(folder: Path, ranks: int) -> dict[str, FileRecord] | None:
    """Return name -> record of all files that the ranks of a component have written.

    Return None until each rank has written its report. `folder`: the folder of the component. `ranks`: the number of
    ranks of the component. Raises ValueError for a report that cannot be read, with a text that names it.
    """
    reports = [folder / f"rank_{rank:05}.json" for rank in range(ranks)]
    if not all(report.exists() for report in reports):
        return None
    found: dict[str, FileRecord] = {}
    for report in reports:
        try:
            files = parsed_object(report.read_bytes().decode("utf-8"))
            for name, record in files.items():
                found[name] = FileRecord(**record)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{report}: {error}") from error
    return found
