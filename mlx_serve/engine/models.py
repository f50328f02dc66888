"""Loading: a model's weights on the worker thread, its tokenizer on any. One model is in memory at a time.

``ModelStore`` is what the scheduler opens backends with and what the API gets tokenizers from.
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from jinja2 import TemplateError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer, maybe_set_recommended_wired_limit

from mlx_serve.core import ApiError
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.engine.mlx_backend import BatchBackend, BatchOptions, Loaded, SingleBackend, SingleOptions
from mlx_serve.engine.prefix_cache import PrefixCache
from mlx_serve.engine.scheduler import Backend

log = logging.getLogger(__name__)

# What mlx_lm.load fetches of a repository.
_HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
# What reading weights, building a model from its config and making a tokenizer raise when the files are wrong.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)
_MAX_TOKENIZERS = 16


class LoadError(Exception):
    """A model that can't be loaded; the text is one line for the operator."""


def locate(name: str) -> Path:
    """The directory of ``--model``: itself when it is one, else a repository, from the hub's cache or the hub.

    Raises LoadError.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) or name.startswith(("./", "../")):
        raise LoadError(f"model not found: there is no directory {name!r}")
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise LoadError(f"model not found: no directory {name!r}, and the hub says: {_one_line(error)}") from None


class ModelStore:
    """Opens models of a catalog, with the options of the command line."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        tokenizer_config: Mapping[str, Any],
        use_default_chat_template: bool = False,
        trust_remote_code: bool = False,
        draft_path: Path | None = None,
        batch: BatchOptions,
        single: SingleOptions,
        prompt_cache_size: int,
        prompt_cache_bytes: int | None,
    ) -> None:
        self._catalog = catalog
        self._tokenizer_config = dict(tokenizer_config)
        self._use_default_chat_template = use_default_chat_template
        self._trust_remote_code = trust_remote_code
        self._draft_path = draft_path
        self._batch = batch
        self._single = single
        self._prompt_cache_size = prompt_cache_size
        self._prompt_cache_bytes = prompt_cache_bytes
        self._loaded: tuple[str, Loaded] | None = None
        self._tokenizers: OrderedDict[Path, MlxTokenizer] = OrderedDict()
        self._lock = Lock()

    def tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        """The model's tokenizer, kept for the next request. Any thread; raises ApiError."""
        try:
            return self._tokenizer(entry)
        except LoadError as error:
            raise _unloadable(entry, error) from error

    def check(self, entry: ModelEntry) -> None:
        """Load a model's tokenizer, for the sake of the LoadError that this may raise."""
        self._tokenizer(entry)

    def open_backend(self, name: str) -> Backend:
        """A backend for the named model, loaded if it is not in memory. Worker thread; raises ApiError."""
        entry = self._catalog.find(name)
        try:
            loaded = self._load(entry)
        except LoadError as error:
            raise _unloadable(entry, error) from error
        single = self._single.kv_bits is not None or loaded.draft_model is not None
        if single or not all(hasattr(layer, "merge") for layer in make_prompt_cache(loaded.model)):
            return SingleBackend(loaded, self._single)
        return BatchBackend(loaded, self._batch)

    def close(self) -> None:
        """Let the model go. Worker thread."""
        self._loaded = None
        gc.collect()
        mx.clear_cache()

    def _load(self, entry: ModelEntry) -> Loaded:
        if self._loaded is not None and self._loaded[0] == entry.name:
            return self._loaded[1]
        # The former model first goes back to the system: two at once may not fit.
        self.close()
        maybe_set_recommended_wired_limit()
        log.info("loading %s from %s", entry.name, entry.path)
        try:
            loaded = self._read(entry)
        except _LOAD_ERRORS as error:
            raise LoadError(f"cannot load {entry.path}: {_one_line(error)}") from error
        self._loaded = (entry.name, loaded)
        return loaded

    def _read(self, entry: ModelEntry) -> Loaded:
        model, _ = load_model(entry.path, trust_remote_code=self._trust_remote_code)
        if entry.adapter_path is not None:
            model = load_adapters(model, str(entry.adapter_path))
            model.eval()
        draft_model = None
        if self._draft_path is not None:
            draft_model, _ = load_model(self._draft_path, trust_remote_code=self._trust_remote_code)
        tokenizer = self._tokenizer(entry)
        return Loaded(
            model=model,
            vocab_size=entry.vocab_size or tokenizer.n_tokens,
            eos_ids=tokenizer.eos_ids,
            # As mlx_lm.server has it: XTC never drops a line end or the end of the text.
            kept_by_xtc=tuple(sorted({*tokenizer.encode("\n", special=False), *tokenizer.eos_ids})),
            prefix_cache=PrefixCache(self._prompt_cache_size, self._prompt_cache_bytes),
            draft_model=draft_model,
        )

    def _tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        with self._lock:
            tokenizer = self._tokenizers.pop(entry.path, None) or self._load_tokenizer(entry)
            self._tokenizers[entry.path] = tokenizer
            while len(self._tokenizers) > _MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return tokenizer

    def _load_tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        try:
            wrapper = load_tokenizer(entry.path, self._tokenizer_config, eos_token_ids=_eos_ids(entry.path))
        except _LOAD_ERRORS as error:
            raise LoadError(f"cannot load the tokenizer of {entry.path}: {_one_line(error)}") from error
        if self._use_default_chat_template and wrapper.chat_template is None:
            wrapper.chat_template = getattr(wrapper, "default_chat_template", None)
        return MlxTokenizer(wrapper)


