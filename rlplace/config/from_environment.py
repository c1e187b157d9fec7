"""Config values from environment variables, `${oc.env:NAME}`: their files and lines, and fixes for errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rlplace.errors import Source, source_of

_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,{}\s]+)\s*(?:,[^{}]*)?\}")


def of_environment(
    written: object, sources: Mapping[str, Source], key: str = ""
) -> dict[str, Source]:
    """Return config key -> file and line, for each value that comes from an environment variable.

    The field `written` of each returned Source is the text `${oc.env:NAME}`. `written`: the config, or a value in it,
    before references `${...}` are replaced. `sources`: config key -> file and line in which its value is set. `key`:
    path of `written`; "" for the whole config.
    """
    if isinstance(written, Mapping):
        below = [
            of_environment(value, sources, f"{key}.{name}".removeprefix("."))
            for name, value in written.items()
        ]
        return {path: source for found in below for path, source in found.items()}
    if isinstance(written, list):
        below = [
            of_environment(value, sources, f"{key}[{at}]")
            for at, value in enumerate(written)
        ]
        return {path: source for found in below for path, source in found.items()}
    if not isinstance(written, str) or not _VARIABLE.fullmatch(written):
        return {}
    source = source_of(key, sources)
    if source is None:
        return {}
    return {key: dataclasses.replace(source, written=written)}


def decoded(leaf: str, variable: str, fits: bool) -> str:
    """Return a remedy for a key that gets a text from an environment variable but needs a value of another type.

    The remedy is text for an error. It uses `oc.decode`, which reads the text as YAML. `leaf`: last part of the key.
    `variable`: the text `${oc.env:NAME}`. `fits`: whether the variable's text, read as YAML, is a valid value; if not,
    the remedy also says to set the variable.
    """
    if fits:
        return f"{leaf}: ${{oc.decode:{variable}}}"
    match = _VARIABLE.fullmatch(variable)
    assert match is not None, "only variables are noted"
    return f"export {match[1]}=<such a value>        (with {leaf}: ${{oc.decode:{variable}}})"


def with_default(written: str, name: str) -> str:
    """Return the text `written` with `${oc.env:<name>}` replaced by `${oc.env:<name>,<a default>}`."""
    return written.replace(f"${{oc.env:{name}}}", f"${{oc.env:{name},<a default>}}")
