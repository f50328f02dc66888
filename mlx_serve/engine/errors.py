"""An exception as one short line, for logs and start-up errors."""


def one_line(error: object) -> str:
    """The first line of its text, or its type when it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
