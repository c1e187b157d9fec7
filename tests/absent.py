"""Libraries that a machine may lack: a test that stumbles over one is skipped, and says which.

A plugin of conftest.py. Where a library is installed nothing is skipped for it. In our own set-up, which has all that
tests need, an import that fails is a fault: `scripts/test` says so by RLPLACE_OWN_SETUP, and only `needs` skips then.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Generator, Iterator

import pytest

from rlplace.errors import ProblemsError
from rlplace.extras import version_of

OWN_SETUP = "RLPLACE_OWN_SETUP"  # variable of the environment
# Modules of the extras; the planner's own are not among them, nor what the tests are run with.
OPTIONAL = {
    *(
        "PIL",
        "accelerate",
        "cv2",
        "datasets",
        "grpc",
        "gymnasium",
        "h5py",
        "imageio",
        "jsonschema",
        "math_verify",
        "minigrid",
    ),
    *(
        "mujoco",
        "nbclient",
        "numpy",
        "openai",
        "pandas",
        "peft",
        "pyarrow",
        "ray",
        "reasoning_gym",
        "rich",
        "safetensors",
    ),
    *(
        "tensorboard",
        "tinker",
        "tokenizers",
        "torch",
        "torchvision",
        "transformers",
        "trl",
        "urllib3",
        "verifiers",
        "vllm",
        "websockets",
        "zmq",
    ),
}
# As Python, this project, transformers and Gymnasium say it.
_NAMED = re.compile(
    r"No module named '(\w+)|there is no module (\w+)|requires the (\w+) library but it was not found"
    r"|\((\w+)\) is not installed"
)


@functools.cache
def absent(library: str) -> bool:
    """Whether a module of the extras is not installed here."""
    return library in OPTIONAL and importlib.util.find_spec(library) is None


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip a test where one of these is not installed, which it would show in its own way, such as a refusal.

    `rlplace` is for the installed package: a clone has no version, and no list of what it requires.
    """
    gone = [
        name
        for name in libraries
        if absent(name) or (name == "rlplace" and version_of(name) is None)
    ]
    return pytest.mark.skipif(bool(gone), reason=f"{', '.join(gone)} is not installed")


def lacking(error: BaseException | None) -> str | None:
    """Return the library whose absence raised an error, or one that it came from."""
    for each in _origins(error):
        if isinstance(each, ImportError) and (name := named(str(each))) is not None:
            return name
        problems = each.problems if isinstance(each, ProblemsError) else ()
        for problem in problems:
            if (
                problem.code == "missing-library"
                and (name := named(f"{problem.why}")) is not None
            ):
                return name
    return None


def named(text: str) -> str | None:
    """Return the first library whose absence a text tells."""
    names = ("".join(groups) for groups in _NAMED.findall(text))  # one of them matched
    names = (name if name in OPTIONAL else name.lower() for name in names)
    return next(filter(absent, names), None)


def _may_lack() -> bool:
    """Whether libraries may be absent here without a fault."""
    return OWN_SETUP not in os.environ


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file of tests that imports what is not installed."""
    report = yield
    if (
        report.failed
        and _may_lack()
        and (name := named(str(report.longrepr))) is not None
    ):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {name} is not installed")
        report.result = []
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails for want of what is not installed."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    if report.failed and _may_lack() and (name := lacking(error)) is not None:
        report.outcome = "skipped"
        report.longrepr = (
            str(item.path),
            (item.location[1] or 0) + 1,
            f"Skipped: {name} is not installed",
        )
    return report
