"""Instructions of a simulator that a policy of `kind: vla` cannot read, found before the workers start."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.envs.contract import Spaces
from rlplace.envs.registry import make_simulator, own_global_numbers, row_seeds
from rlplace.errors import Problem, SimulatorError
from rlplace.models.vla_entries import entries_for, too_long, unknown_words, words_of

# Episodes that are begun to read their instructions
_EPISODES = 32


def problems_of(config: SimulatorJobConfig, spaces: Spaces) -> Iterator[Problem]:
    """Yield the problems of instructions at the start of some episodes. Later instructions may have other words.

    Only a model from scratch has words; a tokenizer reads every text. An environment that fails yields nothing: the run
    names its error. `spaces`: those of the policy.
    """
    policy = config.actor.policy
    if not isinstance(policy, VlaConfig) or policy.path is not None:
        return
    if entries_for(spaces, policy).instruction is None:
        return
    try:
        found = first_instructions(config, policy, spaces.shown)
    except SimulatorError:
        return
    unknown = unknown_words(found, policy.words)
    if unknown is not None:
        yield unknown
    longest = max(found, key=lambda instruction: len(words_of(instruction)))
    long = too_long(longest, len(words_of(longest)), policy)
    if long is not None:
        yield long


def first_instructions(
    config: SimulatorJobConfig, policy: VlaConfig, spaces: Spaces
) -> list[str]:
    """Return the instructions of some episodes, as the simulator shows them after a reset.

    `spaces`: those of the simulator. Raises ConfigError and SimulatorError of the environment.
    """
    instruction = entries_for(spaces, policy).instruction
    assert instruction is not None, "the caller has found it"
    # Bytes of a row: numbers first, then images and texts in the order of the parts
    begin = 4 * spaces.numbers
    for part in spaces.parts:
        if part == instruction:
            break
        if part.dtype == "uint8":
            begin += part.size
    rows = spaces.together
    found: list[str] = []
    with own_global_numbers(config.runner.seed, 0, 0):
        simulator = make_simulator(config.env, rows, 1)
        try:
            for episode in range(_EPISODES):
                seeds = row_seeds(config.runner.seed, 0, rows, episode)
                for row in simulator.reset(seeds):
                    text = row[begin : begin + instruction.size].tobytes()
                    found.append(text.rstrip(b"\0").decode("utf-8"))
        finally:
            simulator.close()
    return found
