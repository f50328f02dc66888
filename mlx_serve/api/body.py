"""From a request's bytes to a checked request of any dialect, or an ApiError 400 that names the field.

The bounds on lists, which all dialects share, are here too. Knows no dialect: each passes its schema, a ``Model``.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from mlx_serve.api.cost import parsing
from mlx_serve.api.fields import Model
from mlx_serve.values import ApiError

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024


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
    """The JSON object that ``body`` holds. Raises ApiError 400 that says where the JSON is invalid (RFC 8259)."""
    try:
        # Parsers may ignore a byte order mark (RFC 8259, 8.1). .NET and PowerShell write one.
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
    """The first fault, in OpenAI's wording if it has one for this fault."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = _param(fault["loc"])
    if fault["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    code = "invalid_type" if fault["type"].endswith("_type") else None
    return ApiError(400, f"Invalid value for '{param}': {fault['msg']}", param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as messages[0].role. Pydantic's names of union branches ("list[str]") are left out."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part):
            out += f".{part}" if out else part
    return out
