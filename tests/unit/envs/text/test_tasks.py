"""Shipped tasks: what they ask follows from the seed and the number, and they play by their rules."""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlplace.envs.text import Image, Message, TextTask, Transcript
from rlplace.envs.text.rewards import reasoning_score
from rlplace.envs.text.right_answers import written_answers
from rlplace.envs.text.rows import Epochs, Share, read_rows
from rlplace.envs.text.tasks import (
    Arithmetic,
    Guessing,
    GuessNumber,
    PromptSet,
    ReasoningGym,
    ToyText,
)
from rlplace.errors import ConfigError, Problem


def problem_of(make: Callable[[], object]) -> Problem:
    with pytest.raises(ConfigError) as caught:
        make()
    (problem,) = caught.value.problems
    return problem


def taxi() -> str:
    """Return the name that the taxi has in the Gymnasium that is here."""
    import gymnasium

    return max(name for name in gymnasium.registry if name.startswith("Taxi-"))


MAKERS: dict[str, Callable[..., TextTask]] = {
    "arithmetic": lambda **k: Arithmetic(digits=3, operations=("+", "-", "*"), **k),
    "guess_number": lambda **k: GuessNumber(highest=10_000, **k),
    "toy_text": lambda **k: ToyText(game=taxi(), **k),
    "reasoning_gym": lambda **k: ReasoningGym(dataset="chain_sum", **k),
}


