"""A worker's ends of weight syncs, for custom workers with a method `weights` and for the workers of rlplace.

::

    source   Worker.weights ─▶ shards ─▶ WeightSender ═════▶ receiver ─▶ names and shapes compared ─▶ copied in place
    target                                                              into the tensors of its own Worker.weights
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlplace import codes
from rlplace.comm.weights.device_sync import DeviceSender
from rlplace.comm.weights.host_sync import WeightSender, receiver_of
from rlplace.comm.weights.rendezvous import StoreAddress, serve_store
from rlplace.comm.weights.shards import Layout
from rlplace.comm.weights.version import ReceivedWeights, WeightReceiver
from rlplace.errors import (
    ChannelTimeout,
    NotResident,
    Source,
    WeightSyncError,
    did_you_mean,
)
from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import Delivery, DeviceDelivery, deliver_by_rank
from rlplace.places import place_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from rlplace.workers.engines.generation import GenerationEngine
    from rlplace.workers.facts import WeightSync
    from rlplace.workers.worker import Worker, WorkerContext


# ── ends, as roles open them too ──────────────────────────────────────────────────────────────────────────────────────


def open_sender(
    context: WorkerContext,
    channel: str,
    *,
    target: str,
    ranks: int,
    deliveries: Sequence[Delivery] = (),
    store: StoreAddress | None = None,
    verify_every: int = 0,
    delta_share: float = 0.0,
) -> WeightSender:
    """Open and return the sender of a weight sync, for the worker with `context`.

    `channel`: name of the sync's channel. `target`: component that receives the weights. `ranks`: number of ranks of
    `target`. `deliveries`: planned copies of the weights; if there are none, or no job folder, each target rank gets a
    copy of its own. `store`: where all ranks meet if GPUs send to GPUs directly; None: at the rendezvous of this
    worker's group. `verify_every`: every n-th push has checksums; 0: none. `delta_share`: between nodes, send only the
    changed bytes if they are at most this share of all bytes; 0: always send all.
    """
    component = context.slot.component
    if context.folder is None or not deliveries:
        deliveries = deliver_by_rank(ranks, component, target)
    device = None
    if any(isinstance(delivery, DeviceDelivery) for delivery in deliveries):
        meet = context.rendezvous
        device = DeviceSender(
            context.channels[channel],
            rank=context.rank,
            component=component,
            device=_device_of(context),
            store=store or StoreAddress(host=meet.host, port=meet.port),
        )
    return WeightSender(
        context.channels[channel],
        rank=context.rank,
        deliveries=deliveries,
        folder=context.folder,
        device=device,
        verify_every=verify_every,
        delta_share=delta_share,
        check=lambda: context.check_cancelled("push_weights"),
    )


def open_receiver(
    context: WorkerContext,
    channel: str,
    *,
    deliveries: Sequence[Delivery] = (),
    engine: object = None,
) -> WeightReceiver:
    """Open and return the receiver of a weight sync, for the worker with `context`.

    `channel`: name of the sync's channel. `deliveries`: planned copies of the weights; ignored if there is no job
    folder. `engine`: generation engine that loads the weights, or None. If the engine has a method `load_from` and the
    deliveries say so, its own processes receive the weights window by window.
    """
    return receiver_of(
        context.channels[channel],
        context.rank,
        component=context.slot.component,
        deliveries=deliveries if context.folder else (),
        folder=context.folder,
        device=_device_of(context),
        load=getattr(engine, "load_from", None),
    )


def push_metrics(component: str, seconds: float, pushed: Mapping[str, int]) -> Metrics:
    """Return the metrics of a push: seconds, bytes, and bytes per second.

    `component`: component that sends, first part of the metrics' names. `seconds`: duration of the push. `pushed`:
    transport -> bytes.
    """
    pushed_bytes = sum(pushed.values())
    return {
        f"{component}/push_s": Metric(seconds, "max"),
        f"{component}/push_gb_per_s": Metric(pushed_bytes / seconds / 1e9, "sum"),
        f"{component}/pushed_bytes": Metric(pushed_bytes, "sum"),
        **{
            f"{component}/pushed_{name}_bytes": Metric(size, "sum")
            for name, size in pushed.items()
        },
    }


def pull_metrics(
    component: str, received: ReceivedWeights, *, waited_s: float, loading_s: float
) -> Metrics:
    """Return the metrics of a pull: seconds, bytes, and bytes per second.

    `component`: component that receives, first part of the metrics' names. `waited_s`: seconds until all weights had
    arrived. `loading_s`: seconds in which the weights that had arrived were loaded.
    """
    seconds = waited_s + loading_s
    pulled_bytes = sum(received.transports.values())
    return {
        f"{component}/pull_s": Metric(seconds, "max"),
        f"{component}/load_s": Metric(loading_s, "max"),
        f"{component}/pull_gb_per_s": Metric(pulled_bytes / seconds / 1e9, "min"),
        f"{component}/pull_bytes": Metric(pulled_bytes, "sum"),
        **{
            f"{component}/pulled_{name}_bytes": Metric(size, "sum")
            for name, size in received.transports.items()
        },
    }


def _device_of(context: WorkerContext) -> torch.device:
    import torch

    return torch.device(context.device.torch_name)


# ── the ends of a worker with `weights` ───────────────────────────────────────────────────────────────────────────────


class WeightEnds:
    """The senders and receivers of one worker for its planned weight syncs. Each is opened at its first use.

    Only the worker's thread uses this object.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._context = worker.context
        self._component = worker.context.slot.component
        # By target
        self._senders: dict[str, WeightSender] = {}
        # By source
        self._receivers: dict[str, WeightReceiver] = {}
        # On rank 0 of a component that sends from accelerator to accelerator
        self._store: Store | None = None

    def push(self, version: int, to: str | None) -> Metrics:
        """Send this rank's weights as version `version`, and return the metrics of the push.

        `to`: component that receives the weights; None: every component with a planned sync from this component.
        """
        from rlplace.comm.weights.named import shards_of

        syncs = self._syncs_to(to)
        tensors = self._tensors("push_weights")
        shards = shards_of(
            tensors, rank=self._context.rank, ranks=self._context.world_size
        )
        began = time.perf_counter()
        pushed = Counter[str]()
        for sync in syncs:
            with _called_together(sync, version):
                pushed.update(self._sender(sync).push(version, shards))
        weights_bytes = Layout.of(shard.spec for shard in shards).size_bytes
        return {
            **push_metrics(self._component, time.perf_counter() - began, pushed),
            f"{self._component}/weights_bytes": Metric(weights_bytes, "max"),
        }

    def pull(self, version: int, source: str | None) -> Metrics:
        """Receive version `version` of the weights, load it into the worker's tensors or engine, and return the metrics
        of the pull.

        `source`: component that sends the weights; None: the only component with a planned sync to this component.
        """
        from rlplace.comm.weights.named import fill

        sync = self._sync_from(source)
        engine = self._worker._engine_of_weights
        own = {} if engine is not None else self._tensors("pull_weights")
        began = time.perf_counter()
        with _called_together(sync, version):
            received = self._receiver(sync).pull(version)
        with received:
            arrived = time.perf_counter()
            if engine is not None:
                self._load(engine, received, sync.source)
            else:
                self._compare(received, own, sync.source)
                fill(own, received.tensors)
        loaded = time.perf_counter()
        return pull_metrics(
            self._component,
            received,
            waited_s=arrived - began,
            loading_s=loaded - arrived,
        )

    def begin_again(self) -> None:
        for sender in self._senders.values():
            sender.begin_again()
        for receiver in self._receivers.values():
            receiver.begin_again()

    def _syncs_to(self, target: str | None) -> list[WeightSync]:
        """Return the planned syncs from this component to `target`, or to any component if `target` is None.

        Raise WeightSyncError if none is planned.
        """
        facts = self._context.facts
        syncs = facts.syncs_from(self._component) if facts else ()
        found = [sync for sync in syncs if target in (None, sync.target)]
        if not found:
            pair = (self._component, target or "<target>")
            known = [sync.target for sync in syncs]
            raise _unplanned(self._context, "push_weights", pair, "to", target, known)
        return found

    def _sync_from(self, source: str | None) -> WeightSync:
        """Return the planned sync from `source` to this component, or from any component if `source` is None.

        Raise WeightSyncError if none or several are planned.
        """
        facts = self._context.facts
        syncs = facts.syncs_to(self._component) if facts else ()
        found = [sync for sync in syncs if source in (None, sync.source)]
        known = [sync.source for sync in syncs]
        if not found:
            pair = (source or "<source>", self._component)
            raise _unplanned(
                self._context, "pull_weights", pair, "source", source, known
            )
        if len(found) > 1:
            raise _several(self._context, known)
        return found[0]

    def _sender(self, sync: WeightSync) -> WeightSender:
        facts = self._context.facts
        assert facts is not None, "a sync is of a job's facts"
        if sync.target not in self._senders:
            sender = open_sender(
                self._context,
                sync.channel.name,
                target=sync.target,
                ranks=facts.ranks[sync.target],
                deliveries=sync.deliveries,
                store=self._store_of(sync),
            )
            self._context.opened.callback(sender.close)
            self._senders[sync.target] = sender
        return self._senders[sync.target]

    def _store_of(self, sync: WeightSync) -> StoreAddress | None:
        """Return where the members of a sync between accelerators meet; None for a sync through the host.

        All syncs of a component meet at one store, which rank 0 serves from its first sync on.
        """
        meet = self._context.rendezvous
        if self._context.folder is None or not sync.on_devices:
            return None
        if self._store is None and meet.weights_fd is not None:
            self._store = serve_store(
                meet.host, meet.weights_port, meet.weights_fd, sync.timeout_s
            )
        return StoreAddress(
            host=meet.host, port=meet.weights_port, prefix=sync.channel.name
        )

    def _receiver(self, sync: WeightSync) -> WeightReceiver:
        if sync.source not in self._receivers:
            receiver = open_receiver(
                self._context, sync.channel.name, deliveries=sync.deliveries
            )
            self._context.opened.callback(receiver.close)
            self._receivers[sync.source] = receiver
        return self._receivers[sync.source]

    def _tensors(self, method: str) -> Mapping[str, Tensor]:
        """Return the result of the worker's `weights()`: name -> tensor.

        `method`: the method that needs the weights, for errors. Raise WeightSyncError if the result is not a mapping of
        names to tensors, NotResident if tensors are offloaded.
        """
        from rlplace.comm.weights.named import absent

        tensors: object = self._worker.weights()
        wrong = _not_weights(tensors)
        if wrong is not None:
            bad = codes.problem(
                "bad-weights",
                self._context.owner,
                source=_place_of_weights(type(self._worker)),
                returned=wrong,
            )
            raise WeightSyncError(bad)
        assert isinstance(tensors, Mapping), "it is a mapping of tensors"
        missing = absent(tensors)
        if missing:
            raise _offloaded(self._context, method, missing)
        return tensors

    def _compare(
        self, received: ReceivedWeights, own: Mapping[str, Tensor], source: str
    ) -> None:
        """Raise WeightSyncError if the received weights and this worker's weights differ in names or shapes. Nothing is
        copied.

        `own`: this worker's weights. `source`: component that has sent the weights, for errors.
        """
        from rlplace.comm.weights.named import misfits

        found = misfits(received.tensors, own)
        if found.names:
            names = codes.problem(
                "weight-names",
                self._context.owner,
                "\n".join(found.names),
                source=_place_of_weights(type(self._worker)),
                sender=source,
                component=self._component,
            )
            raise WeightSyncError(names)
        if found.shapes:
            shapes = codes.problem(
                "weight-shapes",
                self._context.owner,
                "\n".join(found.shapes),
                source=_place_of_weights(type(self._worker)),
                sender=source,
                component=self._component,
            )
            raise WeightSyncError(shapes)

    def _load(
        self, engine: GenerationEngine, received: ReceivedWeights, source: str
    ) -> None:
        """Load the received weights into `engine`. Raise WeightSyncError if names or shapes do not fit the engine's
        model.

        `source`: component that has sent the weights, for errors.
        """
        from rlplace.workers.engines.weights import UnfitWeights

        try:
            engine.load(received.tensors, received.version)
        except UnfitWeights as unfit:
            wrong = codes.problem(
                "weight-names",
                self._context.owner,
                "\n".join(unfit.misfits),
                error="of-engine",
                source=_place_of_weights(type(self._worker)),
                sender=source,
            )
            raise WeightSyncError(wrong) from unfit


