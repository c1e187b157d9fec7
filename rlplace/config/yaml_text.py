"""YAML texts: values on one line, whole configs, the line of every key, and explanations of broken texts."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from rlplace.codes import config_error, problem
from rlplace.errors import ConfigError, Problem, Source, source_of

# Text that stands without quotes in a block: no character in it has a meaning in YAML
_PLAIN = re.compile(r"(?!-[ ,]|-$)[\w+./-](?:[\w+./:, -]*[\w+./,-])?")
# Plain scalars that YAML 1.1 does not read as text. Whole numbers are left out, since keys take both.
_OTHER_TYPES = re.compile(
    r"[-+]?[0-9][0-9_]*(?::[0-9]+)+(?:\.[0-9_]*)?|0[0-9]+|[-+]?0[xob].*|"
    r"[-+]?(?:[0-9][0-9_]*)?\.[0-9_]*|[-+]?[0-9._]+[eE][-+]?[0-9]+|"
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|[-+]?\.inf|\.nan|~|null|true|false|yes|no|on|off|y|n",
    re.IGNORECASE,
)
# Whole numbers that YAML 1.1 does not read to the base 10: 010 and 1:30
_NOT_DECIMAL = re.compile(
    r"[-+]?(?:0[0-7_]*[1-7][0-7_]*|[1-9][0-9_]*(?::[0-5]?[0-9])+)"
)
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]*")


def show(value: object, *, exact: bool = False) -> str:
    """Return a value as YAML on one line; a text by itself is not quoted. `exact`: as in `quote`."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    # YAML's spelling of floats: .inf, and 5.0e-06, since it reads 5e-06 as text
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    if isinstance(value, Mapping):
        pairs = [f"{quote(k)}: {quote(v, exact=exact)}" for k, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(quote(v, exact=exact) for v in value) + "]"
    return str(value)


def quote(value: object, *, inside: bool = True, exact: bool = False) -> str:
    """Return a value as YAML, with quotes around a text that needs them.

    `inside`: the value stands in braces or brackets, where a comma needs quotes. `exact`: a text that is a whole
    number gets quotes too; otherwise it stays plain, for keys that take numbers and texts alike.
    """
    if not isinstance(value, str):
        return show(value, exact=exact)
    is_text = _PLAIN.fullmatch(value) and not _OTHER_TYPES.fullmatch(value)
    is_plain = is_text and ": " not in value
    ends_inside = inside and "," in value
    is_number = exact and _WHOLE.fullmatch(value)
    if is_plain and not ends_inside and not is_number:
        return value
    # JSON's quotes; YAML's escapes for characters that cannot be printed
    escaped = ""
    for character in json.dumps(value, ensure_ascii=False):
        if character.isprintable():
            escaped += character
        else:
            escaped += f"\\U{ord(character):08x}"
    return escaped


def to_yaml(mapping: Mapping[str, object], indent: str = "") -> str:
    """Return a YAML text that readers of YAML 1.1 and of 1.2 read back as the same values. Placements are one line
    each.
    """
    lines: list[str] = []
    for key, value in mapping.items():
        name = quote(str(key))
        is_block = isinstance(value, Mapping) and bool(value)
        is_placement = isinstance(value, Mapping) and bool(
            value.keys() & {"placement", "same_as", "accelerators"}
        )
        if isinstance(value, Mapping) and is_block and not is_placement:
            lines.append(f"{indent}{name}:\n{to_yaml(value, indent + '  ')}")
        else:
            written = quote(value, inside=False, exact=True)
            lines.append(f"{indent}{name}: {written}\n")
    return "".join(lines)


def line_sources(text: str, file: str, prefix: str = "") -> dict[str, Source]:
    """Return path -> file and line, for every key and every list item of a YAML text.

    `file`: file name for the results. `prefix`: path of the config block that the text fills; "" for a whole config.
    """
    found: dict[str, Source] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}" if path else str(key.value)
                found[below] = Source(file=file, line=key.start_mark.line + 1)
                visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                item = f"{path}[{i}]"
                line = value.start_mark.line + 1
                found[item] = Source(file=file, line=line)
                visit(value, item)

    visit(_composed(text), prefix)
    return found


def scalars(text: str) -> dict[str, yaml.ScalarNode]:
    """Return path -> YAML node, for every value of a YAML text that is neither a block nor a list."""
    found: dict[str, yaml.ScalarNode] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                visit(value, f"{path}.{key.value}".removeprefix("."))
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                visit(value, f"{path}[{i}]")
        elif isinstance(node, yaml.ScalarNode):
            found[path] = node

    visit(_composed(text), "")
    return found


