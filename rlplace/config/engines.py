"""The config block of generation engines for language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import Dtype, knob
from rlplace.config.own import OwnName


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRolloutConfig:
    """Settings of the engine that generates the answers of a language model."""

    engine: Literal["vllm", "transformers"] | OwnName = knob(
        "what generates; transformers is slower and needs no vLLM; your own: package.module:Class",
        "vllm",
    )
    temperature: float = knob(
        "divides the logits before a token is drawn; 0: the likeliest token",
        1.0,
        minimum=0,
    )
    top_p: float = knob(
        "draw from the likeliest tokens that together have this probability; a run trains with 1 only",
        1.0,
        above=0,
        maximum=1,
        unit="share",
    )
    top_k: int = knob(
        "draw from so many likeliest tokens; 0: from all; a run trains with 0 only",
        0,
        minimum=0,
    )
    seed: int | None = knob(
        "answers follow from it alone, which takes longer; null: drawn freely",
        None,
        minimum=0,
    )
    min_tokens: int = knob(
        "nothing ends an answer before it has so many tokens; trained with algorithm.tis_cap",
        0,
        minimum=0,
    )
    repetition_penalty: float = knob(
        "divides positive logits of tokens that were there, multiplies negative ones; trained with algorithm.tis_cap",
        1.0,
        above=0,
    )
    presence_penalty: float = knob(
        "taken from the logits of tokens that the answer has; trained with algorithm.tis_cap",
        0.0,
        minimum=-2,
        maximum=2,
    )
    frequency_penalty: float = knob(
        "likewise, for each time that it has them", 0.0, minimum=-2, maximum=2
    )
    stop: tuple[str, ...] = knob(
        "texts that end an answer beside the model's own tokens, and stay in it", ()
    )
    engine_args: Mapping[str, object] = knob(
        "more arguments of vLLM's engine or of your own, by their names there", dict
    )
    enforce_eager: bool = knob(
        "no compiled kernels and graphs: starts faster, generates slower", False
    )
    gpu_memory_utilization: float | Literal["auto"] = knob(
        "share of each accelerator for everything; auto: what the others leave",
        0.6,
        above=0,
        maximum=1,
        unit="share",
    )
    kv_cache_memory: int | None = knob(
        "bytes of the KV cache; null: what is left of the share", None, unit="bytes"
    )
    workspace_memory: int | None = knob(
        "bytes that a step takes beside weights and cache, which an engine of your own says; null: as vLLM's",
        None,
        unit="bytes",
    )
    dtype: Dtype = knob("of weights and computation", "bf16")
    cache_dtype: Literal["bf16", "fp16", "fp8", "fp32"] | None = knob(
        "of the KV cache; null: as dtype", None
    )
    step_tokens: int = knob("most tokens of one step", 8192, minimum=1)
    step_sequences: int = knob("most sequences of one step", 256, minimum=1)
    sleep_level: Literal[1, 2] = knob(
        "1 copies weights to the host, 2 drops them: the next sync brings new ones", 2
    )
    enable_offload: bool = knob("sleep in stages that do not generate", False)

    group_name: str | None = knob(
        "name of the worker group in a loop by hand; null: the component's", None
    )

    @property
    def own(self) -> bool:
        """Whether the engine is a custom class, package.module:Class."""
        return ":" in self.engine

    @property
    def penalties(self) -> Mapping[str, float]:
        """Config key -> value of the penalties that change the sampling distribution.

        Penalties whose values have no effect are left out.
        """
        none = {
            "min_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        return {
            name: getattr(self, name)
            for name, off in none.items()
            if getattr(self, name) != off
        }

    @property
    def cache(self) -> Literal["bf16", "fp16", "fp8", "fp32"]:
        """The dtype of keys and values in the KV cache; by default, the dtype of the engine."""
        return self.cache_dtype or self.dtype
