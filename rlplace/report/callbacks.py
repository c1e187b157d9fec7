"""Call what users bring as `runner.callbacks`: after each iteration, and when a run ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

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
    """Report callbacks that cannot be imported, do not take their arguments, or have nothing to call."""
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
    """The callbacks of a run, in the order of the config. Raises CallbackError for what they raise.

    As a context manager it tells them of an end that nothing inside has told, such as that of a start that fails.
    """

    def __init__(
        self, configs: Sequence[CallbackConfig], folder: Path, config: Mapping[str, Any]
    ) -> None:
        """Make each as `Class(folder, config, **kwargs)`."""
        self._made: list[tuple[str, object]] = []
        self._ended = False
        for at, each in enumerate(configs):
            make = named(
                each.name, {}, key=f"{_KEY}[{at}].name", code=_CODE, noun=_NOUN
            )
            self._made.append(
                (each.name, self._call(each.name, make, folder, config, **each.kwargs))
            )

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
        """Call all that have it; return whether one has returned True, which ends the run."""
        asked = [
            name
            for name, callback in self._made
            if hasattr(callback, "on_iteration")
            and _is_true(
                self._call(
                    name, callback.on_iteration, iteration, env_steps, dict(metrics)
                )
            )
        ]
        if asked:
            print(
                f"{', '.join(asked)} ends the run after iteration {iteration}",
                flush=True,
            )
        return bool(asked)

    def on_end(self, state: str) -> None:
        """Call all that have it with finished, stopped or failed. What they raise is told: the run is over."""
        self._ended = True
        for name, callback in self._made:
            try:
                if hasattr(callback, "on_end"):
                    self._call(name, callback.on_end, state)
            except CallbackError as error:
                print(error, file=sys.stderr, flush=True)

    def _call(self, name: str, what: Any, *given: object, **kwargs: object) -> object:
        try:
            return what(*given, **kwargs)
        except (RlplaceError, Stopped):
            raise
        except Exception as error:
            raise CallbackError.about(
                "callback-failed",
                _KEY,
                f"{getattr(what, '__name__', name)} of a callback raised an error",
                got=name,
                why=f"{type(error).__name__}: {error}".strip(),
                fix=f"mend {place_of(error, name)}, and go on with resume=auto",
            ) from error


def _is_true(answer: object) -> bool:
    """Whether it is True, of Python or of a library: a comparison of NumPy is its own bool, in no class of Python's."""
    return type(answer).__name__ in ("bool", "bool_") and bool(answer)
