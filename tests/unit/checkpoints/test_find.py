"""Which checkpoint a run goes on with, and what every kind of bad checkpoint or path is answered."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.checkpoints.find import find, verify
from rlplace.checkpoints.store import Store
from rlplace.errors import ConfigError
from tests.checkpoint_writer import RANKS, save, write_ranks


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A job with two runs of two checkpoints each; the last one was killed while it wrote a third."""
    runs = tmp_path / "runs" / "hybrid_ppo"
    for day in (21, 22):
        run = runs / f"2026-11-{day}_10-00-00"
        run.mkdir(parents=True)
        store = Store(run, keep_last=2, keep_best=0)
        for iteration in (10, 20):
            save(store, iteration)
    write_ranks(store.begin(30, RANKS))
    return runs


def newest(runs: Path, resume: str = "auto") -> Checkpoint:
    found = find(resume, runs)
    assert found is not None
    return found


@contextmanager
def refused(code: str, *told: str, leaving: Path) -> Iterator[None]:
    """Expect an error with these texts, and that no file below `leaving` changes."""
    before = content(leaving)
    with pytest.raises(ConfigError) as error:
        yield
    assert set(error.value.codes) == {code}
    text = str(error.value)
    assert text.startswith("resume: ")
    assert [t for t in (*told, "fix: ") if t not in text] == [], text
    assert content(leaving) == before


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def offered(error: str) -> str:
    """The path of a fix."""
    found = re.search(r"fix: resume=(.*)", error)
    assert found, error
    return found[1]


def test_auto_is_the_newest_whole_one_of_the_run_that_saved_last(runs: Path) -> None:
    last = runs / "2026-11-22_10-00-00" / "checkpoints" / "000020"
    assert (newest(runs).folder, newest(runs).notes) == (last, ())
    save(
        Store(runs / "2026-11-21_10-00-00", keep_last=2, keep_best=0), 30
    )  # this run was resumed
    assert (
        newest(runs).folder == runs / "2026-11-21_10-00-00" / "checkpoints" / "000030"
    )


def touch(run: Path) -> None:
    """Give all files and folders of a run the time of an hour from now, as a copy has a later one."""
    later = time.time() + 3600.0
    for path in (run, *run.rglob("*")):
        os.utime(path, (later, later))


def told_of(checkpoint: Checkpoint) -> str:
    return "\n".join(checkpoint.chosen)


def test_an_older_run_that_was_touched_is_not_the_newest(runs: Path) -> None:
    older, newer = (runs / f"2026-11-{day}_10-00-00" for day in (21, 22))
    touch(older)
    found = newest(runs)
    assert found.run == newer
    # The one that was taken, why, and the other one with the line that takes it
    assert f"of 2 runs, {newer.name} saved last: 20" in told_of(found)
    assert "UTC after 20 iterations" in told_of(found)
    assert f"not taken: resume={older}, saved 20" in told_of(found)


def test_a_copy_of_a_run_changes_nothing(runs: Path) -> None:
    older, newer = (runs / f"2026-11-{day}_10-00-00" for day in (21, 22))
    for run, name in ((older, "before"), (newer, "best")):
        shutil.copytree(run, runs / name)
        touch(runs / name)
    found = newest(runs)
    assert found.run == newer
    copied = f"not taken: resume={runs / 'best'}, saved"
    (line,) = (line for line in found.chosen if copied in line)
    assert line.endswith("one is a copy of the other")
    # A copy that was trained on is a run of its own.
    save(Store(runs / "before", keep_last=2, keep_best=0), 30)
    assert newest(runs).run == runs / "before"


def test_a_run_that_has_gone_further_is_named(runs: Path) -> None:
    started_anew = runs / "2026-11-23_10-00-00"
    save(Store(started_anew, keep_last=2, keep_best=0), 3)
    found = newest(runs)
    assert (found.run, found.iteration) == (started_anew, 3)
    assert told_of(found).count("it has more iterations") == 2


def saved_as(checkpoint: Path, saved_at: str | None) -> None:
    """Let a manifest say that its checkpoint was saved at another time; None: as older versions, not at all."""
    manifest = checkpoint / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["saved_at"]
    if saved_at is not None:
        values["saved_at"] = saved_at
    manifest.write_text(json.dumps(values))


