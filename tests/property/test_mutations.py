"""Whatever is written into a config or a placement: a plan, or documented errors, within two seconds.

RLPLACE_STRESS_ITEMS sets how many configs and how many placements are tried; each follows from its number alone.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rlplace.codes import codes
from rlplace.config.compose import Composed, config_names, with_hydra
from rlplace.errors import ClusterError, ProblemsError
from rlplace.placement.show.text import render_text
from rlplace.runtime.prepare import prepare

ITEMS = int(os.environ.get("RLPLACE_STRESS_ITEMS", "50"))
LONGEST_S = 2.0  # of this process, for one item
HANGS_S = 60
WILD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        8,
        64,
        247,
        1025,
        10**6,
        10**12 + 1,
        10**40,
        -(10**40),
    ),
    *(0.0, 0.5, -0.1, 1e-300, 1e300, float("inf"), float("nan")),
    *(
        "",
        " ",
        "auto",
        "all",
        "null",
        "0-7",
        "0-3,5-7",
        "80G",
        "16GiB",
        "-1KiB",
        "1e400GiB",
        "7:0",
        "a" * 2000,
    ),
    *(
        "0\u20133",
        "\n",
        "\x00",
        "package.module:Class",
        "ppo",
        "grpo",
        "vllm",
        "mlp",
        "causal_lm",
        "fp8",
        "hybrid",
    ),
    *(
        [],
        [1],
        [None],
        ["a", []],
        [[0]],
        [{}],
        {},
        {"a": 1},
        {1: 2},
        {None: None},
        {"kind": "x"},
        b"x",
    ),
    *(
        10**400,
        -(10**400),
        "9" * 400,
        "9" * 400 + "GiB",
        "9" * 400 + "%",
        "0-" + "9" * 400,
    ),
)
PIECES = (
    *(
        "0",
        "0-3",
        "4-7",
        "all",
        "0-7",
        "3-0",
        "0-3:0-7",
        "0-7:0-3",
        "7",
        "0-9999999999",
        "-",
        ":",
        ",",
        "0:8",
        "1/2",
    ),
    *(
        "",
        " ",
        "rest",
        "cpu",
        "a",
        "0-3;4-7",
        "cuda:0-7",
        "50%",
        "0..7",
        "1:0",
        "0-1:1-2",
        "\u0660",
        "99999999999999",
    ),
)
KEYS = (
    *(
        "placement",
        "accelerators",
        "same_as",
        "node_group",
        "ranks_per_accelerator",
        "accelerators_per_rank",
    ),
    *(
        "tensor_parallel_size",
        "data_parallel_size",
        "tensor_parallel_across_nodes",
        "process",
        "preset",
        "5-7",
        "tp",
    ),
)
COMPONENTS = (
    "actor",
    "rollout",
    "env",
    "critic",
    "reference",
    "reward",
    "reward.math",
    "agent",
    "ref",
    "actor,rollout",
)


@functools.cache
def shipped() -> Sequence[Composed]:
    return [
        job for name in config_names() for job in with_hydra(["--config-name", name])
    ]


def blocks_in(value: object) -> list[Any]:
    """All mappings and lists in a value that have something in them, itself first."""
    below = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else ()
    )
    here = [value] if isinstance(value, dict | list) and value else []
    return here + [found for item in below for found in blocks_in(item)]


def mutate(mapping: dict[str, Any], dice: random.Random) -> None:
    """Change one place: a wild value, a key less, a key more, a key misspelt, or another place's value."""
    blocks = blocks_in(mapping)
    block, other = dice.choice(blocks), dice.choice(blocks)
    key = dice.choice([*block] if isinstance(block, dict) else range(len(block)))
    kind = dice.randrange(6)
    if kind == 0:
        del block[key]
    elif kind == 1 and isinstance(block, dict):
        block[dice.choice([*WILD[:20], *KEYS, *COMPONENTS, "lr", "model"])] = (
            dice.choice(WILD)
        )
    elif kind == 2 and isinstance(block, dict):
        name = str(key)
        at = dice.randrange(len(name) + 1)
        block[
            name[:at] + dice.choice("abx_. ") * dice.randrange(2) + name[at + 1 :]
        ] = block.pop(key)
    elif kind == 3:
        value = other[
            dice.choice([*other] if isinstance(other, dict) else range(len(other)))
        ]
        block[key] = copy.deepcopy(value)
    elif kind == 4 and isinstance(block[key], int):
        block[key] *= dice.choice((2, 3, 10**3, 10**6, 10**12))
    else:
        block[key] = copy.deepcopy(dice.choice(WILD))


