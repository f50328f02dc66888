"""KV caches: what mlx-lm's kinds can do, and kept prefixes in memory and on disk."""