def test_a_time_in_the_future_is_of_a_wrong_clock(runs: Path) -> None:
    older, newer = (runs / f"2026-11-{day}_10-00-00" for day in (21, 22))
    saved_as(older / "checkpoints" / "000020", "2126-11-21T10:00:00+00:00")
    found = newest(runs)
    assert found.run == newer
    assert "saved 2126-11-21 10:00:00 UTC after 20 iterations; this time is in" in (
        told_of(found)
    )
    # It is taken if there is no other, without a word.
    shutil.rmtree(newer)
    assert (newest(runs).run, newest(runs).chosen) == (older, ())


def test_checkpoints_of_older_versions_have_the_time_of_their_file(runs: Path) -> None:
    older, newer = (runs / f"2026-11-{day}_10-00-00" for day in (21, 22))
    for run in (older, newer):
        for iteration in (10, 20):
            saved_as(run / "checkpoints" / f"{iteration:06}", None)
    os.utime(newer / "checkpoints" / "000020" / "manifest.json", (5e8, 5e8))
    os.utime(newer / "checkpoints" / "000010" / "manifest.json", (5e8, 5e8))
    found = newest(runs)
    assert (found.run, found.saved_at) == (older, None)
    assert "saved 1985-11-05 00:53:20 UTC by the time of its file" in told_of(found)


@pytest.mark.parametrize("written", ["yesterday", 7, "2026-11-21T10:00:00", []])
def test_a_time_that_is_none_is_damage(runs: Path, written: object) -> None:
    manifest = runs / "2026-11-22_10-00-00" / "checkpoints" / "000020" / "manifest.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "saved_at": written}))
    found = newest(runs)
    assert found.folder.name == "000010"
    assert str(manifest) in found.notes[0]


def test_a_job_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert find("auto", tmp_path / "never") is None
    run = tmp_path / "runs" / "2026-11-22_10-00-00"
    run.mkdir(parents=True)
    write_ranks(Store(run, keep_last=1, keep_best=0).begin(10, RANKS))
    assert find("auto", tmp_path / "runs") is None


def test_a_path_is_a_run_or_its_checkpoints_or_one_of_them_or_a_copy(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs / "2026-11-21_10-00-00"
    last = run / "checkpoints" / "000020"
    for path in (run, run / "checkpoints", last):
        assert newest(runs, str(path)).folder == last
    shutil.copytree(
        run / "checkpoints" / "000010", tmp_path / "good" / "checkpoints" / "000010"
    )
    copy = newest(runs, str(tmp_path / "good"))
    assert (copy.iteration, copy.run) == (10, tmp_path / "good")
    verify(copy)
    monkeypatch.chdir(last.parent)
    assert newest(runs, "000010").run == run


def test_a_checkpoint_outside_of_a_run_has_no_place_to_go_on(
    runs: Path, tmp_path: Path
) -> None:
    for name in ("good_one", "000010"):
        shutil.copytree(
            runs / "2026-11-21_10-00-00" / "checkpoints" / "000010", tmp_path / name
        )
        with refused(
            "not-a-checkpoint",
            "has to be in the folder of a run",
            "<run>/checkpoints/",
            leaving=tmp_path,
        ):
            find(str(tmp_path / name), runs)


def test_latest_is_for_people(runs: Path) -> None:
    latest = runs / "2026-11-22_10-00-00" / "checkpoints" / "latest"
    latest.write_text("000010\n")
    assert newest(runs).iteration == 20
    latest.unlink()
    assert newest(runs).iteration == 20


def truncate(file: Path) -> None:
    os.truncate(file, 100)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "expected 5,000 bytes, found 100"),
        (remove, "expected 5,000 bytes, found no file"),
    ],
)
def test_a_file_that_lacks_bytes(runs: Path, damage: object, told: str) -> None:
    run = runs / "2026-11-22_10-00-00"
    file = run / "checkpoints" / "000020" / "actor" / "shard_0.bin"
    damage(file)
    found = newest(runs)
    assert found.folder.name == "000010"
    assert len(found.notes) == 1
    assert str(file) in found.notes[0]
    assert told in found.notes[0]
    whole = run / "checkpoints" / "000010"
    for path in (run, run / "checkpoints" / "000020"):
        with refused(
            "checkpoint-damaged", str(file), told, f"fix: resume={whole}", leaving=runs
        ):
            find(str(path), runs)


