"""Every formula of the memory ledger: what it says, where it comes from, how accurate it is; all results are bytes.

Letters: P parameters of the model, d ranks that share the state (shards), t tensor-parallel ranks, c bytes of a number
in the computation, b sequences x s tokens of a micro-batch, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config.schema import FrozenConfig, TrainedConfig
from rlplace.placement.flow import DEVICE_BUCKET_BYTES
from rlplace.placement.memory.model import ModelShape

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Tensors of optimizer state per trained tensor, and bytes of a number in them (Rajbhandari et al. 2020, section 3;
# Dettmers et al. 2022, arXiv:2110.02861, for 8-bit). Exact, less a few scalars; 8-bit: 1 % more for block scales.
OPTIMIZER_STATE: Mapping[str, tuple[int, int]] = {
    "adamw": (2, 4),  # two moments; the float32 master weights are the shards themselves
    "adamw_master": (3, 4),  # the same and master weights, where the shards are 16-bit
    "adamw_8bit": (2, 1),  # block-wise quantised moments
    "sgd": (0, 0),
}
# Models score their tokens in chunks of [tokens, V]: large enough for fast products, small beside the model.
CHUNK_ELEMENTS = 1 << 22
# Sizes that no config states. They depend on driver and library versions: measure them where it matters.
CONTEXT_BYTES = 512 << 20  # of one process on one GPU; 0.3 to 0.6 GiB are seen
GRAPHS_BYTES = 1 << 30  # of an engine's captured graphs; stays while it sleeps
COPY_BYTES_PER_S = 25e9  # between host and accelerator: PCIe 4.0 x 16, pinned


def parameters(model: ModelShape, each: int, parallel: int = 1, shards: int = 1) -> int:
    """Sum over tensors: ceil(rows / d) x row / t x bytes; rows / 1 below ZeRO stage 3.
    Source: torch 2.13, torch.distributed.fsdp.fully_shard: dimension 0 in equal chunks, padded; tests compare counts
        with the library's own.
    Accuracy: exact.
    """
    return sum(part * copies for part, copies in model.parts(parallel, shards)) * each


def pass_tokens(block: TrainedConfig | FrozenConfig, sequence_length: int, packed: bool) -> int:
    """Of one pass, by sequences or packed; the longest sequence is never cut."""
    return max(block.token_budget, sequence_length) if packed else block.micro_batch * sequence_length


def activations(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x sum over layers of what each saves; attention without its s x s matrix.
    Source: counted from the operations, as in Korthikanti et al. 2022, arXiv:2205.05198, section 4.1.
    Accuracy: within 0.1 % of what autograd saves in transformers 5.19 (CPU, sdpa) for 13 models; fused kernels save
        less.
    """
    kept = sum(b.layers * b.saved.bytes_per_token(compute, parallel) for b in model.blocks)
    return tokens * kept


def checkpoints(model: ModelShape, tokens: int, compute: int) -> int:
    """b x s x L x h x c: the input of each layer; one layer is recomputed at a time.
    Source: Chen et al. 2016, arXiv:1604.06174, section 4; Korthikanti et al. 2022, section 5.
    Accuracy: exact for a checkpoint at every layer.
    """
    return tokens * model.layers * model.hidden * compute


def one_layer(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x what the largest layer saves.
    Source: as activations.
    Accuracy: as activations; without gradients it is less, so an upper bound.
    """
    return tokens * max(b.saved.bytes_per_token(compute, parallel) for b in model.blocks)


def passing(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x (3/4 of what the largest layer cuts + what it does not), in the dtype of the computation.
    Source: a gated feed-forward layer has three of its four tensors at once; states and their norms stand beside them.
    Accuracy: within 20 % of a pass without gradients.
    """
    numbers = (3 * -(-b.saved.compute_cut // parallel) // 4 + b.saved.compute for b in model.blocks)
    return tokens * max(numbers) * compute


def flowing(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x half of what the largest layer cuts: gradients on their way through it, beside what it saved.
    Source: a gated feed-forward layer has two gradients for its four tensors.
    Accuracy: within 30 %, a few percent of the pass.
    """
    return tokens * max(-(-b.saved.compute_cut // parallel) // 2 for b in model.blocks) * compute


def chunk_scores(vocabulary: int, tokens: int, parallel: int = 1) -> int:
    """min(tokens, 2^22 / V) x V / t x (4 + 4): scores and likelihoods of a chunk of tokens, in float32.
    Source: rlplace.models.packed; forward, and again backward.
    Accuracy: exact; backward below float32 a rounded copy stands beside them.
    """
    if not vocabulary:
        return 0
    return min(tokens, max(1, CHUNK_ELEMENTS // vocabulary)) * -(-vocabulary // parallel) * 8


def logits(vocabulary: int, tokens: int, compute: int, parallel: int = 1) -> int:
    """Tokens x V / t x (c + 4 + 4): logits, their float32 copy, the log-softmax.
    Source: counted from the operations of an unfused log-probability.
    Accuracy: exact unfused.
    """
    return tokens * -(-vocabulary // parallel) * (compute + 8)


def kv_sequence(model: ModelShape, tokens: int, step: int, each: int, parallel: int = 1) -> int:
    """Sum over layers of max(1, key heads / t) x 2 x head width x tokens x bytes, of a sequence of so many tokens.
    A layer with a window keeps window - 1 + the tokens of a step; of a latent (MLA) its width, whatever t is; of a
    linear layer one state.
    Source: Kwon et al. 2023, arXiv:2309.06180, section 3; vLLM 0.32, SlidingWindowSpec and MLAAttentionSpec.
    Accuracy: exact but for the last block of tokens; an engine that keeps whole keys of a latent needs more.
    """
    return each * sum(layers.of(tokens, step, parallel) for layers in model.kv)


def kv_share(memory: int, share: float, taken: int) -> int:
    """Share x accelerator memory - (weights + workspace + process) of the engine.
    Source: vLLM 0.32, gpu_memory_utilization.
    Accuracy: exact, since the engine takes whatever is left of its share.
    """
    return max(0, int(memory * share) - taken)


def engine_workspace(model: ModelShape, tokens: int, sequences: int, compute: int, parallel: int = 1) -> int:
    """One layer over the most tokens of a step + logits of the most sequences.
    Source: vLLM 0.32 measures it in a dummy step of max_num_batched_tokens and max_num_seqs.
    Accuracy: upper bound; with a share it only moves the border to the KV cache.
    """
    scores = logits(model.vocabulary, sequences, compute, parallel)
    return one_layer(model, tokens, compute, parallel) + scores


def communicator(groups: int) -> int:
    """Groups x 2 directions x 32 channels x 4 MiB.
    Source: NCCL: NCCL_BUFFSIZE 4 MiB, at most 32 channels.
    Accuracy: assumed, within a factor of 2.
    """
    return groups * 2 * 32 * (4 << 20)


def sync_buckets(weights: int) -> int:
    """2 buckets: one is filled while the other is taken; no tensor is gathered.
    Source: rlplace.comm.weights.
    Accuracy: exact past the host, upper bound through it; readers past the host hold a second copy.
    """
    return 2 * min(weights, DEVICE_BUCKET_BYTES)


def pinned(size: int) -> int:
    """Each host copy of a GPU's tensor rounded up to a power of two, kept for the next time.
    Source: torch's caching host allocator (pytorch issue 95823).
    Accuracy: upper bound: newer versions can be told not to round large blocks.
    """
    return 1 << (size - 1).bit_length() if size else 0
