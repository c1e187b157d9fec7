"""How much memory known products have."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

# Parts of names that say nothing of the size.
_MAKER = {"nvidia", "tesla", "geforce"}
_SOCKETS = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "pcie"}
_KINDS = {"hbm2", "hbm2e", "hbm3", "hbm3e"}


@functools.cache
def products() -> Mapping[str, int]:
    """Return the rows of products.toml in bytes."""
    rows = tomllib.loads(
        Path(__file__).with_name("products.toml").read_text(encoding="utf-8")
    )
    return {name.replace(" ", ""): int(gib * (1 << 30)) for name, gib in rows.items()}


def memory_of(product: str) -> int:
    """Return the bytes that CUDA gives of one, by a name as people, nvidia-smi or Ray write it; 0: not known."""
    return products().get(known_name(product), 0)


def known_name(product: str) -> str:
    """Return the name by which tables know a product, without spaces."""
    words = [word for word in re.split("[^a-z0-9]+", product.lower()) if word]
    words = [
        f"{word}b" if re.fullmatch("[0-9]+g", word) else word for word in words
    ]  # Ray labels A100-40G
    return "".join(w for w in words if w not in _MAKER | _SOCKETS | _KINDS)
