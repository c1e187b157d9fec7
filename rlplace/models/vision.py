"""Images of a vision-language model: how many tokens an image is, and where they stand. Needs no transformers.

::

    chat template   <|vision_start|> <|image_pad|>             <|vision_end|> What is it?
    expanded        <|vision_start|> <|image_pad|> x rows x columns <|vision_end|> What is it?

Env ranks expand image tokens, so that engine and learner get the same tokens. Both scale the image to whole cells with
the model's own image processor. A cell of merge x merge patches is one token (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.codes import config_error
from rlplace.config.blocks.language_model import LanguageModelJobConfig, TextEnvConfig
from rlplace.envs.text.contract import Image
from rlplace.json_text import read_object
from rlplace.tokens import Files, Tokens

if TYPE_CHECKING:
    from rlplace.models.causal_lm import CausalLm

# Key of the errors about images and prompts
_KEY = "env.kwargs"
# Times the shorter side; the processors refuse longer images
_LONGEST_SIDE = 200
_FORMATS = ("PNG", "JPEG")
# Compressed pixels cannot contain these bytes; a preview before them can
_JPEG_END = b"\xff\xd9"
# A PNG of one black pixel
BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The sizes of images that a model takes.

    `image_token`: id of the token that stands for an image. `patch`: side of a patch in pixels. `merge`: side, in
    patches, of the square of patches that makes one token. `least`, `most`: the least and the most pixels of an image;
    other images are scaled. `most_bytes`: the most bytes of all image files of a prompt together.
    """

    folder: Path
    image_token: int  # id of the token that stands for an image
    patch: int  # side of a patch, in pixels
    merge: int  # side of a token's cell, in patches
    least: int  # pixels of an image; smaller ones are scaled up
    most: int  # pixels of an image; larger ones are scaled down
    most_bytes: int  # sum over the files of a prompt's images

    @classmethod
    def of(cls, folder: Path, env: TextEnvConfig) -> VisionSpec | None:
        """Return the sizes of images that the model in `folder` takes; None if the model reads text only.

        `env`: config block with limits on the images of a prompt. Raises ConfigError if the folder has no image
        processor.
        """
        config = _json(folder / "config.json")
        token = config.get("image_token_id")
        if "vision_config" not in config or not isinstance(token, int):
            return None
        # The image processor has a file of its own, or an entry in that of the processor
        own = _json(folder / "preprocessor_config.json")
        own = own or _json(folder / "processor_config.json").get("image_processor", {})
        size = own.get("size") or {}
        least = own.get("min_pixels") or size.get("shortest_edge")
        most = own.get("max_pixels") or size.get("longest_edge")
        # All four numbers are needed
        numbers = [
            n
            for n in (own.get("patch_size"), own.get("merge_size"), least, most)
            if isinstance(n, int) and n > 0
        ]
        if len(numbers) < 4:
            raise config_error("no-image-processor", "actor.model.path", str(folder))
        patch, merge, least, most = numbers
        # The job may allow fewer tokens
        if env.max_image_tokens is not None:
            most = min(most, env.max_image_tokens * (patch * merge) ** 2)
        return cls(
            folder=folder,
            image_token=token,
            patch=patch,
            merge=merge,
            least=min(least, most),
            most=most,
            most_bytes=env.max_image_bytes,
        )

    def tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image, scaled like `smart_resize` in transformers' Qwen2-VL processors.

        `height`, `width`: in pixels. Raises ValueError for an image that is too narrow to be scaled.
        """
        if max(height, width) > _LONGEST_SIDE * min(height, width):
            raise ValueError(
                f"it has {width} x {height} pixels: one side is more than {_LONGEST_SIDE} times the other"
            )
        # Whole cells; the pixels must be within both bounds
        cell = self.patch * self.merge
        rows = round(height / cell)
        columns = round(width / cell)
        if rows * columns * cell**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / scale / cell))
            columns = max(1, math.floor(width / scale / cell))
        elif rows * columns * cell**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows = math.ceil(height * scale / cell)
            columns = math.ceil(width * scale / cell)
        # A narrow image has at least one cell across, which can exceed the bound again
        if rows * columns * cell**2 > self.most:
            raise ValueError(
                f"it has {width} x {height} pixels: scaled to {self.most}, its short side is below {cell}"
            )
        return rows * columns

    def read(self, images: Sequence[Image]) -> tuple[Files, list[int]]:
        """Return the contents of the files of a prompt's images, and the number of tokens of each image.

        Raises ConfigError for images that cannot be read, or whose files exceed `most_bytes` in total.
        """
        files = list[bytes]()
        counts = list[int]()
        for image in images:
            try:
                files.append(image.read())
                counts.append(self.tokens(*_size(files[-1])))
            except (OSError, ValueError) as error:
                raise config_error(
                    "bad-image",
                    _KEY,
                    _name(image),
                    error="unread",
                    reason=str(error),
                ) from error
        total = sum(map(len, files))
        if total > self.most_bytes:
            raise config_error(
                "bad-image",
                _KEY,
                f"{total} bytes: {', '.join(map(_name, images))}",
                error="large",
                most=self.most_bytes,
                total=total,
            )
        return tuple(files), counts

    def expand(self, tokens: Tokens, counts: Sequence[int]) -> Tokens:
        """Return a prompt's tokens, in which each image token is repeated as often as its image has tokens.

        `counts`: the number of tokens of each image. Raises ConfigError unless the prompt has one image token for each
        image.
        """
        places = np.flatnonzero(tokens == self.image_token)
        if len(places) != len(counts):
            got = f"{len(places)} tokens, {len(counts)} images"
            raise config_error("bad-image", _KEY, got, error="tokens")
        repeats = np.ones(len(tokens), np.int64)
        repeats[places] = counts
        return np.repeat(tokens, repeats)


def policy_of(config: LanguageModelJobConfig, folder: Path) -> type[CausalLm]:
    """Return the class of the language model that the actor trains. `folder`: the folder of its files."""
    from rlplace.models.causal_lm import ActorCriticLm

    if config.critic.on_actor:
        return ActorCriticLm
    return causal_lm_of(config, folder)


def causal_lm_of(config: LanguageModelJobConfig, folder: Path) -> type[CausalLm]:
    """Return the class for the language model in `folder`.

    If the model reads images, return a class that reads images, too.
    """
    from rlplace.models.causal_lm import CausalLm

    vision = VisionSpec.of(folder, config.env)
    if vision is None:
        return CausalLm
    # Image processors take a second to import
    from rlplace.models.vision_lm import (
        vision_lm_of,
    )

    return vision_lm_of(vision)


def _size(file: bytes) -> tuple[int, int]:
    """Return height and width of an image in pixels, from the header of its file. `file`: the content of the file.

    Also check the checksums of a PNG, and that a JPEG has its end. Raises OSError; ValueError for a damaged file.
    """
    from PIL import Image as Library

    stream = io.BytesIO(file)
    try:
        with Library.open(stream, formats=_FORMATS) as opened:
            width, height = opened.size
            head_bytes = stream.tell()
            cut = opened.format != "PNG" and file.find(_JPEG_END, head_bytes) < 0
            opened.verify()
    except (Library.DecompressionBombError, SyntaxError) as error:
        raise ValueError(str(error)) from error
    if cut:
        raise ValueError(
            f"the file is cut: a JPEG of {width} x {height} pixels without its end"
        )
    return height, width


def _name(image: Image) -> str:
    """Return the name of the image for error messages."""
    if isinstance(image.source, str):
        return image.source
    return f"an image of {len(image.source)} bytes"


def _json(file: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file; empty if the file does not exist. Raises ConfigError if it is damaged."""
    try:
        return read_object(file, "actor.model.path")
    except FileNotFoundError:
        return {}
