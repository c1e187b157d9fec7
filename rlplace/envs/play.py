"""Play whole episodes of a simulator by a policy, and film them; nothing is learned.

How many episodes a row plays is fixed beforehand, and what it plays beyond that is not counted: the first episodes to
end of all rows would be the short ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.config.schema import SimulatorEnvConfig
from rlplace.envs.contract import Rendering, Simulator, Spaces
from rlplace.envs.registry import make_simulator, missing_library, needs, row_seeds
from rlplace.errors import ConfigError, OutputError, SimulatorError, one_of

# Observations [B, *O], and [B] bool where an episode begins with them -> actions [B, *A].
Act = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[Any]]
_ROWS = 16  # most that are simulated side by side
_EVALUATION = -1  # instead of an iteration: no episodes that a run has trained on
# At most: each frame is a picture of its own, slow to make and large
_GIF_FRAMES_PER_S = 20.0
_KEY = "video"


class Played(NamedTuple):
    """One whole episode."""

    total: float  # undiscounted return
    length: int  # steps


def play(
    config: SimulatorEnvConfig,
    spaces: Spaces,
    act: Act,
    *,
    episodes: int,
    seed: int,
    longest: int,
    video: Path | None = None,
) -> list[Played]:
    """Play that many episodes; the same seed and actions give the same ones. `video`: of those of the first row.

    `longest`: steps of an episode at most. Raises ConfigError: no such simulator, or one that draws nothing;
    SimulatorError: a number that is not finite, an episode that does not end; OutputError: the video cannot be written.
    """
    rows = min(episodes, _ROWS)
    due = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    played: list[list[Played]] = [[] for _ in range(rows)]
    with contextlib.ExitStack() as opened:
        simulator = _made(config, rows, spaces.chunk, drawn=video is not None)
        opened.callback(simulator.close)
        observations = simulator.reset(row_seeds(seed, 0, rows, _EVALUATION))
        lengths = np.zeros(rows, np.int64)  # of the episodes under way
        begins = np.ones(rows, np.bool_)
        film = (
            None
            if video is None
            else opened.enter_context(
                contextlib.closing(_Film(video, simulator, config))
            )
        )
        while sum(map(len, played)) < episodes:
            if film is not None and len(played[0]) < due[0]:
                film.add()
            result = simulator.step(act(observations, begins))
            observations = result.observations
            if not (
                np.isfinite(spaces.numbers_in(observations)).all()
                and np.isfinite(result.rewards).all()
            ):
                what = "gave a number that is not finite"
                why = "the mean of such episodes says nothing"
                raise SimulatorError.about(
                    "simulator-not-finite",
                    config.id,
                    what,
                    why=why,
                    fix="seed=<another>",
                )
            begins = result.terminated | result.truncated
            ended = np.flatnonzero(begins)
            lengths += spaces.chunk
            lengths[ended] = 0
            for row, total, length in zip(
                ended, result.episode_returns, result.episode_lengths, strict=True
            ):
                if len(played[row]) < due[row]:
                    played[row].append(Played(total, length))
            if any(
                lengths[row] >= longest and len(played[row]) < due[row]
                for row in range(rows)
            ):
                raise _endless(config, longest, sum(map(len, played)), episodes)
    return [episode for each in played for episode in each]


def _endless(
    config: SimulatorEnvConfig, longest: int, played: int, episodes: int
) -> SimulatorError:
    what = f"an episode has not ended after {longest:,} steps"
    got = f"{played} of {episodes} episodes have ended"
    limit = config.max_episode_steps
    why = (
        "it has no time limit, and the policy does not bring it to an end"
        if limit is None
        else f"it may take {limit:,}"
    )
    fix = f"longest={10 * longest}        (or train with env.max_episode_steps: it is the limit here too)"
    return SimulatorError.about(
        "endless-episode", config.id or config.kind, what, got=got, why=why, fix=fix
    )


def _made(
    config: SimulatorEnvConfig, rows: int, chunk: int, *, drawn: bool
) -> Simulator:
    if not drawn:
        return make_simulator(config, rows, chunk)
    # Pygame looks for a screen, and complains where there is none
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    drawing = dataclasses.replace(
        config, kwargs={**config.kwargs, "render_mode": "rgb_array"}
    )
    try:
        return make_simulator(drawing, rows, chunk)
    except TypeError as error:  # it takes no such argument
        raise _not_drawn(config, str(error)) from error


class _Film:
    """Writes pictures of a simulator's first row. Owns the file until `close`."""

    def __init__(
        self, video: Path, simulator: Simulator, config: SimulatorEnvConfig
    ) -> None:
        if not isinstance(simulator, Rendering):
            raise _not_drawn(
                config, f"simulators of env.kind: {config.kind} draw nothing here"
            )
        self._video = video
        self._simulator = simulator
        self._config = config
        film = video.suffix == ".mp4"
        with needs(
            "imageio",
            "imageio_ffmpeg",
            got=str(video),
            extra="video",
            key=_KEY,
            of="videos",
        ):
            import imageio.v2

            if film:
                import imageio_ffmpeg  # noqa: F401  # which imageio looks for when it writes
        self._frame()  # what draws nothing makes no file
        rate = simulator.frames_per_s
        self._every = 1 if film else math.ceil(rate / _GIF_FRAMES_PER_S)
        self._asked = 0
        # Ms; plays for ever
        options: dict[str, Any] = {
            "duration": 1000 * self._every / rate,
            "loop": 0,
        }
        if film:
            options = {"fps": rate, "macro_block_size": 2}  # its sides are even
        with self._writing():
            video.parent.mkdir(parents=True, exist_ok=True)
            self._writer = imageio.v2.get_writer(video, **options)

    def add(self) -> None:
        """Add the present picture; of an animated image every n-th."""
        self._asked += 1
        if (self._asked - 1) % self._every:
            return
        frame = self._frame()
        with self._writing():
            self._writer.append_data(frame)

    def close(self) -> None:
        with self._writing():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError.of(self._video, error, _KEY, "a file") from error

    def _frame(self) -> NDArray[np.uint8]:
        assert isinstance(self._simulator, Rendering)
        try:
            frame = self._simulator.frame()
        except ModuleNotFoundError as error:
            raise missing_library(
                str(error), got=self._config.id, extra="video", key=_KEY, of="videos"
            ) from error
        except Exception as error:
            # Foreign renderers and drivers fail with errors of any kind
            raise _not_drawn(
                self._config, f"{type(error).__name__}: {error}"
            ) from error
        if frame.dtype != np.uint8 or frame.ndim != 3:
            raise _not_drawn(
                self._config,
                f"its picture is no [height, width, 3] of bytes, but {frame.shape} of {frame.dtype}",
            )
        return frame


def _not_drawn(config: SimulatorEnvConfig, why: str) -> ConfigError:
    fix = f"leave out {_KEY}="
    # Of the user's own, or of a library
    if config.kind == "gymnasium" and ":" in config.id:
        own = "let the class take render_mode=None, and have render(self) return a picture: np.uint8 [height, width, 3]"
        own += "        (docs/own_environment.md has one)"
        fix = one_of([own, fix])
    elif "mujoco" in sys.modules:
        osmesa = "apt-get install -y libosmesa6 && export MUJOCO_GL=osmesa        (without a GPU)"
        fix = one_of(["export MUJOCO_GL=egl        (with a GPU)", osmesa, fix])
    return ConfigError.of(
        "cannot-draw", _KEY, "the simulator cannot be drawn", config.id, why, fix
    )
