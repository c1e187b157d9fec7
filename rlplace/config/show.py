"""Values as they are written in YAML, on one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"(?!-[ ,]|-$)[\w+./-](?:[\w+./:, -]*[\w+./,-])?")  # no character that means more in a block
_OTHER_TYPES = re.compile(  # plain scalars that YAML 1.1 does not read as text; whole numbers stay, keys take both
    r"[-+]?[0-9][0-9_]*(?::[0-9]+)+(?:\.[0-9_]*)?|0[0-9]+|[-+]?0[xob].*|"
    r"[-+]?(?:[0-9][0-9_]*)?\.[0-9_]*|[-+]?[0-9._]+[eE][-+]?[0-9]+|"
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|[-+]?\.inf|\.nan|~|null|true|false|yes|no|on|off|y|n",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"[-+]?[0-9][0-9_]*")


def show(value: object, *, exact: bool = False) -> str:
    """Write a value as YAML on one line; text by itself is not quoted, and `exact` is as in `quote`."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # YAML 1.1 reads 5e-06 as text
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quote(k)}: {quote(v, exact=exact)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(quote(v, exact=exact) for v in value) + "]"
    return str(value)


def quote(value: object, *, inside: bool = True, exact: bool = False) -> str:
    """Write a value as YAML, text in quotes where it needs them; `inside` braces or brackets, commas need them.

    `exact`: a text that is a whole number needs them too; where a key takes both it is written plain.
    """
    if not isinstance(value, str):
        return show(value, exact=exact)
    plain = _PLAIN.fullmatch(value) and not _OTHER_TYPES.fullmatch(value) and ": " not in value
    if plain and not (inside and "," in value) and not (exact and _WHOLE.fullmatch(value)):
        return value
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
