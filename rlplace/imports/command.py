"""`python -m rlplace.plan import LIBRARY SOURCE...`: write the converted config to standard output or a file.

The output is YAML. Comments below the config say what became of each setting. Exit codes: 0 imported, 2 wrong usage or
a config that cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlplace import codes
from rlplace.commands import typed
from rlplace.config.compose import with_defaults
from rlplace.config.yaml_text import to_yaml
from rlplace.errors import OutputError, ProblemsError, did_you_mean
from rlplace.imports.importer import (
    LANGUAGE_MODEL,
    SIMULATOR,
    Draft,
    Imported,
    MappingResult,
    Outcome,
)
from rlplace.imports.libraries import LIBRARIES, simulated
from rlplace.imports.nemo_rl import read_chain
from rlplace.imports.rules import Rules, read_rules
from rlplace.imports.scripts import Reading, Script, ran_script, read_script
from rlplace.imports.settings import (
    Setting,
    flags_of,
    leaves_of,
    overrides_of,
    read_flags,
    read_overrides,
    read_yaml,
    resolved,
    text_of,
)
from rlplace.imports.shell import command_words
from rlplace.imports.tiny import shrink
from rlplace.imports.trl import accelerate_settings, docstring_of, read_python
from rlplace.tables import indented, table
from rlplace.units import clipped, counted

USAGE = Path(__file__).with_name("usage.txt")

_NO_MEMORY = (
    "Its settings do not say how large an accelerator is: plan with "
    "cluster.accelerator.memory=80GiB or the like."
)
_COLUMN = 52  # largest width of the first column
_TRL = (".py", ".yaml", ".yml")  # of files of TRL that are no scripts of a shell
_FEW = 8  # arguments in the code of a script that has its own from the command line
_REASONS = 10  # lines of settings that have no key
# Title of each section, and the noun for counting
_SECTIONS: Mapping[Outcome, tuple[str, str]] = {
    "equal": ("Equal:", "equal"),
    "differs": ("Differs:", "differing"),
    "implied": ("Always true here, without a key:", "implied"),
    "unmapped": ("Not mapped:", "not mapped"),
    "unknown": ("Not known:", "not known"),
}


def run_import(words: list[str]) -> int:
    """Import the config of another library, write the converted config, and return the exit code.

    `words`: words of the command line after `import`.
    """
    if not words or "--help" in words[:1] or "-h" in words[:1]:
        sys.stdout.write(
            USAGE.read_text(encoding="utf-8").format(program=typed("plan"))
        )
        if words:
            return 0
        return 2
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--out", "--accelerators-per-node", "--launch", "--variable"):
        action = "append" if option == "--variable" else "store"
        parser.add_argument(option, nargs="?", const="", action=action)
    for switch in ("--tiny", "--all", "--run-script", "--run-trusted-script"):
        parser.add_argument(switch, action="store_true")
    try:
        words, arguments = _split(words)
        options, words = parser.parse_known_args(words)
        for option, value in (
            ("--out", options.out),
            ("--accelerators-per-node", options.accelerators_per_node),
            ("--launch", options.launch),
        ):
            if value == "":
                raise codes.config_error(
                    "import-flag-value", "import", option, error="option", option=option
                )
        reading = _reading(options, arguments)
        out = options.out
        width = options.accelerators_per_node
        if width is not None and not (width.isdecimal() and int(width) >= 1):
            raise codes.config_error("import-value", "import", width, error="per-node")
        library, *sources = words or [""]
        imported = import_words(library, sources, int(width or 0), reading)
        imported = shrink(imported) if options.tiny else imported
        if out is None:
            sys.stdout.write(render_yaml(imported, every=options.all))
            return 0
        try:
            text = render_yaml(imported, every=True)
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError.of(
                Path(out), error, "--out", "a file in a folder"
            ) from error
        sys.stdout.write(render_report(imported, every=options.all, file=out))
    except (ProblemsError, OutputError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _split(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the words before a word `--`, and those behind it.

    If a script is to be run, the latter are its arguments; otherwise `--` is a word of a command like any other.
    """
    if "--" not in words or not {"--run-script", "--run-trusted-script"} & {*words}:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def _reading(options: argparse.Namespace, arguments: tuple[str, ...]) -> Reading:
    """Return how launch scripts are read, by the options of the command line.

    `arguments`: arguments of the script. Raises ConfigError for options of a wrong form.
    """
    variables: dict[str, str] = {}
    for word in options.variable or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise codes.config_error("import-value", "import", word, error="variable")
        variables[name] = value
    launch = options.launch or "0"
    if not launch.isdecimal() or (options.launch and int(launch) < 1):
        raise codes.config_error("import-value", "import", launch, error="launch")
    return Reading(
        runs=options.run_script or options.run_trusted_script,
        trusted=options.run_trusted_script,
        launch=int(launch),
        variables=variables,
        arguments=arguments,
    )


