"""One exception, Failure, for every reason why a request got no full answer."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_serve.client.events import EventError
from mlx_serve.client.place import Place


class Failure(Exception):
    """A request without a full answer. ``kind`` is one of few; the text is a line for people; ``status`` is HTTP's."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


@contextmanager
def faults(where: Place) -> Iterator[None]:
    """What http.client, the socket and the event reader raise, as Failures."""
    try:
        yield
    except EventError as error:
        raise Failure("malformed stream", str(error)) from error
    except TimeoutError as error:
        raise Failure("timeout", f"{where} sent nothing for {where.timeout_s:g} s") from error
    except http.client.IncompleteRead as error:
        raise Failure("cut off", f"{where} ended the connection inside the reply") from error
    except (http.client.HTTPException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Failure("connection", f"no answer from {where}: {reason}. Is the server running?") from error
