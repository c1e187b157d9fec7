"""Reads what clients send: JSON objects, data of passes, sampling parameters. Errors are texts for the client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlplace.algo.served_losses import INPUTS, SETTINGS, ServedLoss
from rlplace.json_text import parsed_object
from rlplace.tokens import Sampling, Tokens
from rlplace.workers.serving.book import ServedModel, Wrong
from rlplace.workers.serving.messages import Datum, OptimizerStep, Pass
from rlplace.workers.serving.wire import DatumMessage, PassMessage

# Most answers to one request
MOST_SAMPLES = 1024
# Most stop texts or tokens of one request
_MOST_STOPS = 64
# From texts that end an answer: (token ids, texts) as engines take them
Stops = Callable[[Sequence[str]], tuple[tuple[int, ...], tuple[str, ...]]]


class Given:
    """A JSON object that a client has sent. All methods raise Wrong for a value of another type."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    @classmethod
    def of(cls, body: bytes) -> Given:
        try:
            return cls(parsed_object(body))
        except ValueError as error:
            raise Wrong(f"the body is no JSON object: {error}") from error

    def text(self, name: str) -> str:
        found = self.text_or_none(name)
        if found is None:
            raise Wrong(f"{name} is missing")
        return found

    def text_or_none(self, name: str) -> str | None:
        found = self._content.get(name)
        if found is not None and not isinstance(found, str):
            raise Wrong(f"{name} is a text, not {found!r}")
        return found

    def whole(self, name: str, default: int | None = None) -> int:
        found = self._content.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int):
            raise Wrong(f"{name} is a whole number, not {found!r}")
        return found

    def whole_or_none(self, name: str) -> int | None:
        if self._content.get(name) is None:
            return None
        return self.whole(name)

    def number(self, name: str, default: float) -> float:
        found = self._content.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise Wrong(f"{name} is a number, not {found!r}")
        if not math.isfinite(found):
            raise Wrong(f"{name} is finite, not {found!r}")
        return float(found)

    def flag(self, name: str) -> bool:
        found = self._content.get(name)
        if found is not None and not isinstance(found, bool):
            raise Wrong(f"{name} is true or false, not {found!r}")
        return bool(found)

    def part(self, name: str) -> Given:
        found = self._content.get(name)
        if not isinstance(found, dict):
            raise Wrong(f"{name} is an object, not {found!r}")
        return Given(found)

    def value(self, name: str) -> Any:
        return self._content.get(name)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pass_of(message: PassMessage, served: ServedModel) -> Pass:
    """Return the command for a pass. Raises Wrong."""
    loss = message.loss
    if loss not in INPUTS:
        raise Wrong(f"the losses here are {', '.join(INPUTS)}; there is no {loss!r}")
    if not message.data:
        raise Wrong("there are no data")
    settings = dict[str, float]()
    for name, default in SETTINGS[loss].items():
        value = message.settings.get(name, default)
        if not isinstance(value, float) or not math.isfinite(value):
            raise Wrong(f"loss_fn_config of {loss}: {name} is a number, not {value!r}")
        settings[name] = value
    unknown = sorted(message.settings.keys() - settings.keys())
    if unknown:
        raise Wrong(f"loss_fn_config of {loss} has no {', '.join(unknown)}")
    data = [
        _datum(f"datum {number}", each, loss, served)
        for number, each in enumerate(message.data)
    ]
    return Pass(
        data=data,
        loss=ServedLoss(name=loss, settings=settings),
        backward=not message.forward_only,
    )


