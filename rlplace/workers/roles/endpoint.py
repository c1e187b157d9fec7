"""Rules for the config of a reward endpoint: checked before the launch, and by the worker that uses the endpoint."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Iterator

from rlplace.checks.rule import Found, Rule, broken
from rlplace.config.blocks.language_model import RewardConfig
from rlplace.errors import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The config block of a reward that an HTTP endpoint computes, and the key of this block in the config."""

    block: RewardConfig
    key: str


def endpoint_problems(block: RewardConfig, key: str) -> Iterator[Problem]:
    """Yield a problem if the endpoint's address is malformed or has a password, or if the environment variable with its
    access token is not set.

    `key`: key of `block` in the config.
    """
    yield from broken(RULES, Endpoint(block=block, key=key))


def _malformed(case: Endpoint) -> Iterator[Found]:
    """Yield a finding with the endpoint's address if it is not a valid HTTP or HTTPS address."""
    url = case.block.url
    try:
        parts = urllib.parse.urlsplit(str(url))
        well_formed = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
        )
    except ValueError:  # the port is not a number
        well_formed = False
    if not well_formed:
        yield Found(key=f"{case.key}.url", got=url)


def _password(case: Endpoint) -> Iterator[Found]:
    """Yield a finding if the endpoint's address has a user or password; the finding shows the address without them."""
    try:
        parts = urllib.parse.urlsplit(str(case.block.url))
        host = parts.netloc.rpartition("@")
    except ValueError:  # `_malformed` names it
        return
    if host[1]:
        shown = parts._replace(netloc=f"***@{host[2]}").geturl()
        without = parts._replace(netloc=host[2]).geturl()
        yield Found(
            key=f"{case.key}.url",
            got=shown,
            facts={"without": without, "block": case.key},
        )


def _missing_variable(case: Endpoint) -> Iterator[Found]:
    """Yield a finding with the name of the environment variable that should hold the access token, if it is unset or
    empty.
    """
    name = case.block.api_key_env
    if name is not None and not os.environ.get(name):
        yield Found(key=f"{case.key}.api_key_env", got=name, facts={"variable": name})


RULES: tuple[Rule[Endpoint], ...] = (
    Rule(code="bad-reward-url", facts=_malformed),
    Rule(code="password-in-url", facts=_password),
    Rule(code="no-api-key", facts=_missing_variable),
)
