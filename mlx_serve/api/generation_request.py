"""A request in a form that all dialects share: a dialect's schema makes it, ``pipeline`` answers it.

Values alone; knows no dialect, no model and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mlx_serve.text.grammar import Function, Rule
from mlx_serve.text.prompt import ChatText
from mlx_serve.text.tokenizer import Tokenizer
from mlx_serve.values import Check, Prompt

Messages: TypeAlias = Sequence[dict[str, Any]]
# Makes a prompt within a number of tokens by leaving out messages.
Shorten: TypeAlias = Callable[[Messages, Callable[[Messages], ChatText], Tokenizer, Check, int], Prompt]


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """Messages in OpenAI's form, and what else the chat template is given. ``param``: their field, for errors.

    ``last_is_begun``: whether the last message is the beginning of the answer; "allowed": if the template can do it.
    ``is_open``: the prompt ends with the opening of an answer. ``shorten`` makes a prompt of a conversation that is
    longer than the context, with room for ``reserved`` tokens of the answer; None: it is refused.
    """

    messages: Messages
    param: str = "messages"
    tools: Sequence[dict[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    role_mapping: Mapping[str, str] | None = None
    last_is_begun: Literal["no", "allowed", "yes"] = "no"
    is_open: bool = True
    shorten: Shorten | None = None
    reserved: int = 1


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """Plain prompts, as text or token ids. ``kept_tokens``: keep only the last so many of each; -1: as many as fit.

    ``special``: a text gets a start token. ``is_echoed``: each prompt comes before its answers.
    """

    prompts: Sequence[str | list[int]]
    kept_tokens: int | None = None
    special: bool = True
    is_echoed: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for answers.

    ``sampling`` has the fields of ``values.Sampling`` that it gives; what it leaves out is the server's to say.
    ``limit``: the most tokens of an answer; None: it does not say. ``top_logprobs``: how many alternatives come with
    each token; None: no log-probabilities; ``prompt_logprobs`` is the same for the tokens of an echoed prompt.
    """

    model: str | None
    prompt: ChatConversation | PlainTexts
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    # Answers for each prompt.
    n_samples: int = 1
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    # What the text must be; or the functions of which the answer has to call one.
    rule: Rule | None = None
    must_call: Sequence[Function] = ()
    # The tools whose calls the server parses out of the text.
    tools: Sequence[dict[str, Any]] = ()
    max_calls: int | None = None
    # The most tokens of reasoning. None: no such limit.
    reasoning_tokens: int | None = None
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    is_stream: bool = False
    # Whether log-probabilities are collected until the end even for a stream.
    holds_logprobs: bool = False
    # Smaller is earlier.
    priority: int = 0
    cache_salt: str | None = None
    # A text that the answer may repeat; "": none.
    prediction: str = ""
    # These may only name the adapters and draft model that the server was started with.
    adapters: str | None = None
    draft_model: str | None = None

    @property
    def param(self) -> str:
        """The field that its prompts are in."""
        return self.prompt.param if isinstance(self.prompt, ChatConversation) else "prompt"
