"""Call the callbacks of users, `runner.callbacks`: after each iteration, and when a run ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlplace.codes import problem
from rlplace.config.own import CallbackConfig
from rlplace.envs.registry import check_named, named, place_of
from rlplace.errors import CallbackError, Problem, RlplaceError
from rlplace.report.trackers import state_of
from rlplace.signals import Stopped

_KEY = "runner.callbacks"
_CODE = "unknown-callback"
_NOUN = "callback"
METHODS = ("on_iteration", "on_end")


def check_callbacks(configs: Sequence[CallbackConfig]) -> list[Problem]:
    """Return a problem for each callback that cannot be imported or called, or that lacks both methods.

    `configs`: the list `runner.callbacks`. A callback is called with the run's folder, its config, and the `kwargs` of
    the config.
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
    """The callbacks of a run, in the order of the config. Their exceptions become CallbackError.

    On leaving the context, `on_end` is called if it was not called before, as after a failed start.
    """

    def __init__(
        self, configs: Sequence[CallbackConfig], folder: Path, config: Mapping[str, Any]
    ) -> None:
        """Make each callback as `Class(folder, config, **kwargs)`.

        `configs`: the list `runner.callbacks`. `folder`, `config`: the run's folder and the run's config.
        """
        self._made: list[tuple[str, object]] = []
        self._ended = False
        for at, each in enumerate(configs):
            key = f"{_KEY}[{at}].name"
            make = named(each.name, {}, key=key, code=_CODE, noun=_NOUN)
            callback = self._call(each.name, make, folder, config, **each.kwargs)
            self._made.append((each.name, callback))

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
        """Call the method `on_iteration` of each callback that has it; return whether any of them returned True.

        True ends the run. `iteration`: counted from 1. `env_steps`: env steps or answers since the run began.
        `metrics`: name -> value.
        """
        ending = []
        for name, callback in self._made:
            if not hasattr(callback, "on_iteration"):
                continue
            # A copy: a callback may change its metrics.
            given = (iteration, env_steps, dict(metrics))
            if _is_true(self._call(name, callback.on_iteration, *given)):
                ending.append(name)
        if ending:
            names = ", ".join(ending)
            print(f"{names} ends the run after iteration {iteration}", flush=True)
        return bool(ending)

    def on_end(self, state: str) -> None:
        """Call the method `on_end` of each callback that has it. `state`: finished, stopped or failed.

        The run is over, so exceptions are only printed.
        """
        self._ended = True
        for name, callback in self._made:
            try:
                if hasattr(callback, "on_end"):
                    self._call(name, callback.on_end, state)
            except CallbackError as error:
                print(error, file=sys.stderr, flush=True)

    def _call(self, name: str, what: Any, *given: object, **kwargs: object) -> object:
        """Return the result of a user's class or method. Raises CallbackError for its exceptions.

        `name`: name of the callback. `what`: the class or method. `given`, `kwargs`: its arguments.
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


def _is_true(answer: object) -> bool:
    """Return whether an answer is Python's True, or NumPy's, whose bool is another class."""
    return type(answer).__name__ in ("bool", "bool_") and bool(answer)
