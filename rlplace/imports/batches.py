"""Samples of an iteration and the batch of one optimizer step -> `algorithm.num_minibatches`."""

from __future__ import annotations

from rlplace.imports.draft import Draft

_KEY = "algorithm.num_minibatches"


def set_minibatches(draft: Draft, samples: int, batch: int, batch_key: str, why: str, *others: str) -> None:
    """`why` says where the samples come from: "1024 prompts x 1"; `others` are the settings they come from."""
    if samples < 1 or batch < 1:
        return
    if samples % batch:
        below = next(n for n in range(min(batch, samples), 0, -1) if samples % n == 0)
        draft.find(
            "import-batches",
            batch_key,
            f"{samples} samples do not divide into optimizer steps of {batch}",
            got=str(draft.given[batch_key]) if batch_key in draft.given else str(batch),
            why=f"an iteration has {why} = {samples} samples, and nothing is dropped here",
            fix=f"{batch_key}: {below}",
        )
        for key in (batch_key, *others):
            draft.unmapped(key, f"{_KEY} would not be a whole number")
        return
    draft.set(_KEY, samples // batch)
    given = [key for key in (batch_key, *others) if key in draft.given]
    for key in given:
        draft.becomes(key, _KEY)
    if not given:
        draft.assume(f"{_KEY}: {samples // batch}", f"{why} samples in steps of {batch}, the defaults there")
