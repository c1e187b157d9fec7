"""Ledgers and shortages as text, as in `memory/` (UPDATE_GOLDEN=1 rewrites them); the form of all memory errors."""

from __future__ import annotations

import dataclasses
import os
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

HERE = Path(__file__).parent / "memory"


def check(file: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, f"{file.name} differs; UPDATE_GOLDEN=1 accepts the new text"


def hybrid() -> str:
    plan, config = ppo()
    return render_ledger(memory_case(plan, config, PENDULUM).ledger())


LEDGERS: dict[str, Callable[[], str]] = {
    "hybrid": hybrid,
    "llama-3-8b-colocated": lambda: render_ledger(colocated_8b().ledger()),
    "llama-3-70b-on-48": lambda: render_ledger(spread_70b(optimizer_on_host=True).ledger()),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_text(name: str) -> None:
    text = LEDGERS[name]()
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    check(HERE / f"{name}.txt", text + "\n")


def shortage(case: MemoryCase) -> Problem:
    return find_shortages(case)[0]


def raised(cause: Callable[[], object]) -> Problem:
    with pytest.raises(ProblemsError) as caught:
        cause()
    (problem,) = caught.value.problems
    return problem


def unknown_memory() -> object:
    plan, config = ppo(memory=0)
    case = memory_case(plan, config, PENDULUM)
    return solve(dataclasses.replace(case, demands=colocated_8b().demands), Knob.MICRO_BATCH, "actor")


SHOWN = {"does-not-fit", "host-does-not-fit"}  # in full: the changes that would make it fit
ERRORS: dict[str, Callable[[], Problem]] = {
    "does-not-fit": lambda: shortage(spread_70b()),
    "host-does-not-fit": lambda: shortage(with_host_memory(colocated_8b(), 200 * GIB)),
    "kv-cache-too-small": lambda: shortage(colocated_8b().changed(["rollout"], gpu_memory_utilization=0.2)),
    "nothing-to-solve": lambda: raised(lambda: solve(colocated_8b(), Knob.KV_SHARE, "actor")),
    "unknown-memory": lambda: raised(unknown_memory),
    "unknown-model-family": lambda: raised(lambda: read_model({"model_type": "lama"}, key="actor.model")),
    "missing-key": lambda: raised(lambda: read_model(llama_3("8b") | {"vocab_size": None}, key="actor.model")),
    "wrong-type": lambda: raised(lambda: read_model(llama_3("8b") | {"hidden_size": "4k"}, key="actor.model")),
    "not-measurements": lambda: raised(lambda: read_measurements({"actor": {"full": 1}}, key="memory.json")),
    "unknown-residency": lambda: raised(lambda: _read({"actor": {"ful": 5}})),
    "bad-size": lambda: raised(lambda: _read({"actor": {"full": "5GiB"}})),
}


def _read(components: object) -> object:
    return read_measurements({"rlplace_memory": 1, "components": components}, key="memory.json")


@pytest.mark.parametrize("code", ERRORS)
def test_error(code: str) -> None:
    problem = ERRORS[code]()
    assert (problem.code, bool(problem.key), bool(problem.fix)) == (code, True, True)
    if code in SHOWN:
        check(HERE / f"{code}.error.txt", problem.render() + "\n")


def test_every_code_of_the_source_occurs() -> None:
    folder = Path(rlplace.placement.memory.__file__).parent
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    made = set(re.findall(r'(?:code=|else )"([a-z0-9]+(?:-[a-z0-9]+)+)"', source))
    assert made == set(ERRORS)
    assert {file.name for file in HERE.glob("*.txt")} == {f"{n}.txt" for n in LEDGERS} | {
        f"{code}.error.txt" for code in SHOWN
    }
