"""Rows of a batch: a sequence among others has the cache that it has alone, and nobody else's rows are copied."""

import copy
import math
import random

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_serve.engine.cache.banks import bank_of, rows_bytes
from mlx_serve.engine.cache.batch_cache import BatchCache
from mlx_serve.engine.cache.kinds import Quantization, is_quantized
from mlx_serve.engine.cache.rows import MAX_PASS, can_join
from mlx_serve.engine.cache.size import KvSize
from mlx_serve.engine.generate.logprobs import OutputLogprobs
from mlx_serve.engine.generate.row import Row
from mlx_serve.engine.generate.rows import Rows
from mlx_serve.engine.generate.sampling import make_processors, make_sampler
from mlx_serve.values import Sampling
from tests.engine import fuzz
from tests.engine.tinymodel import LATENT, VOCAB_SIZE, WIDE_LFM2, kv_options, tiny, tiny_gemma, tiny_lfm2, tiny_llama

MODELS = {
    "plain": tiny_llama,
    "windows": tiny_gemma,
    "latent": lambda: tiny(LATENT),
    "recurrent": lambda: tiny(fuzz.MAMBA),
    "mixed": tiny_lfm2,
    "lists": lambda: tiny(fuzz.LONGCAT),
    "recurrent lists": lambda: tiny(fuzz.FALCON),
    "window lists": lambda: tiny(fuzz.BAICHUAN),
    "quantized": lambda: tiny_llama(head_dim=32),
    "quantized, mixed": lambda: tiny(WIDE_LFM2),
}
CUT_BACK = ["plain", "windows", "latent", "lists", "quantized"]


