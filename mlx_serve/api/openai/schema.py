"""From a request's bytes to a ChatRequest or a CompletionRequest, or an ApiError 400 that names the field.

Parse, don't validate: what the rest of the package takes can only be made here. Types are strict (a number in quotes is
no number), null counts as absent, fields that are not known are ignored, and fields that would change the answer but
are not served are refused. References: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/completions/create; the rest is mlx_lm.server's.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from mlx_serve.api.cost import parsing
from mlx_serve.api.fields import (
    MAX_TOP_LOGPROBS,
    AllowedIds,
    ContextSize,
    Float,
    LogitBias,
    Model,
    Pairs,
    Prompts,
    RepetitionPenalty,
    Seed,
    StopIds,
    Stops,
    Str,
    TemplateOptions,
    TextLogprobs,
    TopLogprobs,
    content_text,
    refuse,
)
from mlx_serve.api.openai import tools as tool_fields
from mlx_serve.api.scope import CacheSalt
from mlx_serve.api.structured import Structured
from mlx_serve.text.grammar import Function
from mlx_serve.values import ApiError, Sampling

MAX_N = 128
MAX_MESSAGES = 16_384
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets when it does not say: the command line's sampling flags, and a model's own defaults."""

    # None: as many as the context leaves room for.
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n_draft_tokens: int = 3


class _CalledFunction(Model):
    name: Str
    arguments: Str = "{}"


class _ToolCall(Model):
    id: Str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


def _content(value: Any, info: ValidationInfo) -> Any:
    # Only a result may hold what a text model cannot read: its client has no other result to give.
    is_result = info.data.get("role") in _RESULT_ROLES
    return value if value is None else content_text(value, describe_others=is_result)


_RESULT_ROLES = ("tool", "function")


class Message(Model):
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
    # mlx_lm.server and OpenRouter call it ``reasoning``, and clients send back what they were given.
    reasoning_content: Str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        # An assistant's turn may be nothing but tool calls; OpenAI's older form of a result may be null.
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


class _StreamOptions(Model):
    include_usage: bool = False


