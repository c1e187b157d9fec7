"""Checkpoints of SmolVLA in the layout of lerobot: weights by their names, units by their statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from rlplace.config.read import read_config
from rlplace.envs.contract import DenoisedActions, Spaces
from rlplace.envs.reach import Reach
from rlplace.envs.registry import spaces_of_job
from rlplace.envs.smolvla import SmolVlaUnits
from rlplace.errors import ConfigError, Problem
from rlplace.models.flow_vla import FlowVla
from rlplace.models.vla import image_tokens
from rlplace.models.vla_entries import check_vla
from tests.tiny_smolvla import ACTION, CHUNK, STATE, tiny_smolvla


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_smolvla(tmp_path_factory.mktemp("tiny"))


def config_of(
    folders: tuple[Path, Path], model: dict[str, Any] | None = None, **env: Any
) -> Any:
    own, vlm = folders
    units = {
        "name": "rlplace.envs.smolvla:SmolVlaUnits",
        "kwargs": {"folder": str(own)},
    }
    chosen = {"kind": "vla", "head": "flow", "path": str(own), "vlm": str(vlm)}
    return read_config(
        {
            "cluster": {"component_placement": {}},
            "env": {"id": "rlplace.envs.reach:Reach", "wrappers": [units], **env},
            "rollout": {"action_chunk": 2},
            "actor": {
                "model": {
                    **chosen,
                    "denoising_steps": 3,
                    "instruction_tokens": 8,
                    **(model or {}),
                }
            },
        }
    )


def made(folders: tuple[Path, Path]) -> tuple[FlowVla, Spaces]:
    config = config_of(folders)
    spaces = spaces_of_job(config)
    check_vla(spaces, config.actor.policy, config.env)
    policy = FlowVla(spaces, config.actor.policy)
    policy.initialise(torch.Generator().manual_seed(0))
    return policy, spaces


def test_weights_are_those_of_the_folder(folders: tuple[Path, Path]) -> None:
    """Each weight is read by its published name; the value is new."""
    policy, spaces = made(folders)
    assert isinstance(spaces.actions, DenoisedActions)
    assert spaces.actions.shape == (1 + 3, 2, ACTION)
    stored = load_file(folders[0] / "model.safetensors")
    model = "model.vlm_with_expert.vlm.model."
    for name, parameter in {
        f"{model}vision_model.post_layernorm.weight": policy.vision.post_layernorm.weight,
        f"{model}text_model.layers.1.mlp.up_proj.weight": policy.decoder.layers[
            1
        ].mlp.up_proj.weight,
        f"{model}connector.modality_projection.proj.weight": policy.connector.modality_projection.proj.weight,
        "model.state_proj.bias": policy.state.bias,
        "model.action_out_proj.weight": policy.action_out.weight,
        "model.action_time_mlp_in.weight": policy.time_in.weight,
    }.items():
        assert torch.equal(parameter, stored[name])
    # The last layer of the vision-language model is not used
    assert len(policy.decoder.layers) == 2
    read = sum(parameter.numel() for parameter in policy.parameters())
    value = sum(p.numel() for p in (policy.value_query, *policy.value.parameters()))
    head = stored["model.vlm_with_expert.vlm.lm_head.weight"].numel()
    assert read - value == sum(tensor.numel() for tensor in stored.values()) - head


def changed(folders: tuple[Path, Path], to: Path, change: Any) -> tuple[Path, Path]:
    """A copy of the checkpoint with other weights."""
    own = to / "smolvla"
    own.mkdir()
    for file in folders[0].iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    weights = load_file(own / "model.safetensors")
    change(weights)
    save_file(weights, own / "model.safetensors")
    return own, folders[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.pop("model.state_proj.bias"),
        lambda weights: weights.update(another=torch.zeros(1)),
        lambda weights: weights.update({"model.state_proj.bias": torch.zeros(2)}),
    ],
)
def test_no_weight_is_missing_left_over_or_cut(
    folders: tuple[Path, Path], tmp_path: Path, change: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(changed(folders, tmp_path, change))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "actor.model.path")
    assert "1 are missing" in str(found.why)


def test_statistics_among_the_weights_of_earlier_versions_are_no_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    name = "normalize_inputs.buffer_observation_state.mean"
    made(changed(folders, tmp_path, lambda of: of.update({name: torch.zeros(2)})))


def refused(config: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        check_vla(spaces_of_job(config), config.actor.policy, config.env)
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"head": "bins"}, "head"),
        ({"vlm": None}, "vlm"),
        ({"vlm": "/nowhere"}, "vlm"),
    ],
)
def test_keys_that_a_checkpoint_does_not_fit(
    folders: tuple[Path, Path], model: dict[str, Any], key: str
) -> None:
    found = refused(config_of(folders, model))
    assert (found.code, found.key) == ("model-misfit", f"actor.model.{key}")


def test_another_vision_language_model_is_refused(tmp_path: Path) -> None:
    folders = tiny_smolvla(tmp_path, resize_imgs_with_padding=[32, 32])
    found = refused(config_of(folders))
    assert found.key == "actor.model.vlm"
    assert found.what == "is not the vision-language model of the SmolVLA"


@pytest.mark.parametrize("has_path", [False, True])
def test_a_second_folder_beside_another_model_is_refused(
    folders: tuple[Path, Path], has_path: bool
) -> None:
    """Its tokenizer would be read in place of the model's own."""
    path = str(folders[1]) if has_path else None
    found = refused(config_of(folders, {"path": path}))
    assert (found.key, found.fix) == ("actor.model.vlm", "vlm: null")


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_mode": "self_attn"},
        {"empty_cameras": 1},
        {"num_expert_layers": 1},
        {"resize_imgs_with_padding": [16, 32]},
    ],
)
def test_other_settings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = refused(config_of(tiny_smolvla(tmp_path, **settings)))
    assert found.key == "actor.model.path"
    assert next(iter(settings)).partition("_")[0] in str(found.why)


