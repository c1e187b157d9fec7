"""Write values and configs as YAML, find the line of each key in a YAML text, and explain errors in YAML texts."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
_PLACEMENT = "cluster.component_placement"  # a block whose keys are names


def show(value: object, *, exact: bool = False) -> str:
    """Return a value as YAML on one line. If the value itself is a text, it is returned without quotes.

    `exact`: whether texts in lists and blocks that look like whole numbers get quotes.
    """
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


def values_of(text: str) -> Any:
    """Return the values in a YAML text. Raises yaml.YAMLError if the text is not YAML.

    libyaml reads the text, and PyYAML a text with an error or a tab, which libyaml accepts in more places.
    """
    if yaml.__with_libyaml__ and "\t" not in text:
        with contextlib.suppress(yaml.YAMLError, UnicodeEncodeError):
            return yaml.load(text, Loader=yaml.CSafeLoader)
    return yaml.safe_load(text)


def value_of(text: str) -> object:
    """Return the value that a text has in YAML; the text itself if it is no YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def quote(value: object, *, inside: bool = True, exact: bool = False) -> str:
    """Return a value as YAML on one line, with quotes around a text that needs quotes.

    `inside`: whether the value will be within braces or brackets, so that a text with a comma needs quotes. `exact`:
    whether a text that looks like a whole number gets quotes, so that it is read as text again.
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
    """Return a config as YAML text. Parsers of YAML 1.1 and of YAML 1.2 read the same values from it.

    The placement of each component takes one line. `indent`: blanks before each line.
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
    """Return path -> file and line, for each key and each list item in a YAML text.

    `file`: the file name for the result. `prefix`: path of the config block that the text fills; "" for a whole config.
    """
    found: dict[str, Source] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}" if path else str(key.value)
                found[below] = Source(
                    file=file,
                    line=key.start_mark.line + 1,
                    is_dotted=not path and "." in str(key.value),
                )
                visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                item = f"{path}[{i}]"
                line = value.start_mark.line + 1
                found[item] = Source(file=file, line=line)
                visit(value, item)

    visit(root_of(text), prefix)
    return found


def scalars(text: str) -> dict[str, yaml.ScalarNode]:
    """Return path -> YAML node, for each plain value (not a block or a list) in a YAML text."""
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

    visit(root_of(text), "")
    return found


