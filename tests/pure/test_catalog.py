"""Which names reach which directories, and which reach nothing."""

import functools
import json
from pathlib import Path

import huggingface_hub
import pytest

from mlx_serve.core import ApiError
from mlx_serve.engine.catalog import Catalog, ModelEntry, NotAModelError, read_entry

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
    write(tmp_path / "models" / "broken", "{")
    (tmp_path / "models" / "link-out").symlink_to(tmp_path / "outside" / "secret")
    (tmp_path / "models" / "link-in").symlink_to(tmp_path / "models" / "gpt-oss-120b-MXFP4-Q4")
    return tmp_path / "models"


@pytest.mark.parametrize("name", ["gpt-oss-120b-MXFP4-Q4", "mlx-community/Qwen3-4B", "link-in"])
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
        "link-out",
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
        "x" * 300,
    ],
)
def test_no_name_leads_out_of_them(root, name):
    with pytest.raises(ApiError) as caught:
        Catalog(roots=[root]).find(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


def test_an_absolute_path_is_no_name(root):
    with pytest.raises(ApiError):
        Catalog(roots=[root]).find(str(root / "gpt-oss-120b-MXFP4-Q4"))


def test_a_damaged_model_says_so_without_its_path(root):
    with pytest.raises(ApiError) as caught:
        Catalog(roots=[root]).find("broken")
    assert caught.value.status == 500
    assert str(root) not in caught.value.message


def test_the_list_holds_what_can_be_served(root):
    names = [entry.name for entry in Catalog(roots=[root]).entries()]
    assert names == ["gpt-oss-120b-MXFP4-Q4", "link-in", "mlx-community/Qwen3-4B"]


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
    monkeypatch.setattr("mlx_serve.engine.catalog.scan_cache_dir", scan)
    monkeypatch.setattr("mlx_serve.engine.catalog.snapshot_download", download)
    catalog = Catalog(use_hub_cache=True)
    assert catalog.find("mlx-community/Tiny").path == repo / "snapshots" / "abc123"
    assert [entry.name for entry in catalog.entries()] == ["mlx-community/Tiny"]
    with pytest.raises(ApiError):
        catalog.find("mlx-community/Other")
    with pytest.raises(ApiError):
        catalog.find("mlx-community/../Tiny")


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


def test_the_context_may_be_told_for_the_text_part(tmp_path):
    config = {"text_config": {"max_position_embeddings": 99, "vocab_size": 7}, "vocab_size": 5}
    entry = read_entry("x", write(tmp_path / "m", config))
    assert (entry.context_tokens, entry.vocab_size) == (99, 7)
    for wrong in (-5, 0, True, "512", 1.5, None):
        assert read_entry("z", write(tmp_path / repr(wrong), {"n_ctx": wrong})).context_tokens is None
    assert read_entry("y", write(tmp_path / "n", {"model_type": "x"})).context_tokens is None
