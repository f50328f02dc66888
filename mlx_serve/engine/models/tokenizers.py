"""The tokenizers of models, each loaded on first use and kept for later requests. Any thread.

Knows no weights and touches no MLX array.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_lm.utils import load_tokenizer

from mlx_serve.engine.catalog import ModelEntry
from mlx_serve.engine.generate.grammars import Vocabulary
from mlx_serve.engine.load_errors import LoadError, reading, unloadable
from mlx_serve.engine.model_directory import check_files, read_object
from mlx_serve.engine.models.tokenizer import MlxTokenizer

_MAX_TOKENIZERS = 16


class TokenizerStore:
    """Tokenizers and grammar vocabularies of a limited number of models; the least recently used are dropped."""

    def __init__(self, tokenizer_config: Mapping[str, Any], *, use_default_chat_template: bool) -> None:
        self._tokenizer_config = dict(tokenizer_config)
        self._use_default_chat_template = use_default_chat_template
        # Keyed by directory and chat template.
        self._tokenizers: OrderedDict[tuple[Path, str], tuple[MlxTokenizer, Vocabulary]] = OrderedDict()
        self._lock = Lock()

    def tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        """The model's tokenizer, kept for the next request. Any thread; raises ApiError."""
        try:
            return self.load(entry)[0]
        except LoadError as error:
            raise unloadable(entry, error) from error

    def vocabulary(self, entry: ModelEntry) -> Vocabulary:
        """The model's tokens, for grammars. Any thread; raises ApiError."""
        try:
            return self.load(entry)[1]
        except LoadError as error:
            raise unloadable(entry, error) from error

    def load(self, entry: ModelEntry) -> tuple[MlxTokenizer, Vocabulary]:
        """The tokenizer and the vocabulary, loaded if they are not kept. Any thread; raises LoadError."""
        with self._lock:
            key = (entry.path, entry.chat_template)
            tokenizer = self._tokenizers.pop(key, None) or self._load(entry)
            self._tokenizers[key] = tokenizer
            while len(self._tokenizers) > _MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        return tokenizer

    def _load(self, entry: ModelEntry) -> tuple[MlxTokenizer, Vocabulary]:
        with reading(f"cannot load the tokenizer of {entry.path}"):
            settings = self._tokenizer_config | ({"chat_template": entry.chat_template} if entry.chat_template else {})
            check_files(entry.path)
            wrapper = load_tokenizer(entry.path, settings, eos_token_ids=_eos_ids(entry.path))
            if self._use_default_chat_template and wrapper.chat_template is None:
                wrapper.chat_template = getattr(wrapper, "default_chat_template", None)
            tokenizer = MlxTokenizer(wrapper)
            return tokenizer, Vocabulary(tokenizer, entry.vocab_size or 0)


def _eos_ids(path: Path) -> Any:
    """The end tokens that mlx-lm reads from a model's files: generation_config.json overrides config.json.

    Raises OSError, and ValueError for a value that cannot be a token id.
    """
    ids = None
    for name in ("config.json", "generation_config.json"):
        file = path / name
        if file.is_file():
            ids = read_object(file).get("eos_token_id") or ids
    listed = ids if isinstance(ids, list) else [ids]
    if ids is not None and not all(type(token) is int for token in listed):
        raise ValueError("its eos_token_id is neither a token id nor a list of them")
    return ids