def torn_number(key: str, sources: Mapping[str, Source]) -> tuple[str, str] | None:
    """Return (path, digits) if `key` comes from a number with a decimal comma; None otherwise.

    YAML splits `{lr: 0,05}` at the comma: `lr` is 0, and the digits 05 become a further key without a value: the number
    5 (075 would become 61, since YAML reads it as octal). For the key 5, the result is the path `lr` and the digits
    `05`. `key`: path of a key that may have such digits as its last part. `sources`: config key -> file and line in
    which its value is set.
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
    """Return the text of a config file. Raises ConfigError if the text is not UTF-8. `shown`: the path for errors."""
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
    """Return the number that YAML 1.1 reads from an octal `010` (8) or a sexagesimal `1:30` (90).

    Return None if the node is not such a number.
    """
    if node.style not in (None, "") or not _NOT_DECIMAL.fullmatch(node.value):
        return None
    value = yaml.safe_load(node.value)
    if isinstance(value, int):
        return value
    return None


def named_in_defaults(text: str) -> list[str]:
    """Return the names of configs in the `defaults` of a YAML text. Choices of config groups are left out."""
    node = root_of(text)
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


@functools.lru_cache(maxsize=64)
def root_of(text: str) -> yaml.Node | None:
    """Return the root node of a YAML text. It must not be changed. Raises yaml.YAMLError if the text is not YAML.

    libyaml is ten times as fast as PyYAML, but only errors of PyYAML name the line. So a text with an error is parsed
    a second time, with PyYAML.
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
    text: str = "",
) -> ConfigError:
    """Return a ConfigError for an error of the YAML library.

    `file`: name of the file with the error. `code`: code of the problem. `key`: key of the problem. `text`: text of the
    file; "" if it is not at hand.
    """
    # What the library says
    mark = getattr(error, "problem_mark", None)
    message = getattr(error, "problem", None) or "is not YAML"
    got = None
    if mark and mark.buffer:
        got = mark.get_snippet().strip().splitlines()[0]
    # Clearer words for frequent mistakes
    which = "not-yaml"
    fix = None
    if "found character '\\t'" in str(error):
        which = "tab"
    elif "mapping values are not allowed" in message:
        which = "indent"
        lines = text.splitlines()
        written = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
        two = re.fullmatch(r"([\w@/.-]+): ([\w@/., -]+): ([^{}:]+)", written)
        if two is not None:
            which = "two-keys"
            fix = f"{two[1]}: {{{two[2]}: {two[3].strip()}}}"
    elif "could not find expected ':'" in message:
        which = "no-colon"
    elif "expected ',' or" in message:
        which = "open-bracket"
    rows = text.splitlines()
    row = rows[mark.line] if mark and mark.line < len(rows) else ""
    if which == "open-bracket":
        quoted = re.sub(r"(?<![\"'$\w])(\$\{[^{}]*\})", r'"\1"', row.strip())
        if "${" in row and quoted != row.strip():
            which = "reference-in-braces"
            fix = quoted
        elif re.search(r"[{\[].*;.*[}\]]", row):
            which = "semicolon"
            fix = row.strip().replace(";", ",")
    # `gamma = 0.98`; the mark is at this line or behind it
    if which == "no-colon" and mark:
        for near in rows[max(0, mark.line - 1) : mark.line + 1]:
            pair = re.fullmatch(r"\s*([\w.]+)\s*=\s*([^()=#]+?)\s*(?:#.*)?", near)
            if pair is not None and which == "no-colon":
                which = "equals-for-colon"
                fix = f"{pair[1]}: {pair[2]}"
    if "another document" in message:
        which = "documents"
    elif row.lstrip().startswith("```"):
        which = "fence"
    # Where it begins says more than where the file ends
    begun = getattr(error, "context_mark", None)
    if "quoted scalar" in str(getattr(error, "context", "")) and begun is not None:
        which = "open-quote"
        mark = begun
        if begun.line < len(rows):
            got = rows[begun.line].strip()
    if re.search(r"^<<<<<<< ", text, re.MULTILINE):
        which = "conflict"
    line = mark.line + 1 if mark else None
    return config_error(
        code,
        key,
        got,
        error=which,
        source=Source(file=file, line=line),
        message=message,
        context=getattr(error, "context", None),
        line=fix,
        bracket=message.partition(" or ")[2].partition(",")[0],
    )


