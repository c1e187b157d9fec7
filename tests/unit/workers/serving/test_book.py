"""What the server of a training API knows: the order of requests, models and saved weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.workers.serving.book import (
    Book,
    ServedModel,
    Snapshot,
    TooMany,
    Training,
    Wrong,
)
from rlplace.workers.serving.messages import SaveState


def book_of(folder: Path, *, models: int = 2, requests: int = 8, kept: int = 1) -> Book:
    served = ServedModel(
        names=("a-model",), folder=folder, longest=16, vocabulary=32, lora_rank=None
    )
    return Book(
        served, folder, models=models, requests=requests, silent_s=1e6, kept=kept
    )


def enter(book: Book, model: str, number: int) -> str:
    future = book.futures.promise(f"{model}:{number}")
    command = SaveState(folder="")
    book.enter(Training(future=future, model=model, command=command, result={}), number)
    return future.name


def test_requests_begin_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    with book.changed:
        model = book.new_model(book.open_session(), 0).name
        second = enter(book, model, 2)
        assert not book.has_training()
        first = enter(book, model, 1)
        taken = [book.take_training(), book.take_training(), book.take_training()]
    assert [work and work.future.name for work in taken] == [first, second, None]


def test_the_model_in_the_actor_comes_first(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    with book.changed:
        session = book.open_session()
        one = book.new_model(session, 0)
        two = book.new_model(session, 1)
        enter(book, one.name, 1)
        enter(book, two.name, 1)
        book.resident = two
        work = book.take_training()
        assert work is not None
        assert work.model == two.name


def test_models_and_requests_have_a_limit(tmp_path: Path) -> None:
    book = book_of(tmp_path, models=1, requests=1)
    with book.changed:
        session = book.open_session()
        model = book.new_model(session, 0)
        # The same request, sent twice
        assert book.new_model(session, 0) is model
        with pytest.raises(Wrong, match=r"serve\.models"):
            book.new_model(session, 1)
        enter(book, model.name, 1)
        with pytest.raises(TooMany, match="1 requests wait"):
            enter(book, model.name, 2)
        book.drop(model.name)
        with pytest.raises(Wrong, match="was unloaded"):
            book.model(model.name)
        # A client that has ended makes room
        book.new_model(session, 1)
        book.finish_session(session)
        book.new_model(book.open_session(), 0)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("tinker://../weights/x", "no path of weights"),
        (f"tinker://{'0' * 32}:train:0/weights/..", "no path of weights"),
        (f"tinker://{'0' * 32}:train:0/weights/a/b", "no path of weights"),
        (f"tinker://{'0' * 32}:train:0/weights/x", "there are no weights"),
        (f"tinker://{'0' * 32}:train:0/sampler_weights/x", "no weights to train on"),
    ],
)
def test_paths_lead_to_weights_of_the_server_alone(
    path: str, why: str, tmp_path: Path
) -> None:
    book = book_of(tmp_path)
    with book.changed, pytest.raises(Wrong, match=why):
        book.find(path, "weights")


def test_weights_are_found_once_they_are_whole(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    with book.changed:
        model = book.new_model(book.open_session(), 0).name
        for name in ("..", "a/b", ""):
            with pytest.raises(Wrong, match="have a name"):
                book.new_place(model, "weights", name, overwrite=False)
        path, folder = book.new_place(model, "weights", "one", overwrite=False)
        Path(folder).mkdir(parents=True)
        with pytest.raises(Wrong, match="there are no weights"):
            book.find(path, "weights")
        book.complete(folder)
        assert book.find(path, "weights") == folder
        with pytest.raises(Wrong, match="overwrite=True"):
            book.new_place(model, "weights", "one", overwrite=False)
    facts = json.loads((Path(folder) / "served.json").read_text(encoding="utf-8"))
    assert facts == {"base_model": "a-model", "lora_rank": None}


def test_the_newest_samplers_without_names_are_kept(tmp_path: Path) -> None:
    book = book_of(tmp_path, kept=1)
    with book.changed:
        model = book.new_model(book.open_session(), 0)
        folders = []
        for _ in range(2):
            folder = book.unnamed_place(model)
            Path(folder).mkdir(parents=True)
            book.keep_unnamed(model, folder)
            folders.append(folder)
        old, new = (Snapshot(weights=1, folder=folder) for folder in folders)
        (Path(folders[1]) / "model").mkdir()
        assert book.folder_of(new) == f"{folders[1]}/model"
        with pytest.raises(Wrong, match=r"serve\.kept_samplers"):
            book.folder_of(old)
