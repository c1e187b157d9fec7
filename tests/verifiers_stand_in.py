"""A stand-in of `verifiers.v1` 0.4, for machines without the library: the part of its interface that is used here.

Episodes run as there, with a proxy between the harness and the endpoint, but without servers of tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import importlib
import inspect
import json
import os
import sys
import threading
import types
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args

import pytest
from pydantic import BaseModel

DataT = TypeVar("DataT")
TaskT = TypeVar("TaskT")
ConfigT = TypeVar("ConfigT")


class TaskData(BaseModel):
    idx: int | None = None
    prompt: Any = None
    system_prompt: str | None = None


class TaskConfig(BaseModel):
    pass


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class HarnessConfig(BaseModel):
    id: str = "bash"
    tool_timeout: float = 600.0
    disabled_tools: list[str] | None = None


class PrimeConfig(BaseModel):
    type: str = "prime"


class SubprocessConfig(BaseModel):
    type: str = "subprocess"


class AgentConfig(BaseModel):
    harness: HarnessConfig | None = None
    runtime: SubprocessConfig | PrimeConfig = PrimeConfig()


class EnvConfig(BaseModel):
    model_config = {"extra": "forbid"}
    id: str = ""
    taskset: Any = None


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SelectConfig(BaseModel):
    model_config = {"extra": "forbid"}
    skip: int = 0
    limit: int | None = None


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


@dataclasses.dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclasses.dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


@dataclasses.dataclass
class Reward:
    score: float
    weight: float = 1.0


@dataclasses.dataclass
class AgentInfo:
    name: str = "agent"
    trainable: bool = True


@dataclasses.dataclass
class Error:
    type: str
    message: str


class Trace:
    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.agent = AgentInfo()
        self.rewards: dict[str, Reward | None] = {}
        self.metrics: dict[str, float | None] = {}
        self.errors: list[Error] = []
        self.stop_condition: str | None = None
        self.answers: list[str] = []
        self.ok = True

    @property
    def reward(self) -> float:
        found = [reward for reward in self.rewards.values() if reward is not None]
        return sum(reward.score * reward.weight for reward in found)

    @property
    def num_turns(self) -> int:
        return len(self.answers)

    @property
    def last_reply(self) -> str:
        return self.answers[-1].strip() if self.answers else ""


@dataclasses.dataclass
class Episode:
    traces: list[Trace] = dataclasses.field(default_factory=list)
    errors: list[Error] = dataclasses.field(default_factory=list)
    ok: bool = False


def reward(weight: float = 1.0) -> Callable[[Any], Any]:
    def marked(function: Any) -> Any:
        function.weight = weight
        return function

    return marked


def metric(function: Any) -> Any:
    function.measures = True
    return function


class Task(Generic[DataT]):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data = data
        self.config = config

    async def score(self, trace: Trace) -> None:
        for name, function in inspect.getmembers(self, inspect.ismethod):
            if hasattr(function, "weight"):
                trace.rewards[name] = Reward(await function(trace), function.weight)
            if hasattr(function, "measures"):
                trace.metrics[name] = await function(trace)


class Taskset(Generic[TaskT, ConfigT]):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self._select = SelectConfig()

    def load(self) -> Iterator[Any]:
        """Yield the tasks. A taskset has to say it."""
        raise NotImplementedError

    @property
    def bounded(self) -> bool:
        return not self.INFINITE or self._select.limit is not None

    def select(self, config: SelectConfig) -> Self:
        self._select = config
        return self

    def __iter__(self) -> Iterator[Any]:
        end = None
        if self._select.limit is not None:
            end = self._select.skip + self._select.limit
        for idx, task in enumerate(self.load()):
            if idx == end:
                return
            if idx >= self._select.skip:
                task.data = task.data.model_copy(update={"idx": idx})
                yield task


class Harness(Generic[ConfigT]):
    def __init__(self, config: Any) -> None:
        self.config = config

    def resolve_prompt(self, data: TaskData) -> tuple[str | None, Any]:
        return data.system_prompt, data.prompt


@dataclasses.dataclass
class Segment:
    last_reply: str = ""
    terminated: bool = False


class Interaction:
    """As the library's: each turn launches the harness again, with all that was said."""

    def __init__(self, run: Callable[[Any, Trace], Any], trace: Trace) -> None:
        self._run = run
        self.trace = trace
        self._said: list[Mapping[str, Any]] = []

    async def turn(self, message: str) -> Segment:
        self._said.append({"role": "user", "content": message})
        before = self.trace.num_turns
        self._said = await self._run(list(self._said), self.trace)
        if self.trace.num_turns == before:
            return Segment(terminated=True)
        return Segment(self.trace.last_reply)


