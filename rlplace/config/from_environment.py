"""Config values from environment variables, `${oc.env:NAME}`: where they are, and the fixes of errors about them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rlplace.errors import Source, source_of

_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,{}\s]+)\s*(?:,[^{}]*)?\}")


def of_environment(
    written: object, sources: Mapping[str, Source], key: str = ""
) -> dict[str, Source]:
    """Return key -> file and line, for each value that comes from an environment variable.

    `written`: config, or a value in the config, before `${...}` is replaced. `sources`: key -> file and line where it
    was written. `key`: path of `written`. Each returned Source has the text `${oc.env:NAME}` in its field `written`.
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
    """Return the fix for a key that is not a text and whose value comes from an environment variable.

    A variable is always text; `oc.decode` reads it as YAML. `leaf`: last part of the key. `variable`: the text
    `${oc.env:NAME}`. `fits`: whether the variable, read as YAML, is a valid value.
    """
    if fits:
        return f"{leaf}: ${{oc.decode:{variable}}}"
    match = _VARIABLE.fullmatch(variable)
    assert match is not None, "only variables are noted"
    return f"export {match[1]}=<such a value>        (with {leaf}: ${{oc.decode:{variable}}})"


def with_default(written: str, name: str) -> str:
    """Return the text `written`, in which `${oc.env:<name>}` has become `${oc.env:<name>,<a default>}`."""
    return written.replace(f"${{oc.env:{name}}}", f"${{oc.env:{name},<a default>}}")
