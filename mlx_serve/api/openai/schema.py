"""From a request's bytes to a ChatRequest or a CompletionRequest, or an ApiError 400 that names the field.

Parse, don't validate: what the rest of the package takes can only be made here. Types are strict (a number in quotes is
no number), null counts as absent, fields that are not known are ignored, and fields that would change the answer but
are not served are refused. References: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/completions/create; the rest is mlx_lm.server's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, FailFast, Field, ValidationInfo, model_validator

from mlx_serve.api.body import MAX_MESSAGES, MAX_TOOLS
from mlx_serve.api.fields import (
    MAX_TOP_LOGPROBS,
    Model,
    Pairs,
    Prompts,
    Str,
    TemplateOptions,
    TextLogprobs,
    TopLogprobs,
    content_text,
    refuse,
)
from mlx_serve.api.generation_request import ChatConversation, GenerationRequest, PlainTexts
from mlx_serve.api.openai import tools as tool_fields
from mlx_serve.api.request_fields import (
    MAX_N,
    Effort,
    ReasoningOptions,
    ReasoningTokens,
    Request,
    effort_options,
    reasoning_tokens,
)
from mlx_serve.text.grammar import Function
from mlx_serve.values import ApiError


class _CalledFunction(Model):
    name: Str
    arguments: Str = "{}"


class _ToolCall(Model):
    id: Str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


def _content(value: Any, info: ValidationInfo) -> Any:
    # Only a tool's result may hold content that a text model cannot read, because its client cannot change it.
    is_result = info.data.get("role") in _RESULT_ROLES
    return value if value is None else content_text(value, describe_others=is_result)


_RESULT_ROLES = ("tool", "function")


class ChatMessage(Model):
    """One turn of a conversation, in any role.

    ``developer`` is the newer name of ``system``; ``function`` and ``function_call`` are the older ones of ``tool`` and
    ``tool_calls``.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Str | None, BeforeValidator(_content)] = None
    name: Str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Str | None = None
    function_call: _CalledFunction | None = None
    # mlx_lm.server and OpenRouter call this ``reasoning``, and clients send back the field that they received.
    reasoning_content: Str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        # An assistant's turn may consist of tool calls alone. OpenAI's older form of a result may be null.
        if self.content is None and self.role not in ("assistant", "function"):
            refuse("A message must have 'content'.")
        return self

    @property
    def makes_calls(self) -> bool:
        """Whether it calls tools."""
        return bool(self.tool_calls) or self.function_call is not None

    def as_dict(self) -> dict[str, Any]:
        """For the chat template."""
        out = self.model_dump(exclude_none=True)
        called = out.pop("function_call", None)
        if called is not None and not self.tool_calls:
            out["tool_calls"] = [{"id": "", "type": "function", "function": called}]
        if self.role == "function":
            out["tool_call_id"] = ""
        return {**out, "role": _NEW_NAMES.get(self.role, self.role), "content": self.content}


_NEW_NAMES = {"developer": "system", "function": "tool"}


class _Prediction(Model):
    """OpenAI's predicted output: a text that much of the answer will repeat."""

    type: Literal["content"]
    content: Annotated[Str, BeforeValidator(content_text)]


# rapid-mlx's name of the limit on the reasoning, vLLM's, llama.cpp's two, and that of Qwen's own service.
_REASONING_MAX_TOKENS = AliasChoices(
    "reasoning_max_tokens",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
    "thinking_budget",
)

