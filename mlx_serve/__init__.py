"""mlx-serve: the OpenAI HTTP API for MLX language models, on Python's own HTTP server."""

__version__ = "0.1.0"
