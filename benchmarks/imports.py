"""Import the launch scripts and configs of checkouts of other libraries, plan each, and compare with the original.

    python benchmarks/imports.py verl=DIR openrlhf=DIR ... [--failures] [--only TEXT] [--records FILE]

Prints a table with one row for each checkout: files of reinforcement learning, how many plan, and how many are equal
to what the library itself would run. Two things are compared, each by the converted config that follows from it:

- the settings as the library resolves them by itself, with all its defaults: by Hydra or OmegaConf, or by the
  library's own parser of arguments in a process without a network, in which modules that are not installed are stubs
  (`benchmarks/imports_resolved.py`); where a library cannot resolve a file here, it is not counted as compared
- of scripts, the words that a reader gets who runs nothing, with those that bash gives

`--failures` adds each file that does not plan or is not equal, with the reason. `--records` writes the result of each
file as JSON.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rlplace.config.read import try_config
from rlplace.errors import ProblemsError
from rlplace.imports import (
    Imported,
    command,
    import_settings,
    import_words,
    settings_of,
)
from rlplace.imports.scripts import Reading, Script, ran_script
from rlplace.runtime.prepare import prepare
from rlplace.tables import table

_SKIPPED = ("/.git/", "/node_modules/", "/.github/")
_RESOLVED = Path(__file__).with_name("imports_resolved.py")
_BASH = Reading(runs=True)
# What a resolved config has no word for
_NOT_COMPARED = re.compile(r"runner\.output_dir|env\..*|runner\.sinks.*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Which files of a library train a model by reinforcement learning.

    `suffixes`: endings of their names. `wanted`: patterns that all occur in such a file. `unwanted`: patterns of files
    that look alike and are none, such as the evaluation of a model. `unwanted_names`: patterns in their paths.
    """

    suffixes: tuple[str, ...]
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    unwanted_names: tuple[str, ...] = ()


