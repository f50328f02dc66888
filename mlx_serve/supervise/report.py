"""The report of a death: a JSON file of what is known of a server process that died. Written, found, summed up.

Only its owner may read it. It has no texts of requests and no keys. The oldest files go when there are too many.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_serve import __version__
from mlx_serve.machine import installed
from mlx_serve.settings.config import FLAGS, Config

FOLDER = "mlx-serve-deaths"
MOST_KEPT = 20
_PACKAGES = ("mlx", "mlx-lm", "transformers")


def folder(environ: Mapping[str, str], system: str = sys.platform) -> Path:
    """Where reports are written: beside the log, if it has a file or systemd gives it a folder."""
    if path := environ.get("MLX_SERVE_LOG_FILE"):
        return Path(path).absolute().parent / FOLDER
    if path := environ.get("LOGS_DIRECTORY", "").partition(":")[0]:  # systemd's LogsDirectory=
        return Path(path) / FOLDER
    home = Path(os.path.expanduser("~"))
    if system == "darwin":
        return home / "Library/Logs/mlx-serve" / FOLDER
    return Path(environ.get("XDG_STATE_HOME") or home / ".local/state") / "mlx-serve" / FOLDER


def folders(environ: Mapping[str, str], system: str = sys.platform) -> list[Path]:
    """All places to look in: services write where the environment of this shell does not say."""
    found = [folder(environ, system), folder({}, system)]
    for logs in (Path("/Library/Logs"), Path("/var/log")):
        with suppress(OSError):
            found += logs.glob(f"*/{FOLDER}")
    return list(dict.fromkeys(found))


def write(where: Path, report: Mapping[str, Any]) -> Path:
    """Write a report and return its path. Raises OSError, and leaves no unfinished file."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(report["at"]))
    path = where / f"death-{stamp}-{report['process']}.json"
    unfinished = path.with_suffix(".part")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, default=str)
            file.write("\n")
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    for old in _files(where)[MOST_KEPT:]:
        old.unlink(missing_ok=True)
    return path


@dataclass(frozen=True, slots=True)
class Death:
    """A report that was found. ``at`` is Unix time."""

    path: Path
    at: float
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        """One line."""
        facts = self.facts
        parts = [f"{facts.get('time')}: {facts.get('ended')}"]
        parts += [text for text in (facts.get("hang"), facts.get("last_words")) if text]
        parts.append(f"{len(facts.get('requests', ()))} requests were running")
        parts += [f"running at the death before, too: {request}" for request in facts.get("suspects", ())]
        return "; ".join(parts)


def deaths(places: Sequence[Path]) -> list[Death]:
    """The reports in these folders that can be read, the newest first."""
    found = [death for place in places for death in _read_all(place)]
    return sorted(found, key=lambda death: death.at, reverse=True)


def _read_all(place: Path) -> Iterator[Death]:
    for path in _files(place):
        with suppress(OSError, ValueError, KeyError, TypeError):  # not ours to read, or cut off by a full disk
            facts = json.loads(path.read_text(encoding="utf-8"))
            yield Death(path, float(facts["at"]), facts)


def _files(place: Path) -> list[Path]:
    """The newest first: their names begin with the time."""
    try:
        return sorted(place.glob("death-*.json"), reverse=True)
    except OSError:
        return []


def versions() -> dict[str, str]:
    """Of everything that may have caused the death."""
    found = {"mlx-serve": __version__, "python": platform.python_version(), "system": platform.platform()}
    return found | {name: there for name in _PACKAGES if (there := installed(name)) is not None}


def flags(settings: Config) -> dict[str, Any]:
    """The settings that are not the defaults. Instead of keys and templates, only that there are some."""
    said = {name: getattr(settings, name) for name, about in FLAGS.items() if getattr(settings, name) != about.default}
    for name in ("api_key", "chat_template", "chat_template_args"):
        if name in said:
            said[name] = "(set)"
    models = [{"name": spec.name, "path": spec.path, "repo": spec.repo} for spec in settings.models]
    return said | ({"models": models} if models else {})
