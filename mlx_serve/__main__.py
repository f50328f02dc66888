"""``python -m mlx_serve`` is the ``mlx-serve`` command."""

import sys

from mlx_serve.cli import main

sys.exit(main())
