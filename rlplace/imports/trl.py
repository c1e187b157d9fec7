"""Import of TRL: GRPOConfig and GRPOTrainer (or RLOO) in a Python script, the YAML and the flags of `trl grpo`.

A script is parsed and not run. Its settings are the arguments of the config and of the trainer, as far as these are
constants or names of constants. A script that takes its arguments from the command line names a command in its
docstring, which is read as if it had been typed.

Every process has the model, whole or sharded as the config file of accelerate says. Engines of vLLM share the
accelerators of the processes (`colocate`) or have other accelerators (`server`). Without vLLM, the actor's processes
generate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlplace.config.yaml_text import show
from rlplace.errors import ConfigError, Source
from rlplace.imports.importer import NO_LOWER_BOUND, Draft, Imported, finish
from rlplace.imports.placing import Allocation
from rlplace.imports.settings import Setting, read_block
from rlplace.units import clipped

_CONFIG = re.compile(r"(?:\w*(?:GRPO|RLOO)\w*)Config")
_TRAINER = re.compile(r"(?:\w*(?:GRPO|RLOO)\w*)Trainer")
_UNKNOWN: object = object()  # a value that is no constant
_LONGEST = 90  # longest text of a setting that is shown
# Settings of a LoraConfig -> flags of `trl grpo`
_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
}
# Defaults of PEFT's LoraConfig; those of `trl grpo` are other ones
_LORA_DEFAULTS = {"r": 8, "lora_alpha": 8}
_TRAINER_NAMES = {"model": "model_name_or_path"}
# Processes of the config files that come with `trl`
_SHIPPED = {
    "single_gpu": 1,
    **dict.fromkeys(("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8),
}
_LOSSES = {
    "grpo": "sequence",
    "dapo": "token",
    "bnpo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
}
_BLOCK = "vllm_importance_sampling_"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def docstring_of(text: str) -> str:
    """Return the docstring of a Python script; "" if there is none or the text is not Python."""
    try:
        return ast.get_docstring(ast.parse(text)) or ""
    except (SyntaxError, ValueError):
        return ""


def read_python(text: str, file: str) -> list[Setting]:
    """Return the settings in a Python script that makes a trainer of TRL. The script is not run.

    `file`: its name. A text that is not Python gives no settings.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    known = _constants(tree)
    settings: list[Setting] = []

    def add(key: str, node: ast.expr) -> None:
        value = _value(node, known)
        written = ast.unparse(node) if value is _UNKNOWN else show(value)
        settings.append(
            Setting(
                key=key,
                value=None if value is _UNKNOWN else value,
                written=clipped(" ".join(f"{key}={written}".split()), _LONGEST),
                source=Source(file=file, line=node.lineno),
            )
        )

    for node in _taken(tree, known):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if _CONFIG.fullmatch(name):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    add(keyword.arg, keyword.value)
        elif _TRAINER.fullmatch(name):
            add("trainer", ast.copy_location(ast.Constant(name), node))
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg != "args":
                    add(_TRAINER_NAMES.get(keyword.arg, keyword.arg), keyword.value)
        elif name == "LoraConfig":
            add("use_peft", ast.copy_location(ast.Constant(True), node))
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for name, default in _LORA_DEFAULTS.items():
                given.setdefault(name, ast.copy_location(ast.Constant(default), node))
            for option, value in given.items():
                if option in _LORA:
                    add(_LORA[option], value)
    return settings


def _taken(node: ast.AST, known: Mapping[str, object]) -> Iterator[ast.AST]:
    """Yield the nodes of a script, without branches of `if` that its constants and defaults of options rule out."""
    yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        test = _value(node.test, known)
        if test is not _UNKNOWN:
            children = [*(node.body if test else node.orelse)]
    for child in children:
        yield from _taken(child, known)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _constants(tree: ast.Module) -> dict[str, object]:
    """Return name -> value, for names that are set to a constant once, and defaults of the script's own options.

    An option `--model-id` of a parser is `args.model_id` in the code, and has the name `.model_id` here.
    """
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = _value(value, found)
            case ast.Call(
                func=ast.Attribute(attr="add_argument"),
                args=[*options],
                keywords=keywords,
            ):
                names = [o.value for o in options if isinstance(o, ast.Constant)]
                long = next((str(n) for n in names if str(n).startswith("--")), "")
                option = "." + long[2:].replace("-", "_")
                given = {k.arg: _value(k.value, found) for k in keywords}
                if long and given.get("action") == "store_true":
                    found[option] = False
                if long and "default" in given:
                    found[option] = given["default"]
    return found


