"""Every formula of the memory ledger: its terms, its source and its accuracy. All results are bytes.

Letters: P parameters of the model, d ranks that share the state (shards), t tensor-parallel ranks, c bytes of a number
in the computation, b sequences x s tokens of a micro-batch, V vocabulary, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rlplace.checkpoints import MODEL_FILE_BYTES, STATE_FILE_BYTES
from rlplace.config.blocks.language_model import FrozenConfig
from rlplace.config.blocks.training import MOMENT_BLOCK, TrainedConfig
from rlplace.placement.flow import (
    BUCKET_BYTES,
    CUT_BUCKET_BYTES,
    DEVICE_BUCKET_BYTES,
    SUMMED_AT_ONCE_BYTES,
    WINDOW_BYTES,
)
from rlplace.placement.memory.model import ModelShape

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Logits are computed in tiles of this many entries: large enough for fast products, small beside the model.
_TILE_ELEMENTS = 1 << 22
_TILE_TOKENS = 1 << 11
# Sizes that no config states. They depend on driver and library versions: measure them where it matters.
# CUDA context of one process on one GPU; 0.3 to 0.6 GiB are seen
CONTEXT_BYTES = 512 << 20
# Captured CUDA graphs of an engine; they stay while it sleeps. Of 54 engines of vLLM 0.19: 0.51 to 1.85 GiB, mean 1.04
GRAPHS_BYTES = 1 << 30
# Memory of a vLLM engine outside of torch after its first step: kernels that are loaded on first use. Of vLLM 0.18
# and 0.19 on an H100: 0.24 to 0.27 GiB, 0.13 before
KERNELS_BYTES = 256 << 20
# Additional memory for an engine of several GPUs: buffers of NCCL and of other all-reduces, which do not depend on the
# model. Of vLLM 0.19 on H100s connected by NVLink: 1.8 to 1.9 GiB with 2 and with 4 GPUs
ALL_REDUCE_BYTES = 1920 << 20
# Bytes for each score (sequences x vocabulary) while tokens are sampled: logits, as the model computes them and in
# float32, probabilities and noise. With log-probabilities of processed logits, 4 more
SCORE_BYTES = 14
LOGPROB_BYTES = 4
# Bytes of each score while penalties are applied: logits in 16 and 32 bits, counts of the tokens of prompt and answer
# in 64 bits and a mask of each, and a product. No dummy step measures them, so they are beside an engine's share.
PENALTY_SCORE_BYTES = 28
# Of an engine's step: cuBLAS's workspace (32 MiB on a Hopper GPU), rotary angles, block tables
STEP_BYTES = 64 << 20
# cuBLAS's workspaces of a pass: 32 MiB on a Hopper GPU for each of two threads, forward and backward (torch's default;
# CUBLAS_WORKSPACE_CONFIG changes it)
PASS_WORKSPACE_BYTES = 2 * (32 << 20)
COPY_BYTES_PER_S = 25e9  # between host and accelerator: PCIe 4.0 x 16, pinned


def moments(elements: int, each: int, packed: bool) -> list[int]:
    """Sizes of the tensors of one Adam moment: elements x bytes each.
    `packed` (8 bits): elements x 1, rounded up to whole blocks, and 4 bytes per block for its scale.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3; Dettmers et al. 2022, arXiv:2110.02861, section 2.2.
    Accuracy: exact, less a few scalars.
    """
    if not packed:
        return [elements * each]
    blocks = -(-elements // MOMENT_BLOCK)
    return [blocks * MOMENT_BLOCK, blocks * 4]


def parameters(model: ModelShape, each: int, parallel: int = 1, shards: int = 1) -> int:
    """Sum over tensors: ceil(rows / d) x row / t x bytes; rows / 1 below ZeRO stage 3.
    Source: torch 2.13, torch.distributed.fsdp.fully_shard: dimension 0 in equal chunks, padded; tests compare counts
        with the library's own.
    Accuracy: exact.
    """
    return sum(part * copies for part, copies in model.parts(parallel, shards)) * each


def pass_tokens(
    block: TrainedConfig | FrozenConfig, sequence_length: int, packed: bool
) -> int:
    """Tokens of one pass: micro_batch sequences, or packed up to token_budget; the longest sequence is never cut."""
    if packed:
        return max(block.token_budget, sequence_length)
    return block.micro_batch * sequence_length


def activations(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x sum over layers of the elements per token that a layer saves; without the s x s matrix of attention.
    Divided by t, except inputs of projections, which are gathered.
    Source: counted from the operations, as in Korthikanti et al. 2022, arXiv:2205.05198, sections 4.1 and 4.2.2.
    Accuracy: within 0.1 % of what autograd saves in transformers 5.19 (CPU, sdpa) for 13 models; fused kernels save
    less.
    """
    kept = sum(
        b.layers * b.saved.bytes_per_token(compute, parallel, 2 * model.hidden)
        for b in model.blocks
    )
    return tokens * kept


