"""OpenAI's Responses dialect: items in, the same deltas as chat has, items and events out."""
