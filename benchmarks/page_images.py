"""Takes the pictures of the page that docs/page.md shows, from a server that it puts under load.

    mlx-serve --demo &
    python benchmarks/page_images.py http://127.0.0.1:8080

Needs playwright and an installed Chromium.
"""

import json
import os
import shutil
import sys
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
N_STREAMS = 5
MAX_TOKENS = 200
QUESTION = "Name three things that are blue. Be brief."
TIMEOUT_MS = 300_000


def hold_a_stream(base: str, number: int, done: threading.Event) -> None:
    """Ask for a long answer and read it until the pictures are taken."""
    messages = [{"role": "user", "content": f"Write a long story about the number {number}."}]
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode())
    while not done.is_set():
        with urllib.request.urlopen(request) as reply:
            while not done.is_set() and reply.readline():
                pass


def take(base: str) -> None:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        tab = browser.new_page(viewport={"width": 1360, "height": 900})
        tab.set_default_timeout(TIMEOUT_MS)
        tab.goto(base)
        tab.wait_for_selector("#status[data-state=ok]")
        tab.locator("summary", has_text="Settings").click()
        tab.fill("#max-tokens", "40")
        tab.locator("summary", has_text="Settings").click()
        tab.fill("#prompt", QUESTION)
        tab.press("#prompt", "Enter")
        tab.wait_for_selector("#send:enabled")
        tab.locator("#requests td.decoding").nth(N_STREAMS - 1).wait_for()
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            tab.screenshot(path=IMAGES / f"page-{scheme}.png")
        tab.set_viewport_size({"width": 390, "height": 844})
        tab.screenshot(path=IMAGES / "page-phone.png")
        browser.close()


def main() -> None:
    base = sys.argv[1].rstrip("/")
    done = threading.Event()
    streams = [threading.Thread(target=hold_a_stream, args=(base, n, done)) for n in range(N_STREAMS)]
    for stream in streams:
        stream.start()
    try:
        take(base)
    finally:
        done.set()
        for stream in streams:
            stream.join()


if __name__ == "__main__":
    main()
