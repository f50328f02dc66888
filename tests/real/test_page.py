"""The page in a headless Chromium: it chats, keeps, stops, shows what runs, and lets nothing of an answer act.

Chromium is whatever the machine has; nothing is fetched, and no name but this machine's addresses can be looked up.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

AXE = Path(__file__).parents[1] / "ui/node_modules/axe-core/axe.min.js"
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

    def answer(self, nth=-1):
        """The text of an answer, as it is shown."""
        return self.tab.locator(".turn.assistant > .markdown").nth(nth).text_content()

    def settings(self, **fields):
        self.tab.click("#settings-button")
        for name, value in fields.items():
            self.tab.fill(f"#{name.replace('_', '-')}", value)
        self.tab.press("#settings-dialog", "Escape")

    def curl(self):
        return self.tab.text_content("#curl")

    def conversations(self):
        return self.tab.locator("#conversations .title").all_text_contents()


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
        # Until then nobody listens to what is written.
        tab.wait_for_selector("#status:not([data-state=unknown]), #key-dialog[open]", state="attached")
        yield visit
    finally:
        context.close()
    assert faults or visit.faults == []
    assert visit.urls
    assert [url for url in visit.urls if not url.startswith(origin)] == []


@contextmanager
def page_of(browser, make_backend=lambda _: FakeBackend(), *, access=None, max_queue=128, **options):
    with serving(make_backend, page=files.files(), access=access, max_queue=max_queue) as server:
        with visiting(browser, server, **options) as visit:
            yield visit, server


def answering(text):
    return lambda _: FakeBackend(answer=lambda _: [*tokens_of(text), EOS])


def test_it_loads_and_offers_the_models(browser):
    with page_of(browser) as (visit, _):
        visit.shows("#status", "ok")
        visit.shows("#model", "fake")
        visit.shows("#n-requests", "0")


def test_what_is_written_while_the_page_loads_stays(browser):
    with serving(lambda _: FakeBackend(), page=files.files()) as server:
        context = browser.new_context()
        try:
            tab = context.new_page()
            tab.set_default_timeout(TIMEOUT_MS)
            held = []

            def hold(route):
                held.append(route)

            tab.route("**/storage.js", hold)
            tab.goto(f"http://127.0.0.1:{server.port}/", wait_until="commit")
            tab.fill("#prompt", "early")
            assert tab.text_content("#status") == "connecting"
            for route in held:
                route.continue_()
            tab.wait_for_selector("#status[data-state=ok]")
            assert tab.input_value("#prompt") == "early"
        finally:
            context.close()


def test_it_chats_with_the_whole_conversation(browser):
    with page_of(browser) as (visit, _):
        visit.ask("hi")
        visit.answered()
        assert visit.answer() == "user: hi"
        visit.shows(".turn.assistant .note", "10 tokens")
        visit.shows(".turn.assistant .note", "stop")
        visit.ask("more")
        visit.answered()
        assert visit.answer() == "user: hi\nassistant: user: hiuser: more"
        visit.tab.click("#new")
        visit.count(".turn", 0)
        visit.ask("new")
        visit.answered()
        assert visit.answer() == "user: new"


def test_stop_cancels_the_request(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(endless=True)) as (visit, server):
        try:
            visit.ask("hi")
            until(lambda: server.scheduler.health().running == 1, "a running request")
            gate.let(3)
            visit.shows(".turn.assistant > .markdown", "xx")
            visit.tab.click("#stop")
            visit.shows(".turn.assistant .note", "stopped")

            def freed():
                gate.let(1)
                return server.scheduler.health().running == 0

            until(freed, "a free place")
            visit.shows('#totals div:has-text("Cancelled")', "1")
            assert visit.tab.is_disabled("#stop")
        finally:
            gate.open()


def test_escape_stops_and_brings_an_unanswered_question_back(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend()) as (visit, _):
        try:
            visit.ask("hi")
            visit.shows(".waiting", "Waiting for the server")
            visit.tab.keyboard.press("Escape")
            visit.tab.wait_for_selector("#stop:disabled")
            assert visit.tab.input_value("#prompt") == "hi"
            visit.count(".turn", 0)
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
            visit.shows("#charts figure:nth-child(2) .top", "1")
            server.request("GET", "/no/such/route")
            visit.shows("#errors li", "404")
            visit.tab.click("#stop")
        finally:
            gate.open()


HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script><b>bold</b>\n"
HOSTILE += "[click](javascript:document.title='hit') ![x](javascript:1) <javascript:alert(1)>"


def test_an_answer_is_text_and_nothing_else(browser):
    with page_of(browser, answering(HOSTILE)) as (visit, _):
        visit.ask("hi")
        visit.answered()
        assert visit.answer() == HOSTILE
        visit.count(".turn img, .turn script, .turn b, .turn a", 0)
        assert visit.tab.title() == "mlx-serve"


MARKDOWN = "## Head\n\n- one\n- two **bold**\n\n```python\nif x:\n    pass\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
MARKDOWN += "[docs](https://docs.example/a) ![image](https://images.example/b.png)"


def test_markdown_is_shown(browser):
    with page_of(browser, answering(MARKDOWN), permissions=["clipboard-read", "clipboard-write"]) as (visit, _):
        visit.ask("hi")
        visit.answered()
        for selector in ("h3", "li strong", "pre .hl-keyword", "td >> nth=1"):
            assert visit.tab.is_visible(f".turn.assistant {selector}")
        link = visit.tab.locator(".turn.assistant a").first
        assert link.get_attribute("href") == "https://docs.example/a"
        assert "noopener" in link.get_attribute("rel")
        # Loading an image would tell a third party of the conversation.
        visit.count(".turn img", 0)
        visit.tab.click(".code button")
        visit.shows(".code button", "Copied")
        assert visit.tab.evaluate("navigator.clipboard.readText()") == "if x:\n    pass\n"
        visit.tab.click(".turn.assistant .actions button:has-text('Copy')")
        visit.shows(".turn.assistant .actions", "Copied")
        assert visit.tab.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_reasoning_is_folded(browser):
    with page_of(browser, answering("<think>so deep</think>short")) as (visit, _):
        visit.ask("hi")
        visit.answered()
        assert visit.answer() == "short"
        assert visit.tab.text_content(".turn.assistant details .markdown") == "so deep"
        assert visit.tab.is_hidden(".turn.assistant details .markdown")
        visit.tab.click(".turn.assistant summary")
        assert visit.tab.is_visible(".turn.assistant details .markdown")


def test_a_tool_call_is_shown_folded(browser):
    tools = '{"tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}]}'
    with page_of(browser, answering('<tool_call>get {"a": 1}</tool_call>')) as (visit, _):
        visit.settings(more=tools)
        visit.ask("hi")
        visit.answered()
        visit.shows(".turn.assistant .call summary", "Tool call: get")
        assert visit.tab.is_hidden(".turn.assistant pre")
        visit.tab.click(".turn.assistant summary")
        visit.shows(".turn.assistant pre", '{\n  "a": 1\n}')
        visit.shows(".turn.assistant .note", "tool_calls")
        assert '"tools":[{' in visit.curl()


def test_an_answer_is_made_again_and_a_question_edited(browser):
    answers = iter(range(9))
    with page_of(browser, lambda _: FakeBackend(answer=lambda _: [*tokens_of(f"answer {next(answers)}"), EOS])) as (
        visit,
        _,
    ):
        for text in ("one", "two"):
            visit.ask(text)
            visit.answered()
        visit.tab.click(".turn.assistant >> nth=1 >> text=Regenerate")
        visit.shows(".turn:nth-child(4)", "answer 2")
        visit.answered()
        visit.count(".turn", 4)
        visit.tab.click(".turn.user >> nth=0 >> text=Edit")
        assert visit.tab.input_value("#prompt") == "one"
        visit.ask("first")
        visit.shows(".turn:nth-child(2)", "answer 3")
        visit.answered()
        visit.count(".turn", 2)
        assert '"messages":[{"role":"user","content":"first"}]' in visit.curl()
        visit.tab.click(".turn.user >> text=Edit")
        visit.tab.keyboard.press("Escape")
        assert visit.tab.is_hidden("#editing")
        assert visit.tab.input_value("#prompt") == ""


def test_a_refusal_is_told_and_the_question_comes_back(browser):
    with page_of(browser, faults=True) as (visit, _):
        visit.settings(more='{"temperature": 9}')
        visit.ask("hi")
        visit.shows(".failure", "did not accept")
        visit.shows(".failure", "temperature")
        assert visit.tab.input_value("#prompt") == "hi"
        visit.settings(more="")
        visit.tab.click(".failure button")
        visit.answered()
        visit.count(".failure", 0)
        assert visit.answer() == "user: hi"
        assert visit.tab.input_value("#prompt") == ""


def test_a_full_queue_is_told_and_the_question_comes_back(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(capacity=1), max_queue=1, faults=True) as (visit, server):
        try:
            threads = [threading.Thread(target=server.chat) for _ in range(2)]
            threads[0].start()
            gate.let(1)
            until(lambda: server.scheduler.health().running == 1, "a running request")
            threads[1].start()
            until(lambda: server.scheduler.health().waiting == 1, "a waiting request")
            visit.ask("hi")
            visit.shows(".failure", "its queue is full")
            assert visit.tab.input_value("#prompt") == "hi"
            gate.open()
            for thread in threads:
                thread.join()
            visit.tab.click("text=Retry")
            visit.answered()
            assert visit.answer() == "user: hi"
        finally:
            gate.open()


def test_the_place_in_the_queue_and_the_prefill_are_shown(browser):
    gate = Gate()
    with page_of(browser, lambda _: FakeBackend(capacity=1, prefill_step=4, on_step=gate.wait)) as (visit, server):
        try:
            threads = [threading.Thread(target=server.chat) for _ in range(2)]
            for n, thread in enumerate(threads):
                thread.start()
                until(lambda n=n: len(server.request("GET", "/stats")[2]["requests"]) > n, "a request")
            visit.ask("hi")
            # Of three: the first one's first step was not let yet.
            visit.shows(".waiting", "In the queue: place 3 of 3")
            # The others take three steps for the prompt and ten for the answer.
            gate.let(2 * 13 + 2)
            visit.shows(".waiting", "Reading the prompt: 8 of 9 tokens (88 %)")
            assert visit.tab.locator(".waiting progress").evaluate("bar => bar.value") == pytest.approx(8 / 9)
            gate.open()
            visit.answered()
            assert visit.answer() == "user: hi"
            for thread in threads:
                thread.join()
        finally:
            gate.open()


@pytest.mark.parametrize("text", ["{", "[1]", "null"])
def test_more_fields_must_be_an_object(browser, text):
    with page_of(browser) as (visit, _):
        visit.settings(more=text)
        visit.ask("hi")
        visit.tab.wait_for_selector("#settings-dialog[open]")
        visit.shows("#more-error", "More fields")
        visit.count(".turn", 0)
        assert visit.tab.input_value("#prompt") == "hi"


def test_the_settings_go_with_the_request_and_into_the_curl(browser):
    with page_of(browser) as (visit, _):
        visit.settings(max_tokens="3", temperature="0.5", system="Be brief.")
        visit.ask("it's")
        visit.answered()
        visit.shows(".turn.assistant .note", "3 tokens")
        curl = visit.curl()
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
            assert visit.answer() == "user: hi"
            assert "sk-right" not in visit.tab.content()
            assert "$MLX_SERVE_API_KEY" in visit.curl()
            stored = visit.tab.context.storage_state(indexed_db=True)
            assert stored["cookies"] == []
            assert "user: hi" in str(stored["origins"])
            assert "sk-right" not in str(stored)
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


PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, scheme):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(endless=True), **PHONE, color_scheme=scheme) as (visit, _):
        try:
            visit.tab.fill("#prompt", "w" * 300 + "\n" * 30)
            visit.tab.tap("#send")
            visit.tab.wait_for_selector("#stop:enabled")
            gate.let(2000)
            visit.shows(".turn.assistant > .markdown", "x" * 2000)
            for selector in ("header", "#log", "#prompt", "#send", "#stop"):
                box = visit.tab.locator(selector).bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 390
                assert box["y"] >= 0
                assert box["y"] + box["height"] <= 844
            assert visit.tab.evaluate("document.documentElement.scrollWidth") == 390
            visit.tab.tap("#stop")
            visit.shows(".turn.assistant .note", "stopped")
            visit.tab.tap("#figures-button")
            assert visit.tab.is_visible("#tiles")
            visit.tab.tap("#figures-button")
            assert visit.tab.is_hidden("#tiles")
        finally:
            gate.open()


def test_the_view_follows_the_answer_until_the_reader_scrolls_up(browser):
    gate = Gate()
    lines = "".join(f"line {n}\n\n" for n in range(400))
    backend = FakeBackend(answer=lambda _: [*tokens_of(lines), EOS], on_step=gate.wait)
    with page_of(browser, lambda _: backend) as (visit, _):
        to_end = "log => log.scrollHeight - log.scrollTop - log.clientHeight"

        def from_end():
            return visit.tab.locator("#log").evaluate(to_end)

        def top():
            return visit.tab.locator("#log").evaluate("log => log.scrollTop")

        try:
            visit.ask("hi")
            # All that comes of it is shown before the reader scrolls.
            gate.let(1500)
            visit.shows(".turn.assistant > .markdown", "line 160")
            until(lambda: from_end() < 2, "the end in view")
            visit.tab.hover("#log")
            visit.tab.mouse.wheel(0, -600)
            visit.tab.wait_for_selector("#to-end")
            # The browser may scroll smoothly.
            until(lambda: from_end() > 598, "the end of the scroll")
            before = top()
            gate.let(1000)
            visit.shows(".turn.assistant > .markdown", "line 250")
            assert abs(top() - before) < 2
            visit.tab.click("#to-end")
            gate.open()
            visit.answered()
            until(lambda: from_end() < 2, "the end in view")
        finally:
            gate.open()


def test_conversations_are_kept_until_they_are_not_wanted(browser):
    with page_of(browser) as (visit, _):
        for text in ("one", "two"):
            visit.ask(text)
            visit.answered()
            visit.tab.click("#new")
        visit.tab.reload()
        visit.count("#conversations li", 2)
        assert visit.conversations() == ["two", "one"]
        visit.tab.click("text=one")
        visit.shows("#log", "user: one")
        visit.ask("more")
        visit.answered()
        assert visit.conversations() == ["one", "two"]
        with visit.tab.expect_download() as download:
            visit.tab.click("#export")
        saved = Path(download.value.path()).read_text()
        visit.tab.click("[aria-label='Delete two']")
        visit.tab.click("[aria-label='Delete two']")
        visit.count("#conversations li", 1)
        visit.tab.uncheck("#keep")
        visit.shows("#keep-note", "gone when")
        visit.ask("unkept")
        visit.answered()
        visit.tab.reload()
        visit.shows("#keep-note", "gone when")
        visit.count("#conversations li", 0)
        (database,) = visit.tab.context.storage_state(indexed_db=True)["origins"][0]["indexedDB"]
        assert {store["name"]: len(store["records"]) for store in database["stores"]} == {
            "choices": 1,
            "conversations": 0,
            "presets": 0,
        }
        visit.tab.set_input_files("#import-file", {"name": "a.json", "mimeType": "application/json", "buffer": b"[1]"})
        visit.shows("#keep-note", "Not imported")
        data = {"name": "a.json", "mimeType": "application/json", "buffer": saved.encode()}
        visit.tab.set_input_files("#import-file", data)
        visit.shows("#keep-note", "2 imported")
        visit.tab.click("text=one")
        visit.shows("#log", "user: more")


def test_presets_are_kept(browser):
    with page_of(browser) as (visit, _):
        visit.tab.click("#settings-button")
        visit.tab.fill("#system", "Be brief.")
        visit.tab.fill("#preset-name", "brief")
        visit.tab.press("#preset-name", "Enter")
        visit.tab.select_option("#preset", "")
        assert visit.tab.input_value("#system") == ""
        visit.tab.press("#settings-dialog", "Escape")
        visit.tab.reload()
        visit.tab.click("#settings-button")
        visit.tab.select_option("#preset", "brief")
        assert visit.tab.input_value("#system") == "Be brief."
        visit.tab.press("#settings-dialog", "Escape")
        visit.ask("hi")
        visit.answered()
        assert visit.answer() == "system: Be brief.\nuser: hi"
        visit.tab.click("#settings-button")
        visit.tab.click("#preset-delete")
        assert visit.tab.locator("#preset option").all_text_contents() == ["none"]


def test_it_says_so_when_the_server_is_gone(browser):
    with serving(page=files.files()) as server:
        with visiting(browser, server, faults=True) as visit:
            visit.shows("#status", "ok")
            server.server.close()
            visit.shows("#status", "not reachable")
            visit.count("#figures.old", 1)
            visit.shows("#age", "As they were at")
            visit.ask("hi")
            visit.shows(".failure", "cannot be reached")
            assert visit.tab.input_value("#prompt") == "hi"


def test_what_has_come_of_an_answer_is_kept_when_the_server_is_lost(browser):
    gate = Gate()
    with page_of(browser, lambda _: gate.backend(endless=True), faults=True) as (visit, _):
        try:
            chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "half an ans"}}]}\n\n'
            headers = {"content-type": "text/event-stream"}
            visit.tab.route("**/completions", lambda route: route.fulfill(body=chunk, headers=headers))
            visit.ask("hi")
            visit.shows(".failure", "was lost. What has come is kept.")
            assert visit.answer() == "half an ans"
            visit.tab.unroute("**/completions")
            visit.tab.click("text=Retry")
            gate.let(5)
            visit.shows(".turn.assistant > .markdown", "xx")
            visit.count(".turn", 2)
        finally:
            gate.open()


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


WIDE = {"viewport": {"width": 1280, "height": 800}}
EVERYTHING = f"<think>Some **thoughts**.</think>{MARKDOWN}\n\n> quote\n\n1. `code` ~~del~~\n\n"
EVERYTHING += '```diff\n+ a\n- b\n@@ c\n```\n\n```js\nf(1, "s") // c\n```\n<tool_call>get {"a": 1}</tool_call>'


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make tests/ui/node_modules/.package-lock.json")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_wrong(browser, scheme, size):
    found = {}

    def check(state):
        results = visit.tab.evaluate("axe.run()")
        assert results["passes"]
        for violation in results["violations"]:
            found[state, violation["id"]] = [node["html"] for node in violation["nodes"]]

    with serving(lambda _: FakeBackend(answer=lambda _: [*tokens_of(EVERYTHING), EOS]), page=files.files()) as server:
        with visiting(browser, server, faults=True, color_scheme=scheme, **size) as visit:
            visit.shows("#status", "ok")
            # Over the debugger, which the page's policy does not bind.
            visit.tab.evaluate(AXE.read_text())
            check("empty")
            visit.settings(more='{"tools": [{"type": "function", "function": {"name": "get", "parameters": {}}}]}')
            visit.tab.fill("#prompt", "hi")
            visit.tab.click("#send")
            visit.answered()
            for summary in visit.tab.locator(".turn summary").all():
                summary.click()
            check("a conversation")
            visit.tab.click("#settings-button")
            check("the settings")
            visit.tab.press("#settings-dialog", "Escape")
            visit.tab.click(".turn.user >> text=Edit")
            check("editing")
            server.server.close()
            visit.shows("#status", "not reachable")
            visit.tab.click("#send")
            visit.shows(".failure", "cannot be reached")
            check("a lost server")
            for name in ("chats", "figures"):
                if visit.tab.is_hidden(f"#{name}"):
                    visit.tab.click(f"#{name}-button")
                check(name)
                if size is PHONE:
                    visit.tab.click(f"#{name}-button")
    assert found == {}
