"""Config blocks that name classes or functions of the user."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rlplace.config.fields import knob

OWN = "package.module:Name"
OWN_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class OwnName(str):
    """The name of a custom class or function, package.module:Name."""


def block_of_name(block: type, value: object) -> str:
    """Return a block as text, such as `{name: "package.module:Name"}`: its first key with `value`.

    If `value` cannot be the name of a custom class or function, the text has `...` in place of `value`. `block`:
    dataclass of the block.
    """
    first = dataclasses.fields(block)[0].name
    named = first == "name" and isinstance(value, str) and re.fullmatch(OWN_NAME, value)
    if named:
        return f'{{{first}: "{value}"}}'
    return f"{{{first}: ...}}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrapperConfig:
    """One wrapper of a Gymnasium simulator."""

    name: str = knob(
        "package.module:Class, such as gymnasium.wrappers:GrayscaleObservation"
    )
    kwargs: Mapping[str, object] = knob(
        "passed to the wrapper behind the simulator; lists as tuples", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VariantConfig:
    """Custom advantages, losses and metrics, in place of those of `algorithm.name`."""

    name: OwnName | None = knob(
        "package.module:Class, whose methods replace the shipped formulas; null: none",
        None,
    )
    kwargs: Mapping[str, object] = knob(
        "passed to the class behind the algorithm's config", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallbackConfig:
    """A custom class that is called between iterations and when a run ends."""

    name: OwnName = knob("package.module:Class with on_iteration, on_end or both")
    kwargs: Mapping[str, object] = knob(
        "passed to the class behind the run's folder and config", dict
    )
