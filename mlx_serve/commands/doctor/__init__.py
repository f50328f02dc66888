"""``mlx-serve doctor``: whether a server with these flags would work on this machine."""
