"""``mlx-serve bench``: loads any server with OpenAI's API and measures what its clients see."""
