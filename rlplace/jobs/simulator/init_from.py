"""`init_from`: a run that begins with the weights of another policy. Its checks, and the text of what is taken over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rlplace.codes import problem
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.yaml_text import show
from rlplace.contract.trained import find_trained
from rlplace.envs.contract import Spaces
from rlplace.errors import Problem
from rlplace.trained import Trained

KEY = "init_from"
# Settings of a network that do not change the shapes of its layers
_FREE = ("initial_log_std",)


def beginning(config: SimulatorJobConfig) -> Trained | None:
    """Return the trained policy whose weights a run begins with; None if the config names none. Raises ConfigError."""
    if config.init_from is None:
        return None
    return find_trained(Path(config.init_from).expanduser(), KEY)


def problems_of(config: SimulatorJobConfig, spaces: Spaces) -> Iterator[Problem]:
    """Yield the reasons why a run cannot begin with the policy that its config names.

    `spaces`: observation and action spaces of the run's simulator.
    """
    trained = beginning(config)
    if trained is None:
        return
    named = config.init_from
    if not isinstance(trained.config, SimulatorJobConfig):
        yield problem("other-network", KEY, named, error="job")
        return
    theirs = trained.config.actor.policy
    ours = config.actor.policy
    if type(theirs) is not type(ours):
        yield problem(
            "other-network",
            KEY,
            named,
            error="kind",
            theirs=theirs.kind,
            ours=ours.kind,
        )
        return
    different = False
    for field in dataclasses.fields(ours):
        name = field.name
        stored, wanted = getattr(theirs, name), getattr(ours, name)
        if stored != wanted and name not in _FREE:
            different = True
            yield problem(
                "other-network",
                KEY,
                named,
                error="setting",
                name=name,
                theirs=show(stored),
                ours=show(wanted),
            )
    if not different and not _transferred(config, spaces, trained)[0]:
        yield problem("other-network", KEY, named, error="nothing")


def text_of(config: SimulatorJobConfig, spaces: Spaces) -> str:
    """Return lines of text that say what a new run takes over from another run's policy, and what begins anew.

    Return "" if the config names no policy. `spaces`: observation and action spaces of the run's simulator.
    """
    trained = beginning(config)
    if trained is None:
        return ""
    taken, anew = _transferred(config, spaces, trained)
    begins = [*anew, "optimizer, learning-rate schedule and counts"]
    return (
        f"init_from  {trained.text}\n"
        f"           taken over: {', '.join(taken)}\n"
        f"           initialised: {', '.join(begins)}"
    )


def _transferred(
    config: SimulatorJobConfig, spaces: Spaces, trained: Trained
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of the layers that are taken over, names of those that begin anew)."""
    # Imported here: a run without init_from keeps torch out of this process
    from rlplace.models.policy_networks import build_policy
    from rlplace.models.transfer import transfer_of

    network = build_policy(spaces, config.actor, config.algorithm, config.runner.seed)
    transfer = transfer_of(network, trained, KEY)
    return transfer.taken, transfer.anew
