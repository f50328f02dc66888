"""The ``mlx-serve`` command, and ``python -m mlx_serve``. Imports nothing before signals are as they should be."""

import os
import signal
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Until all is imported there is nothing to tidy up: Ctrl-C ends the process at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_descriptors()
    from mlx_serve.commands import COMMANDS, server_flags
    from mlx_serve.supervise import child, start

    # Before the server's modules are imported: a parent needs none of them.
    argv = sys.argv[1:]
    settings = None if argv and argv[0] in COMMANDS else start.wanted(server_flags(argv), os.environ)
    if settings is not None:
        from mlx_serve.supervise import parent

        parent.run(settings)
    # A parent waits for the first beat, and what follows takes seconds to import.
    supervisor = child.join()
    from mlx_serve import cli

    cli.run(supervisor)


def _open_standard_descriptors() -> None:
    """Open stdin, stdout and stderr if they are closed: a socket could get their numbers, and then what stderr gets."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


if __name__ == "__main__":
    run()
