"""What a weight sync promises, on the reference over a channel: every bit, the right version, or nothing at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.codec import tensor_bytes
from rlplace.comm.local import LocalChannel
from rlplace.comm.weight_sync import Bucket, ChannelWeightReceiver, ChannelWeightSender, PushHeader, ReceivedWeights
from rlplace.errors import ChannelBroken, ChannelTimeout, WeightSyncError

PATIENCE_S = 60.0


def channel_of(**fields: Any) -> LocalChannel:
    return LocalChannel(ChannelSpec(**{"name": "weights", "capacity_items": 64, "timeout_s": PATIENCE_S, **fields}))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(17, 9).bfloat16(),
        "half": torch.randn(5).half(),
        "linear.weight": torch.randn(8, 4).T,
        "linear.bias": torch.nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf")])),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "steps": torch.tensor([2**62], dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 7),
        "fp8": torch.randn(6).to(torch.float8_e4m3fn),
    }


def assert_equal_to_the_bit(received: ReceivedWeights, sent: dict[str, torch.Tensor]) -> None:
    assert list(received.tensors) == list(sent)
    for name, tensor in sent.items():
        got = received.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(got).tobytes() == tensor_bytes(tensor).tobytes(), name


@pytest.mark.parametrize("bucket_bytes", [1, 7, 64, 16 << 20])
def test_every_dtype_arrives_equal_to_the_bit(bucket_bytes: int) -> None:
    channel, sent = channel_of(capacity_items=1000), weights()
    report = ChannelWeightSender(channel, targets=[3], bucket_bytes=bucket_bytes).push(1, sent).wait(PATIENCE_S)
    received = ChannelWeightReceiver(channel, 3).pull(1)
    assert_equal_to_the_bit(received, sent)
    size_bytes = sum(t.numel() * t.element_size() for t in sent.values())
    assert report.size_bytes == received.report.size_bytes == size_bytes
    assert report.buckets == received.report.buckets == -(-size_bytes // bucket_bytes)
    assert (report.version, report.tensors) == (1, len(sent))
    assert report.gb_per_s > 0


def test_each_actor_rank_serves_its_targets_and_one_without_targets_sends_nothing() -> None:
    channel, sent = channel_of(), weights()
    senders = [
        ChannelWeightSender(channel, targets=t, source=f"actor rank {i}") for i, t in enumerate([[0, 1], [2], []])
    ]
    reports = [push.wait(PATIENCE_S) for push in [s.push(4, sent) for s in senders]]
    received = [ChannelWeightReceiver(channel, rank).pull(4) for rank in range(3)]
    for one in received:
        assert_equal_to_the_bit(one, sent)
    received[0].tensors["scale"].zero_()  # each receiver's tensors are its own
    assert received[1].tensors["scale"].item() == sent["scale"].item() == 2.5
    assert [r.size_bytes for r in reports] == [2 * reports[1].size_bytes, reports[1].size_bytes, 0]
    assert channel.stats().depth_items == 0


def test_start_and_wait_are_separate_and_pushes_keep_their_order() -> None:
    channel = channel_of(capacity_items=1)
    sender = ChannelWeightSender(channel, targets=[0], bucket_bytes=64)
    pushes = [sender.push(version, weights(version)) for version in (1, 2)]
    with pytest.raises(ChannelTimeout, match="weights version 2: the push was not finished"):
        pushes[1].wait(0.0)
    receiver = ChannelWeightReceiver(channel, 0)
    for version, push in enumerate(pushes, start=1):
        assert_equal_to_the_bit(receiver.pull(version), weights(version))
        assert push.wait(PATIENCE_S).version == version


def test_weights_of_nothing_are_a_version_too() -> None:
    channel = channel_of()
    ChannelWeightSender(channel, targets=[0]).push(9, {}).wait(PATIENCE_S)
    assert ChannelWeightReceiver(channel, 0).pull(9).tensors == {}


@pytest.mark.parametrize(("arrived", "asked"), [(7, 8), (9, 8)])
def test_another_version_is_an_error_that_names_both_and_the_next_pull_is_clean(arrived: int, asked: int) -> None:
    channel, receiver_rank = channel_of(), 0
    sender, receiver = ChannelWeightSender(channel, targets=[0]), ChannelWeightReceiver(channel, receiver_rank)
    sender.push(arrived, weights(arrived)).wait(PATIENCE_S)
    sender.push(asked, weights(asked)).wait(PATIENCE_S)
    with pytest.raises(WeightSyncError) as caught:
        receiver.pull(asked)
    assert caught.value.code == "version-mismatch"
    assert f"rollout rank 0: version {arrived} arrived, version {asked} was asked for" in str(caught.value)
    assert_equal_to_the_bit(receiver.pull(asked), weights(asked))


# ── damage on the way ────────────────────────────────────────────────────────────────────────────────────────────────


def messages() -> list[PushHeader | Bucket]:
    """One push of version 5, as it travels."""
    channel = channel_of()
    ChannelWeightSender(channel, targets=[0], bucket_bytes=128).push(5, weights()).wait(PATIENCE_S)
    return [channel.get(key="0") for _ in range(channel.stats().depth_items)]


def flip_a_bit(sent: list[Any]) -> Iterable[Any]:
    data = sent[1].data.copy()
    data[3] ^= 4
    return [sent[0], dataclasses.replace(sent[1], data=data), *sent[2:]]


def shorten(sent: list[Any]) -> Iterable[Any]:
    last = dataclasses.replace(sent[-1], data=sent[-1].data[:0], crc32=0)
    return [*sent[:-1], last]


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (flip_a_bit, "checksum-mismatch", "bucket 0 of version 5 is damaged"),
        (shorten, "incomplete-weights", "version 5 has"),
        (lambda m: [m[0], m[2], m[1], *m[3:]], "incomplete-weights", "expected bucket 0"),
        (lambda m: [m[0], *[dataclasses.replace(b, version=4) for b in m[1:]]], "version-mismatch", "version 4 in a"),
        (lambda m: [m[0], m[0], *m[2:]], "incomplete-weights", "got the start of version 5"),
        (lambda m: m[1:], "incomplete-weights", "expected the start of a push, got bucket 0"),
        (lambda m: ["noise"], "incomplete-weights", "got a str"),
    ],
)
def test_damage_is_noticed_before_anything_is_handed_over(
    damage: Callable[[list[Any]], Iterable[Any]], code: str, says: str
) -> None:
    channel = channel_of()
    for message in damage(messages()):
        channel.put(message, key="0")
    with pytest.raises(WeightSyncError) as caught:
        ChannelWeightReceiver(channel, 0).pull(5)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert "the weights in use are unchanged" in str(caught.value)


def test_a_push_that_stops_half_way_times_out_and_the_next_one_arrives() -> None:
    channel, sent = channel_of(), messages()
    receiver = ChannelWeightReceiver(channel, 0)
    for message in sent[:2]:
        channel.put(message, key="0")
    with pytest.raises(ChannelTimeout):
        receiver.pull(5, timeout_s=0.01)
    for message in sent[2:]:  # the rest comes late
        channel.put(message, key="0")
    ChannelWeightSender(channel, targets=[0]).push(6, weights(6)).wait(PATIENCE_S)
    assert_equal_to_the_bit(receiver.pull(6), weights(6))


def test_a_broken_channel_reaches_both_sides() -> None:
    channel = channel_of(capacity_items=1)
    push = ChannelWeightSender(channel, targets=[0], bucket_bytes=16).push(1, weights())
    with ThreadPoolExecutor() as threads:
        pull = threads.submit(ChannelWeightReceiver(channel, 1).pull, 1)
        channel.break_("actor rank 0 died")
        for waiting in (push.wait, pull.result):
            with pytest.raises(ChannelBroken, match="actor rank 0 died"):
                waiting(PATIENCE_S)


def test_a_bucket_needs_a_size() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1"):
        ChannelWeightSender(channel_of(), targets=[0], bucket_bytes=0)


@pytest.mark.ray
def test_between_processes() -> None:
    import ray

    from rlplace.comm.ray_channel import RayChannel

    def pull(end: Any, rank: int) -> dict[str, bytes]:
        received = ChannelWeightReceiver(end, rank).pull(2)
        return {name: tensor_bytes(t).tobytes() for name, t in received.tensors.items()}

    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False, logging_level="error")
    try:
        channel = RayChannel.create(ChannelSpec(name="weights", capacity_items=16, timeout_s=PATIENCE_S))
        sent = {**weights(), "large": torch.from_numpy(np.arange(300_000, dtype=np.float32))}
        push = ChannelWeightSender(channel, targets=[0, 1], bucket_bytes=256 << 10).push(2, sent)
        remote = ray.remote(pull)
        for rank in (0, 1):  # one CPU: the second begins when the first has all of its share
            assert ray.get(remote.remote(channel, rank)) == {n: tensor_bytes(t).tobytes() for n, t in sent.items()}
        assert push.wait(PATIENCE_S).buckets == 2 * 5
        channel.destroy()
    finally:
        ray.shutdown()
