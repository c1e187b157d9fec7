"""What a vision-language-action policy reads of an observation, and whether it can. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplace.codes import config_error, problem
from rlplace.config.blocks.policies import VlaConfig
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.config.yaml_text import show
from rlplace.envs.contract import (
    Actions,
    ContinuousActions,
    DenoisedActions,
    DiscreteActions,
    MultiDiscreteActions,
    Part,
    Spaces,
    image_size,
)
from rlplace.envs.registry import with_wrapper
from rlplace.errors import ConfigError, Problem, did_you_mean
from rlplace.models.vla_folder import (
    check_folder,
    is_openvla,
    is_smolvla,
    openvla_folder,
    smolvla_folder,
)

_MODEL = "actor.model"
# Sides of a patch that one token of the decoder stands for
MERGED = 2
_CHANNELS = 3
# The wrapper that makes bins of continuous actions
_BINS = "gymnasium.wrappers:DiscretizeAction"
# The wrapper that gives OpenVLA's tokens their meaning
_MEANING = "rlplace.envs.openvla:OpenVlaActions"
# The wrapper that gives SmolVLA's numbers their units
_SMOLVLA = "rlplace.envs.smolvla:SmolVlaUnits"
# Bins of OpenVLA (arXiv:2406.09246)
_USUAL_BINS = 256
# Choices of one element at most: more are combinations of the bins of several elements
_MOST_BINS = 65_536


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VlaEntries:
    """The entries of an observation that a policy reads.

    `images`: of one camera or more, in the order in which the policy reads them. `instruction`: None: the policy reads
    none.
    """

    images: tuple[Part, ...]
    instruction: Part | None
    state: tuple[Part, ...]


def entries_for(spaces: Spaces, config: VlaConfig) -> VlaEntries:
    """Return the entries that the policy of `config` reads. Raises ConfigError if one that it needs does not exist."""
    numbers = tuple(part for part in spaces.entries if part.dtype == "float32")
    pictures = tuple(part for part in spaces.images if part.dtype == "uint8")
    texts = spaces.texts
    images = _cameras(spaces, pictures, config)
    if not images:
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
    return VlaEntries(images=images, instruction=instruction, state=state)


def check_vla(spaces: Spaces, config: VlaConfig, env: SimulatorEnvConfig) -> None:
    """Raise ConfigError unless the policy of `config` can read observations and choose actions of `spaces`.

    `spaces`: those of the simulators of `env`.
    """
    entries = entries_for(spaces, config)
    sides: list[int] = []
    for image in entries.images:
        channels, *of_image = image_size(image.shape)
        sides += of_image
        if channels != _CHANNELS:
            raise config_error(
                "model-misfit", f"{_MODEL}.image", _worded(image), error="colours"
            )
    if config.vlm is not None and not is_smolvla(config.path):
        raise config_error(
            "model-misfit", f"{_MODEL}.vlm", config.vlm, error="vlm-alone"
        )
    if config.path is not None:
        check_folder(config)
    if is_openvla(config.path):
        _check_openvla(spaces, entries, config, env)
        return
    if config.head == "flow":
        _check_flow(spaces.actions, config)
        if is_smolvla(config.path):
            _check_smolvla(spaces, entries, config, env)
    else:
        _check_actions(spaces.actions, env)
    if config.path is None:
        _check_sizes(config, max(sides))
        if entries.instruction is not None and not config.words:
            raise config_error(
                "model-misfit", f"{_MODEL}.words", "[]", error="no-words"
            )


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
    assert isinstance(actions, DiscreteActions | MultiDiscreteActions)
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


def _check_flow(actions: Actions, config: VlaConfig) -> None:
    """Raise ConfigError unless the policy can make the actions from noise."""
    if not isinstance(actions, DenoisedActions):
        raise config_error(
            "model-misfit",
            f"{_MODEL}.head",
            "flow",
            error="flow-choices",
            counts=getattr(actions, "n", None),
        )
    if config.expert_width % 2:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.expert_width",
            f"{config.expert_width}",
            error="odd-expert",
            above=config.expert_width + 1,
        )


def _check_smolvla(
    spaces: Spaces, entries: VlaEntries, config: VlaConfig, env: SimulatorEnvConfig
) -> None:
    """Raise ConfigError unless a checkpoint of SmolVLA gets what it reads, in the units that it was trained with."""
    assert config.path is not None
    of = smolvla_folder(Path(config.path))
    if entries.instruction is None:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.path",
            config.path,
            error="no-instruction",
            entries=_listed(spaces),
        )
    if spaces.chunk > of.chunk:
        raise config_error(
            "model-misfit",
            "rollout.action_chunk",
            f"{spaces.chunk}",
            error="smolvla-chunk",
            most=of.chunk,
        )
    actions = spaces.actions
    assert isinstance(actions, DenoisedActions)
    elements = math.prod(actions.shape[1:]) // spaces.chunk
    state = sum(part.size for part in entries.state)
    wrapped = any(wrapper.name == _SMOLVLA for wrapper in env.wrappers)
    if not wrapped or (state, elements) != (of.state, of.action):
        raise _without_wrapper(
            env,
            "smolvla-units",
            elsewhere="smolvla-elsewhere",
            state=of.state,
            action=of.action,
            wrappers=with_wrapper(env, _SMOLVLA, {"folder": config.path}),
        )


def _check_openvla(
    spaces: Spaces, entries: VlaEntries, config: VlaConfig, env: SimulatorEnvConfig
) -> None:
    """Raise ConfigError unless a checkpoint of OpenVLA gets what it reads, and its tokens mean actions of its robot."""
    assert config.path is not None
    folder = openvla_folder(Path(config.path))
    if config.head == "flow":
        raise config_error(
            "model-misfit", f"{_MODEL}.head", "flow", error="flow-openvla"
        )
    if entries.instruction is None:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.path",
            config.path,
            error="no-instruction",
            entries=_listed(spaces),
        )
    if config.state:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.state",
            show([*config.state]),
            error="openvla-state",
        )
    if len(entries.images) > 1:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.cameras",
            show([image.name for image in entries.images]),
            error="openvla-cameras",
            first=entries.images[0].name,
        )
    _, *sides = image_size(entries.images[0].shape)
    if folder.square and min(sides) != max(sides):
        raise config_error(
            "model-misfit",
            f"{_MODEL}.image",
            _worded(entries.images[0]),
            error="not-square",
        )
    meaning = [w for w in env.wrappers if w.name == _MEANING]
    counts = (
        spaces.actions.n if isinstance(spaces.actions, MultiDiscreteActions) else ()
    )
    if not meaning or {*counts} != {folder.bins}:
        raise _without_wrapper(
            env,
            "no-meaning",
            elsewhere="no-meaning-elsewhere",
            bins=folder.bins,
            wrappers=_with_meaning(env, config.path, folder.bins),
        )


def _without_wrapper(
    env: SimulatorEnvConfig, error: str, *, elsewhere: str, wrappers: str, **facts: Any
) -> ConfigError:
    """Return the error about an environment without the wrapper that a checkpoint needs.

    `error`: name of the error for Gymnasium. `elsewhere`: for environments that take no wrappers. `wrappers`: the
    proposed wrappers, as YAML. `facts`: further facts of the text.
    """
    return config_error(
        "model-misfit",
        "env.wrappers",
        show([wrapper.name for wrapper in env.wrappers]),
        error=error if env.kind == "gymnasium" else elsewhere,
        kind=env.kind,
        wrappers=wrappers,
        **facts,
    )


def _with_meaning(env: SimulatorEnvConfig, path: str, bins: int) -> str:
    """Return the wrappers of `env` with OpenVLA's actions in place of other bins, as YAML.

    `path`: folder of the checkpoint. `bins`: its choices for each element of an action.
    """
    others = [wrapper for wrapper in env.wrappers if wrapper.name != _BINS]
    kwargs: dict[str, object] = {"folder": path}
    if bins != _USUAL_BINS:
        kwargs["bins"] = bins
    for wrapper in others:
        if wrapper.name == _MEANING:
            kwargs = {**wrapper.kwargs, **kwargs}
    return with_wrapper(
        dataclasses.replace(env, wrappers=tuple(others)), _MEANING, kwargs
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


def _cameras(
    spaces: Spaces, found: tuple[Part, ...], config: VlaConfig
) -> tuple[Part, ...]:
    """Return the images that `config` names, or the only image; () if there is none.

    Raises ConfigError if one does not exist or is named twice, or if there are several and none is named.
    """
    if config.cameras and config.image is not None:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.image",
            config.image,
            error="image-and-cameras",
            cameras=show([*config.cameras]),
        )
    if config.cameras:
        once = tuple(dict.fromkeys(config.cameras))
        if once != config.cameras:
            raise config_error(
                "model-misfit",
                f"{_MODEL}.cameras",
                show([*config.cameras]),
                error="camera-twice",
                once=show([*once]),
            )
        return tuple(_named(spaces, found, "cameras", name) for name in config.cameras)
    if config.image is not None:
        return (_named(spaces, found, "image", config.image),)
    if len(found) > 1:
        raise config_error(
            "model-misfit",
            f"{_MODEL}.cameras",
            "[]",
            error="several-cameras",
            entries=", ".join(_worded(part) for part in found),
            every=show([part.name for part in found]),
        )
    return found


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
    if key in ("state", "cameras"):
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
