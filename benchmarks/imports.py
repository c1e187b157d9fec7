"""Import the launch scripts and configs of checkouts of other libraries, plan each, and compare with the original.

    python benchmarks/imports.py verl=DIR openrlhf=DIR ... [--failures] [--only TEXT] [--records FILE]

Prints a table with one row for each checkout: files of reinforcement learning, how many plan, and how many are equal
to what the library itself would run. `--failures` adds each file that does not plan or is not equal, with the reason.
`--records` writes the result of each file as JSON.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlplace.errors import ProblemsError

_SKIPPED = ("/.git/", "/node_modules/", "/.github/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Which files of a library train a model by reinforcement learning.

    `suffixes`: endings of their names. `wanted`: patterns that all occur in such a file. `unwanted`: patterns of files
    that look alike and are none, such as the evaluation of a model.
    """

    suffixes: tuple[str, ...]
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


KINDS: Mapping[str, tuple[Kind, ...]] = {
    "verl": (
        Kind(
            suffixes=(".sh",),
            wanted=(r"actor_rollout_ref\.", r"main_ppo|ppo_trainer|main"),
            unwanted=(r"main_generation",),
        ),
        Kind(suffixes=(".yaml",), wanted=(r"(?m)^actor_rollout_ref:",)),
    ),
    "openrlhf": (Kind(suffixes=(".sh",), wanted=(r"train_ppo_ray",)),),
    "slime": (
        Kind(suffixes=(".sh",), wanted=(r"--rollout-batch-size", r"train\w*\.py")),
    ),
    "areal": (
        Kind(
            suffixes=(".yaml",),
            wanted=(r"(?m)^gconfig:", r"(?m)^actor:"),
        ),
    ),
    "skyrl": (
        Kind(suffixes=(".sh",), wanted=(r"trainer\.policy\.model", r"generator\.")),
        Kind(suffixes=(".yaml",), wanted=(r"(?m)^trainer:", r"(?m)^generator:")),
    ),
    "roll": (
        Kind(suffixes=(".yaml",), wanted=(r"(?m)^actor_train:", r"(?m)^actor_infer:")),
    ),
    "rlinf": (
        Kind(
            suffixes=(".yaml",),
            wanted=(r"component_placement", r"(?m)^actor:", r"(?m)^algorithm:"),
            unwanted=(r"only_eval: *[Tt]rue", r"task_type: *\S*(sft|eval|collect)"),
        ),
    ),
    "nemo_rl": (
        Kind(suffixes=(".yaml",), wanted=(r"(?m)^(grpo|ppo):|(?m)^defaults:",)),
    ),
    "trl": (
        Kind(suffixes=(".py",), wanted=(r"(GRPO|RLOO)Trainer\(",)),
        Kind(suffixes=(".yaml",), wanted=(r"(?m)^num_generations:",)),
    ),
}


def files_of(library: str, root: Path) -> Iterator[Path]:
    """Yield the files of a checkout that train a model by reinforcement learning."""
    for path in sorted(root.rglob("*")):
        if any(part in f"{path}/" for part in _SKIPPED) or not path.is_file():
            continue
        for kind in KINDS[library]:
            if path.suffix not in kind.suffixes:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if all(re.search(p, text) for p in kind.wanted) and not any(
                re.search(p, text) for p in kind.unwanted
            ):
                yield path


@dataclasses.dataclass(slots=True)
class Record:
    """The result of one file: whether it plans, whether it is equal to the original, and the reason if not."""

    library: str
    file: str
    plans: bool = False
    fits: bool | None = None
    code: str = ""
    reason: str = ""
    equal: bool | None = None
    differing: tuple[str, ...] = ()


def attempt(library: str, root: Path, path: Path) -> Record:
    """Return the record of one file."""
    from rlplace.imports import import_words
    from rlplace.runtime.prepare import prepare

    record = Record(library=library, file=str(path.relative_to(root)))
    try:
        imported = import_words(library, [str(path)])
    except ProblemsError as error:
        record.code = f"import: {error.problems[0].code}"
        record.reason = error.problems[0].render()
        return record
    try:
        prepared = prepare(imported.config, name=path.stem)
    except ProblemsError as error:
        record.code = f"plan: {error.problems[0].code}"
        record.reason = error.problems[0].render()
        return record
    record.plans = True
    record.fits = prepared.view.fits
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkouts", nargs="+", metavar="LIBRARY=DIR")
    parser.add_argument("--failures", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--records")
    options = parser.parse_args()
    records: list[Record] = []
    for word in options.checkouts:
        library, _, folder = word.partition("=")
        root = Path(folder).resolve()
        for path in files_of(library, root):
            if options.only in str(path):
                records.append(attempt(library, root, path))
        mine = [r for r in records if r.library == library]
        codes = collections.Counter(r.code for r in mine if not r.plans)
        print(library, len(mine), sum(r.plans for r in mine), dict(codes), flush=True)
    if options.failures:
        for record in records:
            if not record.plans:
                print(f"--- {record.library} {record.file}\n{record.reason}")
    if options.records:
        Path(options.records).write_text(
            json.dumps([dataclasses.asdict(r) for r in records], indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