def told(task: TextTask, numbers: range = range(20)) -> list[str]:
    """What 20 episodes ask, with the answers that they know."""
    return [
        f"{episode.prompt} {dict(episode.facts())}"
        for episode in map(task.episode, numbers)
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_asked_follows_from_seed_split_and_number_alone(name: str) -> None:
    make = MAKERS[name]
    train = make(seed=3, split="train")
    assert train.size is None
    assert told(train) == told(make(seed=3, split="train"))
    assert told(train, range(19, 9, -1)) == told(train)[:9:-1]
    assert told(train) != told(make(seed=4, split="train"))
    assert told(train) != told(make(seed=3, split="held_out"))


def test_a_game_that_another_version_of_gymnasium_has_names_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gymnasium

    here, other = taxi(), "Taxi-v4" if taxi() == "Taxi-v3" else "Taxi-v3"
    left = {name: spec for name, spec in gymnasium.registry.items() if name != other}
    monkeypatch.setattr(gymnasium, "registry", left)
    found = problem_of(lambda: ToyText(seed=0, split="train", game=other))
    assert here in str(found.fix)
    assert gymnasium.__version__ in str(found.why)


@pytest.mark.parametrize(
    ("sign", "value"), [("+", operator.add), ("-", operator.sub), ("*", operator.mul)]
)
def test_arithmetic_knows_the_answer(
    sign: str, value: Callable[[int, int], int]
) -> None:
    task = Arithmetic(
        seed=0, split="train", digits=2, operations=(sign,), template="{problem}="
    )
    for episode in map(task.episode, range(20)):
        left, right = map(int, str(episode.prompt).removesuffix("=").split(f" {sign} "))
        assert 10 <= min(left, right) <= max(left, right) <= 99
        assert episode.facts()["answer"] == str(value(left, right))
        assert episode.reply("anything") is None


def test_what_arithmetic_holds_out_is_never_trained_on() -> None:
    train, held_out = (
        {
            Arithmetic(seed=seed, split=split).episode(n).prompt
            for seed in range(3)
            for n in range(200)
        }
        for split in ("train", "held_out")
    )
    assert train
    assert held_out
    assert train & held_out == set()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"digits": 0}, "digits"),
        ({"operations": ("/",)}, "operations"),
        ({"template": "What?"}, "{problem}"),
    ],
)
def test_arithmetic_refuses(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Arithmetic(seed=0, split="train", **kwargs)


def test_a_guess_is_answered_by_higher_or_lower() -> None:
    game = Guessing(7, 15, 5)
    assert game.reply("Is it 3?") == "Higher."
    assert game.reply("between 3 and 12") == "Lower."
    assert game.reply("no idea") == "That is no number. Answer with one number only."
    assert game.reply("7") is None
    assert game.facts() == {"answer": "7", "score": 1 - 3 / 10}
    short = Guessing(7, 15, 2)
    assert [short.reply("1"), short.reply("2"), short.facts()["score"]] == [
        "Higher.",
        None,
        0,
    ]


def test_frozen_lake_is_walked_in_words() -> None:
    task = ToyText(
        seed=0, split="train", game="FrozenLake-v1", options={"is_slippery": False}
    )
    game = task.episode(0)
    assert "PFFF\nFHFH\nFFFH\nHFFG" in str(game.prompt)
    assert (
        game.reply("I look around.")
        == "That is no move. Answer with one word: left, down, right, up."
    )
    assert game.reply("Not right: DOWN!") == "SFFF\nPHFH\nFFFH\nHFFG"
    assert None not in [game.reply(move) for move in ("down", "right", "right", "down")]
    assert game.reply("right") is None
    assert game.facts() == {"score": 1.0}
    hole = task.episode(1)
    assert hole.reply("right") is not None
    assert hole.reply("down") is None
    assert hole.facts() == {"score": 0.0}


def test_blackjack_in_words() -> None:
    game = ToyText(seed=0, split="train", game="Blackjack-v1").episode(1)
    assert "The dealer shows" in str(game.prompt)
    assert game.reply("stick") is None
    assert game.facts()["score"] in (-1.0, 0.0, 1.0, 1.5)


@pytest.mark.parametrize(
    ("make", "key", "fix"),
    [
        (
            lambda: ToyText(seed=0, split="train", game="FrozenLak-v1"),
            "game",
            "game: FrozenLake-v1",
        ),
        (
            lambda: ReasoningGym(seed=0, split="train", dataset="chain_sums"),
            "dataset",
            "dataset: chain_sum",
        ),
    ],
)
def test_a_name_that_the_library_does_not_have(
    make: Callable[[], object], key: str, fix: str
) -> None:
    problem = problem_of(make)
    assert (problem.code, problem.key, problem.fix) == (
        "bad-task-kwargs",
        f"env.kwargs.{key}",
        fix,
    )


def test_reasoning_gym_judges_what_is_tagged() -> None:
    puzzle = ReasoningGym(seed=0, split="train", dataset="chain_sum").episode(3)
    facts = puzzle.facts()

    def score(answer: str) -> float:
        over = Transcript(
            prompt="",
            answers=(answer,),
            replies=(),
            facts=facts,
            tokens=1,
            truncated=False,
        )
        return reasoning_score(over)

    assert score(f"I think <answer>{facts['answer']}</answer>.") == 1.0
    assert score(facts["answer"]) == 1.0
    assert score("<answer>no</answer>") < 1


def test_reasoning_gym_checks_its_options() -> None:
    with pytest.raises(ValueError, match="max_terms"):
        ReasoningGym(
            seed=0, split="train", dataset="chain_sum", options={"max_terms": 1}
        )


@given(
    answers=st.lists(
        st.text() | st.text("0123456789 lefthigup", max_size=20), min_size=1, max_size=6
    )
)
@example(answers=["9" * 10_000])
def test_whatever_a_policy_says_a_game_goes_on_or_ends(answers: list[str]) -> None:
    frozen_lake = ToyText(seed=0, split="train", game="FrozenLake-v1")
    for task in (GuessNumber(seed=0, split="train"), frozen_lake):
        episode = task.episode(0)
        for answer in answers:
            if episode.reply(answer) is None:
                break
        assert 0 <= episode.facts()["score"] <= 1


# ── data sets ────────────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": n % 2} for n in range(5)]
_SAID = {"role": "assistant", "content": "1"}
_ASKED = {"role": "user", "content": "2 + 1?"}


def lines(folder: Path, text: str = "\n".join(json.dumps(row) for row in ROWS)) -> str:
    file = folder / "train.jsonl"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(file)


def prompt_set(path: str, **kwargs: Any) -> PromptSet:
    return PromptSet(seed=0, split="train", path=path, **kwargs)


def test_columns_and_rows_are_chosen(tmp_path: Path) -> None:
    task = prompt_set(lines(tmp_path))
    assert task.size == 5
    assert (task.episode(2).prompt, task.episode(2).facts()) == (
        "2 + 1?",
        {"answer": "3", "level": 0},
    )
    task = prompt_set(lines(tmp_path), prompt="answer", answer="prompt", rows=[1, 3])
    assert (task.size, task.episode(0).prompt) == (2, "2")
    assert task.episode(0).facts() == {
        "prompt": "1 + 1?",
        "answer": "1 + 1?",
        "level": 1,
    }
    bare = prompt_set(lines(tmp_path), prompt="answer", answer=None)
    assert bare.episode(0).facts() == {"prompt": "0 + 1?", "level": 0}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
    ]
    path = lines(tmp_path, json.dumps({"prompt": messages, "answer": 4}))
    assert prompt_set(path).episode(0).prompt == [
        Message("system", "Be brief."),
        Message("user", "2 + 2?"),
    ]


