"""What can go wrong when a model is loaded: in full for the operator, without paths for clients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.errors import is_fault, one_line
from mlx_serve.values import ApiError

log = logging.getLogger(__name__)


class LoadError(Exception):
    """A model that can't be loaded; the text is one line for the operator."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever foreign code raises at a model's files into a LoadError that begins with ``what``.

    That can be anything. A head count of 0 is a ZeroDivisionError; one that is a text is an error of huggingface_hub's
    own, which is nothing but an Exception; some tokenizer files are a panic in Rust. An ApiError and a LoadError say
    already what is wrong, and EngineLost is not the files' doing.
    """
    try:
        yield
    except (ApiError, EngineLost, LoadError):
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        raise LoadError(f"{what}: {one_line(error)}") from error


@contextmanager
def loading(entry: ModelEntry) -> Iterator[None]:
    """The same as an ApiError for the clients who wait for the model; its cause is the LoadError."""
    try:
        with reading(f"cannot load {entry.path}"):
            yield
    except LoadError as error:
        raise unloadable(entry, error) from error


def too_large(entry: ModelEntry, n_bytes: int) -> ApiError:
    message = (
        f"The model '{entry.name}' has {n_bytes} bytes of weights: more than this server may use (--memory-bytes)."
    )
    return ApiError(503, message, type="server_error", param="model", code="model_too_large")


def unloadable(entry: ModelEntry, error: LoadError) -> ApiError:
    # The text names the operator's files: for the log, not for clients.
    log.error("%s", error)
    message = f"The model '{entry.name}' could not be loaded; the server's log says why."
    return ApiError(500, message, type="server_error", param="model")