def _value(node: ast.expr, known: Mapping[str, object]) -> object:
    """Return the value of an expression of constants; `_UNKNOWN` for any other."""
    match node:
        case ast.Name(id=name):
            return known.get(name, _UNKNOWN)
        case ast.Attribute(value=ast.Name(), attr=name):
            return known.get(f".{name}", _UNKNOWN)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            a, b = _value(left, known), _value(right, known)
            if isinstance(a, int | float) and isinstance(b, int | float):
                return a * b
            return _UNKNOWN
        case ast.BoolOp(op=ast.Or(), values=parts):
            # The first value that counts as true, if all before it are known
            for part in parts:
                value = _value(part, known)
                if value is _UNKNOWN or value:
                    return value
            return _value(parts[-1], known)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def accelerate_settings(words: list[str], folder: Path) -> Iterator[Setting]:
    """Yield what a command of `accelerate launch` says about processes: the words before the script.

    `folder`: where its config file is looked for, and in the folders above.
    """
    for at, word in enumerate(words[:-1]):
        if word in ("--num_processes", "--num-processes") and words[at + 1].isdecimal():
            yield _of_accelerate("num_processes", int(words[at + 1]))
        if word in ("--config_file", "--config-file"):
            yield _of_accelerate("config_file", words[at + 1])
            for above in (folder, *folder.parents):
                if (above / words[at + 1]).is_file():
                    yield from accelerate_file(above / words[at + 1])
                    break


def accelerate_file(file: Path) -> Iterator[Setting]:
    """Yield the number of processes and the stage of ZeRO of a config file of accelerate."""
    try:
        mapping = read_block(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError, ConfigError):
        return
    if isinstance(count := mapping.get("num_processes"), int):
        yield _of_accelerate("num_processes", count)
    kind = str(mapping.get("distributed_type", ""))
    stage: Any = (mapping.get("deepspeed_config") or {}).get("zero_stage")
    if kind == "DEEPSPEED" and stage in (0, 1, 2, 3):
        yield _of_accelerate("zero_stage", stage)
    elif kind == "MULTI_GPU":
        yield _of_accelerate("zero_stage", 0)


def _of_accelerate(key: str, value: object) -> Setting:
    source = Source(file="the command of accelerate")
    return Setting(key=key, value=value, written=f"--{key} {value}", source=source)


# ── the config ───────────────────────────────────────────────────────────────────────────────────────────────────────