def test_a_changed_bit_is_found_by_reading_all(runs: Path) -> None:
    found = newest(runs)
    before = found.folder.with_name("000010")
    for name in ("env/shard_0.bin", "actor/shard_1.bin"):
        changed = bytearray((found.folder / name).read_bytes())
        changed[1234] ^= 1
        (found.folder / name).write_bytes(changed)
    with refused(
        "checkpoint-damaged",
        "shard_0.bin",
        "shard_1.bin",
        "expected SHA-256",
        str(before),
        leaving=runs,
    ):
        verify(found)
    assert newest(runs).folder == before
    assert ["expected SHA-256" in note for note in newest(runs).notes] == [True, True]
    (runs / "2026-11-21_10-00-00" / "checkpoints").rename(runs / "kept")
    shutil.rmtree(before)
    with refused(
        "checkpoint-damaged", "shard_0.bin", "shard_1.bin", "resume=null", leaving=runs
    ):
        find("auto", runs)


def test_without_a_whole_one_auto_does_not_start_anew(runs: Path) -> None:
    for file in runs.rglob("plan.json"):
        file.unlink()
    with refused("checkpoint-damaged", "plan.json", "resume=null", leaving=runs):
        find("auto", runs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "files": {"a": 3}}',
        "\udcff",
        '{"format": "one"}',
        "[" * 200_000,
    ],
)
def test_a_manifest_that_is_none(runs: Path, text: str) -> None:
    manifest = newest(runs).folder / "manifest.json"
    manifest.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert newest(runs).folder.name == "000010"
    with refused("checkpoint-damaged", str(manifest), "/000010", leaving=runs):
        find(str(manifest.parent), runs)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("format", 0, "its format is 0"),
        ("format", "1", "its format is '1'"),
        ("format", None, "its format is None"),
        ("format", True, "its format is True"),
        ("files", {}, "it lists no file"),
        ("ranks", {}, "it lists files of actor, which has no ranks"),
        ("iteration", 10**30, f"its iteration is {10**30}, and its folder is 000020"),
    ],
)
def test_a_manifest_with_other_values_is_damaged(
    runs: Path, name: str, value: object, said: str
) -> None:
    manifest = newest(runs).folder / "manifest.json"
    assert newest(runs).folder.name == "000020"
    values = json.loads(manifest.read_text()) | {name: value}
    manifest.write_text(json.dumps(values))
    with refused("checkpoint-damaged", str(manifest), said, leaving=runs):
        find(str(manifest.parent), runs)
    # `auto` takes the one before.
    assert newest(runs).folder.name == "000010"


def test_a_manifest_cannot_name_files_elsewhere(runs: Path) -> None:
    manifest = newest(runs).folder / "manifest.json"
    for name in ("/etc/hostname", "../000010/plan.json"):
        values = json.loads(manifest.read_text())
        values["files"][name] = {"bytes": 1, "sha256": ""}
        manifest.write_text(json.dumps(values))
        with refused(
            "checkpoint-damaged", "is outside of the checkpoint", leaving=runs
        ):
            find(str(manifest.parent), runs)


def test_a_newer_format_is_not_passed_over(runs: Path) -> None:
    manifest = newest(runs).folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    for resume in ("auto", str(manifest.parent)):
        with refused(
            "checkpoint-newer",
            str(manifest),
            "expected format 1 or lower, found 2",
            leaving=runs,
        ):
            find(resume, runs)


def test_a_manifest_that_cannot_be_read(runs: Path) -> None:
    manifest = newest(runs).folder / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    with refused(
        "checkpoint-unreadable", str(manifest), "Is a directory", leaving=runs
    ):
        find("auto", runs)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
