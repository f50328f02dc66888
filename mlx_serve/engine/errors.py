"""An exception as one short line, for logs and start-up errors."""


def one_line(error: object) -> str:
    """The first line of its text, with what a colon at its end announces; or its type when it has no text."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return (" ".join(filter(None, lines)) if lines[0].endswith(":") else lines[0])[:300]
