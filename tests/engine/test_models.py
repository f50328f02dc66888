"""Loading model directories: tokenizers, templates, one model at a time, and what happens when files are wrong."""

import inspect
import json
import os
import weakref
from pathlib import Path
from queue import SimpleQueue

import pytest
from mlx import nn
from test_trial import ARCHITECTURES, greedy
from transformers import PreTrainedTokenizerBase

from mlx_serve.engine.backend import EngineLost
from mlx_serve.engine.cache.kinds import Quantization
from mlx_serve.engine.catalog import Catalog, ModelEntry, read_entry
from mlx_serve.engine.generate.batch import BatchOptions
from mlx_serve.engine.generate.pooling import LAST_TOKEN, Pooling
from mlx_serve.engine.load_errors import LoadError, loading
from mlx_serve.engine.memory import MemoryBudget
from mlx_serve.engine.models.store import ModelStore, locate
from mlx_serve.engine.models.weights import id_bound
from mlx_serve.engine.schedule.scheduler import Limits, Scheduler
from mlx_serve.engine.schedule.worker import Worker
from mlx_serve.values import RESERVED_TEMPLATE_OPTIONS, ApiError, Job, Prompt, Sampling
from tests.engine.tinymodel import (
    CONFIG,
    EOS,
    GEMMA,
    LATENT,
    LFM2,
    LLAMA4,
    VOCAB_SIZE,
    tiny,
    tiny_gemma,
    tiny_lfm2,
    tiny_llama,
    tokens_of,
    write_model,
)

DEADLINE_S = 60


@pytest.fixture
def root(tmp_path):
    write_model(tmp_path / "one", seed=1)
    write_model(tmp_path / "two", seed=2)
    return tmp_path


def store_of(root, **options):
    catalog = Catalog(roots=[root])
    options = {"batch": BatchOptions(), "tokenizer_config": {}, **options}
    return catalog, ModelStore(catalog, prompt_cache_size=4, prompt_cache_bytes=None, **options)


def opened(store, name):
    """The backend of a model that is loaded without pause."""
    opening = store.open(name)
    while True:
        try:
            next(opening)
        except StopIteration as done:
            return done.value


def test_the_tokenizer_is_kept_and_works(root):
    catalog, store = store_of(root)
    tokenizer = store.tokenizer(catalog.find("one"))
    assert store.tokenizer(catalog.find("one")) is tokenizer
    text = "né 🐉 12"
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_ids, tokenizer.think, tokenizer.tool_call) == (frozenset([EOS]), None, None)
    assert {256, 257, 258, 259} >= tokenizer.hidden_ids >= {EOS}
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], None, {}) == "user: hi\n"


def test_a_template_that_refuses_says_why(root):
    catalog, store = store_of(root)
    tokenizer = store.tokenizer(catalog.find("one"))
    with pytest.raises(ApiError, match="no tools here") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "x"}], None, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_way_of_pooling_is_the_directory_s(root):
    (root / "two" / "1_Pooling").mkdir()
    (root / "two" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    _, store = store_of(root)
    assert [opened(store, name)._loaded.pooling for name in ("one", "two")] == [LAST_TOKEN, Pooling("mean")]


def test_a_template_of_the_command_line_takes_the_tokenizer_s_place(root):
    catalog, store = store_of(root, tokenizer_config={"chat_template": "{{ messages[0].content }}!"})
    tokenizer = store.tokenizer(catalog.find("one"))
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], None, {}) == "hi!"


def run(scheduler, model, prompt=(1, 2, 3), n=4):
    job = Job(model, Prompt(prompt), Sampling(n), 0, SimpleQueue())
    scheduler.submit([job])
    return tokens_of(job)


@pytest.fixture
def scheduler(root):
    _, store = store_of(root, budget=MemoryBudget(max_models=1))
    scheduler = Scheduler(store, Limits(max_queue=8))
    worker = Worker(scheduler, None, store.close)
    worker.start()
    yield scheduler
    worker.stop()


