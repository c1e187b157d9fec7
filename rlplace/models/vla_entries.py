"""What a vision-language-action policy reads of an observation, and whether it can. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rlplace.codes import config_error, problem
from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.config.yaml_text import show
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DiscreteActions,
    Part,
    Spaces,
    image_size,
)
from rlplace.envs.registry import with_wrapper
from rlplace.errors import Problem, did_you_mean
from rlplace.json_text import read_object
from rlplace.models.heads import unread_weights

_MODEL = "actor.model"
# Families whose models have the parts that the policy calls
FAMILIES = ("smolvlm", "idefics3")
# Sides of a patch that one token of the decoder stands for
MERGED = 2
_CHANNELS = 3
# The wrapper that makes bins of continuous actions
_BINS = "gymnasium.wrappers:DiscretizeAction"
# Bins of OpenVLA (arXiv:2406.09246)
_USUAL_BINS = 256
# Choices of one element at most: more are combinations of the bins of several elements
_MOST_BINS = 65_536


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VlaEntries:
    """The entries of an observation that a policy reads. `instruction`: None: the policy reads none."""

    image: Part
    instruction: Part | None
    state: tuple[Part, ...]


def entries_for(spaces: Spaces, config: VlaConfig) -> VlaEntries:
    """Return the entries that the policy of `config` reads. Raises ConfigError if one that it needs does not exist."""
    numbers = tuple(part for part in spaces.entries if part.dtype == "float32")
    pictures = tuple(part for part in spaces.images if part.dtype == "uint8")
    texts = spaces.texts
    image = _only(spaces, pictures, "image", config.image)
    if image is None:
        # An MLP takes numbers alone
        plain = all(len(part.shape) < 2 for part in spaces.entries) and not texts
        raise config_error(
            "model-misfit",
            f"{_MODEL}.kind",
            "vla",
            error="no-camera" if plain else "no-byte-image",
            entries=_listed(spaces),
        )
    instruction = _only(spaces, texts, "instruction", config.instruction)
    state = numbers
    if config.state:
        state = tuple(_named(spaces, numbers, "state", name) for name in config.state)
    return VlaEntries(image=image, instruction=instruction, state=state)


def check_vla(spaces: Spaces, config: VlaConfig, env: SimulatorEnvConfig) -> None:
    """Raise ConfigError unless the policy of `config` can read observations and choose actions of `spaces`.

    `spaces`: those of the simulators of `env`.
    """
    entries = entries_for(spaces, config)
    channels, *sides = image_size(entries.image.shape)
    if channels != _CHANNELS:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.image",
            _worded(entries.image),
            error="colours",
        )
    _check_actions(spaces.actions, env)
    if config.path is None:
        _check_sizes(config, max(sides))
        if entries.instruction is not None and not config.words:
            raise config_error(
                "model-misfit", f"{_MODEL}.words", "[]", error="no-words"
            )
    else:
        _check_folder(Path(config.path))


def words_of(instruction: str) -> list[str]:
    """Return the words of an instruction as a model from scratch reads them: small letters, divided at blanks."""
    return instruction.lower().split()


def unknown_words(instructions: Sequence[str], words: Sequence[str]) -> Problem | None:
    """Return the problem that instructions have words that the config does not list; None if it lists all.

    `words`: those of the config.
    """
    known = {word.lower() for word in words}
    unknown: dict[str, None] = {}
    first = ""
    for instruction in instructions:
        others = [word for word in words_of(instruction) if word not in known]
        if others and not unknown:
            first = instruction
        unknown |= dict.fromkeys(others)
    if not unknown:
        return None
    return problem(
        "instruction-not-read",
        f"{_MODEL}.words",
        show([*words]),
        error="word",
        instruction=first,
        unknown=", ".join(unknown),
        words=show([*words, *unknown]),
    )


def too_long(instruction: str, tokens: int, config: VlaConfig) -> Problem | None:
    """Return the problem that an instruction has more tokens than the config allows; None if it has not.

    `tokens`: the number of its tokens.
    """
    if tokens <= config.instruction_tokens:
        return None
    return problem(
        "instruction-not-read",
        f"{_MODEL}.instruction_tokens",
        f"{config.instruction_tokens}",
        error="long",
        instruction=instruction,
        tokens=tokens,
    )


def _check_actions(actions: Actions, env: SimulatorEnvConfig) -> None:
    """Raise ConfigError unless each element of an action is a choice among a number of bins that a head can have."""
    if isinstance(actions, ContinuousActions):
        # Wrappers are for simulators of Gymnasium
        error = "no-bins" if env.kind == "gymnasium" else "no-bins-elsewhere"
        raise config_error(
            "model-misfit",
            f"{_MODEL}.kind",
            f"continuous actions of shape {list(actions.shape)}",
            error=error,
            kind=env.kind,
            wrappers=_with_bins(env),
        )
    counts = (actions.n,) if isinstance(actions, DiscreteActions) else actions.n
    in_bins = any(wrapper.name == _BINS for wrapper in env.wrappers)
    if in_bins and min(counts) < 2:
        raise config_error(
            "model-misfit",
            "env.wrappers",
            f"bins: {min(counts)}",
            error="one-bin",
            wrappers=_with_bins(env),
        )
    if in_bins and max(counts) > _MOST_BINS:
        raise config_error(
            "model-misfit",
            "env.wrappers",
            f"{max(counts)} choices",
            error="many-bins",
            most=_MOST_BINS,
            wrappers=_with_bins(env),
        )


def _with_bins(env: SimulatorEnvConfig) -> str:
    """Return the wrappers of `env` with bins for each element of an action, as YAML."""
    return with_wrapper(env, _BINS, {"bins": _USUAL_BINS, "multidiscrete": True})


def _check_sizes(config: VlaConfig, side: int) -> None:
    """Raise ConfigError unless the sizes of a model from scratch fit together. `side`: of the image, in pixels."""
    # Rotary positions need an even number of values for each head
    step = 2 * config.heads
    if config.width % step:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.width",
            f"width: {config.width}, heads: {config.heads}",
            error="even-heads",
            above=-(-config.width // step) * step,
        )
    cell = MERGED * config.patch
    if side % cell:
        fitting = [
            patch
            for patch in range(1, side // MERGED + 1)
            if side % (MERGED * patch) == 0
        ]
        below = [patch for patch in fitting if patch <= config.patch]
        raise config_error(
            "model-misfit",
            f"{_MODEL}.patch",
            f"patch: {config.patch}",
            error="cells" if fitting else "odd-image",
            side=side,
            cell=cell,
            fitting=(below or fitting or [1])[-1],
            even=side + 1,
        )


def _check_folder(folder: Path) -> None:
    """Raise ConfigError unless a folder has a vision-language model of a known family, with its weights."""
    key = f"{_MODEL}.path"
    try:
        shape = read_object(folder / "config.json", key)
    except FileNotFoundError:
        raise config_error(
            "model-misfit", key, str(folder), error="no-folder"
        ) from None
    kind = str(shape.get("model_type"))
    if "vision_config" not in shape:
        raise config_error(
            "model-misfit", key, str(folder), error="no-vision", kind=kind
        )
    if kind not in FAMILIES:
        raise config_error(
            "model-misfit",
            key,
            str(folder),
            error="family",
            kind=kind,
            families=" or ".join(FAMILIES),
        )
    reason = unread_weights(folder)
    if reason is not None:
        raise config_error(
            "model-misfit", key, str(folder), error="unread", reason=reason
        )


def _only(
    spaces: Spaces, found: tuple[Part, ...], key: str, name: str | None
) -> Part | None:
    """Return the entry that a key names, or the only entry of its kind; None if there is no such entry.

    Raises ConfigError if there is no such entry, or if there are several and none is named.
    """
    if name is not None:
        return _named(spaces, found, key, name)
    if len(found) > 1:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.{key}",
            ", ".join(_worded(part) for part in found),
            error="several",
            role=key,
            first=found[0].name,
        )
    return found[0] if found else None


def _named(spaces: Spaces, found: tuple[Part, ...], key: str, name: str) -> Part:
    """Return the entry `name` of `found`. Raises ConfigError if there is none."""
    for part in found:
        if part.name == name:
            return part
    names = [part.name for part in found]
    near = did_you_mean(name, names) or (names[0] if names else "null")
    fix = near
    if key == "state":
        fix = f"[{near}]" if names else "[]"
    raise config_error(
        "model-misfit",
        f"{_MODEL}.{key}",
        name,
        error="no-entry",
        role=key,
        entries=_listed(spaces),
        near=fix,
    )


def _listed(spaces: Spaces) -> str:
    return ", ".join(_worded(part) for part in spaces.entries)


def _worded(part: Part) -> str:
    """Return name, shape and type of an entry in words."""
    kind = "text" if part.is_text else part.dtype
    return f"{part.name} {list(part.shape)} {kind}".strip()
