"""Environments of the library verifiers: how they are loaded, how one of its episodes runs, and a harness that chats.

The library runs in one event loop of the process, which all episodes share. Only this module imports the library.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from rlplace.json_text import parsed

if TYPE_CHECKING:
    import httpx

# The library finds a harness by the name of a module, which has no dots
_HARNESS = "rlplace_chat"
# The library reads the key of an endpoint from a variable. It keeps variables of such a name from other processes
_KEY_VARIABLE = "RLPLACE_ENDPOINT_API_KEY"
# Harness of the library for tasks without one of their own: it gives the policy a shell of this machine
_SHELL = "bash"
# Tries of a request whose connection breaks off
_TRIES = 4
# Seconds in which servers of tools have to end at the end of the process
_CLOSE_S = 10.0


class Environment:
    """An environment of the library, with the selected tasks of its taskset.

    `described`: id of a taskset; or a mapping with the keys of the library's block `env`. `select`: which tasks are
    used, with the keys of the library's block `select`. `key`: key of the endpoint that answers for the policy. Raises
    ValueError for an environment that cannot be loaded, for tasks without an end, and if no task is selected.
    """

    def __init__(
        self,
        described: str | Mapping[str, Any],
        select: Mapping[str, Any] | None,
        key: str,
    ) -> None:
        import verifiers.v1 as vf

        os.environ[_KEY_VARIABLE] = key
        self._environment = _environment(described)
        taskset = self._environment.taskset.select(vf.SelectConfig(**(select or {})))
        if not taskset.bounded:
            raise ValueError("the taskset has no end: set select: {limit: <tasks>}")
        self.tasks: Sequence[Any] = [*taskset]
        if not self.tasks:
            raise ValueError("no task is selected")
        self._loop = _loop()
        # What all episodes share runs until the process ends
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None
        atexit.register(self._close)

    def run(
        self, number: int, base_url: str, begun: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """Run an episode of the task `number`, and return its facts: `score`, `parts` and `measures`.

        `base_url`: of the endpoint. `begun`: is called with the id of each trace before its first request; requests of
        the trace have it as the header X-Session-ID. `score`: mean reward of the agents that are trained. `parts`: name
        of a reward function -> its value without weight. `measures`: name -> value, of the metrics. Raises RuntimeError
        for an episode that has failed.
        """
        work = self._run(self.tasks[number], base_url, begun)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(
        self, task: Any, base_url: str, begun: Callable[[str], None]
    ) -> Mapping[str, Any]:
        import verifiers.v1 as vf

        await self._served()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE)
        episode = await self._environment.run_episode(
            task,
            vf.ModelContext(model="policy", client=client),
            on_trace=lambda trace: begun(trace.id),
        )
        if not episode.ok:
            errors = [*episode.errors]
            for trace in episode.traces:
                errors += trace.errors
            told = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RuntimeError(f"the episode has failed: {told}")
        return _facts([trace for trace in episode.traces if trace.agent.trainable])

    async def _served(self) -> None:
        """Start what all episodes share: the library's proxy, and the servers of tools of the taskset.

        Raises what the library raises if they do not start.
        """
        if self._serving is None or self._ready is None:
            self._ready = asyncio.Event()
            self._serving = asyncio.create_task(self._serve(self._ready))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._serving], return_when="FIRST_COMPLETED")
        ready.cancel()
        if self._serving.done():
            self._serving.result()

    def _close(self) -> None:
        """End what all episodes share, at the end of the process. What does not end in time ends with the process."""
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        concurrent.futures.wait([ending], timeout=_CLOSE_S)

    async def _end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    async def _serve(self, ready: asyncio.Event) -> None:
        async with self._environment.serving():
            ready.set()
            await asyncio.Event().wait()


def _environment(described: str | Mapping[str, Any]) -> Any:
    """Return the environment of the library that a config describes. Raises ValueError."""
    import verifiers.v1 as vf

    block: dict[str, Any] = {"taskset": {"id": described}}
    if isinstance(described, Mapping):
        block = dict(described)
    try:
        config = vf.resolve_env_config(block)
        own = vf.default_harness_id(config.taskset.id)
        changed: dict[str, Any] = {}
        for name, agent in config:
            chats = isinstance(agent, vf.AgentConfig) and agent.harness is None
            if chats and own == _SHELL:
                changed[name] = _chatting(agent)
        return vf.load_environment(config.model_copy(update=changed))
    except (ImportError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _chatting(agent: Any) -> Any:
    """Return the config of an agent with the harness of this module, on this machine unless the config says where."""
    import verifiers.v1 as vf

    if _HARNESS not in sys.modules:
        module = types.ModuleType(_HARNESS, "The harness of rlplace.")
        module.__dict__["Chat"] = types.new_class(
            "Chat", (Chat, vf.Harness[vf.HarnessConfig])
        )
        module.__dict__["__all__"] = ["Chat"]
        sys.modules[_HARNESS] = module
    changed: dict[str, Any] = {"harness": vf.HarnessConfig(id=_HARNESS)}
    if "runtime" not in agent.model_fields_set:
        changed["runtime"] = vf.SubprocessConfig()
    return agent.model_copy(update=changed)


def _facts(traces: Sequence[Any]) -> Mapping[str, Any]:
    """Return the score, its parts and other measures of an episode: means over the traces of the trained agents.

    Raises RuntimeError if none is trained, and if a reward is missing: the score would lack it.
    """
    if not traces:
        raise RuntimeError("no agent of the episode is trained: it has no score")
    score = [trace.reward for trace in traces]
    parts: dict[str, list[float]] = {}
    measures: dict[str, list[float]] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            # The library leaves it out of the sum
            if reward is None:
                raise RuntimeError(f"the reward {name} was not computed")
            parts.setdefault(name, []).append(reward.score)
        for name, measure in trace.metrics.items():
            if measure is not None:
                measures.setdefault(name, []).append(float(measure))
    return {
        "score": sum(score) / len(score),
        "parts": {name: sum(all_) / len(all_) for name, all_ in parts.items()},
        "measures": {name: sum(all_) / len(all_) for name, all_ in measures.items()},
    }


# ── the event loop ────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the library in this process, which runs in a thread of its own.

    The first call must be alone: it is made with the first environment.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


@functools.cache
def _http() -> httpx.AsyncClient:
    """Return the client for all chats. Used in the event loop alone. An answer may take as long as it does."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


