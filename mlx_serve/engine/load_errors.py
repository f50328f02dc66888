"""Errors of loading a model: with all details for the operator, without paths for clients."""

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
    """The model can't be loaded. The text is one line for the operator."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Converts any exception of foreign code that reads a model's files to a LoadError that begins with ``what``.

    Such code raises anything. A head count of 0 gives a ZeroDivisionError; a head count that is a string gives an error
    of huggingface_hub, a plain Exception; some tokenizer files give a panic in Rust. ApiError and LoadError pass
    through, because they already say what is wrong. So does EngineLost, which the files do not cause.
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
    """Like ``reading``, but raises an ApiError for the clients who wait for the model. Its cause is the LoadError."""
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
    # The text names the operator's files, so it goes to the log and not to clients.
    log.error("%s", error)
    message = f"The model '{entry.name}' could not be loaded; the server's log says why."
    return ApiError(500, message, type="server_error", param="model")
