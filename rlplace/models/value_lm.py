"""Language models with a linear head to one number: values of states for a critic, rewards of whole sequences.

Letters: N response tokens, s sequences, E size of the hidden states. Folders are those of transformers' sequence
classification with one label. For a critic the head starts anew where the folder is a causal model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlplace.errors import ConfigError
from rlplace.models.causal_lm import CausalLm, LmSpec, PackedLm, build_sharded
from rlplace.models.heads import HEAD, HEADS, stored_heads, value_head_problem
from rlplace.models.lora import LoraSpec, add_factors
from rlplace.models.packed_attention import Packed
from rlplace.models.token_scores import token_scores


class Valued(PackedLm):
    """A model whose value head, `lm.score`, starts anew where its folder has none."""

    def stored_as(self, name: str) -> tuple[str, ...]:
        return HEADS if name == HEAD else (name,)

    def first_values(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
        return first_head(shape[1], seed) if name == HEAD else None

    def values(self, hidden: Tensor) -> Tensor:
        """Return [N] float32, from products in float32, of `hidden` [N, E]."""
        score = cast(nn.Linear, self.lm.score)
        return hidden.float() @ score.weight.squeeze(0).float()


class ValueLm(Valued):
    """Gives the values of states."""

    made_by = AutoModelForSequenceClassification
    labels = 1

    def forward(self, packed: Packed) -> Tensor:
        """Return [N] float32: for each scored token the value of the state before it."""
        return self.values(self.hidden(packed))

    @property
    def head(self) -> nn.Module | None:
        return cast("nn.Module | None", getattr(self.lm, "score", None))

    def saved_config(self) -> Mapping[str, object]:
        """Say that the head gives one number, so that transformers loads it."""
        names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {"architectures": [type(self.lm).__name__], **names}

    def add_factors(self, spec: LoraSpec) -> None:
        """Put factors into the trunk: the head is trained as it is."""
        add_factors(cast(PreTrainedModel, self.lm.base_model), spec)


class RewardLm(ValueLm):
    """Scores whole sequences, from the state after the last token."""

    heads: ClassVar[tuple[str, ...]] = HEADS

    def forward(self, packed: Packed) -> Tensor:
        """Return [s] float32. The product is float32 too: bfloat16 scores would lie 1/128 of their size apart."""
        last = self.states(packed)[packed.edges[1:].long() - 1]
        head = cast(nn.Linear, self.head).weight
        return (last.float() @ head.float().t()).squeeze(-1)

    def stored_as(self, name: str) -> tuple[str, ...]:
        return self.heads if name == HEAD else super().stored_as(name)

    def first_values(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
        return None  # an untrained head gives no scores


def reward_lm(head: str) -> type[RewardLm]:
    """Return a RewardLm whose files call the head `head`."""

    class Named(RewardLm):
        heads = stored_heads(head)

    return Named


class ValuedScores(NamedTuple):
    """Scores of tokens, [N] float32 each."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor  # of the states in which they were chosen


class ActorCriticLm(Valued, CausalLm):
    """Scores given tokens, and gives the values of the states in which they were chosen: one trunk, one pass.

    The value head stays with the learner: it is neither sent to engines nor saved.
    """

    kept = frozenset({HEAD})

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        width = cast(nn.Linear, self.head).in_features
        lm.score = nn.Linear(width, 1, bias=False, device="meta", dtype=lm.dtype)

    def forward(self, packed: Packed, temperature: float = 1.0) -> ValuedScores:  # type: ignore[override]  # more than scores
        """Score as CausalLm does, with values."""
        hidden = self.hidden(packed)
        scores = token_scores(hidden, cast(nn.Linear, self.head).weight, packed.targets, temperature)
        return ValuedScores(*scores, self.values(hidden))

    def add_factors(self, spec: LoraSpec) -> None:
        """Put factors into all but the value head, which is trained as it is."""
        score = self.lm.score
        del self.lm.score
        super().add_factors(spec)
        self.lm.score = score


def first_head(hidden_size: int, seed: int) -> Tensor:
    """Return [1, E] small enough that first values are near 0, beside any return."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {HEAD}".encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(number)
    return torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1)


def build_value_lm(spec: LmSpec, mesh: DeviceMesh) -> ValueLm:
    """Build a critic; see `build_sharded`. Raises ConfigError also where the folder's head gives several numbers."""
    problem = value_head_problem(spec.folder, spec.key)
    if problem is not None:
        raise ConfigError([problem])
    return build_sharded(ValueLm, spec, mesh)


def build_actor_critic_lm(spec: LmSpec, mesh: DeviceMesh) -> ActorCriticLm:
    """Build an actor with a value head; see `build_sharded`."""
    return build_sharded(ActorCriticLm, spec, mesh)
