"""Read the options of other programs, such as `--ent-coef 0.01`, as keys of a config.

An option is read as the same key would be read in the config: by its place, by its value, and beside the other options.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlplace.config.fields import JobName, jobs
from rlplace.config.found import Found
from rlplace.config.measures import as_plain_number
from rlplace.config.of_job import config_of, named_configs
from rlplace.config.options import Meaning
from rlplace.config.unknown_keys import key_meant
from rlplace.config.which_job import USUAL, find_job
from rlplace.config.yaml_text import show, value_of

# Beginnings of switches in the other direction: --no-autotune
_NOT = ("no_", "disable_")


def read_options(
    options: Mapping[str, Sequence[str]],
    mapping: Mapping[str, Any],
    of_group: Callable[[str, str], str | None],
) -> dict[str, Meaning]:
    """Return option -> what is meant by it in a config; options whose meaning is not clear are left out.

    `options`: option -> its values as they are typed. `mapping`: the composed config. `of_group`: a function that takes
    name and value of an option, and returns the override for a part of a config, such as `task=hopper`, or None.
    """
    schema = schema_of(mapping)
    if schema is None:
        return {}
    job, config = schema
    names = {option: option.lstrip("-").replace("-", "_") for option in options}
    values = {names[option]: _value(given) for option, given in options.items()}
    written = {**mapping, **values}
    found: dict[str, Meaning] = {}
    for option, name in names.items():
        typed = " ".join(options[option])
        override = of_group(name, typed)
        if override is not None:
            found[option] = Meaning(override)
            continue
        value = values[name]
        meant = key_meant(name, value, written, job, config)
        for negated in _NOT:
            if meant is None and value is True and name.startswith(negated):
                plain = name.removeprefix(negated)
                switched = {**written, plain: False}
                meant = key_meant(plain, False, switched, job, config)
        if meant is None:
            continue
        fix = meant.fix
        if fix == f"leave out {name}":
            fix = f"leave out {option}"
        if len(options[option]) == 1:
            # Numbers as they are typed: 3e-4
            fix = re.sub(rf"={re.escape(show(value))}(?='?$)", f"={typed}", fix)
        found[option] = Meaning(fix, meant.reason)
    return found


def schema_of(mapping: Mapping[str, Any]) -> tuple[JobName, type] | None:
    """Return (kind of job, type of the whole config) of a config; None for a custom job."""
    name = mapping.get("job")
    named = named_configs()
    if name in named:
        return USUAL, named[str(name)]
    if name is not None and name not in jobs():
        return None
    job = find_job(copy.deepcopy(dict(mapping)), Found(sources={}))
    return job, config_of(job)


def _value(given: Sequence[str]) -> object:
    """Return the value of an option; True without a value, and a list for several. `given`: its words."""
    if not given:
        return True
    values = [_read(text) for text in given]
    return values[0] if len(values) == 1 else values


def _read(text: str) -> object:
    """Return the value that a word of a command line has in YAML; `3e-4` is a number as well."""
    value = value_of(text)
    if isinstance(value, str):
        number = as_plain_number(value)
        return text if number is None else number
    return value
