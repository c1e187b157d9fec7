"""What fixes do to wrong configs: every one is pasted into the text as it is printed, and the text is read again.

`wrong_configs.yaml` has a shipped config, what is written into it, and what was meant, or `choices` where nobody can
know: then no line may be proposed. A fix must lead to exactly the job that was meant.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlplace.config.blocks.off_policy import OffPolicyBlocks
from rlplace.config.compose import with_hydra
from rlplace.config.fields import jobs
from rlplace.config.of_job import config_of
from rlplace.config.open_job import OpenConfig
from rlplace.config.yaml_text import line_sources
from rlplace.errors import ConfigError, PlacementError, Problem, Source
from rlplace.foresight.show import foreseen
from rlplace.runtime.prepare import prepare

ROWS = yaml.load(
    (Path(__file__).parent / "wrong_configs.yaml").read_text(encoding="utf-8"),
    Loader=yaml.CSafeLoader,  # of libyaml: each process of the tests reads the rows
)
PLACEMENT = "cluster.component_placement"
BLOCKS = {field.name for job in jobs() for field in dataclasses.fields(config_of(job))}
BLOCKS |= {field.name for field in dataclasses.fields(OffPolicyBlocks)}
EACH = 100  # rows of one part: all of them at once take minutes on a busy machine
MOST_ROUNDS = 3  # a placement is read after the rest of a config is right


@functools.cache
def shipped(name: str) -> Mapping[str, Any]:
    (composed,) = with_hydra(["--config-name", *name.split()])
    return composed.mapping


@functools.lru_cache(maxsize=8)
def lines_of(text: str) -> Mapping[str, Source]:
    return line_sources(text, "config.yaml")


def steps(key: str) -> list[str | int]:
    """Split a key path; the names of components may have dots."""
    above, _, component = key.partition(f"{PLACEMENT}.")
    if component and not above:
        name, _, below = (
            component.rpartition(".")
            if "reward." not in component
            else (component, "", "")
        )
        return [*PLACEMENT.split("."), *([name, below] if name else [component])]
    return [
        int(part) if part.isdecimal() else part
        for part in re.split(r"[.\[]", key.replace("]", ""))
    ]


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


def proposed(problem: Problem) -> list[str]:
    """The lines of a fix that a user copies, without the alternatives behind them. Empty: it proposes no line."""
    lines = (problem.pasted or "").split("\n")
    if lines[0] == "one of":
        return []
    kept = [
        re.sub(r" {8,}\(.*", "", line.removeprefix("and: "))
        for line in itertools.takewhile(_is_no_choice, lines)
    ]
    for line in kept:
        if re.fullmatch(r"remove \S+", line):
            continue
        try:
            entry = yaml.safe_load(line)
        except yaml.YAMLError:
            return []
        if not isinstance(entry, (dict, list)) or re.search(r"<.*>|\.\.\.", line):
            return []
    return kept


def _is_no_choice(line: str) -> bool:
    return not line.startswith("or: ")


class Text:
    """A config as a text that is edited by its lines."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
        dumped = yaml.dump(
            config, Dumper=dumper, sort_keys=False, width=10_000, allow_unicode=True
        )
        self.lines = dumped.splitlines()

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"

    def read(self) -> dict[str, Any]:
        return OmegaConf.to_container(OmegaConf.create(str(self)), resolve=False)

    def where(self) -> Mapping[str, Source]:
        return lines_of(str(self))

    def entry(self, key: str) -> tuple[int, int, int] | None:
        """The first and the last line of an entry, and its column; None where there is none."""
        source = self.where().get(key)
        if source is None or source.line is None:
            return None
        first = source.line - 1
        column = re.match(r" *(- )*", self.lines[first]).end()
        if key.endswith("]"):
            column -= 2
        last = first + 1
        while last < len(self.lines) and self._belongs(
            self.lines[last], column, item=key.endswith("]")
        ):
            last += 1
        return first, last, column

    @staticmethod
    def _belongs(line: str, column: int, *, item: bool) -> bool:
        deeper = len(line) - len(line.lstrip())
        return deeper > column or (
            deeper == column and line.lstrip().startswith("- ") and not item
        )

    def replace(self, key: str, lines: Sequence[str]) -> None:
        first, last, column = self.entry(key) or (0, 0, 0)
        before = self.lines[first][:column]
        texts = [
            (before if i == 0 else " " * column) + line for i, line in enumerate(lines)
        ]
        if (
            not texts and "- " in before and last < len(self.lines)
        ):  # its list item goes on with the next line
            self.lines[last] = before + self.lines[last][column:]
        self.lines[first:last] = texts

    def insert(self, block: str, lines: Sequence[str]) -> None:
        """Write lines at the end of a block, which is made where there is none."""
        if not block:
            self.lines += lines
            return
        found = self.entry(block)
        if found is None:
            above, _, name = block.rpartition(".")
            self.insert(above, [f"{name}:", *(f"  {line}" for line in lines)])
            return
        first, last, column = found
        if last == first + 1:  # nothing, or {}, stands there
            self.lines[first] = self.lines[first].partition(":")[0] + ":"
        self.lines[last:last] = [" " * (column + 2) + line for line in lines]

    def paste(self, problem: Problem) -> bool:
        """Replace the line of a problem by its fix, or add it to the block; return whether there was one."""
        lines = proposed(problem)
        block, _, name = problem.key.rpartition(".")
        if PLACEMENT + "." in problem.key and problem.key not in self.where():
            block = PLACEMENT
        top = [
            line
            for line in lines
            if re.match(r"(\w+)\.", line) and line.partition(".")[0] in BLOCKS
        ]
        for word in [
            line.removeprefix("remove ") for line in lines if line.startswith("remove ")
        ]:
            of_block = f"{block}.{word}"
            is_whole = word in self.where() and of_block not in self.where()
            self.replace(word if is_whole else of_block, ())
        entries = [
            line for line in lines if line not in top and not line.startswith("remove ")
        ]
        if problem.code in ("unplaced-component", "empty-placement"):
            self.insert(PLACEMENT, entries)
        elif (
            entries
            and "[" in name
            and entries[0].startswith(name.partition("[")[0] + ":")
        ):  # the whole list
            self.replace(problem.key.rpartition("[")[0], entries)
        elif (
            entries
            and self.entry(problem.key) is not None
            and problem.code != "roles-contradict"
        ):
            self.replace(problem.key, entries)
        elif entries:
            self.insert(block, entries)
        elif (
            top
            and "in place of" in (problem.fix or "")
            and self.entry(problem.key) is not None
        ):
            self.replace(problem.key, ())
        self.lines += top
        return bool(lines)


