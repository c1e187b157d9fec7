"""`python scripts/from_gguf.py FILE FOLDER`: convert a GGUF file to a Hugging Face folder, weights unpacked."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> Path:
    """Write config, weights in bfloat16 and tokenizer with its chat template. Needs `gguf` beside transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=unpacked
    )
    vars(model.config).pop(
        "quantization_config", None
    )  # true of the file, not of what is written here
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    return part.rename(folder)  # whole, or not at all


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.stderr.write(f"{__doc__}\n")
        sys.exit(2)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