# vLLM's fields that change the answer or its form and are not served, with the values that ask for nothing.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class Request(Structured):
    """The fields that OpenAI's endpoints share."""

    model: Str | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: Stops = Field(default_factory=list)
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    xtc_probability: Annotated[Float, Field(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[Float, Field(ge=0, le=1)] = 0.1
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: ContextSize = 20
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    presence_context_size: ContextSize | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_context_size: ContextSize | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None
    # vLLM's; of the priorities the smaller is earlier.
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: StopIds = Field(default_factory=list)
    allowed_token_ids: AllowedIds = None
    include_stop_str_in_output: bool = False
    priority: int = 0
    cache_salt: CacheSalt | None = None
    user: Str | None = None
    # mlx_lm.server's: a client may name the command line's draft model and adapters, and no others.
    draft_model: Str | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    adapters: Str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_not_served(cls, value: Any) -> Any:
        given = value if isinstance(value, dict) else {}
        for name in sorted(_NOT_SERVED.keys() & given.keys() - cls.model_fields.keys()):
            if given[name] is not None and given[name] not in _NOT_SERVED[name]:
                raise ApiError(400, f"This server does not serve '{name}'.", param=name)
        return value

    @model_validator(mode="after")
    def _check_allowed_ids(self) -> Request:
        # Together they could leave no token at all.
        if self.allowed_token_ids is not None and (self.min_tokens or self.ignore_eos):
            text = "'allowed_token_ids' cannot be combined with 'min_tokens' or 'ignore_eos'."
            raise ApiError(400, text, param="allowed_token_ids")
        return self

    def sampling(self, defaults: Defaults, top_logprobs: int | None, max_tokens: int) -> Sampling:
        """How tokens are chosen; what the request leaves out comes from ``defaults``."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(_or(self.top_k, defaults.top_k), 0),
            min_p=_or(self.min_p, defaults.min_p),
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            repetition_context_size=self.repetition_context_size,
            presence_penalty=_or(self.presence_penalty, defaults.presence_penalty),
            presence_context_size=self.presence_context_size,
            frequency_penalty=_or(self.frequency_penalty, defaults.frequency_penalty),
            frequency_context_size=self.frequency_context_size,
            logit_bias=tuple(self.logit_bias.items()),
            seed=self.seed,
            n_draft_tokens=_or(self.num_draft_tokens, defaults.n_draft_tokens),
            top_logprobs=top_logprobs,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        )


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_options(effort: Effort | None) -> dict[str, Any]:
    """A reasoning effort for the chat template. Templates know the efforts by name, but not the absence of any."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


# Of OpenAI's fields, those that only some of its own models have, or that its service keeps for itself, change nothing
# here and are ignored, as unknown ones are: user, metadata, store, service_tier, safety_identifier, prompt_cache_key,
# prompt_cache_retention, verbosity, prediction, web_search_options, moderation, and parallel_tool_calls without tools.


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    # At the first fault, or a body of a million faulty items would be a million errors to write down.
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    tools: Annotated[list[tool_fields.Tool], Field(max_length=MAX_TOOLS), FailFast()] = Field(default_factory=list)
    tool_choice: tool_fields.Choice = tool_fields.AUTO
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    modalities: Annotated[list[str], FailFast()] = Field(default_factory=lambda: ["text"])
    audio: Any = None
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
        """Whether the last message is the beginning of an answer, unless the request says that it is not one."""
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
        return effort_options(self.reasoning_effort) | self.chat_template_kwargs

    @property
    def wanted_tokens(self) -> int | None:
        """The request's own limit on output tokens; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_samples(self) -> int:
        """How many answers are generated."""
        return self.n

    @property
    def needed_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""
        return self.top_logprobs if self.logprobs else None


def _check_top_logprobs(top_logprobs: int, has_logprobs: bool) -> None:
    if top_logprobs > 0 and not has_logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if top_logprobs < 0 and has_logprobs:
        # To mlx_lm.server it means none, to vLLM all of the vocabulary, and to OpenAI nothing.
        raise ApiError(400, f"'top_logprobs' must be between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")


def _check_tool_messages(messages: list[Message]) -> None:
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
    def wanted_tokens(self) -> int | None:
        """The request's own limit on output tokens."""
        return self.max_tokens

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


R = TypeVar("R", bound=Model)


def parse(kind: type[R], body: bytes) -> R:
    """The request that ``body`` holds. Raises ApiError 400."""
    with parsing(body):
        return validated(kind, read_object(body))


def validated(kind: type[R], value: dict[str, Any]) -> R:
    """The request that a JSON object is. Raises ApiError 400."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _as_api_error(error) from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` holds. Raises ApiError 400 that says where it goes wrong (RFC 8259)."""
    try:
        # A byte order mark may be ignored (RFC 8259, 8.1); .NET's and PowerShell's writers put one in front.
        value = json.loads(body.removeprefix(codecs.BOM_UTF8).decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The request body is not UTF-8: bad byte at position {error.start}.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"The request body is not valid JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None
    except ValueError as error:  # NaN and Infinity; integers of thousands of digits
        raise ApiError(400, f"The request body is not valid JSON: {_number_fault(error)}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _number_fault(error: ValueError) -> str:
    text = str(error)
    return f"{text} is not a JSON number" if text in ("NaN", "Infinity", "-Infinity") else "a number is too long"


def _as_api_error(error: ValidationError) -> ApiError:
    """The first fault, in OpenAI's words where there are some."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = _param(fault["loc"])
    if fault["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    code = "invalid_type" if fault["type"].endswith("_type") else None
    return ApiError(400, f"Invalid value for '{param}': {fault['msg']}", param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as messages[0].role; what pydantic calls a union's branch ("list[str]") is left out."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part):
            out += f".{part}" if out else part
    return out
