"""AReaL: its YAML -> ours. One word there says who has how many accelerators and how each model is cut.

::

    allocation_mode: sglang:d4t2+fsdp:d8                engines on 4 x 2, then the actor on 8 others
    allocation_mode: sglang[rollout]:d8|fsdp[actor]:d8  the same 8 in turn
    rollout.backend: sglang:d4     actor.backend: fsdp:d4           the newer form, one word each

Letters are sizes: d data, t tensor, p pipeline, c context; e (experts) lies within the others. A critic or reference
with `scheduling_strategy: {type: colocation, target: actor}` is where the actor is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rlplace.imports.draft import Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.imported import Imported, finish
from rlplace.imports.pool import place
from rlplace.imports.rules import Already, Into, No, Rulebook, To, Words
from rlplace.imports.seating import Seating
from rlplace.imports.settings import Setting
from rlplace.placement.machines.ranges import Ranges

_PLACE = "cluster.component_placement"
_MODE = "allocation_mode"
_MODEL = No("has no key yet")
_LEARN = No("how a language model learns is no part of a plan yet")
_NAMED = No("memory is counted once model has the keys of its config.json")
_ENGINE = No("options of a generation engine have no keys yet")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_RUN = No("has no key in a job with language models")
_ENGINES = ("sglang", "vllm")
_PART = re.compile(r"(?:([a-z]+)(?:\[(\w+)\])?:)?\(?(?:attn:)?((?:[dptce][0-9]+)+)(?:\|ffn:[^)]*)?\)?")

RULES = Rulebook(
    {
        "cluster.n_nodes": Into("cluster.num_nodes"),
        "cluster.n_gpus_per_node": Into("cluster.accelerators_per_node"),
        "cluster.fileroot": _LEARN,
        _MODE: Into(_PLACE),
        "actor.backend": Into(f"{_PLACE}.actor"),
        "rollout.backend": Into(f"{_PLACE}.rollout"),
        "critic.backend": Into(f"{_PLACE}.critic"),
        "ref.backend": Into(f"{_PLACE}.reference"),
        "enable_offload": To(("actor.enable_offload", "rollout.enable_offload"), False),
        "seed": _LEARN,
        "actor.dtype": Words("actor.compute", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, "bfloat16"),
        "actor.eps_clip": _LEARN,
        "actor.discount": _LEARN,
        "actor.gae_lambda": _LEARN,
        "critic.eps_clip": _LEARN,
        "actor.ppo_n_minibatches": Into("algorithm.train_batch"),
        "train_dataset.batch_size": To("algorithm.prompts"),
        "gconfig.n_samples": To("algorithm.samples_per_prompt", 1),
        "train_dataset.max_length": Into("algorithm.sequence_length"),
        "gconfig.max_new_tokens": Into("algorithm.sequence_length"),
        "actor.gradient_checkpointing": To("actor.checkpointing", False),
        "critic.gradient_checkpointing": To("critic.checkpointing", False),
        "actor.path": _NAMED,
        "critic.path": _NAMED,
        "ref.path": _NAMED,
        "actor.optimizer.lr": To("actor.optimizer.lr"),
        "actor.optimizer.beta1": To("actor.optimizer.beta1"),
        "actor.optimizer.beta2": To("actor.optimizer.beta2"),
        "actor.optimizer.eps": To("actor.optimizer.eps"),
        "actor.optimizer.weight_decay": To("actor.optimizer.weight_decay"),
        "actor.optimizer.gradient_clipping": To("actor.optimizer.max_grad_norm"),
        "actor.optimizer.type": Already("the actor learns with Adam", "adam", "the actor learns with Adam only"),
        "actor.optimizer.lr_scheduler_type": _LEARN,
        "actor.weight_update_mode": Already("the way of the weights is worked out from the placement"),
        "critic.scheduling_strategy.type": Into(f"{_PLACE}.critic"),
        "critic.scheduling_strategy.target": Into(f"{_PLACE}.critic"),
        "ref.scheduling_strategy.type": Into(f"{_PLACE}.reference"),
        "ref.scheduling_strategy.target": Into(f"{_PLACE}.reference"),
        "rollout.max_head_offpolicyness": Already(
            "every sample is made by the newest weights", 0, "samples are never older than the newest weights here"
        ),
        "sglang.mem_fraction_static": To("rollout.gpu_memory_utilization"),
        "vllm.gpu_memory_utilization": To("rollout.gpu_memory_utilization"),
    },
    {
        "actor.optimizer.": _LEARN,
        "actor.": _MODEL,
        "critic": No("has no key in the critic block"),
        "ref": No("has no key in the reference block"),
        "rollout.": No("stages follow one another here; how far sampling runs ahead has no key"),
        "sglang.": _ENGINE,
        "vllm.": _ENGINE,
        "gconfig.": _ENGINE,
        "train_dataset.": _DATA,
        "valid_dataset.": _DATA,
        "tokenizer_path": _DATA,
        "cluster.": _RUN,
        "scheduler.": No("cluster.ray and cluster.launcher say how workers start"),
        "launcher.": No("cluster.ray and cluster.launcher say how workers start"),
        "saver.": No("checkpoints have no keys yet"),
        "recover.": No("checkpoints have no keys yet"),
        "checkpointer.": No("checkpoints have no keys yet"),
        "evaluator.": No("evaluation has no keys yet"),
        "stats_logger.": _RUN,
        "perf_tracer.": _RUN,
        "experiment_name": _RUN,
        "trial_name": _RUN,
        "total_train_": _RUN,
        "async_training": No("stages follow one another here"),
    },
)


def import_areal(settings: Sequence[Setting], per_node: int = 0) -> Imported:
    """The settings of a file. `per_node` 0: cluster.n_gpus_per_node."""
    draft = Draft("AReaL", settings, RULES)
    width = per_node or draft.count("cluster.n_gpus_per_node", 8, 1)
    seating = Seating(width)
    spots: dict[str, Ranges] = {}
    copies: dict[str, int] = {}
    if draft.has(_MODE):
        for shared in _split(str(draft.value(_MODE)), "+"):
            _seat(draft, _MODE, _split(shared, "|"), seating, spots, copies)
    else:
        for component, key in (("rollout", "rollout"), ("actor", "actor")):
            if draft.has(f"{key}.backend"):
                _seat(draft, f"{key}.backend", [f"{draft.value(f'{key}.backend')}"], seating, spots, copies, component)
    _place_partners(draft, seating, spots)
    topology = place(draft, spots, copies, width, draft.count("cluster.n_nodes", 1, 1))
    _check_size(draft, topology.num_accelerators, width)
    set_algorithm(draft, "actor.adv_estimator", "gae" if "critic" in draft.placed else "grpo")
    _set_iteration(draft)
    draft.apply_rules()
    return finish(draft, topology, dict.fromkeys(spots, draft.has("enable_offload")))


def _set_iteration(draft: Draft) -> None:
    prompts, samples, steps = "train_dataset.batch_size", "gconfig.n_samples", "actor.ppo_n_minibatches"
    if prompts in draft.given:
        total = draft.count(prompts, 1, 1) * draft.count(samples, 1, 1)
        draft.derive("algorithm.train_batch", -(-total // draft.count(steps, 4, 1)), steps)
    lengths = ("train_dataset.max_length", "gconfig.max_new_tokens")
    if all(key in draft.given for key in lengths):
        draft.derive("algorithm.sequence_length", sum(draft.count(key, 0) for key in lengths), *lengths)


def _split(text: str, sign: str) -> list[str]:
    """At `sign`, but not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _seat(
    draft: Draft,
    key: str,
    parts: Sequence[str],
    seating: Seating,
    spots: dict[str, Ranges],
    copies: dict[str, int],
    component: str | None = None,
) -> None:
    """The models of `parts` on the same next accelerators."""
    where: Ranges | None = None
    for text in parts:
        match = _PART.fullmatch(text)
        if match is None:
            why = "it is BACKEND:SIZES, sizes being letters d, t, p, c, e with a number each"
            draft.refuse(key, f"cannot read {text!r}", why, "sglang:d4t1+fsdp:d4")
            return
        sizes = {letter: int(number) for letter, number in re.findall(r"([dptce])([0-9]+)", match[3])}
        count = math.prod(size for letter, size in sizes.items() if letter != "e")
        copy = sizes.get("t", 1)
        if where is None or len(where) < count:
            where = seating.take(count, copy) if where is None else where
        name = component or _component(match[1], match[2], spots)
        spots[name] = (
            where if len(where) == count else where.within(range(where.pieces[0].start, where.pieces[0].start + count))
        )
        copies[name] = copy