def import_trl(draft: Draft, per_node: int) -> Imported:
    """Return the converted config from settings of TRL.

    `per_node`: processes, each with one accelerator; 0: as accelerate is told, else one process.
    """
    name = draft.value("accelerate_config")
    usual = _SHIPPED.get(str(name), 1)
    count = draft.count("num_processes", usual, 1)
    if per_node:
        width = per_node
        count = count if "num_processes" in draft.given else per_node
    else:
        width = min(8, count)
    if not {"num_processes", "accelerate_config"} & draft.given.keys() and not per_node:
        draft.assume(
            "cluster.component_placement.actor: 0",
            "one process; --accelerators-per-node N for those of accelerate launch",
        )
    pool = Allocation(draft, width)
    pool.take("actor", count)
    if draft.number("beta", _beta(draft)) > 0:
        pool.share("reference", "actor", count)
    apart = "Async" in str(draft.value("trainer", ""))
    vllm = bool(draft.value("use_vllm", False)) or apart
    tensor = draft.count("vllm_tensor_parallel_size", 1, 1)
    server = apart or (vllm and draft.value("vllm_mode", "colocate") == "server")
    if server:
        pool.take("rollout", tensor, tensor)
        draft.assume(
            f"one engine on {tensor} more",
            "the server is started by itself there, on accelerators of its own",
        )
    else:
        if vllm:
            pool.check_engines("vllm_tensor_parallel_size", tensor, count)
        size = tensor if vllm and count % tensor == 0 else 1
        pool.take("rollout", count, size, anew=True)
    topology = pool.write()
    if not vllm:
        draft.set("rollout.engine", "transformers")
        draft.assume(
            "rollout.engine: transformers",
            "without use_vllm, the model itself generates",
        )
    if "zero_stage" in draft.given or str(name).startswith("zero"):
        stage = draft.value(
            "zero_stage", int(str(name)[-1]) if str(name)[-1:].isdecimal() else 3
        )
        draft.set("actor.zero_stage", stage)
        draft.becomes("zero_stage", "actor.zero_stage")
    _set_batches(draft, count)
    _set_algorithm(draft)
    _set_correction(draft, vllm=vllm)
    _set_model(draft)
    draft.apply_rules()
    if apart and "lr_scheduler_type" not in draft.given:
        draft.set("actor.optimizer.schedule", "constant")
    if _rloo(draft) and "reference" in draft.placed:
        # TRL's RLOO subtracts the KL of whole answers from their scores
        draft.set("algorithm.kl_in", "reward")
        draft.set("algorithm.kl_estimator", "k1")
        draft.derive("algorithm.kl_coef", draft.number("beta", _beta(draft)), "beta")
    _set_clip(draft)
    sleeps = vllm and draft.has("vllm_enable_sleep_mode")
    draft.set("rollout.enable_offload", sleeps)
    return finish(
        draft,
        topology,
        {c: {"rollout": sleeps}.get(c, False) for c in pool.where},
    )


def _rloo(draft: Draft) -> bool:
    return "RLOO" in str(draft.value("trainer", ""))


def _beta(draft: Draft) -> float:
    return 0.05 if _rloo(draft) else 0.0


