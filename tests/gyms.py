"""Gymnasium environments made for tests, registered when this is imported; each step is plain to see."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text
from gymnasium.wrappers import FlattenObservation, NormalizeObservation
from numpy.typing import NDArray

from rlplace.envs.wrappers import Shown

AT_IMPORT = dict(os.environ)


class Telling(gymnasium.Env[NDArray[np.float64], Any]):
    """Writes the environment variables of its process into `file`, as they were at import and when it is made."""

    def __init__(self, file: str) -> None:
        self.observation_space = Box(0, 1, (2,))
        self.action_space = Discrete(2)
        Path(file).write_text(
            json.dumps([AT_IMPORT, dict(os.environ)]), encoding="utf-8"
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Script(gymnasium.Env[NDArray[np.float64], Any]):
    """Shows [episode, step, luck, last action]; luck is drawn at each reset. Rewards the step number, 1-based.

    Ends episodes at step `terminate_at`, cuts them at `truncate_at`. A list has one step per episode; its last stays.
    """

    def __init__(
        self,
        terminate_at: int | list[int] | None = None,
        truncate_at: int | None = None,
        action_space: str = "discrete",
        dtype: str = "float64",
    ) -> None:
        self.observation_space = Box(0, 250, (4,), np.dtype(dtype).type)
        self.action_space = {
            "discrete": Discrete(3),
            "from_five": Discrete(3, start=5),
            "pair_from_five": MultiDiscrete([3, 2], start=[5, -1]),
            "box": Box(np.array([-1.0, 0.0]), np.array([1.0, 0.5]), dtype=np.float64),
            "wide": Box(-2000.0, 2000.0, (1,), np.float32),
        }[action_space]
        self._terminate_at = terminate_at
        self._truncate_at = truncate_at
        self._dtype = dtype
        self.episode = 0
        self.taken: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self._step = 0
        self._luck = int(self.np_random.integers(200))
        return self._show(0.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self._step += 1
        ends = self._terminate_at
        if isinstance(ends, list):
            ends = ends[min(self.episode, len(ends)) - 1]
        shown = self._show(float(np.sum(action)))
        return (
            shown,
            float(self._step),
            self._step == ends,
            self._step == self._truncate_at,
            {},
        )

    def _show(self, action: float) -> NDArray[Any]:
        return np.array([self.episode, self._step, self._luck, action], self._dtype)


class Sleeper(Script):
    """Each step takes 10 ms, and no processor."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)
        return super().step(action)


class Poisoned(Script):
    """Gives `value` as part of `what` at step `at` of the first episode, or of every one; 0 is the first observation.

    `what`: reward | observation | end, a reward at which the episode ends too | cut, the observation at which it is cut
    """

    def __init__(
        self,
        at: int = 2,
        what: str = "reward",
        value: str = "nan",
        always: bool = False,
    ) -> None:
        super().__init__(truncate_at=6)
        self._at, self._what, self._value, self._always = at, what, float(value), always

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        shown, info = super().reset(**options)
        return self._hurt(shown), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, reward, terminated, truncated, info = super().step(action)
        if self._now() and self._what in ("reward", "end"):
            reward = self._value
        over = self._now() and self._what in ("end", "cut")
        return (
            self._hurt(shown),
            reward,
            terminated or (over and self._what == "end"),
            truncated or over,
            info,
        )

    def _now(self) -> bool:
        return self._step == self._at and (self._always or self.episode == 1)

    def _hurt(self, shown: NDArray[Any]) -> NDArray[Any]:
        if self._now() and self._what in ("observation", "cut"):
            shown[3] = self._value
        return shown


class DictObservations(Script):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict({"a": Box(0, 1), "b": Box(0, 1)})


class Texts(Script):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict({"a": Box(0, 1), "said": Text(5)})


