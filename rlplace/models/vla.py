"""A vision-language-action policy: a vision-language model of transformers whose answer is an action in bins.

::

    image ──────▶ vision tower ─▶ connector ─▶ tokens ┐
    instruction ▶ words or tokenizer ▶ embedding ─────┤
    numbers ────▶ one linear layer ───────────────────┼─▶ decoder ─▶ element 0 of the action: logits of its bins
    a query for each element of the action ───────────┤             element 1 ...
    a query for the value ────────────────────────────┘             value

Each element of an action is one token among its bins, as in OpenVLA (Kim et al. 2024, arXiv:2406.09246). All elements
are decoded in one pass with a query each, as in OpenVLA-OFT (Kim et al. 2025, arXiv:2502.19645): their choices are
independent given the observation. Only bins can be chosen, since the head has no other outputs.

Letters: N observations, L tokens, W their width, K outputs for all elements of an action, S bytes of a text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    SmolVLMConfig,
)
from transformers import SmolVLMForConditionalGeneration as SmolVLM

from rlplace.codes import config_error
from rlplace.config.blocks.policies import VlaConfig
from rlplace.envs.contract import (
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
    image_size,
)
from rlplace.models.mlp import initialise
from rlplace.models.networks import (
    Observed,
    as_channels_first,
    entries_of,
    scaled_pixels,
)
from rlplace.models.vla_entries import MERGED, VlaEntries, entries_for

_FIRST_DEVIATION = 0.02
# Different instructions whose tokens are kept
_KEPT = 65_536
# Token that pads instructions of words
_PAD = 0


class Vla(nn.Module):
    """A vision-language model with queries and heads for actions in bins, and for values."""

    def __init__(self, spaces: Spaces, config: VlaConfig) -> None:
        super().__init__()
        self._entries: VlaEntries = entries_for(spaces, config)
        actions = spaces.actions
        assert isinstance(actions, DiscreteActions | MultiDiscreteActions)
        self._bins = (actions.n,) if isinstance(actions.n, int) else actions.n
        self._texts = _Texts(config)
        model = _model(spaces, self._entries, config)
        self.vision = model.vision_model
        self.connector = model.connector
        self.decoder = model.text_model
        vision = model.config.vision_config
        self._side = vision.image_size
        self._patches = vision.image_size // vision.patch_size
        width = model.config.text_config.hidden_size
        # One token for all numbers
        numbers = sum(part.size for part in self._entries.state)
        self.state = nn.Linear(numbers, width) if numbers else None
        # A query for each element of an action, then that of the value
        queries = torch.randn(len(self._bins) + 1, width)
        self.queries = nn.Parameter(_FIRST_DEVIATION * queries)
        self.policy = nn.Linear(width, max(self._bins))
        self.value = nn.Linear(width, 1)
        # Weights go from process to process by `state_dict`: tables of positions go with them
        for module in self.modules():
            module._non_persistent_buffers_set.clear()

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the heads; all other weights come from the folder, or are initialised by transformers."""
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(self, observations: Observed) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] for N observations."""
        by_name = entries_of(observations)
        dtype = self.queries.dtype
        tokens = [self._seen(by_name[self._entries.image.name], dtype)]
        rows = len(tokens[0])
        masks = [tokens[0].new_ones(rows, tokens[0].shape[1], dtype=torch.bool)]
        if self._entries.instruction is not None:
            ids = self._texts(by_name[self._entries.instruction.name])
            tokens.append(self.decoder.get_input_embeddings()(ids).to(dtype))
            masks.append(ids != self._texts.pad)
        if self.state is not None:
            numbers = [
                by_name[part.name].flatten(1).to(dtype) for part in self._entries.state
            ]
            tokens.append(self.state(torch.cat(numbers, dim=1))[:, None])
        tokens.append(self.queries.expand(rows, -1, -1))
        joined = torch.cat(tokens, dim=1)
        # Tokens behind the instruction are never padding
        known = torch.cat(masks, dim=1)
        mask = functional.pad(known, (0, joined.shape[1] - known.shape[1]), value=True)
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        through = self.decoder(
            inputs_embeds=joined,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        answers = through[:, -len(self.queries) :]
        logits = self.policy(answers[:, :-1])
        outputs = [logits[:, element, :bins] for element, bins in enumerate(self._bins)]
        return torch.cat(outputs, dim=1), self.value(answers[:, -1])[:, 0]

    def _seen(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tokens of N images, [N, tokens of an image, W]. Pixels are scaled to -1 to 1."""
        pixels = as_channels_first(scaled_pixels(images, dtype))
        side = self._side
        if pixels.shape[-2:] != (side, side):
            pixels = functional.interpolate(
                pixels, (side, side), mode="bilinear", antialias=True
            )
        patches = (len(pixels), self._patches, self._patches)
        mask = torch.ones(patches, dtype=torch.bool, device=pixels.device)
        states = self.vision(
            pixel_values=2 * pixels - 1, patch_attention_mask=mask
        ).last_hidden_state
        tokens: Tensor = self.connector(states)
        return tokens