def import_words(
    library: str,
    sources: Sequence[str],
    per_node: int = 0,
    reading: Reading | None = None,
) -> Imported:
    """Return the converted config of another library.

    `library`: name of the other library. `sources`: paths of files, or flags and overrides as they are typed.
    `per_node`: accelerators of a node; 0: as the original config says. `reading`: how launch scripts are read; None:
    as text. Raises ConfigError for an unknown library, or for sources that cannot be read or converted.
    """
    if library not in LIBRARIES:
        near = did_you_mean(library.lower(), LIBRARIES)
        raise codes.config_error(
            "import-library",
            "import",
            library,
            libraries=", ".join(LIBRARIES),
            near=near or "openrlhf",
        )
    if not sources:
        raise codes.config_error(
            "import-source",
            "import",
            f"import {library}",
            error="nothing",
            library=library,
        )
    settings, notes = _settings(library, sources, reading or Reading())
    return dataclasses.replace(
        import_settings(library, settings, per_node), notes=notes
    )


def import_settings(
    library: str, settings: Sequence[Setting], per_node: int = 0
) -> Imported:
    """Return the converted config from settings of another library that were read before.

    `per_node`: accelerators of a node; 0: as the original config says. Raises ConfigError for values that cannot be
    read.
    """
    target = LANGUAGE_MODEL
    if library == "rlinf" and simulated(settings):
        target = SIMULATOR
    rules = read_rules(library, target.job)
    # Older names of keys become the newest ones
    settings = [
        dataclasses.replace(s, key=rules.spellings.get(s.key, s.key)) for s in settings
    ]
    return LIBRARIES[library](Draft(settings, rules, target), per_node)


def _settings(
    library: str, sources: Sequence[str], reading: Reading
) -> tuple[list[Setting], tuple[str, ...]]:
    """Return the settings of the sources, and lines of text about how launch scripts were read.

    `library`, `sources`, `reading`: as for `import_words`.
    """
    rules = read_rules(library)
    files = [word for word in sources if _is_path(word)]
    typed_words = [word for word in sources if not _is_path(word)]
    # Only libraries with flags have `words_after`. Words behind a flag are no files.
    if library == "trl" and files and files[0] == sources[0]:
        files = list(itertools.takewhile(lambda word: word.endswith(_TRL), sources))
        if files:
            return _of_trl(files, sources[len(files) :], rules)
    if rules.words_after:
        files = [word for word in sources[:1] if _is_path(word)]
        typed_words = list(sources[len(files) :])
    scripts = {
        file: _script(file, reading)
        for file in files
        if file.endswith(".sh") or rules.words_after
    }
    notes = tuple(note for script in scripts.values() for note in script.notes)
    if rules.words_after:
        words = [word for script in scripts.values() for word in script.words]
        found = flags_of(words, rules.words_after, rules.read, rules.spellings)
        text = _joined(typed_words)
        found += read_flags(text, "", rules.words_after, rules.read, rules.spellings)
        return found, notes
    settings: list[Setting] = []
    for file in files:
        if file not in scripts:
            settings += _of_yaml(library, Path(file))
            continue
        config = scripts[file].config
        if config is not None:
            typed = [word for word, _ in scripts[file].words]
            settings += _of_yaml(library, config, typed)
        settings += overrides_of(scripts[file].words)
    settings += read_overrides(_joined(typed_words), "")
    return resolved(settings), notes


