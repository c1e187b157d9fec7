"""Find the kind of job that a config describes, by keys and values of its blocks.

No other module does this: all others get the name of the job as a value, or call methods of the job.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from rlplace.config.blocks.training import AlgorithmName
from rlplace.config.fields import JobName, subject_of
from rlplace.config.found import Found, drop, value_at
from rlplace.config.keys import all_places
from rlplace.config.other_names import meant_word

# The job of a config without marks, and the job that has marks (keys or values that only it uses).
USUAL: JobName = "simulator"
MARKED: JobName = "language_model"
# Tag (a key that selects a kind) -> its value -> the job that has it.
TAGS: Mapping[str, Mapping[str, JobName]] = {
    "actor.model.kind": {
        **dict.fromkeys(("cnn", "transformer", "vla", "module", "mlp"), USUAL),
        "causal_lm": MARKED,
    },
    "env.kind": {
        "gymnasium": USUAL,
        "envpool": USUAL,
        "pettingzoo": USUAL,
        "text": MARKED,
    },
    "rollout.engine": {"torch": USUAL, "transformers": MARKED, "vllm": MARKED},
}
MODEL_KEYS = ("path", "model_type")  # every language model has one of these keys
_OWN = "package.module:Class"  # a custom adapter or engine
# Tags whose values may be custom names -> the job of such a value.
_OWN_TAGS: Mapping[str, JobName] = {"env.kind": USUAL, "rollout.engine": MARKED}
# The algorithm that both jobs have; all others compare answers of language models
_USUAL_ALGORITHM = "ppo"


def find_job(mapping: dict[str, Any], found: Found) -> JobName:
    """Return the kind of job that a config describes, and report contradictions to `found`.

    A tag is a key such as `env.kind`: each of its values belongs to one kind of job. The first tag in the order of TAGS
    that the config sets decides. The keys `actor.model.path` and `actor.model.model_type` also decide for a language
    model. If no tag is set, the algorithm decides: some algorithms exist for language models only. Otherwise, the job
    is a job on simulators. `mapping`: the config; wrong tags, and `model.kind` of language models, are removed.
    """
    written = _written_tags(mapping, found)
    name = value_at(mapping, "algorithm.name")
    deciding = next(iter(written), None)
    # The algorithm compares answers: known by its name, or an unknown name beside keys of language models.
    names = typing.get_args(AlgorithmName)
    compares = (meant_word(name, names) or name) in _comparing()
    if deciding is None and isinstance(name, str) and name not in names:
        compares = compares or has_marked_keys(mapping)
    if deciding is not None:
        job = written[deciding]
    elif compares:
        job = MARKED
    else:
        job = USUAL
    # Reject tags that belong to another job than the first tag.
    for tag, of in written.items():
        if of != job and tag in TAGS:
            fits = [value for value, goes in TAGS[tag].items() if goes == job][-1]
            found.reject(
                "wrong-kind",
                tag,
                value_at(mapping, tag),
                error="other-tag",
                deciding=deciding,
                decided=value_at(mapping, deciding or tag),
                theirs=subject_of(of),
                ours=subject_of(job),
                leaf=tag.rpartition(".")[2],
                fits=fits,
            )
            drop(mapping, tag)
    if compares and job == USUAL:
        found.reject(
            "wrong-kind",
            "algorithm.name",
            name,
            error="algorithm",
            name=name,
            choices=_USUAL_ALGORITHM,
        )
        drop(mapping, "algorithm.name")
    if job == MARKED:
        for role, block in mapping.items():
            _drop_tag(block, role, found)
    return job


def _written_tags(mapping: dict[str, Any], found: Found) -> dict[str, JobName]:
    """Return tag -> kind of job, for each tag that a config sets. Tags with invalid values are reported and removed.

    A tag is a key such as `env.kind`: each of its values belongs to one kind of job. `found`: collects the problems.
    """
    written: dict[str, JobName] = {}
    for tag, values in TAGS.items():
        value = value_at(mapping, tag)
        if value is None:
            continue
        if tag in _OWN_TAGS and isinstance(value, str) and ":" in value:
            written[tag] = _OWN_TAGS[tag]
        elif isinstance(value, str) and value in values:
            written[tag] = values[value]
        else:
            near = meant_word(value, values)
            choices = ", ".join([*values, _OWN] if tag in _OWN_TAGS else values)
            found.reject(
                "unknown-choice",
                tag,
                value,
                error="tag" if near is None else "misspelt-tag",
                choices=choices,
                near=near,
                leaf=tag.rpartition(".")[2],
            )
            if near is None:
                drop(mapping, tag)
            else:
                # Keys beside it belong to the kind that is meant
                above, _, leaf = tag.rpartition(".")
                block = value_at(mapping, above)
                if isinstance(block, dict):
                    block[leaf] = near
                written[tag] = values[near]
    model = value_at(mapping, "actor.model")
    tagged = "actor.model.kind" in written
    if not tagged and isinstance(model, Mapping) and {*MODEL_KEYS} & model.keys():
        written["actor.model"] = MARKED
    return written


def _comparing() -> tuple[str, ...]:
    """Return the names of the algorithms for language models only: they compare several answers to a prompt."""
    names: tuple[str, ...] = typing.get_args(AlgorithmName)
    return tuple(name for name in names if name != _USUAL_ALGORITHM)


def marks() -> dict[str, list[str]]:
    """Return config key -> values that show that a config describes a job on language models."""
    found = {
        tag: [value for value, job in values.items() if job == MARKED]
        for tag, values in TAGS.items()
    }
    found["algorithm.name"] = list(_comparing())
    return found


def has_marked_keys(mapping: Mapping[str, object]) -> bool:
    """Return whether a config sets keys that exist only in jobs on language models."""
    only = {*all_places(MARKED)} - {*all_places(USUAL)}
    blocks = {
        name: block for name, block in mapping.items() if isinstance(block, Mapping)
    }
    return any(
        f"{name}.{key}" in only for name, block in blocks.items() for key in block
    )


def _drop_tag(block: object, key: str, found: Found) -> None:
    """Remove the key `kind` from the model in a component's block. A model without further keys becomes None.

    `key`: config key of the block. `found`: collects a problem if the kind is not that of a language model.
    """
    if not isinstance(block, dict):
        return
    model = block.get("model")
    if isinstance(model, dict):
        kind = model.pop("kind", None)
        if kind not in (None, "causal_lm"):
            found.reject(
                "wrong-kind" if kind == "mlp" else "unknown-choice",
                f"{key}.model.kind",
                kind,
                error="kind-of-model",
            )
        block["model"] = model or None
    elif key == "reward":
        for name, below in block.items():
            if name != "kwargs":
                _drop_tag(below, f"reward.{name}", found)
