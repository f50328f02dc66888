"""A run as text and JSON."""

import json
import math

import pytest

from mlx_serve.client.answer import Answer
from mlx_serve.client.errors import Failure
from mlx_serve.commands.bench import report
from mlx_serve.commands.bench.ceiling import Offline
from mlx_serve.commands.bench.drafts import Drafts
from mlx_serve.commands.bench.report import Measured
from mlx_serve.commands.bench.stats import Record, Slo, summarize

ANSWER = Answer(0.1, 0.5, (0.2, 0.2), 100, 25, 3, "length", "a text of the answer")


def measured(*records, open_loop=False, level=4, n_planned=2, cpu=0.1, offline=None, slo=None, drafts=None):
    summary = summarize(records, 2.0, slo or Slo(), open_loop=open_loop)
    return Measured(open_loop, level, n_planned, records, summary, cpu, offline, drafts)


def ok(late=0.0):
    return Record(0.0, 3, "a prompt", ANSWER, late_s=late)


def failed():
    return Record(0.0, 3, "a prompt", failure=Failure("HTTP 429", "the queue is full", 429))


def test_a_round_as_text():
    text = report.text([measured(ok(), ok())])
    assert "closed loop, 4 at a time: 2 of 2 requests in 2.0 s" in text
    assert "requests/s 1.00   output tokens/s 3.0   all tokens/s 103.0   tokens in 200 (25% cached), out 6" in text
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["ms", "mean", "p50", "p90", "p95", "p99", "max"],
        ["TTFT", *["100.0"] * 6],
        ["ITL", *["200.0"] * 6],
        ["TPOT", *["200.0"] * 6],
        ["E2E", *["500.0"] * 6],
    ]


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (measured(ok(), failed()), "failed: 1 x HTTP 429: the queue is full"),
        (measured(ok()), "not sent: 1"),
        (measured(ok(), ok(), cpu=0.9), "busy: this client used 90% of a processor"),
        (measured(ok(), ok(0.2), open_loop=True), "late: requests were sent up to 200 ms after their scheduled time"),
        (measured(Record(0.0, 9, "p", ANSWER), ok()), "short: 1 answers"),
        (measured(ok(), ok(), slo=Slo(ttft_s=1)), "goodput 1.00 requests/s"),
        (measured(ok(), ok(), offline=Offline(1.0, 200, 6, 0)), "6.0 output tokens/s; served / offline: 0.50"),
        (measured(ok(), ok(), drafts=Drafts(4, 3)), "drafts: 4 tokens, of which 3 were right, 50% of the output"),
        (
            measured(ok(), ok(), offline=Offline(1.0, 210, 6, 0)),
            "different prompts: 200 tokens at the server, 210 in mlx-lm",
        ),
    ],
)
def test_what_a_reader_has_to_know(one, line):
    assert line in report.text([one])
    assert line not in report.text([measured(ok(), ok())])


def test_several_rounds_have_a_table():
    offline = Offline(1.0, 200, 6, 0)
    rounds = [measured(ok(), ok(), offline=offline), measured(failed(), level=math.inf, open_loop=True)]
    table = report.text(rounds).split("\n\n")[-1].splitlines()
    assert table[0].split()[-1] == "offline"
    assert table[1].split()[-1] == "0.50"
    assert table[2].startswith("inf requests/s")
    assert table[2].split()[-2:] == ["1", "-"]


def test_json_has_every_request_and_no_text():
    one = measured(ok(), failed(), open_loop=True, level=math.inf)
    plain = json.loads(json.dumps(report.as_json(one), allow_nan=False))
    assert (plain["loop"], plain["level"], plain["n_ok"], plain["n_failed"]) == ("open", "inf", 1, 1)
    good, bad = plain["requests"]
    assert (good["ttft_ms"], good["itl_ms"], good["e2e_ms"]) == (100.0, [200.0, 200.0], 500.0)
    assert (bad["error"], bad["message"]) == ("HTTP 429", "the queue is full")
    assert "a prompt" not in json.dumps(plain)
    assert "a text of the answer" not in json.dumps(plain)
