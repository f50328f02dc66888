"""Which names reach which directories, and which reach nothing."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from mlx_serve.engine.architectures import _known_types, architecture_fault
from mlx_serve.engine.catalog import Catalog, ModelEntry, NotAModelError, context_limit, read_entry
from mlx_serve.values import ApiError

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}


def write(path: Path, config=CONFIG, weights="model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (path / weights).touch()
    return path


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "models" / "gpt-oss-120b-MXFP4-Q4")
    write(tmp_path / "models" / "mlx-community" / "Qwen3-4B")
    write(tmp_path / "outside" / "secret")
    write(tmp_path / "disk" / "owner" / "large")
    write(tmp_path / "models" / "broken", "{")
    (tmp_path / "models" / "on-a-disk").symlink_to(tmp_path / "disk" / "owner" / "large")
    (tmp_path / "models" / "owner").symlink_to(tmp_path / "disk" / "owner")
    (tmp_path / "models" / "unplugged").symlink_to(tmp_path / "nowhere")
    (tmp_path / "models" / "link-in").symlink_to(tmp_path / "models" / "gpt-oss-120b-MXFP4-Q4")
    return tmp_path / "models"


NAMES = ["gpt-oss-120b-MXFP4-Q4", "link-in", "on-a-disk", "mlx-community/Qwen3-4B", "owner/large"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_looked_up_below_the_model_directories(root, tmp_path, name):
    empty = tmp_path / "empty"
    empty.mkdir()
    entry = Catalog(roots=[empty, root]).find(name)
    assert (entry.name, entry.path) == (name, root / name)
    assert (entry.context_tokens, entry.vocab_size) == (512, 100)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "../outside/secret",
        "mlx-community/../../outside/secret",
        "./gpt-oss-120b-MXFP4-Q4",
        "/etc",
        "unplugged",
        "on-a-disk/../large",
        "mlx-community",
        "a/b/c",
        "gpt-oss-120b-MXFP4-Q4/",
        "~",
        "..",
        ".",
        "",
        "x\x00y",
        "gpt-oss-120b-MXFP4-Q4\n",
        "ｇｐｔ",
        "gpt‐oss-120b-MXFP4-Q4",  # with another hyphen
        "gрt-oss-120b-MXFP4-Q4",  # with a Cyrillic letter
        "．．/outside/secret",
        "..／outside／secret",
        "%2e%2e/outside/secret",
        "%2e%2e%2foutside%2fsecret",
        "..\\outside\\secret",
        "mlx-community\\Qwen3-4B",
        "mlx-community//Qwen3-4B",
        "mlx-community/./Qwen3-4B",
        "x=../outside/secret",
        "gpt-oss-120b-MXFP4-Q4=",
        "=gpt-oss-120b-MXFP4-Q4",
        "gpt-oss-120b-MXFP4-Q4\x00",
        "gpt-oss-120b-MXFP4-Q4\x00/../x",
        "\ud800",
        "x" * 300,
        "x" * 10**6,
        "x/" * 10**5,
    ],
)
def test_no_name_leads_out_of_them(root, name):
    with pytest.raises(ApiError) as caught:
        Catalog(roots=[root]).find(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


WEIRD = ["../secret", "a=b", "%2e%2e", "a\\b", "a\x00b", "x" * 300, "ｇ", ""]


@pytest.mark.parametrize("name", WEIRD)
def test_no_name_is_looked_for_in_the_hub_s_cache_that_is_no_repository_s(name, monkeypatch):
    asked = []
    monkeypatch.setattr("mlx_serve.engine.model_places.snapshot_download", lambda *args, **_: asked.append(args))
    for odd in (name, f"owner/{name}", f"{name}/model"):
        with pytest.raises(ApiError) as caught:
            Catalog(use_hub_cache=True).find(odd)
        assert caught.value.code == "model_not_found"
    assert asked == []


@pytest.mark.parametrize("name", WEIRD)
def test_a_pattern_leads_to_its_model_alone(root, name):
    default = ModelEntry("main", Path("x"), 0, None, None)
    catalog = Catalog(default, (), [root], aliases={"*": "main"})
    if name and name.isprintable() and len(name) <= 256:
        assert catalog.find(name) is default
    else:
        with pytest.raises(ApiError):
            catalog.find(name)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude-x", "b"),
        ("claude-", "b"),
        ("claude-opus-4", "c"),
        ("claude-opus-4-1", "b"),
        ("Claude-x", "a"),
        ("claude", "a"),
        ("exact", "b"),
        ("a", "a"),
        ("aXbXc", "c"),
        ("abc", "c"),
        ("acb", "a"),
        ("ab", "a"),
        ("x.z", "b"),
        ("xyz", "a"),
        ("[q]", "c"),
        ("q", "a"),
    ],
)
def test_an_exact_name_wins_and_then_the_longest_pattern(name, model):
    a, b, c = (ModelEntry(name, Path(name), 0, None, None) for name in "abc")
    patterns = {"*": "a", "claude-*": "b", "claude-opus*4": "c", "a*b*c": "c", "x.*": "b", "[q]*": "c"}
    assert Catalog(a, models=[b, c], aliases=patterns | {"exact": "b"}).find(name).name == model


def test_a_pattern_with_many_stars_is_no_way_to_stall_the_server():
    # A regular expression would try all ways to share out the letters, for longer than the universe lasts.
    default = ModelEntry("main", Path("x"), 0, None, None)
    catalog = Catalog(default, aliases={"*a" * 60 + "*b": "main"})
    with pytest.raises(ApiError):
        catalog.find("a" * 256)
    assert catalog.find("a" * 255 + "b") is default


def test_what_lies_below_a_directory_wins_over_a_pattern_but_not_over_an_alias(root):
    default = ModelEntry("main", Path("x"), 0, None, None)
    catalog = Catalog(default, (), [root], aliases={"*": "main", "link-in": "mlx-community/Qwen3-4B"})
    assert catalog.look_up("gpt-oss-120b-MXFP4-Q4")[1].path == root / "gpt-oss-120b-MXFP4-Q4"
    assert catalog.look_up("link-in") == ("link-in", catalog.find("mlx-community/Qwen3-4B"))
    listing = [(name, entry.name) for name, entry in catalog.listing()]
    assert listing == [
        ("main", "main"),
        ("gpt-oss-120b-MXFP4-Q4", "gpt-oss-120b-MXFP4-Q4"),
        ("mlx-community/Qwen3-4B", "mlx-community/Qwen3-4B"),
        ("on-a-disk", "on-a-disk"),
        ("owner/large", "owner/large"),
        ("link-in", "mlx-community/Qwen3-4B"),
    ]


def test_an_alias_whose_model_has_gone_is_not_found_and_not_listed(root):
    catalog = Catalog(roots=[root], aliases={"alias": "mlx-community/Qwen3-4B"})
    assert catalog.find("alias").path == root / "mlx-community/Qwen3-4B"
    (root / "mlx-community" / "Qwen3-4B" / "config.json").unlink()
    with pytest.raises(ApiError) as caught:
        catalog.find("alias")
    assert caught.value.code == "model_not_found"
    assert "alias" not in [name for name, _ in catalog.listing()]


def test_a_model_s_own_cap_takes_the_place_of_the_server_s():
    entry = ModelEntry("x", Path("x"), 0, 100, None)
    assert [context_limit(entry, cap) for cap in (None, 50, 200)] == [100, 50, 100]
    capped = replace(entry, max_model_len=70)
    assert [context_limit(capped, cap) for cap in (None, 50, 200)] == [70, 70, 70]
    assert context_limit(replace(capped, max_model_len=500), 50) == 100
    assert context_limit(replace(entry, context_tokens=None), None) is None


def test_an_absolute_path_is_no_name(root):
    with pytest.raises(ApiError):
        Catalog(roots=[root]).find(str(root / "gpt-oss-120b-MXFP4-Q4"))


@pytest.mark.parametrize("spelled", [["GPT-OSS-120b-MXFP4-Q4", "mlx-community", "qwen3-4b"], []])
def test_on_a_file_system_without_case_a_name_is_still_written_one_way(root, monkeypatch, spelled):
    catalog = Catalog(roots=[root])
    monkeypatch.setattr("os.listdir", lambda _: spelled)
    for name in ("gpt-oss-120b-MXFP4-Q4", "mlx-community/Qwen3-4B"):
        with pytest.raises(ApiError) as caught:
            catalog.find(name)
        assert caught.value.code == "model_not_found"


def test_a_damaged_model_says_so_without_its_path(root):
    with pytest.raises(ApiError) as caught:
        Catalog(roots=[root]).find("broken")
    assert caught.value.status == 500
    assert str(root) not in caught.value.message


def test_the_list_holds_what_can_be_served(root):
    names = [entry.name for entry in Catalog(roots=[root]).entries()]
    assert sorted(names) == sorted(NAMES)


def test_the_default_answers_to_its_names_and_comes_first(root):
    default = ModelEntry("main", Path("x"), 0, None, None)
    catalog = Catalog(default, ["main", "alias"], [root])
    for name in (None, "main", "alias", "default_model"):
        assert catalog.find(name) is default
    assert catalog.find("mlx-community/Qwen3-4B").name == "mlx-community/Qwen3-4B"
    assert catalog.entries()[0] is default
    with pytest.raises(ApiError):
        catalog.find("x")


def test_without_a_default_a_request_must_name_one(root):
    with pytest.raises(ApiError, match="no default model"):
        Catalog(roots=[root]).find(None)


def test_what_was_downloaded_is_served_by_its_repository_s_name(tmp_path, monkeypatch):
    repo = tmp_path / "models--mlx-community--Tiny"
    write(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    (repo / "blobs").mkdir()
    scan = functools.partial(huggingface_hub.scan_cache_dir, tmp_path)
    download = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr("mlx_serve.engine.model_places.scan_cache_dir", scan)
    monkeypatch.setattr("mlx_serve.engine.model_places.snapshot_download", download)
    catalog = Catalog(use_hub_cache=True)
    assert catalog.find("mlx-community/Tiny").path == repo / "snapshots" / "abc123"
    assert [entry.name for entry in catalog.entries()] == ["mlx-community/Tiny"]
    with pytest.raises(ApiError):
        catalog.find("mlx-community/Other")
    with pytest.raises(ApiError):
        catalog.find("mlx-community/../Tiny")


def test_what_mlx_lm_has_no_code_for_is_no_model(root, monkeypatch):
    monkeypatch.setattr("mlx_serve.engine.architectures._known_types", lambda: frozenset(["llama"]))
    write(root / "embedder", CONFIG | {"model_type": "bert"})
    own_code = write(root / "own", CONFIG | {"model_type": "new", "model_file": "new.py"})
    catalog = Catalog(roots=[root])
    listed = [entry.name for entry in catalog.entries()]
    assert "embedder" not in listed
    assert {*NAMES, "own"} <= set(listed)
    assert catalog.find("own").path == own_code
    with pytest.raises(ApiError) as refused:
        catalog.find("embedder")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert read_entry("embedder", root / "embedder").name == "embedder"


def test_the_types_of_mlx_lm_are_found_without_importing_it():
    pytest.importorskip("mlx_lm")
    types = _known_types()
    assert types >= {"llama", "qwen3", "gpt_oss", "mistral", "kimi_k2"}
    assert not types & {"bert", "xlm-roberta", "nomic_bert"}


def test_without_mlx_lm_no_type_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert _known_types.__wrapped__() == frozenset()
    monkeypatch.setattr("mlx_serve.engine.architectures._known_types", _known_types.__wrapped__)
    assert architecture_fault({"model_type": "bert"}) == ""


@pytest.mark.parametrize(
    ("config", "weights", "says"),
    [
        (None, None, "is not a directory"),
        ("", "model.safetensors", "cannot be read"),
        ("[]", "model.safetensors", "not a JSON object"),
        (CONFIG, None, "no model*.safetensors"),
        (CONFIG, "pytorch_model.bin", "no model*.safetensors"),
    ],
)
def test_what_is_no_model_says_what_is_missing(tmp_path, config, weights, says):
    path = tmp_path / "model"
    if config is not None:
        write(path, config, weights)
    with pytest.raises(NotAModelError) as caught:
        read_entry("x", path)
    assert says in str(caught.value)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DEEP, "nested too deeply"),
        ('{"model_type": "llama", "rope": ' + DEEP + "}", "nested too deeply"),
        ('{"vocab_size": ' + "1" * 5000 + "}", "cannot be read"),
        ('"' + "x" * 16_000_000 + '"', "more than 16000000 bytes"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
    ],
    ids=["deep", "deep inside", "a number too long", "huge", "a list", "null"],
)
def test_a_config_that_is_no_config_says_so(tmp_path, config, says):
    path = write(tmp_path / "models" / "odd", config)
    with pytest.raises(NotAModelError, match=says):
        read_entry("odd", path)
    catalog = Catalog(roots=[tmp_path / "models"])
    assert catalog.entries() == []
    with pytest.raises(ApiError, match="incomplete or damaged"):
        catalog.find("odd")


def test_values_of_other_types_count_as_absent(tmp_path):
    config = {"model_type": 5, "vocab_size": "many", "max_position_embeddings": [1], "text_config": "none"}
    entry = read_entry("odd", write(tmp_path / "odd", config))
    assert (entry.vocab_size, entry.context_tokens) == (None, None)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_config_that_is_no_file_is_not_waited_for(tmp_path, make):
    path = write(tmp_path / "models" / "odd")
    (path / "config.json").unlink()
    make(path / "config.json")
    with pytest.raises(NotAModelError, match="not a regular file"):
        read_entry("odd", path)
    assert Catalog(roots=[tmp_path / "models"]).entries() == []


def test_the_context_may_be_told_for_the_text_part(tmp_path):
    config = {"text_config": {"max_position_embeddings": 99, "vocab_size": 7}, "vocab_size": 5}
    entry = read_entry("x", write(tmp_path / "m", config))
    assert (entry.context_tokens, entry.vocab_size) == (99, 7)
    for wrong in (-5, 0, True, "512", 1.5, None):
        assert read_entry("z", write(tmp_path / repr(wrong), {"n_ctx": wrong})).context_tokens is None
    assert read_entry("y", write(tmp_path / "n", {"model_type": "x"})).context_tokens is None
