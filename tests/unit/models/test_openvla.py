"""OpenVLA-OFT from a folder in the published layout: its weights, its forward pass, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.read import read_config
from rlplace.contract.registry import job_of
from rlplace.envs.contract import MultiDiscreteActions, Part, Spaces
from rlplace.envs.registry import spaces_of_job
from rlplace.errors import ConfigError, Problem
from rlplace.models.openvla import OpenVla
from rlplace.models.prismatic import stored_prismatic
from rlplace.models.vla_entries import check_vla
from tests.tiny_openvla import (
    BLANK,
    LAYERS,
    PROMPT,
    SIDE,
    STATISTICS,
    VOCABULARY,
    WORDS,
    shapes,
    tiny_openvla,
)

CHUNK = 2
ELEMENTS = 2
TEXT = 30
MEANING = {"name": "rlplace.envs.openvla:OpenVlaActions"}
BINS = {
    "name": "gymnasium.wrappers:DiscretizeAction",
    "kwargs": {"bins": 256, "multidiscrete": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_openvla(tmp_path_factory.mktemp("openvla"))


def spaces(side: int = SIDE) -> Spaces:
    parts = (
        Part(name="state", shape=(2,)),
        Part(name="image", shape=(side, side, 3), dtype="uint8"),
        Part(name="instruction", shape=(TEXT,), dtype="uint8"),
    )
    return Spaces(
        observation_shape=(8 + 3 * side * side + TEXT,),
        observation_dtype="uint8",
        parts=parts,
        actions=MultiDiscreteActions(
            n=(256,) * (CHUNK * ELEMENTS), shape=(CHUNK, ELEMENTS)
        ),
    )


def policy_of(folder: Path, side: int = SIDE, **given: Any) -> OpenVla:
    config = VlaConfig(
        path=str(folder),
        **{"decoding": "parallel", "instruction_tokens": 20, **given},
    )
    return OpenVla(spaces(side), config).eval()


def seen(*said: str, side: int = SIDE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = len(said)
    pixels = torch.randint(0, 256, (rows, side, side, 3), generator=generator)
    texts = [list(text.encode().ljust(TEXT, b"\0")) for text in said]
    return {
        "state": torch.rand(rows, 2, generator=generator),
        "image": pixels.to(torch.uint8),
        "instruction": torch.tensor(texts, dtype=torch.uint8),
    }


# ── a reference, written from the published forward pass ─────────────────────────────────────────────────────────────


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name: weight.float() for name, weight in found.items()}


def layer(weights: dict[str, Tensor], name: str, given: Tensor) -> Tensor:
    return functional.linear(
        given, weights[f"{name}.weight"], weights.get(f"{name}.bias")
    )


def normed(weights: dict[str, Tensor], name: str, given: Tensor) -> Tensor:
    weight = weights[f"{name}.weight"]
    return functional.layer_norm(
        given, weight.shape, weight, weights[f"{name}.bias"], 1e-6
    )


def attended(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Attention of all tokens to all, [tokens, width]."""
    tokens, width = query.shape
    split = [
        each.view(tokens, heads, -1).transpose(0, 1) for each in (query, key, value)
    ]
    scores = split[0] @ split[1].transpose(1, 2) / (width // heads) ** 0.5
    return (scores.softmax(dim=-1) @ split[2]).transpose(0, 1).reshape(tokens, width)


def tower(weights: dict[str, Tensor], name: str, image: Tensor, blocks: int) -> Tensor:
    """Features of the patches after the last block but one. `image`: [3, side, side]."""
    of = {
        key.removeprefix(f"vision_backbone.{name}."): weight
        for key, weight in weights.items()
    }
    patches = functional.conv2d(
        image[None], of["patch_embed.proj.weight"], of["patch_embed.proj.bias"], 14
    )
    tokens = patches[0].flatten(1).T + of["pos_embed"][0]
    before = 0
    if "cls_token" in of:
        first = torch.cat([of["cls_token"][0], of["reg_token"][0]])
        before = len(first)
        tokens = torch.cat([first, tokens])
    for number in range(blocks - 1):
        block = f"blocks.{number}"
        mixed = layer(of, f"{block}.attn.qkv", normed(of, f"{block}.norm1", tokens))
        found = layer(of, f"{block}.attn.proj", attended(*mixed.chunk(3, dim=1), 16))
        tokens = tokens + found * of.get(f"{block}.ls1.scale_factor", torch.ones(1))
        hidden = layer(of, f"{block}.mlp.fc1", normed(of, f"{block}.norm2", tokens))
        found = layer(of, f"{block}.mlp.fc2", functional.gelu(hidden))
        tokens = tokens + found * of.get(f"{block}.ls2.scale_factor", torch.ones(1))
    return tokens[before:]


def llama(weights: dict[str, Tensor], tokens: Tensor, layers: int) -> Tensor:
    """Outputs before the head, with attention in both directions."""

    def norm(name: str, given: Tensor) -> Tensor:
        root = given.square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt()
        return given * root * of[f"{name}.weight"]

    def rotated(given: Tensor) -> Tensor:
        split = given.view(len(given), heads, -1)
        half = split.shape[-1] // 2
        rate = 10_000 ** (-torch.arange(half) / half)
        angle = torch.arange(len(given))[:, None] * rate
        cosine, sine = (
            torch.cat([each, each], dim=1)[:, None]
            for each in (angle.cos(), angle.sin())
        )
        turned = torch.cat([-split[..., half:], split[..., :half]], dim=-1)
        return (split * cosine + turned * sine).flatten(1)

    heads = 4
    of = {
        key.removeprefix("language_model.model."): value
        for key, value in weights.items()
    }
    for number in range(layers):
        block = f"layers.{number}"
        given = norm(f"{block}.input_layernorm", tokens)
        query, key, value = (
            layer(of, f"{block}.self_attn.{name}_proj", given) for name in "qkv"
        )
        mixed = attended(rotated(query), rotated(key), value, heads)
        tokens = tokens + layer(of, f"{block}.self_attn.o_proj", mixed)
        given = norm(f"{block}.post_attention_layernorm", tokens)
        gate = functional.silu(layer(of, f"{block}.mlp.gate_proj", given))
        hidden = gate * layer(of, f"{block}.mlp.up_proj", given)
        tokens = tokens + layer(of, f"{block}.mlp.down_proj", hidden)
    return norm("norm", tokens)


def reference(folder: Path, image: Tensor, instruction: str) -> Tensor:
    """Logits [elements, tokens of the vocabulary] for an image of bytes, [side, side, 3]."""
    weights = weights_of(folder)
    pixels = image.movedim(-1, 0).float() / 255
    features = []
    for name, blocks, mean, deviation in (
        ("featurizer", LAYERS[0], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("fused_featurizer", LAYERS[1], (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ):
        shift, scale = (torch.tensor(each)[:, None, None] for each in (mean, deviation))
        features.append(tower(weights, name, (pixels - shift) / scale, blocks))
    shown = torch.cat(features, dim=1)
    shown = functional.gelu(layer(weights, "projector.fc1", shown))
    shown = functional.gelu(layer(weights, "projector.fc2", shown))
    shown = layer(weights, "projector.fc3", shown)
    words = list(dict.fromkeys([*PROMPT, *WORDS]))
    question = ["In", ":", "What", "action", "should", "the", "robot", "take", "to"]
    said = [*question, *instruction.split(), "?", "Out", ":"]
    ids = [100 + words.index(word) for word in said]
    embedded = weights["language_model.model.embed_tokens.weight"]
    tokens = torch.cat(
        [
            embedded[[1]],
            shown,
            embedded[[*ids, BLANK]],
            torch.zeros(CHUNK * ELEMENTS, embedded.shape[1]),
            embedded[[2]],
        ]
    )
    outputs = llama(weights, tokens, LAYERS[2])
    first = len(shown) + len(ids) + 1
    answers = outputs[first : first + CHUNK * ELEMENTS]
    return layer(weights, "language_model.lm_head", answers)


@torch.no_grad()
def test_the_forward_pass_is_the_published_one(folder: Path) -> None:
    said = ("go to red", "reach the green square")
    given = seen(*said)
    outputs, values = policy_of(folder)(given)
    assert (outputs.shape, values.shape) == ((2, CHUNK * ELEMENTS * 256), (2,))
    for row, instruction in enumerate(said):
        logits = reference(folder, given["image"][row], instruction)
        # Choice c is the token c + 1 from the end of 32,000
        tokens = [31_999 - choice for choice in range(256)]
        found = outputs[row].view(CHUNK * ELEMENTS, 256)
        torch.testing.assert_close(found, logits[:, tokens], atol=2e-5, rtol=1e-4)


def test_every_weight_of_the_published_layout_is_used(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = stored_prismatic(folder, config["text_config"])
    state = dict(model.named_parameters())
    assert {name: tuple(each.shape) for name, each in state.items()} == shapes()
    for name, weight in weights_of(folder).items():
        torch.testing.assert_close(state[name].detach(), weight, rtol=0, atol=0)


@torch.no_grad()
def test_each_row_is_decided_by_itself(folder: Path) -> None:
    policy = policy_of(folder)
    given = seen("go to red", "reach the green square")
    together = policy(given)
    for row in range(2):
        alone = policy({name: each[row : row + 1] for name, each in given.items()})
        for part, whole in zip(alone, together, strict=True):
            torch.testing.assert_close(part[0], whole[row])


@torch.no_grad()
def test_an_instruction_is_read_in_small_letters(folder: Path) -> None:
    policy = policy_of(folder)
    torch.testing.assert_close(policy(seen("Go TO Red")), policy(seen("go to red")))


def test_a_prompt_that_is_too_long_names_the_number(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_of(folder, instruction_tokens=8)(seen("go to red"))
    (found,) = caught.value.problems
    assert (found.code, found.fix) == ("instruction-not-read", "instruction_tokens: 16")


@torch.no_grad()
def test_images_are_resized_as_a_processor_of_images_does(folder: Path) -> None:
    """The published one resizes with PIL, which rounds to bytes."""
    import numpy as np
    from PIL import Image

    side = 40
    given = seen("go to red", side=side)["image"]
    picture = Image.fromarray(given[0].numpy())
    resized = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    first, second = policy_of(folder, side)._pixels(given)
    found = 255 * (second[0] * 0.5 + 0.5)
    expected = torch.tensor(resized).movedim(-1, 0).float()
    assert (found - expected).abs().max() <= 1 + 1e-3
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for channel in range(3):
        normal = first[0, channel] * deviation[channel] + mean[channel]
        torch.testing.assert_close(255 * normal, found[channel])


@torch.no_grad()
def test_a_crop_reads_the_middle_of_an_image(folder: Path) -> None:
    """Its corners are those of `tf.image.crop_and_resize` with boxes around the middle."""
    given = seen("go to red")["image"]
    whole = policy_of(folder)._pixels(given)[1]
    cropped = policy_of(folder, crop_area=0.81)._pixels(given)[1]
    # 0.9 of each side: the first pixel is 5 % of the way from the first to the last
    place = 0.05 * (SIDE - 1)
    low, share = int(place), place % 1
    corner = whole[0, :, low : low + 2, low : low + 2]
    rows = corner[:, 0] * (1 - share) + corner[:, 1] * share
    expected = rows[:, 0] * (1 - share) + rows[:, 1] * share
    # Both are rounded to bytes, from -1 to 1
    assert (cropped[0, :, 0, 0] - expected).abs().max() <= 0.51 / 127.5
    torch.testing.assert_close(
        policy_of(folder, crop_area=1.0)._pixels(given)[1], whole
    )


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def config_of(
    path: Path | str,
    model: dict[str, Any] | None = None,
    wrappers: Any = None,
    **env: Any,
) -> Any:
    if wrappers is None:
        wrappers = [{**MEANING, "kwargs": {"folder": str(path)}}]
    return read_config(
        {
            "cluster": {"component_placement": {"actor": 0, "env": 0, "rollout": 0}},
            "env": {"id": "rlplace.envs.reach:Reach", "wrappers": wrappers, **env},
            "actor": {
                "model": {
                    "kind": "vla",
                    "path": str(path),
                    "decoding": "parallel",
                    **(model or {}),
                }
            },
        }
    )


def refused(config: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        check_vla(spaces_of_job(config), config.actor.policy, config.env)
    (found,) = caught.value.problems
    return found


def test_a_whole_config_passes(folder: Path) -> None:
    config = config_of(folder)
    found = spaces_of_job(config)
    check_vla(found, config.actor.policy, config.env)
    assert found.actions == MultiDiscreteActions(n=(256, 256), shape=(2,))


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        ({"decoding": None}, "decoding: parallel"),
        (
            {"decoding": "autoregressive"},
            "decoding: parallel    # with a checkpoint of OpenVLA-OFT",
        ),
        ({"state": ["state"]}, "state: []"),
    ],
)
def test_keys_that_a_checkpoint_does_not_fit(
    folder: Path, model: dict[str, Any], fix: str
) -> None:
    found = refused(config_of(folder, model))
    assert (found.code, found.fix) == ("model-misfit", fix)


@pytest.mark.parametrize(
    "wrappers", [[BINS], [{**BINS, "kwargs": {**BINS["kwargs"], "bins": 5}}]]
)  # type: ignore[dict-item]  # as YAML
def test_bins_without_the_statistics_of_the_checkpoint_are_refused(
    folder: Path, wrappers: Any
) -> None:
    """Middles of the bins of a simulator's own bounds would be other actions."""
    found = refused(config_of(folder, wrappers=wrappers))
    assert (found.code, found.key) == ("model-misfit", "env.wrappers")
    assert found.fix is not None
    proposed = yaml.safe_load(found.fix.partition(": ")[2])
    assert proposed == [{**MEANING, "kwargs": {"folder": str(folder)}}]
    config = config_of(folder, wrappers=proposed)
    check_vla(spaces_of_job(config), config.actor.policy, config.env)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"type": "pi0"}, "by flow matching"),
        ({"type": "pi0_fast"}, "frequency transform"),
        ({"model_type": "gr00t_n1_5"}, "by flow matching"),
    ],
)
def test_a_policy_with_continuous_actions_is_refused_at_the_plan(
    tmp_path: Path, kind: dict[str, str], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kind))
    (found,) = planned(config_of(tmp_path))
    assert (found.code, found.key) == ("model-misfit", "actor.model.path")
    assert found.why is not None
    assert why in found.why