def repeated_key(text: str, file: str) -> ConfigError | None:
    """Return the error about the first key that occurs twice in a block of a YAML text; None if no key does.

    `file`: name of the file with the text.
    """

    def visit(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield (path, line, line of the repetition) of each repeated key below `node`. `path`: path of `node`."""
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
    found = next(visit(root_of(text), ""), None)
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
    """Return a copy of a YAML text with new values for some keys. All comments stay.

    `values`: path of a key -> new value; None removes the key. A key that is not in the text is added at the end of the
    nearest enclosing block. Raises ValueError if this block is empty or written in braces.
    """
    for path, value in values.items():
        text = _with_value(text, path, value)
    return text


def _with_value(text: str, path: str, value: object) -> str:
    """Return a copy of a YAML text in which the key at `path` has the new value. If `value` is None, remove the key."""
    spans = dict(_spans(root_of(text), ""))
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
    """Return whether the position `start` in a text is within braces that were opened earlier in its line."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    return line.count("{") > line.count("}")


def _spans(
    node: yaml.Node | None,
    path: str,
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield (path, (start of the key, start of its value, end of its value)) for each key below a YAML node.

    Starts and end are positions in the text. `path`: path of `node`.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        below = f"{path}.{key.value}".removeprefix(".")
        yield below, (key.start_mark.index, value.start_mark.index, _end(value))
        yield from _spans(value, below)


def _end(node: yaml.Node) -> int:
    """Return the position in the text at which a YAML node ends. Comments after its last value are not included."""
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
    """Yield a problem for each number in a YAML text that YAML does not read as decimal, such as 010 (read as 8).

    `file`: name of the file with the text. `sources`: config key -> file and line in which its final value is set.
    Numbers that a later file or an override replaces are left out.
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
    takes_list: Callable[[str], bool],
) -> ConfigError | None:
    """Return the error about a list for a key that needs a block, or about `defaults` that are not a list.

    Return None if the text has no such error. `file`: name of the file with the text. `places`: a function that returns
    the paths of all keys that a config may have. `takes_list`: whether the value of a key may be a list.
    """
    written = yaml.safe_load(text)
    lines = line_sources(text, file)
    if not isinstance(written, dict):
        return None
    known = places()

    def visit(block: Mapping[object, object], above: str) -> ConfigError | None:
        """Return the error about the first wrong list in a block and the blocks below it. `above`: the block's path."""
        for name, value in block.items():
            key = f"{above}{name}"
            if isinstance(value, Mapping) and "name" in value and takes_list(key):
                return config_error(
                    "wrong-type",
                    key,
                    show(value),
                    error="item-for-list",
                    source=lines.get(key),
                    line=f"{name}: [{show(value)}]",
                )
            if isinstance(value, Mapping):
                below = visit(value, f"{key}.")
                if below is not None:
                    return below
            takes_any = str(name) in ("kwargs", "eval_kwargs") and bool(above)
            is_block = (
                key == _PLACEMENT
                or takes_any
                or any(place.startswith(f"{key}.") for place in known)
            )
            if is_block and isinstance(value, list) and not takes_list(key):
                return _list_for_block(key, value, lines.get(key))
        return None

    defaults = written.get("defaults")
    if isinstance(defaults, dict):
        # A config alone, or a choice of a group
        items = [
            chosen if name in ("config", "base", "_base_") else {name: chosen}
            for name, chosen in defaults.items()
        ]
        return config_error(
            "bad-config",
            "defaults",
            show(defaults),
            error="defaults-of-block",
            source=lines.get("defaults"),
            line=show([*items, "_self_"]),
        )
    if isinstance(defaults, str):
        return config_error(
            "bad-config",
            "defaults",
            show(defaults),
            error="defaults",
            source=lines.get("defaults"),
            value=defaults,
        )
    return visit(written, "")


def _list_for_block(
    key: str, value: Sequence[object], source: Source | None
) -> ConfigError:
    """Return the error about a list for a key that needs a block. The blocks of the list are merged for the fix."""
    merged = merged_blocks(value)
    return config_error(
        "wrong-type",
        key,
        show(value),
        error="list-of-blocks",
        source=source,
        name=key.rpartition(".")[2],
        block=show(merged) if merged else "{...}",
    )


def merged_blocks(items: Sequence[object]) -> dict[object, object] | None:
    """Return the block that is meant by a list of blocks, or of texts such as `actor: 0-7`; None for another list."""
    merged: dict[object, object] = {}
    for item in items:
        pair = re.fullmatch(r"\s*([\w,.]+)\s*[:=]\s*([^:={}]+)", str(item))
        if isinstance(item, Mapping):
            merged |= item
        elif pair is not None:
            merged[pair[1]] = value_of(pair[2].strip())
        else:
            return None
    return merged


def closes(text: str) -> bool:
    """Return whether a text has as many closing as opening brackets, and as many closing as opening braces."""
    return all(text.count(a) == text.count(b) for a, b in ("{}", "[]"))
