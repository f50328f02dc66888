"""What a request demands of its text: OpenAI's response_format, and the fields of vLLM and llama.cpp, as one Rule.

vLLM: ``structured_outputs``, and its older ``guided_json``, ``guided_regex``, ``guided_choice``, ``guided_grammar``
(https://docs.vllm.ai/en/latest/features/structured_outputs/). llama.cpp: ``grammar``, ``json_schema``, and a
``schema`` in a response_format of type json_object. ``regex`` is like guided_regex.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlx_serve.api.fields import Model, Str, refuse
from mlx_serve.text.grammar import Rule
from mlx_serve.values import ApiError

# Further vLLM options that would change the text. They are refused.
_NOT_SERVED = ("structural_tag", "whitespace_pattern")
_MAX_CHOICES = 1_000

Choices = Annotated[list[Str], Field(min_length=1, max_length=_MAX_CHOICES)]


class _JsonSchema(Model):
    # OpenAI requires it; vLLM and llama-server do not, and nothing depends on it.
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    # A schema is enforced as far as possible either way. If true, a schema that cannot be enforced is refused.
    strict: bool = False
    description: Str | None = None


class ResponseFormat(Model):
    """OpenAI's; ``schema`` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            refuse("The type 'json_schema' needs a 'json_schema' with a 'schema'.")
        return self

    @property
    def schema_value(self) -> dict[str, Any] | None:
        """The JSON schema of the text; None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or {"type": "object"}

    @property
    def is_strict(self) -> bool:
        """Whether all of the schema has to be enforced."""
        return self.json_schema is None or self.json_schema.strict


class StructuredOutputs(Model):
    """vLLM's newer field: one of these."""

    json_: Annotated[Any, Field(alias="json")] = None
    regex: Str | None = None
    choice: Choices | None = None
    grammar: Str | None = None
    json_object: bool = False

    @model_validator(mode="before")
    @classmethod
    def _served(cls, value: Any) -> Any:
        asked = [name for name in _NOT_SERVED if isinstance(value, dict) and value.get(name) is not None]
        if asked:
            refuse(f"This server does not serve '{asked[0]}'.")
        return value


class Structured(Model):
    """The fields of a request that say what its text must be."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Str | None = None
    guided_choice: Choices | None = None
    guided_grammar: Str | None = None
    grammar: Str | None = None
    json_schema: Any = None
    regex: Str | None = None

    def rule(self) -> Rule | None:
        """The one thing that is demanded, or None. Raises ApiError 400 when there are several."""
        rules = [*self._format_rules(), *self._vllm_rules(), *self._other_rules()]
        if len(rules) > 1:
            text = f"Only one of '{rules[0].param}' and '{rules[1].param}' can say what the text must be."
            raise ApiError(400, text, param=rules[1].param)
        return rules[0] if rules else None

    def _format_rules(self) -> list[Rule]:
        asked = self.response_format
        schema = asked.schema_value if asked is not None else None
        if asked is None or schema is None:
            return []
        return [Rule("json_schema", schema, "response_format", asked.is_strict)]

    def _vllm_rules(self) -> list[Rule]:
        asked = self.structured_outputs
        if asked is None:
            return []
        name = "structured_outputs"
        any_object = [Rule("json_schema", {"type": "object"}, f"{name}.json_object")] if asked.json_object else []
        return any_object + _rules(
            ("json_schema", asked.json_, f"{name}.json"),
            ("regex", asked.regex, f"{name}.regex"),
            ("choice", asked.choice, f"{name}.choice"),
            ("grammar", asked.grammar, f"{name}.grammar"),
        )

    def _other_rules(self) -> list[Rule]:
        return _rules(
            ("json_schema", self.guided_json, "guided_json"),
            ("regex", self.guided_regex, "guided_regex"),
            ("choice", self.guided_choice, "guided_choice"),
            ("grammar", self.guided_grammar, "guided_grammar"),
            ("grammar", self.grammar, "grammar"),
            ("json_schema", self.json_schema, "json_schema"),
            ("regex", self.regex, "regex"),
        )


def _rules(*asked: tuple[Any, Any, str]) -> list[Rule]:
    return [
        Rule(kind, _schema(value, param) if kind == "json_schema" else value, param)
        for kind, value, param in asked
        if value not in (None, "")
    ]


def _schema(value: Any, param: str) -> Any:
    """vLLM takes a schema as text, too."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ApiError(400, f"Invalid value for '{param}': it is text, but not JSON.", param=param) from None
