"""The floors, doors and house rules of docs/architecture.md; imports inside functions count too."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.sources import nodes, parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rlplace"

FLOORS = (  # lowest first; a room imports from floors below its own
    (
        "codes",
        "cores",
        "errors",
        "extras",
        "http_server",
        "json_text",
        "places",
        "proxies",
        "python_code",
        "signals",
        "streams",
        "tables",
        "tried",
        "units",
    ),
    (
        "checkpoints",
        "commands",
        "config",
        "metrics",
        "stopwatch",
        "tokens",
        "trajectory",
    ),
    ("algo", "placement", "trained"),
    ("checks", "comm"),
    ("envs", "models", "workers"),
    ("report",),
    ("contract",),
    ("execution", "imports"),
    ("foresight",),
    ("runtime",),
    ("jobs",),
    ("cli",),
    ("api",),
    (
        "__main__",
        "completion",
        "doctor",
        "drain",
        "evaluate",
        "export",
        "init",
        "plan",
        "profile",
        "replace",
        "share",
        "runs",
        "search",
        "serve",
        "train",
    ),
)
PEERS = {  # and from these rooms of its own floor
    "codes": {"errors"},
    "json_text": {"codes"},
    "places": {"errors", "python_code"},
    "models": {"envs"},
    "stopwatch": {"metrics"},
    "tried": {"extras"},
    "workers": {"envs", "models"},
}
# Floors of the sub-packages and modules in a room, lowest first: one imports from its own floor and from those below.
# Every sub-package of a room that is listed here has a floor.
FLOORS_WITHIN: dict[str, tuple[tuple[str, ...], ...]] = {
    "comm": (
        ("codec", "ends", "processes", "queue", "table"),
        ("shared_memory",),
        ("network",),
        ("weights",),
    ),
    "placement": (("machines",), ("language",), ("memory", "show")),
    "workers": (
        ("engines", "launch", "ray_launch", "serving", "training"),
        ("off_policy", "roles"),
    ),
}
DOORS = {  # library -> the only modules (or rooms) that may import it
    "IPython": {"api.notebook"},
    "PIL": {"models.vision", "models.vision_lm"},
    "annotated_types": {"config"},
    "datasets": {"envs.text"},
    "envpool": {"envs"},
    "grpc": {"workers.ray_launch.token"},
    "gymnasium": {"envs"},
    "h5py": {"envs.recorded"},
    "httpx": {"envs.text.verifiers_library"},
    "hydra": {"config.compose", "config.composition"},
    "imageio": {"envs"},
    "imageio_ffmpeg": {"envs"},
    "jinja2": {"models.template_limits", "models.tokenizer"},
    "math_verify": {"envs.text"},
    "mlflow": {"report.trackers"},
    "mujoco": {"envs"},
    "numpy": {
        "algo.priorities",
        "algo.replay",
        "comm",
        "envs",
        "models",
        "tokens",
        "trajectory",
        "workers",
    },
    "omegaconf": {"config.compose", "config.composition"},
    "pandas": {"api.run"},
    "onnx": {"models.exported"},
    "packaging": {"cli.doctor", "tried"},
    "peft": {"models.lora"},
    "psutil": {"workers"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "pyarrow": {"envs.text"},
    # Tests of code that a model wrote may import it
    "pytest": {"envs.text.code"},
    "ray": {"workers.ray_launch"},
    "reasoning_gym": {"envs.text"},
    "rich": {"report.live"},
    "safetensors": {"models", "workers"},
    "swanlab": {"report.trackers"},
    "tensorboard": {"report.sinks"},
    "textarena": {"envs.text"},
    "tokenizers": {"models.tokenizer"},
    "torch": {"algo", "comm.codec", "comm.weights", "models", "workers"},
    "trackio": {"report.trackers"},
    "transformers": {"models", "workers.engines.transformers"},
    "verifiers": {"envs.text.verifiers_library"},
    "urllib3": {"workers.engines.vllm_server", "workers.roles.reward"},
    "websockets": {"envs.text"},
    "vllm": {
        "workers.engines.vllm",
        "workers.engines.vllm_loading",
        "workers.engines.vllm_memory",
        "workers.engines.vllm_modules",
        "workers.engines.vllm_versions",
    },
    "wandb": {"report.trackers"},
    "yaml": {
        "cli.own_job",
        "config.compose",
        "config.composition",
        "config.yaml_text",
        "contract.trained",
        "imports.settings",
        "report.record",
        "runtime.resume",
        "runtime.run",
    },
    "zmq": {"comm.network"},
}
# library -> what may not pull it in when imported, not even through others
PURE = {"config.compose", "config.read", "errors", "imports", "metrics", "placement"}
PLANNER = PURE | {
    "checkpoints",
    "api.callables",
    "doctor",
    "evaluate",
    "export",
    "plan",
    "report.__main__",
    "train",
}  # shows the plan within a second
# starts fast, stays small
DRIVER = PLANNER | {
    "envs",
    "execution.loop",
    "execution.overlap",
    "runtime.run",
    "trajectory",
    "workers.launch.group",
    "workers.worker",
}
WITHOUT = {
    "hydra": {"api.callables", "plan", "search", "train"},
    "pandas": {"api"},
    "numpy": PLANNER
    | {
        "foresight",
        "runtime.prepare",
        "search",
    },  # which a planner alone does not install
    "ray": PLANNER | {"workers.roles.env"},
    "torch": DRIVER
    | {
        "search",
        "workers.roles.actor",
        "workers.roles.env",
        "workers.roles.reward",
        "workers.roles.rollout",
        "workers.roles.scorer",
        "workers.roles.text_env",
    },  # 100 MB in every process that imports it
    "transformers": DRIVER
    | {
        "comm.weights",
        "models.mlp",
        "models.policy",
        "workers.engines.torch",
        "workers.roles.rollout",
        "workers.roles.text_env",
        "workers.training.policy_learner",
        "workers.training.state",
    },  # 3 s in the template of workers of simulators, which need none of it
    "urllib3": PLANNER | {"runtime.prepare", "workers.roles.reward"},
    "vllm": DRIVER | {"workers.roles.rollout", "workers.roles.text_env"},
}

# Names of jobs, and the kinds of model that once stood for them.
JOB_NAMES = {"causal_lm", "language_model", "mlp", "simulator"}
# Rooms and modules in which such a word may decide: the jobs, what decides by the words of a config which job it is of,
# and the table that finds a job by its name.
DECIDED_BY = {"config.which_job", "contract.registry", "jobs"}
# `mlp` is a network there, or a part of a weight's name.
NETWORKS = {"config.blocks.policies", "models"}

# Blocks of a config that only one job has -> the only modules (or rooms) that may import them: the job, its workers,
# its simulators, tasks and models, their memory; and the table that has the config of each job.
BLOCKS = {
    "config.blocks.simulator": {
        "cli.doctor",
        "config.blocks.off_policy",
        "config.of_job",
        "envs",
        "jobs.played",
        "jobs.simulator",
        "models.policy",
        "models.vla_entries",
        "workers.arguments",
        "workers.roles.env",
        "workers.roles.played",
        "workers.training.policy_learner",
    },
    "config.blocks.off_policy": {
        "config.of_job",
        "jobs.off_policy",
        "models.off_policy",
        "workers.off_policy",
    },
    "config.blocks.policies": {
        "config.blocks.training",
        "envs.registry",
        "jobs.simulator",
        "models",
        "placement.memory.policies",
    },
    "config.blocks.language_model": {
        "config.of_job",
        "envs.registry",
        "envs.text",
        "jobs.language_model",
        "models.vision",
        "placement.memory.demands",
        "placement.memory.formulas",
        "workers.arguments",
        "workers.engines",
        "workers.roles",
        "workers.training.lm_learner",
    },
}

# Modules that read JSON by themselves: json_text, and those whose texts rlplace has made a moment before
READS_JSON = {
    "comm.weights.device_group",
    "envs.gymnasium_state",
    "envs.text.code.process",
    "envs.text.code.wire",
    "json_text",
    "models.describe",
    "models.describe_policy",
    "placement.memory.families",
    "runtime.run",
    "workers.launch.devices",
    "workers.ray_launch.fork",
}

# Modules that can be called, and the statement that makes a module callable
CALLED = {"plan", "search", "train"}
MADE_CALLABLE = "sys.modules[__name__].__class__ = "

EMPTY_NAMES = {
    "manager",
    "handler",
    "util",
    "utils",
    "helper",
    "helpers",
    "common",
    "misc",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """One source file; `name` is relative to the package: "placement.schedule", "" for the package itself."""

    name: str
    source: str

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def tree(self) -> ast.Module:
        return parsed(self.source)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return nodes(self.source)

    def within(self, places: set[str]) -> bool:
        return any(
            self.name == place or self.name.startswith(place + ".") for place in places
        )


@functools.cache
def modules() -> list[Module]:
    found = []
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found.append(
            Module(
                ".".join(p for p in parts if p != "__init__"),
                file.read_text(encoding="utf-8"),
            )
        )
    return found


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a module; "from rlplace import config" gives "rlplace.config"."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            whole = node.module == PACKAGE
            yield from (
                (node.lineno, f"{PACKAGE}.{a.name}" if whole else str(node.module))
                for a in node.names
            )
        elif isinstance(node, ast.Call) and _is_import(node.func):
            yield from (
                (node.lineno, str(a.value))
                for a in node.args[:1]
                if isinstance(a, ast.Constant)
            )


def _is_import(called: ast.expr) -> bool:
    """Whether it is `__import__` or `importlib.import_module`; only such names are written out, which is slow."""
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in ("__import__", "import_module") and ast.unparse(called) in (
        "__import__",
        "importlib.import_module",
    )


def floor_of(room: str) -> int | None:
    return next((i for i, rooms in enumerate(FLOORS) if room in rooms), None)


def wrong_floors(module: Module) -> Iterator[str]:
    if module.name == "report.__main__":  # a way in to a command
        return
    floor = floor_of(module.room)
    if floor is None:
        if module.name:
            yield f"{module.name}: the room {module.room!r} stands on no floor"
        return
    for line, name in imports(module):
        room = name.removeprefix(PACKAGE + ".").partition(".")[0]
        below = floor_of(room)
        if not name.startswith(PACKAGE + ".") or room == module.room or below is None:
            continue
        if below > floor or (
            below == floor and room not in PEERS.get(module.room, set())
        ):
            yield f"{module.name}:{line}: {module.room} (floor {floor}) imports {room} (floor {below})"


def wrong_floors_within(module: Module) -> Iterator[str]:
    floors = FLOORS_WITHIN.get(module.room, ())
    children = {child: floor for floor, listed in enumerate(floors) for child in listed}
    floor = children.get(child_of(module.name))
    for line, name in imports(module):
        own, _, inside = name.removeprefix(PACKAGE + ".").partition(".")
        below = children.get(inside.partition(".")[0])
        if (
            own == module.room
            and floor is not None
            and below is not None
            and below > floor
        ):
            yield f"{module.name}:{line}: {child_of(module.name)} (floor {floor}) imports {inside} (floor {below})"


def child_of(name: str) -> str:
    """ "memory" of "placement.memory.ledger"."""
    return name.partition(".")[2].partition(".")[0]


def wrong_doors(module: Module) -> Iterator[str]:
    for line, name in imports(module):
        library = name.partition(".")[0]
        if library == PACKAGE or library in sys.stdlib_module_names:
            continue
        if library not in DOORS:
            yield f"{module.name}:{line}: {library} has no door in this package"
        elif not module.within(DOORS[library]):
            yield f"{module.name}:{line}: {library} is imported only by {', '.join(sorted(DOORS[library]))}"


def private_of_ray(module: Module) -> Iterator[str]:
    """What a version of Ray may lack is reached by one module, which has a way without it."""
    if module.name != "workers.ray_launch.private":
        for number, line in enumerate(module.source.splitlines(), 1):
            if re.search(r"ray\._private|ray\._raylet|from ray import _", line):
                yield f"{module.name}:{number}: only workers.ray_launch.private uses what is private of Ray"


def compared_jobs(module: Module) -> Iterator[str]:
    """No name of a job is compared or looked up outside of the jobs: the job itself is asked."""
    if module.within(DECIDED_BY):
        return
    names = JOB_NAMES - {"mlp"} if module.within(NETWORKS) else JOB_NAMES
    for node in module.nodes:
        words: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            words = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            words = [node.value]
        elif (
            isinstance(node, ast.Subscript)
            and getattr(node.value, "id", "") != "Literal"
        ):
            words = [node.slice]
        elif isinstance(node, ast.Dict):
            words = list(node.keys)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            words = list(node.args[:1])
        for word in words:
            for found in sorted(_texts(word) & names):
                line = getattr(node, "lineno", 0)
                yield f"{module.name}:{line}: decides by {found!r}; a job is asked instead (contract.job)"


def _texts(node: ast.expr | None) -> set[str]:
    """Return the texts that an expression is, or lists: "a", ("a", "b")."""
    listed = [node]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        listed += node.elts
    return {
        each.value
        for each in listed
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def imported_jobs(module: Module) -> Iterator[str]:
    """The jobs are found by their names in contract.registry, and by nothing else outside of their room."""
    if module.room == "jobs" or module.name == "contract.registry":
        return
    room = f"{PACKAGE}.jobs"
    lines = [
        line
        for line, name in imports(module)
        if name == room or name.startswith(f"{room}.")
    ]
    lines += [
        node.lineno
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(rf"{re.escape(room)}[.:]", node.value)
    ]
    for line in sorted(set(lines)):
        yield f"{module.name}:{line}: only contract.registry names what is in {room}"


def blocks_of_one_job(module: Module) -> Iterator[str]:
    """A block of one job is known where that job is at work, and nowhere else."""
    for line, name in imports(module):
        if name == f"{PACKAGE}.config.blocks":
            yield f"{module.name}:{line}: import the names of a block from its module"
        block = name.removeprefix(f"{PACKAGE}.")
        places = BLOCKS.get(block, set())
        if places and not module.within(places):
            yield f"{module.name}:{line}: {block} is imported only by {', '.join(sorted(places))}"


def read_by_hand(module: Module) -> Iterator[str]:
    """JSON of files and requests is read by json_text, which has an error for each damaged text."""
    if module.within(READS_JSON):
        return
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        # Only such names are written out, which is slow
        name = getattr(node.func, "attr", "")
        if name in ("loads", "load") and ast.unparse(node.func) == f"json.{name}":
            yield f"{module.name}:{node.lineno}: json_text reads JSON, and has an error for a damaged text"


def passed_sentences(module: Module) -> Iterator[str]:
    """Errors take their texts from rlplace.codes; no function of a module's own makes them of sentences."""
    for node in module.nodes:
        if not isinstance(node, ast.FunctionDef):
            continue
        given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        sentences = {"what", "why"} <= given
        if node.name.startswith("_wrong") or sentences:
            yield f"{module.name}:{node.lineno}: {node.name} passes sentences on; codes.problem takes a code and facts"


