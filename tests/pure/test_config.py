"""The command line."""

import argparse
import ast
from importlib.metadata import distribution

import pytest

from mlx_serve.commands import COMMANDS
from mlx_serve.settings import config
from mlx_serve.settings.config import from_args
from mlx_serve.settings.flags import size, size_text


def test_defaults_are_mlx_lm_server_s():
    settings = from_args([], {})
    assert (settings.host, settings.port, settings.max_tokens, settings.temp) == ("127.0.0.1", 8080, None, 0.0)
    assert (settings.decode_concurrency, settings.prompt_concurrency, settings.prefill_step_size) == (32, 8, 2048)
    assert settings.allowed_origins == ()


def flags_of_mlx_lm_server() -> dict[str, ast.Call]:
    """Its add_argument calls, read from its source: importing it needs MLX."""
    source = distribution("mlx-lm").locate_file("mlx_lm/server.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    return {call.args[0].value: call for call in named}


def our_flags() -> dict[str, argparse.Action]:
    return {option: action for action in config.parser()._actions for option in action.option_strings}


def test_every_flag_of_mlx_lm_server_is_taken():
    theirs = flags_of_mlx_lm_server()
    assert len(theirs) > 25
    assert theirs.keys() <= our_flags().keys()


# Why is in docs/decisions.md.
OWN_DEFAULTS = {
    *("--allowed-origins", "--chat-template-args", "--max-tokens", "--num-draft-tokens", "--prompt-cache-size")
}


@pytest.mark.parametrize("flag", sorted(flags_of_mlx_lm_server().keys() - OWN_DEFAULTS))
def test_the_default_is_the_same(flag):
    keywords = {keyword.arg: keyword.value for keyword in flags_of_mlx_lm_server()[flag].keywords}
    if isinstance(keywords.get("default"), ast.Constant):
        assert our_flags()[flag].default == keywords["default"].value


def test_a_command_line_for_mlx_lm_server_runs():
    line = "--model m --adapter-path a --host h --port 9 --allowed-origins http://x,http://y --draft-model d"
    line += " --num-draft-tokens 4 --trust-remote-code --log-level DEBUG --chat-template t --use-default-chat-template"
    line += " --temp 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --max-tokens 7 --decode-concurrency 2 --prompt-concurrency 1"
    line += " --prefill-step-size 64 --prompt-cache-size 3 --prompt-cache-bytes 2GB --kv-bits 4 --kv-group-size 32"
    line += " --quantized-kv-start 10 --pipeline"
    settings = from_args([*line.split(), "--chat-template-args", '{"enable_thinking": false}'], {})
    assert settings.allowed_origins == ("http://x", "http://y")
    assert settings.prompt_cache_bytes == 2 * 10**9
    assert settings.chat_template_args == {"enable_thinking": False}
    assert (settings.kv_bits, settings.pipeline, settings.trust_remote_code) == (4, True, True)


def test_prompt_caches_on_disk_are_off_until_a_directory_is_named():
    settings = from_args([], {})
    assert (settings.prompt_cache_dir, settings.prompt_cache_disk_bytes) == (None, 10**10)
    settings = from_args(["--prompt-cache-dir", "/c", "--prompt-cache-disk-bytes", "2GiB"], {})
    assert (settings.prompt_cache_dir, settings.prompt_cache_disk_bytes) == ("/c", 2 * 2**30)


def test_kept_responses_are_bounded_by_flags():
    settings = from_args([], {})
    kept = (settings.response_store_size, settings.response_store_bytes, settings.response_store_ttl)
    assert kept == (1000, 256 * 2**20, 3600.0)
    settings = from_args(
        ["--response-store-size", "0", "--response-store-bytes", "1MiB", "--response-store-ttl", "5"], {}
    )
    kept = (settings.response_store_size, settings.response_store_bytes, settings.response_store_ttl)
    assert kept == (0, 2**20, 5.0)


def test_model_directories_come_from_the_flag_or_the_environment():
    environ = {"MLX_MODEL_PATH": "/a:/b"}
    assert from_args([], environ).model_dir == ("/a", "/b")
    assert from_args(["--model-dir", "/c"], environ).model_dir == ("/c",)


@pytest.mark.parametrize("line", ["--model m --model n=/x", "--model m n=/x"])
def test_several_models(line):
    assert from_args(line.split(), {}).model == ("m", "n=/x")


def test_adapters_and_aliases_are_pairs():
    settings = from_args(["--adapter", "a=/x", "--alias", "b=c", "--alias", "claude-*=d=e"], {})
    assert settings.adapter == (("a", "/x"),)
    assert settings.alias == (("b", "c"), ("claude-*", "d=e"))


def test_an_abbreviation_is_taken_as_mlx_lm_server_takes_it():
    assert from_args(["--served", "a"], {}).served_model_name == ("a",)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--max-tokns 5", "unrecognized arguments: --max-tokns 5 (did you mean --max-tokens?)"),
        ("--aliass=x", "unrecognized arguments: --aliass=x (did you mean --alias?)"),
        ("--qqqqqq", "unrecognized arguments: --qqqqqq\n"),
        ("loose", "unrecognized arguments: loose\n"),
        ("--alias x", "argument --alias: 'x' is not of the form NAME=VALUE"),
        ("--adapter =x", "argument --adapter: '=x' is not of the form NAME=VALUE"),
        ("--port x", "argument --port: 'x' is not an integer between 0 and 65535"),
        ("--temp nan", "argument --temp: nan is not a number between 0 and 2"),
        ("--max-body-bytes " + "9" * 400, "argument --max-body-bytes: not a size"),
    ],
)
def test_what_is_wrong_with_a_flag_is_said(line, says, capsys):
    with pytest.raises(SystemExit) as caught:
        from_args(line.split(), {})
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_flags_of_the_engine():
    settings = from_args([], {})
    assert (settings.max_loaded_models, settings.memory_bytes, settings.kv_cache_bytes) == (4, None, None)
    assert (settings.model_ttl, settings.queue_timeout, settings.request_timeout) == (None, 600.0, 0.0)
    assert settings.max_itl_ms == 200.0