def _component(backend: str | None, name: str | None, spots: dict[str, Ranges]) -> str:
    """By the name in brackets, else by what the backend is for; a second trainer without a name is the actor."""
    if name:
        return {"ref": "reference", "gen": "rollout"}.get(name, name)
    return "rollout" if backend in _ENGINES or (backend is None and "actor" in spots) else "actor"


def _place_partners(draft: Draft, seating: Seating, spots: dict[str, Ranges]) -> None:
    """A critic or reference that is written down is where the actor is."""
    for component, key in (("critic", "critic"), ("reference", "ref")):
        written = any(s.key.startswith(f"{key}.") for s in draft.settings)
        if written and component not in spots and "actor" in spots:
            spots[component] = spots["actor"]
            if draft.value(f"{key}.scheduling_strategy.type") not in (None, "colocation"):
                spots[component] = seating.take(len(spots["actor"]))


def _check_size(draft: Draft, used: int, width: int) -> None:
    """The cluster that is written down against the one that the sizes need."""
    if "cluster.n_nodes" in draft.given and draft.count("cluster.n_nodes", 1, 1) * width < used:
        has = draft.count("cluster.n_nodes", 1, 1) * width
        draft.find(
            "import-counts",
            "cluster.n_nodes",
            f"the sizes need {used} accelerators, and there are {has}",
            got=str(draft.given["cluster.n_nodes"]),
            why="models that do not share need accelerators of their own",
            fix=f"cluster.n_nodes: {used // width}",
        )
