"""The demo model itself, in the user's own cache: plain mlx_lm loads it and it answers."""

import json
from hashlib import sha256

import mlx.core as mx
import mlx_lm
import pytest

from mlx_serve.demo.model import DEMO_MODEL_NAME, ensure_demo_model

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def folder():
    return ensure_demo_model()


@pytest.fixture(scope="module")
def loaded(folder):
    return mlx_lm.load(str(folder))


def test_the_directory_is_what_its_manifest_says(folder):
    assert folder.name.startswith(DEMO_MODEL_NAME)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    for name, entry in files.items():
        assert sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]


def test_a_second_call_does_nothing(folder):
    assert ensure_demo_model(progress=lambda *step: pytest.fail(f"did {step}")) == folder


def test_it_answers_token_for_token(loaded):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    steps = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=32))
    assert [step.token for step in steps] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert "".join(step.text for step in steps) == ANSWER
    assert steps[-1].finish_reason == "stop"


def test_the_chat_template_is_smollm2s(loaded):
    _, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt)[:2] == [1, 9690]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! don't can't I'll",
        "  leading, trailing  ",
        "\n\n\n\t\t  x   y\r\n        deep",
        "1234567890 3.14159 1,000,000 ٣",
        "naïve façade Straße ÆØÅ",
        "日本語のテキスト、中文文本，한국어",
        "😀👍🏽👩‍👩‍👧‍👦🇫🇷",
        "def f(x):\n    return {'a': [x ** 2]}  # ok",
        "مرحبا שלום नमस्ते",
        "<|im_start|>user\nx<|im_end|>\n",
        " ,.!?' s 'm n't",
        "",
    ],
)
def test_tokenizer_round_trip(loaded, text):
    _, tokenizer = loaded
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    for token_id in ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    assert detokenizer.text == text.removeprefix(" ")  # mlx-lm's streaming one drops a leading space


def test_numbers_come_digit_by_digit(loaded):
    _, tokenizer = loaded
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024", add_special_tokens=False)] == ["2", "0", "2", "4"]


def test_the_packed_variant_has_the_same_weights(folder):
    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("the packed variant is the one above")
    config = json.loads((ensure_demo_model(quantized=True) / "config.json").read_text())
    packed = mx.load(str(ensure_demo_model(quantized=True) / "model.safetensors"))
    plain = mx.load(str(folder / "model.safetensors"))
    for stem in ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"):
        layout = {"bits": config["quantization"]["bits"], "group_size": 32, **config["quantization"].get(stem, {})}
        scales, biases = (packed[f"{stem}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
        assert mx.array_equal(
            mx.dequantize(packed[f"{stem}.weight"], scales, biases, **layout), plain[f"{stem}.weight"]
        )
