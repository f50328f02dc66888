"""The fields of a request that chat, completions and responses share: how tokens are chosen, who asks, how it is sent.

Types are strict (a number in quotes is no number), null counts as absent, fields that are not known are ignored, and
fields that would change the answer but are not served are refused. OpenAI's fields, vLLM's and mlx_lm.server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from mlx_serve.api.fields import (
    AllowedIds,
    ContextSize,
    Float,
    LogitBias,
    Model,
    RepetitionPenalty,
    Seed,
    StopIds,
    Stops,
    Str,
)
from mlx_serve.api.scope import CacheSalt
from mlx_serve.api.structured import Structured
from mlx_serve.values import ApiError

MAX_N = 128


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


def _not_negative(value: int) -> int:
    return max(value, 0)


class SamplingFields(Model):
    """How tokens are chosen. Each field has the name of its field in ``values.Sampling``, by which it is copied."""

    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(_not_negative)] | None = None
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
    # vLLM's.
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: StopIds = Field(default_factory=list)
    allowed_token_ids: AllowedIds = None
    # mlx_lm.server's.
    n_draft_tokens: Annotated[Annotated[int, Field(ge=0, le=64)] | None, Field(alias="num_draft_tokens")] = None

    @property
    def given_sampling(self) -> dict[str, Any]:
        """The fields that the request sets, by their names in ``values.Sampling``."""
        fields = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


class Request(Structured, SamplingFields):
    """The fields that OpenAI's endpoints share."""

    model: Str | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop: Stops = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    # vLLM's; the smaller is earlier.
    priority: int = 0
    cache_salt: CacheSalt | None = None
    user: Str | None = None
    # mlx_lm.server's: a client may name the command line's draft model and adapters, and no others.
    draft_model: Str | None = None
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
        # Together, these fields could leave no allowed token.
        if self.allowed_token_ids is not None and (self.min_tokens or self.ignore_eos):
            text = "'allowed_token_ids' cannot be combined with 'min_tokens' or 'ignore_eos'."
            raise ApiError(400, text, param="allowed_token_ids")
        return self

    def shared(self) -> dict[str, Any]:
        """What these fields are in a ``GenerationRequest``."""
        return {
            "stops": self.stop,
            "keeps_stop": self.include_stop_str_in_output,
            "is_stream": self.stream,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "adapters": self.adapters,
            "draft_model": self.draft_model,
        }


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The most tokens of reasoning.
ReasoningTokens: TypeAlias = Annotated[int, Field(ge=0)]


class ReasoningOptions(Model):
    """How much a model may think. ``max_tokens`` is OpenRouter's."""

    effort: Effort | None = None
    max_tokens: ReasoningTokens | None = None


def reasoning_tokens(given: int | None, template_options: Mapping[str, Any]) -> int | None:
    """The most tokens of reasoning: as given, else by the option that some chat templates tell their models of.

    Raises ApiError 400. An option of -1 is no limit, as these templates have it.
    """
    name = "thinking_budget"
    option = template_options.get(name)
    if given is not None or option is None or option == -1:
        return given
    if isinstance(option, bool) or not isinstance(option, int) or option < 0:
        param = f"chat_template_kwargs.{name}"
        raise ApiError(400, f"Invalid value for '{param}': Must be an integer of at least 0, or -1.", param=param)
    return option


def effort_options(effort: Effort | None) -> dict[str, Any]:
    """A reasoning effort for the chat template. Templates know efforts by name; "none" turns thinking off instead."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
