"""What a model can do is tried: models that mlx-lm batches wrongly, caches that can't be quantized, or cut back."""

from functools import partial

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.cache.lone import LoneCache
from mlx_serve.engine.cache.rows import QuantizedKvRows
from mlx_serve.engine.cache.size import measure
from mlx_serve.engine.generate import trial
from tests.engine.tinymodel import (
    CONFIG,
    EOS,
    LATENT,
    LLAMA4,
    VOCAB_SIZE,
    WIDE_LFM2,
    tiny,
    tiny_gemma,
    tiny_lfm2,
    tiny_llama,
)

# The models of mlx-lm 0.32 that can't run in a batch, and what the trial says of them.
ARCHITECTURES = {
    "afm7": (
        {
            "model_type": "afm7",
            "vocab_size": VOCAB_SIZE,
            "hidden_dim": 32,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "log-probabilities are off by",
    ),
    # Its masks are broadcast over the wrong axis when its KV heads are shared: wrong tokens, or an error.
    "gemma2": (
        {
            "model_type": "gemma2",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB_SIZE,
            "num_key_value_heads": 2,
            "query_pre_attn_scalar": 8,
        },
        "log-probabilities are off by",
    ),
    "gpt_bigcode": (
        {
            "model_type": "gpt_bigcode",
            "n_embd": 32,
            "n_layer": 2,
            "n_inner": 64,
            "n_head": 4,
            "n_positions": 512,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": VOCAB_SIZE,
        },
        "fails in a batch",
    ),
    "longcat_flash_ngram": (
        {
            "model_type": "longcat_flash_ngram",
            "hidden_size": 48,
            "ffn_hidden_size": 64,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "num_layers": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 512,
            "num_attention_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 2,
        },
        "fails in a batch",
    ),
}


def greedy(model, prompt, n):
    """mlx-lm's own tokens, up to the end token."""
    cache, out = make_prompt_cache(model), []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache):
        out.append(int(token))
        if token == EOS:
            break
    return out


def bfloat16(make):
    model = make()
    model.set_dtype(mx.bfloat16)
    return model


class Batched:
    """A model that is off when it runs several sequences."""

    def __init__(self, model, change):
        self._model, self._change = model, change

    def __call__(self, inputs, cache=None):
        logits = self._model(inputs, cache=cache)
        return self._change(logits) if inputs.shape[0] > 1 else logits

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma, tiny_lfm2, lambda: tiny(LATENT)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_runs_together_as_alone_may_be_batched(make, dtype):
    model = make()
    model.set_dtype(dtype)
    assert trial.batch_fault(model) == ""


def test_a_batch_is_tried_with_quantized_caches_too(monkeypatch):
    model, quantization = tiny_llama(head_dim=32), Quantization(8, 32)
    assert trial.batch_fault(model, quantization) == ""
    monkeypatch.setattr(QuantizedKvRows, "bits", property(lambda self: 1 / 0, lambda self, bits: None), raising=False)
    assert trial.batch_fault(model) == ""
    assert "with --kv-bits it fails in a batch" in trial.batch_fault(model, quantization)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(3))
def test_what_cannot_run_in_a_batch_is_found_out(name, seed):
    config, reason = ARCHITECTURES[name]
    assert reason in trial.batch_fault(tiny(config, seed))


def test_a_cache_without_a_form_for_batches_is_named():
    model = tiny_llama()
    own = type("Own", (KVCache,), {})
    model.make_cache = lambda: [own() for _ in model.layers]
    assert trial.batch_fault(model) == "a batch cannot have its Own"


def other_row(logits):
    """Another position's, in the short prompt's row."""
    return mx.concatenate([logits[:1], logits[1:, :, ::-1]])


@pytest.mark.parametrize(
    ("change", "may"),
    [
        (lambda logits: logits * 1.001, True),
        (other_row, False),
        (lambda logits: logits[::-1], False),
        (lambda logits: logits * float("nan"), False),
    ],
)
def test_a_row_that_says_something_else_in_a_batch_is_noticed_and_rounding_is_not(change, may):
    fault = trial.batch_fault(Batched(tiny_llama(), change))
    assert (fault == "") is may
    assert may or "off by" in fault


class InOnePass(Batched):
    """A model that is off when a pass has several tokens of more than one sequence."""

    def __call__(self, inputs, cache=None):
        logits = self._model(inputs, cache=cache)
        return self._change(logits) if inputs.shape[0] > 1 < inputs.shape[1] else logits


def undrafted(model, quantization=None, *, alone=False):
    return trial.draft_fault(model, alone=alone) or trial.pass_fault(model, quantization, alone=alone)


class OffInOnePass(Batched):
    """A model that is off when a pass has as many tokens as one with drafts, or as a long prompt."""

    def __call__(self, inputs, cache=None):
        logits = self._model(inputs, cache=cache)
        return self._change(logits) if inputs.shape[1] > 1 else logits


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_llama, ""),
        (lambda: bfloat16(tiny_llama), ""),
        (tiny_gemma, ""),
        (tiny_lfm2, "its ArraysCache cannot be cut back"),
        (lambda: tiny(LATENT), "expands the whole cache"),
        (lambda: InOnePass(tiny_llama(), other_row), "off by"),
        (lambda: InOnePass(tiny_llama(), lambda logits: logits * float("nan")), "off by"),
        (lambda: InOnePass(tiny_llama(), lambda logits: logits.reshape(3, 5)), "fails with several tokens"),
    ],
)
def test_whether_drafts_can_be_checked_is_tried(make, reason):
    fault = undrafted(model := make())
    assert reason in fault
    assert bool(fault) == bool(reason)
    if not isinstance(model, InOnePass):
        return
    assert trial.batch_fault(model) == ""
    assert undrafted(model, alone=True) == ""


