"""slime: its flags -> ours. The trainer asks for nodes x accelerators; engines share them (`--colocate`) or come after.

The reference lives in the actor's processes there, and a critic (estimator ppo) has as many accelerators as the actor.
Flags of Megatron and SGLang are many; those that say nothing about who is where are told apart by how they begin.
"""

from __future__ import annotations

from rlplace.imports.draft import Draft
from rlplace.imports.estimators import set_algorithm
from rlplace.imports.flags import MANY, Flag, read_flags
from rlplace.imports.imported import Imported, finish
from rlplace.imports.pool import check_engine_size, place
from rlplace.imports.rules import Already, Into, No, Rule, Rulebook, To, Words
from rlplace.imports.seating import Seating, first_of
from rlplace.placement.machines.ranges import Ranges

_PLACE = "cluster.component_placement"
_MODEL = No("has no key yet")
_LEARN = No("how a language model learns is no part of a plan yet")
_NAMED = No("memory is counted once model has the keys of its config.json")
_ENGINE = No("options of a generation engine have no keys yet")
_DATA = No("prompts, answers and their tokenizing have no keys yet")
_SCORES = No("how scores become rewards has no key yet")
_KL = No("a penalty against a reference has no key yet")
_MICRO = No("micro-batches are counted in sequences, not in tokens")
_TRAINING = No("an option of Megatron; the actor trains with FSDP2")
_RUN = No("has no key in a job with language models")
_CHECKPOINT = No("checkpoints have no keys yet")

# flag -> (words that follow, rule)
_TABLE: dict[str, tuple[int, Rule]] = {
    "actor-num-nodes": (1, Into(f"{_PLACE}.actor")),
    "actor-num-gpus-per-node": (1, Into(f"{_PLACE}.actor")),
    "critic-num-nodes": (1, Into(f"{_PLACE}.critic")),
    "critic-num-gpus-per-node": (1, Into(f"{_PLACE}.critic")),
    "rollout-num-gpus": (1, Into(f"{_PLACE}.rollout")),
    "rollout-num-gpus-per-engine": (1, Into(f"{_PLACE}.rollout")),
    "num-gpus-per-node": (1, Into("cluster.accelerators_per_node")),
    "tensor-model-parallel-size": (1, Into(f"{_PLACE}.actor")),
    "colocate": (0, Into(_PLACE)),
    "offload": (0, Into("actor.enable_offload")),
    "offload-train": (0, To("actor.enable_offload")),
    "offload-rollout": (0, To("rollout.enable_offload")),
    "no-offload-train": (0, Into("actor.enable_offload")),
    "no-offload-rollout": (0, Into("rollout.enable_offload")),
    "sglang-mem-fraction-static": (1, To("rollout.gpu_memory_utilization")),
    "lr": (1, To("actor.optimizer.lr")),
    "adam-beta1": (1, To("actor.optimizer.beta1")),
    "adam-beta2": (1, To("actor.optimizer.beta2")),
    "adam-eps": (1, To("actor.optimizer.eps")),
    "weight-decay": (1, To("actor.optimizer.weight_decay")),
    "clip-grad": (1, To("actor.optimizer.max_grad_norm")),
    "lr-decay-style": (1, No("actor.optimizer.schedule falls to 0, over the whole run")),
    "optimizer": (1, Already("the actor learns with Adam", "adam", "the actor learns with Adam only")),
    "advantage-estimator": (1, Into("algorithm.name")),
    "eps-clip": (1, To("algorithm.clip_ratio_low")),
    "value-clip": (1, To("algorithm.value_clip")),
    "gamma": (1, To("algorithm.gamma")),
    "lambd": (1, To("algorithm.gae_lambda")),
    "entropy-coef": (1, To("algorithm.entropy_coef")),
    "normalize-advantages": (0, To("algorithm.normalize_advantages")),
    "seed": (1, To("runner.seed")),
    "rollout-batch-size": (1, To("algorithm.prompts")),
    "n-samples-per-prompt": (1, To("algorithm.samples_per_prompt", 1)),
    "global-batch-size": (1, To("algorithm.train_batch")),
    "num-steps-per-rollout": (1, Into("algorithm.train_batch")),
    "rollout-max-prompt-len": (1, Into("algorithm.sequence_length")),
    "rollout-max-response-len": (1, Into("algorithm.sequence_length")),
    "rollout-max-context-len": (1, To("algorithm.sequence_length")),
    "micro-batch-size": (1, To("actor.micro_batch")),
    "hf-checkpoint": (1, _NAMED),
    "bf16": (0, Words("actor.compute", {True: "bf16"})),
    "kl-coef": (1, _KL),
    "kl-loss-coef": (1, _KL),
    "kl-loss-type": (1, _KL),
    "use-kl-loss": (0, _KL),
    "use-dynamic-batch-size": (0, _MICRO),
    "apply-chat-template": (0, _DATA),
    "eval-prompt-data": (MANY, No("evaluation has no keys yet")),
    "save": (1, _CHECKPOINT),
    "load": (1, _CHECKPOINT),
}
_FLAGS = {key: Flag(words) for key, (words, _) in _TABLE.items()}
RULES = Rulebook(
    {key: rule for key, (_, rule) in _TABLE.items()},
    {
        "sglang-": _ENGINE,
        "router-": _ENGINE,
        "eval-": No("evaluation has no keys yet"),
        "n-samples-per-eval": No("evaluation has no keys yet"),
        "rollout-": _ENGINE,
        "num-rollout": _RUN,
        "num-epoch": _RUN,
        "eps-clip-": _LEARN,
        "critic-": No("has no key in the critic block"),
        "ref-": _MODEL,
        "hf-": _MODEL,
        "model-": _MODEL,
        "save-": _CHECKPOINT,
        "use-wandb": _RUN,
        "wandb-": _RUN,
        "use-tensorboard": _RUN,
        "tb-": _RUN,
        "prompt-": _DATA,
        "input-key": _DATA,
        "label-key": _DATA,
        "metadata-key": _DATA,
        "rm-": _SCORES,
        "reward-": _SCORES,
        "custom-": No("functions of one's own have no keys here"),
        "max-tokens-per-gpu": _MICRO,
        "lr-": _LEARN,
        "update-weight": Already("the way of the weights is worked out from the placement"),
        "tensor-model-": _TRAINING,
        "pipeline-model-": _TRAINING,
        "context-parallel-": _TRAINING,
        "expert-": _TRAINING,
        "sequence-parallel": _TRAINING,
        "recompute-": _TRAINING,
        "attention-": _TRAINING,
        "hidden-": _TRAINING,
        "accumulate-": _TRAINING,
        "train-": _TRAINING,
        "optimizer-": _TRAINING,
        "use-": _TRAINING,
        "num-": _TRAINING,
        "no-": _TRAINING,
    },
)


