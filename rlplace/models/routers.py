"""Routers of mixtures of experts: which experts they choose, in a pass that records it and in one that replays it.

A router scores all E experts of its layer for each token, and the token goes to the k experts with the highest scores.
In 16 bits, engine and trainer round differently, so a token near a tie goes to other experts in the one than in the
other, and its log-probability differs by much more than rounding. Ma et al. 2025 (Rollout Routing Replay,
arXiv:2510.11370): the engine records the chosen experts, and the trainer takes them in place of its own choice. Their
weights are still computed from the trainer's own scores, so that gradients reach the router::

    engine    scores ──▶ its k highest ──▶ experts ────── routes [tokens, routers, k] ──┐
    trainer   scores ──▶ weights of these k, normalised as the family does it ◀─────────┘ ──▶ experts

Letters: T tokens of a pass, R layers with a router, E experts of a layer, k experts of a token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlplace.models.packed import Packed

# In routes: the router of the pass chooses for this token
FREE = -1
# Routers of transformers return (logits [T, E], weights [T, k], experts [T, k])
_ROUTER = "TopKRouter"
# Numbers of experts up to this one fit into int8, beside FREE
_SMALL = 128


def route_dtype(experts: int) -> torch.dtype:
    """Return the dtype of routes: the smallest one that has the numbers of `experts` experts of a layer, and FREE."""
    return torch.int8 if experts <= _SMALL else torch.int16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How the tokens of one pass were spread over experts.

    `counts` [R, E] int64: how many tokens each expert of each layer got. `loss`: the auxiliary loss, a number with a
    gradient; None: it was not asked for.
    """

    counts: Tensor
    loss: Tensor | None


