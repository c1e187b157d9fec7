"""Make the reference pages of the documentation site from the code: config keys, metrics, error codes, Python API."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.codes import codes
from rlplace.config.blocks.off_policy import OffPolicyBlocks
from rlplace.config.fields import (
    JobName,
    blocks_in,
    default_of,
    fields_of,
    jobs,
    subject_of,
    tag_of,
)
from rlplace.config.of_job import config_of
from rlplace.units import show_bytes

ROOT = Path(__file__).resolve().parent.parent

# The names that the guides use, by their modules, with what they are for.
API: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "rlplace": ("load a trained policy and let it act", ("load_policy",)),
    "rlplace.runtime.prepare": (
        "read, check and plan a whole config; nothing is started",
        ("prepare", "prepare_composed", "Prepared"),
    ),
    "rlplace.placement": ("read placements, describe machines, make plans", None),
    "rlplace.placement.schedule": (
        "see what is resident in which stage of a plan",
        ("Residency", "Needs", "Schedule"),
    ),
    "rlplace.placement.show.text": (
        "write a plan as text, or two side by side",
        ("render_text", "render_diff"),
    ),
    "rlplace.placement.show.html": ("write a plan as a page", ("render_html",)),
    "rlplace.placement.show.svg": ("draw a plan", ("render_svg",)),
    "rlplace.placement.show.explain": (
        "say why a component or an accelerator is used as it is",
        ("explain_component", "explain_accelerator", "explain_pair"),
    ),
    "rlplace.placement.memory.solve": (
        "find the largest size that fits",
        ("Knob", "Solution", "solve"),
    ),
    "rlplace.workers.launch.cluster": (
        "start or join Ray and hold its machines",
        ("Cluster",),
    ),
    "rlplace.workers.worker": (
        "write a worker",
        ("Worker", "WorkerContext", "MoveReport"),
    ),
    "rlplace.workers.launch.group": (
        "call all ranks of a worker",
        ("WorkerGroup", "Pending", "wait_all"),
    ),
    "rlplace.comm.channel": (
        "pass items between workers",
        ("Channel", "ChannelSpec", "ChannelStats"),
    ),
    "rlplace.comm.work": ("wait for what was begun", ("Work",)),
    "rlplace.metrics": (
        "reduce numbers over ranks",
        ("Metric", "reduce_metrics"),
    ),
    "rlplace.envs.contract": (
        "connect a simulator library",
        ("Adapter", "Simulator", "Restorable", "Spaces", "StepResult"),
    ),
    "rlplace.envs.observations": (
        "see how observations become numbers",
        ("Encoding", "encoding_of"),
    ),
    "rlplace.envs.text.contract": (
        "write a task or a reward for language models",
        ("TextTask", "TextEpisode", "OneTurn", "Message", "Transcript"),
    ),
    "rlplace.errors": (
        "catch what is raised on purpose",
        (
            "RlplaceError",
            "ProblemsError",
            "Problem",
            "ConfigError",
            "PlacementError",
            "ClusterError",
            "WorkerError",
            "WorkerMisuse",
            "WorkerTimeout",
            "ChannelError",
            "ChannelBroken",
            "ChannelClosed",
            "ChannelTimeout",
            "EndOfStream",
        ),
    ),
}
_EXAMPLES = (
    "Examples: [from Python](../python.md), [own workers](../own_workers.md), "
    "[after training](../after_training.md), [own code](../own_code.md)."
)


def pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its name below docs/."""
    return {
        "reference/hyperparameters.md": hyperparameters_page(),
        "reference/config.md": config_page(),
        "reference/off_policy.md": off_policy_page(),
        "reference/configs.md": configs_page(),
        "reference/metrics.md": metrics_page(),
        "reference/errors.md": errors_page(),
        "reference/api.md": api_page(),
        "decisions/index.md": decisions_page(),
    }


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [
        heads,
        ["---"] * len(heads),
        *([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ── config keys ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of the config, in one job."""

    name: str  # dotted
    type: str
    default: str
    doc: str
    tag: str  # of the block that has it, where it is one of several; else empty


def config_page() -> str:
    """Return a section for each block of the config, and in it an entry with an anchor for each key."""
    entries = "".join(
        f"\n## {section}\n{''.join(map(_entry, names))}"
        for section, names in _sections(found_keys()).items()
    )
    return (
        "# Config keys\n\nEvery key of a config, from `rlplace/config/blocks`. Jobs whose actor is a language model "
        "and jobs with simulators have different keys in some blocks. A key that is not listed is an error; the error "
        "names the nearest key that is. The keys that are tuned most are on one page: "
        "[keys of hyperparameters](hyperparameters.md). `python -m rlplace.plan schema` prints the same as a JSON "
        "Schema.\n" + entries
    )


def off_policy_page() -> str:
    """Return a table for each block that only off-policy jobs have."""
    text = (
        "# Keys of off-policy jobs\n\nThe keys that only `job: off_policy` has, from "
        "`rlplace/config/blocks/off_policy.py`. `cluster`, `env`, `memory`, `runner`, `checkpoint` and `faults` have "
        "the [keys of all jobs](config.md).\n"
    )
    rows: dict[str, list[tuple[str, str, str, str]]] = {}
    for key in keys_of(OffPolicyBlocks, "simulator"):
        block = key.name.partition(".")[0]
        if block in ("algorithm", "replay", "actor", "rollout"):
            row = (f"`{key.name}`", key.type, key.default, _plain(key.doc))
            rows.setdefault(block, []).append(row)
    heads = ("key", "type", "default", "meaning")
    for block in ("algorithm", "replay", "actor", "rollout"):
        text += f"\n## {block}\n\n{table(heads, rows[block])}"
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A key as one kind of block has it, with the jobs that have it."""

    key: Key
    jobs: str  # in words: all, simulators, or language models; with the kind of the block, if it is one of several
    type: str
    default: str


def found_keys() -> dict[str, list[Variant]]:
    """Return the variants of every key by its dotted name: one, or one of each kind of block that has the key."""
    found = {
        job: {(key.name, key.tag): key for key in keys_of(config_of(job), job)}
        for job in jobs()
    }
    variants: dict[str, list[Variant]] = {}
    for name, tag in dict.fromkeys(itertools.chain.from_iterable(found.values())):
        here = {
            job: keys[name, tag] for job, keys in found.items() if (name, tag) in keys
        }
        having = "all" if len(here) == len(found) else subject_of(next(iter(here)))
        if tag:
            having += f", `kind: {tag}`"
        variants.setdefault(name, []).append(
            Variant(
                key=next(iter(here.values())),
                jobs=having,
                type=_by_job({subject_of(job): key.type for job, key in here.items()}),
                default=_by_job(
                    {subject_of(job): key.default for job, key in here.items()}
                ),
            )
        )
    return variants


def _sections(
    keys: Mapping[str, list[Variant]],
) -> dict[str, list[tuple[str, list[Variant]]]]:
    """Return the keys by the block at the top that has them; those without a block are last."""
    sections: dict[str, list[tuple[str, list[Variant]]]] = {}
    top = []
    for name, variants in keys.items():
        block, dot, _ = name.partition(".")
        if dot:
            sections.setdefault(block, []).append((name, variants))
        else:
            top.append((name, variants))
    return {**sections, "at the top": top}


def anchor_of(key: str) -> str:
    """Return the anchor of a key on the page of config keys: its dotted name without the brackets of lists."""
    return key.replace("[]", "")


def _entry(entry: tuple[str, list[Variant]]) -> str:
    """Return the entry of a key: its name with an anchor; its meaning, type, default and jobs."""
    name, variants = entry
    text = f"\n### `{name}` {{ #{anchor_of(name)} .config-key }}\n"
    meanings = [_plain(variant.key.doc) for variant in variants]
    if len({*meanings}) == 1:
        text += f"\n{meanings[0]}\n"
        meanings = [""] * len(variants)
    for variant, meaning in zip(variants, meanings, strict=True):
        if meaning:
            text += f"\n{meaning}\n"
        default = variant.default
        if default != "required":
            default = f"default {default}"
        having = "all jobs" if variant.jobs == "all" else variant.jobs
        text += f"\n{having} · {variant.type} · {default}\n{{: .config-type }}\n"
    return text


def _by_job(values: Mapping[str, str]) -> str:
    """Return the one value that all jobs have, or each value with its job."""
    if len({*values.values()}) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{value} ({job})" for job, value in values.items())


# Sections of the page; in each, what readers call a hyperparameter, as other libraries do, and the key that sets it.
HYPERPARAMETERS: dict[str, tuple[tuple[str, str], ...]] = {
    "Learning rate": (
        ("learning rate", "actor.optimizer.lr"),
        ("learning rate schedule", "actor.optimizer.schedule"),
        ("warm-up steps", "actor.optimizer.warmup_steps"),
        ("gradient clipping, `max_grad_norm`", "actor.optimizer.max_grad_norm"),
        ("weight decay", "actor.optimizer.weight_decay"),
        ("critic learning rate", "critic.optimizer.lr"),
    ),
    "Batch size and rollout length": (
        ("number of environments, `n_envs`", "env.total_num_envs"),
        ("rollout length, `n_steps`", "algorithm.rollout_steps"),
        ("minibatches, for `batch_size`", "algorithm.num_minibatches"),
        ("epochs, `n_epochs`", "algorithm.epochs"),
        ("prompts of an iteration, for `train_batch_size`", "algorithm.prompts"),
        ("answers of a prompt, `num_generations`", "algorithm.samples_per_prompt"),
        ("samples of an optimizer step, `mini_batch_size`", "algorithm.train_batch"),
        ("micro-batch size", "actor.micro_batch"),
    ),
    "Discount and advantages": (
        ("discount, `gamma`", "algorithm.gamma"),
        ("`gae_lambda`", "algorithm.gae_lambda"),
        ("advantage normalization", "algorithm.normalize_advantages"),
    ),
    "Loss": (
        ("clip range, `clip_range`", "algorithm.clip_ratio_low"),
        ("upper clip range", "algorithm.clip_ratio_high"),
        ("entropy coefficient, `ent_coef`", "algorithm.entropy_coef"),
        ("value coefficient, `vf_coef`", "algorithm.value_coef"),
        ("value clipping, `clip_range_vf`", "algorithm.value_clip"),
        ("`target_kl`", "algorithm.target_kl"),
        ("KL coefficient, `beta`", "algorithm.kl_coef"),
    ),
    "Normalization": (
        (
            "observation normalization, as `VecNormalize`",
            "algorithm.normalize_observations",
        ),
        ("reward normalization", "algorithm.normalize_rewards"),
    ),
    "Network": (
        ("hidden layers, `net_arch`", "actor.model.hidden"),
        ("`log_std_init`", "actor.model.initial_log_std"),
        ("LoRA rank", "actor.lora_rank"),
    ),
    "Sampling": (
        ("temperature", "rollout.temperature"),
        ("answer length, `max_new_tokens`", "algorithm.max_new_tokens"),
    ),
    "Length and seed of a run": (
        ("iterations, for `total_timesteps`", "runner.total_iterations"),
        ("seed", "runner.seed"),
    ),
}


def hyperparameters_page() -> str:
    """Return the keys that are tuned most, by the names that other libraries give them."""
    keys = found_keys()
    text = (
        "# Keys of hyperparameters\n\nThe settings of training that are tuned most, by the names that other libraries "
        "give them, with their defaults. [Hyperparameters](../hyperparameters.md) says what each does, and has the "
        "settings of the shipped tasks. Each key is an override of the command line or a line of YAML:\n\n"
        "```bash\nrlplace train cartpole actor.optimizer.lr=1e-3 algorithm.gamma=0.98\n```\n\n"
        "Shipped configs set some of these keys for their task: [shipped configs](configs.md). A run keeps the values "
        "that it had in `config.yaml` of its folder. All other keys: [config keys](config.md).\n"
    )
    for section, rows in HYPERPARAMETERS.items():
        lines = [
            (name, f"[`{key}`](config.md#{anchor_of(key)})", _default_of(keys[key]))
            for name, key in rows
        ]
        text += (
            f"\n## {section}\n\n{table(('hyperparameter', 'key', 'default'), lines)}"
        )
    return text


def _default_of(variants: Sequence[Variant]) -> str:
    """Return the defaults of a key, each with the jobs that have it, unless all jobs have the same."""
    if len(variants) == 1 and variants[0].jobs == "all":
        return variants[0].default
    texts = []
    for variant in variants:
        if variant.default.endswith(")"):  # it names the jobs
            texts.append(variant.default)
        else:
            texts.append(f"{variant.default} ({variant.jobs})")
    return "; ".join(texts)


def keys_of(
    block: type, job: JobName, prefix: str = "", tag: str = ""
) -> Iterator[Key]:
    """Yield the keys below a block; those of a list of blocks are below `name[]`."""
    for name, (field, hint) in fields_of(block, job).items():
        inner, default, doc = (
            blocks_in(hint),
            default_of(field, job),
            str(field.metadata.get("doc") or ""),
        )
        if not inner or default == ():
            unit = str(field.metadata.get("unit") or "")
            yield Key(
                f"{prefix}{name}",
                _bounds(_type(hint), field.metadata),
                _shown(default, unit),
                doc,
                tag,
            )
        for one in inner:
            own = tag_of(one) if len(inner) > 1 else tag
            yield from keys_of(
                one, job, f"{prefix}{name}{'[]' if default == () else ''}.", own
            )


def _type(hint: object) -> str:
    """Return a type in words of YAML."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(_type(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {_type(typing.get_args(hint)[0])}"
    kind = typing.get_origin(hint) or hint
    words = {
        bool: "true or false",
        int: "integer",
        float: "number",
        str: "text",
        Mapping: "mapping",
    }
    found = [
        word
        for known, word in words.items()
        if isinstance(kind, type) and issubclass(kind, known)
    ]
    if not found and not dataclasses.is_dataclass(kind):
        raise TypeError(f"no words of YAML for {hint!r}")
    return found[0] if found else "mapping"


def _bounds(kind: str, rules: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
    told = [f"{sign} {rules[rule]:,}" for rule, sign in signs.items() if rule in rules]
    if "unit" in rules:
        kind = kind.replace(
            "integer", "size such as `16GiB`" if "bytes" in rules["unit"] else "integer"
        )
        kind = kind.replace("number", "share")
    return ", ".join([kind, *told])


def _shown(default: object, unit: str) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if default in ((), {}):
        return "none"
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    if unit == "bytes" and isinstance(default, int) and default:
        return f"`{show_bytes(default).replace(' ', '')}`"
    words = {None: "null", True: "true", False: "false"}
    plain = (
        words[default] if default is None or isinstance(default, bool) else str(default)
    )
    return f"`{plain}`" if plain else "empty"


def configs_page() -> str:
    """Return every shipped config as it is."""
    text = "# Shipped configs\n\nRun one by its name: `scripts/train NAME`, plan it with `scripts/plan NAME`.\n"
    text += "`task/hopper` is the task of `scripts/train hopper`, `placement/hybrid` that of `placement=hybrid`.\n"
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        name = file.relative_to(ROOT / "configs").with_suffix("").as_posix()
        text += f"\n## {name}\n\n```yaml\n{file.read_text(encoding='utf-8')}```\n"
    return text


# ── metrics, error codes, decisions ──────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class MetricName:
    """A metric of docs/metrics.toml. `<component>` and the like in its name stand for one part of a real name."""

    name: str
    group: str
    doc: str

    def matches(self, name: str) -> bool:
        pattern = re.sub(r"<\w+>", r"[^/]+", self.name)
        return re.fullmatch(pattern, name) is not None


def metric_names() -> list[MetricName]:
    """Return all metrics that runs write, as listed in docs/metrics.toml; a test compares the list with runs."""
    tables = tomllib.loads((ROOT / "docs" / "metrics.toml").read_text(encoding="utf-8"))
    return [
        MetricName(name, group, doc)
        for group, names in tables.items()
        for name, doc in names.items()
    ]


def metrics_page() -> str:
    text = (
        "# Metrics\n\nNames in `metrics.jsonl` and TensorBoard; a run writes those of its components. Names "
        "that end in `_per_s` are rates, others in `_s` are seconds, of the slowest rank; `_bytes` are bytes; `_share` "
        "are between 0 and 1.\n"
    )
    for group, found in itertools.groupby(metric_names(), lambda metric: metric.group):
        text += f"\n## {group}\n\n{table(('metric', 'meaning'), ((f'`{m.name}`', m.doc) for m in found))}"
    return text


def errors_page() -> str:
    text = (
        "# Error codes\n\nThe word in brackets at the end of an error's first line is its code. "
        "`python -m rlplace.plan explain CODE` shows the same entry.\n"
    )
    for when, found in itertools.groupby(codes().values(), lambda code: code.when):
        text += f"\n## {when[0].upper()}{when[1:]}\n"
        for code in found:
            text += f"\n### {code.name}\n"
            for each in filter(None, (code.earlier, code)):
                text += f"\n{each.means[0].upper()}{each.means[1:]}.\n\n"
                text += f"- Example: `{each.example}`\n- Fix: {_plain(each.advice)}\n"
    return text


def _plain(text: str) -> str:
    """Return text in which `<name>` is no HTML tag and `*` no emphasis."""
    pieces = re.split(r"(`[^`]*`)", text)  # texts and, between them, code
    pieces[::2] = [re.sub(r"([<*_|])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)


def decisions_page() -> str:
    """Return the list of decisions, by their headings."""
    files = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    heads = [
        (
            file.name,
            file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "),
        )
        for file in files
    ]
    return "# Decisions\n\n" + "".join(f"- [{head}]({name})\n" for name, head in heads)


# ── the API, from the sources: nothing is imported ───────────────────────────────────────────────────────────────────


def api_page() -> str:
    """Return the names of API with their signatures and docstrings."""
    rows, sections = [], ""
    for module, (about, names) in API.items():
        found = list(
            _public(_source(module).read_text(encoding="utf-8"), module, names)
        )
        listed = ", ".join(
            f"[`{node.name}`](#{node.name.lower()})" for node, _ in found
        )
        rows.append((about, listed, f"[`{module}`](#{module.replace('.', '')})"))
        sections += f"\n## {module}\n\n{about[0].upper()}{about[1:]}.\n"
        for node, source in found:
            sections += _described(node, source, "###")
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if (
                    isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and ast.get_docstring(method)
                ):
                    sections += _described(method, source, "####")
    return f"# Python API\n\n{_EXAMPLES}\n\n{table(('to', 'use', 'from'), rows)}\n{sections}"


def _source(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _public(
    source: str, module: str, names: Collection[str] | None
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, str]]:
    """Yield the named definitions of a module, in that order, each with the text of its module.

    `names` None: those that a package offers from its modules.
    """
    tree = ast.parse(source)
    defined = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    yield from (
        (defined[name], source)
        for name in (names or defined)
        if names or not name.startswith("_")
    )
    typed = (
        [node for node in tree.body if isinstance(node, ast.If)]
        if names is None
        else []
    )  # if TYPE_CHECKING
    for node in itertools.chain.from_iterable(block.body for block in typed):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = _source(node.module).read_text(encoding="utf-8")
            yield from _public(inner, node.module, [alias.name for alias in node.names])


def _field_line(field: ast.AnnAssign, lines: Sequence[str]) -> str:
    """Return a field of a class as one line, with the comment behind it or above it."""
    last = lines[(field.end_lineno or field.lineno) - 1]
    line = last.rstrip()
    if field.end_lineno != field.lineno:
        line = f"    {ast.unparse(field.target)}: {ast.unparse(field.annotation)}"
        if field.value is not None:
            line += f" = {ast.unparse(field.value)}"
        comment = last.partition("  # ")[2]
        if comment:
            line += f"  # {comment}"
    above = []
    at = field.lineno - 2
    while lines[at].strip().startswith("# "):
        above.insert(0, lines[at].strip().removeprefix("# "))
        at -= 1
    if above and "  # " not in line:
        line += f"  # {' '.join(above)}"
    return line


def _described(node: ast.ClassDef | ast.FunctionDef, source: str, heading: str) -> str:
    lines = source.splitlines()
    if isinstance(node, ast.ClassDef):
        fields = [
            _field_line(f, lines) for f in node.body if isinstance(f, ast.AnnAssign)
        ]
        shown = (
            re.sub(r" = (dataclasses\.)?field\(.*?\)(?=  #|$)", " = ...", line)
            for line in fields
        )
        signature = "\n".join(
            [
                f"class {node.name}",
                *(line for line in shown if not line.strip().startswith("_")),
            ]
        )
    elif "property" in map(ast.unparse, node.decorator_list):
        signature = (
            f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
        )
    else:
        signature = (
            textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]))
            .rstrip()
            .rstrip(":")
        )
    return f"\n{heading} {node.name}\n\n```python\n{signature}\n```\n\n{_plain(ast.get_docstring(node) or '')}\n"
