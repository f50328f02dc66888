"""Splits answers in gpt-oss's format: an answer is several messages, each with a header that gives its purpose.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient ("to=") stands before or after the channel. A message is a call if its header names a tool as recipient,
whichever token ends it: the splitter never sees the last token of an answer. The format is described in
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mlx_serve.text.calls.readers import NamedCall
from mlx_serve.text.symbols import Piece, Region, Symbols, is_symbol, joined

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
FINAL = f"{CHANNEL}final{MESSAGE}"
# The channel of the reasoning, its header, and what goes from it to another message.
ANALYSIS = "analysis"
OPENS_ANALYSIS = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
NEXT_MESSAGE = f"{END}{START}assistant{CHANNEL}"
NEXT_IS_FINAL = f"{END}{START}assistant{FINAL}"
CONTROLS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
# A header without any control token so far: the role and the recipient, complete or not.
_BARE_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:t|to|to=\S*)?\s*")
_RUN = re.compile("[\ud800-\udfff]|[^\ud800-\udfff]+")


class HarmonySplitter:
    """Splits an answer that continues ``<|start|>assistant``. ``tools``: the names of the offered tools."""

    def __init__(self, symbols: Symbols, tools: Collection[str]) -> None:
        self._symbols = symbols
        self._tools = frozenset(tools)
        self._region: Region = "header"
        self._header = ""
        self._body: NamedCall | None = None
        # The text of a call that has not been sent yet. If it turns out to be no call, this text is sent as content.
        self._given = ""
        self._position = 0
        self._is_first_text = True
        self._said: set[Region] = set()

    @property
    def region(self) -> Region:
        """The region of the next text, as far as it is known."""
        return self._region

    def feed(self, text: str) -> list[Piece]:
        """Takes more of the answer and returns the pieces that are certain now."""
        out: list[Piece] = []
        for run in _RUN.findall(text):
            if is_symbol(run[0]):
                self._control(self._symbols.restore(run), out)
            else:
                self._text(run, out)
            self._position += len(run)
        return joined(out)

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Returns the remaining pieces. An answer without any header is content."""
        out: list[Piece] = []
        self._end_header(out)
        self._end_message(out, cut=cut)
        return joined(out)

    def _control(self, control: str, out: list[Piece]) -> None:
        if control == MESSAGE and self._region == "header":
            self._begin_message()
        elif control in (CHANNEL, CONSTRAIN) and self._region == "header":
            self._header += control
        elif control in (START, CHANNEL) or control in ENDS:
            self._end_header(out)
            self._end_message(out, cut=False)
            self._header = "" if control in ENDS else control
        # Any other control token has no meaning at this place and is dropped.

    def _text(self, text: str, out: list[Piece]) -> None:
        if self._region == "header" and (self._header + text).lstrip().startswith("{"):
            # A header never begins with "{": a grammar made the model begin with its JSON answer.
            text, self._header = self._header + text, ""
            self._enter("content")
        if self._region == "header":
            self._header += text
        elif self._body is not None:
            self._argument_text(text, out)
        else:
            self._say(text, out)

    def _begin_message(self) -> None:
        channel = _CHANNEL_NAME.search(self._header)
        recipient = _RECIPIENT.search(self._header)
        name = recipient[1] if recipient else ""
        if self._tools and (name.startswith("functions.") or name in self._tools):
            self._body, self._given = NamedCall(name.removeprefix("functions.")), ""
            self._enter("call")
        else:
            self._enter("reasoning" if channel and channel[1] == ANALYSIS else "content")

    def _enter(self, region: Region) -> None:
        self._region = region
        self._header = ""
        self._is_first_text = True

    def _say(self, text: str, out: list[Piece]) -> None:
        region = self._region
        assert region in ("content", "reasoning")
        if self._is_first_text and region in self._said:
            # Several messages of one kind are joined by line ends.
            out.append(Piece(region, "\n", self._position, self._position))
        self._is_first_text = False
        self._said.add(region)
        out.append(Piece(region, text, self._position, self._position + len(text)))

    def _argument_text(self, text: str, out: list[Piece]) -> None:
        assert self._body is not None
        n_left = self._body.feed(text, out)
        self._given += "" if self._body.n_calls else text
        if n_left is not None:
            left = self._body.left if self._body.n_calls else self._given
            self._body = None
            self._enter("content")
            self._say(left, out)

    def _end_header(self, out: list[Piece]) -> None:
        if self._region == "header" and not _is_header(self._header):
            start = self._position - len(self._header)
            out.append(Piece("content", self._header, start, self._position))
        self._header = ""

    def _end_message(self, out: list[Piece], *, cut: bool) -> None:
        if self._body is not None:
            self._body.close(out, cut=cut)
            if not self._body.n_calls and not cut:
                out.append(Piece("content", self._given, self._position - len(self._given), self._position))
        self._body = None
        self._region = "header"


def _is_header(text: str) -> bool:
    return START in text or CHANNEL in text or _BARE_HEADER.fullmatch(text) is not None
