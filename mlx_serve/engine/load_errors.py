"""What can go wrong when a model is loaded: in full for the operator, without paths for clients."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlx_serve.core import ApiError
from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.errors import one_line

log = logging.getLogger(__name__)

# What reading weights, building a model from its config and making a tokenizer raise when the files are wrong:
# anything. They are foreign input to foreign code. A head count of 0 is a ZeroDivisionError; one that is a text is an
# error of huggingface_hub's own, which is nothing but an Exception, and so is what the tokenizers package raises.
LOAD_ERRORS = (Exception,)


class LoadError(Exception):
    """A model that can't be loaded; the text is one line for the operator."""


@contextmanager
def loading(entry: ModelEntry) -> Iterator[None]:
    """Turns what a model's files bring about into an ApiError, whose cause is a LoadError.

    An ApiError is one already, and EngineLost is not the files' doing.
    """
    try:
        yield
    except (ApiError, EngineLost):
        raise
    except LoadError as error:
        raise unloadable(entry, error) from error
    except LOAD_ERRORS as error:
        known = LoadError(f"cannot load {entry.path}: {one_line(error)}")
        known.__cause__ = error
        raise unloadable(entry, known) from known


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
