"""Who may speak with a job's gates: keys that encrypt, or a password where the network itself is trusted."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Protocol

import zmq
from zmq.utils import z85


class Keys(Protocol):
    """Made once per job and given to its workers only. Both ends of a connection hold the same."""

    @property
    def mechanism(self) -> bytes: ...

    @property
    def frame_bytes(self) -> int:
        """A larger buffer is cut into frames of so many bytes: while one is sent, the next is prepared."""
        ...

    def guard(self, gate: zmq.Socket) -> None:
        """Prepares the listening socket, before it binds."""
        ...

    def show(self, client: zmq.Socket) -> None:
        """Prepares a connecting socket, before it connects."""
        ...

    def admits(self, credentials: list[bytes]) -> bool:
        """Whether these are a client of this job; of the mechanism above."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobKeys:
    """CURVE: all is encrypted, and each side proves that it is of this job. Costs most of a fast network's speed."""

    server_public: bytes
    server_secret: bytes = dataclasses.field(repr=False)
    client_public: bytes
    client_secret: bytes = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobKeys:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    @property
    def mechanism(self) -> bytes:
        return b"CURVE"

    @property
    def frame_bytes(self) -> int:
        return 1 << 20  # encrypting takes longer than sending: both ends at work make half as much again

    def guard(self, gate: zmq.Socket) -> None:
        gate.curve_server = True
        gate.curve_publickey = self.server_public
        gate.curve_secretkey = self.server_secret

    def show(self, client: zmq.Socket) -> None:
        client.curve_serverkey = self.server_public
        client.curve_publickey = self.client_public
        client.curve_secretkey = self.client_secret

    def admits(self, credentials: list[bytes]) -> bool:
        return len(credentials) == 1 and secrets.compare_digest(z85.encode(credentials[0]), self.client_public)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPassword:
    """PLAIN: keeps strangers and other jobs out, hides nothing. For an interface that only the cluster uses."""

    password: str = dataclasses.field(repr=False)

    @classmethod
    def create(cls) -> JobPassword:
        return cls(password=secrets.token_urlsafe(32))

    @property
    def mechanism(self) -> bytes:
        return b"PLAIN"

    @property
    def frame_bytes(self) -> int:
        return 1 << 40  # never: there is nothing to prepare, and putting the frames together is a copy

    def guard(self, gate: zmq.Socket) -> None:
        gate.plain_server = True

    def show(self, client: zmq.Socket) -> None:
        client.plain_username = b"job"
        client.plain_password = self.password.encode()

    def admits(self, credentials: list[bytes]) -> bool:
        return len(credentials) == 2 and secrets.compare_digest(credentials[1], self.password.encode())
