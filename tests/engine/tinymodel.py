"""A tiny random Llama in MLX, and in a directory as mlx-lm loads it, for the tests of the engine."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import tokenizer_utils
from mlx_lm.models import gemma3_text, lfm2, llama, qwen2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.token_choice import Loaded
from mlx_serve.engine.models.tokenizer import MlxTokenizer
from mlx_serve.values import Failed, Job, TokenEvent

VOCAB_SIZE = 260
DEADLINE_S = 60
EOS = 257
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def tiny_llama(seed: int = 0, **config):
    """Random weights, large enough that greedy decoding wanders instead of repeating one token."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG | config))
    scaled = [(name, value * 4 if "proj" in name else value) for name, value in tree_flatten(model.parameters())]
    model.load_weights(scaled)
    mx.eval(model.parameters())
    return model


def tiny_qwen2(seed: int = 0, **config):
    """A model that mlx-lm can split both ways."""
    mx.random.seed(seed)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG | {"model_type": "qwen2"} | config))
    scaled = [(name, value * 4 if "proj" in name else value) for name, value in tree_flatten(model.parameters())]
    model.load_weights(scaled)
    mx.eval(model.parameters())
    return model


def nearly(model, noise: float = 0.1, seed: int = 9):
    """The model with a little noise in its weights, so that it often agrees with what it was made from."""
    mx.random.seed(seed)
    noisy = [
        (name, value + noise * mx.std(value) * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.parameters())
    ]
    model.load_weights(noisy)
    mx.eval(model.parameters())
    return model


GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
}

LFM2 = {
    "model_type": "lfm2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 64,
    "layer_types": ["conv", "full_attention"],
}

# The same with heads wide enough for quantized KV caches.
WIDE_LFM2 = LFM2 | {"hidden_size": 128, "block_dim": 128}

# Multi-latent attention.
LATENT = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "first_k_dense_replace": 2,
}
# Three layers that attend to chunks before one that attends to everything.
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 16,
        "head_dim": 8,
        "hidden_size": 32,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_qk_norm": True,
        "vocab_size": VOCAB_SIZE,
    },
}
# Sliding windows in every other layer.
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": 16,
}
# Three recurrent layers before one of full attention.
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
}


def tiny(config, seed: int = 0):
    """A model of any architecture with random weights, by its configuration."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    scaled = [(name, value * 2 if value.ndim > 1 else value) for name, value in tree_flatten(model.parameters())]
    model.load_weights(scaled)
    mx.eval(model.parameters())
    return model


def tiny_gemma():
    """A model with rotating caches, which merge but do not always trim."""
    mx.random.seed(1)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(GEMMA))
    mx.eval(model.parameters())
    return model


def tiny_lfm2():
    """A model with a recurrent state in one layer and a KV cache in the other."""
    mx.random.seed(2)
    model = lfm2.Model(lfm2.ModelArgs.from_dict(LFM2))
    scaled = [(name, value * 4 if value.ndim > 1 else value) for name, value in tree_flatten(model.parameters())]
    model.load_weights(scaled)
    mx.eval(model.parameters())
    return model


def loaded(model, *, max_sequences: int = 10, draft_model=None) -> Loaded:
    return Loaded(model, VOCAB_SIZE, frozenset([EOS]), (10, EOS), PrefixCache(max_sequences, None), draft_model)


def one_by_one(whole: Loaded, options: BatchOptions | None = None) -> BatchBackend:
    """The backend of a model that runs one job at a time, as if its caches couldn't be rows."""
    return BatchBackend(replace(whole, alone="a test says so"), options or BatchOptions())


def kv_options(quantization: Quantization) -> dict[str, int]:
    """The options of mlx-lm's generators for a quantized KV cache."""
    return {
        "kv_bits": quantization.bits,
        "kv_group_size": quantization.group_size,
        "quantized_kv_start": quantization.start,
    }


def byte_tokenizer(words=(), *, splits: bool = True) -> Tokenizer:
    """A token for each byte and each of ``words``, and control tokens. ``splits``: a text is first cut into words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    begun = [word[:i] for word in words for i in range(2, len(word) + 1)]
    merges = [(part[:-1], part[-1]) for part in begun]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys(begun)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|pad|>", "<|x|>"])
    return tokenizer


def mlx_tokenizer(
    backend=None, *, special=(), added=(), template=None, tool_parser_type=None, **kwargs
) -> MlxTokenizer:
    """mlx-lm's wrapper around bytes and some control tokens, as its ``load`` makes it."""
    backend = backend or byte_tokenizer()
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    kind = tool_parser_type or tokenizer_utils._infer_tool_parser(wrapped)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{kind}") if kind else None
    markers = {"tool_parser": module.parse_tool_call, "tool_call_start": module.tool_call_start} if module else {}
    if module:
        markers["tool_call_end"] = module.tool_call_end
    return MlxTokenizer(tokenizer_utils.TokenizerWrapper(wrapped, **markers, **kwargs))


def write_model(path: Path, seed: int = 0, *, make=tiny_llama, **config) -> Path:
    """A model directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    weights = dict(tree_flatten(make(seed, **config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def tokens_of(job: Job) -> list[int]:
    """What a job that was submitted generates. Raises the ApiError that it fails with."""
    tokens = []
    while True:
        event = job.events.get(timeout=DEADLINE_S)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
            if event.finish:
                return tokens
