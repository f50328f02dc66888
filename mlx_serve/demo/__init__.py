"""The demo model: a small real model from a PyPI package, converted for mlx-lm."""
