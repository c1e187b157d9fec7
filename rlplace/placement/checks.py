"""Checks of a job beyond placement and residency: rows for every rank, whole batches, compatible roles.

A reference is either a component of its own or the actor without its LoRA factors. Values come either from a critic or
from a value head on the actor. Having both at once is a problem; so is having none where the algorithm needs it. The
plan adds to each problem the place where its key was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, isqrt, lcm
from typing import TYPE_CHECKING

from rlplace.config.keys import PLACEMENT
from rlplace.config.schema import RewardConfig
from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError, Problem, did_you_mean, one_of, suggestion
from rlplace.placement.language.hybrid import COLLOCATED, HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, role_of
from rlplace.placement.machines.products import memory_of
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.memory.model import read_model
from rlplace.placement.schedule import Needs, Residency, makes_room, placed_names
from rlplace.units import counted, plural, show_bytes

if TYPE_CHECKING:
    from rlplace.config.schema import Config, NodeConfig

_ENVS = "env.total_num_envs"
# Sync modes that send only part of the weights: the rollout ranks must still hold the rest.
_SOME_WEIGHTS = (
    "trainable",
    "lora",
)
# Role -> the role whose ranks hold the rows that it scores.
PARTNERS = {
    "reference": "actor",
    "reward": "critic",
}


def check_simulator_job(
    config: Config, placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Check a job on simulators against its placement. Components that are not placed are skipped.

    `active`: the needs of the job, with its stages split into sub-stages.
    """
    yield from _check_joined(config, placement)
    yield from _check_inline(config, placement)
    yield from _check_rows(config, placement)
    yield from _check_sequences(config)
    yield from _check_sync(config, placement, active)


