"""What fixes do to wrong configs: every one is pasted as it is printed, and the config is read again.

`wrong_configs.yaml` has a shipped config, what is written into it, and what was meant, or `choices` where nobody can
know: then no line may be proposed. A fix must lead to exactly the job that was meant.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlplace.config.compose import with_hydra
from rlplace.config.schema import Config
from rlplace.errors import ConfigError, PlacementError, Problem
from rlplace.prepare import prepare

ROWS = yaml.safe_load((Path(__file__).parent / "wrong_configs.yaml").read_text(encoding="utf-8"))
PLACEMENT = "cluster.component_placement"
BLOCKS = {field.name for field in dataclasses.fields(Config)}
MOST_ROUNDS = 3  # a placement is read after the rest of a config is right


@functools.cache
def shipped(name: str) -> Mapping[str, Any]:
    (composed,) = with_hydra(["--config-name", *name.split()])
    return composed.mapping


def steps(key: str) -> list[str | int]:
    """Split a key path; the names of components may have dots."""
    above, _, component = key.partition(f"{PLACEMENT}.")
    if component and not above:
        name, _, below = component.rpartition(".") if "reward." not in component else (component, "", "")
        return [*PLACEMENT.split("."), *([name, below] if name else [component])]
    return [int(part) if part.isdecimal() else part for part in re.split(r"[.\[]", key.replace("]", ""))]


def write(config: Any, path: list[str | int], value: object) -> None:
    for step in path[:-1]:
        if isinstance(config, dict) and not isinstance(config.get(step), (dict, list)):
            config[step] = {}
        config = config[step]
    config[path[-1]] = value


def remove(config: Any, path: list[str | int]) -> None:
    for step in path[:-1]:
        config = config[step] if isinstance(config, list) else config.get(step) or {}
    if isinstance(config, list):
        del config[int(path[-1])]
    else:
        config.pop(path[-1], None)


def edited(row: Mapping[str, Any], what: str) -> dict[str, Any]:
    config = copy.deepcopy(dict(shipped(row["config"])))
    for key in row.get("without", ()):
        remove(config, steps(key))
    for key, value in row[what].items():
        write(config, steps(key), copy.deepcopy(value))
    return config


def entries(problem: Problem) -> list[object]:
    """Return what a fix proposes, one for each line: a YAML entry, or `remove ...`. Empty: it proposes no line."""
    found: list[object] = []
    if (problem.fix or "").startswith("one of\n"):
        return []
    for line in (problem.fix or "").split("\n"):
        if line.startswith("or: "):
            break
        proposed = re.sub(r" {8,}.*", "", line.removeprefix("and: "))
        if re.fullmatch(r"remove \S+", proposed):
            found.append(proposed)
            continue
        try:
            entry = yaml.safe_load(proposed)
        except yaml.YAMLError:
            return []
        if not isinstance(entry, (dict, list)) or re.search(r"<.*>|\.\.\.", proposed):
            return []
        found.append(entry)
    return found


def paste(config: dict[str, Any], problem: Problem) -> bool:
    """Replace the line of a problem by each line of its fix; return whether there was one."""
    path = steps(problem.key)
    proposed = entries(problem)
    for entry in proposed:
        if isinstance(entry, str):
            word = entry.removeprefix("remove ")
            remove(config, steps(word) if word.partition(".")[0] in config and "." in word else [*path[:-1], word])
        elif isinstance(entry, list):
            write(config, path, entry[0])
        else:
            assert isinstance(entry, dict)
            if isinstance(path[-1], int) and path[-2] in entry:  # the line has the whole list
                path = path[:-1]
            if not isinstance(path[-1], str):
                return False
            inside = problem.code in ("unplaced-component", "empty-placement") and path == steps(PLACEMENT)
            if problem.code not in ("unplaced-component", "empty-placement", "roles-contradict"):
                remove(config, path)
            for name, value in entry.items():
                if "." in str(name) and str(name).partition(".")[0] in BLOCKS:  # a line at the top
                    config[name] = value
                else:
                    write(config, [*(path if inside else path[:-1]), name], value)
    return bool(proposed)


def job(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a config means: its values, and the ranks of each component."""
    prepared = prepare(config)
    read = prepared.config
    placement = prepared.plan.placement
    values = dataclasses.replace(read, cluster=dataclasses.replace(read.cluster, component_placement={}))
    return values, {name: placement.spec(name).canonical() for name in placement.components}


def outcome(row: Mapping[str, Any]) -> str:
    """`right`, `stuck` or `changed`, with what was seen."""
    config, seen = edited(row, "write"), ""
    for _ in range(row.get("rounds", MOST_ROUNDS)):
        try:
            got = job(config)
        except (ConfigError, PlacementError) as error:
            problems, seen = error.problems, seen + f"\n{error}"
            pasted = [paste(config, problem) for problem in problems]
            if row["meant"] == "choices":
                said = all(p.why or p.fix for p in problems) and row.get("says", "") in str(error)
                if not any(pasted):
                    return "right" if said else f"stuck, without a word of the choices{seen}"
            elif not all(pasted):
                return f"stuck{seen}"
        else:
            if not seen:
                return "stuck: it was not refused"
            if row["meant"] == "choices":
                return f"changed{seen}"
            return "right" if got == job(edited(row, "meant")) else f"changed{seen}"
    try:
        got = job(config)
    except (ConfigError, PlacementError) as error:
        return f"stuck{seen}\n{error}"
    if row["meant"] == "choices":
        return f"changed{seen}"
    return "right" if got == job(edited(row, "meant")) else f"changed{seen}"


def test_fixes_lead_to_what_was_meant() -> None:
    """At least 95 of 100 do, and none leads to another job."""
    results = [(row, outcome(row)) for row in ROWS]
    rate = collections.Counter(re.match(r"\w+", result)[0] for _, result in results)  # type: ignore[index]
    print(f"\n{len(ROWS)} wrong configs: {dict(rate)}")
    for row, result in results:
        if result != "right":
            print(f"\n--- {row['config']}: {row['write']}, meant {row['meant']}: {result}")
    assert len(ROWS) >= 150
    assert rate["changed"] == 0
    assert rate["right"] >= 0.95 * len(ROWS)
