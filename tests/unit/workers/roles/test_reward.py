"""Rewards without a model: behind HTTP, asked through real sockets, and Python functions; right and failing."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.language_model import RewardConfig
from rlplace.errors import ChannelBroken, ConfigError, RewardError
from rlplace.tokens import Sample
from rlplace.workers.roles.reward import (
    RewardClient,
    RewardEndpointWorker,
    RewardFunctionWorker,
)
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import Said, ScorerScenario, scored_by, with_text
from tests.served import in_a_thread
from tests.tiny_tokenizer import tiny_tokenizer

Answer = Callable[
    [Mapping[str, Any]], "tuple[int, str | Iterator[str]]"
]  # what was posted -> status, body


class Endpoints(ThreadingHTTPServer):
    """Answers as a test says, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.answer, self.asked, self.keys = answer, list[Any](), list[str | None]()
        self.headers: dict[str, str] = {}  # of every answer
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"


class _Request(BaseHTTPRequestHandler):
    server: Endpoints

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.keys.append(self.headers["Authorization"])
        status, body = self.server.answer(asked)
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who asked has given up
            for piece in [body] if isinstance(body, str) else body:
                self.wfile.write(piece.encode())

    def log_message(self, format: str, *args: object) -> None: ...


def serving(answer: Answer) -> contextlib.AbstractContextManager[Endpoints]:
    return in_a_thread(Endpoints(answer))


def by_length(asked: Mapping[str, Any]) -> tuple[int, str]:
    return 200, json.dumps(
        {"rewards": [len(query) + 1000 * int(label) for query, label in _pairs(asked)]}
    )


def _pairs(asked: Mapping[str, Any]) -> list[tuple[str, str]]:
    return list(zip(asked["query"], asked["labels"], strict=True))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("policy"))


def scored(
    policy: Path, url: str, groups: list[tuple[Sample, ...]], **block: object
) -> Said:
    scenario = ScorerScenario(
        model=policy, component="reward", block={"url": url, **block}
    )
    return scored_by(scenario, groups, kind=RewardEndpointWorker)


def client(url: str, **others: Any) -> RewardClient:
    block = RewardConfig(url=url, **{"timeout_s": 5.0, "retries": 0, **others})
    return RewardClient(block, "reward", threading.Event())


def ask(url: str, **others: Any) -> list[float]:
    return client(url, **others).scores(["a", "b"], ["a", "b"], ["1", "2"])


def test_every_sample_gets_its_own_score_in_batches(policy: Path) -> None:
    from rlplace.models.tokenizer import Tokenizer

    groups, tokenizer = with_text(made_up_samples()), Tokenizer.load(policy)
    with serving(by_length) as server:
        found = scored(policy, server.url, groups, batch=5)
    expected = {
        (s.group, s.sample): [
            len(tokenizer.decode(s.tokens, special=True)) + 1000.0 * s.group
        ]
        for group in groups
        for s in group
    }
    assert found == expected
    assert sorted(len(asked["query"]) for asked in server.asked) == [2, 5, 5]
    assert all(
        q.startswith(p)
        for asked in server.asked
        for q, p in zip(asked["query"], asked["prompts"], strict=True)
    )


def test_what_fails_for_a_moment_is_asked_again() -> None:
    answers = [(503, "busy"), (429, "later"), (200, '{"rewards": [1, 2.5]}')]
    with serving(lambda _: answers.pop(0)) as server:
        assert ask(server.url, retries=2) == [1.0, 2.5]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (500, "out of memory", "reward-endpoint-down", "HTTP 500: 'out of memory'"),
        (400, "no field query", "reward-endpoint-refused", "'no field query'"),
        (200, "<html>", "reward-endpoint-answer", "'<html>'"),
        (200, '{"scores": [1, 2]}', "reward-endpoint-answer", "it is not"),
        (200, '{"rewards": 1}', "reward-endpoint-answer", "it is not"),
        (200, '{"rewards": ["good", "bad"]}', "reward-endpoint-answer", "it is not"),
        (200, '{"rewards": ["1", "2"]}', "reward-endpoint-answer", "it is not"),
        (200, '{"rewards": [true, 1]}', "reward-endpoint-answer", "it is not"),
        (200, "[" * 200_000, "reward-endpoint-answer", "it is not"),
        (200, '{"rewards": [1]}', "reward-endpoint-answer", "1 rewards for 2 queries"),
        (
            200,
            '{"rewards": [1, NaN]}',
            "reward-endpoint-answer",
            "why: one of its rewards is not finite",
        ),
    ],
)
def test_a_wrong_answer_is_shown(status: int, body: str, code: str, said: str) -> None:
    with (
        serving(lambda _: (status, body)) as server,
        pytest.raises(RewardError) as caught,
    ):
        ask(server.url)
    assert (caught.value.code, caught.value.problem.key, caught.value.problem.got) == (
        code,
        "reward.url",
        server.url,
    )
    assert said in str(caught.value)


