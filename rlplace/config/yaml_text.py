"""YAML texts: values on one line, whole configs, the line of every key, and what is wrong with a text."""

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

from rlplace.config.fields import ModelKind
from rlplace.errors import ConfigError, Problem, Source, source_of

# No character that means more in a block
_PLAIN = re.compile(r"(?!-[ ,]|-$)[\w+./-](?:[\w+./:, -]*[\w+./,-])?")
_OTHER_TYPES = re.compile(  # plain scalars that YAML 1.1 does not read as text; whole numbers stay, keys take both
    r"[-+]?[0-9][0-9_]*(?::[0-9]+)+(?:\.[0-9_]*)?|0[0-9]+|[-+]?0[xob].*|"
    r"[-+]?(?:[0-9][0-9_]*)?\.[0-9_]*|[-+]?[0-9._]+[eE][-+]?[0-9]+|"
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|[-+]?\.inf|\.nan|~|null|true|false|yes|no|on|off|y|n",
    re.IGNORECASE,
)
_NOT_DECIMAL = re.compile(
    r"[-+]?(?:0[0-7_]*[1-7][0-7_]*|[1-9][0-9_]*(?::[0-5]?[0-9])+)"
)
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]*")


def show(value: object, *, exact: bool = False) -> str:
    """Write a value as YAML on one line; text by itself is not quoted, and `exact` is as in `quote`."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # YAML 1.1 reads 5e-06 as text
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{quote(k)}: {quote(v, exact=exact)}" for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, Sequence):
        return "[" + ", ".join(quote(v, exact=exact) for v in value) + "]"
    return str(value)


def quote(value: object, *, inside: bool = True, exact: bool = False) -> str:
    """Write a value as YAML, text in quotes where it needs them; `inside` braces or brackets, commas need them.

    `exact`: a text that is a whole number needs them too; where a key takes both it is written plain.
    """
    if not isinstance(value, str):
        return show(value, exact=exact)
    plain = (
        _PLAIN.fullmatch(value)
        and not _OTHER_TYPES.fullmatch(value)
        and ": " not in value
    )
    if (
        plain
        and not (inside and "," in value)
        and not (exact and _WHOLE.fullmatch(value))
    ):
        return value
    return "".join(
        c if c.isprintable() else f"\\U{ord(c):08x}"
        for c in json.dumps(value, ensure_ascii=False)
    )


def to_yaml(mapping: Mapping[str, object], indent: str = "") -> str:
    """YAML text that every reader, of YAML 1.1 or 1.2, reads back as the same values. Placements are one line each."""
    lines: list[str] = []
    for key, value in mapping.items():
        if (
            isinstance(value, Mapping)
            and value
            and not value.keys() & {"placement", "same_as", "accelerators"}
        ):
            lines.append(f"{indent}{quote(str(key))}:\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(
                f"{indent}{quote(str(key))}: {quote(value, inside=False, exact=True)}\n"
            )
    return "".join(lines)


def line_sources(text: str, file: str, prefix: str = "") -> dict[str, Source]:
    """Map the path of every key of a YAML text to the line of the key."""
    found: dict[str, Source] = {}

    def visit(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                below = f"{path}.{key.value}" if path else str(key.value)
                found[below] = Source(file=file, line=key.start_mark.line + 1)
                visit(value, below)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                found[f"{path}[{i}]"] = Source(
                    file=file, line=value.start_mark.line + 1
                )
                visit(value, f"{path}[{i}]")

    visit(_composed(text), prefix)
    return found


def scalars(text: str) -> dict[str, yaml.ScalarNode]:
    """Map the path of every value of a YAML text that is neither a block nor a list to its node."""
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
    """Return the path and the digits of `{path: 0,05}`, whose second part YAML makes the key 5 of: of 075 it makes 61.

    `key`: what it has made. None for a key that no other stands before in its line.
    """
    above, _, name = key.rpartition(".")
    before: dict[Source, str] = {}  # of each line, the last key so far
    for path, place in sources.items():
        block, _, leaf = path.rpartition(".")
        if block != above:
            continue
        if place in before and leaf.isdecimal() and str(yaml.safe_load(leaf)) == name:
            return before[place], leaf
        before[place] = path
    return None


def text_of(file: Path, shown: str) -> str:
    """Read a config's file. Raises ConfigError: not UTF-8. `shown`: its path in errors."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        begin = file.read_bytes()[:2]
        word = shlex.quote(shown)
        written = (
            "UTF-16"
            if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            else "ISO-8859-1"
        )
        fix = f"iconv -f {written} -t UTF-8 {word} > {word}.new && mv {word}.new {word}"
        fix += "        (or save it as UTF-8 in your editor)"
        raise ConfigError.of(
            "bad-yaml", shown, "is no text in UTF-8", None, str(error), fix
        ) from error


