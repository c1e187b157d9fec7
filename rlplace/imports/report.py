"""An import as text: a YAML file of ours, and below it, as comments, what became of every line of the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlplace.imports.imported import Imported
from rlplace.imports.rules import Became, Fate, Needless, Unknown, Unmapped
from rlplace.imports.yaml_text import to_yaml

_COLUMN = 52  # where the fates begin at the latest


def render_yaml(imported: Imported) -> str:
    """The config, between what it is and what became of the original; all but the config are comments."""
    head = [f"Imported from {imported.library}: {_counts(imported.fates)}.", *_placed(imported)]
    return _comment(head) + "\n" + to_yaml(imported.config) + "\n" + _comment(_trimmed(imported))


def render_report(imported: Imported) -> str:
    """The same without the config."""
    head = [f"Imported from {imported.library}: {_counts(imported.fates)}.", *_placed(imported), ""]
    return "\n".join([*head, *_trimmed(imported)]) + "\n"


def _trimmed(imported: Imported) -> list[str]:
    """Without blank lines at the end."""
    lines = list(report_lines(imported))
    while lines and not lines[-1]:
        lines.pop()
    return lines


def report_lines(imported: Imported) -> Iterator[str]:
    """What does not hold, then every setting by what became of it."""
    if imported.findings:
        yield "Does not hold:"
        yield ""
        for problem in imported.findings:
            yield from (f"  {line}" if line else "" for line in problem.render().split("\n"))
            yield ""
    sections: Sequence[tuple[str, Sequence[tuple[str, str]]]] = [
        ("Became:", [(str(f.setting), f.text) for f in imported.fates if isinstance(f, Became)]),
        ("Holds here without a key:", [(str(f.setting), f.why) for f in imported.fates if isinstance(f, Needless)]),
        ("Could not be mapped:", [(str(f.setting), f.why) for f in imported.fates if isinstance(f, Unmapped)]),
        ("Not known:", [(_where(f), _hint(f)) for f in imported.fates if isinstance(f, Unknown)]),
        ("Written out, though the original does not say it:", imported.assumed),
    ]
    for title, rows in sections:
        if rows:
            yield title
            width = min(_COLUMN, max(len(left) for left, _ in rows))
            yield from (f"  {left:<{width}}  {right}" for left, right in rows)
            yield ""
    if imported.missing:
        yield "Still to be written before a run: " + ", ".join(imported.missing)


def _counts(fates: Sequence[Fate]) -> str:
    kinds = (
        (Became, "came over"),
        (Needless, "already so here"),
        (Unmapped, "could not be mapped"),
        (Unknown, "not known"),
    )
    counted = [(sum(isinstance(f, kind) for f in fates), words) for kind, words in kinds]
    said = ", ".join(f"{n} {words}" for n, words in counted if n)
    return f"{len(fates)} setting{'s' * (len(fates) != 1)}" + (f"; {said}" if said else "")


def _placed(imported: Imported) -> list[str]:
    nodes = imported.topology.describe()
    if imported.layout is None:
        return [f"On {nodes}."]
    placement = imported.layout.placement
    sizes = " + ".join(
        f"{c} {len(placement.accelerators(c))}" for c in placement.components if placement.accelerators(c)
    )
    savings = imported.layout.savings
    uses = f"uses {savings.used}"
    if savings.saved:
        uses += f" instead of {savings.dedicated}"
    return [f"On {nodes}; {placement.mode}, {uses} ({sizes})."]


def _where(fate: Unknown) -> str:
    source = fate.setting.source
    return f"{fate.setting}" + (f"     ({source})" if source is not None and source.line is not None else "")


def _hint(fate: Unknown) -> str:
    if not fate.near:
        return "no setting of that name is known here"
    return f"did you mean {'--' * str(fate.setting).startswith('--')}{fate.near}?"


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
