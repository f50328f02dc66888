"""The format of a model's answers, derived once from its tokenizer: regions, tool calls, control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from mlx_serve.text.calls import harmony
from mlx_serve.text.calls.descriptions import CallFormat, Offer
from mlx_serve.text.calls.forced import ForcedCall
from mlx_serve.text.calls.registry import HERMES, call_format, new_bare_reader, new_reader
from mlx_serve.text.marker_tokens import marker_of
from mlx_serve.text.splitter import Calls, Layout, RegionSplitter
from mlx_serve.text.symbols import Region, Splitter, Symbols, is_symbol
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import TAG, Gate, Marker, ReasoningBudget

# Markers of reasoning that mlx-lm does not know or that are plain text: what opens and closes it, and other markers
# that the template puts around an answer. The first row whose markers are all in the template applies.
_THINK: tuple[tuple[str, ...], ...] = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|think|>", "<|end|>", "<|begin|>assistant", "<|content|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("<longcat_think>", "</longcat_think>"),
    ("<think>", "</think>", "<answer>", "</answer>"),
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("◁think▷", "◁/think▷"),
    ("<|start_think|>", "<|end_think|>"),
    ("<|thought_start|>", "<|thought_end|>"),
)
_REGIONS: Mapping[str, Region] = {"normal": "content", "reasoning": "reasoning", "tool": "call", "header": "header"}
_MAX_KEPT = 16
# A template that opens the reasoning does so at the end of the prompt.
_TAIL_TOKENS = 16


@dataclass(frozen=True)
class Formats:
    """How a model writes.

    ``controls``: the control tokens that have a meaning in an answer, and those that must not be visible. An added
    token that is ordinary text ("\\n\\n" in some vocabularies) is not one of them.
    """

    tokenizer: Tokenizer
    is_harmony: bool
    think: tuple[str, str] | None
    # Other markers around an answer that are not part of it.
    wrapping: tuple[str, ...]
    calls: CallFormat
    controls: Mapping[int, str]
    # The control tokens that markers consist of.
    in_markers: Mapping[int, str]

    def symbols(self, tools: Sequence[dict[str, Any]]) -> Symbols:
        """Control tokens as characters, for one answer. Without tools, a call's markers are shown as
        text if possible.
        """
        of_calls = {token for token, text in self.in_markers.items() if text in self.calls.opening + self.calls.closing}
        shown = frozenset() if tools else frozenset(of_calls - self.tokenizer.special_ids)
        return Symbols(self.controls, self.in_markers, shown)

    def splitter(
        self, symbols: Symbols, tools: Sequence[dict[str, Any]], *, in_reasoning: bool, forced_call: bool = False
    ) -> Splitter:
        """A new splitter for one answer. ``forced_call``: its content is one tool call as JSON."""
        if forced_call:
            # gpt-oss may make a call in its own format before its content.
            own = tools if self.is_harmony else ()
            return ForcedCall(self.splitter(symbols, own, in_reasoning=in_reasoning))
        if self.is_harmony:
            return harmony.HarmonySplitter(symbols, [tool["function"]["name"] for tool in tools])
        return RegionSplitter(
            self._layout(symbols, with_calls=bool(tools)),
            symbols,
            calls=self._calls(symbols, tools) if tools else None,
            in_reasoning=in_reasoning,
        )

    def _calls(self, symbols: Symbols, tools: Sequence[dict[str, Any]]) -> Calls:
        offer = Offer(tools, lambda text: self.tokenizer.parse_tool_call(text, tools))
        closing = symbols.marker(self.calls.closing)
        return Calls(new_reader(self.calls, offer), new_bare_reader(self.calls, offer), closing)

    def ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt leaves the model inside its reasoning."""
        if self.think is None:
            return False
        tail = tokens[-_TAIL_TOKENS:]
        controls = {token for token, text in self.in_markers.items() if text in self.think[0]}
        is_real = not controls or not controls.isdisjoint(tail)
        return is_real and self.tokenizer.decode(tail).rstrip().endswith(self.think[0])

    def gate(self, *, in_reasoning: bool, with_calls: bool) -> Gate:
        """Where a grammar for the content applies: after the reasoning, and not in the text of a call."""
        if self.is_harmony:
            return Gate(waiting=True, until=self._ids(harmony.FINAL))
        exits = self._ids(self.calls.opening)[:1] if with_calls else ()
        exits = exits if self.controls.keys() >= set(exits) else ()
        if self.think is None:
            return Gate(exits=exits)
        detours = self._ids(self.think[0])[:1]
        return Gate(waiting=in_reasoning, until=self._ids(self.think[1]), detours=detours, exits=exits)

    def reasoning_budget(self, n_tokens: int, *, in_reasoning: bool, may_call: bool) -> ReasoningBudget | None:
        """What closes the reasoning after ``n_tokens``. None: this model does not think.

        ``may_call``: a call may follow instead of text.
        """
        if self._reasoning_markers is None:
            return None
        opening, ending = self._reasoning_markers
        if not self.is_harmony:
            assert self.think is not None
            return ReasoningBudget(n_tokens, in_reasoning, opening, ending, self._ids(self.think[1]))
        # A call is a message of its own, so the next message may be of any kind but reasoning.
        closing = self._ids(harmony.NEXT_MESSAGE if may_call else harmony.NEXT_IS_FINAL)
        not_next = self._ids(harmony.ANALYSIS)[:1] if may_call else ()
        return ReasoningBudget(n_tokens, in_reasoning, opening, ending, closing, reopens=True, not_next=not_next)

    @cached_property
    def _reasoning_markers(self) -> tuple[Marker, Marker] | None:
        """What opens the reasoning, and what ends it. Takes up to a second for a large vocabulary, once."""
        if self.is_harmony:
            return self._marker(harmony.OPENS_ANALYSIS), self._marker(harmony.END)
        return None if self.think is None else (self._marker(self.think[0]), self._marker(self.think[1]))

    def _marker(self, text: str) -> Marker:
        symbols = Symbols(self.controls, self.in_markers)
        found = symbols.marker(text)

        def spelled(token: int) -> bytes:
            if token not in self.controls:
                return self.tokenizer.token_bytes(token)
            # Control tokens of other markers get characters too, which are not in this one.
            return symbols.char(token).encode("utf-8", "surrogatepass") if token in self.in_markers else b""

        # A marker of control tokens alone is spelled in one way.
        is_text = any(not is_symbol(char) for char in found)
        tokens = {*range(self.tokenizer.n_tokens), *self.controls} if is_text else self.in_markers.keys()
        return marker_of(found.encode("utf-8", "surrogatepass"), ((token, spelled(token)) for token in sorted(tokens)))

    def _ids(self, marker: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(marker, special=False))

    def markers(self) -> list[str]:
        """All markers that have a meaning in an answer."""
        markers = [*(self.think or ()), *self.wrapping, *self.calls.openings(), self.calls.closing]
        markers += self.tokenizer.structural_markers
        markers += [marker for edges in self.tokenizer.transitions.values() for marker, _ in edges]
        return [*markers, *(harmony.CONTROLS if self.is_harmony else ())]

    def _layout(self, symbols: Symbols, *, with_calls: bool) -> Layout:
        """The markers of an answer, by the region in which each has a meaning (as in mlx-lm's state machine)."""
        edges: dict[Region, list[tuple[str, Region]]] = {"content": [], "reasoning": [], "call": [], "header": []}
        if self.think is not None:
            edges["content"].append((self.think[0], "reasoning"))
            edges["reasoning"].append((self.think[1], "content"))
        if with_calls:
            openings: list[tuple[str, Region]] = [(opening, "call") for opening in self.calls.openings()]
            # If a response format leads to calls by itself, calls begin nowhere else.
            is_free = not any(to == "tool" for found in self.tokenizer.transitions.values() for _, to in found)
            edges["content"] += openings if is_free else []
            edges["reasoning"] += openings
        edges["content"] += [(marker, "content") for marker in (*self.wrapping, *self.tokenizer.structural_markers)]
        for name, found in self.tokenizer.transitions.items():
            targets = [(marker, _REGIONS[to] if with_calls or to != "tool" else "content") for marker, to in found]
            edges[_REGIONS[name]] += targets
        initial = _REGIONS[self.tokenizer.initial_region or "normal"]
        return Layout({k: tuple((symbols.marker(m), to) for m, to in v) for k, v in edges.items()}, initial)


