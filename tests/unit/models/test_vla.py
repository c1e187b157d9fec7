"""Vision-language-action policies: what they read, what they refuse, and models from folders."""

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
from transformers import AutoTokenizer

from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.read import read_config
from rlplace.envs.contract import (
    ContinuousActions,
    MultiDiscreteActions,
    Part,
    Spaces,
)
from rlplace.envs.reach import Reach
from rlplace.envs.registry import spaces_of_job
from rlplace.errors import ConfigError, Problem
from rlplace.models.flow_vla import FlowVla
from rlplace.models.vla import Vla
from rlplace.models.vla_entries import check_vla, entries_for
from tests.tiny_vlm import tiny_smolvlm, tiny_vlm

NEARER = {"name": "rlplace.envs.reach:Nearer"}
BINS = {
    "name": "gymnasium.wrappers:DiscretizeAction",
    "kwargs": {"bins": 5, "multidiscrete": True},
}
WORDS = ["reach", "go", "to", "the", "red", "green", "blue", "square"]
SPACES = Spaces(
    observation_shape=(4 * 2 + 16 * 16 * 3 + 8,),
    observation_dtype="uint8",
    parts=(
        Part(name="state", shape=(2,)),
        Part(name="image", shape=(16, 16, 3), dtype="uint8"),
        Part(name="instruction", shape=(8,), dtype="uint8"),
    ),
    actions=MultiDiscreteActions(n=(4, 3), shape=(2,)),
)


def seen(*said: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = len(said)
    pixels = torch.randint(0, 256, (rows, 16, 16, 3), generator=generator)
    texts = [list(text.encode().ljust(8, b"\0")) for text in said]
    return {
        "state": torch.rand(rows, 2, generator=generator),
        "image": pixels.to(torch.uint8),
        "instruction": torch.tensor(texts, dtype=torch.uint8),
    }


def small(**given: Any) -> VlaConfig:
    sizes: dict[str, Any] = {"width": 16, "heads": 2, "layers": 1, "patch": 4}
    return VlaConfig(**{**sizes, "instruction_tokens": 3, "words": ("a", "b"), **given})


def checked(config: Any) -> Spaces:
    spaces = spaces_of_job(config)
    check_vla(spaces, config.actor.policy, config.env)
    return spaces


def refused(
    model: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    wrappers: tuple[dict[str, Any], ...] = (BINS,),
) -> Problem:
    given = {
        "cluster": {"component_placement": {}},
        "env": {
            "id": "rlplace.envs.reach:Reach",
            "wrappers": list(wrappers),
            **(env or {}),
        },
        "actor": {
            "model": {"kind": "vla", "words": WORDS, "patch": 8, **(model or {})}
        },
    }
    with pytest.raises(ConfigError) as caught:
        checked(read_config(given))
    (found,) = caught.value.problems
    return found


@pytest.mark.parametrize(
    ("model", "env", "key", "fix"),
    [
        ({"image": "camera"}, {}, "image", "image: image"),
        ({"instruction": "task"}, {}, "instruction", "instruction: instruction"),
        ({"state": ["joints"]}, {}, "state", "state: [state]"),
        ({"state": ["image"]}, {}, "state", "state: [state]"),
        ({"patch": 6}, {}, "patch", "patch: 4"),
        ({"width": 20}, {}, "width", "width: 24"),
        ({"words": []}, {}, "words", "words: [<word>, <word>]"),
        ({"path": "/nowhere"}, {}, "path", "path: null"),
        ({}, {"id": "CartPole-v1", "wrappers": []}, "kind", "kind: mlp"),
    ],
)
def test_what_does_not_fit_is_told_with_a_fix(
    model: dict[str, Any], env: dict[str, Any], key: str, fix: str
) -> None:
    found = refused(model, env)
    assert (found.code, found.key) == ("model-misfit", f"actor.model.{key}")
    assert found.fix == fix


def test_actions_that_are_no_bins_are_refused_with_the_wrapper_that_makes_them() -> (
    None
):
    found = refused(wrappers=(NEARER,))
    assert (found.code, found.key) == ("model-misfit", "actor.model.kind")
    proposed = pasted(found)
    assert proposed["wrappers"][0] == NEARER
    spaces = checked(job(**proposed))
    assert spaces.actions == MultiDiscreteActions(n=(256, 256), shape=(2,))


@pytest.mark.parametrize(
    ("bins", "what"),
    [
        ({"bins": 1, "multidiscrete": True}, "there is nothing to choose"),
        # Without `multidiscrete`, one choice among all combinations
        ({"bins": 300}, "each combination of bins is a choice of its own"),
    ],
)
def test_bins_that_are_no_choices_of_elements(bins: dict[str, Any], what: str) -> None:
    found = refused(wrappers=({**BINS, "kwargs": bins}, NEARER))
    assert (found.code, found.key, found.what) == ("model-misfit", "env.wrappers", what)
    proposed = pasted(found)
    assert [wrapper["name"] for wrapper in proposed["wrappers"]] == [
        NEARER["name"],
        BINS["name"],
    ]
    spaces = checked(job(**proposed))
    assert spaces.actions == MultiDiscreteActions(n=(256, 256), shape=(2,))


def pasted(found: Problem) -> dict[str, Any]:
    """The block env with the last line of the fix."""
    assert found.fix is not None
    key, _, value = found.fix.splitlines()[-1].partition(": ")
    assert key == "env.wrappers"
    return {"wrappers": yaml.safe_load(value)}


class Blind(Reach):
    """It shows no picture."""

    def __init__(self) -> None:
        super().__init__()
        spaces = dict(self.observation_space.spaces)
        del spaces["image"]
        self.observation_space = gymnasium.spaces.Dict(spaces)


@pytest.mark.parametrize(
    ("model", "env", "first"),
    [
        ({"kind": "cnn", "network": "impala"}, "rlplace.envs.reach:Reach", "kind: vla"),
        ({"kind": "mlp"}, f"{__name__}:Blind", None),
    ],
)
def test_a_text_for_another_kind_of_policy(
    model: dict[str, str], env: str, first: str | None
) -> None:
    def of(**wrappers: Any) -> Any:
        return read_config(
            {
                "cluster": {"component_placement": {}},
                "env": {"id": env, **wrappers},
                "actor": {"model": model},
            }
        )

    with pytest.raises(ConfigError) as caught:
        spaces_of_job(of(wrappers=[NEARER]))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "actor.model.kind")
    assert found.fix is not None
    assert first is None or first in found.fix.splitlines()
    proposed = pasted(found)
    assert proposed["wrappers"][0] == NEARER
    assert not spaces_of_job(of(**proposed)).texts


