"""Names of custom classes or functions in a config."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

from rlplace.config.other_names import meant_word
from rlplace.config.yaml_text import show

OWN = "package.module:Name"
OWN_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_ENVIRONMENT_ID = r"^([A-Za-z_][\w.]*[:/])?[A-Z][\w.-]*$"  # such as Hopper-v5, ALE/Pong-v5 or reach:Reach-v0


_TASKS = Path(__file__).parents[1] / "configs" / "task"


class OwnName(str):
    """The name of a custom class or function in the form `package.module:Name`."""


def block_of_name(block: type, value: object) -> str:
    """Return config text for a block with its first key set to `value`, such as `{name: "package.module:Name"}`.

    A choice of one of the keys is written for this key. The id of an environment is written for `id`, the name of a
    custom function for `function`, and another text or number for the first key, if the block has a key that takes it.
    Otherwise, the text is `{<key>: ...}`. `block`: dataclass of the block.
    """
    first = dataclasses.fields(block)[0].name
    hints = typing.get_type_hints(block)
    for name, hint in hints.items():
        choices = [o for o in (hint, *typing.get_args(hint)) if _is_choice(o)]
        if any(value in typing.get_args(choice) for choice in choices):
            return f"{{{name}: {value}}}"
    # The same, misspelt or in the words of another library
    near = {}
    for name, hint in hints.items():
        words = [
            o
            for c in (hint, *typing.get_args(hint))
            if _is_choice(c)
            for o in typing.get_args(c)
        ]
        meant = meant_word(value, [word for word in words if isinstance(word, str)])
        if meant is not None and isinstance(value, str):
            near[name] = meant
    if len(near) == 1:
        return show(near)
    if "id" in hints and re.match(_ENVIRONMENT_ID, str(value)):
        return f"{{id: {value}}}"
    of_task = _id_of_task(str(value)) if "id" in hints else None
    if of_task is not None:
        return f"{{id: {of_task}}}"
    if "function" in hints and re.match(OWN_NAME, str(value)):
        return f'{{function: "{value}"}}'
    is_word = isinstance(value, str) and re.fullmatch(r"[\w.-]+(:[0-9]+)?", value)
    takes_text = str in (hints[first], *typing.get_args(hints[first]))
    if first != "name" and is_word and takes_text:
        return f"{{{first}: {value}}}"
    if type(value) is int and hints[first] is int:
        return f"{{{first}: {value}}}"
    script = re.fullmatch(r"([A-Za-z_][\w/]*)\.py:([A-Za-z_]\w*)", str(value))
    if first == "name" and script:
        value = f"{script[1].replace('/', '.')}:{script[2]}"
    if first == "name" and isinstance(value, str):
        value = with_module(block, value)
        if re.fullmatch(OWN_NAME, value):
            return f'{{name: "{value}"}}'
        if re.fullmatch(r"[A-Za-z_]\w*", value):
            return f"{{name: {value}}}"
    return f"{{{first}: ...}}"


def _id_of_task(name: str) -> str | None:
    """Return the id of the environment of a shipped task: `CartPole-v1` for `cartpole`; None for another name."""
    plain = re.sub("[-_ ]", "", name.lower())
    for file in _TASKS.glob("*.yaml"):
        if plain == file.stem.replace("_", ""):
            written = re.search(r"^ +id: *(\S+)", file.read_text("utf-8"), re.MULTILINE)
            return written and written[1]
    return None


def with_module(block: type, name: str) -> str:
    """Return the name of a class with its module, such as `gymnasium.wrappers:ClipAction` for `ClipAction`.

    Only names in capitals get a module, and only in blocks whose classes usually come from one. `block`: dataclass of
    the block with the key `name`.
    """
    field = dataclasses.fields(block)[0]
    module = field.metadata.get("module")
    if module is None or not re.fullmatch(r"[A-Z]\w*", name):
        return name
    return f"{module}:{name}"


def _is_choice(hint: object) -> bool:
    """Return whether the type `hint` is a choice of words."""
    return typing.get_origin(hint) is typing.Literal