def mutated_config(dice: random.Random) -> Mapping[str, Any]:
    mapping = copy.deepcopy(dict(dice.choice(shipped()).mapping))
    for _ in range(dice.choice((1, 1, 2, 4))):
        mutate(mapping, dice)
    return mapping


def wild_place(dice: random.Random) -> object:
    text = ",".join(dice.choice(PIECES) for _ in range(dice.choice((1, 1, 2, 3))))
    kind = dice.randrange(8)
    if kind < 3:
        return text
    if kind == 3:
        return [dice.choice([*PIECES, *WILD]) for _ in range(dice.randrange(4))]
    if kind == 4:
        return dice.choice(WILD)
    block: dict[object, object] = {dice.choice(KEYS[:3]): text}
    for _ in range(dice.randrange(3)):
        block[dice.choice(KEYS)] = dice.choice(
            [*WILD, *COMPONENTS, 1, 2, 4, "a", "cluster", "shared", "own"]
        )
    return block


def tame_place(dice: random.Random) -> object:
    """A place that some cluster has."""
    first, count = dice.choice((0, 0, 1, 2, 4)), dice.choice((1, 1, 2, 4, 8))
    numbers = f"{first}-{first + count - 1}"
    block = {"placement": numbers, dice.choice(KEYS[4:8]): dice.choice((1, 2, 4))}
    return dice.choice(
        (
            numbers,
            numbers,
            block,
            {"accelerators": count},
            {"same_as": "actor"},
            "rest",
            f"0-1,{numbers}",
        )
    )


def mutated_placement(dice: random.Random) -> Mapping[str, Any]:
    mapping = copy.deepcopy(dict(dice.choice(shipped()).mapping))
    placement = mapping["cluster"]["component_placement"]
    if dice.random() < 0.1:
        placement.clear()
    for _ in range(dice.choice((1, 1, 2, 3))):
        component = (
            dice.choice([*placement, *COMPONENTS])
            if dice.random() < 0.2
            else dice.choice([*placement, "env"])
        )
        placement[component] = (
            wild_place(dice) if dice.random() < 0.5 else tame_place(dice)
        )
    if dice.random() < 0.2:
        mapping["cluster"]["node_groups"] = [
            {
                "label": dice.choice(["a", *WILD]),
                "node_ranks": dice.choice([0, *PIECES, *WILD]),
            }
        ]
    return mapping


def try_one(mapping: Mapping[str, Any]) -> list[str]:
    """Return the codes of the problems; none where it can be planned."""
    try:
        render_text(prepare(mapping).view)
    except ProblemsError as error:
        problems = error.problems
    except ClusterError as error:
        problems = (error.problem,)
    else:
        return []
    assert all(problem.render() for problem in problems)
    assert {problem.code for problem in problems} <= codes().keys()
    return [problem.code for problem in problems]


@pytest.mark.parametrize("name", ["hybrid_ppo", "rlhf_ppo_colocated"])
def test_numbers_of_hundreds_of_digits_are_refused_wherever_a_number_stands(
    name: str,
) -> None:
    (composed,) = with_hydra(["--config-name", name])

    def numbers(block: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key, below in (
            block.items() if isinstance(block, Mapping) else enumerate(block)
        ):
            if isinstance(below, (Mapping, list)):
                yield from numbers(below, (*path, key))
            elif isinstance(below, (int, float)) and not isinstance(below, bool):
                yield (*path, key)

    for path in numbers(composed.mapping):
        for wild in (10**400, "9" * 400 + "GiB"):
            mapping: Any = copy.deepcopy(dict(composed.mapping))
            block = functools.reduce(lambda of, step: of[step], path[:-1], mapping)
            block[path[-1]] = wild
            assert try_one(mapping), path


@pytest.mark.parametrize("made", [mutated_config, mutated_placement])
def test_nothing_but_documented_errors(
    made: Callable[[random.Random], Mapping[str, Any]],
) -> None:
    met, plans, slowest, item = Counter[str](), 0, (0.0, 0), 0

    def hangs(*_: object) -> None:
        pytest.fail(f"item {item} takes more than {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    try:
        for item in range(ITEMS):
            mapping, start = made(random.Random(item)), time.process_time()
            signal.alarm(HANGS_S)
            try:
                found = try_one(mapping)
            except Exception as error:
                raise AssertionError(f"item {item}: {mapping}") from error
            met.update(found)
            plans += not found
            slowest = max(slowest, (time.process_time() - start, item))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    print(
        f"{made.__name__}: {ITEMS} tried, {plans} planned, slowest {slowest[0]:.2f} s; {dict(met.most_common())}"
    )
    assert plans
    assert slowest[0] <= LONGEST_S, f"item {slowest[1]} took {slowest[0]:.1f} s"
