"""An exception as one short line, for logs and start-up errors."""


def one_line(error: object) -> str:
    """The first line of its text, with what a colon at its end announces; its type when that has no meaning alone."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {lines[0]}"[:300]
    return (" ".join(filter(None, lines)) if lines[0].endswith(":") else lines[0])[:300]
