"""Workers of a user's own that send and take weights; other processes can import this module."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlplace.comm.codec import tensor_bytes
from rlplace.placement import HybridComponentPlacement, Topology
from rlplace.placement.schedule import Residency
from rlplace.workers.facts import JobFacts, facts_of
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, wait_all
from rlplace.workers.offload import Offloadable
from rlplace.workers.worker import MoveReport, Worker

PATIENCE_S = 60.0
PLACES = {"learner": "0-1", "sampler": "1-3", "evaluator": "4"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a worker's model is like."""

    seed: int = 0
    width: int = 300
    dtype: torch.dtype = torch.float32
    names: str = ""  # in front of each
    returns: str = "weights"  # or what is none


class Net(nn.Module):
    """A model with tied weights, a buffer, and a parameter that is not contiguous."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, model.width)
        self.hidden = nn.Linear(model.width, 70)
        self.turned = nn.Parameter(torch.empty(5, 8).T)
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(model.width, 17, bias=False)
        self.head.weight = self.embed.weight
        # Its own generator: ranks may be threads, which share torch's.
        generator = torch.Generator().manual_seed(model.seed)
        with torch.no_grad():
            for tensor in self.state_dict(keep_vars=True).values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.to(model.dtype)


class Weighted(Worker):
    """Has a model; its class names the weights in one line."""

    # What torch imports for the first optimizer of a process
    imports: ClassVar[tuple[str, ...]] = ("torch._dynamo",)

    config: Model

    def setup(self) -> None:
        self.net = Net(self.config)
        self.loaded: list[int] = []
        device = self.context.device
        self.offloadable = Offloadable("weights", device, self.net.parameters)
        self.view = self.net.hidden.weight[3]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.before = [tensor.data_ptr() for tensor in self.net.parameters()]

    def weights(self) -> Mapping[str, Tensor]:
        if self.config.returns == "a list":
            return [*self.net.parameters()]  # type: ignore[return-value]
        if self.config.returns == "numbers":
            return {"steps": 3}  # type: ignore[dict-item]
        state = self.net.state_dict(keep_vars=True)
        return {self.config.names + name: tensor for name, tensor in state.items()}

    def weights_loaded(self, version: int) -> None:
        self.loaded.append(version)

    def move(self, to: Residency) -> MoveReport:
        if to is Residency.OFF:
            self.offloadable.offload()
        else:
            self.offloadable.onload()
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0)

    def step(self, seed: int) -> None:
        """Change all weights, as training does, alike on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def bits(self) -> dict[str, bytes]:
        state = self.net.state_dict()
        return {name: tensor_bytes(t.clone()).tobytes() for name, t in state.items()}

    def as_float(self) -> dict[str, list[float]]:
        state = self.net.state_dict()
        return {name: t.flatten().double().tolist() for name, t in state.items()}

    def same_objects(self) -> bool:
        """Whether tensors, views and what the optimizer steps are what they were at first."""
        pointers = [tensor.data_ptr() for tensor in self.net.parameters()]
        stepped = self.optimizer.param_groups[0]["params"]
        return (
            pointers == self.before
            and torch.equal(self.view, self.net.hidden.weight[3])
            and all(a is b for a, b in zip(stepped, self.net.parameters(), strict=True))
        )

    def versions(self) -> list[int]:
        return self.loaded

    def pid(self) -> int:
        return os.getpid()


class Learner(Weighted):
    pass


class Sampler(Weighted):
    pass


class Registered(Weighted):
    """Names its weights by one call in `setup` instead."""

    def setup(self) -> None:
        super().setup()
        self.weights_of(self.net)

    weights = Worker.weights


class Silent(Worker):
    """Takes no part in a sync, or so its class says."""


class Dying(Weighted):
    """One of its ranks dies, or fails, when its weights are asked for."""

    def push_weights(self, version: int, to: str | None = None) -> Any:
        if version > 0 and self.context.rank == 1:
            if self.config.returns == "raises":
                raise ValueError("no weights today")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().push_weights(version, to)


class Sharded(Weighted):
    """FSDP2 has cut its weights: each rank sends its rows."""

    needs_own_process: ClassVar[bool] = True

    def setup(self) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        rendezvous = self.context.rendezvous
        store = dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=self.context.rank == 0,
            master_listen_fd=rendezvous.listen_fd,
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.context.rank,
            world_size=self.context.world_size,
        )
        torch.manual_seed(self.config.seed)
        self.model = nn.Sequential(nn.Linear(33, 7), nn.ReLU(), nn.Linear(7, 5))
        fully_shard(self.model)
        self.weights_of(self.model)

    weights = Worker.weights

    def whole(self) -> dict[str, bytes]:
        return {
            name: tensor_bytes(tensor.full_tensor()).tobytes()  # type: ignore[operator]
            for name, tensor in self.model.state_dict().items()
        }

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Whole(Worker):
    """The same model as Sharded, whole."""

    config: Model

    def setup(self) -> None:
        self.model = nn.Sequential(nn.Linear(33, 7), nn.ReLU(), nn.Linear(7, 5))
        self.weights_of(self.model)

    def whole(self) -> dict[str, bytes]:
        return {
            name: tensor_bytes(tensor.clone()).tobytes()
            for name, tensor in self.model.state_dict().items()
        }


def as_on_gpus(facts: JobFacts, places: Mapping[str, object]) -> JobFacts:
    """Return facts whose syncs are those of GPUs at the same places: hosts share tensors, and broadcast by gloo."""
    gpus = Topology.uniform(1, 8, kind="cuda")
    placement = HybridComponentPlacement({"component_placement": places}, gpus)
    pairs = [(sync.source, sync.target) for sync in facts.syncs]
    sources = [source for source, _ in pairs]
    planned = facts_of(placement, weights=pairs, on_devices=sources).syncs
    syncs = [
        dataclasses.replace(sync, deliveries=on_gpus.deliveries)
        for sync, on_gpus in zip(facts.syncs, planned, strict=True)
    ]
    return dataclasses.replace(facts, syncs=tuple(syncs))


def started(
    cluster: Cluster,
    workers: Mapping[str, tuple[type[Worker], Model]],
    weights: list[tuple[str, str]],
    places: Mapping[str, str] = PLACES,
    *,
    on_devices: bool = False,
    **options: Any,
) -> dict[str, WorkerGroup]:
    """Launch components with the facts of their job. `on_devices`: weights go as between GPUs at these places."""
    placed = {name: places[name] for name in workers}
    placement = HybridComponentPlacement({"component_placement": placed}, cluster)
    facts = facts_of(placement, weights=weights, **options)
    if on_devices:
        facts = as_on_gpus(facts, placed)
    return {
        name: kind.create_group(model, facts).launch(
            cluster, name=name, placement_strategy=placement.get_strategy(name)
        )
        for name, (kind, model) in workers.items()
    }


def sync(source: WorkerGroup, target: WorkerGroup, version: int) -> list[list[Any]]:
    return wait_all(
        [source.push_weights(version), target.pull_weights(version)], PATIENCE_S
    )
