"""Which kind of model the actor trains, from the tags that a config writes; every tag must go with the others."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping

from rlplace.config.fields import ModelKind
from rlplace.config.schema import AlgorithmName
from rlplace.errors import did_you_mean, suggestion

# Tag -> its values and the kind of actor model that each goes with.
TAGS: Mapping[str, Mapping[str, ModelKind]] = {
    "actor.model.kind": {"mlp": "mlp", "causal_lm": "causal_lm"},
    "env.kind": {"gymnasium": "mlp", "text": "causal_lm"},
    "rollout.engine": {"torch": "mlp", "transformers": "causal_lm", "vllm": "causal_lm"},
}
MODEL_KEYS = ("path", "model_type")  # either is in every language model
_OWN = "package.module:Class"  # an adapter of the user's


Reject = Callable[..., object]  # (code, key, what, value, why=, fix=): records a problem


def find_kind(mapping: Mapping[str, object], reject: Reject) -> tuple[ModelKind, Mapping[str, object]]:
    """Return the kind of the job, and the mapping without the tags that were rejected.

    The first tag that is written decides, and keys of a language model count as its tag. Without one, an algorithm
    that only language models have decides; else it is a job with simulators.
    """
    written: dict[str, ModelKind] = {}
    for tag, values in TAGS.items():
        value = value_at(mapping, tag)
        if value is None:
            continue
        if tag == "env.kind" and isinstance(value, str) and ":" in value:
            written[tag] = "mlp"
        elif isinstance(value, str) and value in values:
            written[tag] = values[value]
        else:
            near = did_you_mean(str(value), values)
            choices = ", ".join([*values, _OWN] if tag == "env.kind" else values)
            what = "unknown choice" + suggestion(near)
            fix = f"{_leaf(tag)}: {near or next(iter(values))}"
            reject("unknown-choice", tag, what, value, why=f"choices: {choices}", fix=fix)
            mapping = _without(mapping, tag)
    model, name = value_at(mapping, "actor.model"), value_at(mapping, "algorithm.name")
    if "actor.model.kind" not in written and isinstance(model, Mapping) and {*MODEL_KEYS} & model.keys():
        written["actor.model"] = "causal_lm"
    of_text = name in typing.get_args(AlgorithmName) and name != "ppo"
    deciding = next(iter(written), None)
    kind: ModelKind = written[deciding] if deciding is not None else "causal_lm" if of_text else "mlp"
    for tag, of in written.items():
        if of != kind and tag in TAGS:
            fits = [value for value, k in TAGS[tag].items() if k == kind][-1]
            reject(
                "wrong-kind",
                tag,
                f"does not go with {deciding}: {value_at(mapping, deciding or tag)}",
                value_at(mapping, tag),
                why=f"it is for actor.model.kind: {of}; this job has {kind}",
                fix=f"{_leaf(tag)}: {fits}",
            )
            mapping = _without(mapping, tag)
    if of_text and kind == "mlp":
        why = f"{name} compares answers of a language model; actor.model.kind is mlp"
        reject("wrong-kind", "algorithm.name", "does not train an MLP", name, why=why, fix="name: ppo")
        mapping = _without(mapping, "algorithm.name")
    if kind == "mlp":
        return kind, mapping
    return kind, {role: _untagged(block, role, reject) for role, block in mapping.items()}


def _untagged(block: object, key: str, reject: Reject) -> object:
    """Return a component's block with its language model as a mapping of keys alone; a tag alone is no model."""
    if not isinstance(block, Mapping):
        return block
    model = block.get("model")
    if isinstance(model, Mapping):
        kind = model.get("kind")
        if kind not in (None, "causal_lm"):
            code = "wrong-kind" if kind == "mlp" else "unknown-choice"
            why = "every model of a job with a language model is one"
            reject(code, f"{key}.model.kind", "is no kind of this model", kind, why=why, fix="kind: causal_lm")
        return {**block, "model": {name: value for name, value in model.items() if name != "kind"} or None}
    if key != "reward":
        return block
    named = {name: _untagged(below, f"reward.{name}", reject) for name, below in block.items() if name != "kwargs"}
    return {**block, **named}


def value_at(mapping: Mapping[str, object], path: str) -> object:
    value: object = mapping
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _without(mapping: Mapping[str, object], path: str) -> Mapping[str, object]:
    key, _, below = path.partition(".")
    if not below:
        return {k: v for k, v in mapping.items() if k != key}
    block = mapping.get(key)
    return {**mapping, key: _without(block, below)} if isinstance(block, Mapping) else mapping


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
