"""Takes the pictures of the page that docs/page.md shows, from servers on the fake backend.

    python -m benchmarks.page_images

Needs playwright and an installed Chromium.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from mlx_serve import serve, testing
from mlx_serve.api.status import page
from mlx_serve.engine.catalog import Catalog, ModelEntry
from mlx_serve.testing import EOS, FakeBackend, FakeTokenizer, serving
from mlx_serve.values import Job

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NAME = "Qwen3-30B-A3B"
TIMEOUT_MS = 60_000
STEP_S = 0.02
WIDE = {"viewport": {"width": 1180, "height": 760}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
QUESTION = "Write quicksort in Python, and compare it with mergesort."
ANSWER = """<think>A short version, then a table.</think>Here is a compact **quicksort**, with the pivot in the middle:

```python
def quicksort(items: list[int]) -> list[int]:
    \"\"\"Sort without changing the input.\"\"\"
    if len(items) < 2:
        return items[:]
    pivot = items[len(items) // 2]  # sorted input is common
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)
```

| algorithm | average | worst | stable |
|---|---|---|:-:|
| quicksort | `O(n log n)` | `O(n²)` | no |
| mergesort | `O(n log n)` | `O(n log n)` | yes |

For real work use `sorted`: it is stable, and written in C.
"""


@contextmanager
def server(*, capacity: int = 32, step_s: float = STEP_S) -> Iterator[serve.Running]:
    """Answers with ANSWER, four characters a step, or without end to a prompt that asks for it."""
    tokenizer = FakeTokenizer()
    think, rest = ANSWER.split("</think>")
    texts = ["<think>", *pieces(think.removeprefix("<think>")), "</think>", *pieces(rest)]
    answer = [*map(tokenizer.learn, texts), EOS]

    def answers(job: Job) -> Iterable[int]:
        return cycle(answer[2:9]) if b"endless" in bytes(t for t in job.prompt.tokens if t < EOS) else answer

    entry: ModelEntry = replace(testing.ENTRY, name=NAME, context_tokens=None, vocab_size=10**6)
    with serving(
        lambda _: FakeBackend(
            capacity=capacity,
            answer=answers,
            on_step=lambda _: time.sleep(step_s),
            vocab_size=10**6,
            token_bytes=98_304,
        ),
        catalog=Catalog(entry, [entry.name]),
        tokenizer=tokenizer,
        page=page.files(),
        version="1.0",
    ) as running:
        yield running


def pieces(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]


@contextmanager
def traffic(running: serve.Running, n: int) -> Iterator[None]:
    """Streams without end, each read by a thread, until the block ends."""
    connections = []
    with ExitStack() as stack:
        for _ in range(n):
            connection = http.client.HTTPConnection("127.0.0.1", int(running.http.address[1]))
            stack.callback(connection.close)
            body = {"messages": [{"role": "user", "content": "endless"}], "stream": True, "max_tokens": 100_000}
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            connections.append(connection)
        readers = [threading.Thread(target=read, args=(connection,), daemon=True) for connection in connections]
        for reader in readers:
            reader.start()
        yield


def read(connection: http.client.HTTPConnection) -> None:
    # The connection is closed under it.
    try:
        reply = connection.getresponse()
        while reply.readline():
            pass
    except (OSError, ValueError, http.client.HTTPException, AttributeError):
        return


@contextmanager
def tab_of(browser: Browser, running: serve.Running, **options: Any) -> Iterator[Page]:
    context = browser.new_context(**options)
    tab = context.new_page()
    tab.set_default_timeout(TIMEOUT_MS)
    tab.goto(f"http://127.0.0.1:{running.http.address[1]}/")
    tab.wait_for_selector("#status[data-state=ok]")
    yield tab
    context.close()


def ask(tab: Page, text: str = QUESTION) -> None:
    tab.fill("#prompt", text)
    tab.click("#send")


def take(browser: Browser) -> None:
    with server() as running, traffic(running, 3):
        with tab_of(browser, running, **WIDE) as tab:
            ask(tab)
            tab.wait_for_selector(".turn.assistant .note:not(:empty)")
            tab.locator("#requests td.decoding").nth(2).wait_for()
            # Some seconds for the charts.
            tab.wait_for_timeout(6000)
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                tab.screenshot(path=IMAGES / f"page-{scheme}.png")
        with tab_of(browser, running, **PHONE) as tab:
            ask(tab)
            tab.wait_for_selector(".turn.assistant .code .line >> nth=8")
            tab.screenshot(path=IMAGES / "page-phone.png")
    with server(capacity=1) as running, traffic(running, 3), tab_of(browser, running, **WIDE) as tab:
        ask(tab)
        tab.locator(".waiting", has_text="place").wait_for()
        tab.wait_for_timeout(2000)
        tab.screenshot(path=IMAGES / "page-queue.png")
    with server() as running, tab_of(browser, running, **WIDE) as tab:
        with traffic(running, 3):
            ask(tab, "Hello.")
            tab.wait_for_selector(".turn.assistant .note:not(:empty)")
            tab.wait_for_timeout(4000)
        running.http.close()
        tab.locator("#status", has_text="not reachable").wait_for()
        ask(tab)
        tab.wait_for_selector(".failure")
        tab.screenshot(path=IMAGES / "page-lost.png")


def main() -> None:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        take(browser)
        browser.close()


if __name__ == "__main__":
    main()
