"""Parsing Python code in several threads at once."""

from __future__ import annotations

import argparse
import ast
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from rlplace.places import place_of
from rlplace.python_code import one_at_a_time, parse


@pytest.fixture
def other_threads_run_meanwhile() -> Iterator[None]:
    """Let the collector, which runs often in a parse, let other threads run."""
    before = gc.get_threshold()

    def pause(*_: object) -> None:
        time.sleep(0.0001)

    gc.callbacks.append(pause)
    gc.set_threshold(100)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(pause)


@pytest.mark.usefixtures("other_threads_run_meanwhile")
def test_threads_find_the_place_of_a_class_at_the_same_time() -> None:
    found: list[object] = []

    def find() -> None:
        found.extend(place_of(argparse.ArgumentParser) for _ in range(5))

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert found == [place_of(argparse.ArgumentParser)] * 20


def test_a_parse_that_code_outside_has_disturbed_is_made_again() -> None:
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3

    def read() -> int:
        if failures:
            raise failures.pop()
        return 7

    assert one_at_a_time(read) == 7


def test_other_errors_are_those_of_ast() -> None:
    assert ast.dump(parse("x = 1")) == ast.dump(ast.parse("x = 1"))
    with pytest.raises(SyntaxError):
        parse("x = ")