def job(
    config: Mapping[str, Any], sources: Mapping[str, Source] | None = None
) -> tuple[Any, ...]:
    """What a config means: its values, and the ranks of each component."""
    prepared = prepare(config, sources=sources)
    read = prepared.config
    if read.profile is not None:
        foreseen(read, prepared.plan, prepared.case)
    placement = prepared.plan.placement
    cluster = dataclasses.replace(read.cluster, component_placement={})
    if isinstance(read, OpenConfig):
        engine = dataclasses.replace(read.engine, cluster=cluster)
        settings = {**read.settings, "cluster": None}
        values = dataclasses.replace(
            read, job=type(read.job), engine=engine, settings=settings
        )
    else:
        values = dataclasses.replace(read, cluster=cluster)
    return values, {
        name: placement.spec(name).canonical() for name in placement.components
    }


def outcome(row: Mapping[str, Any]) -> str:
    """`right`, `stuck` or `changed`, with what was seen."""
    text, seen = Text(edited(row, "write")), ""
    written = edited(
        {**row, "write": Text(row["write"]).read()}, "write"
    )  # `text` as it is read, shipped lines unread
    for _ in range(row.get("rounds", MOST_ROUNDS) + 1):
        try:
            got = job(text.read() if seen else written, text.where())
        except (ConfigError, PlacementError) as error:
            problems, seen = error.problems, seen + f"\n{error}"
            pasted = [text.paste(problem) for problem in problems]
            if row["meant"] == "choices" and not any(pasted):
                said = all(p.why or p.fix for p in problems) and row.get(
                    "says", ""
                ) in str(error)
                return (
                    "right" if said else f"stuck, without a word of the choices{seen}"
                )
            if row["meant"] != "choices" and not all(pasted):
                return f"stuck{seen}"
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            return f"stuck{seen}\nno YAML: {error}\n{text}"
        else:
            if row["meant"] != "choices" and got == job(edited(row, "meant")):
                return "right"
            return f"changed{seen}\n{text}" if seen else "stuck: it was not refused"
    return f"stuck{seen}\n{text}"


# Of six parts, one is in the default tests: a row takes about 0.07 s.
PARTS = [
    pytest.param(first, marks=pytest.mark.slow if number % 6 else ())
    for number, first in enumerate(range(0, len(ROWS), EACH))
]


@pytest.mark.parametrize("first", PARTS)
def test_fixes_lead_to_what_was_meant(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All do; none is stuck, and none leads to another job. `first`: index of the first row of a part."""
    rows = ROWS[first : first + EACH]
    for name, methods in (
        ("my_calls:Stop", ["on_end"]),
        ("my_losses:Dual", ["policy_loss"]),
    ):  # of the user's own
        module, _, kind = name.partition(":")
        own = type(
            kind,
            (),
            {
                "__init__": lambda self, *given, **kwargs: None,
                **dict.fromkeys(methods, print),
            },
        )
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], kind, own)
    results = [(row, outcome(row)) for row in rows]
    rate = collections.Counter(re.match(r"\w+", result)[0] for _, result in results)
    print(f"\n{len(rows)} wrong configs: {dict(rate)}")
    for row, result in results:
        if result != "right":
            print(
                f"\n--- {row['config']}: {row['write']}, meant {row['meant']}: {result}"
            )
    assert len(ROWS) >= 150
    assert rate["right"] == len(rows)
