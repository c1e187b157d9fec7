"""A reward model served over HTTP gives what it gives as a component; who has no token gets nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.language_model import RewardConfig
from rlplace.errors import RewardError
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.workers.roles.reward import RewardClient, RewardEndpointWorker
from rlplace.workers.roles.reward_server import RewardServer, main
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import ScorerScenario, scored_by, values, with_text
from tests.tiny_lm import tiny_model, tiny_reward_model
from tests.unit.workers.roles.test_reward import in_a_thread


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    return tiny_reward_model(tmp_path_factory.mktemp("scorer"), like=policy)


@contextlib.contextmanager
def serving(folder: Path, **others: Any) -> Iterator[str]:
    settings = {
        "dtype": "fp32",
        "head": "score",
        "token_budget": 64,
        "api_key": None,
    } | others
    with in_a_thread(
        RewardServer(folder, address=("127.0.0.1", 0), **settings)
    ) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"


def words(policy: Path) -> list[tuple[Sample, ...]]:
    """Made-up samples of text: random tokens would not be encoded from their text as they were drawn."""
    tokenizer = Tokenizer.load(policy)

    def worded(sample: Sample) -> Sample:
        text = "<turn>user: the quick fox<eos><turn>assistant: " + "jumps over " * (
            1 + sample.sample + 4 * sample.group
        )
        tokens = tokenizer.encode(text)
        mask = np.arange(len(tokens)) > 9
        return dataclasses.replace(
            sample, tokens=tokens, mask=mask, logprobs=tokens * 0.0, versions=tokens * 0
        )

    return with_text([tuple(map(worded, group)) for group in made_up_samples()])


def test_a_reward_is_switched_to_an_endpoint_by_its_address(
    policy: Path, scorer: Path
) -> None:
    groups = words(policy)
    model = ScorerScenario(
        model=policy, component="reward", block={"model": {"path": str(scorer)}}
    )
    with serving(scorer) as url:
        endpoint = ScorerScenario(
            model=policy, component="reward", block={"url": url, "batch": 5}
        )
        asked = scored_by(endpoint, groups, kind=RewardEndpointWorker)
    here = scored_by(model, groups)
    assert asked.keys() == here.keys()
    np.testing.assert_allclose(values(asked), values(here), atol=1e-5)


def test_texts_are_scored_in_their_order_whatever_the_packing(
    policy: Path, scorer: Path
) -> None:
    texts = ["<turn>user: 1+2<eos>", "a longer question, " * 9, "brown fox", "3"]
    with serving(scorer) as url, serving(scorer, token_budget=1) as one_by_one:
        found, expected = (
            ask(url, texts),
            [ask(one_by_one, [text])[0] for text in texts],
        )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(set(found)) == 4


def client(url: str, **others: Any) -> RewardClient:
    return RewardClient(
        RewardConfig(url=url, timeout_s=30.0, retries=0, **others),
        "reward",
        threading.Event(),
    )


def ask(url: str, texts: list[str], **others: Any) -> list[float]:
    return client(url, **others).scores(texts, texts, [None] * len(texts))


def test_without_the_token_nothing_is_scored(
    scorer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_KEY", "abc")
    with serving(scorer, api_key="abc") as url:
        with pytest.raises(RewardError, match="401") as caught:
            ask(url, ["a"])
        assert len(ask(url, ["a"], api_key_env="REWARD_KEY")) == 1
        client(url).reach()
    assert caught.value.code == "reward-endpoint-refused"


def test_what_is_no_query_is_refused(scorer: Path) -> None:
    with serving(scorer) as url, pytest.raises(RewardError, match="no text empty"):
        ask(url, [""])


def test_a_token_that_is_not_set_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--api-key-env", "NOT_SET_ANYWHERE"])
    assert "no environment variable NOT_SET_ANYWHERE" in capsys.readouterr().err
