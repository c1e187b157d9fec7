"""Named placements: `{preset: hybrid, accelerators: 8}` -> the plain lines it stands for.

::

    colocate_all                              every component on all accelerators
    disaggregated                             every component on accelerators of its own
    hybrid                                    actor (and critic) on all; the others side by side on the same
    colocate_actor_ref+colocate_critic_reward actor with reference, critic with reward, all others alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source, did_you_mean
from rlplace.placement.language.written import PATH, Written, check_keys, count_at, source_of, write_down
from rlplace.placement.machines.ranges import show_range
from rlplace.structure import show

_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "colocate_actor_ref": ("actor", "reference"),
    "actor_ref": ("actor", "reference"),  # after a +
    "colocate_critic_reward": ("critic", "reward"),
    "critic_reward": ("critic", "reward"),
}
PRESETS = ("hybrid", "colocate_all", "disaggregated", "colocate_actor_ref", "colocate_critic_reward")
_PPO = ("actor", "env", "rollout")


def is_preset(block: object) -> bool:
    return isinstance(block, Mapping) and "preset" in block


def expand_preset(
    block: Mapping[str, object], total: int, components: Sequence[str] | None, sources: Mapping[str, Source]
) -> tuple[dict[str, str], list[Problem]]:
    """Component -> plain placement text on a cluster of `total` accelerators; empty when there are problems.

    `components` are the algorithm's; None: those of a PPO job.
    """
    names = sorted(components or _PPO, key=lambda name: name == "rollout")  # it comes last on the accelerators
    written = write_down(PATH, "preset", block["preset"], sources)
    problems = check_keys(block, ("preset", "accelerators", *names), PATH, sources)
    sizes: dict[str, int] = {}
    for key in ("accelerators", *names):
        if key in block:
            size = count_at(PATH, key, block[key], sources)
            if isinstance(size, int):
                sizes[key] = size
            else:
                problems.append(size)
    sets = _sets(written, names)
    if isinstance(sets, Problem):
        return {}, [*problems, sets]
    room = sizes.pop("accelerators", total)
    if room > total:
        why = f"this cluster has {total}"
        problems.append(_size_problem(f"{room} accelerators do not exist", "accelerators", room, why, total, sources))
    if problems:
        return {}, problems
    if written.value == "hybrid":
        return _hybrid(names, room, sizes, sources)
    return _side_by_side(sets, room, sizes, sources)


def _sets(written: Written, names: Sequence[str]) -> list[tuple[str, ...]] | Problem:
    """The components that live together, in the order of `names`."""
    words = [w.strip() for w in str(written.value).split("+")]
    if words in (["hybrid"], ["colocate_all"]):
        return [tuple(names)]
    together: list[tuple[str, ...]] = []
    for word in words if words != ["disaggregated"] else []:
        if word not in _TOGETHER:
            near = did_you_mean(word, (*PRESETS, *_TOGETHER))
            at = written.text.find(word)
            fix = written.text[:at] + near + written.text[at + len(word) :] if near and at >= 0 else PRESETS[0]
            what = f"there is no preset {word!r}" + (f", did you mean {near!r}?" if near else "")
            why = "presets are " + ", ".join(PRESETS) + "; the last two can be joined by +"
            return written.whole("unknown-preset", what, why, f"preset: {fix}")
        members = tuple(n for n in names if n.partition(".")[0] in _TOGETHER[word])
        if members:
            together.append(members)
    alone = [(n,) for n in names if not any(n in members for members in together)]
    return sorted([*together, *alone], key=lambda members: names.index(members[0]))


def _side_by_side(
    sets: Sequence[tuple[str, ...]], room: int, sizes: Mapping[str, int], sources: Mapping[str, Source]
) -> tuple[dict[str, str], list[Problem]]:
    """Each set on the next accelerators; sets without a size share evenly what is left."""
    asked: list[int | None] = []
    for members in sets:
        given = {n: sizes[n] for n in members if n in sizes}
        if len(set(given.values())) > 1:
            what = " and ".join(f"{n}: {size}" for n, size in given.items()) + " live together and differ in size"
            why = f"this preset puts {' and '.join(members)} on the same accelerators"
            least = min(given, key=lambda n: given[n])
            return {}, [_size_problem(what, least, given[least], why, max(given.values()), sources)]
        asked.append(next(iter(given.values()), None))
    left, open_ = room - sum(a or 0 for a in asked), asked.count(None)
    if left < open_ or (not open_ and left < 0):
        what = f"{room - left} accelerators are asked for" + (f", and {open_} more sets get some" if open_ else "")
        fix = "\n".join(f"{name}: {max(1, room // len(sets))}" for members in sets for name in members if name in sizes)
        largest = max(sizes, key=lambda name: sizes[name], default=sets[0][0])
        why = f"there are {room} for {len(sets)} sets"
        problem = _size_problem(what, largest, sizes.get(largest, 0), why, 1, sources)
        return {}, [dataclasses.replace(problem, fix=fix or f"accelerators: {len(sets)}")]
    lines: dict[str, str] = {}
    start = 0
    for members, own in zip(sets, asked, strict=True):
        count = left // open_ if own is None else own
        lines |= dict.fromkeys(members, show_range(range(start, start + count)))
        start += count
    return lines, []


def _hybrid(
    names: Sequence[str], room: int, sizes: Mapping[str, int], sources: Mapping[str, Source]
) -> tuple[dict[str, str], list[Problem]]:
    """The actor (and critic) on all; the others side by side on the same accelerators."""
    learners = [n for n in names if n in ("actor", "critic")]
    others = [(n,) for n in names if n not in learners]
    for name in learners:
        if sizes.get(name, room) > room:
            why = f"there are {room}"
            return {}, [_size_problem("more than there are", name, sizes[name], why, room, sources)]
    lines, problems = _side_by_side(others, room, sizes, sources)
    spots = {n: show_range(range(sizes.get(n, room))) for n in learners}
    return {n: (spots | lines)[n] for n in names} if not problems else {}, problems


def _size_problem(what: str, key: str, size: int, why: str, fix: int, sources: Mapping[str, Source]) -> Problem:
    got = f"{key}: {show(size)}"
    path = f"{PATH}.{key}"
    return Problem(
        code="preset-sizes",
        key=path,
        what=what,
        got=got,
        span=(0, len(got)),
        source=source_of(path, sources),
        why=why,
        fix=f"{key}: {max(1, fix)}",
    )
