"""What the doctor and the list say of a model directory, from its files alone."""

import json
import os
import struct

import pytest

from mlx_serve.engine.model_files import has_chat_template, look_into, quantization, shard_fault

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}


def shard(n_bytes=8, *, missing=0, dtype="F32"):
    header = json.dumps({"a": {"dtype": dtype, "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * (n_bytes - missing)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(shard())
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return path


def texts(path):
    return [fault.text for fault in look_into(path).faults]


def test_a_whole_model_has_no_fault(model):
    files = look_into(model)
    assert files.faults == ()
    assert files.servable
    assert (files.model_type, files.quantization, files.context_tokens) == ("llama", "F32", 512)
    assert files.weight_bytes == len(shard())
    assert files.has_chat_template


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "cut short"),
        (b"\0\0\0", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS pointer"),
        (shard(missing=1), "has 76 of 77 bytes"),
        (struct.pack("<Q", 10**12) + b"{}", "no safetensors"),
        (struct.pack("<Q", 2) + b"[]", "no safetensors"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "no safetensors"),
        (struct.pack("<Q", 3) + b"\xff\xff\xff", "no safetensors"),
        (struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000, "no safetensors"),
    ],
)
def test_a_damaged_shard_is_told(model, raw, says):
    file = model / "model.safetensors"
    file.write_bytes(raw)
    assert says in shard_fault(file)
    assert any(says in text and "model.safetensors" in text for text in texts(model))
    assert not look_into(model).servable


def test_a_shard_that_the_index_names_and_is_not_there(model):
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "../elsewhere"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert texts(model) == ["model-2.safetensors is named in model.safetensors.index.json and is not there"]


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_mlx_lm_does_not_read_stops_nothing(model, index):
    (model / "model.safetensors.index.json").write_text(index)
    assert look_into(model).servable


def test_a_link_into_the_cache_whose_file_is_gone(model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "blob")
    files = look_into(model)
    assert any("cannot be read" in fault.text for fault in files.faults)
    assert files.weight_bytes == 0


def test_no_tokenizer_and_a_damaged_one(model):
    (model / "tokenizer.json").write_text("{")
    assert any(text.startswith("tokenizer.json cannot be read") for text in texts(model))
    (model / "tokenizer.json").unlink()
    assert any("no tokenizer" in text for text in texts(model))
    (model / "x.tiktoken").touch()
    assert texts(model) == []


def test_a_missing_template_does_not_stop_it(model):
    (model / "tokenizer_config.json").write_text("{}")
    files = look_into(model)
    assert [fault.fatal for fault in files.faults] == [False]
    assert files.servable
    (model / "chat_template.jinja").touch()
    assert has_chat_template(model)


@pytest.mark.parametrize("config", ["", "[]", "{}"])
def test_a_config_that_says_nothing(model, config):
    (model / "config.json").write_text(config)
    files = look_into(model)
    assert not files.servable
    assert files.model_type is None


def test_what_is_no_directory(tmp_path):
    assert not look_into(tmp_path / "nothing").servable


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit"),
        ({"quantization": {"bits": 4, "mode": "affine", "layers.0": {"bits": 8}}}, "4-bit, mixed"),
        ({"quantization": {"bits": 4, "mode": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}, "quantization": 5}, "float16"),
        ({}, None),
    ],
)
def test_how_the_weights_are_kept(config, said):
    assert quantization(config) == said


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [DEEP, '{"a": ' + DEEP + "}", "5", ""])
def test_a_file_that_is_no_json_object_is_a_fault(model, name, text):
    (model / name).write_text(text)
    assert any(name in fault and "cannot be read" in fault for fault in texts(model))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "x.py"]
)
def test_a_fifo_is_not_waited_for(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    files = look_into(model)
    assert f"{model / name}: it is not a regular file" in [fault.text for fault in files.faults]
    assert not files.servable


def test_values_of_other_types_are_no_values(model):
    (model / "config.json").write_text('{"model_type": [], "quantization": {"bits": "4"}, "torch_dtype": {}}')
    header = json.dumps({"a": {"dtype": ["F32"], "data_offsets": [0, 8]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    files = look_into(model)
    assert (files.model_type, files.quantization) == (None, None)
    assert texts(model) == ["config.json has no model_type"]
