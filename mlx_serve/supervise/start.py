"""Decides whether this process is a parent, before the server's modules are imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_serve.settings import config
from mlx_serve.settings.config import Config
from mlx_serve.supervise.child import VARIABLE
from mlx_serve.values import StartError

# What mlx.launch sets for each rank; a count of mpirun's or of another MPI's ranks.
_RANK = "MLX_RANK"
_RANK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
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


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise StartError if this process is one of several ranks. It has not joined the others yet.

    A parent would start a rank again after its death, while the others wait for the old process.
    """
    if environ.get(_RANK) or any(environ.get(name, "1") not in ("", "0", "1") for name in _RANK_COUNTS):
        raise StartError(
            "--supervise does not work under mlx.launch, whose ranks have to start together: leave it out, or put "
            "--no-supervise behind it"
        )
