"""`python -m rlplace.profile --config-name hybrid_ppo [key=value ...]`: measure the costs of a job, in seconds.

Exit codes: 0 measured, 1 the profile cannot be written, 2 wrong usage, config or placement, or no run could be
measured.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlplace.codes import config_error
from rlplace.commands import DONE, answered, typed
from rlplace.config import compose
from rlplace.config.options import OptionParser
from rlplace.contract.registry import job_of
from rlplace.errors import ClusterError, ConfigError, OutputError, ProblemsError
from rlplace.foresight.costs import fit_error, gathered
from rlplace.foresight.known import FILE
from rlplace.foresight.measure import Variant, run, variants
from rlplace.foresight.profile import Curve, Profile
from rlplace.runtime.prepare import Prepared, prepare, prepare_composed
from rlplace.tables import table

LEAST_ITERATIONS = 3  # fewest iterations; the first two are not counted


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the costs of a job, write the costs to a profile file, and return the exit code.

    `argv`: words of the command line, without the program; None: the command line of this process.
    """
    return answered(lambda: _measure(sys.argv[1:] if argv is None else argv))


def _measure(argv: Sequence[str]) -> int:
    about = "Runs a job for a few iterations under several placements; the profile says what each part of it takes."
    parser = OptionParser(
        typed("profile"),
        word_of=compose.word_of,
        reader=compose.options_meant,
        description=about,
    )
    parser.add_argument(
        "--out", help="the file to write; a folder beside the job's runs otherwise"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=8,
        help="of each run; the first two are left out (8)",
    )
    parser.add_argument(
        "--config-name", metavar="NAME", help="the config, as for train"
    )
    parser.epilog = "key=value: overrides of the config. The profile is used by plan, train and search: profile=FILE"
    options, words = parser.parse_known_args(argv)
    parser.refuse_unknown(words, compose.FLAGS)
    for word in words:
        if word.lstrip("+").partition("=")[0] == "profile":
            raise config_error(
                "bad-option",
                "profile",
                word,
                error="profile",
                file=word.partition("=")[2] or FILE,
            )
    if options.iterations < LEAST_ITERATIONS:
        raise config_error(
            "bad-option",
            "--iterations",
            str(options.iterations),
            error="iterations",
            least=LEAST_ITERATIONS,
        )
    named = [f"--config-name={options.config_name}"] if options.config_name else []
    jobs = compose.with_hydra([*named, *words])
    if len(jobs) != 1:
        raise config_error("bad-option", "--multirun", str(len(jobs)), error="sweep")
    (composed,) = jobs
    job = prepare_composed(composed)
    placement = job.plan.placement
    accelerators = placement.topology.num_accelerators
    # A custom component without accelerators may not work on one, so it stays where it is.
    own = job_of(job.config).components
    staying = [c for c in own if not placement.accelerators(c)]
    found = distinct(variants(composed.mapping, accelerators, staying))
    valid = [v for v in found if runs(v)]
    if not valid:
        error = "no-placement"
        if job.shortages:
            error = "shortages"
        raise config_error(
            "profile-run-failed",
            "profile",
            error=error,
            shortages=job.shortages,
            train=_command("train", job),
        )
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(job.config.runner.output_dir) / composed.name / f"profile_{stamp}"
    file = folder / FILE if options.out is None else Path(options.out)
    written = (
        ("runner.output_dir", "a folder")
        if options.out is None
        else ("--out", "a file")
    )
    # Check that the output can be written before any run.
    _write(file, "", *written)
    profile = _run_all(valid, options.iterations)
    _write(file, json.dumps(profile.record(), indent=1) + "\n", *written)
    print("\n" + render(profile))
    print(f"\nprofile    {file}")
    print(f"use it     {_command('plan', job)} {shlex.quote(f'profile={file}')}")
    return DONE


def _command(module: str, job: Prepared) -> str:
    """Return a command line for the same config: `python -m rlplace.<module>` with the job's words."""
    return shlex.join(["python", "-m", f"rlplace.{module}", *job.words])


def distinct(found: Iterable[Variant]) -> list[Variant]:
    """Return the variants of a config, without variants that repeat the placement of an earlier variant."""
    seen: dict[str, Variant] = {}
    for variant in found:
        key = json.dumps(
            [variant.mapping["cluster"], variant.mapping.get("rollout")],
            sort_keys=True,
            default=str,
        )
        seen.setdefault(key, variant)
    return list(seen.values())


def runs(variant: Variant) -> bool:
    """Return whether a variant of a config can run: its plan is valid and fits in memory."""
    try:
        job: Prepared = prepare(variant.mapping, name=variant.name)
    except (ProblemsError, ClusterError):
        return False
    return not (job.refused or job.not_run)


def _write(file: Path, text: str, key: str, place: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.of(file, error, key, place) from error


def _run_all(found: Sequence[Variant], iterations: int) -> Profile:
    """Run each variant, and return one profile with the measured costs of all runs.

    A variant that fails is left out; if all fail, the first error is raised. `iterations`: number of iterations of each
    run.
    """
    profile: Profile | None = None
    failed: ConfigError | None = None
    for number, variant in enumerate(found, 1):
        print(f"{number} of {len(found)}  {variant.name}: ", end="", flush=True)
        began = time.perf_counter()
        try:
            measured = run(variant, iterations)
        except ConfigError as error:
            print("failed, left out", flush=True)
            print(error, file=sys.stderr)
            failed = failed or error
            continue
        seconds = measured.seconds["iteration"]["measured"]
        print(
            f"{seconds:.3g} s an iteration, {time.perf_counter() - began:.0f} s in all",
            flush=True,
        )
        profile = (
            measured.profile if profile is None else profile.merged(measured.profile)
        )
    if profile is None:
        assert failed is not None, "there is something to run"
        raise failed
    return profile


def render(profile: Profile) -> str:
    """Return the costs of a profile as a table, with one row for each cost.

    A row shows the sizes that were measured, the processor time of one execution (a lap), the spread of this time, and
    its distance from a straight line over the sizes.
    """
    rows = [("cost", "sizes", "processor time of a lap", "varies", "off the line")]
    for name, curve in sorted(profile.costs.items()):
        rows.append((name, *_row(curve)))
    return "\n".join(table(rows, gap=2))


def _row(curve: Curve) -> tuple[str, str, str, str]:
    points = gathered(curve.points)
    ends = [points[0], points[-1]] if len(points) > 1 else list(points)
    sizes = (
        " - ".join(f"{point.size:.4g}" for point in ends) if points[-1].size else "-"
    )
    more = f" ({len(points)})" if len(points) > 2 else ""
    seconds = " - ".join(f"{point.cpu_s * 1e3:.3g}" for point in ends) + " ms"
    varies = max(point.spread for point in points)
    off = fit_error(points)
    return (
        sizes + more,
        seconds,
        f"{varies:.0%}",
        f"{off:.0%}" if len(points) > 2 else "-",
    )
