"""Code of a model against tests: right code passes every public form of tests, and no trick passes any."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlplace.envs.text import Transcript
from rlplace.envs.text.code import confine
from rlplace.envs.text.code.fences import code_block
from rlplace.envs.text.code.forms import read
from rlplace.envs.text.code.runner import missing_layers, run_checks
from rlplace.envs.text.rewards import Reward, unit_tests
from rlplace.workers.roles import unconfined
from tests.kernel import lacking_layers

_CALLS = 5
_LONG_S = 60.0
_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel of Linux confines the code"
)


@pytest.fixture(scope="module")
def all_layers() -> None:
    """Skip where the kernel lacks a layer: `test_a_layer_that_the_system_lacks_leaves_the_others` holds the rest."""
    missing = set(missing_layers())
    # A layer that the kernel offers and the code does not use is a fault
    assert missing <= lacking_layers()
    if missing:
        pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")


def passed(code: str, tests: object, **facts: object) -> int:
    """Return how many tests the code passes."""
    return run_checks(code, read(tests, facts), timeout_s=_LONG_S)


def value_of(expression: str, folder: Path) -> str:
    """Return the repr of the value of an expression in an answer process, or of the exception that it raises."""
    code = (
        f"try:\n    value = repr({expression})\n"
        "except BaseException as error:\n    value = repr(error)\n"
    )
    # The judge is trusted, so a test can write what it sees
    file = folder / "value"
    test = f"open({str(file)!r}, 'w').write(value)\nassert value"
    assert passed(code, test) == 1
    return file.read_text()


# ── forms of tests ───────────────────────────────────────────────────────────────────────────────────────────────────

_ADD = "def add(a, b):\n    return a + b\n"
_WRONG = "def add(a, b):\n    return 0\n"
_METHOD = f"class Solution:\n    {_ADD.replace('(a', '(self, a').replace('    return', '        return')}"
_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
_WRONG_PROGRAM = "print(0)\n"

FORMS: dict[str, tuple[Any, dict[str, object], str, str]] = {
    "assert": ("assert add(1, 2) == 3", {}, _ADD, _WRONG),
    "MBPP": (
        ["assert add(1, 2) == 3"],
        {"test_imports": ["import math"]},
        _ADD,
        _WRONG,
    ),
    "MBPP as a text": ('["assert add(1, 2) == 3"]', {}, _ADD, _WRONG),
    "HumanEval": (
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n",
        {"entry_point": "add"},
        _ADD,
        _WRONG,
    ),
    "check that is called": (
        "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)",
        {},
        _ADD,
        _WRONG,
    ),
    "pytest": ("def test_add():\n    assert add(1, 2) == 3\n", {}, _ADD, _WRONG),
    "pytest with imports": (
        "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
        {},
        _ADD,
        _WRONG,
    ),
    "pytest in a class": (
        "class TestAdd:\n    def test_add(self):\n        assert add(1, 2) == 3\n",
        {},
        _ADD,
        _WRONG,
    ),
    "pytest with parameters": (
        "import pytest\n\n@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])\n"
        "def test_add(a, b, c):\n    assert add(a, b) == c\n",
        {},
        _ADD,
        _WRONG,
    ),
    "unittest": (
        "import unittest\n\nclass TestAdd(unittest.TestCase):\n    def test_add(self):\n"
        "        self.assertEqual(add(1, 2), 3)\n\nif __name__ == '__main__':\n    unittest.main()\n",
        {},
        _ADD,
        _WRONG,
    ),
    "APPS": (
        '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}',
        {},
        _PROGRAM,
        _WRONG_PROGRAM,
    ),
    "APPS with a function": (
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
        {},
        _METHOD,
        _WRONG,
    ),
    "CodeContests": ({"input": ["1 2"], "output": ["3"]}, {}, _PROGRAM, _WRONG_PROGRAM),
    "LiveCodeBench": (
        '[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]',
        {},
        _PROGRAM,
        _WRONG_PROGRAM,
    ),
    "LiveCodeBench with a function": (
        '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
        {"func_name": "add"},
        _METHOD,
        _WRONG,
    ),
    "cases below a key": (
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "input": "1 2", "output": "3"}],
        },
        {},
        _PROGRAM,
        _WRONG_PROGRAM,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_right_code_passes_every_form_of_tests_and_wrong_code_none(form: str) -> None:
    tests, facts, right, wrong = FORMS[form]
    assert passed(right, tests, **facts) == len(read(tests, facts))
    assert passed(wrong, tests, **facts) == 0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ([], "no tests"),
        ("[]", "no tests"),
        ("x = 1", "assert nothing"),
        ("def f(): pass", "assert nothing"),
        ("add(1, 2)", "assert nothing"),
        ("def check(candidate): assert candidate(1) == 2", "entry_point"),
        ("def test_f(tmp_path): assert f(tmp_path)", "tmp_path"),
        ("assert f(1) ==", "no Python"),
        ({"question": "?"}, "question"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (7, "int"),
        ("import scipy_that_is_not_there\nassert f(1)", ""),
    ],
)
def test_tests_that_assert_nothing_are_refused(tests: object, reason: str) -> None:
    if not reason:
        # A library that nobody knows fails when it is imported
        assert passed("def f(x): return 1", tests) == 0
        return
    with pytest.raises(ValueError, match=reason):
        read(tests)


def test_functions_with_names_of_checks_are_under_test_too() -> None:
    code = "def check_char(a): return a[0] == a[-1]\ntest_three = sorted_list = check_char\n"
    tests = ["assert check_char('aba') == True", "assert test_three('ab') is False"]
    assert passed(code, tests) == 2


def test_each_test_passes_or_fails_by_itself() -> None:
    code = "def double(x):\n    return 2 * x\n"
    tests = [
        "assert double(2) == 4",
        "assert double(2) == 5",
        "assert x == y",
        "assert True\nraise SystemExit",
        "assert double('a') == 'aa'",
    ]
    assert passed(code, tests) == 2


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1000001", "1000000", False),
        ("1.0", "1", False),
        ("yes", "YES", False),
        ("1\n2", "1 2", False),
        ("", "1", False),
        ("nan", "1.0", False),
    ],
)
def test_outputs_are_compared_by_line(printed: str, expected: str, equal: bool) -> None:
    tests = {"inputs": [""], "outputs": [expected]}
    assert passed(f"print({printed!r})", tests) == equal


# ── what tests may do with the code's objects ────────────────────────────────────────────────────────────────────────

_CODE = """
import asyncio, collections, dataclasses, functools, math
from typing import NamedTuple