class TwoCameras(Reach):
    def __init__(self) -> None:
        super().__init__()
        spaces = dict(self.observation_space.spaces)
        spaces["wrist"] = spaces["image"]
        self.observation_space = gymnasium.spaces.Dict(spaces)


class Grey(Reach):
    def __init__(self) -> None:
        super().__init__()
        picture = gymnasium.spaces.Box(0, 255, (32, 32, 1), np.uint8)
        spaces = {**self.observation_space.spaces, "image": picture}
        self.observation_space = gymnasium.spaces.Dict(spaces)


class Odd(Reach):
    def __init__(self) -> None:
        super().__init__(pixels=33)


class Floats(Reach):
    """Its picture is no bytes."""

    def __init__(self) -> None:
        super().__init__()
        picture = gymnasium.spaces.Box(0, 1, (32, 32, 3), np.float32)
        spaces = {**self.observation_space.spaces, "image": picture}
        self.observation_space = gymnasium.spaces.Dict(spaces)


@pytest.mark.parametrize(
    ("kind", "key", "what"),
    [
        (Grey, "image", "is no image of red, green and blue"),
        (Floats, "kind", "the observations of the simulator have no image of bytes"),
        (Odd, "patch", "the image has an odd number of pixels each way"),
    ],
)
def test_cameras_that_it_cannot_look_through(kind: type, key: str, what: str) -> None:
    found = refused(env={"id": f"{__name__}:{kind.__name__}"})
    assert (found.code, found.key) == ("model-misfit", f"actor.model.{key}")
    assert found.what == what


def test_several_cameras_are_read_in_the_order_of_the_config() -> None:
    env = {"id": f"{__name__}:TwoCameras", "wrappers": [BINS]}
    for names in (["image", "wrist"], ["wrist", "image"], ["wrist"]):
        model = {"kind": "vla", "words": WORDS, "patch": 8, "cameras": names}
        config = read_config(
            {
                "cluster": {"component_placement": {}},
                "env": env,
                "actor": {"model": model},
            }
        )
        read = entries_for(checked(config), config.actor.policy).images
        assert [part.name for part in read] == names