def test_a_checkpoint_of_another_user(runs: Path) -> None:
    for folder in list(runs.parents)[:-2]:
        folder.chmod(0o755)
    found = newest(runs)
    shard = found.folder / "actor" / "shard_0.bin"
    shard.chmod(0o600)
    folder = newest(runs).run / "checkpoints"
    with (
        as_nobody(),
        refused(
            "checkpoint-unreadable",
            str(shard),
            "Permission denied",
            leaving=runs / "none",
        ),
    ):
        verify(found)
    folder.chmod(0o700)
    with as_nobody():
        other = newest(runs)
        assert (other.run.name, len(other.notes)) == ("2026-11-21_10-00-00", 1)
        assert str(folder) in other.notes[0]
        with refused(
            "resume-not-found", f"fix: resume={other.folder}", leaving=runs / "none"
        ):
            find(str(runs.parent / "elsewhere"), runs)
    for run in runs.iterdir():
        run.chmod(0o700)
    with (
        as_nobody(),
        refused(
            "checkpoint-unreadable",
            str(folder),
            "Permission denied",
            leaving=runs / "none",
        ),
    ):
        find("auto", runs)


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_path_that_does_not_exist_is_answered_with_what_is_there(
    runs: Path, tmp_path: Path
) -> None:
    last = runs / "2026-11-22_10-00-00"
    (tmp_path / "model").mkdir()
    offers = {
        tmp_path / "modle": last
        / "checkpoints"
        / "000020",  # what is called nearly so has no checkpoint
        runs / "2026-11-22_10-00-01": last,
        last / "checkpoints" / "000030": last / "checkpoints" / "000020",
        runs.parent / "hybrid_pp" / "2026-11-22_10-00-00": last,
        tmp_path / "elsewhere": last / "checkpoints" / "000020",
    }
    for path, offer in offers.items():
        with pytest.raises(ConfigError) as error:
            find(str(path), runs)
        assert error.value.codes == ("resume-not-found",)
        assert (str(path) in str(error.value), offered(str(error.value))) == (
            True,
            str(offer),
        )
        assert newest(runs, offered(str(error.value))).run == last


def test_a_word_for_the_newest_is_answered_with_auto(runs: Path) -> None:
    for word in ("latest", "last", "true"):
        with pytest.raises(ConfigError) as error:
            find(word, runs)
        assert "fix: resume=auto" in str(error.value)


def test_a_folder_that_is_no_checkpoint(runs: Path, tmp_path: Path) -> None:
    model, run = tmp_path / "model", runs / "2026-11-22_10-00-00"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    last = str(run / "checkpoints" / "000020")
    cases = {
        model: "they can be a start: actor.model.path",
        model / "model.safetensors": "they can be a start: actor.model.path",
        run
        / "checkpoints"
        / "000030.part": "the run ended while it wrote this checkpoint",
        runs: "a checkpoint has manifest.json, a run has checkpoints/",
    }
    for path, told in cases.items():
        with refused(
            "not-a-checkpoint", str(path), told, f"resume={last}", leaving=tmp_path
        ):
            find(str(path), runs)
    empty = runs / "2026-11-20_10-00-00"
    (empty / "checkpoints").mkdir(parents=True)
    with refused(
        "no-checkpoint",
        str(empty),
        "before its first checkpoint was complete",
        f"resume={last}",
        leaving=tmp_path,
    ):
        find(str(empty), runs)


def test_a_part_that_lacks_only_its_name_is_not_taken(runs: Path) -> None:
    """The process was killed between the manifest and the rename."""
    whole = newest(runs)
    part = whole.folder.with_name("000040.part")
    shutil.copytree(whole.folder, part)
    assert newest(runs) == whole
    with refused("not-a-checkpoint", str(part), leaving=runs):
        find(str(part), runs)


def test_the_key_of_an_error_is_that_of_who_asks(runs: Path) -> None:
    last = runs / "2026-11-22_10-00-00" / "checkpoints" / "000020"
    with pytest.raises(
        ConfigError,
        match=rf"^CHECKPOINT: the path does not exist[^$]*fix: {re.escape(str(last))}$",
    ):
        find(str(runs / "none"), runs, "CHECKPOINT")


def test_a_checkpoint_is_a_value(runs: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        newest(runs).iteration = 3
