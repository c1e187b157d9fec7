"""An import as text: a YAML file of ours, and below it, as comments, the mapping result of every setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.imports.importer import Imported, MappingResult, Outcome
from rlplace.imports.settings import to_yaml

_COLUMN = 52  # where the second column begins at the latest
_SECTIONS: Mapping[Outcome, tuple[str, str]] = {  # title, and how they are counted
    "equal": ("Equal:", "equal"),
    "differs": ("Differs:", "differing"),
    "implied": ("Holds here without a key:", "implied"),
    "unmapped": ("Not mapped:", "not mapped"),
    "unknown": ("Not known:", "not known"),
}


def render_yaml(imported: Imported) -> str:
    """The config, between its summary and the mapping results; all but the config are comments."""
    return _comment(_head(imported)) + "\n" + to_yaml(imported.config) + "\n" + _comment(_body(imported))


def render_report(imported: Imported) -> str:
    """The same without the config."""
    return "\n".join([*_head(imported), "", *_body(imported)]) + "\n"


def _head(imported: Imported) -> list[str]:
    outcomes = [result.outcome for result in imported.results]
    counted = ", ".join(f"{outcomes.count(o)} {words}" for o, (_, words) in _SECTIONS.items() if o in outcomes)
    count = f"{len(outcomes)} setting{'s' * (len(outcomes) != 1)}" + (f"; {counted}" if counted else "")
    where = f"On {imported.topology.describe()}"
    if imported.layout is not None:
        placement, savings = imported.layout.placement, imported.layout.savings
        instead = f" instead of {savings.dedicated}" if savings.saved else ""
        where += f"; {placement.mode}, uses {savings.used}{instead} ({savings.sizes})"
    return [f"Imported from {imported.library}: {count}.", f"{where}."]


def _body(imported: Imported) -> list[str]:
    """The findings, then every setting by its outcome; without blank lines at the end."""
    lines: list[str] = []
    if imported.findings:
        lines.append("Does not hold:\n")
        for problem in imported.findings:
            lines += [*(f"  {line}" if line else "" for line in problem.render().split("\n")), ""]
    sections = {title: [_row(r) for r in imported.results if r.outcome == o] for o, (title, _) in _SECTIONS.items()}
    sections["Written out, though the original does not have it:"] = list(imported.assumed)
    for title, rows in sections.items():
        width = min(_COLUMN, max((len(left) for left, _ in rows), default=0))
        lines += [title, *(f"  {left:<{width}}  {right}" for left, right in rows), ""] if rows else []
    if imported.missing:
        lines.append("Still to be written before a run: " + ", ".join(imported.missing))
    return "\n".join(lines).rstrip("\n").split("\n")


def _row(result: MappingResult) -> tuple[str, str]:
    """The setting and the text of its result; an unknown one with its line and the nearest known name."""
    setting, source = str(result.setting), result.setting.source
    if result.outcome != "unknown":
        return setting, result.text
    where = f"     ({source})" if source is not None and source.line is not None else ""
    known = f"did you mean {'--' * setting.startswith('--')}{result.text}?"
    return setting + where, known if result.text else "no setting of that name is known here"


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in text.split("\n"))
