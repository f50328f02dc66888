"""The fields of a request that chat, completions and responses share: how tokens are chosen, who asks, how it is sent.

Types are strict (a number in quotes is no number), null counts as absent, fields that are not known are ignored, and
fields that would change the answer but are not served are refused. OpenAI's fields, vLLM's and mlx_lm.server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, model_validator

from mlx_serve.api.body import Defaults
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
from mlx_serve.values import ApiError, Sampling

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
