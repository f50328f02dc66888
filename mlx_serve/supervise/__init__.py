"""The small process that keeps the port, and starts the server process again when that dies or hangs."""