def misread_number(node: yaml.ScalarNode) -> int | None:
    """Return what YAML 1.1 makes of a plain `010` or `1:30`, 8 and 90; None for a value that is read as it looks."""
    if node.style not in (None, "") or not _NOT_DECIMAL.fullmatch(node.value):
        return None
    value = yaml.safe_load(node.value)
    if isinstance(value, int):
        return value
    return None


def named_in_defaults(text: str) -> list[str]:
    """Return the configs that a YAML text extends: the plain names of its `defaults`, without those of groups."""
    node = _composed(text)
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    lists = [
        value
        for key, value in pairs
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode)
    ]
    names = [
        item.value
        for each in lists
        for item in each.value
        if isinstance(item, yaml.ScalarNode)
    ]
    return [name for name in names if name != "_self_"]


def _composed(text: str) -> yaml.Node | None:
    """Compose a text by libyaml, which is ten times as fast; errors are PyYAML's, which have the line."""
    if yaml.__with_libyaml__:
        with contextlib.suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def not_yaml(error: yaml.YAMLError, file: str, code: str, key: str) -> ConfigError:
    """Convert an error of the YAML library to the standard format."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or "is not YAML"
    got = mark.get_snippet().strip().splitlines()[0] if mark and mark.buffer else None
    why = getattr(error, "context", None)
    fix = "see the line named above"
    if "found character '\\t'" in str(error):
        why = "YAML indents with blanks only, never with tabs"
        fix = "replace the tab by blanks"
    elif "mapping values are not allowed" in what:
        why = "a key stands below a value, or behind one: keys of one block begin in one column"
        fix = "indent this line as the keys beside it"
    elif "could not find expected ':'" in what:
        why = "a line is key: value, with a blank behind the colon; an item is - value"
        fix = "key: value        (at this line or the one before)"
    elif "expected ',' or" in what:
        why = "what opens with { or [ goes on to its end"
        fix = f"close it with {what.partition(' or ')[2].partition(',')[0]}"
    source = Source(file=file, line=mark.line + 1 if mark else None)
    return ConfigError.of(code, key, what, got, why, fix, source=source)


def repeated_key(text: str, file: str) -> ConfigError | None:
    """Explain the first key that stands twice in one block of a YAML text; None where there is none."""

    def visit(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int, int]]:
        lines: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            below = f"{path}.{key.value}".removeprefix(".")
            line = key.start_mark.line + 1
            if key.value in lines:
                yield below, lines[key.value], line
            lines[key.value] = line
            yield from visit(value, below)
        for i, item in enumerate(
            node.value if isinstance(node, yaml.SequenceNode) else ()
        ):
            yield from visit(item, f"{path}[{i}]")

    found = next(visit(_composed(text), ""), None)
    if found is None:
        return None
    key, first, second = found
    got = text.splitlines()[second - 1].strip()
    what = "stands twice in its block"
    why = "a key has one value"
    fix = f"remove line {first} or line {second}"
    return ConfigError.of(
        "bad-yaml", key, what, got, why, fix, source=Source(file=file, line=second)
    )


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return a YAML text with other values at these paths of keys, and all comments; None removes a key.

    What the text does not have is added to the end of the nearest block that it has.
    """
    for path, value in values.items():
        text = _with_value(text, path, value)
    return text


