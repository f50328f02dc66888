"""Token ids in, token ids out: the scheduler, the one MLX thread, caches. Knows no text and no HTTP."""
