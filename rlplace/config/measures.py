"""Values of other libraries' keys in the units of rlplace: environment steps as iterations, a share as a number.

A conversion uses other values of the config: an iteration of PPO has `total_num_envs x rollout_steps` steps. Keys of
the other library that stand beside the key count as well: `n_envs=8 n_timesteps=1e6`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.config.fields import JobName, block_at, default_of, fields_of
from rlplace.config.found import value_at
from rlplace.config.keys import COMPONENTS, PLACEMENT, places_in
from rlplace.config.other_names import ENV_STEPS, KEYS, OFF_POLICY_KEYS
from rlplace.config.yaml_text import show

_ITERATIONS = "runner.total_iterations"
_TARGET_EVERY = "algorithm.target_every"
_RATIO = "algorithm.updates_per_step"
# Argument of the task `prompts` -> names in other libraries
_COLUMNS = {
    "path": (
        "prompt_data",
        "dataset_name",
        "data_path",
        "train_files",
        "prompt_dataset",
        "train_data_path",
        "dataset_path",
        "dataset_file",
        "train_file",
        "data_file",
        "data_files",
        "dataset",
    ),
    "prompt": ("input_key", "prompt_key", "prompt_column"),
    "answer": ("label_key", "answer_key", "answer_column"),
}
# TRL's name of a loss -> what it is the mean of
_LOSSES = {
    "grpo": "sequence",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "constant",
}
# Switch of OpenRLHF -> (component, the component whose place it shares)
_TOGETHER = {
    "colocate_actor_ref": ("reference", "actor"),
    "colocate_critic_reward": ("reward", "critic"),
}
# Components with a model, which a switch puts in one place
_MODELS = ("actor", "rollout", "critic", "reference", "reward", "teacher")
_MOST_LAYERS = 16
# Text of a placement with known numbers: all of 8, 0-7, 3
_ALL_OF = re.compile(r"all of ([0-9]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A key of another library in a config.

    `name`: last part of the key. `role`: the first part of its path. `value`: its value. `written`: the whole config.
    `config`: type of the whole config. `job`: the kind of job.
    """

    name: str
    role: str
    value: object
    written: Any
    config: type
    job: JobName

    @property
    def has_replay(self) -> bool:
        """Whether the job learns from a replay memory."""
        return "replay.capacity" in places_in(self.config, self.job)

    @property
    def amount(self) -> float:
        """The value as a number above 0, also of a text such as `1e6`; 0 for another value."""
        number = as_plain_number(self.value)
        return number if number is not None and number > 0 else 0

    def beside(self, *names: str) -> object:
        """Return the value of another key of the library: at the top of the config, or in the same block."""
        blocks = [self.written]
        if isinstance(self.written, Mapping):
            blocks.append(self.written.get(self.role))
        for block in blocks:
            for name in names:
                if isinstance(block, Mapping) and block.get(name) is not None:
                    return block[name]
        return None

    def number(self, path: str) -> float:
        """Return the number at a path of the config, or else its default. Return 0 if the value is not a number.

        A key of the other library with this meaning comes first.
        """
        if path not in places_in(self.config, self.job):
            return 0
        names = {**KEYS, **(OFF_POLICY_KEYS if self.has_replay else {})}
        theirs = (theirs for theirs, ours in names.items() if ours == path)
        number = as_plain_number(self.beside(*theirs))
        if number is not None:
            return number
        written = value_at(self.written, path)
        if written is None:
            above, _, name = path.rpartition(".")
            block = block_at(self.config, self.job, above.split("."))
            field, _ = fields_of(block, self.job)[name]
            written = default_of(field, self.job)
        number = as_plain_number(written)
        return 0 if number is None else number

    def steps_of_iteration(self) -> int:
        """Return the environment steps of an iteration; 0 for a language model, or without the numbers."""
        if self.has_replay:
            return int(self.number("algorithm.steps_per_iteration"))
        steps = self.number("env.total_num_envs") * self.number(
            "algorithm.rollout_steps"
        )
        return int(steps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a key of another library says in keys of rlplace.

    `keys`: key -> value. `reason`: how the values differ.
    """

    keys: Mapping[str, object]
    reason: str


def as_plain_number(value: object) -> float | None:
    """Return a value as a number, also of a text such as `1e6`; None if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def converted(given: Given) -> Converted | None:
    """Return the keys of rlplace that say the same as a key of another library; None if they do not follow.

    Whole numbers are converted only if they come out even, except the length of a run.
    """
    convert = _CONVERSIONS.get(given.name)
    return None if convert is None else convert(given)


def _whole(number: float) -> int | None:
    """Return `number` as an int if it is a whole number above 0, else None."""
    rounded = round(number)
    return rounded if rounded > 0 and abs(number - rounded) < 1e-9 * rounded else None


# ── simulators ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _length(given: Given) -> Converted | None:
    """Convert the environment steps of a run."""
    steps = given.steps_of_iteration()
    if not steps or not given.amount:
        return None
    iterations = math.ceil(given.amount / steps)
    return Converted(
        keys={_ITERATIONS: iterations},
        reason=f"there, environment steps are counted; here, iterations of {steps:,} steps",
    )


def _long_length(given: Given) -> Converted | None:
    """Convert the steps of a run, if there are so many that no iterations can be meant."""
    is_of_run = given.role in ("runner", given.name)
    if not is_of_run or given.amount < 10 * given.steps_of_iteration():
        return None
    return _length(given)


def _evaluated(given: Given) -> Converted | None:
    """Convert the environment steps between two evaluations."""
    steps = given.steps_of_iteration()
    # A number of iterations
    if not steps or given.amount < steps:
        return None
    every = round(given.amount / steps)
    return Converted(
        keys={"runner.eval_every": every},
        reason=f"there, environment steps are counted; here, iterations of {steps:,} steps",
    )


def _exploration(given: Given) -> Converted | None:
    """Convert the share of a run in which the share of random actions falls."""
    total = given.steps_of_iteration() * given.number(_ITERATIONS)
    wanted = as_plain_number(
        given.beside(*(name for name, to in _CONVERSIONS.items() if to is _length))
    )
    total = wanted or total
    if not total or not 0 < given.amount <= 1:
        return None
    return Converted(
        keys={"algorithm.epsilon_steps": max(1, round(given.amount * total))},
        reason=f"there, a share of the run; here, environment steps, of {total:,.0f}",
    )


def _target(given: Given) -> Converted | None:
    """Convert the environment steps between two copies of DQN's network."""
    if value_at(given.written, "algorithm.name") != "dqn":
        return None
    updates: object = _whole(given.amount * given.number(_RATIO))
    if updates is None:
        updates = f"<{given.amount:g} x {given.number(_RATIO):g}, as a whole number>"
    return Converted(
        keys={_TARGET_EVERY: updates},
        reason=f"there, environment steps are counted; here, updates, {given.number(_RATIO):g} for each step",
    )


def _ratio(given: Given) -> Converted | None:
    """Convert the steps between updates, and the updates at a time, to the updates for each step."""
    if not given.has_replay:
        return None
    every: Any = given.value
    updates: Any = given.beside("gradient_steps")
    if given.name == "gradient_steps":
        updates = given.value
        every = given.beside("train_freq", "train_frequency")
    steps = as_plain_number(1 if every is None else every)
    count = as_plain_number(1 if updates is None else updates)
    if steps is None or count is None or steps <= 0 or count == 0:
        return None
    envs = given.number("env.total_num_envs")
    if envs <= 0:
        return None
    # -1: as many updates as steps
    ratio = 1.0 if count < 0 else count / (steps * envs)
    if round(ratio, 6) != ratio:
        return None
    return Converted(
        keys={_RATIO: ratio},
        reason="there, updates at a time, and steps of each environment between them; "
        "here, updates for each step of any environment",
    )


def _value_clip(given: Given) -> Converted | None:
    """Convert the switch that clips values by as much as the ratio."""
    reason = "there, a switch; here, the distance that values may move"
    on = str(given.value).lower() == "true"
    width = given.number("algorithm.clip_ratio_low") if on else None
    return Converted(keys={"algorithm.value_clip": width}, reason=reason)


def _minibatches(given: Given) -> Converted | None:
    """Convert the samples of a minibatch to the minibatches of an iteration."""
    if given.has_replay or not given.amount:
        return None
    minibatches = _whole(given.steps_of_iteration() / given.amount)
    if minibatches is None:
        return None
    return Converted(
        keys={"algorithm.num_minibatches": minibatches},
        reason="there, samples of a minibatch; here, minibatches of an iteration",
    )


def _steps_of_iteration(given: Given) -> Converted | None:
    """Convert the environment steps of an iteration to the steps of each environment."""
    envs = given.number("env.total_num_envs")
    if given.has_replay or not envs:
        return None
    steps = _whole(given.amount / envs)
    if steps is None:
        return None
    return Converted(
        keys={"algorithm.rollout_steps": steps},
        reason=f"there, the steps of an iteration; here, those of each of {envs:g} environments",
    )


def _lowest_rate(given: Given) -> Converted | None:
    """Convert the lowest learning rate to its ratio to the highest one."""
    role = given.role if given.role in COMPONENTS else "actor"
    highest = given.number(f"{role}.optimizer.lr")
    if not highest or given.amount > highest:
        return None
    return Converted(
        keys={f"{role}.optimizer.min_lr_ratio": float(f"{given.amount / highest:.6g}")},
        reason="there, the learning rate at the end; here, its ratio to lr",
    )


def _layers(given: Given) -> Converted | None:
    """Convert the number of layers of a policy to their sizes, all as large as the first one so far."""
    path = "actor.hidden" if given.has_replay else "actor.model.hidden"
    sizes = value_at(given.written, path)
    count = _whole(given.amount) if given.amount else None
    if count is None or count > _MOST_LAYERS:
        return None
    if not isinstance(sizes, list) or not sizes:
        return None
    return Converted(
        keys={path: [sizes[0]] * count},
        reason="there, the number of layers; here, the size of each",
    )


def _following(given: Given) -> Converted | None:
    """Convert the share of a target network that stays to the share by which it follows."""
    if not given.has_replay or not 0 < given.amount < 1:
        return None
    return Converted(
        keys={"algorithm.tau": round(1 - given.amount, 9)},
        reason="there, the share of the target that stays; here, the share by which it follows",
    )


def _fixed_temperature(given: Given) -> Converted | None:
    """Convert the switch of a learned temperature, where it is off: the temperature is a number."""
    if not given.has_replay or str(given.value).lower() != "false":
        return None
    number = as_plain_number(given.beside("alpha", "ent_coef"))
    return Converted(
        keys={
            "algorithm.temperature": "<a number, such as 0.2>"
            if number is None
            else number
        },
        reason="there, a switch; here, a number in place of auto",
    )


def _normalized(given: Given) -> Converted | None:
    """Convert the zoo's switch for observations and rewards; it stands at the top of a config there."""
    if given.role != given.name or not isinstance(given.value, bool):
        return None
    names = ("algorithm.normalize_observations", "algorithm.normalize_rewards")
    return Converted(
        keys=dict.fromkeys(names, given.value),
        reason="there, one switch; here, one for observations and one for rewards",
    )


# ── language models ───────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts_of_a_step(given: Given) -> Converted | None:
    """Convert the prompts of an optimizer step to its samples."""
    samples = _whole(given.amount * given.number("algorithm.samples_per_prompt"))
    if samples is None:
        return None
    return Converted(
        keys={"algorithm.train_batch": samples},
        reason="there, prompts are counted; here, samples",
    )


def _warmup(given: Given) -> Converted | None:
    """Convert the share of a run in which the learning rate rises to optimizer steps."""
    share = as_plain_number(given.value)
    samples = given.number("algorithm.prompts") * given.number(
        "algorithm.samples_per_prompt"
    )
    batch = given.number("algorithm.train_batch") or samples
    if share is None or not 0 <= share < 1 or not samples or samples % batch:
        return None
    steps_each = given.number("algorithm.epochs") * samples / batch
    steps = share * given.number(_ITERATIONS) * steps_each
    if abs(steps - round(steps)) > 1e-9:
        return None
    role = given.role if given.role in COMPONENTS else "actor"
    return Converted(
        keys={f"{role}.optimizer.warmup_steps": round(steps)},
        reason="there, a share of the run; here, optimizer steps",
    )


def _with_actor(given: Given) -> Converted | None:
    """Convert the switch that puts a model where another is."""
    role, other = _TOGETHER[given.name]
    of_all = value_at(given.written, PLACEMENT)
    if str(given.value).lower() != "true" or not isinstance(of_all, Mapping):
        return None
    if role not in of_all or other not in of_all:
        return None
    return Converted(
        keys={f"{PLACEMENT}.{role}": {"same_as": other}},
        reason="there, a switch; here, the place of the other component",
    )


def _all_together(given: Given) -> Converted | None:
    """Convert the switch that puts all models of a job on language models on the same accelerators."""
    if given.steps_of_iteration():
        return None
    of_all = value_at(given.written, PLACEMENT)
    if str(given.value).lower() != "true" or not isinstance(of_all, Mapping):
        return None
    keys: dict[str, object] = {}
    for role, placed in of_all.items():
        if role not in _MODELS:
            continue
        keys[f"{PLACEMENT}.{role}"] = "all"
        if isinstance(placed, Mapping):
            sizes = {key: size for key, size in placed.items() if key.endswith("_size")}
            if sizes:
                keys[f"{PLACEMENT}.{role}"] = {"placement": "all", **sizes}
    if not keys:
        return None
    return Converted(
        keys=keys,
        reason="there, a switch; here, the accelerators of each component are named",
    )


def _epochs_of_simulators(given: Given) -> Converted | None:
    """Convert the epochs of a job on simulators, as RLinf and rl_games count them: an epoch is an iteration."""
    if not given.steps_of_iteration() or given.has_replay or not given.amount:
        return None
    epochs = _whole(given.amount)
    if epochs is None:
        return None
    return Converted(
        keys={_ITERATIONS: epochs},
        reason="there, an epoch is one rollout and what is learned from it: an iteration",
    )


def _passes(given: Given) -> Converted | None:
    """Ask which number is meant: TRL's name for the passes over samples is that of others for a run's length."""
    if given.role != given.name or "algorithm.samples_per_prompt" not in places_in(
        given.config, given.job
    ):
        return None
    return Converted(
        keys={_ITERATIONS: f"<iterations; or algorithm.epochs={given.value}>"},
        reason="TRL's num_iterations counts passes over samples: algorithm.epochs",
    )


def _passes_of_rows(given: Given) -> Converted | None:
    """Ask which number is meant: other libraries count passes over all rows, and no rows of an iteration."""
    is_sft = value_at(given.written, "algorithm.name") == "sft"
    if not is_sft or given.role != given.name:
        return None
    return Converted(
        keys={_ITERATIONS: f"<rows x {show(given.value)} / algorithm.prompts>"},
        reason="there, passes over all rows; here, iterations of algorithm.prompts rows",
    )


def _kl_in_loss(given: Given) -> Converted | None:
    """Convert the switch that adds the KL to the loss; its weight is a key of its own."""
    if str(given.value).lower() != "true":
        return None
    keys: dict[str, object] = {
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": "k3",
    }
    if not given.number("algorithm.kl_coef"):
        keys["algorithm.kl_coef"] = "<its weight, such as 0.001>"
    return Converted(keys=keys, reason="there, a switch beside the weight of the KL")


def _accumulated(given: Given) -> Converted | None:
    """Convert the passes of an optimizer step to its samples."""
    each = as_plain_number(given.beside("per_device_train_batch_size")) or given.number(
        "actor.micro_batch"
    )
    ranks = len(_accelerators(value_at(given.written, f"{PLACEMENT}.actor")))
    samples = _whole(given.amount * each * ranks)
    if samples is None:
        return None
    return Converted(
        keys={"algorithm.train_batch": samples},
        reason=f"there, passes of an optimizer step; here, its samples: "
        f"{given.amount:g} passes x {each:g} samples x {ranks} ranks",
    )


def _rows(given: Given) -> Converted | None:
    """Convert the file of a data set, or one of its columns, to arguments of the task `prompts`."""
    if "env.task" not in places_in(given.config, given.job):
        return None
    if not isinstance(given.value, str):
        return None
    keys: dict[str, object] = {}
    if value_at(given.written, "env.task") != "prompts":
        keys["env.task"] = "prompts"
    for argument, names in _COLUMNS.items():
        path = f"env.kwargs.{argument}"
        beside = given.value if given.name in names else given.beside(*names)
        if beside is not None:
            keys[path] = beside
        elif keys.get("env.task") or value_at(given.written, path) is None:
            keys[path] = "<a file>" if argument == "path" else "<its column>"
    return Converted(
        keys=keys, reason="the data set and its columns are arguments of a task"
    )


def _whole_length(given: Given) -> Converted | None:
    """Convert the length of a row, where answers are not generated: prompt and answer are cut together."""
    if value_at(given.written, "algorithm.name") != "sft":
        return None
    length = _whole(given.amount)
    if length is None:
        return None
    return Converted(
        keys={"algorithm.sequence_length": length},
        reason="a row is cut at its length, prompt and answer together",
    )


def _steps_of_all(given: Given) -> Converted | None:
    """Convert the steps of each environment to the steps of all of them, which the off-policy job counts."""
    steps = _whole(given.amount * given.number("env.total_num_envs"))
    if not given.has_replay or steps is None:
        return None
    return Converted(
        keys={"algorithm.steps_per_iteration": steps},
        reason="there, steps of each environment are counted; here, those of all environments together",
    )


def _argument_of_rows(given: Given) -> Converted | None:
    """Convert an argument of the task `prompts` that stands beside it to one among its arguments."""
    if given.role != "env" or value_at(given.written, "env.task") != "prompts":
        return None
    argument = "path" if given.name == "file" else given.name
    return Converted(
        keys={f"env.kwargs.{argument}": given.value},
        reason="it is an argument of the task, and stands in kwargs",
    )


def _mean_of_loss(given: Given) -> Converted | None:
    """Convert TRL's name of a loss to what it is the mean of; it stands at the top of a config there."""
    mean = _LOSSES.get(str(given.value))
    if mean is None or given.role != given.name:
        return None
    return Converted(
        keys={"algorithm.loss": mean},
        reason="there, the paper of the loss; here, what it is the mean of",
    )


def _without_deviation(given: Given) -> Converted | None:
    """Convert the switch of GRPO's deviation, where it is off; the mean of the loss stays."""
    off = str(given.value).lower() in ("false", "none")
    if not off or value_at(given.written, "algorithm.name") != "grpo":
        return None
    mean = value_at(given.written, "algorithm.loss") or "sequence"
    return Converted(
        keys={"algorithm.name": "dr_grpo", "algorithm.loss": mean},
        reason="there, a switch; here, an algorithm, whose loss would have another mean",
    )


def _all_gpus(given: Given) -> Converted | None:
    """Convert the GPUs of all machines to those of one machine."""
    if given.role in COMPONENTS:
        return None
    machines = given.number("cluster.num_nodes") or 1
    of_one = _whole(given.amount / machines)
    if of_one is None:
        return None
    return Converted(
        keys={"cluster.accelerators_per_node": of_one},
        reason="there, all GPUs are counted; here, those of one machine",
    )


def _engines(given: Given) -> Converted | None:
    """Convert the number of engines to the accelerators of rollout."""
    placed = value_at(given.written, f"{PLACEMENT}.rollout")
    beside = given.beside("vllm_tensor_parallel_size", "tensor_parallel_size")
    size = as_plain_number(beside)
    if size is None and isinstance(placed, Mapping):
        size = as_plain_number(placed.get("tensor_parallel_size"))
    return _placed(
        given,
        "rollout",
        size or 1,
        "engines follow from the accelerators of rollout and its tensor_parallel_size",
    )


def _gpus_of_component(given: Given) -> Converted | None:
    """Convert the GPUs of a component on each of its machines to its accelerators."""
    role = given.name.partition("_")[0]
    if role == "ref":
        role = "reference"
    machines = as_plain_number(
        given.beside(f"{given.name.partition('_')[0]}_num_nodes")
    )
    return _placed(
        given,
        role,
        machines or 1,
        "there, GPUs are counted; here, the accelerators of each component are named",
    )


def _placed(given: Given, role: str, times: float, reason: str) -> Converted | None:
    """Convert a number to the first accelerators of a component: `times` as many.

    If the component has fewer, or if its numbers are not known, it is said how many they have to be.
    """
    count = _whole(given.amount * times)
    of_all = value_at(given.written, PLACEMENT)
    if isinstance(of_all, Mapping) and role not in of_all:
        return None
    placed = value_at(given.written, f"{PLACEMENT}.{role}")
    accelerators = _accelerators(placed)
    if count is None:
        return None
    if len(accelerators) < count:
        wanted = f"<{count} accelerators, such as 0-{count - 1}>"
        if count == 1:
            wanted = "<an accelerator, such as 0>"
        return Converted(keys={f"{PLACEMENT}.{role}": wanted}, reason=reason)
    block = dict(placed) if isinstance(placed, Mapping) else {"placement": placed}
    if len(accelerators) > count:
        first = accelerators[0]
        block["placement"] = first if count == 1 else f"{first}-{first + count - 1}"
    if role == "rollout" and times > 1:
        block["tensor_parallel_size"] = int(times)
    place = block if len(block) > 1 else block["placement"]
    return Converted(keys={f"{PLACEMENT}.{role}": place}, reason=reason)


def _accelerators(placed: object) -> range:
    """Return the accelerators that a placement names, where its text alone says it; else none."""
    if isinstance(placed, Mapping):
        placed = placed.get("placement")
    text = str(placed)
    if whole := _ALL_OF.fullmatch(text):
        return range(int(whole[1]))
    if numbers := _RANGE.fullmatch(text):
        return range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    return range(0)


_CONVERSIONS: Mapping[str, Callable[[Given], Converted | None]] = {
    **dict.fromkeys(ENV_STEPS, _length),
    **dict.fromkeys(("steps", "total_steps", "env_steps"), _long_length),
    **dict.fromkeys(("eval_freq", "eval_frequency"), _evaluated),
    **dict.fromkeys(("exploration_fraction", "eps_fraction"), _exploration),
    **dict.fromkeys(
        (
            "target_update_interval",
            "target_network_frequency",
            "target_update_freq",
            "target_network_update_freq",
        ),
        _target,
    ),
    **dict.fromkeys(
        (
            "train_freq",
            "train_frequency",
            "train_every",
            "update_every",
            "train_interval",
            "gradient_steps",
            "policy_train_freq",
        ),
        _ratio,
    ),
    **dict.fromkeys(
        ("autotune", "automatic_entropy_tuning", "auto_entropy", "learn_temperature"),
        _fixed_temperature,
    ),
    **dict.fromkeys((name for names in _COLUMNS.values() for name in names), _rows),
    **dict.fromkeys(_TOGETHER, _with_actor),
    "polyak": _following,
    **dict.fromkeys(("min_lr", "lr_min", "end_lr", "final_lr"), _lowest_rate),
    **dict.fromkeys(("path", "file", "prompt", "answer", "image"), _argument_of_rows),
    **dict.fromkeys(("max_length", "max_seq_length"), _whole_length),
    **dict.fromkeys(("rollout_steps", "rollout_length"), _steps_of_all),
    "colocate_all_models": _all_together,
    "max_epochs": _epochs_of_simulators,
    "num_iterations": _passes,
    "rollout_num_gpus": _gpus_of_component,
    "normalize": _normalized,
    "loss_type": _mean_of_loss,
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), _passes_of_rows),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), _without_deviation),
    "use_kl_loss": _kl_in_loss,
    "clip_vloss": _value_clip,
    **dict.fromkeys(("batch_size", "minibatch_size"), _minibatches),
    "train_batch_size": _steps_of_iteration,
    **dict.fromkeys(("num_layers", "n_layers", "depth"), _layers),
    "ppo_mini_batch_size": _prompts_of_a_step,
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), _warmup
    ),
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "gradient_accumulation",
            "grad_accum",
            "grad_accum_steps",
            "accumulate_grad_batches",
        ),
        _accumulated,
    ),
    "num_gpus": _all_gpus,
    **dict.fromkeys(
        ("vllm_num_engines", "num_engines", "rollout_num_engines"), _engines
    ),
    **dict.fromkeys(
        (
            "actor_num_gpus_per_node",
            "critic_num_gpus_per_node",
            "ref_num_gpus_per_node",
            "reward_num_gpus_per_node",
        ),
        _gpus_of_component,
    ),
}
# Names of other libraries whose values are converted
CONVERTED = tuple(_CONVERSIONS)