@contextlib.contextmanager
def _called_together(sync: WeightSync, version: int) -> Iterator[None]:
    """Return a context manager that adds a hint to a ChannelTimeout that is raised in its `with` block.

    The hint says that the push and the pull of a sync must both be called before either is waited for.
    """
    try:
        yield
    except ChannelTimeout as late:
        late.add_note(
            "the two ends of a sync are called before either is waited for: wait_all(["
            f"{sync.source}.push_weights({version}), {sync.target}.pull_weights({version})])"
        )
        raise


def undeclared(worker: Worker) -> WeightSyncError:
    """Return the error for a worker whose component takes part in a planned weight sync, but whose class has no
    weights.
    """
    context = worker.context
    component = context.slot.component
    kind = type(worker)
    does = ""
    for sync in context.facts.syncs_of(component) if context.facts else ():
        does = f", and {component} is to take those of {sync.source}"
        if sync.source == component:
            does = f", and {component} is to send them to {sync.target}"
            break
    problem = codes.problem(
        "weights-undeclared",
        context.owner,
        source=place_of(kind),
        kind=kind.__name__,
        does=does,
    )
    return WeightSyncError(problem)


def _place_of_weights(kind: type) -> Source | None:
    """Return the source line where the class `kind` defines the method `weights`; if it does not define it, the line of
    the class.
    """
    from rlplace.workers.worker import Worker

    if vars(Worker)["weights"] is getattr(kind, "weights", None):
        return place_of(kind)
    return place_of(getattr(kind, "weights", kind))


