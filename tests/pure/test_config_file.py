"""The file of --config: what it may hold, what wins over it, and how it is refused."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_serve.settings.config import FLAGS, from_args
from mlx_serve.settings.file import ModelSpec, model_defaults
from mlx_serve.values import StartError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def settings(tmp_path):
    """The settings that a file's text gives, with further arguments and an environment."""

    def of(text, *argv, **environ):
        path = tmp_path / "serve.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return from_args(["--config", str(path), *argv], environ)

    return of


def test_an_empty_file_changes_nothing(settings):
    assert settings("") == from_args([], {})


def test_a_key_may_have_dashes_or_underscores(settings):
    found = settings('max-tokens = 7\nmax_queue = 8\nkv-bits = 4\nlog_level = "debug"\ndemo = true\ntemp = 1\n')
    assert (found.max_tokens, found.max_queue, found.kv_bits, found.log_level) == (7, 8, 4, "DEBUG")
    assert found.demo is True
    assert (found.temp, type(found.temp)) == (1.0, float)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("max_body_bytes = 1024", "max_body_bytes", 1024),
        ('max_body_bytes = "32MiB"', "max_body_bytes", 32 * 2**20),
        ('memory_bytes = "96GB"', "memory_bytes", 96 * 10**9),
        ('model_dir = "/a:/b"', "model_dir", ("/a", "/b")),
        ('model_dir = ["/a", "/b:c"]', "model_dir", ("/a", "/b:c")),
        ('allowed_hosts = ["x", "y"]', "allowed_hosts", ("x", "y")),
        ('allowed_origins = "x, y"', "allowed_origins", ("x", "y")),
        ('model = "m"', "model", ("m",)),
        ('model = ["m", "n"]', "model", ("m", "n")),
        ('alias = ["a=m", "b=m=n"]', "alias", (("a", "m"), ("b", "m=n"))),
        ("chat_template_args = { enable_thinking = false }", "chat_template_args", {"enable_thinking": False}),
        ("model_ttl = 60", "model_ttl", 60.0),
    ],
)
def test_values_have_their_toml_types(settings, line, name, value):
    assert getattr(settings(line), name) == value


def test_the_home_directory_is_known_without_a_shell(settings, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = settings('tls_cert = "~/cert.pem"\n[[models]]\npath = "~/m"\nadapter_path = "~/a"')
    assert (found.tls_cert, found.adapter_path, found.models[0].path) == (
        "/home/me/cert.pem",
        "/home/me/a",
        "/home/me/m",
    )


def test_command_line_over_environment_over_file_over_default(settings):
    file = 'model_dir = "/file"\nport = 1\napi_key = "file"\ntrust_remote_code = true'
    found = settings(file)
    assert (found.model_dir, found.port, found.api_key, found.max_queue) == (("/file",), 1, ("file",), 128)
    found = settings(file, MLX_MODEL_PATH="/env", MLX_SERVE_API_KEY="env")
    assert (found.model_dir, found.api_key) == (("/env",), ("env",))
    argv = ["--model-dir", "/line", "--port", "8080", "--api-key", "line", "--no-trust-remote-code"]
    found = settings(file, *argv, MLX_MODEL_PATH="/env", MLX_SERVE_API_KEY="env")
    # Also where what was said is the default.
    assert (found.model_dir, found.port, found.api_key) == (("/line",), 8080, ("line",))
    assert found.trust_remote_code is False


def test_models_have_tables(settings):
    found = settings(
        """
        [[models]]
        name = "main"
        path = "/m"
        aliases = ["a", "b*"]
        chat_template = "T"
        chat-template-args = { x = 1 }
        max_model_len = 100
        defaults = { temperature = 1, top_k = 5, repetition_penalty = 0 }

        [[models]]
        repo = "a/b"
        adapter_path = "/lora"
        [models.defaults]
        max-tokens = 9
        """
    )
    main = ModelSpec("main", "/m", None, None, ("a", "b*"), None, "T", {"x": 1}, 100)
    assert found.models[0] == ModelSpec(
        *(getattr(main, f.name) for f in fields(main)[:-1]),
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 0.0},
    )
    assert found.models[1] == ModelSpec(repo="a/b", adapter_path="/lora", defaults={"max_tokens": 9})


def test_the_first_model_s_adapter_and_draft_model_are_the_flags(settings):
    file = '[[models]]\npath = "/m"\nadapter_path = "/a"\ndraft_model = "/d"\n'
    assert (settings(file).adapter_path, settings(file).draft_model) == ("/a", "/d")
    assert settings(file, "--adapter-path", "/b").adapter_path == "/b"


def test_models_of_the_command_line_take_the_place_of_the_file_s(settings):
    found = settings('[[models]]\npath = "/m"\nadapter_path = "/a"\ndraft_model = "/d"\n', "--model", "x")
    assert (found.model, found.models) == (("x",), ())
    assert (found.adapter_path, found.draft_model) == (None, None)


