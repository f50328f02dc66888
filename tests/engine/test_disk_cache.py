"""Every kind of cache that mlx-lm has goes to disk and comes back as it was."""

import copy
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlx_serve.engine.cache import file
from mlx_serve.engine.cache import state as cache_state
from mlx_serve.engine.cache.disk import DiskCache, model_identity
from mlx_serve.engine.cache.file import DamagedFileError, Header
from mlx_serve.engine.cache.prefixes import PrefixCache, as_ids
from tests.engine.tinymodel import tiny_gemma, tiny_lfm2, tiny_llama, write_model

LONG_S = 60
PROMPT = list(range(100, 140))


@pytest.fixture
def open_disk(tmp_path):
    opened = []

    def open_one(max_bytes=10**8, **kwargs):
        opened.append(DiskCache(tmp_path / "c", max_bytes, **kwargs))
        return opened[-1]

    yield open_one
    for disk in opened:
        disk.close(LONG_S)


@pytest.fixture
def through_disk(open_disk):
    """Saves a cache, starts anew, and loads it."""

    def there_and_back(cache, tokens=(1, 2, 3)):
        disk = open_disk()
        disk.tier("m").save(tokens, "", cache)
        disk.close(LONG_S)
        disk = open_disk()
        loaded = load(disk.tier("m"), tokens, trimmable=False)
        disk.close(LONG_S)
        assert loaded is not None
        assert loaded[1] == list(tokens)
        return loaded[0]

    return there_and_back


def load(tier, tokens, *, trimmable=True):
    """The best file's cache, and the tokens that it holds."""
    found = tier.find(tokens, trimmable=trimmable)
    cache = tier.load(found) if found is not None else None
    return (cache, found.held.tolist()) if cache is not None else None


def fill(cache, n, *, dtype=mx.float32, seed=0, n_heads=2, width=32):
    """Put so many tokens' keys and values into a cache, and return what it then attends to."""
    key = mx.random.key(seed)
    keys, values = (mx.random.normal((1, n_heads, n, width), key=k).astype(dtype) for k in mx.random.split(key))
    return cache.update_and_fetch(keys, values)


def filled(cache, *counts, **kwargs):
    for n in counts:
        fill(cache, n, **kwargs)
    return cache


def arrays_cache(*, ends=False):
    cache = ArraysCache(3, left_padding=[2] if ends else None)
    cache[0] = mx.random.normal((1, 3, 8)).astype(mx.bfloat16)
    cache[2] = mx.arange(6).reshape(1, 6)
    if ends:
        cache.prepare(lengths=[5])
    return cache


def cut_back(cache, n):
    assert cache.trim(n) == n
    return cache


def chunked():
    cache = filled(ChunkedKVCache(16), 5, 20)
    cache.maybe_trim_front()
    return cache


CACHES = {
    "kv": lambda: filled(KVCache(), 5, 1, 1),
    "kv of a whole step": lambda: filled(KVCache(), 256),
    "kv over a step": lambda: filled(KVCache(), 300, 1),
    "kv float16": lambda: filled(KVCache(), 5, dtype=mx.float16),
    "kv bfloat16": lambda: filled(KVCache(), 5, dtype=mx.bfloat16),
    "kv, cut back": lambda: cut_back(filled(KVCache(), 300), 50),
    "kv, cut back to nothing": lambda: cut_back(filled(KVCache(), 5), 5),
    "kv, nothing in it": KVCache,
    "quantized": lambda: filled(QuantizedKVCache(32, 4), 5, 1, 1),
    "quantized bfloat16": lambda: filled(QuantizedKVCache(64, 8), 5, dtype=mx.bfloat16, width=64),
    "quantized later": lambda: filled(KVCache(), 5).to_quantized(32, 8),
    "quantized, cut back": lambda: cut_back(filled(QuantizedKVCache(32, 4), 20), 3),
    "quantized, nothing in it": lambda: QuantizedKVCache(32, 4),
    "rotating": lambda: filled(RotatingKVCache(16, keep=4), 5, 1),
    "rotating, one by one": lambda: filled(RotatingKVCache(16), *[1] * 9),
    "rotating, cut back": lambda: cut_back(filled(RotatingKVCache(16, keep=4), 12), 3),
    "rotating, one by one, cut back": lambda: cut_back(filled(RotatingKVCache(16), *[1] * 9), 3),
    "rotating, full": lambda: filled(RotatingKVCache(16, keep=4), 5, *[1] * 40),
    "rotating, over full": lambda: filled(RotatingKVCache(16, keep=4), 60),
    "rotating, nothing in it": lambda: RotatingKVCache(16, keep=4),
    "chunked": lambda: filled(ChunkedKVCache(16), 5, 1),
    "chunked, cut back": lambda: cut_back(filled(ChunkedKVCache(16), 5, 9), 3),
    "chunked, trimmed in front": chunked,
    "chunked, nothing in it": lambda: ChunkedKVCache(16),
    "concatenated": lambda: filled(ConcatenateKVCache(), 5, 1),
    "concatenated, nothing in it": ConcatenateKVCache,
    "arrays": arrays_cache,
    "arrays with ends": lambda: arrays_cache(ends=True),
    "arrays, nothing in it": lambda: ArraysCache(2),
    "list": lambda: CacheList(filled(KVCache(), 5), filled(RotatingKVCache(4), 9)),
    "list of lists": lambda: CacheList(arrays_cache(), CacheList(filled(KVCache(), 3), KVCache())),
}
# Those that take keys and values.
GROWING = [name for name in CACHES if not name.startswith(("arrays", "list"))]