def test_columns_within_columns_have_names_with_dots(tmp_path: Path) -> None:
    row = {
        "prompt": "1 + 1?",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "a.b": 7,
        "extra": {},
    }
    path = lines(tmp_path, json.dumps(row))  # as the data sets of verl are
    assert (
        prompt_set(path, answer="reward_model.ground_truth")
        .episode(0)
        .facts()["answer"]
        == "2"
    )
    assert prompt_set(path, answer="a.b").episode(0).facts()["answer"] == 7
    problem = problem_of(lambda: prompt_set(path))
    assert (
        problem.got
        == "columns: prompt, reward_model.ground_truth, reward_model.style, a.b, extra"
    )
    assert str(problem.fix).startswith("env.kwargs.answer=reward_model.ground_truth ")
    assert (
        problem_of(lambda: prompt_set(path, prompt="problem", answer="a.b")).fix
        == "env.kwargs.prompt=prompt"
    )


@pytest.mark.parametrize(
    ("third", "says"),
    [
        ('{"prompt": "2 + 1?", "answer": ', "a line is no row"),
        ('{"prompt": "\udcff"}', "a line is no row"),  # a byte that is no text
        ('["2 + 1?", "3"]', "a line is no row"),
        (
            '{"prompt": "2 + 1?", "anwser": "3"}',
            "a row has no 'answer', did you mean 'anwser'?",
        ),
        ('{"prompt": null, "answer": "3"}', "a row's 'prompt' is null"),
        ('{"prompt": "2 + 1?", "answer": NaN}', "a row's 'answer' is nan"),
        (
            '{"prompt": "2 + 1?", "answer": " "}',
            "a row's 'answer' has an empty right answer",
        ),
        (
            '{"prompt": "2 + 1?", "answer": []}',
            "a row's 'answer' has an empty right answer",
        ),
        (
            '{"prompt": "2 + 1?", "answer": ["3", ""]}',
            "a row's 'answer' has an empty right answer",
        ),
        ('{"prompt": "1 + 1?", "prompt": "2 + 1?", "answer": "3"}', "a line is no row"),
        (r'{"prompt": "\ud83d", "answer": "3"}', "a row has half of a character"),
        (
            '{"prompt": "?", "answer": ' + 99_999 * "[" + 99_999 * "]" + "}",
            "a line is no row",
        ),
        ('{"prompt": 7, "answer": "3"}', "'prompt' is no prompt"),
        (
            '{"prompt": [{"role": "robot", "content": "?"}], "answer": "3"}',
            "'prompt' is no prompt",
        ),
        (
            '{"prompt": [{"role": "user", "content": null}], "answer": "3"}',
            "'prompt' is no prompt",
        ),
        *(
            (
                json.dumps({"prompt": [{**_SAID, key: value}, _ASKED], "answer": "3"}),
                f"a message has {key}, which would not be in the prompt",
            )
            for key, value in (
                ("reasoning_content", "two and one"),
                ("tool_calls", [{"type": "function", "function": {"name": "add"}}]),
            )
        ),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    tmp_path: Path, third: str, says: str
) -> None:
    path = lines(tmp_path, f"{json.dumps(ROWS[0])}\n\n{third}\n{json.dumps(ROWS[1])}\n")
    problem = problem_of(lambda: prompt_set(path))
    assert (problem.code, problem.key, problem.what) == (
        "bad-row",
        "env.kwargs.path",
        says,
    )
    assert str(problem.source) == f"{path}:3"


def test_keys_of_messages_without_a_value_are_no_part_of_a_prompt(
    tmp_path: Path,
) -> None:
    """Files of Parquet have all keys in all messages."""
    told = {**_SAID, "reasoning_content": None, "tool_calls": [], "id": 7}
    row = {"prompt": [told, _ASKED], "answer": "3"}
    task = prompt_set(lines(tmp_path, json.dumps(row)))
    prompt = task.episode(0).prompt
    assert prompt == [Message("assistant", "1"), Message("user", "2 + 1?")]


def test_all_bad_rows_are_counted_and_placed_at_once(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        "\n".join(json.dumps({"prompt": "?"} if n % 2 else ROWS[0]) for n in range(40)),
    )
    problem = problem_of(lambda: prompt_set(path))
    assert str(problem.source) == f"{path}:2"
    assert f"19 more rows are wrong: {path}:4, {path}:6, " in (problem.why or "")
    assert (problem.why or "").endswith(f"{path}:18, ...")


@pytest.mark.parametrize("text", ["{}", "[{}]", "[\n{}]"])
def test_a_byte_order_mark_and_windows_line_ends_are_read_over(
    tmp_path: Path, text: str
) -> None:
    row = json.dumps(
        {
            "prompt": "\N{GRINNING FACE}",
            "answer": {"answer": "same name, further inside"},
        }
    )
    file = tmp_path / "train.json"
    file.write_bytes(
        b"\xef\xbb\xbf"
        + text.replace("{}", row).replace("\n", "\r\n").encode()
        + b"\r\n"
    )
    assert prompt_set(str(file)).episode(0).prompt == "\N{GRINNING FACE}"


@pytest.mark.parametrize("rows", [[1], [0, "all"]])
def test_rows_are_two_numbers(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(ValueError, match="rows are two whole numbers"):
        prompt_set(lines(tmp_path), rows=rows)


def test_images_stand_where_the_messages_say(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.jpg"):
        (tmp_path / "images" / name).write_bytes(name.encode())
    a, b = (Image(str(tmp_path / "images" / name)) for name in ("a.png", "b.jpg"))
    parts = [
        {"type": "text", "text": "this"},
        {"type": "image"},
        {"type": "text", "text": "or"},
    ]
    rows = [
        {"prompt": "what?", "image": "images/a.png"},
        {
            "prompt": [{"role": "user", "content": "what?"}],
            "image": ["images/a.png", {"path": "images/b.jpg"}],
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [*parts, {"type": "image", "image": "images/b.jpg"}],
                }
            ],
            "image": "images/a.png",
        },
        {"prompt": "none", "image": None},
    ]
    path = lines(tmp_path, "\n".join(json.dumps(row | {"answer": 1}) for row in rows))
    task = prompt_set(path, image="image")
    assert [task.episode(row).prompt for row in range(4)] == [
        [Message("user", (a, "what?"))],
        [Message("user", (a, b, "what?"))],
        [Message("user", ("this", a, "or", b))],
        "none",
    ]
    assert a.read() == b"a.png"
    assert task.episode(0).facts() == {"answer": 1}


def test_images_in_the_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {
        "prompt": "what?",
        "answer": "a",
        "image": {"bytes": b"the file", "path": None},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    prompt = (
        prompt_set(str(tmp_path / "train.parquet"), image="image").episode(0).prompt
    )
    assert prompt == [Message("user", (Image(b"the file"), "what?"))]


@pytest.mark.parametrize(
    ("prompt", "image", "says"),
    [
        ("?", "c.png", "a row's image is not there"),
        ("?", 7, "a row's image is not there"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
            "a.png",
            "the row has none for it",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            ["a.png", "a.png"],
            "more images than places",
        ),
        ([{"role": "assistant", "content": "!"}], "a.png", "more images than places"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
            None,
            "a part of a message is not read",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            None,
            "a part of a message is not read",
        ),
    ],
)
def test_a_row_whose_images_have_no_place_is_named(
    tmp_path: Path, prompt: Any, image: Any, says: str
) -> None:
    (tmp_path / "a.png").touch()
    path = lines(
        tmp_path, json.dumps({"prompt": prompt, "image": image, "answer": "1"})
    )
    problem = problem_of(lambda: prompt_set(path, image="image"))
    assert (problem.code, str(problem.source)) == ("bad-row", f"{path}:1")
    assert says in problem.what


@pytest.mark.parametrize(
    ("name", "why"),
    [("nowhere/train.jsonl", "{folder}"), ("train.csv", "save_to_disk")],
)
def test_what_is_no_data_set(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "train.csv").touch()
    problem = problem_of(lambda: prompt_set(str(tmp_path / name)))
    assert (problem.code, problem.key) == ("no-dataset", "env.kwargs.path")
    assert why.format(folder=tmp_path) in (problem.why or "")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    assert told(prompt_set(str(file)), range(5)) == told(
        prompt_set(lines(tmp_path)), range(5)
    )
    written = file.read_bytes()
    for content in (b"no parquet", written[:4] + bytes(99) + written[103:]):
        file.write_bytes(content)
        assert problem_of(lambda: prompt_set(str(file))).code == "no-dataset"
    parquet.write_table(
        pyarrow.Table.from_pylist([*ROWS, {"prompt": "?", "answer": None}]), file
    )
    problem = problem_of(lambda: prompt_set(str(file)))
    assert (problem.what, str(problem.source)) == (
        "a row's 'answer' is null",
        f"{file}, row:6",
    )


@pytest.mark.slow
def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(
        str(tmp_path / "two")
    )
    expected = told(prompt_set(lines(tmp_path)), range(5))
    assert told(prompt_set(str(tmp_path / "one")), range(5)) == expected
    assert (
        told(prompt_set(str(tmp_path / "two"), dataset_split="train"), range(5))
        == expected
    )
    problem = problem_of(
        lambda: prompt_set(str(tmp_path / "two"), dataset_split="tests")
    )
    assert (problem.code, problem.why) == (
        "no-dataset",
        "it has the splits train, test",
    )
    (tmp_path / "three").mkdir()
    assert problem_of(lambda: prompt_set(str(tmp_path / "three"))).code == "no-dataset"
    for file in (tmp_path / "one").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert (
            problem_of(lambda: prompt_set(str(tmp_path / "one"))).code == "no-dataset"
        ), file.name
        file.write_bytes(content)


# ── several data sets ────────────────────────────────────────────────────────────────────────────────────────────────


def write_rows(file: Path, prompts: Sequence[str]) -> Path:
    file.write_text(
        json.dumps([{"prompt": prompt, "answer": "0"} for prompt in prompts], indent=1),
        encoding="utf-8",
    )
    return file


def test_a_list_of_rows_in_a_json_file_is_read(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.json", ["a", "b"])
    assert [values["prompt"] for values, _ in read_rows(str(file))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"prompt": 1},', "JSON"),
        ('[{"prompt": "1", "prompt": "2"}]', "'prompt' is there more than once"),
        ("[1]", "a row is one object"),
    ],
)
def test_a_list_that_is_none_of_rows_names_the_file(
    tmp_path: Path, content: str, why: str
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as caught:
        read_rows(str(file))
    assert caught.value.codes == ("bad-row",)
    assert "rows.json" in str(caught.value)


TWO_ROWS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "2 + 2", "answer": "4"}]


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (
            json.dumps(TWO_ROWS[0], indent=2),
            "a JSON object that is written over several lines",
            "jq -c .",
        ),
        (
            "\n".join(json.dumps(row, indent=2) for row in TWO_ROWS),
            "a JSON object that is written over several lines",
            "jq -c .",
        ),
        (
            "\ufeff" + json.dumps({"version": 1, "data": TWO_ROWS}, indent=1),
            "its key 'data' has the list of rows",
            "jq -c '.[\"data\"][]'",
        ),
    ],
)
def test_an_object_over_several_lines_is_named_as_one(
    tmp_path: Path, content: str, what: str, fix: str
) -> None:
    file = tmp_path / "my rows.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_rows(str(file))
    (found,) = caught.value.problems
    assert found.code == "no-dataset"
    assert what in found.what
    assert found.fix is not None
    assert found.fix.startswith(fix)
    if shutil.which("jq") is None:
        pytest.skip("this machine has no jq")
    # The fix is pasted, and the file that it writes has the rows
    assert found.pasted is not None
    subprocess.run(found.pasted, shell=True, check=True)
    rows = read_rows(str(tmp_path / "my rows.lines.jsonl"))
    assert [values for values, _ in rows] == TWO_ROWS[: len(rows)]


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-32-be"]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_file_in_another_encoding_is_named_as_one(
    tmp_path: Path, encoding: str, mark: str
) -> None:
    file = tmp_path / "rows.jsonl"
    text = mark + "\n".join(json.dumps(row) for row in TWO_ROWS)
    file.write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError) as caught:
        read_rows(str(file))
    (found,) = caught.value.problems
    assert found.code == "no-dataset"
    name = encoding[:6].upper()
    assert f"is {name}" in found.what
    assert ", not UTF-8" in found.what
    assert found.fix is not None
    if shutil.which("iconv") is None:
        pytest.skip("this machine has no iconv")
    # The fix is pasted, and the file that it writes has the rows
    assert found.pasted is not None
    subprocess.run(found.pasted, shell=True, check=True)
    rows = read_rows(str(tmp_path / "rows.utf8.jsonl"))
    assert [values for values, _ in rows] == TWO_ROWS


