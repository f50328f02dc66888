"""From jobs to deltas: submit, detokenize, split and cut; and cancel the remaining jobs when the consumer stops.

    TokenEvent -> Detokenizer -> Splitter -> StopCutter (content only) -> Text
                                        \\-> names, arguments          -> ToolCallStart, ToolCallArguments

One generator for streaming and not streaming. Closing it, at any point, frees the places of its jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_serve.api.running_jobs import RunningJobs
from mlx_serve.api.token_logprobs import TokenLogprobs
from mlx_serve.engine.schedule.scheduler import Scheduler
from mlx_serve.metrics import Metrics, Trace
from mlx_serve.text.detokenizer import Detokenizer
from mlx_serve.text.formats import formats
from mlx_serve.text.splitter import Layout, RegionSplitter
from mlx_serve.text.stops import StopCutter
from mlx_serve.text.symbols import Piece, Splitter, Symbols
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import (
    Beat,
    Delta,
    Event,
    Finish,
    FinishReason,
    Job,
    PromptLogprobs,
    Started,
    Text,
    TokenEvent,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)

# The longest silence of a stream.
BEAT_EVERY_S = 10.0
# A stream's headers wait this long for a job to be admitted, so that a failure still gets its own status.
ADMISSION_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request wants the model's text to be processed."""

    stops: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    # A plain completion is all content, and continues its prompt's text.
    is_chat: bool = True
    # A grammar makes the whole content one call: {"name": ..., "arguments": {...}}.
    forced_call: bool = False
    # The text of each choice's prompt, when it comes first and with log-probabilities.
    echoes: tuple[str, ...] = ()
    # Further calls are dropped and end the answer. None: no limit.
    max_calls: int | None = None
    # Whether the stop string that ended the text stays in it.
    keeps_stop: bool = False


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
        trace: Trace | None = None,
    ) -> None:
        trace = trace if trace is not None else Trace(Metrics(), jobs[0].model, n_sequences=len(jobs))
        self._running = RunningJobs(scheduler, jobs, alive, trace)
        self._choices = {job.index: _Choice(job, tokenizer, options) for job in jobs}
        self.finishes: list[Finish] = []

    def submit(self) -> None:
        """Queue the jobs and wait, up to a limit, until the first of them runs or fails. Raises ApiError."""
        self._running.submit(ADMISSION_WAIT_S)

    def __iter__(self) -> Iterator[Delta]:
        try:
            with self._running:
                yield from self._deltas()
        finally:
            # Count the tokens that were made while a slow client did not read, and then left.
            for event in self._running.untaken():
                self._choices[event.index].n_tokens += isinstance(event, TokenEvent)

    @property
    def cached_tokens(self) -> int:
        """Of the first job's prompt; asked before the iteration, and 0 while it has not left the queue."""
        first = self._running.first
        return first.cached_tokens if isinstance(first, Started) else 0

    @property
    def usages(self) -> dict[int, Usage]:
        """The usage of each choice so far."""
        return {index: choice.usage() for index, choice in self._choices.items()}

    def cancel(self) -> None:
        """Free the places of the jobs that have not ended."""
        self._running.cancel()

    def _deltas(self) -> Iterator[Delta]:
        spoken_at = time.monotonic()
        while self._running:
            event = self._running.next(BEAT_EVERY_S)
            # Tokens may arrive without text: part of a marker, or of a tool call that is parsed at its end.
            if event is None or time.monotonic() - spoken_at >= BEAT_EVERY_S:
                spoken_at = time.monotonic()
                yield Beat()
            if event is not None and event in self._running:
                choice = self._choices[event.index]
                for delta in choice.take(event):
                    spoken_at = time.monotonic()
                    yield delta
                if choice.finish is not None:
                    self.finishes.append(choice.finish)
                    self._running.end(event, choice.finish.reason)


