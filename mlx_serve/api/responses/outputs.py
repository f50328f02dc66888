"""The output items of a response and the events of each, in OpenAI's order. Knows no deltas and no sequence numbers.

Each kind has ``opening``, ``add`` for a piece of text, ``closing``, and the ``item`` as it is at any time. Reference:
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from mlx_serve.api.responses.freetext import FreeText
from mlx_serve.api.responses.items import new_id, seal
from mlx_serve.api.shapes import chat_logprobs, new_call_id
from mlx_serve.values import TokenLogprob

Event: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One item, which grows. ``index`` is its place in the output."""

    kind: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id(self.kind)
        self.status: Status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    @abstractmethod
    def item(self) -> dict[str, Any]:
        """The item as it is now."""

    def opening(self) -> Iterator[Event]:
        """The events with which it begins."""
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.item()}

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """The events of a piece of its text."""
        self._texts.append(text)
        yield self._delta(text)

    def closing(self, status: Status) -> Iterator[Event]:
        """The events with which it ends."""
        self.status = status
        yield from self._done()
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.item()}

    @abstractmethod
    def _delta(self, text: str) -> Event: ...

    @abstractmethod
    def _done(self) -> Iterator[Event]: ...

    def _event(self, event: str, /, **fields: Any) -> Event:
        return {"type": f"response.{event}", "item_id": self.id, "output_index": self.index, **fields}


class MessageItem(OutputItem):
    """The answer's words."""

    kind = "message"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []

    def item(self) -> dict[str, Any]:
        """A message of one part, or of none while there is no text yet."""
        content = [] if self.status == "in_progress" and not self._texts else [self._part()]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def opening(self) -> Iterator[Event]:
        """The item, and its part."""
        yield from super().opening()
        yield self._event("content_part.added", content_index=0, part=self._part())

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """With the log-probabilities that were asked for."""
        self._texts.append(text)
        found = chat_logprobs(logprobs)
        entries = found["content"] if found else []
        self._logprobs += entries
        yield self._delta(text) | {"logprobs": entries}

    def _delta(self, text: str) -> Event:
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _done(self) -> Iterator[Event]:
        yield self._event("output_text.done", content_index=0, text=self.text, logprobs=self._logprobs)
        yield self._event("content_part.done", content_index=0, part=self._part())

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}


class ReasoningItem(OutputItem):
    """The model's reasoning, as the item's content, or as its summary for clients that read only the summary.

    ``sealed``: the item also has ``encrypted_content``, the only form that some clients keep and send back.
    """

    kind = "reasoning"

    def __init__(self, index: int, *, as_summary: bool, sealed: bool) -> None:
        super().__init__(index)
        self._as_summary = as_summary
        self._sealed = sealed

    def item(self) -> dict[str, Any]:
        """With its text in one of the two places."""
        parts = [self._part()] if self._texts else []
        out: dict[str, Any] = {"id": self.id, "type": "reasoning", "summary": parts if self._as_summary else []}
        if not self._as_summary:
            out["content"] = parts
        if self._sealed:
            out["encrypted_content"] = seal(self.text)
        return out | {"status": self.status}

    def opening(self) -> Iterator[Event]:
        """The item, and its part."""
        yield from super().opening()
        yield self._part_event("added")

    def _delta(self, text: str) -> Event:
        if self._as_summary:
            return self._event("reasoning_summary_text.delta", summary_index=0, delta=text)
        return self._event("reasoning_text.delta", content_index=0, delta=text)

    def _done(self) -> Iterator[Event]:
        if self._as_summary:
            yield self._event("reasoning_summary_text.done", summary_index=0, text=self.text)
        else:
            yield self._event("reasoning_text.done", content_index=0, text=self.text)
        yield self._part_event("done")

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": self.text}

    def _part_event(self, which: str) -> Event:
        if self._as_summary:
            return self._event(f"reasoning_summary_part.{which}", summary_index=0, part=self._part())
        return self._event(f"content_part.{which}", content_index=0, part=self._part())


class CallItem(OutputItem):
    """A call of one of the client's tools."""

    def __init__(self, index: int, name: str, namespace: str | None) -> None:
        super().__init__(index)
        self._call_id = new_call_id()
        self._name = name
        self._namespace = namespace

    def _call(self, **fields: str) -> dict[str, Any]:
        out = {"id": self.id, "type": self.kind, "status": self.status, "call_id": self._call_id, "name": self._name}
        return out | ({"namespace": self._namespace} if self._namespace else {}) | fields


class FunctionCallItem(CallItem):
    """A call whose arguments are JSON."""

    kind = "function_call"

    def item(self) -> dict[str, Any]:
        """With its arguments so far."""
        return self._call(arguments=self.text)

    def closing(self, status: Status) -> Iterator[Event]:
        """A call without arguments has an empty object of them."""
        if status == "completed" and not self.text:
            yield from self.add("{}")
        yield from super().closing(status)

    def _delta(self, text: str) -> Event:
        return self._event("function_call_arguments.delta", delta=text)

    def _done(self) -> Iterator[Event]:
        yield self._event("function_call_arguments.done", name=self._name, arguments=self.text)


class CustomCallItem(CallItem):
    """A call with free text. The model writes it inside JSON, unless ``is_bare``."""

    kind = "custom_tool_call"

    def __init__(self, index: int, name: str, namespace: str | None, *, is_bare: bool) -> None:
        super().__init__(index, name, namespace)
        self._reader = None if is_bare else FreeText()

    def item(self) -> dict[str, Any]:
        """With its input so far."""
        return self._call(input=self.text)

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """As much of the input as is certain."""
        certain = text if self._reader is None else self._reader.feed(text)
        if certain:
            yield from super().add(certain)

    def closing(self, status: Status) -> Iterator[Event]:
        """With the rest of the input."""
        rest = "" if self._reader is None else self._reader.flush()
        if rest:
            yield from super().add(rest)
        yield from super().closing(status)

    def _delta(self, text: str) -> Event:
        return self._event("custom_tool_call_input.delta", delta=text)

    def _done(self) -> Iterator[Event]:
        yield self._event("custom_tool_call_input.done", input=self.text)
