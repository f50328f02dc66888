"""Models in memory: loading weights and tokenizers, splitting them among ranks."""
