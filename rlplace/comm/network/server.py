"""The channel server of a node: performs requests of ends on other nodes on the channels of its node.

::

    client ── request (serial) ──▶ server ── put, fill, get ──▶ Channel
           ◀─ answer (serial) ───       kept until the client sends `done`; undone when the client is gone

One thread with one asyncio loop does all of it; a wait costs a task, not a thread. A client that cannot be reached
for `LOST_S` is gone: its waits end, its credit returns, and items that it had not confirmed go back to the front of
their line. A client that comes back earlier, over a new connection, repeats its requests without an answer, and
nothing is performed twice. The server never unpickles an item: a broken item harms its taker only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import resource
import threading
from collections.abc import Callable, Iterable, Sequence

import zmq

from rlplace.codes import problem
from rlplace.comm.network import wire
from rlplace.comm.network.wire import LOST_S, PROBE_S, Frame, Keys, Reply, Request
from rlplace.comm.queue import Get, Put
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.errors import ChannelBroken, ChannelError, RlplaceError

_LOG = logging.getLogger(__name__)
# Open files that a server may need, if the hard limit allows as many
_OPEN_FILES = 1 << 16
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Largest message beside one frame of data: envelopes, encryption
_BESIDE_BYTES = 1 << 20
_HANDSHAKE_S = 5.0  # a connection without a handshake is cut after this time

Answer = Sequence[Frame]  # an envelope, and the frames behind it


class Session:
    """The state of one client, a connected process.

    A request stays in the session until the client confirms the answer.
    """

    def __init__(self, client: bytes) -> None:
        self.client = client
        # Time of the loop since which the client cannot be reached; None: it can
        self.lost_since: float | None = None
        # By serial
        self.performing: dict[int, asyncio.Task[None]] = {}
        # Answers that the client may not have received; a repeated request gets the same answer
        self.answers: dict[int, Answer] = {}
        # By serial: credit that is neither filled nor withdrawn, and items that may not have arrived
        self.held: dict[int, tuple[SharedChannel, Put | Get]] = {}
        # By channel and owner
        self.ends: dict[tuple[str, str], SharedChannel] = {}

    def done(self, serials: Iterable[int]) -> None:
        """Drop the answers that the client has received, and record that their items have arrived.

        `serials`: numbers of the requests.
        """
        for serial in serials:
            self.answers.pop(serial, None)
            # A credit stays held until it is filled; items are confirmed now
            end, request = self.held.get(serial, (None, None))
            if end is not None and isinstance(request, Get):
                del self.held[serial]
                _settle(end, end.confirm, request)

    def withdraw(self, serial: int) -> None:
        """Undo a request that the client has withdrawn: put its items back, or free its credit (reserved room).

        `serial`: number of the request.
        """
        task = self.performing.pop(serial, None)
        if task is not None:
            task.cancel()
        self.answers.pop(serial, None)
        if serial in self.held:
            end, request = self.held.pop(serial)
            _settle(end, end.give_back, request)

    def withdraw_all(self) -> None:
        """Undo all requests, the latest first, so that returned items get their earlier order."""
        serials = {*self.performing, *self.held, *self.answers}
        for serial in sorted(serials, reverse=True):
            self.withdraw(serial)

    def died(self) -> None:
        """Undo all requests of a client that is gone, and mark its workers as dead in the channels."""
        self.withdraw_all()
        for end in self.ends.values():
            _settle(end, end.died)


def _settle(end: SharedChannel, act: Callable[..., None], *arguments: object) -> None:
    """Call `act`, a method of an end. If it fails, break the end's channel, so that other channels are not affected."""
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 -- any failure, such as a full disk, becomes the reason of the break
        _LOG.warning(
            "channel %s: what a client on another node left could not be undone",
            end.spec.name,
        )
        with contextlib.suppress(ChannelError):
            end.break_(
                f"what a client on another node left could not be undone: {_text(error)}"
            )


def _text(error: Exception) -> str:
    """Return an error as text: the message of an RlplaceError, or type and message of any other error."""
    if isinstance(error, RlplaceError):
        return str(error)
    return repr(error)


