"""What the doctor finds of crashes: reports of dead server processes, and macOS's own of panics and lack of memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_serve.commands.doctor.finding import Finding
from mlx_serve.paths import expanded
from mlx_serve.supervise import report
from mlx_serve.supervise.report import Death

# Older ones say little about the server of today.
_LAST_S = 7 * 86400
_HOUR_S = 3600
_MOST = 5
_MAC_FOLDERS = ("/Library/Logs/DiagnosticReports", "~/Library/Logs/DiagnosticReports")
# A panic in macOS's GPU memory code, which large models on Metal have caused.
_GPU_PANIC = "completeMemory() prepare count underflow"
# What is read of a report, to find why the Mac panicked.
_READ_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class SystemReport:
    """A report that macOS wrote. ``at`` is Unix time."""

    path: Path
    at: float
    kind: str
    text: str = ""


def findings(
    environ: Mapping[str, str],
    now: float | None = None,
    system: str = sys.platform,
    places: Sequence[str] = _MAC_FOLDERS,
) -> Iterator[Finding]:
    """The deaths and panics of the last week, the newest first."""
    now = time.time() if now is None else now
    deaths = [death for death in report.deaths(report.folders(environ, system)) if now - death.at < _LAST_S]
    reports = [found for found in system_reports(places) if now - found.at < _LAST_S] if system == "darwin" else []
    for death in deaths[:_MOST]:
        yield _of_death(death, [found for found in reports if abs(found.at - death.at) < _HOUR_S])
    if len(deaths) > _MOST:
        more = f"the server process died {len(deaths) - _MOST} more times in the last week"
        yield Finding("note", "crashes", more, f"all that is known: {deaths[0].path.parent}")
    # A panic ends the parent too, so it leaves no report of a death.
    for panic in [found for found in reports if found.kind == "panic"][:_MOST]:
        yield _of_panic(panic)


def _of_death(death: Death, nearby: Iterable[SystemReport]) -> Finding:
    also = "".join(f"; macOS wrote {found.path}" for found in nearby)
    return Finding("note", "crashes", f"the server process died at {death}{also}", f"all that is known: {death.path}")


def _of_panic(panic: SystemReport) -> Finding:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(panic.at))
    known = f": {_GPU_PANIC}" if _GPU_PANIC in panic.text else ""
    advice = "docs/troubleshooting.md, The machine suffers" if known else "read its panicString"
    return Finding("note", "crashes", f"the Mac panicked at {when}{known} ({panic.path})", advice)


def system_reports(places: Sequence[str]) -> list[SystemReport]:
    """macOS's reports of panics and of processes that were ended for lack of memory, the newest first."""
    found = []
    for place in places:
        for pattern, kind in (("*.panic", "panic"), ("panic-*.ips", "panic"), ("JetsamEvent-*.ips", "memory")):
            with suppress(OSError):  # only administrators may read the machine's folder
                found += [_read(path, kind) for path in expanded(place).glob(pattern)]
    return sorted(found, key=lambda each: each.at, reverse=True)


def _read(path: Path, kind: str) -> SystemReport:
    text = ""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_READ_CHARS)
    return SystemReport(path, path.stat().st_mtime, kind, text)
