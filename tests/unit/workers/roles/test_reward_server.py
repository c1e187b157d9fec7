"""A reward model served over HTTP gives what it gives as a component; who has no token gets nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.language_model import RewardConfig
from rlplace.errors import RewardError
from rlplace.http_server import Limits
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.workers.roles.reward import RewardClient, RewardEndpointWorker
from rlplace.workers.roles.reward_server import RewardServer, main, most_tokens
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import ScorerScenario, scored_by, values, with_text
from tests.served import in_a_thread
from tests.tiny_lm import tiny_model, tiny_reward_model


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


def client(url: str, *, retries_of: int = 0, **others: Any) -> RewardClient:
    return RewardClient(
        RewardConfig(url=url, timeout_s=30.0, retries=retries_of, **others),
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


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Send a request with these headers as they are; return the status and the body of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60.0)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/")
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        with contextlib.suppress(ConnectionError):
            connection.send(body)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("key", ["Bearer abd", "abc", "Bearer \xe9", "bearer abc"])
@pytest.mark.parametrize("length", ["600000000", "-1", "9" * 30, "3"])
def test_who_has_no_key_sends_no_body(scorer: Path, key: str, length: str) -> None:
    with serving(scorer, api_key="abc") as url:
        status, _ = post(url, b"abc", Content_Length=length, Authorization=key)
    assert status == 401


@pytest.mark.parametrize(
    ("length", "status"),
    [("-1", 411), ("", 411), ("x", 411), (str(1 << 40), 413), ("9" * 30, 411)],
)
def test_the_size_of_a_request_has_a_limit(
    scorer: Path, length: str, status: int
) -> None:
    with serving(scorer) as url:
        assert post(url, b"", Content_Length=length)[0] == status


@pytest.mark.parametrize("text", ["[" * 200_000, r'{"query": ["\ud800"]}', "{", "3"])
def test_what_is_no_json_of_texts_is_refused(
    scorer: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(scorer) as url:
        status, answer = post(url, text.encode(), Content_Length=str(len(text)))
    assert (status, b"no text empty" in answer) == (400, True)
    assert "Traceback" not in capfd.readouterr().err


def test_a_text_that_is_longer_than_the_model_reads_is_refused(scorer: Path) -> None:
    longest = most_tokens(scorer)
    assert longest is not None
    with (
        serving(scorer) as url,
        pytest.raises(RewardError, match=f"the model reads {longest}"),
    ):
        ask(url, ["word " * (longest + 1)])


def test_half_requests_end_and_leave_room_for_others(
    scorer: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = Limits(connections=2, silent_s=0.2)
    with serving(scorer, limits=limits) as url:
        port = int(url.rpartition(":")[2])
        half = b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(2)
            ]
            for each in silent:
                each.sendall(half)
            # Each is closed after its silence, with the reason.
            for each in silent:
                assert b" 408 " in each.recv(100)
        # A place is free once its thread has ended.
        assert len(client(url, retries_of=50).scores(["a"], ["a"], [None])) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_token_that_is_not_set_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--api-key-env", "NOT_SET_ANYWHERE"])
    assert "no environment variable NOT_SET_ANYWHERE" in capsys.readouterr().err
