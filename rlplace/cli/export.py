"""`python -m rlplace.export CHECKPOINT OUT`: export the model of a checkpoint for other programs.

Exit codes: 0 written, 1 the model cannot be written, 2 wrong usage or no such checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlplace.commands import DONE, answered, typed
from rlplace.config.options import Meaning, OptionParser, of_other_programs
from rlplace.contract.registry import job_of
from rlplace.contract.requests import ExportRequest
from rlplace.contract.trained import find_trained
from rlplace.units import counted

_KEY = "CHECKPOINT"
# Name of a format -> the end of a file's name
_ENDS = {
    "onnx": ".onnx",
    "safetensors": ".safetensors",
    **dict.fromkeys(("pt", "pth", "torch", "pytorch", "torchscript"), ".pt"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Export the model of a checkpoint, print the path to which it was written, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """

    def command() -> int:
        options = _options(sys.argv[1:] if argv is None else argv)
        print(
            _export(
                options.checkpoint,
                Path(options.out),
                options.component,
                average=options.ema,
                adapter=options.adapter,
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
    parser = OptionParser(
        typed("export"),
        description=about,
        reader=lambda words: of_other_programs(words, _meant),
        check=lambda run: find_trained(run, _KEY, verified=False),
    )
    parser.add_argument(
        "checkpoint",
        metavar=_KEY,
        help="the folder of a checkpoint, of a run: its newest, of runs: the run that saved last, or of an export",
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
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="the LoRA factors alone, as an adapter of PEFT",
    )
    return parser.parse_args(argv)


def _meant(name: str, value: str) -> Meaning | None:
    """Return what is meant by an option of another program: the format is the end of the name of the file."""
    format_ = value if name in ("format", "type", "to") else name
    reason = "the end of the name OUT says the format: .safetensors, .pt (TorchScript) or .onnx"
    end = _ENDS.get(format_.lower().removeprefix("."))
    if end is not None:
        return Meaning(f"policy{end}        (as the word OUT)", reason)
    if name in ("output", "o", "output_dir", "to", "save_path") and value:
        return Meaning(value, "OUT has no name of an option")
    return None


def _export(
    named: str, out: Path, component: str, *, average: bool, adapter: bool
) -> str:
    # The job verifies the files later, after the options.
    trained = find_trained(named, _KEY, verified=False)
    request = ExportRequest(
        key=_KEY, out=out, component=component, average=average, adapter=adapter
    )
    job_of(trained.config).export(trained, request)
    found = trained.checkpoint
    if found is None:
        return f"{trained.text}: {out}"
    which = f"the moving average of {component}" if average else component
    if adapter:
        which = f"the LoRA factors of {which}"
    return f"{which} after {counted(found.iteration, 'iteration')}, policy version {found.version}: {out}"
