"""What scorers read, when samples need text, and what is refused before launch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlplace.comm.ends import LocalChannel
from rlplace.config.blocks.language_model import (
    CriticConfig,
    ReferenceConfig,
    RewardConfig,
    TextRolloutConfig,
)
from rlplace.config.own import OwnName
from rlplace.envs.text import Message, Transcript
from rlplace.envs.text.rewards import answer_text, prompt_text
from rlplace.jobs.language_model.rules.own_engine import own_engine_problems
from rlplace.jobs.language_model.rules.scorers import scorer_problems
from rlplace.models.folders import reads_tokens, same_tokens
from rlplace.models.heads import reward_head_problem
from rlplace.models.tokenizer import Tokenizer
from rlplace.workers.arguments import SAMPLES
from rlplace.workers.roles.scorer import (
    conversation,
    queries,
    reads_text,
    retokenized,
)
from rlplace.workers.roles.text_env import TextEnvWorker
from tests.lm_ranks import made_up_samples
from tests.pages import write_own_engine
from tests.scorer_ranks import ScorerScenario
from tests.text_stage import TextStage
from tests.tiny_lm import tiny_model, tiny_reward_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.worker_ranks import spec_of

TWO_TURNS = Transcript(
    prompt="guess",
    answers=("4", "6"),
    replies=("higher",),
    facts={},
    tokens=4,
    truncated=False,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("name", "given", "code", "fix"),
    [
        (
            "plain_engine:PlainEngin",
            {},
            "unknown-engine",
            "engine: plain_engine:PlainEngine",
        ),
        (
            "plain_engines:PlainEngine",
            {},
            "unknown-engine",
            "put the folder of your package on PYTHONPATH",
        ),
        ("plain_engine:random", {}, "unknown-engine", "engine: <package.module:Class>"),
        ("plain_engine:Answer", {}, "unknown-engine", "def move(self, ...)"),
        ("plain_engine:PlainEngine", {"ownr": 1}, "engine-args", "remove ownr"),
        ("plain_engine:PlainEngine", {}, None, ""),
    ],
)
def test_an_engine_of_ones_own_is_looked_at_before_a_run(
    name: str,
    given: dict[str, object],
    code: str | None,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(write_own_engine(tmp_path))
    found = [
        (p.code, p.fix)
        for p in own_engine_problems(
            TextRolloutConfig(engine=OwnName(name), engine_args=given)
        )
    ]
    assert [code for code, _ in found] == ([] if code is None else [code])
    assert all(fix in str(shown) for _, shown in found)


def test_a_conversation_is_told_in_order() -> None:
    told = " ".join(
        f"{message.role}: {message.content}"
        for message in conversation(TWO_TURNS, "be brief")
    )
    assert told == "system: be brief user: guess assistant: 4 user: higher assistant: 6"
    assert (prompt_text(TWO_TURNS), answer_text(TWO_TURNS)) == ("guess", "4\nhigher\n6")
    asked = [
        Message("user", "hello"),
        Message("assistant", "yes?"),
        Message("user", "guess"),
    ]
    told = replace(TWO_TURNS, prompt=asked)
    assert conversation(told)[:3] == asked
    assert prompt_text(told) == "hello\nyes?\nguess"


def test_an_answer_continues_the_last_message_of_a_prompt() -> None:
    asked = [Message("user", "1 + 2?"), Message("assistant", "It is ")]
    told = conversation(replace(TWO_TURNS, prompt=asked))
    assert told[1] == Message("assistant", f"It is {TWO_TURNS.answers[0]}")
    assert [message.role for message in told[:3]] == ["user", "assistant", "user"]


def test_a_query_is_what_the_policy_saw_and_wrote(policy: Path) -> None:
    tokenizer = Tokenizer.load(policy)
    prompt, answer = "<turn>user: 1+2<eos>\n<turn>assistant: ", "3<eos>"
    tokens = tokenizer.encode(prompt + answer)
    first = len(tokenizer.encode(prompt))
    sample = replace(
        made_up_samples()[0][0],
        tokens=tokens,
        mask=tokens * 0 + [i >= first for i in range(len(tokens))] > 0,
        logprobs=tokens * 0.0,
        versions=tokens,
    )
    assert queries([sample], tokenizer) == ([prompt + answer], [prompt])


def test_who_reads_text(policy: Path, tmp_path: Path) -> None:
    alike, other = (
        tiny_tokenizer(tmp_path / "alike", chat=None),
        tiny_tokenizer(tmp_path / "other", vocabulary=280),
    )
    (tmp_path / "bare").mkdir()
    folders = (policy, alike, other, tmp_path / "bare")
    assert [same_tokens(policy, folder) for folder in folders] == [
        True,
        True,
        False,
        True,
    ]

    def reads(component: str, **block: object) -> bool:
        return reads_text(
            ScorerScenario(model=policy, component=component, block=block).job,
            component,
        )

    assert not reads("reference")
    assert not reads("reward", model={"path": str(alike)})
    assert reads("reward", model={"path": str(other)})
    assert reads("reward", function="math_answer")
    assert reads("reward", url="http://host/")


OWN_CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>{% endfor %}"


def test_a_reward_model_with_another_template_reads_its_own(
    policy: Path, tmp_path: Path
) -> None:
    """Its tokens are those of the policy, and it has learned to read other chats."""
    alike = tiny_tokenizer(tmp_path / "alike")
    bare = tiny_tokenizer(tmp_path / "bare", chat=None)
    own = tiny_tokenizer(tmp_path / "own", chat=OWN_CHAT)
    folders = (policy, alike, bare, own)
    found = [reads_tokens(policy, folder, chat=True) for folder in folders]
    assert found == [True, True, True, False]
    assert reads_tokens(policy, own, chat=False)
    block = {"model": {"path": str(own)}}
    job = ScorerScenario(model=policy, component="reward", block=block).job
    assert job.config.env.chat
    assert reads_text(job, "reward")
    sample = made_up_samples(groups=1)[0][0]
    told = replace(sample, transcript=TWO_TURNS)
    text = Tokenizer.load(own).decode(retokenized(job, own)(told), special=True)
    assert text == (
        "[user] guess<eos>[assistant] 4<eos>[user] higher<eos>[assistant] 6<eos>"
    )


def test_env_ranks_add_text_for_those_who_read_it(policy: Path) -> None:
    stage = TextStage(
        policy, lambda request, sample: f"{sample}<eos>", env={"task": "arithmetic"}
    )
    rewards = {"first": RewardConfig(function="math_answer"), "second": RewardConfig()}
    stage.job = replace(
        stage.job,
        config=replace(stage.job.config, reward=rewards),
        ranks=dict.fromkeys(
            ("actor", "env", "rollout", "reward.first", "reward.second"), 1
        ),
    )
    names = (SAMPLES, "samples.reward.first", "samples.reward.second")
    stage.channels |= {name: LocalChannel(spec_of(name)) for name in names}
    stage.env = [TextEnvWorker(stage.job, stage._context(0))]
    with stage:
        stage.run()
    taken = [
        [sample for _ in range(3) for sample in stage.channels[name].get_nowait()]
        for name in names
    ]
    without, told, also_without = (
        [sample.transcript for sample in samples] for samples in taken
    )
    assert (without, also_without) == ([None] * 6, [None] * 6)
    assert [transcript.answers for transcript in told] == [("0",), ("1",)] * 3
    assert all(
        transcript.prompt.startswith("What is ") and transcript.facts
        for transcript in told
    )
    places = [
        [(s.group, s.sample, s.tokens.tolist()) for s in samples] for samples in taken
    ]
    assert places[0] == places[1] == places[2]


# ── checks before launch ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    return tiny_reward_model(
        tmp_path_factory.mktemp("scorer"), like=trained, head="value_head"
    )


def problems(
    trained: Path, component: str, block: Mapping[str, object], **env: object
) -> list[tuple[str, str]]:
    job = ScorerScenario(model=trained, component=component, block=block, env=env).job
    return [(p.code, p.key) for p in scorer_problems(job.config, tuple(job.ranks))]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"function": "math_answer"}, []),
        ({"function": "math_anwser"}, [("unknown-reward", "reward.function")]),
        (
            {"function": "exact_match", "kwargs": {"cse": 1}},
            [("bad-reward-kwargs", "reward.kwargs.cse")],
        ),
        ({"url": "http://localhost:5000/get_reward"}, []),
        ({"url": "localhost:5000"}, [("bad-reward-url", "reward.url")]),
        (
            {"url": "http://host/", "api_key_env": "NOT_SET_ANYWHERE"},
            [("no-api-key", "reward.api_key_env")],
        ),
        ({}, [("reward-head", "reward.model")]),  # the policy itself scores nothing
    ],
)
def test_rewards(
    trained: Path, block: Mapping[str, object], expected: list[tuple[str, str]]
) -> None:
    assert problems(trained, "reward", block) == expected


def test_a_reward_model_needs_the_head_that_is_named_and_the_fix_names_the_one_that_is_there(
    trained: Path, scorer: Path
) -> None:
    assert problems(trained, "reward", {"model": {"path": str(scorer)}}) == []
    wrong = problems(
        trained, "reward", {"model": {"path": str(scorer)}, "head": "worth"}
    )
    assert wrong == [("reward-head", "reward.head")]
    problem = reward_head_problem(scorer, "reward.math", "worth")
    assert problem is not None
    assert (problem.key, problem.fix) == ("reward.math.head", "head: value_head")


@pytest.mark.parametrize(
    ("rows", "bias", "says"), [(3, False, "3 classes"), (1, True, "would be left out")]
)
def test_a_head_that_does_not_give_one_number(
    scorer: Path, tmp_path: Path, rows: int, bias: bool, says: str
) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights["value_head.weight"].repeat(rows, 1)
    if bias:
        weights["value_head.bias"] = weights["value_head.weight"][:, 0].clone()
    save_file(weights, tmp_path / "model.safetensors")
    problem = reward_head_problem(tmp_path, "reward")
    assert problem is not None
    assert says in str(problem.why)


def test_a_reward_model_of_other_tokens_needs_a_chat_template(
    trained: Path, scorer: Path, tmp_path: Path
) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    tiny_tokenizer(tmp_path, chat=None)
    block = {"model": {"path": str(tmp_path)}}
    assert problems(trained, "reward", block) == [
        ("no-chat-template", "reward.model.path")
    ]
    assert problems(trained, "reward", block, chat=False) == []


@pytest.mark.parametrize("component", ["reference", "critic"])
def test_what_reads_the_tokens_of_the_policy_has_its_tokenizer(
    component: str, trained: Path, scorer: Path, tmp_path: Path
) -> None:
    job = ScorerScenario(model=trained, block={}).job
    kind = {"reference": ReferenceConfig, "critic": CriticConfig}[component]

    def found(folder: Path) -> list[tuple[str, str]]:
        config = replace(job.config, **{component: kind(model={"path": str(folder)})})
        return [(p.code, p.key) for p in scorer_problems(config, ["actor", component])]

    assert found(scorer) == []
    assert found(tiny_tokenizer(tmp_path)) == [
        ("other-tokenizer", f"{component}.model.path")
    ]
