"""``mlx-serve doctor``: checks whether a server with these flags would work on this machine."""