def checkpoints(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s / t x L x h x c: the input of each layer; one layer is recomputed at a time.
    Source: Chen et al. 2016, arXiv:1604.06174, section 4; Korthikanti et al. 2022, section 5.
    Accuracy: exact for a checkpoint at every layer.
    """
    return -(-tokens // parallel) * model.layers * model.hidden * compute


def one_layer(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x the elements per token that the largest layer saves.
    Source: as activations.
    Accuracy: as activations; without gradients it is less, so an upper bound.
    """
    return tokens * max(
        b.saved.bytes_per_token(compute, parallel, 2 * model.hidden)
        for b in model.blocks
    )


def copied_keys(model: ModelShape, tokens: int, compute: int, ranks: int) -> int:
    """Tokens x 2 x head width x (1 - key heads / ranks) x c, if this many ranks split the heads.
    Source: rlplace.models.context_parallel, and vLLM 0.32: with fewer key heads than ranks, several ranks copy one.
    Accuracy: exact.
    """
    attention = model.attention
    return (
        tokens
        * 2
        * attention.head_dim
        * max(0, ranks - attention.kv_heads)
        * compute
        // ranks
    )


def attended(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x q / t x c: the output of attention before its projection to the hidden width.
    Source: counted from the operations.
    Accuracy: exact.
    """
    return tokens * -(-model.attention.query // parallel) * compute


def layer_pass(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """b x s x the largest number of elements per token that a layer holds at a time, without gradients.
    Source: counted from the operations of transformers 5.19.
    Accuracy: within 5 % of what torch allocates for dense models (CPU, sdpa); of experts an upper bound.
    """
    kept = 2 * model.hidden
    return tokens * max(
        (b.passing or b.saved).bytes_per_token(compute, parallel, kept)
        for b in model.blocks
    )


def flowing(model: ModelShape, tokens: int, compute: int, parallel: int = 1) -> int:
    """Gradients in flight through a layer: b x s / t x the larger of two terms.

    The terms are half of what feed-forward saved, and 2 q + 2 k of attention, which exists after feed-forward is freed.
    Letters q, k: widths of query and key heads.
    Source: a gated feed-forward layer has two gradients for its four tensors, attention one for each.
    Accuracy: within 30 %, a few percent of the pass; attention as wide as the states is counted as feed-forward.
    """
    attention = 2 * (model.attention.query + model.attention.keys)
    known = attention if model.attention.query != model.hidden else 0
    wide = [max(0, b.saved.compute_cut - known) for b in model.blocks]
    return (
        tokens * max(-(-max(w // 2, attention - w) // parallel) for w in wide) * compute
    )


def fragments(passing: int) -> int:
    """8 % of the memory that a pass allocates and frees: gaps between live tensors, too small for later tensors.

    Tensors that live from step to step cause no such gaps. `passing`: gathered weights, activations and scores.
    Source: pytorch/torchtitan, Llama 3.1 8B on 8 H100 and everything recomputed: 83.9 GiB are reserved where the
        operations have 79.0, of which 64 are of the pass (docs/validation.md).
    Accuracy: assumed; a torch with expandable segments has nearly none.
    """
    return passing * 8 // 100


def score_tile(tokens: int, vocabulary: int, hidden: int) -> tuple[int, int]:
    """Return (tokens, vocabulary entries) of one tile of logits, each as large as the tile size allows."""
    rows = max(1, min(tokens, _TILE_TOKENS, _TILE_ELEMENTS // max(1, hidden)))
    return rows, max(1, min(vocabulary, _TILE_ELEMENTS // rows))


def tile_scores(model: ModelShape, tokens: int, parallel: int = 1) -> int:
    """Tokens x entries x (4 + 4) of a tile of 2^22 scores: scores and likelihoods, in float32.
    Source: rlplace.models.packed; forward, and again backward.
    Accuracy: exact; backward below float32 a rounded copy stands beside them.
    """
    rows, entries = score_tile(tokens, -(-model.vocabulary // parallel), model.hidden)
    if model.vocabulary:
        return rows * entries * 8
    return 0


def kv_sequence(
    model: ModelShape, tokens: int, step: int, each: int, parallel: int = 1
) -> int:
    """Bytes of the KV cache of a sequence: sum over layers of max(1, key heads / t) x 2 x head width x tokens x bytes.
    A layer with a window keeps window - 1 + the tokens of a step. A latent (MLA) keeps its width, whatever t is. A
    linear layer keeps one state.
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


def sampling(
    model: ModelShape, tokens: int, sequences: int, compute: int, score: int
) -> int:
    """n x V x bytes of a score + 2 x b x s x h x c: the hidden states of the step, as given and as normalised.
    No term is divided by t: vLLM gathers the scores of the whole vocabulary on every rank.
    Source: vLLM 0.26, GPUModelRunner._dummy_sampler_run and Sampler.forward.
    Accuracy: 0.98 to 1.04 of the peaks that vLLM 0.19 logs for 14 models (docs/validation.md).
    """
    return sequences * model.vocabulary * score + 2 * tokens * model.hidden * compute


def expert_workspace(
    model: ModelShape, tokens: int, compute: int, parallel: int = 1
) -> int:
    """b x s x A x (max(w, h) + max(2 w, h)) x c: two buffers for experts, which vLLM keeps from the first step on.
    Letters A, w: experts that a token uses, and their width / t.
    Source: vLLM 0.26, TritonExperts.workspace_shapes, WorkspaceManager.
    Accuracy: exact for experts that are not quantised; 0 for dense models.
    """
    most = 0
    for block in model.blocks:
        for w in block.weights:
            # The second projection of stacked experts: [E, h, w]
            if w.met < 1 and len(w.shape) == 3 and w.shape[1] == model.hidden:
                used = round(w.met * w.shape[0])
                width = -(-w.shape[2] // min(parallel, w.ways))
                each = max(width, model.hidden) + max(2 * width, model.hidden)
                most = max(most, used * each)
    return tokens * most * compute


def engine_layer(model: ModelShape, tokens: int, compute: int, parallel: int) -> int:
    """The same as layer_pass; for layers with experts, only the memory outside of the experts' workspace.
    That memory is 4 hidden states, and the larger of the tensors of attention and of a dense projection.
    Source: counted from the operations.
    Accuracy: upper bound for fused kernels.
    """
    attention = 2 * model.attention.query + 2 * model.attention.keys
    most = 0
    for block in model.blocks:
        if any(w.met < 1 and len(w.shape) == 3 for w in block.weights):
            wide = [w.shape[1] for w in block.weights if w.by_columns]
            cut = max([attention, *(3 * width for width in wide)])
            each = (4 * model.hidden + -(-cut // parallel)) * compute
        else:
            saved = block.passing or block.saved
            each = saved.bytes_per_token(compute, parallel)
        most = max(most, each)
    return tokens * most


def engine_workspace(
    model: ModelShape,
    tokens: int,
    sequences: int,
    compute: int,
    parallel: int = 1,
    score: int = SCORE_BYTES + LOGPROB_BYTES,
) -> int:
    """max(one layer over the most tokens of a step, tokens drawn for the most sequences) + experts' buffers + 64 MiB.
    Source: vLLM 0.26 measures it in a dummy step of max_num_batched_tokens and max_num_seqs.
    Accuracy: 0.98 to 1.1 of what vLLM logs; with a share it only moves the border to the KV cache.
    """
    layer = engine_layer(model, tokens, compute, parallel)
    layer += copied_keys(model, tokens, compute, parallel)
    drawn = sampling(model, tokens, sequences, compute, score)
    kept = expert_workspace(model, tokens, compute, parallel)
    return max(layer, drawn) + kept + STEP_BYTES


def reloading(model: ModelShape, each: int, parallel: int = 1) -> int:
    """max(largest weight, largest layer) / t x bytes: the new weights, which are then copied into the old tensors.
    Source: vLLM 0.32, model_loader/reload/layerwise.py, one module after the other; fused ones have several weights.
    Accuracy: exact if the embedding is the largest weight; near for layers with experts, an upper bound for dense ones.
    """
    return (
        -(-max(model.largest_weight_elements, model.largest_layer_elements) // parallel)
        * each
    )


def checkpoint_copy(whole: int, largest: int, copied: bool) -> int:
    """Host bytes of a rank while a checkpoint is written: an unpinned copy if `copied`, and one file twice.
    `largest`: bytes of the largest tensor, by which a file may exceed its size limit.
    Accuracy: upper bound; the last file is smaller.
    """
    return whole * copied + 2 * min(whole, STATE_FILE_BYTES + largest)


def saved_file(model: ModelShape, each: int) -> int:
    """Host bytes of rank 0 while a model is saved: the weights of one file, and the first weight of the next file.
    Source: rlplace.models.checkpoint.
    Accuracy: exact for a model of one file, else within the largest weight.
    """
    return min(
        model.parameters * each, MODEL_FILE_BYTES + model.largest_weight_elements * each
    )


def generation(
    model: ModelShape, answers: int, length: int, compute: int, cut: bool
) -> int:
    """The largest of three: a decoding step, a draw of tokens, a pass over one prompt.
    Step: 2 x answers x length x q x c, keys and values for every query head. Draw: answers x V x (c + 24), in float64;
    8 more with top_k or top_p (`cut`). Prompt: one layer, and the KV cache of all layers, for one sequence.
    Source: rlplace.workers.engines.transformers; transformers 5.19 repeats the heads of keys where there is a mask.
    Accuracy: within 5 % of the whole where answers are of full length.
    """
    step = answers * (2 * length * model.attention.query + 8 * model.hidden) * compute
    draw = answers * model.vocabulary * (compute + (32 if cut else 24))
    prompt = layer_pass(model, length, compute) + kv_sequence(
        model, length, length, compute
    )
    if model.tower is not None:
        prompt += model.tower.given(length) + model.tower.layer(length, compute)
    return max(step, draw, prompt)


def whole_weight(largest: int, projection: int, each: int, *, shared: bool) -> int:
    """Elements x bytes of the largest weight; twice if ranks shard it: its pieces, and the weight put together.
    A projection with LoRA factors needs the float32 weight, the float32 sum of its factors, and the rounded result.
    Source: torch 2.13, DTensor.full_tensor; rlplace.models.lora.
    Accuracy: exact, but for the factors.
    """
    merged = projection * (8 + each * (1 + shared))
    return max(2 * largest * each * shared, merged)


def communicator(groups: int) -> int:
    """Groups x 2 directions x 32 channels x 4 MiB.
    Source: NCCL: NCCL_BUFFSIZE 4 MiB, at most 32 channels.
    Accuracy: assumed, within a factor of 2.
    """
    return groups * 2 * 32 * (4 << 20)


def nccl_shared() -> int:
    """2 neighbours x 2 channels x 9.2 MiB in /dev/shm for each GPU of a group, if GPUs cannot access each other.
    Source: NCCL's transport over shared memory, whose segments have 9,637,888 bytes each.
    Accuracy: assumed; almost 0 if GPUs can access each other.
    """
    return 2 * 2 * 9_637_888


def sync_buckets(weights: int) -> int:
    """2 buckets: one is filled while the other is read; no tensor is gathered.
    Source: rlplace.comm.weights.
    Accuracy: exact between GPUs, an upper bound through the host; readers on GPUs hold windows or a second copy, too.
    """
    return 2 * min(weights, DEVICE_BUCKET_BYTES)


def sync_windows(model: ModelShape, number: int, windows: int = 2) -> int:
    """2 windows of whole weights, each of 256 MiB or the largest weight: one arrives while modules load from the other.
    1 in an engine that copies a window at once (transformers). At most all weights.
    Source: rlplace.comm.weights.device_sync.
    Accuracy: upper bound.
    """
    window = max(WINDOW_BYTES, model.largest_weight_elements * number)
    return min(windows * window, parameters(model, number))


def stream_buckets(weights: int, *, sent: bool, encrypted: bool = False) -> int:
    """2 buckets of 16 MiB: one is filled while the other is sent, or one arrives while the other is used.
    A receiver of encrypted pieces assembles a bucket from them, so it has 3 buckets.
    Source: rlplace.comm.network.stream, rlplace.comm.weights.host_sync.
    Accuracy: within 10 % of the measured memory of two processes, with their sockets.
    """
    return (2 if sent or not encrypted else 3) * min(weights, BUCKET_BYTES)


def cut_buckets(model: ModelShape) -> int:
    """2 buckets, each of 64 MiB or the largest weight x 4: one is written while processes read the other.
    Source: rlplace.workers.engines.weights.
    Accuracy: upper bound: weights may come in 16 bits.
    """
    return 2 * max(CUT_BUCKET_BYTES, model.largest_weight_elements * 4)


def pinned(size: int) -> int:
    """Pinned bytes of a host copy of a GPU tensor: its size rounded up to a power of two; the block is reused.
    Source: torch's caching host allocator (pytorch issue 95823).
    Accuracy: upper bound: newer versions can be told not to round large blocks.
    """
    if size:
        return 1 << (size - 1).bit_length()
    return 0


# ── policies of simulators: two trunks of widths O (observation), hidden ones, A (outputs); the value trunk ends in 1


def policy_samples(widths: Sequence[int], samples: int) -> int:
    """n x (O + A + 4) x 4: the samples that learning uses.
    Source: rlplace.workers.training.policy_learner.
    Accuracy: exact.
    """
    if widths:
        return samples * (widths[0] + widths[-1] + 4) * 4
    return 0


def policy_order(samples: int, ranks: int) -> int:
    """n x (16 + 34 x ranks): the sample order of an epoch over all ranks, and the rank of each sample.
    Source: rlplace.algo.minibatches.
    Accuracy: upper bound.
    """
    return samples * (16 + 34 * ranks)


def policy_statistics(widths: Sequence[int], samples: int, normalized: bool) -> int:
    """n x O x 2 x 8: observations in float64, and their squares.
    Without a normaliser of observations, only those of advantages and returns.
    Source: rlplace.algo.normalize.
    Accuracy: exact.
    """
    if not widths:
        return 0
    counted = widths[0] if normalized else 3
    return (samples * 2 + 8) * counted * 8 + samples * 16


def policy_pass(
    widths: Sequence[int], samples: int, compute: int, kept_each: int = 1
) -> int:
    """n x (outputs of hidden layers, three tensors of the layer in its backward pass, 4 A + 10 of the loss).

    `kept_each`: tensors that each hidden layer keeps: 2 if the derivative of its activation also needs the input.
    Source: rlplace.models.passes: the policy trunk goes backward first, its last layer with all outputs there.
    Accuracy: within 3 %.
    """
    if not widths:
        return 0
    terms = samples * 4 * (4 * widths[-1] + 10)
    inputs = widths[0] * (compute != 4)
    kept = 2 * kept_each * sum(widths[1:-1])
    most = 0
    for width, following in zip(
        reversed(widths[1:-1]), reversed(widths[2:]), strict=True
    ):
        most = max(most, kept + following + 2 * width)
        kept -= kept_each * width
    return terms + samples * compute * (inputs + most)


def summed(size: int, ranks: int, *, on_host: bool) -> int:
    """Bytes of an all-reduce over ranks, in addition to its input: a copy by NCCL; on a host, pieces sent and received.
    Source: rlplace.workers.training.ranks.
    Accuracy: exact. If ranks of one host sum in shared memory, an upper bound, without the 512 KiB per rank there.
    """
    if ranks == 1:
        return 0
    if not on_host:
        return size
    if size * ranks <= SUMMED_AT_ONCE_BYTES:
        return 2 * size * ranks
    return 2 * size + -(-size // ranks)


def policy_answer(widths: Sequence[int], rows: int, normalized: bool) -> int:
    """rows x 4 x (O if normalised + 2 A + the larger of two neighbouring layers and four tensors of the actions).
    Source: rlplace.models.mlp_decision: activations are in place; noise, and outputs of the first trunk.
    Accuracy: within an observation.
    """
    if not widths:
        return 0
    pairs = [sum(pair) for pair in itertools.pairwise(widths[1:])]
    return (
        rows
        * 4
        * (
            normalized * widths[0]
            + max([*pairs, 4 * widths[-1], normalized * widths[0]])
            + 2 * widths[-1]
        )
    )
