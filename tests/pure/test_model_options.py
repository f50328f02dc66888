"""From the flags to the models: which there are, what they are called, and what is refused at start."""

import json
from pathlib import Path

import pytest

from mlx_serve.engine.catalog import NotAModelError
from mlx_serve.settings import models
from mlx_serve.settings.config import from_args
from mlx_serve.values import ApiError, StartError


def write_model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vocab_size": 100}))
    (path / "model.safetensors").touch()
    return path


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Models "one" and "two", a repository "org/Three", adapters "lora", and this as the working directory."""
    for name in ("one", "two", "hub/Three", "a=b", "below/four"):
        write_model(tmp_path / name)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").touch()
    (tmp_path / "lora" / "adapters.safetensors").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def locate(name: str) -> Path:
    """As the real one, with a hub of one repository."""
    if name == "org/Three":
        return Path("hub/Three")
    path = Path(name)
    if not path.exists():
        raise StartError(f"model not found: {name}")
    return path


def catalog_of(*argv, file=None):
    if file is not None:
        Path("serve.toml").write_text(file)
        argv = ("--config", "serve.toml", *argv)
    return models.catalog(from_args([str(arg) for arg in argv], {}), locate)


def names_of(catalog):
    return [name for name, _ in catalog.listing()]


def refusal(*argv, file=None) -> str:
    with pytest.raises(StartError) as caught:
        catalog_of(*argv, file=file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_first_model_is_the_default(root):
    catalog = catalog_of("--model", root / "one", "--model", "two", "--model", "org/Three")
    assert catalog.default.path == root / "one"
    assert names_of(catalog) == ["one", "two", "org/Three"]
    for name in (None, "default_model", "one", str(root / "one")):
        assert catalog.find(name) is catalog.default
    assert catalog.find("two").path == Path("two")
    for name in ("org/Three", "Three"):
        assert catalog.find(name).path == Path("hub/Three")
    with pytest.raises(ApiError):
        catalog.find("four")


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("fast=one", "fast", "one"),
        ("fast=./one", "fast", "./one"),
        ("qwen3:4b=org/Three", "qwen3:4b", "hub/Three"),
        ("模型=one", "模型", "one"),
        # Paths that hold a "=" are paths, and no names.
        ("./a=b", "a=b", "a=b"),
        ("a=b", "a=b", "a=b"),
        ("x=./a=b", "x", "./a=b"),
    ],
)
def test_a_model_may_be_given_a_name(root, text, name, path):
    default = catalog_of("--model", text).default
    assert (default.name, default.path) == (name, Path(path))


def test_a_given_name_is_the_only_one(root):
    catalog = catalog_of("--model", "fast=org/Three")
    for name in ("Three", "org/Three", "fast=org/Three"):
        with pytest.raises(ApiError):
            catalog.find(name)


def test_served_names_are_the_first_model_s(root):
    catalog = catalog_of("--model", "x=one", "--model", "two", "--served-model-name", "a", "b", "a")
    assert names_of(catalog) == ["a", "two", "b"]
    assert catalog.look_up("b") == ("b", catalog.default)
    with pytest.raises(ApiError):
        catalog.find("x")


def test_short_names_never_take_another_model_s(root):
    write_model(root / "other" / "Three")
    catalog = catalog_of("--model", "org/Three", "--model", "other/Three")
    assert catalog.find("Three").path == Path("other/Three")
    assert catalog.find("org/Three").path == Path("hub/Three")


def test_adapters_are_models_on_top_of_the_first(root):
    catalog = catalog_of("--model", "one", "--model", "two", "--adapter", "sql=lora", "--alias", "q=sql")
    entry = catalog.find("sql")
    assert (entry.path, entry.adapter_path, entry.base) == (Path("one"), Path("lora"), "one")
    assert catalog.default.adapter_path is None
    assert names_of(catalog) == ["one", "two", "sql", "q"]


def test_the_adapter_path_is_the_first_model_s(root):
    catalog = catalog_of("--model", "one", "--model", "two", "--adapter-path", "lora")
    assert (catalog.default.adapter_path, catalog.find("two").adapter_path) == (Path("lora"), None)


def test_aliases_lead_to_models_and_to_what_lies_below_directories(root):
    argv = ["--model", "one", "--model-dir", "below", "--alias", "gpt-4o=one", "f=four", "claude-*=four", "*=one"]
    catalog = catalog_of(*argv)
    assert names_of(catalog) == ["one", "four", "gpt-4o", "f"]
    for model, names in {"four": ["f", "claude-x", "claude-", "four"], "one": ["gpt-4o", "one", "x/y"]}.items():
        assert {catalog.find(name).name for name in names} == {model}


def test_what_the_file_says_of_a_model_is_in_its_entry(root):
    file = """
    [[models]]
    path = "one"
    aliases = ["first", "f-*"]
    max_model_len = 99
    adapter_path = "lora"
    [[models]]
    name = "second"
    path = "one"
    chat_template = "T"
    chat_template_args = { x = 1 }
    defaults = { temperature = 1, max_tokens = 5 }
    """
    catalog = catalog_of(file=file)
    default, second = catalog.models()
    assert (default.name, default.max_model_len, default.adapter_path) == ("one", 99, Path("lora"))
    assert catalog.find("first") is catalog.find("f-x") is default
    assert (second.name, second.path, second.adapter_path) == ("second", Path("one"), None)
    assert (second.chat_template, second.template_options) == ("T", {"x": 1})
    assert second.defaults == {"temperature": 1.0, "max_tokens": 5}
    hash(second)


def test_an_adapter_has_its_model_s_settings(root):
    file = '[[models]]\npath = "one"\nchat_template = "T"\nmax_model_len = 9\ndefaults.top_k = 3'
    entry = catalog_of("--adapter", "sql=lora", file=file).find("sql")
    assert (entry.chat_template, entry.max_model_len, entry.defaults) == ("T", 9, {"top_k": 3})


def test_the_draft_model_is_a_model(root):
    settings = from_args(["--model", "one", "--draft-model", "two"], {})
    assert models.draft_path(settings, locate) == Path("two")
    assert models.draft_path(from_args([], {}), locate) is None
    with pytest.raises(StartError, match="needs --model"):
        models.draft_path(from_args(["--draft-model", "two"], {}), locate)
    with pytest.raises(NotAModelError):
        models.draft_path(from_args(["--model", "one", "--draft-model", "lora"], {}), locate)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--model one --model missing", "model not found"),
        ("--model one x=one x=two", "two models are called 'x'"),
        ("--model one --adapter one=lora", "two models are called 'one'"),
        ("--model one --adapter x=two", "adapters not found: two has no adapter_config.json"),
        ("--model one --adapter x=half", "half has no adapters.safetensors"),
        ("--model one default_model=two", "this name means the first one"),
        ("--model x*=one", "only an alias may be a pattern"),
        ("--model one --served-model-name " + "x" * 300, "cannot be a model's name"),
        ("--model one --served-model-name x\x07", "cannot be a model's name"),
        ("--model one --alias a=onne", "no model is called 'onne' (did you mean one?)"),
        ("--model one --alias a=one b=a", "no model is called 'a'"),
        ("--model one --alias a*=b b=one", "no model is called 'b'"),
        ("--model one two --alias a=one a=two", "another model has that name"),
        ("--model one two --alias one=two", "another model has that name"),
        ("--model one two --alias default_model=two", "another model has that name"),
        ("--model-dir missing", "model directory not found"),
        ("--adapter x=lora", "need --model"),
        ("--adapter-path lora", "need --model"),
        ("--demo --model one", "exclude each other"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(root, argv, says):
    assert says in refusal(*argv.split(" "))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ('[[models]]\npath = "org/Three"', "there is no directory 'org/Three'"),
        ('[[models]]\npath = "one"\nname = ""', "cannot be a model's name"),
        ('[[models]]\npath = "one"\nadapter_path = "two"', "adapters not found"),
        ('demo = true\n[[models]]\npath = "one"', "exclude each other"),
    ],
)
def test_what_the_file_cannot_have_is_refused_at_start(root, file, says):
    assert says in refusal(file=file)


def test_a_damaged_model_below_a_directory_is_no_alias_s(root):
    (root / "below" / "four" / "model.safetensors").unlink()
    assert "incomplete" in refusal("--model-dir", "below", "--alias", "a=four")
