"""Every formula of the memory ledger: what it says, where it comes from, how near it comes; all results are bytes.

Letters: P parameters of the model, d ranks that share the state (shards), t tensor-parallel ranks, c bytes of a number
in the computation, b sequences x s tokens of a micro-batch, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rlplace.placement.memory.model import ModelShape

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Tensors of optimizer state per trained tensor, and bytes of a number in them.
OPTIMIZER_STATE: Mapping[str, tuple[int, int]] = {
    "adamw": (2, 4),  # two moments; the float32 master weights are the shards themselves
    "adamw_master": (3, 4),  # the same and master weights, where the shards are 16-bit
    "adamw_8bit": (2, 1),  # block-wise quantised moments
    "sgd": (0, 0),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One row of the table."""

    name: str
    text: str
    source: str
    accuracy: str
    compute: Callable[..., int]


def parameters(model: ModelShape, each: int, *, tensor_parallel: int = 1, shards: int = 1) -> int:
    return sum(part * copies for part, copies in model.parts(tensor_parallel, shards)) * each


def gradients(trained: int, each: int) -> int:
    return trained * each


def optimizer_state(trained: int, optimizer: str) -> int:
    tensors, each = OPTIMIZER_STATE[optimizer]
    return trained * tensors * each


def lora(model: ModelShape, rank: int, each: int, *, tensor_parallel: int = 1, shards: int = 1) -> int:
    return sum(part * copies for part, copies in model.lora_parts(rank, tensor_parallel, shards)) * each


def pass_tokens(micro_batch: int, sequence_length: int, token_budget: int | None) -> int:
    """Of one pass, by sequences or packed; the longest sequence is never cut."""
    return micro_batch * sequence_length if token_budget is None else max(token_budget, sequence_length)