def only_taken(worker: Worker) -> WeightSyncError:
    """Return the error for a worker that should send weights but has only an engine, which can receive weights but not
    send.
    """
    wrong = codes.problem("bad-weights", worker.context.owner, error="of-engine")
    return WeightSyncError(wrong)


def _unplanned(
    context: WorkerContext,
    method: str,
    pair: tuple[str, str],
    keyword: str,
    asked: str | None,
    known: Sequence[str],
) -> WeightSyncError:
    """Return the error for a push or pull between two components without a planned sync.

    `method`: the called method. `pair`: (source, target). `keyword`: argument of the method that names the other
    component. `asked`: value of that argument. `known`: components with which this component has planned syncs.
    """
    near = None
    if asked:
        near = did_you_mean(asked, known)
    error = "unplanned"
    if near:
        error = "misspelt"
    got = None
    if known:
        got = f"{method} knows {', '.join(known)}"
    unplanned = codes.problem(
        "weight-sync-unplanned",
        context.owner,
        got,
        error=error,
        method=method,
        source_name=pair[0],
        target=pair[1],
        pair=pair,
        keyword=keyword,
        near=near,
    )
    return WeightSyncError(unplanned)


def _several(context: WorkerContext, sources: Sequence[str]) -> WeightSyncError:
    return WeightSyncError(
        codes.problem(
            "weight-sync-unplanned",
            context.owner,
            f"weights are planned from {', '.join(sources)}",
            error="several",
            first=sources[0],
        )
    )


def _not_weights(returned: object) -> str | None:
    """Return a text that says why `returned` is not a valid result of `weights`; None if it is valid.

    A valid result is a mapping of names to dense tensors that is not empty.
    """
    import torch

    if not isinstance(returned, Mapping):
        return f"a {type(returned).__name__}"
    if not returned:
        return "no tensor"
    for name, tensor in returned.items():
        if not isinstance(name, str):
            return f"{name!r}, which is no name"
        if not isinstance(tensor, torch.Tensor):
            return f"a {type(tensor).__name__} as {name}"
        if tensor.layout != torch.strided:
            return f"a sparse tensor as {name}"
    return None


def _offloaded(
    context: WorkerContext, method: str, names: Sequence[str]
) -> NotResident:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    component = context.slot.component
    return NotResident(
        codes.problem(
            "not-resident",
            context.owner,
            error="offloaded",
            method=method,
            first=names[0],
            more=more,
            component=component,
        )
    )
