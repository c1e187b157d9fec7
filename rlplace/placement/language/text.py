"""Values of the config as they were written: key path, text on one line, the columns of its items, its entries."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from rlplace.config.yaml_text import quote, show
from rlplace.errors import Source, source_of

PATH = "cluster.component_placement"
# Keys of the line of a component.
PLACES = ("placement", "accelerators", "same_as")  # exactly one of them
PARALLEL = ("tensor_parallel_size", "context_parallel_size", "data_parallel_size")
COUNTS = ("ranks_per_accelerator", "accelerators_per_rank", *PARALLEL)
KEYS = ("node_group", *PLACES, *COUNTS, "tensor_parallel_across_nodes", "process")

_ONE_LINE = str.maketrans("\n\r\t", "   ")
# A piece of a placement that YAML has made a key of.
_PIECE = re.compile(r"[0-9][0-9 :-]*|all")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A value of the config as it was written. No part of it has been checked.

    `key`: its key path. `leaf`: its last key, such as "actor,rollout"; "-" for an item of a list. `text`: the value on
    one line. `items`: for each list item (first column, column after the last, value); one entry for a value that is
    not a list. `entries`: key -> Text, for a block. `pieces`: keys of a block that are really pieces of values, which
    YAML has cut at commas. `sources`: key path -> the place in the config where it was written.
    """

    key: str  # key path
    # The last key verbatim, such as "actor,rollout"; "-" for an item of a list.
    leaf: str
    value: object
    text: str  # on one line
    # First column, column after the last, and value of each list item; one for a plain value.
    items: tuple[tuple[int, int, object], ...]
    # Values of a block by their keys, which are texts.
    entries: Mapping[str, Text] = dataclasses.field(repr=False)
    # Keys of a block that are no keys but pieces of the value before them, cut off by YAML.
    pieces: tuple[str, ...] = ()
    sources: Mapping[str, Source] = dataclasses.field(repr=False)

    @property
    def source(self) -> Source | None:
        return source_of(self.key, self.sources)


def write(
    value: object,
    key: str,
    leaf: str,
    sources: Mapping[str, Source],
    lines: Collection[str] | None = None,
) -> Text:
    """Return a value of the config as Text, with a Text for each entry if the value is a block.

    `key`: its key path. `leaf`: its last key. `sources`: key path -> the place in the config where it was written.
    `lines`: if the value is the block `component_placement`: names that are always keys, never pieces of values that
    YAML has cut at commas; None for any other value.
    """
    entries: dict[str, Text] = {}
    pieces: list[str] = []
    if isinstance(value, Mapping):
        known = lines
        if known is None:
            known = KEYS
        whole, pieces = joined(value, known)
        if lines is None or "preset" in value:
            whole = {str(name): entry for name, entry in value.items()}
        for name, entry in whole.items():
            entries[name] = write(entry, f"{key}.{name}", name, sources)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        text, items = _written_list(value)
    else:
        text = show(value).translate(_ONE_LINE).strip()
        items = [(0, len(text), value)]
    return Text(
        key=key,
        leaf=leaf,
        value=value,
        text=text,
        items=tuple(items),
        entries=entries,
        pieces=tuple(pieces),
        sources=sources,
    )


def entry_of(block: Text, key: str, value: object = None) -> Text:
    """Return the Text of the entry `key` of a block.

    If there is no such entry, return a Text with `value`.
    """
    if key in block.entries:
        return block.entries[key]
    return write(value, f"{block.key}.{key}", key, block.sources)


def item_of(text: Text, index: int) -> Text:
    """Return the item at `index` of a list as Text. `text`: the list."""
    assert isinstance(text.value, Sequence)
    return write(text.value[index], f"{text.key}[{index}]", "-", text.sources)


def joined(
    block: Mapping[object, object], known: Collection[str]
) -> tuple[dict[str, object], list[str]]:
    """Return a block in which values that YAML has cut at commas are whole, and the keys that were pieces of values.

    YAML reads {placement: 0-3,5-7} as {placement: 0-3, 5-7: null}. `known`: keys that are never pieces of values.
    """
    whole: dict[str, object] = {}
    pieces: list[str] = []
    last = ""
    for name, value in block.items():
        key = str(name)
        before = whole.get(last)
        is_piece = value is None and key not in known and isinstance(before, str | int)
        if is_piece and (last == "node_group" or _PIECE.fullmatch(key)):
            pieces.append(key)
            whole[last] = f"{before},{key}"
        else:
            last = key
            whole[key] = value
    return whole, pieces


def one_line(value: object) -> str:
    """Return a value as text on one line, as YAML writes it inside of braces."""
    return quote(value).translate(_ONE_LINE)


def _written_list(
    value: Sequence[object],
) -> tuple[str, list[tuple[int, int, object]]]:
    """Return a list as text on one line, and for each item (first column, column after the last, value)."""
    text = "["
    items: list[tuple[int, int, object]] = []
    for item in value:
        if items:
            text += ", "
        shown = one_line(item)
        start = len(text)
        text += shown
        stop = len(text)
        if isinstance(item, str) and shown[:1] == '"':
            # The columns are those of the letters, without the quotes.
            start += 1
            stop -= 1
        items.append((start, stop, item))
    return f"{text}]", items
