"""``mlx-serve bench``: load for any server with OpenAI's API, and what its clients see."""
