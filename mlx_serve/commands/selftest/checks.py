"""What is tested, each check a function that asks the running server and says what it found. Starts no process.

Greedy answers are compared with mlx-lm's own. In a batch their numbers differ in the last bits, since a matrix product
of another shape adds in another order; where two tokens are nearly equally likely, the text may then part. So answers
in a batch must agree for most of their length, and answers alone to the end.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlx_serve.client.answer import Answer
from mlx_serve.client.connection import Client
from mlx_serve.client.errors import Failure
from mlx_serve.client.place import Place
from mlx_serve.commands.bench.load import LoadTarget
from mlx_serve.commands.bench.stats import percentile
from mlx_serve.commands.terminal import bytes_text

_BATCH = 8
# Of an answer in a batch, on average over the answers.
_LEAST_AGREEMENT = 0.5
# Beside a long prompt a stream may pause so long, or for so many of its usual gaps where that is more.
_MOST_PAUSE_S, _MOST_GAPS = 1.0, 10
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


@dataclass(frozen=True, slots=True)
class AskedText:
    """A prompt, the most tokens of its answer, and the answer of mlx-lm alone."""

    prompt: str
    max_tokens: int
    wanted: str


def alone(target: LoadTarget, asked: Sequence[AskedText]) -> CheckResult:
    """Each prompt by itself."""
    with Client(target.server) as client:
        texts = [_ask(client, target, each).text for each in asked]
    n_equal = sum(_agreement(text, each.wanted) == 1 for text, each in zip(texts, asked, strict=True))
    found = f"{n_equal} of {len(asked)} as mlx-lm's"
    return CheckResult(
        "greedy answers, one at a time", found, n_equal == len(asked), {"equal": n_equal, "of": len(asked)}
    )


def together(target: LoadTarget, asked: Sequence[AskedText]) -> CheckResult:
    """Eight at a time; their lengths differ, so they join and leave at different steps."""

    def one(each: AskedText) -> str:
        with Client(target.server) as client:
            return _ask(client, target, each).text

    with ThreadPoolExecutor(_BATCH) as threads:
        texts = list(threads.map(one, asked))
    agreed = [_agreement(text, each.wanted) for text, each in zip(texts, asked, strict=True)]
    n_equal, share = sum(part == 1 for part in agreed), sum(agreed) / len(agreed)
    found = f"{n_equal} of {len(asked)} as mlx-lm's, {share:.0%} of the text"
    figures = {"equal": n_equal, "of": len(asked), "agreement": round(share, 3)}
    return CheckResult(f"greedy answers, {_BATCH} at a time", found, share >= _LEAST_AGREEMENT, figures)


def _agreement(text: str, wanted: str) -> float:
    """The share of a text before it parts from the other one.

    Blanks around them do not count, nor does a character that the last token has only begun.
    """
    text, wanted = (each.rstrip("\ufffd").strip() for each in (text, wanted))
    if text == wanted:
        return 1.0
    n = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
    return n / max(len(text), len(wanted))


def bodies(target: LoadTarget, asked: AskedText) -> CheckResult:
    """The same request with a Content-Length and in chunks gets the same answer."""
    body = json.dumps({"model": target.model, "prompt": asked.prompt, "max_tokens": 8, "temperature": 0}).encode()
    plain, chunked = (_posted(target.server, sent) for sent in (body, _in_pieces(body)))
    is_same = plain == chunked
    return CheckResult("plain and chunked bodies", "the same answer" if is_same else f"{plain!r}, {chunked!r}", is_same)


def _in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 7):
        yield body[start : start + 7]


def _posted(where: Place, body: bytes | Iterator[bytes]) -> str:
    """The text of an answer, or the status and the error. Bytes get a Content-Length, an iterator goes in chunks."""
    connection = where.connection()
    try:
        is_chunked = not isinstance(body, bytes)
        path = f"{where.path}/completions"
        connection.request("POST", path, body, where.headers(), encode_chunked=is_chunked)
        response = connection.getresponse()
        answer = json.loads(response.read())
        return str(answer["choices"][0]["text"]) if response.status == http.client.OK else f"{response.status} {answer}"
    finally:
        connection.close()


def beside_a_long_prompt(target: LoadTarget, stream: AskedText, long: AskedText) -> CheckResult:
    """The pauses of streams while a long prompt is read."""
    joined = threading.Event()
    gaps: list[float] = []

    def heard(_: float) -> None:
        joined.set()

    def one(_: int) -> Answer:
        with Client(target.server) as client:
            return _ask(client, target, stream, heard)

    with ThreadPoolExecutor(_BATCH) as threads:
        streams = [threads.submit(one, n) for n in range(_BATCH // 2)]
        joined.wait(target.server.timeout_s)
        with Client(target.server) as client:
            first = _ask(client, target, long)
        for each in streams:
            gaps += each.result().gaps_s
    usual_s, p99 = (percentile(sorted(gaps), percent) if gaps else 0.0 for percent in (50, 99))
    found = (
        f"{first.prompt_tokens} tokens, {len(streams)} streams: p99 gap {p99:.2f} s (p50 {usual_s:.2f}), first token"
    )
    figures = {"prompt_tokens": first.prompt_tokens, "p50_gap_s": usual_s, "p99_gap_s": p99, "ttft_s": first.ttft_s}
    is_good = p99 <= max(_MOST_PAUSE_S, _MOST_GAPS * usual_s)
    return CheckResult("a long prompt beside streams", f"{found} {first.ttft_s or 0:.1f} s", is_good, figures)


def memory(target: LoadTarget) -> CheckResult:
    """MLX's peak against the mark above which the server pauses sequences."""
    with Client(target.server) as client:
        use = client.get("/stats").get("memory") or {}
    peak, bound = use.get("peak_bytes"), use.get("hard_mark_bytes")
    if not isinstance(peak, int) or not isinstance(bound, int) or not bound:
        return CheckResult("memory", f"peak {bytes_text(peak or 0)}, no bound is known", None, use)
    found = f"peak {bytes_text(peak)} of {bytes_text(bound)}"
    return CheckResult("memory", found, peak <= _MOST_PEAK * bound, use)


def after_a_crash(target: LoadTarget, asked: AskedText, child: int | None) -> CheckResult:
    """The server's process is killed: the port stays, and the next answer is the same as before."""
    name = "a killed process"
    if child is None:
        return CheckResult(name, "the server runs without --supervise", None)
    os.kill(child, signal.SIGKILL)
    began, n_refused = time.monotonic(), 0
    while time.monotonic() - began < _RESTART_S:
        with suppress(Failure), Client(target.server) as client:
            text = _ask(client, target, asked).text
            seconds = time.monotonic() - began
            is_same = _agreement(text, asked.wanted) == 1
            return CheckResult(
                name,
                f"answered again after {seconds:.1f} s{'' if is_same else ', with another text'}",
                is_same,
                {"seconds": round(seconds, 2), "failed_requests": n_refused},
            )
        n_refused += 1
        time.sleep(_POLL_S)
    return CheckResult(name, f"no answer within {_RESTART_S:.0f} s", False)


def _ask(
    client: Client, target: LoadTarget, asked: AskedText, heard: Callable[[float], None] = lambda _: None
) -> Answer:
    return client.ask(target.path, target.body(asked.prompt, asked.max_tokens), heard=heard)
