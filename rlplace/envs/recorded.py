"""Recorded steps of a simulator, such as demonstrations, from files in the layouts of NumPy, D4RL and Minari.

::

    .npz, .hdf5     observations, next_observations    [N, *O]    as the simulator shows them
                    actions                            [N, *A]    as the simulator takes them
                    rewards, terminated, truncated     [N]        neighbouring steps follow each other, unless an
                                                                  episode ends between
    D4RL            terminals, timeouts                           in place of the last two names; without
                                                                  next_observations, they are those of the next step
    Minari          episode_<n>/observations           [T+1, *O]  of an episode of T steps; also actions, rewards,
                                                                  terminations and truncations

Letters: N steps, T steps of an episode, O observation shape, A action shape.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.algo.replay import Steps
from rlplace.codes import config_error, problem
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.envs.registry import needs
from rlplace.errors import ConfigError, Problem, ProblemsError
from rlplace.json_text import parsed

KEY = "replay.demonstrations"
# Of a folder of Minari
_OF_MINARI = Path("data", "main_data.hdf5")
_METADATA = Path("data", "metadata.json")
_EPISODE = "episode_"
_MINARI_NAMES = {"terminated": "terminations", "truncated": "truncations"}
# Differences up to this size are rounding errors. Fewer lost differences than _FEWEST_LOST do not count
_NOISE = 1e-6
_FEWEST_LOST = 4
# A number whose float32 changes at least once in so many changes is a slow one, which a policy sees
_MOST_BETWEEN = 16
_FLOAT32_BYTES = 4
# Actions are of another scale if none is larger than a number well within the bounds, and many are equal to it
_WITHIN = 0.95
_FEWEST_EQUAL = 10
# Fewest truncated steps that are compared
_FEWEST_CUT = 3
_SHARE_EQUAL = 0.01
_D4RL_NAMES = {"terminated": "terminals", "truncated": "timeouts"}


def read_demonstrations(path: str, spaces: Spaces) -> Steps:
    """Return the steps of a file as those of one environment, with actions as the memory has them.

    Raises ConfigError if the file cannot be read, lacks an array, or has the spaces of another simulator.
    """
    actions = spaces.actions
    shapes = {
        "observations": spaces.observation_shape,
        "next_observations": spaces.observation_shape,
        "actions": getattr(actions, "shape", ()),
        "rewards": (),
        "terminated": (),
        "truncated": (),
    }
    arrays = _arrays(path, shapes)
    missing = [name for name in shapes if name not in arrays]
    if missing:
        raise config_error(
            "bad-demonstrations",
            KEY,
            path,
            error="missing",
            missing=", ".join(missing),
            names=", ".join(shapes),
        )
    count = len(np.atleast_1d(arrays["rewards"]))
    for name, shape in shapes.items():
        if arrays[name].shape != (count, *shape):
            raise config_error(
                "bad-demonstrations",
                KEY,
                f"{path}: {name} {list(arrays[name].shape)}",
                error="shape",
                name=name,
                expected=[count, *shape],
            )
        # As the memory has them: a large float64 becomes infinite
        with np.errstate(over="ignore"):
            stored = arrays[name].astype(np.float32)
        if not np.isfinite(stored).all():
            raise config_error(
                "bad-demonstrations", KEY, f"{path}: {name}", error="finite", name=name
            )
    for name in ("terminated", "truncated"):
        others = ~np.isin(arrays[name], (0, 1))
        if others.any():
            got = f"{path}: {name} {arrays[name][others][0]:g}"
            raise config_error("bad-demonstrations", KEY, got, error="flags", name=name)
    _require_precision(path, arrays)
    return Steps(
        observations=arrays["observations"].astype(np.float32)[:, None],
        actions=_scaled(arrays["actions"], spaces, path)[:, None],
        rewards=arrays["rewards"].astype(np.float32)[:, None],
        terminated=arrays["terminated"].astype(np.bool_)[:, None],
        truncated=arrays["truncated"].astype(np.bool_)[:, None],
        next_observations=arrays["next_observations"].astype(np.float32)[:, None],
        begins=np.zeros(1, np.bool_),
    )


def steps_in(path: str) -> int:
    """Return the number of steps in a file; 0 for a file with problems. Only the rewards are read."""
    try:
        rewards = _arrays(path, ("rewards",))["rewards"]
    except (ConfigError, KeyError):
        return 0
    return len(np.atleast_1d(rewards))


def problems_of(
    path: str, spaces: Spaces, *, shards: int, n_step: int
) -> list[Problem]:
    """Return the reasons why a job cannot learn from a file of steps, which is read for that.

    `shards`: number of ranks that share the steps. `n_step`: rewards that are summed.
    """
    try:
        steps = read_demonstrations(path, spaces)
        if n_step > 1:
            require_sequence(path, steps)
    except ProblemsError as error:
        return [*error.problems]
    count = len(steps.rewards)
    if count >= shards:
        return []
    few = problem(
        "bad-demonstrations", KEY, path, error="few", steps=count, ranks=shards
    )
    return [few]


def require_sequence(path: str, steps: Steps) -> None:
    """Raise ConfigError if a step is followed by one of another place, though no episode ends between the two.

    Sums of several rewards would go on from one episode to another, or over a gap. `path`: the file of `steps`.
    """
    after = steps.next_observations[:-1, 0]
    following = steps.observations[1:, 0]
    ended = np.logical_or(steps.terminated, steps.truncated)[:-1, 0]
    alike = np.isclose(after, following, rtol=1e-4, atol=1e-5)
    follows = alike.reshape(len(after), -1).all(axis=1)
    broken = np.flatnonzero(~np.logical_or(follows, ended))
    if len(broken):
        raise config_error(
            "bad-demonstrations",
            KEY,
            f"{path}: {len(broken)} of {len(ended) + 1} steps, the first is {broken[0]}",
            error="gaps",
            step=int(broken[0]),
            following=int(broken[0]) + 1,
        )


def other_simulator(path: str, simulator: str) -> Problem | None:
    """Return a warning if a folder of Minari was recorded in another simulator than `simulator`, an id; else None.

    Ids that differ in their version count as different: versions have other observations, rewards or ends.
    """
    file = Path(path).expanduser() / _METADATA
    recorded = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        spec = parsed(file.read_text(encoding="utf-8"))["env_spec"]
        # A text of JSON within JSON
        recorded = (parsed(spec) if isinstance(spec, str) else spec)["id"]
    module, colon, registered = simulator.rpartition(":")
    known = isinstance(recorded, str) and re.search(r"-v\d+$", registered)
    if not known or recorded == registered:
        return None
    return problem(
        "demonstrated-simulator",
        KEY,
        path,
        recorded=recorded,
        simulator=simulator,
        id=f"{module}{colon}{recorded}",
    )


def next_episodes(path: str, steps: Steps) -> Problem | None:
    """Return a warning if truncated steps are followed by the first observation of another episode; else None.

    Environments that begin the next episode by themselves return it, and programs store it as it came. Then the value
    of another episode's first state would be learned as that of the last one. It shows where the next observation of
    each truncated step is the observation of the step after it, while observations change otherwise.

    `path`: the file of `steps`.
    """
    seen = steps.observations[:, 0].reshape(len(steps.rewards), -1)
    after = steps.next_observations[:, 0].reshape(len(steps.rewards), -1)
    cut = (steps.truncated & ~steps.terminated)[:-1, 0]
    equal = (after[:-1] == seen[1:]).all(axis=1)
    changes = (after[:-1] != seen[:-1]).any(axis=1)
    count = int(cut.sum())
    if count < _FEWEST_CUT or not equal[cut].all() or not changes[cut].all():
        return None
    return problem("demonstrated-cuts", KEY, path, count=count)


def narrow_actions(path: str, steps: Steps, spaces: Spaces) -> Problem | None:
    """Return a warning if the actions of a file seem to be those of narrower bounds, such as [-1, 1]; else None.

    Programs that scale actions often store the scaled ones. They are clipped at bounds of their own: no action is
    larger, and many are equal to it.

    `path`: the file of `steps`. `spaces`: those of the simulator.
    """
    of = spaces.actions
    if not isinstance(of, ContinuousActions):
        return None
    taken = np.abs(steps.actions.reshape(len(steps.actions), -1))
    largest = taken.max(axis=0)
    equal = (taken > largest - _NOISE).sum(axis=0)
    enough = max(_FEWEST_EQUAL, _SHARE_EQUAL * len(taken))
    narrow = (largest > _NOISE) & (largest < _WITHIN) & (equal >= enough)
    if not narrow.any():
        return None
    element = int(narrow.argmax())
    middle = (of.high[element] + of.low[element]) / 2
    reach = float(largest[element]) * (of.high[element] - of.low[element]) / 2
    scales = np.where(narrow, largest, 1.0)
    factors = [f"{1 / scale:.6g}" for scale in scales]
    alike = len(set(factors)) == 1
    return problem(
        "demonstrated-actions",
        KEY,
        path,
        error="npz" if Path(path).suffix == ".npz" else "hdf5",
        element=element,
        least=f"{middle - reach:.4g}",
        most=f"{middle + reach:.4g}",
        equal=int(equal[element]),
        count=len(taken),
        low=f"{of.low[element]:.4g}",
        high=f"{of.high[element]:.4g}",
        factor=factors[0] if alike else f"[{', '.join(factors)}]",
        file=path,
    )


def _require_precision(path: str, arrays: dict[str, NDArray[Any]]) -> None:
    """Raise ConfigError if different numbers of neighbouring steps are equal as float32, the type that is learned from.

    That counts if it is so for nearly all changes of a number, as of seconds since 1970. A slow number changes over
    some steps. `path`: the file of `arrays`.
    """
    seen = arrays["observations"]
    seen = seen.reshape(len(seen), -1)
    if seen.dtype.itemsize <= _FLOAT32_BYTES and seen.dtype.kind == "f":
        return
    small = seen.astype(np.float32)
    changed = seen[1:] != seen[:-1]
    lost = changed & (small[1:] == small[:-1])
    # Smaller differences are rounding errors of simulators
    lost &= np.abs(seen[1:].astype(np.float64) - seen[:-1]) > _NOISE
    changes = changed.sum(axis=0)
    many = lost.sum(axis=0) > np.maximum(_FEWEST_LOST, changes / 2)
    seen_changes = (small[1:] != small[:-1]).sum(axis=0)
    many &= seen_changes * _MOST_BETWEEN < changes
    steps, numbers = np.nonzero(lost & many)
    if not len(steps):
        return
    pair = seen[steps[0] : steps[0] + 2, numbers[0]]
    raise config_error(
        "bad-demonstrations",
        KEY,
        f"{path}: {pair[0]:.12g} and {pair[1]:.12g}",
        error="float32",
        number=int(numbers[0]),
        offset=f"{pair[0]:.12g}",
    )


def _arrays(path: str, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file that have one of these names. Raises ConfigError if it cannot be read."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / _OF_MINARI
    try:
        if file.suffix in (".hdf5", ".h5"):
            return _of_hdf5(file, names)
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in names if name in stored}
    except ConfigError:
        # Which is a ValueError
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:
        raise config_error(
            "bad-demonstrations", KEY, path, error="unreadable", reason=str(error)
        ) from error


def _of_hdf5(file: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file of D4RL or Minari. Raises ConfigError without h5py; OSError, KeyError, TypeError."""
    with needs("h5py", got=str(file), extra="recorded", key=KEY, of="the file"):
        import h5py
    with h5py.File(file) as stored:
        episodes = [name for name in stored if name.startswith(_EPISODE)]
        if not episodes:
            return _of_d4rl(stored, names)
        episodes.sort(key=lambda name: int(name.removeprefix(_EPISODE)))
        observations = stored[episodes[0]]["observations"]
        # An array has a shape, a group of arrays has none
        if not hasattr(observations, "shape"):
            entries = ", ".join(observations)
            raise config_error(
                "bad-demonstrations", KEY, f"{file}: {entries}", error="entries"
            )
        parts = [_of_episode(stored[name], names) for name in episodes]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_episode(episode: Any, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the steps of a group of Minari. The last step of an unfinished episode is truncated."""
    found = {}
    for name in names:
        if name == "next_observations":
            found[name] = episode["observations"][1:]
        elif name == "observations":
            found[name] = episode[name][:-1]
        else:
            found[name] = episode[_MINARI_NAMES.get(name, name)][:]
    if {"terminated", "truncated"} <= found.keys():
        found["truncated"][-1] |= not found["terminated"][-1]
    return found


def _of_d4rl(stored: Any, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the steps of a file of D4RL, or of one with the arrays of a `.npz`.

    Without `next_observations`, steps whose next one is not recorded are left out: those that a time limit cuts, and
    the last one. The step before such a gap counts as truncated.
    """
    found = {}
    for name in names:
        for stored_name in (name, _D4RL_NAMES.get(name, name)):
            if stored_name in stored:
                found[name] = stored[stored_name][:]
    if "next_observations" in found or "next_observations" not in names:
        return found
    if not {"observations", "terminated", "truncated"} <= found.keys():
        return found
    after = np.roll(found["observations"], -1, axis=0)
    known = found["terminated"].astype(bool) | ~found["truncated"].astype(bool)
    known[-1] = found["terminated"][-1]
    # Sums of rewards end before a gap
    cut = np.append(~known[1:], False)
    found["truncated"] = found["truncated"].astype(bool) | cut
    found["truncated"] &= ~found["terminated"].astype(bool)
    found["next_observations"] = after
    return {name: array[known] for name, array in found.items()}


def _scaled(actions: NDArray[Any], spaces: Spaces, path: str) -> NDArray[Any]:
    """Return actions as the memory has them: choices, or elements of [-1, 1]. Raises ConfigError for others."""
    of = spaces.actions
    if isinstance(of, ContinuousActions):
        low = np.array(of.low, np.float32).reshape(of.shape)
        high = np.array(of.high, np.float32).reshape(of.shape)
        outside = (actions < low - 1e-4) | (actions > high + 1e-4)
        if outside.any():
            raise config_error(
                "bad-demonstrations",
                KEY,
                f"{path}: actions from {actions.min():g} to {actions.max():g}",
                error="bounds",
                low=f"{low.min():g}",
                high=f"{high.max():g}",
            )
        # An element whose bounds are equal has no choice: the policy's one counts for nothing
        span = np.where(high > low, high - low, np.inf)
        scaled = 2 * (actions - low) / span - 1
        return scaled.clip(-1.0, 1.0).astype(np.float32)
    assert isinstance(of, DiscreteActions), "a rule of the job has refused it"
    # The memory counts choices from 0, the simulator from its first one
    choices = actions.astype(np.int64) - of.first
    outside = choices.min() < 0 or choices.max() >= of.n
    if outside or (choices + of.first != actions).any():
        raise config_error(
            "bad-demonstrations",
            KEY,
            f"{path}: actions from {actions.min():g} to {actions.max():g}",
            error="bounds",
            low=of.first,
            high=of.first + of.n - 1,
        )
    return choices
