"""``mlx-serve selftest``: whether a server with a model is correct, robust and fast on this machine."""
