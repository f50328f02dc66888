"""The values that cross the borders between wire, text, engine and api.

Plain data and the errors that go with it: nothing here opens a socket, reads a clock or knows a model. Every module may
import this one; it imports no other module of the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Region: TypeAlias = Literal["content", "reasoning"]
# What is being done, how much of it is done, of how much (0: nobody knows).
Progress: TypeAlias = Callable[[str, int, int], None]

# Where the tokenizer cuts a text before encoding it. Half of a surrogate pair: nothing that a client sends can hold it.
GUARD = "\udc00"
# What control tokens look like, unlike the words and spaces that some vocabularies have among their added tokens.
TAG = re.compile(r"[<\[|｜].+[>\]|｜]")

# Asked while a text becomes tokens: given the least number of tokens that the text has, it raises what ends the work.
Check: TypeAlias = Callable[[int], None]


def unchecked(n_tokens: int) -> None:
    """The check of a text that may have any length."""


# What apply_chat_template takes for itself and no chat template can be given; ``chat_template`` would be code.
RESERVED_TEMPLATE_OPTIONS = frozenset(
    [
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    ]
)

# The logger of the requests' lines, which are formatted as they are written.
ACCESS_LOG = "mlx_serve.access"


class ApiError(Exception):
    """A request that is refused, or that failed, in OpenAI's terms.

    ``status`` is the HTTP status; ``type``, ``param`` and ``code`` are the fields of OpenAI's error object
    (https://platform.openai.com/docs/guides/error-codes). ``headers`` go out with the reply (Retry-After, Allow).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # the contract's own word
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers


def internal_error(request_id: str = "") -> ApiError:
    """A fault of ours. The client learns where to ask and no more: the log has the reason."""
    which = f"request {request_id}" if request_id else "this request"
    return ApiError(500, f"The server failed to answer {which}; its log says why.", type="server_error")


class StartError(Exception):
    """The server can't start; the text is one line for the operator."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    """One HTTP request, read whole, before anything looked into its body.

    ``path`` is without the query, which is in ``query`` as it came. It is percent-decoded but for "%2F" and "%25":
    whoever takes a part of it as a name decodes these. ``headers`` has lower-case names; a repeated field is joined
    with ", ". ``alive()`` tells whether the client still waits. ``notes`` collects what the layers above want in this
    request's log line (model, token counts, finish reason). ``received_at`` is when the last byte was here, on the
    monotonic clock. ``client`` is a digest of the API key that let it in; "": none is needed.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    alive: Callable[[], bool]
    notes: MutableMapping[str, str | int] = field(default_factory=dict)
    received_at: float | None = None
    query: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """What goes back: a whole body, or an iterator whose every piece is written at once as it comes.

    An iterator that has a ``close`` is closed when the reply ends, however it ends: that is how a generation is
    cancelled.
    """

    status: int
    body: bytes | Iterator[bytes]
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Gate:
    """Where in an output its grammar takes hold, in token ids; by default at the first token.

    ``until`` ends what comes before (the reasoning). ``waiting``: the output begins in there; one of ``detours`` as
    its first token leads there too. One of ``exits`` before the grammar has begun (the opening of a tool call) leaves
    the grammar for good.
    """

    waiting: bool = False
    until: tuple[int, ...] = ()
    detours: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Marker:
    """An automaton over token ids that finds a marker's text. Its state says how much of the text has been read.

    It begins at 0 and has found the marker at ``end``. ``moves`` has the next state for each state of the tokens that
    can spell a part of the text; every other token leads to 0.
    """

    end: int
    moves: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """The reasoning may have ``n_tokens``; then its output goes on with the tokens ``closing``.

    ``inside``: the output begins in the reasoning. It otherwise begins behind ``opening``, and ends by itself behind
    ``ending``. ``reopens``: it may begin again after it has ended. None of ``not_next`` may follow ``closing``.
    """

    n_tokens: int
    inside: bool
    opening: Marker
    ending: Marker
    closing: tuple[int, ...]
    reopens: bool = False
    not_next: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A llguidance grammar that a process with limits has compiled, which took ``n_bytes`` of memory there.

    ``compiled`` is the engine's: what jobs copy, held as long as somebody may need it. None: on another rank.
    """

    text: str
    n_bytes: int
    compiled: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, with mlx-lm's meaning of each field; penalties of 0 are off.

    Presence and frequency penalties look at the output alone, as OpenAI has it; without a context size at all of it.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int | None = None
    frequency_penalty: float = 0.0
    frequency_context_size: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    # The most tokens to draft at a time. None: as many as pay.
    n_draft_tokens: int | None = None
    # None: no log-probabilities wanted; k: those of the chosen token and of the k likeliest ones.
    top_logprobs: int | None = None
    # The same for the tokens of the prompt; ``max_tokens`` may then be 0.
    prompt_logprobs: int | None = None
    # The end tokens are out of reach for so many tokens, or for good.
    min_tokens: int = 0
    ignore_eos: bool = False
    # Further tokens that end the output, and the only ones that may be in it; None: any.
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    # What the output has to match.
    grammar: Grammar | None = None
    gate: Gate = Gate()
    # None: the reasoning may take all of ``max_tokens``.
    reasoning_budget: ReasoningBudget | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and whether they end inside the model's reasoning (a template may open it itself).

    ``continues``: the answer goes on from text that they end with.
    """

    tokens: tuple[int, ...]
    in_reasoning: bool = False
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """Texts to be embedded, as token ids; their vectors are cut to ``dimensions`` numbers. None: the model's width."""

    tokens: tuple[tuple[int, ...], ...]
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The job's prefill begins; ``cached_tokens`` of its prompt need none."""

    index: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. With ``finish`` set it is the last one; on "stop" it is the end token itself.

    ``logprob`` and ``top_logprobs`` (pairs of token id and log-probability, falling) are there when asked for.
    """

    index: int
    token: int
    finish: Literal["stop", "length"] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely the prompt was: for each of its tokens but the first the log-probability and the likeliest ones.

    Comes before the first token of the output; ``is_last``: there is no output.
    """

    index: int
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of a job's next input: numbers of 4 bytes, little-endian, of length 1 together.

    Bytes and not numbers: a request of 2048 inputs has millions of them. ``is_last``: it was the last input.
    """

    index: int
    vector: bytes
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended without a result."""

    index: int
    error: ApiError


Event: TypeAlias = Started | PromptLogprobs | TokenEvent | Embedded | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to generate. The samples of one request share ``events`` and differ in ``index``.

    With ``inputs`` nothing is generated: they are embedded one after another, and ``prompt`` is the longest of them.
    ``priority``: smaller is earlier, as in vLLM. ``scope``: only jobs of the same one share KV caches. ``prediction``:
    a text that the output may repeat; tokens are drafted from it.

    Six fields change. ``arrived_s`` (monotonic) is set when the job is queued. Any thread may set ``cancelled``, once,
    and the engine's reads it. The engine's thread sets the others and any thread reads them: ``n_prefilled``, the
    prompt tokens in the job's KV cache; ``n_output``, its tokens so far; ``n_accepted`` and ``n_rejected``, the tokens
    drafted from the prediction that were right and wrong.
    """

    model: str
    prompt: Prompt
    sampling: Sampling
    index: int
    events: SimpleQueue[Event]
    priority: int = 0
    inputs: Inputs | None = None
    scope: str = ""
    prediction: tuple[int, ...] = ()
    arrived_s: float = 0.0
    cancelled: bool = False
    n_prefilled: int = 0
    n_output: int = 0
    n_accepted: int = 0
    n_rejected: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, with its log-probability and that of the likeliest ones in its place.

    None: a prompt's first token, which nothing comes before.
    """

    token: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of one choice's answer (never empty, unless it only carries log-probabilities)."""

    index: int
    region: Region
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; ``call`` numbers the calls of one choice from 0. Its arguments follow."""

    index: int
    call: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; joined they are JSON text."""

    index: int
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request. The last two count tokens that were drafted from its prediction."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice, with what that choice alone cost, and the stop string that ended it, if one did."""

    index: int
    reason: FinishReason
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """Nothing has come for a while; a stream says so to keep its connection open."""


Delta: TypeAlias = Text | ToolCallStart | ToolCallArguments | Finish | Beat


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What the engine tells of one model that is loaded. Counts are of sequences. ``idle_s``: since its last step.

    ``capacity``: how many run at a time; ``alone``: why it is but one, when the model or a flag is the reason.
    ``undrafted``: why no tokens are drafted for them, when the model is the reason.
    """

    name: str
    waiting: int = 0
    running: int = 0
    paused: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    capacity: int = 0
    alone: str = ""
    undrafted: str = ""
    idle_s: float = 0.0


# Which of the two marks the process's memory has passed.
MemoryPressure: TypeAlias = Literal["none", "soft", "hard"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What only the engine knows, at one moment. Counts are of sequences.

    ``preemptions`` (how often one was paused for lack of memory), ``evictions``, and the ``drafted`` and ``accepted``
    tokens are sums since the start.
    ``kv_bytes`` is what the running sequences' KV caches are expected to come to, which is what admission counts.
    ``active_bytes``, ``peak_bytes``, ``cache_bytes`` and ``wired_limit_bytes`` are MLX's own figures, and
    ``footprint_bytes`` is what the process holds by the system's count. 0 also stands for "not known"; a mark of 0 is
    none.
    """

    waiting: int = 0
    running: int = 0
    paused: int = 0
    models: tuple[ModelStats, ...] = ()
    kv_bytes: int = 0
    prefix_cache_bytes: int = 0
    prefix_cache_entries: int = 0
    preemptions: int = 0
    evictions: int = 0
    drafted: int = 0
    accepted: int = 0
    weights_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    wired_limit_bytes: int = 0
    footprint_bytes: int = 0
    soft_mark_bytes: int = 0
    hard_mark_bytes: int = 0
    pressure: MemoryPressure = "none"
