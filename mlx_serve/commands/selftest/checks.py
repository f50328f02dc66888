"""What is tested, each check a function that asks the running server and says what it found. Starts no process.

Greedy answers are compared with mlx-lm's own. Their numbers may differ in the last bits, since a matrix product of
another shape adds in another order; where two tokens are nearly equally likely, an answer may then part from the other
one. So an answer is right if it is equal, or parts at such a place; and answers must agree for most of their length.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_serve.client.connection import Client, Connections
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place
from mlx_serve.commands.bench.ceiling import Continuation
from mlx_serve.commands.bench.drafts import drafts_since, read_drafts
from mlx_serve.commands.bench.load import LoadTarget
from mlx_serve.commands.bench.stats import percentile, tpot_s
from mlx_serve.commands.terminal import bytes_text
from mlx_serve.supervise import report

TOGETHER = 8
# Where an answer first differs from mlx-lm's, mlx-lm may prefer its own token by so much log-probability. In bfloat16,
# logits of 16 to 32 are 1/8 apart, and a few roundings add up.
_NEAR_TIE = 0.5
# The share of an answer, on average, that must equal mlx-lm's.
_LEAST_AGREEMENT = 0.5
_STREAMS = 4
# How often the same answer is asked for with drafts, and as often without. The first ones show what drafts cost.
DRAFT_ROUNDS = 2
# Beside a long prompt a stream may pause so long, or for so many of its usual gaps where that is more.
_MOST_PAUSE_S, _MOST_GAPS = 1.0, 10
# A pause may also last as long as a slice of so many prompt tokens takes on a slow machine.
_SLICE_TOKENS = 128
# A first peak over the memory's bound that is still good.
_MOST_PEAK = 1.05
_RESTART_S = 300.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found. ``passed``: None where it could not be done; ``figures`` are for the JSON file."""

    name: str
    found: str
    passed: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AskedText:
    """A prompt, the most tokens of its answer, and the answer of mlx-lm alone."""

    prompt: str
    max_tokens: int
    wanted: Continuation


def alone(target: LoadTarget, asked: Sequence[AskedText]) -> CheckResult:
    """Each prompt by itself."""
    with Client(target.server) as client:
        texts = [_text(client, target, each) for each in asked]
    return _compared("greedy answers, one at a time", texts, asked)


def together(target: LoadTarget, asked: Sequence[AskedText]) -> CheckResult:
    """Eight at a time; their lengths differ, so they join and leave at different steps."""

    def one(each: AskedText) -> str:
        with Client(target.server) as client:
            return _text(client, target, each)

    with ThreadPoolExecutor(TOGETHER) as threads:
        texts = list(threads.map(one, asked))
    return _compared(f"greedy answers, {TOGETHER} at a time", texts, asked)


def _compared(name: str, texts: Sequence[str], asked: Sequence[AskedText]) -> CheckResult:
    parted = [part for text, each in zip(texts, asked, strict=True) if (part := parting(text, each.wanted)) is not None]
    n_equal, n_ties = len(asked) - len(parted), sum(part.is_tie for part in parted)
    share = (n_equal + sum(part.share for part in parted)) / len(asked)
    found = f"{n_equal} of {len(asked)} as mlx-lm's"
    if n_ties:
        found += f", {n_ties} until two tokens were nearly equally likely"
    if n_wrong := len(parted) - n_ties:
        found += f", {n_wrong} with other tokens"
    found += f"; {share:.0%} of the text" if parted else ""
    figures = {
        "equal": n_equal,
        "ties": n_ties,
        "of": len(asked),
        "agreement": round(share, 3),
        "margins": [round(part.margin, 3) for part in parted],
    }
    return CheckResult(name, found, not n_wrong and share >= _LEAST_AGREEMENT, figures)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer first differs from mlx-lm's: the share before it, and how much mlx-lm preferred its own token."""

    share: float
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin <= _NEAR_TIE


