"""The files that make a service of the server: launchd's property list, newsyslog's rotation, systemd's unit.

Functions from a ``Service`` to text; nothing here touches the system. Sources: launchd.plist(5), newsyslog.conf(5),
systemd.service(5), systemd.exec(5).
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

# Beyond --drain-timeout: the last errors, closing, letting the model go.
_LAST_WORDS_S = 15
# Restarts that follow one another faster than this are held back, so that a wrong flag does not keep a machine busy.
_RESTART_S = 10
_LOG_KB, _N_LOGS = 50_000, 7
# What systemd takes unquoted in a word of a command line.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True, slots=True)
class Service:
    """A server as a service. ``command`` starts with the program's absolute path. ``system``: it belongs to the machine
    and starts with it; otherwise to ``user``, at login. ``home`` is the user's. Times in seconds.
    """

    label: str
    command: tuple[str, ...]
    user: str
    group: str
    home: PurePath
    log_dir: PurePath
    system: bool
    drain_timeout_s: float = 30.0
    n_files: int = 768
    environ: Mapping[str, str] = field(default_factory=dict)
    # Where it writes besides its user's caches: prompt caches, a socket.
    writable: tuple[PurePath, ...] = ()

    @property
    def name(self) -> str:
        """The label's last part: what logs and units are called."""
        return self.label.rsplit(".", 1)[-1]

    @property
    def log(self) -> PurePath:
        """What the server writes."""
        return self.log_dir / f"{self.name}.log"

    @property
    def stop_s(self) -> int:
        return int(self.drain_timeout_s) + _LAST_WORDS_S


def launchd_plist(service: Service) -> str:
    """A LaunchDaemon (``system``) or a LaunchAgent."""
    # The server opens its log itself, and again when newsyslog has moved it: launchd would go on writing to the moved
    # file. What goes to stderr in spite of that (a crash of the interpreter) has a file of its own.
    stray = str(service.log_dir / f"{service.name}.stderr.log")
    job = {
        "Label": service.label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": {
            "HOME": str(service.home),
            "MLX_SERVE_LOG_FILE": str(service.log),
            **service.environ,
        },
        # Not the home: a folder there called mlx_serve would be taken for the package.
        "WorkingDirectory": "/",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": service.stop_s,
        # Else launchd throttles its processor and disk, as it does with background work.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": service.n_files},
        "HardResourceLimits": {"NumberOfFiles": service.n_files},
        "Umask": 0o027,
        "StandardOutPath": stray,
        "StandardErrorPath": stray,
    }
    if service.system:
        job |= {"UserName": service.user, "GroupName": service.group}
    return plistlib.dumps(job, sort_keys=False).decode()


def newsyslog_conf(service: Service) -> str:
    """Rotation of the log on macOS: by size, some old ones kept. Owner and group, or the new file would be root's."""
    fields = (str(service.log), f"{service.user}:{service.group}", "600", str(_N_LOGS), str(_LOG_KB), "*", "N")
    head = "# logfilename owner:group mode count size(kB) when flags; N: no process is told, the server looks itself"
    return f"{head}\n{' '.join(fields)}\n"


def systemd_unit(service: Service) -> str:
    """A system unit, hardened, or a user unit. Its log goes to the journal."""
    environ = [f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environ.items()]
    lines = [
        "[Unit]",
        "Description=mlx-serve: MLX language models over the OpenAI HTTP API",
        "Wants=network-online.target" if service.system else "",
        "After=network-online.target" if service.system else "",
        "# Three failed starts in five minutes are no accident: stay down, so that somebody looks.",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=3",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_quoted(word) for word in service.command)}",
        *environ,
        *([f"User={service.user}", f"Group={service.group}"] if service.system else []),
        "Restart=on-failure",
        f"RestartSec={_RESTART_S}",
        "# Longer than --drain-timeout. The main process alone gets SIGTERM: it ends the others.",
        f"TimeoutStopSec={service.stop_s}",
        "KillMode=mixed",
        f"LimitNOFILE={service.n_files}",
        "",
        *(_hardening(service) if service.system else ["NoNewPrivileges=yes", "UMask=0027"]),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if service.system else 'default.target'}",
    ]
    return "\n".join(line for line, former in zip(lines, ["", *lines], strict=False) if line or former) + "\n"


def _hardening(service: Service) -> Sequence[str]:
    # "-": a folder that is not there is no reason not to start.
    writable = [_quoted(f"-{folder}") for folder in (service.home / ".cache", *service.writable)]
    return (
        "# It reads models and writes to caches; nothing else of the machine is its business.",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        f"ReadWritePaths={' '.join(writable)}",
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "ProtectProc=invisible",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "RemoveIPC=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallErrorNumber=EPERM",
        "UMask=0027",
        "# Without a GPU. With one (CUDA) leave this out.",
        "PrivateDevices=yes",
    )


def _quoted(word: str) -> str:
    """A word of a systemd command line: its own quoting, with % and $ doubled, which it would else expand."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{inner}"'
