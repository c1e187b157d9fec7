"""How a model of text and images sees: how many tokens an image is, and where they stand. Known without transformers.

::

    chat template   <|vision_start|> <|image_pad|>             <|vision_end|> What is it?
    expanded        <|vision_start|> <|image_pad|> x rows x columns <|vision_end|> What is it?

Env ranks expand, so that engine and learner are given the very same tokens. Both scale the image to whole cells with
the model's own image processor; a cell of merge x merge patches is a token (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.config.schema import Config, TextEnvConfig
from rlplace.envs.text.contract import Image
from rlplace.errors import ConfigError
from rlplace.tokens import Files, Tokens

if TYPE_CHECKING:
    from rlplace.models.causal_lm import CausalLm

_LONGEST_SIDE = 200  # times the other one; the processors refuse images beyond it
_FORMATS = ("PNG", "JPEG")
# Pixels have no such bytes; what stands before them may, as a preview
_JPEG_END = b"\xff\xd9"
# One black pixel, as PNG.
BLANK = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The sizes of a model's images."""

    folder: Path
    image_token: int
    patch: int  # pixels of a side of a patch
    merge: int  # patches of a side of a token
    least: int  # pixels of an image; it is scaled up to them
    most: int  # pixels of an image; it is scaled down to them
    most_bytes: int  # of the files of a prompt's images

    @classmethod
    def of(cls, folder: Path, env: TextEnvConfig) -> Sight | None:
        """Read a model's folder; None where its model reads text alone. Raises ConfigError without a processor."""
        config = _json(folder / "config.json")
        if "vision_config" not in config or not isinstance(
            token := config.get("image_token_id"), int
        ):
            return None
        own = _json(folder / "preprocessor_config.json")
        own = own or _json(folder / "processor_config.json").get("image_processor", {})
        size = own.get("size") or {}
        least = own.get("min_pixels") or size.get("shortest_edge")
        most = own.get("max_pixels") or size.get("longest_edge")
        numbers = [
            n
            for n in (own.get("patch_size"), own.get("merge_size"), least, most)
            if isinstance(n, int) and n > 0
        ]
        if len(numbers) < 4:
            what = "the model's folder has no image processor"
            why = "patch_size, merge_size and the size of images in preprocessor_config.json define what it sees"
            fix = "save it there: AutoImageProcessor.from_pretrained(<model>).save_pretrained(<folder>)"
            raise ConfigError.of(
                "no-image-processor", "actor.model.path", what, str(folder), why, fix
            )
        patch, merge, least, most = numbers
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
        """Return how many tokens an image is, as `smart_resize` of transformers' Qwen2-VL processors scales it.

        Raises ValueError for an image that is narrower than the processor takes, or than fits the limit.
        """
        if max(height, width) > _LONGEST_SIDE * min(height, width):
            raise ValueError(
                f"it has {width} x {height} pixels: one side is more than {_LONGEST_SIDE} times the other"
            )
        cell = self.patch * self.merge
        rows = round(height / cell)
        columns = round(width / cell)
        if rows * columns * cell**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (
                max(1, math.floor(side / scale / cell)) for side in (height, width)
            )
        elif rows * columns * cell**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
        if rows * columns * cell**2 > self.most:
            raise ValueError(
                f"it has {width} x {height} pixels: scaled to {self.most}, its short side is below {cell}"
            )
        return rows * columns

    def read(self, images: Sequence[Image]) -> tuple[Files, list[int]]:
        """Return the files of a prompt's images and their tokens. Raises ConfigError for those that cannot be seen."""
        files = list[bytes]()
        counts = list[int]()
        for image in images:
            try:
                files.append(image.read())
                counts.append(self.tokens(*_size(files[-1])))
            except (OSError, ValueError) as error:
                what = "an image cannot be read"
                why = str(error)
                raise self._bad(
                    what, _name(image), why, "a PNG or JPEG, or another row"
                ) from error
        if (total := sum(map(len, files))) > self.most_bytes:
            what = "the images of a prompt are larger than the limit"
            got = f"{total} bytes: {', '.join(map(_name, images))}"
            why = f"they travel with each request and each group of samples; env.max_image_bytes is {self.most_bytes}"
            raise self._bad(
                what,
                got,
                why,
                f"env.max_image_bytes: {total}        (or smaller files)",
            )
        return tuple(files), counts

    def expand(self, tokens: Tokens, counts: Sequence[int]) -> Tokens:
        """Return the tokens of a prompt with as many image tokens as each image has. Raises ConfigError."""
        places = np.flatnonzero(tokens == self.image_token)
        if len(places) != len(counts):
            what = "a prompt has other image tokens than images"
            got = f"{len(places)} tokens, {len(counts)} images"
            why = (
                "the chat template writes one for each image; a text that has one "
                "itself, as <|image_pad|>, is refused"
            )
            fix = "env.chat: true, a chat_template.jinja that shows images, or texts without such a token"
            raise self._bad(what, got, why, fix)
        repeats = np.ones(len(tokens), np.int64)
        repeats[places] = counts
        return np.repeat(tokens, repeats)

    def _bad(self, what: str, got: str, why: str, fix: str) -> ConfigError:
        return ConfigError.of("bad-image", "env.kwargs", what, got, why, fix)


def policy_of(config: Config, folder: Path) -> type[CausalLm]:
    """Return what computes the actor's model, in `folder`."""
    from rlplace.models.causal_lm import ActorCriticLm

    if config.critic.on_actor:
        return ActorCriticLm
    return causal_lm_of(config, folder)


def causal_lm_of(config: Config, folder: Path) -> type[CausalLm]:
    """Return what computes the language model in `folder`, whether it sees or not."""
    from rlplace.models.causal_lm import CausalLm

    sight = Sight.of(folder, config.text_env)
    if sight is None:
        return CausalLm
    # Image processors take a second to import
    from rlplace.models.vision_lm import (
        seeing,
    )

    return seeing(sight)


def _size(file: bytes) -> tuple[int, int]:
    """Return height and width, from the head of the file; check the sums of a PNG, and that a JPEG has its end.

    Raises OSError, ValueError.
    """
    from PIL import Image as Library

    try:
        with Library.open(stream := io.BytesIO(file), formats=_FORMATS) as opened:
            (width, height), head_bytes = opened.size, stream.tell()
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
    if isinstance(image.source, str):
        return image.source
    return f"an image of {len(image.source)} bytes"


def _json(file: Path) -> Mapping[str, Any]:
    try:
        content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content