def parting(text: str, wanted: Continuation) -> Parting | None:
    """None if a text is the wanted one. Blanks around both and an incomplete last character are ignored."""
    text, whole = (each.rstrip("\ufffd").strip() for each in (text, wanted.text))
    if text == whole:
        return None
    pairs = enumerate(zip(text, whole, strict=False))
    n_same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(whole)))
    at = n_same + len(wanted.text) - len(wanted.text.lstrip())
    # The other token may have begun with the same characters as the one before.
    last = max((i for i, start in enumerate(wanted.starts) if start <= at), default=0)
    return Parting(n_same / max(len(text), len(whole)), min(wanted.margins[max(0, last - 1) : last + 1], default=0.0))


def bodies(target: LoadTarget, asked: AskedText) -> CheckResult:
    """The same request with a Content-Length and in chunks gets the same answer."""
    body = json.dumps({"model": target.model, "prompt": asked.prompt, "max_tokens": 8, "temperature": 0}).encode()
    plain, chunked = (_posted(target.server, sent) for sent in (body, _in_pieces(body)))
    statuses = {status for status, _ in (plain, chunked)}
    is_good = plain == chunked and statuses == {http.client.OK}
    return CheckResult("plain and chunked bodies", "the same answer" if is_good else f"{plain}, {chunked}", is_good)


def _in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 7):
        yield body[start : start + 7]


def _posted(where: Place, body: bytes | Iterator[bytes]) -> tuple[int, str]:
    """The status, and the text or the error. Bytes are sent with a Content-Length, an iterator in chunks."""
    connection = where.connection()
    try:
        is_chunked = not isinstance(body, bytes)
        path = f"{where.path}/completions"
        connection.request("POST", path, body, where.headers(), encode_chunked=is_chunked)
        response = connection.getresponse()
        answer = json.loads(response.read())
        is_good = response.status == http.client.OK
        return response.status, str(answer["choices"][0]["text"] if is_good else answer)
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def beside_a_long_prompt(target: LoadTarget, prompt: str, n_stream: int, long: str, prompt_rate: float) -> CheckResult:
    """The pauses of streams while a long prompt is read. The streams end with the prompt, or after ``n_stream`` tokens.

    ``prompt_rate``: how many prompt tokens the machine reads per second.
    """
    heard: list[list[float]] = [[] for _ in range(_STREAMS)]
    begun = [threading.Event() for _ in heard]
    ending = Connections()
    # Keep the streams going while the prompt is read, and with text: control tokens are not sent.
    lasting = replace(target, fields={**target.fields, "min_tokens": n_stream})

    def one(times: list[float], has_begun: threading.Event) -> None:
        def note(now: float) -> None:
            times.append(now)
            has_begun.set()

        try:
            with Client(target.server, ending) as client:
                client.ask(target.path, lasting.body(prompt, n_stream), heard=note)
        except Failure:
            if not ending.ended:
                raise
        finally:
            has_begun.set()

    with ThreadPoolExecutor(_STREAMS) as threads:
        streams = [threads.submit(one, *each) for each in zip(heard, begun, strict=True)]
        try:
            for each in begun:
                each.wait()
            began = time.perf_counter()
            with Client(target.server) as client:
                first = client.ask(target.path, target.body(long, 1))
            ended = time.perf_counter()
        finally:
            ending.end_all()
        for stream in streams:
            stream.result()
    gaps = sorted(gap for times in heard for gap in _gaps_between(times, began, ended))
    if not gaps:
        return CheckResult(_LONG_NAME, f"{first.prompt_tokens} tokens: every stream stood still", passed=False)
    usual_s, p99 = (percentile(gaps, percent) for percent in (50, 99))
    found = f"{first.prompt_tokens} tokens, {_STREAMS} streams: p99 gap {p99:.2f} s (p50 {usual_s:.2f})"
    figures = {
        "prompt_tokens": first.prompt_tokens,
        "gaps": len(gaps),
        "p50_gap_s": usual_s,
        "p99_gap_s": p99,
        "ttft_s": first.ttft_s,
    }
    most_s = max(_MOST_PAUSE_S, _MOST_GAPS * usual_s, _SLICE_TOKENS / prompt_rate)
    return CheckResult(_LONG_NAME, f"{found}, first token {first.e2e_s:.1f} s", p99 <= most_s, figures)


