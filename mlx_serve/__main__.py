"""``python -m mlx_serve`` is the ``mlx-serve`` command."""

from mlx_serve.cli import run

run()
