"""How far a long step is, for people and for a log."""

import io
import logging

import pytest

from mlx_serve.progress import hub_bars, logged, printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_a_step_is_a_line():
    stream = io.StringIO()
    report = printed(stream)
    for step in (("downloading", 0, 9), ("downloading", 5, 9), ("unpacking", 1, 2), ("unpacking", 2, 2)):
        report(*step)
    assert stream.getvalue() == "downloading\nunpacking\n"


def bar(n_marks):
    return f"[{'#' * n_marks}{' ' * (30 - n_marks)}] {100 * n_marks // 30:3}%"


def test_on_a_terminal_a_step_is_a_bar():
    stream = Terminal()
    report = printed(stream)
    for step in (("waiting", 0, 0), ("unpacking", 1, 2), ("unpacking", 2, 2), ("unpacking", 2, 2)):
        report(*step)
    assert stream.getvalue() == f"waiting\n\x1b[Kunpacking {bar(15)}\r\x1b[Kunpacking {bar(30)}\n"


@pytest.mark.parametrize("columns", ["10", "20", "38", "60", "200"])
@pytest.mark.parametrize("step", ["loading", "loading mlx-community/Qwen3-235B-A22B-Instruct-4bit"])
def test_a_bar_is_no_wider_than_its_terminal(monkeypatch, columns, step):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    printed(stream)(step, 1, 3)
    line = stream.getvalue().removeprefix("\x1b[K").removesuffix("\r")
    assert len(line) < int(columns)
    assert line.endswith(" 33%")


def test_a_model_that_is_loaded_again_has_its_bar_again():
    stream = Terminal()
    report = printed(stream)
    for step in (("loading", 2, 2), ("loading", 1, 2)):
        report(*step)
    assert stream.getvalue() == f"\x1b[Kloading {bar(30)}\n\x1b[Kloading {bar(15)}\r"


@pytest.fixture
def lines(caplog):
    """A report, and the log lines that came of it. The clock shows the seconds of the steps."""
    log = logging.getLogger("test_progress")
    caplog.set_level(logging.INFO, log.name)

    def told(*steps):
        seconds = iter([step[0] for step in steps])
        report = logged(log, lambda: next(seconds))
        for _, *step in steps:
            report(*step)
        return caplog.messages

    return told


def test_a_log_has_a_line_every_few_seconds(lines):
    steps = [(second, "loading m", second + 1, 20) for second in range(20)]
    assert lines(*steps) == ["loading m: 30 %", "loading m: 55 %", "loading m: 80 %"]


def test_what_begins_at_nothing_is_told_at_once(lines):
    assert lines((0, "waiting", 0, 0), (9, "waiting", 0, 0), (9, "fetching", 0, 9), (10, "fetching", 9, 9)) == [
        "waiting",
        "fetching",
    ]


def test_the_same_once_more_begins_anew(lines):
    assert lines((0, "loading", 9, 9), (50, "loading", 3, 9), (51, "loading", 9, 9)) == []


def test_the_hub_s_bars_report_bytes_and_never_go_back():
    reports = []
    bars = hub_bars(lambda *step: reports.append(step), "fetching a/b")
    on_disk = bars(desc="x", total=0, initial=0, unit="B", unit_scale=True, name="huggingface_hub.x", mininterval=0)
    received = bars(desc="y", total=0, initial=0, unit="B", unit_scale=True, mininterval=0)
    files = bars(range(3), desc="z", mininterval=0)
    on_disk.total = received.total = 10
    on_disk.refresh()
    received.update(6)
    on_disk.update(4)
    on_disk.update(8)  # begun again: more than there is
    assert list(files) == [0, 1, 2]
    for each in (on_disk, received, files):
        each.close()
    assert reports[:1] == [("fetching a/b", 0, 10)]
    assert [n_done for _, n_done, _ in reports] == sorted(n_done for _, n_done, _ in reports)
    assert reports[-1] == ("fetching a/b", 10, 10)


def test_the_hub_s_bars_write_nothing(capfd):
    with hub_bars(lambda *step: None, "fetching")(total=2, unit="B", mininterval=0) as one:
        one.update(2)
    assert capfd.readouterr() == ("", "")
