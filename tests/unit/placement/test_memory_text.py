"""Ledgers as text for people, and every error of the memory room."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import rlplace.placement.memory
from rlplace.errors import Problem, ProblemsError
from rlplace.placement.memory.case import memory_case
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.ledger_text import render_ledger
from rlplace.placement.memory.measured import read_measurements
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.remedies import find_shortages
from rlplace.placement.memory.solve import Knob, solve
from tests.unit.placement.memory_cases import GIB, PENDULUM, colocated_8b, llama_3, ppo, spread_70b, with_host_memory


def hybrid() -> MemoryCase:
    plan, config = ppo()
    return memory_case(plan, config, PENDULUM)


@pytest.mark.parametrize("case", [hybrid, colocated_8b, lambda: spread_70b(on_host=True)])
def test_a_ledger_as_text(case: Callable[[], MemoryCase]) -> None:
    """A verdict, a table for each kind of accelerator with its worst moment marked, hosts, and how far to trust it."""
    ledger = case().ledger()
    text = render_ledger(ledger)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    verdict, *tables, hosts, trust = text.split("\n\n")
    assert ledger.tightest is not None
    assert verdict.startswith(f"memory: fits; tightest accelerators {ledger.tightest.numbers} in ")
    assert len(tables) == len(ledger.accelerators)
    for account, table in zip(ledger.accelerators, tables, strict=True):
        title, columns, *rows = table.splitlines()
        assert str(account.numbers) in title
        assert columns.split()[-2:] == ["sum", "free"]
        (worst,) = (row for row in rows if row.startswith("  > "))
        assert worst[4:].startswith(str(account.worst.moment))
        assert f"{account.worst.moment} holds {account.worst.holds[0].component}" in table
    assert hosts.startswith("host memory at the worst stage")
    assert "accuracy: " in trust


def raised(cause: Callable[[], object]) -> Problem:
    with pytest.raises(ProblemsError) as caught:
        cause()
    (problem,) = caught.value.problems
    return problem


def unknown_memory() -> object:
    plan, config = ppo(memory=0)
    case = memory_case(plan, config, PENDULUM)
    return solve(dataclasses.replace(case, demands=colocated_8b().demands), Knob.MICRO_BATCH, "actor")


def read(components: object) -> object:
    return read_measurements({"rlplace_memory": 1, "components": components}, key="memory.json")


ERRORS: dict[str, Callable[[], Problem]] = {
    "does-not-fit": lambda: find_shortages(spread_70b())[0],
    "host-does-not-fit": lambda: find_shortages(with_host_memory(colocated_8b(), 200 * GIB))[0],
    "kv-cache-too-small": lambda: find_shortages(colocated_8b().changed(["rollout"], gpu_memory_utilization=0.2))[0],
    "nothing-to-solve": lambda: raised(lambda: solve(colocated_8b(), Knob.KV_SHARE, "actor")),
    "unknown-memory": lambda: raised(unknown_memory),
    "unknown-model-family": lambda: raised(lambda: read_model({"model_type": "lama"}, key="actor.model")),
    "missing-key": lambda: raised(lambda: read_model(llama_3("8b") | {"vocab_size": None}, key="actor.model")),
    "wrong-type": lambda: raised(lambda: read_model(llama_3("8b") | {"hidden_size": "4k"}, key="actor.model")),
    "not-measurements": lambda: raised(lambda: read_measurements({"actor": {"full": 1}}, key="memory.json")),
    "unknown-residency": lambda: raised(lambda: read({"actor": {"ful": 5}})),
    "bad-size": lambda: raised(lambda: read({"actor": {"full": "5GiB"}})),
}


@pytest.mark.parametrize("code", ERRORS)
def test_error(code: str) -> None:
    problem = ERRORS[code]()
    assert (problem.code, bool(problem.key), bool(problem.fix)) == (code, True, True)


def test_every_code_of_the_source_occurs() -> None:
    folder = Path(rlplace.placement.memory.__file__).parent
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    made = set(re.findall(r'(?:code=|else |Error\.of\()"([a-z0-9]+(?:-[a-z0-9]+)+)"', source))
    assert made == set(ERRORS)