KINDS: Mapping[str, tuple[Kind, ...]] = {
    "verl": (
        Kind(
            suffixes=(".sh",),
            wanted=(r"actor_rollout_ref\.", r"trainer\.n_gpus_per_node|main_ppo"),
            unwanted=(r"main_generation", r"distillation\.enabled=['\"]?[Tt]rue"),
        ),
    ),
    "openrlhf": (Kind(suffixes=(".sh",), wanted=(r"train_ppo_ray",)),),
    "slime": (
        Kind(suffixes=(".sh",), wanted=(r"--rollout-batch-size", r"train\w*\.py")),
    ),
    "areal": (Kind(suffixes=(".yaml",), wanted=(r"(?m)^gconfig:", r"(?m)^actor:")),),
    "skyrl": (
        Kind(
            suffixes=(".sh",), wanted=(r"trainer\.policy\.model", r"generator\.\w+[.=]")
        ),
    ),
    "roll": (
        Kind(
            suffixes=(".yaml",),
            wanted=(r"(?m)^actor_train:", r"(?m)^actor_infer:"),
            unwanted=(r"(?m)^student",),
            unwanted_names=(r"/tests/distributed/",),
        ),
    ),
    "rlinf": (
        Kind(
            suffixes=(".yaml",),
            wanted=(r"component_placement", r"(?m)^actor:", r"(?m)^algorithm:"),
            unwanted=(
                r"only_eval: *[Tt]rue",
                r"task_type: *\S*(sft|eval|collect)",
                r"loss_type: *\S*(sft|bc|dagger)",
            ),
        ),
    ),
    "nemo_rl": (
        Kind(
            suffixes=(".yaml",),
            wanted=(r"(?m)^(grpo|ppo):",),
            unwanted_names=(r"distill", r"sft|dpo|(^|/)rm\b", r"reference_configs"),
        ),
    ),
    "trl": (
        Kind(
            suffixes=(".py",),
            wanted=(r"(GRPO|RLOO)Trainer\(",),
            unwanted_names=(r"/tests/", r"/trl/trl/"),
        ),
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
            if any(re.search(name, str(path)) for name in kind.unwanted_names):
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if all(re.search(p, text) for p in kind.wanted) and not any(
                re.search(p, text) for p in kind.unwanted
            ):
                yield path


@dataclasses.dataclass(slots=True)
class Record:
    """The result of one file.

    `plans`: whether it plans. `code`, `reason`: the problem, if it does not. `as_text`: whether the reader that runs
    nothing gives the same config as bash; None: it is no script. `equal`: whether the config is that of the settings
    as the library resolves them; None: they could not be resolved here. `differing`: keys in which they differ.
    """

    library: str
    file: str
    plans: bool = False
    code: str = ""
    reason: str = ""
    as_text: bool | None = None
    equal: bool | None = None
    unresolved: str = ""
    differing: tuple[str, ...] = ()


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return dotted key -> value of a nested mapping."""
    found: dict[str, object] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def whole(imported: Imported) -> dict[str, object]:
    """Return dotted key -> value of a converted config with all its defaults."""
    config, _ = try_config(imported.config)
    if config is None:
        return flat(imported.config)
    found = flat(dataclasses.asdict(config))
    # Two ways to write the same
    if found.get("algorithm.clip_ratio_high") is None:
        found["algorithm.clip_ratio_high"] = found.get("algorithm.clip_ratio_low")
    if found.get("algorithm.normalize_advantages") is None:
        of_ppo = found.get("algorithm.name") == "ppo"
        found["algorithm.normalize_advantages"] = of_ppo
    if found.get("algorithm.dynamic_sampling") is None:
        of_dapo = found.get("algorithm.name") == "dapo"
        found["algorithm.dynamic_sampling"] = of_dapo
    if not found.get("runner.eval_every"):
        found = {k: v for k, v in found.items() if not k.startswith("runner.eval_")}
    alone = found.get("runner.eval_samples") == 1
    if found.get("runner.eval_temperature") is None and alone:
        found["runner.eval_temperature"] = 0.0
    if found.get("runner.eval_temperature") == 0:
        # The likeliest token is taken, whatever the share
        found["runner.eval_top_p"] = None
    elif found.get("runner.eval_top_p") is None:
        found["runner.eval_top_p"] = found.get("rollout.top_p")
    return found


def compared(one: Imported, other: Imported) -> tuple[str, ...]:
    """Return the keys in which two converted configs differ, with both values."""
    a, b = whole(one), whole(other)
    return tuple(
        f"{key}: {a.get(key)} | {b.get(key)}"
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) and not _NOT_COMPARED.fullmatch(key)
    )


def attempt(library: str, root: Path, path: Path) -> Record:
    """Return the record of one file."""
    record = Record(library=library, file=str(path.relative_to(root)))
    script = path.suffix == ".sh"
    imported: Imported | None = None
    text: Imported | None = None
    try:
        with mock.patch.object(command, "ran_script", lambda file, _: launch_of(file)):
            imported = import_words(library, [str(path)], 0, _BASH if script else None)
    except ProblemsError as error:
        record.code = f"import: {error.problems[0].code}"
        record.reason = error.problems[0].render()
    if script:
        try:
            text = import_words(library, [str(path)])
        except ProblemsError as error:
            record.reason += error.problems[0].render()
        record.as_text = (
            imported is not None and text is not None and not compared(imported, text)
        )
    imported = imported or text
    if imported is None:
        return record
    try:
        prepare(imported.config, name=path.stem)
        record.plans = True
        record.code = record.reason = ""
    except ProblemsError as error:
        record.code = f"plan: {error.problems[0].code}"
        record.reason = error.problems[0].render()
    try:
        mapping = resolved(library, root, path)
        truth = import_settings(library, settings_of(mapping))
    except Unresolved as error:
        record.unresolved = str(error)
        return record
    except ProblemsError as error:
        record.unresolved = error.problems[0].render()
        record.equal = False
        return record
    record.differing = compared(imported, truth)
    record.equal = not record.differing
    return record


class Unresolved(Exception):
    """The library cannot resolve a file here, for the reason that the text says."""


@functools.cache
def launch_of(path: Path) -> Script:
    """Return the words of the launch of a script, by bash. Raises ProblemsError."""
    return ran_script(path, _BASH)


def resolved(library: str, root: Path, path: Path) -> dict[str, Any]:
    """Return the settings of a file as the library resolves them, as a nested mapping. Raises Unresolved."""
    words: list[str] = []
    if path.suffix == ".sh":
        try:
            words = [word for word, _ in launch_of(path).words]
        except ProblemsError as error:
            raise Unresolved(error.problems[0].what) from error
    resolver = resolver_of(library, root)
    assert resolver.stdin is not None
    assert resolver.stdout is not None
    with tempfile.NamedTemporaryFile() as output:
        request = [output.name, str(path), *words]
        resolver.stdin.write(json.dumps(request) + "\n")
        resolver.stdin.flush()
        code = resolver.stdout.readline().strip()
        said = Path(output.name).read_text(encoding="utf-8", errors="replace")
    if code != "0":
        raise Unresolved(said.strip().rpartition("\n")[2][:300] or "no parser here")
    mapping: dict[str, Any] = json.loads(said.rpartition("\n@@")[2].split("\n")[0])
    return mapping


@functools.cache
def resolver_of(library: str, root: Path) -> subprocess.Popen[str]:
    """Return a process that resolves files of a library, one for each line of its input."""
    return subprocess.Popen(
        [sys.executable, str(_RESOLVED), library, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def commit_of(root: Path) -> str:
    """Return the commit of a checkout; "" if it is no repository."""
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def row(library: str, root: Path, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the row of a library in the table."""
    refused = collections.Counter(r.code for r in records if not r.plans)
    reasons = ", ".join(f"{count} {code}" for code, count in refused.most_common())
    plans = sum(r.plans for r in records)
    checked = [r for r in records if r.equal is not None]
    texts = [r for r in records if r.as_text is not None]
    return (
        library,
        commit_of(root),
        str(len(records)),
        f"{plans} ({100 * plans / max(1, len(records)):.0f} %)",
        f"{sum(bool(r.equal) for r in checked)} of {len(checked)}",
        f"{sum(bool(r.as_text) for r in texts)} of {len(texts)}" if texts else "-",
        reasons,
    )


_TITLES = (
    "library",
    "commit",
    "files",
    "plan",
    "equal to its own",
    "text = bash",
    "refused",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkouts", nargs="+", metavar="LIBRARY=DIR")
    parser.add_argument("--failures", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--records")
    options = parser.parse_args()
    records: list[Record] = []
    rows: list[tuple[str, ...]] = []
    for word in options.checkouts:
        library, _, folder = word.partition("=")
        root = Path(folder).resolve()
        paths = [p for p in files_of(library, root) if options.only in str(p)]
        mine = [attempt(library, root, path) for path in paths[:: options.every]]
        records += mine
        rows.append(row(library, root, mine))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table([_TITLES, *rows], gap=2))
    for record in records if options.failures else ():
        if not record.plans:
            print(f"--- refused: {record.library} {record.file}\n{record.reason}")
        if record.as_text is False:
            print(f"--- not as bash: {record.library} {record.file}")
        if record.unresolved:
            print(f"--- unresolved: {record.library} {record.file}")
            print(f"    {record.unresolved}")
        if record.differing:
            print(f"--- differs: {record.library} {record.file}")
            print("\n".join(f"    {line}" for line in record.differing))
    if options.records:
        Path(options.records).write_text(
            json.dumps([dataclasses.asdict(r) for r in records], indent=1),
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