def test_models_take_turns_and_a_broken_one_hurts_nobody(root, scheduler, caplog):
    first = run(scheduler, "one")
    assert run(scheduler, "two") != first
    (root / "two" / "model.safetensors").write_bytes(b"damaged")
    assert run(scheduler, "one") == first
    with pytest.raises(ApiError) as caught:
        run(scheduler, "two")
    assert (caught.value.status, caught.value.type, caught.value.param) == (500, "server_error", "model")
    assert str(root) not in caught.value.message
    assert str(root) in caplog.text
    assert run(scheduler, "one") == first


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{}"),
        ("config.json", json.dumps(CONFIG | {"num_attention_heads": 0})),
        ("config.json", json.dumps({"model_type": "llama", "vocab_size": 260})),
        ("model.safetensors", ""),
    ],
)
def test_whatever_is_wrong_with_a_model_is_a_load_error(root, name, content):
    _catalog, store = store_of(root)
    (root / "one" / name).write_text(content)
    with pytest.raises(ApiError) as caught:
        opened(store, "one")
    assert isinstance(caught.value.__cause__, LoadError)
    assert "\n" not in str(caught.value.__cause__)


@pytest.mark.parametrize("where", ["one/tokenizer.json", "one/chat_template.jinja", "one/1_Pooling/x"])
def test_a_fifo_in_a_model_is_not_waited_for(root, where):
    _catalog, store = store_of(root)
    (root / where).parent.mkdir(exist_ok=True)
    (root / where).unlink(missing_ok=True)
    os.mkfifo(root / where)
    with pytest.raises(ApiError) as caught:
        opened(store, "one")
    assert "not a regular file" in str(caught.value.__cause__)


