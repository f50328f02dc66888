"""From flags to the HTTP layer's options."""

import pytest

from mlx_serve.settings import http
from mlx_serve.settings.config import from_args
from mlx_serve.values import StartError


def options(line="", **environ):
    return http.options(from_args(line.split(), environ))


def test_every_limit_has_its_flag():
    line = "--host h --port 9 --max-body-bytes 5 --max-header-bytes 2048 --max-connections 3 --head-timeout 1"
    line += " --body-timeout 2 --body-min-rate 3 --idle-timeout 4 --write-timeout 5 --log-format json"
    got = options(line)
    assert (got.address, got.max_connections, got.log_format) == (("h", 9), 3, "json")
    assert (got.limits.max_body_bytes, got.limits.max_header_bytes) == (5, 2048)
    assert (got.head_timeout_s, got.body_timeout_s, got.body_min_bytes_per_s) == (1, 2, 3)
    assert (got.idle_timeout_s, got.write_timeout_s) == (4, 5)


def test_keys_come_from_flags_a_file_or_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# remark\n\nfrom-file\n  padded  \n")
    assert options("--api-key a --api-key b c").access.api_keys == ("a", "b", "c")
    assert options(f"--api-key a --api-key-file {file}").access.api_keys == ("a", "from-file", "padded")
    assert options(MLX_SERVE_API_KEY="secret").access.api_keys == ("secret",)
    assert options("--api-key a", MLX_SERVE_API_KEY="secret").access.api_keys == ("a",)
    assert options().access.api_keys == ()


@pytest.mark.parametrize("content", ["", "\n# only a remark\n", "two words", "né"])
def test_a_key_file_without_keys_opens_nothing(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(StartError):
        options(f"--api-key-file {file}")


def test_a_key_file_that_is_missing_is_told(tmp_path):
    with pytest.raises(StartError, match="cannot read the API keys"):
        options(f"--api-key-file {tmp_path / 'missing'}")


@pytest.mark.parametrize(
    ("line", "loopback"),
    [("", True), ("--host localhost", True), ("--host ::1", True), ("--host 0.0.0.0", False), ("--uds /tmp/x", False)],
)
def test_host_names_are_checked_on_loopback(line, loopback):
    assert options(line).access.loopback_only is loopback


def test_origins_and_hosts_are_lists():
    access = options("--allowed-origins http://a,http://b --allowed-hosts x.local,y").access
    assert (access.allowed_origins, access.allowed_hosts) == (("http://a", "http://b"), ("x.local", "y"))


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://a.example:444", "chrome-extension://*", "app://obsidian.md", "file://"]
)
def test_an_origin_of_any_scheme_may_be_listed(origin):
    assert options(f"--allowed-origins {origin}").access.allowed_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://*.example", "https://a@b", "//a", "https"]
)
def test_what_no_page_has_as_its_origin_is_refused(origin):
    with pytest.raises(StartError, match="--allowed-origins"):
        options(f"--allowed-origins {origin}")


@pytest.mark.parametrize(
    ("line", "says"), [("--tls-key k", "needs --tls-cert"), ("--tls-cert /no/such/file", "TLS file not found")]
)
def test_tls_faults_are_one_line(line, says):
    with pytest.raises(StartError, match=says):
        options(line)
