"""Every kind of cache that mlx-lm has goes to disk and comes back as it was."""

import copy
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event

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
from mlx_serve.engine.cache.checkpoints import take
from mlx_serve.engine.cache.disk import DiskCache, model_identity
from mlx_serve.engine.cache.file import DamagedFileError
from mlx_serve.engine.cache.form import dumped, parsed
from mlx_serve.engine.cache.kinds import leaves
from mlx_serve.engine.cache.prefix_tree import as_ids
from mlx_serve.engine.cache.prefixes import PrefixCache
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

    def there_and_back(cache, tokens=None):
        tokens = range(n_tokens(cache)) if tokens is None else tokens
        disk = open_disk()
        disk.tier("m").save(tokens, "", cache)
        disk.close(LONG_S)
        disk = open_disk()
        loaded = load(disk.tier("m"), tokens)
        disk.close(LONG_S)
        assert loaded is not None
        assert loaded[1] == len(tokens)
        return loaded[0]

    return there_and_back


def n_tokens(cache):
    """How many tokens a cache holds."""
    return max((getattr(layer, "offset", 0) for layer in leaves(cache)), default=0) or 3


def save(disk, tokens, cache, scope="", model="m"):
    disk.tier(model).save(tokens, scope, cache)
    assert disk.flush(LONG_S)


def load(tier, tokens, scope="", **options):
    """The cache of a prompt's best files, and how many tokens it holds."""
    got = []
    options = {"n_held": 0, "least": 1, "prefill_s": lambda n: LONG_S} | options
    loading = tier.load(as_ids(tokens), scope, lambda *found: got.append(found), **options)
    if loading is not None:
        finish(loading)
    return got[0] if got else None


def finish(loading):
    while not loading.poll():
        loading.wait(LONG_S)


def covers(tier, tokens, scope=""):
    found = tier.find(tokens, scope)
    return found.n_tokens if found is not None else 0


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
    parts = cache_state.take_apart([filled(KVCache(), 5), filled(RotatingKVCache(512), *[1] * 5)], 5)
    assert [array.shape[2] for array in (*parts.growing, *parts.last)] == [5] * 4
    assert [array.size for array in cache_state.views(parts.growing)] == [5 * 2 * 32] * 2


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


def test_a_prompt_gets_what_it_shares_with_another(open_disk):
    model = tiny_llama()
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    disk = open_disk()
    save(disk, PROMPT, cache)
    other = [*PROMPT[:25], 3, 4, 5]
    tier = disk.tier("m")
    assert covers(tier, other) == 25
    back, n = load(tier, other)
    assert n == 25
    assert generate(model, other[25:], back, 10) == generate(model, other, make_prompt_cache(model), 10)


LENDS = {"kv": True, "quantized": True, "chunked": True, "concatenated": True, "rotating": False, "arrays": False}
LENDS |= {"rotating, full": False, "chunked, trimmed in front": False, "list of lists": False}


@pytest.mark.parametrize("kind", LENDS)
def test_only_what_can_be_cut_back_lends_a_part(open_disk, kind):
    cache = [CACHES[kind]()]
    tokens = list(range(n_tokens(cache)))
    disk = open_disk()
    tier = disk.tier("m")
    save(disk, tokens, cache)
    assert covers(tier, [*tokens[:-1], 99, 99]) == (len(tokens) - 1 if LENDS[kind] else 0)
    assert covers(tier, [*tokens, 99]) == len(tokens)


def test_of_a_growing_conversation_only_the_new_blocks_are_written(open_disk):
    disk, model = open_disk(), tiny_llama()
    tokens = [n % 250 for n in range(900)]
    n_written = 0
    for n in (300, 600, 900):
        cache = make_prompt_cache(model)
        model(mx.array([tokens[:n]]), cache=cache)
        save(disk, tokens[:n], cache)
        n_written, before = disk.counts()["bytes_written"], n_written
        # A block begins at most 255 tokens before what is new.
        assert n_written - before < (300 + file.BLOCK_TOKENS) * sum(layer.nbytes for layer in cache) / n
    assert disk.counts()["written"] == 3 + 3
    back, n = load(disk.tier("m"), tokens)
    assert n == 900
    # Passes of other lengths round differently.
    assert mx.allclose(back[0].keys, cache[0].keys_and_values()[0], atol=1e-4).item()


def test_what_a_save_holds_is_not_changed_by_a_job_that_goes_on(open_disk, monkeypatch):
    """The cache is moved into a job, which writes to it, before the writer has come to it."""
    gate = Event()
    create = file.create
    monkeypatch.setattr(file, "create", lambda path: gate.wait(LONG_S) and create(path))
    disk = open_disk()
    cache = [filled(KVCache(), 300)]
    mx.eval([layer.state for layer in cache])
    want = bare(cache[0])
    disk.tier("m").save(range(300), "", cache)
    trim_prompt_cache(cache, 40)
    for seed in range(1, 5):
        fill(cache[0], 10, seed=seed)
        mx.eval([layer.state for layer in cache])
    gate.set()
    assert disk.flush(LONG_S)
    (back,), n = load(disk.tier("m"), range(300))
    assert (n, bare(back)) == (300, want)


