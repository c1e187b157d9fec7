"""Ledgers as text for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.memory.ledger_text import render_ledger
from tests.unit.placement.memory_cases import colocated_8b, ppo_case, spread_70b


@pytest.mark.parametrize("case", [ppo_case, colocated_8b, lambda: spread_70b(on_host=True)])
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