@pytest.mark.parametrize(
    ("model", "key", "fix"),
    [
        ({}, "cameras", "one of\ncameras: [image, wrist]\nimage: <entry>"),
        ({"cameras": ["wrist", "wrist"]}, "cameras", "cameras: [wrist]"),
        ({"cameras": ["wrist"], "image": "image"}, "image", "image: null"),
        ({"cameras": ["image", "wrst"]}, "cameras", "cameras: [wrist]"),
    ],
)
def test_cameras_that_are_not_clear(model: dict[str, Any], key: str, fix: str) -> None:
    found = refused(model, {"id": f"{__name__}:TwoCameras"})
    assert (found.code, found.key) == ("model-misfit", f"actor.model.{key}")
    assert found.fix == fix


@pytest.mark.parametrize("head", ["bins", "flow"])
@torch.no_grad()
def test_every_camera_counts(head: str) -> None:
    """Cameras may have images of other sizes."""
    actions = SPACES.actions
    if head == "flow":
        actions = ContinuousActions(shape=(2,), low=(-1.0,) * 2, high=(1.0,) * 2)
    wrist = Part(name="wrist", shape=(8, 12, 3), dtype="uint8")
    spaces = Spaces(
        observation_shape=(SPACES.observation_shape[0] + wrist.size,),
        observation_dtype="uint8",
        parts=(*SPACES.parts, wrist),
        actions=actions,
    ).denoised(2)
    config = small(head=head, cameras=("wrist", "image"), expert_width=8, layers=2)
    torch.manual_seed(0)
    policy = FlowVla(spaces, config) if head == "flow" else Vla(spaces, config)
    policy.requires_grad_(False)
    shown = seen("a")
    shown["wrist"] = torch.zeros(1, 8, 12, 3, dtype=torch.uint8)
    chains = [torch.ones(1, 6)] if head == "flow" else []
    outputs, values = policy(shown, *chains)
    for camera in ("image", "wrist"):
        other = {**shown, camera: 255 - shown[camera]}
        changed, others = policy(other, *chains)
        assert not torch.allclose(outputs, changed, atol=1e-6)
        assert not torch.allclose(values, others, atol=1e-6)


def job(**env: Any) -> Any:
    return read_config(
        {
            "cluster": {"component_placement": {}},
            "env": {"id": "rlplace.envs.reach:Reach", **env},
            "actor": {"model": {"kind": "vla", "words": WORDS, "patch": 8}},
        }
    )


class Unbounded(Reach):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))


def test_actions_without_bounds_have_no_bins() -> None:
    found = refused(env={"id": f"{__name__}:Unbounded"})
    assert (found.code, found.key) == ("bad-wrapper", "env.wrappers[0]")
    assert found.why is not None
    assert "finite" in found.why


def test_a_folder_without_a_vision_tower_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = refused({"path": str(tmp_path)})
    assert "no vision tower" in found.what


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    found = refused({"path": str(tiny_vlm(tmp_path))})
    assert found.what == "a qwen2_5_vl is no model of this policy"


# ── the network ──────────────────────────────────────────────────────────────────────────────────────────────────────


def made(config: VlaConfig, spaces: Spaces = SPACES) -> Vla:
    torch.manual_seed(0)
    return Vla(spaces, config).eval()


@torch.no_grad()
def test_each_row_is_decided_by_itself() -> None:
    """Instructions of other lengths in the batch change nothing, since all are padded to one length."""
    policy = made(small())
    given = seen("a", "a b", "b b a")
    together = policy(given)
    for row in range(3):
        alone = policy({name: each[row : row + 1] for name, each in given.items()})
        for part, whole in zip(alone, together, strict=True):
            torch.testing.assert_close(part[0], whole[row])


def test_the_first_weights_are_as_large_as_a_width_needs() -> None:
    """So outputs of layers are as large as their inputs, and depend on them."""
    policy = made(small(width=64))
    for weights in (
        policy.decoder.layers[0].mlp.up_proj.weight,
        policy.vision.encoder.layers[0].mlp.fc1.weight,
        policy.decoder.get_input_embeddings().weight,
        policy.queries,
    ):
        assert weights.std().item() == pytest.approx(64**-0.5, rel=0.2)


