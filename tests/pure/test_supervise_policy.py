"""The parent's decisions, its messages and its reports, without a process."""

import errno
import json
import os
import socket
import stat
from dataclasses import dataclass

import pytest

from mlx_serve.settings.config import from_args
from mlx_serve.supervise import doorway, report, start, systemd
from mlx_serve.supervise.child import Supervisor
from mlx_serve.supervise.messages import MAX_BYTES, LineBuffer, decode, encode
from mlx_serve.supervise.policy import Restarts, RunningRequest, Silence, Suspects, hang
from mlx_serve.supervise.process import ProcessState
from mlx_serve.values import StartError

# Restarts


def test_a_process_that_served_for_long_is_started_again_at_once():
    restarts = Restarts()
    assert [restarts.pause_s(3600) for _ in range(10)] == [0] * 10


def test_the_third_quick_death_in_a_row_is_the_last():
    restarts = Restarts()
    assert [restarts.pause_s(59), restarts.pause_s(0), restarts.pause_s(10)] == [1, 2, None]


def test_a_longer_life_in_between_begins_the_count_anew():
    restarts = Restarts()
    assert [restarts.pause_s(s) for s in (1, 1, 60, 1, 1, 1)] == [1, 2, 0, 1, 2, None]


# Hangs


def test_a_step_is_no_hang_before_the_timeout_or_while_it_is_usual():
    assert not hang(overdue_s=0, work="", silent_s=0, timeout_s=180)
    assert not hang(overdue_s=179, work="a step", silent_s=0, timeout_s=180)
    assert "a step for 180 s" in hang(overdue_s=180, work="a step", silent_s=0, timeout_s=180)


def test_a_silent_process_hangs_but_not_for_a_few_lost_beats():
    assert hang(0, "", silent_s=180, timeout_s=180)
    assert not hang(0, "", silent_s=4, timeout_s=1)
    assert hang(0, "", silent_s=5, timeout_s=1)
    assert not hang(overdue_s=1e6, work="", silent_s=1e6, timeout_s=0)


def test_silence_grows_and_ends_with_a_word():
    silence = Silence(now=0, step_s=2)
    assert [silence.pass_to(now) for now in (1, 2, 3)] == [1, 2, 3]
    silence.heard()
    assert silence.pass_to(4) == 1


def test_a_time_in_which_the_parent_was_frozen_too_does_not_count():
    silence = Silence(now=0, step_s=2)
    assert silence.pass_to(3600) == 2


def test_a_process_that_was_told_to_end_must_not_be_silent_for_long():
    assert not hang(overdue_s=1e6, work="a step", silent_s=9, timeout_s=180, is_ending=True)
    assert hang(0, "", silent_s=10, timeout_s=180, is_ending=True)
    assert not hang(0, "", silent_s=1e6, timeout_s=0, is_ending=True)


# Suspects


def request(name, fingerprint, model="m"):
    return RunningRequest(name, model, 5, 10, 1, fingerprint)


def test_a_suspect_was_running_at_two_deaths_in_a_row():
    suspects = Suspects()
    assert suspects.at_death([request("a", "x"), request("b", "y")]) == []
    # Tried again, it has another id.
    again = request("c", "x")
    assert suspects.at_death([again, request("d", "z")]) == [again]
    assert suspects.at_death([]) == []
    assert suspects.at_death([again]) == []


def test_the_same_prompt_on_another_model_is_no_suspect():
    suspects = Suspects()
    suspects.at_death([request("a", "x", model="one")])
    assert suspects.at_death([request("b", "x", model="two")]) == []


# Messages


def test_messages_are_read_however_they_are_cut():
    raw = encode("beat", overdue_s=1.5, work="a step") + encode("end", id="r")
    for n in range(len(raw)):
        buffer = LineBuffer()
        lines = buffer.feed(raw[:n]) + buffer.feed(raw[n:])
        assert [decode(line)["kind"] for line in lines] == ["beat", "end"]


def test_a_long_line_is_cut_and_holds_no_more_than_a_message():
    assert len(encode("log", line="\x00" * 100_000)) < MAX_BYTES
    buffer = LineBuffer()
    for _ in range(10):
        buffer.feed(b"x" * MAX_BYTES)
    assert len(buffer.feed(b"\n")[0]) <= MAX_BYTES


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"1", b"{}", b'{"kind": 1}', b"\xff"])
def test_what_is_no_message_has_no_kind(line):
    assert decode(line) == {"kind": ""}


def test_a_process_state_keeps_the_running_requests_and_the_last_lines():
    state = ProcessState()
    facts = {"model": "m", "prompt_tokens": 1, "max_tokens": 2, "sequences": 1, "fingerprint": "f"}
    for name in ("a", "b"):
        state.note({"kind": "begin", "id": name, **facts}, 0)
    state.note({"kind": "end", "id": "a"}, 0)
    state.note({"kind": "ready"}, 7)
    state.note({"kind": "beat", "overdue_s": 30, "work": "a step"}, 8)
    for n in range(100):
        state.note({"kind": "log", "line": str(n)}, 8)
        state.note({"kind": "memory", "active_bytes": n}, 8)
    assert list(state.requests) == ["b"]
    assert (state.ready_at, state.overdue_s, state.work) == (7, 30, "a step")
    assert list(state.log) == [str(n) for n in range(50, 100)]
    assert [figures["active_bytes"] for figures in state.figures] == list(range(87, 100))
    # The step came to its end.
    state.note({"kind": "beat"}, 9)
    assert state.overdue_s == 0


