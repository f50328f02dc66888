"""The command line."""

import argparse
import ast
from importlib.metadata import distribution

import pytest

from mlx_serve import config
from mlx_serve.config import from_args, size


def test_defaults_are_mlx_lm_server_s():
    settings = from_args([], {})
    assert (settings.host, settings.port, settings.max_tokens, settings.temp) == ("127.0.0.1", 8080, 512, 0.0)
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


@pytest.mark.parametrize(
    "flag", sorted(flags_of_mlx_lm_server().keys() - {"--allowed-origins", "--chat-template-args"})
)
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


def test_a_model_may_have_several_names():
    assert from_args(["--model", "m", "--served-model-name", "a", "b"], {}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "n"), [("100", 100), ("2GB", 2 * 10**9), ("2g", 2 * 10**9), ("1.5M", 1_500_000), ("32MiB", 32 * 2**20)]
)
def test_sizes(text, n):
    assert size(text) == n


@pytest.mark.parametrize(
    "line",
    [
        "--port 65536",
        "--port -1",
        "--port x",
        "--temp 3",
        "--top-p 1.1",
        "--max-body-bytes 0",
        "--max-body-bytes 5Q",
        "--max-body-bytes -5",
        "--max-queue 0",
        "--kv-bits 5",
        "--kv-group-size 8",
        "--chat-template-args [1]",
        "--chat-template-args {",
        "--log-level LOUD",
        "--no-such-flag",
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
