"""Trained simulator policies, to use outside of a run: `rlplace.load_policy`.

Letters: N observations, O observation shape, A action shape.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rlplace.config.schema import Config
from rlplace.envs.contract import ContinuousActions, Spaces
from rlplace.envs.registry import needs, spaces_of_job
from rlplace.errors import ConfigError
from rlplace.models.checkpoint import write_bytes
from rlplace.models.mlp import PolicyOutput, mode, noise_shape, sample
from rlplace.models.networks import NetworkPolicy
from rlplace.models.policy_networks import PolicyNetwork, build_policy
from rlplace.models.saved_state import policy_tensors
from rlplace.trained import Trained, find_trained

_OUT = "OUT"  # of the command that exports


class Policy(nn.Module):
    """Decides on the CPU, as the simulator takes it; observations are normalised as in training.

    One with a memory remembers each row of a batch from one `act` to the next.

    `spaces`: the `Spaces` of the simulator that it was trained on. `network`: the module behind it, whose `forward`
    takes observations [N, *O].
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, network: PolicyNetwork, spaces: Spaces, config: Config, *, seed: int
    ) -> None:
        super().__init__()
        self.network = network
        self.spaces = spaces.shown
        self.config = config
        self._memory = torch.zeros((0, network.remembered))
        self._generator = torch.Generator().manual_seed(seed)
        self._bounded = isinstance(spaces.actions, ContinuousActions)
        if isinstance(spaces.actions, ContinuousActions):
            self.register_buffer(
                "low", torch.tensor(spaces.actions.low).view(spaces.actions.shape)
            )
            self.register_buffer(
                "high", torch.tensor(spaces.actions.high).view(spaces.actions.shape)
            )

    def forward(self, observations: Tensor) -> Tensor:
        """Return the likeliest actions of [N, *O], as `act` does."""
        return self._within(mode(self.network(observations)))

    @torch.inference_mode()
    def act(
        self,
        observations: ArrayLike,
        deterministic: bool = True,
        begins: ArrayLike | None = None,
    ) -> NDArray[Any]:
        """Return the actions for observations [*O], or a batch [N, *O], of the shape `spaces.observation_shape`.

        Of a discrete space: int64 [] or [N], counted from 0. Of a continuous one: float32 [*A] or [N, *A], within its
        bounds. The likeliest ones; with `deterministic=False` they are drawn, as in training.

        `begins`: a bool, or [N] of them, where an episode begins: there a policy with memory forgets. Without it, all
        rows go on, unless there are more or fewer than before. Raises ValueError for another shape, for what is no
        numbers, and for floating-point numbers where it was trained on bytes.
        """
        shown = np.asarray(observations)
        shape = self.spaces.observation_shape
        if shown.shape[shown.ndim - len(shape) :] != shape or shown.ndim not in (
            len(shape),
            len(shape) + 1,
        ):
            raise _wrong_shape(shown.shape, shape)
        if shown.dtype.kind not in (
            "biu" if self.spaces.observation_dtype == "uint8" else "biuf"
        ):
            raise _wrong_dtype(str(shown.dtype), self.spaces.observation_dtype)
        given = shown.astype(self.spaces.observation_dtype, copy=False)
        batch = torch.tensor(given).reshape(-1, *shape)
        if self.network.remembered:
            output = self._decided(batch, begins)
            actions = (
                self._within(mode(output)) if deterministic else self._drawn(output)
            )
        else:
            actions = self(batch) if deterministic else self._drawn(self.network(batch))
        found: NDArray[Any] = actions.numpy()
        if given.ndim > len(shape):
            return found
        return found[0]

    def _decided(self, batch: Tensor, begins: ArrayLike | None) -> PolicyOutput:
        network = self.network
        assert isinstance(network, NetworkPolicy), "no other has a memory"
        if len(self._memory) != len(batch):
            self._memory = torch.zeros((len(batch), network.remembered))
        elif begins is not None:
            empty = torch.from_numpy(
                np.broadcast_to(np.asarray(begins, bool), len(batch)).copy()
            )
            self._memory = self._memory.masked_fill(empty[:, None], 0.0)
        output, self._memory = network.decide(network.remembering(batch, self._memory))
        return output

    def _drawn(self, output: PolicyOutput) -> Tensor:
        size = (len(output.values), *noise_shape(self.spaces.actions))
        draw = torch.randn if self._bounded else torch.rand
        return self._within(sample(output, draw(size, generator=self._generator))[0])

    def _within(self, actions: Tensor) -> Tensor:
        if self._bounded:
            return torch.clamp(actions, self.low, self.high)
        return actions


def load_policy(path: str | Path, *, seed: int = 0, key: str = "path") -> Policy:
    """Load the policy of a run (its newest checkpoint), of a checkpoint, or of a folder that `rlplace.export` wrote.

    The simulator is made once, to see its spaces. `seed`: of actions that are drawn. Raises ConfigError, of `key`.
    """
    return policy_of(find_trained(path, key), seed=seed, key=key)


