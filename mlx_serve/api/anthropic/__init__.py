"""Anthropic's Messages: requests in, named events and messages out."""
