"""Sizes of the networks of off-policy algorithms, by formulas. The planner needs no torch for them."""

from __future__ import annotations

import dataclasses
import itertools

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSize:
    """A network: how many numbers it learns, in how many tensors, and how many other numbers it has."""

    numbers: int
    tensors: int
    buffers: int = 0

    def __add__(self, other: NetworkSize) -> NetworkSize:
        return NetworkSize(
            numbers=self.numbers + other.numbers,
            tensors=self.tensors + other.tensors,
            buffers=self.buffers + other.buffers,
        )

    @property
    def bytes(self) -> int:
        return _FLOAT32 * (self.numbers + self.buffers)

    @property
    def trained_bytes(self) -> int:
        """Bytes of gradients and of Adam's state: two moments, and a step count for each tensor."""
        return _FLOAT32 * (3 * self.numbers + self.tensors)

    def ensemble(self, members: int) -> NetworkSize:
        """Return the size of several such networks that share tensors."""
        return NetworkSize(
            numbers=members * self.numbers,
            tensors=self.tensors,
            buffers=members * self.buffers,
        )


def layers(widths: tuple[int, ...]) -> NetworkSize:
    """Return the size of linear layers with biases."""
    numbers = sum((wide + 1) * narrow for wide, narrow in itertools.pairwise(widths))
    return NetworkSize(numbers=numbers, tensors=2 * (len(widths) - 1))


def renormalised(widths: tuple[int, ...]) -> NetworkSize:
    """Return the size of batch renormalisation of features of these widths: scales and shifts, and statistics."""
    features = sum(widths)
    return NetworkSize(
        numbers=2 * features,
        tensors=2 * len(widths),
        buffers=2 * features + len(widths),
    )


def policy_size(
    name: str, inputs: int, hidden: tuple[int, ...], outputs: int
) -> NetworkSize:
    """Return the size of the network that acts.

    `name`: the algorithm. `inputs`: numbers of an observation. `outputs`: elements of an action, or choices.
    """
    widths = (inputs, *hidden)
    if name == "iql":
        # And a deviation for each element
        deviations = NetworkSize(numbers=outputs, tensors=1)
        return layers((*widths, outputs)) + deviations
    if name not in ("sac", "crossq"):
        return layers((*widths, outputs))
    # Means and log standard deviations have a layer each
    head = layers((widths[-1], outputs))
    size = layers(widths) + head + head
    if name == "crossq":
        size += renormalised(widths)
    return size


def critics_size(
    name: str, inputs: int, hidden: tuple[int, ...], critics: int
) -> NetworkSize:
    """Return the size of an ensemble of critics. `inputs`: numbers of an observation and elements of an action."""
    one = layers((inputs, *hidden, 1))
    if name == "crossq":
        one += renormalised((inputs, *hidden))
    return one.ensemble(critics)
