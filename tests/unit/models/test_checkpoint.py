"""Models in folders: read by parts, written whole or not at all, in a form that transformers reads."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplace.errors import OutputError
from rlplace.models.checkpoint import Checkpoint, as_stored, write_model
from tests.tiny_lm import END, tiny_model

TINY_FILE = 100_000  # bytes: several files for a tiny model


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def write(
    target: Path, like: Path, weights: Mapping[str, Tensor], **sizes: int
) -> None:
    write_model(target, like, weights.items(), **sizes)


@pytest.mark.parametrize(
    "sizes", [{}, {"file_bytes": TINY_FILE}], ids=["one file", "several files"]
)
def test_transformers_reads_what_was_written(
    folder: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    write(
        tmp_path / "policy", folder, weights_of(folder), file_bytes=2 * TINY_FILE
    )  # an older one is replaced
    changed = {name: tensor + 1.0 for name, tensor in weights_of(folder).items()}
    write(tmp_path / "policy", folder, changed, **sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert all(
        torch.equal(model.state_dict()[name], tensor)
        for name, tensor in changed.items()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").chat_template
    files = sorted(p.name for p in (tmp_path / "policy").glob("*.safetensors"))
    assert (len(files) > 1) == bool(sizes)
    if sizes:
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert all(
            (tmp_path / "policy" / name).stat().st_size < 2 * TINY_FILE
            for name in files
        )


@pytest.mark.parametrize(
    "sizes", [{}, {"file_bytes": TINY_FILE}], ids=["one file", "several files"]
)
def test_parts_are_read_without_the_rest(
    folder: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    weights = weights_of(folder)
    write(tmp_path / "policy", folder, weights, **sizes)
    checkpoint = Checkpoint(tmp_path / "policy")
    assert checkpoint.names == weights.keys()
    name = "model.embed_tokens.weight"
    shape = tuple(weights[name].shape)
    some = (slice(10, 20), slice(32, 64))
    assert torch.equal(
        checkpoint.part(["other.name", name], shape, some), weights[name][some]
    )
    assert checkpoint.part([name], shape, (slice(7, 7), slice(0, 64))).shape == (0, 64)
    assert torch.equal(
        checkpoint.part(["model.norm.weight"], (64,), (slice(1, 3),)),
        weights["model.norm.weight"][1:3],
    )


def test_the_type_is_written_down(qwen: Path, tmp_path: Path) -> None:
    write(
        tmp_path / "policy",
        qwen,
        {name: w.bfloat16() for name, w in weights_of(qwen).items()},
    )
    assert (
        json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"]
        == "bfloat16"
    )
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype="auto").dtype
        == torch.bfloat16
    )


TURNS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("chat", [True, False])
def test_answers_of_a_base_model_end_where_its_template_ends_them(
    qwen: Path, tmp_path: Path, chat: bool
) -> None:
    """As Qwen's base models: their answers end with the end of text, and the template writes <|im_end|>."""
    base = shutil.copytree(qwen, tmp_path / "base")
    (base / "chat_template.jinja").write_text(TURNS)
    write_model(tmp_path / "policy", base, weights_of(qwen).items(), chat=chat)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    turn = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<turn>")
    ids = model.generation_config.eos_token_id
    assert ids == ([END, turn] if chat else END)
    # Its own template ends answers with a token that is known
    write_model(tmp_path / "same", qwen, weights_of(qwen).items(), chat=chat)
    file = "generation_config.json"
    assert (tmp_path / "same" / file).read_bytes() == (qwen / file).read_bytes()


def test_a_failure_keeps_the_older_model(qwen: Path, tmp_path: Path) -> None:
    write(tmp_path / "policy", qwen, weights_of(qwen))
    before = (tmp_path / "policy" / "model.safetensors").read_bytes()

    def weights() -> Iterator[tuple[str, Tensor]]:
        (tmp_path / "policy.part" / "1.part").mkdir()  # a file cannot be written there
        yield "model.norm.weight", torch.zeros(64)

    with pytest.raises(OutputError) as caught:
        write_model(tmp_path / "policy", qwen, weights())
    assert caught.value.code == "cannot-write"
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]


def test_a_place_that_cannot_be_written(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError) as caught:
        write(
            tmp_path / "file" / "policy", qwen, {"model.norm.weight": torch.zeros(64)}
        )
    assert caught.value.code == "cannot-write"


def test_converting_without_arguments_says_how(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with mock.patch("sys.argv", ["from_gguf"]), pytest.raises(SystemExit) as stopped:
        runpy.run_path(
            str(Path(__file__).parents[3] / "scripts" / "from_gguf.py"),
            run_name="__main__",
        )
    assert stopped.value.code == 2
    assert "from_gguf.py FILE FOLDER" in capsys.readouterr().err


def test_experts_are_stored_by_themselves_as_transformers_stores_them(
    tmp_path: Path,
) -> None:
    folder = tiny_model(tmp_path, "qwen3_moe")
    expected = load_file(folder / "model.safetensors")
    found = dict(
        as_stored(
            AutoModelForCausalLM.from_pretrained(folder).state_dict().items(), expected
        )
    )
    assert any(".experts.3.up_proj." in name for name in found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