def check_text_job(
    config: Config, placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Check a job on language models against its placement; the counterpart of `check_simulator_job`."""
    yield from _check_joined(config, placement)
    yield from _check_inline(config, placement)
    if not config.runs:
        yield from check_batches(config, placement)
        yield from check_partners(placement)
    for check in (_check_critic, _check_reference, _check_rewards):
        yield from check(config, placed_names(config.cluster.component_placement))
    yield from _check_reward_places(config, placement)
    # In a real run, samples need not divide over engines or ranks: an engine takes samples while it has room.
    if config.runs:
        yield from _check_prompts(config, placement)
        yield from _check_overlap(config, placement, active)
        yield from _check_accumulation(config, placement, active)
        yield from _check_tails(config)


def _joined(config: Config, component: str) -> bool:
    """Return whether the ranks of a component form one torch process group."""
    role = role_of(component)
    return role in ("actor", "critic", "reference") or (
        role == "reward" and config.reward_of(component).kind == "model"
    )


def _check_joined(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report ranks of one process group that share a GPU: NCCL allows one rank of a group per GPU."""
    nodes = placement.topology.nodes
    for component in placement.components:
        places = placement.locations(component)
        on = [
            first
            for node, first in zip(places.node, places.first, strict=True)
            if nodes[node].kind == "cuda"
        ]
        on = [first for first in on if first >= 0]
        if not _joined(config, component) or len(set(on)) == len(on):
            continue
        spec = placement.spec(component)
        most = max(map(on.count, set(on)))
        fix = (
            f"{component}: {placement.accelerators(component)}        (or emulated: "
            f"cluster.accelerator.kind=emulated)"
        )
        what = f"{most} of its ranks are on one GPU"
        why = "its ranks compute together, by NCCL, which takes one on each"
        yield _placed(spec, "ranks-share-gpu", what, why, fix)


def _check_inline(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report process groups of several ranks under the inline launcher, which runs ranks as threads of one process."""
    if config.cluster.launcher != "inline" or not config.runs:
        return
    sizes = {
        c: placement.world_size(c) for c in placement.components if _joined(config, c)
    }
    crowded = {component: size for component, size in sizes.items() if size > 1}
    if not crowded:
        return
    names = " and ".join(
        f"{component} ({size} ranks)" for component, size in crowded.items()
    )
    first = next(iter(crowded))
    key = "cluster.launcher"
    what = f"{names} cannot run as threads of one process"
    why = "a process can join only one process group, so each of these ranks needs a process of its own"
    fix = f"cluster.launcher=ray     (or one rank: {PLACEMENT}.{first}=0)"
    yield _problem(
        "inline-needs-one-rank", key, what, config.cluster.launcher, why, fix
    )


def _check_rows(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report environments that do not divide over env ranks, and ranks or minibatches that would get no rows."""
    envs = config.simulator_env.total_num_envs
    groups = config.torch_rollout.pipeline_stage_num
    sizes = {c: placement.world_size(c) for c in placement.components}
    block = groups * sizes.get("env", 1)
    if "env" in sizes and envs % block:
        below = envs // block * block
        above = -(-envs // block) * block
        what = f"{envs} environments do not divide over {sizes['env']} env ranks x {groups} stage groups"
        why = f"each stage group of each env rank holds equally many: a multiple of {sizes['env']} x {groups} = {block}"
        fix = f"total_num_envs: {above}" + (f"        (or: {below})" if below else "")
        yield _problem("uneven-envs", _ENVS, what, envs, why, fix)
    for component, parts, given in (
        (
            "rollout",
            groups,
            f"a stage group has {envs} / {groups} = {envs // groups} environments, and ",
        ),
        ("actor", 1, f"there are {envs} environments, and "),
    ):
        ranks = sizes.get(component, 0)
        if ranks > envs // parts:
            yield _without_rows(
                _ENVS, envs, component, ranks, -(-ranks * parts // block) * block, given
            )
    minibatches = config.algorithm.num_minibatches
    steps = config.algorithm.rollout_steps
    unrolled, sequences = (
        config.algorithm.unrolled,
        envs * (steps // config.algorithm.unrolled),
    )
    if config.actor.policy.remembered and minibatches > sequences > 0:
        what = (
            f"{minibatches} minibatches of {sequences} sequences: some would be empty"
        )
        why = f"an iteration has total_num_envs {envs} x rollout_steps {steps} / unroll_steps {unrolled} sequences"
        fix = f"num_minibatches: {sequences}        (or fewer, or a smaller algorithm.unroll_steps)"
        yield _problem(
            "empty-minibatches",
            "algorithm.num_minibatches",
            what,
            minibatches,
            why,
            fix,
        )
    elif minibatches > envs * steps:
        what = (
            f"{minibatches} minibatches of {envs * steps} samples: some would be empty"
        )
        why = f"an iteration has total_num_envs {envs} x rollout_steps {steps} samples"
        fix = f"num_minibatches: {envs * steps}        (or fewer)"
        yield _problem(
            "empty-minibatches",
            "algorithm.num_minibatches",
            what,
            minibatches,
            why,
            fix,
        )


def _check_prompts(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report env ranks without a prompt, and data-parallel actor groups without a sample."""
    prompts = config.algorithm.prompts or 0
    each = config.algorithm.samples_per_prompt
    for component, items, item in (("env", 1, "prompt"), ("actor", each, "sample")):
        ranks = (
            placement.world_size(component) if component in placement.components else 0
        )
        cut = placement.spec(component).parallel.ranks if ranks else 1
        if prompts * items < (parts := ranks // cut):
            least = -(-parts // items)
            yield _without_rows(
                "algorithm.prompts",
                prompts,
                component,
                parts,
                least,
                item=f"one {item}",
                together=cut,
            )


def _without_rows(
    key: str,
    value: int,
    component: str,
    ranks: int,
    least: int,
    given: str = "",
    item: str = "one",
    together: int = 1,
) -> Problem:
    unit = f"{component} rank"
    units = f"{component} ranks"
    # Ranks of one group hold the same samples: they split tensors or tokens between them.
    if together > 1:
        unit = f"group of {together} {units}"
        units = f"groups of {together} {units}"
    what = f"too few for {ranks} {units}: some would have nothing to do"
    why = f"{given}each {unit} takes at least {item}"
    fix = f"{key.rpartition('.')[2]}: {least}        (or fewer {units})"
    return _problem("rank-without-rows", key, what, value, why, fix)


def _check_sequences(config: Config) -> Iterator[Problem]:
    """Report sequence settings that do not fit the policy: sequences need a policy with memory."""
    algorithm = config.algorithm
    key = "algorithm.unroll_steps"
    steps = algorithm.rollout_steps
    length = algorithm.unrolled
    if not config.actor.policy.remembered:
        given = {key: algorithm.unroll_steps, "algorithm.burn_in": algorithm.burn_in}
        for name, value in given.items():
            if value:
                what = "the policy has no memory"
                why = "it learns from single steps, not from sequences"
                fix = f"remove {name}, or give it a memory: actor.model.memory: gru"
                yield _problem("bad-sequences", name, what, value, why, fix)
    elif steps % length:
        what = f"{steps} steps are no whole number of sequences of {length}"
        why = f"rollout_steps {steps} are cut into sequences of unroll_steps"
        fit = next(fit for fit in range(min(length, steps), 0, -1) if steps % fit == 0)
        yield _problem("bad-sequences", key, what, length, why, f"unroll_steps: {fit}")
    elif algorithm.burn_in > length:
        what = "longer than the sequences"
        why = f"no more than the sequence before, of {length} steps, is kept for it"
        yield _problem(
            "bad-sequences",
            "algorithm.burn_in",
            what,
            algorithm.burn_in,
            why,
            f"burn_in: {length}",
        )


def _check_sync(
    config: Config, placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Report a partial sync mode whose rollout ranks drop their weights between two syncs."""
    key = "actor.sync.mode"
    mode = config.actor.sync.mode
    if (
        mode not in _SOME_WEIGHTS
        or not config.rollout.enable_offload
        or "rollout" not in placement.components
    ):
        return
    away = [
        stage for stage in active.stages if active.of(stage, "rollout") is Residency.OFF
    ]
    if away and makes_room(placement, active, "rollout"):
        what = "the rollout would get some weights while it has lost the others"
        why = f"rollout drops its weights in {' and '.join(away)}; only the first sync of mode {mode} sends all of them"
        fix = f"{key}: all        (or keep them: rollout.enable_offload: false)"
        yield _problem("sync-without-base", key, what, mode, why, fix)


def _check_overlap(
    config: Config, placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Report components with enable_offload that share accelerators with an asynchronous rollout.

    An asynchronous rollout never pauses, so it cannot release accelerators for them. Components that stay resident
    share accelerators permanently: the memory ledger shows whether both fit.
    """
    generating = [
        c for c in placement.components if active.of("rollout", c) > Residency.OFF
    ]
    for component in placement.components if active.ahead else ():
        others = [c for c in generating if placement.shared(component, c)]
        if (
            component in generating
            or not config.block_of(component).enable_offload
            or not others
        ):
            continue
        where = ", ".join(
            f"{placement.shared(component, other)} with {other}" for other in others
        )
        what = f"{component} takes turns with {' and '.join(others)}, so neither can go on while the other works"
        why = f"above 0, rollout goes on while the actor learns; {component} shares accelerators {where}"
        fix = f"max_staleness: 0        (or other accelerators; or, where both fit, {component}.enable_offload: false)"
        yield _problem(
            "overlap-takes-turns",
            "algorithm.max_staleness",
            what,
            active.ahead,
            why,
            fix,
        )


def _check_tails(config: Config) -> Iterator[Problem]:
    """Report `short_rounds` where it has no effect or no round can drop its longest answers."""
    algorithm = config.algorithm
    key = "algorithm.short_rounds"
    hindrances = {
        "with max_staleness, engines go on with the next prompts meanwhile": algorithm.max_staleness
        > 0,
        "an agent is a program of its own, and waits for each of its answers": config.text_env.task
        == "agent",
    }
    found = [
        why for why, hinders in hindrances.items() if algorithm.short_rounds and hinders
    ]
    if found:
        what = "no round can end before its longest answers"
        yield _problem(
            "short-rounds",
            key,
            what,
            algorithm.short_rounds,
            "\n".join(found),
            "short_rounds: 0",
        )


def _check_accumulation(
    config: Config, placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Report `accumulate_early` where gradients need other groups, or where others use the actor's accelerators."""
    algorithm = config.algorithm
    key = "algorithm.accumulate_early"
    if not algorithm.accumulate_early or "actor" not in placement.components:
        return
    samples = (algorithm.prompts or 0) * algorithm.samples_per_prompt
    shared = [
        c
        for c in active.residency["rollout"]
        if c in placement.components and placement.shared("actor", c)
    ]
    scored = config.actor_infers or any(
        role_of(c) in ("critic", "reference", "reward") for c in config.placed
    )
    normalized = (
        algorithm.advantages_normalized
        or algorithm.normalize_rewards
        or algorithm.variant.name is not None
    )
    hindrances = {
        f"{', '.join(c for c in shared if c != 'actor')} shares its accelerators": any(
            c != "actor" for c in shared
        ),
        "with max_staleness, engines go on while the actor learns": algorithm.max_staleness
        > 0,
        "there is more than one optimizer step": algorithm.epochs > 1
        or (algorithm.train_batch or samples) < samples,
        "samples are scored after they are generated": scored,
        "advantages depend on other groups": normalized
        or algorithm.name in ("reinforce_pp", "reinforce_pp_baseline"),
        "poisoned samples are left out, which is decided of all": config.leaves_out,
    }
    found = [why for why, hinders in hindrances.items() if hinders]
    if found:
        what = "the actor cannot learn from some groups while others are generated"
        yield _problem(
            "learns-late", key, what, True, "\n".join(found), f"{key}: false"
        )


def check_names(
    allow_resident: tuple[str, ...], components: tuple[str, ...]
) -> Iterator[Problem]:
    """Report names in `cluster.allow_resident` that are not components."""
    for i, name in enumerate(allow_resident):
        if name not in components:
            near = did_you_mean(name, components)
            start = 1 + sum(len(n) + 2 for n in allow_resident[:i])
            yield Problem(
                code="unknown-component",
                key="cluster.allow_resident",
                what=f"no component is called {name!r}" + suggestion(near),
                got="[" + ", ".join(allow_resident) + "]",
                span=(start, start + len(name)),
                why="the components of this algorithm are " + ", ".join(components),
                fix="allow_resident: "
                + show([near if n == name else n for n in allow_resident])
                if near
                else None,
            )


# Batches of a plan-only job with text. No sample is dropped, and every rank gets equally many.


def check_batches(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Check that samples divide over engines, optimizer steps and micro-batches of the data-parallel replicas.

    Each fix is the nearest value with which all of these conditions hold.
    """
    prompts = config.algorithm.prompts
    per = config.algorithm.samples_per_prompt
    micro = config.actor.micro_batch
    if prompts is None:
        return
    samples = prompts * per
    batch = config.algorithm.train_batch or samples
    learning = {
        c: placement.spec(c).data_parallel
        for c in ("actor", "critic")
        if c in placement.components
    }
    engines = (
        placement.spec("rollout").num_copies if "rollout" in placement.components else 1
    )
    legal = _nearest_batch(
        samples, batch, lcm(*(copies * micro for copies in learning.values()))
    )
    unit = lcm(engines, legal)
    # Smallest number of prompts whose samples make whole units.
    whole = unit // gcd(unit, per)
    enough = -(-prompts // whole) * whole
    if samples % engines:
        what = f"{samples} samples do not divide over {engines} engines"
        why = f"{prompts} prompts x {counted(per, 'sample')} each; every engine gets equally many"
        yield _problem(
            "uneven-batches",
            "algorithm.prompts",
            what,
            prompts,
            why,
            f"prompts: {enough}",
        )
    uneven = [
        (
            f"{batch} samples do not divide over {copies} {component} copies x {micro}",
            f"each of {copies} copies takes equally many, in passes of micro_batch {micro}",
        )
        for component, copies in learning.items()
        if batch % (copies * micro)
    ]
    if samples % batch:
        what = f"{samples} samples are no whole number of batches of {batch}"
        uneven.insert(
            0, (what, f"an iteration has {samples} samples, and none is dropped")
        )
    fix = f"train_batch: {legal}" + (
        f", and prompts: {enough}" if enough != prompts else ""
    )
    for what, why in uneven:
        yield _problem("uneven-batches", "algorithm.train_batch", what, batch, why, fix)


def _nearest_batch(samples: int, batch: int, step: int) -> int:
    """Return the multiple of `step` nearest to `batch` that divides `samples`; if none does, the next multiple."""
    steps, rest = divmod(samples, step)
    low = [] if rest else [n for n in range(1, isqrt(steps) + 1) if steps % n == 0]
    whole = [step * n for divisor in low for n in (divisor, steps // divisor)]
    return min(
        whole, key=lambda n: (abs(n - batch), n), default=-(-batch // step) * step
    )


# Roles of a job with text: missing roles, contradicting roles, roles that use no accelerator.


def _check_reward_places(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    for component in (c for c in placement.components if role_of(c) == "reward"):
        block = config.reward_of(component)
        if block.kind != "model" and placement.accelerators(component):
            kind = "an endpoint" if block.kind == "url" else "a function"
            what = f"{kind} needs no accelerators"
            why = f"{component} is {kind}, which computes elsewhere or on CPUs: accelerators would wait for it"
            yield _placed(
                placement.spec(component),
                "needs-no-accelerators",
                what,
                why,
                f"{component}: cpu",
            )


def _check_critic(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    placed = "critic" in names
    critic = config.critic
    name = config.algorithm.name
    if placed and critic.on_actor:
        why = "values come from one of the two: a model of its own, or a head on the actor's trunk"
        yield _wrong(
            "critic.on_actor",
            "the critic is placed as well",
            True,
            why,
            f"remove {PLACEMENT}.critic",
        )
    valued = placed or critic.on_actor
    if config.runs and name == "ppo" and not valued:
        why = "PPO estimates advantages from a critic's values"
        heads = "        (a head on the actor's trunk)"
        fix = one_of(
            [
                f"{PLACEMENT}.critic: all",
                f"critic.on_actor: true{heads}",
                "algorithm.name: reinforce_pp",
            ]
        )
        yield _wrong(
            f"{PLACEMENT}.critic",
            "is not placed, and ppo needs values",
            None,
            why,
            fix,
            "critic-missing",
        )
    if config.runs and name != "ppo" and valued:
        key = "critic.on_actor" if critic.on_actor else f"{PLACEMENT}.critic"
        why = f"{name} compares the answers to a prompt, or all of an iteration, and needs no values"
        yield _wrong(
            key,
            f"{name} has no use for a critic",
            None,
            why,
            "algorithm.name: ppo        (or remove it)",
        )
    if critic.on_actor and critic.warmup_iterations:
        key = "critic.warmup_iterations"
        why = "a head on the actor's trunk learns with it, in the same step"
        what = "has no meaning with critic.on_actor"
        yield _wrong(key, what, critic.warmup_iterations, why, "warmup_iterations: 0")


def _check_reference(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    placed = "reference" in names
    reference = config.reference
    algorithm = config.algorithm
    every = reference.refresh_every
    kl_coef = algorithm.kl_coef
    if placed and reference.share_actor:
        why = "log-probabilities come from one of the two: a model of its own, or the actor without its factors"
        fix = f"remove {PLACEMENT}.reference"
        yield _wrong(
            "reference.share_actor", "the reference is placed as well", True, why, fix
        )
    if reference.share_actor and config.actor.lora_rank is None:
        why = "without low-rank factors the actor's weights change, and its first weights are gone"
        yield _wrong(
            "reference.share_actor",
            "the actor has no factors to leave out",
            True,
            why,
            "actor.lora_rank: 16",
        )
    if reference.share_actor and every:
        key = "reference.refresh_every"
        what = "has no meaning with reference.share_actor"
        yield _wrong(
            key,
            what,
            every,
            "shared weights never change: only the factors are trained",
            "refresh_every: 0",
        )
    if placed and every and _other_shape(config):
        why = "it takes the actor's weights, and its own model has other shapes"
        fix = "reference.model: null        (or refresh_every: 0)"
        yield _wrong(
            "reference.model", "the reference cannot become the actor", None, why, fix
        )
    if config.runs and kl_coef > 0 and not (placed or reference.share_actor):
        why = "the KL is between the actor and a reference, and there is none"
        fix = "kl_coef: 0        (or place a reference; or, with LoRA, reference.share_actor: true)"
        yield _wrong(
            "algorithm.kl_coef",
            "no reference is placed",
            kl_coef,
            why,
            fix,
            "reference-missing",
        )
    if kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        why = "its gradient is zero on average: as a loss it holds nothing back"
        fix = "kl_estimator: k2        (or k3; or kl_in: reward)"
        yield _wrong(
            "algorithm.kl_estimator", "k1 belongs into the reward", "k1", why, fix
        )
    if algorithm.kl_target is not None and kl_coef == 0:
        why = "kl_coef adapts by factors from its first value, and no factor makes 0 larger"
        yield _wrong(
            "algorithm.kl_target",
            "kl_coef is 0 and stays so",
            algorithm.kl_target,
            why,
            "kl_coef: 0.01",
        )


def _other_shape(config: Config) -> bool:
    """Return whether the reference has its own model with other weight shapes than the actor's.

    False if one of the two models is not known.
    """
    own = config.reference.model
    shared = config.model
    try:
        return (
            own is not None
            and shared is not None
            and read_model(own) != read_model(shared)
        )
    except ConfigError:  # reported for each component when its memory is counted
        return False


def _check_rewards(config: Config, names: Sequence[str]) -> Iterator[Problem]:
    components = [c for c in names if role_of(c) == "reward"]
    own = [c.partition(".")[2] for c in components]
    if not isinstance(config.reward, RewardConfig):
        if "reward" in names:
            key = f"{PLACEMENT}.reward"
            why = f"reward has one block for each name: {', '.join(config.reward)}"
            yield _wrong(
                key,
                "no block is its own",
                None,
                why,
                "reward.<name>: ...        (and a block reward.<name>)",
            )
        for name in (name for name in config.reward if name not in own):
            near = did_you_mean(name, own)
            why = "placed are " + (", ".join(components) or "no rewards")
            fix = (
                f"{near}: ..."
                if near
                else f"{PLACEMENT}: {{reward.{name}: ...}}        (or remove the block)"
            )
            what = "no such component is placed" + suggestion(near)
            yield _wrong(f"reward.{name}", what, None, why, fix, "unknown-component")
    for component in components:
        block = config.reward_of(component)
        key = config.key_of(component)
        if block.function is not None and block.url is not None:
            why = "a reward is a model, a function or an endpoint"
            yield _wrong(
                f"{key}.url",
                "the reward has a function as well",
                block.url,
                why,
                f"remove {key}.function",
            )


def _wrong(
    key: str,
    what: str,
    value: object,
    why: str,
    fix: str,
    code: str = "roles-contradict",
) -> Problem:
    return _problem(code, key, what, value, why, fix)


# Partner components, and placements that work but waste accelerators.


def check_partners(placement: HybridComponentPlacement) -> Iterator[Problem]:
    """Report partners that share accelerators although neither number of ranks divides the other."""
    for partner, leader in _partners(placement):
        ranks = placement.world_size(partner)
        others = placement.world_size(leader)
        if ranks % others and others % ranks:
            what = f"{ranks} {partner} ranks and {others} {leader} ranks share accelerators"
            why = f"{partner} scores the rows of {leader}; they stay in place where one number divides the other"
            fix = f"{partner}: {{same_as: {leader}}}"
            yield _placed(placement.spec(partner), "uneven-partners", what, why, fix)


def find_waste(placement: HybridComponentPlacement) -> Iterator[Problem]:
    """Report unused accelerators and model copies wider than a node. These are warnings of any plan."""
    yield from _find_idle(placement)
    yield from _find_wide_copies(placement)


def find_waste_of_simulators(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report placements of a job on simulators that leave accelerators idle or waiting."""
    yield from find_waste(placement)
    yield from _find_uneven(config, placement)


def find_waste_of_roles(
    placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Report placements of language-model roles that leave accelerators idle or waiting."""
    yield from find_waste(placement)
    for partner, leader in _partners(placement):
        if placement.relation(partner, leader) != COLLOCATED:
            mine = len(placement.accelerators(partner))
            theirs = len(placement.accelerators(leader))
            shared = len(placement.shared(partner, leader))
            what = f"{partner} is on {mine} accelerators, {leader} on {theirs}, {shared} of them shared"
            why = "libraries that colocate the two ask for the same number; here it works, and some wait"
            fix = f"{partner}: {{same_as: {leader}}}"
            yield _placed(placement.spec(partner), "unequal-partners", what, why, fix)
    both = {"actor", "rollout"} <= {*placement.components}
    if both and placement.shared("actor", "rollout"):
        yield from _find_idle_beside_engines(placement, active)


def find_overstated(nodes: Sequence[NodeConfig]) -> Iterator[Problem]:
    """Report declared accelerators with more memory than their product has. These are warnings of a plan."""
    for number, node in enumerate(nodes):
        key = f"cluster.nodes[{number}]"
        mixed = [
            (f"{key}.mixed[{i}]", run.product, run.memory)
            for i, run in enumerate(node.mixed)
        ]
        for place, product, memory in [(key, node.product, node.memory), *mixed]:
            if 0 < (known := memory_of(product)) < memory:
                gib = f"{known / (1 << 30):.1f}GiB"
                what = f"is more than CUDA gives of one {product}"
                why = f"that is {gib}: the driver keeps its part of what is sold; the plan counts with what is written"
                got = f"memory: {show_bytes(memory)}"
                yield Problem(
                    code="memory-overstated",
                    key=f"{place}.memory",
                    what=what,
                    got=got,
                    why=why,
                    fix=f"memory: {gib}",
                )


def _partners(placement: HybridComponentPlacement) -> list[tuple[str, str]]:
    """Return pairs (scorer, component whose rows it scores) that share accelerators."""
    return [
        (a, b)
        for partner, leader in PARTNERS.items()
        for a in placement.components
        for b in placement.components
        if role_of(a) == partner and role_of(b) == leader and placement.shared(a, b)
    ]


def _find_idle_beside_engines(
    placement: HybridComponentPlacement, active: Needs
) -> Iterator[Problem]:
    """Report accelerators of the actor that no component uses while engines generate."""
    busy = Ranges(())
    for component in placement.components:
        if component != "actor" and active.of("rollout", component) > Residency.OFF:
            busy |= placement.accelerators(component)
    spec = placement.spec("rollout")
    pool = placement.accelerators("actor")
    used = placement.accelerators("rollout")
    if idle := pool - busy:
        size = spec.accelerators_per_copy
        near = min(
            (n for n in range(1, len(pool) + 1) if len(pool) % n == 0),
            key=lambda n: (abs(n - size), n),
        )
        sized = f", tensor_parallel_size: {near}" if near > 1 else ""
        what = (
            f"no component uses accelerators {idle} of the actor while engines generate"
        )
        count = f"{len(used) // size} engines x {size} = {len(used)} accelerators"
        why = f"{count}, and the actor has {len(pool)}; libraries that colocate the two ask for the same number"
        fix = f"rollout: {{same_as: actor{sized}}}        ({len(pool) // near} engines x {near} = {len(pool)})"
        yield _placed(spec, "engines-leave-idle", what, why, fix)


def _find_idle(placement: HybridComponentPlacement) -> Iterator[Problem]:
    """Report accelerators that no component uses."""
    if idle := placement.topology.all - placement.used:
        what = f"no component uses {plural(len(idle), 'accelerator')} {idle}"
        them = "it" if len(idle) == 1 else "them"
        fix = f"give {them} to a component, or plan a smaller cluster"
        yield _problem(
            "idle-accelerators",
            PLACEMENT,
            what,
            None,
            f"this cluster has {placement.topology.describe()}",
            fix,
        )


def _find_wide_copies(placement: HybridComponentPlacement) -> Iterator[Problem]:
    """Report tensor parallelism across nodes where the config allows it: every layer then waits for the network."""
    for component in placement.components:
        spec = placement.spec(component)
        node = max(placement.topology.nodes, key=lambda n: n.accelerators)
        size = spec.parallel.tensor_parallel_size
        if size > node.accelerators:
            what = f"{component}: a copy over {size} accelerators leaves its node, which has {node.accelerators}"
            why = "the sums of every layer cross the network"
            if node.network_gb_per_s and node.nvlink_gb_per_s:
                slower = node.nvlink_gb_per_s / node.network_gb_per_s
                why += f" at {node.network_gb_per_s:g} GB/s, {slower:.3g} times slower than NVLink between accelerators"
            fix = f"tensor_parallel_size: {node.accelerators}        (where the model fits)"
            yield _placed(spec, "tensor-parallel-leaves-node", what, why, fix)


def _find_uneven(
    config: Config, placement: HybridComponentPlacement
) -> Iterator[Problem]:
    """Report ranks of a job with simulators that get fewer rows than others."""
    envs = config.simulator_env.total_num_envs
    groups = config.torch_rollout.pipeline_stage_num
    for component, rows in (("rollout", envs // groups), ("actor", envs)):
        ranks = placement.world_size(component)
        most = -(-rows // ranks)
        if rows % ranks:
            even = lcm(
                groups * placement.world_size("env"),
                ranks * (groups if component == "rollout" else 1),
            )
            what = f"some {component} ranks get {most} rows, others {most - 1}"
            lost = f"{1 - rows / (ranks * most):.0%} of their time is lost"
            why = f"{rows} rows over {ranks} {component} ranks; all wait for the fullest, {lost}"
            yield _problem(
                "uneven-shares",
                _ENVS,
                what,
                envs,
                why,
                f"total_num_envs: {-(-envs // even) * even}",
            )


def _problem(
    code: str, key: str, what: str, value: object, why: str, fix: str
) -> Problem:
    """Return a problem about the value of one key. `value` None: the key is not written in the config."""
    got = None if value is None else f"{key.rpartition('.')[2]}: {show(value)}"
    return Problem(code=code, key=key, what=what, got=got, why=why, fix=fix)


def _placed(spec: ComponentSpec, code: str, what: str, why: str, fix: str) -> Problem:
    """Return a problem about a component's line in the placement."""
    return Problem(code=code, key=spec.key, what=what, got=spec.text, why=why, fix=fix)