def bare(cache):
    """What is in a cache, as plain data: its kind, its state without room for coming tokens, the arrays' bits."""
    if isinstance(cache, CacheList):
        return [CacheList, type(cache.caches), *map(bare, cache.caches)]
    state = cache.state
    if not isinstance(cache, ArraysCache) and not cache.empty():
        state = (*cache.keys_and_values(), *state[2:])
    return [type(cache), plain(state)]


def plain(value):
    if isinstance(value, mx.array):
        return str(value.dtype), value.shape, bytes(memoryview(mx.contiguous(value.reshape(-1)).view(mx.uint8)))
    if isinstance(value, list | tuple):
        return type(value), [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", CACHES)
def test_each_kind_comes_back_bit_for_bit(through_disk, name):
    cache = CACHES[name]()
    (back,) = through_disk([cache])
    assert bare(back) == bare(cache)


@pytest.mark.parametrize("counts", [[1] * 20, [3, 1, 1], [30, 1]])
@pytest.mark.parametrize("name", GROWING)
def test_each_kind_goes_on_as_if_nothing_had_been(through_disk, name, counts):
    cache = CACHES[name]()
    dtype = next((d for d in (mx.bfloat16, mx.float16) if str(d).split(".")[-1] in name), mx.float32)
    width = 64 if name == "quantized bfloat16" else 32
    (back,) = through_disk([cache])
    for seed, n in enumerate(counts, 1):
        want = fill(cache, n, seed=seed, dtype=dtype, width=width)
        got = fill(back, n, seed=seed, dtype=dtype, width=width)
        assert plain(list(got)) == plain(list(want))
        assert back.offset == cache.offset


DTYPES = ["bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 5)])
def test_each_dtype_comes_back_bit_for_bit(through_disk, dtype, shape):
    cache = ArraysCache(2)
    cache[0] = (mx.random.normal(shape) * 50).astype(getattr(mx, dtype))
    cache[1] = cache[0][..., :2] if shape else None
    (back,) = through_disk([cache])
    for a, b in zip(back.cache, cache.cache, strict=True):
        if b is None:
            assert a is None
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert mx.array_equal(a, b).item()


def test_plain_values_in_a_state_come_back(through_disk):
    cache = ArraysCache(1)
    cache.cache = [1, -(2**70), 0.1, True, None, "text \ud800", (mx.array([1.5]), [2])]
    (back,) = through_disk([cache])
    assert back.cache[:6] == cache.cache[:6]
    assert type(back.cache[3]) is bool
    assert plain(back.cache[6]) == plain(cache.cache[6])


def test_numbers_that_are_none_keep_their_bits(through_disk):
    cache = filled(KVCache(), 3)
    cache.keys[0, 0, 0, :4] = mx.array([float("nan"), float("inf"), float("-inf"), -0.0])
    (back,) = through_disk([cache])
    assert bare(back) == bare(cache)


def test_the_room_for_coming_tokens_is_not_written():
    _, arrays = cache_state.take_apart([filled(KVCache(), 5), filled(RotatingKVCache(512), *[1] * 5)])
    assert [array.shape[2] for array in arrays] == [5] * 4


def tiny_chunked():
    """The tiny Llama on the caches of Llama 4."""
    model = tiny_llama()
    model.make_cache = lambda: [ChunkedKVCache(512) for _ in model.layers]
    return model


def tiny_bfloat16():
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    return model


MODELS = {
    "llama": (tiny_llama, {}),
    "llama bfloat16": (tiny_bfloat16, {}),
    "llama quantized": (lambda: tiny_llama(head_dim=32), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}),
    "llama chunked": (tiny_chunked, {}),
    "gemma": (tiny_gemma, {}),
    "lfm2": (tiny_lfm2, {}),
}


def generate(model, prompt, cache, n, **options):
    return [
        int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=n, prompt_cache=cache, **options)
    ]


