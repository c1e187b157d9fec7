"""A vision-language-action policy from a checkpoint of OpenVLA-OFT with tokens of actions.

::

    begin │ 256 tokens of the image │ prompt │ a zero for each element of the action │ end
                                           └──────────────┬──────────────┘
            each token attends to all; the output before an element ▶ logits of its tokens

All elements of an action, or of a chunk of actions, are decoded in one pass (Kim et al. 2025, arXiv:2502.19645): the
forward pass is that of `OpenVLAForActionPrediction.predict_action` in moojink/openvla-oft, with the bidirectional
attention of moojink/transformers-openvla-oft. The value is a new layer on the output of the prompt's last token, where
RLinf puts its own.

Letters: N observations, L tokens of a prompt, W width of a token, A elements of an action or of a chunk of actions, K
outputs for all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.codes import config_error
from rlplace.config.blocks.policies import VlaConfig
from rlplace.envs.contract import MultiDiscreteActions, Spaces
from rlplace.errors import ConfigError
from rlplace.models.mlp import initialise
from rlplace.models.networks import BRIGHTEST, Observed, as_channels_first, entries_of
from rlplace.models.prismatic import stored_prismatic
from rlplace.models.tokenizers_of_folders import stored_tokenizer
from rlplace.models.vla_entries import entries_for, too_long
from rlplace.models.vla_folder import OpenVlaFolder, openvla_folder

_PROMPT = "In: What action should the robot take to {}?\nOut:"
# Tokens of Llama 2: begin, end, and the blank that stands before an action
_BEGIN = 1
_END = 2
_BLANK = 29871
# Different instructions whose tokens are kept
_KEPT = 65_536


class OpenVla(nn.Module):
    """OpenVLA-OFT with tokens of actions, and a value."""

    def __init__(self, spaces: Spaces, config: VlaConfig) -> None:
        super().__init__()
        assert config.path is not None
        folder = Path(config.path)
        actions = spaces.actions
        assert isinstance(actions, MultiDiscreteActions)
        self._elements = len(actions.n)
        self._entries = entries_for(spaces, config)
        self._of_folder: OpenVlaFolder = openvla_folder(folder)
        self._area = config.crop_area
        self._prompts = _Prompts(folder, config, self._of_folder.text["vocab_size"])
        self.model = stored_prismatic(folder, self._of_folder.text)
        width = self.model.language_model.config.hidden_size
        self.value = nn.Linear(width, 1)
        # Weights go from process to process by `state_dict`: tables of positions go with them
        for module in self.modules():
            module._non_persistent_buffers_set.clear()

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the value; all other weights come from the folder."""
        initialise([self.value], 1.0, generator)

    def forward(self, observations: Observed) -> tuple[Tensor, Tensor]:
        """Return outputs [N, K] and values [N] for N observations."""
        by_name = entries_of(observations)
        assert self._entries.instruction is not None
        images = by_name[self._entries.images[0].name]
        dtype = self.value.weight.dtype
        ids, said = self._prompts(by_name[self._entries.instruction.name])
        rows = len(ids)
        llama = self.model.language_model
        embed = llama.get_input_embeddings()
        ends = embed(ids.new_tensor([_BEGIN, _END])).expand(rows, -1, -1)
        seen = self.model.seen([each.to(dtype) for each in self._pixels(images)])
        zeros = ends.new_zeros(rows, self._elements, ends.shape[-1])
        joined = torch.cat([ends[:, :1], seen, embed(ids), zeros, ends[:, 1:]], dim=1)
        # Tokens before a shorter prompt are not read; all others are
        before = 1 + seen.shape[1]
        known = functional.pad(said, (before, self._elements + 1), value=True)
        positions = (known.long().cumsum(dim=1) - 1).clamp(min=0)
        tokens = joined.shape[1]
        mask = known[:, None, None].expand(-1, 1, tokens, -1)
        through = llama.model(
            inputs_embeds=joined,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        answers = through[:, -self._elements - 2 : -2]
        logits = answers @ self._choices(llama.lm_head.weight).T
        return logits.flatten(1), self.value(answers[:, 0])[:, 0]

    def _choices(self, head: Tensor) -> Tensor:
        """Return the rows of the decoder's head for each choice, [bins, W]: the last tokens, from the end.

        `head`: [tokens, W].
        """
        last = self._of_folder.vocabulary
        return head[last - self._of_folder.bins : last].flip(0)

    def _pixels(self, images: Tensor) -> list[Tensor]:
        """Return the images of each tower, [N, 3, side, side], resized, cropped and normalised.

        `images`: bytes, [N, height, width, 3] or [N, 3, height, width].
        """
        pixels = as_channels_first(images).float()
        of = self._of_folder
        found = []
        for side, mean, deviation in zip(
            of.sides, of.means, of.deviations, strict=True
        ):
            resized = _cropped(_resized(pixels, side), self._area) / BRIGHTEST
            middle = resized.new_tensor(mean)[:, None, None]
            found.append(
                (resized - middle) / resized.new_tensor(deviation)[:, None, None]
            )
        return found


def _resized(pixels: Tensor, side: int) -> Tensor:
    """Return N images with `side` pixels each way, with whole numbers from 0 to 255.

    As in PIL, rows are resized first and columns then, and both results are rounded.
    """
    for size in ((pixels.shape[-2], side), (side, side)):
        if pixels.shape[-2:] != size:
            resized = functional.interpolate(
                pixels, size, mode="bicubic", antialias=True
            )
            pixels = resized.clamp(0, BRIGHTEST).round()
    return pixels


def _cropped(pixels: Tensor, area: float) -> Tensor:
    """Return the middle of N images, resized to their size. `area`: its share of an image."""
    if area == 1:
        return pixels
    scale = math.sqrt(area)
    theta = pixels.new_tensor([[scale, 0, 0], [0, scale, 0]]).expand(len(pixels), 2, 3)
    grid = functional.affine_grid(theta, list(pixels.shape), align_corners=True)
    cropped = functional.grid_sample(pixels, grid, align_corners=True)
    return cropped.clamp(0, BRIGHTEST).round()


class _Prompts:
    """Turns instructions, N texts as bytes, into the tokens of prompts, without the token that begins them.

    Tokens stand at the end: shorter prompts are padded before them. All have the length `instruction_tokens`.
    """

    def __init__(self, folder: Path, config: VlaConfig, vocabulary: int) -> None:
        self._config = config
        self._size = config.instruction_tokens
        self._tokenizer = stored_tokenizer(str(folder), vocabulary, as_file=True)
        self._ids = functools.lru_cache(maxsize=_KEPT)(self._ids_of)

    def __call__(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids, and where a prompt has a token: [N, L] int64 and bool."""
        padded = []
        lengths = []
        for row in np.ascontiguousarray(texts.cpu().numpy()):
            ids = self._ids(row.tobytes())
            padded.append((*itertools.repeat(_END, self._size - len(ids)), *ids))
            lengths.append(len(ids))
        places = torch.arange(self._size)
        said = places >= self._size - torch.tensor(lengths)[:, None]
        return torch.tensor(padded).to(texts.device), said.to(texts.device)

    def _ids_of(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of a prompt. Raises ConfigError if it has too many tokens, or does not begin as Llama 2's."""
        sentence = text.rstrip(b"\0").decode("utf-8")
        begin, *ids = self._tokenizer.encode(_PROMPT.format(sentence.lower()))
        if begin != _BEGIN:
            raise config_error(
                "model-misfit",
                "actor.model.path",
                f"{self._config.path}",
                error="tokenizer-begin",
                begin=begin,
                expected=_BEGIN,
            )
        if not ids or ids[-1] != _BLANK:
            ids.append(_BLANK)
        long = too_long(sentence, len(ids), self._config)
        if long is not None:
            raise ConfigError([long])
        return tuple(ids)
