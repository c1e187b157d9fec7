"""A run in numbers: score, counts, seconds by stage, waits, memory predicted against measured."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.comm.channel import ChannelStats
from rlplace.placement.language.slots import component_of
from rlplace.placement.memory.ledger import Measurements, MemoryLedger
from rlplace.placement.schedule import Residency, base_stage
from rlplace.report import learning
from rlplace.report.learning import LearningWatch
from rlplace.report.sinks import score_text
from rlplace.report.utilisation import SYNC, usage_rows
from rlplace.tables import with_whole_word
from rlplace.units import counted, plural, show_bytes

# Attributes of a Progress that go into a checkpoint as they are.
_KEPT = (
    "start_s",
    "steps",
    "iterations",
    "first_return",
    "counts",
    "seconds",
    "evaluations",
    "skipped",
    "named",
    "warnings",
    "learned",
)
# Ends of the metrics that count what `faults.on_poison: skip` left out.
_SKIPPED = ("/poisoned", "/skipped_steps")
_NAMED = 100  # of the things that were skipped, the first ones are named
_LEAST_WAIT_S = 0.05  # seconds; a channel with less waiting is not shown
# Stages of a run whose summary does not name its own, as older versions wrote it.
_STAGES = ("sync", "rollout", "infer", "learn")
_HEAD = 11  # width of the first column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The names of the metrics from which a job's runs are summarised.

    `score`: metric with an iteration's mean return; "" if a job has none. `score_name`: name of the score in texts.
    `episodes`: metric with the number of episodes behind the score; None: an iteration counts as one episode.
    `window`: number of latest episodes in the mean return, rounded up to whole iterations.
    `evaluated`: metric with the mean score of an evaluation.
    `steps`: name of a run's steps in summary.json. `counts`: key of summary.json -> metric to sum up for it.
    `signs`: signs that nothing is learned, of which the run warns. `learned`: metrics that tell how the policy learned;
    the summary has their first and last values.
    """

    score: str
    score_name: str = "reward"
    episodes: str | None = None
    window: int = 1
    evaluated: str = "eval/reward"
    steps: str
    counts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    signs: Sequence[learning.Name] = tuple(sign.name for sign in learning.SIGNS)
    learned: Sequence[str] = ()


SIMULATED = Measures(
    score="env/return",
    score_name="return",
    episodes="env/episodes",
    window=100,
    evaluated="eval/return",
    steps="env_steps",
    learned=(
        "env/episode_length",
        "actor/explained_variance",
        "actor/approx_kl",
        "actor/clip_fraction",
        "actor/entropy",
        "actor/grad_norm",
    ),
)
TEXT = Measures(
    score="actor/reward",
    steps="answers",
    counts={
        "samples": "actor/samples",
        "tokens_generated": "rollout/tokens",
        "tokens_learned": "actor/tokens_learned",
    },
    learned=(
        "actor/length_learned",
        "actor/truncated_share",
        "actor/mismatch",
        "actor/kl_reference",
        "actor/kl_teacher_token",
        "actor/entropy",
        "actor/grad_norm",
    ),
)


