"""``mlx-serve install-service [OPTIONS] -- FLAGS``: writes files that start a server with these flags at boot.

Writes only where this user may write, and prints the remaining commands. Those need root, and the operator should read
them first, so this command runs none of them.
"""

from __future__ import annotations

import argparse
import grp
import os
import pwd
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx_serve
from mlx_serve.commands.doctor.checks import OTHER_DESCRIPTORS
from mlx_serve.commands.service import files as service_files
from mlx_serve.commands.service.files import Service
from mlx_serve.paths import expanded
from mlx_serve.settings import config, http
from mlx_serve.settings.config import Config
from mlx_serve.values import StartError

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}(?<!\.)")
# Environment variables that the server needs too. Keys are not among them: every user can read a service file.
_KEPT = ("MLX_MODEL_PATH", "MLX_SERVE_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")
# _FOUND: the value is a path if it exists. _NAMED: the value may be NAME=PATH. _MADE: the server creates the path.
_FOUND = ("--model", "--draft-model", "--adapter-path", "--api-key-file", "--tls-cert", "--tls-key", "--config")
_NAMED = ("--model", "--adapter")
_MADE = ("--uds", "--prompt-cache-dir")
# The variables of _KEPT that name folders the server writes to.
_CACHES = ("MLX_SERVE_CACHE", "HF_HOME", "HF_HUB_CACHE")
_SECRETS = ("MLX_SERVE_API_KEY", "HF_TOKEN")


class UsageError(Exception):
    """A mistake in the command line, as one line for the user."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to write. ``final``: where root has to install it; None if it is written to its final place."""

    name: str
    text: str
    final: Path | None


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    own, flags = _split(argv)
    given = parser().parse_args(own)
    try:
        service = service_of(given, flags, os.environ)
        files = files_of(service, given.manager)
        if given.dry_run:
            _show(files)
        else:
            folder = _folder(service, given)
            _write(files, folder, force=given.force)
            print("\n".join(_next(service, files, folder, given.manager)))
        _warn_of_strangers(flags)
        _warn_of_closed_folders(service)
    except (UsageError, StartError) as error:
        print(f"mlx-serve install-service: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mlx-serve install-service: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    top = argparse.ArgumentParser(
        prog="mlx-serve install-service",
        usage="mlx-serve install-service [OPTIONS] -- FLAGS OF THE SERVER",
        description="Write the files that start a server at boot and restart it when it fails: a launchd property list "
        "on macOS, a systemd unit on Linux. Prints the remaining commands and does not run them.",
        epilog="Example: mlx-serve install-service -- --config ~/mlx-serve.toml",
    )
    manager = "launchd" if sys.platform == "darwin" else "systemd"
    top.add_argument(
        "--for",
        dest="manager",
        choices=("launchd", "systemd"),
        default=manager,
        help="service manager (default: this system's)",
    )
    text = "install for this user only: start the server at login instead of at boot"
    top.add_argument("--user", dest="for_user", action="store_true", help=text)
    text = "user that the server runs as (default: the current user)"
    top.add_argument("--run-as", metavar="USER", help=text)
    top.add_argument("--label", default="org.mlx-serve", help="name of the service (default: %(default)s)")
    text = "folder for the log, launchd only (default: /Library/Logs/mlx-serve; with --user ~/Library/Logs/mlx-serve)"
    top.add_argument("--log-dir", metavar="DIR", help=text)
    top.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the files (default: with --user their final place, otherwise the current folder)",
    )
    top.add_argument("--force", action="store_true", help="overwrite existing files")
    top.add_argument("--dry-run", action="store_true", help="print the files and write nothing")
    return top


def _warn_of_strangers(flags: Sequence[str]) -> None:
    settings = config.from_args(flags, {})
    if not http.is_loopback(settings) and not settings.api_key and not settings.api_key_file:
        text = f"everyone who can reach {settings.host} can use this server: add --api-key-file"
        print(f"mlx-serve install-service: {text}", file=sys.stderr)


def _warn_of_closed_folders(service: Service) -> None:
    """The program and the files of the flags may be in a home that the service's user cannot enter."""
    named = [Path(word.partition("=")[2] or word) for word in service.command if "/" in word]
    # A link may lead into a home too, as a virtual environment's Python does.
    paths = [each for path in (Path(sys.executable), *named) for each in (path, Path(os.path.realpath(path)))]
    for path in dict.fromkeys(closed for path in paths if (closed := closed_to(service.user, path)) is not None):
        text = f"{service.user} cannot enter {path}: install or move what is in it elsewhere, such as to /opt"
        print(f"mlx-serve install-service: {text}", file=sys.stderr)


