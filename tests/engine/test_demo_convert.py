"""GGUF to MLX on small arrays: the rotary order, the packed weights, the tokenizer."""

import json

import mlx.core as mx
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mlx_serve.demo import gguf

ALPHABET = sorted(ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]

TEXTS = [
    "hello hello",
    "  spaces   and\ttabs\n\n\n",
    "12 2024 3.14",
    "naïve café",
    "日本語と中文",
    "😀👩‍👩‍👧🇫🇷",
    "a\u0000b\x7f",
    "<|im_start|>user\nhello<|im_end|>\n",
    "",
]


def interleaved(rows, n_heads):
    """llama.cpp's permutation, as its convert_hf_to_gguf.py writes it."""
    return rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def packed(prefix, n_rows, n_columns, bits=4):
    weights = mx.random.normal((n_rows, n_columns), key=mx.random.key(len(prefix)))
    parts = mx.quantize(weights, group_size=32, bits=bits)
    names = ("weight", "scales", "biases")
    return {f"{prefix}.{n}": a if n == "weight" else a.astype(mx.float16) for n, a in zip(names, parts, strict=True)}


@pytest.fixture
def tiny():
    return {
        **packed("token_embd", 16, 64, bits=8),
        **packed("blk.0.attn_q", 64, 64),
        **packed("blk.0.attn_k", 32, 64),
        **packed("blk.0.attn_v", 32, 64),
        "blk.0.attn_norm.weight": mx.ones(64),
        "output_norm.weight": mx.arange(64, dtype=mx.float32),
    }


@pytest.fixture
def metadata():
    numbers = {
        "embedding_length": 64, "feed_forward_length": 128, "block_count": 1, "attention.head_count": 4,
        "attention.head_count_kv": 2, "context_length": 512, "vocab_size": len(TOKENS),
    }  # fmt: skip
    return {
        **{f"llama.{key}": mx.array(value, dtype=mx.uint32) for key, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(100000.0),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))),
        **{
            f"tokenizer.ggml.{key}_token_id": mx.array(i, dtype=mx.uint32)
            for key, i in {"unknown": 0, "bos": 1, "eos": 2, "padding": 2}.items()
        },
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


@pytest.mark.parametrize(("n_heads", "head_size", "n_columns"), [(1, 2, 1), (1, 8, 3), (3, 4, 5), (9, 64, 18)])
def test_half_split_undoes_the_interleaving(n_heads, head_size, n_columns):
    rows = mx.arange(n_heads * head_size * n_columns).reshape(n_heads * head_size, n_columns)
    assert mx.array_equal(gguf.half_split(interleaved(rows, n_heads), n_heads), rows)
    assert mx.array_equal(interleaved(gguf.half_split(rows, n_heads), n_heads), rows)


def test_half_split_of_one_head():
    rows = mx.array([[0], [10], [1], [11], [2], [12]])  # a0 b0 a1 b1 a2 b2
    assert gguf.half_split(rows, 1).flatten().tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.scales", "model.embed_tokens.scales"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.29.ffn_down.biases", "model.layers.29.mlp.down_proj.biases"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ],
)
def test_names(name, expected):
    assert gguf.mlx_name(name) == expected


def test_rotary_rows_move_packed_as_they_do_unpacked(tiny):
    moved_then_unpacked = gguf.unpacked(gguf.to_mlx_names(tiny, n_heads=4, n_kv_heads=2))
    plain = gguf.unpacked(tiny)
    for part, projection, n_heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        unpacked_then_moved = gguf.half_split(plain[f"blk.0.{part}.weight"], n_heads)
        assert mx.array_equal(moved_then_unpacked[f"model.layers.0.self_attn.{projection}.weight"], unpacked_then_moved)
    values = moved_then_unpacked["model.layers.0.self_attn.v_proj.weight"]
    assert mx.array_equal(values, plain["blk.0.attn_v.weight"])


def test_unpacked_is_float32_computed_in_float32(tiny):
    plain = gguf.unpacked(tiny)
    assert {array.dtype for array in plain.values()} == {mx.float32}
    assert all(name.endswith(".weight") for name in plain)
    words, scales, biases = (tiny[f"blk.0.attn_v.{leaf}"] for leaf in ("weight", "scales", "biases"))
    nibbles = ((words[:, :, None] >> mx.arange(0, 32, 4, dtype=mx.uint32)) & 15).reshape(32, 2, 32).astype(mx.float32)
    by_hand = nibbles * scales.astype(mx.float32)[:, :, None] + biases.astype(mx.float32)[:, :, None]
    assert mx.allclose(plain["blk.0.attn_v.weight"], by_hand.reshape(32, 64), rtol=0, atol=1e-6)


def test_both_widths_are_declared(tiny):
    declared = gguf.quantization(gguf.to_mlx_names(tiny, n_heads=4, n_kv_heads=2))
    assert declared == {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}


@pytest.mark.parametrize("quantized", [True, False])
def test_written_directory(tmp_path, monkeypatch, tiny, metadata, quantized):
    monkeypatch.setattr(mx, "load", lambda path, return_metadata: (tiny, metadata))
    steps = []
    gguf.write_model(tmp_path / "x", tmp_path, quantized=quantized, progress=lambda *step: steps.append(step))
    monkeypatch.undo()
    written = mx.load(str(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization" in config) is quantized
    assert config["rms_norm_eps"] == 1e-5
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["eos_token_id"]) == (4, 2, 2)
    assert steps[-1] == ("converting the demo model", len(written), len(written))
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_the_packed_variant_unpacks_to_the_float32_one(tmp_path, tiny):
    renamed = gguf.to_mlx_names(tiny, n_heads=4, n_kv_heads=2)
    for name, arrays in (("packed", gguf.in_half(renamed)), ("plain", gguf.unpacked(renamed))):
        gguf.save_weights(tmp_path / f"{name}.safetensors", arrays, lambda *step: None)
    packed_file, plain_file = (mx.load(str(tmp_path / f"{name}.safetensors")) for name in ("packed", "plain"))
    assert {array.dtype for array in packed_file.values()} == {mx.uint32, mx.float16}
    unpacked = gguf.unpacked(packed_file)
    assert unpacked.keys() == plain_file.keys()
    assert all(mx.array_equal(unpacked[name], plain_file[name]) for name in plain_file)


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="absent"):
        gguf.save_weights(tmp_path / "absent" / "x.safetensors", {"a": mx.zeros(1)}, lambda *step: None)


@pytest.fixture
def tokenizer():
    return gguf.build_tokenizer(TOKENS, MERGES, range(len(SPECIAL)))


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_merges_words_and_splits_digits(tokenizer):
    assert tokenizer.encode("hello hello").tokens == ["hello", "Ġhello"]
    assert tokenizer.encode("12").tokens == ["1", "2"]  # the merge exists, the digits come one by one all the same


def test_control_tokens_are_special(tokenizer):
    assert tokenizer.encode("<|im_start|>hello<|im_end|>").ids == [1, TOKENS.index("hello"), 2]
    assert tokenizer.decode([1, TOKENS.index("hello"), 2], skip_special_tokens=True) == "hello"
    assert gguf.control_ids([3, 1, 6, 3]) == [0, 3]


def test_tokenizer_config(metadata):
    config = gguf.tokenizer_config(metadata)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