def test_a_smolvla_needs_the_head_by_flow_matching(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "smolvla"}')
    (found,) = planned(config_of(tmp_path))
    assert (found.code, found.key) == ("model-misfit", "actor.model.head")
    assert found.fix == "head: flow"


def test_a_checkpoint_of_openpi_is_refused_at_the_plan(tmp_path: Path) -> None:
    for name in ("params", "assets"):
        (tmp_path / name).mkdir()
    (found,) = planned(config_of(tmp_path))
    assert found.what == "a checkpoint of openpi is no model of this policy"


def planned(config: Any) -> list[Problem]:
    """The problems that a plan finds, which makes no simulator."""
    return [*job_of(config).environment_problems(config)]


def test_a_plan_takes_a_whole_checkpoint(folder: Path) -> None:
    assert planned(config_of(folder)) == []


def spoilt(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("action_head--150000_checkpoint.pt", "regression or diffusion"),
        ("proprio_projector--150000_checkpoint.pt", "numbers of the robot"),
    ],
)
def test_parts_of_openvla_oft_that_are_not_called_are_refused(
    folder: Path, tmp_path: Path, file: str, part: str
) -> None:
    copy = spoilt(folder, tmp_path)
    (copy / file).touch()
    (found,) = planned(config_of(copy))
    assert found.why is not None
    assert part in found.why


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"timm_model_ids": ["vit_large_patch14_clip_224.openai"]}, "vision towers"),
        ({"text_config": {"model_type": "mistral"}}, "no Llama"),
        ({"text_config": {"model_type": "llama"}}, "vocab_size"),
    ],
)
def test_another_network_is_refused(
    folder: Path, tmp_path: Path, keys: dict[str, Any], reason: str
) -> None:
    copy = spoilt(folder, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **keys}))
    (found,) = planned(config_of(copy))
    assert found.what == "the folder is not as OpenVLA publishes it"
    assert found.why is not None
    assert reason in found.why


