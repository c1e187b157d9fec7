"""Evaluate a checkpoint's language model on held-out prompts, with env and rollout in two threads of one process."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.envs.text import Message
from rlplace.errors import ChannelBroken
from rlplace.placement.language.slots import Slot
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, WEIGHTS, TextArguments
from rlplace.workers.roles.rollout import TextRolloutWorker
from rlplace.workers.roles.text_env import TextEnvWorker
from rlplace.workers.worker import Rendezvous, WorkerContext

_CACHE_BYTES = 1 << 30  # bytes of the KV cache if the config leaves it to the plan
_CAPACITY = 1024  # items of a channel


def answers(
    config: LanguageModelJobConfig,
    weights: Path,
    *,
    prompts: int | None,
    greedy: bool,
    seed: int,
) -> list[dict[str, Any]]:
    """Return one transcript (a dict of JSON values) for each held-out prompt, in order. No prompt comes twice.

    `prompts`: the largest number of prompts; None: all of a data set. `weights`: the actor's folder in a checkpoint.
    `greedy`: answer with the most probable tokens instead of sampled tokens. `seed`: seed of the sampled answers. The
    model runs on a GPU if there is one. Raises ConfigError, and all errors of env and rollout workers.
    """
    rollout = config.rollout
    cache = rollout.kv_cache_memory or _CACHE_BYTES
    job = dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, eval_every=1, eval_prompts=prompts),
        rollout=dataclasses.replace(
            rollout, engine="transformers", kv_cache_memory=cache, seed=seed
        ),
    )
    arguments = TextArguments(config=job, ranks={"actor": 1, "env": 1, "rollout": 1})
    timeout_s = config.runner.channel_timeout_s
    channels = {
        name: LocalChannel(
            ChannelSpec(name=name, capacity_items=_CAPACITY, timeout_s=timeout_s)
        )
        for name in (REQUESTS, COMPLETIONS, WEIGHTS)
    }
    with ExitStack() as opened:
        env = TextEnvWorker(arguments, _context("env", channels))
        opened.callback(env.close)
        env.setup()
        env.move(Residency.FULL)
        engine = TextRolloutWorker(arguments, _context("rollout", channels))
        opened.callback(engine.close)
        engine.setup()
        engine.move(Residency.WEIGHTS)
        engine.engine.load(_weights(config, weights), version=0)
        engine.move(Residency.FULL)
        samples = _both(env, engine, channels, greedy=greedy)
    return [
        _transcript(sample)
        for sample in sorted(samples, key=lambda sample: sample.group)
    ]


def _context(component: str, channels: dict[str, LocalChannel]) -> WorkerContext:
    import torch

    from rlplace.workers.launch.devices import CudaDevice, Device

    slot = Slot(
        component=component,
        rank=0,
        node=0,
        local_rank=0,
        accelerators=(0,),
        local_accelerators=(0,),
    )
    return WorkerContext(
        slot=slot,
        world_size=1,
        device=CudaDevice(0, slot)
        if component == "rollout" and torch.cuda.is_available()
        else Device(),
        rendezvous=Rendezvous(host="", port=0),
        channels={
            name: channel.named(slot.owner) for name, channel in channels.items()
        },
    )


def _weights(config: LanguageModelJobConfig, folder: Path) -> dict[str, Any]:
    from rlplace.models.causal_lm import LmSpec
    from rlplace.models.saved_lm import lm_weights
    from rlplace.models.vision import policy_of

    job = Path(config.model_path)
    spec = LmSpec.of(
        config.actor, "actor", config.runner.seed, job_folder=job, own_folder=None
    )
    return lm_weights(folder, spec, policy_of(config, job))


def _both(
    env: TextEnvWorker,
    rollout: TextRolloutWorker,
    channels: dict[str, LocalChannel],
    *,
    greedy: bool,
) -> list[Sample]:
    """Run `env` in this thread and `rollout` in a second thread, and return the answered samples.

    The workers exchange messages through `channels`. If one worker fails, the channels break, so that the other worker
    ends.

    `greedy`: answer with the most probable tokens instead of sampled tokens.
    """

    def generate() -> None:
        try:
            rollout.generate(0)
        except BaseException:
            end()
            raise

    def end() -> None:
        for channel in channels.values():
            channel.break_("the evaluation failed")

    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(generate)
        try:
            samples, _ = env.answered(0, greedy=greedy)
            generating.result()
        except ChannelBroken:
            # Raises the rollout error that broke the channel, if there is one.
            generating.result()
            raise
        except BaseException:
            end()
            raise
    return samples


def _shown(message: Message) -> dict[str, Any]:
    """Return the fields of a message. Those of tools are left out if they are empty."""
    fields = dataclasses.asdict(message)
    kept = ("role", "content")
    return {name: value for name, value in fields.items() if name in kept or value}


def _transcript(sample: Sample) -> dict[str, Any]:
    said = sample.transcript
    prompt = (
        said.prompt
        if isinstance(said.prompt, str)
        else [_shown(message) for message in said.prompt]
    )
    return {
        "prompt": prompt,
        "answers": said.answers,
        "replies": said.replies,
        "reward": None if math.isnan(sample.reward) else sample.reward,
        "rewards": dict(sample.rewards),
        "tokens": said.tokens,
        "truncated": said.truncated,
    }
