"""What saving the state of an actor costs: the part that blocks an iteration, and all of it beside a plain torch.save.

    python benchmarks/checkpoint.py [--gib 1] [--samples 16] [--repeat 3] [--folder .]

One rank in float32 on one thread, as an emulated accelerator computes; model and moments. Each turn makes an iteration
of learning alone, a save that is written behind such an iteration, a save that is waited for, and a torch.save of the
same tensors until they are on the disk. Shown are the medians of all turns. What an iteration has besides, generation
above all, is left out, so that shares are too large rather than too small.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lm_learning import made_up, write_model
from rlplace.checkpoints import failed, written
from rlplace.models.sharding import own
from rlplace.placement.schedule import Residency
from rlplace.workers.launch.devices import EmulatedDevice, MemoryAccount
from tests.lm_ranks import LmScenario, iterate, make_lm_worker
from tests.open_calls import slot_of
from tests.worker_ranks import listen, rendezvous_at

GIB = 1 << 30
EMBEDDING = 49152 * 576
LAYER = 3_540_096  # numbers of the model of lm_learning
NUMBER_BYTES = 12  # with both moments


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--folder",
        default=".",
        help="where it writes: a disk, if not this one; /tmp may be memory",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = made_up(options.samples)
    layers = max(1, round((options.gib * GIB / NUMBER_BYTES - EMBEDDING) / LAYER))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_model(Path(folder), layers)
        algorithm = {"prompts": len(groups), "samples_per_prompt": 4}
        scenario = LmScenario(
            model=Path(folder), algorithm=algorithm, trained={"token_budget": 1024}
        )
        device = EmulatedDevice(MemoryAccount([8 * GIB]), slot_of("actor", 0))
        actor = make_lm_worker(scenario, 0, rendezvous_at(listen()), device=device)
        actor.move(Residency.FULL)
        turns = [turn(actor, groups, Path(folder)) for _ in range(options.repeat + 1)][
            1:
        ]  # the first warms up
        size = sum(tensor.nbytes for tensor in actor._state().values())
        actor.close()
    seconds = {
        name: statistics.median(each[name] for each in turns) for name in turns[0]
    }
    print(
        f"{size / GIB:.2f} GiB of state, an iteration of {sum(s.weight for g in groups for s in g)} tokens\n"
    )
    print("| what | seconds | of an iteration |")
    print("|---|---|---|")
    for name, found in seconds.items():
        print(f"| {name} | {found:.2f} | {found / seconds['iteration']:.1%} |")


def turn(actor: Any, groups: Any, folder: Path) -> dict[str, float]:
    """Seconds of everything once."""
    found = {"iteration": seconds_of(lambda: iterate(actor, 0, groups))}
    behind = folder / "behind"
    alone = folder / "alone"
    plain = folder / "plain.pt"
    behind.mkdir()
    found["save, the part that blocks"] = seconds_of(
        lambda: actor.write_state(str(behind))
    )
    found["iteration in front of the rest"] = seconds_of(
        lambda: iterate(actor, 0, groups)
    )
    wait_for(behind)
    found["save, waited for"] = seconds_of(lambda: save(actor, alone))
    state = actor._state()
    found["torch.save"] = seconds_of(lambda: save_plainly(state, plain))
    shutil.rmtree(behind)
    shutil.rmtree(alone)
    plain.unlink()
    return found


def save(actor: Any, folder: Path) -> None:
    folder.mkdir()
    actor.write_state(str(folder))
    wait_for(folder)


def wait_for(folder: Path) -> None:
    while written(folder, 1) is None:
        if failed(folder):
            raise SystemExit(f"the save failed: {failed(folder)}")
        time.sleep(0.01)


def save_plainly(state: dict[str, torch.Tensor], file: Path) -> None:
    with open(file, "wb") as out:
        torch.save({name: own(tensor) for name, tensor in state.items()}, out)
        out.flush()
        os.fsync(out.fileno())


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
