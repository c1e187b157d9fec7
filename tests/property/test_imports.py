"""Any values of the settings that importers know are imported, or refused in the usual form."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import ConfigError
from rlplace.imports import (
    Imported,
    Setting,
    areal,
    import_areal,
    import_openrlhf,
    import_rlinf,
    import_roll,
    import_skyrl,
    import_slime,
    import_verl,
    openrlhf_flags,
    rlinf_rules,
    roll,
    skyrl,
    slime,
    verl_rules,
)
from rlplace.imports.yaml_text import to_yaml
from rlplace.placement import HybridComponentPlacement

VALUES = st.one_of(
    st.integers(-1, 20),
    st.booleans(),
    st.none(),
    st.floats(0, 2),
    st.sampled_from(["0-7", "all", "list(range(0,8))", "sglang:d4+fsdp:d2t2", "gae", "$N", "x"]),
)
PLACED = {f"cluster.component_placement.{c}" for c in ("actor", "env", "rollout", "critic", "inference")}
BY_KEYS: dict[str, tuple[Callable[[Sequence[Setting]], Imported], list[str]]] = {
    "rlinf": (import_rlinf, sorted({*rlinf_rules.RULES.rules, *PLACED})),
    "rlinf llm": (import_rlinf, sorted({*rlinf_rules.LLM_RULES.rules, *PLACED} - {"cluster.component_placement.env"})),
    "verl": (import_verl, list(verl_rules.RULES.rules)),
    "roll": (import_roll, [*roll.RULES.rules, "rewards.x.device_mapping"]),
    "skyrl": (import_skyrl, list(skyrl.RULES.rules)),
    "areal": (import_areal, list(areal.RULES.rules)),
}
BY_FLAGS = {
    "openrlhf": (import_openrlhf, list(openrlhf_flags.FLAGS)),
    "slime": (import_slime, list(slime.RULES.rules)),
}


def check(imported: Imported, count: int) -> None:
    assert len(imported.fates) == count
    assert to_yaml(imported.config)
    if imported.layout is not None:
        placement = HybridComponentPlacement(imported.config, imported.topology)
        assert placement.canonical() == imported.layout.placement.canonical()
    else:
        assert imported.findings


def refusals(bring: Callable[[], Imported], count: int) -> set[str]:
    """Codes of what was refused; none where the import holds."""
    try:
        imported = bring()
    except ConfigError as error:
        return set(error.codes)
    check(imported, count)
    return set()


@pytest.mark.parametrize("library", BY_KEYS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_keys(library: str, data: st.DataObject) -> None:
    importer, keys = BY_KEYS[library]
    drawn = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=12))
    found = [Setting(key=k, value=v, written=f"{k}={v}") for k, v in drawn.items()]
    assert refusals(lambda: importer(found), len(found)) <= {"import-value", "import-empty"}


@pytest.mark.parametrize("library", BY_FLAGS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_flags(library: str, data: st.DataObject) -> None:
    importer, names = BY_FLAGS[library]
    drawn = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=12))
    text = shlex.join(f"--{name}={value}" for name, value in drawn.items())
    assert refusals(lambda: importer(text), len(drawn)) <= {"import-value", "import-flag-value"}
