"""The services that are written: what launchd, newsyslog and systemd would read in them. Nothing is installed."""

import getpass
import os
import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from mlx_serve.commands.service import command, files
from mlx_serve.commands.service.files import Service

EXAMPLES = Path(__file__).parents[2] / "examples"
MAC = Service(
    label="org.mlx-serve",
    command=(
        "/opt/mlx-serve/bin/mlx-serve",
        "--model",
        "/Users/llm/models/Qwen3-4B-4bit",
        "--port",
        "8080",
        "--supervise",
    ),
    user="llm",
    group="staff",
    home=PurePosixPath("/Users/llm"),
    log_dir=PurePosixPath("/Library/Logs/mlx-serve"),
    system=True,
)
LINUX = Service(
    label="org.mlx-serve",
    command=("/opt/mlx-serve/bin/mlx-serve", "--model", "/srv/models/Qwen3-4B", "--port", "8080", "--supervise"),
    user="mlx-serve",
    group="mlx-serve",
    home=PurePosixPath("/var/lib/mlx-serve"),
    log_dir=PurePosixPath("/var/log/mlx-serve"),
    system=True,
)


@pytest.fixture
def anybody():
    """A user that is not root, as whom the server may run."""
    name = getpass.getuser()
    return "nobody" if name == "root" else name


def run(capsys, *argv):
    status = command.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


# The examples are what is written


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("launchd/org.mlx-serve.plist", files.launchd_plist(MAC)),
        ("launchd/mlx-serve.newsyslog.conf", files.newsyslog_conf(MAC)),
        ("systemd/mlx-serve.service", files.systemd_unit(LINUX)),
    ],
)
def test_the_examples_are_what_is_written(file, text):
    assert (EXAMPLES / file).read_text() == text


def test_a_service_is_supervised_unless_the_flags_say_otherwise(capsys, anybody):
    for flags, last in ([], "--supervise"), (["--no-supervise"], "--no-supervise"), (["--supervise"], "--supervise"):
        _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--dry-run", "--", "--demo", *flags)
        line = next(line for line in out.splitlines() if line.startswith("ExecStart"))
        assert line.endswith(f"--demo {last}")


# launchd


