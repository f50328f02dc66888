"""KV caches that are kept in 8 bits: what they take, what they give back, and which models can't have them."""

import copy
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_serve.engine.cache.kinds import Quantization, holds, leaves, packed, unpacked
from mlx_serve.engine.cache.prefix_tree import as_ids
from mlx_serve.engine.cache.prefixes import PrefixCache
from mlx_serve.engine.generate.batch import BatchBackend, BatchOptions
from mlx_serve.engine.generate.prefill import prefill
from mlx_serve.engine.generate.trial import refusal
from tests.engine.fuzz import FALCON, MAMBA
from tests.engine.test_prefixes import Seen, job
from tests.engine.tinymodel import loaded, one_by_one, tiny, tiny_gemma, tiny_llama

TOKENS = [(7 * i) % 250 for i in range(100)]
WIDE = {"hidden_size": 128}


@pytest.fixture(scope="module")
def model():
    """Its head dimension is 32."""
    return tiny_llama(**WIDE)


def filled(model, tokens=TOKENS):
    cache = make_prompt_cache(model)
    prefill(model, cache, tokens)
    return cache


def probabilities(model, cache, tokens=(9, 8, 7)):
    return mx.softmax(model(mx.array(list(tokens))[None], cache=cache)[0, -1])


def test_a_kept_cache_is_smaller_and_gives_nearly_the_same(model):
    kept = PrefixCache(10, None, bits=8)
    ids = as_ids(TOKENS)
    kept.store(ids, filled(model))
    (entry,) = kept._entries
    assert all(isinstance(layer, QuantizedKVCache) for layer in entry.cache)
    # A byte a number, and for each 32 numbers a scale and a bias of 4 bytes.
    assert kept.n_bytes == 2 * 2 * 2 * 32 * 100 * (1 + 8 / 32)
    want = probabilities(model, filled(model))
    # A copy, and the cache itself.
    for owner in (None, "owner"):
        cache, n, _ = kept.fetch(as_ids([*TOKENS, 9, 8, 7]), "", owner)
        assert (n, holds(cache, 100)) == (100, True)
        assert all(type(layer) is KVCache for layer in cache)
        assert cache[0].keys.dtype == mx.float32
        got = probabilities(model, cache)
        assert 0 < mx.abs(got - want).max() < 0.05 * want.max()
    assert len(kept) == 0


def test_a_paused_job_s_cache_is_kept_as_it_is(model):
    kept = PrefixCache(10, None, bits=8)
    kept.store(as_ids([*TOKENS, 5, 6]), filled(model, [*TOKENS, 5, 6]))
    # The other one covers it, but not to the last bit.
    kept.store(as_ids(TOKENS), filled(model), paused="owner")
    cache, n, _ = kept.fetch(as_ids([*TOKENS, 9]), "", "owner")
    assert n == 100
    assert mx.array_equal(probabilities(model, cache), probabilities(model, filled(model)))


@pytest.mark.parametrize("is_batch", [True, False])
def test_a_pause_changes_no_token(model, is_batch):
    def backend(bits=8):
        whole = replace(loaded(model), prefix_cache=PrefixCache(10, None, bits=bits))
        return BatchBackend(whole, BatchOptions()) if is_batch else one_by_one(whole)

    paused = Seen(backend())
    stores = []
    cache = paused.backend._loaded.prefix_cache
    store = cache.store
    cache.store = lambda *args, **kwargs: (stores.append(kwargs["paused"] is not None), store(*args, **kwargs))
    one = job(TOKENS, 12)
    paused.backend.insert(one)
    while len(paused.tokens.get(one, ())) < 4:
        paused.step()
    for _, event in paused.backend.pause([one]):
        paused.tokens[one].append(event.token)
    assert stores == [True]
    paused.run(one)
    assert stores == [True, False]
    assert paused.tokens[one] == Seen(backend(None)).run(job(TOKENS, 12))[0]


def test_a_kept_cache_is_cut_back_like_any_other(model):
    kept = PrefixCache(10, None, bits=8)
    kept.store(as_ids(TOKENS), filled(model))
    cache, n, _ = kept.fetch(as_ids([*TOKENS[:60], 1, 2, 3]))
    assert (n, holds(cache, 60)) == (60, True)
    want = probabilities(model, filled(model, TOKENS[:60]))
    assert mx.abs(probabilities(model, cache) - want).max() < 0.05 * want.max()


def test_what_is_kept_again_and_again_does_not_drift(model):
    cache = filled(model)
    once = again = unpacked(packed(cache, 8))
    for _ in range(20):
        again = unpacked(packed(again, 8))
    for first, last, right in zip(once, again, cache, strict=True):
        right_keys = right.keys_and_values()[0]
        off_once, off_again = (mx.abs(one.keys - right_keys).max() for one in (first, last))
        assert off_again < 2 * off_once


def test_windows_and_states_stay_as_they_are():
    falcon = tiny(FALCON | {"head_dim": 32})
    cache = filled(falcon)
    kept = packed(cache, 8)
    same = [one is other for one, other in zip(leaves(cache), leaves(kept), strict=True)]
    assert same == [True, False] * 2
    want = probabilities(falcon, copy.deepcopy(cache))
    assert mx.abs(probabilities(falcon, unpacked(kept)) - want).max() < 0.05 * want.max()


@pytest.mark.parametrize(
    ("make", "quantization", "says"),
    [
        (lambda: tiny_llama(**WIDE), None, ""),
        (lambda: tiny_llama(**WIDE), Quantization(8, 32), "--kv-bits quantizes the KV cache already"),
        (tiny_llama, None, "no group of (64, 32) divides its dimensions of [8]"),
        (tiny_gemma, None, "no group of (64, 32) divides its dimensions of [8]"),
        (lambda: tiny(MAMBA), None, "no layers of full attention"),
    ],
)
def test_a_model_whose_caches_cannot_be_kept_so_is_refused(make, quantization, says):
    fault = refusal(make(), None, quantization, computes=False, prompt_cache_bits=8)
    assert says in fault
    assert fault.startswith("--prompt-cache-bits does not work: " if says else "")
    assert bool(fault) == bool(says)
