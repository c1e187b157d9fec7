"""Folders for the sockets of one machine.

Socket paths have a small length limit, and TMPDIR may be long.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rlplace.codes import problem
from rlplace.comm.shared_memory.folder import LONGEST_SOCKET
from rlplace.errors import ClusterError

SHORT = Path("/tmp")
# Bytes that are added to the folder:
_OURS = len("/rlplace_12345678/door")
_OF_RAY = len("/ray/session_2026-12-31_23-59-59_999999_9999999/sockets/plasma_store.9")
_OF_VLLM = len("/12345678-1234-1234-1234-123456789012")


def socket_folder(behind: int = _OURS) -> Path:
    """Return the folder for temporary files, or /tmp if socket paths in that folder would be too long.

    `behind`: number of bytes that a socket path has after the folder's path.
    """
    usual = Path(tempfile.gettempdir())
    if _fits(usual, behind):
        return usual
    return SHORT


def ray_variables() -> Mapping[str, str]:
    """Return environment variables that make Ray put its sockets into /tmp, for a TMPDIR that is too long for socket
    paths.

    Return an empty mapping if TMPDIR is short enough or RAY_TMPDIR is set. Raise ClusterError if RAY_TMPDIR is too
    long, because Ray would fail in the middle of its start.
    """
    own = os.environ.get("RAY_TMPDIR")
    if own is None:
        if socket_folder(_OF_RAY) == SHORT:
            return {"RAY_TMPDIR": str(SHORT)}
        return {}
    if not _fits(Path(own), _OF_RAY):
        raise ClusterError(
            problem(
                "long-folder",
                "RAY_TMPDIR",
                own,
                error="ray",
                of_ray=_OF_RAY,
                longest=LONGEST_SOCKET,
                short=SHORT,
            )
        )
    return {}


def vllm_variables() -> Mapping[str, str]:
    """Return environment variables that make vLLM put its sockets into /tmp, for a TMPDIR that is too long for socket
    paths.

    Return an empty mapping if TMPDIR is short enough.
    """
    if not _fits(Path(tempfile.gettempdir()), _OF_VLLM):
        return {"VLLM_RPC_BASE_PATH": str(SHORT)}
    return {}


def _fits(folder: Path, behind: int) -> bool:
    return len(os.fsencode(folder)) + behind <= LONGEST_SOCKET
