"""A vision-language-action policy whose actions come from noise, by flow matching: the architecture of SmolVLA.

::

    image ──────▶ vision tower ─▶ connector ─▶ tokens ┐
    instruction ▶ words or tokenizer ▶ embedding ─────┤
    numbers ────▶ one linear layer ───────────────────┼─▶ decoder ─▶ value
    a query for the value ────────────────────────────┘     │ keys and values of each layer
                                                            ▼
    x of step i of a chunk of actions, and its time t ──▶ expert ─▶ velocities of the chunk

SmolVLA (Shukor et al. 2025, arXiv:2506.01844; lerobot, commit 7427f31, `policies/smolvla`): a second, narrower decoder,
the expert, has a token for each action of a chunk. Its layers attend in turn to the decoder's tokens and to earlier
actions, and to the decoder's tokens alone. Images and instruction do not see numbers, and nothing sees actions. The
query for the value is new here. Only the value sees it, so the actions are those of SmolVLA.

When the policy acts, the expert runs once for each step. When it learns, the expert runs once for all steps of a chain:
their tokens stand side by side, and those of one step do not see those of another.

Letters: N observations, P tokens of the decoder, L tokens of the expert, W and V widths of a token of both, H heads, D
numbers of a head, k steps of a chain, m of them, n actions of a chunk, A elements of an action, E = n * A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, LlamaModel
from transformers import SmolVLMForConditionalGeneration as SmolVLM

from rlplace.codes import config_error
from rlplace.config.blocks.policies import VlaConfig
from rlplace.envs.contract import DenoisedActions, Spaces
from rlplace.models.flow import Velocity, step_times
from rlplace.models.mlp import initialise
from rlplace.models.networks import Observed, entries_of
from rlplace.models.vla import Texts, image_tokens, vision_language_model
from rlplace.models.vla_entries import VlaEntries, entries_for
from rlplace.models.vla_folder import SmolVlaFolder, is_smolvla, smolvla_folder

# Each second layer of the expert also attends to earlier actions
_SELF_EVERY = 2
# Longest and shortest period of the embedding of a time from 0 to 1
_PERIODS = (4e-3, 4.0)
_LONGEST_WAVE = 10_000.0
# Beginnings of names here -> in lerobot's SmolVLA
_PUBLISHED: Mapping[str, str] = {
    "vision.": "vlm_with_expert.vlm.model.vision_model.",
    "connector.": "vlm_with_expert.vlm.model.connector.",
    "decoder.": "vlm_with_expert.vlm.model.text_model.",
    "expert.": "vlm_with_expert.lm_expert.",
    "state.": "state_proj.",
    "action_in.": "action_in_proj.",
    "action_out.": "action_out_proj.",
    "time_in.": "action_time_mlp_in.",
    "time_out.": "action_time_mlp_out.",
}
_TOKEN_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"
# Earlier versions of lerobot have statistics among the weights
_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
# The width within a layer of SmolVLA's expert is a multiple of this number
_MULTIPLE = 256


class _Seen(NamedTuple):
    """What the expert reads of N observations: keys and values of each layer of the decoder.

    `keys`, `values`: [N, H, P, D] of each layer. `known`: [N, P] bool, false behind a shorter instruction.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    known: Tensor


