"""Decides whether this process is a parent, before the server's modules are imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_serve.settings import config
from mlx_serve.settings.config import Config
from mlx_serve.supervise.child import VARIABLE
from mlx_serve.values import StartError

# Flags that print something and end the process.
_INFORMING = {"-h", "--help", "--version"}


def wanted(flags: Sequence[str], environ: Mapping[str, str]) -> Config | None:
    """The settings of the server that these flags start, if this process is to be its parent; else None.

    A wrong command line ends the process with a usage line; all else that is wrong the server reports itself.
    """
    if VARIABLE in environ or _INFORMING & set(flags):
        return None
    try:
        settings = config.from_args(flags, environ)
    except StartError:
        return None
    return settings if settings.supervise else None