def test_a_save_holds_its_memory_and_counts_it_once_it_is_released(open_disk, monkeypatch):
    gate = Event()
    create = file.create
    monkeypatch.setattr(file, "create", lambda path: gate.wait(LONG_S) and create(path))
    disk = open_disk()
    prefixes = PrefixCache(10, None, tier=disk.tier("m"))
    cache = [filled(KVCache(), 512, width=512)]
    n_bytes = cache[0].nbytes
    prefixes.store(as_ids(range(512)), cache)
    del cache
    before = mx.get_active_memory()
    assert prefixes.unkept_bytes == 0
    prefixes.shrink(0)
    assert (prefixes.unkept_bytes, mx.get_active_memory()) == (n_bytes, before)
    gate.set()
    assert disk.flush(LONG_S)
    assert prefixes.unkept_bytes == 0
    assert mx.get_active_memory() <= before - n_bytes


def test_a_load_is_given_up_when_computing_would_have_been_quicker(open_disk, monkeypatch, tmp_path):
    now = [0.0]
    disk = open_disk(clock=lambda: now[0])
    save(disk, range(300), [filled(KVCache(), 300)])
    gate, reached, read = Event(), Event(), file.read
    monkeypatch.setattr(file, "read", lambda *args: reached.set() or (gate.wait(LONG_S) and read(*args)))
    tier, kept = disk.tier("m"), []
    options = {"n_held": 0, "least": 1, "prefill_s": lambda n: n / 100}
    loading = tier.load(as_ids(range(300)), "", lambda *found: kept.append(found), **options)
    assert [loading.poll() for _ in range(3)] == [False] * 3
    assert reached.wait(LONG_S)
    now[0] = 2.9
    assert not loading.poll()
    now[0] = 3.1
    assert loading.poll()
    # While it has not answered, nobody waits for the disk.
    assert tier.load(as_ids(range(300)), "", lambda *found: kept.append(found), **options) is None
    assert (kept, disk.counts()["given_up"]) == ([], 1)
    gate.set()


def test_what_memory_holds_is_not_read(open_disk):
    disk = open_disk()
    save(disk, range(300), [filled(KVCache(), 300)])
    tier = disk.tier("m")
    assert load(tier, range(300), n_held=200, least=101) is None
    assert load(tier, range(300), n_held=200, least=100)[1] == 300


@pytest.mark.parametrize("identity", ["", "a b", "3 a", "\udc00", "x" * 10**5])
def test_any_string_names_a_model(open_disk, identity):
    disk = open_disk()
    disk.tier(identity).save([1, 2], "", [filled(KVCache(), 2)])
    disk.close(LONG_S)
    disk = open_disk()
    assert load(disk.tier(identity), [1, 2]) is not None
    assert load(disk.tier(identity + "x"), [1, 2]) is None


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_files_that_go_while_they_are_read_what_came_before_is_used(open_disk, tmp_path, lost):
    disk = open_disk()
    tokens, other = list(range(600)), [*range(200), *range(900, 1300)]
    for one in (tokens, other):
        save(disk, one, [numbered(one)])
    prefixes = PrefixCache(10, None, tier=disk.tier("m"))
    loading = prefixes.load(as_ids([*tokens, 5]), "", 0, lambda n: LONG_S)
    blocks = disk.tier("m").find(tokens).blocks
    (tmp_path / "c" / f"{blocks[lost].name}.kv").unlink()
    finish(loading)
    prompt = as_ids([*tokens, 5])
    (got, n, _) = prefixes.fetch(prompt)
    assert n == lost * file.BLOCK_TOKENS
    assert n == 0 or got[0].keys_and_values()[0].flatten().tolist() == tokens[:n]


def numbered(tokens):
    """A cache that says of which tokens it is."""
    layer = KVCache()
    numbers = mx.array(tokens, dtype=mx.float32)[None, None, :, None]
    layer.update_and_fetch(numbers, numbers)
    return layer


def test_the_wrong_files_of_a_path_are_never_used(open_disk, tmp_path):
    """Files of other tokens in the place of a path's: as if the directory were restored from another one."""
    disk = open_disk()
    tokens, other = list(range(600)), list(range(1000, 1600))
    for one in (tokens, other):
        save(disk, one, [numbered(one)])
    tier = disk.tier("m")
    ours, theirs = ([tmp_path / "c" / f"{b.name}.kv" for b in tier.find(one).blocks] for one in (tokens, other))
    ours[1].write_bytes(theirs[1].read_bytes())
    (got,), n = load(tier, tokens)
    assert (n, got.keys_and_values()[0].flatten().tolist()) == (256, tokens[:256])
    assert disk.counts()["damaged"] == 1


