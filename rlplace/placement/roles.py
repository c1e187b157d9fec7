"""What the roles of a job ask of each other: who must be there, who may not be there twice, who needs accelerators.

A reference is a component of its own or the actor without its low-rank factors; values come from a critic or from a
head on the actor. Both at once, or none where the algorithm asks for it, is a problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlplace.config import RewardConfig
from rlplace.config.show import show
from rlplace.errors import ConfigError, Problem, Source, did_you_mean, source_of
from rlplace.placement.language.spec import role_of
from rlplace.placement.memory.model import read_model
from rlplace.placement.schedule import placed_names

if TYPE_CHECKING:
    from rlplace.config import Config
    from rlplace.placement.language.hybrid import HybridComponentPlacement

_PLACEMENT = "cluster.component_placement"


def check_roles(config: Config, placement: HybridComponentPlacement, sources: Mapping[str, Source]) -> list[Problem]:
    """Every contradiction between the blocks of a job and the components it places.

    `placement` has those whose lines could be read; who is there at all, the config says.
    """
    checks: tuple[Callable[[Config, Sequence[str]], Iterator[Problem]], ...] = (
        _check_critic,
        _check_reference,
        _check_rewards,
    )
    names = placed_names(config.cluster.component_placement)
    problems = [problem for check in checks for problem in check(config, names)]
    problems += _check_accelerators(config, placement)
    return [dataclasses.replace(p, source=source_of(p.key, sources)) for p in problems]


def _check_critic(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    placed, critic, name = "critic" in names, config.critic, config.algorithm.name
    if placed and critic.on_actor:
        why = "values come from one of the two: a model of its own, or a head on the actor's trunk"
        yield _wrong("critic.on_actor", "the critic is placed as well", True, why, f"remove {_PLACEMENT}.critic")
    valued = placed or critic.on_actor
    if config.runs and name == "ppo" and not valued:
        why = "PPO estimates advantages from a critic's values"
        fix = "critic: all        (or a head on the actor: critic.on_actor: true; or algorithm.name: reinforce_pp)"
        yield _wrong(f"{_PLACEMENT}.critic", "is not placed, and ppo needs values", None, why, fix, "critic-missing")
    if config.runs and name != "ppo" and valued:
        key = "critic.on_actor" if critic.on_actor else f"{_PLACEMENT}.critic"
        why = f"{name} compares the answers to a prompt, or all of an iteration, and asks nobody for values"
        yield _wrong(key, f"{name} has no use for a critic", None, why, "algorithm.name: ppo        (or remove it)")
    if critic.on_actor and critic.warmup_iterations:
        why = "a head on the actor's trunk learns with it, in the same step"
        yield _wrong(
            "critic.warmup_iterations",
            "has no meaning with critic.on_actor",
            critic.warmup_iterations,
            why,
            "warmup_iterations: 0",
        )


def _check_reference(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    placed, reference, algorithm = "reference" in names, config.reference, config.algorithm
    if placed and reference.share_actor:
        why = "log-probabilities come from one of the two: a model of its own, or the actor without its factors"
        fix = f"remove {_PLACEMENT}.reference"
        yield _wrong("reference.share_actor", "the reference is placed as well", True, why, fix)
    if reference.share_actor and config.actor.lora_rank is None:
        why = "without low-rank factors the actor's weights change, and what it began with is gone"
        yield _wrong("reference.share_actor", "the actor has no factors to leave out", True, why, "actor.lora_rank: 16")
    if reference.share_actor and reference.refresh_every:
        why = "weights that are shared never change: only the factors are trained"
        yield _wrong(
            "reference.refresh_every",
            "has no meaning with reference.share_actor",
            reference.refresh_every,
            why,
            "refresh_every: 0",
        )
    if placed and reference.refresh_every and _other_shape(config):
        why = "it takes the actor's weights, and its own model has others: a refresh is of equals"
        fix = "reference.model: null        (or refresh_every: 0)"
        yield _wrong("reference.model", "the reference cannot become the actor", None, why, fix)
    if config.runs and algorithm.kl_coef > 0 and not (placed or reference.share_actor):
        why = "the divergence is between the actor and a reference, and there is none"
        fix = "kl_coef: 0        (or place a reference; or, with LoRA, reference.share_actor: true)"
        yield _wrong("algorithm.kl_coef", "no reference is placed", algorithm.kl_coef, why, fix, "reference-missing")
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        why = "its gradient is zero on average: as a loss it holds nothing back"
        fix = "kl_estimator: k2        (or k3; or kl_in: reward)"
        yield _wrong("algorithm.kl_estimator", "k1 belongs into the reward", "k1", why, fix)
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        why = "kl_coef adapts by factors from its first value, and no factor makes 0 larger"
        yield _wrong("algorithm.kl_target", "kl_coef is 0 and stays so", algorithm.kl_target, why, "kl_coef: 0.01")


def _other_shape(config: Config) -> bool:
    """Whether the reference has a model of its own with other weights than the job's; False where one is not known."""
    own, shared = config.reference.model, config.model
    if own is None or shared is None:
        return False
    try:
        return read_model(own) != read_model(shared)
    except ConfigError:  # said of each component when its memory is counted
        return False


def _check_rewards(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    components = [c for c in names if role_of(c) == "reward"]
    own = [c.partition(".")[2] for c in components]
    if not isinstance(config.reward, RewardConfig):
        if "reward" in names:
            key, why = f"{_PLACEMENT}.reward", f"reward has one block for each name: {', '.join(config.reward)}"
            yield _wrong(key, "no block is its own", None, why, "reward.<name>: ...        (and a block reward.<name>)")
        for name in (name for name in config.reward if name not in own):
            near = did_you_mean(name, own)
            why = "placed are " + (", ".join(components) or "no rewards")
            fix = f"{near}: ..." if near else f"{_PLACEMENT}: {{reward.{name}: ...}}        (or remove the block)"
            what = "no such component is placed" + (f", did you mean {near!r}?" if near else "")
            yield _wrong(f"reward.{name}", what, None, why, fix, "unknown-component")
    for component in components:
        block, key = config.reward_of(component), config.key_of(component)
        if block.function is not None and block.url is not None:
            why = "a reward is a model, a function or an endpoint"
            yield _wrong(f"{key}.url", "the reward has a function as well", block.url, why, f"remove {key}.function")


def _check_accelerators(config: Config, placement: HybridComponentPlacement) -> Iterator[Problem]:
    for component in (c for c in placement.components if role_of(c) == "reward"):
        block, written = config.reward_of(component), placement.spec(component)
        if block.kind != "model" and placement.accelerators(component):
            kind = "an endpoint" if block.kind == "url" else "a function"
            why = f"{component} is {kind}, which computes elsewhere or on CPUs: accelerators would wait for it"
            what = f"{kind} needs no accelerators"
            got, fix = f"{component}: {written.text}", f"{component}: cpu"
            yield Problem(code="needs-no-accelerators", key=written.key, what=what, got=got, why=why, fix=fix)


def _wrong(key: str, what: str, value: object, why: str, fix: str, code: str = "roles-contradict") -> Problem:
    got = None if value is None else f"{key.rpartition('.')[2]}: {show(value)}"
    return Problem(code=code, key=key, what=what, got=got, why=why, fix=fix)
