"""Calls to this machine go past the proxies that the environment names; all else goes as the user has set it."""

from __future__ import annotations

import os
import urllib.request

import pytest

from rlplace.proxies import keep_local
from rlplace.workers.ray_launch import token
from tests.proxy import answering


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "")  # so that what the code sets is undone
            monkeypatch.delenv(each)


def read(url: str) -> None:
    with urllib.request.build_opener().open(url, timeout=20) as answer:
        assert answer.read() == b"here"


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_server_of_this_machine_is_asked_by_itself(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering() as (proxy, caught), answering() as (server, asked):
        monkeypatch.setenv(variable, proxy)
        read(server)
        assert (len(caught), len(asked)) == (
            (0, 1) if variable == "all_proxy" else (1, 0)
        )  # urllib reads no all_proxy
        keep_local()
        read(server)
        assert asked[-1] == "/"
        assert len(caught) + len(asked) == 2


def test_machines_of_the_cluster_are_asked_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "example.org, 10.0.0.1")
    monkeypatch.setenv("NO_PROXY", "other.org")
    keep_local(["10.0.0.1", "10.0.0.2"])
    keep_local(["10.0.0.2"])
    excepted = os.environ["no_proxy"].split(",")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    assert excepted[:3] == ["example.org", "10.0.0.1", "other.org"]
    assert sorted(excepted) == sorted(
        {*excepted, "localhost", "127.0.0.1", "::1", "10.0.0.2"}
    )
    assert urllib.request.proxy_bypass("10.0.0.2")
    assert not urllib.request.proxy_bypass("huggingface.co")


@pytest.mark.parametrize(
    ("proxy", "excepted"), [("", "mine"), ("http://proxy:3128", "*")]
)
def test_without_a_proxy_nothing_is_changed(
    proxy: str, excepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", excepted)
    keep_local(["10.0.0.2"])
    assert os.environ["no_proxy"] == excepted
    assert "NO_PROXY" not in os.environ


def test_a_ray_of_this_machine_is_asked_for_its_token_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering() as (proxy, caught), answering() as (server, _):
        monkeypatch.setenv("http_proxy", proxy)
        assert not token._refuses(
            server.removeprefix("http://"), {}
        )  # it speaks another language
        assert caught == []
