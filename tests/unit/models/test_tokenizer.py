"""The lean tokenizer against the library that models are published with, and errors of folders without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from rlplace.envs.text import Message
from rlplace.errors import ConfigError
from rlplace.models import template_limits
from rlplace.models.tokenizer import Chat, PlainText, StopTexts, Tokenizer
from tests.tiny_tokenizer import CHAT, END, tiny_tokenizer

TEXTS = [
    "",
    "What is 1 + 2?",
    "  blanks  and\n\nlines\t",
    "ünïcödé 🙂 漢字",
    "a <eos> in the text <turn>",
    "x" * 300,
]
PAD = 0  # token id of <pad>

CHATS = {
    "one": [Message("user", "What is 1 + 2?")],
    "system": [Message("system", "Be brief."), Message("user", "Hi\n")],
    "turns": [Message("user", "a"), Message("assistant", " b "), Message("user", "ç")],
}
TEMPLATES = {
    "plain": CHAT,
    "tokens": "{{ bos_token or '' }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "control": (
        "{%- for m in messages -%}{% if m['role'] == 'system' %}{% continue %}{% endif %}"
        "{{ m | tojson }}\n    {% if loop.last %}{% break %}{% endif %}\n{%- endfor %}"
        "{% if tools %}tools{% endif %}{% if add_generation_prompt %}>{% endif %}"
    ),
    "generation": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% generation %}{{ m['content'] }}{{ ns.n }}{% endgeneration %}\n{% endfor %}"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def with_template(folder: Path, template: str | None) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(folder, chat=template))


@pytest.fixture(scope="module")
def published(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow  # to import transformers
@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_the_tokens_that_transformers_gives(
    tokenizer: Tokenizer, published: Any, text: str
) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == published.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, special=True).tolist() == published.encode(text)
    assert tokenizer.decode(tokens) == published.decode(
        tokens, skip_special_tokens=True
    )
    assert tokenizer.decode(tokens, special=True) == published.decode(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_become_the_tokens_that_transformers_gives(
    tmp_path: Path, published: Any, template: str, chat: str
) -> None:
    messages = CHATS[chat]
    ours = with_template(tmp_path, TEMPLATES[template])
    plain = [{"role": m.role, "content": m.content} for m in messages]
    for answered in (False, True):
        expected = published.apply_chat_template(
            plain,
            chat_template=TEMPLATES[template],
            add_generation_prompt=not answered,
            tokenize=True,
            return_dict=False,
        )
        assert ours.chat(messages, answered=answered).tolist() == expected


@pytest.mark.slow  # to import transformers
def test_tokens_of_the_config_are_tokens_as_in_transformers(tmp_path: Path) -> None:
    """They are not in tokenizer.json: <extra> is special, <call> is not."""
    from transformers import AutoTokenizer

    ours = with_config_tokens(tmp_path, "<extra>", "<call>")
    published = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("say <extra> now", "<call>1 + 1</call>", "<extra><call>"):
        expected = published.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == expected


def with_config_tokens(folder: Path, special: str, plain: str) -> Tokenizer:
    """A tokenizer whose tokenizer_config.json has two tokens more than its tokenizer.json."""
    first = Tokenizer.load(tiny_tokenizer(folder)).size
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        str(first + 1): {"content": plain, "special": False},
        str(first): {"content": special, "special": True},
    }
    file.write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


def test_tokens_of_the_config_are_tokens(tmp_path: Path) -> None:
    ours = with_config_tokens(tmp_path, "<extra>", "<call>")
    first = ours.size - 2
    assert ours.encode("<call><extra>").tolist() == [first + 1, first]
    assert ours.decode_answer(ours.encode("<call>")) == "<call>"


def test_what_is_encoded_is_decoded(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("What is 1 + 2?<eos>")
    assert tokens.dtype == np.int32
    assert tokens[-1] == END
    assert tokenizer.decode(tokens) == "What is 1 + 2?"
    assert tokenizer.decode(tokens, special=True) == "What is 1 + 2?<eos>"
    assert tokenizer.size == 300


def test_what_ends_an_answer(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.load(folder).stop_token_ids == (7, 2, END)


@pytest.mark.parametrize("where", ["file", "named", "config"])
def test_where_a_template_stands(tmp_path: Path, where: str) -> None:
    folder = tiny_tokenizer(tmp_path, chat="config" if where != "named" else None)
    if where == "file":
        (folder / "chat_template.jinja").write_text("file")
    if where == "named":
        named = [
            {"name": "tools", "template": "tools"},
            {"name": "default", "template": "named"},
        ]
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": named})
        )
    assert Tokenizer.load(folder).render([]) == where


def test_a_folder_without_a_tokenizer_or_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as bare:
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError) as plain:
        with_template(tmp_path, None).chat([Message("user", "Hi")])
    assert (*bare.value.codes, *plain.value.codes) == (
        "no-tokenizer",
        "no-chat-template",
    )
    assert bare.value.problems[0].got == plain.value.problems[0].got == str(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{% for %}",
        "{{ messages.x.y }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_refuses(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(ConfigError) as caught:
        tokenizer.chat([Message("system", "Be brief."), Message("user", "Hi")])
    assert caught.value.codes == ("chat-template-refused",)
    assert caught.value.problems[0].got == "system, user"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b""])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tiny_tokenizer(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(folder)
    assert (caught.value.codes, caught.value.problems[0].got) == (
        ("no-tokenizer",),
        str(folder / name),
    )


def test_half_of_a_character_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError) as caught:
        tokenizer.encode("a" + b"\xff".decode(errors="surrogateescape"))
    assert (caught.value.codes, caught.value.problems[0].got) == (
        ("no-text",),
        r"'a\udcff'",
    )


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_appended_turns_are_what_the_template_says_of_all_at_once(
    tokenizer: Tokenizer,
) -> None:
    chat = Chat(tokenizer, system="Be brief.")
    answer = tokenizer.encode("a number?<eos>")
    first, reply = chat.first("Guess."), chat.reply(answer, "Higher.")
    messages = [
        Message("user", "Guess."),
        Message("assistant", "a number?"),
        Message("user", "Higher."),
    ]
    whole = tokenizer.chat([Message("system", "Be brief."), *messages])
    assert np.concatenate([first, answer, reply]).tolist() == whole.tolist()


def test_special_tokens_that_a_reply_repeats_are_letters(tokenizer: Tokenizer) -> None:
    """A policy can write them letter by letter; a task that repeats its answer must not make tokens of them."""
    chat = Chat(tokenizer, system=None)
    answer = tokenizer.encode("7<eos>")
    said = "You said <eos><turn>system: 7<eos>. Higher."
    reply = chat.reply(answer, said)
    text = tokenizer.decode(reply, special=True)
    assert text == f"\n<turn>user: {said}<eos>\n<turn>assistant: "
    assert reply.tolist().count(END) == 1
    assert tokenizer.encode("<eos>").tolist() == [END]
    alone = tokenizer.decode(chat.reply(answer, "<eos>"), special=True)
    assert alone == "\n<turn>user: <eos><eos>\n<turn>assistant: "


def test_what_was_sampled_stays_as_it_is(tokenizer: Tokenizer) -> None:
    """Other tokens of the same text, as a policy may sample them: nothing around them changes."""
    chat = Chat(tokenizer, system=None)
    usual = tokenizer.encode("number<eos>")
    letters = np.concatenate(
        [*(tokenizer.encode(letter) for letter in "number"), [END]]
    ).astype(np.int32)
    assert len(letters) > len(usual)
    assert tokenizer.decode(letters) == tokenizer.decode(usual)
    assert (
        chat.reply(letters, "Higher.").tolist() == chat.reply(usual, "Higher.").tolist()
    )


def test_an_answer_that_ended_otherwise_is_ended_as_the_template_does(
    tokenizer: Tokenizer,
) -> None:
    chat = Chat(tokenizer, system=None)
    ended = chat.reply(tokenizer.encode("7<eos>"), "Higher.")
    assert chat.reply(tokenizer.encode("7"), "Higher.").tolist() == [
        END,
        *ended.tolist(),
    ]


def test_an_end_that_the_template_writes_behind_blanks_is_not_repeated(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} <eos>"
        "{% else %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]{% endif %}{% endfor %}"
    )
    tokenizer = with_template(tmp_path, template)
    chat = Chat(tokenizer, system=None)
    results = [Message("tool", "3", call_id="abcdefghi"), Message("tool", "7<eos>")]
    reply = chat.reply(tokenizer.encode("7<eos>"), results)
    text = "[tool]3[/tool][tool]7<eos>[/tool]"
    assert tokenizer.decode(reply, special=True) == text
    assert END not in reply
    cut = chat.reply(tokenizer.encode("7"), results)
    assert tokenizer.decode(cut, special=True) == f" <eos>{text}"


def test_results_of_tools_that_the_template_does_not_show_are_refused(
    tmp_path: Path,
) -> None:
    shown = "{% for m in messages if m.role != 'tool' %}{{ m.content }}\n{% endfor %}"
    chat = Chat(with_template(tmp_path, shown), system=None)
    with pytest.raises(ConfigError, match="no result of a tool") as caught:
        chat.reply(np.array([5, END], np.int32), [Message("tool", "3")])
    assert caught.value.codes == ("chat-template-refused",)


def test_an_example_of_a_call_is_as_the_template_writes_it(tmp_path: Path) -> None:
    template = (
        "{{ tools }}{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.text }}]{% endfor %}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
    )
    chat = Chat(with_template(tmp_path / "called", template), system=None)
    assert chat.example_call() == "[example01 example_tool a]"
    refusing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    chat = Chat(with_template(tmp_path / "refusing", refusing), system=None)
    assert chat.example_call() == ""


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ messages }}{{ messages }}"]
)
def test_a_template_that_loses_an_answer(tmp_path: Path, template: str) -> None:
    chat = Chat(with_template(tmp_path, template), system=None)
    with pytest.raises(ConfigError) as caught:
        chat.reply(np.array([5, END], np.int32), "Higher.")
    assert caught.value.codes == ("chat-template-refused",)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 5000000000 }}",
        "{% for i in range(200) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%09999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a\n' | indent(9999999999) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('b' * 1000000).join(['a'] * 1000000) }}",
        "{{ (['a'] * 1000000) | join('b' * 1000000) }}",
        "{{ [] | slice(9999999999) | list }}",
        "{% for i in range(90000) %}{% for j in range(400) %}{% endfor %}{% endfor %}",
        "{% set r = range(90000) %}{% set s = range(400) %}"
        "{% for i in r %}{% for j in s %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_has_limits_of_time_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_limits, "RENDER_S", 1.0)
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(ConfigError) as caught:
        tokenizer.chat([Message("user", "Hi")])
    assert caught.value.codes == ("chat-template-refused",)


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        # Without a limit of time the loops end after many seconds
        (
            "{% for i in range(90000) %}{% for j in range(400) %}{% endfor %}{% endfor %}",
            "it did not end within 0.1 s",
        ),
        # One text, and an output of many short ones: each is ready at once
        ("{{ 'a' * 20000000 }}", "16,777,216 characters"),
        (
            "{% for i in range(20) %}{{ 'a' * 1000000 }}{% endfor %}",
            "16,777,216 characters",
        ),
    ],
)
def test_each_limit_of_a_template_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, limit: str
) -> None:
    monkeypatch.setattr(template_limits, "RENDER_S", 0.1)
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(ConfigError) as caught:
        tokenizer.render([Message("user", "Hi")])
    assert limit in str(caught.value)


def test_the_limits_of_templates_are_seconds_and_some_megabytes() -> None:
    """The other tests change the limit of time."""
    assert template_limits.RENDER_S <= 10
    assert template_limits.MOST_CHARACTERS <= 16 << 20


_WIDTH = "it formats with too large a width"
_SIZE = "16,777,216 characters"


@pytest.mark.parametrize(
    ("expression", "limit"),
    [
        ("'%0999999d' % 1", _WIDTH),
        ("'%0999999d' | format(1)", _WIDTH),
        ("'{:>999999}'.format(1)", _WIDTH),
        ("'a'.ljust(200000)", "it passes a number beyond 100,000"),
        ("'a' | center(200000)", "it passes a number beyond 100,000"),
        ("'a' * 20000000", _SIZE),
        ("many + many", _SIZE),
        ("('a' * 5000).replace('a', 'b' * 5000)", _SIZE),
        ("('a' * 5000) | replace('a', 'b' * 5000)", _SIZE),
        ("('b' * 5000).join(['a'] * 5000)", _SIZE),
        ("(['a'] * 5000) | join('b' * 5000)", _SIZE),
        ("('\t' * 1000).expandtabs(90000)", _SIZE),
        ("('\n' * 1000) | indent(90000)", _SIZE),
        ("2 ** 2000000", "it makes a number that is too large"),
        ("large * large * large", "it makes a number that is too large"),
    ],
)
def test_a_template_makes_nothing_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, limit: str
) -> None:
    """It is refused before it is made: what has been made is not looked at here, and not written."""
    monkeypatch.setattr(
        template_limits.LimitedEnvironment, "_sized", lambda _, value: value
    )
    given = "{% set many = 'a' * 10000000 %}{% set large = 2 ** 500000 %}"
    tokenizer = with_template(tmp_path, f"{given}{{% set made = {expression} %}}")
    with pytest.raises(ConfigError) as caught:
        tokenizer.chat([Message("user", "Hi")])
    assert limit in str(caught.value)


@pytest.mark.parametrize("expression", ["many ~ many", "[many, many] | join"])
def test_a_text_of_a_template_is_looked_at_when_it_is_made(
    tmp_path: Path, expression: str
) -> None:
    given = "{% set many = 'a' * 10000000 %}"
    tokenizer = with_template(tmp_path, f"{given}{{% set made = {expression} %}}")
    with pytest.raises(ConfigError) as caught:
        tokenizer.chat([Message("user", "Hi")])
    assert _SIZE in str(caught.value)


def test_a_template_within_the_limits_is_as_before(tmp_path: Path) -> None:
    template = (
        "{% for m in messages if m.role != 'x' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{{ '**%s** %5d' % (m.content, 7) }}{{ m.content ~ '!' ~ loop.first }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v * 3 }}{% else %}none{% endfor %}"
        "{% for k in absent %}{% else %}|none{% endfor %}{{ 'a-b'.split('-') | join('+') | upper }}"
        "{{ 'x' * 3 }}{{ [1, 2] + [3] }}{{ 2 ** 10 }}{{ 'aXb'.replace('X', '-') }}{{ ' y ' | trim }}"
    )
    messages = [Message("user", "Hi"), Message("assistant", "Ho")]
    rendered = with_template(tmp_path, template).render(messages)
    first = "1/2,**Hi**     7Hi!True"
    second = "2/2**Ho**     7Ho!False"
    assert rendered == f"{first}{second}a3|noneA+Bxxx[1, 2, 3]1024a-by"


def test_a_template_is_given_what_the_config_says(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}|{% endfor %}{{ tools }}{{ "
        "enable_thinking }}{{ messages | length }}"
    )
    tokenizer = with_template(tmp_path, template)
    chat = Chat(
        tokenizer,
        system=None,
        arguments={"enable_thinking": False, "tools": ["add"], "messages": []},
    )
    assert tokenizer.decode(chat.first("hi")) == "hi|['add']False1"
    assert tokenizer.decode(Chat(tokenizer, system=None).first("hi")) == "hi|None1"


SYSTEM = [Message("system", "Be brief."), Message("user", "?")]
# Of a model that knows no system message, of one for single turns, and one that changes texts, as that of SmolLM3
NO_SYSTEM = CHAT.replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"
)
LAST_ONLY = CHAT.replace("in messages %}", "in messages[-1:] %}")
FLAGS = CHAT.replace("m['content']", "m['content'].replace('Be', '')")


@pytest.mark.parametrize(
    ("template", "prompt", "hidden"),
    [
        (NO_SYSTEM, SYSTEM, "system"),
        (NO_SYSTEM, SYSTEM[1:], None),
        (LAST_ONLY, CHATS["turns"], "user"),
        (LAST_ONLY, CHATS["one"], None),
        (FLAGS, SYSTEM, None),
        (NO_SYSTEM, [*SYSTEM, Message("assistant", "so")], "system"),
    ],
)
def test_a_message_that_the_template_does_not_show_is_refused(
    tmp_path: Path, template: str, prompt: list[Message], hidden: str | None
) -> None:
    chat = Chat(with_template(tmp_path, template), system=None)
    if hidden is None:
        assert chat.text(prompt)
        return
    with pytest.raises(ConfigError, match="does not show a message") as caught:
        chat.text(prompt)
    assert f"the role {hidden} says" in str(caught.value)


def test_a_system_message_that_is_not_shown_is_refused_for_written_answers(
    tmp_path: Path,
) -> None:
    chat = Chat(with_template(tmp_path, NO_SYSTEM), system="Be brief.")
    answered = [Message("user", "?"), Message("assistant", "so")]
    with pytest.raises(ConfigError, match="does not show a message"):
        chat.learned(answered)
    assert len(Chat(chat._tokenizer, system=None).learned(answered).tokens)


def test_a_template_that_begins_no_answer_is_refused(tmp_path: Path) -> None:
    without = CHAT.partition("{% if add_generation_prompt")[0]
    with pytest.raises(ConfigError, match="begins no answer"):
        Chat(with_template(tmp_path, without), system=None).text("?")
    # As in Llama 2, the end of the question begins the answer
    ends = without.replace("<eos>", "[/INST]")
    assert Chat(with_template(tmp_path, ends), system=None).text("?")
    # As in DialoGPT, nothing stands before an answer
    bare = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    assert Chat(with_template(tmp_path, bare), system=None).text("?") == "?<eos>"


def test_parts_that_are_texts_are_one_text(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer, system=None)
    parts = [Message("user", ("What is ", "1 + 2?"))]
    assert chat.text(parts) == chat.text("What is 1 + 2?")


def test_parts_stay_a_list_for_a_template_that_reads_lists(tmp_path: Path) -> None:
    """As some templates of models for images, which read nothing else."""
    reads = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    chat = Chat(with_template(tmp_path, reads), system=None)
    assert chat.text([Message("user", ("What is ", "1 + 2?"))]) == "<What is ><1 + 2?>"


def test_a_text_becomes_a_list_for_a_template_that_reads_nothing_else(
    tmp_path: Path,
) -> None:
    reads = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    chat = Chat(with_template(tmp_path, reads), system="Add.")
    assert chat.text([Message("user", "What is 1 + 2?")]) == "<Add.><What is 1 + 2?>"


def test_a_text_stays_a_text_for_a_template_that_reads_both(tmp_path: Path) -> None:
    reads = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    chat = Chat(with_template(tmp_path, reads), system=None)
    assert chat.text([Message("user", "What is 1 + 2?")]) == "What is 1 + 2?"


def test_variables_of_a_template_are_known(tmp_path: Path) -> None:
    template = "{% if not date is defined %}{% set date = 'x' %}{% endif %}{{ date }}{{ think }}"
    found = with_template(tmp_path, template).variables
    assert found >= {"date", "think"}
    assert "enable_thinking" not in found


def test_special_tokens_end_an_answer_by_themselves_and_texts_wherever_they_are_whole(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.stops(()) == ((END,), ())
    assert tokenizer.stop_token_ids == (END,)
    turn = tokenizer.encode("<turn>").tolist()
    assert tokenizer.stops(("<turn>", "x", "<eos>", "STOP")) == (
        (END, *turn),
        ("x", "STOP"),
    )
    assert [tokenizer.special_within(text) for text in ("<turn>", "x", "x<turn>")] == [
        None,
        None,
        "<turn>",
    ]
    texts = StopTexts(tokenizer, ("left of", "\N{SNOWMAN}"))
    for written in ("it is left off", "a b \N{SNOWMAN} c", "left  of what is not left"):
        tokens = tokenizer.encode(written).tolist()
        found = next(
            (n for n in range(1, len(tokens) + 1) if texts.end(tokens[:n])), None
        )
        whole = [
            n
            for n in range(1, len(tokens) + 1)
            if any(t in tokenizer.decode(tokens[:n]) for t in texts._texts)
        ]
        assert found == (whole[0] if whole else None)


IM = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (IM, (PAD,)),
        (IM.replace("<pad>", " <pad>"), (PAD,)),  # blanks before it
        (IM.replace("<pad>", ""), ()),  # nothing ends a turn
        (IM.replace("<pad>", "###"), ()),  # no special token
        ("{{ raise_exception('no') }}", ()),
        (None, ()),
    ],
)
def test_the_token_by_which_the_template_ends_a_turn_ends_an_answer(
    tmp_path: Path, template: str | None, more: tuple[int, ...]
) -> None:
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.stops((), chat=True) == ((END, *more), ())
    assert tokenizer.stops((), chat=False) == ((END,), ())


@pytest.mark.parametrize(
    ("begun", "kept"),
    [("The answer is", "The answer is"), ("so: ", "so: "), ("\n", "")],
)
def test_an_answer_continues_a_last_message_of_the_assistant(
    tokenizer: Tokenizer, begun: str, kept: str
) -> None:
    chat = Chat(tokenizer, system=None)
    prompt = [Message("user", "1 + 2?"), Message("assistant", begun)]
    text = tokenizer.decode(chat.first(prompt), special=True)
    assert text == f"<turn>user: 1 + 2?<eos>\n<turn>assistant: {kept}"


def test_a_template_that_cuts_blanks_continues_without_them(tmp_path: Path) -> None:
    trimmed = CHAT.replace("m['content']", "m['content'] | trim")
    chat = Chat(with_template(tmp_path, trimmed), system=None)
    prompt = [Message("user", "?"), Message("assistant", " so: ")]
    text = chat._tokenizer.decode(chat.first(prompt), special=True)
    assert text == "<turn>user: ?<eos>\n<turn>assistant: so:"


def test_a_message_that_the_template_does_not_show_cannot_be_continued(
    tmp_path: Path,
) -> None:
    chat = Chat(with_template(tmp_path, "{{ messages[0].content }}"), system=None)
    with pytest.raises(ConfigError, match="is to be continued") as caught:
        chat.first([Message("user", "?"), Message("assistant", "so")])
    assert caught.value.codes == ("chat-template-refused",)


def test_a_second_system_message_is_refused(tokenizer: Tokenizer) -> None:
    prompt = [Message("system", "Be kind."), Message("user", "?")]
    with pytest.raises(ConfigError) as caught:
        Chat(tokenizer, system="Be brief.").first(prompt)
    assert caught.value.codes == ("two-system-messages",)
    text = tokenizer.decode(Chat(tokenizer, system=None).first(prompt))
    assert text.count("system") == 1


def test_a_prompt_begins_as_the_tokenizer_says_and_does_not_end(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path)
    library = Library.from_file(str(folder / "tokenizer.json"))
    special = [("<turn>", 2), ("<eos>", END)]
    library.post_processor = TemplateProcessing(
        single="<turn> $A <eos>", special_tokens=special
    )
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    plain = PlainText(tokenizer, system=None)
    for text, shown in (
        ("1 + 2", "<turn>1 + 2"),
        ("<turn>1 + 2", "<turn>1 + 2"),  # not twice
        ("1 + 2<eos>", "<turn>1 + 2<eos>"),  # the row's own
        ("", "<turn>"),
    ):
        assert tokenizer.decode(plain.first(text), special=True) == shown
    whole = tokenizer.encode("1 + 2", special=True)
    assert tokenizer.decode(whole, special=True) == "<turn>1 + 2<eos>"


def test_plain_text(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, None)
    plain = PlainText(tokenizer, system="Be brief.")
    assert tokenizer.decode(plain.first("1 + 2 =")) == "Be brief.\n1 + 2 ="
    assert (
        tokenizer.decode(PlainText(tokenizer, system=None).first(CHATS["turns"]))
        == "a\n b \nç"
    )
    assert (
        tokenizer.decode(plain.reply(tokenizer.encode("3"), "Higher.")) == "\nHigher.\n"
    )


def test_an_answer_has_its_tags_and_no_other_special_tokens(tmp_path: Path) -> None:
    tags = ["<think>", "</think>", "[TOOL]", "[/TOOL]"]
    marks = ["<|im_end|>", "<lone>"]
    folder = tiny_tokenizer(tmp_path, special=[*tags, *marks])
    tokenizer = Tokenizer.load(folder)
    text = "<think>a</think>[TOOL]b[/TOOL]<lone> c<|im_end|>"
    tokens = tokenizer.encode(text + "<eos>")
    assert tokenizer.decode_answer(tokens) == "<think>a</think>[TOOL]b[/TOOL] c"
    assert tokenizer.decode(tokens) == "ab c"
    # Tags that are plain tokens, and an answer without special tokens
    plain = Tokenizer.load(tiny_tokenizer(tmp_path / "plain"))
    assert plain.decode_answer(plain.encode(text)) == text
    # The begin and end of a text are no tags
    folder = tiny_tokenizer(tmp_path / "ends", special=["<s>", "</s>"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = Tokenizer.load(folder)
    assert ends.decode_answer(ends.encode("<s>a</s>")) == "a"
