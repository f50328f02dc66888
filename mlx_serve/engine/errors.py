"""An exception as one short line, for logs and start-up errors; and a test for the failures of foreign libraries."""


def is_fault(error: BaseException) -> bool:
    """Whether the exception is a failure of foreign code, rather than a request to end the thread or the process.

    A panic in a library written in Rust (tokenizers, llguidance) is a BaseException of pyo3's, whose class has a name
    and cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: object) -> str:
    """The first line of the error's text, or all lines if the first ends with a colon. Its type if there is no text."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {lines[0]}"[:300]
    return (" ".join(filter(None, lines)) if lines[0].endswith(":") else lines[0])[:300]
