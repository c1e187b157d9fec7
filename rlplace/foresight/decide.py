"""When a running job changes its placement, keeps a new placement, or goes back: a rule on numbers alone.

::

    search ─▶ `decide`: stay, or change if the gain exceeds the error and pays back
                            │
              change ─▶ `judge`: wait for iterations, then keep, or go back if they are slower than before

Two things prevent oscillation. A gain counts only if it exceeds the error of the performance model on this run plus the
noise of the measured seconds. And a placement that the run has left is chosen again only after the work itself has
changed by more than twice this error, and by 10 %: see `Left`. So with stationary work, a run chooses each placement
at most once.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

# Smallest error that is assumed, as a share: less is not measured by a few iterations
LEAST_ERROR = 0.02
# Standard errors to each side that count as noise
_SIGMAS = 2.0
# The standard error of a median is larger than that of a mean, for a normal distribution
_OF_MEDIAN = 1.2533
# The median of absolute deviations, in standard deviations of a normal distribution
_OF_DEVIATIONS = 1.4826
# Share of pairs with the other sign from which on a slope is noise
_DISAGREE = 0.2
# A placement that was left is chosen again if the work has changed by more than so many times the error, and by more
# than this share: a few iterations may show less noise than there is
_CHANGED = 2.0
_LEAST_CHANGED = 0.1
# A change is taken back early if each of so many iterations is slower than any before, by so many times the noise
_LEAST_CLEAR = 3
_CLEAR = 2.0


class Verdict(enum.Enum):
    """What to do. WAIT: too few iterations were measured to judge a change."""

    STAY = "stay"
    CHANGE = "change"
    WAIT = "wait"
    KEEP = "keep"
    BACK = "back"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The seconds of an iteration under one placement, from the latest iterations.

    `seconds`: their median. `noise`: what the median may be off by, as a share of it.
    """

    seconds: float
    noise: float


def level_of(seconds: Sequence[float]) -> Level:
    """Return the level of measured iterations. `seconds`: of at least one iteration, all above 0.

    Work that changes at an even rate is no noise.
    """
    middle = statistics.median(seconds)
    slope_s = slope_of(seconds) * middle
    straight = [each - slope_s * at for at, each in enumerate(seconds)]
    center = statistics.median(straight)
    deviation = statistics.median(abs(each - center) for each in straight)
    spread = _OF_DEVIATIONS * deviation * _OF_MEDIAN / math.sqrt(len(seconds))
    return Level(seconds=middle, noise=_SIGMAS * spread / middle)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A placement that the run has left, or that could not be launched.

    `work`: stage -> predicted seconds of the config's own placement when the run left it. This is a measure of the
    work: it changes if the work changes, and stays if only the placement changes.
    """

    work: Mapping[str, float]


def drift(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """Return by which share the work has changed. `before`, `now`: stage -> predicted seconds of the same placement."""
    whole = sum(before.values())
    if not whole:
        return 0.0
    stages = {*before, *now}
    changed = sum(abs(now.get(s, 0.0) - before.get(s, 0.0)) for s in stages)
    return changed / whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known when a search has ended. Seconds are those of an iteration.

    `level`: measured under the present placement. `predicted_s`: predicted for the present placement. `best_s`:
    predicted for the best other placement. `left`: whether the run has left that placement before; None: it has not.
    `work`: stage -> predicted seconds of the config's own placement now. `error`: error of earlier predictions of this
    run, as a share. `cost_s`: seconds of a change. `pay_back`: most iterations in which a change has to pay back.
    `iterations`: how many iterations follow.
    """

    level: Level
    predicted_s: float
    best_s: float
    left: Left | None
    work: Mapping[str, float]
    error: float
    cost_s: float
    pay_back: float
    iterations: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision and its reason.

    `gain`: predicted gain as a share of an iteration. `expected_s`: seconds of an iteration after the change. `error`:
    what the gain has to exceed, as a share. `pays_back`: iterations in which the change pays back; infinite without a
    gain.
    """

    verdict: Verdict
    why: str
    gain: float
    expected_s: float
    error: float
    pays_back: float


def error_of(level: Level, predicted_s: float, error: float) -> float:
    """Return the error of the model on this run, as a share, with the noise of what it is compared with.

    `level`: measured under the present placement. `predicted_s`: predicted for it. `error`: of earlier predictions.
    """
    off = abs(predicted_s / level.seconds - 1.0)
    return max(LEAST_ERROR, off, error) + level.noise


def decide(case: Case) -> Decision:
    """Return whether to change to the best other placement: CHANGE or STAY."""
    # The model is off in the same direction for both, so only the ratio of its predictions counts
    gain = 1.0 - case.best_s / case.predicted_s
    error = error_of(case.level, case.predicted_s, case.error)
    gain_s = gain * case.level.seconds
    pays_back = math.inf
    if gain_s > 0.0:
        pays_back = case.cost_s / gain_s
    verdict = Verdict.STAY
    most = min(case.pay_back, case.iterations)
    changed = math.inf
    if case.left is not None:
        changed = drift(case.left.work, case.work)
    if gain <= 0.0:
        why = "no other placement is predicted to be faster"
    elif gain <= error:
        why = f"the gain of {gain:.1%} is within the error of {error:.1%}"
    elif changed <= max(_LEAST_CHANGED, _CHANGED * error):
        why = f"the run has left this placement, and the work has changed by {changed:.1%} since"
    elif pays_back > most:
        why = f"the change pays back in {math.ceil(pays_back)} iterations, not in {most:g}"
    else:
        verdict = Verdict.CHANGE
        why = f"the gain of {gain:.1%} exceeds the error of {error:.1%}"
    return Decision(
        verdict=verdict,
        why=why,
        gain=gain,
        expected_s=case.level.seconds - gain_s,
        error=error,
        pays_back=pays_back,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the measured iterations say about a change.

    `verdict`: WAIT, KEEP or BACK. `level`: measured after the change. `due_s`: seconds that an iteration would take by
    now with the placement before.
    """

    verdict: Verdict
    why: str
    level: Level
    due_s: float