def test_a_model_may_have_several_names():
    assert from_args(["--model", "m", "--served-model-name", "a", "b"], {}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "n"), [("100", 100), ("2GB", 2 * 10**9), ("2g", 2 * 10**9), ("1.5M", 1_500_000), ("32MiB", 32 * 2**20)]
)
def test_sizes(text, n):
    assert size(text) == n


@pytest.mark.parametrize(("text", "value"), [("weights", "weights"), ("none", "none"), ("0", 0), ("2GB", 2 * 10**9)])
def test_the_wired_limit_is_a_word_or_a_size(text, value):
    assert from_args(["--wired-limit", text], {}).wired_limit == value


@pytest.mark.parametrize(
    "line",
    [
        "--port 65536",
        "--port -1",
        "--port x",
        "--temp 3",
        "--top-p 1.1",
        "--max-body-bytes 0",
        "--wired-limit all",
        "--max-body-bytes 5Q",
        "--max-body-bytes -5",
        "--max-queue 0",
        "--prompt-cache-disk-bytes 0",
        "--kv-bits 5",
        "--kv-group-size 8",
        "--chat-template-args [1]",
        "--chat-template-args {",
        '--chat-template-args {"sanitize_control_tokens":true}',
        pytest.param("--chat-template-args " + "[" * 100_000, id="deep"),
        "--log-level LOUD",
        "--no-such-flag",
        "--max-loaded-models 0",
        "--memory-bytes x",
        "--queue-timeout 0",
        "--model-ttl -1",
    ],
)
def test_a_bad_flag_is_a_usage_error(line, capsys):
    with pytest.raises(SystemExit) as caught:
        from_args(line.split(), {})
    assert caught.value.code == 2
    assert line.split()[0] in capsys.readouterr().err


def test_the_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        from_args(["--help"], {})
    text = capsys.readouterr().out
    assert all(option in text for option in our_flags())


def test_the_help_shows_defaults_as_one_would_type_them():
    text = " ".join(config.parser().format_help().split())
    assert "largest request body (default: 32MiB)" in text
    assert "in --prompt-cache-dir (default: 10GB)" in text
    assert "temperature (default: 0)" in text
    assert "seconds for running requests to end after SIGTERM or Ctrl-C (default: 30)" in text


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0"), (1, "1"), (1000, "1KB"), (1536, "1536"), (2**20, "1MiB"), (10**10, "10GB")]
)
def test_a_size_is_shown_as_it_is_taken(n_bytes, text):
    assert (size_text(n_bytes), size(text)) == (text, n_bytes)


def test_the_help_names_every_command():
    _, _, names = config.parser().epilog.rpartition("of its own: ")
    assert names.rstrip(".").split(", ") == sorted(COMMANDS)
