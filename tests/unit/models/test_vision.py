"""Models that see learn, and answer, as transformers does; engine and learner are given the same tokens."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from rlplace.config.blocks.language_model import TextEnvConfig, TextRolloutConfig
from rlplace.envs.text import Image, Message
from rlplace.errors import ConfigError
from rlplace.models.causal_lm import LmSpec, build
from rlplace.models.describe import describe
from rlplace.models.families import VISION_FAMILIES
from rlplace.models.lora import LoraSpec
from rlplace.models.packed import Packed
from rlplace.models.tokenizer import Chat, Tokenizer
from rlplace.models.vision import VisionSpec
from rlplace.models.vision_lm import VisionInput, vision_lm_of
from rlplace.placement.memory import families
from rlplace.placement.memory.model import read_model
from rlplace.placement.schedule import Residency
from rlplace.tokens import Files, Request
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.transformers import TransformersEngine
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedLm
from rlplace.workers.worker import Rendezvous
from tests.rollout_stage import Ledger
from tests.tiny_vlm import IMAGE, PATCH, png, tiny_vlm
from tests.worker_ranks import context_of, in_processes

ENV = TextEnvConfig(max_image_tokens=12)
PICTURES = [png(40, 24, seed=1), png(200, 100, seed=2), png(17, 9, seed=3)]
HEAD = b"IHDR" + struct.pack(
    ">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0
)  # of more pixels than follow
BOMB = png(8, 8)[:12] + HEAD + struct.pack(">I", zlib.crc32(HEAD)) + png(8, 8)[33:]
ANSWER = np.array([10, IMAGE, 17, 18])  # a policy may draw any token
ASKED: list[list[Message]] = [
    [Message("user", (Image(PICTURES[0]), "which colour is it?"))],
    [Message("user", "no image")],
    [Message("user", (Image(PICTURES[1]), "or ", Image(PICTURES[2]), "?"))],
]


def jpeg(width: int, height: int, **options: Any) -> bytes:
    from PIL import Image as Library

    Library.open(io.BytesIO(png(width, height))).save(
        out := io.BytesIO(), "JPEG", **options
    )
    return out.getvalue()


def vision_of(folder: Path, env: TextEnvConfig = ENV) -> VisionSpec:
    found = VisionSpec.of(folder, env)
    assert found is not None
    return found


def sequences(folder: Path, vision: VisionSpec) -> tuple[list[np.ndarray], list[Files]]:
    """As an env rank makes prompts, each with an answer."""
    chat, tokens, files = Chat(Tokenizer.load(folder), system=None), [], []
    for messages in ASKED:
        own, counts = vision.read(
            [image for message in messages for image in message.images]
        )
        tokens.append(
            np.concatenate([vision.expand(chat.first(messages), counts), ANSWER])
        )
        files.append(own)
    return tokens, files


def logprobs_of(
    model: PreTrainedModel,
    folder: Path,
    vision: VisionSpec,
    tokens: torch.Tensor,
    files: Files,
) -> torch.Tensor:
    """Of each token after the first, by transformers alone, an image token that is drawn left as it is."""
    given: dict[str, Any] = {}
    prompt = tokens[: -len(ANSWER)]
    if files:
        from io import BytesIO

        from PIL import Image as Library

        size = {"shortest_edge": vision.least, "longest_edge": vision.most}
        processor = AutoImageProcessor.from_pretrained(folder)
        given = processor(
            images=[Library.open(BytesIO(file)) for file in files],
            size=size,
            return_tensors="pt",
        )
        kinds = torch.cat(
            [(prompt == IMAGE).int(), torch.zeros(len(ANSWER), dtype=torch.int)]
        )
        given = {**given, "mm_token_type_ids": kinds[None]}
    base: Any = model.model
    mask = base.get_placeholder_mask

    def prompts_alone(input_ids: torch.Tensor, **others: Any) -> Any:
        hidden = input_ids.clone()
        hidden[:, len(prompt) :] = 0
        return mask(hidden, **others)

    base.get_placeholder_mask = prompts_alone
    base.rope_deltas = None
    scores = torch.log_softmax(
        model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1], dim=-1
    )
    base.get_placeholder_mask = mask
    return scores.gather(1, tokens[1:, None])[:, 0]


def plain(folder: Path) -> PreTrainedModel:
    found = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_a_step_is_that_of_transformers(
    family: Any, ranks: Ranks, tmp_path: Path
) -> None:
    model, vision = plain(tiny_vlm(tmp_path, family)), vision_of(tmp_path)
    tokens, files = sequences(tmp_path, vision)
    expected = torch.cat(
        [
            logprobs_of(model, tmp_path, vision, torch.tensor(t).long(), f)
            for t, f in zip(tokens, files, strict=True)
        ]
    )
    module = build(vision_lm_of(vision), LmSpec(folder=tmp_path), ranks.mesh)
    found = module(
        Packed.of(tokens, [np.arange(len(t)) > 0 for t in tokens], images=files)
    ).logprobs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    rate = torch.linspace(-1.0, 2.0, len(expected))
    steps = []
    for trained, loss in ((model, rate @ expected), (module.lm, rate @ found)):
        loss.backward()
        torch.optim.SGD(trained.parameters(), lr=0.01).step()
        steps.append(
            {
                n: p.full_tensor() if hasattr(p, "full_tensor") else p
                for n, p in trained.named_parameters()
            }
        )
    before = dict(plain(tmp_path).named_parameters())
    for name, weight in steps[1].items():
        torch.testing.assert_close(
            weight, steps[0][name], atol=2e-5, rtol=1e-4, msg=name
        )
        assert not torch.equal(weight, before[name]), f"{name} has not moved"


def _with_and_without_images(
    folder: Path, rank: int, rendezvous: Rendezvous, _: Path
) -> dict[str, np.ndarray]:
    """Gradients of a model that two ranks share, of which one sees an image."""
    ranks, vision = (
        Ranks(context_of("actor", rank, 2, rendezvous, {}), 60.0),
        vision_of(folder),
    )
    tokens, files = sequences(folder, vision)
    lm = TrainedLm(LmSpec(folder=folder), ranks, vision_lm_of(vision))
    lm.module(
        Packed.of(
            [tokens[rank]], [np.arange(len(tokens[rank])) > 0], images=[files[rank]]
        )
    ).logprobs.sum().backward()
    found = {
        name: p.grad.full_tensor().numpy()
        for name, p in lm.module.lm.named_parameters()
    }
    ranks.close()
    return found


@pytest.mark.slow
def test_ranks_with_and_without_images_go_through_the_tower_together(
    tmp_path: Path,
) -> None:
    model, vision = plain(tiny_vlm(tmp_path)), vision_of(tmp_path)
    tokens, files = sequences(tmp_path, vision)
    for of in (0, 1):
        logprobs_of(
            model, tmp_path, vision, torch.tensor(tokens[of]).long(), files[of]
        ).sum().backward()
    for rank in in_processes(_with_and_without_images, tmp_path, 2):
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(
                rank[name], parameter.grad, atol=1e-4, rtol=1e-3, err_msg=name
            )


def test_a_pass_without_images_moves_no_weight_of_the_tower(
    ranks: Ranks, tmp_path: Path
) -> None:
    vision = vision_of(tiny_vlm(tmp_path))
    module = build(vision_lm_of(vision), LmSpec(folder=tmp_path), ranks.mesh)
    tokens = np.arange(7, 17)
    found = module(Packed.of([tokens], [np.arange(10) > 0], images=[()])).logprobs
    expected = logprobs_of(plain(tmp_path), tmp_path, vision, torch.tensor(tokens), ())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    found.sum().backward()
    tower = {
        name: p.grad.full_tensor()
        for name, p in module.lm.named_parameters()
        if ".visual." in name
    }
    assert tower
    assert not any(gradient.any() for gradient in tower.values())


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_answers_to_an_image_share_it(
    family: Any, ranks: Ranks, tmp_path: Path
) -> None:
    vision = vision_of(tiny_vlm(tmp_path, family))
    tokens, files = sequences(tmp_path, vision)
    prompt = tokens[2][: -len(ANSWER)]
    answers = [
        *(
            np.concatenate([prompt, answer])
            for answer in (ANSWER, ANSWER[:1], ANSWER[::-1])
        ),
        tokens[0],
        tokens[1],
    ]
    masks = [np.arange(len(each)) >= len(prompt) for each in answers[:3]] + [
        np.arange(len(each)) > 2 for each in answers[3:]
    ]
    shown = [files[2]] * 3 + files[:2]
    alike = [(0, len(prompt))] * 3 + [(1, 0), (2, 0)]
    module = build(vision_lm_of(vision), LmSpec(folder=tmp_path), ranks.mesh)
    found = []
    for shared in (alike, []):
        packed = Packed.of(answers, masks, alike=shared, images=shown)
        assert len(packed.images) == len(packed.lengths)
        logprobs = module(packed).logprobs
        logprobs.sum().backward()
        found.append(
            [
                logprobs.detach(),
                *(p.grad.full_tensor().clone() for p in module.parameters()),
            ]
        )
        module.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_low_rank_factors_leave_the_tower_alone(
    family: Any, ranks: Ranks, tmp_path: Path
) -> None:
    vision = vision_of(tiny_vlm(tmp_path, family))
    module = build(
        vision_lm_of(vision),
        LmSpec(folder=tmp_path, lora=LoraSpec(rank=2, alpha=2.0)),
        ranks.mesh,
    )
    trained = {
        name
        for name, parameter in module.lm.named_parameters()
        if parameter.requires_grad
    }
    layers = {name.partition(".layers.")[0] for name in trained}
    assert layers == {"model.language_model"}
    unknown = LmSpec(
        folder=tmp_path, lora=LoraSpec(rank=2, alpha=2.0, targets=("qkv",))
    )
    with pytest.raises(ConfigError, match="no linear layer of this name"):
        build(vision_lm_of(vision), unknown, ranks.mesh)


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_the_ledger_counts_the_tower(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((tiny_vlm(tmp_path, family) / "config.json").read_text())
    monkeypatch.setattr(
        families,
        "_kept",
        lambda keys: json.loads(json.dumps(describe(json.loads(keys)))),
    )
    shape, model = read_model(config), plain(tmp_path)
    assert (shape.parameters, shape.layers, shape.notes) == (
        model.num_parameters(),
        2,
        (),
    )
    assert shape.tower is not None
    saved = [saved_by_a_layer(model, side) for side in (8, 16)]
    each = (saved[1] - saved[0]) / (16**2 - 8**2)  # bytes of a patch
    assert each <= shape.tower.block.saved.bytes_per_token(4, 1) <= 1.1 * each


def saved_by_a_layer(model: PreTrainedModel, side: int) -> int:
    """Bytes that autograd saves in the first layer of the tower, for an image of `side` patches each way."""
    tower: Any = model.model.visual
    inside, total = False, 0
    kept: list[torch.Tensor] = list(model.parameters())
    seen = {tensor.untyped_storage()._cdata for tensor in kept}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in seen:
            kept.append(tensor)
            seen.add(storage._cdata)
            total += storage.nbytes()
        return tensor

    def enter(_: Any, __: Any, named: dict[str, Any]) -> None:
        nonlocal inside
        inside = True
        for tensor in named["position_embeddings"]:  # which all layers share
            kept.append(tensor)
            seen.add(tensor.untyped_storage()._cdata)

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    hooks = [tower.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks.append(tower.blocks[0].register_forward_hook(leave))
    tower.config._attn_implementation = "sdpa"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(
            torch.randn(side * side, 3 * 2 * PATCH**2),
            grid_thw=torch.tensor([[1, side, side]]),
        )
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_an_answer_is_that_of_transformers(family: Any, tmp_path: Path) -> None:
    model, vision = plain(tiny_vlm(tmp_path, family)), vision_of(tmp_path)
    tokens, files = sequences(tmp_path, vision)
    rollout = TextRolloutConfig(dtype="fp32", kv_cache_memory=4 << 20, temperature=0.0)
    settings = EngineSettings(rollout=rollout, model=tmp_path, context=96, env=ENV)
    engine = TransformersEngine(settings, device=Ledger(), owner="rollout rank 0")
    engine.move(Residency.WEIGHTS)
    engine.load(dict(model.named_parameters(remove_duplicate=False)), 0)
    engine.move(Residency.FULL)
    facts = {
        "env_rank": 0,
        "iteration": 0,
        "first_sample": 0,
        "samples": 2,
        "turn": 0,
        "max_new_tokens": len(ANSWER),
    }
    prompts = [prompt[: -len(ANSWER)].astype(np.int32) for prompt in tokens]
    for group, (prompt, own) in enumerate(zip(prompts, files, strict=True)):
        engine.submit(Request(group=group, tokens=prompt, images=own, **facts))
    answers = list(engine.step())
    engine.load(
        dict(model.named_parameters(remove_duplicate=False)), 1
    )  # what was begun is read again
    while engine.in_flight:
        answers += engine.step()
    assert len(answers) == 6
    for answer in answers:
        count = len(answer.tokens)
        whole = torch.from_numpy(
            np.concatenate([prompts[answer.group], answer.tokens, ANSWER[count:]])
        ).long()
        expected = logprobs_of(model, tmp_path, vision, whole, files[answer.group])[
            -len(ANSWER) :
        ][:count]
        torch.testing.assert_close(
            torch.from_numpy(answer.logprobs), expected.detach(), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("width", "height"), [(8, 8), (50, 20), (300, 100), (1, 1), (12, 13), (480, 640)]
)
def test_an_image_has_as_many_tokens_as_its_processor_makes_of_it(
    width: int, height: int, tmp_path: Path
) -> None:
    tiny_vlm(tmp_path)
    for env in (TextEnvConfig(), ENV):
        vision = vision_of(tmp_path, env)
        patches, grids = VisionInput(vision).read([png(width, height)])
        files, counts = vision.read([Image(png(width, height))])
        assert counts == [len(patches) // 4] == [int(grids.prod()) // 4]
        assert len(files) == 1
    assert patches.shape[1] == 3 * 2 * PATCH**2
    assert counts[0] <= 12


@pytest.mark.parametrize(
    ("image", "most_bytes", "part"),
    [
        (b"no image", 4096, "cannot be read"),
        (png(1000, 1), 4096, "one side is more than 200 times the other"),
        (png(9, 790), 1 << 20, "its short side is below 8"),
        (png(64, 64), 4096, "larger than the limit"),
        (png(64, 64)[:3000], 1 << 20, "cannot be read"),
        (jpeg(64, 64)[:-1], 1 << 20, "the file is cut"),
        (jpeg(64, 64, progressive=True)[:-40], 1 << 20, "the file is cut"),
        (jpeg(64, 64, comment=b"\xff\xd9")[:-2], 1 << 20, "the file is cut"),
        (BOMB, 1 << 20, "decompression bomb"),
    ],
)
def test_what_cannot_be_seen_is_an_error(
    image: bytes, most_bytes: int, part: str, tmp_path: Path
) -> None:
    vision = vision_of(tiny_vlm(tmp_path), TextEnvConfig(max_image_bytes=most_bytes))
    with pytest.raises(ConfigError, match=part):
        vision.read([Image(image)])


@pytest.mark.parametrize("after", [b"", b"\0\0 of a camera"], ids=["end", "more"])
def test_a_whole_jpeg_is_read(after: bytes, tmp_path: Path) -> None:
    vision = vision_of(tiny_vlm(tmp_path))
    for options in ({}, {"progressive": True}):
        files, counts = vision.read([Image(jpeg(64, 64, **options) + after)])
        assert counts == [len(VisionInput(vision).read(files)[0]) // 4]


def test_a_text_with_an_image_token_is_an_error(tmp_path: Path) -> None:
    vision = vision_of(tiny_vlm(tmp_path))
    tokens = Chat(Tokenizer.load(tmp_path), system=None).first("what is <|image_pad|>?")
    with pytest.raises(ConfigError, match="other image tokens than images"):
        vision.expand(tokens, [])
