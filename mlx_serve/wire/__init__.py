"""HTTP/1.1: bytes to messages and back, connections, access control. Knows no JSON shape and no model."""