@pytest.mark.parametrize("entry", ["image", "instruction", "state"])
@torch.no_grad()
def test_every_entry_counts(entry: str) -> None:
    policy = made(small())
    torch.nn.init.normal_(policy.policy.weight)
    given = seen("a", "a")
    other = {**given, entry: seen("b", "b")[entry].flip(0)}
    outputs, values = policy(given)
    changed, others = policy(other)
    assert not torch.allclose(outputs, changed, atol=1e-5)
    assert not torch.allclose(values, others, atol=1e-5)


@torch.no_grad()
def test_padding_behind_an_instruction_is_not_read() -> None:
    policy = made(small())
    before = policy(seen("a"))
    policy.decoder.get_input_embeddings().weight[0] += 1
    torch.testing.assert_close(policy(seen("a")), before)


@pytest.mark.parametrize(
    ("said", "key", "fix"),
    [
        ("d a c c", "actor.model.words", "words: [a, b, d, c]"),
        # YAML reads it as true without quotes
        ("on", "actor.model.words", 'words: [a, b, "on"]'),
        ("a b a b", "actor.model.instruction_tokens", "instruction_tokens: 4"),
    ],
)
def test_an_instruction_that_it_cannot_read_ends_the_run(
    said: str, key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(small())(seen(said))
    (found,) = caught.value.problems
    assert (found.code, found.key, found.fix) == ("instruction-not-read", key, fix)


@torch.no_grad()
def test_words_are_read_in_any_case() -> None:
    policy = made(small(words=("A", "b")))
    torch.testing.assert_close(policy(seen("a B")), policy(seen("A b")))


def test_a_token_of_an_instruction_is_read_whatever_its_id(tmp_path: Path) -> None:
    """A tokenizer may pad with a token that instructions have, too."""
    policy = made(VlaConfig(path=str(tiny_smolvlm(tmp_path)), instruction_tokens=4))
    shorter, longer = (policy(seen(said))[0] for said in ("red", "<pad>red"))
    assert not torch.allclose(shorter, longer, atol=1e-6)


def without(folder: Path, name: str) -> None:
    """Take a weight out of the file of a model."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})


def shorten(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name][:-1].clone()
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("spoil", [without, shorten])
def test_no_weight_of_a_folder_begins_at_random(tmp_path: Path, spoil: Any) -> None:
    folder = tiny_smolvlm(tmp_path)
    spoil(folder, "model.vision_model.post_layernorm.weight")
    with pytest.raises(ConfigError) as caught:
        made(VlaConfig(path=str(folder)))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "actor.model.path")
    assert found.why is not None
    assert "model.vision_model.post_layernorm.weight" in found.why


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path)
    (folder / "model.safetensors").unlink()
    found = refused({"path": str(folder)})
    assert found.key == "actor.model.path"
    assert (
        found.why == "it has neither model.safetensors nor model.safetensors.index.json"
    )


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def another_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["gripper"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("spoil", [no_tokenizer, another_tokenizer])
def test_a_folder_needs_the_tokenizer_of_its_model(tmp_path: Path, spoil: Any) -> None:
    folder = tiny_smolvlm(tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        made(VlaConfig(path=str(folder)))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", "actor.model.path")
    assert "tokenizer" in found.what


@torch.no_grad()
def test_a_model_is_read_from_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path)
    config = VlaConfig(path=str(folder), instruction_tokens=4)
    policy = made(config)
    outputs, values = policy(seen("is red?", "it blue"))
    assert (outputs.shape, values.shape) == ((2, 7), (2,))
    assert outputs[0].ne(outputs[1]).any()
    # Offloading frees them: they are no part of a mapped file
    assert all(
        parameter.untyped_storage().resizable() for parameter in policy.parameters()
    )
    import transformers

    stored = transformers.AutoModelForImageTextToText.from_pretrained(folder).model
    states = dict(policy.decoder.named_parameters())
    for name, weights in stored.text_model.named_parameters():
        torch.testing.assert_close(states[name], weights)
    for name, weights in stored.vision_model.named_parameters():
        torch.testing.assert_close(
            dict(policy.vision.named_parameters())[name], weights
        )
