"""Names of custom classes or functions in a config."""

from __future__ import annotations

import dataclasses
import re

OWN = "package.module:Name"
OWN_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class OwnName(str):
    """The name of a custom class or function in the form `package.module:Name`."""


def block_of_name(block: type, value: object) -> str:
    """Return config text for a block with its first key set to `value`, such as `{name: "package.module:Name"}`.

    If the key is not `name`, or `value` is no name, the text is `{<key>: ...}`. `block`: dataclass of the block.
    """
    first = dataclasses.fields(block)[0].name
    if first == "name" and isinstance(value, str):
        if re.fullmatch(OWN_NAME, value):
            return f'{{name: "{value}"}}'
        if re.fullmatch(r"[A-Za-z_]\w*", value):
            return f"{{name: {value}}}"
    return f"{{{first}: ...}}"