def _datum(where: str, message: DatumMessage, loss: str, served: ServedModel) -> Datum:
    if message.others:
        raise Wrong(f"{where}: {message.others}")
    tokens = message.tokens
    targets = message.inputs.get("target_tokens")
    if targets is None or targets.dtype.kind != "i":
        raise Wrong(f"{where}: target_tokens are missing, or no whole numbers")
    if not len(tokens) or targets.shape != tokens.shape:
        raise Wrong(
            f"{where}: {len(tokens)} tokens of input and {len(targets)} target_tokens; each token has one target"
        )
    if len(tokens) >= served.longest:
        raise Wrong(
            f"{where}: {len(tokens) + 1} tokens with the last target, and the server takes {served.longest}: "
            "algorithm.max_prompt_length + max_new_tokens, or sequence_length"
        )
    # A target is the next token of the input: the model reads a sequence once
    if not np.array_equal(targets[:-1], tokens[1:]):
        raise Wrong(
            f"{where}: target_tokens are the input shifted by one token: target_tokens[i] is token i + 1 of the input"
        )
    whole = np.append(tokens, targets[-1]).astype(np.int64)
    if whole.min() < 0 or whole.max() >= served.vocabulary:
        raise Wrong(f"{where}: token ids are from 0 to {served.vocabulary - 1}")
    names = INPUTS[loss]
    unknown = sorted(message.inputs.keys() - {"target_tokens", *names})
    if unknown:
        raise Wrong(f"{where}: {loss} takes no {', '.join(unknown)}")
    inputs = {}
    for name in names:
        found = message.inputs.get(name)
        if found is None and name == "weights":
            found = np.ones(len(tokens), np.float32)
        if found is None or found.shape != tokens.shape:
            raise Wrong(
                f"{where}: {loss} takes {name}, one number for each target token"
            )
        numbers = found.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise Wrong(f"{where}: {name} has numbers that are not finite")
        inputs[name] = numbers
    return Datum(tokens=whole.astype(np.int32), inputs=inputs)


def step_of(given: Given) -> OptimizerStep:
    """Return the command for an optimizer step. Raises Wrong."""
    adam = given.value("adam_params")
    if not isinstance(adam, dict):
        raise Wrong("the server steps by AdamW only: optim_step takes AdamParams")
    found = Given(adam)
    clip = found.number("grad_clip_norm", 0.0)
    step = OptimizerStep(
        lr=found.number("learning_rate", 1e-4),
        beta1=found.number("beta1", 0.9),
        beta2=found.number("beta2", 0.95),
        eps=found.number("eps", 1e-12),
        weight_decay=found.number("weight_decay", 0.0),
        max_grad_norm=clip if clip > 0 else math.inf,
    )
    if step.lr < 0 or step.eps <= 0 or step.weight_decay < 0 or clip < 0:
        raise Wrong(
            "learning_rate, weight_decay and grad_clip_norm are not below 0, eps is above 0"
        )
    if not (0 <= step.beta1 < 1 and 0 <= step.beta2 < 1):
        raise Wrong("beta1 and beta2 are at least 0 and below 1")
    return step


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_of(given: Given, served: ServedModel) -> Tokens:
    """Return the tokens of a prompt. Raises Wrong."""
    chunks = given.part("prompt").value("chunks")
    if not isinstance(chunks, list):
        raise Wrong("prompt.chunks is a list")
    tokens = list[int]()
    for chunk in chunks:
        if (
            not isinstance(chunk, dict)
            or chunk.get("type", "encoded_text") != "encoded_text"
        ):
            raise Wrong(
                "a prompt has chunks of encoded text only; images and audio are not read"
            )
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(type(t) is int for t in part):
            raise Wrong("the tokens of a chunk are whole numbers")
        tokens += part
    if not tokens:
        raise Wrong("a prompt has at least one token")
    if min(tokens) < 0 or max(tokens) >= served.vocabulary:
        raise Wrong(f"token ids are from 0 to {served.vocabulary - 1}")
    if len(tokens) >= served.longest:
        raise Wrong(
            f"the prompt has {len(tokens)} tokens, and the server takes {served.longest} with the answer: "
            "algorithm.max_prompt_length + max_new_tokens, or sequence_length"
        )
    return np.array(tokens, np.int32)


def sampling_of(given: Given, stops: Stops) -> Sampling:
    """Return sampling parameters. Raises Wrong. `given`: an object of the type SamplingParams."""
    temperature = given.number("temperature", 1.0)
    top_p = given.number("top_p", 1.0)
    top_k = given.whole("top_k", -1)
    if temperature < 0 or not 0 < top_p <= 1:
        raise Wrong("temperature is at least 0, top_p above 0 and at most 1")
    stop = given.value("stop")
    ends = stop != []
    if isinstance(stop, str):
        stop = [stop]
    stop = stop or []
    if not isinstance(stop, list) or len(stop) > _MOST_STOPS:
        raise Wrong(
            f"stop is a text, or a list of at most {_MOST_STOPS} texts or token ids"
        )
    texts = [each for each in stop if isinstance(each, str) and each]
    tokens = [each for each in stop if type(each) is int]
    if len(texts) + len(tokens) != len(stop):
        raise Wrong("stop has texts or token ids, no other values and no empty texts")
    ids, others = stops(texts) if texts else ((), ())
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        seed=given.whole_or_none("seed"),
        stop_tokens=(*tokens, *ids),
        stop_texts=others,
        ends=ends,
    )
