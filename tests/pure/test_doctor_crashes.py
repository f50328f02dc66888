"""What the doctor says of dead server processes and of macOS's panics."""

import os

from mlx_serve.commands.doctor import crashes
from mlx_serve.supervise import report

NOW = 1_800_000_000.0
HOUR_S = 3600
PANIC = '{"bug_type": "210"}\n{"panicString": "panic(cpu 4): completeMemory() prepare count underflow @IOGPU.cpp"}'


def death(place, at):
    facts = {"at": at, "time": f"T{at:.0f}", "process": 1, "ended": "signal SIGABRT", "requests": []}
    return report.write(place / "mlx-serve" / report.FOLDER, facts)


def written(path, text, at):
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def findings(tmp_path, system="linux"):
    environ = {"XDG_STATE_HOME": str(tmp_path), "MLX_SERVE_LOG_FILE": str(tmp_path / "mlx-serve" / "log")}
    found = crashes.findings(environ, NOW, system, [str(tmp_path)])
    return [(each.level, each.text, each.advice) for each in found if str(tmp_path) in each.advice + each.text]


def test_deaths_of_the_last_week_are_shown_the_newest_first(tmp_path):
    death(tmp_path, NOW - 8 * 86400)
    first, second = death(tmp_path, NOW - 5 * HOUR_S), death(tmp_path, NOW - HOUR_S)
    said = [(text.partition(";")[0], advice) for _, text, advice in findings(tmp_path)]
    assert said == [
        (f"the server process died at T{NOW - HOUR_S:.0f}: signal SIGABRT", f"all that is known: {second}"),
        (f"the server process died at T{NOW - 5 * HOUR_S:.0f}: signal SIGABRT", f"all that is known: {first}"),
    ]


def test_many_deaths_are_counted(tmp_path):
    for n in range(8):
        death(tmp_path, NOW - n * HOUR_S)
    assert len(findings(tmp_path)) == 6
    assert "3 more" in findings(tmp_path)[-1][1]


def test_macos_reports_of_that_hour_are_named(tmp_path):
    death(tmp_path, NOW - HOUR_S)
    near = written(tmp_path / "JetsamEvent-a.ips", "{}", NOW - 1.5 * HOUR_S)
    written(tmp_path / "JetsamEvent-b.ips", "{}", NOW - 3 * HOUR_S)
    ((_, text, _),) = findings(tmp_path, "darwin")
    assert text.endswith(f"macOS wrote {near}")
    assert "JetsamEvent" not in findings(tmp_path, "linux")[0][1]


def test_a_panic_is_shown_and_the_one_of_the_gpu_is_known(tmp_path):
    gpu = written(tmp_path / "panic-full-1.panic", PANIC, NOW - HOUR_S)
    other = written(tmp_path / "panic-full-2.panic", "{}", NOW - 2 * HOUR_S)
    found = findings(tmp_path, "darwin")
    assert [str(gpu) in found[0][1], str(other) in found[1][1]] == [True, True]
    assert "prepare count underflow" in found[0][1]
    assert "troubleshooting" in found[0][2]
    assert "troubleshooting" not in found[1][2]
