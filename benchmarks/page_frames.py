"""How the page keeps up with a long answer: the time of its frames, and of its work, for each tenth of the answer.

    python -m benchmarks.page_frames

A headless Chromium shows an answer of 30,000 tokens of Markdown from a server on the fake backend, which makes
``--rate`` tokens per second. Needs playwright and an installed Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Collection
from dataclasses import replace

from playwright.sync_api import CDPSession, Page, sync_playwright

from mlx_serve import testing
from mlx_serve.api.status import page
from mlx_serve.engine.catalog import Catalog
from mlx_serve.testing import EOS, FakeBackend, FakeTokenizer, serving
from mlx_serve.values import Job

TIMEOUT_MS = 600_000
SECTION = """## Part {n}

Each part has a paragraph with *some* emphasis, a `name`, a [link](https://example.org/{n}) and **more** of it, so that
the spans of a line are as many as a model writes.

- a list, with an item
- and another one, which is a little longer
  1. with a list inside

```python
def part_{n}(items: list[int]) -> int:
    # Add what is positive.
    total = sum(item for item in items if item > {n})
    return total or len("nothing")
```

| part | value |
|---|---:|
| {n} | `{n}.0` |
| next | **more** |

"""
# Frame times, in the page: one entry for each frame while an answer runs.
RECORD = """() => {
  window.frames_ms = [];
  let before = performance.now();
  const next = (now) => {
    window.frames_ms.push(now - before);
    before = now;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""


def words(kind: str, n_tokens: int) -> list[str]:
    """The answer as tokens of a few characters each."""
    found: list[str] = []
    n = 0
    while len(found) < n_tokens:
        text = {
            "mixed": SECTION.format(n=n),
            "paragraph": "word and *more* of it, ",
            "code": f"x_{n} = call({n})  # y\n",
        }
        found += [text[kind][i : i + 4] for i in range(0, len(text[kind]), 4)]
        n += 1
    return (["```python\n"] if kind == "code" else []) + found[:n_tokens]


class Pace:
    """Lets steps pass at a steady rate."""

    def __init__(self, rate: float) -> None:
        self._gap_s = 1 / rate
        self._due_s = 0.0

    def wait(self, _jobs: Collection[Job]) -> None:
        now = time.perf_counter()
        self._due_s = max(self._due_s + self._gap_s, now - 0.1)
        time.sleep(max(0.0, self._due_s - now))


def watch(tab: Page) -> list[dict[str, float]]:
    """Figures of each tenth of the answer's time."""
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable")
    tab.evaluate(RECORD)
    tab.fill("#prompt", "Go on.")
    tab.press("#prompt", "Enter")
    moments = [metrics(session)]
    frames = []
    while tab.is_disabled("#send"):
        tab.wait_for_timeout(250)
        moments.append(metrics(session))
        frames.append(tab.evaluate("window.frames_ms.splice(0)"))
    found = []
    for tenth in range(10):
        first, last = (len(frames) * n // 10 for n in (tenth, tenth + 1))
        times = sorted(time_ms for some in frames[first:last] for time_ms in some)
        before, now = moments[first], moments[last]
        work_s = now["TaskDuration"] - before["TaskDuration"]
        found.append(
            {
                "frame_p50_ms": statistics.median(times),
                "frame_p95_ms": times[int(0.95 * (len(times) - 1))],
                "frame_max_ms": times[-1],
                "busy_percent": 100 * work_s / (now["Timestamp"] - before["Timestamp"]),
                "work_per_frame_ms": 1000 * work_s / len(times),
                "nodes": now["Nodes"],
            }
        )
    return found


def metrics(session: CDPSession) -> dict[str, float]:
    return {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}


def measure(kind: str, n_tokens: int, rate: float) -> list[dict[str, float]]:
    tokenizer = FakeTokenizer()
    answer = [*map(tokenizer.learn, words(kind, n_tokens)), EOS]
    entry = replace(testing.ENTRY, context_tokens=None, vocab_size=10**6)
    backend = FakeBackend(answer=lambda _: answer, on_step=Pace(rate).wait, vocab_size=10**6)
    catalog = Catalog(entry, [entry.name])
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        serving(lambda _: backend, catalog=catalog, tokenizer=tokenizer, page=page.files()) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.set_default_timeout(TIMEOUT_MS)
        tab.goto(f"http://127.0.0.1:{server.http.address[1]}/")
        tab.wait_for_selector("#status[data-state=ok]")
        tab.click("#settings-button")
        tab.fill("#max-tokens", str(n_tokens + 1))
        tab.press("#settings-dialog", "Escape")
        found = watch(tab)
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_frames", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("mixed", "paragraph", "code"), default="mixed", help="what the answer is")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens per second")
    args = parser.parse_args()
    rows = measure(args.kind, args.tokens, args.rate)
    print(" tenth  frame p50  p95  max (ms)  work a frame (ms)  busy (%)    nodes")
    for tenth, row in enumerate(rows, start=1):
        print(
            f"{tenth:6} {row['frame_p50_ms']:9.1f} {row['frame_p95_ms']:6.1f} {row['frame_max_ms']:6.0f}"
            f" {row['work_per_frame_ms']:14.1f} {row['busy_percent']:13.0f} {row['nodes']:10.0f}"
        )


if __name__ == "__main__":
    main()