class _Texts:
    """Turns instructions, N texts as bytes [N, S], into token ids [N, tokens of an instruction].

    `pad`: the id behind the tokens of a shorter instruction.
    """

    def __init__(self, config: VlaConfig) -> None:
        self._size = config.instruction_tokens
        self.pad = _PAD
        read: Callable[[str], Sequence[int]]
        if config.path is None:
            self._words: Mapping[str, int] = {
                word: number for number, word in enumerate(config.words, start=1)
            }
            read = self._by_words
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                config.path, local_files_only=True
            )
            self.pad = tokenizer.pad_token_id or 0
            read = functools.partial(tokenizer.encode, add_special_tokens=False)
        self._read = read
        self._ids = functools.lru_cache(maxsize=_KEPT)(self._padded)

    def __call__(self, texts: Tensor) -> Tensor:
        rows = np.ascontiguousarray(texts.cpu().numpy())
        ids = [self._ids(row.tobytes()) for row in rows]
        return torch.tensor(ids, device=texts.device)

    def _padded(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of a text, padded. Raises ConfigError if it has too many tokens."""
        sentence = text.rstrip(b"\0").decode("utf-8")
        ids = list(self._read(sentence))
        if len(ids) > self._size:
            raise config_error(
                "instruction-not-read",
                "actor.model.instruction_tokens",
                f"{self._size}",
                error="long",
                instruction=sentence,
                tokens=len(ids),
            )
        return (*ids, *itertools.repeat(self.pad, self._size - len(ids)))

    def _by_words(self, sentence: str) -> Sequence[int]:
        ids = []
        for word in sentence.lower().split():
            if word not in self._words:
                raise config_error(
                    "instruction-not-read",
                    "actor.model.words",
                    f"[{', '.join(self._words)}]",
                    error="word",
                    instruction=sentence,
                    word=word,
                    words=", ".join([*self._words, word]),
                )
            ids.append(self._words[word])
        return ids


def _model(spaces: Spaces, entries: VlaEntries, config: VlaConfig) -> Any:
    """Return the vision-language model, without its head over tokens: that of a folder, or a small one from scratch."""
    if config.path is not None:
        whole = AutoModelForImageTextToText.from_pretrained(
            config.path, local_files_only=True, dtype=torch.float32
        )
        # Memory of their own: offloading frees weights, and those of a mapped file cannot be freed
        for parameter in whole.parameters():
            parameter.data = parameter.data.clone()
        return whole.model
    width = config.width
    _, *sides = image_size(entries.image.shape)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": config.heads,
    }
    shape = SmolVLMConfig(
        vision_config={
            **sizes,
            "num_hidden_layers": config.vision_layers,
            "image_size": max(sides),
            "patch_size": config.patch,
        },
        text_config={
            **sizes,
            "model_type": "llama",
            "num_hidden_layers": config.layers,
            "num_key_value_heads": config.heads,
            "vocab_size": len(config.words) + 1,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        scale_factor=MERGED,
        image_token_id=_PAD,
        pad_token_id=_PAD,
    )
    return SmolVLM(shape).model
