"""Which constructors a worker class may have, and what they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from rlplace.errors import WorkerMisuse
from rlplace.workers.launch.construction import construct
from rlplace.workers.worker import Worker, WorkerContext

CONTEXT = cast(WorkerContext, object())


class Plain(Worker):
    """Has the constructor of the base."""


class WithoutArguments(Worker):
    def __init__(self) -> None:
        self.before = self.config
        super().__init__()


class WithConfig(Worker):
    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.before = cfg


class WithBoth(Worker):
    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__(config, context)
        self.before = config


class WithContext(Worker):
    def __init__(self, context: WorkerContext) -> None:
        assert context is CONTEXT
        super().__init__(context=context)
        self.before = self.config


class WithDefaults(Worker):
    def __init__(self, rate: Any = None, verbose: bool = False) -> None:
        assert verbose is False
        super().__init__()
        self.before = rate


class WithAny(Worker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before = arguments[0]


class Forgetful(Worker):
    def __init__(self) -> None:
        """Do not call the base."""
        self.before = self.config


@pytest.mark.parametrize(
    "kind",
    [
        WithoutArguments,
        WithConfig,
        WithBoth,
        WithContext,
        WithDefaults,
        WithAny,
        Forgetful,
    ],
)
def test_config_and_context_are_there_whatever_the_constructor_takes(
    kind: Callable[..., Any],
) -> None:
    worker = construct(cast(type[Worker], kind), "a config", CONTEXT)
    assert cast(Any, worker).before == "a config"
    assert (worker.config, worker.context) == ("a config", CONTEXT)
    assert worker.take_metrics() == {}


def test_a_worker_can_be_made_without_a_launcher() -> None:
    worker = Plain("a config", CONTEXT)
    assert (worker.config, worker.context) == ("a config", CONTEXT)


class WithThree(Worker):
    def __init__(self, rate: float, epochs: int, name: str) -> None:
        super().__init__()


class WithKeyword(Worker):
    def __init__(self, config: Any, *, epochs: int) -> None:
        super().__init__(config)


@pytest.mark.parametrize("kind", [WithThree, WithKeyword])
def test_other_arguments_are_refused_before_the_start_with_file_and_line(
    kind: type[Worker],
) -> None:
    with pytest.raises(WorkerMisuse) as refused:
        kind.create_group()
    assert refused.value.code == "worker-constructor"
    text = str(refused.value)
    assert text.startswith(kind.__name__)
    assert "epochs" in text
    line = kind.__init__.__code__.co_firstlineno
    assert f"test_construction.py:{line})" in text


class Holding(Plain):
    def hold(self) -> None: ...


def test_a_method_that_the_group_has_itself_is_refused() -> None:
    with pytest.raises(WorkerMisuse, match=r"Holding\.hold") as refused:
        Holding.create_group()
    assert refused.value.code == "worker-method"
