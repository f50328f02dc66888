"""Loading: models' weights on the worker thread, their tokenizers on any.

``ModelStore`` is what the scheduler opens models with and what the API gets tokenizers from.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.utils import load_adapters, load_model, load_tokenizer, maybe_set_recommended_wired_limit

from mlx_serve.core import ApiError
from mlx_serve.engine.backend import Backend, Opening
from mlx_serve.engine.catalog import Catalog, ModelEntry, read_entry
from mlx_serve.engine.choice import Loaded
from mlx_serve.engine.constraints import Vocabulary
from mlx_serve.engine.disk_cache import DiskCache, DiskTier, model_identity
from mlx_serve.engine.errors import one_line
from mlx_serve.engine.kv_size import measure
from mlx_serve.engine.memory import RESERVE_BYTES, MemoryBudget, MemoryUse
from mlx_serve.engine.mlx_backend import BatchBackend, BatchOptions
from mlx_serve.engine.mlx_tokenizer import MlxTokenizer
from mlx_serve.engine.prefix_cache import PrefixCache
from mlx_serve.engine.single_backend import SingleBackend, SingleOptions

log = logging.getLogger(__name__)

# What mlx_lm.load fetches of a repository.
_HUB_FILES = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
# What reading weights, building a model from its config and making a tokenizer raise when the files are wrong. The
# files are foreign input to code that expects sane numbers in them: a head count of 0 is a ZeroDivisionError.
_LOAD_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError),
    *(ArithmeticError, AssertionError, MemoryError),
)
_MAX_TOKENIZERS = 16
# Weights are read in slices of about so many bytes, so that other models' streams go on between them.
_SLICE_BYTES = 256 * 2**20
# What MLX keeps of freed memory for the next arrays: of the reserve, so that the budget holds.
_MLX_CACHE_BYTES = RESERVE_BYTES // 2


class LoadError(Exception):
    """A model that can't be loaded; the text is one line for the operator."""


def n_ranks() -> int:
    """How many processes mlx.launch started us in."""
    return int(mx.distributed.init().size())


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
        raise LoadError(f"model not found: no directory {name!r}, and the hub says: {one_line(error)}") from None


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
        budget: MemoryBudget | None = None,
        disk: DiskCache | None = None,
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
        self._budget = budget or MemoryBudget()
        self._disk = disk
        self._loaded: dict[str, Loaded] = {}
        self._weights: dict[str, int] = {}
        # By directory and chat template.
        self._tokenizers: OrderedDict[tuple[Path, str], tuple[MlxTokenizer, Vocabulary]] = OrderedDict()
        self._lock = Lock()

    def tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        """The model's tokenizer, kept for the next request. Any thread; raises ApiError."""
        try:
            return self._tokenizer(entry)[0]
        except LoadError as error:
            raise _unloadable(entry, error) from error

    def check_grammar(self, entry: ModelEntry, grammar: str) -> str:
        """Compile a grammar for the model's tokens. What is wrong with it, or "". Any thread; raises ApiError."""
        try:
            return self._tokenizer(entry)[1].check(grammar)
        except LoadError as error:
            raise _unloadable(entry, error) from error

    def check(self, entry: ModelEntry) -> None:
        """Load a model's tokenizer, for the sake of the LoadError that this may raise."""
        self._tokenizer(entry)

    # What the scheduler asks. Worker thread, but for kv_limit.

    def weights_bytes(self, name: str) -> int:
        """Of a model in memory what it holds, of another one the size of its files. Raises ApiError 404."""
        if name not in self._weights:
            entry = self._catalog.find(name)
            paths = [entry.path, entry.adapter_path, self._draft_path if entry is self._catalog.default else None]
            self._weights[name] = sum(_weights_size(path) for path in paths if path is not None)
        return self._weights[name]

    def has_room(self, names: Collection[str]) -> bool:
        """Whether these models may be in memory together."""
        return self._budget.has_room([self.weights_bytes(name) for name in names])

    def kv_limit(self, names: Collection[str]) -> int | None:
        """Bytes for KV caches beside these models. Any thread."""
        return self._budget.kv_limit([self.weights_bytes(name) for name in names])

    def open(self, name: str) -> Opening:
        """Load a model in slices, unless it still is in memory, and make a backend. Raises ApiError."""
        entry = self._catalog.find(name)
        if name not in self._loaded:
            if not self.has_room([name]):
                raise _too_large(entry, self.weights_bytes(name))
            mx.set_cache_limit(_MLX_CACHE_BYTES)
            maybe_set_recommended_wired_limit()
            log.info("loading %s from %s", entry.name, entry.path)
            try:
                self._loaded[name] = yield from self._checked(entry)
            except LoadError as error:
                raise _unloadable(entry, error) from error
            finally:
                # Whatever was read of a model that failed half-way.
                _collect()
        return self._backend(self._loaded[name])

    def memory(self) -> MemoryUse:
        """MLX's own figures."""
        return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())

    def unload(self, name: str) -> None:
        """Let a model go."""
        self._loaded.pop(name, None)
        _collect()

    def close(self) -> None:
        """Let all models go, and wait for what is still to be written of their prefixes."""
        self._loaded.clear()
        _collect()
        if self._disk is not None:
            self._disk.close()

    def _backend(self, loaded: Loaded) -> Backend:
        single = self._single.kv_bits is not None or loaded.draft_model is not None
        if single or not all(hasattr(layer, "merge") for layer in make_prompt_cache(loaded.model)):
            return SingleBackend(loaded, self._single)
        return BatchBackend(loaded, self._batch)

    def _checked(self, entry: ModelEntry) -> Generator[None, None, Loaded]:
        try:
            return (yield from self._read(entry))
        except _LOAD_ERRORS as error:
            raise LoadError(f"cannot load {entry.path}: {one_line(error)}") from error

    def _read(self, entry: ModelEntry) -> Generator[None, None, Loaded]:
        model, _ = load_model(entry.path, lazy=True, trust_remote_code=self._trust_remote_code)
        if entry.adapter_path is not None:
            model = load_adapters(model, str(entry.adapter_path))
            model.eval()
        yield from _read_weights(model)
        draft_model = self._read_draft(entry)
        if draft_model is not None:
            yield from _read_weights(draft_model)
        tokenizer, vocabulary = self._tokenizer(entry)
        trimmable = all(map(_always_trims, make_prompt_cache(model)))
        yield
        return Loaded(
            model=model,
            vocab_size=entry.vocab_size or tokenizer.n_tokens,
            eos_ids=tokenizer.eos_ids,
            # As mlx_lm.server has it: XTC never drops a line end or the end of the text.
            kept_by_xtc=tuple(sorted({*tokenizer.encode("\n", special=False), *tokenizer.eos_ids})),
            prefix_cache=PrefixCache(
                self._prompt_cache_size, self._prompt_cache_bytes, trimmable=trimmable, tier=self._tier(entry)
            ),
            draft_model=draft_model,
            vocabulary=vocabulary,
            control_ids=frozenset(tokenizer.controls),
            kv_size=measure([model] if draft_model is None else [model, draft_model]),
            trimmable=trimmable,
        )

    def _tier(self, entry: ModelEntry) -> DiskTier | None:
        if self._disk is None:
            return None
        draft = str(self._draft_path) if entry is self._catalog.default else ""
        settings = [repr(self._single), draft]
        return self._disk.tier(model_identity(entry.path, *settings, adapter=entry.adapter_path))

    def _read_draft(self, entry: ModelEntry) -> Any:
        """The draft model, for the command line's model alone: it proposes token ids, so it must know the same ones."""
        if self._draft_path is None or entry is not self._catalog.default:
            return None
        vocab_size = read_entry("draft", self._draft_path).vocab_size
        if vocab_size != entry.vocab_size:
            # MLX does not check indices: the larger vocabulary's ids would end the process.
            raise LoadError(
                f"the draft model {self._draft_path} has {vocab_size} tokens, {entry.path} {entry.vocab_size}"
            )
        try:
            return load_model(self._draft_path, lazy=True, trust_remote_code=self._trust_remote_code)[0]
        except _LOAD_ERRORS as error:
            raise LoadError(f"cannot load the draft model {self._draft_path}: {one_line(error)}") from error

    def _tokenizer(self, entry: ModelEntry) -> tuple[MlxTokenizer, Vocabulary]:
        with self._lock:
            key = (entry.path, entry.chat_template)
            tokenizer = self._tokenizers.pop(key, None) or self._load_tokenizer(entry)
            self._tokenizers[key] = tokenizer
            while len(self._tokenizers) > _MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return tokenizer

    def _load_tokenizer(self, entry: ModelEntry) -> tuple[MlxTokenizer, Vocabulary]:
        try:
            settings = self._tokenizer_config | ({"chat_template": entry.chat_template} if entry.chat_template else {})
            wrapper = load_tokenizer(entry.path, settings, eos_token_ids=_eos_ids(entry.path))
        except _LOAD_ERRORS as error:
            raise LoadError(f"cannot load the tokenizer of {entry.path}: {one_line(error)}") from error
        if self._use_default_chat_template and wrapper.chat_template is None:
            wrapper.chat_template = getattr(wrapper, "default_chat_template", None)
        tokenizer = MlxTokenizer(wrapper)
        return tokenizer, Vocabulary(tokenizer, entry.vocab_size or 0)


