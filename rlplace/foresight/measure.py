"""Short runs of a job under other placements, to measure costs at sizes that the job's own placement does not have.

In a run under one placement, each lap has one size: for example one number of simulators for each rank, and one number
of samples in a minibatch. The placements with the fewest and with the most ranks give the two ends of the cost's line.
Sizes between them are interpolated.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplace.codes import config_error
from rlplace.config.yaml_text import to_yaml
from rlplace.contract.reading import read_job
from rlplace.contract.registry import job_of
from rlplace.foresight.known import FILE
from rlplace.foresight.model import model_of
from rlplace.foresight.profile import Profile, read_profile
from rlplace.json_text import read_object
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import placed_names

_TAIL = 12  # last lines of a failed run's output to show


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A job with one of the placements under which it is measured.

    `name`: the variant's name in messages. `mapping`: the whole config.
    """

    name: str
    mapping: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a short run.

    `seconds`: stage, or "iteration" -> its "predicted" seconds, from the run's own profile, and its "measured" seconds.
    """

    profile: Profile
    seconds: Mapping[str, Mapping[str, float]]


def variants(
    mapping: Mapping[str, Any], accelerators: int, staying: Collection[str] = ()
) -> Iterator[Variant]:
    """Yield the config as it is, then the config with other placements, which give other sizes of work to measure.

    Some of these placements may not be valid. `mapping`: the config. `accelerators`: the most ranks of a component.
    `staying`: components of a custom job whose placement is not changed, because they use no accelerators.
    """
    yield Variant(name="as written", mapping=mapping)
    config = read_job(mapping)
    model = model_of(config)
    # A custom job need not write a block for each component.
    own = job_of(config).components
    block = mapping["cluster"]["component_placement"]
    names = placed_names(block)
    kept = {name: text for name, text in _one_by_one(block) if name in staying}
    for count in dict.fromkeys((1, accelerators, max(1, accelerators // 2))):
        where = _first(count)
        what = "one rank of each" if count == 1 else f"{count} ranks of each"
        ranks = {name: min(count, _most_ranks(own.get(name), count)) for name in names}
        varied = {name: _first(ranks[name]) for name in names}
        yield placed(mapping, what, {**varied, **kept}, own)
        if model.pair and count != accelerators:
            # Within a block, a plain number in `accelerators` means a count.
            shared = {"placement": where, "process": "shared"}
            placement: dict[str, object] = dict.fromkeys(names, where)
            placement |= dict.fromkeys(model.pair, shared)
            together = " and ".join(model.pair)
            yield placed(mapping, f"{what}, {together} in one process", placement)
    yield from model.more_variants(mapping)


def _one_by_one(block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (component, placement) pairs of a placement block. A line of several components gives one pair for each."""
    for names, place in block.items():
        for name in placed_names({names: place}):
            yield name, place


def _first(count: int) -> str:
    """Return the placement text of the first `count` accelerators, such as "0-3"."""
    if count == 1:
        return "0"
    return f"0-{count - 1}"


def _most_ranks(worker: Any, count: int) -> int:
    """Return the most ranks that a worker class of a custom job allows; `count` if it sets no limit.

    `worker`: the class, or None.
    """
    most: int | None = getattr(worker, "most_ranks", None)
    if most is None:
        return count
    return most


def placed(
    mapping: Mapping[str, Any],
    name: str,
    placement: Mapping[str, object],
    own: Collection[str] = (),
) -> Variant:
    """Return a variant of the job: the config with another placement, and with `enable_offload` set for its components.

    A reward that is a function has no model, and gets no `enable_offload`. `name`: name of the variant. `placement`:
    component -> its placement. `own`: components of a custom job; if the config has no block for one, the block is
    created.
    """
    changed = copy.deepcopy(dict(mapping))
    changed["cluster"]["component_placement"] = dict(placement)
    for component in placement:
        if component in own and changed.get(component) is None:
            changed[component] = {}
        key = component if component in own else role_of(component)
        block = changed.get(key)
        if not isinstance(block, dict):
            continue
        # A reward that is a function has no accelerators.
        if component in own or block.get("kind", "model") == "model":
            block["enable_offload"] = True
    return Variant(name=name, mapping=changed)


def _finding_modules() -> dict[str, str]:
    """Return environment variables for a child process, with which it imports the same modules as this process.

    PYTHONPATH gets all folders of this process's search path, such as the folder of the config.
    """
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [folder for folder in sys.path if not folder.startswith(sys.prefix)]
    folders = dict.fromkeys(folder for folder in (*known, *found) if folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def run(variant: Variant, iterations: int) -> Measured:
    """Train a few iterations in a separate process and a temporary folder; return the measured profile and seconds.

    Raises ConfigError with the last lines of output if the run fails.
    """
    mapping = copy.deepcopy(dict(variant.mapping))
    mapping["runner"] = mapping.get("runner", {}) | {
        "total_iterations": iterations,
        "sinks": ["jsonl"],
    }
    mapping["runner"] |= (
        {"stop_at_return": None} if "stop_at_return" in mapping["runner"] else {}
    )
    mapping["checkpoint"] = mapping.get("checkpoint", {}) | {"every": 0}
    # A placement that does not work fails once; what it would measure is worth no second try.
    mapping["faults"] = (mapping.get("faults") or {}) | {"restarts": 0}
    mapping |= {"profile": None, "resume": None, "dry_run": False}
    with tempfile.TemporaryDirectory(prefix="rlplace-profile-") as folder:
        mapping["runner"]["output_dir"] = f"{folder}/runs"
        Path(folder, "variant.yaml").write_text(to_yaml(mapping), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "rlplace.train",
            "--config-dir",
            folder,
            "--config-name",
            "variant",
        ]
        done = subprocess.run(
            command,
            env=_finding_modules(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = sorted(Path(folder).glob(f"runs/*/*/{FILE}"))
        if done.returncode or not found:
            tail = "\n".join(done.stdout.splitlines()[-_TAIL:])
            raise config_error(
                "profile-run-failed",
                "profile",
                variant.name,
                error="run",
                exit_code=done.returncode,
                tail=tail,
            )
        summary = read_object(found[-1].parent / "summary.json", "profile")
        profile = read_profile(
            found[-1].read_text(encoding="utf-8"), file=str(found[-1])
        )
        return Measured(profile=profile, seconds=summary["predicted"]["seconds"])
