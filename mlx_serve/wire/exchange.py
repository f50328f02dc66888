"""One request and its reply: admit it, read its body, run it, send the answer, write the log line.

    Exchange.run
        a Refusal instead of a head          -> its status, close
        admission.admit                      -> a refusal or an answer that needs no body
        receive_body                         -> 413, 417, 100 Continue, the bytes
        application(RawRequest)              -> Response
        Reply.send                           -> whole, or a stream; before each piece the client is checked

An exchange can end in these ways: answered, and the connection kept or closed; refused with the body unread, closed
after lingering; client gone (499 in the log); stream broken off (closed without its last chunk, so that the client
knows).
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mlx_serve.values import ApiError, ClientGone, RawRequest, Response, internal_error
from mlx_serve.wire import access
from mlx_serve.wire.access import AccessPolicy
from mlx_serve.wire.admission import admit, check_expectation, length_is_missing
from mlx_serve.wire.body import body_decoder
from mlx_serve.wire.body_budget import BodyBudget
from mlx_serve.wire.channel import Channel
from mlx_serve.wire.connections import State
from mlx_serve.wire.framing import Head, Refusal
from mlx_serve.wire.reply import Fields, Manner, Reply
from mlx_serve.wire.request_log import RequestLog, log_request
from mlx_serve.wire.request_reader import receive_body
from mlx_serve.wire.server_options import Application, ServerOptions

# Kept: the next byte begins a request. Gone: no client is left, so the connection closes without lingering.
Ending: TypeAlias = Literal["kept", "closed", "gone"]

_log = logging.getLogger("mlx_serve.wire")

# The date of the REST API's contract; OpenAI has sent this value with every answer since.
OPENAI_VERSION = "2020-10-01"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A refused body up to this size that is already here is dropped, so that the connection can be kept.
_MAX_DISCARD_BYTES = 64 * 1024
# How much of a body is logged, at log level DEBUG.
_MAX_LOGGED_BYTES = 4096
_MAX_PROBES = 2
_PROBE_EVERY_S = 0.5


@dataclass(slots=True)
class Setting:
    """Values that all exchanges of a server share. ``access`` may be replaced while the server runs."""

    options: ServerOptions
    access: AccessPolicy
    application: Application
    draining: Callable[[], bool]
    bodies: BodyBudget


class Exchange:
    """``stage`` is called with what the request waits for: its own body, or its answer."""

    def __init__(
        self,
        setting: Setting,
        channel: Channel,
        client: str,
        asked: Head | Refusal,
        stage: Callable[[State], None],
    ) -> None:
        self._started = time.monotonic()
        self._setting = setting
        self._channel = channel
        self._client = client
        self._asked = asked
        self._stage = stage
        self._head = asked if isinstance(asked, Head) else None
        self._target = setting.application.find(self._head.path if self._head is not None else "")
        self._request_id = _request_id(self._head)
        self._reply = Reply(channel, self._writable)
        self._notes: dict[str, str | int] = {}
        self._n_written_before = channel.n_written
        self._n_body = 0
        # Bytes held of the budget for all bodies.
        self._n_held = 0
        # The body's end is known and has been reached: the next byte begins a request.
        head = self._head
        self._in_step = head is not None and head.body in (None, 0) and not length_is_missing(head)
        self._kept = False
        self._n_probes = 0
        self._probed_at = 0.0

    def run(self) -> Ending:
        status = 0
        try:
            self._answer()
        except ClientGone as gone:
            self._note("gone", str(gone))
            status = 499
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:  # noqa: BLE001  # the request boundary; a panic of an extension in Rust is no Exception
            _log.exception("request %s failed", self._request_id)
            self._fail()
        finally:
            self._setting.bodies.release(self._n_held)
            self._write_log(status or self._reply.status)
        if status:
            return "gone"
        return "kept" if self._kept else "closed"

    def alive(self) -> bool:
        """Whether the client may still read. Call it only on the thread of the request."""
        peer = self._channel.peer()
        return self._probe() if peer == "eof" else peer == "open"

    def _writable(self) -> bool:
        """The same before a write. It sends no probe, since the write itself is one."""
        return self._channel.peer() != "gone"

    def _probe(self) -> bool:
        """Finds out whether a client that has ended its sending is gone or waits for the reply; both look the same.

        A closed socket answers a few bytes of the reply with a reset. Where the system does not report the reset, a
        second write, a while later, fails.
        """
        now = time.monotonic()
        if self._n_probes < _MAX_PROBES and now - self._probed_at >= _PROBE_EVERY_S:
            self._n_probes += 1
            self._probed_at = now
            with suppress(ClientGone):  # the channel remembers it
                self._reply.probe()
        return self._channel.peer() != "gone"

    def _answer(self) -> None:
        try:
            self._send(self._respond())
        except (ApiError, Refusal) as error:
            # Once the head is sent, no other status can be sent.
            if self._reply.head_sent:
                raise
            self._send(self._error(self._noted(error)))

    def _noted(self, error: ApiError | Refusal) -> ApiError:
        """Keeps an error for the log. An ApiError's message is left out, since it may repeat a part of the body."""
        if isinstance(error, ApiError):
            self._note("error", error.code or error.type)
            return error
        self._note("refused", error.message)
        return ApiError(error.status, error.message, code="request_too_large" if error.status == 413 else None)

    def _respond(self) -> Response:
        if isinstance(self._asked, Refusal):
            raise self._asked
        head, setting = self._asked, self._setting
        try:
            answer = admit(self._target, setting.access, head, setting.draining())
        except ApiError:
            self._discard_body(head)
            raise
        if answer is not None:
            self._discard_body(head)
            return answer
        return self._target.answer(self._request(head, self._receive_body(head)))

    def _request(self, head: Head, body: bytes) -> RawRequest:
        method = "GET" if head.method == "HEAD" else head.method
        now, query = time.monotonic(), head.target.partition("?")[2]
        client = access.client(self._setting.access, head.headers)
        return RawRequest(
            method, head.path, head.headers, body, self._request_id, self.alive, self._notes, now, query, client
        )

    def _receive_body(self, head: Head) -> bytes:
        options = self._setting.options
        decoder = body_decoder(head, options.limits)
        check_expectation(head)
        if head.body in (None, 0):
            return b""
        self._stage("body")
        # Sent just before the body is read, and not if the body is already coming (RFC 9110 10.1.1).
        if head.expect is not None and not self._channel.leftover:
            self._channel.write(_CONTINUE)
        body = receive_body(self._channel, decoder, options, options.body_timeout_s, self._hold)
        self._stage("running")
        self._in_step = True
        self._n_body = len(body)
        self._log_body("request", body)
        return body

    def _hold(self, n_bytes: int) -> None:
        self._setting.bodies.hold(n_bytes)
        self._n_held += n_bytes

    def _discard_body(self, head: Head) -> None:
        """Drops the body of a refused request if it is small and already here; otherwise the connection will close.

        Waiting for the body would let anybody, without a key, hold a place and delay the refusal.
        """
        if not self._in_step and isinstance(head.body, int) and head.body <= _MAX_DISCARD_BYTES and not head.expect:
            self._in_step = self._channel.discard_ready(head.body)

    def _send(self, response: Response) -> None:
        self._log_body("reply", response.body if isinstance(response.body, bytes) else b"(a stream)")
        keep = self._head is not None and self._head.keep_alive and self._in_step and not self._setting.draining()
        self._kept = self._reply.send(response, self._fields(), Manner.of(self._asked, keep))

    def _fields(self) -> Fields:
        options = self._setting.options
        ms = int((time.monotonic() - self._started) * 1000)
        own = (*own_fields(options, self._request_id), ("openai-processing-ms", str(ms)))
        return own + (access.cors_fields(self._setting.access, self._head.headers) if self._head else ())

    def _fail(self) -> None:
        if self._reply.head_sent:
            # A connection that closes without the last chunk tells the client that the stream is incomplete (RFC 9112
            # 8).
            self._kept = False
            self._note("broken", "the stream failed")
            return
        with suppress(ClientGone):  # the failure is in the log already; without a client, nobody needs its status
            self._send(self._error(internal_error(self._request_id)))

    def _error(self, error: ApiError) -> Response:
        """The application's form of an error, with the error's header fields if the application left them out."""
        response = self._target.error(error, self._request_id)
        there = {name.lower() for name, _ in response.headers}
        missing = tuple(field for field in error.headers if field[0].lower() not in there)
        return replace(response, headers=response.headers + missing)

    def _log_body(self, which: str, raw: bytes) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s %s: %s", which, self._request_id, ascii(raw[:_MAX_LOGGED_BYTES]))

    def _note(self, name: str, text: str) -> None:
        self._notes[name] = text

    def _write_log(self, status: int) -> None:
        entry = RequestLog(
            method=self._head.method if self._head else "-",
            path=self._head.path if self._head else "-",
            status=status,
            bytes_in=self._n_body,
            bytes_out=self._channel.n_written - self._n_written_before,
            ms=(time.monotonic() - self._started) * 1000,
            id=self._request_id,
            client=self._client,
            notes=self._notes,
            route=self._target.name,
        )
        options = self._setting.options
        # A 503 of such a route is what was asked for: how the server is.
        is_routine = self._target.is_quiet and (entry.status < 400 or entry.status == 503)
        log_request(entry, options.log_format, logging.DEBUG if is_routine else logging.INFO)
        options.on_end(entry)


def own_fields(options: ServerOptions, request_id: str) -> Fields:
    """Header fields that every reply has."""
    # The request's id under OpenAI's name and under Anthropic's: each client reads one of them.
    ids = (("x-request-id", request_id), ("request-id", request_id))
    return (("Server", options.server_name), *ids, ("openai-version", OPENAI_VERSION))


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def _request_id(head: Head | None) -> str:
    """The client's id, if it is safe in a header and in a log, so that both sides' logs have the same id."""
    given = head.headers.get("x-request-id", "") if head else ""
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()