def _of_trl(
    files: Sequence[str], typed_words: Sequence[str], rules: Rules
) -> tuple[list[Setting], tuple[str, ...]]:
    """Return the settings of Python scripts and YAML files of TRL, and lines of text about how they were read.

    `typed_words`: flags, which count more.
    """
    settings: list[Setting] = []
    notes: list[str] = []

    def flags(text: str) -> list[Setting]:
        return read_flags(text, "", rules.words_after, rules.read, rules.spellings)

    for file in files:
        text = text_of(Path(file))
        if not file.endswith(".py"):
            settings += read_yaml(text, file)
            continue
        found = read_python(text, file)
        command = docstring_of(text)
        # A script without arguments in its code has them from its command line
        if typed_words or len(found) > _FEW or "--" not in command:
            notes.append(
                "The script was parsed and not run; values that are no constants are left out."
            )
        else:
            notes.append(
                "Its arguments are those of the command in its docstring; the script was not run."
            )
            words = command_words(command)
            settings += accelerate_settings(words, Path(file).parent)
            settings += flags(shlex.join(words))
        # What the code takes from the command line is no value of its own
        given = {setting.key for setting in settings}
        settings += [s for s in found if s.value is not None or s.key not in given]
    if typed_words:
        settings += flags(_joined(typed_words))
    return settings, tuple(notes)


def _of_yaml(library: str, file: Path, words: Sequence[str] = ()) -> list[Setting]:
    """Return the settings of a YAML file and of the files that it includes, as the library merges them.

    `words`: overrides. Those that choose a file in a folder beside the file replace an included file.
    """
    text = text_of(file)
    if library == "nemo_rl":
        return read_chain(file)
    choices = [
        word
        for word in words
        if re.fullmatch(r"[\w/]+=[\w/-]+", word)
        and (file.parent / word.partition("=")[0]).is_dir()
    ]
    return _with_defaults(file, text, choices)


def _script(file: str, reading: Reading) -> Script:
    """Return what is read of a launch script: by running it, or as text. Raises ConfigError."""
    text = text_of(Path(file))
    if reading.runs:
        return ran_script(Path(file), reading)
    return read_script(text, file, reading)


def _with_defaults(file: Path, text: str, choices: Sequence[str]) -> list[Setting]:
    """Return the settings of a YAML file and of the files that its `defaults` name, or that `choices` choose instead.

    If one of these files does not exist, only the settings of the file itself are returned. `text`: the text of the
    file.
    """
    written = read_yaml(text, str(file))
    if not any(setting.key.startswith("defaults") for setting in written):
        return written
    composed = with_defaults(file, choices)
    if composed is None:
        return written
    return leaves_of(composed.mapping, composed.sources)


def _joined(words: Sequence[str]) -> str:
    """Return the text of a command.

    `words`: the words of the command as a shell has split them; or a single word, which is the whole command.
    """
    if len(words) == 1:
        return words[0]
    return shlex.join(words)


def _is_path(word: str) -> bool:
    """Return whether a word is the path of a file. If not, it is a flag or an override.

    A missing file counts as a path, so that it is reported as missing.
    """
    if word.startswith("-") or " --" in word or "=" in word or "\n" in word:
        return False
    return os.path.isfile(word) or " " not in word


# ── the result as text ───────────────────────────────────────────────────────────────────────────────────────────────


def render_yaml(imported: Imported, *, every: bool = True) -> str:
    """Return the text of a YAML file with the converted config.

    Comments above the config are a summary. Comments below the config say what became of the settings. `every`: whether
    each setting that has no key has a line of its own; otherwise they are counted by reason.
    """
    return (
        _comment(_head(imported))
        + "\n"
        + to_yaml(imported.config)
        + "\n"
        + _comment(_body(imported, every=every, file=None))
    )


def render_report(
    imported: Imported, *, every: bool = True, file: str | None = None
) -> str:
    """Return a summary of the import, and what became of the settings, as text without the config.

    `every`: whether each setting that has no key has a line of its own. `file`: the file that has all lines; None: no
    such file.
    """
    lines = [*_head(imported), "", *_body(imported, every=every, file=file)]
    return "\n".join(lines) + "\n"