def _set_batches(draft: Draft, processes: int) -> None:
    """Write prompts, samples and the batch of an optimizer step. `processes`: number of processes.

    A generation batch has the samples of `steps_per_generation` passes of all processes.
    """
    each = draft.count("per_device_train_batch_size", 8, 1)
    accumulated = draft.count("gradient_accumulation_steps", 1, 1)
    steps = draft.count("steps_per_generation", accumulated, 1)
    samples = draft.count("num_generations", 2 if _rloo(draft) else 8, 1)
    generated = draft.count("generation_batch_size", each * processes * steps, 1)
    batch = each * processes * accumulated
    prompts = max(1, generated // samples)
    draft.derive("algorithm.samples_per_prompt", samples, "num_generations")
    draft.derive(
        "algorithm.prompts", prompts, "generation_batch_size", "steps_per_generation"
    )
    draft.derive("algorithm.train_batch", batch, "gradient_accumulation_steps")
    if generated % samples:
        draft.find(
            "import-batches",
            "num_generations",
            error="generations",
            settings={
                "num_generations": next(
                    n
                    for n in range(min(samples, generated), 0, -1)
                    if generated % n == 0
                )
            },
            batch=generated,
            samples=samples,
        )


def _set_algorithm(draft: Draft) -> None:
    """Write the algorithm and the aggregation of its loss."""
    if "Async" in str(draft.value("trainer", "")):
        draft.derive(
            "algorithm.max_staleness",
            draft.count("max_staleness", 4, 1),
            "max_staleness",
        )
    if _rloo(draft):
        draft.set("algorithm.name", "rloo")
        draft.derive(
            "algorithm.normalize_advantages",
            draft.has("normalize_advantages"),
            "normalize_advantages",
        )
        draft.becomes("trainer", "algorithm.name")
        return
    scaled = draft.value("scale_rewards", "group")
    name = "dr_grpo" if scaled in (False, None, "none") else "grpo"
    draft.set("algorithm.name", name)
    draft.becomes("trainer", "algorithm.name")
    if scaled == "batch":
        draft.unmapped(
            "scores are divided by the deviation of their group", "scale_rewards"
        )
    else:
        draft.becomes("scale_rewards", "algorithm.name")
    kind = str(draft.value("loss_type", "dapo"))
    if kind in _LOSSES:
        draft.set("algorithm.loss", _LOSSES[kind])
        draft.becomes("loss_type", "algorithm.loss")
        if kind == "cispo":
            draft.set("algorithm.surrogate", "cispo")
    else:
        draft.unmapped("no such loss; algorithm.variant takes your own", "loss_type")
    if "loss_type" not in draft.given:
        draft.assume("algorithm.loss: token", "the default loss there, dapo")


def _set_clip(draft: Draft) -> None:
    """Write the bounds of the ratio. With TRL's cispo, `epsilon_high` is the upper bound, and there is no lower one."""
    high = draft.value("epsilon_high")
    cispo = draft.at("algorithm.surrogate") == "cispo"
    if cispo:
        draft.set("algorithm.clip_ratio_low", NO_LOWER_BOUND)
    if isinstance(high, int | float) and not isinstance(high, bool):
        bound = round(high - 1, 6) if cispo else high
        if bound > 0:
            draft.derive("algorithm.clip_ratio_high", bound, "epsilon_high")


def _set_correction(draft: Draft, *, vllm: bool) -> None:
    """Write the correction for probabilities of vLLM that differ from the actor's. `vllm`: whether vLLM generates."""
    switch = f"{_BLOCK}correction"
    if not vllm or draft.value(switch, True) is False:
        draft.leave_uncorrected()
        draft.implied(
            "without vLLM, nothing is weighed" if not vllm else "nothing is weighed",
            switch,
        )
        return
    cap = draft.value(f"{_BLOCK}clip_max", draft.value(f"{_BLOCK}cap", 3.0))
    mode = str(draft.value(f"{_BLOCK}mode", "sequence_mask"))
    level, _, action = mode.partition("_")
    draft.set(
        "algorithm.tis_cap", cap if isinstance(cap, int | float) and cap > 0 else 1e6
    )
    draft.set("algorithm.tis_level", "sequence" if level == "sequence" else "token")
    draft.set("algorithm.tis_above", "drop" if action == "mask" else "cap")
    draft.becomes(f"{_BLOCK}mode", "algorithm.tis_level", "algorithm.tis_above")
    for key in (switch, f"{_BLOCK}clip_max", f"{_BLOCK}cap"):
        draft.becomes(key, "algorithm.tis_cap")
    floor = draft.value(f"{_BLOCK}clip_min")
    if isinstance(floor, int | float) and floor > 0:
        draft.derive("algorithm.tis_floor", floor, f"{_BLOCK}clip_min")
    if f"{_BLOCK}mode" not in draft.given:
        draft.assume(
            f"algorithm.tis_cap: {cap}",
            "the correction by default there, sequence_mask",
        )


def _set_model(draft: Draft) -> None:
    """Write the model, the dtype of its computation, and LoRA."""
    draft.set_model("actor.model", "model_name_or_path")
    half = draft.has("fp16") and not draft.has("bf16")
    whole = draft.value("bf16") is False and not half
    draft.derive(
        "actor.compute", "fp16" if half else "fp32" if whole else "bf16", "bf16", "fp16"
    )
    if draft.has("use_peft"):
        draft.set("actor.lora_rank", draft.count("lora_r", 16, 1))
        draft.set("actor.lora_alpha", draft.number("lora_alpha", 32))
        for key in ("use_peft", "lora_r"):
            draft.becomes(key, "actor.lora_rank")
        draft.becomes("lora_alpha", "actor.lora_alpha")
        targets = draft.value("lora_target_modules")
        if isinstance(targets, list | tuple) and all(
            isinstance(t, str) for t in targets
        ):
            draft.set("actor.lora_targets", [t.rstrip(",") for t in targets])
            draft.becomes("lora_target_modules", "actor.lora_targets")
    if draft.has("sync_ref_model") and "reference" in draft.placed:
        every = draft.count("ref_model_sync_steps", 512, 1)
        draft.derive(
            "reference.refresh_every", every, "sync_ref_model", "ref_model_sync_steps"
        )