def missing_purpose(module: Module) -> Iterator[str]:
    if module.tree.body and not ast.get_docstring(module.tree):
        yield f"{module.name}: does not open with a sentence of purpose"


def empty_names(module: Module) -> Iterator[str]:
    named = [(0, module.name.rpartition(".")[2])]
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named += [
        (node.lineno, node.name)
        for node in module.nodes
        if isinstance(node, definitions)
    ]
    for line, name in named:
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
        if words & EMPTY_NAMES:
            yield f"{module.name}:{line}: {name} says nothing"


def work_at_import(module: Module) -> Iterator[str]:
    """Statements that do or hold something when imported: calls, loops, variables, empty containers, `global`."""
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield f"{module.name}:{node.lineno}: global {', '.join(node.names)}"
    for node in module.tree.body:
        if isinstance(
            node,
            ast.Import
            | ast.ImportFrom
            | ast.ClassDef
            | ast.FunctionDef
            | ast.AsyncFunctionDef,
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and not _is_state(node):
            continue
        # A module that is also a function: rlplace.train(...)
        if module.name in CALLED and ast.unparse(node).startswith(MADE_CALLABLE):
            continue
        yield f"{module.name}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"


def _is_state(node: ast.Assign | ast.AnnAssign) -> bool:
    """Constants and type names are capitalised; a container that begins empty is there to be filled."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    named = [
        name
        for target in targets
        for name in ast.walk(target)
        if not isinstance(name, ast.expr_context)
    ]
    constant = all(
        isinstance(n, ast.Tuple)
        or (isinstance(n, ast.Name) and re.match(r"_*[A-Z]|__\w+__$", n.id))
        for n in named
    )
    empty = node.value is not None and ast.unparse(node.value) in (
        "[]",
        "{}",
        "set()",
        "list()",
        "dict()",
    )
    return not constant or empty


RULES = (
    wrong_floors,
    wrong_floors_within,
    wrong_doors,
    private_of_ray,
    compared_jobs,
    imported_jobs,
    blocks_of_one_job,
    read_by_hand,
    passed_sentences,
    missing_purpose,
    empty_names,
    work_at_import,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert [violation for module in modules() for violation in rule(module)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (wrong_floors, "placement.spec", "from rlplace.workers.worker import Worker"),
        (wrong_floors, "placement.spec", "def f():\n    import rlplace.execution.loop"),
        (wrong_floors, "placement.spec", "from rlplace import algo"),
        (wrong_floors, "envs.adapter", "from rlplace.workers import worker"),
        (
            wrong_floors,
            "comm.codec",
            "import importlib\nimportlib.import_module('rlplace.execution.loop')",
        ),
        (wrong_floors, "cellar", "x = 1"),
        (wrong_floors_within, "comm.codec", "from rlplace.comm.weights import shards"),
        (wrong_doors, "execution.loop", "def f():\n    import ray.util"),
        (wrong_doors, "workers.launch.group", "from ray import get"),
        (wrong_doors, "placement.spec", "import numpy"),
        (wrong_doors, "workers.roles.env", "import pandas"),
        (
            wrong_doors,
            "train",
            "if TYPE_CHECKING:\n    from omegaconf import DictConfig",
        ),
        (compared_jobs, "runtime.run", "x = config.job == 'simulator'"),
        (compared_jobs, "runtime.run", "x = 'language_model' != config.job"),
        (compared_jobs, "config.read", "x = kind in ('causal_lm', 'vllm')"),
        (compared_jobs, "envs.registry", "x = model.kind == 'mlp'"),
        (compared_jobs, "cli.train", "match x:\n    case 'simulator':\n        pass"),
        (compared_jobs, "cli.train", "match x:\n    case 'a' | 'mlp':\n        pass"),
        (compared_jobs, "cli.train", "x = {'simulator': play}"),
        (compared_jobs, "cli.train", "x = PLAYED['simulator']"),
        (compared_jobs, "cli.train", "x = field.metadata.get('mlp', None)"),
        (compared_jobs, "models.policy", "x = config.job == 'language_model'"),
        (
            imported_jobs,
            "cli.train",
            "from rlplace.jobs.simulator.job import SimulatorJob",
        ),
        (imported_jobs, "runtime.run", "def f():\n    from rlplace import jobs"),
        (imported_jobs, "runtime.run", "x = find('rlplace.jobs.simulator.job:Job')"),
        (
            blocks_of_one_job,
            "config.read",
            "from rlplace.config.blocks.language_model import RewardConfig",
        ),
        (
            blocks_of_one_job,
            "jobs.simulator.plan",
            "from rlplace.config.blocks.language_model import TextEnvConfig",
        ),
        (
            blocks_of_one_job,
            "config.open_job",
            "from rlplace.config.blocks import simulator",
        ),
        (read_by_hand, "models.vision", "x = json.loads(file.read_text())"),
        (passed_sentences, "jobs.notes", "def _wrong(code, got): ..."),
        (passed_sentences, "cli.plan", "def refuse(key, what, *, why=None): ..."),
        (missing_purpose, "execution.loop", "x = 1"),
        (empty_names, "comm.utils", ""),
        (empty_names, "comm.codec", "class BufferManager: ..."),
        (empty_names, "comm.codec", "def put_helper(): ..."),
        (work_at_import, "execution.loop", "current = None"),
        (work_at_import, "execution.loop", "REGISTRY = {}"),
        (work_at_import, "execution.loop", "print('hello')"),
        (work_at_import, "execution.loop", "def f():\n    global STATE\n    STATE = 1"),
        (work_at_import, "doctor", "sys.modules[__name__].__class__ = Doctor"),
    ],
)
def test_the_rule_can_fail(
    rule: Callable[[Module], Iterator[str]], name: str, source: str
) -> None:
    assert len(list(rule(Module(name, source)))) == 1


def test_what_the_rules_allow() -> None:
    source = '"""Sends."""\nfrom rlplace.errors import ChannelError\nimport numpy\nLIMIT: int = 3\nA, B = 1, 2\n'
    assert [
        violation for rule in RULES for violation in rule(Module("comm.codec", source))
    ] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config.which_job", "x = tag == 'causal_lm'"),
        ("contract.registry", "x = {'simulator': 'rlplace.jobs.simulator.job:Job'}"),
        ("jobs.notes", "x = config.job == 'simulator'"),
        ("models.checkpoint", "x = {'mlp': 'block_sparse_moe'}"),
        ("config.blocks.training", "x = lm_knob('words', 1, only='language_model')"),
        ("config.fields", "Job = Literal['simulator', 'language_model']"),
        ("runtime.run", "x = job_of(config).name == config.job"),
    ],
)
def test_where_the_name_of_a_job_may_stand(name: str, source: str) -> None:
    module = Module(name, source)
    assert [*compared_jobs(module), *imported_jobs(module)] == []


def test_every_place_that_the_guide_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", text)
    assert len(places) > 25
    assert [
        f"{file}:{name}"
        for file, name in places
        if not _defines(ROOT / PACKAGE / file, name.split("."))
    ] == []


def _defines(file: Path, names: list[str]) -> bool:
    body = parsed(file.read_text(encoding="utf-8")).body if file.is_file() else []
    for name in names:
        inside = [getattr(node, "body", []) for node in body if name in _names(node)]
        if not inside:
            return False
        (body,) = inside
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [getattr(node, "target", None)]
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_every_sub_package_of_a_listed_room_has_a_floor() -> None:
    packages = {
        (m.room, child_of(m.name))
        for m in modules()
        if m.name.count(".") > 1 and m.room in FLOORS_WITHIN
    }
    assert (
        packages
        - {
            (room, child)
            for room, floors in FLOORS_WITHIN.items()
            for f in floors
            for child in f
        }
        == set()
    )


def test_every_room_and_door_exists() -> None:
    """A name in the tables above that no longer exists would guard nothing."""
    there = {module.name for module in modules()}
    rooms = {room for floor in FLOORS for room in floor}
    rooms |= {
        f"{room}.{child}"
        for room, floors in FLOORS_WITHIN.items()
        for floor in floors
        for child in floor
    }
    places = {
        place
        for table in (DOORS, WITHOUT)
        for places in table.values()
        for place in places
    }
    for block, within in BLOCKS.items():
        places |= {block, *within}
    places |= DECIDED_BY | NETWORKS | READS_JSON
    assert (rooms | places) - there == set()


def test_the_page_lists_each_room_once() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    # Behind a semicolon: modules beside the room
    rows = re.findall(r"^\| \d+ \| ([^;|]+)", page, re.MULTILINE)
    named = [room for row in rows for room in re.findall(r"`([a-z_.]+)`", row)]
    twice = {room for room in named if named.count(room) > 1}
    assert len(named) > 20
    assert twice == set()


def test_importing_a_light_module_pulls_in_nothing_heavy() -> None:
    light = {
        library: [
            f"{PACKAGE}.{module.name}" for module in modules() if module.within(places)
        ]
        for library, places in WITHOUT.items()
    }
    assert importing(light) == ""


def test_what_a_light_module_pulls_in_is_noticed() -> None:
    light = ["json", "rlplace.trajectory", "hashlib"]
    noticed = "rlplace.trajectory imports numpy\n"
    assert importing({"numpy": light}) == noticed
    # Of several libraries, in what all of their modules are, and in what one has of its own
    assert noticed in importing({"numpy": light, "torch": light})
    assert importing({"torch": ["json"], "numpy": light}) == noticed


def importing(light: Mapping[str, Sequence[str]]) -> str:
    """What fresh interpreters say that import modules in turn: nothing while the libraries stay away.

    `light`: library -> modules that may not pull it in. Modules that are light for most libraries are imported once for
    all of these, by an interpreter that is then forked for each of them.
    """
    script = f"""
import importlib, os, sys

def check(names, libraries):
    for name in names:
        importlib.import_module(name)
        for library in libraries:
            if library in sys.modules:
                sys.exit(f"{{name}} imports {{library}}")

def in_fork(names, libraries):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        check(names, libraries)
        sys.exit()

light = {light!r}
longest = max(light.values(), key=len)
together = [library for library in light if len(light[library]) > len(longest) / 2]
for library in light:
    if library not in together:
        in_fork(light[library], [library])
shared = [name for name in longest if all(name in light[each] for each in together)]
check(shared, together)
for library in together:
    in_fork([name for name in light[library] if name not in shared], [library])
"""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    ).stderr


def test_the_walk_of_one_sample_opens_fifteen_files_at_most() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.partition("## One sample")[2].partition("\n## ")[0]
    steps = [line for line in walk.splitlines() if line.startswith("|")]
    files = re.findall(r"`([\w/]+\.py):", "\n".join(steps))
    assert 10 <= len(files) == len(set(files)) <= 15