@dataclass(slots=True)
class _Choice:
    """Converts one choice's tokens to deltas."""

    job: Job
    tokenizer: Tokenizer
    options: OutputOptions
    finish: Finish | None = None
    n_tokens: int = 0
    n_reasoning: int = 0
    n_cached: int = 0
    n_calls: int = 0
    # Whether the model made more calls than allowed.
    has_enough: bool = False
    # How much text the splitter was given.
    position: int = 0
    controls: Mapping[int, str] = field(init=False)
    symbols: Symbols = field(init=False)
    detokenizer: Detokenizer = field(init=False)
    splitter: Splitter = field(init=False)
    cutter: StopCutter = field(init=False)
    logprobs: TokenLogprobs = field(init=False)

    def __post_init__(self) -> None:
        if self.options.is_chat:
            self._read_as_chat()
        else:
            self.controls, self.symbols = {}, Symbols({})
            self.splitter = RegionSplitter(Layout(), self.symbols)
            context = self.job.prompt.tokens
            self.detokenizer = Detokenizer(self.tokenizer, self.tokenizer.hidden_ids, context)
        self.cutter = StopCutter(self.options.stops, keeps_stop=self.options.keeps_stop)
        self.logprobs = TokenLogprobs(self.tokenizer)

    def _read_as_chat(self) -> None:
        found = formats(self.tokenizer)
        forced, tools = self.options.forced_call, self.options.tools
        self.controls, self.symbols = found.controls, found.symbols(() if forced else tools)
        in_reasoning = self.job.prompt.in_reasoning
        self.splitter = found.splitter(self.symbols, tools, in_reasoning=in_reasoning, forced_call=forced)
        context = self.job.prompt.tokens if self.job.prompt.continues else ()
        self.detokenizer = Detokenizer(self.tokenizer, (), context)

    def take(self, event: Event) -> Iterator[Delta]:
        if isinstance(event, Started):
            self.n_cached = event.cached_tokens
        elif isinstance(event, PromptLogprobs):
            yield self._echo(event)
            if event.is_last:
                self.finish = Finish(self.job.index, "length", Usage(len(self.job.prompt.tokens), 0))
                yield self.finish
        elif isinstance(event, TokenEvent):
            yield from self._take_token(event)

    def _echo(self, event: PromptLogprobs) -> Text:
        tokens = self.job.prompt.tokens
        # An empty prompt has no first token.
        entries = [self.logprobs.entry(token, None) for token in tokens[:1]]
        for token, (logprob, top) in zip(tokens[1:], event.logprobs, strict=True):
            entries.append(self.logprobs.entry(token, logprob, top))
        return Text(self.job.index, "content", self.options.echoes[self.job.index], tuple(entries))

    def _take_token(self, event: TokenEvent) -> Iterator[Delta]:
        self.n_tokens += 1
        finish = "stop" if self._is_stop(event.token) else event.finish
        if finish != "stop":
            yield from self._pieces(self._feed(event))
        if finish is not None and not self._is_over():
            yield from self._pieces(self.splitter.flush(cut=finish == "length"))
            if not self._is_over():
                yield from self._text(self.cutter.flush())
        if finish is not None or self._is_over():
            self.finish = self._end(finish)
            yield self.finish

    def _is_stop(self, token: int) -> bool:
        """Whether it is one of the request's own end tokens, which count behind its ``min_tokens``."""
        sampling = self.job.sampling
        return token in sampling.stop_token_ids and self.n_tokens > sampling.min_tokens

    def _is_over(self) -> bool:
        return self.cutter.stopped or self.has_enough

    def _feed(self, event: TokenEvent) -> list[Piece]:
        self.n_reasoning += self.splitter.region == "reasoning"
        if event.token in self.controls:
            self.detokenizer.interrupt()
            text = self.symbols.char(event.token)
        else:
            text = self.detokenizer.add(event.token)
        if event.logprob is not None and (text or event.token not in self.tokenizer.hidden_ids):
            self.logprobs.add(event, self.position, self.position + len(text))
        self.position += len(text)
        return self.splitter.feed(text)

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            if self._is_over():
                return
            if piece.kind == "content":
                self.logprobs.place(piece)
                yield from self._text(self.cutter.feed(piece.text))
            else:
                # A stop string does not match across anything but content.
                yield from self._text(self.cutter.flush())
                yield from self._other(piece)

    def _other(self, piece: Piece) -> Iterator[Delta]:
        index = self.job.index
        if piece.kind == "reasoning":
            self.logprobs.drop(piece.end)
            yield Text(index, "reasoning", piece.text)
        elif piece.kind == "call":
            self.has_enough = self.n_calls == self.options.max_calls
            if not self.has_enough:
                self.n_calls += 1
                yield ToolCallStart(index, self.n_calls - 1, piece.text)
        else:
            yield ToolCallArguments(index, self.n_calls - 1, piece.text)

    def _text(self, text: str) -> Iterator[Delta]:
        logprobs = self.logprobs.take(len(text))
        if text:
            yield Text(self.job.index, "content", text, logprobs)

    def _end(self, finish: Literal["stop", "length"] | None) -> Finish:
        reason: FinishReason = "stop" if self._is_over() else finish or "stop"
        if self.n_calls and reason == "stop":
            reason = "tool_calls"
        return Finish(self.job.index, reason, self.usage(), self.cutter.match)

    def usage(self) -> Usage:
        """So far."""
        # Right drafts behind the stop string that ended the answer do not count.
        n_accepted = min(self.job.n_accepted, self.n_tokens)
        n_prompt = len(self.job.prompt.tokens)
        return Usage(n_prompt, self.n_tokens, self.n_cached, self.n_reasoning, n_accepted, self.job.n_rejected)