def judge(
    before: Sequence[float], after: Sequence[float], apart: int, least: int
) -> Judgement:
    """Return whether to keep a new placement.

    `before`, `after`: seconds of the last iterations before the change and of the first ones after it. `apart`:
    iterations from the last of `before` to the first of `after`. `least`: iterations from which on it is judged; fewer
    are enough if they are clearly slower.
    """
    now = level_of(after)
    # The work may have changed meanwhile, at an even rate
    then = level_of(before)
    middle = (len(before) - 1) / 2 + apart + (len(after) - 1) / 2
    due_s = then.seconds * (1.0 + slope_of(before, after) * middle)
    off = now.seconds / due_s - 1.0
    noise = max(LEAST_ERROR, then.noise + now.noise)
    told = f"{now.seconds:.3g} s, with the placement before {due_s:.3g} s"
    grown = due_s / then.seconds
    clear = min(after) > max(before) * grown and off > _CLEAR * noise
    verdict = Verdict.KEEP
    why = f"as fast within the noise of {noise:.1%}: {told}"
    if len(after) < least and not (clear and len(after) >= _LEAST_CLEAR):
        verdict = Verdict.WAIT
        why = f"{least - len(after)} more iterations are measured"
    elif off > noise:
        verdict = Verdict.BACK
        why = f"slower by {off:.1%}: {told}"
    elif off < -noise:
        why = f"faster by {-off:.1%}: {told}"
    return Judgement(verdict=verdict, why=why, level=now, due_s=due_s)


def slope_of(*series: Sequence[float]) -> float:
    """Return the rate at which the work changes, as a share of an iteration's seconds for each iteration.

    It is the median of the slopes between all pairs of iterations of the same series (the estimator of Theil and Sen:
    Sen, Journal of the American Statistical Association 63, 1968). 0 if the pairs do not agree on its sign: then noise
    is larger. `series`: seconds of successive iterations, one series for each placement.
    """
    slopes: list[float] = []
    for seconds in series:
        middle = statistics.median(seconds)
        pairs = itertools.combinations(enumerate(seconds), 2)
        slopes += [(last - first) / (j - i) / middle for (i, first), (j, last) in pairs]
    if not slopes:
        return 0.0
    rising = sum(slope > 0.0 for slope in slopes) / len(slopes)
    if _DISAGREE < rising < 1.0 - _DISAGREE:
        return 0.0
    return statistics.median(slopes)