@pytest.mark.parametrize("ids", ["end", {"a": 1}, [[1]], [1.5], True])
def test_an_end_token_that_is_no_token_is_a_load_error(root, ids):
    catalog, store = store_of(root)
    (root / "one" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(LoadError, match="eos_token_id"):
        store.check(catalog.find("one"))


def test_a_vocabulary_larger_than_the_embedding_is_a_load_error(root):
    # The model's own code reads the first one, the catalog the second.
    config = CONFIG | {"text_config": {"vocab_size": 300}}
    (root / "one" / "config.json").write_text(json.dumps(config))
    _, store = store_of(root)
    with pytest.raises(ApiError) as caught:
        opened(store, "one")
    assert "has 260 rows for a vocab_size of 300" in str(caught.value.__cause__)


def test_a_smaller_vocabulary_than_the_embedding_s_is_the_bound(root):
    (root / "one" / "config.json").write_text(json.dumps(CONFIG | {"text_config": {"vocab_size": 250}}))
    _, store = store_of(root)
    backend = opened(store, "one")
    with pytest.raises(ApiError, match="0 to 249"):
        backend.insert(Job("one", Prompt((250,)), Sampling(1), 0, SimpleQueue()))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_cut(is_quantized):
    model = tiny_llama(vocab_size=200)
    if is_quantized:
        nn.quantize(model, group_size=32)
    assert id_bound(model, None, None, VOCAB_SIZE) == 200
    assert id_bound(model, None, None, 150) == 150
    assert id_bound(model, None, 200, VOCAB_SIZE) == 200
    with pytest.raises(LoadError, match="200 rows"):
        id_bound(model, Path("m"), 201, VOCAB_SIZE)


def test_an_embedding_of_an_unknown_name_is_believed():
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.names = nn.Embedding(5, 4)

    assert id_bound(Unknown(), None, 10, 20) == 10
    assert id_bound(Unknown(), None, None, 20) == 20


# What a client's arguments and messages make of a template: numbers that do not divide, or overflow, or exceed memory.
@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{{ 1 / n }}", {"n": 0}),
        ("{{ 2.0 ** n }}", {"n": 5000}),
        ("{{ 'a' * n }}", {"n": 2**62}),
        ("{{ 'a' * n }}", {"n": 2**200}),
        ("{{ '%*d' % (n, 1) }}", {"n": 2**70}),
        ("{{ n.x.y }}", {"n": 1}),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(n) }}", {"n": 1}),
        ("{{ n.__class__.__mro__ }}", {"n": 1}),
    ],
)
def test_whatever_a_template_raises_is_the_request_s_fault(root, template, options):
    catalog, store = store_of(root, tokenizer_config={"chat_template": template})
    with pytest.raises(ApiError) as caught:
        store.tokenizer(catalog.find("one")).render_chat([{"role": "user", "content": "hi"}], None, options)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_no_argument_of_the_tokenizer_s_own_can_be_a_template_s():
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    # ``documents`` are for the template.
    assert taken.keys() - {"self", "kwargs", "documents"} <= RESERVED_TEMPLATE_OPTIONS


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"num_attention_heads": "many"},
            "TypeError: Field 'num_attention_heads' expected int, got str",
        ),
        ({"rope_scaling": [1]}, "field 'rope_parameters': "),
    ],
)
def test_a_config_that_transformers_refuses_is_one_line_at_start_and_in_a_request(root, config, reason, caplog):
    catalog, store = store_of(root)
    (root / "one" / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(LoadError, match="cannot load the tokenizer of ") as caught:
        store.check(catalog.find("one"))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    caplog.clear()
    with pytest.raises(ApiError, match="the server's log says why") as refused:
        store.tokenizer(catalog.find("one"))
    assert (refused.value.status, refused.value.type, refused.value.param) == (500, "server_error", "model")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [str(caught.value)]


def test_a_rank_that_is_lost_is_no_fault_of_the_model_s_files():
    entry = ModelEntry("m", Path("m"), 0, None, None)
    with pytest.raises(EngineLost), loading(entry):
        raise EngineLost("lost the other ranks")
    with pytest.raises(ApiError, match="busy"), loading(entry):
        raise ApiError(503, "busy")


def test_a_tokenizer_that_panics_is_a_load_error(root):
    catalog, store = store_of(root)
    file = root / "one" / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": ""}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    with pytest.raises(LoadError, match=r"cannot load the tokenizer .*precompiled_charsmap"):
        store.check(catalog.find("one"))
    with pytest.raises(ApiError) as caught:
        opened(store, "one")
    assert (caught.value.status, caught.value.param) == (500, "model")


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[")])
def test_a_damaged_tokenizer_is_a_load_error(root, name, content):
    catalog, store = store_of(root)
    (root / "one" / name).write_text(content)
    with pytest.raises(LoadError, match="tokenizer"):
        store.check(catalog.find("one"))
    with pytest.raises(ApiError):
        store.tokenizer(catalog.find("one"))


def test_with_a_quantized_cache_sequences_run_together(root, caplog):
    caplog.set_level("INFO")
    write_model(root / "wide", head_dim=64)
    _, store = store_of(root, quantization=Quantization(4))
    assert opened(store, "wide").alone == ""
    assert "wide: sequences run together" in caplog.text


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_mlx_lm_cannot_batch_runs_alone_and_right(root, name, caplog):
    config, reason = ARCHITECTURES[name]
    model = tiny(config)
    write_model(root / name, make=lambda *_, **__: model, **config)
    _, store = store_of(root)
    backend = opened(store, name)
    assert backend.capacity == 1
    assert reason in backend.alone
    scheduler = Scheduler(store, Limits())
    scheduler.load(name)
    jobs = [Job(name, Prompt(tuple(prompt)), Sampling(8), 0, SimpleQueue()) for prompt in ([5, 6], [*range(9, 40)])]
    scheduler.submit(jobs)
    while scheduler.step():
        pass
    assert [tokens_of(a_job) for a_job in jobs] == [greedy(model, a_job.prompt.tokens, 8) for a_job in jobs]
    (stats,) = scheduler.stats().models
    assert (stats.capacity, stats.alone) == (1, backend.alone)


def test_a_model_whose_pass_expands_its_cache_gets_no_drafts(root, caplog):
    caplog.set_level("INFO")
    write_model(root / "latent", make=lambda *_, **__: tiny(LATENT), **LATENT)
    _, store = store_of(root)
    backend = opened(store, "latent")
    assert backend.alone == ""
    assert "expands the whole cache" in backend._loaded.undrafted
    assert opened(store, "one")._loaded.undrafted == ""
    assert "latent: no drafts: a pass of several tokens expands" in caplog.text
    write_model(root / "one", make=lambda *_, **__: tiny(LATENT), **LATENT)
    with pytest.raises(ApiError) as caught:
        opened(with_draft(root), "main")
    assert "no drafts with the model: a pass of several tokens expands the whole cache" in str(caught.value.__cause__)


def test_a_model_that_runs_alone_on_caches_that_forget_says_why_it_gets_no_drafts(root, caplog):
    caplog.set_level("INFO")
    write_model(root / "chunked", make=lambda *_, **__: tiny(LLAMA4), **LLAMA4)
    _, store = store_of(root)
    scheduler = Scheduler(store, Limits())
    scheduler.load("chunked")
    (stats,) = scheduler.stats().models
    assert (stats.alone, stats.undrafted) == (
        "a batch cannot have its ChunkedKVCache",
        "its ChunkedKVCache cannot be cut back",
    )
    assert "chunked: no drafts: its ChunkedKVCache cannot be cut back" in caplog.text


def test_a_quantized_cache_that_the_model_cannot_have_is_refused_with_the_reason(root):
    write_model(root / "windowed", make=lambda *_, **__: tiny_gemma(), **GEMMA)
    _, store = store_of(root, quantization=Quantization(8, 32))
    with pytest.raises(ApiError) as caught:
        opened(store, "windowed")
    assert "--kv-bits does not work" in str(caught.value.__cause__)
    assert "RotatingKVCache" in str(caught.value.__cause__)


def test_a_draft_model_for_what_cannot_be_cut_back_is_refused_with_the_reason(root):
    write_model(root / "one", make=lambda *_, **__: tiny_lfm2(), **LFM2)
    with pytest.raises(ApiError) as caught:
        opened(with_draft(root), "main")
    assert "--draft-model does not work" in str(caught.value.__cause__)
    assert "ArraysCache" in str(caught.value.__cause__)


def test_a_draft_model_is_refused_where_sequences_run_alone(root):
    write_model(root / "one", **ARCHITECTURES["gemma2"][0], make=lambda *_, **__: tiny(ARCHITECTURES["gemma2"][0]))
    with pytest.raises(ApiError) as caught:
        opened(with_draft(root), "main")
    assert "--draft-model does not work: in a batch" in str(caught.value.__cause__)


def with_draft(root, *, progress=lambda *_: None, **config):
    """A store whose default model is "one", drafted for by a model of its own."""
    write_model(root / "draft", seed=3, **config)
    default = read_entry("main", root / "one")
    catalog = Catalog(default, ["main"], [root])
    options = {"batch": BatchOptions(), "tokenizer_config": {}, "progress": progress}
    return ModelStore(catalog, draft_path=root / "draft", prompt_cache_size=4, prompt_cache_bytes=None, **options)


def test_a_draft_model_drafts_for_the_default_model_alone(root):
    store = with_draft(root)
    assert opened(store, "main")._loaded.draft_model is not None
    assert opened(store, "two")._loaded.draft_model is None


def test_loading_tells_how_much_is_read_of_the_model_and_its_draft(root, monkeypatch):
    monkeypatch.setattr("mlx_serve.engine.models.weights._SLICE_BYTES", 1000)
    reports = []
    opened(with_draft(root, progress=lambda *step: reports.append(step)), "main")
    sizes = [n_read for _, n_read, _ in reports]
    total = reports[0][2]
    assert len(sizes) > 2
    assert sizes == sorted(set(sizes))
    assert (sizes[-1], {step for step, _, _ in reports}) == (total, {"loading main"})
    # The weights are one array each in the file, behind a header.
    in_files = sum((root / name / "model.safetensors").stat().st_size for name in ("one", "draft"))
    assert 0.9 * in_files < total < in_files


@pytest.mark.parametrize("config", [{"vocab_size": 300}, {"model_type": "unknown"}])
def test_a_draft_model_that_does_not_fit_is_named(root, config):
    with pytest.raises(ApiError) as caught:
        opened(with_draft(root, **config), "main")
    assert str(root / "draft") in str(caught.value.__cause__)


def test_the_old_model_is_gone_before_the_next_is_read(root, monkeypatch):
    _, store = store_of(root, budget=MemoryBudget(max_models=1))
    scheduler = Scheduler(store, Limits(max_queue=8))
    scheduler.load("one")
    old = weakref.ref(store._loaded["one"].model)
    read = store._read
    monkeypatch.setattr(store, "_read", lambda entry: (old() is None or pytest.fail("both in memory"), read(entry))[1])
    scheduler.load("two")
    assert scheduler.health().models == ("two",)


def test_a_failing_step_keeps_the_weights_in_memory(root):
    _, store = store_of(root)
    assert opened(store, "one")._loaded is opened(store, "one")._loaded


def test_the_memory_is_mlx_s_own(root):
    _, store = store_of(root)
    backend = opened(store, "one")
    memory = store.memory()
    assert memory.peak_bytes >= memory.active_bytes > 0
    assert (backend.n_cached, backend.n_evicted) == (0, 0)


def test_locate_takes_a_directory_as_it_is(root):
    assert locate(str(root / "one")) == root / "one"


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "missing", "a/b/c", "no-owner/no-model"])
def test_locate_says_what_was_not_found(name):
    with pytest.raises(LoadError, match="model not found") as caught:
        locate(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_bytes_of_tokens_join_to_the_text(root):
    catalog, store = store_of(root)
    tokenizer = store.tokenizer(catalog.find("one"))
    text = "né 🐉\n\t 12"
    ids = tokenizer.encode(text, special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(EOS) == b"<|end|>"
