"""A GGUF file of the llama family, made into a model directory that plain ``mlx_lm.load`` reads.

Knows GGUF's names, its order of the rotary rows and SmolLM2's tokenizer. Must not know where the file came from or
where the directory ends up: no network, no cache folder, no locks; it writes into the folder it is given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_serve.values import Progress

# mlx and tokenizers are imported inside the functions that use them. The command line imports this module and must
# work without MLX; and where OpenBLAS is to stand in for MLX's own BLAS, it has to be loaded before mlx is.
if TYPE_CHECKING:
    import mlx.core as mx
    from tokenizers import Tokenizer

Arrays: TypeAlias = "dict[str, mx.array]"
Metadata: TypeAlias = Mapping[str, Any]  # str, list[str] or mx.array, as mx.load hands it out

GROUP_SIZE = 32  # values under one scale, in all of GGUF's formats that mx.load keeps packed (Q4_0, Q4_1, Q8_0)

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_model(gguf: Path, folder: Path, *, quantized: bool, progress: Progress) -> None:
    """Write the model in ``gguf`` to ``folder``: packed as it is, or unpacked to float32."""
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    packed, metadata = loaded
    config = model_config(metadata)
    packed = to_mlx_names(packed, n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"])
    if quantized:
        config["quantization"] = quantization(packed)
    save_weights(folder / "model.safetensors", in_half(packed) if quantized else unpacked(packed), progress)
    write_tokenizer(folder, metadata)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_ids(metadata))


# Weights


def to_mlx_names(arrays: Arrays, *, n_heads: int, n_kv_heads: int) -> Arrays:
    rotary = {"attn_q": n_heads, "attn_k": n_kv_heads}
    return {
        mlx_name(name): half_split(array, rotary[part]) if (part := name.split(".")[-2]) in rotary else array
        for name, array in arrays.items()
    }


def mlx_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_OUTER_NAMES[stem]}.{leaf}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{leaf}"


def half_split(rows: mx.array, n_heads: int) -> mx.array:
    """Undo GGUF's interleaving of a head's two rotary halves: a0 b0 a1 b1 ... back to a0 a1 ... b0 b1 ...

    Whole rows move, so the packed weights, their scales and their biases are all treated alike.
    """
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def unpacked(arrays: Arrays) -> Arrays:
    import mlx.core as mx

    return {
        name: _dequantize(arrays, stem) if f"{stem}.scales" in arrays else array.astype(mx.float32)
        for name, array in arrays.items()
        if (stem := name.rpartition(".")[0]) and not name.endswith((".scales", ".biases"))
    }


def _dequantize(arrays: Arrays, stem: str) -> mx.array:
    import mlx.core as mx

    # The scales are widened first: MLX computes in their type, and float16 would round every weight.
    scales, biases = (arrays[f"{stem}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
    packed = arrays[f"{stem}.weight"]
    return mx.dequantize(packed, scales, biases, group_size=GROUP_SIZE, bits=_bits(packed, scales))


def in_half(arrays: Arrays) -> Arrays:
    """The packed weights with the norms in float16 like the scales, or each layer would be computed in float32.

    Measured: whichever token comes first (that is where they peak), no activation of this model passes 31,000, and
    float16 ends at 65,504. bfloat16 would round the scales.
    """
    import mlx.core as mx

    return {name: a.astype(mx.float16) if a.dtype == mx.float32 else a for name, a in arrays.items()}


def quantization(arrays: Arrays) -> dict[str, Any]:
    """The ``quantization`` entry of config.json: the usual width, and by name each layer with another one.

    A Q4_1 file is not 4-bit throughout: the token embeddings, which are also the output layer, have 8.
    """
    stems = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
    bits = {stem: _bits(arrays[f"{stem}.weight"], arrays[f"{stem}.scales"]) for stem in stems}
    usual = Counter(bits.values()).most_common(1)[0][0]
    unusual = {stem: {"group_size": GROUP_SIZE, "bits": n} for stem, n in bits.items() if n != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, **unusual}


def _bits(packed: mx.array, scales: mx.array) -> int:
    # 32 values of n bits fill n words of 32 bits.
    return packed.shape[-1] // scales.shape[-1]


def save_weights(path: Path, arrays: Arrays, progress: Progress) -> None:
    import mlx.core as mx

    for n_done, array in enumerate(arrays.values(), 1):
        mx.eval(array)
        progress("converting the demo model", n_done, len(arrays))
    try:
        mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX's word for every failure of the file system
        raise OSError(str(error)) from error


# Configuration


def model_config(metadata: Metadata) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-05 was a float32 in the file
        "rope_theta": number("rope.freq_base"),
        "vocab_size": number("vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_token_ids(metadata),
    }


def _token_ids(metadata: Metadata) -> dict[str, int]:
    return {
        key: metadata[f"tokenizer.ggml.{gguf_key}_token_id"].item()
        for key, gguf_key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }


# Tokenizer


def write_tokenizer(folder: Path, metadata: Metadata) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = build_tokenizer(
        tokens, metadata["tokenizer.ggml.merges"], control_ids(metadata["tokenizer.ggml.token_type"].tolist())
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def control_ids(token_types: Iterable[int]) -> list[int]:
    return [token_id for token_id, kind in enumerate(token_types) if kind == 3]  # 3: GGUF's "control token"


def build_tokenizer(tokens: Sequence[str], merges: Iterable[str], special_ids: Iterable[int]) -> Tokenizer:
    """Byte-level BPE that takes numbers digit by digit, which is what GGUF means by ``pre = smollm``."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special_ids])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    def token(key: str) -> str:
        return str(metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{key}_token_id"].item()])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # it would eat spaces before punctuation
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