class Point:
    ORIGIN = (0, 0)
    def __init__(self, x, y=0):
        self.x, self.y = x, y
    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, k):
        return Point(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __abs__(self):
        return math.hypot(self.x, self.y)
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other):
        return self.x < other.x
    def __repr__(self):
        return f"Point({self.x}, {self.y})"
    def __len__(self):
        return 2
    def __iter__(self):
        return iter((self.x, self.y))
    def __getitem__(self, index):
        return (self.x, self.y)[index]
    def __contains__(self, item):
        return item in (self.x, self.y)
    def __call__(self):
        return "called"
    @property
    def norm(self):
        return abs(self)
    @staticmethod
    def zero():
        return Point(0)
    @classmethod
    def of(cls, pair):
        return cls(*pair)

class Stack(list):
    def push(self, item):
        self.append(item)

class Empty(ValueError):
    pass

class Node:
    def __init__(self, val, next=None):
        self.val, self.next = val, next

class Pair(NamedTuple):
    a: int
    b: int

@dataclasses.dataclass
class Data:
    a: int = 0

def linked(values):
    node = None
    for value in reversed(values):
        node = Node(value, node)
    return node

def pop(stack):
    if not stack:
        raise Empty("nothing")
    return stack.pop()

def fails(kind):
    raise kind("so")

def sort_in_place(values): values.sort()
def numbers(n):
    for i in range(n):
        yield i
def apply(f, x): return f(x)
def maker(): return lambda x: x + 1
async def later(x):
    await asyncio.sleep(0)
    return x
def show(x): print("x is", x)
def ask(): return input("? ") + "!"
def many(): return {1: (2, [3.5]), "a": {4}, None: b"x", 1j: frozenset([5]), True: None, 10**40: range(3)}
def counted(text): return collections.Counter(text)
@functools.lru_cache
def cached(x): return x
def array():
    import numpy as np
    return np.arange(6).reshape(2, 3) / 2
