"""The channels of a run that trains a language model: requests and completions, samples, what is said of them, weights.

::

    env ── requests ──▶ any rollout rank with room        env ── samples: whole groups ──▶ actor rank 0
        ◀── completions, by env rank ── rollout           actor ── weights, by rollout rank ──▶ rollout

    and for each critic, reference or reward, called judge here:
    env ── samples.judge: the same groups ──▶ judge       judge ── scores.judge ──▶ actor rank 0
    actor ── returns: of whole groups ──▶ critic          actor ── weights.reference ──▶ reference, if refreshed
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable

from rlplace.placement.channels import ChannelPlan, Ends, plan_weights
from rlplace.placement.flow import block_edges
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import Homes, role_of
from rlplace.placement.schedule import Schedule, base_stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Of one iteration, in prompts and answers."""

    prompts: int
    samples_per_prompt: int
    turns: int = 1  # most answers of one episode
    held_out: int = 0  # prompts of one evaluation, each answered once; 0: there are none
    ahead: int = 0  # iterations that are generated before the one that is learned is over

    @property
    def requests(self) -> int:
        """Most that can wait at once: a prompt is asked for all its samples, a later turn for each by itself."""
        asked = self.prompts * (self.samples_per_prompt if self.turns > 1 else 1)
        return max(asked, self.held_out)


def plan_text_channels(placement: HybridComponentPlacement, sizes: TextSizes) -> tuple[ChannelPlan, ...]:
    """Each is large enough for all that can be under way at once, so no rank waits for room in it."""
    envs, engines = placement.homes("env"), placement.homes("rollout")
    ranks, ends = len(envs.node), len(engines.node)
    answers = [
        max(own * sizes.samples_per_prompt, held)
        for own, held in zip(_blocks(sizes.prompts, ranks), _blocks(sizes.held_out, ranks), strict=True)
    ]
    answers[0] += ranks
    turns = f", up to {sizes.samples_per_prompt} of each in later turns" if sizes.turns > 1 else ""
    return (
        ChannelPlan(
            name="requests",
            source="env",
            target="rollout",
            keys=("",),
            why=f"{sizes.requests // (sizes.samples_per_prompt if turns else 1)} prompts{turns}, "
            f"and the end of the iteration for {ends} rollout rank{'s' * (ends > 1)}",
            targets=_first(engines),
            waiting=array("l", [sizes.requests + ends]),
            inside=bytes(1),
        ),
        ChannelPlan(
            name="completions",
            source="rollout",
            target="env",
            keys=tuple(map(str, range(ranks))),
            why="every answer of an env rank's prompts, and rank 0 hears when each rank is done",
            targets=envs,
            waiting=array("l", answers),
            inside=bytes(ranks),
        ),
        ChannelPlan(
            name="samples",
            source="env",
            target="actor",
            keys=("",),
            why="all groups of an iteration wait there for learn"
            + (f", and those of {sizes.ahead} more" if sizes.ahead else ""),
            targets=_first(placement.homes("actor")),
            waiting=array("l", [sizes.prompts * (1 + sizes.ahead)]),
            inside=bytes(1),
        ),
        plan_weights(placement),
    )


def plan_judging(placement: HybridComponentPlacement, sizes: TextSizes, *, refreshed: bool) -> tuple[ChannelPlan, ...]:
    """What judges are given and say, with room for whole iterations; `refreshed`: a reference gets weights."""
    groups = sizes.prompts * (1 + sizes.ahead)
    samples = groups * sizes.samples_per_prompt
    channels: list[ChannelPlan] = []
    for judge in judges_of(placement.components):
        channels += [
            _to_first(placement, f"samples.{judge}", "env", judge, groups, "all groups of an iteration"),
            _to_first(placement, f"scores.{judge}", judge, "actor", samples, "what is said of each sample, at most"),
        ]
    if "critic" in placement.components:
        channels.append(_to_first(placement, "returns", "actor", "critic", groups, "those of all groups"))
    if refreshed and "reference" in placement.components:
        channels.append(plan_weights(placement, "weights.reference", "reference"))
    return tuple(channels)


def judges_of(components: Iterable[str]) -> tuple[str, ...]:
    """Those that say something of each sample beside the actor."""
    return tuple(c for c in components if role_of(c) in ("critic", "reference", "reward"))


def _to_first(
    placement: HybridComponentPlacement, name: str, source: str, target: str, items: int, why: str
) -> ChannelPlan:
    return ChannelPlan(
        name=name,
        source=source,
        target=target,
        keys=("",),
        why=why,
        targets=_first(placement.homes(target)),
        waiting=array("l", [items]),
        inside=bytes(1),
    )


def text_ends(schedule: Schedule) -> Ends:
    """When each channel is filled and emptied.

    The actor gathers what judges say, and hands on returns, where the last of them has spoken: `appraised_in`.
    """
    components = tuple(dict.fromkeys(c for working in schedule.active.values() for c in working))
    judges, appraised = judges_of(components), appraised_in(schedule)
    taken = _stage_of(schedule, "actor", "infer") or (appraised if judges else _stage_of(schedule, "actor", "learn"))
    ends: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "requests": ("rollout", "rollout", ()),
        "completions": ("rollout", "rollout", ("requests",)),
        "samples": ("rollout", taken, ("completions",)),
        "weights": ("sync", "sync", ()),
        "weights.reference": ("sync", "sync", ()),
    }
    for judge in judges:
        said = _stage_of(schedule, judge, "infer") or "rollout"
        ends[f"samples.{judge}"] = ("rollout", said, ("completions",))
        ends[f"scores.{judge}"] = (said, appraised, (f"samples.{judge}",))
    if "critic" in judges:
        ends["returns"] = (appraised, _stage_of(schedule, "critic", "learn"), tuple(f"scores.{j}" for j in judges))
    return ends


def appraised_in(schedule: Schedule) -> str:
    """The stage at whose end the actor has all that is said of an iteration's samples."""
    return next((s for s in reversed(schedule.stages) if base_stage(s) == "infer"), "rollout")


def _stage_of(schedule: Schedule, component: str, base: str) -> str:
    """Its turn of a stage; "" where it does not work there."""
    return next((s for s, working in schedule.active.items() if base_stage(s) == base and component in working), "")


def _first(homes: Homes) -> Homes:
    """Where rank 0 lives, and with it a key that any rank may take from."""
    return Homes(node=homes.node[:1], first=homes.first[:1], count=homes.count[:1])


def _blocks(rows: int, ranks: int) -> list[int]:
    edges = block_edges(rows, ranks)
    return [stop - start for start, stop in itertools.pairwise(edges)]
