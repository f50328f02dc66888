"""The page at /: its files, read once, as finished responses with the headers that fence it in.

The files are static and hold no data: what the page shows it asks for as any client does, with a key if one is needed.
"""

from __future__ import annotations

from importlib.resources import files as package_files
from pathlib import PurePath

from mlx_serve.values import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# The page may use its own files and server alone. Inline code is forbidden: a model's output could become some.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    # Asked for again after an update; the files are small.
    ("Cache-Control", "no-cache"),
)


def files() -> dict[str, Response]:
    """The page's files by path: index.html at ``/``, the others below ``/ui/``."""
    found = {}
    for file in (package_files("mlx_serve") / "ui").iterdir():
        # Anything else in the folder is not for browsers.
        if content_type := _TYPES.get(PurePath(file.name).suffix):
            path = "/" if file.name == "index.html" else f"/ui/{file.name}"
            found[path] = Response(200, file.read_bytes(), content_type, HEADERS)
    return found
