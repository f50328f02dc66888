"""The types of request fields: strict, bounded, and refused in words that a client's developer understands.

A number in quotes is no number, null counts as absent, and fields that are not known are ignored. Knows no endpoint.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_serve.values import RESERVED_TEMPLATE_OPTIONS

MAX_STOPS = 64
# Each entry is checked one by one, and each step adds all of them to the logits.
MAX_BIASES = 16_384
# As many as the largest vocabularies have.
MAX_ALLOWED_IDS = 2**18
MAX_STOP_CHARS = 1024
MAX_TEXT_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 128
# OpenAI's.
MAX_INPUTS = 2048
MAX_PAIRS = 16


def fault(text: str) -> PydanticCustomError:
    """What is wrong with the field that is being validated."""
    return PydanticCustomError("refused", "{text}", {"text": text})


def refuse(text: str) -> NoReturn:
    """Fault the field that is being validated."""
    raise fault(text)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        refuse("Must be a finite number.")
    return value


def _text(value: str) -> str:
    # JSON can encode half a surrogate pair. It is not a character, and tokenizers and UTF-8 reject it.
    try:
        # Encoding finds it a hundred times faster than a check of each character.
        value.encode()
    except UnicodeEncodeError:
        refuse("Holds half of a surrogate pair, which is not a character.")
    return value


def _few_pairs(value: Any) -> Any:
    # The length is checked before the pairs: a million faulty pairs would produce a million errors.
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        refuse(f"At most {MAX_PAIRS} pairs.")
    return value


def _object(value: dict[str, Any]) -> dict[str, Any]:
    _text(json.dumps(value, ensure_ascii=False))
    return value


def _repetition_penalty(value: float) -> float:
    # The penalty divides and multiplies logits in float32. Near 0 the results are infinities, then NaN.
    if value != 0 and not 0.01 <= value <= 100:
        refuse("Must be 0 (off) or between 0.01 and 100.")
    return value


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        refuse("Must be a string or a list of strings.")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        refuse(f"At most {MAX_STOPS} stop strings of at most {MAX_STOP_CHARS} characters.")
    # Forms send an empty field as an empty string, which would match before the first token.
    return [stop for stop in stops if stop]


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        refuse("Must be an object of token id to bias.")
    if len(value) > MAX_BIASES:
        refuse(f"At most {MAX_BIASES} tokens.")
    for token, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", token, re.ASCII):
            refuse("Its keys must be token ids.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            refuse("Its values must be numbers between -100 and 100.")
    return {int(token): float(bias) for token, bias in value.items()}


def content_text(value: Any, *, describe_others: bool = False) -> str:
    """The text of a message's content. Parts are joined without a separator, so one part equals a plain string.

    A part that is not text is refused, or with ``describe_others`` replaced by a note for the model.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("Must be a string or a list of content parts.")
    return "".join(_part_text(part, describe_others) for part in value)


def _part_text(part: Any, describe_others: bool) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        if describe_others and isinstance(kind, str):
            return omitted(kind)
        refuse("This server takes content parts of type 'text' only: its models read text.")
    text = part.get(kind)
    if not isinstance(text, str):
        refuse(f"A content part of type '{kind}' must have a string '{kind}'.")
    return text


def omitted(kind: str) -> str:
    """The note that replaces a picture or file in a tool's result, which the client cannot change."""
    return f"[{kind[:80]} omitted: this model reads text only]"


def _template_options(value: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(RESERVED_TEMPLATE_OPTIONS & value.keys())
    if taken:
        refuse(f"'{taken[0]}' is not for the chat template.")
    return value


def _prompts(value: Any) -> Any:
    """One string, one list of token ids, or a list of either: always as a list of prompts."""
    if isinstance(value, str):
        return [value]
    prompts = _texts(value)
    if len(prompts) > MAX_PROMPTS:
        refuse(f"At most {MAX_PROMPTS} prompts.")
    if [] in prompts:
        refuse("Must be strings only, or lists of token ids only.")
    return prompts


def _inputs(value: Any) -> Any:
    """As prompts, but more of them, and none of them empty."""
    inputs = [value] if isinstance(value, str) else _texts(value)
    if len(inputs) > MAX_INPUTS:
        refuse(f"At most {MAX_INPUTS} inputs.")
    empty = next((i for i, one in enumerate(inputs) if not one), None)
    if empty is not None:
        refuse("Must not be empty." if value == "" else f"Input {empty} is empty.")
    return inputs


def _texts(value: Any) -> list[Any]:
    """One list of token ids, or a list of strings or of such lists: as a list of strings or of token ids."""
    if not isinstance(value, list) or not value:
        refuse("Must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.")
    texts = [value] if all(_is_id(item) for item in value) else value
    if all(isinstance(text, str) for text in texts):
        return texts
    if not all(isinstance(text, list) and all(_is_id(item) for item in text) for text in texts):
        refuse("Must be strings only, or lists of token ids only.")
    return texts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text_logprobs(value: Any) -> Any:
    # An integer is OpenAI's; true and false are mlx_lm.server's.
    if isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= MAX_TEXT_LOGPROBS):
        return value
    refuse(f"Must be an integer between 0 and {MAX_TEXT_LOGPROBS}.")


Str = Annotated[str, AfterValidator(_text)]
# The engine checks that the model has it.
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Any JSON object, with no half of a surrogate pair anywhere in it.
Object = Annotated[dict[str, Any], AfterValidator(_object)]
Pairs = Annotated[dict[str, Str], BeforeValidator(_few_pairs)]
Float = Annotated[float, AfterValidator(_finite)]
RepetitionPenalty = Annotated[Float, AfterValidator(_repetition_penalty)]
# mlx-lm slices by this number, and MLX's slices take 32 bits. A larger number would fail the whole batch's step.
ContextSize = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOPS), FailFast()]
AllowedIds = Annotated[list[TokenId] | None, Field(min_length=1, max_length=MAX_ALLOWED_IDS), FailFast()]
Stops = Annotated[list[Str], BeforeValidator(_stop_list)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]
# OpenAI's and vLLM's range. MLX's random keys have 64 bits, so a larger seed would equal another one.
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TemplateOptions = Annotated[Object, AfterValidator(_template_options)]
Prompts = Annotated[list[Str] | list[list[int]], BeforeValidator(_prompts)]
Inputs = Annotated[list[Str] | list[list[int]], BeforeValidator(_inputs)]
# -1 is mlx_lm.server's default, which its clients send.
TopLogprobs = Annotated[int, Field(ge=-1, le=MAX_TOP_LOGPROBS)]
TextLogprobs = Annotated[bool | int | None, BeforeValidator(_text_logprobs)]


class Model(BaseModel):
    """Frozen and strict. Unknown fields are ignored, because clients send vendor extras."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
