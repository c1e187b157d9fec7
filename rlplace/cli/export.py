"""`python -m rlplace.export CHECKPOINT OUT`: the model of a checkpoint as other programs read it.

Exit codes: 0 written, 1 it cannot be written, 2 wrong usage or no such checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlplace.checkpoints.checkpoint import CONFIG, Checkpoint
from rlplace.checkpoints.find import find, verify
from rlplace.commands import DONE, answered, typed
from rlplace.config.options import OptionParser
from rlplace.config.schema import Config
from rlplace.errors import ConfigError, OutputError, did_you_mean
from rlplace.trained import POLICY, Trained, config_of, exported_policy

_TRAINED = ("actor", "critic")
_FILES = (".pt", ".onnx", ".safetensors")  # of simulator policies
_OTHER_FILES = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".json",
    ".npz",
    ".pb",
    ".pkl",
    ".tflite",
    ".yaml",
    ".zip",
)
_KEY = "CHECKPOINT"
_ELSEWHERE = "OUT=<a place with free space that you may write to>"


def main(argv: Sequence[str] | None = None) -> int:
    """Export as one command line says; return the exit code."""

    def command() -> int:
        options = _options(sys.argv[1:] if argv is None else argv)
        print(
            _export(
                options.checkpoint,
                Path(options.out),
                options.component,
                average=options.ema,
            )
        )
        return DONE

    return answered(command)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    about = (
        "Writes the model of a checkpoint: a language model as a folder of "
        "transformers; a policy of simulators as a"
    )
    about += " folder for rlplace.load_policy, or by the end of the name as .safetensors, .pt (TorchScript) or .onnx."
    parser = OptionParser(typed("export"), description=about)
    parser.add_argument(
        "checkpoint",
        metavar=_KEY,
        help="the folder of a checkpoint, of a run: its newest, or of an export",
    )
    parser.add_argument("out", metavar="OUT", help="the new folder or file")
    parser.add_argument(
        "--component",
        default="actor",
        metavar="actor|critic",
        help="whose weights (actor)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="their moving average (actor.ema_decay)"
    )
    return parser.parse_args(argv)


def _export(named: str, out: Path, component: str, *, average: bool) -> str:
    path = Path(named).expanduser().absolute()
    if (exported := exported_policy(path, _KEY)) is not None:
        return _export_again(exported, _free(out), component, average=average)
    found = find(str(path), path.parent, _KEY)
    assert found is not None, "a path is found or refused"
    config = config_of(found.folder / CONFIG, _KEY)
    there = [c for c in _TRAINED if c in found.ranks]
    if component not in there:
        near = did_you_mean(component, there)
        why = "it has the weights of " + ", ".join(there)
        raise _wrong(
            "--component",
            "the checkpoint has no such weights",
            component,
            why,
            f"--component {near or _TRAINED[0]}",
        )
    if config.kind == "mlp" and average:
        raise _wrong(
            "--ema",
            "a simulator policy has no moving average",
            None,
            None,
            "leave out --ema",
        )
    _free(out, _FILES if config.kind == "mlp" else (), number=found.iteration)
    verify(found, _KEY)
    with _written(out):
        _write(found, out, component, config, average=average)
    which = f"the moving average of {component}" if average else component
    return f"{which} after {found.iteration} iterations, policy version {found.version}: {out}"


def _export_again(
    exported: Trained, out: Path, component: str, *, average: bool
) -> str:
    """Write a policy that was exported before in another form."""
    if component != "actor" or average:
        option = "--ema" if average else f"--component {component}"
        why = "weights of the actor alone were exported"
        raise _wrong(
            option,
            "it has no such weights",
            str(exported.folder),
            why,
            f"leave out {option}",
        )
    with _written(out):
        _write_policy(exported, out)
    return f"{exported.text}: {out}"


def _free(out: Path, files: Sequence[str] = _FILES, *, number: int = 2) -> Path:
    """Return the place to write to. Raises ConfigError where something is there, or `files` do not end like it."""
    near = did_you_mean(out.suffix[1:], [end[1:] for end in files])
    if (
        not out.exists()
        and out.suffix not in files
        and (near or out.suffix in (*_FILES, *_OTHER_FILES))
    ):
        ends = f"the end of the name says what is written: {', '.join(files)}, or none for a folder"
        why = ends if files else "a language model is written as a folder"
        raise _wrong(
            "OUT",
            "no such kind of file",
            str(out),
            why,
            str(out.with_suffix(f".{near}" if near else "")),
        )
    if not out.name:
        raise _wrong(
            "OUT",
            "is not the name of a new folder or file",
            str(out),
            None,
            "my_policy",
        )
    if out.exists():
        others = (
            out.with_name(f"{out.stem}_{n}{out.suffix}")
            for n in itertools.count(number)
        )
        free = next(other for other in others if not other.exists())
        raise _wrong(
            "OUT", "exists already", str(out), "an export overwrites nothing", str(free)
        )
    return out


@contextlib.contextmanager
def _written(out: Path) -> Iterator[None]:
    """Write the new folder or file inside. Raises OutputError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError.of(out, error, "OUT", "a place") from error
    except OutputError as error:
        raise OutputError(
            dataclasses.replace(error.problem, key="OUT", fix=_ELSEWHERE)
        ) from error


def _write(
    checkpoint: Checkpoint, out: Path, component: str, config: Config, *, average: bool
) -> None:
    folder = checkpoint.folder / component
    if config.kind == "mlp":
        _write_policy(
            Trained(weights=folder, config=config, checkpoint=checkpoint), out
        )
        return
    from rlplace.models.causal_lm import LmSpec, ValueLm
    from rlplace.models.saved_lm import write_lm
    from rlplace.models.vision import policy_of
    from rlplace.workers.roles.checks import folder_of

    job = Path(config.model_path)
    seed = config.runner.seed
    if component == "critic":
        own = folder_of(config.critic.model)
        spec = LmSpec.of(config.critic, component, seed, job_folder=job, own_folder=own)
        write_lm(folder, out, spec, ValueLm, average=average)
    else:
        spec = LmSpec.of(config.actor, component, seed, job_folder=job, own_folder=None)
        write_lm(folder, out, spec, policy_of(config, job), average=average)


def _write_policy(trained: Trained, out: Path) -> None:
    from rlplace.models.policy import policy_of, write_onnx, write_torchscript
    from rlplace.models.saved_state import write_policy

    if out.suffix in (".pt", ".onnx"):
        policy = policy_of(trained, seed=0, key=_KEY)
        (write_onnx if out.suffix == ".onnx" else write_torchscript)(policy, out)
        return
    weights = out if out.suffix == ".safetensors" else out / POLICY
    if weights != out:
        out.mkdir()
        shutil.copyfile(trained.folder / CONFIG, out / CONFIG)
    if trained.checkpoint is None:
        shutil.copyfile(trained.weights, weights)
    else:
        write_policy(trained.weights, weights)


def _wrong(
    key: str, what: str, got: str | None, why: str | None, fix: str
) -> ConfigError:
    return ConfigError.of("bad-option", key, what, got, why, fix)
