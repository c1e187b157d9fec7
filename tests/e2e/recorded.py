"""Actors that write down which samples they learn, for tests that count them: a line for each rank and iteration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rlplace.tokens import Tokens
from rlplace.trajectory import Trajectory
from rlplace.workers.roles.actor import LmActor, PolicyActor

FILE = "learned.jsonl"  # in runner.output_dir


def write(actor: PolicyActor | LmActor, ids: list[Any], iteration: int) -> None:
    line = {"iteration": iteration, "rank": actor.context.rank, "ids": ids}
    with open(
        Path(actor.config.config.runner.output_dir) / FILE, "a", encoding="utf-8"
    ) as file:
        file.write(json.dumps(line) + "\n")


def of_prompt(tokens: Tokens) -> str:
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of each iteration and rank, in their order: a run that goes back learns some anew."""
    lines = [
        json.loads(line)
        for line in (folder / FILE).read_text(encoding="utf-8").splitlines()
    ]
    last = {(line["iteration"], line["rank"]): line for line in lines}
    return [last[place] for place in sorted(last)]


class RecordedPolicyActor(PolicyActor):
    """Of `tests.gyms:Numbered-v0`, whose observations say which step of which episode they are of: [T, B, 3]."""

    def _receive(self, version: int) -> Trajectory:
        trajectory = super()._receive(version)
        write(self, trajectory.observations[:, :, :3].astype(int).tolist(), version)
        return trajectory


class RecordedLmActor(LmActor):
    """Group, sample and a hash of the prompt, in the order in which they are learned."""

    def _receive(self, iteration: int, part: int) -> Any:
        shard, experience = super()._receive(iteration, part)
        samples = (
            []
            if experience is None
            else [sample for group in experience.groups for sample in group]
        )
        if samples:
            ids = [
                [s.group, s.sample, of_prompt(s.tokens[: int(s.mask.argmax())])]
                for s in samples
            ]
            write(self, ids, iteration)
        return shard, experience
