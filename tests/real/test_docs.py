"""What the pages show is true: each block is run against the demo model, or parsed, or says why it is not.

To add a language, add a function and a row in ``CHECKS``.
"""

import configparser
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from contextlib import contextmanager

import pytest
import yaml

from mlx_serve.commands import COMMANDS, server_flags
from mlx_serve.settings import config
from mlx_serve.settings.flags import option_of
from tests.real.docblocks import ROOT, BadPageError, Block, blocks, blocks_of, commands_of

pytestmark = pytest.mark.real

DEADLINE_S = 300
SHOWN = "127.0.0.1:8080"
BLOCKS = list(blocks())


@contextmanager
def demo_server(folder):
    """The demo model on some free port."""
    log = folder / "server.log"
    line = [sys.executable, "-m", "mlx_serve", "--demo", "--port", "0", "--max-tokens", "32"]
    with log.open("w") as out, subprocess.Popen(line, stderr=out, cwd=ROOT) as process:
        try:
            yield _port(process, log)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def _port(process, log):
    with log.open() as lines:
        while process.poll() is None:
            if match := re.search(r"ready: http://127\.0\.0\.1:(\d+)", lines.readline()):
                return int(match[1])
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with demo_server(tmp_path_factory.mktemp("docs")) as number:
        yield number


@pytest.fixture(scope="module")
def environ(port, tmp_path_factory):
    """What a reader's shell would have: our command, curl that minds its status, the server's address."""
    folder = tmp_path_factory.mktemp("shell")
    python = shlex.quote(sys.executable)
    script = folder / "mlx-serve"
    # The doctor is asked about a server that is still to come: on a port that is free.
    script.write_text(
        f'#!/bin/sh\n[ "$1" = doctor ] && set -- "$@" --port 0\nPYTHONPATH={shlex.quote(str(ROOT))} '
        f'exec {python} -m mlx_serve "$@"\n'
    )
    script.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    path = os.pathsep.join([str(folder), os.path.dirname(sys.executable), os.environ["PATH"]])
    url = f"http://127.0.0.1:{port}/v1"
    return {**os.environ, "PATH": path, "CURL_HOME": str(folder), "MLX_SERVE_URL": url, "OPENAI_BASE_URL": url}


# The languages


