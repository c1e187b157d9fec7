"""docs/planning.md as it is printed: every command in it says what the page says, every example runs."""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import shlex
from collections.abc import Iterator

import pytest

from rlplace.cli import plan
from rlplace.commands import WRONG
from tests.pages import ROOT, blocks, says

FILE = ROOT / "docs" / "planning.md"
PAGE = FILE.read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in blocks(FILE)
    if block.language == "console"
    for command in block.commands()
]


@pytest.mark.parametrize(
    ("typed", "shown"), [pytest.param(*c, id=c[0]) for c in COMMANDS]
)
def test_a_command_answers_what_the_page_shows(
    typed: str,
    shown: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    command, _, rest = typed.partition(" > ")
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "rlplace.plan"]
    code = plan.main(words[3:])
    captured = capsys.readouterr()
    if rest:
        assert code == 0
        return
    answer = (captured.out + captured.err).rstrip("\n").split("\n")
    assert says(answer, shown), f"{typed} answers\n" + "\n".join(answer)


def test_the_python_example_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "planning.md", "exec"), {"__name__": "__main__"})
    assert out.getvalue() == printed


def test_every_function_that_the_page_names_is_there() -> None:
    """As `module.name(`; below one of these packages; `report` is the reader's own plan."""
    named = re.findall(r"`([a-z_.]+\.[a-z_]+)[(`]", PAGE.partition("## In Python")[2])
    found = {
        name: [*_resolved(name)] for name in named if not name.startswith("report.")
    }
    assert {"config.validate.config_schema", "text.render_diff"} <= {
        name for name, places in found.items() if places
    }
    assert [name for name, places in found.items() if not places] == []


def _resolved(name: str) -> Iterator[object]:
    for package in ("rlplace", "rlplace.config", "rlplace.placement.show"):
        with contextlib.suppress(ImportError, AttributeError):
            yield pkgutil.resolve_name(f"{package}.{name}")


def test_exit_codes_are_those_of_the_command() -> None:
    told = dict(re.findall(r"^\| (\d) \| (.*) \|$", PAGE, re.MULTILINE))
    assert {int(code) for code in told} == {plan.FITS, WRONG, plan.DOES_NOT_FIT}
