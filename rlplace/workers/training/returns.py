"""What came of an iteration's samples, as rank 0 of a critic takes it: of each sample once, a number by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.comm.channel import Channel
from rlplace.tokens import Returns, Sample
from rlplace.workers.training.samples import TokenArray
from rlplace.workers.worker import out_of_step


def take_returns(channel: Channel, samples: Sequence[Sample], groups: int, owner: str) -> TokenArray:
    """[M] of the learned tokens of all `samples`, in their order. Blocks until all `groups` of them are here.

    Raises ChannelTimeout, naming who waits; ChannelMisuse for returns that are not of these samples.
    """
    due = {(sample.group, sample.sample): sample.learned for sample in samples}
    found: dict[tuple[int, int], TokenArray] = {}
    for _ in range(groups):
        group: Sequence[Returns] = channel.get()
        for returns in group:
            place = returns.group, returns.sample
            if place in found or due.get(place) != len(returns.returns):
                got = f"{len(returns.returns)} returns of sample {place[0]}/{place[1]}"
                expected = f"{due.get(place, 'none')} of it, once"
                raise out_of_step(owner, "returns are of other samples than the values", got=got, expected=expected)
            found[place] = returns.returns
    missing = [f"{group}/{sample}" for group, sample in due if (group, sample) not in found]
    if missing:
        got, expected = f"none of samples {', '.join(missing)}", "returns of every sample that was inferred"
        raise out_of_step(owner, "returns are missing", got=got, expected=expected)
    return np.concatenate([np.zeros(0, np.float32), *(found[place] for place in due)])