TABLE = {"one": 1}
"""


_TESTS_WITH_OBJECTS = [
    "assert (Point(1) + Point(2, 3)).y == 3",
    "assert Point(1) + Point(2) == Point(3)",
    "assert Point(1) != Point(2)",
    "assert Point(1, 1) * 2 == Point(2, 2) and 2 * Point(1, 1) == Point(2, 2)",
    "assert abs(Point(3, 4)) == 5 and Point(3, 4).norm == 5",
    "assert repr(Point(1, 2)) == 'Point(1, 2)' and len(Point(1)) == 2",
    "assert list(Point(1, 2)) == [1, 2] and Point(1, 2)[1] == 2 and 2 in Point(1, 2)",
    "assert Point(1)() == 'called' and Point.zero() == Point.of((0, 0))",
    "assert Point.ORIGIN == (0, 0) and isinstance(Point(1), Point)",
    "assert sorted([Point(2), Point(1)])[0].x == 1",
    "p = Point(1)\np.x = 7\nassert p.x == 7",
    "s = Stack()\ns.push(3)\nassert s == [3] and len(s) == 1 and s[0] == 3 and s",
    "assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1",
    "assert Data(3) == Data(3) and Data(3) != Data(4)",
    "n = linked([1, 2])\nseen = []\nwhile n:\n    seen.append(n.val)\n    n = n.next\nassert seen == [1, 2]",
    "try:\n    pop([])\nexcept Empty as error:\n    assert str(error) == 'nothing'\nelse:\n    assert False",
    "import pytest\nwith pytest.raises(ValueError, match='nothing'):\n    pop([])",
    "import unittest\nwith unittest.TestCase().assertRaises(KeyError):\n    fails(KeyError)",
    "values = [3, 1]\nsort_in_place(values)\nassert values == [1, 3]",
    "assert list(numbers(3)) == [0, 1, 2] and next(numbers(3)) == 0",
    "assert apply(lambda x: x * 2, 4) == 8 and maker()(1) == 2",
    "import asyncio\nassert asyncio.run(later(3)) == 3",
    "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    show(1)\n"
    "assert out.getvalue() == 'x is 1\\n'",
    "from unittest import mock\nwith mock.patch('builtins.input', return_value='hi'):\n    assert ask() == 'hi!'",
    "assert many() == {1: (2, [3.5]), 'a': {4}, None: b'x', 1j: frozenset([5]), True: None, 10**40: range(3)}",
    "assert counted('aab') == {'a': 2, 'b': 1} and counted('aab')['a'] == 2",
    "assert cached(1) == 1 and cached.cache_info().misses == 1",
    "import numpy as np\nassert np.allclose(array(), [[0, .5, 1], [1.5, 2, 2.5]])",
    "assert math.sqrt(4) == 2 and TABLE['one'] == 1",
]


def test_tests_may_use_objects_of_the_code_as_in_one_process() -> None:
    """One judge runs all on one answer process. Where one fails, each runs again by itself, to be named."""
    if passed(_CODE, _TESTS_WITH_OBJECTS) < len(_TESTS_WITH_OBJECTS):
        failing = [test for test in _TESTS_WITH_OBJECTS if not passed(_CODE, test)]
        pytest.fail("\n".join(["these do not pass:", *failing]))


_PLUS = "def f(x):\n    return x + 1\n"
_PARAMETERS = "import pytest\n@pytest.mark.parametrize"
_ROUNDED = "class P:\n    def __init__(self, x): self.x = x\n"
# Name -> (right code, its test)
RIGHT: dict[str, tuple[str, object]] = {
    "a function called sum": (
        "def sum(a, b): return a + b",
        ["assert sum(1, 2) == 3"],
    ),
    "a function called delta": (
        "def delta(a, b): return b - a",
        ["assert delta(1, 2) == 1"],
    ),
    "a check that takes a text": (
        "def check_palindrome(t): return t == t[::-1]",
        "assert check_palindrome(str(121))",
    ),
    "unittest that runs itself": (
        _PLUS,
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(1), 2)\n"
        "unittest.main()\n",
    ),
    "async methods": (
        "async def f(x): return x + 1",
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n"
        "        self.assertEqual(await f(1), 2)\n",
    ),
    "parameters by keyword": (
        _PLUS,
        f"{_PARAMETERS}(argnames='x', argvalues=[1, 2])\ndef test_it(x): assert f(x) == x + 1\n",
    ),
    "pytest.param": (
        _PLUS,
        f"{_PARAMETERS}('x, y', [pytest.param(1, 2, id='one')])\ndef test_it(x, y): assert f(x) == y\n",
    ),
    "setup_class": (
        _PLUS,
        "class TestIt:\n    @classmethod\n    def setup_class(cls): cls.x = 1\n"
        "    def test_it(self): assert f(self.x) == 2\n",
    ),
    "setup_method": (
        _PLUS,
        "class TestIt:\n    def setup_method(self, method): self.x = 1\n"
        "    def test_it(self): assert f(self.x) == 2\n",
    ),
    "names that LeetCode imports": (
        "class Solution:\n    def f(self, x: List[int]) -> Optional[int]: return Counter(x)[1]\n",
        {"fn_name": "f", "inputs": [[[1, 1, 2]]], "outputs": [2]},
    ),
    "a method of LeetCode": (
        "class Solution:\n    def f(self, x): return x + 1\n",
        {"fn_name": "Solution().f", "inputs": [[1]], "outputs": [2]},
    ),
    "numbers that differ in the last digit": (
        "def f(x): return 0.1 + x",
        [{"input": "0.2", "output": "0.3", "testtype": "functional", "fn_name": "f"}],
    ),
    "a list as APPS writes it": (
        "def f(x): return [2]",
        {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]},
    ),
    "a list in a list as APPS writes it": (
        "def f(x): return [2]",
        {"fn_name": "f", "inputs": [[1]], "outputs": [[[2]]]},
    ),
    "texts with any line end": (
        "def f(t): return len(t)",
        [
            {
                "input": '"a\u2028b"',
                "output": "3",
                "testtype": "functional",
                "fn_name": "f",
            }
        ],
    ),
    "a program in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def main(): print(int(input()) + 1)\nt = threading.Thread(target=main)\nt.start()\nt.join()\n",
        {"inputs": ["1"], "outputs": ["2"]},
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n"
        "    with ThreadPoolExecutor(2) as pool: return list(pool.map(lambda y: y + 1, x))\n",
        "assert f([1, 2]) == [2, 3]",
    ),
    "threads of the tests": (
        _PLUS,
        "import threading\nseen = []\nts = [threading.Thread(target=lambda: seen.append(f(1))) for _ in range(4)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()\nassert seen == [2] * 4",
    ),
    "hashes": (
        f"{_ROUNDED}    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)\n",
        "assert hash(P(1)) == hash(P(1)) and len({P(1), P(1), P(2)}) == 2",
    ),
    "enumerations": (
        "import enum\nclass C(enum.Enum):\n    RED = 1\n    BLUE = 2\n",
        "assert C['RED'] is C.RED and C(2) is C.BLUE and len(C) == 2 and [c.value for c in C] == [1, 2]",
    ),
    "rounding": (
        f"{_ROUNDED}    def __round__(self, digits=0): return round(self.x, digits)\n",
        "assert round(P(1.234), 2) == 1.23",
    ),
    "fields of exceptions": (
        "class E(Exception):\n    def __init__(self, n): self.n = n\n    def __str__(self): return f'no {self.n}'\n"
        "def f(): raise E(3)\n",
        "import pytest\nwith pytest.raises(E, match='no 3') as seen:\n    f()\nassert seen.value.n == 3",
    ),
    "dates": (
        "import datetime\ndef f(d): return d + datetime.timedelta(days=1)",
        "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
    ),
    "iterators as arguments": (
        "def f(x): return list(x)",
        "assert f(iter([1, 2])) == [1, 2] and f(n for n in [3]) == [3] and f({4: 5}.items()) == [(4, 5)]",
    ),
    "changes beside a result": (
        "def f(x):\n    x.sort()\n    return len(x)\n",
        "a = [2, 1]\nassert f(a) == 2\nassert a == [1, 2]",
    ),
    "a result that is compared with its argument": (
        "def f(x):\n    x.reverse()\n    return x\n",
        "a = [1, 2]\nassert f(a) == a[::-1]",
    ),
    "nodes of the tests": (
        "def f(n):\n    if n: n.left, n.right = f(n.right), f(n.left)\n    return n\n",
        "class T:\n    def __init__(self, v, l=None, r=None): self.v, self.left, self.right = v, l, r\n"
        "root = T(1, T(2))\nassert f(root) is root and root.left is None and root.right.v == 2",
    ),
    "a module that nobody knows": (
        _PLUS,
        "from your_code import f\ndef test_it(): assert f(1) == 2\n",
    ),
    "more files than one poll takes": (
        _PLUS,
        "import os\nfds = [os.dup(0) for _ in range(1100)]\nassert f(1) == 2",
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_code_passes(case: str) -> None:
    code, tests = RIGHT[case]
    checks = read(tests)
    assert run_checks(code, checks, timeout_s=_LONG_S) == len(checks)


def test_functions_that_the_prompt_gives_are_those_of_the_prompt() -> None:
    prompt = (
        "import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n"
        'def find_zero(xs):\n    """Return a zero of the polynomial."""\n'
    )
    tests = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\n"
    right = "from __future__ import annotations\ndef find_zero(xs):\n    assert poly([1], 0) == 1\n    return -0.5\n"
    wrong = "def poly(xs, x): return 0\ndef find_zero(xs): return 7\n"
    assert unit_tests(told(right, prompt, tests=tests, entry_point="find_zero")) == 1.0
    assert unit_tests(told(wrong, prompt, tests=tests, entry_point="find_zero")) == 0.0


# ── tricks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_EVIL = """
class Evil:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __mod__ = __pow__ = __sub__
    def __abs__(self): return 0.0
    def __float__(self): return 0.0
    def __round__(self, n=None): return self
    def __hash__(self): return 3
    def __contains__(self, item): return True
    def __bool__(self): return True
    def __getattr__(self, name): return Evil()
    def __call__(self, *a, **k): return True
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __instancecheck__(self, other): return True
def f(x): return Evil()
"""
_REPORT = "\n".join(f"{number} passed" for number in range(9)) + "\n"

TRICKS: dict[str, str] = {
    "leaves at once": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "leaves in the call": "import os\ndef f(x): os._exit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "writes reports": f"import os\nfor fd in range(70):\n    try: os.write(fd, {_REPORT!r}.encode())\n"
    "    except OSError: pass\nos._exit(0)",
    "writes reports in the call": f"import os\ndef f(x):\n    for fd in range(70):\n"
    f"        try: os.write(fd, {_REPORT!r}.encode())\n        except OSError: pass\n    os._exit(0)",
    "prints reports": f"print({_REPORT!r})\ndef f(x): print({_REPORT!r})",
    "closes everything": "import os\nos.closerange(0, 100)",
    "equals everything": _EVIL,
    "is a number that equals everything": _EVIL.replace(
        "class Evil:", "class Evil(float):"
    ),
    "is a list that equals everything": _EVIL.replace(
        "class Evil:", "class Evil(list):"
    ),
    "is a text that equals everything": _EVIL.replace(
        "class Evil:", "class Evil(str):"
    ),
    "returns a class that equals everything": _EVIL.replace(
        "return Evil()\n", "return Evil\n"
    ),
    "brings its own abs": "abs = isclose = round = all = any = len = lambda *a, **k: 0\ndef f(x): return 0",
    "brings its own math": "class math: isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
    "brings its own numpy": "class np: allclose = staticmethod(lambda *a, **k: True)\nnumpy = np\ndef f(x): return 0",
    "brings its own assertions": "def assertEqual(*a): pass\nassert_equal = check = expect = same = assertEqual\n"
    "check_equal = lambda *a: True\n"
    "class Test: assert_equals = assertEqual\ndef f(x): return 0",
    "changes builtins": "import builtins\nbuiltins.abs = builtins.all = lambda *a: 0\ndef f(x): return 0",
    "changes unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0",
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "changes the judge's modules": "import sys\nfor m in list(sys.modules):\n"
    "    if not m.endswith(('judge', 'wire', '__main__', 'answer')): continue\n"
    "    sys.modules[m].__dict__.update(_text_passes=lambda *a: True)\ndef f(x): return 0",
    "looks for the tests in memory": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n    return 0",
    "looks for the tests in frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in list(frame.f_locals.values()):\n"
    "            if isinstance(v, str) and 'f(1) ==' in v: return int(v.split('==')[1])\n"
    "        frame = frame.f_back\n    return 0",
    "reads the judge's memory": "import os\ndef f(x): return open(f'/proc/{os.getppid()}/mem', 'rb').read(9)",
    "reads the judge's input": "import os\ndef f(x): return os.read(0, 9999)",
    "searches the disk": "import glob\ndef f(x): return [open(p).read() for p in glob.glob('/tmp/**', recursive=True)]",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 0",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): return 0",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef f(x): return 0",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)\ndef f(x): return 0",
    "traces its parent": "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\ndef f(x): return 0",
    "leaves the session": "import os\nos.setsid()\ndef f(x): return 0",
    "nests folders": "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\ndef f(x): return 0",
    "makes folders that cannot be removed": "import os\nos.makedirs('a/b')\nos.chmod('a', 0)\ndef f(x): return 0",
    "fills the disk": "for i in range(999):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))\ndef f(x): return 0",
    "fills the memory": "x = [bytearray(1 << 28) for _ in range(99)]\ndef f(x): return 0",
    "returns too much": "def f(x): return 'a' * (100 << 20)",
    "returns a deep list": "def f(x):\n    l = []\n    for _ in range(99999): l = [l]\n    return l",
    "returns itself": "def f(x):\n    l = []\n    l.append(l)\n    return l",
    "returns an endless generator": "def f(x):\n    while True: yield 0",
    "sends nonsense to the judge": "import os\ndef f(x):\n    for fd in range(3, 20):\n"
    "        try: os.write(fd, b'\\xff' * 4096)\n        except OSError: pass\n    return 0",
    "sends replies to the judge": "import json, os, struct\ndef f(x):\n"
    "    body = json.dumps({'reply': {'names': {}, 'value': 3}}).encode()\n    for fd in range(3, 20):\n"
    "        try: os.write(fd, struct.pack('=I', len(body)) + body)\n        except OSError: pass\n    os._exit(0)",
    "overflows the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "crashes": "import ctypes\ndef f(x): return ctypes.string_at(0)",
    "raises what passes": "def f(x): raise AssertionError",
    "raises an odd exception": "class E(BaseException):\n    __str__ = __repr__ = lambda s: 1 / 0\n"
    "def f(x): raise E(E)",
    "is no Python": "def f(x:",
    "has null bytes": "\0def f(x): return 2",
    "has lone surrogates": "x = '\ud800'\ndef f(x): return '\ud800'",
    "is empty": "",
}
# These compute until they are killed
_ENDLESS = {
    "overflows the stack",
    "returns a deep list",
    "returns an endless generator",
    "returns itself",
    "returns too much",
}
# The first test has the trick's function return a wrong number; the others are comparisons that can be fooled
_TARGETS: list[str] = [
    "assert f(1) == 2",
    "assert 2 == f(1)",
    "assert not f(1) != 2",
    "assert abs(f(1) - 2) < 1e-6",
    "assert f(1) - 2 == 0",
    "assert f(1) in [2]",
    "assert 2 in f(1)",
    "assert sum([f(1), -2]) == 0.5",
    "assert math.isclose(f(1), 2)",
    "assertEqual(f(1), 2)",
    "Test.assert_equals(f(1), 2)",
    "same(f(1), 2)\nassert True",
    "if not check_equal(f(1), 2):\n    raise AssertionError",
    "try:\n    value = f(1)\nexcept Exception:\n    value = 0\nassert value == 2",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f(1), 2)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertAlmostEqual(f(1), 2)",
]


# Comparisons by libraries that take long to import, for tricks about comparisons
_BY_LIBRARIES: list[str] = [
    "import pytest\nassert f(1) == pytest.approx(2)",
    "import math\nassert math.isclose(f(1), 2)",
    "import numpy\nassert numpy.allclose(f(1), 2)",
    "assert np.allclose(f(1), [2, 3])",
]
_ABOUT_COMPARISONS = re.compile("equals everything|brings|changes")


@pytest.mark.usefixtures("all_layers")
@pytest.mark.parametrize(
    "trick",
    [
        # Each starts processes; the default tests have every third one
        pytest.param(trick, marks=pytest.mark.slow if number % 3 else ())
        for number, trick in enumerate(TRICKS)
    ],
)
def test_no_trick_passes_a_test_or_raises(
    trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    checks = read(_TARGETS)
    checks += read({"fn_name": "f", "inputs": [[1]], "outputs": [2]})
    checks += read({"inputs": ["1"], "outputs": ["2"]})
    if _ABOUT_COMPARISONS.search(trick):
        checks += read(_BY_LIBRARIES)
    limit_s = 2 if trick in _ENDLESS else 5
    limits = {"timeout_s": limit_s, "memory_bytes": 256 << 20}
    assert run_checks(TRICKS[trick], checks, **limits) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("import time\ndef f():\n    while True: time.sleep(1)", "assert f() == 1"),
        ("", "import time\nwhile True:\n    time.sleep(1)\n    assert True"),
    ],
)
def test_code_that_does_not_come_back_passes_nothing(code: str, test: str) -> None:
    """It sleeps, which leaves the processor to other tests; `test_no_process_is_left_of_a_judge` computes."""
    # Long enough for the first test to end on a loaded machine, too
    assert run_checks(code, read(["assert 1 == 1", test]), timeout_s=5) == 1


# Replaces names of Python in what the answer process tells of its names
_TELLS_BUILTINS = """
import subprocess
import sys
Answer = sys.modules['rlplace.envs.text.code.answer'].Answer
class Any:
    def __getattr__(self, name): return Any()
    def __call__(self, *a, **k): return Any()
