"""Vision-language models of transformers: states of a vision tower take the places of image tokens.

::

    files ──▶ image processor ──▶ patches ──▶ tower ──▶ states ─┐
    tokens ───────────────────▶ embedding ──▶ states ───────────┴──▶ decoder, with positions in three dimensions

Positions of an image's tokens count time, row and column (Qwen2-VL, arXiv:2409.12191, section 2.1). Attention over
packed sequences does not use positions, so sequences with images are packed like any others.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from rlplace.models.causal_lm import CausalLm
from rlplace.models.packed import Packed
from rlplace.models.vision import BLANK, VisionSpec
from rlplace.tokens import Files


class VisionInput:
    """Reads images with the model's own processor, and computes hidden states of text with images."""

    def __init__(self, vision: VisionSpec) -> None:
        self.vision = vision

    @functools.cached_property
    def _processor(self) -> Any:
        """The image processor of the model's folder, loaded at its first use."""
        return AutoImageProcessor.from_pretrained(
            self.vision.folder,
            local_files_only=True,
        )

    def read(self, files: Files) -> tuple[Tensor, Tensor]:
        """Return the patches of all images, [P, D] float32, and the sizes of the n images, [n, 3].

        P is the number of patches, and D the numbers in a patch. A size is the number of patches in time, in rows and
        in columns. `files`: the content of each image file.
        """
        from PIL import Image

        size = {"shortest_edge": self.vision.least, "longest_edge": self.vision.most}
        images = [Image.open(io.BytesIO(file)) for file in files]
        read = self._processor(images=images, size=size, return_tensors="pt")
        patches = read["pixel_values"].float()
        grids = read["image_grid_thw"]
        return patches, grids

    def states(
        self,
        lm: PreTrainedModel,
        segments: Sequence[Tensor],
        files: Sequence[Files],
        after: Sequence[int | None],
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, size of a state] before the head, and positions [3, T], of the T tokens of all
        segments.

        `lm`: the whole model. `segments`: token ids of each segment. `files`: the images of each segment; at least one
        segment has an image. `after`: for each segment, the index of the segment that it continues, or None. `others`:
        further arguments of the decoder. Image tokens that a policy has sampled come after the image tokens of the
        prompt, and are treated as text.
        """
        base: Any = lm.base_model
        patches, grids = self.read([file for own in files for file in own])
        marks = list[Tensor]()
        positions = list[Tensor]()
        left = grids
        # Which tokens are images, and the positions of all tokens, segment by segment
        for segment, own, follows in zip(segments, files, after, strict=True):
            tokens = segment.cpu()
            grid = left[: len(own)]
            left = left[len(own) :]
            # The first so many image tokens are those of the segment's images
            due = int(grid.prod(dim=1).sum()) // self.vision.merge**2
            mark = tokens == self.vision.image_token
            mark &= mark.cumsum(dim=0) <= due
            assert int(mark.sum()) == due, (
                "a prompt is expanded to the tokens of its images"
            )
            found, _ = base.get_rope_index(
                tokens[None],
                mm_token_type_ids=mark[None].int(),
                image_grid_thw=grid,
            )
            # A continued segment counts on from the one before it
            if follows is not None:
                found = found + positions[follows].max() + 1
            positions.append(found)
            marks.append(mark)
        # Put the states of the images in place of their tokens
        tokens = torch.cat(list(segments))
        places = torch.cat(marks)[None].to(tokens.device)
        turned = torch.cat(positions, dim=-1).to(tokens.device)
        seen = base.get_image_features(
            patches.to(tokens.device),
            grids.to(tokens.device),
            return_dict=True,
        )
        states = lm.get_input_embeddings()(tokens)[None]
        states = states.masked_scatter(
            places[..., None],
            torch.cat(seen.pooler_output).to(states.dtype),
        )
        # Qwen3-VL also adds states of the tower in the first layers of the decoder
        if layers := getattr(seen, "deepstack_features", None):
            stacked = []
            for layer in layers:
                if isinstance(layer, (list, tuple)):
                    layer = torch.cat(layer)
                stacked.append(layer)
            others |= {"visual_pos_masks": places, "deepstack_visual_embeds": stacked}
        out = VisionLm.decoder_of(lm)(
            inputs_embeds=states,
            position_ids=turned,
            **others,
        )
        return out.last_hidden_state[0], turned[:, 0]


class VisionLm(CausalLm):
    """A language model that reads images. `vision_input`: reads the images.

    Each pass has at least one image, because all ranks that share weights must run the vision tower together. If the
    sequences have no images, a blank image is added.
    """

    made_by = AutoModelForImageTextToText
    vision_input: ClassVar[VisionInput]

    @staticmethod
    def decoder_of(lm: PreTrainedModel) -> PreTrainedModel:
        """Return the text decoder inside `lm`."""
        return cast(PreTrainedModel, getattr(lm.base_model, "language_model", lm))

    def states(self, packed: Packed, places: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Return hidden states [n, size of a state] before the head, after the n tokens at `places`, and a full slice.

        `packed`: the sequences to read. `places` [n]: indices of tokens. The full slice says that the states of all
        `places` are on this rank.
        """
        assert self.context is None
        assert self.parallel is None
        if not any(packed.images):
            packed = self._with_blank(packed)
        segments = packed.tokens.split(packed.lengths)
        states, _ = self.vision_input.states(
            self.lm,
            segments,
            packed.images,
            packed.after,
            use_cache=False,
            packed=packed,
        )
        return states[places], slice(None)

    def _with_blank(self, packed: Packed) -> Packed:
        """Return `packed` with one more sequence, of one blank image; none of its tokens is scored."""
        tokens = packed.tokens
        vision = self.vision_input.vision
        more = vision.tokens(1, 1)
        total = len(packed.tokens) + more
        return dataclasses.replace(
            packed,
            tokens=functional.pad(tokens, (0, more), value=vision.image_token),
            positions=functional.pad(packed.positions, (0, more)),
            edges=functional.pad(packed.edges, (0, 1), value=total),
            lengths=(*packed.lengths, more),
            after=(*packed.after, None),
            images=(*([()] * len(packed.lengths)), (BLANK,)),
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the decoder, then the blocks of the vision tower."""
        tower = cast(Any, self.lm.base_model).visual
        layers = cast(nn.ModuleList, self.decoder_of(self.lm).layers)
        return [*layers, *tower.blocks]


def vision_lm_of(vision: VisionSpec) -> type[VisionLm]:
    """Return a class of vision-language models that read images of the sizes in `vision`."""

    class Named(VisionLm):
        vision_input = VisionInput(vision)

    return Named