def check_sh(block, request):
    """Commands that start a server have their flags parsed; all others are run."""
    commands = commands_of(block.text)
    starts = [command for command in commands if _starts_a_server(command)]
    for command in starts:
        _parse_flags(command)
    if starts:
        assert starts == commands, "a block either starts servers or uses them"
        return
    environ = request.getfixturevalue("environ")
    script = _with_port(block.text, request.getfixturevalue("port"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _starts_a_server(command):
    words = _without_assignments(shlex.split(command, comments=True))
    return words[:1] == ["mlx-serve"] and words[1:2] != ["--help"] and (len(words) < 2 or words[1] not in COMMANDS)


def _without_assignments(words):
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def _parse_flags(command):
    words = _without_assignments(shlex.split(command, comments=True))
    if "--config" in words:  # a file of the reader's own
        i = words.index("--config")
        words[i : i + 2] = []
    config.from_args(server_flags(words[1:]), {})


def check_python(block, request):
    compile(block.text, str(block), "exec")
    needed = re.findall(r"^(?:from|import) ([\w.]+)", block.text, re.MULTILINE)
    for package in (name.split(".")[0] for name in needed):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the block was compiled, not run")
    code = _with_port(block.text, request.getfixturevalue("port")).replace("MODEL", "default_model")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=request.getfixturevalue("environ"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _with_port(text, port):
    return text.replace(SHOWN, f"127.0.0.1:{port}")


def check_js(block, request):
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    file = request.getfixturevalue("tmp_path") / "block.mjs"
    file.write_text(block.text)
    done = subprocess.run([node, "--check", str(file)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def check_json(block, request):
    json.loads(block.text)


def check_jsonl(block, request):
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


def check_toml(block, request):
    tomllib.loads(block.text)


def check_yaml(block, request):
    assert yaml.safe_load(block.text) is not None


def check_ini(block, request):
    configparser.ConfigParser(strict=False, interpolation=None).read_string(block.text)


def check_xml(block, request):
    ET.fromstring(block.text)


def check_nginx(block, request):
    """Lines of the example, which the tests of proxies run nginx with."""
    example = {line.strip() for line in (ROOT / "examples/nginx/mlx-serve.conf").read_text().splitlines()}
    assert {line.strip() for line in block.text.splitlines()} <= example


def check_text(block, request):
    """A drawing, or what something prints: nothing to run."""
    assert block.text.strip()


CHECKS = {
    "sh": check_sh,
    "python": check_python,
    "js": check_js,
    "json": check_json,
    "jsonl": check_jsonl,
    "toml": check_toml,
    "yaml": check_yaml,
    "ini": check_ini,
    "xml": check_xml,
    "nginx": check_nginx,
    "text": check_text,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_true(block, request):
    assert block.language in CHECKS, f"a language that nobody checks; there are {', '.join(CHECKS)}"
    if block.not_run is not None:
        pytest.skip(f"not run: {block.not_run}")
    CHECKS[block.language](block, request)


def test_links_lead_somewhere():
    for path in {ROOT / block.page for block in BLOCKS} | set((ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            page = path.parent / target if target else path
            assert page.exists(), f"{path}: {target}"
            assert not anchor or anchor in _anchors(page), f"{path}: {target}#{anchor}"


def _anchors(page):
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_flag_that_a_page_names_is_there():
    known = set(re.findall(r"--[a-z][a-z0-9-]+", config.parser().format_help())) | _of_commands() | FROM_OTHERS
    flags = re.compile(r"`(--[a-z][a-z0-9-]+)")
    for page in ("README.md", "docs/operating.md", "docs/troubleshooting.md", "docs/migrating-from-mlx_lm-server.md"):
        assert set(flags.findall((ROOT / page).read_text())) <= known, page


def test_every_flag_of_the_server_is_explained():
    page = (ROOT / "docs/operating.md").read_text()
    assert not {option_of(name) for name in config.FLAGS} - set(re.findall(r"`(--[a-z][a-z0-9-]+)", page))


@pytest.mark.parametrize("page", ["README.md", "docs/operating.md", "docs/prompt-cache.md"])
def test_the_defaults_in_tables_are_the_server_s(page):
    named = {option_of(name): about for name, about in config.FLAGS.items()}
    told = list(_defaults((ROOT / page).read_text()))
    assert told
    for option, text in told:
        about = named.get(option)
        assert about is None or _is_default(about, text), f"{option}: {text!r}, not {about.default!r}"


def _defaults(page):
    """Each flag of the tables that have a column "default", with what stands there for it."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in row.strip("|\n").split("|")] for row in table.splitlines())
        if "default" not in head:
            continue
        for cells in rows:
            options = re.findall(r"`(--[a-z-]+)`", cells[head.index("flag")])
            texts = cells[head.index("default")].split(", ")
            assert len(options) == len(texts), cells
            yield from zip(options, texts, strict=True)


def _is_default(about, text):
    if about.default_text in ("", "0", "on"):
        # In words, and those are no number that another default could be.
        return text == about.default_text or not re.search(r"\d", text + about.default_text.replace("0", ""))
    units = {"": 1, "s": 1, "ms": 1, "B/s": 1, "h": 3600}
    if (number := re.fullmatch(r"(\d+) ?([a-zA-Z/]*)", text)) and number[2] in units:
        return int(number[1]) * units[number[2]] == about.default
    return text.replace(" ", "") == about.default_text


def test_a_wrong_default_in_a_table_is_found():
    page = "| flag | default | |\n| --- | --- | --- |\n| `--port`, `--max-body-bytes` | 8081, 32 MiB | x |\n"
    assert [_is_default(config.FLAGS[option[2:].replace("-", "_")], text) for option, text in _defaults(page)] == [
        False,
        True,
    ]


def _of_commands():
    found = set()
    for name in COMMANDS:
        line = [sys.executable, "-m", "mlx_serve", name, "--help"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd=ROOT)
        found |= set(re.findall(r"--[a-z][a-z0-9-]+", done.stdout))
    return found


# Of other programs, which the pages name too.
FROM_OTHERS = {"--data-binary", "--no-buffer", "--fail-with-body"}

# The reader of pages itself


def test_blocks_are_told_apart():
    page = "a\n\n```sh\nx \\\n  y\n```\n\n<!-- not run: why -->\n\n```python\nz\n```\n"
    assert blocks_of("p", page) == [Block("p", 3, "sh", "x \\\n  y\n", None), Block("p", 10, "python", "z\n", "why")]
    assert commands_of("# a\nx \\\n  y\n\nz # b\n") == ["x y", "z # b"]


@pytest.mark.parametrize(
    "page",
    ["```sh\nx\n", "text\n\n    code\n", "<!-- not run: why -->\ntext\n", "<!-- not run: why -->\n"],
    ids=["no end", "indented", "marker above text", "marker at the end"],
)
def test_a_page_whose_blocks_would_be_missed_is_refused(page):
    with pytest.raises(BadPageError):
        blocks_of("p", page)


def test_a_list_s_second_paragraph_is_no_block():
    assert blocks_of("p", "- a\n\n    b\n") == []


def test_a_server_s_flags_are_told_from_commands():
    assert _starts_a_server("MLX_MODEL_PATH=/m mlx-serve  # remark")
    assert _starts_a_server("mlx-serve --demo")
    assert not _starts_a_server("mlx-serve chat hi")
    assert not _starts_a_server("curl http://x")
    with pytest.raises(SystemExit):
        _parse_flags("mlx-serve --no-such-flag")