old = Answer._known
def known(self):
    zero = lambda *a, **k: 0
    names = dict(abs=zero, sorted=zero, round=zero, all=lambda *a: True, isinstance=lambda *a: True)
    names['__build_class__'] = names['__import__'] = lambda *a, **k: Any()
    told = [[name, self._data(value)] for name, value in names.items()]
    return {**old(self), '__builtins__': ['dict', told]}
Answer._known = known
def f(x): return 0
"""
_EVERYTHING = "class E:\n    def __eq__(self, o): return True\n"
# Name -> (wrong code, its test)
FORGED: dict[str, tuple[str, str]] = {
    "builtins": (_TELLS_BUILTINS, "assert abs(f(1) - 2) < 1e-6"),
    "sorted of builtins": (_TELLS_BUILTINS, "assert sorted([f(1)]) == sorted([3, 4])"),
    "imports of builtins": (
        _TELLS_BUILTINS,
        "import math\nassert math.isclose(f(1), 2)",
    ),
    "classes of builtins": (
        _TELLS_BUILTINS,
        "class TestF:\n    def test_f(self):\n        assert f(1) == 2\n",
    ),
    "unittest of builtins": (
        _TELLS_BUILTINS,
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n",
    ),
    "an async test that does not run": (
        "def f(x): return 0",
        "import pytest\n@pytest.mark.asyncio\nasync def test_f():\n    assert f(1) == 2\n",
    ),
    "an async method that does not run": (
        "def f(x): return 0",
        "import unittest\nclass T(unittest.TestCase):\n    async def test_f(self):\n        assert f(1) == 2\n",
    ),
    "a generator that does not run": (
        "def f(x): return 0",
        "def test_f():\n    yield\n    assert f(1) == 2\n",
    ),
    "StopIteration in all": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda p: f(p[0]) == p[1], [(1, 2)]))",
    ),
    "StopIteration in zip": (
        "def f(x): raise StopIteration",
        "for got, want in zip(map(f, [1, 2]), [2, 3]):\n    assert got == want",
    ),
    "a class with the name of the function, in": (
        "class E:\n    def __contains__(self, o): return True\nE.__name__ = 'f'\ndef f(x): return E()\n",
        "assert 'two' in f(1)",
    ),
    "a class with the name of the function, /": (
        "class E:\n    def __truediv__(self, o): return 1.0\nE.__name__ = 'f'\ndef f(x): return E()\n",
        "assert abs(f(1) / 2.5 - 1) < 1e-6",
    ),
    "a class with the name of the function, -": (
        "class E:\n    def __sub__(self, o): return set()\n    __rsub__ = __sub__\nE.__name__ = 'f'\n"
        "def f(x): return E()\n",
        "assert f(1) - {1} == set() and {1} - f(1) == set()",
    ),
    "no numbers are close to all": (
        "def f(x): return []",
        "import numpy as np\nassert np.allclose(f(1), 2.5)",
    ),
    "no numbers are equal to all": (
        "def f(x): return []",
        "import numpy as np\nnp.testing.assert_allclose(f(1), [2.5])",
    ),
    "no numbers are about all": (
        "import numpy as np\ndef f(x): return np.array([])",
        "import pytest\nassert f(1) == pytest.approx(2)",
    ),
    "the order of a dict": (
        "from collections import OrderedDict\ndef f(x): return OrderedDict([(2, 1), (1, 1)])",
        "from collections import OrderedDict\nassert f(1) == OrderedDict([(1, 1), (2, 1)])",
    ),
    "a change of the argument": (
        "def f(x):\n    x.sort()\n    return x[:]\n",
        "a = [3, 1]\nassert f(a) == [1, 3]\nassert a == [3, 1]",
    ),
    "its own Counter": (
        "def Counter(x): return 0\ndef f(x): return 7",
        "assert Counter(f('aab')) == Counter({'a': 2, 'b': 1})",
    ),
    "its own sqrt": (
        "def sqrt(x): return 0\ndef f(x): return 7",
        "assert f(sqrt(4)) == sqrt(16)",
    ),
    "its own pytest behind a star": (
        f"{_EVERYTHING}class pytest:\n    approx = staticmethod(lambda x: E())\ndef f(x): return E()\n",
        "import pytest\nfrom solution import *\ndef test_f(): assert f(1) == pytest.approx(2)\n",
    ),
    "its own same behind a star": (
        "def same(a, b): return True\ndef f(x): return 0\n",
        "from solution import *\ndef same(a, b): assert a == b\nsame(f(1), 2)",
    ),
    "modules that only the answer imports": (
        "import this, antigravity\ndef f(x): return 0",
        "import sys\nassert 'this' in sys.modules",
    ),
    "any object is an iterator": (
        f"{_EVERYTHING}def f(x): return E()",
        "from collections.abc import Iterator\nassert isinstance(f(1), Iterator)",
    ),
    "fields of the tests' objects": (
        "def f(n): return n.__init__.__globals__['right']",
        "class N:\n    def __init__(self): pass\nright = 7\nassert f(N()) == 7",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_no_answer_passes_by_what_the_tests_trust(case: str) -> None:
    code, test = FORGED[case]
    assert passed(code, test) == 0


def test_no_process_is_left_of_a_judge() -> None:
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    before = set(children.read_text().split())
    passed("def f(x): return x", "assert f(1) == 1")
    assert run_checks("while True: pass", read("assert f(1) == 1"), timeout_s=1) == 0
    assert set(children.read_text().split()) <= before


# ── confinement ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("all_layers")
@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("__import__('os').fork()", "BlockingIOError"),
        ("__import__('subprocess').run(['true'])", "BlockingIOError"),
        ("__import__('_thread').start_new_thread(print, ())", "RuntimeError"),
        ("__import__('socket').socket()", "PermissionError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('/tmp/rlplace-written', 'w')", "PermissionError"),
        ("open('/dev/shm/rlplace-written', 'w')", "PermissionError"),
        ("__import__('os').memfd_create('x')", "PermissionError"),
        ("__import__('os').listdir('/proc')", "PermissionError"),
        ("open('big', 'wb').write(bytes(64 << 20))", "OSError"),
        ("[open(str(i), 'wb').write(bytes(9 << 20)) for i in range(9)]", "OSError"),
        ("bytearray(1 << 31)", "MemoryError"),
        ("__import__('resource').prlimit(1, 7, (1, 1))", "PermissionError"),
    ],
)
def test_code_reaches_nothing_outside(
    expression: str, error: str, tmp_path: Path
) -> None:
    assert value_of(expression, tmp_path).startswith(error)


def in_child(work: Callable[[], object]) -> Any:
    """Return what `work` returns in a child process, by its repr; or the exception that it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:  # noqa: BLE001  # reported to the parent
            text = repr([type(error).__name__, str(error)])
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return ast.literal_eval(text)