_LONG_NAME = "a long prompt beside streams"


def drafts(target: LoadTarget, prompt: str, n_tokens: int) -> CheckResult:
    """The speed of answers that may be drafted from their own text, over the same answers without drafts.

    ``prompt``: a text that the model goes on to repeat.
    """
    fields = {**target.fields, "min_tokens": n_tokens}
    before = read_drafts(target.server)
    seconds: dict[int | None, float] = {}
    with Client(target.server) as client:
        for most in (0, None) * DRAFT_ROUNDS:
            asked = replace(target, fields={**fields, "num_draft_tokens": most})
            answer = client.ask(target.path, asked.body(prompt, n_tokens))
            seconds[most] = seconds.get(most, 0.0) + (tpot_s(answer) or 0.0)
    counts = drafts_since(before, target.server) if before is not None else None
    if counts is None or not seconds[None]:
        return CheckResult("drafts", "the server does not tell", None)
    ratio = seconds[0] / seconds[None]
    found = f"{ratio:.2f} of the speed without; {counts.accepted_tokens} of {counts.drafted_tokens} tokens were right"
    return CheckResult("drafts", found, None, {"ratio": ratio, "tokens": n_tokens} | asdict(counts))


def _gaps_between(times: Sequence[float], began: float, ended: float) -> list[float]:
    """The gaps of a stream that overlap a period, and the time since its last text if that came before the end."""
    found = [late - early for early, late in pairwise(times) if late > began and early < ended]
    return found if not times or times[-1] >= ended else [*found, ended - times[-1]]


def memory(target: LoadTarget) -> CheckResult:
    """MLX's peak against the mark above which the server pauses sequences."""
    with Client(target.server) as client:
        use = client.get("/stats").get("memory") or {}
    peak, bound = use.get("peak_bytes"), use.get("hard_mark_bytes")
    if not isinstance(peak, int) or not isinstance(bound, int) or not bound:
        return CheckResult("memory", f"peak {bytes_text(peak or 0)}, no bound is known", None, use)
    found = f"peak {bytes_text(peak)} of {bytes_text(bound)}"
    return CheckResult("memory", found, peak <= _MOST_PEAK * bound, use)


def after_a_crash(target: LoadTarget, asked: AskedText, child: int | None, reports: Path) -> CheckResult:
    """The server's process is killed: the port stays, the next answer is right, and there is a report.

    ``reports``: the folder where it should be.
    """
    name = "a killed process"
    if child is None:
        return CheckResult(name, "the server runs without --supervise", None)
    os.kill(child, signal.SIGKILL)
    began, n_failed = time.monotonic(), 0
    while time.monotonic() - began < _RESTART_S:
        try:
            with Client(target.server) as client:
                text = _text(client, target, asked)
        except Failure as failure:
            if isinstance(failure.__cause__, ConnectionRefusedError):
                return CheckResult(name, "the port was closed", passed=False)
            n_failed += 1
            time.sleep(_POLL_S)
            continue
        seconds = time.monotonic() - began
        part = parting(text, asked.wanted)
        faults = ["with another text"] if part is not None and not part.is_tie else []
        faults += [] if report.deaths([reports]) else ["without a report"]
        return CheckResult(
            name,
            ", ".join([f"answered again after {seconds:.1f} s", *faults]),
            not faults,
            {"seconds": round(seconds, 2), "failed_requests": n_failed},
        )
    return CheckResult(name, f"no answer within {_RESTART_S:.0f} s", passed=False)


def _text(client: Client, target: LoadTarget, asked: AskedText) -> str:
    return client.ask(target.path, target.body(asked.prompt, asked.max_tokens)).text
