"""Calls the user's callbacks, `runner.callbacks`: after each iteration, and when a run ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlplace.codes import problem
from rlplace.config.blocks.engine import CallbackConfig
from rlplace.envs.registry import check_named, named, place_of
from rlplace.errors import CallbackError, Problem, RlplaceError
from rlplace.report.trackers import state_of
from rlplace.signals import Stopped

_KEY = "runner.callbacks"
_CODE = "unknown-callback"
_NOUN = "callback"
METHODS = ("on_iteration", "on_end")
# A function that is called after each iteration: its number, the env steps so far, its metrics
OnIteration = Callable[[int, int, Mapping[str, float]], object]


def check_callbacks(configs: Sequence[CallbackConfig]) -> list[Problem]:
    """Return a problem for each callback that cannot be imported, or that does not accept its arguments.

    A callback class must have at least one of the methods `on_iteration` and `on_end`. `configs`: the list
    `runner.callbacks`. A callback is called with the run's folder, the run's config, and the callback's `kwargs`.
    """
    problems: list[Problem] = []
    for at, config in enumerate(configs):
        problems += check_named(
            config.name,
            config.kwargs,
            given=("the run's folder", "its config"),
            key=f"{_KEY}[{at}].name",
            code=_CODE,
            noun=_NOUN,
            methods=METHODS,
        )
    return problems


class Callbacks:
    """The callbacks of a run, in the order of the config. An exception of a callback is raised as CallbackError.

    When the `with` statement ends, `on_end` is called unless that was done before, for example after a failed start.
    """

    def __init__(
        self,
        configs: Sequence[CallbackConfig],
        folder: Path,
        config: Mapping[str, Any],
        functions: Sequence[OnIteration] = (),
    ) -> None:
        """Make each callback as `Class(folder, config, **kwargs)`.

        `configs`: the list `runner.callbacks`. `folder`, `config`: the run's folder and the run's config. `functions`:
        functions that are called like `on_iteration` of a callback, after the callbacks of the config.
        """
        self._made: list[tuple[str, object]] = []
        self._ended = False
        for at, each in enumerate(configs):
            key = f"{_KEY}[{at}].name"
            make = named(each.name, {}, key=key, code=_CODE, noun=_NOUN)
            callback = self._call(each.name, make, folder, config, **each.kwargs)
            self._made.append((each.name, callback))
        self._functions = [(_name_of(each), each) for each in functions]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if not self._ended:
            self.on_end(state_of(error))

    def on_iteration(
        self, iteration: int, env_steps: int, metrics: Mapping[str, float]
    ) -> bool:
        """Call `on_iteration` of all callbacks that have this method. Return True if the run has to end.

        The run has to end if any callback returned True. `iteration`: counted from 1. `env_steps`: number of env steps
        or answers since the run began. `metrics`: name -> value.
        """
        ending = []
        for name, callback in self._made:
            if not hasattr(callback, "on_iteration"):
                continue
            # A copy: a callback may change its metrics.
            given = (iteration, env_steps, dict(metrics))
            if _is_true(self._call(name, callback.on_iteration, *given)):
                ending.append(name)
        for name, function in self._functions:
            if _is_true(self._call(name, function, iteration, env_steps, {**metrics})):
                ending.append(name)
        if ending:
            names = ", ".join(ending)
            print(f"{names} ends the run after iteration {iteration}", flush=True)
        return bool(ending)

    def on_end(self, state: str) -> None:
        """Call `on_end` of all callbacks that have this method.

        `state`: how the run ended: finished, stopped or failed. Since the run is over, exceptions of callbacks are only
        printed.
        """
        self._ended = True
        for name, callback in self._made:
            try:
                if hasattr(callback, "on_end"):
                    self._call(name, callback.on_end, state)
            except CallbackError as error:
                print(error, file=sys.stderr, flush=True)

    def _call(self, name: str, what: Any, *given: object, **kwargs: object) -> object:
        """Call a class or method of the user and return its result. If it raises an exception, raise CallbackError.

        `name`: name of the callback. `what`: the class or method. `given`, `kwargs`: arguments for the call.
        """
        try:
            return what(*given, **kwargs)
        except (RlplaceError, Stopped):
            raise
        except Exception as error:
            called = getattr(what, "__name__", name)
            failed = problem(
                "callback-failed",
                _KEY,
                name,
                called=called,
                reason=f"{type(error).__name__}: {error}".strip(),
                place=place_of(error, name),
            )
            raise CallbackError(failed) from error


def _name_of(function: object) -> str:
    """Return the name of a function of the user, for texts; of a callable object, the name of its class."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def _is_true(answer: object) -> bool:
    """Return whether `answer` is Python's True or NumPy's True. The two have different classes."""
    return type(answer).__name__ in ("bool", "bool_") and bool(answer)