@lru_cache(maxsize=_MAX_KEPT)
def formats(tokenizer: Tokenizer) -> Formats:
    """The format of a model's answers. Kept, because a vocabulary has thousands of control tokens."""
    texts = frozenset(tokenizer.controls.values())
    template = tokenizer.template if tokenizer.has_chat_template else ""
    think, wrapping = _reasoning(tokenizer, template or "")
    has_tools = template is None or re.search(r"\btools\b", template) is not None
    has_calls = template is None or "tool_calls" in template
    found = Formats(
        tokenizer,
        is_harmony=texts.issuperset((harmony.START, harmony.CHANNEL, harmony.MESSAGE)),
        think=think,
        wrapping=wrapping,
        calls=call_format(tokenizer) if has_tools or has_calls else HERMES,
        controls={},
        in_markers={},
    )
    in_markers = _in_markers(tokenizer, found.markers())
    special = {token: tokenizer.controls[token] for token in tokenizer.special_ids if token in tokenizer.controls}
    return replace(found, controls=special | in_markers, in_markers=in_markers)


def _reasoning(tokenizer: Tokenizer, template: str) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """The markers that open and close the reasoning, and other markers around an answer."""
    texts = frozenset(tokenizer.controls.values())
    rows = [row for row in _THINK if all(marker in template for marker in row)]
    rows += [tokenizer.think] if tokenizer.think is not None else []
    rows += [row for row in _THINK if texts.issuperset(row[:2])]
    if not rows:
        return None, ()
    opening, closing, *wrapping = rows[0]
    return (opening, closing), tuple(wrapping)


def _in_markers(tokenizer: Tokenizer, markers: Sequence[str]) -> dict[int, str]:
    special = tokenizer.special_ids
    tags = {token: text for token, text in tokenizer.controls.items() if TAG.fullmatch(text) or token in special}
    return {token: text for token, text in tags.items() if any(text in marker for marker in markers)}
