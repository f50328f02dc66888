"""A Responses request: the fields it shares with chat, and its own. Reference:
https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, model_validator

from mlx_serve.api.body import MAX_TOOLS
from mlx_serve.api.fields import Model, Pairs, Str, TemplateOptions, TopLogprobs, refuse
from mlx_serve.api.generation_request import ChatConversation, GenerationRequest
from mlx_serve.api.request_fields import ReasoningOptions, Request, effort_options, reasoning_tokens
from mlx_serve.api.responses.items import Items
from mlx_serve.api.responses.tools import AUTO, AllowedToolsField, OfferedTool, Tool, chosen
from mlx_serve.api.responses.truncation import truncated
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.values import ApiError

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# OpenAI's own limits.
_MAX_KEY_CHARS, _MAX_VALUE_CHARS = 64, 512


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > _MAX_KEY_CHARS or len(text) > _MAX_VALUE_CHARS for key, text in value.items()):
        refuse(f"Keys have at most {_MAX_KEY_CHARS} characters, values {_MAX_VALUE_CHARS}.")
    return value


class TextFormat(Model):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    # What can be enforced is enforced either way; if true, the rest is refused.
    strict: bool = False
    description: Str | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            refuse("The type 'json_schema' needs a 'schema'.")
        return self

    def rule(self) -> Rule | None:
        """For the grammar; None: any text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.type == "json_schema" else {"type": "object"}
        return Rule("json_schema", schema, "text.format", strict=self.strict)


class TextOptions(Model):
    """``verbosity`` is for models that have one."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class SummarizedReasoning(ReasoningOptions):
    """A ``summary`` is asked for by clients that show nothing else of the reasoning."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseRequest(Request):
    """POST /v1/responses."""

    # At the first fault, or a body of a million faulty items would be a million errors to write down.
    input: Items = Field(default_factory=list)
    instructions: Str | None = None
    previous_response_id: Str | None = None
    n: Literal[1] = 1
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    # OpenAI's limit on calls of its own tools, of which there are none here.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: AllowedToolsField = AUTO
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: SummarizedReasoning = SummarizedReasoning()
    top_logprobs: Annotated[TopLogprobs, Field(ge=0)] = 0
    include: Annotated[list[Str], FailFast()] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[Pairs, AfterValidator(_metadata)] = Field(default_factory=dict)
    store: bool = True
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: Str | None = None
    safety_identifier: Str | None = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)

    @model_validator(mode="after")
    def _served(self) -> ResponseRequest:
        if not self.input and self.previous_response_id is None:
            code = "missing_required_parameter"
            raise ApiError(400, "Missing required parameter: 'input'.", param="input", code=code)
        if self.background:
            text = "This server answers while the client waits: 'background' true is not served."
            raise ApiError(400, text, param="background")
        if self.conversation is not None:
            text = "This server keeps no conversations: use 'previous_response_id', or send all of the 'input'."
            raise ApiError(400, text, param="conversation")
        if self.prompt is not None:
            raise ApiError(400, "This server keeps no prompts: use 'instructions' and 'input'.", param="prompt")
        chosen(self.tool_choice, self.tools)
        return self

    def _format_rules(self) -> list[Rule]:
        rule = self.text.format.rule()
        return [*super()._format_rules(), *([rule] if rule is not None else [])]

    def offers(self) -> list[OfferedTool]:
        """The tools that the model is told of."""
        return chosen(self.tool_choice, self.tools)

    def must_call(self) -> list[Function]:
        """The functions of which the answer has to call one; none: it need not."""
        if self.tool_choice.mode != "required" or self.free_input() is not None:
            return []
        return [offer.function() for offer in self.offers()]

    def free_input(self) -> OfferedTool | None:
        """The custom tool whose input the whole text is: the only one that may be called, held to its own grammar."""
        found = self.offers() if self.tool_choice.mode == "required" else []
        return found[0] if len(found) == 1 and found[0].rule() is not None else None

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may make; None: any number."""
        return None if self.parallel_tool_calls else 1

    @property
    def template_options(self) -> dict[str, Any]:
        """What the request has for the chat template."""
        return effort_options(self.reasoning.effort) | self.chat_template_kwargs

    @property
    def reasoning_tokens(self) -> int | None:
        """The most tokens of reasoning; None: no such limit."""
        return reasoning_tokens(self.reasoning.max_tokens, self.chat_template_kwargs)

    @property
    def wants_summary(self) -> bool:
        """Whether the client looks for reasoning in the summary."""
        return (self.reasoning.summary or self.reasoning.generate_summary) is not None

    @property
    def wanted_tokens(self) -> int | None:
        """The request's own limit on output tokens."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def needed_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""
        return self.top_logprobs if LOGPROBS in self.include else None

    def as_conversation(self, messages: list[dict[str, Any]]) -> ChatConversation:
        """What the prompt is made of, given all messages of the conversation."""
        return ChatConversation(
            messages,
            "input",
            tools=[offer.definition() for offer in self.offers()],
            template_options=self.template_options,
            shorten=truncated if self.truncation == "auto" else None,
            reserved=self.wanted_tokens or 1,
        )

    def generation_request(self, messages: list[dict[str, Any]]) -> GenerationRequest:
        """All of it. Raises ApiError 400 when it demands several things of its text."""
        free_input, prompt = self.free_input(), self.as_conversation(messages)
        return GenerationRequest(
            self.model,
            prompt,
            self.given_sampling,
            self.wanted_tokens,
            top_logprobs=self.needed_logprobs,
            rule=free_input.rule() if free_input is not None else self.rule(),
            must_call=self.must_call(),
            tools=() if free_input is not None else prompt.tools,
            max_calls=self.max_calls,
            reasoning_tokens=self.reasoning_tokens,
            # The response at the end of a stream has them all.
            holds_logprobs=True,
            **self.shared(),
        )