def test_a_refusal_whose_reason_breaks_off_is_still_one() -> None:
    with serving(lambda _: (400, "5\r\nno")) as server:
        server.headers["Transfer-Encoding"] = "chunked"
        with pytest.raises(RewardError, match="refused with HTTP 400") as caught:
            ask(server.url)
    assert caught.value.code == "reward-endpoint-refused"


def test_it_goes_nowhere_else_with_its_token() -> None:
    with serving(by_length) as elsewhere, serving(lambda _: (302, "")) as server:
        server.headers["Location"] = elsewhere.url
        with pytest.raises(RewardError, match="HTTP 302") as caught:
            ask(server.url)
    assert caught.value.code == "reward-endpoint-refused"
    assert not elsewhere.keys


@pytest.mark.parametrize("first", [20.0, 0.0], ids=["late", "drop by drop"])
def test_an_answer_that_is_not_whole_in_time_is_given_up(first: float) -> None:
    given_up = threading.Event()

    def drops() -> Iterator[str]:
        given_up.wait(first)
        while not given_up.wait(0.01):
            yield " "

    with serving(lambda _: (200, drops())) as server:
        with pytest.raises(
            RewardError,
            match=r"no answer in 2 tries(.|\n)*no whole answer within 0\.1 s",
        ) as caught:
            ask(server.url, timeout_s=0.1, retries=1)
        given_up.set()
    assert caught.value.code == "reward-endpoint-down"


def test_an_endpoint_that_is_not_there_is_noticed_before_anything_is_sampled(
    policy: Path,
) -> None:
    with serving(by_length) as server:
        url = server.url
    with pytest.raises(RewardError, match="refused") as caught:
        scored(policy, url, [], retries=0)
    assert caught.value.code == "reward-endpoint-down"


def test_samples_of_a_request_that_failed_are_left_out_where_errors_are_skipped(
    policy: Path,
) -> None:
    groups = with_text(made_up_samples())

    def one_too_long(asked: Mapping[str, Any]) -> tuple[int, str]:
        return (422, "too long") if "0" in asked["labels"] else by_length(asked)

    faults = {"on_error": "skip", "error_budget": 4}
    with serving(one_too_long) as server:
        block = {"url": server.url, "batch": 4}
        scenario = ScorerScenario(
            model=policy, component="reward", block=block, faults=faults
        )
        found = scored_by(scenario, groups, kind=RewardEndpointWorker)
    left_out = {place for place, (value,) in found.items() if math.isnan(value)}
    assert left_out == {(s.group, s.sample) for s in groups[0]}


@pytest.mark.parametrize(("on_error", "left_out"), [("skip", 4), ("retry", 0)])
def test_an_answer_that_is_no_list_of_rewards_is_asked_for_again(
    policy: Path, on_error: str, left_out: int
) -> None:
    pages = iter(["<html>a gateway's</html>"])

    def first_a_page(asked: Mapping[str, Any]) -> tuple[int, str]:
        page = next(pages, None)
        return by_length(asked) if page is None else (200, page)

    with serving(first_a_page) as server:
        block = {"url": server.url, "batch": 4, "concurrency": 1}
        scenario = ScorerScenario(
            model=policy, component="reward", block=block, faults={"on_error": on_error}
        )
        found = scored_by(
            scenario, with_text(made_up_samples()), kind=RewardEndpointWorker
        )
    assert sum(math.isnan(value) for (value,) in found.values()) == left_out


@pytest.mark.parametrize(
    ("answer", "times"),
    [((200, "<html>"), 3), ((500, "out of memory"), 1)],
    ids=["no list", "down"],
)
def test_what_stays_wrong_is_asked_for_twice_more_unless_the_endpoint_is_down(
    policy: Path, answer: tuple[int, str], times: int
) -> None:
    often = Counter[str]()

    def wrong(asked: Mapping[str, Any]) -> tuple[int, str]:
        often[json.dumps(asked)] += 1
        return answer if often[json.dumps(asked)] < 9 else by_length(asked)

    with serving(wrong) as server:
        block = {"url": server.url, "batch": 4, "concurrency": 1, "retries": 0}
        faults = {"on_error": "retry", "error_budget": 1000}
        scenario = ScorerScenario(
            model=policy, component="reward", block=block, faults=faults
        )
        found = scored_by(
            scenario, with_text(made_up_samples()), kind=RewardEndpointWorker
        )
    assert {*often.values()} == {times}
    assert all(math.isnan(value) for (value,) in found.values())