def torn_number(key: str, sources: Mapping[str, Source]) -> tuple[str, str] | None:
    """Return path and digits of a number with a decimal comma that YAML has split; None if `key` is no such digits.

    In `{lr: 0,05}`, YAML takes the digits behind the comma for a key without a value: 05 becomes the key 5, 075 the
    key 61. `key`: path of a key that may be such digits. Return the path before the comma (`lr`) and the digits (`05`).
    `sources`: key -> file and line where it was written.
    """
    above, _, name = key.rpartition(".")
    # The last key so far of each line
    before: dict[Source, str] = {}
    for path, place in sources.items():
        block, _, leaf = path.rpartition(".")
        if block != above:
            continue
        if place in before and leaf.isdecimal() and str(yaml.safe_load(leaf)) == name:
            return before[place], leaf
        before[place] = path
    return None


def text_of(file: Path, shown: str) -> str:
    """Return the text of a config's file. Raises ConfigError if it is not UTF-8. `shown`: its path in errors."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        # The encoding that it probably has, for the fix
        begin = file.read_bytes()[:2]
        word = shlex.quote(shown)
        is_utf16 = begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise config_error(
            "bad-yaml",
            shown,
            error="encoding",
            reason=str(error),
            written="UTF-16" if is_utf16 else "ISO-8859-1",
            file=word,
        ) from error


def misread_number(node: yaml.ScalarNode) -> int | None:
    """Return the number that YAML 1.1 reads in a plain `010` (8) or `1:30` (90); None if it reads the node as it
    looks.
    """
    if node.style not in (None, "") or not _NOT_DECIMAL.fullmatch(node.value):
        return None
    value = yaml.safe_load(node.value)
    if isinstance(value, int):
        return value
    return None


def named_in_defaults(text: str) -> list[str]:
    """Return the configs that a YAML text extends: the plain names in its `defaults`, without choices of groups."""
    node = _composed(text)
    names: list[str] = []
    if not isinstance(node, yaml.MappingNode):
        return names
    for key, value in node.value:
        if key.value != "defaults" or not isinstance(value, yaml.SequenceNode):
            continue
        for item in value.value:
            if isinstance(item, yaml.ScalarNode) and item.value != "_self_":
                names.append(item.value)
    return names


def _composed(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text.

    libyaml is ten times as fast as PyYAML, but only PyYAML's errors name the line, so a broken text is read again.
    """
    if yaml.__with_libyaml__:
        with contextlib.suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def not_yaml(
    error: yaml.YAMLError,
    file: str,
    code: str,
    key: str,
) -> ConfigError:
    """Convert an error of the YAML library to the standard error form."""
    # What the library says
    mark = getattr(error, "problem_mark", None)
    message = getattr(error, "problem", None) or "is not YAML"
    got = None
    if mark and mark.buffer:
        got = mark.get_snippet().strip().splitlines()[0]
    # Clearer words for frequent mistakes
    which = "not-yaml"
    if "found character '\\t'" in str(error):
        which = "tab"
    elif "mapping values are not allowed" in message:
        which = "indent"
    elif "could not find expected ':'" in message:
        which = "no-colon"
    elif "expected ',' or" in message:
        which = "open-bracket"
    line = mark.line + 1 if mark else None
    return config_error(
        code,
        key,
        got,
        error=which,
        source=Source(file=file, line=line),
        message=message,
        context=getattr(error, "context", None),
        bracket=message.partition(" or ")[2].partition(",")[0],
    )