def gathered(model: ModelShape, compute: int, *, tensor_parallel: int = 1) -> int:
    return -(-(model.root_elements + 2 * model.largest_layer_elements) * compute // tensor_parallel)


def gradient_buckets(model: ModelShape, compute: int, *, tensor_parallel: int = 1) -> int:
    layer = model.largest_layer_elements * (compute + 4)
    return -(-(layer + model.root_elements * compute) // tensor_parallel)


def activations(model: ModelShape, tokens: int, compute: int, *, tensor_parallel: int = 1) -> int:
    kept = sum(b.layers * b.saved.bytes_per_token(compute, tensor_parallel) for b in model.blocks)
    return tokens * kept


def checkpoints(model: ModelShape, tokens: int, compute: int) -> int:
    return tokens * model.layers * model.hidden * compute


def one_layer(model: ModelShape, tokens: int, compute: int, *, tensor_parallel: int = 1) -> int:
    return tokens * max(b.saved.bytes_per_token(compute, tensor_parallel) for b in model.blocks)


def logits(vocabulary: int, tokens: int, compute: int, *, tensor_parallel: int = 1) -> int:
    return tokens * -(-vocabulary // tensor_parallel) * (compute + 8)


def logits_backward(vocabulary: int, tokens: int, compute: int, *, tensor_parallel: int = 1) -> int:
    return tokens * -(-vocabulary // tensor_parallel) * (compute + 12)


def kv_per_token(model: ModelShape, each: int, *, tensor_parallel: int = 1) -> int:
    return 2 * model.layers * max(1, model.kv_heads // tensor_parallel) * model.head_dim * each


def kv_share(memory: int, share: float, taken: int) -> int:
    return max(0, int(memory * share) - taken)


def engine_workspace(model: ModelShape, tokens: int, sequences: int, compute: int, *, tensor_parallel: int = 1) -> int:
    return one_layer(model, tokens, compute, tensor_parallel=tensor_parallel) + logits(
        model.vocabulary, sequences, compute, tensor_parallel=tensor_parallel
    )


def communicator(groups: int) -> int:
    return groups * 2 * 32 * (4 << 20)


def sync_buckets(weights: int, bucket: int) -> int:
    return 2 * min(weights, bucket)


def sleep_copy(weights: int, level: int) -> int:
    return weights if level == 1 else 0


def pinned(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


_TORCH = "torch 2.13, torch.distributed.fsdp.fully_shard"
_ZERO = "Rajbhandari et al. 2020, arXiv:1910.02054, sections 3 and 5"
_COUNTED = "within 0.1 % of what autograd saves in transformers 5.19 (CPU, sdpa) for 13 models; fused kernels save less"

FORMULAS = (
    Formula(
        name="parameters",
        text="sum over tensors: ceil(rows / d) x row / t x bytes; rows / 1 below ZeRO stage 3",
        source=_TORCH + ": dimension 0 in equal chunks, padded; tests compare counts with the library's own",
        accuracy="exact",
        compute=parameters,
    ),
    Formula(
        name="gradients",
        text="trained numbers of a rank x bytes; of the whole model below ZeRO stage 2",
        source=_ZERO,
        accuracy="exact, where gradients are dropped after the step",
        compute=gradients,
    ),
    Formula(
        name="optimizer state",
        text="trained numbers of a rank x 8 (AdamW), 12 (with master weights), 2 (8-bit), 0 (SGD)",
        source=_ZERO + "; Dettmers et al. 2022, arXiv:2110.02861, for 8-bit",
        accuracy="exact, less a few scalars; 8-bit: 1 % more for block scales",
        compute=optimizer_state,
    ),
    Formula(
        name="LoRA",
        text="sum over projections: rank x (inputs + outputs) / d x bytes",
        source="Hu et al. 2022, arXiv:2106.09685, section 4.1",
        accuracy="exact for all linear layers but experts adapted, without tensor parallelism",
        compute=lora,
    ),
    Formula(
        name="gathered weights",
        text="(all outside the layers + 2 layers) x c / t: one layer computes while the next arrives",
        source="Zhao et al. 2023, arXiv:2304.11277, sections 3.3 and 4.1",
        accuracy="+0/-1 layer",
        compute=gathered,
    ),
    Formula(
        name="gradient buckets",
        text="(one layer x (c + 4) + all outside the layers x c) / t, before they are reduced to shards",
        source=_TORCH + ", reduce_dtype=float32",
        accuracy="+1/-0 layer",
        compute=gradient_buckets,
    ),
    Formula(
        name="activations",
        text="b x s x sum over layers of what each saves; attention without its s x s matrix",
        source="counted from the operations, as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.1",
        accuracy=_COUNTED,
        compute=activations,
    ),
    Formula(
        name="checkpoints",
        text="b x s x L x h x c: the input of each layer; one layer is recomputed at a time",
        source="Chen et al. 2016, arXiv:1604.06174, section 4; Korthikanti et al. 2022, section 5",
        accuracy="exact for a checkpoint at every layer",
        compute=checkpoints,
    ),
    Formula(
        name="one layer",
        text="b x s x what the largest layer saves",
        source="as activations",
        accuracy="as activations; without gradients it is less, so an upper bound",
        compute=one_layer,
    ),
    Formula(
        name="logits",
        text="tokens x V / t x (c + 4 + 4): logits, their float32 copy, the log-softmax",
        source="counted from the operations of an unfused log-probability",
        accuracy="exact unfused; computed in chunks it is less",
        compute=logits,
    ),
    Formula(
        name="logits, backward",
        text="tokens x V / t x (c + 4 + 4 + 4): the same and the float32 gradient",
        source="counted from the operations of an unfused loss",
        accuracy="exact unfused; computed in chunks it is less",
        compute=logits_backward,
    ),
    Formula(
        name="KV cache of a token",
        text="2 x L x max(1, key heads / t) x head width x bytes",
        source="Kwon et al. 2023, arXiv:2309.06180, section 3",
        accuracy="exact for full attention; layers with a sliding window need less",
        compute=kv_per_token,
    ),
    Formula(
        name="KV cache of a share",
        text="share x accelerator memory - (weights + workspace + process) of the engine",
        source="vLLM 0.32, gpu_memory_utilization",
        accuracy="exact, since the engine takes whatever is left of its share",
        compute=kv_share,
    ),
    Formula(
        name="engine workspace",
        text="one layer over the most tokens of a step + logits of the most sequences",
        source="vLLM 0.32 measures it in a dummy step of max_num_batched_tokens and max_num_seqs",
        accuracy="upper bound; with a share it only moves the border to the KV cache",
        compute=engine_workspace,
    ),
    Formula(
        name="communicator buffers",
        text="groups x 2 directions x 32 channels x 4 MiB",
        source="NCCL: NCCL_BUFFSIZE 4 MiB, at most 32 channels",
        accuracy="assumed, within a factor of 2",
        compute=communicator,
    ),
    Formula(
        name="sync buffers",
        text="2 buckets: one is filled while the other is taken; no tensor is gathered",
        source="rlplace.comm.weights",
        accuracy="exact past the host, upper bound through it; readers past the host hold a second copy",
        compute=sync_buckets,
    ),
    Formula(
        name="sleep copies",
        text="level 1: the engine's weights, pinned on its host; level 2: nothing, weights come with the next sync",
        source="vLLM 0.32, sleep mode",
        accuracy="exact, less buffers",
        compute=sleep_copy,
    ),
    Formula(
        name="pinned pool",
        text="each host copy of a GPU's tensor rounded up to a power of two, kept for the next time",
        source="torch's caching host allocator (pytorch issue 95823)",
        accuracy="upper bound: newer versions can be told not to round large blocks",
        compute=pinned,
    ),
)