@_linux
@pytest.mark.parametrize("missing", ["_in_namespaces", "_landlocked", "_can_filter"])
def test_a_layer_that_the_system_lacks_leaves_the_others(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer stands alone: without one of them, the parent cannot be killed, and no process is started."""
    monkeypatch.setattr(confine, missing, lambda *_: False)
    parent = os.getpid()
    if confine.os.geteuid() != 0 and missing == "_can_filter":
        pytest.skip(
            "without seccomp a user's own processes are protected by namespaces alone"
        )

    def tried() -> dict[str, str]:
        layers = confine.confine(str(tmp_path), 512 << 20, 10)
        results = {"layers": ",".join(layers)}
        for name, attempt in (
            ("fork", os.fork),
            ("kill", lambda: os.kill(parent, 0)),
            ("read", Path(f"/proc/{parent}/environ").read_bytes),
        ):
            try:
                attempt()
                results[name] = "done"
            except OSError as error:
                results[name] = type(error).__name__
        return results

    results = in_child(tried)
    names = {
        "_in_namespaces": "namespaces",
        "_landlocked": "landlock",
        "_can_filter": "seccomp",
    }
    assert names[missing] not in results["layers"]
    assert results["fork"] != "done"
    assert results["read"] != "done"
    assert results["kill"] in ("PermissionError", "ProcessLookupError")


def test_code_sees_no_secrets_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('left', 'w').write('x')\nENV = dict(os.environ)\nHERE = os.getcwd()\n"
    tests = ["assert 'SECRET' not in ENV", f"assert HERE.startswith({str(tmp_path)!r})"]
    assert passed(code, tests) == len(tests)
    assert list(tmp_path.iterdir()) == []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(_CALLS):
        passed(code, tests)
    # other threads of this process may have opened some
    assert len(os.listdir("/proc/self/fd")) < before + _CALLS


# ── code in an answer ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "answer",
    [
        "```python\nX\n```",
        "```\nX\n```",
        "```py\nX\n```",
        "```Python\nX\n```",
        "```python3\nX\n```",
        "``` python\nX\n```",
        "~~~python\nX\n~~~",
        "~~~\nX\n~~~",
        "````python\nX\n````",
        "```python\r\nX\r\n```\r\n",
        "1. So:\n   ```python\n   X\n   ```\n2. Done",
        "First:\n```python\nY\n```\nbetter:\n```python\nX\n```\nThat is it.",
        "```python\nX\n```\nIt prints:\n```\n3\n```",
        "```py\nY\n```\nIt prints:\n```\nTrue\n[1, -2]\n```\nbetter:\n```python\nX\n```",
        "```bash\npip install it\n```\n```python\nX\n```",
        '```python title="a.py"\nX\n```',
        "```{.python}\nX\n```",
        "```python\nX",
        "X",
    ],
)
def test_code_is_found_in_each_kind_of_fence(answer: str) -> None:
    assert code_block(answer).strip() == "X"


def test_a_block_without_a_mark_counts_if_it_does_something() -> None:
    answer = "```py\nx = 1\n```\nbetter\n```\nx = 2\n```"
    assert code_block(answer) == "x = 2\n"


def test_an_indented_block_keeps_its_inner_indentation() -> None:
    answer = "- a\n  ```python\n  def f():\n      return '''\n  ```\n'''\n  ```\n"
    assert code_block(answer).startswith("def f():\n    return")


def test_the_share_of_passed_tests_is_a_reward() -> None:
    answer = "Here it is:\n```python\ndef f(x):\n    return abs(x)\n```\n"
    tests = ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 3"]
    transcript = Transcript(
        prompt="?",
        answers=(answer,),
        replies=(),
        facts={"tests": tests},
        tokens=9,
        truncated=False,
    )
    assert unit_tests(transcript) == pytest.approx(2 / 3)


_LIMITED = """
import resource, sys
from rlplace.envs.text.code import confine
confine._limit(1 << 40, 5.0)
names = "AS CPU FSIZE CORE NOFILE NPROC".split()
print(*[resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] for name in names])
try:
    with open(sys.argv[1], "wb") as file:
        file.write(bytes(confine.FILE_BYTES + 1))