def test_a_lost_file_of_weights_is_told(folder: Path, tmp_path: Path) -> None:
    copy = spoilt(folder, tmp_path)
    (copy / "model-00002-of-00002.safetensors").unlink()
    (found,) = planned(config_of(copy))
    assert found.why is not None
    assert "model-00002-of-00002.safetensors is missing" in found.why


@pytest.mark.parametrize("change", ["less", "more", "shape"])
def test_weights_that_are_not_those_of_the_layout_are_refused(
    folder: Path, tmp_path: Path, change: str
) -> None:
    copy = spoilt(folder, tmp_path)
    name = "projector.fc3.bias"
    for file in copy.glob("*.safetensors"):
        weights = load_file(file)
        if name in weights:
            if change == "less":
                del weights[name]
            elif change == "more":
                weights[f"{name}.lora_A"] = weights[name].clone()
            else:
                weights[name] = weights[name][:-1].clone()
            save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        policy_of(copy)
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "actor.model.path")
    assert found.why is not None
    assert name in found.why


def test_an_image_that_is_not_square_needs_the_strategy_of_openvla(
    folder: Path, tmp_path: Path
) -> None:
    copy = spoilt(folder, tmp_path)
    file = copy / "preprocessor_config.json"
    pictures = json.loads(file.read_text())
    file.write_text(json.dumps({**pictures, "image_resize_strategy": "letterbox"}))
    config = config_of(copy, id=f"{__name__}:Wide")
    assert refused(config).what == "the image is not square"
    config = config_of(folder, id=f"{__name__}:Wide")
    check_vla(spaces_of_job(config), config.actor.policy, config.env)