class Pixels(Script):
    """Has the space of a colour image."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(0, 255, (84, 84, 3), np.uint8)


class Corner(gymnasium.Env[Any, Any]):
    """Shows a bright square in one of four corners, as [12, 12, 1] bytes; an action that names the corner is paid 1.

    Ten steps an episode, each with another corner. With `beside`, numbers that are shown beside the image say by how
    much the answer is turned: only who looks at both is paid. With `split`, row and column are named one by one. At
    step `poison_at` one of these numbers is nan.
    """

    _SIZE, _STEPS = 12, 10

    def __init__(
        self, beside: bool = False, split: bool = False, poison_at: int | None = None
    ) -> None:
        self._poison_at = poison_at
        self._beside, image = beside, Box(0, 255, (self._SIZE, self._SIZE, 1), np.uint8)
        turn = Dict({"turn": Discrete(4), "noise": Box(-1.0, 1.0, (2,))})
        self.observation_space = (
            Dict({"image": image, "told": turn}) if beside else image
        )
        self.action_space = MultiDiscrete([2, 2]) if split else Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        named = 2 * int(action[0]) + int(action[1]) if np.ndim(action) else int(action)
        paid = float(named == (self._corner + self._turn) % 4)
        return self._show(), paid, self._step == self._STEPS, False, {}

    def checkpoint_state(self) -> dict[str, Any]:
        return {"step": self._step, "corner": self._corner, "turn": self._turn}

    def restore_state(self, state: dict[str, NDArray[Any]]) -> None:
        self._step, self._corner, self._turn = (
            int(state[name]) for name in ("step", "corner", "turn")
        )

    def _show(self) -> Any:
        self._corner, half = int(self.np_random.integers(4)), self._SIZE // 2
        self._turn = int(self.np_random.integers(4)) if self._beside else 0
        image = self.np_random.integers(0, 64, (self._SIZE, self._SIZE, 1), np.uint8)
        top, left = (
            half * side + int(self.np_random.integers(half - 2))
            for side in divmod(self._corner, 2)
        )
        image[top : top + 2, left : left + 2] = 255
        noise = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        if self._step == self._poison_at:
            noise[1] = np.nan
        return (
            {"image": image, "told": {"turn": self._turn, "noise": noise}}
            if self._beside
            else image
        )


class Recall(gymnasium.Env[NDArray[np.float32], Any]):
    """Shows 1 or -1 in the first of six steps and 0 in the others; whoever names it in the last is paid 1."""

    observation_space, action_space = Box(-1.0, 1.0, (1,)), Discrete(2)
    _STEPS = 6

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self._sign - 1], np.float32), {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._step += 1
        end = self._step == self._STEPS
        return (
            np.zeros(1, np.float32),
            float(end and int(action) == self._sign),
            end,
            False,
            {},
        )

    def checkpoint_state(self) -> dict[str, Any]:
        return {"step": self._step, "sign": self._sign}

    def restore_state(self, state: dict[str, NDArray[Any]]) -> None:
        self._step, self._sign = int(state["step"]), int(state["sign"])


class Dictation(gymnasium.Env[NDArray[np.float32], Any]):
    """Shows four signs in the first of four steps and zeros in the others; an action that names its sign is paid 1."""

    observation_space, action_space = Box(-1.0, 1.0, (4,)), Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._signs, self._step = self.np_random.integers(2, size=4), 0
        return (2 * self._signs - 1).astype(np.float32), {}

    def step(
        self, action: Any
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._step += 1
        paid = float(int(action) == self._signs[self._step - 1])
        return np.zeros(4, np.float32), paid, self._step == 4, False, {}


class ManyActions(Script):
    """Takes several choices at once."""

    def __init__(self, space: str = "many") -> None:
        super().__init__()
        self.action_space = {
            "many": MultiDiscrete([2, 3]),
            "switches": MultiBinary((2, 2)),
        }[space]


class Changing(ManyActions):
    """Changes its actions in place, after it has read them, and the list that it is given."""

    def __init__(self, space: str = "many", given: list[int] | None = None) -> None:
        super().__init__(space)
        self.given = given if given is not None else []
        self.given.append(1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action.copy())
        action[...] = 0
        return result


class WholeNumbers(Script):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(0, 3, (2,), np.int64)


def limited(steps: int) -> gymnasium.Env[Any, Any]:
    """Make one that cuts its episodes."""
    return Script(truncate_at=steps)


def hidden() -> gymnasium.Env[Any, Any]:
    """Make CartPole without its velocities."""
    return Shown(gymnasium.make("CartPole-v1", max_episode_steps=-1), [0, 2])


class OwnLimit(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Cuts episodes by the limit that `gymnasium.make` was given, which it looks up there, as ManiSkill's does."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._limit, self._steps = sys._getframe(1).f_locals["max_episode_steps"], 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return super().reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._steps += 1
        shown, reward, terminated, _, info = super().step(action)
        return (
            shown,
            reward,
            terminated,
            self._limit is not None and self._steps >= self._limit,
            info,
        )


class Drawn(Script):
    """Draws its step and episode as grey. `picture`: none raises an error, flat has no colours."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, render_mode: str | None = None, picture: str = "grey") -> None:
        super().__init__(terminate_at=[3, 5, 7], truncate_at=9)
        self.render_mode, self._picture = render_mode, picture

    def render(self) -> Any:
        if self._picture == "none":
            raise OSError("no display")
        return np.full(
            (32, 48) if self._picture == "flat" else (32, 48, 3),
            20 * self._step + 10 * self.episode,
            np.uint8,
        )


