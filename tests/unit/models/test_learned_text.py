"""What is learned of a written conversation: each answer with the token that ends it, by tags or by prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlplace.envs.text import Message
from rlplace.errors import ConfigError
from rlplace.models.learned_text import LearnedTokens
from rlplace.models.tokenizer import Chat, PlainText, Tokenizer
from tests.tiny_tokenizer import CHAT, END, tiny_tokenizer

# As CHAT, with the answers marked for training
MARKED = (
    "{% for m in messages %}<turn>{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
# The same, with the end of the turn outside, or with the line break inside
END_OUTSIDE = MARKED.replace("<eos>{% endgeneration %}", "{% endgeneration %}<eos>")
BREAK_INSIDE = MARKED.replace("{% endgeneration %}{{ '\n' }}", "\n{% endgeneration %}")
# Shows an empty thought in the last answer alone, as Qwen3 does
THINKS = (
    "{% for m in messages %}<turn>{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
# Begins an answer with words that it does not show in a whole chat
OPENS = CHAT.replace("<turn>assistant: {% endif %}", "<turn>assistant: hm{% endif %}")

ONE = [Message("user", "1 + 2?"), Message("assistant", "3")]
SEVERAL = [
    Message("system", "Be brief."),
    *ONE,
    Message("user", "and 3?"),
    Message("assistant", " it is 3"),
]


def chat(folder: Path, template: str) -> Chat:
    return Chat(Tokenizer.load(tiny_tokenizer(folder, chat=template)), system=None)


def texts(folder: Path, found: LearnedTokens) -> list[tuple[str, bool]]:
    """Return the tokens as texts: each run of learned tokens, and of others."""
    tokenizer = Tokenizer.load(folder)
    runs: list[tuple[list[int], bool]] = []
    for token, learned in zip(found.tokens.tolist(), found.mask.tolist(), strict=True):
        if not runs or runs[-1][1] != learned:
            runs.append(([], learned))
        runs[-1][0].append(token)
    return [(tokenizer.decode(run, special=True), learned) for run, learned in runs]


@pytest.mark.parametrize("messages", [ONE, SEVERAL])
@pytest.mark.parametrize("template", [MARKED, END_OUTSIDE, BREAK_INSIDE])
def test_tags_and_prefixes_give_the_same_mask(
    tmp_path: Path, template: str, messages: Sequence[Message]
) -> None:
    by_tags = chat(tmp_path / "tags", template).learned(messages)
    by_prefix = chat(tmp_path / "prefix", CHAT).learned(messages)
    assert by_tags.tokens.tolist() == by_prefix.tokens.tolist()
    assert by_tags.mask.tolist() == by_prefix.mask.tolist()


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_every_answer_is_learned_with_its_end(tmp_path: Path, template: str) -> None:
    found = chat(tmp_path, template).learned(SEVERAL)
    assert texts(tmp_path, found) == [
        ("<turn>system: Be brief.<eos>\n<turn>user: 1 + 2?<eos>\n<turn>assistant: ", False),
        ("3<eos>", True),
        ("\n<turn>user: and 3?<eos>\n<turn>assistant: ", False),
        (" it is 3<eos>", True),
    ]  # fmt: skip
    assert found.tokens[-1] == END


def test_a_prompt_has_the_tokens_that_a_run_asks_with(tmp_path: Path) -> None:
    conversation = chat(tmp_path, CHAT)
    found = conversation.learned(ONE)
    assert found.tokens[~found.mask].tolist() == conversation.first(ONE[:1]).tolist()


def test_what_the_template_writes_before_an_answer_is_learned(tmp_path: Path) -> None:
    found = chat(tmp_path, THINKS).learned(ONE)
    assert texts(tmp_path, found)[-1] == ("<think></think>3<eos>", True)
    # Of earlier answers the template shows no thought
    several = texts(tmp_path, chat(tmp_path, THINKS).learned(SEVERAL))
    assert [text for text, learned in several if learned] == [
        "3<eos>",
        "<think></think>it is 3<eos>",
    ]


def test_a_template_that_ends_no_answer_gets_the_end_of_text(tmp_path: Path) -> None:
    found = chat(tmp_path, CHAT.replace("<eos>", ";")).learned(ONE)
    assert texts(tmp_path, found)[-1] == ("3<eos>", True)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (OPENS, "does not show an answer behind the messages before it"),
        (CHAT.replace("{{ m['content'] }}", ""), "does not show an answer"),
        (
            CHAT + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
            "marks no answer",
        ),
    ],
)
def test_a_template_without_the_answer_is_refused(
    tmp_path: Path, template: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        chat(tmp_path, template).learned(ONE)


def test_an_opened_thought_names_the_variable_only_if_it_helps(tmp_path: Path) -> None:
    opens = "{% if enable_thinking is not defined %}<think>{% endif %}{% endif %}"
    template = CHAT.replace("assistant: {% endif %}", f"assistant: {opens}")
    with pytest.raises(ConfigError) as caught:
        chat(tmp_path, template).learned(ONE)
    assert "env.template.enable_thinking=false" in str(caught.value)
    tokenizer = Tokenizer.load(tmp_path)
    plain = Chat(tokenizer, system=None, arguments={"enable_thinking": False})
    assert len(plain.learned(ONE).tokens)
    with pytest.raises(ConfigError) as caught:
        chat(tmp_path, OPENS).learned(ONE)
    assert "enable_thinking" not in str(caught.value)


def test_plain_text_is_the_prompt_the_answer_and_the_end(tmp_path: Path) -> None:
    conversation = PlainText(Tokenizer.load(tiny_tokenizer(tmp_path)), system=None)
    found = conversation.learned(ONE)
    assert texts(tmp_path, found) == [("1 + 2?", False), ("3<eos>", True)]
    assert found.tokens[~found.mask].tolist() == conversation.first("1 + 2?").tolist()
    several = texts(tmp_path, conversation.learned(SEVERAL[1:]))
    assert several[1:3] == [("3", True), ("\nand 3?\n", False)]


WRONG_FIRST = [
    Message("user", "1 + 2?"),
    Message("assistant", "4", is_learned=False),
    Message("user", "sure?"),
    Message("assistant", "3"),
]


@pytest.mark.parametrize("template", [CHAT, MARKED, END_OUTSIDE])
def test_an_answer_that_is_not_to_be_learned_is_not(
    tmp_path: Path, template: str
) -> None:
    found = chat(tmp_path, template).learned(WRONG_FIRST)
    learned = [text for text, is_learned in texts(tmp_path, found) if is_learned]
    assert learned == ["3<eos>"]
    # The last answer: the row ends with the first one
    turned = [*WRONG_FIRST[2:], *WRONG_FIRST[:2]]
    found = chat(tmp_path, template).learned(turned)
    assert texts(tmp_path, found)[-1] == ("3<eos>", True)
    plain = PlainText(Tokenizer.load(tmp_path), system=None).learned(WRONG_FIRST)
    assert [text for text, is_learned in texts(tmp_path, plain) if is_learned] == [
        "3<eos>"
    ]


def test_marks_that_are_of_no_answer_cannot_be_left_out(tmp_path: Path) -> None:
    marks_all = MARKED.replace("'assistant' %}{% gen", "'assistant' or true %}{% gen")
    with pytest.raises(ConfigError, match="marks 4 parts, and the row has 2 answers"):
        chat(tmp_path, marks_all).learned(WRONG_FIRST)
