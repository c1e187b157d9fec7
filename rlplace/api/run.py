"""A run as an object: its folder, summary, metrics, config and policy, read from what the run has written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlplace.cli.evaluate import evaluated, read_line
from rlplace.cli.runs import read
from rlplace.codes import config_error
from rlplace.json_text import read_object
from rlplace.report.record import SUMMARY, read_config, read_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from rlplace.models.policy import Policy

_KEY = "path"


class Run:
    """A run that has ended or is in progress. Its properties read the files that the run has written.

    `folder`: the folder of the run, with checkpoints, metrics, report and policy.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a run. `folder`: the folder of the run. Raises ConfigError if it is not the folder of a run."""
        self.folder = Path(folder).expanduser()
        self.config: Mapping[str, Any] = read_config(self.folder, _KEY)

    @property
    def name(self) -> str:
        """The name of the run's config."""
        return self.folder.absolute().parent.name

    @property
    def state(self) -> str:
        """How the run ended: finished, stopped by a signal, failed, or not started; or running."""
        return read(self.folder).state

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of summary.json, such as `return_last` and `train_s`; empty if the run has not written it yet."""
        try:
            return read_object(self.folder / SUMMARY, _KEY)
        except FileNotFoundError:
            return {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each iteration, in order: name -> value. A value that is not finite is None."""
        return read_rows(self.folder, _KEY)

    @property
    def metrics(self) -> DataFrame:
        """The metrics as a pandas DataFrame with a row for each iteration. Without pandas, use `rows`.

        Raises ConfigError if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise config_error(
                "missing-library", "metrics", "pandas", error="pandas"
            ) from error
        frame = pandas.DataFrame(self.rows())
        if frame.empty:
            return frame
        return frame.set_index("iteration")

    @functools.cached_property
    def policy(self) -> Policy:
        """The trained policy: `run.policy.act(observation)`. For a simulator; the import of torch takes a second.

        The policy of the newest checkpoint is loaded once. Raises ConfigError if the run has saved none.
        """
        from rlplace.contract.trained import load_policy

        return cast("Policy", load_policy(self.folder, key=_KEY))

    def evaluate(
        self,
        episodes: int | None = None,
        *,
        seed: int = 0,
        deterministic: bool = True,
        longest: int | None = None,
        video: str | Path | None = None,
        transcripts: str | Path | None = None,
    ) -> Mapping[str, Any]:
        """Evaluate the trained policy, as the command `rlplace evaluate` does, and return the numbers.

        `episodes`: whole episodes, or prompts of a language model; None: 20, or as many as in the run's evaluations.
        `seed`: seed of simulators and of sampled actions. `deterministic`: whether to take the likeliest actions
        instead of samples. `longest`: most steps of an episode; None: 100,000. `video`: file for a video, .mp4 or .gif.
        `transcripts`: file for the answers of a language model. Raises ConfigError.
        """
        given = {
            "episodes": episodes,
            "longest": longest,
            "video": video,
            "transcripts": transcripts,
        }
        words = [f"{key}={value}" for key, value in given.items() if value is not None]
        words += [f"seed={seed}", f"deterministic={str(deterministic).lower()}"]
        return evaluated(read_line([str(self.folder), *words])).report

    @property
    def report(self) -> Path:
        """The path of the HTML report of the run. The run writes the report when it ends."""
        return self.folder / "report.html"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self._line()})"

    def _repr_html_(self) -> str:
        """Return one line about the run, which a notebook displays, with a link to the report."""
        shown = f"<code>{escape(str(self.folder))}</code>: {escape(self._line())}"
        if self.report.is_file():
            shown += f', <a href="{escape(str(self.report))}">report</a>'
        return shown

    def _line(self) -> str:
        """Return the state of the run, its iterations, and its last return or reward."""
        found = read(self.folder)
        line = f"{found.state}, {found.iterations:,} iterations"
        if found.last is not None:
            line += f", last {self.summary.get('score', 'score')} {found.last:,.4g}"
        return line


def load_run(path: str | Path) -> Run:
    """Return a run that has ended or is still in progress. `path`: the folder of the run. Raises ConfigError."""
    return Run(path)
