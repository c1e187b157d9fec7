"""Modules that can be called: `rlplace.train(...)` trains, and `python -m rlplace.train` stays the command.

The names `train`, `plan` and `search` of the package are the modules of the commands. The classes here make these
modules callable, and import what a call needs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.api.run import Run
    from rlplace.foresight.answer import Result
    from rlplace.runtime.prepare import Prepared

# A config: the name of a shipped one, a YAML file, or the content of such a file
Config = str | Path | Mapping[str, Any]
# Overrides: words such as "algorithm.gamma=0.98", or key -> value
Overrides = Sequence[str] | Mapping[str, Any]
# Called after each iteration with its number, the env steps so far, and its metrics; True ends the run
OnIteration = Callable[[int, int, Mapping[str, float]], object]


class TrainModule(ModuleType):
    """The module `rlplace.train`, which can be called to train in this process."""

    main: Callable[..., int]  # the command

    def __call__(
        self,
        config: Config,
        overrides: Overrides = (),
        *,
        on_iteration: OnIteration | None = None,
    ) -> Run:
        """Train the job of a config in this process, as the command `python -m rlplace.train` does. Return its run.

        `config`: name of a shipped config or task, path of a YAML file, or the content of such a file as a mapping.
        `overrides`: words such as `"runner.total_iterations=3"`, or key -> value. `on_iteration`: is called after each
        iteration as `on_iteration(iteration, env_steps, metrics)`; if it returns True, the run ends.

        After Ctrl-C, the run saves and ends, and KeyboardInterrupt is raised; `rlplace.load_run` has what it wrote.
        Raises ConfigError, PlacementError, ClusterError or another RlplaceError.
        """
        from rlplace.api.training import train

        return train(config, overrides, on_iteration=on_iteration)


class PlanModule(ModuleType):
    """The module `rlplace.plan`, which can be called to plan the job of a config."""

    main: Callable[..., int]  # the command

    def __call__(self, config: Config, overrides: Overrides = ()) -> Prepared:
        """Return the plan of a config, its memory proof, and both as text and as a picture. Nothing is started.

        `config`, `overrides`: as in `rlplace.train`. Raises ConfigError, PlacementError or ClusterError with all
        problems.
        """
        from rlplace.api.planning import plan

        return plan(config, overrides)


class SearchModule(ModuleType):
    """The module `rlplace.search`, which can be called to find the fastest placement of a config."""

    main: Callable[..., int]  # the command

    def __call__(
        self,
        config: Config,
        overrides: Overrides = (),
        *,
        objective: str = "seconds",
        fix: Sequence[str] = (),
        accelerators: Sequence[int] = (),
        vary: Sequence[str] = (),
        seconds: float = 60.0,
        probe: int = 0,
        apply: str | Path | None = None,
    ) -> Result:
        """Find the placement with the shortest iterations under a profile, and return it with its runners-up.

        `config`, `overrides`: as in `rlplace.train`; the override `profile=FILE` names the profile. `objective`:
        "seconds" of an iteration, or "accelerator_seconds". `fix`: components that keep their placement.
        `accelerators`: allowed numbers of accelerators; empty: any. `vary`: config keys that may get other values.
        `seconds`: time for the search. `probe`: how many of the best plans to run for a few iterations. `apply`: YAML
        file for the config with the best plan. Raises ConfigError, PlacementError, ClusterError or OutputError.
        """
        from rlplace.api.searching import search

        return search(
            config,
            overrides,
            objective=objective,
            fix=fix,
            accelerators=accelerators,
            vary=vary,
            seconds=seconds,
            probe=probe,
            apply=apply,
        )