def _with_value(text: str, path: str, value: object) -> str:
    spans = dict(_spans(_composed(text), ""))
    if path in spans:
        start, first, last = spans[path]
        if value is None:
            begin = text.rfind("\n", 0, start) + 1
            end = text.find("\n", last)
            return text[:begin] + (text[end + 1 :] if end >= 0 else "")
        written = quote(value, inside=_in_flow(text, start), exact=True)
        behind = text[last:]
        # The comment stays in its column, if there is room
        if gap := re.match(" +(?=#)", behind):
            behind = (
                " " * max(2, last - first + len(gap[0]) - len(written))
                + behind[len(gap[0]) :]
            )
        return text[:first] + written + behind
    if value is None:
        return text
    above = path
    while above and above not in spans:
        above = above.rpartition(".")[0]
    rest = path.removeprefix(above).removeprefix(".")
    inside = [
        span
        for key, span in spans.items()
        if key.startswith(f"{above}." if above else "")
    ]
    # An empty block, or one in braces
    if above and (not inside or text[spans[above][1]] == "{"):
        raise ValueError(f"{above} has no lines to add {rest} to")
    at = text.find("\n", max((last for _, _, last in inside), default=0))
    column = min(
        (start - text.rfind("\n", 0, start) - 1 for start, _, _ in inside), default=0
    )
    block: object = value
    names = [rest] if above.endswith("component_placement") else rest.split(".")
    for name in reversed(names):
        block = {name: block}
    assert isinstance(block, Mapping)
    at = len(text) if at < 0 else at + 1
    return (
        text[:at]
        + ("" if text[:at].endswith("\n") or not at else "\n")
        + to_yaml(block, " " * column)
        + text[at:]
    )


def _in_flow(text: str, start: int) -> bool:
    line = text[text.rfind("\n", 0, start) + 1 : start]
    return line.count("{") > line.count("}")


def _spans(
    node: yaml.Node | None, path: str
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Return for every key where it begins, and where its value begins and ends."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        below = f"{path}.{key.value}" if path else str(key.value)
        yield below, (key.start_mark.index, value.start_mark.index, _end(value))
        yield from _spans(value, below)


def _end(node: yaml.Node) -> int:
    """Return where a value ends, without the comments behind it."""
    parts = (
        [part for pair in node.value for part in pair]
        if isinstance(node, yaml.MappingNode)
        else []
    )
    parts += node.value if isinstance(node, yaml.SequenceNode) else []
    if parts and not getattr(node, "flow_style", False):
        return max(_end(part) for part in parts)
    return int(node.end_mark.index)


def misread_numbers(
    text: str, file: str, sources: Mapping[str, Source]
) -> Iterator[Problem]:
    """Report numbers of a file that YAML reads as others, where no later file or override replaces them."""
    for key, node in scalars(text).items():
        place = Source(file=file, line=node.start_mark.line + 1)
        value = misread_number(node)
        # There, as what was meant
        explained = ":" in node.value and key.startswith("cluster.component_placement")
        if value is None or explained or source_of(key, sources) != place:
            continue
        leaf = "" if key.endswith("]") else f"{key.rpartition('.')[2]}: "
        what = f"YAML reads {node.value} as {value}"
        base = "60" if ":" in node.value else "8"
        why = f"YAML 1.1 takes digits {'with colons' if base == '60' else 'after a 0'} for a number to the base {base}"
        plain = str(value) if base == "60" else str(int(node.value.replace("_", "")))
        fix = f'{leaf}{plain}        (or in quotes, if it is text: "{node.value}")'
        yield Problem(
            code="misread-number",
            key=key,
            what=what,
            got=f"{leaf}{node.value}",
            source=place,
            why=why,
            fix=fix,
        )


def not_blocks(
    text: str, file: str, places: Callable[[ModelKind], Sequence[str]]
) -> ConfigError | None:
    """Explain a list where a block of keys is, or `defaults` that are no list; None where a text has neither."""
    written = yaml.safe_load(text)
    lines = line_sources(text, file)
    found = written.items() if isinstance(written, dict) else ()
    for key, value in found:
        block = any(
            place.startswith(f"{key}.")
            for place in (*places("mlp"), *places("causal_lm"))
        )
        if key == "defaults" and isinstance(value, str):
            why = "it lists the configs that this one extends, and itself"
            fix = f"defaults: [{value}, _self_]"
            return ConfigError.of(
                "bad-config",
                key,
                "expected a list",
                show(value),
                why,
                fix,
                source=lines.get(key),
            )
        if block and isinstance(value, list):
            why = "a dash in front makes an item of a list"
            items = [i for i in value if isinstance(i, dict)]
            fix = f"{key}: {show({k: v for item in items for k, v in item.items()}) if items else '{...}'}"
            what = "expected a block of keys"
            return ConfigError.of(
                "wrong-type", key, what, show(value), why, fix, source=lines.get(key)
            )
    return None


def closes(text: str) -> bool:
    """Whether every bracket and brace of a text is closed."""
    return all(text.count(a) == text.count(b) for a, b in ("{}", "[]"))
