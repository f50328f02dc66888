"""From jobs to deltas: submit, detokenize, split, cut, parse; and cancel whatever is left when the consumer goes.

    TokenEvent -> Detokenizer -> RegionSplitter -> StopCutter (content only) -> Text
                                              \\-> tool-call text, parsed    -> ToolCall

One generator for streaming and not streaming. Closing it, at any point, frees the places of its jobs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_serve.core import (
    Beat,
    ClientGone,
    Delta,
    Event,
    Failed,
    Finish,
    FinishReason,
    Job,
    Started,
    Text,
    TokenEvent,
    TokenLogprob,
    ToolCall,
    Usage,
)
from mlx_serve.engine.scheduler import Scheduler
from mlx_serve.text.detokenizer import Detokenizer
from mlx_serve.text.stream import Piece, RegionSplitter, StopCutter
from mlx_serve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# How long a client that has gone may go unnoticed, and how long a stream may be silent.
ALIVE_EVERY_S = 0.25
BEAT_EVERY_S = 10.0
# A stream's headers wait so long for a job to be admitted, so that a failure still gets its own status.
ADMISSION_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request wants done with the model's text."""

    stops: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    # A plain completion is all content, and continues its prompt's text.
    is_chat: bool = True


class Generation:
    """The deltas of one request's jobs, in the order in which they come; iterate once. ``finishes``: how they ended.

    Raises ApiError from a job that failed, ClientGone when the client has left.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        jobs: Sequence[Job],
        options: OutputOptions,
        alive: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._jobs = {job.index: job for job in jobs}
        self._events = jobs[0].events
        self._choices = {job.index: _Choice(job, tokenizer, options) for job in jobs}
        self._alive = alive
        self._alive_at = time.monotonic()
        self._early: Event | None = None
        self.finishes: list[Finish] = []

    def submit(self) -> None:
        """Queue the jobs and wait, up to a limit, until the first of them runs or fails. Raises ApiError."""
        self._scheduler.submit(list(self._jobs.values()))
        try:
            self._early = self._wait(ADMISSION_WAIT_S)
            if isinstance(self._early, Failed):
                raise self._early.error
        except BaseException:
            self.cancel()
            raise

    def __iter__(self) -> Iterator[Delta]:
        try:
            yield from self._deltas()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free the places of the jobs that have not ended."""
        if self._jobs:
            self._scheduler.cancel(list(self._jobs.values()))

    def _deltas(self) -> Iterator[Delta]:
        while self._jobs:
            event, self._early = self._early or self._wait(BEAT_EVERY_S), None
            if event is None:
                yield Beat()
                continue
            if isinstance(event, Failed):
                raise event.error
            if event.index in self._jobs:
                choice = self._choices[event.index]
                yield from choice.take(event)
                if choice.finish is not None:
                    self.finishes.append(choice.finish)
                    self._end(event)

    def _end(self, event: Event) -> None:
        job = self._jobs.pop(event.index)
        if not (isinstance(event, TokenEvent) and event.finish):
            # Ended by a stop string: the engine does not know yet.
            self._scheduler.cancel([job])

    def _wait(self, timeout_s: float) -> Event | None:
        """The next event, or None after ``timeout_s``. Asks every now and then whether the client is still there."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            event = self._scheduler.poll(self._events, min(left_s, ALIVE_EVERY_S))
            self._check_alive()
            if event is not None:
                return event
        return None

    def _check_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            if not self._alive():
                raise ClientGone


@dataclass(slots=True)
class _Choice:
    """One choice's way from tokens to deltas."""

    job: Job
    tokenizer: Tokenizer
    options: OutputOptions
    finish: Finish | None = None
    n_tokens: int = 0
    n_reasoning: int = 0
    n_cached: int = 0
    made_calls: bool = False
    detokenizer: Detokenizer = field(init=False)
    splitter: RegionSplitter = field(init=False)
    cutter: StopCutter = field(init=False)
    logprobs: _Logprobs = field(init=False)

    def __post_init__(self) -> None:
        chat = self.options.is_chat
        prompt = self.job.prompt
        context = () if chat else prompt.tokens
        self.detokenizer = Detokenizer(self.tokenizer.decode, self.tokenizer.hidden_ids, context)
        self.splitter = RegionSplitter(
            self.tokenizer.think if chat else None,
            self.tokenizer.tool_call if chat and self.options.tools else None,
            in_reasoning=prompt.in_reasoning,
        )
        self.cutter = StopCutter(self.options.stops)
        self.logprobs = _Logprobs(self.tokenizer)

    def take(self, event: Event) -> Iterator[Delta]:
        if isinstance(event, Started):
            self.n_cached = event.cached_tokens
        elif isinstance(event, TokenEvent):
            yield from self._take_token(event)

    def _take_token(self, event: TokenEvent) -> Iterator[Delta]:
        self.n_tokens += 1
        if event.finish != "stop":
            yield from self._feed(event)
        if event.finish is not None and not self.cutter.stopped:
            yield from self._pieces(self.splitter.flush())
            if not self.cutter.stopped:
                yield from self._text(self.cutter.flush())
        if event.finish is not None or self.cutter.stopped:
            self.finish = self._end(event)
            yield self.finish

    def _feed(self, event: TokenEvent) -> Iterator[Delta]:
        text = self.detokenizer.add(event.token)
        self.n_reasoning += self.splitter.kind == "reasoning"
        if event.logprob is not None and self.splitter.kind == "content":
            self.logprobs.add(event, text)
        pieces = self.splitter.feed(text)
        yield from self._pieces(pieces)
        if self.splitter.kind != "content":
            self.logprobs.drop()

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if self.cutter.stopped:
                return
            if piece.kind == "tool":
                yield from self._tool_calls(piece)
            elif piece.kind == "reasoning":
                yield Text(self.job.index, "reasoning", piece.text)
            else:
                yield from self._content(piece.text)

    def _content(self, text: str) -> Iterator[Delta]:
        yield from self._text(self.cutter.feed(text))

    def _text(self, text: str) -> Iterator[Delta]:
        logprobs = self.logprobs.take(len(text))
        if text:
            yield Text(self.job.index, "content", text, logprobs)

    def _tool_calls(self, piece: Piece) -> Iterator[Delta]:
        try:
            calls = self.tokenizer.parse_tool_call(piece.text, self.options.tools)
            found = [ToolCall(self.job.index, str(call["name"]), _arguments(call)) for call in calls]
        except (ValueError, KeyError) as error:
            log.info("a malformed tool call goes out as text: %s", error)
            yield from self._content(piece.raw)
            return
        self.made_calls = self.made_calls or bool(found)
        yield from found

    def _end(self, event: TokenEvent) -> Finish:
        reason: FinishReason = "stop" if self.cutter.stopped else event.finish or "stop"
        if self.made_calls and reason == "stop":
            reason = "tool_calls"
        usage = Usage(len(self.job.prompt.tokens), self.n_tokens, self.n_cached, self.n_reasoning)
        return Finish(self.job.index, reason, usage)


def _arguments(call: dict[str, Any]) -> str:
    arguments = call.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class _Logprobs:
    """Holds the log-probabilities of content tokens until the text that each one begins has gone out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._n_received = 0
        self._n_sent = 0
        # (position in the content at which the token's text begins, entry)
        self._waiting: list[tuple[int, TokenLogprob]] = []

    def add(self, event: TokenEvent, text: str) -> None:
        assert event.logprob is not None
        top = tuple(self._entry(token, logprob) for token, logprob in event.top_logprobs)
        self._waiting.append((self._n_received, self._entry(event.token, event.logprob, top)))
        self._n_received += len(text)

    def take(self, n_chars: int) -> tuple[TokenLogprob, ...]:
        """The entries that go with the next ``n_chars`` of the content."""
        self._n_sent += n_chars
        out = tuple(entry for start, entry in self._waiting if start < self._n_sent)
        del self._waiting[: len(out)]
        return out

    def drop(self) -> None:
        """What waits turned out to be a marker, not content."""
        self._waiting.clear()
        self._n_received = self._n_sent

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(self._tokenizer.decode([token]), self._tokenizer.token_bytes(token), logprob, top)
