"""Words about node groups, and about the labels that a line names."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config.yaml_text import show
from rlplace.errors import did_you_mean, suggestion
from rlplace.placement.language.complaints.paste import line_of, open_line, with_part
from rlplace.placement.language.complaints.writer import Facts, Writer, span_of
from rlplace.placement.language.faults import Fault
from rlplace.placement.machines.pools import NODE
from rlplace.placement.machines.topology import Ranges, named


def _no_label(fault: Fault) -> Facts:
    """Return name -> value for the error message about a missing label.

    `line`: a corrected line that names the last group of the cluster.
    """
    return {"line": line_of(fault.text, fault.facts["labels"][-1])}


def _unknown_group(fault: Fault) -> Facts:
    """Return name -> value for the error message about a node group that does not exist.

    `meant`: the suggestion of a similar label, if there is one. `line`: a corrected line with that label.
    """
    label = fault.facts["label"]
    meant = did_you_mean(label, fault.facts["labels"])
    line = open_line(fault.text, "one of these")
    if meant:
        line = with_part(fault.text, span_of(fault), meant)
    return {"meant": suggestion(meant), "line": line}


def _group_twice(fault: Fault) -> Facts:
    """Return name -> value for the error message about a node group that is named twice.

    `line`: a corrected line that names each group once.
    """
    return {"line": line_of(fault.text, ",".join(fault.facts["found"]))}


def _first_group(fault: Fault) -> Facts:
    """Return name -> value for the error message about node groups that cannot be joined.

    `line`: a corrected line that names only the first group.
    """
    return {"line": line_of(fault.text, fault.facts["first"])}


def _free_label(fault: Fault) -> Facts:
    """Return name -> value for the error message about a label that a node group cannot have.

    `free`: a label that can be used instead.
    """
    free = "train"
    if fault.facts["taken"]:
        free = f"{fault.facts['name']}_2"
    return {"free": free}


def _named(nodes: Ranges) -> str:
    """Return nodes as text, such as `node 3, nodes 5-7`."""
    return ", ".join(named(NODE, piece) for piece in nodes.pieces)


def _outside(fault: Fault) -> Facts:
    """Return name -> value for the error message about nodes that are not in the node group.

    `nodes`: these nodes, as text. `line`: a corrected line with all nodes of the group.
    """
    members = str(fault.facts["members"])
    return {"nodes": _named(fault.facts["nodes"]), "line": line_of(fault.text, members)}


def _item_outside(fault: Fault) -> Facts:
    """Return name -> value for the error message about hardware on a node that is not in the node group.

    `node`: the node. `line`: a corrected line with the first node of the group.
    """
    members: Ranges = fault.facts["members"]
    line = line_of(fault.text, members.pieces[0].start)
    return {"node": show(fault.text.value), "line": line}


def _two_envs(fault: Fault) -> Facts:
    """Return name -> value for the error message about nodes for which two environments are declared.

    `nodes`: these nodes, as text. `line`: a corrected line with the nodes that have no environment yet.
    """
    left: Ranges = fault.facts["left"]
    line = "remove this entry"
    if left:
        line = line_of(fault.text, str(left))
    return {"nodes": _named(fault.facts["nodes"]), "line": line}


WRITERS: Mapping[tuple[str, str], Writer] = {
    ("unknown-node-group", "no_label"): _no_label,
    ("unknown-node-group", "no_group"): _unknown_group,
    ("node-group-repeated", ""): _group_twice,
    ("mixed-node-groups", ""): _first_group,
    ("overlapping-node-groups", ""): _first_group,
    ("bad-label", "no_name"): _free_label,
    ("bad-label", "reserved"): _free_label,
    ("bad-label", "not_one_name"): _free_label,
    ("node-group-declared-twice", ""): _free_label,
    ("node-outside-group", "in_env"): _outside,
    ("node-outside-group", "of_item"): _item_outside,
    ("overlapping-env-configs", ""): _two_envs,
}
