"""The HTTP server's interface for its owner: bind, serve, drain, close.

Server                        this file
  Listener                    accept loop, a thread per connection
    Connection                one request after another
      Exchange                one request: admission -> body -> application -> reply
  Roster                      connections and running requests
"""

from __future__ import annotations

import logging

from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.admission import unavailable
from mlx_serve.wire.body_budget import BodyBudget
from mlx_serve.wire.connections import Roster
from mlx_serve.wire.exchange import Setting, new_request_id, own_fields
from mlx_serve.wire.listener import Listener
from mlx_serve.wire.reply import Manner, whole
from mlx_serve.wire.request_log import RequestLog
from mlx_serve.wire.server_options import Application, ServerOptions

_log = logging.getLogger("mlx_serve.wire")


class Server:
    """Bound once constructed; OSError if that fails. Methods may be called from any thread, with one exception:
    ``close`` waits for ``serve_forever``, so it must not be called from that thread, nor from its signal handlers.
    """

    def __init__(self, application: Application, options: ServerOptions) -> None:
        self._application = application
        self._options = options
        self._roster = Roster(options.max_connections)
        bodies = BodyBudget(options.max_total_body_bytes)
        self._setting = Setting(options, options.access, application, lambda: self._roster.draining, bodies)
        self._listener = Listener(self._setting, self._roster, self._full)

    @property
    def address(self) -> tuple[str, int] | str:
        """Host and port, with the actual port if 0 was given; or the path of the Unix socket."""
        if self._options.uds:
            return self._options.uds
        host, port = self._listener.server_address[:2]
        return str(host), int(port)

    @property
    def n_connections(self) -> int:
        return self._roster.n_connections

    def serve_forever(self) -> None:
        """Returns after ``close``."""
        self._listener.serve_forever()

    def renew(self, access: AccessPolicy, tls_cert: str | None, tls_key: str | None) -> None:
        """Take other keys and another certificate, for the next requests and connections.

        Raises OSError (ssl.SSLError is one) when the certificate can't be used; then nothing changes.
        """
        if tls_cert is not None:
            self._listener.renew_certificate(tls_cert, tls_key)
        self._setting.access = access

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests with 503, closes idle connections, and returns whether all requests have ended."""
        return self._roster.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends everything: a request that still runs finds its client gone. No socket and no file remains."""
        self._listener.stop()
        self._listener.server_close()
        self._roster.hang_up_all()
        if not self._roster.join(timeout_s):
            _log.warning("a request did not end within %s s of its connection", timeout_s)

    def _full(self) -> bytes:
        error = unavailable("too many connections", code="too_many_connections")
        # The request was not read, so its path is not known.
        request_id = new_request_id()
        response = self._application.find("").error(error, request_id)
        body = response.body if isinstance(response.body, bytes) else b""
        notes = {"error": error.code or error.type}
        self._options.on_end(RequestLog("-", "-", error.status, 0, len(body), 0.0, request_id, "-", notes))
        return whole(response, body, own_fields(self._options, request_id) + error.headers, Manner())
