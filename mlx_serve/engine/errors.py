"""An exception as one short line, for logs and start-up errors, and what a foreign library's fault may look like."""


def is_fault(error: BaseException) -> bool:
    """Whether foreign code failed, and not somebody ends the thread or the process.

    A panic in a library written in Rust (tokenizers, llguidance) is a BaseException of pyo3's, whose class has a name
    and cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(error: object) -> str:
    """The first line of its text, with what a colon at its end announces; its type when that has no meaning alone."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"{type(error).__name__}: {lines[0]}"[:300]
    return (" ".join(filter(None, lines)) if lines[0].endswith(":") else lines[0])[:300]