def _allow_open_files() -> None:
    """Raise this process's soft limit of open files, within the hard limit.

    The server needs one file for each connected client, and one more for each wait of a client.
    """
    # As many as wanted, within the hard limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Authenticator:
    """Admits only clients with the job's keys to a listening socket, by ZeroMQ's authentication protocol (ZAP, RFC 27).

    Create one per context, before the socket is bound. The owner must call `answer` when `socket` has a message, and
    `notice` when `monitor` has a message. A connection without the job's keys or without a handshake is cut; the first
    refused connection is logged.
    """

    def __init__(
        self,
        context: zmq.Context,
        server: zmq.Socket,
        keys: Keys,
    ) -> None:
        """Set the job's keys and limits on the socket `server`, and open the sockets `socket` and `monitor`."""
        self._keys = keys
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        keys.guard(server)
        server.zap_domain = b"rlplace"
        # A limit for strangers too, who have not shown any key
        server.maxmsgsize = keys.frame_bytes + _BESIDE_BYTES
        server.handshake_ivl = int(_HANDSHAKE_S * 1000)
        self.monitor = server.get_monitor_socket(_REFUSED)
        self._told = False

    def answer(self) -> None:
        """Admit or refuse all connections that wait for admission."""
        while True:
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Fields of a request of ZAP
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                asked
            )
            known = mechanism == self._keys.mechanism and self._keys.admits(credentials)
            verdict = (b"200", b"OK") if known else (b"400", b"not of this job")
            self.socket.send_multipart([version, request, *verdict, b"", b""])

    def notice(self, endpoint: str) -> None:
        """Read the events of refused connections, and log the first one.

        `endpoint`: the server's endpoint, for the log.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                self.monitor.recv_multipart(zmq.NOBLOCK)
                if not self._told:
                    self._told = True
                    _LOG.warning(
                        "channel server %s refused a connection without this job's keys; later ones are not logged",
                        endpoint,
                    )


class ChannelServer:
    """Performs requests of processes on other nodes on the channels of its node. Owns the socket and the sessions.

    `host`: address on which the server listens. `keys`: the job's keys. The channels outlive the server. Any thread may
    call `add`.
    """

    def __init__(self, *, host: str, keys: Keys) -> None:
        # Once it listens
        self.endpoint = ""
        self._host = host
        self._keys = keys
        self._channels: dict[str, SharedChannel] = {}
        self._sessions: dict[bytes, Session] = {}
        self._receiving = False
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run,
            name="rlplace channel server",
            daemon=True,
        )

    def add(self, name: str, channel: SharedChannel) -> None:
        """Let clients use `channel`. `name`: the name by which their requests choose this channel."""
        assert name not in self._channels, f"the server has a channel {name!r}"
        self._channels[name] = channel

    def start(self) -> str:
        """Start to listen in a thread, and return the endpoint for clients.

        Raise ClusterError if the address is not of this machine.
        """
        _allow_open_files()
        self._context = zmq.Context()
        try:
            # Authentication must be in place before the socket is bound
            self._socket = self._context.socket(zmq.ROUTER)
            self._authenticator = Authenticator(self._context, self._socket, self._keys)
            wire.endure(self._socket)
            # Sending to a client that cannot be reached is an error
            self._socket.router_mandatory = True
            # A client that comes back takes over from its old connection
            self._socket.router_handover = True
            self.endpoint = wire.listen(self._socket, self._host)
        except Exception:
            self._context.destroy(linger=0)
            raise
        self._loop = self._runner.get_loop()
        self._thread.start()
        return self.endpoint

    def close(self) -> None:
        """Tell all clients that the server closes, undo their open requests, and stop. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        """Run the event loop of the server until the server is closed. This is the server's thread."""
        try:
            with self._runner:
                self._runner.run(self._serve())
        finally:
            self._context.destroy(linger=0)

    async def _serve(self) -> None:
        """Handle messages of clients and the authentication of new connections until the server is closed."""
        # The loop reads the socket and both sockets of the authenticator
        self._loop.add_reader(wire.fd_of(self._socket), self._receive)
        self._loop.add_reader(
            wire.fd_of(self._authenticator.socket), self._authenticator.answer
        )
        self._loop.add_reader(
            wire.fd_of(self._authenticator.monitor),
            self._authenticator.notice,
            self.endpoint,
        )
        try:
            await self._watch()
        finally:
            self._end()

    async def _watch(self) -> None:
        """Undo the requests of clients that have been unreachable for `LOST_S` seconds, until the server closes."""
        # Once in PROBE_S
        while not self._closing.is_set():
            # Signals of sockets can be lost, so all are read
            self._receive()
            self._authenticator.answer()
            self._authenticator.notice(self.endpoint)
            for session in list(self._sessions.values()):
                # A message to a client shows whether it can be reached
                self._send(session, Reply(wire.HERE))
                since = session.lost_since
                if since is not None and self._loop.time() - since > LOST_S:
                    del self._sessions[session.client]
                    session.died()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._closing.wait()

    def _end(self) -> None:
        """Tell all clients that the server closes, undo their requests, and close the socket."""
        for session in self._sessions.values():
            self._send(session, Reply(wire.CLOSED))
            session.withdraw_all()
        self._sessions.clear()
        for socket in (
            self._socket,
            self._authenticator.socket,
            self._authenticator.monitor,
        ):
            self._loop.remove_reader(wire.fd_of(socket))
        self._socket.disable_monitor()
        # Ms: for the last word
        self._socket.close(linger=500)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        """Handle all messages that have arrived; the socket signals each message only once."""
        if self._receiving or self._socket.closed:
            return
        self._receiving = True
        emptied = False
        try:
            while True:
                client = self._socket.recv(zmq.NOBLOCK)
                envelope, frames = wire.receive(self._socket)
                self._take_in(client, Request(*pickle.loads(envelope)), frames)
        except zmq.Again:
            emptied = True
        finally:
            self._receiving = False
            # After an error, go on with the messages that are left
            if not emptied:
                self._loop.call_soon(self._receive)

    def _take_in(
        self,
        client: bytes,
        request: Request,
        frames: Sequence[zmq.Frame],
    ) -> None:
        """Handle one message of a client. `client`: name of the client. `frames`: data that followed the request."""
        session = self._sessions.get(client)
        if request.method == "hello":
            welcomed, wanted = request.arguments
            if session is not None:
                # The client has received the answers that it does not want any more
                received = [s for s in session.answers if s not in wanted]
                session.done(received)
            # A client that was welcomed before and has no session was forgotten for good
            elif not welcomed:
                session = self._sessions[client] = Session(client)
            if session is not None:
                self._send(session, Reply(wire.WELCOME))
        if session is None:
            self._send(Session(client), Reply(wire.FORGOTTEN))
            return
        # A message shows that the client can be reached
        session.lost_since = None
        session.done(request.done)
        if request.method in ("hello", "done"):
            return
        # The client closes, gives up a request, or asks for something
        if request.method == "bye":
            del self._sessions[client]
            session.withdraw_all()
        elif request.method == "withdraw":
            session.withdraw(request.serial)
            self._send(session, Reply(request.serial, value="withdrawn"))
        # A repeated request gets its answer again, or waits for it
        elif (answer := session.answers.get(request.serial)) is not None:
            self._deliver(session, answer)
        elif request.serial not in session.performing:
            task = self._loop.create_task(self._perform(session, request, frames))
            session.performing[request.serial] = task

    def _send(self, session: Session, reply: Reply) -> None:
        """Send the message `reply`, without frames, to the client of `session`."""
        self._deliver(session, [wire.pack(reply)])

    def _deliver(self, session: Session, answer: Answer) -> None:
        """Send `answer` to the client of `session` without waiting. An unreachable client repeats its request later."""
        try:
            self._socket.send_multipart(
                (session.client, *answer),
                zmq.NOBLOCK,
                copy=False,
            )
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if session.lost_since is None:
                session.lost_since = self._loop.time()
        # Sending may have consumed the signal of an incoming message
        if not self._receiving and wire.has_message(self._socket):
            self._loop.call_soon(self._receive)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _perform(
        self,
        session: Session,
        request: Request,
        frames: Sequence[zmq.Frame],
    ) -> None:
        """Perform a request and send its answer, which is an error if the request fails.

        `frames`: data of the request.
        """
        try:
            answer = await self._do(session, request, frames)
        except ChannelError as refusal:
            answer = [wire.pack(Reply(request.serial, error=refusal))]
        except Exception as error:  # noqa: BLE001 -- the boundary of the process: it travels as a value
            name = "server"
            if isinstance(error, KeyError):
                name = "no-channel"
            failed = problem(
                "channel-broken",
                f"channel {request.channel}",
                error=name,
                method=request.method,
                owner=request.owner,
                endpoint=self.endpoint,
                channel=request.channel,
                reason=_text(error),
            )
            answer = [wire.pack(Reply(request.serial, error=ChannelBroken(failed)))]
        # The answer is kept, as the client may ask again
        session.performing.pop(request.serial, None)
        session.answers[request.serial] = answer
        self._deliver(session, answer)

    async def _do(
        self,
        session: Session,
        request: Request,
        frames: Sequence[zmq.Frame],
    ) -> Answer:
        """Perform a request and return its answer: the envelope (first frame), and the frames with data.

        Taken items and granted credit (reserved room) stay in `session.held` until the client confirms the items or
        sends the item for the room. `frames`: data of the request.
        """
        user = (request.channel, request.owner)
        value = None
        if user not in session.ends:
            session.ends[user] = self._channels[request.channel].named(request.owner)
        end = session.ends[user]
        # Arguments as in `SharedChannel.put_packed`; credit for a large put is held until its data arrives
        if request.method == "put":
            put = await end.put_packed(*request.arguments)
            if put.entry:
                session.held[request.serial] = end, put
        elif request.method == "fill":
            reserved, marks = request.arguments
            assert reserved in session.held, "a client fills what it reserved, once"
            (packed,) = wire.disclose(marks, frames)
            holder, credit = session.held.pop(reserved)
            assert isinstance(credit, Put), "what a client fills is a put"
            holder.fill(credit, packed)
        # Items are held until the client confirms them
        elif request.method == "get":
            get = await end.take(*request.arguments)
            try:
                items = [packed for packed, _, _ in get.taken]
                marks, taken = wire.enclose(items, self._keys.frame_bytes)
                answer = [wire.pack(Reply(request.serial, marks=marks)), *taken]
            except Exception:
                # The client gets an error instead
                _settle(end, end.give_back, get)
                raise
            session.held[request.serial] = end, get
            return answer
        else:
            assert request.method in ("close", "break_", "reset", "stats"), (
                f"no such request: {request.method}"
            )
            value = getattr(end, request.method)(*request.arguments)
        return [wire.pack(Reply(request.serial, value=value))]
