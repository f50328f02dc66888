"""The accept loop: a thread for each connection, and a short 503 for connections beyond the limit.

The loop never waits for a client: handshakes and replies happen on the connections' threads. To a refused connection it
writes only what the system takes at once.
"""

from __future__ import annotations

import errno
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlx_serve.wire import sockets
from mlx_serve.wire.channel import Channel
from mlx_serve.wire.connection import Connection
from mlx_serve.wire.connections import Roster
from mlx_serve.wire.doorstep import Doorstep
from mlx_serve.wire.exchange import Setting

_log = logging.getLogger("mlx_serve.wire")

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_UNIX_CLIENT = ("unix", 0)
# How often a lasting shortage of descriptors is logged, and the pause before accepting again.
_SHORTAGE_EVERY_S = 60.0
_SHORTAGE_WAIT_S = 0.05


class Listener(ThreadingHTTPServer):
    """Of ThreadingHTTPServer this uses the socket's life and the order of the calls for one connection.

    ``serve_forever`` and ``process_request`` are its own: the loop wakes at events alone, and the roster knows the
    threads and joins them with a time limit.
    """

    def __init__(self, setting: Setting, roster: Roster, full: Callable[[], bytes]) -> None:
        options = setting.options
        self._setting = setting
        self._roster = roster
        self._full = full
        self._tls = sockets.tls_context(options.tls_cert, options.tls_key) if options.tls_cert else None
        self._doorstep = Doorstep(options.linger_silence_s)
        self._stopping = threading.Event()
        self._not_serving = threading.Event()
        self._not_serving.set()
        self._loop: threading.Thread | None = None
        self._shortage_told_at = -math.inf
        # A socket that another process handed over stays open there, and so does the file of a Unix socket.
        self._own = None if options.listening else sockets.Listening(options.address, options.uds, options.backlog)
        sock = self._own.sock if self._own else options.listening
        assert sock is not None
        self.address_family = sock.family
        # finish_request makes the Connections, which take more arguments than socketserver gives a handler.
        super().__init__(options.address, BaseHTTPRequestHandler, bind_and_activate=False)
        # socketserver's own socket is never bound. Binding here leaves out HTTPServer's look-up of the host's full
        # name, which can take long and is not used.
        self.socket.close()
        self.socket = sock
        if sock.family != socket.AF_UNIX:
            self.server_address = sock.getsockname()
        self._wake_reader, self._wake_writer = socket.socketpair()

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Returns after ``stop``. Only events wake it, so ``poll_interval`` has no effect."""
        self._loop = threading.current_thread()
        self._not_serving.clear()
        try:
            # Checked after the line above; otherwise a stop in between would close the socket under the loop.
            if self._stopping.is_set():
                return
            with selectors.DefaultSelector() as selector:
                selector.register(self.socket, selectors.EVENT_READ)
                selector.register(self._wake_reader, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    selector.select(self._doorstep.sweep())
                    if not self._stopping.is_set():
                        self._accept()
        finally:
            self._not_serving.set()

    def stop(self) -> None:
        if self._loop is threading.current_thread() and not self._not_serving.is_set():
            raise RuntimeError("the accept loop cannot wait for its own end")
        self._stopping.set()
        with suppress(OSError):  # closed already, so there is no loop to wake
            self._wake_writer.send(b"x")
        self._not_serving.wait()

    def server_close(self) -> None:
        super().server_close()
        self._doorstep.clear()
        self._wake_reader.close()
        self._wake_writer.close()
        if self._own is not None:
            self._own.close()

    def renew_certificate(self, cert: str, key: str | None) -> None:
        """The next connections get another certificate, if the server has one. Raises OSError."""
        if self._tls is not None:
            self._tls = sockets.tls_context(cert, key)

    def get_request(self) -> tuple[Any, Any]:
        """A Channel, which socketserver passes to the methods below as its request, and the client's address."""
        sock, client = self.socket.accept()
        # Some systems copy the listener's non-blocking mode.
        sock.setblocking(True)
        if sock.family == socket.AF_UNIX:
            client = _UNIX_CLIENT
        else:
            sockets.tune(sock)
        if self._tls is not None:
            # The handshake runs on the connection's own thread: here it would hold up all others.
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return Channel(sock, self._setting.options.write_timeout_s), client

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="http-connection", daemon=True
        )
        if not self._roster.enter(request, thread):
            reply = self._full()
            # Under TLS nothing can be sent before the handshake.
            self._doorstep.turn_away(request.sock, b"" if self._tls else reply)
            return
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            _log.warning("no thread for a connection: closing it")
            self.shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        Connection(request, client_address, self, self._setting, self._roster)

    def shutdown_request(self, request: Any) -> None:
        """Leaves the roster first, so that nobody hangs up a descriptor that by then belongs to another connection."""
        self._roster.leave(request)
        with suppress(OSError):  # the descriptor is released even if closing reports an error
            request.sock.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("a connection failed")

    def _accept(self) -> None:
        try:
            request, client = self.get_request()
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("accept failed: %s", type(error).__name__)
            if error.errno in _OUT_OF_RESOURCES:
                self._relieve()
            return
        self.process_request(request, client)

    def _relieve(self) -> None:
        """After running out of descriptors: evicts connections, and lets their threads close their descriptors."""
        now = time.monotonic()
        if now - self._shortage_told_at >= _SHORTAGE_EVERY_S:
            self._shortage_told_at = now
            _log.warning("no file descriptors for another connection (ulimit -n): the slowest ones are closed")
        self._doorstep.clear()
        self._roster.evict()
        # The connection stays in the queue, so without a pause the loop would spin.
        self._stopping.wait(_SHORTAGE_WAIT_S)