def test_only_one_camera_of_openvla_is_read(folder: Path) -> None:
    cameras = {"cameras": ["wrist", "image"]}
    found = refused(config_of(folder, cameras, id=f"{__name__}:TwoCameras"))
    assert (found.key, found.fix) == ("actor.model.cameras", "cameras: [wrist]")


def test_an_environment_without_an_instruction_is_refused(folder: Path) -> None:
    found = refused(config_of(folder, id=f"{__name__}:Mute"))
    assert found.what == "there is no instruction"


def test_the_vocabulary_is_that_of_llama_without_what_was_added() -> None:
    assert VOCABULARY - 64 == 32_000
    assert [*STATISTICS] == ["squares"]


def Wide() -> Any:  # named as a class of environments
    return _changed(lambda of: of.update(image=_picture(32, 48)))


def Mute() -> Any:  # named as a class of environments
    return _changed(lambda of: of.pop("instruction"))


def _picture(height: int, width: int) -> Any:
    import gymnasium
    import numpy as np

    return gymnasium.spaces.Box(0, 255, (height, width, 3), np.uint8)


def _changed(change: Any) -> Any:
    import gymnasium

    from rlplace.envs.reach import Reach

    env = Reach()
    entries = dict(env.observation_space.spaces)
    change(entries)
    env.observation_space = gymnasium.spaces.Dict(entries)
    return env


def TwoCameras() -> Any:  # named as a class of environments
    return _changed(lambda of: of.update(wrist=_picture(32, 32)))
