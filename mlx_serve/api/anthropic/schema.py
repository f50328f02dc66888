"""From a request's bytes to a MessagesRequest, or an ApiError 400 that names the field.

Fields that are for Anthropic's own service change nothing here and are ignored, as unknown ones are: metadata,
service_tier, container, mcp_servers, context_management, inference_geo, speed, ``cache_control`` anywhere, and
``output_config`` but for its format. Reference: https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, FailFast, Field, Tag, model_validator

from mlx_serve.api.anthropic.blocks import MessageTurn, SystemContent, as_chat
from mlx_serve.api.body import MAX_MESSAGES, MAX_TOOLS
from mlx_serve.api.fields import Float, Model, Object, Stops, Str
from mlx_serve.api.generation_request import ChatConversation, GenerationRequest
from mlx_serve.api.scope import CacheSalt
from mlx_serve.text.grammar import Function, Rule
from mlx_serve.values import ApiError


class ClientTool(Model):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: Str | None = None
    input_schema: Object
    strict: bool = False

    def as_function(self) -> dict[str, Any]:
        """OpenAI's object for it, which chat templates take."""
        about = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.input_schema}}


class ServerTool(Model):
    """A tool that runs at Anthropic, or whose schema only their models know. The model is not offered it."""

    type: Str
    name: Str | None = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<custom>" if kind in (None, "custom") or "input_schema" in value else "<server>"


AnyTool: TypeAlias = Annotated[
    Annotated[ClientTool, Tag("<custom>")] | Annotated[ServerTool, Tag("<server>")], Discriminator(_tool_kind)
]


class ToolUseChoice(Model):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Model):
    """Whether the model thinks, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class _JsonSchemaFormat(Model):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(Model):
    format: _JsonSchemaFormat | None = None


class CountRequest(Model):
    """POST /v1/messages/count_tokens: what makes a prompt."""

    model: Str | None = None
    # At the first fault, or a body of a million faulty items would be a million errors to write down.
    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    system: SystemContent = Field(default_factory=list)
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: ToolUseChoice = ToolUseChoice()
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _served(self) -> CountRequest:
        self._check_tool_choice()
        if self.messages[-1].role == "assistant" and self.chat_messages[-1].get("tool_calls"):
            text = "The last message calls tools: their results must follow, in a message of role 'user'."
            raise ApiError(400, text, param="messages")
        return self

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice.type == "tool" and choice.name is None:
            text = "Missing required parameter: 'tool_choice.name'."
            raise ApiError(400, text, param="tool_choice.name", code="missing_required_parameter")
        if choice.type in ("any", "tool") and not self._chosen():
            text = "'tool_choice' asks for a call, but 'tools' has no tool for it."
            raise ApiError(400, text, param="tool_choice")

    def _chosen(self) -> list[tuple[int, ClientTool]]:
        """The tools that ``tool_choice`` leaves, with their places in the request."""
        choice = self.tool_choice
        tools = [(i, tool) for i, tool in enumerate(self.tools) if isinstance(tool, ClientTool)]
        return [(i, tool) for i, tool in tools if choice.type != "tool" or tool.name == choice.name]

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation for the chat template, in OpenAI's form."""
        return as_chat(self.system, self.messages)

    @property
    def is_prefilled(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, in OpenAI's form.

        All tools are listed even when one is forced: they stand at the prompt's beginning, which must not change.
        """
        if self.tool_choice.type == "none":
            return []
        return [tool.as_function() for tool in self.tools if isinstance(tool, ClientTool)]

    @property
    def template_options(self) -> dict[str, Any]:
        """The request's options for the chat template. Without ``thinking``, the model's default applies."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    def as_conversation(self) -> ChatConversation:
        """What the prompt is made of."""
        messages = self.chat_messages
        if self.is_prefilled:
            # The model continues the last turn only if that turn is nothing but text.
            messages[-1] = {"role": "assistant", "content": messages[-1]["content"]}
        return ChatConversation(
            messages,
            tools=self.offered_tools,
            template_options=self.template_options,
            last_is_begun="yes" if self.is_prefilled else "no",
        )


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Stops = Field(default_factory=list)
    temperature: Annotated[Float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    output_config: _OutputConfig = _OutputConfig()
    # The older name of output_config.format.
    output_format: _JsonSchemaFormat | None = None
    # vLLM's, as in chat.
    cache_salt: CacheSalt | None = None

    @property
    def must_call(self) -> list[Function]:
        """The functions of which the answer must call one. Empty: no call is required."""
        if self.tool_choice.type not in ("any", "tool"):
            return []
        return [
            Function(tool.name, tool.input_schema, f"tools[{i}].input_schema", tool.strict)
            for i, tool in self._chosen()
        ]

    @property
    def max_calls(self) -> int | None:
        """How many calls an answer may make; None: any number."""
        return 1 if self.tool_choice.disable_parallel_tool_use else None

    def rule(self) -> Rule | None:
        """The rule for the text. None when a call is required, since there is no text then."""
        wanted, param = self.output_config.format, "output_config.format.schema"
        if wanted is None:
            wanted, param = self.output_format, "output_format.schema"
        return Rule("json_schema", wanted.schema_, param) if wanted is not None and not self.must_call else None

    def generation_request(self) -> GenerationRequest:
        """All of it."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return GenerationRequest(
            self.model,
            self.as_conversation(),
            {name: value for name, value in given.items() if value is not None},
            self.max_tokens,
            rule=self.rule(),
            must_call=self.must_call,
            tools=self.offered_tools,
            max_calls=self.max_calls,
            reasoning_tokens=self.thinking.budget_tokens if self.thinking is not None else None,
            stops=self.stop_sequences,
            is_stream=self.stream,
            cache_salt=self.cache_salt,
        )