@dataclasses.dataclass(slots=True)
class Progress:
    """Sums and latest values of the metrics of a run so far. It belongs to the run's driver.

    `began`: `time.perf_counter()` when the command began to run. `start_s`: seconds until all workers were ready.
    `steps`: env steps or answers. `first_return`: score of the first iteration that had one. `counts`: key of
    summary.json -> sum of its metric. `seconds`: metric of seconds -> sum over iterations. `episodes`: (mean return,
    episodes) of the latest iterations, as many as the window needs. `evaluations`: policy version -> mean score of its
    evaluation, such as the mean reward of held-out prompts; None: no answer has a score. `skipped`: metric -> how many
    rows, samples or steps were skipped because a number was not finite. `named`: records of the first skipped items, as
    in summary.json. `earlier_s`: seconds of the earlier commands of a resumed run. `learned`: metric of
    `Measures.learned` -> its first and its last value. `watch`: warns if nothing is learned.
    """

    measures: Measures
    began: float
    start_s: float = 0.0
    steps: int = 0
    iterations: int = 0
    first_return: float | None = None
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    episodes: deque[tuple[float, float]] = dataclasses.field(default_factory=deque)
    evaluations: dict[int, float | None] = dataclasses.field(default_factory=dict)
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    named: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    earlier_s: float = 0.0
    learned: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    watch: LearningWatch = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.watch = LearningWatch(self.measures.signs)

    @property
    def warnings(self) -> list[dict[str, object]]:
        """The warnings that nothing is learned, as in summary.json."""
        return self.watch.warnings

    @warnings.setter
    def warnings(self, warnings: list[dict[str, object]]) -> None:
        self.watch.restore(warnings)

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.perf_counter() - self.began

    def state(self) -> dict[str, Any]:
        """Return the sums for a checkpoint, as plain values for JSON. `resume` takes them back."""
        kept = {name: copy.copy(getattr(self, name)) for name in _KEPT}
        return kept | {
            "episodes": [list(pair) for pair in self.episodes],
            "earlier_s": self.wall_s,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, the sums that the method `state` returned in an earlier command."""
        for name in _KEPT:
            setattr(self, name, copy.copy(state.get(name, getattr(self, name))))
        # JSON has texts as keys, and lists for pairs.
        evaluations = {int(at): value for at, value in self.evaluations.items()}
        self.evaluations = evaluations
        self.episodes = deque((score, count) for score, count in state["episodes"])
        self.earlier_s = state["earlier_s"]

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Return to `state`, the sums that the method `state` returned earlier in this command.

        The clock is not set back.
        """
        earlier_s = self.earlier_s
        self.resume(state)
        self.earlier_s = earlier_s

    @property
    def train_s(self) -> float:
        return self.seconds.get("time/iteration_s", 0.0)

    def add(self, numbers: Mapping[str, float], steps: int) -> None:
        """Add one iteration. `numbers`: metrics of the iteration. `steps`: env steps or answers in the iteration."""
        self.steps += steps
        self.iterations += 1
        self._add_seconds(numbers)
        for name, metric in self.measures.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + numbers.get(metric, 0.0)
        for metric in self.measures.learned:
            if metric in numbers:
                first = self.learned.get(metric, [numbers[metric]])[0]
                # A new dict: a checkpoint has a shallow copy of the old one
                self.learned = {**self.learned, metric: [first, numbers[metric]]}
        score = numbers.get(self.measures.score)
        if score is None:
            return
        episodes = 1.0
        if self.measures.episodes is not None:
            episodes = numbers[self.measures.episodes]
        self.episodes.append((score, episodes))
        # Drop the oldest iterations while the others fill the window.
        while self._finished - self.episodes[0][1] >= self.measures.window:
            self.episodes.popleft()
        if self.first_return is None:
            self.first_return = score

    def add_evaluation(self, numbers: Mapping[str, float], *, version: int) -> None:
        """Add the seconds of an evaluation, which count as training, and record its mean score.

        `numbers`: the metrics of the evaluation. `version`: the policy version that was evaluated.
        """
        self.evaluations[version] = numbers.get(self.measures.evaluated)
        evaluate_s = numbers.get("time/evaluate_s", 0.0)
        self._add_seconds({**numbers, "time/iteration_s": evaluate_s})

    def _add_seconds(self, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                self.seconds[name] = self.seconds.get(name, 0.0) + value

    def add_skipped(
        self,
        numbers: Mapping[str, float],
        notes: Mapping[str, Sequence[str]],
        *,
        iteration: int,
    ) -> None:
        """Count what was skipped in an iteration because a number was not finite, and keep the first notes about it.

        `numbers`: the metrics of the iteration. `notes`: metric -> a text for each skipped row, sample or step.
        `iteration`: counted from 1.
        """
        for name, count in numbers.items():
            if not name.endswith(_SKIPPED):
                continue
            self.skipped[name] = self.skipped.get(name, 0) + int(count)
            for note in notes.get(name, ()):
                if len(self.named) < _NAMED:
                    event = {"iteration": iteration, "metric": name, "what": note}
                    self.named.append(event)

    @property
    def _finished(self) -> float:
        """Return the number of episodes in the window, over which the mean return is computed."""
        return sum(count for _, count in self.episodes)

    @property
    def mean_return(self) -> float | None:
        """Return the mean return of the latest episodes, see `Measures.window`; None before an episode has finished."""
        total = self._finished
        if total:
            return sum(score * count for score, count in self.episodes) / total
        return None

    @property
    def score(self) -> float | None:
        """Return the number by which checkpoints are compared; None if the present policy has none.

        If the run evaluates, it is the score of this version's evaluation. Else it is the mean return, as soon as there
        are enough episodes for a full window: the first episodes to end are not typical.
        """
        if self.evaluations:
            return self.evaluations.get(self.iterations)
        if self._has_full_window:
            return self.mean_return
        return None

    @property
    def best_version(self) -> int | None:
        """The version with the highest score of an evaluation, the first of equal ones; None without evaluations."""
        best: int | None = None
        best_score = -math.inf
        for version, score in sorted(self.evaluations.items()):
            if score is not None and score > best_score:
                best = version
                best_score = score
        return best

    @property
    def _has_full_window(self) -> bool:
        return self._finished >= self.measures.window

    def reached_eval(self, goal: float | None) -> bool:
        """Return whether the newest evaluation has a score of at least `goal`. Return False if `goal` is None."""
        if goal is None or not self.evaluations:
            return False
        newest = self.evaluations[max(self.evaluations)]
        return newest is not None and newest >= goal

    def evaluations_without_gain(self) -> int:
        """Return the number of evaluations after that of the best version."""
        best = self.best_version
        if best is None:
            return len(self.evaluations)
        return sum(version > best for version in self.evaluations)

    def reached(self, goal: float | None) -> bool:
        """Return whether the mean return is at least `goal`, with enough episodes for a full window.

        Return False if `goal` is None.
        """
        if goal is None or not self._has_full_window:
            return False
        return self.mean_return is not None and self.mean_return >= goal


def summary(progress: Progress, folder: Path) -> dict[str, Any]:
    """Return the content of summary.json about a run, without memory, channels and accelerators.

    Seconds are sums over iterations. `folder`: the run's folder.
    """
    steps = progress.measures.steps
    total = progress.train_s
    speed = 0.0
    overhead = 0.0
    if total:
        speed = progress.steps / total
        overhead = progress.seconds.get("time/overhead_s", 0.0) / total
    record: dict[str, Any] = {
        "steps_name": steps,
        "score_name": progress.measures.score_name,
        "score": progress.measures.score,
        "iterations": progress.iterations,
        steps: progress.steps,
        "return_first": progress.first_return,
        "return_last": progress.mean_return,
    }
    # Runs of language models have these keys without an evaluation, too.
    if progress.measures.episodes is None or progress.evaluations:
        record |= _held_out(progress)
    record["learned"] = progress.learned
    for name, value in progress.counts.items():
        record[name] = int(value)
    seconds = {}
    for name, value in progress.seconds.items():
        seconds[name.removeprefix("time/").removesuffix("_s")] = value
    return record | {
        "wall_s": progress.wall_s,
        "start_s": progress.start_s,
        "train_s": total,
        f"{steps}_per_s": speed,
        "seconds": seconds,
        "skipped": {"counts": progress.skipped, "events": progress.named},
        "warnings": progress.warnings,
        "overhead_share": overhead,
        "folder": str(folder),
    }


def _held_out(progress: Progress) -> dict[str, Any]:
    """Return the scores of evaluations: the first, the last, the best and its version, and version -> score."""
    evaluations: dict[str, float | None] = {}
    for version, value in sorted(progress.evaluations.items()):
        evaluations[str(version)] = value
    ends: Sequence[float | None] = list(evaluations.values()) or [None]
    best = progress.best_version
    return {
        "eval_first": ends[0],
        "eval_last": ends[-1],
        "eval_best": None if best is None else progress.evaluations[best],
        "eval_best_version": best,
        "evaluations": evaluations,
    }


def compare_memory(
    ledger: MemoryLedger, measured: Measurements
) -> dict[str, dict[str, dict[str, int | None]]]:
    """Return component -> residency -> its `predicted` and `measured` bytes on each accelerator.

    `ledger`: holds the predicted bytes. `measured`: component -> residency -> bytes. Residencies that were not measured
    are left out. `predicted` is None if the plan does not know the component's memory.
    """
    compared: dict[str, dict[str, dict[str, int | None]]] = {}
    for component, found in measured.items():
        compared[component] = {}
        for residency in Residency:
            if residency not in found:
                continue
            predicted = None
            if component not in ledger.uncounted:
                predicted = ledger.bytes(component, residency)
            compared[component][residency.word] = {
                "predicted": predicted,
                "measured": found[residency],
            }
    return compared


def waits_of(views: Mapping[str, ChannelStats]) -> dict[str, dict[str, Any]]:
    """Return channel -> its producers, consumers, seconds that they waited, and numbers of items and bytes.

    `views`: channel -> its statistics. Seconds are summed over the ranks.
    """
    waits = {}
    for name, seen in views.items():
        waits[name] = {
            "producers": _components(seen.producers),
            "consumers": _components(seen.consumers),
            "producer_wait_s": seen.producer_wait_s,
            "consumer_wait_s": seen.consumer_wait_s,
            "items": seen.puts,
            "bytes": seen.bytes,
            "high_water_items": seen.high_water_items,
            "staleness_max": seen.staleness_max,
        }
    return waits


def _components(owners: Iterable[str]) -> list[str]:
    """Return the components to which the ranks `owners` belong, each once.

    A name in `owners` that is not the name of a rank is returned unchanged.
    """
    return list(dict.fromkeys(component_of(owner) or owner for owner in owners))


# Metric -> its head in the line about what was learned, and the format of its values
_LEARNED = {
    "env/episode_length": ("length", ",.0f"),
    "actor/length_learned": ("tokens of an answer", ",.1f"),
    "actor/truncated_share": ("truncated", ".0%"),
    "actor/mismatch": ("mismatch", ".1e"),
    "actor/kl_reference": ("kl from the reference", ",.2f"),
    "actor/kl_teacher_token": ("kl to the teacher, per token", ".3f"),
    "actor/explained_variance": ("explained variance", ".2f"),
    "actor/approx_kl": ("kl", ".4f"),
    "actor/clip_fraction": ("clipped", ".0%"),
    "actor/entropy": ("entropy", ",.2f"),
    "actor/grad_norm": ("gradient norm", ".3g"),
}
_OVERHEAD = (
    "spent outside of simulator, policy and learning: in waiting, moves, sync and calls"
)

Rows = Iterable[tuple[str, str]]  # head, text


def summary_text(report: Mapping[str, Any]) -> str:
    """Return the summary of a run as text for the console. The name of a file is never wrapped.

    `report`: the result of `summary`, with the run's `memory`, `waits` and `utilisation`.
    """
    rows: list[tuple[str, str]] = []
    steps = steps_name(report)
    if steps == SIMULATED.steps:
        rows += _simulated_rows(report)
    elif steps == TEXT.steps:
        rows += _text_rows(report)
    else:
        rows += _own_rows(report)
    # How it was learned, and signs that nothing was.
    rows += _learned_rows(report.get("learned", {}))
    rows += [("warning", str(each["text"])) for each in report.get("warnings", ())]
    # Where the time went.
    rows += _seconds_rows(report)
    rows += _predicted_rows(report.get("predicted", {}))
    rows += _elastic_rows(report.get("elastic", {}))
    rows += usage_rows(report.get("utilisation", {}))
    # What did not go as planned.
    rows += _fault_rows(report.get("faults", {}))
    rows += _skipped_rows(report.get("skipped", {}))
    rows += _wait_rows(report.get("waits", {}))
    rows += _memory_rows(report.get("memory", {}))

    lines = [""]
    for head, text in rows:
        lines.append(fitted(f"{head:<{_HEAD}}{text}", _HEAD))
    if checkpoint := report.get("checkpoint"):
        head = f"{'checkpoint':<{_HEAD - 1}}"
        lines.append(with_whole_word(head, str(checkpoint), indent=_HEAD))
        saved = f"saving took {report['save_s']:.1f} s; resume=auto continues from it"
        lines.append(fitted(f"{'':<{_HEAD}}{saved}", _HEAD))
    head = f"{'files':<{_HEAD - 1}}"
    lines.append(with_whole_word(head, report["folder"], indent=_HEAD))
    return "\n".join(lines)


def steps_name(report: Mapping[str, Any]) -> str:
    """Return the name of a run's steps, such as "env_steps" or "answers".

    `report`: the run's summary. If an older version wrote it, the name is found by its other keys.
    """
    named = report.get("steps_name")
    if named is not None:
        return str(named)
    if SIMULATED.steps in report:
        return SIMULATED.steps
    return TEXT.steps


def is_custom(report: Mapping[str, Any]) -> bool:
    """Return whether a run is of a custom job, which has its own names of metrics. `report`: the run's summary."""
    return steps_name(report) not in (SIMULATED.steps, TEXT.steps)


def parts_of_training(report: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> seconds of each part of training: first the stages of the job, then sync, moves and evaluation.

    `report`: the run's summary. Parts that did not occur in the run are left out.
    """
    names: list[str] = []
    for stage in report.get("stages", _STAGES):
        # A stage that sends weights and works has both by name.
        names += [f"{stage} weights", stage]
    last = [name for name in names if base_stage(name) == SYNC]
    ordered = [name for name in names if name not in last]
    seconds = report["seconds"]
    found = {}
    for name in (*ordered, *last, "moves", "evaluate"):
        key = name.replace(" ", "_")
        if key in seconds:
            found[name] = seconds[key]
    return found


def fitted(line: str, indent: int = 2) -> str:
    """Return `line`, wrapped at spaces to the width of the terminal; in a pipe, to 80 columns.

    `indent`: number of spaces before each further line.
    """
    parts = textwrap.TextWrapper(
        width=max(shutil.get_terminal_size().columns, 2 * indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return parts.fill(line)


def _seconds_rows(report: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about the seconds of start and training, and about the overhead.

    `report`: the run's summary.
    """
    stages = []
    for name, seconds in parts_of_training(report).items():
        stages.append(f"{name} {seconds:.1f}")
    each = ", ".join(stages) or "no iteration"
    parts = f"start {report['start_s']:.1f}, training {report['train_s']:.1f} ({each})"
    yield "seconds", f"{report['wall_s']:.1f} in all: {parts}"
    share = f"{report['overhead_share']:.0%}"
    if is_custom(report):
        yield "overhead", f"{share} of training was outside of the workers' methods"
    else:
        yield "overhead", f"{share} of training was {_OVERHEAD}"


def _simulated_rows(report: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about the returns and env steps of a run on simulators.

    `report`: the run's summary.
    """
    returns = []
    for value in (report["return_first"], report["return_last"]):
        if value is None:
            returns.append("no episode finished")
        else:
            returns.append(score_text(value))
    window = f"(first iteration, last {SIMULATED.window} episodes)"
    yield "return", f"{' -> '.join(returns)}   {window}"
    if report.get("evaluations"):
        values, when = _evaluated(report, _return)
        yield "evaluated", f"{values}   (mean return of whole episodes, {when})"
    steps = f"{report['env_steps']:,}"
    iterations = counted(report["iterations"], "iteration")
    rate = f"{report['env_steps_per_s']:,.0f} per second"
    yield "env steps", f"{steps} in {iterations}, {rate}"


def _evaluated(
    report: Mapping[str, Any], text: Callable[[float | None], str]
) -> tuple[str, str]:
    """Return the scores of the first and the last evaluation as text, and which iterations they came after.

    `report`: the run's summary, with one evaluation at least. `text`: a score -> its text.
    """
    ends = _first_and_last(report["evaluations"])
    values = " -> ".join(map(text, ends.values()))
    iterations = plural(int(max(ends, key=int)), "iteration")
    when = f"after {' and '.join(ends)} {iterations}"
    best = report.get("eval_best_version")
    if best is not None and str(best) not in ends:
        when += f"; best {text(report['eval_best'])}, after {best}"
    return values, when


def _first_and_last(
    evaluations: Mapping[str, float | None],
) -> dict[str, float | None]:
    """Return the first and the last of the evaluations. A single one is both.

    `evaluations`: policy version -> score, in the order of time.
    """
    rows = list(evaluations.items())
    return dict([rows[0], rows[-1]])


def _return(value: float | None) -> str:
    if value is None:
        return "none"
    return score_text(value)


def _learned_rows(learned: Mapping[str, Sequence[float]]) -> Rows:
    """Yield (head, text) of the line with first and last values of metrics that tell how the policy learned.

    `learned`: metric -> its first and its last value.
    """
    texts = []
    for metric, (head, form) in _LEARNED.items():
        if metric in learned:
            first, last = learned[metric]
            texts.append(f"{head} {first:{form}} -> {last:{form}}")
    if texts:
        yield "learning", f"{', '.join(texts)}   (first, last iteration)"


def _own_rows(report: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about a job's steps, such as iterations and, if it has them, its scores.

    `report`: the run's summary.
    """
    first, last = report["return_first"], report["return_last"]
    if first is not None and last is not None:
        name = report["score_name"]
        yield name, f"{first:,.4g} -> {last:,.4g}   (first, last iteration)"
    if report.get("evaluations"):
        scores = []
        for version, score in _first_and_last(report["evaluations"]).items():
            scores.append(f"{_reward(score)} by version {version}")
        yield "held out", " -> ".join(scores)
    steps = steps_name(report)
    rate = f"{report[f'{steps}_per_s']:,.3g} per second"
    yield steps, f"{report[steps]:,}, {rate}"


def _text_rows(report: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about the rewards and tokens of a run on a language model.

    `report`: the run's summary.
    """
    first = _reward(report["return_first"])
    last = _reward(report["return_last"])
    yield "reward", f"{first} -> {last}   (first, last iteration)"

    if report.get("evaluations"):
        values, when = _evaluated(report, _reward)
        yield "held out", f"{values}   (mean reward of the answers, {when})"

    generated = report.get("tokens_generated", 0)
    learned = report.get("tokens_learned", 0)
    texts = [
        f"{generated:,} generated, {_rate(report, generated, 'rollout')}",
        f"{learned:,} learned, {_rate(report, learned, 'learn')}",
        counted(report["iterations"], "iteration"),
    ]
    yield "tokens", "; ".join(texts)


def _reward(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.3f}"


def _rate(report: Mapping[str, Any], tokens: int, stage: str) -> str:
    """Return a text with the number of tokens for each second of a stage. `report`: the run's summary."""
    seconds = report["seconds"].get(stage)
    if seconds:
        return f"{tokens / seconds:,.0f} per second"
    return "none per second"


def _predicted_rows(predicted: Mapping[str, Any]) -> Rows:
    seconds = predicted.get("seconds")
    if not seconds:
        return
    each = []
    for stage, row in seconds.items():
        each.append(f"{stage} {row['predicted']:.3g} ({row['measured']:.3g})")
    yield "predicted", ", ".join(each)
    about = "seconds of an iteration, predicted (measured, median)"
    yield "", f"{about}, from {predicted['from']}"
    others = predicted.get("others")
    if others is not None:
        busy = f"other processes used {others:.0%} of this machine's processors"
        yield "", f"{busy}, which no prediction counts: the run alone would be faster"


def _elastic_rows(elastic: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about searches during the run, and about what they advised or changed.

    `elastic`: the block `elastic` of the run's summary.
    """
    if not elastic:
        return
    searches = counted(elastic["searches"], "search")
    took = f"{searches} beside the run, {elastic['search_s']:.1f} s"
    events = elastic["events"]
    if not events and elastic["stayed"] is not None:
        took += f"; {elastic['stayed']}"
    if elastic["failed"] is not None:
        took += f"; the last failure: {elastic['failed']}"
    yield "elastic", took
    advised = [event for event in events if event["decision"] == "advise"]
    for event in events:
        # Advice is repeated as long as it holds
        if event in advised[:-1]:
            continue
        yield "", f"after {event['iteration']}: {_elastic_text(event)}"


def _elastic_text(event: Mapping[str, Any]) -> str:
    """Return the text about a decision. `event`: its record in summary.json."""
    decision = event["decision"]
    moves = [f"{name} {old} -> {new}" for name, (old, new) in event["moved"].items()]
    if decision not in ("advise", "change"):
        return f"{decision}: {event['why']}"
    before_s = event["measured"]["before"]
    seconds = f"{before_s:.3g} s -> {event['expected_s']:.3g} s predicted"
    text = f"{decision}: {', '.join(moves)}; {seconds}"
    if decision == "advise":
        text += f"; {event['words']}"
    return text


def _fault_rows(faults: Mapping[str, Any]) -> Rows:
    """Yield (head, text) of the lines about faults: their number, the replaced workers, and the lost time.

    `faults`: the block `faults` of the run's summary.
    """
    events = faults.get("events")
    if not events:
        return
    counts = Counter(name for event in events for name in event["replaced"])
    each = [f"{name} ({times})" for name, times in sorted(counts.items())]
    replaced = ", ".join(each) or "none"
    recovery = f"recovery {faults['recovery_s']:.1f} s"
    redone = f"done again {faults['redone_s']:.1f} s"
    texts = [str(len(events)), f"workers replaced: {replaced}", f"{recovery}, {redone}"]
    yield "faults", "; ".join(texts)
    share = f"{faults['effective_share']:.0%}"
    yield "", f"{share} of the time since all were ready went into work that counted"


def _skipped_rows(skipped: Mapping[str, Any]) -> Rows:
    counts = skipped.get("counts")
    if counts:
        each = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        yield "skipped", f"{each}   (not finite; summary.json names the first {_NAMED})"


def _wait_rows(waits: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (head, text) of a line for each channel at which ranks waited for `_LEAST_WAIT_S` or longer.

    `waits`: the result of `waits_of`.
    """
    texts: list[str] = []
    for name, seen in waits.items():
        putting = "+".join(seen["producers"])
        taking = "+".join(seen["consumers"])
        taken_s = seen["consumer_wait_s"]
        put_s = seen["producer_wait_s"]
        if putting and taking and max(taken_s, put_s) >= _LEAST_WAIT_S:
            consumers = f"{taking} {taken_s:.1f} s for {putting}"
            producers = f"{putting} {put_s:.1f} s for {taking}"
            texts.append(f"{name}: {consumers}, {producers}")
    return _headed("waited", texts, "summed over ranks")


def _memory_rows(
    memory: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[tuple[str, str]]:
    """Return (head, text) of a line for each component: its bytes in each residency.

    `memory`: the result of `compare_memory`. A component is left out if no bytes were predicted and none were measured.
    """
    texts = []
    for component, states in memory.items():
        unknown = all(of["predicted"] is None for of in states.values())
        if unknown and not any(of["measured"] for of in states.values()):
            continue
        sizes = []
        for word, of in states.items():
            if word != "off":
                measured = show_bytes(of["measured"])
                predicted = "not known"
                if of["predicted"] is not None:
                    predicted = show_bytes(of["predicted"])
                sizes.append(f"{word} {measured} ({predicted})")
        texts.append(f"{component}: {', '.join(sizes)}")
    return _headed("memory", texts, "per accelerator, measured (predicted)")


def _headed(head: str, texts: Sequence[str], note: str) -> list[tuple[str, str]]:
    """Return (head, text) of several lines: only the first line has the head `head`; the last ends with `note`.

    `texts`: the text of each line.
    """
    rows = [("", text) for text in texts]
    if rows:
        rows[0] = (head, texts[0])
        last_head, last = rows[-1]
        rows[-1] = (last_head, f"{last}   {note}")
    return rows
