"""`python -m rlplace.models.from_gguf FILE FOLDER`: convert a GGUF file to a Hugging Face folder, weights unpacked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def convert(file: Path, folder: Path) -> Path:
    """Write config, weights in bfloat16 and tokenizer with its chat template. Needs `gguf` beside transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=unpacked)
    vars(model.config).pop("quantization_config", None)  # true of the file, not of what is written here
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    return part.rename(folder)  # whole, or not at all


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    convert(Path(argv[0]), Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