# ── the harness ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Chat:
    """A harness that chats within this process: it asks the policy, calls the tools of the task, and asks again.

    The end of an episode is no error: what was said until then is scored. The class lacks its base, the library's
    Harness, since importing this module does not import the library.
    """

    config: Any
    resolve_prompt: Callable[[Any], tuple[Any, Any]]

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """Chat until an answer calls no tool. See the library for the arguments. Raises RuntimeError."""
        import verifiers.v1 as vf

        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [_as_json(message) for message in prompt]
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        async with AsyncExitStack() as stack:
            tools = _Tools(stack, self.config)
            if mcp_urls:
                body["tools"] = await tools.connect(mcp_urls)
            while True:
                answer = await _asked(f"{endpoint}/chat/completions", secret, body)
                # The episode is over, or the environment has stopped it
                if answer.status_code == HTTPStatus.GONE or trace.stop_condition:
                    break
                if answer.is_error:
                    raise RuntimeError(f"{answer.status_code}: {answer.text}")
                message = parsed(answer.content)["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    messages.append(await tools.result(call))
                if not message.get("tool_calls"):
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _asked(url: str, secret: str, body: Mapping[str, Any]) -> httpx.Response:
    """Return the answer to a request. If the connection breaks off, the library's proxy is asked for the same answer.

    Raises httpx.TransportError if it breaks off `_TRIES` times.
    """
    import httpx

    headers = {"Authorization": f"Bearer {secret}"}
    for tried in range(1, _TRIES):
        try:
            return await _http().post(url, json=body, headers=headers)
        except httpx.TransportError:
            # By this header, the proxy knows that the request is not a new one
            headers["x-stainless-retry-count"] = f"{tried}"
    return await _http().post(url, json=body, headers=headers)


def _as_json(message: Any) -> Any:
    """Return a message of the library in the form of the OpenAI API."""
    from verifiers.v1.dialects.chat import message_to_wire

    return message_to_wire(message)


class _Tools:
    """The tools of one chat, on servers of the Model Context Protocol. `stack`: closes the connections."""

    def __init__(self, stack: AsyncExitStack, config: Any) -> None:
        self._stack = stack
        self._config = config
        self._places: dict[str, tuple[str, str]] = {}
        self._servers: dict[str, Any] = {}

    async def connect(self, urls: Mapping[str, str]) -> Sequence[Any]:
        """Connect to the servers, and return the definitions of their tools. `urls`: by the name of the server."""
        from verifiers.v1.harnesses.utils.mcp import connect_mcp

        timeout = self._config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in urls.items()}
        tools, self._places, self._servers = await connect_mcp(
            {"mcpServers": servers}, self._stack
        )
        hidden = self._config.disabled_tools or ()
        return [tool for tool in tools if tool["function"]["name"] not in hidden]

    async def result(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a tool, and return the message with its result. A wrong call has its error as the result."""
        from verifiers.v1.harnesses.utils.mcp import call_mcp

        name = call["function"]["name"]
        try:
            if name not in self._places:
                raise ValueError(f"there is no tool {name}")
            arguments = parsed(call["function"]["arguments"])
            content = await call_mcp(self._servers, self._places, name, arguments)
        except Exception as error:  # noqa: BLE001  # whatever a tool raises, the policy reads
            content = f"error: {error}"
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": name,
            "content": content,
        }