@dataclass
class RunningTrace:
    request_id: str
    model: str = "m"


def test_a_parent_that_did_not_read_for_long_learns_what_holds_now():
    theirs, ours = socket.socketpair()
    with theirs, ours:
        supervisor = Supervisor(ours, ours)
        supervisor.serving(None)
        supervisor.ready()
        supervisor.entered(RunningTrace("first"), [])
        # Nobody reads: the parent is stopped. The end of a request is among what is lost.
        for _ in range(1000):
            supervisor.logged("x" * 2000)
        supervisor.left(RunningTrace("first"))
        supervisor.entered(RunningTrace("second"), [])
        state, lines, now = ProcessState(), LineBuffer(), 0
        theirs.setblocking(False)
        while set(state.requests) != {"second"}:
            supervisor.logged("next")
            for line in lines.feed(theirs.recv(1 << 20)):
                now += 1
                state.note(decode(line), now)
        assert state.serving
        assert state.ready_at == 2


# Reports


def facts(at, **more):
    return {"at": at, "time": f"T{at}", "process": 7, "ended": "signal SIGABRT", "requests": ["r"], **more}


def test_a_report_is_its_owners_alone_and_the_newest_are_kept(tmp_path):
    place = tmp_path / "deaths"
    for n in range(report.MOST_KEPT + 5):
        path = report.write(place, facts(60.0 * n))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    found = report.deaths([place])
    assert [death.at for death in found] == [60.0 * n for n in range(report.MOST_KEPT + 4, 4, -1)]
    assert len(os.listdir(place)) == report.MOST_KEPT


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report.json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        report.write(tmp_path, facts(1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_death_is_summed_up_in_a_line(tmp_path):
    report.write(tmp_path, facts(1.0, last_words="[METAL] Insufficient Memory", suspects=["id=x"]))
    (death,) = report.deaths([tmp_path])
    said = "T1.0: signal SIGABRT; [METAL] Insufficient Memory; 1 requests were running"
    assert str(death) == f"{said}; running at the death before, too: id=x"


def test_files_that_are_no_reports_are_passed_over(tmp_path):
    (tmp_path / "death-1.json").write_text("{")
    (tmp_path / "death-2.json").write_text("[]")
    (tmp_path / "death-3.json").mkdir()
    assert report.deaths([tmp_path, tmp_path / "none"]) == []


def test_reports_lie_beside_the_log(tmp_path):
    log = str(tmp_path / "logs/mlx-serve.log")
    assert report.folder({"MLX_SERVE_LOG_FILE": log}) == tmp_path / "logs" / report.FOLDER
    assert str(report.folder({"LOGS_DIRECTORY": "/var/log/mlx-serve"})) == "/var/log/mlx-serve/mlx-serve-deaths"
    assert str(report.folder({"XDG_STATE_HOME": "/s"}, "linux")) == "/s/mlx-serve/mlx-serve-deaths"
    assert str(report.folder({}, "darwin")).endswith("Library/Logs/mlx-serve/mlx-serve-deaths")


def test_flags_are_told_without_secrets():
    argv = ["--model", "m", "--api-key", "geheim", "--chat-template", "geheim {{ messages }}", "--max-queue", "7"]
    said = report.flags(from_args(argv, {}))
    assert "geheim" not in json.dumps(said)
    assert said == {"model": ("m",), "api_key": "(set)", "chat_template": "(set)", "max_queue": 7}


# The rest


@pytest.mark.parametrize(
    ("argv", "is_parent"),
    [
        (["--supervise"], True),
        (["--supervise", "--no-supervise"], False),
        ([], False),
        (["--supervise", "--version"], False),
    ],
)
def test_who_becomes_a_parent(argv, is_parent):
    assert (start.wanted(argv, {}) is not None) == is_parent
    assert start.wanted(argv, {"MLX_SERVE_CHILD": "3,4,5"}) is None


def test_the_parents_reply_is_openais_error():
    head, _, body = doorway.unavailable().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert f"Content-Length: {len(body)}".encode() in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_systemd_is_told_only_if_it_asked(tmp_path):
    systemd.notify("READY=1", {})
    systemd.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "none")})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        systemd.notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "n")})
        assert manager.recv(100) == b"READY=1"


# Ranks


@pytest.mark.parametrize(
    "environ", [{"MLX_RANK": "0"}, {"MLX_RANK": "1"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "4"}]
)
def test_a_rank_has_no_parent(environ):
    with pytest.raises(StartError, match=r"--supervise does not work under mlx\.launch.*--no-supervise"):
        start.check_alone(environ)


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": ""}])
def test_a_process_alone_may_have_one(environ):
    start.check_alone(environ)
