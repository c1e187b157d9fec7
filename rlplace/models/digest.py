"""Fingerprint of a set of tensors, to compare copies to the bit across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, whatever the order and the device."""
    fingerprint = hashlib.sha256()
    for name in sorted(tensors):
        # A copy: a storage that numpy has referenced can not be resized, as offloading does.
        tensor = tensors[name].detach().to("cpu", copy=True).contiguous()
        fingerprint.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        fingerprint.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return fingerprint.hexdigest()