def test_data_sets_are_mixed_by_how_often_their_rows_are_asked(tmp_path: Path) -> None:
    one, other = (
        str(write_rows(tmp_path / f"{name}.json", [name + c for c in "1234"]))
        for name in ("one", "two")
    )
    task = PromptSet(seed=3, split="train", path={one: 1.5, other: 0.25})
    assert task.size == 8
    epochs = Epochs(task.shares, seed=3)
    assert epochs.size == 7
    asked = Counter(str(task.episode(number).prompt) for number in epochs.rows(0))
    assert sorted(asked.values()) == [1, 1, 1, 2, 2]
    assert sum(asked[f"one{c}"] for c in "1234") == 6
    assert {task.episode(n).facts()["data_set"] for n in range(8)} == {"one", "two"}
    again = Epochs(task.shares, seed=3)
    assert [epochs.rows(n) for n in range(7)] == [again.rows(n) for n in range(7)]
    assert PromptSet(seed=3, split="train", path=[one, other]).size == 8


def test_each_epoch_has_an_order_of_its_own_wherever_prompts_come_from() -> None:
    epochs = Epochs([Share(rows=range(6), weight=1.0)], seed=3)
    asked = [epochs.row(number) for number in range(12)]
    assert asked == [*epochs.rows(0), *epochs.rows(1)]
    assert sorted(asked[:6]) == sorted(asked[6:]) == list(range(6))
    assert asked[:6] != asked[6:]
    # A prompt is the same one whatever was asked before
    again = Epochs([Share(rows=range(6), weight=1.0)], seed=3)
    assert [again.row(number) for number in reversed(range(60))][-12:] == asked[::-1]
    other = Epochs([Share(rows=range(6), weight=1.0)], seed=4)
    assert [other.row(number) for number in range(12)] != asked


