"""Any values of the settings that importers know are imported, or refused in the standard error format."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.config.fields import JobName
from rlplace.config.yaml_text import to_yaml
from rlplace.errors import ConfigError
from rlplace.imports import Setting, import_settings, import_words
from rlplace.imports.rules import read_rules
from rlplace.placement import HybridComponentPlacement

VALUES = st.one_of(
    st.integers(-1, 20),
    st.booleans(),
    st.none(),
    st.floats(0, 2),
    st.sampled_from(
        ["0-7", "all", "list(range(0,8))", "sglang:d4+fsdp:d2t2", "gae", "$N", "x"]
    ),
)
PLACED = {
    f"cluster.component_placement.{c}"
    for c in ("actor", "rollout", "critic", "inference")
}
MORE = {
    ("rlinf", "simulator"): PLACED | {"cluster.component_placement.env"},
    ("rlinf", "language_model"): PLACED,
    ("roll", "language_model"): {"rewards.x.device_mapping"},
}
LIBRARIES = ("openrlhf", "slime", "verl", "roll", "skyrl", "areal", "rlinf")


@pytest.mark.parametrize(
    ("library", "job"),
    [*((name, "language_model") for name in LIBRARIES), ("rlinf", "simulator")],
)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_values_are_imported_or_refused(
    library: str, job: JobName, data: st.DataObject
) -> None:
    rules = read_rules(library, job)
    keys = sorted({*rules.rules, *MORE.get((library, job), ())})
    drawn = data.draw(
        st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=12)
    )
    try:
        if rules.words_after:
            imported = import_words(
                library,
                [shlex.join(f"--{key}={value}" for key, value in drawn.items())],
            )
        else:
            imported = import_settings(
                library,
                [Setting(key=k, value=v, written=f"{k}={v}") for k, v in drawn.items()],
            )
    except ConfigError as error:
        if {*error.codes} <= {
            "import-value",
            "import-flag-value" if rules.words_after else "import-empty",
        }:
            return
        raise
    assert len(imported.results) == len(drawn)
    assert to_yaml(imported.config)
    if imported.layout is None:
        assert imported.findings
    else:
        placement = HybridComponentPlacement(imported.config, imported.topology)
        assert placement.canonical() == imported.layout.placement.canonical()
