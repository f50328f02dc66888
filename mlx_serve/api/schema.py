"""From a request's bytes to a ChatRequest or a CompletionRequest, or an ApiError 400 that names the field.

Parse, don't validate: what the rest of the package takes can only be made here. Types are strict (a number in quotes is
no number), null counts as absent, fields that are not known are ignored, and fields that would change the answer but
are not served are refused. References: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/completions/create; the rest is mlx_lm.server's.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from mlx_serve.core import ApiError, Sampling

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5
MAX_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request gets when it does not say: the command line's sampling flags."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n_draft_tokens: int = 3


def _refuse(text: str) -> NoReturn:
    raise PydanticCustomError("refused", "{text}", {"text": text})


def _finite(value: float) -> float:
    if not math.isfinite(value):
        _refuse("Must be a finite number.")
    return value


def _text(value: str) -> str:
    # JSON can spell half a surrogate pair, which is no character: neither tokenizers nor UTF-8 take it.
    if any("\ud800" <= char <= "\udfff" for char in value):
        _refuse("Holds half of a surrogate pair, which is not a character.")
    return value


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        _refuse("Must be a string or a list of strings.")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        _refuse(f"At most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARS} characters.")
    if "" in stops:
        _refuse("A stop string must not be empty.")
    return stops


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        _refuse("Must be an object of token id to bias.")
    for token, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", token, re.ASCII):
            _refuse("Its keys must be token ids.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            _refuse("Its values must be numbers between -100 and 100.")
    return {int(token): float(bias) for token, bias in value.items()}


def _content(value: Any) -> Any:
    """Text parts join without anything between: one part gives exactly the prompt of the plain string."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse("Must be a string or a list of content parts.")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        _refuse("This server takes content parts of type 'text' only: its models read text.")
    text = part.get(kind)
    if not isinstance(text, str):
        _refuse(f"A content part of type '{kind}' must have a string '{kind}'.")
    return text


# What the tokenizer's apply_chat_template takes for itself; "chat_template" would be code from a client.
_RESERVED_OPTIONS = frozenset(
    [
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)


def _template_options(value: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(_RESERVED_OPTIONS & value.keys())
    if taken:
        _refuse(f"'{taken[0]}' is not for the chat template.")
    return value


Str = Annotated[str, AfterValidator(_text)]
Float = Annotated[float, AfterValidator(_finite)]
Stops = Annotated[list[Str], BeforeValidator(_stop_list)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]
Content = Annotated[Str | None, BeforeValidator(_content)]


class _Model(BaseModel):
    # Frozen and strict; what is not known is ignored, for clients send vendor extras.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class _CalledFunction(_Model):
    name: Str
    arguments: Str = "{}"


class _ToolCall(_Model):
    id: Str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(_Model):
    """One turn of a conversation, in any role; ``developer`` is the newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Str | None = None
    reasoning_content: Str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        # Only an assistant's turn may be without: it may be nothing but tool calls.
        if self.content is None and self.role != "assistant":
            _refuse("A message must have 'content'.")
        return self

    def as_dict(self) -> dict[str, Any]:
        """For the chat template."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role, "content": self.content}


class _Function(_Model):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Model):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function


class _StreamOptions(_Model):
    include_usage: bool = False


class _ResponseFormat(_Model):
    type: str

    @model_validator(mode="after")
    def _served(self) -> _ResponseFormat:
        if self.type != "text":
            _refuse("This server does not constrain its output yet: only {'type': 'text'} is served.")
        return self


class _Request(_Model):
    """The fields that chat and plain completions share."""

    model: Str | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: Stops = []
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    xtc_probability: Annotated[Float, Field(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[Float, Field(ge=0, le=1)] = 0.1
    repetition_penalty: Annotated[Float, Field(ge=0, le=100)] = 0.0
    repetition_context_size: Annotated[int, Field(ge=0)] = 20
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    presence_context_size: Annotated[int, Field(ge=0)] = 20
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    frequency_context_size: Annotated[int, Field(ge=0)] = 20
    logit_bias: LogitBias = {}
    seed: int | None = None
    user: Str | None = None
    # mlx_lm.server's: a client may name the command line's draft model and adapters, and no others.
    draft_model: Str | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    adapters: Str | None = None

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
            repetition_penalty=self.repetition_penalty,
            repetition_context_size=self.repetition_context_size,
            presence_penalty=self.presence_penalty,
            presence_context_size=self.presence_context_size,
            frequency_penalty=self.frequency_penalty,
            frequency_context_size=self.frequency_context_size,
            logit_bias=tuple(self.logit_bias.items()),
            seed=self.seed,
            n_draft_tokens=_or(self.num_draft_tokens, defaults.n_draft_tokens),
            top_logprobs=top_logprobs,
        )


T = TypeVar("T")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: list[Tool] = []
    tool_choice: Any = "auto"
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_options)] = {}
    role_mapping: dict[str, Str] | None = None

    @model_validator(mode="after")
    def _served(self) -> ChatRequest:
        if self.tool_choice not in ("auto", "none"):
            raise ApiError(400, "This server serves tool_choice 'auto' and 'none' only.", param="tool_choice")
        if self.top_logprobs > 0 and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def wanted_tokens(self) -> int | None:
        """The request's own limit on output tokens; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token's log-probabilities come with; None: not asked for."""
        return self.top_logprobs if self.logprobs else None


def _prompts(value: Any) -> Any:
    """One string, one list of token ids, or a list of either: always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        _refuse("Must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.")
    prompts = [value] if all(_is_id(item) for item in value) else value
    if len(prompts) > MAX_PROMPTS:
        _refuse(f"At most {MAX_PROMPTS} prompts.")
    if all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    if not all(isinstance(prompt, list) and prompt and all(_is_id(item) for item in prompt) for prompt in prompts):
        _refuse("Must be strings only, or lists of token ids only.")
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text_logprobs(value: Any) -> Any:
    # An integer is OpenAI's; true and false are mlx_lm.server's.
    if isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= MAX_TEXT_LOGPROBS):
        return value
    _refuse(f"Must be an integer between 0 and {MAX_TEXT_LOGPROBS}.")


# OpenAI's default for plain completions, unlike chat's.
COMPLETION_MAX_TOKENS = 16


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[list[Str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[bool | int | None, BeforeValidator(_text_logprobs)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _served(self) -> CompletionRequest:
        if self.suffix:
            raise ApiError(400, "This server does not fill in the middle: 'suffix' is not served.", param="suffix")
        if self.best_of is not None and self.best_of != self.n:
            raise ApiError(400, "This server does not serve 'best_of' other than 'n'.", param="best_of")
        if self.echo and self.wanted_logprobs is not None:
            raise ApiError(400, "This server does not serve 'echo' with 'logprobs'.", param="echo")
        if self.n * len(self.prompt) > MAX_N:
            raise ApiError(400, f"'n' times the number of prompts must be at most {MAX_N}.", param="n")
        return self

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


R = TypeVar("R", bound=_Request)


def parse(kind: type[R], body: bytes) -> R:
    """The request that ``body`` holds. Raises ApiError 400."""
    try:
        return kind.model_validate(read_object(body))
    except ValidationError as error:
        raise _as_api_error(error) from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` holds. Raises ApiError 400 that says where it goes wrong (RFC 8259)."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
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