class Agent:
    def __init__(
        self, config: AgentConfig, model: ModelContext, episode: Episode, begun: Any
    ) -> None:
        assert config.harness is not None
        module = importlib.import_module(config.harness.id)
        (name,) = module.__all__
        kind = getattr(module, name)
        assert issubclass(kind, Harness)
        self._harness = kind(config.harness)
        self._model = model
        self._episode = episode
        self._begun = begun

    def _trace(self) -> Trace:
        trace = Trace()
        self._episode.traces.append(trace)
        self._begun(trace)
        return trace

    async def run(self, task: Any) -> Trace:
        trace = self._trace()
        await self._launch(task.data, trace)
        await task.score(trace)
        return trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Interaction]:
        async def run(said: Any, trace: Trace) -> Any:
            return await self._launch(
                task.data.model_copy(update={"prompt": said}), trace
            )

        made = Interaction(run, self._trace())
        yield made
        await task.score(made.trace)

    async def _launch(self, data: Any, trace: Trace) -> Any:
        with proxied(self._model.client, trace) as (endpoint, secret):
            before = len(trace.answers)
            result = await self._harness.launch(
                self._model, trace, None, endpoint, secret, {}, data
            )
        assert result.exit_code == 0
        answers = [
            {"role": "assistant", "content": text} for text in trace.answers[before:]
        ]
        return [*(data.prompt if isinstance(data.prompt, list) else ()), *answers]


class Agents:
    def __init__(self, agents: Mapping[str, Agent]) -> None:
        self.__dict__.update(agents)


class Env(Generic[ConfigT]):
    def __init__(self, config: Any) -> None:
        self.config = config
        (kind,) = _exported(config.taskset.id, Taskset)
        self.taskset = kind(config.taskset)

    async def run(self, task: Any, agents: Any) -> None:
        """Run an episode of a task. An environment of several agents has to say it."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(
        self, task: Any, model: ModelContext, *, on_trace: Callable[[Trace], None]
    ) -> Episode:
        episode = Episode()
        agents = {
            name: Agent(value, model, episode, on_trace)
            for name, value in self.config
            if isinstance(value, AgentConfig)
        }
        try:
            await self.run(task, Agents(agents))
            episode.ok = True
        except Exception as error:  # noqa: BLE001  # as in the library
            episode.errors.append(Error(type(error).__name__, str(error)))
        return episode


class SingleAgentEnv(Env[SingleAgentEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


# ── the proxy ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Sends requests on, with the id of their trace, and keeps the answers."""

    traces: ClassVar[dict[str, tuple[EvalClientConfig, Trace]]] = {}

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        client, trace = self.traces[self.headers["Authorization"]]
        headers = {
            "Authorization": f"Bearer {os.environ[client.api_key_var]}",
            "X-Session-ID": trace.id,
        }
        url = f"{client.base_url}{self.path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers)
            ) as found:
                status = 200
                answer = found.read()
                message = json.loads(answer)["choices"][0]["message"]
                trace.answers.append(message["content"])
        except urllib.error.HTTPError as error:
            status = error.code
            answer = error.read()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@functools.cache
def _server() -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextlib.contextmanager
def proxied(client: EvalClientConfig, trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield (base URL, key) for the requests of a trace."""
    secret = uuid.uuid4().hex
    _Proxy.traces[f"Bearer {secret}"] = (client, trace)
    yield f"http://127.0.0.1:{_server().server_port}", secret
    del _Proxy.traces[f"Bearer {secret}"]


# ── plugins ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _exported(name: str, kind: type) -> list[Any]:
    module = importlib.import_module(name)
    found = [getattr(module, each) for each in module.__all__]
    return [each for each in found if issubclass(each, kind)]


def _of_class(kind: Any, base: type) -> Any:
    """Return the config class that a class is written for, as in `Taskset[Task, Config]`."""
    for each in kind.__orig_bases__:
        for argument in get_args(each):
            if isinstance(argument, type) and issubclass(argument, base):
                return argument
    return base


def resolve_env_config(data: Mapping[str, Any]) -> Any:
    name = data["taskset"]["id"]
    (taskset,) = _exported(name, Taskset)
    config = SingleAgentEnvConfig
    for kind in _exported(name, Env):
        config = _of_class(kind, EnvConfig)
    made = _of_class(taskset, TasksetConfig).model_validate(data["taskset"])
    return config.model_validate({**data, "taskset": made})


def load_environment(config: Any) -> Any:
    for kind in _exported(config.taskset.id, Env):
        return kind(config)
    return SingleAgentEnv(config)


def default_harness_id(taskset: str) -> str:
    return "bash"


def message_to_wire(message: Any) -> Any:
    return message


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import verifiers.v1` find this module."""
    package = types.ModuleType("verifiers")
    chat = types.ModuleType("verifiers.v1.dialects.chat")
    here = sys.modules[__name__]
    package.v1 = here  # type: ignore[attr-defined]
    chat.message_to_wire = message_to_wire  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", here)
    monkeypatch.setitem(sys.modules, "verifiers.v1.dialects", chat)
    monkeypatch.setitem(sys.modules, "verifiers.v1.dialects.chat", chat)