def test_drafts_are_tried_with_quantized_caches_too(monkeypatch):
    model, quantization = tiny_llama(head_dim=32), Quantization(8, 32)
    assert undrafted(model, quantization) == ""
    monkeypatch.setattr(QuantizedKvRows, "bits", property(lambda self: 1 / 0, lambda self, bits: None), raising=False)
    assert undrafted(model) == ""
    assert "fails with several tokens" in undrafted(model, quantization)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_gemma, "its RotatingKVCache cannot be cut back"),
        (lambda: tiny(LLAMA4), "its ChunkedKVCache cannot be cut back"),
        (lambda: tiny(LATENT), ""),
        (lambda: tiny(ARCHITECTURES["afm7"][0]), ""),
        (lambda: tiny(ARCHITECTURES["gpt_bigcode"][0]), ""),
        (lambda: OffInOnePass(tiny_llama(), lambda logits: mx.roll(logits, 1, axis=-1)), "off by"),
    ],
)
def test_drafts_of_what_runs_alone_are_tried_alone(make, reason):
    fault = undrafted(make(), alone=True)
    assert reason in fault
    assert bool(fault) == bool(reason)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma, tiny_lfm2, *(partial(tiny, one) for one in (LLAMA4, LATENT))])
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_never_cut_back_is_called_so_when_the_model_is_loaded(make, alone):
    cache = make_prompt_cache(model := make())
    lone = LoneCache()
    lone.join(cache, 0)
    can = lone.can_cut_back if alone else BatchCache(cache).can_cut_back
    assert ("cannot be cut back" not in trial.draft_fault(model, alone=alone)) is can


class Remembers(llama.Model):
    """What was taken back leaves a trace, outside of the caches' arrays."""

    def __call__(self, inputs, cache):
        layer = cache[0]
        held = mx.array(layer.offset)
        n_fed = getattr(layer, "n_fed", held)
        layer.n_fed = n_fed + inputs.shape[1]
        logits = super().__call__(inputs, cache)
        return mx.where((n_fed > held).reshape(-1, 1, 1), mx.roll(logits, 1, axis=-1), logits)


@pytest.mark.parametrize("alone", [False, True])
def test_a_model_that_does_not_take_tokens_back_is_noticed(alone, monkeypatch):
    model = Remembers(llama.ModelArgs.from_dict(CONFIG))
    assert "off by" in undrafted(model, alone=alone)
    # With nothing to take back it is like any other.
    monkeypatch.setattr(trial, "_N_KEPT", (3, 3))
    assert undrafted(model, alone=alone) == ""


def test_a_latent_cache_is_expanded_also_by_quantized_weights_and_heads_that_share_keys_are_not():
    latent = tiny(LATENT)
    nn.quantize(latent, group_size=32)
    assert "expands" in undrafted(latent)
    assert undrafted(tiny_llama(num_key_value_heads=1)) == ""


def test_a_model_that_fails_alone_too_is_no_matter_of_batches():
    model = tiny_llama()
    model.model.layers[0].mlp = None
    with pytest.raises(TypeError):
        trial.batch_fault(model)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_llama(head_dim=32), ""),
        (lambda: bfloat16(lambda: tiny_llama(head_dim=32)), ""),
        (tiny_llama, "divisible"),
        (tiny_gemma, "RotatingKVCache"),
        (lambda: tiny(WIDE_LFM2), ""),
        (lambda: tiny(LATENT), "fails with one: 'list' object"),
        (lambda: tiny(ARCHITECTURES["longcat_flash_ngram"][0]), "does not quantize its KVCache"),
    ],
)
@pytest.mark.parametrize("computes", [True, False])
def test_whether_a_cache_can_be_quantized_is_tried(make, reason, computes):
    fault = trial.quantization_fault(make(), Quantization(8, 32), computes=computes)
    assert reason in fault
    assert bool(fault) == bool(reason)
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("target", "draft", "quantization", "reason"),
    [
        (tiny_lfm2, tiny_llama, None, "no drafts with the model: its ArraysCache cannot be cut back"),
        (tiny_llama, tiny_lfm2, None, "no drafts with the draft model: its ArraysCache cannot be cut back"),
        (tiny_llama, lambda: tiny(LATENT), None, "the draft model: a pass of several tokens expands the whole cache"),
        (lambda: tiny(LLAMA4), tiny_llama, None, "the model: a batch cannot have its ChunkedKVCache"),
        (tiny_llama, tiny_llama, Quantization(8, 32), "the KV cache of the model cannot be quantized"),
        (lambda: tiny_llama(head_dim=32), tiny_llama, Quantization(8, 32), "the KV cache of the draft model"),
    ],
)
def test_a_draft_model_and_quantized_caches_are_tried_with_both_models(target, draft, quantization, reason):
    fault = trial.refusal(target(), draft(), quantization, computes=False)
    assert "does not work" in fault
    assert reason in fault


class Named:
    """A cache whose arrays have names of their own."""

    def __init__(self):
        self.latent, self.offset, self.fixed = None, 0, mx.zeros((1, 100))

    @property
    def state(self):
        return self.latent

    @property
    def nbytes(self):
        return self.latent.nbytes + self.fixed.nbytes


def test_what_grows_is_counted_whatever_its_arrays_are_called():
    class Model:
        layers = (None,)

        def make_cache(self):
            return [Named()]

        def __call__(self, inputs, cache):
            cache[0].latent = mx.zeros((1, inputs.shape[1], 10))

    size = measure([Model()])
    assert (size.bytes(256), size.bytes(1024)) == (400 + 256 * 40, 400 + 1024 * 40)