except OSError as error:
    print(error.strerror)
"""


def test_each_limit_of_an_answer_process_is_set(tmp_path: Path) -> None:
    """Also where the kernel has no namespaces, and files are on a disk."""
    told = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = confine._OPEN_FILES
    assert told[0] == f"{1 << 40} 6 {confine.FILE_BYTES} 0 {files} 1"
    assert told[1] == "File too large"


def test_layers_that_a_machine_lacks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [Reward(name="unit_tests", written="unit_tests")]
    monkeypatch.setattr(unconfined, "missing_layers", lambda: ("landlock",))
    (metric,) = unconfined.unconfined("env", rewards).values()
    assert metric.value == 1
    assert "landlock" in metric.notes[0]
    assert unconfined.unconfined("env", [Reward(name="a", written="contains")]) == {}


@_linux
def test_the_layers_of_this_machine_are_those_of_an_answer_process() -> None:
    here = in_child(lambda: confine.confine(tempfile.mkdtemp(), 512 << 20, 10))
    assert set(missing_layers()) == set(confine.LAYERS) - set(here)


def told(answer: str, prompt: str = "?", **facts: object) -> Transcript:
    return Transcript(
        prompt=prompt,
        answers=(answer,),
        replies=(),
        facts=facts,
        tokens=9,
        truncated=False,
    )


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (f"<think>easy</think>\n```python\n{_ADD}```", 1.0),
        (f"<think>```python\nbroken</think>\n```python\n{_ADD}```", 1.0),
        (f"<think>```python\n{_ADD}```</think>\nI do not know", 0.0),
        (f"<think>```python\n{_ADD}```", 0.0),
    ],
)
def test_code_in_thoughts_is_no_answer(answer: str, value: float) -> None:
    assert unit_tests(told(answer, tests="assert add(1, 2) == 3")) == value


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b\n",
        "```python\n    return a + b\n```",
        "```\nreturn a + b\n```",
        _ADD,
    ],
)
def test_an_answer_may_continue_the_function_of_its_prompt(answer: str) -> None:
    prompt = 'def add(a, b):\n    """Return the sum."""\n'
    tests = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert unit_tests(told(answer, prompt, tests=tests, entry_point="add")) == 1.0