class Routers:
    """The routers of a decoder, whose choices can be recorded and replayed.

    Hooks on the decoder's layers and routers do the work. A layer that is computed again for the backward pass
    (activation checkpointing) replays the same routes again, because they come with the layer's arguments.
    """

    def __init__(self, decoder: nn.Module) -> None:
        """Find the routers of `decoder`, and add the hooks."""
        self._layers: list[_Layer] = []
        layers = getattr(decoder, "layers", ())
        for block in layers:
            for module in block.modules():
                if type(module).__name__.endswith(_ROUTER):
                    layer = _Layer(self, len(self._layers), module)
                    block.register_forward_pre_hook(layer.begin, with_kwargs=True)
                    module.register_forward_hook(layer.choose)
                    self._layers.append(layer)
        # Whether passes count the tokens of each expert, and whether they compute the auxiliary loss
        self.counts = False
        self.balances = False
        # Where the routers of the pass in progress put their choices
        self._record: list[Tensor] | None = None
        # For each router of the last counted pass: tokens of each expert, and sum of the probabilities
        self._shares: list[tuple[Tensor, Tensor | None]] = []
        # Whether such a pass is in progress, and the number of its first tokens that count
        self._counting = False
        self._tokens: int | None = None

    def __len__(self) -> int:
        """The number of layers with a router, R."""
        return len(self._layers)

    @property
    def experts(self) -> int:
        """Number of experts of a layer, E; 0 without routers."""
        if not self._layers:
            return 0
        return int(self._layers[0].router.num_experts)  # type: ignore[arg-type]  # a router of transformers has it

    def check(self, routes: Tensor | None) -> None:
        """Raise ValueError if `routes` [T, routers, k] are those of a model with other layers or another k."""
        if routes is None:
            return
        chosen = self._layers[0].chosen if self._layers else 0
        if tuple(routes.shape[1:]) != (len(self), chosen):
            raise ValueError(
                f"routes of {routes.shape[1]} routers with {routes.shape[2]} experts of a token are not those of a "
                f"model with {len(self)} routers and {chosen} experts of a token"
            )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Record the experts that are chosen in one pass inside of the `with` block.

        After the pass, the yielded list has one tensor [T, k] int64 for each of the R layers with a router.
        """
        found = list[Tensor]()
        self._record = found
        try:
            yield found
        finally:
            self._record = None

    @contextlib.contextmanager
    def counted(self, tokens: int) -> Iterator[None]:
        """Keep what `balance` needs of the pass inside of the `with` block, if `counts` or `balances` is set.

        `tokens`: number of first tokens of the pass that count; all others are fillers.
        """
        self._shares = []
        self._counting = self.counts or self.balances
        # Kept beyond the pass: the backward pass may compute layers again
        self._tokens = tokens
        try:
            yield
        finally:
            self._counting = False

    def balance(self) -> Balance | None:
        """Return how the tokens of the last counted pass were spread over experts; None without routers or such a pass.

        The result is returned once. The loss is that of Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961,
        equations 4 to 6) for k experts of a token, over all layers at once, as transformers computes it: E times the
        sum over experts of the share of tokens that the expert got, times the mean probability that the router gave
        the expert. It is k if all experts are used equally.
        """
        shares = self._shares
        self._shares = []
        if not shares:
            return None
        counts = torch.stack([counts for counts, _ in shares])
        sums = [each for _, each in shares if each is not None]
        if not sums:
            return Balance(counts=counts, loss=None)
        # A token has k entries in each layer
        rows = counts.sum() / self._layers[0].chosen
        rows = rows.clamp(min=1)
        share = counts.sum(0) / rows
        probability = torch.stack(sums).sum(0) / rows
        loss = counts.shape[1] * (share * probability).sum()
        return Balance(counts=counts, loss=loss)

    def take(self, logits: Tensor, experts: Tensor) -> None:
        """Record and count the choices of one router, as far as the pass in progress asks for it.

        `logits` [T, E]: the router's scores. `experts` [T, k]: the experts that the tokens go to.
        """
        if self._record is not None:
            self._record.append(experts)
        total = None
        # A layer that is computed again takes the same steps, as checkpointing needs it, and keeps nothing
        if self.balances and torch.is_grad_enabled():
            probabilities = logits[: self._tokens].softmax(-1, dtype=torch.float32)
            total = probabilities.sum(0)
        if self._counting:
            chosen = experts[: self._tokens].reshape(-1)
            counts = chosen.new_zeros(logits.shape[-1])
            counts.scatter_add_(0, chosen, torch.ones_like(chosen))
            self._shares.append((counts, total))


class _Layer:
    """A decoder layer with a router.

    `number`: index of the layer among the layers with a router. `router`: the router's module.
    """

    def __init__(self, routers: Routers, number: int, router: nn.Module) -> None:
        self._routers = routers
        self._number = number
        # Not a child: hooks are kept by modules, which would otherwise own themselves
        self.router = router
        # Experts of the tokens of this pass, [T, k]; None: the router chooses
        self._routes: Tensor | None = None

    @property
    def chosen(self) -> int:
        """Number of experts of a token, k."""
        return int(self.router.top_k)  # type: ignore[arg-type]  # a router of transformers has it

    def begin(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take the routes of a pass that begins in this layer, from the packed sequences among its arguments."""
        packed: Packed | None = kwargs.get("packed")
        self._routes = None
        if packed is not None and packed.routes is not None:
            self._routes = packed.routes[:, self._number]

    def choose(
        self, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the output of the router with the experts of the routes, and the weights of these experts.

        `output`: logits [T, E], weights [T, k] and experts [T, k], as the router has chosen them.
        """
        logits, weights, experts = output
        if self._routes is not None:
            routes = self._routes.long()
            is_free = routes[:, :1] == FREE
            experts = torch.where(is_free, experts, routes)
            probabilities = logits.softmax(-1, dtype=torch.float32)
            found = probabilities.gather(-1, experts)
            # Mixtral always normalises, and has no key for it
            if getattr(router, "norm_topk_prob", True):
                found = found / found.sum(-1, keepdim=True)
            weights = found.to(weights.dtype)
        self._routers.take(logits, experts)
        return logits, weights, experts


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return metrics of how tokens are spread over experts. `counts` [R, E]: tokens of each expert of each layer.

    `expert_load_max`: tokens of the most used expert of a layer, divided by the mean over the layer's experts; the mean
    over layers. It is 1 if all experts get equally many tokens, and one more than MaxVio of Wang et al. 2024
    (arXiv:2408.15664). `experts_unused`: share of all experts that got no token.
    """
    load = counts.double()
    mean = load.mean(-1).clamp(min=1e-12)
    return {
        "expert_load_max": float((load.amax(-1) / mean).mean()),
        "experts_unused": float((load == 0).double().mean()),
    }
