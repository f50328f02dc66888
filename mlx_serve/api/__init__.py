"""Connects wire, text and engine: OpenAI's, Anthropic's and the Responses dialects, and the routes beside them."""
