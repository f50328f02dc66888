"""The ``mlx-serve`` command, and ``python -m mlx_serve``. Imports nothing before signals are as they should be."""

import signal
from typing import NoReturn


def run() -> NoReturn:
    """Until all is imported there is nothing to tidy up: Ctrl-C ends the process at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mlx_serve import cli

    cli.run()


if __name__ == "__main__":
    run()
