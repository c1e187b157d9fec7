"""The generated reference pages: every config key, metric and error code is in them, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplace.codes import codes
from rlplace.config.fields import JobName, jobs
from rlplace.config.read import read_config
from scripts import site_reference

ROOT = Path(__file__).parents[2]
PAGES = site_reference.pages()
ANY = re.compile(r"<\w+>")


def entry_of(key: str) -> list[str]:
    """Return the lines of a key's entry on the page of config keys, without the heading and empty lines."""
    page = PAGES["reference/config.md"]
    _, heading, rest = page.partition(f"\n### `{key}` {{")
    assert heading, key
    lines = re.split(r"^##", rest, flags=re.MULTILINE)[0].splitlines()[1:]
    return [line for line in lines if line and not line.startswith("{:")]


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        (
            "algorithm.gamma",
            [
                "discount per step or learned token",
                "all jobs · number, ≥ 0, ≤ 1 · default `0.99` (simulators); `1.0` (language models)",
            ],
        ),
        (
            "cluster.accelerator.memory",
            [..., "all jobs · size such as `16GiB` · default `16GiB`"],
        ),
        (
            "cluster.nodes[].mixed[].count",
            [..., "all jobs · integer, ≥ 1, ≤ 1,024 · required"],
        ),
        (
            "actor.model.hidden",
            [
                ...,
                "simulators, `kind: mlp` · list of integer, ≥ 1 · default `[64, 64]`",
                ...,
                "simulators, `kind: cnn` · list of integer, ≥ 1 · default `[512]`",
                ...,
            ],
        ),
        (
            "rollout.dtype",
            [..., "language models · `fp32` | `bf16` | `fp16` · default `bf16`"],
        ),
        ("dry_run", [..., "all jobs · true or false · default `false`"]),
    ],
)
def test_every_key_is_there_with_its_type_default_and_meaning(
    key: str, entry: list[object]
) -> None:
    found = entry_of(key)
    if ... not in entry:
        assert found == entry
    for line in entry:
        assert line is ... or line in found


def test_a_text_of_its_own_kind_is_a_text() -> None:
    assert any("`trackio` | text ·" in line for line in entry_of("runner.sinks"))
    with pytest.raises(TypeError, match="bytes"):
        site_reference._type(bytes)


def test_a_key_has_one_anchor() -> None:
    page = PAGES["reference/config.md"]
    anchors = re.findall(r"^### `.*` \{ #(\S+) \.config-key \}$", page, re.MULTILINE)
    assert len(anchors) == len({*anchors}) > 200
    assert "actor.optimizer.lr" in anchors
    assert "cluster.nodes.count" in anchors


def test_hyperparameters_have_the_defaults_of_their_keys() -> None:
    page = PAGES["reference/hyperparameters.md"]
    rate = "[`actor.optimizer.lr`](config.md#actor.optimizer.lr)"
    default = "`0.0003` (simulators); `1e-06` (language models)"
    assert f"| learning rate | {rate} | {default} |" in page
    length = "[`algorithm.rollout_steps`](config.md#algorithm.rollout_steps)"
    assert f"| rollout length, `n_steps` | {length} | `64` (simulators) |" in page
    hidden = "[`actor.model.hidden`](config.md#actor.model.hidden)"
    assert f"{hidden} | `[64, 64]` (simulators, `kind: mlp`); " in page


@pytest.mark.parametrize("job", jobs())
def test_a_config_of_defaults_has_no_other_keys(job: JobName) -> None:
    listed = {
        row.split("`")[1].replace("[]", "")
        for row in PAGES["reference/config.md"].splitlines()
        if row.startswith("### `")
    }
    model = (
        {"kind": "causal_lm", "path": "somewhere"}
        if job == "language_model"
        else {"kind": "mlp"}
    )
    where = {"actor": 0, "env": 0, "rollout": 0}
    config = read_config(
        {
            "cluster": {"component_placement": where},
            "env": {},
            "rollout": {},
            "actor": {"model": model},
        }
    )
    blocks = [
        name
        for name in config.__dataclass_fields__
        if hasattr(getattr(config, name), "__dataclass_fields__")
    ]
    for block in blocks:
        if job == "language_model" or block not in (
            "critic",
            "reference",
            "reward",
            "agent",
        ):
            of = getattr(config, block)
            own = {f"{block}.{name}" for name in of.__dataclass_fields__}
            assert {
                key
                for key in own
                if not any(
                    known == key or known.startswith(f"{key}.") for known in listed
                )
            } == set()


def test_every_code_is_there() -> None:
    heads = re.findall(r"^### (\S+)$", PAGES["reference/errors.md"], re.MULTILINE)
    assert heads == list(codes())


def test_every_shipped_config_is_there() -> None:
    heads = set(re.findall(r"^## (\S+)$", PAGES["reference/configs.md"], re.MULTILINE))
    assert {file.stem for file in (ROOT / "configs").glob("*.yaml")} <= heads


def test_the_api_has_names_of_modules_with_their_docstrings() -> None:
    page = PAGES["reference/api.md"]
    assert "### HybridComponentPlacement" in page
    assert "### Worker\n" in page
    assert all(f"## {module}\n" in page for module in site_reference.API)
    assert (
        "    config: Any  # of the job's own type, with the keys of its models' config.json\n"
        in page
    )
    assert "dataclasses.field" not in page


MAKERS = ("Metric", "_mean")  # what makes a metric


def metrics_in_code() -> Iterator[str]:
    """Yield the names to which the package assigns a Metric in a dict, `<any>` for what is filled in."""
    for file in (ROOT / "rlplace").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if not any(f"{maker}(" in text for maker in MAKERS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.DictComp):
                pairs = [(node.key, node.value)]
            elif isinstance(node, ast.Assign) and isinstance(
                node.targets[0], ast.Subscript
            ):
                pairs = [(node.targets[0].slice, node.value)]
            else:
                continue
            for key, value in pairs:
                called = getattr(getattr(value, "func", None), "id", "")
                if called in MAKERS and isinstance(key, ast.JoinedStr | ast.Constant):
                    parts = key.values if isinstance(key, ast.JoinedStr) else [key]
                    yield "".join(
                        str(p.value) if isinstance(p, ast.Constant) else "<any>"
                        for p in parts
                    )


def test_every_metric_that_is_made_is_listed() -> None:
    listed = {ANY.sub("<any>", metric.name) for metric in site_reference.metric_names()}
    made = {name for name in metrics_in_code() if "/" in name.replace("</any>", "")}
    assert len(made) > 50
    unlisted = {
        name
        for name in made
        if name not in listed and not any(_covers(name, known) for known in listed)
    }
    assert unlisted == set()


def test_what_ends_in_s_is_a_rate_or_seconds_as_the_pages_say() -> None:
    for text in (
        PAGES["reference/metrics.md"],
        (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"),
    ):
        assert "`_per_s` are rates, other" in text
    docs = {
        metric.name: metric.doc
        for metric in site_reference.metric_names()
        if metric.name.endswith("_s")
    }
    rates = {
        name for name, doc in docs.items() if re.search(r"\bper second\b|\brate\b", doc)
    }
    assert rates | {"critic/infer_tokens_per_s"} == {
        name for name in docs if name.endswith("_per_s")
    }


def _covers(made: str, listed: str) -> bool:
    """Whether a name in the list is one that `made` can become, or the other way round."""
    return any(
        re.fullmatch(re.escape(wide).replace("<any>", "[^/]+"), narrow)
        for wide, narrow in ((made, listed), (listed, made))
    )