class Counter(Script):
    """Tells its state; that of its last actions changes in size."""

    def checkpoint_state(self) -> dict[str, Any]:
        return {
            "episode": self.episode,
            "step": self._step,
            "luck": self._luck,
            "taken": self.taken,
        }

    def restore_state(self, state: dict[str, NDArray[Any]]) -> None:
        self.episode, self._step, self._luck = (
            int(state[name]) for name in ("episode", "step", "luck")
        )
        self.taken = state["taken"].tolist()


class Lucky(Script):
    """Draws luck and rewards from the random numbers that Python and NumPy have for the whole process."""

    def _show(self, action: float) -> NDArray[Any]:
        shown = super()._show(action)
        shown[2] = np.random.uniform(0.0, 200.0)
        return shown

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, _, terminated, truncated, info = super().step(action)
        return shown, random.random(), terminated, truncated, info


class TorchLucky(Script):
    """Draws rewards from the random numbers that torch has for the whole process, and imports torch when it is made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        import torch

        self._draw = torch.rand

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, _, terminated, truncated, info = super().step(action)
        return shown, float(self._draw(())), terminated, truncated, info


class Numbered(Counter):
    """No two observations of a run are the same: the first three numbers are a step's id. Episodes have 40 steps."""

    def __init__(self) -> None:
        super().__init__(terminate_at=40)
        self.observation_space = Box(0, 1 << 24, (4,), np.float64)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        _, info = super().reset(**options)
        self._luck = int(self.np_random.integers(1 << 24))
        return self._show(0.0), info


class Killer(Script):
    """Kills its process in its eleventh step, unless the file `once` is there; leaves that file."""

    def __init__(self, once: str) -> None:
        super().__init__(terminate_at=[7, 5, 9], truncate_at=8)
        self._once = Path(once)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if len(self.taken) == 10 and not self._once.exists():
            self._once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Talks(Script):
    """Prints, warns, logs and writes past Python; fails in a step, or stops for a debugger in one, if asked to."""

    def __init__(self, fails_at: int | None = None, breaks: bool = False) -> None:
        super().__init__(terminate_at=5)
        self._breaks = breaks
        self._fails_at = fails_at
        print("a simulator prints")
        warnings.warn("a simulator warns", stacklevel=1)
        logging.getLogger("simulator").warning("a simulator logs")
        os.write(1, b"a simulator writes\n")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._fails_at == self._step:
            raise ValueError("a simulator fails")
        if self._breaks:
            type(self).step = Script.step  # once in a process
            breakpoint()
        return super().step(action)


class NeedsAbsent(Script):
    """Its library is nowhere."""

    def __init__(self) -> None:
        import no_such_simulator_library  # noqa: F401  which is not there


class Broken(Script):
    """Has a bug of its own."""

    def __init__(self) -> None:
        raise ValueError("a bug in the simulator")


class OwnNormalize(NormalizeObservation[Any, Any, Any]):
    """A wrapper of a user, derived from one with statistics."""


def normalizing() -> gymnasium.Env[Any, Any]:
    """Make an environment that brings a normalizing wrapper of its own."""
    return NormalizeObservation(gymnasium.make("CartPole-v1"))


for _name, _class in {
    "Script-v0": Script,
    "Sleeper-v0": Sleeper,
    "Poisoned-v0": Poisoned,
    "DictObservations-v0": DictObservations,
    "Texts-v0": Texts,
    "ManyActions-v0": ManyActions,
    "Changing-v0": Changing,
    "WholeNumbers-v0": WholeNumbers,
    "Pixels-v0": Pixels,
    "Drawn-v0": Drawn,
    "Corner-v0": Corner,
    "Recall-v0": Recall,
    "Dictation-v0": Dictation,
    "Counter-v0": Counter,
    "Lucky-v0": Lucky,
    "TorchLucky-v0": TorchLucky,
    "Numbered-v0": Numbered,
    "Killer-v0": Killer,
    "Talks-v0": Talks,
    "NeedsAbsent-v0": NeedsAbsent,
    "Broken-v0": Broken,
}.items():
    gymnasium.register(_name, entry_point=_class)
gymnasium.register(
    "Wrapped-v0",
    entry_point=lambda: gymnasium.wrappers.RescaleObservation(
        Counter(), np.float64(0.0), np.float64(1.0)
    ),
)
gymnasium.register("PixelRow-v0", entry_point=lambda: FlattenObservation(Pixels()))
gymnasium.register("Telling-v0", entry_point=Telling)
gymnasium.register("Limited-v0", entry_point=Script, max_episode_steps=7)
_OWN_LIMIT = gymnasium.envs.registration.WrapperSpec(
    "OwnLimit", "tests.gyms:OwnLimit", {}
)
gymnasium.register(
    "OwnLimit-v0",
    entry_point=Script,
    max_episode_steps=7,
    additional_wrappers=(_OWN_LIMIT,),
)