def logprobs_of(model, prompt, cache):
    logits = model(mx.array([prompt]), cache=cache)[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("n_first", [5, 30])
@pytest.mark.parametrize("name", MODELS)
def test_generation_goes_on_as_if_nothing_had_been(through_disk, name, n_first):
    make, options = MODELS[name]
    model = make()
    cache = make_prompt_cache(model)
    first = generate(model, PROMPT, cache, n_first, **options)
    back = through_disk(cache, [*PROMPT, *first])
    assert all(type(a) is type(b) for a, b in zip(back, cache, strict=True))
    go_on = [7, 8, 9]
    want = logprobs_of(model, go_on, copy.deepcopy(cache))
    assert mx.allclose(logprobs_of(model, go_on, copy.deepcopy(back)), want, atol=1e-5).item()
    # Neither is it what a model says that has seen nothing.
    assert not mx.allclose(logprobs_of(model, go_on, make_prompt_cache(model)), want, atol=1e-2).item()
    assert generate(model, go_on, back, 20, **options) == generate(model, go_on, cache, 20, **options)


def test_a_cache_can_be_cut_back_to_what_another_prompt_shares(open_disk):
    model = tiny_llama()
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    disk = open_disk()
    disk.tier("m").save(PROMPT, "", cache)
    assert disk.flush(LONG_S)
    other = [*PROMPT[:25], 3, 4, 5]
    tier = disk.tier("m")
    assert tier.covers(other, trimmable=False) == 0
    assert tier.covers(other, trimmable=True) == 25
    back, held = load(tier, other)
    assert held == PROMPT
    trim_prompt_cache(back, len(held) - 25)
    assert generate(model, other[25:], back, 10) == generate(model, other, make_prompt_cache(model), 10)


@pytest.mark.parametrize(
    ("cache", "can_trim"),
    [
        ("kv", True),
        ("rotating", True),
        ("rotating, full", False),
        ("chunked", True),
        ("chunked, trimmed in front", False),
        ("arrays", False),
        ("list of lists", False),
    ],
)
def test_only_what_can_be_cut_back_lends_a_part(open_disk, cache, can_trim):
    disk = open_disk()
    tier = disk.tier("m")
    tier.save([1, 2, 3], "", [CACHES[cache]()])
    assert disk.flush(LONG_S)
    assert tier.covers([1, 2, 9], trimmable=True) == (2 if can_trim else 0)
    assert tier.covers([1, 2, 3, 9], trimmable=True) == 3
    # A shorter one is needed by those that can't be cut back, and only by those.
    tier.save([1, 2], "", [CACHES[cache]()])
    assert disk.flush(LONG_S)
    assert disk.counts()["files"] == (1 if can_trim else 2)


@pytest.mark.parametrize("identity", ["", "a b", "3 a", "\udc00", "x" * 10**5])
def test_any_string_names_a_model(open_disk, identity):
    disk = open_disk()
    disk.tier(identity).save([1, 2], "", [CACHES["kv"]()])
    disk.close(LONG_S)
    disk = open_disk()
    assert load(disk.tier(identity), [1, 2]) is not None
    assert load(disk.tier(identity + "x"), [1, 2]) is None


def test_a_file_that_goes_between_search_and_read_is_not_replaced_by_another(open_disk):
    disk = open_disk()
    tier = disk.tier("m")
    best, other = list(range(300)), [*range(200), *range(900, 1200)]
    for tokens in (best, other):
        tier.save(tokens, "", [filled(KVCache(), len(tokens))])
    assert disk.flush(LONG_S)
    cache = PrefixCache(10, None, tier=tier)
    find = tier.find

    def find_and_lose(tokens, scope, *, trimmable):
        found = find(tokens, scope, trimmable=trimmable)
        disk._store._remove(found.file)
        return found

    tier.find = find_and_lose
    prompt = as_ids([*best, 5])
    assert cache.covers(cache.place(prompt)) == 300
    assert cache.fetch(prompt) == (None, 0, [])
    tier.find = find
    assert cache.fetch(prompt)[1] == 200


def test_models_do_not_see_each_other_s_files(open_disk):
    disk = open_disk()
    disk.tier("a").save([1, 2], "", [CACHES["kv"]()])
    assert disk.flush(LONG_S)
    assert disk.tier("b").covers([1, 2], trimmable=True) == 0
    assert load(disk.tier("b"), [1, 2]) is None
    assert disk.tier("a").covers([1, 2], trimmable=True) == 2


def test_files_of_one_scope_are_not_found_under_another(open_disk):
    disk = open_disk()
    tokens = list(range(200))
    for scope in ("a", "b"):
        cache = PrefixCache(10, None, tier=disk.tier("m"))
        cache.store(as_ids(tokens), [filled(KVCache(), 200, seed=ord(scope))], scope)
    disk.close(LONG_S)
    disk = open_disk()
    assert disk.counts()["files"] == 2
    cache = PrefixCache(10, None, tier=disk.tier("m"))
    prompt = as_ids([*tokens, 5])
    assert [cache.covers(cache.place(prompt, scope)) for scope in ("", "a", "b", "c")] == [0, 200, 200, 0]
    assert [cache.fetch(prompt, scope)[1] for scope in ("", "c")] == [0, 0]
    for scope in ("a", "b"):
        (back,), n, _ = cache.fetch(prompt, scope)
        assert n == 200
        assert bare(back) == bare(filled(KVCache(), 200, seed=ord(scope)))


def test_a_file_put_in_another_one_s_place_is_not_taken_for_it(open_disk, tmp_path):
    disk = open_disk()
    for identity in ("a", "b"):
        disk.tier(identity).save([1, 2], "", [CACHES["kv"]()])
    assert disk.flush(LONG_S)
    first, second = sorted((tmp_path / "c").glob("*.kv"))
    second.write_bytes(first.read_bytes())
    assert sorted(load(disk.tier(i), [1, 2]) is None for i in ("a", "b")) == [False, True]
    assert disk.counts()["damaged"] == 1


def test_nothing_is_saved_of_no_tokens(open_disk):
    disk = open_disk()
    disk.tier("m").save([], "", [KVCache()])
    assert disk.flush(LONG_S)
    assert disk.counts()["files"] == 0


def test_when_the_writer_is_behind_nothing_is_copied(open_disk, monkeypatch):
    disk = open_disk(max_pending_bytes=100)
    monkeypatch.setattr(cache_state, "to_bytes", lambda arrays: pytest.fail("copied"))
    disk.tier("m").save([1, 2], "", [CACHES["kv"]()])
    assert disk.counts()["skipped_large"] == 1


def no_memory(*_):
    raise RuntimeError("[malloc] Unable to allocate")


def test_a_cache_that_memory_does_not_suffice_for_fails_nothing(open_disk, monkeypatch, caplog):
    disk = open_disk()
    tier = disk.tier("m")
    with monkeypatch.context() as patch:
        patch.setattr(cache_state, "to_bytes", no_memory)
        tier.save([1, 2], "", [CACHES["kv"]()])
    assert "not saved" in caplog.text
    assert disk.counts()["pending_bytes"] == 0
    tier.save([1, 2], "", [CACHES["kv"]()])
    assert disk.flush(LONG_S)
    with monkeypatch.context() as patch:
        patch.setattr(cache_state, "put_together", no_memory)
        assert load(tier, [1, 2]) is None
    assert "not loaded" in caplog.text
    assert load(tier, [1, 2]) is not None


def test_a_layout_over_the_limit_of_headers_is_not_kept(open_disk, monkeypatch, caplog):
    monkeypatch.setattr(file, "_MAX_HEADER_BYTES", 100)
    disk = open_disk()
    disk.tier("m").save([1, 2], "", [CACHES["kv"]()])
    assert disk.flush(LONG_S)
    assert disk.counts()["files"] == 0
    assert "header" in caplog.text


def test_the_thread_that_decodes_is_not_the_one_that_starts(open_disk):
    disk = open_disk()

    def work():
        tier = disk.tier("m")
        cache = CACHES["kv"]()
        tier.save([1, 2], "", [cache])
        assert disk.flush(LONG_S)
        (back,), _ = load(tier, [1, 2])
        return bare(back) == bare(cache)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result()


class OwnCache(KVCache):
    """A kind of cache that mlx-lm doesn't have."""


class OwnArray(ArraysCache):
    pass


def odd(value):
    cache = ArraysCache(1)
    cache[0] = value
    return cache


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled(OwnCache(), 3),
        lambda: CacheList(KVCache(), OwnArray(1)),
        lambda: BatchKVCache([0]),
        lambda: odd({"a": 1}),
        lambda: odd(mx.zeros(3, dtype=mx.float64, stream=mx.cpu)),
    ],
)
def test_a_kind_that_is_not_known_is_said_once_and_not_kept(open_disk, caplog, make):
    disk = open_disk()
    tier = disk.tier("m")
    for n in range(3):
        tier.save([1, n], "", [make()])
    assert disk.flush(LONG_S)
    assert disk.counts()["files"] == 0
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "node",
    [
        {"kind": "OwnCache", "state": {"value": None}},
        {"kind": "BatchKVCache", "state": {"value": None}},
        {"kind": "CacheList", "caches": [{"kind": "make_prompt_cache", "state": {"value": None}}]},
        {"kind": "KVCache"},
        {"kind": "KVCache", "state": {"value": 3}},
        {"kind": "KVCache", "state": {"tuple": [{"dtype": "object", "shape": [1]}]}},
        {"kind": "KVCache", "state": {"tuple": [{"dtype": "uint8", "shape": [-1, -4]}]}},
        {"kind": "KVCache", "state": {"tuple": [{"dtype": "uint8", "shape": "x"}]}},
        {"kind": "KVCache", "state": {"tuple": [{"dtype": "uint8", "shape": [2**40]}]}},
        [],
        None,
    ],
)
def test_a_layout_that_we_did_not_write_is_a_damaged_file(tmp_path, node):
    path = tmp_path / "x.kv"
    head = file.head(Header("m", b"", True, [node], 4))
    assert file.write(path, head, [b"abcd"], lambda: True)
    with pytest.raises(DamagedFileError):
        file.read(path, lambda header, take: cache_state.put_together(header.layout, take))


