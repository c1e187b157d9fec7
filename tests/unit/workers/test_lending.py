"""One worker lends, another of its process uses what is lent in its own thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlplace.errors import ChannelTimeout
from rlplace.workers.lending import Lending, Lent


def calm() -> None:
    """Not cancelled."""


def borrowed(lending: Lending, failing: Exception | None) -> int:
    with lending.borrow("p", owner="env rank 0", timeout_s=10.0, check=calm) as thing:
        if failing is None:
            return int(thing())
        raise failing


def both(
    failing: Exception | None,
) -> tuple[BaseException | None, BaseException | None, int]:
    lending = Lending()
    with ThreadPoolExecutor(2) as threads:
        lender = threads.submit(
            lending.lend,
            "p",
            lambda: 7,
            owner="rollout rank 0",
            timeout_s=10.0,
            check=calm,
        )
        borrower = threads.submit(borrowed, lending, failing)
        errors = lender.exception(10), borrower.exception(10)
        return *errors, 0 if errors[1] else borrower.result()


def test_what_is_lent_is_used_and_given_back() -> None:
    assert both(None) == (None, None, 7)


def test_a_failure_of_the_borrower_is_its_own() -> None:
    error = ValueError("simulator")
    assert both(error) == (None, error, 0)


def test_a_failure_of_the_lent_object_is_the_lenders() -> None:
    lent, cause = Lent(), ValueError("policy")
    lent.__cause__ = cause
    assert both(lent) == (cause, lent, 0)


def test_who_is_alone_gives_up_in_time_and_leaves_nothing() -> None:
    lending = Lending()
    with pytest.raises(ChannelTimeout, match="rollout rank 0"):
        lending.lend("p", lambda: 7, owner="rollout rank 0", timeout_s=0.0, check=calm)
    with (
        pytest.raises(ChannelTimeout, match="env rank 0"),
        lending.borrow("p", owner="env rank 0", timeout_s=0.0, check=calm),
    ):
        pass
