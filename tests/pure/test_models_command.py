"""``mlx-serve models`` on this machine: what could be served, and why the rest could not."""

import json
import struct
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import CacheNotFound

from mlx_serve.commands import model_list, models
from mlx_serve.commands.terminal import bytes_text, table

HEADER = b'{"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}'
SHARD = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 8


def write(path, config=None):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "n_ctx": 512} | (config or {})))
    (path / "model.safetensors").write_bytes(SHARD)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    def nothing():
        raise CacheNotFound("nothing", "here")

    monkeypatch.setattr(model_list, "scan_cache_dir", nothing)
    monkeypatch.setenv("MLX_MODEL_PATH", "")


def test_directories_are_listed_with_what_they_hold(tmp_path, capsys):
    write(tmp_path / "a" / "Plain")
    write(tmp_path / "a" / "owner" / "Packed", {"quantization": {"bits": 4}})
    (write(tmp_path / "a" / "Broken") / "model.safetensors").write_bytes(b"")
    assert models.main(["--model-dir", str(tmp_path / "a")]) == 0
    out, err = capsys.readouterr()
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["NAME", "TYPE", "WEIGHTS", "SIZE", "CONTEXT", "FROM"]
    size = bytes_text(len(SHARD)).split()
    assert rows == [
        ["Plain", "llama", "BF16", *size, "512", str(tmp_path / "a")],
        ["owner/Packed", "llama", "4-bit", *size, "512", str(tmp_path / "a")],
    ]
    assert (
        err == f"cannot be served: Broken ({tmp_path}/a): model.safetensors is cut short, or is no safetensors file\n"
    )


def test_a_model_of_the_flags_is_listed_once_and_by_its_name(tmp_path, capsys):
    path = write(tmp_path / "a" / "Plain")
    flags = ["--model-dir", str(tmp_path / "a"), "--model", str(path), "--served-model-name", "mine"]
    assert models.main(["--json", *flags]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["source"], model["path"]) == ("mine", "--model", str(path))
    assert (model["servable"], model["context_tokens"], model["weight_bytes"]) == (True, 512, len(SHARD))


def test_the_hub_s_cache_is_listed(tmp_path, capsys, monkeypatch):
    def repo(name, kind="model", **refs):
        return SimpleNamespace(repo_id=name, repo_type=kind, refs=refs)

    main = SimpleNamespace(snapshot_path=write(tmp_path / "snapshot"))
    repos = [repo("b/Model", main=main), repo("a/Data", "dataset", main=main), repo("c/NoMain")]
    monkeypatch.setattr(model_list, "scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    assert models.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["b/Model"]


def test_a_directory_that_is_not_there_is_told(tmp_path, capsys):
    assert models.main(["--model-dir", str(tmp_path / "nope")]) == 1
    assert "model directory not found" in capsys.readouterr().err


def test_flags_of_the_server_are_refused_where_another_is_asked(capsys):
    with pytest.raises(SystemExit):
        models.main(["--url", "http://127.0.0.1:1", "--jsno"])
    assert "of no use with --url: --jsno" in capsys.readouterr().err


def test_nothing_to_serve_says_what_to_do(capsys):
    assert models.main([]) == 0
    assert "--model-dir" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        *[(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_940, "99.9 kB"), (99_960, "100 kB")],
        *[(999_600, "1.0 MB"), (63_400_000_000, "63.4 GB"), (5 * 10**15, "5000 TB")],
    ],
)
def test_sizes_have_three_digits(n_bytes, text):
    assert bytes_text(n_bytes) == text


def test_a_table_is_aligned_and_has_no_blanks_at_its_ends():
    assert table(("A", "N", "Z"), [("aa", "1", ""), ("b", "100", "z")], frozenset({1})) == (
        "A     N  Z\naa    1\nb   100  z"
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, []),
        ({"model": ("a/b",)}, [(None, "a/b")]),
        ({"model": ("fast=a/b", "c")}, [("fast", "a/b"), (None, "c")]),
        ({"model": ("./x=y",)}, [(None, "./x=y")]),
        ({"models": [SimpleNamespace(name="n", path="/p", repo=None)]}, [("n", "/p")]),
        ({"model": ("a/b",), "served_model_name": ("x", "y")}, [("x", "a/b")]),
    ],
)
def test_what_the_flags_name(settings, named):
    assert model_list.named(SimpleNamespace(**{"model": (), "models": (), "served_model_name": ()} | settings)) == named
