"""Rules of parallel sizes: of engines, and of models that are divided between ranks.

An engine is one rank and may have several accelerators. Ranks of all other components have one accelerator each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlplace.checks.parallel import undivided
from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.language_model import FrozenConfig
from rlplace.config.blocks.training import TrainedConfig
from rlplace.errors import one_of
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.placement.language.spec import ComponentSpec, role_of

# Model families that transformers can split by heads and columns (tensor parallel), without a bias on the summed
# outputs.
CUT_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_CUT_EVENLY = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_WHOLE = "no tensor_parallel_size        (ranks then share the state by FSDP)"


def _accelerators_per_rank(spec: ComponentSpec) -> int:
    sizes = [segment.accelerators_per_rank for segment in spec.segments]
    return max(sizes, default=1)


def _has_a_model(spec: ComponentSpec) -> bool:
    return role_of(spec.name) not in ("rollout", "env", "agent")


def _divided(case: PlannedJob) -> Iterator[ComponentSpec]:
    """Yield the placement of each component that divides its model between ranks with one accelerator each.

    Env and rollout are left out.
    """
    for spec in case.specs:
        several = spec.parallel.ranks > 1 and _accelerators_per_rank(spec) == 1
        if several and _has_a_model(spec):
            yield spec


def _model_of(case: PlannedJob, component: str) -> Mapping[str, object]:
    """Return the config.json of a component's model. A component without its own model uses the actor's model."""
    block = case.config.block_of(component)
    if isinstance(block, TrainedConfig):
        return block.language_model or case.model
    return getattr(block, "model", None) or case.model


# ── ranks without a model ────────────────────────────────────────────────────────────────────────────────────────────


def _divided_env(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if env has a parallel size above 1. Env has no model that could be divided."""
    yield from undivided(case.plan.placement.spec("env"), error="no-model")


ENV = (Rule(code="parallel-sizes", facts=_divided_env),)


# ── engines, and ranks with several accelerators ─────────────────────────────────────────────────────────────────────