def _eos_ids(path: Path) -> Any:
    """The end tokens that mlx-lm reads from a model's configuration: generation_config.json wins over config.json."""
    ids = None
    for name in ("config.json", "generation_config.json"):
        file = path / name
        if file.is_file():
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") or ids
    return ids


def device_bytes() -> int:
    """What models may use of this machine by default: what Metal recommends, elsewhere 70 % of the memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        return int(recommended)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 7 // 10


def _weights_size(path: Path) -> int:
    return sum(file.stat().st_size for file in [*path.glob("model*.safetensors"), *path.glob("adapters.safetensors")])


def _read_weights(model: Any) -> Generator[None, None, None]:
    """Evaluate a lazily loaded model's weights, a slice at a time."""
    batch, n_bytes = [], 0
    for _, weight in tree_flatten(model.parameters()):
        batch.append(weight)
        n_bytes += weight.nbytes
        if n_bytes >= _SLICE_BYTES:
            mx.eval(batch)
            batch, n_bytes = [], 0
            yield
    mx.eval(batch)
    yield


def _always_trims(cache: Any) -> bool:
    # Others that can be trimmed at first cannot any more once their window is full.
    if isinstance(cache, CacheList):
        return all(map(_always_trims, cache.caches))
    return isinstance(cache, KVCache)


def _collect() -> None:
    """Give the memory of what was let go back to the system."""
    gc.collect()
    mx.clear_cache()


def _too_large(entry: ModelEntry, n_bytes: int) -> ApiError:
    message = (
        f"The model '{entry.name}' has {n_bytes} bytes of weights: more than this server may use (--memory-bytes)."
    )
    return ApiError(503, message, type="server_error", param="model", code="model_too_large")


def _unloadable(entry: ModelEntry, error: LoadError) -> ApiError:
    # The text names the operator's files: for the log, not for clients.
    log.error("%s", error)
    message = f"The model '{entry.name}' could not be loaded; the server's log says why."
    return ApiError(500, message, type="server_error", param="model")