def test_data_sets_whose_files_have_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("gsm8k", "math"):
        (tmp_path / folder).mkdir()
    alike = [
        str(write_rows(tmp_path / folder / "test.json", [folder]))
        for folder in ("gsm8k", "math")
    ]
    task = PromptSet(
        seed=3,
        split="train",
        path=[*alike, str(write_rows(tmp_path / "other.json", ["o"]))],
    )
    assert [task.episode(n).facts()["data_set"] for n in range(3)] == [
        "gsm8k-test",
        "math-test",
        "other",
    ]


@pytest.mark.parametrize("weight", [0, -1, "much", 10**6])
def test_a_weight_is_how_often(tmp_path: Path, weight: Any) -> None:
    one = str(write_rows(tmp_path / "one.json", ["a"]))
    with pytest.raises(ConfigError, match="no such weight"):
        PromptSet(seed=3, split="train", path={one: weight})


@pytest.mark.parametrize("key", ["weight", "loss_mask", "loss", "train", "trainable"])
def test_a_message_says_whether_it_is_learned(tmp_path: Path, key: str) -> None:
    chat = [
        {"role": "user", "content": "1 + 2?", key: 0},
        {"role": "assistant", "content": "4", key: 0},
        {"role": "assistant", "content": "3", key: 1},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": chat}))
    task = PromptSet(seed=0, split="train", path=str(file), answer=None)
    found = [message.is_learned for message in task.episode(0).prompt]
    assert found == [True, False, True]
    chat[1][key] = 0.5
    file.write_text(json.dumps({"prompt": chat}))
    with pytest.raises(ConfigError, match=f"{key} that is neither 0 nor 1"):
        PromptSet(seed=0, split="train", path=str(file), answer=None)


def test_messages_as_a_json_text_are_messages(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
    ]
    file = tmp_path / "rows.jsonl"

    def prompt(text: str) -> Any:
        file.write_text(json.dumps({"prompt": text, "answer": "3"}))
        return PromptSet(seed=0, split="train", path=str(file)).episode(0).prompt

    assert [message.role for message in prompt(json.dumps(chat))] == ["system", "user"]
    for text in (
        '[{"name": "role"}]',
        '["role"]',
        '[{"role": 1}',
        "[1, 2] has which role?",
    ):
        assert prompt(text) == text
    with pytest.raises(ConfigError, match="written as a text"):
        prompt(repr(chat))


def test_right_answers_of_parquet_are_as_they_are_written(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "bytes": (pyarrow.array([b"5"]), ["5"]),
        "decimal": (pyarrow.array([Decimal("5.00")]), ["5.00", "5"]),
        "single": (pyarrow.array([0.1], pyarrow.float32()), ["0.1"]),
        "half": (pyarrow.array([0.1], pyarrow.float16()), ["0.1"]),
        "list": (
            pyarrow.array([[0.1, 5.0]], pyarrow.list_(pyarrow.float32())),
            ["0.1", "5.0", "5"],
        ),
        "double": (pyarrow.array([0.1 + 0.2]), ["0.30000000000000004"]),
        "third": (pyarrow.array([1 / 3], pyarrow.float32()), ["0.33333334"]),
        "nine digits": (
            pyarrow.array([13.3730135], pyarrow.float32()),
            ["13.3730135"],
        ),
    }
    file = tmp_path / "rows.parquet"
    for name, (column, expected) in columns.items():
        parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": column}), file)
        facts = PromptSet(seed=0, split="train", path=str(file)).episode(0).facts()
        assert written_answers(facts["answer"]) == expected, name
    parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": [b"\xff"]}), file)
    facts = PromptSet(seed=0, split="train", path=str(file)).episode(0).facts()
    with pytest.raises(ValueError, match="no text in UTF-8"):
        written_answers(facts["answer"])
