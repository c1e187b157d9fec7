"""What convolutions take for an image, and where they look for its channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlplace.config.blocks.policies import CnnConfig
from rlplace.envs.contract import DiscreteActions, Part, Spaces, image_size
from rlplace.models.networks import ImageNetwork, as_channels_first
from rlplace.models.recurrent import StepByStep

SMALL = CnnConfig(network="impala", channels=(4,), hidden=(8,))
TWO = DiscreteActions(n=2)


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        ((9, 7), (1, 9, 7)),
        ((84, 84, 3), (3, 84, 84)),
        ((3, 84, 84), (3, 84, 84)),
        ((210, 160, 3), (3, 210, 160)),
        ((4, 210, 160), (4, 210, 160)),
        ((16, 8, 8), (16, 8, 8)),  # more frames than pixels each way
        ((8, 8, 20), (20, 8, 8)),  # more planes than squares
        ((3, 3, 3), (3, 3, 3)),
        ((4, 9, 9, 3), (12, 9, 9)),
        ((16, 8, 8, 3), (48, 8, 8)),
    ],
)
def test_where_the_channels_are(
    shape: tuple[int, ...], first: tuple[int, int, int]
) -> None:
    assert image_size(shape) == first
    assert as_channels_first(torch.empty(2, *shape)).shape == (2, *first)


def test_a_matrix_beside_an_image_is_numbers() -> None:
    parts = (
        Part(name="pose", shape=(4, 4)),
        Part(name="eye", shape=(9, 7), dtype="uint8"),
    )
    spaces = Spaces(
        observation_shape=(4 * 16 + 63,),
        observation_dtype="uint8",
        parts=parts,
        actions=TWO,
    )
    assert [part.name for part in spaces.images] == ["eye"]
    network = ImageNetwork(spaces, SMALL)
    assert len(network.images) == 1
    assert network.numbers is not None
    assert network.numbers.in_features == 16
    outputs, values = network(
        {"pose": torch.rand(3, 4, 4), "eye": torch.zeros(3, 9, 7, dtype=torch.uint8)}
    )
    assert (outputs.shape, values.shape) == ((3, 2), (3,))


def test_without_bytes_an_array_of_numbers_is_an_image() -> None:
    assert [
        part.shape for part in Spaces(observation_shape=(9, 7, 2), actions=TWO).images
    ] == [(9, 7, 2)]
    assert not Spaces(observation_shape=(5,), actions=TWO).images


class _Cell(nn.Module):
    """A module with a memory as a user writes it, without a word of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 3)

    def forward(
        self, observations: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        memory = self.cell(observations, memory)
        outputs = self.head(memory)
        return outputs[:, 1:], outputs[:, 0], memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_with_a_memory_gets_it_in_the_dtype_of_its_weights(
    dtype: torch.dtype,
) -> None:
    network = StepByStep(_Cell()).to(dtype)
    begins = torch.tensor([[False, False], [True, False]])
    outputs, values, memory = network(
        torch.ones(4, 3, dtype=dtype), torch.ones(2, 4), begins
    )
    assert (outputs.shape, values.shape, memory.shape, memory.dtype) == (
        (4, 2),
        (4,),
        (2, 4),
        dtype,
    )
    assert torch.equal(
        network(torch.ones(1, 3, dtype=dtype), torch.zeros(1, 4))[2][0], memory[0]
    )