def _head(imported: Imported) -> list[str]:
    outcomes = [result.outcome for result in imported.results]
    counts = [counted(len(outcomes), "setting")]
    by_outcome = ", ".join(
        f"{outcomes.count(o)} {words}"
        for o, (_, words) in _SECTIONS.items()
        if o in outcomes
    )
    if by_outcome:
        counts.append(by_outcome)
    count = "; ".join(counts)
    where = f"On {imported.topology.describe()}"
    if imported.layout is not None:
        placement = imported.layout.placement
        savings = imported.layout.savings
        instead = f" instead of {savings.dedicated}" if savings.saved else ""
        where += f"; {placement.mode}, uses {savings.used}{instead} ({savings.sizes})"
    head = [f"Imported from {imported.library}: {count}.", f"{where}."]
    head += imported.notes
    if imported.topology.nodes[0].kind == "emulated":
        return head
    return [*head, _NO_MEMORY]


def _body(imported: Imported, *, every: bool, file: str | None) -> list[str]:
    """Return lines of text: the problems of the original, then its settings, grouped by what became of them.

    `every`: whether each setting that has no key has a line of its own. `file`: the file that has all lines.
    """
    lines: list[str] = []
    if imported.findings:
        lines.append("Does not hold:\n")
        for problem in imported.findings:
            lines += [
                *(f"  {line}" if line else "" for line in problem.render().split("\n")),
                "",
            ]
    sections: dict[str, list[tuple[str, str]]] = {}
    for outcome, (title, _) in _SECTIONS.items():
        results = [r for r in imported.results if r.outcome == outcome]
        if outcome == "unmapped" and not every:
            title = f"{title[:-1]}, by reason ({_details(file)}):"
            sections[title] = _by_reason(results)
        else:
            sections[title] = [_row(result) for result in results]
    sections["Added, because the original does not write it:"] = list(imported.assumed)
    for title, rows in sections.items():
        if rows:
            lines += [title, *indented(table(rows, gap=2, most=_COLUMN)), ""]
    if imported.missing:
        lines.append("Write these keys before a run: " + ", ".join(imported.missing))
    return "\n".join(lines).rstrip("\n").split("\n")


def _details(file: str | None) -> str:
    if file is None:
        return "--all lists each"
    return f"{file} lists each, as --all does"


def _by_reason(results: Sequence[MappingResult]) -> list[tuple[str, str]]:
    """Return at most `_REASONS` table rows for settings that have no key: (how many and which, the reason)."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        reasons.setdefault(result.text, []).append(result.setting.key)
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    shown = ordered if len(ordered) <= _REASONS else ordered[: _REASONS - 1]
    rows = [(_which(keys), reason) for reason, keys in shown]
    if rest := ordered[len(shown) :]:
        keys = [key for _, keys in rest for key in keys]
        rows.append((_which(keys), f"{len(rest)} other reasons"))
    return rows


def _which(keys: Sequence[str]) -> str:
    """Return how many settings there are, and the last names of the first ones."""
    names = list(dict.fromkeys(key.rpartition(".")[2] for key in keys))
    listed = names[0]
    for name in names[1:]:
        if len(listed) + len(name) > _COLUMN - 14:
            return f"{len(keys)}  {listed}, ..."
        listed += f", {name}"
    return f"{len(keys)}  {clipped(listed, _COLUMN - 4)}"


def _row(result: MappingResult) -> tuple[str, str]:
    """Return a table row: (a setting, what became of it).

    For a setting that is not known, the row has its place in the file and the nearest known name.
    """
    setting, source = str(result.setting), result.setting.source
    if result.outcome != "unknown":
        return setting, result.text
    where = f"     ({source})" if source is not None and source.line is not None else ""
    known = f"did you mean {'--' * setting.startswith('--')}{result.text}?"
    return (
        setting + where,
        known if result.text else "no setting of that name is known here",
    )


def _comment(lines: Sequence[str]) -> str:
    return "".join(
        f"# {line}".rstrip() + "\n" for text in lines for line in text.split("\n")
    )
