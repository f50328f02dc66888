"""One connection, on its thread: the TLS handshake, then one request after another.

    handle
        handshake
        handle_one_request, again and again
            wait for a first byte             idle: a drain or an eviction may end it
            receive_head                      under the head's deadline
            Exchange.run                      running: a drain waits for it
    finish                                    lingering close

A connection that waits for its client may be ended at any time to free its place (connections.py).

Of BaseHTTPRequestHandler this uses the life cycle of a connection: ``handle`` with ``close_connection``, and
``finish``. Its header parser is not used: it drops a Content-Length behind a line without a colon, takes the last of
two, and accepts bare line feeds. Method, path and headers come from a ``Head`` of framing.py.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer

from mlx_serve.values import ClientGone
from mlx_serve.wire.channel import Channel
from mlx_serve.wire.connections import Roster
from mlx_serve.wire.exchange import Exchange, Setting
from mlx_serve.wire.framing import Head, Refusal
from mlx_serve.wire.request_reader import receive_head

_log = logging.getLogger("mlx_serve.wire")


class Connection(BaseHTTPRequestHandler):
    def __init__(
        self, channel: Channel, client: tuple[str, int], server: BaseServer, setting: Setting, roster: Roster
    ) -> None:
        self._setting = setting
        self._roster = roster
        self._channel = channel
        self._n_requests = 0
        self._linger = False
        # This call serves the connection to its end.
        super().__init__(channel.sock, client, server)

    def setup(self) -> None:
        """Does nothing: the channel replaces rfile and wfile."""

    def handle(self) -> None:
        try:
            self._channel.handshake(self._setting.options.head_timeout_s)
        except OSError as error:  # a client that does not speak TLS, or too slowly
            _log.debug("TLS handshake with %s failed: %s", self._client(), type(error).__name__)
        else:
            super().handle()

    def handle_one_request(self) -> None:
        self.close_connection = True
        asked = self._receive()
        if asked is None:
            return
        self._roster.begin(self._channel)
        stage = partial(self._roster.stage, self._channel)
        try:
            ending = Exchange(self._setting, self._channel, self._client(), asked, stage).run()
        finally:
            self._roster.end()
        self.close_connection = ending != "kept"
        self._linger = ending == "closed"

    def finish(self) -> None:
        if self._linger:
            self._roster.stage(self._channel, "lingering")
            options = self._setting.options
            self._channel.finish(options.linger_silence_s, options.linger_s)

    def _receive(self) -> Head | Refusal | None:
        options = self._setting.options
        try:
            raw = self._first_bytes()
            deadline = time.monotonic() + options.head_timeout_s
            return receive_head(self._channel, options.limits, raw, deadline) if raw else None
        except (TimeoutError, ClientGone):
            return None
        finally:
            self._n_requests += 1

    def _first_bytes(self) -> bytes:
        """Waits for a request: a new connection has to send one soon, a kept one may be idle."""
        options = self._setting.options
        wait_s = options.idle_timeout_s if self._n_requests else options.head_timeout_s
        # Pipelined bytes are the beginning of the next request.
        if self._n_requests and not self._channel.leftover and not self._roster.rest(self._channel):
            return b""
        raw = self._channel.read(time.monotonic() + wait_s)
        self._roster.stage(self._channel, "head")
        return raw

    def _client(self) -> str:
        host, port = self.client_address[:2]
        return f"{host}:{port}" if port else host
