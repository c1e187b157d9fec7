"""Memory of known accelerators, by product."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

# Parts of names that do not depend on the size of the memory.
_MAKER = {"nvidia", "tesla", "geforce", "amd", "instinct"}
_SOCKETS = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "pcie", "oam"}
_KINDS = {"hbm2", "hbm2e", "hbm3", "hbm3e"}


@functools.cache
def products() -> Mapping[str, int]:
    """Return accelerator model -> memory of one accelerator in bytes, for the models in products.toml."""
    file = Path(__file__).with_name("products.toml")
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name.replace(" ", ""): int(gib * (1 << 30)) for name, gib in rows.items()}


def memory_of(product: str) -> int:
    """Return the memory in bytes that CUDA offers on one accelerator of a model; 0 if the model is not known.

    `product`: name of the accelerator model, as a config, nvidia-smi or Ray writes it.
    """
    return products().get(known_name(product), 0)


def known_name(product: str) -> str:
    """Return the name of an accelerator model in the form that `products` uses.

    This form is in lower case, without maker, socket, kind of memory and spaces.
    """
    name = ""
    for word in re.split("[^a-z0-9]+", product.lower()):
        if word in _MAKER | _SOCKETS | _KINDS:
            continue
        if re.fullmatch("[0-9]+g", word):
            # Ray labels A100-40G
            word += "b"
        name += word
    return name
