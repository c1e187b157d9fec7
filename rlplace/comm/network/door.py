"""Lets only this job's clients in: the authenticator that ZeroMQ asks within the process (ZAP, RFC 27)."""

from __future__ import annotations

import logging
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlplace.comm.network.keys import Keys

_LOG = logging.getLogger("rlplace.comm.network")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_HANDSHAKE_S = 5.0  # who connects and has not come in by then is sent away


class Door:
    """Guards `gate` from before it is bound. Its two sockets are read in the gate's loop, by `answer` and `notice`.

    Who does not hold the job's keys, or sends what is no handshake at all, gets no further. The first is logged.
    """

    def __init__(self, context: zmq.Context, gate: zmq.Socket, keys: Keys) -> None:
        """The context's only authenticator: one door per context."""
        self._keys = keys
        self.authenticator = context.socket(zmq.REP)
        self.authenticator.linger = 0
        self.authenticator.bind("inproc://zeromq.zap.01")
        keys.guard(gate)
        gate.zap_domain = b"rlplace"
        gate.handshake_ivl = int(_HANDSHAKE_S * 1000)
        self.monitor = gate.get_monitor_socket(_EVENTS)
        self.refused = 0
        self._came = self._let_in = 0
        self._undecided: dict[int, float] = {}  # connections that may still be at their handshake, and since when

    def answer(self) -> None:
        """Answers all who are asking to be let in."""
        while True:
            try:
                asked = self.authenticator.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, _domain, _address, _identity, mechanism, *credentials = asked
            known = mechanism == self._keys.mechanism and self._keys.admits(credentials)
            verdict = (b"200", b"OK") if known else (b"400", b"not of this job")
            self.authenticator.send_multipart([version, request, *verdict, b"", b""])

    def notice(self, endpoint: str) -> None:
        """Counts those who were sent away from the gate at `endpoint`, a few seconds late where many come at once.

        ZeroMQ says who came and who left, but not who of those that came was let in.
        """
        now = time.monotonic()
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._came += 1
                self._undecided[event["value"]] = now
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._undecided.pop(event["value"], None)
            else:
                self._let_in += 1
                if len(self._undecided) == 1:  # then it is the one
                    self._undecided.clear()
        self._undecided = {fd: since for fd, since in self._undecided.items() if now - since < _HANDSHAKE_S + 1}
        refused = self._came - self._let_in - len(self._undecided)
        if refused > 0 and not self.refused:
            _LOG.warning(
                "gate %s sent away a connection that did not show this job's keys; later ones are only counted",
                endpoint,
            )
        self.refused = max(self.refused, refused)

    def close(self) -> None:
        self.authenticator.close()
        self.monitor.close()
