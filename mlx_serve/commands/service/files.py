"""Makes the text of service files: launchd's property list, newsyslog's rotation, systemd's unit.

Every function takes a ``Service`` and returns text; none touches the system. Sources: launchd.plist(5),
newsyslog.conf(5), systemd.service(5), systemd.exec(5).
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

# Time after --drain-timeout for sending the last errors, closing connections and releasing the model.
_LAST_WORDS_S = 15
# The minimum time between restarts, so that a wrong flag does not keep the machine busy.
_RESTART_S = 10
_LOG_KB, _N_LOGS = 50_000, 7
# A word that systemd accepts without quotes in a command line.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True, slots=True)
class Service:
    """A server that runs as a service.

    ``command``: starts with the absolute path of the program. ``system``: starts at boot, for the machine; otherwise at
    the login of ``user``. ``home``: the user's home. Times are in seconds.
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
    # Folders the server writes to besides its user's caches: for prompt caches, for a socket.
    writable: tuple[PurePath, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the label. Names the log and the unit."""
        return self.label.rsplit(".", 1)[-1]

    @property
    def log(self) -> PurePath:
        """The server's log file."""
        return self.log_dir / f"{self.name}.log"

    @property
    def stop_s(self) -> int:
        return int(self.drain_timeout_s) + _LAST_WORDS_S


def launchd_plist(service: Service) -> str:
    """The property list of a LaunchDaemon (``system``) or a LaunchAgent."""
    # The server opens its log itself, and reopens it when newsyslog has moved it. launchd would keep writing to the
    # moved file, so it gets another file, for output that bypasses the log (a crash of the interpreter).
    stray = str(service.log_dir / f"{service.name}.stderr.log")
    job = {
        "Label": service.label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": {
            "HOME": str(service.home),
            "MLX_SERVE_LOG_FILE": str(service.log),
            **service.environ,
        },
        # Not the home directory: Python would import a folder there named mlx_serve instead of the package.
        "WorkingDirectory": "/",
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": service.stop_s,
        # By default launchd throttles the CPU and disk use of a job, as background work.
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
    """Rotates the log by size on macOS. Without an owner and group, the new log file would belong to root."""
    fields = (str(service.log), f"{service.user}:{service.group}", "600", str(_N_LOGS), str(_LOG_KB), "*", "N")
    head = "# logfilename owner:group mode count size(kB) when flags; N: no signal, the server notices the rotation"
    return f"{head}\n{' '.join(fields)}\n"


def systemd_unit(service: Service) -> str:
    """A hardened system unit, or a user unit. systemd sends the server's log to the journal."""
    environ = [f"Environment={_quoted(f'{name}={value}')}" for name, value in service.environ.items()]
    lines = [
        "[Unit]",
        "Description=mlx-serve: MLX language models over the OpenAI HTTP API",
        "Wants=network-online.target" if service.system else "",
        "After=network-online.target" if service.system else "",
        "# After three failed starts in five minutes the service stays down, so that an operator looks at it.",
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
        "# Longer than --drain-timeout. Only the main process gets SIGTERM; it ends the others.",
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
    # "-": the service also starts if the folder does not exist.
    writable = [_quoted(f"-{folder}") for folder in (service.home / ".cache", *service.writable)]
    return (
        "# The server reads models and writes to caches. It needs no other access to the machine.",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        f"ReadWritePaths={' '.join(writable)}",
        "# For the reports of dead server processes.",
        f"LogsDirectory={service.name}",
        "LogsDirectoryMode=0750",
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
        "# Remove the next line if the server uses a GPU (CUDA).",
        "PrivateDevices=yes",
    )


def _quoted(word: str) -> str:
    """Quotes a word for a systemd command line. systemd would expand single % and $, so both are doubled."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    inner = escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{inner}"'
