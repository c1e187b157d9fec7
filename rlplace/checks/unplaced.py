"""Checks for config blocks of components that the job does not place: the values in such a block have no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.config.schema import Config
from rlplace.errors import Problem, Source, source_of
from rlplace.placement.language.spec import role_of
from rlplace.placement.schedule import placed_names

# The package: sources name shipped configs as configs/<name>.yaml
_PACKAGE = Path(__file__).resolve().parents[1]
_CONFIGS = (_PACKAGE / "configs").resolve()
# Fields that change where a component works and how its work is divided, but not its results
_WITHOUT_NUMBERS = frozenset(
    {
        "checkpointing",
        "enable_offload",
        "group_name",
        "micro_batch",
        "on_host",
        "sharded",
        "token_budget",
    }
)
# Code of the warning. The block changes no results, or comes from a shipped config: the job can run
WARNING = "unused-block"
_REFUSED = "block-not-placed"
# Keys of a component that uses a function or an endpoint in place of a model
_WITHOUT_MODEL = ("function", "url")


def unplaced_problems(
    config: Config, roles: Sequence[str], sources: Mapping[str, Source]
) -> Iterator[Problem]:
    """Yield a problem for each role without a placed component whose block has values other than the defaults.

    `roles`: roles whose blocks are checked. `sources`: key -> file and line of its value. The problem is a warning if
    each of these values comes from a shipped config or does not change results.
    """
    placed = placed_names(config.cluster.component_placement)
    for role in roles:
        block = getattr(config, role)
        # `reward.<name>` blocks of named components have another check, which compares names
        if isinstance(block, Mapping) or role in map(role_of, placed):
            continue
        default = type(block)()
        changed = [
            field.name
            for field in dataclasses.fields(block)
            if getattr(block, field.name) != getattr(default, field.name)
        ]
        if not changed:
            continue
        own = [
            name
            for name in changed
            if name not in _WITHOUT_NUMBERS
            and not _is_shipped(f"{role}.{name}", sources)
        ]
        where = "<accelerators>"
        if any(name in changed for name in _WITHOUT_MODEL):
            where = "cpu"
        yield problem(
            _REFUSED if own else WARNING,
            f"{role}.{(own or changed)[0]}",
            f"{role}: {{{', '.join(f'{name}: ...' for name in own or changed)}}}",
            role=role,
            where=where,
            placed=", ".join(placed),
        )


def without_unread(
    mapping: Mapping[str, Any], warnings: Iterable[Problem]
) -> Mapping[str, Any]:
    """Return a composed config without the blocks that nothing reads, so that it can be the config of another run.

    In the other run, the values of such a block would not come from a shipped config. `warnings`: warnings of the
    config; those of `unplaced_problems` name the blocks. A block stays if `mapping` places its component.
    """
    cluster = mapping.get("cluster") or {}
    placed = map(role_of, placed_names(cluster.get("component_placement") or {}))
    unread = {
        each.key.partition(".")[0] for each in warnings if each.code == WARNING
    }.difference(placed)
    return {key: value for key, value in mapping.items() if key not in unread}


def _is_shipped(key: str, sources: Mapping[str, Source]) -> bool:
    """Return whether all values at `key` come from shipped configs."""
    found = [source for name, source in sources.items() if name.startswith(f"{key}.")]
    at_key = source_of(key, sources)
    if at_key is not None:
        found.append(at_key)
    return bool(found) and all(_is_file_of_ours(source.file) for source in found)


def _is_file_of_ours(file: str) -> bool:
    """Return whether a file is a shipped config. `file`: the name in a source, or the whole path."""
    place = (_PACKAGE / file).resolve()
    return place.is_relative_to(_CONFIGS) and place.is_file()