def test_what_makes_a_model_another_one(tmp_path):
    path = write_model(tmp_path / "m")
    seen = {model_identity(path)}

    def is_new(*extra, **kwargs):
        n = len(seen)
        seen.add(model_identity(path, *extra, **kwargs))
        return len(seen) == n + 1

    assert not is_new()
    assert is_new("kv_bits=8")
    assert is_new("kv_bits=8", "x")
    assert is_new("kv_bits=8x")
    weights = path / "model.safetensors"
    os.utime(weights, (1, 1))
    assert is_new()
    weights.write_bytes(weights.read_bytes() + b"x")
    os.utime(weights, (1, 1))
    assert is_new()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text((path / name).read_text() + "\n")
        assert is_new()
    (path / "README.md").write_text("hello")
    assert not is_new()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert is_new(adapter=adapter)
    (adapter / "adapters.safetensors").write_bytes(b"abc")
    assert is_new(adapter=adapter)
    with pytest.raises(FileNotFoundError):
        model_identity(tmp_path / "nowhere")


def test_a_model_that_was_moved_is_the_same(tmp_path):
    path = write_model(tmp_path / "m")
    before = model_identity(path)
    assert model_identity(path.rename(tmp_path / "n")) == before


def test_the_version_of_mlx_lm_is_part_of_it(tmp_path, monkeypatch):
    path = write_model(tmp_path / "m")
    before = model_identity(path)
    monkeypatch.setattr("mlx_serve.engine.cache.disk.version", lambda name: "0.0")
    assert model_identity(path) != before


def test_no_weights_are_read_for_it(tmp_path):
    path = write_model(tmp_path / "m")
    weights = path / "model.safetensors"
    weights.unlink()
    # A pipe: whoever opened it would wait for ever.
    os.mkfifo(weights)
    assert model_identity(path)
