"""The demo model: a small real model out of a package on PyPI, made ready for mlx-lm."""
