"""A named placement, `{preset: hybrid, accelerators: 8}` -> the plain lines that it stands for.

::

    colocate_all                              every component on all accelerators
    disaggregated                             every component on accelerators of its own
    hybrid                                    actor (and critic) on all; the others side by side on the same
    colocate_actor_ref+colocate_critic_reward actor with reference, critic with reward, all others alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.config.keys import PRESETS_OF_ALL
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.lines import Line
from rlplace.placement.language.spec import Segment, role_of
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import WHOLE_CLUSTER, Pool
from rlplace.placement.machines.topology import show_range

# Names with and without colocate_ -> components of the pair.
TOGETHER = {
    "actor_ref": ("actor", "reference"),
    "critic_reward": ("critic", "reward"),
}
PRESETS = (*PRESETS_OF_ALL, *(f"colocate_{pair}" for pair in TOGETHER))
_PPO = ("actor", "env", "rollout")
_LEARNERS = ("actor", "critic")
Sets = list[tuple[str, ...]]  # each of components that share accelerators


def expand_preset(
    block: Text,
    roles: Sequence[str],
    sizes: Mapping[str, int],
    groups: NodeGroups,
    faults: list[Fault],
) -> list[Line]:
    """Return the lines for which a preset stands: one for each component in `roles`.

    If the block has a fault, add it to `faults` and return []. `block`: the block with the key `preset`. `sizes`:
    component -> number of its accelerators, if the block gives one; key "accelerators" -> number for all components
    together. `groups`: the node groups.
    """
    rows = _rows_of(block.entries["preset"], roles, faults)
    total = groups.topology.num_accelerators
    room = sizes.get("accelerators", total)
    if room > total:
        facts = {"room": room, "total": total}
        faults.append(Fault("preset-sizes", block, "no_such_number", facts=facts))
    places: dict[str, range] = {}
    for sets in rows:
        if not faults:
            places |= _side_by_side(block, sets, room, sizes, faults)
    if faults:
        return []
    pool = groups[WHOLE_CLUSTER]
    return [_line(name, places[name], pool, block) for name in roles]


def preset_roles(components: Sequence[str] | None) -> list[str]:
    """Return the components that a preset places, with the rollout as the last one.

    `components`: the components of the algorithm; None: the components of a PPO job are used.
    """
    return sorted(components or _PPO, key=lambda name: name == "rollout")


def _rows_of(preset: Text, names: Sequence[str], faults: list[Fault]) -> list[Sets]:
    """Return the rows of a preset. For an unknown preset, return [] and add a fault to `faults`.

    A row is a list of sets of components. The components of a set share accelerators. The sets of a row get different
    accelerators, side by side from the first accelerator on. Every row starts at the first accelerator again, so
    components of different rows share accelerators. `preset`: the name of the preset. `names`: the components.
    """
    words = [word.strip() for word in str(preset.value).split("+")]
    if words == ["hybrid"]:
        learners: list[Sets] = [[(name,)] for name in names if name in _LEARNERS]
        return [*learners, [(name,) for name in names if name not in _LEARNERS]]
    if words == ["colocate_all"]:
        return [[tuple(names)]]
    if words == ["disaggregated"]:
        words = []

    # Pairs that share accelerators, in the order of their first components; others alone.
    together: Sets = []
    for word in words:
        pair = TOGETHER.get(word.removeprefix("colocate_"))
        if pair is None:
            faults.append(Fault("unknown-preset", preset, facts={"word": word}))
            return []
        members = tuple(name for name in names if role_of(name) in pair)
        if members:
            together.append(members)
    alone = []
    for name in names:
        if not any(name in members for members in together):
            alone.append((name,))
    return [sorted([*together, *alone], key=lambda members: names.index(members[0]))]


def _side_by_side(
    block: Text,
    sets: Sets,
    room: int,
    sizes: Mapping[str, int],
    faults: list[Fault],
) -> dict[str, range]:
    """Return component -> its accelerators, for the sets of one row. Each set gets the next free accelerators.

    Sets without a size get equally many of the remaining accelerators. `sets`: the components of a set share
    accelerators. `room`: how many accelerators there are. `sizes`: component -> number of its accelerators, if the
    block gives one. Faults are added to `faults`.
    """
    # The size of each set, by any of its components; None: it has no size.
    asked: list[int | None] = []
    for members in sets:
        sized = {name: sizes[name] for name in members if name in sizes}
        if len(set(sized.values())) > 1:
            facts: dict[str, object] = {"members": members, "sized": sized}
            faults.append(Fault("preset-sizes", block, "differ", facts=facts))
            return {}
        asked.append(next(iter(sized.values()), None))

    # Sets without a size get at least one accelerator each.
    taken = sum(size or 0 for size in asked)
    unsized = asked.count(None)
    if room - taken < unsized:
        facts = {
            "sets": sets,
            "sizes": sizes,
            "room": room,
            "taken": taken,
            "unsized": unsized,
        }
        faults.append(Fault("preset-sizes", block, "too_few", facts=facts))
        return {}
    places: dict[str, range] = {}
    start = 0
    for members, size in zip(sets, asked, strict=True):
        count = size
        if count is None:
            count = (room - taken) // unsized
        places |= dict.fromkeys(members, range(start, start + count))
        start += count
    return places


def _line(name: str, numbers: range, pool: Pool, block: Text) -> Line:
    """Return a line that places component `name` on `numbers` of the pool, one rank on each.

    `block`: the block of the preset.
    """
    key = f"{block.key}.{name}"
    written = show_range(numbers)
    span = (0, len(written))
    text = Text(
        key=key,
        leaf=name,
        value=written,
        text=written,
        items=((*span, written),),
        entries={},
        sources=block.sources,
    )
    segment = Segment(accelerators=numbers, ranks=range(len(numbers)), span=span)
    return Line((name,), text, text, pool, (segment,))