class MlxTokenizer:
    """mlx-lm's tokenizer as the Tokenizer protocol of ``text``; one lock, for fast tokenizers are not thread-safe."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        self._lock = Lock()
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.n_tokens = len(wrapper)
        self.has_chat_template = bool(wrapper.has_chat_template)
        self.think: tuple[str, str] | None = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None
        self.tool_call: tuple[str, str] | None = None
        if wrapper.has_tool_calling:
            self.tool_call = (wrapper.tool_call_start, wrapper.tool_call_end)
        self.hidden_ids = self._hidden_ids()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a start token."""
        with self._lock:
            return list(self._wrapper.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        with self._lock:
            return str(self._wrapper.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """The chat template's prompt. Raises ApiError 400 when the template refuses the messages."""
        try:
            with self._lock:
                ids = self._wrapper.apply_chat_template(
                    list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, **options
                )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            log.info("the chat template refused a request: %s", _one_line(error))
            text = "The model's chat template cannot render these messages."
            if isinstance(error, TemplateError) and error.message:
                text += f" It says: {_one_line(error.message)}"
            raise ApiError(400, text, param="messages") from error
        return [int(token) for token in ids]

    def ends_in_reasoning(self, tokens: Sequence[int]) -> bool:
        """Whether the last reasoning region that the prompt opens is still open."""
        if self.think is None:
            return False
        ids = list(tokens)
        return bool(self._wrapper.rfind_think_start(ids) > self._wrapper.rfind_think_end(ids))

    def parse_tool_call(self, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
        """The calls in one tool-call region, each {"name", "arguments"}. Raises ValueError when it is malformed."""
        try:
            parsed = self._wrapper.tool_parser(text, list(tools) or None)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError) as error:
            raise ValueError(f"malformed tool call: {error}") from error
        return parsed if isinstance(parsed, list) else [parsed]

    def _hidden_ids(self) -> frozenset[int]:
        # Control tokens never reach a client as text, but those that a marker is made of must be seen.
        markers = "".join([*(self.think or ()), *(self.tool_call or ())])
        special = zip(self._wrapper.all_special_ids, self._wrapper.all_special_tokens, strict=True)
        return frozenset(token for token, text in special if not (markers and text in markers))


def _eos_ids(path: Path) -> Any:
    """The end tokens that mlx-lm reads from a model's configuration: generation_config.json wins over config.json."""
    ids = None
    for name in ("config.json", "generation_config.json"):
        file = path / name
        if file.is_file():
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") or ids
    return ids


def _unloadable(entry: ModelEntry, error: LoadError) -> ApiError:
    # The text names the operator's files: for the log, not for clients.
    log.error("%s", error)
    message = f"The model '{entry.name}' could not be loaded; the server's log says why."
    return ApiError(500, message, type="server_error", param="model")


def _one_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
