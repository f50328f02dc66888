"""An exception as one short line, for logs and start-up errors; and the error of a fault that is ours."""

from mlx_serve.core import ApiError


def one_line(error: object) -> str:
    """The first line of its text, or its type when it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def internal() -> ApiError:
    """A fault of the engine, which the log tells about."""
    return ApiError(
        500, "The model failed while generating this answer; the server's log says why.", type="server_error"
    )
