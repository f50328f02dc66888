"""``mlx-serve bench``: load for any server with OpenAI's API, and what came of it. Knows nothing of this one."""
