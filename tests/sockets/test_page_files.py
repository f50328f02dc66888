"""The page's files as they are served, and what they may not hold."""

import re
from html.parser import HTMLParser

import pytest

from mlx_serve.api.status import page
from mlx_serve.wire.access import AccessPolicy
from tests.sockets.apikit import serving
from tests.waiting import until

FILES = page.files()
SCRIPTS = sorted(path for path in FILES if path.endswith(".js"))
KEYS = AccessPolicy(api_keys=("k",))


@pytest.fixture(scope="module")
def server():
    with serving(page=FILES) as running:
        yield running


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.ids = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]


@pytest.fixture(scope="module")
def tags(server):
    return Tags(server.request("GET", "/")[2])


def test_it_is_at_the_root(server):
    status, headers, text = server.request("GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert text.startswith("<!doctype html>")
    assert server.request("GET", "/?a=b")[0] == 200
    assert server.request("HEAD", "/")[0] == 200


@pytest.mark.parametrize("path", sorted(FILES))
def test_every_file_is_fenced_in(server, path):
    headers = server.request("GET", path)[1]
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path", ["/ui", "/ui/", "/ui/index.html", "/ui/package.json", "/ui/../cli.py", "/ui/%2e%2e/cli.py", "/v1/", "//"]
)
def test_there_is_nothing_else_to_be_had(server, path):
    assert server.request("GET", path)[0] in (400, 404)


def test_it_takes_nothing(server):
    assert server.request("POST", "/", "x")[0] == 405


def test_it_can_be_left_out():
    with serving() as bare:
        assert {bare.request("GET", path)[0] for path in FILES if path != "/"} == {404}
        assert bare.request("GET", "/")[2] == {"name": "mlx-serve"}
        assert bare.request("GET", "/stats")[0] == 200


def test_it_needs_no_key_and_its_figures_do():
    with serving(page=FILES, access=KEYS) as guarded:
        assert guarded.request("GET", "/")[0] == 200
        assert guarded.request("GET", "/ui/page.js")[0] == 200
        assert guarded.request("GET", "/stats")[0] == guarded.request("GET", "/v1/models")[0] == 401


def test_a_foreign_page_gets_neither_it_nor_its_figures(server):
    for path in ("/", "/stats", "/metrics"):
        assert server.request("GET", path, headers={"Origin": "http://evil.example"})[0] == 403
        assert server.request("GET", path, headers={"Host": "evil.example"})[0] == 403


def test_its_own_requests_pass(server):
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.request("GET", "/stats", headers=own)[0] == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.request("POST", "/v1/chat/completions", body, own)[0] == 200
    other_port = {"Origin": f"http://127.0.0.1:{server.port + 1}"}
    assert server.request("POST", "/v1/chat/completions", body, other_port)[0] == 403


def test_its_requests_are_counted_under_its_own_paths():
    with serving(page=FILES) as fresh:
        fresh.request("GET", "/ui/page.css")
        until(lambda: fresh.request("GET", "/stats")[2]["totals"]["http_requests"] > 0, "a count")
        assert "/ui/page.css" in fresh.request("GET", "/metrics")[2]


# The files themselves


def test_nothing_in_it_is_inline(tags):
    for tag, attributes in tags.tags:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_it_refers_to_nothing_outside(server, tags):
    links = [value for _, attributes in tags.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links
    for link in links:
        assert link.startswith("#") or f"/{link}" in FILES
    for path in FILES:
        text = server.request("GET", path)[2].replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w|[\"']//[a-z]|@import|\burl\(", text)


def test_its_modules_are_its_own_files(server):
    imported = [name for path in SCRIPTS for name in re.findall(r'(?m)^import [^"]*"([^"]+)"', code_of(server, path))]
    assert imported
    assert {f"/ui/{name.removeprefix('./')}" for name in imported} | {"/ui/page.js"} == set(SCRIPTS)


def code_of(server, path):
    lines = server.request("GET", path)[2].splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_script_sets_text_and_never_markup(server, path):
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|srcdoc"
    assert not re.search(banned, code_of(server, path))


def test_it_is_small():
    assert sum(len(file.body) for file in FILES.values()) < 300_000


def test_every_control_has_a_label(tags):
    labels = {attributes.get("for") for tag, attributes in tags.tags if tag == "label"}
    for tag, attributes in tags.tags:
        if tag in ("input", "select", "textarea"):
            assert attributes["id"] in labels
    assert len(set(tags.ids)) == len(tags.ids)


def test_every_id_the_scripts_ask_for_is_there(server, tags):
    code = "\n".join(code_of(server, path) for path in SCRIPTS)
    calls = r'(?:draw|showPairs|showQuantiles)\("([^"]+)"'
    wanted = {*re.findall(r'\$\("([^"]+)"\)', code), *re.findall(calls, code)}
    for panel in re.findall(r'setUpPanel\("([^"]+)"', code):
        wanted |= {panel, f"{panel}-button"}
    assert wanted
    assert wanted <= set(tags.ids)