def test_a_daemon_starts_at_boot_and_after_a_failure():
    job = plistlib.loads(files.launchd_plist(MAC).encode())
    assert job["ProgramArguments"] == list(MAC.command)
    assert (job["RunAtLoad"], job["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert (job["UserName"], job["GroupName"]) == ("llm", "staff")
    assert job["ExitTimeOut"] > MAC.drain_timeout_s
    assert job["EnvironmentVariables"]["HOME"] == "/Users/llm"
    assert job["EnvironmentVariables"]["MLX_SERVE_LOG_FILE"] == "/Library/Logs/mlx-serve/mlx-serve.log"


def test_an_agent_names_no_user():
    agent = Service("a.b", ("/x",), "u", "g", PurePosixPath("/h"), PurePosixPath("/l"), system=False)
    assert "UserName" not in plistlib.loads(files.launchd_plist(agent).encode())


def test_the_log_that_is_rotated_is_the_one_that_is_written():
    job = plistlib.loads(files.launchd_plist(MAC).encode())
    line = files.newsyslog_conf(MAC).splitlines()[-1].split()
    assert line[0] == job["EnvironmentVariables"]["MLX_SERVE_LOG_FILE"]
    assert line[1:3] == ["llm:staff", "600"]


# systemd


def test_systemd_takes_the_unit(tmp_path):
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "mlx-serve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    words = (str(program), "--served-model-name", "a b", '"', "50%", "$HOME", "back\\slash", "")
    service = Service("x.y", words, "daemon", "daemon", PurePosixPath("/h"), PurePosixPath("/l"), system=True)
    unit = tmp_path / "y.service"
    unit.write_text(files.systemd_unit(service))
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert str(unit) not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--port", "--port"),
        ("a b", '"a b"'),
        ("50%", '"50%%"'),
        ("$HOME", '"$$HOME"'),
        ('say "x"', '"say \\"x\\""'),
        ("a\\b", '"a\\\\b"'),
        ("a\nb", '"a\\nb"'),
        ("", '""'),
        ("a;b", '"a;b"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word, written):
    service = Service("x", ("/p", word), "u", "g", PurePosixPath("/h"), PurePosixPath("/l"), system=True)
    assert f"ExecStart=/p {written}\n" in files.systemd_unit(service)


# The command


def test_a_dry_run_prints_and_writes_nothing(capsys, tmp_path, monkeypatch, anybody):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--dry-run", "--", "--demo", "--port", "1")
    assert status == 0
    assert "/etc/systemd/system/mlx-serve.service" in out
    assert "--demo --port 1 --supervise\n" in out
    assert list(tmp_path.iterdir()) == []


def test_it_writes_and_prints_the_commands_that_remain(capsys, tmp_path, anybody):
    args = ("--for", "launchd", "--run-as", anybody, "--output", tmp_path, "--", "--demo")
    status, out, _ = run(capsys, *args)
    assert status == 0
    assert plistlib.loads((tmp_path / "org.mlx-serve.plist").read_bytes())["UserName"] == anybody
    assert f"sudo install -o root -g wheel -m 644 {tmp_path}/org.mlx-serve.plist /Library/LaunchDaemons/" in out
    assert "launchctl bootstrap system" in out
    assert " doctor --demo" in out
    status, _, err = run(capsys, *args)
    assert (status, "--force" in err) == (2, True)
    assert run(capsys, "--force", *args)[0] == 0


def test_every_command_that_remains_is_one_shell_line(capsys, tmp_path, anybody):
    folder = tmp_path / "with a blank"
    _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--output", folder, "--", "--demo")
    (line,) = (line for line in out.splitlines() if "install -o root" in line)
    assert str(folder / "mlx-serve.service") in shlex.split(line)


def test_paths_of_the_flags_are_made_whole(capsys, tmp_path, monkeypatch, anybody):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "keys").touch()
    flags = ["--model", "model", "--api-key-file=keys", "--uds", "s", "--model-dir", f"a{os.pathsep}b"]
    _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--dry-run", "--", *flags)
    line = next(line for line in out.splitlines() if line.startswith("ExecStart"))
    whole = f"--model {tmp_path}/model --api-key-file={tmp_path}/keys --uds {tmp_path}/s"
    assert line.endswith(f"{whole} --model-dir {tmp_path}/a:{tmp_path}/b --supervise")
    _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--dry-run", "--", "--model", "owner/name")
    assert "--model owner/name --supervise\n" in out


def test_what_is_refused(capsys, monkeypatch, anybody):
    def says(*argv):
        status, _, err = run(capsys, *argv)
        assert status == 2
        (line,) = err.splitlines()
        return line

    assert "--api-key-file" in says("--run-as", anybody, "--", "--api-key", "secret")
    assert "--api-key-file" in says("--run-as", anybody, "--", "--api-key=secret")
    assert "no user" in says("--run-as", "no-such-user", "--", "--demo")
    assert "root" in says("--run-as", "root", "--", "--demo")
    assert "not a label" in says("--label", "../x", "--run-as", anybody, "--", "--demo")
    assert "not a label" in says("--label", "org.", "--run-as", anybody, "--", "--demo")
    assert "exclude" in says("--user", "--run-as", anybody, "--", "--demo")
    with pytest.raises(SystemExit):
        command.main(["--run-as", anybody, "--", "--no-such-flag"])


def test_secrets_of_this_shell_do_not_get_into_files(capsys, monkeypatch, tmp_path, anybody):
    monkeypatch.setenv("MLX_SERVE_API_KEY", "topsecret")
    monkeypatch.setenv("HF_HOME", "/models/hub")
    _, out, _ = run(capsys, "--for", "launchd", "--run-as", anybody, "--output", tmp_path, "--", "--demo")
    plist = (tmp_path / "org.mlx-serve.plist").read_text()
    assert "topsecret" not in plist + out
    assert "$MLX_SERVE_API_KEY" in out
    assert plistlib.loads(plist.encode())["EnvironmentVariables"]["HF_HOME"] == "/models/hub"


def test_a_unit_may_write_where_the_flags_say(capsys, tmp_path, monkeypatch, anybody):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    flags = ["--demo", "--uds", tmp_path / "run" / "s", "--prompt-cache-dir", tmp_path / "a b"]
    _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--output", tmp_path, "--", *flags)
    unit = (tmp_path / "mlx-serve.service").read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ReadWritePaths="))
    assert line.endswith(f'"-{tmp_path}/a b" -{tmp_path}/hub -{tmp_path}/run')
    made = [shlex.split(line)[-1] for line in out.splitlines() if "install -d" in line]
    cache = Path(f"~{anybody}/.cache").expanduser()
    assert made == [
        *map(str, [] if cache.exists() else [cache]),
        f"{tmp_path}/a b",
        f"{tmp_path}/hub",
        f"{tmp_path}/run",
    ]


def test_a_service_that_strangers_could_use_is_told(capsys, anybody, tmp_path):
    args = ("--for", "systemd", "--run-as", anybody, "--dry-run", "--", "--demo", "--host", "0.0.0.0")
    assert "--api-key-file" in run(capsys, *args)[2]
    (tmp_path / "keys").write_text("k\n")
    assert "can use this server" not in run(capsys, *args, "--api-key-file", tmp_path / "keys")[2]


def test_a_folder_that_the_service_s_user_cannot_enter_is_told(tmp_path):
    inner = tmp_path / "open" / "program"
    inner.parent.mkdir(parents=True)
    for folder in (*reversed(inner.parents), inner.parent):
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o755)
    closed = [folder for folder in tmp_path.parents if not folder.stat().st_mode & 1]
    assert command.closed_to("nobody", inner) == (closed[-1] if closed else None)
    tmp_path.chmod(0o700)
    assert command.closed_to("nobody", inner) in (tmp_path, *tmp_path.parents)
    assert command.closed_to("root", inner) is None


def test_the_doctor_is_run_as_the_service_s_user(capsys, anybody, tmp_path):
    _, out, _ = run(capsys, "--for", "systemd", "--run-as", anybody, "--output", tmp_path, "--", "--demo")
    line = next(line for line in out.splitlines() if " doctor " in line)
    assert line.strip().startswith(f"sudo -H -u {anybody} /") == (anybody != getpass.getuser())


def test_a_program_behind_a_link_into_a_closed_folder_is_told(capsys, monkeypatch, tmp_path):
    """As the Python of a virtual environment in /opt whose base is in somebody's home."""
    monkeypatch.setattr(command.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    (tmp_path / "python").symlink_to(tmp_path / "home/bin/python")
    service = Service("x", ("/bin/sh",), "nobody", "nogroup", PurePosixPath("/"), PurePosixPath("/"), system=True)
    command._warn_of_closed_folders(service)
    assert f"nobody cannot enter {command.closed_to('nobody', tmp_path / 'home/bin/python')}" in capsys.readouterr().err
