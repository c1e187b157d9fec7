"""Named placements: `{preset: hybrid, accelerators: 8}` -> the plain lines it stands for.

::

    colocate_all                              every component on all accelerators
    disaggregated                             every component on accelerators of its own
    hybrid                                    actor (and critic) on all; the others side by side on the same
    colocate_actor_ref+colocate_critic_reward actor with reference, critic with reward, all others alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.errors import did_you_mean, suggestion
from rlplace.placement.language.text import Text
from rlplace.placement.machines.ranges import show_range

_TOGETHER = {"actor_ref": ("actor", "reference"), "critic_reward": ("critic", "reward")}  # with and without colocate_
PRESETS = ("hybrid", "colocate_all", "disaggregated", *(f"colocate_{pair}" for pair in _TOGETHER))
_PPO = ("actor", "env", "rollout")
Sets = list[tuple[str, ...]]  # each of components that share accelerators


def expand_preset(block: Text, total: int, components: Sequence[str] | None) -> dict[str, str]:
    """Map each component to its placement text on `total` accelerators; record problems in `block`.

    `components` are the algorithm's; None: those of a PPO job.
    """
    assert isinstance(block.value, Mapping)
    names = sorted(components or _PPO, key=lambda name: name == "rollout")  # it comes last on the accelerators
    block.check_keys(("preset", "accelerators", *names))
    counts = {key: block.child(key).count() for key in ("accelerators", *names) if key in block.value}
    sizes = {key: count for key, count in counts.items() if count is not None}
    rows = _rows_of(block.child("preset"), names)
    room = sizes.pop("accelerators", total)
    if room > total:
        _reject_size(block, "accelerators", f"{room} accelerators do not exist", f"this cluster has {total}", total)
    lines: dict[str, str] = {}
    for sets in rows:
        lines |= {} if block.problems else _side_by_side(block, sets, room, sizes)
    return {n: lines[n] for n in names if n in lines}


def _rows_of(preset: Text, names: Sequence[str]) -> list[Sets]:
    """Return rows of sets: those of a row lie side by side, and each row begins at the first accelerator."""
    words = [w.strip() for w in str(preset.value).split("+")]
    if words == ["hybrid"]:
        learners: list[Sets] = [[(n,)] for n in names if n in ("actor", "critic")]
        return [*learners, [(n,) for n in names if n not in ("actor", "critic")]]
    if words == ["colocate_all"]:
        return [[tuple(names)]]
    together: Sets = []
    for word in words if words != ["disaggregated"] else []:
        pair = _TOGETHER.get(word.removeprefix("colocate_"))
        if pair is None:
            near = did_you_mean(word, (*PRESETS, *_TOGETHER)) or ("colocate_all" if word.startswith("coloc") else None)
            at = preset.text.find(word)
            fix = preset.text[:at] + near + preset.text[at + len(word) :] if near and at >= 0 else PRESETS[0]
            what = f"there is no preset {word!r}" + suggestion(near)
            why = "presets are " + ", ".join(PRESETS) + "; the last two can be joined by +"
            preset.reject("unknown-preset", what, why, f"preset: {fix}")
            return []
        together += [members] if (members := tuple(n for n in names if n.partition(".")[0] in pair)) else []
    alone = [(n,) for n in names if not any(n in members for members in together)]
    return [sorted([*together, *alone], key=lambda members: names.index(members[0]))]


def _side_by_side(block: Text, sets: Sets, room: int, sizes: Mapping[str, int]) -> dict[str, str]:
    """Place each set on the next accelerators; sets without a size share evenly what is left."""
    asked: list[int | None] = []
    for members in sets:
        given = {sizes[n]: n for n in reversed(members) if n in sizes}
        if len(given) > 1:
            what = " and ".join(f"{n}: {sizes[n]}" for n in members if n in sizes) + " are together and differ in size"
            why = f"this preset puts {' and '.join(members)} on the same accelerators"
            _reject_size(block, given[min(given)], what, why, max(given))
            return {}
        asked.append(next(iter(given), None))
    left, open_ = room - sum(a or 0 for a in asked), asked.count(None)
    if left < open_:
        sized = [n for members in sets for n in members if n in sizes]
        what = f"{room - left} accelerators are asked for" + (f", and {open_} more sets get some" if open_ else "")
        fix = "\n".join(f"{n}: {max(1, room // len(sets))}" for n in sized) or f"accelerators: {len(sets)}"
        largest = max(sized, key=lambda n: sizes[n], default=sets[0][0])
        _reject_size(block, largest, what, f"there are {room} for {len(sets)} sets", 1, fix)
        return {}
    lines: dict[str, str] = {}
    start = 0
    for members, own in zip(sets, asked, strict=True):
        count = left // open_ if own is None else own
        lines |= dict.fromkeys(members, show_range(range(start, start + count)))
        start += count
    return lines


def _reject_size(block: Text, key: str, what: str, why: str, size: int, fix: str = "") -> None:
    text = block.child(key, 0)
    text.reject("preset-sizes", what, why, fix or f"{key}: {max(1, size)}", got=f"{key}: {text.text}")
