"""A cable between a connection and its channel server that tests can cut, stall and join again."""

from __future__ import annotations

import contextlib
import socket
import threading


class Cable:
    """Forwards TCP connections to `endpoint`. `cut` ends all that are open; while stalled, nothing passes."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._passed = threading.Condition()
        self.passed_bytes = 0  # towards the server
        self._ended = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):  # the other side was faster
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def wait_passed(self, size_bytes: int, timeout_s: float = 60.0) -> None:
        with self._passed:
            assert self._passed.wait_for(
                lambda: self.passed_bytes >= size_bytes, timeout_s
            )

    def close(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()  # before it flows: what has not passed by now is lost
        self.flow()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._flows.wait()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open += (near, far)
            for source, sink, to_server in ((near, far, True), (far, near, False)):
                self._threads.append(
                    threading.Thread(
                        target=self._pump, args=(source, sink, to_server), daemon=True
                    )
                )
                self._threads[-1].start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, to_server: bool
    ) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
                if to_server:
                    with self._passed:
                        self.passed_bytes += len(data)
                        self._passed.notify_all()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