def import_slime(text: str, file: str = "", per_node: int = 0) -> Imported:
    """A command, its flags alone, or the script around it. `per_node` 0: --num-gpus-per-node, else the actor's."""
    draft = Draft("slime", read_flags(text, file, _FLAGS), RULES)
    each = draft.count("actor-num-gpus-per-node", 8, 1)
    width = per_node or draft.count("num-gpus-per-node", each, 1)
    size = each * draft.count("actor-num-nodes", 1, 1)
    together = draft.has("colocate")
    seating = Seating(width)
    spots: dict[str, Ranges] = {"actor": seating.take(size)}
    if draft.value("advantage-estimator", "grpo") == "ppo":
        spots["critic"] = spots["actor"] if together else seating.take(size)
    if draft.number("kl-coef", 0) or draft.has("use-kl-loss") or draft.number("kl-loss-coef", 0):
        spots["reference"] = spots["actor"]
    engine = draft.count("rollout-num-gpus-per-engine", 1, 1)
    engines = draft.count("rollout-num-gpus", size, 1)
    check_engine_size(draft, "rollout-num-gpus-per-engine", engine, engines)
    whole = engines - engines % engine or engines
    copy = engine if whole % engine == 0 else 1
    spots["rollout"] = first_of(whole, copy, width) if together else seating.take(whole, copy)
    tensor = draft.count("tensor-model-parallel-size", 1, 1)
    copies = {"rollout": copy, "actor": tensor, "critic": tensor}
    topology = place(draft, spots, copies, width)
    set_algorithm(draft, "advantage-estimator", "grpo")
    _set_iteration(draft)
    draft.apply_rules()
    leaves = _offloads(draft, together)
    offload = {c: leaves["rollout" if c == "rollout" else "actor"] or c == "reference" for c in spots}
    return finish(draft, topology, offload)


def _set_iteration(draft: Draft) -> None:
    samples = draft.count("rollout-batch-size", 0) * draft.count("n-samples-per-prompt", 1, 1)
    if "num-steps-per-rollout" in draft.given and samples:
        batch = samples // draft.count("num-steps-per-rollout", 1, 1)
        draft.derive("algorithm.train_batch", batch, "num-steps-per-rollout")
    lengths = ("rollout-max-prompt-len", "rollout-max-response-len")
    if all(key in draft.given for key in lengths):
        draft.derive("algorithm.sequence_length", sum(draft.count(key, 0) for key in lengths), *lengths)


def _offloads(draft: Draft, together: bool) -> dict[str, bool]:
    """`--colocate` means both unless one is refused; a critic makes the trainers leave as well."""
    everything = together or draft.has("offload")
    train = everything or draft.has("offload-train") or draft.value("advantage-estimator") == "ppo"
    leaves = {
        "actor": train and not draft.has("no-offload-train"),
        "rollout": (everything or draft.has("offload-rollout")) and not draft.has("no-offload-rollout"),
    }
    for component, gone in leaves.items():
        draft.set(f"{component}.enable_offload", gone)
    return leaves
