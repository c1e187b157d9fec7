"""Rules of the positions that models know: a model that only reads may know fewer than prompts and answers have.

The rules of engines have the one about the model that generates. Rotary positions beyond the known ones raise no error:
the scores of a reward model, or the loss of written answers, are then of texts that the model has never learned to
read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rlplace.checks.rule import Found, Rule, broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.blocks.training import AlgorithmConfig
from rlplace.config.model_folder import text_keys
from rlplace.errors import Problem

# Components with models that read prompts with answers, and generate none
_READERS = ("actor", "critic", "reference", "teacher", "reward")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadingModel:
    """The model of a component: the content of its config.json, and the algorithm with the lengths that it has to read.

    `key`: config key of the component's block.
    """

    key: str
    model: Mapping[str, object]
    algorithm: AlgorithmConfig


def position_problems(
    config: LanguageModelJobConfig, components: Sequence[str], *, generates: bool
) -> Iterator[Problem]:
    """Yield a problem for each component whose model knows fewer positions than a prompt and its answer have.

    `components`: names of the placed components. `generates`: whether an engine generates with the actor's model, so
    that the rules of engines are about it.
    """
    for component in components:
        role = component.partition(".")[0]
        if role not in _READERS or (role == "actor" and generates):
            continue
        model = getattr(config.block_of(component), "model", None)
        if not isinstance(model, Mapping):
            # The model of the actor
            continue
        case = ReadingModel(
            key=config.key_of(component),
            model=text_keys(model),
            algorithm=config.algorithm,
        )
        yield from broken(RULES, case)


def beyond_positions(
    key: str, model: Mapping[str, object], algorithm: AlgorithmConfig
) -> Iterator[Found]:
    """Yield a finding if a prompt and its answer may have more tokens together than a model knows positions.

    `key`: config key of the finding. `model`: the content of the model's config.json.
    """
    longest = model.get("max_position_embeddings")
    if not isinstance(longest, int) or algorithm.longest <= longest:
        return
    prompt = algorithm.max_prompt_length
    answer = algorithm.max_new_tokens
    if prompt + answer <= longest:
        error = "sequence_length"
    elif algorithm.sequence_length is not None:
        error = "all-lengths"
    elif prompt < longest:
        error = "longer-answers"
    else:
        error = "longer-prompts"
    # Lengths that fit: a shorter answer, or half of the room for prompts that leave none
    if prompt >= longest:
        prompt = longest - min(answer, longest // 2)
    yield Found(
        key=key,
        got=f"{algorithm.longest} tokens of prompt and answer together",
        error=error,
        facts={
            "longest": longest,
            "prompt": prompt,
            "answer": min(answer, longest - prompt),
        },
    )


def _beyond_positions(case: ReadingModel) -> Iterator[Found]:
    yield from beyond_positions(f"{case.key}.model.path", case.model, case.algorithm)


RULES: tuple[Rule[ReadingModel], ...] = (
    Rule(code="context-too-long", facts=_beyond_positions),
)