# Of OpenAI's fields, those that only some of its own models have, or that its service keeps for itself, change nothing
# here and are ignored, as unknown ones are: user, metadata, store, service_tier, safety_identifier, prompt_cache_key,
# prompt_cache_retention, verbosity, web_search_options, moderation, and parallel_tool_calls without tools.


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    # At the first fault, or a body of a million faulty items would be a million errors to write down.
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    tools: Annotated[list[tool_fields.ChatTool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: tool_fields.ChatToolChoiceField = tool_fields.AUTO
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    reasoning_max_tokens: ReasoningTokens | None = Field(None, validation_alias=_REASONING_MAX_TOKENS)
    modalities: Annotated[list[str], FailFast()] = Field(default_factory=lambda: ["text"])
    audio: Any = None
    prediction: _Prediction | None = None
    functions: list[Any] = Field(default_factory=list)
    function_call: Any = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    role_mapping: Pairs | None = None
    # vLLM's: how the prompt ends.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _served(self) -> ChatRequest:
        self._check_ending()
        _check_top_logprobs(self.top_logprobs, self.logprobs)
        if self.modalities != ["text"]:
            raise ApiError(400, "This server serves 'modalities' ['text'] only.", param="modalities")
        if self.audio is not None:
            raise ApiError(400, "This server serves no 'audio': its models answer in text.", param="audio")
        if self.functions and self.function_call != "none":
            raise ApiError(400, "'functions' are not served any more: use 'tools'.", param="functions")
        _check_tool_messages(self.messages)
        tool_fields.check_choice(self.tool_choice, self.tools)
        return self

    def _check_ending(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            text = "'continue_final_message' and 'add_generation_prompt' exclude each other."
            raise ApiError(400, text, param="continue_final_message")
        last = self.messages[-1]
        if last.role != "assistant" or last.makes_calls:
            text = "'continue_final_message' needs an assistant's message without calls as the last one."
            raise ApiError(400, text, param="continue_final_message")

    @property
    def ends_in_answer(self) -> bool:
        """Whether the model continues the last message: as the request says, else if that is an assistant's text."""
        if self.continue_final_message is not None or self.add_generation_prompt is not None:
            return bool(self.continue_final_message)
        last = self.messages[-1]
        return len(self.messages) > 1 and last.role == "assistant" and not last.makes_calls

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        found = tool_fields.offered(self.tool_choice, self.tools)
        return [tool.model_dump(exclude_none=True) for _, tool in found]

    @property
    def must_call(self) -> list[Function]:
        """The functions of which the answer has to call one; none: it need not."""
        if self.tool_choice.mode != "required":
            return []
        return [tool_fields.as_function(*found) for found in tool_fields.offered(self.tool_choice, self.tools)]

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may make; None: any number."""
        return None if self.parallel_tool_calls else 1

    @property
    def template_options(self) -> dict[str, Any]:
        """What the request has for the chat template."""
        return effort_options(self.reasoning_effort or self.reasoning.effort) | self.chat_template_kwargs

    @property
    def reasoning_tokens(self) -> int | None:
        """The most tokens of reasoning; None: no such limit."""
        own, nested = self.reasoning_max_tokens, self.reasoning.max_tokens
        return reasoning_tokens(nested if own is None else own, self.chat_template_kwargs)

    @property
    def wanted_tokens(self) -> int | None:
        """The request's limit on output tokens. The newer field takes precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def needed_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""
        return self.top_logprobs if self.logprobs else None

    def as_conversation(self) -> ChatConversation:
        """What the prompt is made of."""
        return ChatConversation(
            [message.as_dict() for message in self.messages],
            tools=self.offered_tools,
            template_options=self.template_options,
            role_mapping=self.role_mapping,
            last_is_begun="yes" if self.continue_final_message else "allowed" if self.ends_in_answer else "no",
            is_open=self.add_generation_prompt is not False,
        )

    def generation_request(self) -> GenerationRequest:
        """All of it. Raises ApiError 400 when it demands several things of its text."""
        return GenerationRequest(
            self.model,
            self.as_conversation(),
            self.given_sampling,
            self.wanted_tokens,
            n_samples=self.n,
            top_logprobs=self.needed_logprobs,
            rule=self.rule(),
            must_call=self.must_call,
            tools=self.offered_tools,
            max_calls=self.max_calls,
            reasoning_tokens=self.reasoning_tokens,
            prediction=self.prediction.content if self.prediction is not None else "",
            **self.shared(),
        )


def _check_top_logprobs(top_logprobs: int, has_logprobs: bool) -> None:
    if top_logprobs > 0 and not has_logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if top_logprobs < 0 and has_logprobs:
        # -1 means "none" to mlx_lm.server and "the whole vocabulary" to vLLM. OpenAI does not define it.
        raise ApiError(400, f"'top_logprobs' must be between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")


def _check_tool_messages(messages: list[ChatMessage]) -> None:
    for i, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages[{i}].tool_call_id"
            text = f"Missing required parameter: '{param}'. It says which call a message of role 'tool' answers."
            raise ApiError(400, text, param=param, code="missing_required_parameter")


# OpenAI's default for plain completions, unlike chat's.
COMPLETION_MAX_TOKENS = 16


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: TextLogprobs = None
    top_logprobs: TopLogprobs = 0
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None
    # vLLM's: the last so many tokens of each prompt, or (-1) as many as fit; and whether a text gets a start token.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _served(self) -> CompletionRequest:
        if self.suffix:
            raise ApiError(400, "This server does not fill in the middle: 'suffix' is not served.", param="suffix")
        _check_top_logprobs(self.top_logprobs, self.logprobs is not None and self.logprobs is not False)
        self._check_best_of()
        if self.echo and self.truncate_prompt_tokens is not None:
            text = "'echo' and 'truncate_prompt_tokens' exclude each other."
            raise ApiError(400, text, param="truncate_prompt_tokens")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "'max_tokens' 0 needs 'echo': true.", param="max_tokens")
        if self.n_samples * len(self.prompt) > MAX_N:
            text = f"'n' (or 'best_of') times the number of prompts must be at most {MAX_N}."
            raise ApiError(400, text, param="n" if self.best_of is None else "best_of")
        return self

    def _check_best_of(self) -> None:
        if self.best_of is None or self.best_of == self.n:
            return
        if self.best_of < self.n:
            raise ApiError(400, "'best_of' must be at least 'n'.", param="best_of")
        if self.stream or self.wanted_logprobs is not None:
            raise ApiError(400, "'best_of' over 'n' can't be had as a stream or with 'logprobs'.", param="best_of")

    @property
    def n_samples(self) -> int:
        """How many answers each prompt gets, of which ``n`` are given."""
        return self.best_of or self.n

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""
        if isinstance(self.logprobs, bool):
            return self.top_logprobs if self.logprobs else None
        return self.logprobs

    @property
    def needed_logprobs(self) -> int | None:
        """As ``wanted_logprobs``, but for those too that choose the best answers."""
        return 0 if self.n_samples > self.n else self.wanted_logprobs

    @property
    def only_echoes(self) -> bool:
        """Whether the request wants its prompts back and nothing computed."""
        return self.max_tokens == 0 and self.wanted_logprobs is None

    def generation_request(self) -> GenerationRequest:
        """All of it. Raises ApiError 400 when it demands several things of its text."""
        return GenerationRequest(
            self.model,
            PlainTexts(self.prompt, self.truncate_prompt_tokens, self.add_special_tokens, self.echo),
            self.given_sampling,
            COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            n_samples=self.n_samples,
            top_logprobs=self.needed_logprobs,
            prompt_logprobs=self.wanted_logprobs if self.echo else None,
            rule=self.rule(),
            **self.shared(),
        )
