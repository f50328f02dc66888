"""Bytes to messages and back: HTTP/1.1, connections, access. Knows no JSON shape and no model."""