def repeated_key(text: str, file: str) -> ConfigError | None:
    """Return the error about the first key that occurs twice in one block of a YAML text; None if all keys differ."""

    def visit(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield path, first line and second line of each repeated key."""
        lines: dict[str, int] = {}
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}".removeprefix(".")
                line = key.start_mark.line + 1
                if key.value in lines:
                    yield below, lines[key.value], line
                lines[key.value] = line
                yield from visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                yield from visit(item, f"{path}[{i}]")

    # Only the first one is told
    found = next(visit(_composed(text), ""), None)
    if found is None:
        return None
    key, first, second = found
    return config_error(
        "bad-yaml",
        key,
        text.splitlines()[second - 1].strip(),
        error="key-twice",
        source=Source(file=file, line=second),
        first=first,
        second=second,
    )


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return a YAML text with new values at some key paths. All comments stay.

    `values`: key path -> new value; None removes the key. A key that the text lacks is added
    at the end of the nearest block above it. Raises ValueError if that block is empty or in braces.
    """
    for path, value in values.items():
        text = _with_value(text, path, value)
    return text


def _with_value(text: str, path: str, value: object) -> str:
    """Return a YAML text in which the key at `path` has the new value; None removes the key."""
    spans = dict(_spans(_composed(text), ""))
    if path in spans:
        start, first, last = spans[path]
        # Remove the whole line
        if value is None:
            begin = text.rfind("\n", 0, start) + 1
            end = text.find("\n", last)
            behind = text[end + 1 :] if end >= 0 else ""
            return text[:begin] + behind
        written = quote(value, inside=_in_flow(text, start), exact=True)
        behind = text[last:]
        # The comment stays in its column, if there is room
        gap = re.match(" +(?=#)", behind)
        if gap:
            width = last - first + len(gap[0]) - len(written)
            behind = " " * max(2, width) + behind[len(gap[0]) :]
        return text[:first] + written + behind
    if value is None:
        return text
    # The nearest block above the key, and the keys in that block
    above = path
    while above and above not in spans:
        above = above.rpartition(".")[0]
    rest = path.removeprefix(above).removeprefix(".")
    prefix = f"{above}." if above else ""
    inside = [span for key, span in spans.items() if key.startswith(prefix)]
    is_empty = not inside
    if above and (is_empty or text[spans[above][1]] == "{"):
        raise ValueError(f"{above} has no lines to add {rest} to")
    # Behind the line of the block's last value, in the column of its keys
    last_value = max((last for _, _, last in inside), default=0)
    line_end = text.find("\n", last_value)
    at = len(text) if line_end < 0 else line_end + 1
    columns = [start - text.rfind("\n", 0, start) - 1 for start, _, _ in inside]
    column = min(columns, default=0)
    # Names of components may contain a dot
    block: object = value
    names = [rest] if above.endswith("component_placement") else rest.split(".")
    for name in reversed(names):
        block = {name: block}
    assert isinstance(block, Mapping)
    before = text[:at]
    if before and not before.endswith("\n"):
        before += "\n"
    return before + to_yaml(block, " " * column) + text[at:]


def _in_flow(text: str, start: int) -> bool:
    """Return whether a position in a text is within braces that begin in the same line."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    return line.count("{") > line.count("}")


def _spans(
    node: yaml.Node | None,
    path: str,
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield path -> (start of the key, start of its value, end of its value), for every key below a YAML node.

    All three are positions in the text. `path`: path of `node`.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        below = f"{path}.{key.value}".removeprefix(".")
        yield below, (key.start_mark.index, value.start_mark.index, _end(value))
        yield from _spans(value, below)


def _end(node: yaml.Node) -> int:
    """Return the position in the text where the value of a YAML node ends; comments behind the value do not count."""
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            parts += pair
    elif isinstance(node, yaml.SequenceNode):
        parts += node.value
    # A block ends with its last part; its own mark is behind the comments
    if parts and not getattr(node, "flow_style", False):
        return max(_end(part) for part in parts)
    return int(node.end_mark.index)


def misread_numbers(
    text: str,
    file: str,
    sources: Mapping[str, Source],
) -> Iterator[Problem]:
    """Yield a problem for each number that YAML reads in another base than ten, such as 010 as 8.

    Numbers that a later file or an override replaces are left out. `file`: name of the text's file.
    """
    for key, node in scalars(text).items():
        place = Source(file=file, line=node.start_mark.line + 1)
        value = misread_number(node)
        # Placements with a colon get a better explanation elsewhere
        explained = ":" in node.value and key.startswith("cluster.component_placement")
        if value is None or explained or source_of(key, sources) != place:
            continue
        name = key.rpartition(".")[2]
        leaf = "" if key.endswith("]") else f"{name}: "
        if ":" in node.value:
            which = "colons"
            plain = str(value)
        else:
            which = "zero"
            plain = str(int(node.value.replace("_", "")))
        yield problem(
            "misread-number",
            key,
            f"{leaf}{node.value}",
            error=which,
            source=place,
            written=node.value,
            value=value,
            leaf=leaf,
            plain=plain,
        )


def not_blocks(
    text: str,
    file: str,
    places: Callable[[], Sequence[str]],
) -> ConfigError | None:
    """Return the error about a list in place of a block, or about `defaults` that are not a list; None without error.

    `places`: returns all key paths of configs, of any job.
    """
    written = yaml.safe_load(text)
    lines = line_sources(text, file)
    if not isinstance(written, dict):
        return None
    known = places()
    for key, value in written.items():
        block = any(place.startswith(f"{key}.") for place in known)
        if key == "defaults" and isinstance(value, str):
            return config_error(
                "bad-config",
                key,
                show(value),
                error="defaults",
                source=lines.get(key),
                value=value,
            )
        if block and isinstance(value, list):
            # The blocks of the list, merged
            merged: dict[object, object] = {}
            for item in value:
                if isinstance(item, dict):
                    merged |= item
            has_blocks = any(isinstance(item, dict) for item in value)
            return config_error(
                "wrong-type",
                key,
                show(value),
                error="list-of-blocks",
                source=lines.get(key),
                name=key,
                block=show(merged) if has_blocks else "{...}",
            )
    return None


def closes(text: str) -> bool:
    """Whether every bracket and brace of a text is closed."""
    return all(text.count(a) == text.count(b) for a, b in ("{}", "[]"))
