"""The JSON Schema of the config: what ships is valid, what the reader refuses is refused, every key is explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from rlplace.config.fields import JobName, fields_of, jobs
from rlplace.config.of_job import config_of
from rlplace.config.validate import config_schema

SCHEMA = config_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
RUN = {
    "cluster": {"component_placement": {"actor": "0-7"}},
    "env": {"id": "CartPole-v1"},
}
LLM = {"cluster": {"component_placement": {"actor": "0-7"}}, "env": {"kind": "text"}}


def with_value(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {
        **base,
        first: with_value(base.get(first, {}), rest, value) if rest else value,
    }


def problems(config: object) -> list[str]:
    return [".".join(map(str, e.path)) for e in VALIDATOR.iter_errors(config)]


def test_the_schema_is_one() -> None:
    jsonschema.validators.validator_for(SCHEMA).check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("base", "path", "value"),
    [
        (RUN, "actor.compute", "bf16"),
        (RUN, "cluster.accelerators_per_node", "auto"),
        (RUN, "cluster.accelerator.memory", "16GiB"),
        (RUN, "cluster.nodes", [{"count": 6, "accelerators": 8, "memory": "80GiB"}]),
        (RUN, "cluster.elastic", "advise"),
        (RUN, "cluster.elastic", True),
        (RUN, "cluster.elastic", {"mode": "on", "every": 5}),
        (RUN, "env.max_episode_steps", None),
        (RUN, "algorithm.gamma", "${other.gamma}"),
        (RUN, "actor.model.hidden", [64, 64]),
        (RUN, "actor.model", {"kind": "cnn", "network": "impala"}),
        (RUN, "defaults", ["_self_"]),
        (LLM, "critic.lora_rank", 8),
        (LLM, "reward.url", "http://localhost:1"),
        (LLM, "reward.math.function", "numeric"),
        (LLM, "actor.model.model_type", "llama"),
        (LLM, "reward.model.kind", "causal_lm"),
    ],
)
def test_what_the_reader_takes_is_valid(
    base: dict[str, Any], path: str, value: object
) -> None:
    assert problems(with_value(base, path, value)) == []


@pytest.mark.parametrize(
    ("base", "path", "value", "where"),
    [
        (RUN, "actr", {}, ""),
        (RUN, "actor.compuet", "bf16", "actor"),
        (RUN, "actor.compute", "fp8", "actor.compute"),
        (RUN, "actor.lora_rank", 8, "actor"),
        (RUN, "actor.model.hidden", [0], "actor.model"),
        (RUN, "algorithm.gamma", 1.5, "algorithm.gamma"),
        (RUN, "actor.optimizer.beta1", 1, "actor.optimizer.beta1"),
        (RUN, "cluster.accelerator.memory", "16 gigs", "cluster.accelerator.memory"),
        (RUN, "cluster.accelerators_per_node", "all", "cluster.accelerators_per_node"),
        (RUN, "cluster.nodes", [{"acelerators": 8}], "cluster.nodes.0"),
        (RUN, "cluster.elastic", "auto", "cluster.elastic"),
        (RUN, "cluster.elastic", {"evry": 5}, "cluster.elastic"),
        (LLM, "env.id", "CartPole-v1", "env"),
        (LLM, "critic.zero_stage", 4, "critic.zero_stage"),
        (LLM, "reward.math.weight", "heavy", "reward"),
    ],
)
def test_what_the_reader_refuses_is_refused(
    base: dict[str, Any], path: str, value: object, where: str
) -> None:
    assert problems(with_value(base, path, value)) == [where]


def knobs(
    block: type, job: JobName, path: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for name, (field, hint) in fields_of(block, job).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from knobs(hint, job, f"{path}{name}.")
        else:
            yield f"{path}{name}", field


@pytest.mark.parametrize("job", jobs())
def test_editors_show_what_every_key_means(job: JobName) -> None:
    for path, field in knobs(config_of(job), job):
        schema: dict[str, Any] = SCHEMA["$defs"][f"{config_of(job).__name__}_{job}"]
        for name in path.split("."):
            schema = schema["properties"][name]
            schema = (
                SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
                if "$ref" in schema
                else schema
            )
        assert schema["description"] == field.metadata["doc"], path
        default = field.metadata.get(job, field.default)
        shown = default is not dataclasses.MISSING and not isinstance(default, tuple)
        if (
            shown and path != "actor.model"
        ):  # which is one of several blocks, each with its own
            assert schema["default"] == default