def closed_to(user: str, path: Path) -> Path | None:
    """The first folder on the way to a path that a user may not enter; None: there is none, or nothing to enter."""
    account = pwd.getpwnam(user)
    groups = os.getgrouplist(user, account.pw_gid)
    for folder in reversed(path.parents):
        if not os.path.isdir(folder):
            return None
        about = folder.stat()
        shift = 6 if about.st_uid == account.pw_uid else 3 if about.st_gid in groups else 0
        if not (about.st_mode >> shift) & 1 and account.pw_uid:
            return folder
    return None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" in argv:
        i = list(argv).index("--")
        return list(argv[:i]), list(argv[i + 1 :])
    return list(argv), []


def service_of(given: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]) -> Service:
    """The service of this command line. Raises UsageError. A wrong server flag ends the process."""
    # The environment's keys are left out here too, so that the settings are those of the future service.
    settings = config.from_args(flags, {name: environ[name] for name in _KEPT if name in environ})
    if any(re.match(r"--api-key(=|$)", word) for word in flags):
        raise UsageError("--api-key would be stored in a file that every user can read: use --api-key-file")
    if not _LABEL.fullmatch(given.label):
        raise UsageError(f"not a label: {given.label!r} (use letters, digits, dots, dashes and underscores)")
    if given.for_user and given.run_as:
        raise UsageError("--user and --run-as exclude each other")
    user, group, home = _account(given.run_as)
    if user == "root":
        raise UsageError("the server does not need root: name a user with --run-as")
    program, needed = _program()
    # A service keeps its port when the server process dies, unless the flags say otherwise.
    supervise = () if {"--supervise", "--no-supervise"} & set(flags) else ("--supervise",)
    library = Path(home if given.for_user else "/") / "Library/Logs/mlx-serve"
    return Service(
        label=given.label,
        command=(*program, *_absolute(flags), *supervise),
        user=user,
        group=group,
        home=home,
        log_dir=expanded(given.log_dir).absolute() if given.log_dir else library,
        system=not given.for_user,
        drain_timeout_s=settings.drain_timeout,
        n_files=settings.max_connections + OTHER_DESCRIPTORS,
        environ=needed | {name: environ[name] for name in _KEPT if environ.get(name)},
        writable=_writable(settings, environ),
    )


def _writable(settings: Config, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders that the server writes to, besides its user's cache."""
    named = [settings.prompt_cache_dir, *(environ.get(name) for name in _CACHES)]
    folders = [expanded(text).absolute() for text in named if text]
    if settings.uds:
        folders.append(expanded(settings.uds).absolute().parent)
    return tuple(dict.fromkeys(folders))


def _account(name: str | None) -> tuple[str, str, Path]:
    """A user's name, group and home. Raises UsageError if the user does not exist."""
    try:
        entry = pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())
        return entry.pw_name, grp.getgrgid(entry.pw_gid).gr_name, Path(entry.pw_dir)
    except KeyError:
        raise UsageError(f"no user {name or os.getuid()} exists: create the user first") from None


def _program() -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that starts this server from any directory, and the environment variables that it needs."""
    script = Path(sys.executable).parent / "mlx-serve"
    if script.is_file():
        return (str(script),), {}
    folder = Path(mlx_serve.__file__).parents[1]
    # Python finds a checkout that is not installed only by PYTHONPATH.
    installed = folder == Path(sysconfig.get_path("purelib"))
    return (sys.executable, "-m", "mlx_serve"), {} if installed else {"PYTHONPATH": str(folder)}


def _absolute(flags: Sequence[str]) -> list[str]:
    """Makes paths absolute: a service starts in another directory."""
    words, of = [], ""
    for word in flags:
        if word.startswith("--"):
            of, sign, value = word.partition("=")
            words.append(f"{of}={_absolute_value(of, value)}" if sign else word)
        else:
            words.append(_absolute_value(of, word))
    return words


def _absolute_value(flag: str, value: str) -> str:
    if flag == "--model-dir":
        return os.pathsep.join(str(expanded(part).absolute()) for part in value.split(os.pathsep))
    name, sign, place = value.partition("=")
    if flag in _NAMED and sign and not os.path.exists(expanded(value)):
        return f"{name}={_absolute_value('--model', place)}"
    path = expanded(value)
    # If no such path exists, the value is the name of a repository.
    if flag in _MADE or (flag in _FOUND and os.path.exists(path)):
        return str(path.absolute())
    return value


def files_of(service: Service, manager: str) -> list[File]:
    """The files to write, and where each belongs."""
    if manager == "systemd":
        name = f"{service.name}.service"
        final = Path("/etc/systemd/system") / name if service.system else None
        return [File(name, service_files.systemd_unit(service), final)]
    name = f"{service.label}.plist"
    daemon = File(
        name, service_files.launchd_plist(service), Path("/Library/LaunchDaemons") / name if service.system else None
    )
    name = f"{service.name}.newsyslog.conf"
    rotation = File(name, service_files.newsyslog_conf(service), Path("/etc/newsyslog.d") / f"{service.name}.conf")
    return [daemon, rotation]


def _show(files: Sequence[File]) -> None:
    for file in files:
        print(f"# {file.final or file.name}\n{file.text}")


def _folder(service: Service, given: argparse.Namespace) -> Path:
    if given.output:
        return expanded(given.output).absolute()
    if service.system:
        return Path.cwd()
    return Path(service.home) / ("Library/LaunchAgents" if given.manager == "launchd" else ".config/systemd/user")


def _write(files: Sequence[File], folder: Path, *, force: bool) -> None:
    """Writes all files, or none if one exists and must not be overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    there = [file.name for file in files if (folder / file.name).exists()]
    if there and not force:
        raise UsageError(f"{folder / there[0]} exists: --force overwrites it")
    for file in files:
        (folder / file.name).write_text(file.text, encoding="utf-8")


