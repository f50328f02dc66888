"""Caches that are cut back by means of checkpoints: the model goes on as if it had read only so much."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_serve.engine.cache.checkpoints import Checkpoint, Trail, borders, cut, reach, take, thinned, up_to
from mlx_serve.engine.cache.kinds import holds, leaves
from mlx_serve.engine.generate.prefill import prefill
from tests.engine.fuzz import BAICHUAN, FALCON, LONGCAT, MAMBA
from tests.engine.tinymodel import GPT_OSS, QWEN3_NEXT, tiny, tiny_gemma, tiny_lfm2, tiny_llama

MODELS = {
    "plain": tiny_llama,
    "gemma": tiny_gemma,
    "lfm2": tiny_lfm2,
    "gpt-oss": lambda: tiny(GPT_OSS),
    "qwen3-next": lambda: tiny(QWEN3_NEXT),
    "recurrent": lambda: tiny(MAMBA),
    "lists": lambda: tiny(LONGCAT),
    "recurrent lists": lambda: tiny(FALCON),
    "window lists": lambda: tiny(BAICHUAN),
}
TOKENS = [(7 * i + i // 5) % 250 for i in range(100)]


def filled(model, *slices):
    """A cache of these tokens, and checkpoints between the slices."""
    cache, n, checkpoints = make_prompt_cache(model), 0, []
    for tokens in slices:
        prefill(model, cache, tokens)
        n += len(tokens)
        checkpoints.append(take(cache, n))
    return cache, [one for one in checkpoints[:-1] if one is not None]


def logits(model, cache, tokens=(9, 8, 7)):
    return model(mx.array(list(tokens))[None], cache=cache)[0]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_cut_at_a_checkpoint_goes_on_as_what_ended_there(name):
    model = MODELS[name]()
    cache, checkpoints = filled(model, TOKENS[:30], TOKENS[30:47], TOKENS[47:])
    for _ in range(3):
        # Token by token, as in decoding, a window is written in place.
        logits(model, cache, [5])
    before = logits(model, cut(cache, 103, checkpoints, 103))
    for n in (47, 30):
        assert reach(cache, 103, checkpoints, n) == n
        part = cut(cache, 103, checkpoints, n)
        assert holds(part, n)
        straight, _ = filled(model, TOKENS[:n])
        # One token first, which a window writes in place, then several.
        for tokens in ([3], [9, 8, 7]):
            assert mx.allclose(logits(model, part, tokens), logits(model, straight, tokens), atol=1e-4)
    # Neither the cache nor its checkpoints have changed.
    assert mx.array_equal(logits(model, cut(cache, 103, checkpoints, 103)), before)
    again, straight = cut(cache, 103, checkpoints, 47), filled(model, TOKENS[:47])[0]
    assert mx.allclose(logits(model, again), logits(model, straight), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("plain", "lists")])
def test_a_prompt_that_parts_between_checkpoints_reaches_the_last_one_before(name):
    cache, checkpoints = filled(MODELS[name](), TOKENS[:30], TOKENS[30:47], TOKENS[47:])
    assert [reach(cache, 100, checkpoints, n) for n in (29, 30, 46, 47, 99, 100, 120)] == [0, 30, 30, 47, 47, 100, 100]
    assert [reach(cache, 100, (), n) for n in (99, 100)] == [0, 100]


@pytest.mark.parametrize("name", ["plain", "lists"])
def test_full_attention_needs_no_checkpoints(name):
    cache, checkpoints = filled(MODELS[name](), TOKENS[:30], TOKENS[30:])
    assert checkpoints == []
    assert reach(cache, 100, (), 77) == 77


@pytest.mark.parametrize("name", ["gemma", "gpt-oss"])
def test_a_window_that_is_not_full_can_be_cut_to_any_token(name):
    model = MODELS[name]()
    cache, checkpoints = filled(model, TOKENS[:9], TOKENS[9:])
    # 9 tokens fit into the window: the checkpoint serves for all before it.
    assert [reach(cache, 100, checkpoints, n) for n in (5, 9, 50)] == [5, 9, 9]
    want = logits(model, filled(model, TOKENS[:5])[0])
    assert mx.allclose(logits(model, cut(cache, 100, checkpoints, 5)), want, atol=1e-4)
    short, _ = filled(model, TOKENS[:9])
    assert reach(short, 9, (), 5) == 5
    assert mx.allclose(logits(model, cut(short, 9, (), 5)), want, atol=1e-4)


def test_a_checkpoint_of_a_window_holds_no_more_than_the_window():
    layer = RotatingKVCache(16)
    numbers = mx.random.uniform(shape=(1, 1, 4000, 64))
    mx.eval(numbers)
    layer.update_and_fetch(numbers[..., :3000, :], numbers[..., :3000, :])
    layer.update_and_fetch(numbers[..., 3000:, :], numbers[..., 3000:, :])
    before = mx.get_active_memory()
    checkpoint = take([KVCache(), layer], 4000)
    assert checkpoint.n_bytes == 2 * 16 * 64 * 4
    del numbers, layer
    # What was computed for the whole chunk is given back.
    assert before - mx.get_active_memory() > 1_000_000


def test_of_an_unknown_type_no_checkpoint_is_taken():
    class Other(RotatingKVCache):
        """May keep anything."""

    assert take([KVCache(), Other(16)], 30) is None
    assert take([KVCache(), RotatingKVCache(16)], 30) is not None


def made(*positions, n_bytes=10, stops=()):
    return [Checkpoint(n, (), n_bytes, n in stops) for n in positions]


def places(checkpoints):
    return [one.n_tokens for one in checkpoints]


def test_of_too_many_checkpoints_those_near_others_are_dropped():
    assert places(thinned(made(100, 200, 210, 300, 400), 40)) == [100, 200, 300, 400]
    some = made(0, 100, 200, 300, 350, 400, stops=(100, 400))
    assert places(thinned(some, 60)) == [0, 100, 200, 300, 350, 400]
    assert places(thinned(some, 30)) == [100, 300, 400]
    # Two are kept whatever they cost: where the first turn ends, and where the last one begins.
    assert places(thinned(some, 0)) == [100, 400]
    # Between stops that lie near each other and slices that lie far apart.
    assert places(thinned(made(0, 90, 100, 200, 310, stops=(90, 100, 310)), 40)) == [90, 100, 200, 310]
    assert len(thinned(made(*range(200)), 10_000)) == 64


def test_borders_of_turns_are_found_and_thinned():
    ids = np.zeros(10_000, dtype=np.int64)
    # Each turn ends with one control token, and the next one begins with another.
    ends = [200, 700, 1200, 1300, 1310, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000]
    for n in ends:
        ids[n] = 7
        ids[n + 2] = 8
    found = borders(ids, 0, {7, 8})
    assert found == [200, 700, 1300, 3000, 5000, 7000, 8000, 9000]
    assert borders(ids, 7990, {7, 8}) == [9000]
    assert borders(ids, 3000, {7, 8}) == [4000, 5000, 6000, 7000, 8000, 9000]
    assert borders(ids, 9500, {7}) == []
    assert borders(ids, 0, ()) == []


def test_slices_end_at_stops():
    trail = Trail()
    trail.plan(100, {50, 110, 300, 310, 500}, {290, 320, 400, 520, 600})
    assert trail.stops == [290, 300, 400, 500, 600]
    assert [trail.end(100, 2048), trail.end(100, 150)] == [290, 250]
    trail.want(100, 450)
    trail.want(100, 610)
    trail.want(100, 90)
    assert trail.stops == [290, 300, 400, 450, 500, 600]
    assert [trail.will_reach(n) for n in (289, 299, 1000)] == [0, 290, 600]


def test_checkpoints_are_taken_at_stops_and_between_them_where_slices_end():
    model, trail = tiny_lfm2(), Trail()
    cache = make_prompt_cache(model)
    trail.plan(0, {900}, {1500})
    n = 0
    for size in (100, 200, 300, 250, 50, 300, 300, 100):
        prefill(model, cache, [1] * size)
        n += size
        trail.reached(cache, n)
    # Not at 850, which is near the stop at 900, and not at 1200, near enough to 1500 and 900 both.
    assert [(one.n_tokens, one.is_stop) for one in trail.kept] == [
        (300, False),
        (600, False),
        (900, True),
        (1200, False),
        (1500, True),
    ]
    assert trail.stops == []
    assert trail.will_reach(1400) == 1200
    assert places(up_to(trail.kept, 900)) == [300, 600, 900]


def test_checkpoints_take_a_share_of_the_bytes_of_full_attention():
    model, trail = tiny_gemma(), Trail()
    cache, n = make_prompt_cache(model), 0
    # A window of 16 tokens in one layer of two; a stop every 20 tokens would cost 0.8 of the other layer.
    for _ in range(50):
        trail.want(n, n + 32)
        prefill(model, cache, [1] * 32)
        n += 32
        trail.reached(cache, n)
        complete = cache[1].nbytes
        assert sum(one.n_bytes for one in trail.kept) <= max(complete / 2, 2 * trail.kept[0].n_bytes)
    assert len(trail.kept) > 20


def test_windows_that_are_not_full_need_one_checkpoint():
    model, trail = tiny(GPT_OSS | {"sliding_window": 100}), Trail()
    cache, n = make_prompt_cache(model), 0
    for _ in range(6):
        trail.want(n, n + 32)
        prefill(model, cache, [1] * 32)
        n += 32
        trail.reached(cache, n)
        if n < 100:
            assert places(trail.kept) == [n]
    assert places(trail.kept) == [96, 192]
    assert trail.will_reach(50) == 50
    assert all(isinstance(layer, RotatingKVCache) for layer in trail.kept[0].layers)
    assert len(list(leaves(cache))) == 4
