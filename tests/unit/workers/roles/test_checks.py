"""What scorers read, when samples need text, and what is refused before launch."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlplace.comm.local import LocalChannel
from rlplace.config.schema import CriticConfig
from rlplace.envs.text import Message, Transcript
from rlplace.envs.text.rewards import answer_text, prompt_text
from rlplace.models.heads import reward_head_problem
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.workers.arguments import SAMPLES, samples_for
from rlplace.workers.roles.checks import check_scorers, same_tokens
from rlplace.workers.roles.scorer import conversation, queries, reads_text
from rlplace.workers.roles.text_env import TextEnvWorker
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import ScorerScenario
from tests.text_stage import TextStage
from tests.tiny_lm import tiny_model, tiny_reward_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.worker_ranks import spec_of

TWO_TURNS = Transcript(prompt="guess", answers=("4", "6"), replies=("higher",), facts={}, tokens=4, truncated=False)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("policy"))


def test_a_conversation_is_told_in_order() -> None:
    told = " ".join(f"{message.role}: {message.content}" for message in conversation(TWO_TURNS, "be brief"))
    assert told == "system: be brief user: guess assistant: 4 user: higher assistant: 6"
    assert (prompt_text(TWO_TURNS), answer_text(TWO_TURNS)) == ("guess", "4\nhigher\n6")


def test_a_prompt_of_messages_is_kept() -> None:
    asked = [Message("user", "hello"), Message("assistant", "yes?"), Message("user", "guess")]
    told = dataclasses.replace(TWO_TURNS, prompt=asked)
    assert conversation(told)[:3] == asked
    assert prompt_text(told) == "hello\nyes?\nguess"


def test_a_query_is_what_the_policy_saw_and_wrote(policy: Path) -> None:
    tokenizer = Tokenizer.load(policy)
    prompt, answer = "<turn>user: 1+2<eos>\n<turn>assistant: ", "3<eos>"
    tokens = tokenizer.encode(prompt + answer)
    first = len(tokenizer.encode(prompt))
    sample = dataclasses.replace(
        made_up_samples()[0][0],
        tokens=tokens,
        mask=tokens * 0 + [i >= first for i in range(len(tokens))] > 0,
        logprobs=tokens * 0.0,
        versions=tokens,
    )
    assert queries([sample], tokenizer) == ([prompt + answer], [prompt])


def test_who_reads_text(policy: Path, tmp_path: Path) -> None:
    alike, other = tiny_tokenizer(tmp_path / "alike", chat=None), tiny_tokenizer(tmp_path / "other", vocabulary=280)
    (tmp_path / "bare").mkdir()
    folders = (policy, alike, other, tmp_path / "bare")
    assert [same_tokens(policy, folder) for folder in folders] == [True, True, False, True]

    def reads(component: str, **block: object) -> bool:
        return reads_text(ScorerScenario(model=policy, component=component, block=block).job, component)

    assert not reads("reference")
    assert not reads("reward", model={"path": str(alike)})
    assert reads("reward", model={"path": str(other)})
    assert reads("reward", function="math_answer")
    assert reads("reward", url="http://host/")


def test_env_ranks_add_text_for_those_who_read_it(policy: Path) -> None:
    stage = TextStage(policy, lambda request, sample: f"{sample}<eos>", env={"task": "arithmetic"})
    block = {"first": {"function": "math_answer"}, "second": {}}
    stage.job = dataclasses.replace(
        stage.job,
        config=dataclasses.replace(stage.job.config, reward=_rewards(policy, block)),
        ranks=dict.fromkeys(("actor", "env", "rollout", "reward.first", "reward.second"), 1),
    )
    for component in stage.job.scorers:
        name = samples_for(component)
        stage.channels[name] = LocalChannel(spec_of(name))
    stage.env = [TextEnvWorker(stage.job, stage._context(0))]
    with stage:
        stage.run()
    taken = {name: _all(stage.channels[name]) for name in (SAMPLES, *map(samples_for, stage.job.scorers))}
    texts = {name: [s.transcript for s in samples] for name, samples in taken.items()}
    assert texts.pop("samples.reward.first") == [Transcript(**_facts(s)) for s in taken["samples.reward.first"]]
    assert texts == {"samples": [None] * 6, "samples.reward.second": [None] * 6}
    tokens = [[(s.group, s.sample, s.tokens.tolist()) for s in samples] for samples in taken.values()]
    assert tokens[0] == tokens[1] == tokens[2]


def _rewards(policy: Path, blocks: dict[str, dict[str, object]]) -> object:
    return {n: ScorerScenario(model=policy, component="reward", block=b).job.config.reward for n, b in blocks.items()}


def _all(channel: LocalChannel) -> list[Sample]:
    return [sample for _ in range(channel.stats().depth_items) for sample in channel.get_nowait()]


def _facts(sample: Sample) -> dict[str, object]:
    """Of the transcript that this sample should have: its answer is its number."""
    found = sample.transcript
    assert isinstance(found, Transcript)
    fixed = {"answers": (str(sample.sample),), "replies": (), "tokens": sample.response_tokens, "truncated": False}
    return {"prompt": found.prompt, "facts": found.facts, **fixed}


# ── checks before launch ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("scorer"), like=trained, head="value_head")


def problems(trained: Path, component: str, block: Mapping[str, object], **env: object) -> list[tuple[str, str]]:
    job = ScorerScenario(model=trained, component=component, block=block, env=env).job
    return [(p.code, p.key) for p in check_scorers(job.config, tuple(job.ranks))]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"function": "math_answer"}, []),
        ({"function": "math_anwser"}, [("unknown-reward", "reward.function")]),
        ({"function": "exact_match", "kwargs": {"cse": 1}}, [("bad-reward-kwargs", "reward.kwargs.cse")]),
        ({"url": "http://localhost:5000/get_reward"}, []),
        ({"url": "localhost:5000"}, [("bad-reward-url", "reward.url")]),
        ({"url": "http://host/", "api_key_env": "NOT_SET_ANYWHERE"}, [("no-api-key", "reward.api_key_env")]),
        ({}, [("reward-head", "reward.model")]),  # the policy itself scores nothing
    ],
)
def test_rewards(trained: Path, block: Mapping[str, object], expected: list[tuple[str, str]]) -> None:
    assert problems(trained, "reward", block) == expected


def test_a_reward_model_with_a_usual_head(trained: Path, scorer: Path) -> None:
    assert problems(trained, "reward", {"model": {"path": str(scorer)}}) == []
    wrong = problems(trained, "reward", {"model": {"path": str(scorer)}, "head": "worth"})
    assert wrong == [("reward-head", "reward.head")]


def test_the_fix_names_the_head_that_is_there(scorer: Path) -> None:
    problem = reward_head_problem(scorer, "reward.math", "worth")
    assert problem is not None
    assert (problem.key, problem.fix) == ("reward.math.head", "head: value_head")


@pytest.mark.parametrize(("rows", "bias", "says"), [(3, False, "3 classes"), (1, True, "would be left out")])
def test_a_head_that_does_not_give_one_number(scorer: Path, tmp_path: Path, rows: int, bias: bool, says: str) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights["value_head.weight"].repeat(rows, 1)
    if bias:
        weights["value_head.bias"] = weights["value_head.weight"][:, 0].clone()
    save_file(weights, tmp_path / "model.safetensors")
    problem = reward_head_problem(tmp_path, "reward")
    assert problem is not None
    assert says in str(problem.why)


def test_a_reward_model_of_other_tokens_needs_a_chat_template(trained: Path, scorer: Path, tmp_path: Path) -> None:
    shutil.copytree(scorer, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    tiny_tokenizer(tmp_path, chat=None)
    block = {"model": {"path": str(tmp_path)}}
    assert problems(trained, "reward", block) == [("no-chat-template", "reward.model.path")]
    assert problems(trained, "reward", block, chat=False) == []


def test_a_reference_reads_the_tokens_of_the_policy(trained: Path, scorer: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path)
    assert problems(trained, "reference", {"model": {"path": str(scorer)}}) == []
    assert problems(trained, "reference", {"model": {"path": str(other)}}) == [
        ("other-tokenizer", "reference.model.path")
    ]


def test_a_critic_reads_them_too(trained: Path, scorer: Path, tmp_path: Path) -> None:
    job = ScorerScenario(model=trained, component="reference", block={}).job

    def said_of(folder: Path) -> list[tuple[str, str]]:
        config = replace(job.config, critic=CriticConfig(model={"path": str(folder)}))
        return [(p.code, p.key) for p in check_scorers(config, ["actor", "critic"])]

    assert said_of(scorer) == []
    assert said_of(tiny_tokenizer(tmp_path)) == [("other-tokenizer", "critic.model.path")]