def test_a_longer_chunk_than_that_of_the_checkpoint(tmp_path: Path) -> None:
    found = refused(config_of(tiny_smolvla(tmp_path, chunk_size=1)))
    assert (found.key, found.fix) == ("rollout.action_chunk", "rollout.action_chunk: 1")
    assert CHUNK > 2


def test_numbers_in_other_units_are_refused_with_the_wrapper(
    folders: tuple[Path, Path],
) -> None:
    found = refused(config_of(folders, wrappers=[]))
    assert (found.code, found.key) == ("model-misfit", "env.wrappers")
    _, _, value = str(found.fix).partition(": ")
    config = config_of(folders, wrappers=yaml.safe_load(value))
    check_vla(spaces_of_job(config), config.actor.policy, config.env)


def test_state_and_actions_have_the_units_of_the_data_set(
    folders: tuple[Path, Path],
) -> None:
    env = SmolVlaUnits(Reach(pixels=16), str(folders[0]))
    plain: Any = env.unwrapped
    shown, _ = env.reset(seed=0)
    assert env.observation_space.contains(shown)
    place = plain._places[0]
    expected = (place - [0.5, 0.4]) / [0.2, 0.3]
    np.testing.assert_allclose(shown["state"][:2], expected, rtol=1e-5)
    assert shown["state"].shape == (STATE,)
    assert not shown["state"][2:].any()
    before = place.copy()
    env.step(np.asarray([0.2, 2.0, 9.0, 9.0, 9.0], np.float32))
    # 0.2 * 0.5 + 0.1, and 2 * 0.25 - 0.1, of the longest move
    np.testing.assert_allclose(plain._places[0] - before, [0.2 * 0.2, 0.2 * 0.4])


class Arm(Reach):
    """A robot with three joints."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)


class Shifted(Reach):
    """A robot whose actions have other units."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(5, 9, (2,), np.float32)


@pytest.mark.parametrize("robot", [Arm, Shifted])
def test_statistics_of_another_robot_are_refused(
    folders: tuple[Path, Path], robot: type
) -> None:
    found = refused(config_of(folders, id=f"{__name__}:{robot.__name__}"))
    assert (found.code, found.key) == ("bad-wrapper", "env.wrappers[0]")
    assert "another robot" in str(found.why)
    with pytest.raises(ValueError, match="another robot"):
        SmolVlaUnits(robot(), str(folders[0]))


def test_statistics_that_are_not_there(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    own, _ = changed(folders, tmp_path, lambda weights: None)
    (own / "policy_postprocessor.json").unlink()
    with pytest.raises(ValueError, match=r"no policy_postprocessor\.json"):
        SmolVlaUnits(Reach(), str(own))
    shape = json.loads((own / "config.json").read_text())
    shape["normalization_mapping"]["STATE"] = "MIN_MAX"
    (own / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ValueError, match="MIN_MAX"):
        SmolVlaUnits(Reach(), str(own))


def test_images_keep_their_shape() -> None:
    """Black pixels are added at the left and at the top, as lerobot adds them."""

    class Tower(nn.Module):
        class config:
            image_size = 8
            patch_size = 8

        def forward(self, pixel_values: Any, patch_attention_mask: Any) -> Any:
            self.pixels = pixel_values
            return type("States", (), {"last_hidden_state": torch.zeros(1, 1, 1)})

    tower = Tower()
    image = torch.randint(0, 256, (1, 16, 8, 3), dtype=torch.uint8)
    image_tokens(tower, nn.Identity(), [image], torch.float32, padded=True)
    pixels = image.movedim(-1, 1).float() / 255
    expected = functional.interpolate(pixels, (8, 4), mode="bilinear")
    torch.testing.assert_close(tower.pixels[..., 4:], 2 * expected - 1)
    assert bool((tower.pixels[..., :4] == -1).all())