class FlowVla(nn.Module):
    """A vision-language model with an expert that denoises chunks of actions, and a value."""

    def __init__(self, spaces: Spaces, config: VlaConfig) -> None:
        super().__init__()
        self._entries: VlaEntries = entries_for(spaces, config)
        actions = spaces.actions
        assert isinstance(actions, DenoisedActions)
        self._times = step_times(actions.shape[0] - 1)
        self._chunk = spaces.chunk
        self._elements = math.prod(actions.shape[1:]) // spaces.chunk
        self._published = is_smolvla(config.path)
        narrow = config.expert_width
        inner = 4 * narrow
        if self._published:
            assert config.path is not None
            of_folder = smolvla_folder(Path(config.path))
            model = _without_weights(config, of_folder)
            narrow = int(of_folder.expert_share * model.config.text_config.hidden_size)
            inner = _inner_width(narrow)
        else:
            model = vision_language_model(spaces, self._entries, config)
        embedding = model.text_model.get_input_embeddings()
        self._texts: Texts | None = None
        if self._entries.instruction is not None:
            self._texts = Texts(config, embedding.num_embeddings)
        self.vision = model.vision_model
        self.connector = model.connector
        self.decoder = model.text_model
        text = model.config.text_config
        width = text.hidden_size
        # One token for all numbers
        numbers = sum(part.size for part in self._entries.state)
        self.state = nn.Linear(numbers, width) if numbers else None
        self.expert = _Expert(text, narrow, inner)
        self.action_in = nn.Linear(self._elements, narrow)
        self.time_in = nn.Linear(2 * narrow, narrow)
        self.time_out = nn.Linear(narrow, narrow)
        self.action_out = nn.Linear(narrow, self._elements)
        query = torch.randn(width)
        self.value_query = nn.Parameter(text.initializer_range * query)
        self.value = nn.Linear(width, 1)
        # Weights go from process to process by `state_dict`: tables of positions go with them
        for module in self.modules():
            module._non_persistent_buffers_set.clear()
        if self._published:
            _load(self, str(config.path))

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise the heads; all other weights come from the folder, or are initialised by transformers."""
        if not self._published:
            initialise([self.action_out], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def decide(self, observations: Observed) -> tuple[Velocity, Tensor]:
        """Return a function for velocities, and the values [N], of N observations.

        The function takes x [N, E] and the number of the step, and returns velocities [N, E].
        """
        seen, values = self._read(observations)

        def velocity(points: Tensor, step: int) -> Tensor:
            return self._velocities(seen, points[:, None], self._times[step : step + 1])

        return velocity, values

    def forward(self, observations: Observed, chains: Tensor) -> tuple[Tensor, Tensor]:
        """Return velocities [N, k * E] at all x of N chains but the last, and values [N].

        `chains`: [N, (1 + k) * E].
        """
        seen, values = self._read(observations)
        points = chains.view(len(chains), 1 + len(self._times), -1)[:, :-1]
        return self._velocities(seen, points, self._times), values

    def _read(self, observations: Observed) -> tuple[_Seen, Tensor]:
        """Return what the expert reads of N observations, and the values [N]."""
        by_name = entries_of(observations)
        dtype = self.value_query.dtype
        scale = math.sqrt(len(self.value_query))
        images = [by_name[image.name] for image in self._entries.images]
        pictures = image_tokens(
            self.vision, self.connector, images, dtype, padded=self._published
        )
        rows = len(pictures)
        tokens = [scale * pictures]
        masks = [pictures.new_ones(pictures.shape[:2], dtype=torch.bool)]
        if self._entries.instruction is not None and self._texts is not None:
            ids, said = self._texts(by_name[self._entries.instruction.name])
            words = self.decoder.get_input_embeddings()(ids).to(dtype)
            tokens.append(scale * words)
            masks.append(said)
        # Tokens see those of their own block, and of blocks before it
        blocks = [0] * sum(each.shape[1] for each in tokens)
        if self.state is not None:
            numbers = [
                by_name[part.name].flatten(1).to(dtype) for part in self._entries.state
            ]
            tokens.append(self.state(torch.cat(numbers, dim=1))[:, None])
            blocks.append(1)
        tokens.append(self.value_query.expand(rows, 1, -1))
        blocks.append(2)
        joined = torch.cat(tokens, dim=1)
        known = torch.cat(masks, dim=1)
        known = functional.pad(known, (0, joined.shape[1] - known.shape[1]), value=True)
        block = torch.tensor(blocks, device=joined.device)
        mask = (block <= block[:, None]) & known[:, None]
        positions = (known.long().cumsum(dim=1) - 1).clamp(min=0)
        keys = []
        values = []
        through = joined
        for layer in self.decoder.layers:
            query, key, value = _projected(layer, through)
            query = _rotated(query, positions)
            key = _rotated(key, positions)
            through = _after(layer, through, _attended(query, key, value, mask))
            # The expert does not see the query for the value
            keys.append(key[:, :, :-1])
            values.append(value[:, :, :-1])
        answer = self.decoder.norm(through[:, -1])
        return _Seen(keys, values, known[:, :-1]), self.value(answer)[:, 0]

    def _velocities(
        self, seen: _Seen, points: Tensor, times: Sequence[float]
    ) -> Tensor:
        """Return velocities at m points x of N observations, [N, m * E].

        `points`: x, [N, m, E]. `times`: t of each point, m numbers.
        """
        rows, steps, _ = points.shape
        chunk = self._chunk
        dtype = self.value_query.dtype
        actions = points.to(dtype).reshape(rows, steps, chunk, self._elements)
        placed = self.action_in(actions)
        timed = _of_times(times, placed.shape[-1]).to(placed)
        timed = timed[:, None].expand_as(placed)
        mixed = functional.silu(self.time_in(torch.cat([placed, timed], dim=-1)))
        through = self.time_out(mixed).flatten(1, 2)
        # Actions see earlier ones of their own step
        step = torch.arange(steps * chunk, device=points.device) // chunk
        place = torch.arange(steps * chunk, device=points.device) % chunk
        own = (step == step[:, None]) & (place <= place[:, None])
        known = seen.known[:, None].expand(-1, steps * chunk, -1)
        both = torch.cat([known, own.expand(rows, -1, -1)], dim=2)
        behind = seen.known.sum(dim=1)[:, None] + place
        layers: Any = self.expert.layers
        for at, layer in enumerate(layers):
            if at % _SELF_EVERY == 0:
                query, key, value = _projected(layer, through)
                query = _rotated(query, behind)
                key = torch.cat([seen.keys[at], _rotated(key, behind)], dim=2)
                value = torch.cat([seen.values[at], value], dim=2)
                attended = _attended(query, key, value, both)
            else:
                query = _heads(layer, layer.self_attn.q_proj, _normed(layer, through))
                query = _rotated(query, place[None])
                key = _heads(layer, layer.self_attn.k_proj, _joined(seen.keys[at]))
                value = _heads(layer, layer.self_attn.v_proj, _joined(seen.values[at]))
                attended = _attended(query, key, value, known)
            through = _after(layer, through, attended)
        found: Tensor = self.action_out(self.expert.norm(through))
        return found.flatten(1).float()


class _Expert(nn.Module):
    """The layers of the expert, as wide as `width`, with the heads of the decoder.

    `inner`: width within a layer.
    """

    def __init__(self, text: Any, width: int, inner: int) -> None:
        super().__init__()
        of_decoder = text.num_key_value_heads * text.head_dim
        made = LlamaModel(
            LlamaConfig(
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=text.num_hidden_layers,
                num_attention_heads=text.num_attention_heads,
                num_key_value_heads=text.num_key_value_heads,
                head_dim=text.head_dim,
                rms_norm_eps=text.rms_norm_eps,
                initializer_range=width**-0.5,
                vocab_size=1,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        self.layers = made.layers
        self.norm = made.norm
        for at, layer in enumerate(made.layers):
            # These layers attend to keys and values of the decoder
            if at % _SELF_EVERY:
                attention: Any = layer.self_attn
                attention.k_proj = nn.Linear(of_decoder, of_decoder, bias=False)
                attention.v_proj = nn.Linear(of_decoder, of_decoder, bias=False)


def _inner_width(width: int) -> int:
    """Return the width within a layer of SmolVLA's expert: 8 / 3 of its width, rounded up to a multiple of 256."""
    return -(-4 * int(2 * width / 3) // _MULTIPLE) * _MULTIPLE


def _without_weights(config: VlaConfig, of_folder: SmolVlaFolder) -> Any:
    """Return the vision-language model of a SmolVLA, with random weights and as many layers as the SmolVLA has."""
    assert config.vlm is not None, "checked before the start"
    shape: Any = AutoConfig.from_pretrained(config.vlm, local_files_only=True)
    shape.text_config.num_hidden_layers = of_folder.layers
    return SmolVLM(shape).float().model


def _load(policy: FlowVla, folder: str) -> None:
    """Copy the weights of a checkpoint of SmolVLA into the policy.

    Raises ConfigError if a weight is missing, has another shape, or is left over. Statistics of earlier versions are
    not weights. The head over tokens is left out: it does not make actions.
    """
    needed = {}
    for name, parameter in policy.named_parameters():
        for ours, theirs in _PUBLISHED.items():
            if name.startswith(ours):
                needed[f"model.{theirs}{name.removeprefix(ours)}"] = parameter
    stored = load_file(Path(folder) / "model.safetensors")
    kept = {}
    for name, tensor in stored.items():
        if name != _TOKEN_HEAD and not name.startswith(_STATISTICS):
            kept[name] = tensor
    odd = []
    for name in sorted(needed.keys() | kept.keys()):
        shapes = [tuple(of[name].shape) for of in (needed, kept) if name in of]
        if len(shapes) != 2 or shapes[0] != shapes[1]:
            odd.append(name)
    if odd:
        raise config_error(
            "model-misfit",
            "actor.model.path",
            folder,
            error="smolvla-weights",
            name=odd[0],
            count=len(odd),
        )
    with torch.no_grad():
        for name, parameter in needed.items():
            parameter.copy_(kept[name])


def _normed(layer: Any, tokens: Tensor) -> Tensor:
    normed: Tensor = layer.input_layernorm(tokens)
    return normed


def _heads(layer: Any, projection: nn.Module, tokens: Tensor) -> Tensor:
    """Return a projection of tokens by heads, [N, H, tokens, D]."""
    projected: Tensor = projection(tokens)
    return projected.unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(1, 2)


def _joined(by_heads: Tensor) -> Tensor:
    """Return [N, tokens, H * D] of [N, H, tokens, D]."""
    return by_heads.transpose(1, 2).flatten(2)


def _projected(layer: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the tokens of a layer, by heads, [N, H, tokens, D] each."""
    normed = _normed(layer, tokens)
    attention = layer.self_attn
    query = _heads(layer, attention.q_proj, normed)
    key = _heads(layer, attention.k_proj, normed)
    value = _heads(layer, attention.v_proj, normed)
    return query, key, value


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return what each query takes from values, [N, queries, H * D].

    `query`: [N, H, queries, D]. `key`, `value`: [N, heads of keys, keys, D]. `mask`: [N, queries, keys], true where a
    query sees a key.
    """
    groups = query.shape[1] // key.shape[1]
    found = functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=mask[:, None],
    )
    return _joined(found)


def _after(layer: Any, tokens: Tensor, attended: Tensor) -> Tensor:
    """Return the tokens after a layer. `attended`: the result of its attention."""
    tokens = tokens + layer.self_attn.o_proj(attended)
    added: Tensor = layer.mlp(layer.post_attention_layernorm(tokens))
    return tokens + added


def _rotated(by_heads: Tensor, positions: Tensor) -> Tensor:
    """Return queries or keys [N, H, tokens, D], rotated by the positions of their tokens, [N or 1, tokens]."""
    half = by_heads.shape[-1] // 2
    exponents = torch.arange(half, device=by_heads.device) / half
    angles = positions[..., None] / _LONGEST_WAVE**exponents
    angles = angles[:, None]
    sine = angles.sin().to(by_heads.dtype)
    cosine = angles.cos().to(by_heads.dtype)
    first, second = by_heads.split(half, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1)


def _of_times(times: Sequence[float], width: int) -> Tensor:
    """Return the embeddings of times, [times, width], of sines and cosines."""
    shortest, longest = _PERIODS
    fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    periods = shortest * (longest / shortest) ** fractions
    angles = torch.tensor(times, dtype=torch.float64)[:, None] * 2 * math.pi / periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
