"""The doctor's checks of files and folders that the server reads and writes as this user, besides models.

A server that runs as another user needs the doctor to run as that user too.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlx_serve.commands.doctor.finding import Finding
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.paths import closed_folder, expanded
from mlx_serve.settings.config import Config

# The permissions to read or write a file, for its group and for others.
_OTHERS = 0o066


def secret_files(settings: Config) -> Iterator[Finding]:
    """Whether other users of the machine can read or write the files with keys."""
    for text in (settings.api_key_file, settings.tls_key):
        path = expanded(text) if text is not None else None
        if path is not None and os.path.isfile(path) and (mode := path.stat().st_mode & _OTHERS):
            advice = f"restrict it to the server's user: chmod 600 {path}"
            yield Finding("note", "keys", f"other users may {_doing(mode)} {path}", advice)


def _doing(mode: int) -> str:
    return "write" if mode & (stat.S_IWGRP | stat.S_IWOTH) else "read"


def prompt_cache(settings: Config) -> Iterator[Finding]:
    """Whether the directory for prompt caches is writable, or could be created. Does not create it."""
    if settings.prompt_cache_dir is None:
        return
    wanted = expanded(settings.prompt_cache_dir).absolute()
    if faults := list(unwritable(wanted, "prompt cache", "choose another --prompt-cache-dir")):
        yield from faults
        return
    free = shutil.disk_usage(_nearest(wanted)).free
    text = f"{wanted}: {bytes_text(free)} free; the server uses up to {bytes_text(settings.prompt_cache_disk_bytes)}"
    short = free < settings.prompt_cache_disk_bytes
    yield Finding("note" if short else "ok", "prompt cache", text, "lower --prompt-cache-disk-bytes" if short else "")


def log_file(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the server can write its log where the environment says. Without it the log goes to stderr."""
    if not (name := environ.get("MLX_SERVE_LOG_FILE")):
        return
    path = Path(name).absolute()
    for fault in unwritable(path.parent, "log", "set MLX_SERVE_LOG_FILE to another file"):
        yield Finding("note", "log", f"{fault.text}: the log goes to stderr", fault.advice)
    if os.path.exists(path) and not os.access(path, os.W_OK):
        text = f"user {_user()} cannot write to {path}: the log goes to stderr"
        yield Finding("note", "log", text, f"give the file to this user: sudo chown {_user()} {path}")


def unwritable(folder: Path, topic: str, instead: str) -> Iterator[Finding]:
    """A problem, if this user can neither write to the folder nor make it. ``instead``: what else would help."""
    nearest = _nearest(folder)
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    if closed := closed_folder(folder):
        yield Finding(
            "problem", topic, f"user {_user()} may not enter {closed}, so it cannot write to {folder}", instead
        )
    elif not nearest.is_dir():
        yield Finding("problem", topic, f"{nearest} is a file, and {folder} should be a folder", instead)
    elif nearest == folder:
        yield Finding(
            "problem", topic, f"user {_user()} cannot write to {folder}", f"{instead}, or let this user write to it"
        )
    else:
        text = f"user {_user()} cannot write to {nearest}, where {folder} should be"
        advice = f"make it: sudo install -d -o {_user()} -m 700 {folder}; or {instead}"
        other = "If the server runs as another USER: sudo -H -u USER mlx-serve doctor ..."
        yield Finding("problem", topic, text, f"{advice}. {other}")


def _nearest(path: Path) -> Path:
    """The path itself if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def _user() -> str:
    """The user that this process runs as."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