def policy_of(trained: Trained, *, seed: int, key: str) -> Policy:
    """Load a policy that was found. Raises ConfigError, of `key`: damaged weights, a language model."""
    config = trained.config
    if config.kind != "mlp":
        what = "this is a language model"
        why = "its folder is loaded by transformers, and it is no policy of simulators"
        fix = f"python -m rlplace.export {trained.folder} <new folder>"
        raise ConfigError.of("wrong-kind", key, what, str(trained.folder), why, fix)
    spaces = spaces_of_job(config)
    network = build_policy(spaces, config.actor, config.algorithm, config.runner.seed)
    expected = network.state_dict()
    found = {
        name: _shaped(tensor, expected.get(name))
        for name, tensor in _tensors(trained, key).items()
    }
    there, wanted = (
        {name: tuple(t.shape) for name, t in of.items()} for of in (found, expected)
    )
    if odd := sorted(
        name
        for name in there.keys() | wanted.keys()
        if there.get(name) != wanted.get(name)
    ):
        what = "the weights are not those of a policy for this simulator"
        why = f"{odd[0]} is {there.get(odd[0], 'missing')} there and {wanted.get(odd[0], 'missing')} by config.yaml"
        why += f"; {config.simulator_env.id} may show or take something else than when it was trained on"
        fix = "name a checkpoint of this simulator, or bring back the simulator of then"
        raise ConfigError.of("other-state", key, what, str(trained.weights), why, fix)
    network.load_state_dict(found)
    return Policy(
        network.requires_grad_(False).eval(), spaces, config, seed=seed
    ).eval()


def _tensors(trained: Trained, key: str) -> dict[str, Tensor]:
    if trained.checkpoint is not None:
        return dict(policy_tensors(trained.weights))
    try:
        return load_file(trained.weights)
    except (SafetensorError, OSError) as error:
        what = "the weights cannot be read"
        fix = "export them again: python -m rlplace.export RUN <new folder>"
        raise ConfigError.of(
            "checkpoint-damaged", key, what, str(trained.weights), str(error), fix
        ) from error


def _shaped(stored: Tensor, expected: Tensor | None) -> Tensor:
    """Turn a single number, which checkpoints hold as a vector of length 1, back into one."""
    single = expected is not None and not expected.dim() and stored.shape == (1,)
    if single:
        return stored.view([])
    return stored


# ── for other programs ───────────────────────────────────────────────────────────────────────────────────────────────


def write_torchscript(policy: Policy, out: Path) -> None:
    """Write observations [N, *O] -> likeliest actions, for `torch.jit.load`. Raises OutputError, ConfigError."""
    content = io.BytesIO()
    with _tracing(out):
        torch.jit.save(_traced(policy, out), content)
    write_bytes(out, content.getvalue())


def write_onnx(policy: Policy, out: Path) -> None:
    """Write `observations` [N, *O] -> `actions`, the likeliest. Raises OSError; ConfigError, also without onnx."""
    with needs("onnx", got=str(out), extra="onnx", key=_OUT, of="the format"):
        import onnx  # noqa: F401  # which torch looks for when it writes
    names = ["observations", "actions"]
    part = out.with_name(out.name + ".part")
    options: dict[str, Any] = {
        "input_names": names[:1],
        "output_names": names[1:],
        "dynamo": False,
    }
    with _tracing(out):
        _traced(policy, out)  # for what it refuses
        torch.onnx.export(
            policy,
            (_example(policy),),
            part,
            dynamic_axes={n: {0: "N"} for n in names},
            **options,
        )
    part.replace(out)


@contextmanager
def _tracing(out: Path) -> Iterator[None]:
    """Write what torch records of a pass inside. Raises ConfigError where it cannot be recorded."""
    with warnings.catch_warnings():
        # Of what `_traced` tries, and for forms that need Python to run
        warnings.simplefilter("ignore")
        try:
            yield
        except (RuntimeError, TypeError) as error:
            raise _not_traced(
                out, f"{type(error).__name__}: {error}".splitlines()[0]
            ) from error


def _traced(policy: Policy, out: Path) -> torch.jit.ScriptModule:
    """Record the pass of one batch. Raises ConfigError where it is not that of another batch too."""
    if policy.network.remembered:
        raise _not_traced(
            out,
            "it has a memory, which goes from one step to the next beside the observations",
        )
    traced: torch.jit.ScriptModule = torch.jit.trace(
        policy, _example(policy), check_trace=False
    )
    other = torch.randint(0, 255, (3, *policy.spaces.observation_shape)).to(
        _example(policy).dtype
    )
    if not torch.allclose(traced(other), policy(other), atol=1e-5):
        raise _not_traced(
            out,
            "the network does something else by what it sees, which a recorded pass does not",
        )
    return traced


def _not_traced(out: Path, why: str) -> ConfigError:
    what = "the policy cannot be written in this form"
    fix = f"{out.with_suffix('')}        (a folder for rlplace.load_policy)"
    return ConfigError.of("not-traceable", _OUT, what, str(out), why, fix)


def _example(policy: Policy) -> Tensor:
    spaces = policy.spaces
    return torch.zeros(
        (2, *spaces.observation_shape), dtype=getattr(torch, spaces.observation_dtype)
    )


def _wrong_shape(got: tuple[int, ...], shape: tuple[int, ...]) -> ConfigError:
    what = "observations of another shape"
    why = f"the policy was trained on {list(shape)}; a batch is [N, *{list(shape)}]"
    return ConfigError.of(
        "observation-shape",
        "observations",
        what,
        str(list(got)),
        why,
        "stack them along the first axis",
    )


def _wrong_dtype(got: str, dtype: str) -> ConfigError:
    what = "observations of another kind of numbers"
    why = f"the policy was trained on {dtype}, as the simulator shows"
    fix = (
        "give them as the simulator shows them: bytes 0 to 255"
        if dtype == "uint8"
        else "give an array of float32"
    )
    return ConfigError.of("observation-shape", "observations", what, got, why, fix)