def _engine_of_several(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding if the rollout engine does not support the way in which several accelerators share a copy.

    Not supported: context parallelism, an engine of several ranks, and several accelerators without vLLM.
    """
    if "rollout" not in case.plan.placement.components:
        return
    spec = case.plan.placement.spec("rollout")
    engine = case.config.rollout.engine
    sizes = {segment.accelerators_per_rank for segment in spec.segments}
    most = max(sizes, default=1)
    tensor = spec.parallel.tensor_parallel_size
    context = spec.parallel.context_parallel_size
    if context > 1:
        error = "context-parallel-engine"
    elif tensor > 1 and sizes != {tensor}:
        error = "ranks-of-one-engine"
    elif engine != "vllm" and most > 1:
        error = "accelerators-of-one-engine"
    else:
        return
    yield Found(
        key=spec.key,
        got=spec.text,
        error=error,
        facts={"context": context, "tensor": tensor, "most": most, "engine": engine},
    )


def _accelerators_of_one_rank(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each trained component or scorer with ranks of several accelerators."""
    for spec in case.specs:
        most = _accelerators_per_rank(spec)
        if _has_a_model(spec) and most > 1:
            yield Found(
                key=spec.key,
                got=spec.text,
                error="accelerators-of-one-rank",
                facts={"most": most},
            )


# ── a model by heads and columns ─────────────────────────────────────────────────────────────────────────────────────


def _cut(
    case: PlannedJob,
) -> Iterator[tuple[ComponentSpec, Mapping[str, object]]]:
    """Yield (placement, config.json of the model) of each tensor-parallel component.

    Tensor parallelism cuts layers by attention heads and by columns of matrices.
    """
    for spec in _divided(case):
        if spec.parallel.tensor_parallel_size > 1:
            yield spec, _model_of(case, spec.name)


def _family_not_cut(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each tensor-parallel component with a model family that cannot be tensor-parallel."""
    for spec, model in _cut(case):
        family = model.get("model_type")
        if family is not None and family not in CUT_FAMILIES:
            families = ", ".join(sorted(CUT_FAMILIES))
            yield Found(
                key=spec.key,
                got=spec.text,
                error="family",
                facts={"family": family, "families": families},
            )


def _biases(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each tensor-parallel component with biases on outputs that are summed over ranks.

    Each rank would add the bias to the sum.
    """
    for spec, model in _cut(case):
        family = model.get("model_type")
        keys = [key for key in ("attention_bias", "mlp_bias") if model.get(key)]
        cut = family is None or family in CUT_FAMILIES
        # Biases of Qwen2 are on queries, keys and values, which are not summed.
        if keys and cut and family != "qwen2":
            yield Found(
                key=spec.key, got=spec.text, error="biases", facts={"bias": keys[0]}
            )


def _uneven_layers(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each tensor-parallel component with heads or columns that cannot be divided evenly."""
    for spec, model in _cut(case):
        size = spec.parallel.tensor_parallel_size
        parts: dict[str, int] = {}
        for key in _CUT_EVENLY:
            number = model.get(key)
            if isinstance(number, int) and number > 0:
                parts[key] = number
        uneven = [f"{key}: {n}" for key, n in parts.items() if n % size]
        if not uneven:
            continue
        yield Found(
            key=spec.key,
            got=spec.text,
            error="copy",
            facts={
                "size": size,
                "uneven": ", ".join(uneven),
                "remedy": _even_sizes(spec, parts),
            },
        )


def _even_sizes(spec: ComponentSpec, parts: Mapping[str, int]) -> str:
    """Return config text with the next smaller and the next larger tensor-parallel size that fit the model.

    A size fits if it divides the component's accelerators and all numbers in `parts` evenly. `parts`: key in the
    model's config.json -> number of heads, columns or tokens.
    """
    total = len(spec.accelerators)
    size = spec.parallel.tensor_parallel_size
    below = 1
    above = None
    for n in range(1, total + 1):
        even = total % n == 0 and all(number % n == 0 for number in parts.values())
        if even and n < size:
            below = n
        if even and n > size and above is None:
            above = n
    lines = [_WHOLE]
    if below > 1:
        lines = [f"tensor_parallel_size: {below}"]
    if above is not None:
        lines.append(f"tensor_parallel_size: {above}")
    if len(lines) == 1:
        return lines[0]
    return one_of(lines)


def _copies_on_host(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each tensor-parallel reference or reward that keeps weights of several copies on the host."""
    for spec, _ in _cut(case):
        block = case.config.block_of(spec.name)
        if not isinstance(block, FrozenConfig) or spec.num_copies == 1:
            continue
        if block.on_host and not block.sharded:
            yield Found(
                key=spec.key,
                got=spec.text,
                error="copies-on-host",
                facts={"block": case.config.key_of(spec.name)},
            )


# ── tokens of a sample ───────────────────────────────────────────────────────────────────────────────────────────────


def _uneven_exchange(case: PlannedJob) -> Iterator[Found]:
    """Yield a finding for each component with numbers of heads that do not allow its context-parallel size.

    In attention, context-parallel ranks exchange tokens for heads. Each rank needs the same number of query heads. If
    there are fewer key heads than ranks, key heads are copied.
    """
    for spec in _divided(case):
        model = _model_of(case, spec.name)
        tensor = spec.parallel.tensor_parallel_size
        size = spec.parallel.context_parallel_size
        heads = model.get("num_attention_heads")
        keys = model.get("num_key_value_heads") or heads
        if size == 1 or not isinstance(heads, int) or not isinstance(keys, int):
            continue
        queries = max(1, heads // tensor)
        keys = max(1, keys // tensor)
        if _exchanged(queries, keys, size):
            continue
        # The largest smaller size that divides the copies and can be exchanged
        near = 1
        for n in range(1, size):
            if spec.num_copies % n == 0 and _exchanged(queries, keys, n):
                near = n
        yield Found(
            key=spec.key,
            got=spec.text,
            facts={"queries": queries, "keys": keys, "size": size, "near": near},
        )


def _exchanged(queries: int, keys: int, ranks: int) -> bool:
    """Return whether `ranks` context-parallel ranks can share the heads evenly.

    `queries`, `keys`: numbers of query heads and key heads of one tensor-parallel rank.
    """
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


RULES: tuple[Rule[PlannedJob], ...] = (
    Rule(code="plan-only", facts=_engine_of_several),
    Rule(code="plan-only", facts=_accelerators_of_one_rank),
    Rule(code="tensor-parallel-family", facts=_family_not_cut),
    Rule(code="tensor-parallel-family", facts=_biases),
    Rule(code="tensor-parallel-heads", facts=_uneven_layers),
    Rule(code="plan-only", facts=_copies_on_host),
    Rule(code="context-parallel-heads", facts=_uneven_exchange),
)
