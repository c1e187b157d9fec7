"""Config blocks that name custom classes or functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from rlplace.config.fields import knob

OWN = "package.module:Name"
OWN_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class OwnName(str):
    """The name of a custom class or function in the form `package.module:Name`."""


def block_of_name(block: type, value: object) -> str:
    """Return config text for a block with its first key set to `value`, such as `{name: "package.module:Name"}`.

    If the key is not `name`, or `value` cannot be the name of a custom class or function, the text is `{<key>: ...}`.
    `block`: dataclass of the block.
    """
    first = dataclasses.fields(block)[0].name
    named = first == "name" and isinstance(value, str) and re.fullmatch(OWN_NAME, value)
    if named:
        return f'{{{first}: "{value}"}}'
    return f"{{{first}: ...}}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrapperConfig:
    """A Gymnasium wrapper around the simulator.

    `kwargs`: keyword arguments of the class, after the simulator.
    """

    name: str = knob(
        "package.module:Class, such as gymnasium.wrappers:GrayscaleObservation"
    )
    kwargs: Mapping[str, object] = knob(
        "passed to the wrapper behind the simulator; lists as tuples", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VariantConfig:
    """A custom class that replaces advantages, losses or metrics of the algorithm `algorithm.name`.

    `kwargs`: keyword arguments of the class, after the config of the algorithm.
    """

    name: OwnName | None = knob(
        "package.module:Class, whose methods replace the shipped formulas; null: none",
        None,
    )
    kwargs: Mapping[str, object] = knob(
        "passed to the class behind the algorithm's config", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallbackConfig:
    """A custom class that is called between iterations and when a run ends.

    `kwargs`: keyword arguments of the class, after the run's folder and config.
    """

    name: OwnName = knob("package.module:Class with on_iteration, on_end or both")
    kwargs: Mapping[str, object] = knob(
        "passed to the class behind the run's folder and config", dict
    )
