"""Plays whole episodes of a simulator with a policy, and films them. Nothing is learned.

The number of episodes of each row is fixed beforehand, and later episodes of a row do not count. If instead the first
episodes to end in any row were taken, short episodes would be preferred.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.codes import config_error, problem
from rlplace.config.blocks.simulator import MOST_PLAYED, SimulatorEnvConfig
from rlplace.envs.contract import (
    Normalizing,
    Remarking,
    Rendering,
    Simulator,
    Spaces,
)
from rlplace.envs.registry import (
    make_simulator,
    missing_library,
    needs,
    own_global_numbers,
    row_seeds,
    without_statistics,
)
from rlplace.errors import ConfigError, OutputError, SimulatorError

# Observations [B, *O], and [B] bool where an episode begins with them -> actions [B, *A]
Act = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[Any]]
# Stands for the iteration in the seeds: gives episodes on which no run has trained
_EVALUATION = -1
# Limit for animated images: each picture is stored whole, so they are slow to make and large
_GIF_FRAMES_PER_S = 20.0
_KEY = "video"


class Played(NamedTuple):
    """The undiscounted return and the number of steps of one whole episode."""

    total: float
    length: int


def play(
    config: SimulatorEnvConfig,
    spaces: Spaces,
    act: Act,
    *,
    episodes: int,
    seed: int,
    longest: int,
    video: Path | None = None,
    states: Sequence[Mapping[str, NDArray[Any]]] = (),
    remarks: list[str] | None = None,
) -> list[Played]:
    """Play `episodes` whole episodes with a policy, and return the return and length of each.

    Episodes without a step are left out: those of an agent that was absent.

    Equal seeds and equal actions give equal episodes. `spaces`: spaces of the policy. `act`: takes observations, and
    returns actions. `longest`: the most steps that an episode may have. `video`: file for a video of the first row;
    None: no video. `states`: states of the environments of the training, which have the statistics of wrappers.
    `remarks`: remarks of the simulator are appended to this list; None: remarks are only logged. Raises ConfigError if
    the simulator is unknown or cannot be rendered, or if statistics are missing; SimulatorError if a number is not
    finite or an episode is too long; OutputError if the video cannot be written.
    """
    rows = min(episodes, MOST_PLAYED)
    # Round up to whole environments, if an environment has several rows
    rows = -(-rows // spaces.together) * spaces.together
    # Episodes that each row has to play
    due = [episodes // rows] * rows
    for row in range(episodes % rows):
        due[row] += 1
    played: list[list[Played]] = [[] for _ in range(rows)]
    with contextlib.ExitStack() as opened:
        # Some environments use the global random numbers, and so may a training in the same process
        opened.enter_context(own_global_numbers(seed, 0, _EVALUATION))
        simulator = _made(config, rows, spaces.chunk, drawn=video is not None)
        opened.callback(simulator.close)
        _with_statistics(simulator, config, states)
        observations = simulator.reset(row_seeds(seed, 0, rows, _EVALUATION))
        # Steps so far of the episodes in progress, and where episodes begin
        lengths = np.zeros(rows, np.int64)
        begins = np.ones(rows, np.bool_)
        film: _Film | None = None
        if video is not None:
            film = _Film(video, simulator, config)
            opened.enter_context(contextlib.closing(film))
        while sum(map(len, played)) < episodes:
            if film is not None and len(played[0]) < due[0]:
                film.add()
            result = simulator.step(act(observations, begins))
            observations = result.observations
            # Returns of a simulator with non-finite numbers would mean nothing
            finite = np.isfinite(spaces.numbers_in(observations)).all()
            if not (finite and np.isfinite(result.rewards).all()):
                raise SimulatorError(
                    problem("simulator-not-finite", config.id, error="played")
                )
            # Count the episodes that ended, as far as their rows need more
            begins = result.terminated | result.truncated
            ended = np.flatnonzero(begins)
            lengths += spaces.chunk
            lengths[ended] = 0
            for row, total, length in zip(
                ended, result.episode_returns, result.episode_lengths, strict=True
            ):
                if len(played[row]) < due[row]:
                    played[row].append(Played(total, length))
            # An episode that does not end would keep this loop running forever
            for row in range(rows):
                if lengths[row] >= longest and len(played[row]) < due[row]:
                    raise _endless(config, longest, sum(map(len, played)), episodes)
        if remarks is not None and isinstance(simulator, Remarking):
            remarks += simulator.remarks
    every = [episode for each in played for episode in each]
    # An agent that was absent from the whole episode has no return
    took_part = [episode for episode in every if episode.length]
    return took_part or every


def _with_statistics(
    simulator: Simulator,
    config: SimulatorEnvConfig,
    states: Sequence[Mapping[str, NDArray[Any]]],
) -> None:
    """Give wrappers that normalize the statistics of the training. Raises ConfigError if `states` has none."""
    if not isinstance(simulator, Normalizing):
        return
    # This also sets statistics of a user's wrappers, which `statistics` does not name
    taken = simulator.take_statistics(states)
    if simulator.statistics and not taken:
        raise without_statistics(config)


def _endless(
    config: SimulatorEnvConfig, longest: int, played: int, episodes: int
) -> SimulatorError:
    """Return the error that an episode did not end within `longest` steps.

    `played`: number of episodes that have ended, out of `episodes`.
    """
    limit = config.max_episode_steps
    error = "no-limit"
    if limit is not None:
        error = "limit"
    endless = problem(
        "endless-episode",
        config.id or config.kind,
        f"{played} of {episodes} episodes have ended",
        error=error,
        longest=longest,
        limit=limit,
        longer=10 * longest,
    )
    return SimulatorError(endless)


def _made(
    config: SimulatorEnvConfig, rows: int, chunk: int, *, drawn: bool
) -> Simulator:
    """Return a simulator with `rows` environments that takes `chunk` actions in each step. Raises ConfigError.

    `drawn`: whether the simulator has to draw pictures; it then gets the argument `render_mode`.
    """
    if not drawn:
        return make_simulator(config, rows, chunk)
    # Without a screen, pygame complains unless it draws into memory
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    drawing = dataclasses.replace(
        config, kwargs={**config.kwargs, "render_mode": "rgb_array"}
    )
    try:
        return make_simulator(drawing, rows, chunk)
    except TypeError as error:  # it takes no such argument
        raise _not_drawn(config, str(error)) from error


class _Film:
    """A video with the pictures of a simulator's first row. It owns the video file until `close`."""

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
                import imageio_ffmpeg  # noqa: F401  # imageio needs it for writing
        # A simulator that draws nothing must leave no file: try a picture first
        self._frame()
        # An animated image takes every n-th picture
        rate = simulator.frames_per_s
        self._every = 1 if film else math.ceil(rate / _GIF_FRAMES_PER_S)
        self._asked = 0
        # Milliseconds for each picture; loop 0 repeats for ever
        options: dict[str, Any] = {
            "duration": 1000 * self._every / rate,
            "loop": 0,
        }
        # Video codecs want even sides
        if film:
            options = {"fps": rate, "macro_block_size": 2}
        with self._writing():
            video.parent.mkdir(parents=True, exist_ok=True)
            self._writer = imageio.v2.get_writer(video, **options)

    def add(self) -> None:
        """Add the simulator's present picture to the video. A GIF takes only every n-th picture."""
        self._asked += 1
        if (self._asked - 1) % self._every:
            return
        frame = self._frame()
        with self._writing():
            self._writer.append_data(frame)

    def close(self) -> None:
        """Finish the video file."""
        with self._writing():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the body of the `with` statement; if it raises OSError, raise OutputError instead."""
        try:
            yield
        except OSError as error:
            raise OutputError.of(self._video, error, _KEY, "a file") from error

    def _frame(self) -> NDArray[np.uint8]:
        """Return the simulator's present picture, [height, width, 3]. Raises ConfigError if that fails."""
        assert isinstance(self._simulator, Rendering)
        try:
            frame = self._simulator.frame()
        except ModuleNotFoundError as error:
            raise missing_library(
                str(error), got=self._config.id, extra="video", key=_KEY, of="videos"
            ) from error
        except Exception as error:
            # Renderers and drivers of other packages raise errors of any kind
            reason = f"{type(error).__name__}: {error}"
            raise _not_drawn(self._config, reason) from error
        if frame.dtype != np.uint8 or frame.ndim != 3:
            reason = f"its picture is no [height, width, 3] of bytes, but {frame.shape} of {frame.dtype}"
            raise _not_drawn(self._config, reason)
        return frame


def _not_drawn(config: SimulatorEnvConfig, reason: str) -> ConfigError:
    """Return the error that the simulator cannot be drawn. `reason`: why, as text.

    The proposed fix depends on the kind of simulator.
    """
    error = "any"
    # A custom class has to draw; for MuJoCo a library of the system may be missing
    if config.kind == "gymnasium" and ":" in config.id:
        error = "own"
    elif "mujoco" in sys.modules:
        error = "mujoco"
    return config_error("cannot-draw", _KEY, config.id, error=error, reason=reason)
