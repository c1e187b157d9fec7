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
from rlplace.errors import ConfigError
from rlplace.models.mlp import initialise
from rlplace.models.networks import (
    Observed,
    as_channels_first,
    entries_of,
    scaled_pixels,
)
from rlplace.models.tokenizers_of_folders import stored_tokenizer
from rlplace.models.vla_entries import (
    MERGED,
    VlaEntries,
    entries_for,
    too_long,
    unknown_words,
    words_of,
)

_PATH = "actor.model.path"
# Different instructions whose tokens are kept
_KEPT = 65_536
# Stands behind the tokens of a shorter instruction, and is not read; tokens of words begin behind it
_PAD = 0


class Vla(nn.Module):
    """A vision-language model with queries and heads for actions in bins, and for values."""

    def __init__(self, spaces: Spaces, config: VlaConfig) -> None:
        super().__init__()
        self._entries: VlaEntries = entries_for(spaces, config)
        actions = spaces.actions
        assert isinstance(actions, DiscreteActions | MultiDiscreteActions)
        self._bins = (actions.n,) if isinstance(actions.n, int) else actions.n
        model = vision_language_model(spaces, self._entries, config)
        embedding = model.text_model.get_input_embeddings()
        self._texts: Texts | None = None
        if self._entries.instruction is not None:
            self._texts = Texts(config, embedding.num_embeddings)
        self.vision = model.vision_model
        self.connector = model.connector
        self.decoder = model.text_model
        width = model.config.text_config.hidden_size
        # One token for all numbers
        numbers = sum(part.size for part in self._entries.state)
        self.state = nn.Linear(numbers, width) if numbers else None
        # A query for each element of an action, then that of the value
        deviation = model.config.text_config.initializer_range
        queries = torch.randn(len(self._bins) + 1, width)
        self.queries = nn.Parameter(deviation * queries)
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
        images = [by_name[image.name] for image in self._entries.images]
        tokens = [image_tokens(self.vision, self.connector, images, dtype)]
        rows = len(tokens[0])
        masks = [tokens[0].new_ones(rows, tokens[0].shape[1], dtype=torch.bool)]
        if self._entries.instruction is not None and self._texts is not None:
            ids, said = self._texts(by_name[self._entries.instruction.name])
            tokens.append(self.decoder.get_input_embeddings()(ids).to(dtype))
            masks.append(said)
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


def image_tokens(
    vision: Any,
    connector: nn.Module,
    images: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    padded: bool = False,
) -> Tensor:
    """Return the tokens of the images of N observations, camera after camera, [N, tokens of all images, W].

    Pixels are scaled to -1 to 1. `images`: of each camera, [N, ...]. All go through the vision tower together.
    `padded`: images keep their shape, and get black pixels at the left and at the top.
    """
    side = vision.config.image_size
    resized = []
    for of_camera in images:
        pixels = as_channels_first(scaled_pixels(of_camera, dtype))
        if padded:
            pixels = _padded(pixels, side)
        elif pixels.shape[-2:] != (side, side):
            pixels = functional.interpolate(
                pixels, (side, side), mode="bilinear", antialias=True
            )
        resized.append(pixels)
    pixels = torch.stack(resized, dim=1).flatten(0, 1)
    each_way = side // vision.config.patch_size
    mask = torch.ones(
        (len(pixels), each_way, each_way), dtype=torch.bool, device=pixels.device
    )
    states = vision(
        pixel_values=2 * pixels - 1, patch_attention_mask=mask
    ).last_hidden_state
    tokens: Tensor = connector(states)
    return tokens.unflatten(0, (-1, len(images))).flatten(1, 2)


def _padded(pixels: Tensor, side: int) -> Tensor:
    """Return N images with `side` pixels each way: resized in their shape, with zeros at the left and at the top."""
    height, width = pixels.shape[-2:]
    if (height, width) == (side, side):
        return pixels
    ratio = max(width, height) / side
    size = (int(height / ratio), int(width / ratio))
    resized = functional.interpolate(pixels, size, mode="bilinear")
    return functional.pad(resized, (side - size[1], 0, side - size[0], 0))


class Texts:
    """Turns instructions, N texts as bytes [N, S], into token ids. All have the length `instruction_tokens`.

    `vocabulary`: the number of tokens that the model has.
    """

    def __init__(self, config: VlaConfig, vocabulary: int) -> None:
        self._config = config
        self._size = config.instruction_tokens
        read: Callable[[str], Sequence[int]]
        if config.path is None:
            self._words: Mapping[str, int] = {
                word.lower(): number for number, word in enumerate(config.words, 1)
            }
            read = self._by_words
        else:
            tokenizer = stored_tokenizer(config.vlm or config.path, vocabulary)
            read = functools.partial(tokenizer.encode, add_special_tokens=False)
        self._read = read
        self._ids = functools.lru_cache(maxsize=_KEPT)(self._ids_of)

    def __call__(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids, and where an instruction has a token: [N, tokens of an instruction] int64 and bool."""
        padded = []
        lengths = []
        for row in np.ascontiguousarray(texts.cpu().numpy()):
            ids = self._ids(row.tobytes())
            padded.append((*ids, *itertools.repeat(_PAD, self._size - len(ids))))
            lengths.append(len(ids))
        places = torch.arange(self._size)
        said = places < torch.tensor(lengths)[:, None]
        return torch.tensor(padded).to(texts.device), said.to(texts.device)

    def _ids_of(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of a text. Raises ConfigError if it has too many tokens."""
        sentence = text.rstrip(b"\0").decode("utf-8")
        # SmolVLA was trained with a line for each instruction
        if self._config.vlm is not None and not sentence.endswith("\n"):
            sentence += "\n"
        ids = tuple(self._read(sentence))
        long = too_long(sentence, len(ids), self._config)
        if long is not None:
            raise ConfigError([long])
        return ids

    def _by_words(self, sentence: str) -> Sequence[int]:
        """Return the ids of words. Raises ConfigError with all words that the config does not list."""
        unknown = unknown_words([sentence], self._config.words)
        if unknown is not None:
            raise ConfigError([unknown])
        return [self._words[word] for word in words_of(sentence)]


def vision_language_model(
    spaces: Spaces, entries: VlaEntries, config: VlaConfig
) -> Any:
    """Return the vision-language model, without its head over tokens: that of a folder, or a small one from scratch."""
    if config.path is not None:
        return _stored(config.path)
    width = config.width
    sides: list[int] = []
    for image in entries.images:
        sides += image_size(image.shape)[1:]
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": config.heads,
        # The default of transformers is for wide models: here, outputs would hardly depend on inputs
        "initializer_range": width**-0.5,
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


def _stored(folder: str) -> Any:
    """Return the vision-language model of a folder, without its head over tokens.

    Raises ConfigError if its files lack a weight, or have one of another shape: transformers would begin with a random
    one.
    """
    read: Any = AutoModelForImageTextToText.from_pretrained(
        folder,
        local_files_only=True,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    whole, loading = read
    model = whole.model
    own = {id(parameter) for parameter in model.parameters()}
    needed = {
        name for name, parameter in whole.named_parameters() if id(parameter) in own
    }
    others = {name for name, *_ in loading["mismatched_keys"]}
    random = sorted(needed & {*loading["missing_keys"], *others})
    if random:
        raise config_error(
            "model-misfit",
            _PATH,
            folder,
            error="weights",
            name=random[0],
            count=len(random),
        )
    # Memory of their own: offloading frees weights, and those of a mapped file cannot be freed
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
