"""The trained policy as a safetensors file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from rlplace.errors import OutputError


def write_policy(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replaces `path` only once everything is on the disk. Raises OutputError; then `path` is what it was before."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError.of(path, error) from error
