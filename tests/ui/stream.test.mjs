import assert from "node:assert/strict";
import { test } from "node:test";

import { Interrupted, events } from "../../mlx_serve/ui/stream.js";

const bodyOf = (...pieces) => new ReadableStream({
  start(controller) {
    for (const piece of pieces) controller.enqueue(piece);
    controller.close();
  },
});
const encode = (text) => new TextEncoder().encode(text);

async function all(body) {
  const found = [];
  for await (const event of events(body)) found.push(event);
  return found;
}

const STREAM = 'data: {"a": "é😀"}\n\n: keep-alive\n\ndata: {"a": 2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n';

test("events are read, wherever the stream is cut", async () => {
  const bytes = encode(STREAM);
  for (let i = 0; i < bytes.length; i += 1) {
    assert.deepEqual(await all(bodyOf(bytes.slice(0, i), bytes.slice(i))), [{ a: "é😀" }, { a: 2 }]);
  }
});

test("a stream without its end is an error", async () => {
  await assert.rejects(all(bodyOf(encode('data: {"a": 1}\n\n'))), Interrupted);
});

test("a connection that breaks is an error of its own, and stopping is none", async () => {
  const broken = (error) => new ReadableStream({ pull: (controller) => controller.error(error) });
  await assert.rejects(all(broken(new TypeError("network error"))), Interrupted);
  await assert.rejects(all(broken(new DOMException("stopped", "AbortError"))), { name: "AbortError" });
});
