"""OpenAI's chat and completions: requests in, chunks and objects out."""