class Waits(threading.Event):
    """Waits for no time, and keeps for how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return False


@pytest.mark.parametrize(
    ("asked", "waited"),
    [("3", 3.0), ("9999", 60.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.1)],
)
def test_a_refusal_says_when_to_ask_again(asked: str, waited: float) -> None:
    ended = Waits()
    with serving(lambda _: (429, "slow down")) as server:
        server.headers["Retry-After"] = asked
        client = RewardClient(RewardConfig(url=server.url, retries=1), "reward", ended)
        with pytest.raises(RewardError, match="HTTP 429"):
            client.scores(["a"], ["a"], [None])
    assert ended.waited == [waited]


def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.workers.roles.reward._LARGEST", 1 << 17)
    with (
        serving(lambda _: (200, itertools.repeat(" " * 999))) as server,
        pytest.raises(RewardError, match="does not end"),
    ):
        ask(server.url)


def test_numbers_that_are_letters_of_a_text_are_no_scores() -> None:
    with (
        serving(lambda _: (200, '{"rewards": "11"}')) as server,
        pytest.raises(RewardError, match="it is not"),
    ):
        ask(server.url)


def test_an_endpoint_that_fails_fails_the_stage(policy: Path) -> None:
    with (
        serving(lambda _: (422, "text too long")) as server,
        pytest.raises(RewardError, match="text too long"),
    ):
        scored(policy, server.url, with_text(made_up_samples()))


def test_the_pauses_between_tries_end_with_the_run() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ChannelBroken):
        RewardClient(
            RewardConfig(url="http://127.0.0.1:9/", retries=1000), "reward", cancelled
        ).reach()


def test_the_token_is_sent_and_never_shown(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_KEY", "xyzzy-secret")
    with serving(by_length) as server:
        scored(
            policy, server.url, with_text(made_up_samples()), api_key_env="REWARD_KEY"
        )
    assert set(server.keys) == {"Bearer xyzzy-secret"}
    address = server.url.removeprefix("http://")
    with pytest.raises(RewardError) as caught:
        ask(
            f"http://{address}?key=hidden",
            timeout_s=0.1,
            api_key_env="REWARD_KEY",
        )
    assert "secret" not in str(caught.value)
    assert caught.value.problem.got == server.url


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"url": url}, ("bad-reward-url", "reward.url", url))
        for url in ("ftp://host/x", "http://", "http://host:port/")
    ]
    + [
        (
            {"url": "http://host", "api_key_env": name},
            ("no-api-key", "reward.api_key_env", name),
        )
        for name in ("EMPTY", "ABSENT")
    ],
)
def test_what_is_no_address_or_no_token_is_refused(
    block: dict[str, Any], problem: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError) as caught:
        client(**block)
    assert [(p.code, p.key, p.got) for p in caught.value.problems] == [problem]


@pytest.mark.parametrize("user", ["me:hidden", "me", ":hidden", "a:hidden@b"])
def test_a_password_in_the_address_is_refused_and_not_shown(user: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client(url=f"http://{user}@host:5000/score")
    text = str(caught.value)
    assert caught.value.codes == ("password-in-url",)
    assert "hidden" not in text
    assert "reward.url: http://host:5000/score" in text


# ── a Python function ────────────────────────────────────────────────────────────────────────────────────────────────


def by_function(block: Mapping[str, object], groups: list[tuple[Sample, ...]]) -> Said:
    scenario = ScorerScenario(model=Path("unused"), component="reward", block=block)
    return scored_by(scenario, groups, kind=RewardFunctionWorker)


def right_in_even_samples() -> list[tuple[Sample, ...]]:
    """The label of a group is its number."""
    return with_text(
        made_up_samples(), lambda s: f"it is {s.group if s.sample % 2 == 0 else 99}"
    )


def test_a_shipped_reward_scores_each_episode() -> None:
    found = by_function({"function": "math_answer"}, right_in_even_samples())
    assert found == {(g, s): [float(s % 2 == 0)] for g in range(3) for s in range(4)}


def test_a_function_of_lists_is_given_prompts_answers_labels_and_its_arguments() -> (
    None
):
    found = by_function(
        {"function": "tests.odd_rewards:spelled", "kwargs": {"bonus": 0.5}},
        with_text(made_up_samples(), lambda s: "x" * s.sample),
    )
    assert found == {(g, s): [100 * g + s + 0.5] for g in range(3) for s in range(4)}


def test_a_function_of_trl_gives_no_score_where_it_does_not_apply() -> None:
    found = by_function(
        {"function": "tests.foreign_rewards:trl_even"},
        with_text(made_up_samples(), lambda s: "x" * s.sample),
    )
    assert found == {(g, s): [] if s % 2 else [1.0] for g in range(3) for s in range(4)}


def test_a_function_of_lists_is_given_all_answers_to_a_prompt() -> None:
    found = by_function(
        {"function": "tests.odd_rewards:relative_length"},
        with_text(made_up_samples(), lambda s: "x" * s.sample),
    )
    assert found == {
        (g, s): [pytest.approx(0.5 - s / 3)] for g in range(3) for s in range(4)
    }


@pytest.mark.parametrize(
    ("block", "code", "fix"),
    [
        ({"function": "tests.odd_rewards:raises"}, "reward-raised", "return 0.0"),
        (
            {"function": "tests.odd_rewards:hangs", "timeout_s": 0.2},
            "reward-timeout",
            "reward.timeout_s=<longer>",
        ),
    ],
)
def test_a_function_that_fails_is_named_by_this_components_keys(
    block: dict[str, Any], code: str, fix: str
) -> None:
    with pytest.raises(RewardError, match="for sample 0 of group 0") as caught:
        by_function(block, with_text(made_up_samples()))
    assert (caught.value.code, caught.value.problem.key) == (code, "reward.function")
    assert fix in str(caught.value.problem.fix)
