"""What must hold for every placement, topology and size."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.config.yaml_text import quote, to_yaml
from rlplace.contract.planning import make_plan
from rlplace.errors import PlacementError
from rlplace.jobs.simulator.plan import SIMULATOR_NEEDS
from rlplace.placement import HybridComponentPlacement, Plan, Topology
from rlplace.placement.flow import DeviceDelivery, Transport, deliver
from rlplace.placement.machines.topology import Ranges
from rlplace.placement.schedule import Residency
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import fold_nodes
from tests.unit.placement.reports import shown

COMPONENTS = ("actor", "env", "rollout")
number_sets = st.frozensets(st.integers(0, 40), max_size=20).map(
    lambda ns: Ranges.of(range(n, n + 1) for n in ns)
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    return Topology.uneven(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))


@st.composite
def placements(draw: st.DrawFn, topology: Topology) -> str:
    """Text that fits: one stretch of a node after another, ranks spread over it in either direction."""
    pieces: list[str] = []
    rank = 0
    for node in draw(st.permutations(topology.nodes)):
        start = draw(st.integers(node.first, node.numbers.stop - 1))
        stop = draw(st.integers(start + 1, node.numbers.stop))
        if pieces and draw(st.booleans()):
            continue
        count = stop - start
        ranks = draw(
            st.sampled_from(
                [n for n in range(1, 13) if n % count == 0 or count % n == 0]
            )
        )
        explicit = ranks != count or draw(st.booleans())
        pieces.append(
            f"{start}-{stop - 1}" + (f":{rank}-{rank + ranks - 1}" if explicit else "")
        )
        rank += ranks
    return ",".join(pieces)


def config(
    placement: Mapping[str, object], envs: int, groups: int, offload: bool = True
) -> Config:
    return read_config(
        {
            "cluster": {"component_placement": placement},
            "env": {
                "id": "CartPole-v1",
                "total_num_envs": envs,
                "enable_offload": offload,
            },
            "rollout": {"pipeline_stage_num": groups, "enable_offload": offload},
            "actor": {"enable_offload": offload},
        }
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    topology = draw(topologies())
    block = {c: draw(placements(topology)) for c in COMPONENTS}
    sizes = HybridComponentPlacement({"component_placement": block}, topology)
    groups = draw(st.integers(1, 3))
    unit = sizes.world_size("env") * groups
    most = max(sizes.world_size("actor"), sizes.world_size("rollout") * groups)
    envs = unit * draw(st.integers(-(-most // unit), -(-most // unit) + 3))
    return make_plan(config(block, envs, groups), topology)


@given(number_sets, number_sets)
def test_sets_behave_like_sets(a: Ranges, b: Ranges) -> None:
    assert list(a & b) == sorted(set(a) & set(b))
    assert list(a | b) == sorted(set(a) | set(b))
    assert list(a - b) == sorted(set(a) - set(b))
    assert [n in a for n in range(42)] == [n in set(a) for n in range(42)]


@given(st.data())
def test_each_rank_has_one_slot_on_one_node_and_the_rendered_text_gives_the_same(
    data: st.DataObject,
) -> None:
    topology = data.draw(topologies())
    placement = HybridComponentPlacement(
        {"component_placement": {"env": data.draw(placements(topology))}}, topology
    )
    slots, rendered = placement.slots("env"), placement.spec("env").render()
    assert [s.rank for s in slots] == list(range(placement.world_size("env")))
    for slot in slots:
        assert {topology.node_of(a).rank for a in slot.accelerators} == {slot.node}
        assert [
            topology.nodes[slot.node].first + a for a in slot.local_accelerators
        ] == list(slot.accelerators)
    for _, group in itertools.groupby(
        sorted(slots, key=lambda s: s.node), key=lambda s: s.node
    ):
        here = list(group)
        assert sorted(s.local_rank for s in here) == list(range(len(here)))
    assert list(placement.accelerators("env")) == sorted(
        {a for s in slots for a in s.accelerators}
    )
    again = HybridComponentPlacement(
        {"component_placement": {"env": rendered}}, topology
    )
    assert again.slots("env") == slots
    assert again.spec("env").render() == rendered


@st.composite
def lines(draw: st.DrawFn) -> object:
    """A placement on node groups `a`, `b` (each 4 x 4 accelerators), both, or the cluster: text or a block."""
    sizes = {"cluster": 32, "a": 16, "b": 16, "a,b": 32, "node": 8, "cpus": 1}
    group = draw(st.sampled_from([*sizes]))
    numbers = draw(
        st.frozensets(st.integers(0, sizes[group] - 1), min_size=1, max_size=8)
    )
    text = str(Ranges.of(range(n, n + 1) for n in numbers))
    if group == "cluster" and draw(st.booleans()):
        return text
    options: dict[str, object] = {"node_group": group} if group != "cluster" else {}
    name, value = draw(
        st.sampled_from([("ranks_per_accelerator", 2), ("process", "shared"), ("", 0)])
    )
    if group not in ("node", "cpus") and draw(st.booleans()):
        name, value = (
            "tensor_parallel_size",
            draw(
                st.sampled_from(
                    [size for size in (1, 2, 4) if len(numbers) % size == 0]
                )
            ),
        )
        options["tensor_parallel_across_nodes"] = True
    return options | {"placement": text} | ({name: value} if name else {})


@given(lines())
def test_what_is_printed_of_a_placement_is_yaml_that_reads_back_as_the_same(
    line: object,
) -> None:
    """In the block, and in braces: `{env: {placement: 0-3,5-7}}` would be read otherwise."""
    groups = [
        {"label": label, "node_ranks": f"{4 * i}-{4 * i + 3}"}
        for i, label in enumerate("ab")
    ]
    groups.append({"label": "cpus", "node_ranks": 8})
    topology = Topology.uneven([4] * 8 + [0])
    components = {"env": line}
    if isinstance(line, dict) and line.get("process"):
        components["rollout"] = {"same_as": "env", "process": "shared"}

    def place(block: object) -> HybridComponentPlacement:
        return HybridComponentPlacement(
            {"component_placement": block, "node_groups": groups}, topology
        )

    placement = place(components)
    spec = placement.spec("env")
    blocks = (
        f"env: {spec.render()}",
        f"{{env: {quote(spec.canonical())}}}",
        to_yaml({"env": spec.canonical()}),
    )
    for text in blocks:
        read = yaml.safe_load(text) | {
            c: v for c, v in components.items() if c != "env"
        }
        assert place(read).slots("env") == placement.slots("env"), text
        assert place(read).spec("env").render() == spec.render()
    assert yaml.safe_load(f"env: {spec.render()}") == {
        "env": yaml.safe_load(quote(spec.canonical()))
    }


@given(plans())
def test_routes_carry_each_row_once(plan: Plan) -> None:
    for route in (plan.row_routes.observations, plan.row_routes.trajectories):
        sources, targets = (
            plan.placement.slots(c) for c in (route.source, route.target)
        )
        assert [row for s in route.shares for row in range(s.start, s.stop)] == list(
            range(route.rows)
        )
        assert {s.target for s in route.shares} == {t.rank for t in targets}
        for share in route.shares:
            a, b = sources[share.source], targets[share.target]
            assert (share.transport is Transport.NETWORK) == (a.node != b.node)
            assert (share.transport is Transport.SAME_ACCELERATOR) == bool(
                set(a.accelerators) & set(b.accelerators)
            )
        sent = Counter(
            s.source for s in route.shares for _ in range(s.start, s.stop)
        ).values()
        taken = Counter(
            s.target for s in route.shares for _ in range(s.start, s.stop)
        ).values()
        assert len(set(sent)) == 1
        assert max(taken) - min(taken) <= 1


@given(plans())
def test_each_rollout_rank_gets_its_weights_once_and_from_its_own_accelerator_where_it_can(
    plan: Plan,
) -> None:
    actors, rollouts = (plan.placement.slots(c) for c in ("actor", "rollout"))
    gpus = dataclasses.replace(
        plan.topology,
        nodes=[dataclasses.replace(n, kind="cuda") for n in plan.topology.nodes],
    )
    on_gpus = HybridComponentPlacement(
        {"component_placement": plan.placement.canonical()}, gpus
    )
    for deliveries in (plan.deliveries, deliver(on_gpus), deliver(on_gpus, cut=True)):
        assert sorted(r for d in deliveries for r in d.readers) == list(
            range(len(rollouts))
        )
        for device in (d for d in deliveries if isinstance(d, DeviceDelivery)):
            held = [a.accelerators for a in actors]
            for taker, host in zip(device.takers, device.owners, strict=True):
                own = rollouts[taker.rank].accelerators[taker.part or 0 :][:1]
                assert (taker.part is None) == (
                    len(rollouts[taker.rank].accelerators) == 1
                )
                assert (held[host] == own) if host is not None else own not in held
            slots = {"actor": actors, "rollout": rollouts}
            members = [
                slots[m.component][m.rank].accelerators[m.part or 0]
                for m in device.group
            ]
            assert len(set(members)) == len(members)
    assert not any(
        isinstance(d, DeviceDelivery) for d in plan.deliveries
    )  # of emulated accelerators


@given(plans())
def test_no_two_unneeded_residents_share_an_accelerator_and_the_cycle_of_moves_closes(
    plan: Plan,
) -> None:
    def spare(stage: str, component: str) -> bool:
        held, need = (
            plan.schedule.residency[stage][component],
            SIMULATOR_NEEDS.of(stage, component),
        )
        assert held >= need
        return held > need

    for stage, (a, b) in itertools.product(
        plan.schedule.stages, itertools.permutations(COMPONENTS, 2)
    ):
        if plan.placement.shared(a, b):
            assert not (spare(stage, a) and spare(stage, b))
            assert not (
                spare(stage, a) and SIMULATOR_NEEDS.of(stage, b) > Residency.OFF
            )
        elif all(not plan.placement.shared(a, c) for c in COMPONENTS if c != a):
            assert plan.schedule.residency[stage][a] is Residency.FULL
    held = dict(plan.schedule.residency[plan.schedule.stages[-1]])
    for stage in plan.schedule.stages:
        entry = plan.schedule.entries[stage]
        for move in (*entry.releases, *entry.acquires):
            assert held[move.component] is move.before
            held[move.component] = move.after
        assert held == plan.schedule.residency[stage]
        assert all(m.after < m.before for m in entry.releases)
        assert all(m.after > m.before for m in entry.acquires)


@given(plans(), st.booleans())
def test_every_key_has_one_location_which_holds_what_comes_there(
    plan: Plan, shared: bool
) -> None:
    if shared:
        plan = with_shared_processes(plan)
    channels = {c.name: c for c in plan.channels}
    under_way = plan.stage_groups * len(plan.row_routes.observations.shares)
    if not shared:  # else env and rollout call each other
        assert (
            channels["observations"].capacity_items
            == channels["actions"].capacity_items
            == under_way
        )
    assert channels["trajectories"].capacity_items == len(
        plan.row_routes.trajectories.shares
    )
    assert channels["weights"].capacity_items >= plan.placement.world_size("rollout")
    assert set(channels["trajectories"].keys) == {
        str(s.target) for s in plan.row_routes.trajectories.shares
    }
    consumers = {c.name: plan.placement.slots(c.target) for c in plan.channels}
    routes = {
        "observations": plan.row_routes.observations,
        "trajectories": plan.row_routes.trajectories,
    }
    for channel in plan.channels:
        locations = channel.locations()
        assert sorted(key for location in locations for key in location.keys) == sorted(
            channel.keys
        )
        assert len(
            {(location.node, location.process) for location in locations}
        ) == len(locations)
        assert (
            sum(location.capacity_items for location in locations)
            == channel.capacity_items
        )
        for location in locations:
            ranks = {int(key.partition("/")[0]) for key in location.keys}
            assert location.capacity_items >= location.under_way >= len(ranks)
            assert {consumers[channel.name][rank].node for rank in ranks} == {
                location.node
            }
            assert not location.process or {
                consumers[channel.name][rank].process for rank in ranks
            } == {location.process}
        if channel.name in routes:
            times = plan.stage_groups if channel.name == "observations" else 1
            taken = Counter(share.target for share in routes[channel.name].shares)
            assert list(channel.waiting) == [
                taken[rank] * times for rank in range(len(consumers[channel.name]))
            ]
    if shared:
        assert {share.transport for share in plan.row_routes.observations.shares} == {
            Transport.SAME_PROCESS
        }
        assert list(channels) == ["trajectories", "weights"]


def with_shared_processes(plan: Plan) -> Plan:
    """The same with rollout in the processes of env."""
    block = plan.placement.canonical()
    block["env"] = {"placement": block["env"], "process": "shared"}
    block["rollout"] = {"same_as": "env", "process": "shared"}
    envs = (
        plan.placement.world_size("env")
        * plan.stage_groups
        * plan.placement.world_size("actor")
    )
    return make_plan(config(block, envs, plan.stage_groups), plan.topology)


@given(plans())
def test_folds_cover_all_nodes_and_every_plan_renders(plan: Plan) -> None:
    folds = fold_nodes(plan.placement)
    assert [n for f in folds for n in f.nodes] == list(range(plan.topology.num_nodes))
    for fold in folds:
        assert [a for numbers, _ in fold.bands() for a in numbers] == list(
            range(fold.accelerators)
        )
    assert render_text(shown(plan)).isascii()
    assert render_svg(shown(plan)).startswith("<svg")


texts = st.text(alphabet="0123456789-:, all/rest\u2013[]x.~\n\t", max_size=14)
scalars = st.one_of(
    texts, st.text(max_size=6), st.integers(), st.floats(), st.booleans(), st.none()
)
numbers = st.one_of(
    st.integers(-1, 6),
    st.sampled_from(["all", "0-1", "1/2", "0:0-1", "0", "rest", [0, 1]]),
)
labels = st.sampled_from(["a", "b", "a,b", "b,a", "cluster", "node", "c", 7, "a,a"])


def keys(**values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """A block with any of these keys; now and then a value is something else."""
    mostly = {
        key: st.one_of(value, value, value, scalars) for key, value in values.items()
    }
    return st.fixed_dictionaries({}, optional=mostly)


def several(block: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(st.one_of(block, block, block, scalars), max_size=2)


lines = keys(
    node_group=st.one_of(labels, st.lists(labels, max_size=2)),
    placement=st.one_of(numbers, st.lists(texts, max_size=2)),
    accelerators=numbers,
    same_as=st.sampled_from(COMPONENTS),
    ranks_per_accelerator=st.one_of(st.integers(0, 3), st.just(10**40)),
    accelerators_per_rank=st.integers(0, 3),
    tensor_parallel_size=st.integers(0, 4),
    data_parallel_size=st.integers(0, 4),
    tensor_parallel_across_nodes=st.booleans(),
    process=st.sampled_from(["shared", "own"]),
    typo=scalars,
)
values = st.one_of(
    scalars,
    lines,
    lines,
    numbers,
    numbers,
    several(texts),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
names = st.sampled_from(
    ["actor", "env", "rollout", "actor,env", "env,rollout", "actr", "", "a:b"]
)
presets = st.sampled_from(
    ["hybrid", "colocate_all", "disaggregated", "colocate_actor_ref"]
)
sizes = {name: st.integers(-1, 9) for name in ("accelerators", *COMPONENTS)}
blocks = st.one_of(
    st.dictionaries(names, values, max_size=4),
    st.fixed_dictionaries(dict.fromkeys(COMPONENTS, st.one_of(numbers, lines))),
    keys(preset=presets, **sizes),
)
groups = keys(
    label=st.sampled_from(["a", "b", 7]),
    node_ranks=numbers,
    ignore_hardware=st.booleans(),
    env_configs=several(
        keys(
            node_ranks=numbers,
            env_vars=several(st.dictionaries(texts, scalars, max_size=2)),
            python_interpreter_path=scalars,
        )
    ),
    hardware=keys(
        type=st.sampled_from(["Arm", "node"]),
        configs=several(keys(node_rank=st.integers(-1, 3))),
    ),
)


@given(blocks, st.one_of(st.just([]), several(groups)), topologies())
def test_nothing_but_a_placement_error_comes_out(
    block: dict[str, object], node_groups: list[object], topology: Topology
) -> None:
    cluster = {"component_placement": block, "node_groups": node_groups}
    try:
        placement = HybridComponentPlacement(cluster, topology, components=COMPONENTS)
    except PlacementError as error:
        for problem in error.problems:
            assert problem.render()
            if problem.span is not None and problem.got is not None:
                assert 0 <= problem.span[0] <= problem.span[1] <= len(problem.got) + 1
            assert problem.why
            assert problem.fix
    else:
        rendered = {
            c: yaml.safe_load(placement.spec(c).render()) for c in placement.components
        }
        again = {"component_placement": rendered, "node_groups": node_groups}
        assert (
            HybridComponentPlacement(again, topology).canonical()
            == placement.canonical()
        )
        for component in placement.components:
            slots = placement.slots(component)
            assert [s.rank for s in slots] == list(
                range(placement.world_size(component))
            )
            assert {a for s in slots for a in s.accelerators} == set(
                placement.accelerators(component)
            )


@given(st.data())
def test_a_group_counts_the_accelerators_of_its_nodes_in_written_order(
    data: st.DataObject,
) -> None:
    """Of two disjoint groups, a component lives on one or both."""
    topology = Topology.uneven(
        data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    )
    ranks = data.draw(st.permutations(range(topology.num_nodes)))
    cut = data.draw(st.integers(1, len(ranks) - 1))
    parts = {"a": sorted(ranks[:cut]), "b": sorted(ranks[cut:])}
    label = data.draw(st.sampled_from(["a", "b", "a,b", "b,a"]))
    declared = [{"label": name, "node_ranks": nodes} for name, nodes in parts.items()]
    block = {"actor": {"node_group": label, "placement": "all"}}
    placement = HybridComponentPlacement(
        {"component_placement": block, "node_groups": declared}, topology
    )
    wanted = [
        a
        for name in label.split(",")
        for node in parts[name]
        for a in topology.nodes[node].numbers
    ]
    assert [s.accelerators[0] for s in placement.slots("actor")] == wanted


@given(
    topologies(),
    st.lists(
        st.sampled_from(["rest", "1/2", {"accelerators": 1}, {"accelerators": 2}, "0"]),
        max_size=4,
    ),
)
def test_counts_never_take_what_is_taken(
    topology: Topology, wanted: list[object]
) -> None:
    block = dict(zip("abcd", wanted, strict=False))
    try:
        placement = HybridComponentPlacement({"component_placement": block}, topology)
    except PlacementError:
        return
    counted = [c for c in placement.components if block[c] not in ("rest", "0")]
    for a, b in itertools.combinations(counted, 2):
        assert not placement.shared(a, b)
    for c in counted:
        assert not any(
            placement.shared(c, other)
            for other in placement.components
            if block[other] in ("rest", "0")
        )