MODEL = '[[models]]\npath = "/m"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_tokns = 5", "max_tokns: unknown key (did you mean max_tokens?)"),
        ("config = 'x'", "config: unknown key"),
        ("port = 'x'", "port: must be an integer between 0 and 65535, not 'x'"),
        ("port = 70000", "port: 70000 is not an integer between 0 and 65535"),
        ("port = 80.5", "port: must be an integer"),
        ("port = true", "port: must be an integer"),
        ("demo = 1", "demo: must be true or false, not 1"),
        ("temp = nan", "temp: nan is not a number between 0 and 2"),
        ("drain_timeout = inf", "drain_timeout: inf is not a number of at least 0"),
        ("temp = '1'", "temp: must be a number between 0 and 2"),
        ("temp = false", "temp: must be a number"),
        ("max_body_bytes = '5Q'", "max_body_bytes: not a size"),
        ("max_body_bytes = -5", "max_body_bytes: not a size"),
        ("max_body_bytes = 0", "max_body_bytes: 0 is not a size"),
        ("max_body_bytes = 1.5", "max_body_bytes: must be a size"),
        ("kv_bits = 5", "kv_bits: 5 is not one of 2, 3, 4, 6, 8"),
        ("log_format = 'xml'", "log_format: xml is not one of text, json"),
        ("model_dir = [1]", "model_dir: must be a string or a list of strings"),
        ("model = 5", "model: must be a string or a list of strings, not 5"),
        ("alias = ['x']", "alias: 'x' is not of the form NAME=VALUE"),
        ("chat_template_args = 'x'", "chat_template_args: must be a table"),
        ("chat_template_args = { tokenize = true }", "chat_template_args: 'tokenize' is not for the chat template"),
        ("host = 1979-05-27", "host: must be a string"),
        ("max-queue = 1\nmax_queue = 1", "max_queue: given twice"),
        ("model = 'x'\n" + MODEL, "model and [[models]] exclude each other"),
        ("models = 5", "models: must be tables"),
        ("[models]\npath = 'x'", "models: must be tables, each under a line [[models]]"),
        (MODEL + "port = 1", "models[0].port: unknown key (it is for the whole server: write it above"),
        (MODEL + "alias = []", "models[0].alias: unknown key (did you mean aliases?)"),
        (MODEL + "nonsense = 1", "models[0].nonsense: unknown key; allowed: name, path, repo, adapter_path, aliases"),
        (MODEL + "repo = 'a/b'", "models[0]: must have one of path and repo"),
        (MODEL + "[[models]]\nname = 'x'", "models[1]: must have one of path and repo"),
        (MODEL + "[[models]]\npath = 'x'\ndraft_model = 'd'", "models[1].draft_model: only the first model"),
        (MODEL + "aliases = 5", "models[0].aliases: must be a string or a list of strings"),
        (MODEL + "max_model_len = 1", "models[0].max_model_len: 1 is not an integer of at least 2"),
        (MODEL + "defaults = 1", "models[0].defaults: must be a table"),
        (
            MODEL + "defaults.temp = 1",
            "models[0].defaults.temp: unknown key (did you mean temperature?); allowed: temp",
        ),
        (MODEL + "defaults.top_p = 1.1", "models[0].defaults.top_p: 1.1 is not a number between 0 and 1"),
        (MODEL + "defaults.repetition_penalty = 0.001", "models[0].defaults.repetition_penalty: 0.001 is not 0 (off)"),
        (MODEL + "defaults.max_tokens = 0", "models[0].defaults.max_tokens: 0 is not an integer of at least 1"),
        ("adapter_path = 'x'\n" + MODEL + "adapter_path = 'y'", "adapter_path: given twice"),
        ("port = ", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        (b"\xff", "not valid TOML"),
        ("a = " + "[" * 9999, "not valid TOML"),
        ("port = " + "9" * 5000, "serve.toml"),
        ("port = 0x" + "f" * 5000, "serve.toml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_file_and_key(settings, text, says):
    with pytest.raises(StartError) as caught:
        settings(text)
    message = str(caught.value)
    assert says in message
    assert "serve.toml" in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(StartError, match="cannot read") as caught:
            from_args(["--config", str(path)], {})
        assert str(path) in str(caught.value)


def example() -> str:
    return re.search(r"```toml\n(.*?)```", (DOCS / "models.md").read_text(), re.DOTALL)[1]


def test_the_example_in_the_documentation_is_complete_and_right(settings):
    found = settings(example())
    assert found.memory_bytes == 96 * 10**9
    assert [spec.name for spec in found.models] == ["qwen", None, "qwen-sql"]
    assert found.alias == (("gpt-4o", "qwen"), ("claude-*", "qwen"))
    assert found.models[0].defaults["max_tokens"] == 4096
    keys = {f.name for f in fields(ModelSpec)} | model_defaults(FLAGS).keys()
    assert {key for key in keys if not re.search(rf"^(\[models\.)?{key}\b", example(), re.MULTILINE)} == set()


def test_every_flag_may_stand_in_the_file(settings):
    samples = {"--kv-bits": "4", "--prompt-cache-bits": "8"}
    for name, about in FLAGS.items():
        value = about.default
        if about.many:
            text, value = '["a=b"]', (about.from_text("a=b"),)
        elif value is None:
            text = samples.get("--" + name.replace("_", "-"), "5" if about.low is not None else '"x"')
            value = about.from_text(text.strip('"'))
        elif isinstance(value, bool):
            text, value = "true", True
        else:
            text = {"tuple": "[]", "dict": "{}"}.get(type(value).__name__, repr(value))
        assert getattr(settings(f"{name} = {text}"), name) == value
