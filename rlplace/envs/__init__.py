"""Simulator adapters behind one contract; importing this imports no simulator library."""

from rlplace.envs.registry import check, describe, find_adapter, row_seeds

__all__ = ["check", "describe", "find_adapter", "row_seeds"]