def _next(service: Service, files: Sequence[File], folder: Path, manager: str) -> list[str]:
    """The text for the user: the written files, and the remaining commands."""
    written = [f"written: {folder / file.name}" for file in files]
    why = "is set in this shell but not written to the service's file, which every user can read"
    left_out = [f"${name} {why}" for name in _SECRETS if os.environ.get(name)]
    list_commands = _launchd_commands if manager == "launchd" else _systemd_commands
    commands = [f"    {line}" for line in list_commands(service, files, folder)]
    return [*written, *left_out, "", "First check the flags:", f"    {_doctor(service)}", "", "Then run:", *commands]


def _doctor(service: Service) -> str:
    """The command that lets the doctor check the same flags, as the service's user."""
    program, _ = _program()
    # -H: with macOS's sudo the doctor would look for models in this user's home.
    other = ["sudo", "-H", "-u", service.user] if service.user != _account(None)[0] else []
    return shlex.join([*other, *program, "doctor", *service.command[len(program) :]])


def _launchd_commands(service: Service, files: Sequence[File], folder: Path) -> list[str]:
    plist, rotation = files
    domain = "system" if service.system else f"gui/{os.getuid()}"
    sudo = "sudo " if service.system else ""
    place = str(plist.final or folder / plist.name)
    owner = f"-o {service.user} -g {service.group} " if service.system else ""
    return [
        f"{sudo}install -d {owner}-m 750 {shlex.quote(str(service.log_dir))}",
        *(
            [f"sudo install -o root -g wheel -m 644 {shlex.quote(str(folder / plist.name))} {place}"]
            if service.system
            else []
        ),
        f"sudo install -o root -g wheel -m 644 {shlex.quote(str(folder / rotation.name))} {rotation.final}",
        f"{sudo}launchctl bootstrap {domain} {shlex.quote(place)}",
        f"{sudo}launchctl print {domain}/{service.label}    # its state",
        f"tail -f {shlex.quote(str(service.log))}    # wait for: ready",
        f"{sudo}launchctl bootout {domain}/{service.label}    # to stop it",
    ]


def _systemd_commands(service: Service, files: Sequence[File], folder: Path) -> list[str]:
    (unit,) = files
    systemctl = "sudo systemctl" if service.system else "systemctl --user"
    journal = "sudo journalctl" if service.system else "journalctl --user"
    put = f"sudo install -o root -g root -m 644 {shlex.quote(str(folder / unit.name))} {unit.final}"
    linger = f"sudo loginctl enable-linger {service.user}    # else the service ends with your session"
    owner = f"-o {service.user} -g {service.group}"
    # In a system that is read-only to the service, a folder that is missing when it starts cannot be made later.
    folders = (service.home / ".cache", *service.writable) if service.system else ()
    missing = [path for path in folders if not os.path.exists(path)]
    return [
        *(f"sudo install -d {owner} -m 700 {shlex.quote(str(path))}" for path in missing),
        put if service.system else linger,
        f"{systemctl} daemon-reload",
        f"{systemctl} enable --now {unit.name}",
        f"{journal} --follow --unit {unit.name}    # wait for: ready",
    ]