def cache_of(name, model, tokens):
    """A sequence's own cache. The first pass of a quantized one is short: it is made before the cache is quantized."""
    cache = make_prompt_cache(model)
    if tokens:
        model(mx.array(tokens[:2])[None], cache=cache)
    if name.startswith("quantized"):
        maybe_quantize_kv_cache(cache, 0, 32, 8)
    if len(tokens) > 2:
        model(mx.array(tokens[2:])[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def near(a, b, tolerance):
    return mx.allclose(a, b, atol=tolerance).item()


class Sequences:
    """Sequences in a batch, each with a copy that goes on alone."""

    def __init__(self, name, rng):
        self.name, self.rng, self.model = name, rng, MODELS[name]()
        self.batch = BatchCache(cache_of(name, self.model, []))
        self.alone = []

    def join(self, n_tokens):
        cache = cache_of(self.name, self.model, self.random(n_tokens))
        self.alone.append(copy.deepcopy(cache))
        self.batch.join(cache, n_tokens)

    def leave(self, row):
        self.batch.leave(row)
        self.alone[row] = self.alone[-1]
        self.alone.pop()

    def come_back(self, row):
        """Leave, and join again with the cache that the batch gave back."""
        length, alone = self.batch.lengths[row], self.alone[row]
        max_spare = self.rng.choice([0, math.inf])
        cache = self.batch.leave(row, max_spare)
        self.alone[row] = self.alone[-1]
        self.alone.pop()
        self.batch.join(cache, length, max_spare)
        self.alone.append(alone)

    def run(self, n_tokens, n_kept=None):
        """A pass over so many tokens a row, of which ``n_kept`` stay; its logits are those of each row alone."""
        tokens = [self.random(n_tokens) for _ in self.alone]
        self.batch.begin(n_tokens)
        logits = self.model(mx.array(tokens), cache=self.batch.layers)
        # Another rounding before a number is quantized may change it by a whole step.
        tolerance = 0.05 if self.name.startswith("quantized") else 1e-3
        kept = n_kept or [n_tokens] * len(tokens)
        self.batch.advance(kept)
        for n, row, own, cache in zip(kept, logits, tokens, self.alone, strict=True):
            for i in range(n):
                assert near(self.model(mx.array([own[i : i + 1]]), cache=cache)[0, 0], row[i], tolerance)

    def random(self, n):
        return [self.rng.randrange(250) for _ in range(n)]


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_join_and_leave_are_as_they_are_alone(name):
    rng = random.Random(name)
    sequences = Sequences(name, rng)
    lengths = [40, 1, 0, 17, 100, 3, 60]
    for n in lengths[:3]:
        sequences.join(n)
    for n in lengths[3:]:
        sequences.run(1)
        sequences.join(n)
        sequences.run(1)
        sequences.leave(rng.randrange(len(sequences.alone)))
        sequences.come_back(rng.randrange(len(sequences.alone)))
        sequences.run(1)
    while sequences.alone:
        sequences.run(1)
        sequences.leave(0)
    assert sequences.batch.nbytes == 0
    sequences.join(5)
    sequences.run(1)


@pytest.mark.parametrize("name", CUT_BACK)
def test_dropped_tokens_leave_no_trace(name):
    rng = random.Random(name)
    sequences = Sequences(name, rng)
    # The window of 16 tokens is full in some rows, and becomes full in another.
    for n in (40, 3, 14, 16):
        sequences.join(n)
    for n_tokens in (4, MAX_PASS, 1, 3, MAX_PASS, MAX_PASS, 2):
        sequences.run(n_tokens, [rng.randrange(1, n_tokens + 1) for _ in sequences.alone])
        if n_tokens == 3:
            sequences.come_back(1)


def test_what_a_row_held_before_is_gone():
    sequences = Sequences("plain", random.Random(0))
    for n in (30, 50):
        sequences.join(n)
    for layer in sequences.batch.layers:
        layer.values[len(layer.values) // 2 :] = mx.array(float("nan"))
    sequences.leave(1)
    sequences.join(0)
    sequences.run(1)


def large(n_rows, length, n_layers=2):
    """A batch with caches of a known size, and one more sequence's cache."""

    def single():
        cache = [KVCache() for _ in range(n_layers)]
        for layer in cache:
            layer.update_and_fetch(*(mx.ones((1, 2, length, 64)) for _ in range(2)))
        mx.eval([layer.state for layer in cache])
        return cache

    batch = BatchCache(single())
    for _ in range(n_rows):
        batch.join(single(), length)
    return batch, single()


def copied(work):
    """MLX's peak while ``work`` runs, beyond what is held before it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("n_rows", [16, 13])
def test_joining_and_leaving_copy_one_row_and_no_other(n_rows):
    batch, single = large(n_rows, 1000)
    row_bytes = 2 * 2 * 2 * 1024 * 64 * 4
    held = batch.nbytes
    if n_rows == 16:
        assert copied(lambda: batch.join(single, 1000)) <= 1.05 * row_bytes
        batch.leave(n_rows)
    left = []
    assert copied(lambda: left.append(batch.leave(0))) <= 1.3 * row_bytes  # the row, and one array of that in its place
    assert copied(lambda: batch.copy(3)) <= 1.05 * row_bytes
    assert copied(lambda: batch.copy(3, 250)) <= 0.3 * row_bytes
    assert batch.nbytes == held


def test_without_spare_memory_rows_come_and_go_an_array_at_a_time():
    batch, single = large(8, 1000, n_layers=16)
    batch.give_up_spare()
    row_bytes = batch.nbytes // 8
    array_bytes = batch.nbytes // 32
    assert batch.spare_bytes == 0
    # The new row, less what is freed of the sequence's own cache. The other rows are copied: an array of them more.
    assert copied(lambda: batch.join(single, 1000, max_spare=0)) <= 1.3 * array_bytes
    assert batch.nbytes == 9 * row_bytes
    left = []
    assert copied(lambda: left.append(batch.leave(4, max_spare=0))) <= 1.3 * array_bytes
    assert batch.nbytes == 8 * row_bytes
    # Longer rows: all arrays grow.
    batch.lengths[0] = 1024
    assert copied(lambda: batch.begin(1)) <= batch.nbytes - 8 * row_bytes + 1.3 * array_bytes
    assert batch.nbytes == 8 * row_bytes * 1280 // 1024


def test_the_last_row_is_moved():
    batch, _ = large(1, 1000)
    left = []
    assert copied(lambda: left.append(batch.leave(0))) < batch.nbytes / 100 + 10_000
    assert batch.nbytes == 0
    assert mx.all(left[0][0].state[0][:, :, :1000] == 1).item()


def test_spare_rows_take_what_they_may():
    batch, single = large(7, 100)
    assert batch.spare_bytes == 0
    row_bytes = batch.row_bytes
    batch.join(single, 100, max_spare=1.5 * row_bytes)
    assert batch.spare_bytes == row_bytes
    batch.leave(0, max_spare=2 * row_bytes)
    assert batch.spare_bytes == 2 * row_bytes
    batch.leave(0, max_spare=2 * row_bytes)
    assert (batch.spare_bytes, batch.nbytes) == (0, 6 * row_bytes)


def test_a_pass_writes_its_tokens_in_place():
    batch, _ = large(16, 1000)

    def run():
        batch.begin(4)
        for layer in batch.layers:
            layer.update_and_fetch(*(mx.ones((16, 2, 4, 64)) for _ in range(2)))
            mx.eval(layer.state)
        batch.advance([4] * 16)

    assert copied(run) < batch.nbytes / 100


def test_spare_memory_is_given_back():
    before = mx.get_active_memory()
    batch = large(16, 600)[0]
    row_bytes = 2 * 2 * 2 * 768 * 64 * 4
    assert batch.nbytes <= 1.25 * 16 * row_bytes
    for n_left in range(15, 0, -1):
        batch.leave(n_left // 2)
        assert batch.nbytes <= max(n_left + 2, 1.7 * n_left) * row_bytes
        # The old arrays are gone too.
        assert mx.get_active_memory() - before <= batch.nbytes + 10_000


@pytest.mark.parametrize(
    ("layer", "can"),
    [
        (KVCache(), True),
        (RotatingKVCache(8), True),
        (RotatingKVCache(8, keep=4), False),
        (ArraysCache(2), True),
        (type("Own", (KVCache,), {})(), False),
    ],
)
def test_only_known_caches_become_rows(layer, can):
    assert can_join(layer) is can


@pytest.mark.parametrize("name", ["windows", "recurrent"])
def test_what_cannot_be_cut_back_says_so(name):
    sequences = Sequences(name, random.Random(0))
    sequences.join(40)
    with pytest.raises(ValueError, match="cannot be cut back"):
        sequences.batch.copy(0, 20)


def test_short_rows_do_not_pay_for_a_long_one():
    size = KvSize(0, ((1.0, None),)).bytes
    # With room for the tokens of a pass.
    assert [bank_of(n) for n in (1, 2032, 2033, 8176, 8177, 100_000)] == [0, 0, 1, 1, 2, 3]
    assert rows_bytes(size, [(1000, 1000)]) == 1024
    assert rows_bytes(size, [(1000, 1000), (500, 500)]) == 2 * 1024
    # A long row that was never short, and one that passes through the bank of the short ones.
    assert rows_bytes(size, [(900, 1000)] * 3 + [(99_000, 100_000)]) == 3 * 1024 + 100_096
    assert rows_bytes(size, [(900, 1000)] * 3 + [(2000, 100_000)]) == 3 * 2048 + 100_096
    assert rows_bytes(size, [(20_000, 20_000)] * 16 + [(9000, 9000)]) == 17 * 20_224
    assert rows_bytes(size, []) == 0


def test_rows_move_to_the_bank_of_their_length(monkeypatch):
    monkeypatch.setattr("mlx_serve.engine.cache.banks._FIRST_BANK", 32)
    model = tiny_llama()
    rows, drawn = Rows(model), {}
    for n in (5, 12, 60, 150):
        prompt = [random.Random(n).randrange(250) for _ in range(n)]
        row = Row(prompt[:-1], prompt[-1])
        rows.join(row, cache_of("plain", model, prompt[:-1]))
        drawn[row] = []
    assert len(rows._banks) == 3
    for _ in range(121):
        for row, token in rows.step():
            drawn[row].append(token)
    # All of them are longer than 112 tokens, and no longer than 496.
    assert len(rows._banks) == 1
    for row, tokens in drawn.items():
        prompt = row.tokens[: -len(tokens)]
        logits = model(mx.array(row.tokens)[None])[0]
        assert mx.argmax(logits, axis=-1).tolist()[len(prompt) - 1 : -1] == tokens
    for row in drawn:
        cache, token = rows.leave(row)
        assert cache[0].offset == len(row.tokens)
        assert token == mx.argmax(model(mx.array(row.tokens)[None])[0, -1])
    assert not len(rows)


@pytest.mark.parametrize("alone", [False, True])
def test_a_sequence_is_quantized_once_it_is_long_enough(alone):
    model, quantization, prompt = tiny_llama(head_dim=32), Quantization(4, 32, start=20), [*range(50, 66)]
    options = kv_options(quantization)
    want = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=20, **options)]
    # Four bits are felt, or nothing would be shown here.
    assert want != [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=20)]
    rows = Rows(model, alone=alone, quantization=quantization)
    row = Row(prompt[:-1], prompt[-1])
    rows.join(row, cache_of("plain", model, prompt[:-1]))
    tokens = [token for _ in range(21) for _, token in rows.step()]
    assert tokens == want
    cache, _ = rows.leave(row)
    assert all(map(is_quantized, cache))


def test_the_next_pass_is_started_before_the_tokens_of_the_last_one_are_read(monkeypatch):
    model = tiny_llama()
    seeded = make_sampler(Sampling(9, temperature=1.0, seed=3), vocab_size=VOCAB_SIZE, kept_by_xtc=())
    penalties = Sampling(9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)
    prompt = [*range(50, 66)]
    rows = Rows(model)
    for row in (
        Row(prompt[:-1], prompt[-1]),
        Row(prompt[:-1], prompt[-1], processors=make_processors(penalties)),
        Row(prompt[:-1], prompt[-1], seeded, [seeded.follow]),
        Row(prompt[:-1], prompt[-1], logprobs=OutputLogprobs(2)),
    ):
        rows.join(row, cache_of("plain", model, prompt[:-1]))
    order = []

    def noted(owner, name, what):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (order.append(what), real(*args, **kwargs))[1])

    noted(mx, "async_eval", "started")
    for owner, name in ((mx, "eval"), (mx.array, "tolist"), (mx.array, "item")):
        noted(owner, name, "read")
    rows.step()
    order.clear()
    for _ in range(5):
        assert len(rows.step()) == 4
        # The log-probabilities and the drawn tokens are computed first.
        assert order == ["started", "started", "read"]
        order.clear()
