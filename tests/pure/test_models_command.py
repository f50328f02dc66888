"""``mlx-serve models`` on this machine: what could be served, and why the rest could not."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import CacheNotFound

from mlx_serve.commands import models
from mlx_serve.commands.terminal import bytes_text, table
from mlx_serve.engine import model_places
from mlx_serve.settings import config
from mlx_serve.settings import models as model_options
from mlx_serve.values import ApiError

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

    monkeypatch.setattr(model_places, "scan_cache_dir", nothing)
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
    monkeypatch.setattr(model_places, "scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    assert models.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["b/Model"]


def test_a_directory_that_is_not_there_is_told(tmp_path, capsys):
    assert models.main(["--model-dir", str(tmp_path / "nope")]) == 1
    assert "model directory not found" in capsys.readouterr().err


def test_flags_of_the_server_are_refused_where_another_is_asked(capsys):
    with pytest.raises(SystemExit):
        models.main(["--url", "http://127.0.0.1:1", "--jsno"])
    assert "cannot be combined with --url: --jsno" in capsys.readouterr().err


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
    ("flags", "named"),
    [
        ([], []),
        (["--model", "a/b"], [(None, "a/b")]),
        (["--model", "fast=a/b", "--model", "c"], [("fast", "a/b"), (None, "c")]),
        (["--model", "./x=y"], [(None, "./x=y")]),
        # No name begins with a dot or a tilde: these are paths and repositories.
        (["--model", ".a=b"], [(None, ".a=b")]),
        (["--model", "~a=b"], [(None, "~a=b")]),
        (["--model", "=b"], [(None, "=b")]),
        (["--model", "a/b", "--served-model-name", "x", "y"], [("x", "a/b")]),
    ],
)
def test_what_the_flags_name(flags, named):
    specs = model_options.named(config.from_args(flags, {}))
    assert [(spec.name, model_options.place(spec)) for spec in specs] == named


def listed(capsys, *flags):
    """What the command lists: names that can be served, and the faults of the others by name."""
    assert models.main(["--json", *map(str, flags)]) == 0
    found = json.loads(capsys.readouterr().out)
    good = [model["name"] for model in found if model["servable"]]
    return good, {model["name"]: model["faults"] for model in found if not model["servable"]}


def served(*flags):
    """The catalog of a server with these flags."""
    return model_options.catalog(config.from_args([str(flag) for flag in flags], {}), Path)


def refused(catalog, name):
    with pytest.raises(ApiError) as raised:
        catalog.find(name)
    return raised.value.status


def test_below_a_directory_the_command_lists_what_the_server_serves(tmp_path, capsys):
    elsewhere = write(tmp_path / "elsewhere" / "Linked")
    first, second = tmp_path / "first", tmp_path / "second"
    write(first / "Plain")
    write(first / "owner" / "With blank")
    (first / "bad,name").symlink_to(elsewhere)
    write(first / ".hidden")
    write(first / "Bert", {"model_type": "no_such_type"})
    (write(first / "Broken") / "model.safetensors").unlink()
    write(second / "Broken")
    write(second / "Plain")
    write(second / "Other")
    flags = ("--model-dir", os.pathsep.join([str(first), str(second)]))
    good, faults = listed(capsys, *flags)
    catalog = served(*flags)
    assert good == ["Plain", "owner/With blank", "Other"]
    assert [entry.name for entry in catalog.entries()] == good
    assert [catalog.find(name).path.parent for name in ("Plain", "Other")] == [first, second]
    assert set(faults) == {"bad,name", ".hidden", "Bert", "Broken", "Plain"}
    assert [refused(catalog, name) for name in ("bad,name", ".hidden", "Bert")] == [404, 404, 404]
    assert "no request can name 'bad,name'" in faults["bad,name"][-1]
    assert "no model type 'no_such_type'" in faults["Bert"][0]
    assert refused(catalog, "Broken") == 500
    assert faults["Plain"][-1] == f"the name 'Plain' already belongs to {first / 'Plain'}"


def test_a_link_in_a_directory_is_a_model_by_its_own_name(tmp_path, capsys):
    elsewhere = write(tmp_path / "elsewhere" / "Far")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Near").symlink_to(elsewhere)
    assert listed(capsys, "--model-dir", tmp_path / "a") == (["Near"], {})
    assert served("--model-dir", tmp_path / "a").find("Near").name == "Near"


def hub(monkeypatch, *repos):
    found = [
        SimpleNamespace(repo_id=name, repo_type="model", refs={"main": SimpleNamespace(snapshot_path=path)})
        for name, path in repos
    ]
    monkeypatch.setattr(model_places, "scan_cache_dir", lambda: SimpleNamespace(repos=found))
    paths = dict(repos)
    monkeypatch.setattr(model_places, "snapshot_download", lambda name, **_: paths[name])


def test_of_the_hub_s_cache_the_command_lists_what_the_server_serves(tmp_path, capsys, monkeypatch):
    snapshot = "models--a--Model/snapshots/1"
    good, short = write(tmp_path / snapshot), write(tmp_path / "models--gpt2/snapshots/1")
    hub(monkeypatch, ("a/Model", good), ("gpt2", short))
    names, faults = listed(capsys)
    assert (names, list(faults)) == (["a/Model"], ["gpt2"])
    assert [entry.name for entry in served().entries()] == names
    assert refused(served(), "gpt2") == 404
    # Where the operator named something, no request reaches the cache.
    (tmp_path / "empty").mkdir()
    assert listed(capsys, "--model-dir", tmp_path / "empty") == ([], {})
    assert refused(served("--model-dir", tmp_path / "empty"), "a/Model") == 404


def test_a_repository_with_a_name_of_its_own_is_listed_by_it(tmp_path, capsys, monkeypatch):
    hub(monkeypatch, ("a/Model", write(tmp_path / "models--a--Model/snapshots/1")))
    assert listed(capsys, "--model", "mine=a/Model") == (["mine"], {})
    assert listed(capsys, "--model", "a/Model") == (["a/Model"], {})