def test_models_do_not_see_each_other_s_files(open_disk):
    disk = open_disk()
    save(disk, [1, 2], [filled(KVCache(), 2)], model="a")
    assert covers(disk.tier("b"), [1, 2]) == 0
    assert load(disk.tier("b"), [1, 2]) is None
    assert covers(disk.tier("a"), [1, 2]) == 2


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
    for scope in ("", "c"):
        assert cache.load(prompt, scope, 0, lambda n: LONG_S) is None
    for scope in ("a", "b"):
        finish(cache.load(prompt, scope, 0, lambda n: LONG_S))
        (back,), n, _ = cache.fetch(prompt, scope)
        assert n == 200
        assert bare(back) == bare(filled(KVCache(), 200, seed=ord(scope)))
    assert [cache.fetch(prompt, scope)[1] for scope in ("", "c")] == [0, 0]


def test_checkpoints_are_stored_beside_the_blocks_that_they_share(open_disk):
    """Of a cache with a window: its end, and the first and last place where prompts are likely to part."""
    disk = open_disk()
    prefixes = PrefixCache(10, None, tier=disk.tier("m"))
    cache, checkpoints = [KVCache(), RotatingKVCache(16)], []
    tokens = list(range(700))
    for end in (300, 400, 500, 600, 700):
        n = end - cache[0].offset
        for layer in cache:
            fill(layer, n, seed=end)
        if end != 700:
            checkpoints.append(take(cache, end, is_stop=end != 600))
    prefixes.store(as_ids(tokens), cache, checkpoints=checkpoints)
    assert disk.flush(LONG_S)
    # Two full blocks, and the rest at three positions.
    assert disk.counts()["written"] == 5
    tier = disk.tier("m")
    assert [covers(tier, [*tokens[:n], 999]) for n in (299, 300, 450, 650, 700)] == [0, 300, 300, 500, 700]
    (whole, window), n = load(tier, [*tokens[:650], 999])
    assert (n, whole.offset, window.offset) == (500, 500, 500)
    assert plain(window.keys) == plain(checkpoints[2].layers[0].keys)


def test_nothing_is_saved_of_no_tokens(open_disk):
    disk = open_disk()
    save(disk, [], [KVCache()])
    assert disk.counts()["files"] == 0


def no_memory(*_):
    raise RuntimeError("[malloc] Unable to allocate")


@pytest.mark.parametrize("call", ["blank", "from_numpy", "put_together"])
def test_a_cache_that_memory_does_not_suffice_for_fails_nothing(open_disk, monkeypatch, caplog, call):
    disk = open_disk()
    tier = disk.tier("m")
    cache = [filled(KVCache(), 2), filled(RotatingKVCache(16), 2)]
    with monkeypatch.context() as patch:
        patch.setattr(cache_state, "views", no_memory)
        save(disk, [1, 2], cache)
    assert "not saved" in caplog.text
    assert disk.counts()["pending_bytes"] == 0
    save(disk, [1, 2], cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache_state, call, no_memory)
        assert load(tier, [1, 2]) is None
    assert "not loaded" in caplog.text
    assert load(tier, [1, 2]) is not None


def test_a_layout_over_the_limit_of_headers_is_not_kept(open_disk, monkeypatch, caplog):
    monkeypatch.setattr(file, "_MAX_HEADER_BYTES", 100)
    disk = open_disk()
    save(disk, [1, 2], [filled(KVCache(), 2)])
    assert disk.counts()["files"] == 0
    assert "header" in caplog.text


def test_the_thread_that_decodes_is_not_the_one_that_starts(open_disk):
    disk = open_disk()

    def work():
        tier = disk.tier("m")
        cache = filled(KVCache(), 2)
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


GROWS = {"tuple": [{"dtype": "uint8", "shape": [1, 1, 4]}] * 2}


@pytest.mark.parametrize(
    ("node", "state"),
    [
        ({"kind": "OwnCache"}, {"value": None}),
        ({"kind": "BatchKVCache"}, {"value": None}),
        ({"kind": "CacheList", "caches": [{"kind": "make_prompt_cache"}]}, {"value": None}),
        ({"kind": "OwnCache", "grows": GROWS, "settings": []}, None),
        ({"kind": "KVCache", "grows": GROWS, "settings": [{"value": 1}]}, None),
        ({"kind": "KVCache", "grows": GROWS}, None),
        ({"kind": "KVCache", "grows": {"value": 3}, "settings": []}, None),
        ({"kind": "QuantizedKVCache", "grows": GROWS, "settings": []}, None),
        ({"grows": GROWS, "settings": []}, None),
        ({"kind": "KVCache"}, {"value": 3}),
        ({"kind": "KVCache"}, None),
        ({"kind": "KVCache"}, {"tuple": [{"dtype": "uint8", "shape": [1]}]}),
    ],
)
def test_a_form_that_we_did_not_write_is_a_damaged_file(node, state):
    form = parsed(dumped([node]))
    arrays = [mx.zeros(array.of(3).shape, mx.uint8) for array in form.growing]
    with pytest.raises(DamagedFileError):
        cache_state.put_together(form, 3, arrays, [] if state is None else [state], [])


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
    assert is_new(draft_model=adapter)
    (adapter / "adapters.safetensors").write_bytes(b"abc")
    assert is_new(adapter=adapter)
    assert is_new(draft_model=adapter)
    (adapter / "config.json").write_text("{}")
    assert is_new(draft_model=adapter)
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
