"""Files with groups of samples that were generated ahead of learning.

The files are named by global group numbers, so that any number of ranks can read what another number of ranks has
written.

::

    groups_00000-00007.npz    tokens, mask, logprobs, versions    of all samples, one after the other
                              routes                              the same, if samples have them
                              index                               JSON: what was asked, and the rest of each sample
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.envs.text import Transcript
from rlplace.json_text import parsed
from rlplace.tokens import Files, Routes, Sample
from rlplace.workers.saving import unreadable_state

Group = tuple[Sample, ...]
# iteration -> group number -> group, in the order of completion
Kept = dict[int, dict[int, Group]]

_ARRAYS = ("tokens", "mask", "logprobs", "versions")
_ROUTES = "routes"
_VALUES = ("group", "sample", "reward", "rewards", "turns", "truncated")


def write(
    folder: Path,
    groups: range,
    asked: str,
    kept: Mapping[int, list[Group]],
    *,
    text: bool,
) -> list[str]:
    """Write this rank's groups that are generated but not learned yet as one file in `folder`; return a list with its
    name.

    The file is flushed to disk. If `groups` is empty, write nothing and return an empty list.

    `groups`: group numbers that this rank owns. `asked`: text that describes the prompts and rewards of the config;
    `read` compares it. `kept`: iteration -> groups to write. `text`: whether to write the answers and replies of the
    transcripts. Of images, only digests are written, because the task can make the images again.
    """
    if not groups:
        return []
    samples = [
        (iteration, sample)
        for iteration, whole in kept.items()
        for group in whole
        for sample in group
    ]
    index = [
        {"iteration": i, "length": s.weight, "ended": s.ended, "parts": s.parts}
        | {name: getattr(s, name) for name in _VALUES}
        for i, s in samples
    ]
    for entry, (_, sample) in zip(index, samples, strict=True):
        entry["images"] = [digest.decode() for digest in digests(sample.images)]
    if text:
        for entry, (_, sample) in zip(index, samples, strict=True):
            entry |= {
                "answers": sample.transcript.answers,
                "replies": sample.transcript.replies,
                "opened": sample.transcript.opened,
            }
    arrays = {
        n: np.concatenate([getattr(s, n) for _, s in samples])
        if samples
        else np.empty(0)
        for n in _ARRAYS
    }
    arrays |= _routes([sample for _, sample in samples])
    header = json.dumps({"asked": asked, "samples": index}).encode()
    name = f"groups_{groups.start:05}-{groups.stop - 1:05}.npz"
    with open(folder / name, "wb") as out:
        np.savez(
            out, allow_pickle=False, index=np.frombuffer(header, np.uint8), **arrays
        )
        out.flush()
        os.fsync(out.fileno())
    return [name]


def read(folder: Path, groups: range, asked: str) -> Kept:
    """Return the saved groups with numbers in `groups`, as iteration -> number -> group, from all files in `folder`.

    `asked`: text that describes the prompts and rewards of the config; files with a different text are ignored. In the
    returned samples, the transcripts have no prompt and empty `facts`, and each image is replaced by its digest. Raises
    ConfigError for an unreadable file.
    """
    kept: Kept = {}
    for file in sorted(folder.glob("groups_*.npz")):
        first, last = map(int, re.findall("[0-9]+", file.stem))
        if max(first, groups.start) >= min(last + 1, groups.stop):
            continue
        try:
            samples = _samples(file, asked)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            raise unreadable_state("env", file, error) from error
        for iteration, sample in samples:
            if sample.group in groups:
                whole = kept.setdefault(iteration, {})
                whole[sample.group] = (*whole.get(sample.group, ()), sample)
    return kept


def _routes(samples: Sequence[Sample]) -> dict[str, Routes]:
    """Return the name of the array with all routes -> the routes of all samples; empty if no sample has routes.

    For a sample without routes, such as one that failed, all routes are unknown.
    """
    known = [sample.routes for sample in samples if sample.routes is not None]
    if not known:
        return {}
    found = []
    for sample in samples:
        routes = sample.routes
        if routes is None:
            shape = (sample.weight, *known[0].shape[1:])
            routes = np.full(shape, -1, known[0].dtype)
        found.append(routes)
    return {_ROUTES: np.concatenate(found)}


def digests(images: Files) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(image).hexdigest().encode() for image in images)


def _samples(file: Path, asked: str) -> list[tuple[int, Sample]]:
    with np.load(file, allow_pickle=False) as stored:
        index = parsed(stored["index"].tobytes())
        if index["asked"] != asked:
            return []
        names = [*_ARRAYS, *({_ROUTES} & {*stored.files})]
        arrays = {name: stored[name] for name in names}
    samples = []
    start = 0
    for entry in index["samples"]:
        stop = start + entry["length"]
        values = {name: array[start:stop] for name, array in arrays.items()} | {
            name: entry[name] for name in _VALUES
        }
        images = tuple(digest.encode() for digest in entry.get("images", ()))
        # Files of older versions do not say why an episode ended, and have no parts
        sample = Sample(
            **values,
            images=images,
            ended=entry.get("ended", ""),
            parts=tuple(entry.get("parts", ())),
        )
        samples.append((entry["iteration"], _with_text(sample, entry)))
        start = stop
    return samples


def _with_text(sample: Sample, entry: Mapping[str, Any]) -> Sample:
    if "answers" not in entry:
        return sample
    answers = tuple(entry["answers"])
    replies = tuple(entry["replies"])
    facts = dict[str, Any]()
    tokens = sample.response_tokens
    cut = sample.truncated
    text = Transcript(
        prompt="",
        answers=answers,
        replies=replies,
        facts=facts,
        tokens=tokens,
        truncated=cut,
        # Files of older versions do not have it
        opened=entry.get("opened", ""),
    )
    return dataclasses.replace(sample, transcript=text)
