"""Loads models: the scheduler opens them through ``ModelStore``. Worker thread, unless a docstring says otherwise.

``tokenizers.py`` loads their tokenizers, on any thread.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_adapters, load_model

from mlx_serve.engine import footprint
from mlx_serve.engine.backend import Opening
from mlx_serve.engine.cache.disk import DiskCache, DiskTier, model_identity
from mlx_serve.engine.cache.kinds import Quantization, always_trims
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.catalog import Catalog, ModelEntry, read_entry
from mlx_serve.engine.errors import one_line
from mlx_serve.engine.generate import trial
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.pooling import read_pooling
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.engine.load_errors import LoadError, loading, reading, too_large
from mlx_serve.engine.memory import RESERVE_BYTES, Marks, MemoryBudget, MemoryUse
from mlx_serve.engine.model_directory import check_files
from mlx_serve.engine.model_places import HUB_FILES
from mlx_serve.engine.models.sharding import Sharding
from mlx_serve.engine.models.tokenizers import TokenizerStore
from mlx_serve.engine.models.weights import files_bytes, held_bytes, id_bound, read_weights
from mlx_serve.engine.models.wired import WiredLimit
from mlx_serve.machine import memory_bytes
from mlx_serve.paths import expanded, is_repository, why_missing
from mlx_serve.values import Progress

log = logging.getLogger(__name__)

# The freed memory that MLX keeps for its next arrays. It is part of the reserve, so the budget holds.
_MLX_CACHE_BYTES = RESERVE_BYTES // 2


def locate(name: str, bars: Callable[[str], type[Any]] | None = None) -> Path:
    """The directory of ``--model``: the path itself if it is a directory, else a repository in the hub or its cache.

    ``bars`` makes the hub's ``tqdm_class`` from a description of the work. By default the hub draws its own bars on a
    terminal. Raises LoadError.
    """
    path = expanded(name)
    if os.path.exists(path):
        return path
    if not is_repository(name):
        raise LoadError(f"model not found: there is no directory {name!r}{why_missing(path)}")
    try:
        shown = bars(f"fetching {name}") if bars is not None else None
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, tqdm_class=shown))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise LoadError(f"model not found: no directory {name!r}, and the hub says: {one_line(error)}") from None


class ModelStore:
    """Opens models of a catalog, with the options of the command line: the ``ranks.protocol.Store`` of a rank."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        tokenizer_config: Mapping[str, Any],
        use_default_chat_template: bool = False,
        trust_remote_code: bool = False,
        draft_path: Path | None = None,
        batch: BatchOptions,
        quantization: Quantization | None = None,
        prompt_cache_size: int,
        prompt_cache_bytes: int | None,
        prompt_cache_bits: int | None = None,
        budget: MemoryBudget | None = None,
        disk: DiskCache | None = None,
        sharding: Sharding | None = None,
        wired: WiredLimit | None = None,
        progress: Progress = lambda *_: None,
    ) -> None:
        self._catalog = catalog
        self._tokenizers = TokenizerStore(tokenizer_config, use_default_chat_template=use_default_chat_template)
        self.tokenizer = self._tokenizers.tokenizer
        self.vocabulary = self._tokenizers.vocabulary
        self._trust_remote_code = trust_remote_code
        self._draft_path = draft_path
        self._batch = batch
        self._quantization = quantization
        self._prompt_cache_size = prompt_cache_size
        self._prompt_cache_bytes = prompt_cache_bytes
        self._prompt_cache_bits = prompt_cache_bits
        self._budget = budget or MemoryBudget()
        self._disk = disk
        self._sharding = sharding
        self._wired = wired or WiredLimit()
        self._progress = progress
        # Models whose weights are read, with their draft models; then the models that are ready.
        self._fresh: dict[str, tuple[Any, Any]] = {}
        self._loaded: dict[str, Loaded] = {}
        self._weights: dict[str, int] = {}

    def check(self, entry: ModelEntry) -> None:
        """Load a model's tokenizer, to find its faults early. Raises LoadError."""
        self._tokenizers.load(entry)

    # The scheduler's interface. Worker thread, except kv_limit.

    def weights_bytes(self, name: str) -> int:
        """The bytes in this process: of a loaded model its weights, else the size of its files. Raises ApiError 404."""
        if name not in self._weights:
            entry = self._catalog.entry(name)
            paths = [entry.path, entry.adapter_path, self._draft_path if entry is self._catalog.default else None]
            in_files = sum(files_bytes(path) for path in paths if path is not None)
            self._weights[name] = -(-in_files // self._n_ranks)
        return self._weights[name]

    def has_room(self, names: Collection[str]) -> bool:
        return self._budget.has_room([self.weights_bytes(name) for name in names])

    def kv_limit(self, names: Collection[str]) -> int | None:
        """Bytes for KV caches beside these models. Any thread."""
        return self._budget.kv_limit([self.weights_bytes(name) for name in names])

    def marks(self, names: Collection[str]) -> Marks | None:
        """Any thread."""
        return self._budget.marks([self.weights_bytes(name) for name in names])

    def open(self, name: str) -> Opening:
        """Load a model in slices, unless it is still in memory, and make a backend. Raises ApiError."""
        self.check_room(name)
        yield from self.read(name)
        return self.finish(name)

    def check_room(self, name: str) -> None:
        entry = self._catalog.entry(name)
        if name not in self._loaded and not self.has_room([name]):
            raise too_large(entry, self.weights_bytes(name))

    def read(self, name: str) -> Generator[None, None, None]:
        """Read the weights of a model in slices, independently of other ranks. Raises ApiError."""
        entry = self._catalog.entry(name)
        if name in self._loaded:
            return
        mx.set_cache_limit(_MLX_CACHE_BYTES)
        log.info("loading %s from %s", entry.name, entry.path)
        with _loading(entry):
            self._fresh[name] = yield from self._read(entry)

    def finish(self, name: str) -> BatchBackend:
        """A backend for a model that was read. All ranks call this together. Raises ApiError."""
        entry = self._catalog.entry(name)
        if name in self._fresh:
            with _loading(entry):
                self._loaded[name] = self._ready(entry, *self._fresh.pop(name))
        backend = BatchBackend(self._loaded[name], self._batch)
        self._keep_wired()
        return backend

    def memory(self) -> MemoryUse:
        return MemoryUse(
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=mx.get_cache_memory(),
            wired_limit_bytes=self._wired.n_bytes,
            footprint_bytes=footprint.footprint_bytes(),
        )

    def rest(self) -> None:
        self._wired.keep()
        mx.clear_cache()

    def release(self) -> None:
        mx.clear_cache()
        footprint.return_freed()

    def prefix_cache(self, name: str) -> PrefixCache:
        return self._loaded[name].prefix_cache

    def unload(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._fresh.pop(name, None)
        _collect()
        self._keep_wired()

    def close(self) -> None:
        """Unload all models, and wait until their prefixes are written to disk."""
        self._loaded.clear()
        self._fresh.clear()
        _collect()
        if self._disk is not None:
            self._disk.close()

    def _keep_wired(self) -> None:
        self._wired.keep(sum(self.weights_bytes(name) for name in self._loaded))

    def _read(self, entry: ModelEntry) -> Generator[None, None, tuple[Any, Any]]:
        self._tokenizers.load(entry)
        for path in (entry.path, entry.adapter_path, self._draft_path):
            if path is not None:
                check_files(path)
        model, _ = load_model(entry.path, lazy=True, trust_remote_code=self._trust_remote_code)
        if entry.adapter_path is not None:
            model = load_adapters(model, str(entry.adapter_path))
            model.eval()
        if self._sharding is not None:
            self._sharding.apply(model, entry.path)
        draft_model = self._lazy_draft(entry)
        models = [model] if draft_model is None else [model, draft_model]
        n_read, n_bytes = 0, sum(map(held_bytes, models))
        for n_more in chain.from_iterable(map(read_weights, models)):
            n_read += n_more
            self._progress(f"loading {entry.name}", n_read, n_bytes)
            yield
        return model, draft_model

    def _ready(self, entry: ModelEntry, model: Any, draft_model: Any) -> Loaded:
        tokenizer, vocabulary = self._tokenizers.load(entry)
        vocab_size = id_bound(model, entry.path, entry.vocab_size, tokenizer.n_tokens)
        if draft_model is not None:
            id_bound(draft_model, self._draft_path, vocab_size, tokenizer.n_tokens)
        trimmable, alone, undrafted = self._tried(entry, model, draft_model)
        return Loaded(
            model=model,
            vocab_size=vocab_size,
            eos_ids=tokenizer.eos_ids,
            # As in mlx_lm.server, XTC never drops a line end or the end of the text.
            kept_by_xtc=tuple(sorted({*tokenizer.encode("\n", special=False), *tokenizer.eos_ids})),
            prefix_cache=self._new_prefix_cache(entry, trimmable=trimmable),
            draft_model=draft_model,
            vocabulary=vocabulary,
            control_ids=frozenset(tokenizer.controls),
            kv_size=measure([model] if draft_model is None else [model, draft_model]),
            trimmable=trimmable,
            shares=not self._parts_differ(trimmable=trimmable),
            alone=alone,
            undrafted=undrafted,
            quantization=self._quantization,
            agree=self._sharding.ranks.agree if self._sharding is not None else None,
            pooling=read_pooling(entry.path),
        )

    def _tried(self, entry: ModelEntry, model: Any, draft_model: Any) -> tuple[bool, str, str]:
        """Whether caches can always be trimmed, and why sequences can't run together, or get no drafts.

        Raises LoadError.
        """
        quantization = self._quantization
        refusal = trial.refusal(
            model,
            draft_model,
            quantization,
            computes=self._sharding is None,
            prompt_cache_bits=self._prompt_cache_bits,
        )
        models = [model] if draft_model is None else [model, draft_model]
        trims = all(always_trims(make_prompt_cache(one)) for one in models)
        trimmable, may_serve = self._agree_on(entry, model, [trims, not refusal])
        if not may_serve:
            raise LoadError(f"cannot serve {entry.name}: {refusal or 'another rank says why in its log'}")
        alone = next(filter(None, (trial.batch_fault(one, quantization) for one in models)), "")
        (together,) = self._agree_on(entry, model, [not alone])
        if draft_model is not None and not together:
            raise LoadError(f"cannot serve {entry.name}: --draft-model does not work: {alone}")
        alone = "" if together else alone or "another rank cannot batch it"
        log.info("%s: %s", entry.name, f"one sequence at a time: {alone}" if alone else "sequences run together")
        undrafted = self._undrafted(entry, models, alone=bool(alone))
        if draft_model is not None and undrafted:
            raise LoadError(f"cannot serve {entry.name}: --draft-model does not work: {undrafted}")
        if undrafted:
            log.info("%s: no drafts: %s", entry.name, undrafted)
        return trimmable, alone, undrafted

    def _undrafted(self, entry: ModelEntry, models: Sequence[Any], *, alone: bool) -> str:
        """Why nothing is drafted. Passes are run on all ranks or on none, because they exchange data."""
        tests = [
            partial(trial.draft_fault, alone=alone),
            partial(trial.pass_fault, quantization=self._quantization, alone=alone),
        ]
        for test in tests:
            fault = next(filter(None, map(test, models)), "")
            (may_draft,) = self._agree_on(entry, models[0], [not fault])
            if not may_draft:
                return fault or "another rank cannot check drafts"
        return ""

    @property
    def _n_ranks(self) -> int:
        return self._sharding.ranks.size if self._sharding is not None else 1

    def _agree_on(self, entry: ModelEntry, model: Any, facts: list[bool]) -> list[bool]:
        """The facts that hold for a model on all ranks. With a pipeline, each rank has different layers."""
        if self._sharding is None:
            return facts
        try:
            self._weights[entry.name], facts = self._sharding.agree_on(entry.path, held_bytes(model), facts)
        except ValueError as error:
            raise LoadError(f"cannot load {entry.name}: {error}") from error
        return facts

    def _new_prefix_cache(self, entry: ModelEntry, *, trimmable: bool) -> PrefixCache:
        if self._sharding is None:
            return PrefixCache(
                self._prompt_cache_size,
                self._prompt_cache_bytes,
                bits=self._prompt_cache_bits,
                tier=self._tier(entry),
            )
        # The sizes of the ranks' parts differ, so rank 0 alone counts bytes (ranks/protocol.py).
        size = 0 if self._parts_differ(trimmable=trimmable) else self._prompt_cache_size
        return PrefixCache(size, None, bits=self._prompt_cache_bits)

    def _parts_differ(self, *, trimmable: bool) -> bool:
        """Whether the stages of a pipeline may hold different kinds of layers, some trimmable and others not."""
        return self._sharding is not None and self._sharding.pipeline and not trimmable

    def _tier(self, entry: ModelEntry) -> DiskTier | None:
        if self._disk is None:
            return None
        draft_path = self._draft_path if entry is self._catalog.default else None
        settings = [repr(self._batch.prefill_step_size), repr(self._quantization)]
        if self._prompt_cache_bits is not None:
            settings.append(f"{self._prompt_cache_bits} bits")
        identity = model_identity(entry.path, *settings, adapter=entry.adapter_path, draft_model=draft_path)
        return self._disk.tier(identity)

    def _lazy_draft(self, entry: ModelEntry) -> Any:
        """The draft model, for the command line's model alone. It proposes token ids, so both need one vocabulary."""
        if self._draft_path is None or entry is not self._catalog.default:
            return None
        vocab_size = read_entry("draft", self._draft_path).vocab_size
        if vocab_size != entry.vocab_size:
            # MLX does not check indices: ids of the larger vocabulary would end the process.
            raise LoadError(
                f"the draft model {self._draft_path} has {vocab_size} tokens, {entry.path} {entry.vocab_size}"
            )
        with reading(f"cannot load the draft model {self._draft_path}"):
            return load_model(self._draft_path, lazy=True, trust_remote_code=self._trust_remote_code)[0]


def device_bytes() -> int:
    """The memory that models may use by default: Metal's recommendation, elsewhere 70 % of the memory."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        return int(recommended)
    return (memory_bytes() or 0) * 7 // 10


@contextmanager
def _loading(entry: ModelEntry) -> Iterator[None]:
    try:
        with loading(entry):
            yield
    finally:
        # Free the part of a model that failed while it was being read.
        _collect()


def _collect() -> None:
    """Return freed memory to the system."""
    gc.collect()
    mx.clear_cache()
    footprint.return_freed()
