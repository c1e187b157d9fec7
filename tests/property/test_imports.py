"""Any values of the settings that importers know are imported, or refused in the standard error format."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.config.fields import ModelKind
from rlplace.errors import ConfigError
from rlplace.imports import Imported, Setting, import_settings, import_words
from rlplace.imports.rules import read_rules
from rlplace.imports.settings import to_yaml
from rlplace.placement import HybridComponentPlacement

VALUES = st.one_of(
    st.integers(-1, 20),
    st.booleans(),
    st.none(),
    st.floats(0, 2),
    st.sampled_from(["0-7", "all", "list(range(0,8))", "sglang:d4+fsdp:d2t2", "gae", "$N", "x"]),
)
PLACED = {f"cluster.component_placement.{c}" for c in ("actor", "rollout", "critic", "inference")}
MORE = {
    ("rlinf", "mlp"): PLACED | {"cluster.component_placement.env"},
    ("rlinf", "causal_lm"): PLACED,
    ("roll", "causal_lm"): {"rewards.x.device_mapping"},
}
BY_KEYS = ["verl", "roll", "skyrl", "areal", "rlinf"]


def codes_of(bring: Callable[[], Imported], count: int) -> set[str]:
    """The codes of a refusal; none where the import holds as it is written."""
    try:
        imported = bring()
    except ConfigError as error:
        return set(error.codes)
    assert len(imported.results) == count
    assert to_yaml(imported.config)
    if imported.layout is None:
        assert imported.findings
        return set()
    placement = HybridComponentPlacement(imported.config, imported.topology)
    assert placement.canonical() == imported.layout.placement.canonical()
    return set()


@pytest.mark.parametrize(("library", "kind"), [*((name, "causal_lm") for name in BY_KEYS), ("rlinf", "mlp")])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_keys(library: str, kind: ModelKind, data: st.DataObject) -> None:
    keys = sorted({*read_rules(library, kind).rules, *MORE.get((library, kind), ())})
    drawn = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=12))
    found = [Setting(key=k, value=v, written=f"{k}={v}") for k, v in drawn.items()]
    assert codes_of(lambda: import_settings(library, found), len(found)) <= {"import-value", "import-empty"}


@pytest.mark.parametrize("library", ["openrlhf", "slime"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_flags(library: str, data: st.DataObject) -> None:
    names = sorted(read_rules(library).rules)
    drawn = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=12))
    text = shlex.join(f"--{name}={value}" for name, value in drawn.items())
    assert codes_of(lambda: import_words(library, [text]), len(drawn)) <= {"import-value", "import-flag-value"}
