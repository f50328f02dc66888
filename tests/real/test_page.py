"""The page in a headless Chromium: it chats, stops, shows what runs, and lets nothing of a model's answer act.

Chromium is whatever the machine has; nothing is fetched, and no name but this machine's addresses can be looked up.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_serve.api.status import page as files
from mlx_serve.testing import EOS, FakeBackend, tokens_of
from mlx_serve.wire.access import AccessPolicy
from tests.real.clientkit import Gate
from tests.sockets.apikit import serving
from tests.waiting import DEADLINE_S, until

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [pytest.mark.real, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

TIMEOUT_MS = 3 * DEADLINE_S * 1000
ARGUMENTS = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
# Chromium's sandbox will not start for root.
ARGUMENTS += ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """The page, and what went wrong in it."""

    def __init__(self, tab, origin):
        self.tab = tab
        self.origin = origin
        self.faults = []
        self.urls = []
        tab.on("console", lambda message: message.type in ("error", "warning") and self.faults.append(message.text))
        tab.on("pageerror", lambda error: self.faults.append(str(error)))
        tab.on("request", lambda request: self.urls.append(request.url))

    def text(self, selector):
        return self.tab.inner_text(selector)

    def shows(self, selector, text):
        """Wait until it does."""
        api.expect(self.tab.locator(selector)).to_contain_text(text, timeout=TIMEOUT_MS)

    def count(self, selector, n):
        api.expect(self.tab.locator(selector)).to_have_count(n, timeout=TIMEOUT_MS)

    def ask(self, text):
        self.tab.fill("#prompt", text)
        self.tab.press("#prompt", "Enter")

    def answered(self):
        self.tab.wait_for_selector("#send:enabled", timeout=TIMEOUT_MS)

    def settings(self, **fields):
        self.tab.locator("summary", has_text="Settings").click()
        for name, value in fields.items():
            self.tab.fill(f"#{name}", value)


@contextmanager
def visiting(browser, server, *, faults=False, **options) -> Iterator[Visit]:
    """A tab of its own with the page in it. Nothing may go wrong, unless ``faults`` says so, or leave the origin."""
    origin = f"http://127.0.0.1:{server.port}/"
    context = browser.new_context(**options)
    tab = context.new_page()
    tab.set_default_timeout(TIMEOUT_MS)
    visit = Visit(tab, origin)
    try:
        tab.goto(origin)
        yield visit
    finally:
        context.close()
    assert faults or visit.faults == []
    assert visit.urls
    assert [url for url in visit.urls if not url.startswith(origin)] == []


@contextmanager
def page_of(browser, make_backend=lambda _: FakeBackend(), *, access=None, **options):
    with serving(make_backend, page=files.files(), access=access) as server:
        with visiting(browser, server, **options) as visit:
            yield visit, server


def answering(text):
    return lambda _: FakeBackend(answer=lambda _: [*tokens_of(text), EOS])


def test_it_loads_and_offers_the_models(browser):
    with page_of(browser) as (visit, _):
        visit.shows("#status", "ok")
        visit.shows("#model", "fake")
        visit.shows("#n-requests", "0")


def test_it_chats_with_the_whole_conversation(browser):
    with page_of(browser) as (visit, _):
        visit.ask("hi")
        visit.answered()
        assert visit.tab.text_content(".turn.assistant .text") == "user: hi\n"
        visit.shows(".turn.assistant .note", "10 tokens")
        visit.shows(".turn.assistant .note", "stop")
        visit.ask("more")
        visit.answered()
        assert visit.tab.text_content(".turn:last-child .text") == "user: hi\nassistant: user: hi\n\nuser: more\n"
        visit.tab.click("#new")
        visit.count(".turn", 0)
        visit.ask("new")
        visit.answered()
        assert visit.tab.text_content(".turn.assistant .text") == "user: new\n"


def test_stop_cancels_the_request(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(endless=True)) as (visit, server):
        try:
            visit.ask("hi")
            until(lambda: server.scheduler.health().running == 1, "a running request")
            gate.let(3)
            visit.shows(".turn.assistant .text", "xx")
            visit.tab.click("#stop")
            visit.shows(".turn.assistant .note", "stopped")

            def freed():
                gate.let(1)
                return server.scheduler.health().running == 0

            until(freed, "a free place")
            visit.shows("#totals div:nth-child(5)", "1")
            assert visit.tab.is_disabled("#stop")
        finally:
            gate.open()


def test_it_shows_what_runs(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(endless=True, capacity=1)) as (visit, server):
        try:
            visit.ask("hi")
            visit.shows("#requests tr", "queued")
            gate.let(5)
            visit.shows("#requests tr", "decoding")
            visit.shows("#requests tr td:nth-child(2)", "5")
            visit.shows("#t-running", "1")
            visit.shows("#facts", "fake")
            visit.count("#c-speed polyline", 1)
            visit.count("#c-load polyline", 2)
            assert "now" in visit.tab.get_attribute("#c-load", "aria-label")
            server.request("GET", "/no/such/route")
            visit.shows("#errors li", "404")
            visit.tab.click("#stop")
        finally:
            gate.open()


HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script><b>bold</b>\n"
HOSTILE += "[click](javascript:document.title='hit')"


def test_an_answer_is_text_and_nothing_else(browser):
    with page_of(browser, answering(HOSTILE)) as (visit, _):
        visit.ask("hi")
        visit.answered()
        assert visit.tab.text_content(".turn.assistant .text") == HOSTILE
        visit.count(".turn img, .turn script, .turn b, .turn a", 0)
        assert visit.tab.title() == "mlx-serve"


def test_reasoning_is_folded(browser):
    with page_of(browser, answering("<think>so deep</think>short")) as (visit, _):
        visit.ask("hi")
        visit.answered()
        visit.shows(".turn.assistant > .text", "short")
        assert visit.tab.text_content(".turn.assistant details .text") == "so deep"
        assert visit.tab.is_hidden(".turn.assistant details .text")
        visit.tab.click(".turn.assistant summary")
        assert visit.tab.is_visible(".turn.assistant details .text")


def test_a_tool_call_is_shown(browser):
    tools = '{"tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}]}'
    with page_of(browser, answering('<tool_call>get {"a": 1}</tool_call>')) as (visit, _):
        visit.settings(more=tools)
        visit.ask("hi")
        visit.answered()
        visit.shows(".turn.assistant pre", 'get({"a": 1})')
        visit.shows(".turn.assistant .note", "tool_calls")
        assert '"tools":[{' in visit.tab.text_content("#curl")


def test_a_refusal_is_told_and_the_question_taken_back(browser):
    with page_of(browser, faults=True) as (visit, _):
        visit.settings(more='{"temperature": 9}')
        visit.ask("hi")
        visit.answered()
        visit.shows(".turn.assistant .error", "temperature")
        visit.tab.fill("#more", "")
        visit.ask("again")
        visit.answered()
        assert visit.tab.text_content(".turn:last-child .text") == "user: again\n"


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_more_fields_must_be_an_object(browser, text):
    with page_of(browser) as (visit, _):
        visit.settings(more=text)
        visit.ask("hi")
        visit.shows("#more-error", "More fields")
        visit.count(".turn", 0)
        assert visit.tab.input_value("#prompt") == "hi"


def test_the_settings_go_with_the_request_and_into_the_curl(browser):
    with page_of(browser) as (visit, _):
        visit.settings(**{"max-tokens": "3", "temperature": "0.5", "system": "Be brief."})
        visit.ask("it's")
        visit.answered()
        visit.shows(".turn.assistant .note", "3 tokens")
        curl = visit.tab.text_content("#curl")
        assert curl.startswith(f"curl -N '{visit.origin}v1/chat/completions'")
        assert '"max_tokens":3' in curl
        assert '"temperature":0.5' in curl
        assert "it'\\''s" in curl
        assert "Authorization" not in curl


KEYS = AccessPolicy(api_keys=("sk-right",))


def test_it_asks_for_the_key_and_keeps_it_for_the_tab(browser):
    with serving(page=files.files(), access=KEYS) as server:
        # Chromium itself reports each 401 as an error.
        with visiting(browser, server, faults=True) as visit:
            visit.tab.wait_for_selector("#key-dialog[open]")
            visit.tab.fill("#key", "sk-wrong")
            visit.tab.press("#key", "Enter")
            visit.shows("#key-text", "did not take")
            visit.tab.fill("#key", "sk-right")
            visit.tab.press("#key", "Enter")
            visit.shows("#status", "ok")
            visit.shows("#model", "fake")
            visit.ask("hi")
            visit.answered()
            visit.shows(".turn.assistant .text", "user: hi")
            assert "sk-right" not in visit.tab.content()
            assert "$MLX_SERVE_API_KEY" in visit.tab.text_content("#curl")
            stored = visit.tab.context.storage_state()
            assert stored["cookies"] == stored["origins"] == []
            visit.tab.reload()
            visit.shows("#status", "ok")
        with visiting(browser, server, faults=True) as stranger:
            stranger.tab.wait_for_selector("#key-dialog[open]")
            stranger.tab.click("#key-cancel")
            stranger.shows("#status", "needs an API key")
            stranger.tab.click("#key-button")
            stranger.tab.fill("#key", "sk-right")
            stranger.tab.press("#key", "Enter")
            stranger.shows("#status", "ok")


def test_it_works_from_the_keyboard(browser):
    with page_of(browser) as (visit, _):
        visit.shows("#model", "fake")
        visit.tab.keyboard.press("Tab")
        visit.count(".skip:focus", 1)
        visit.tab.keyboard.press("Enter")
        visit.tab.keyboard.type("one")
        visit.tab.keyboard.press("Shift+Enter")
        visit.tab.keyboard.type("two")
        visit.tab.keyboard.press("Enter")
        visit.answered()
        assert visit.tab.text_content(".turn.user .text") == "one\ntwo"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, scheme):
    with page_of(browser, viewport={"width": 360, "height": 640}, color_scheme=scheme) as (visit, _):
        visit.ask("w" * 300)
        visit.answered()
        for selector in ("header", "#chat", "#live", ".turn.assistant", "#curl-details"):
            box = visit.tab.locator(selector).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360


def test_it_says_so_when_the_server_is_gone(browser):
    with serving(page=files.files()) as server:
        with visiting(browser, server, faults=True) as visit:
            visit.shows("#status", "ok")
            server.server.close()
            visit.shows("#status", "not reachable")


def test_it_says_so_when_the_server_answers_no_more(browser):
    with page_of(browser, faults=True) as (visit, _):
        visit.shows("#status", "ok")
        visit.tab.route("**/stats", lambda route: None)
        visit.tab.evaluate("AbortSignal.timeout = () => AbortSignal.abort()")
        visit.shows("#status", "not reachable")


def test_a_server_that_comes_back_may_have_other_models(browser):
    with page_of(browser, faults=True) as (visit, _):
        visit.shows("#model", "fake")
        visit.tab.route("**/stats", lambda route: route.abort())
        visit.shows("#status", "not reachable")
        visit.tab.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "another"}]}))
        visit.tab.unroute("**/stats")
        visit.shows("#model", "another")
