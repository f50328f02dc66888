import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer, StreamFailed, readable } from "../../mlx_serve/ui/answer.js";

const chunk = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });

test("chunks are folded into one answer", () => {
  const answer = new Answer(1000);
  answer.take(chunk({ role: "assistant", content: "" }), 1100);
  assert.ok(answer.isEmpty);
  answer.take(chunk({ reasoning_content: "hm" }), 1500);
  answer.take(chunk({ content: "a" }), 2000);
  answer.take(chunk({ content: "b" }), 2500);
  answer.take({ choices: [{ index: 1, delta: { content: "other" } }] }, 2600);
  answer.take(chunk({ tool_calls: [{ index: 0, function: { name: "get", arguments: "" } }] }), 2600);
  answer.take(chunk({ tool_calls: [{ index: 0, function: { arguments: '{"a"' } }] }), 2700);
  answer.take(chunk({ tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] }), 3500);
  answer.take(chunk({}, { finish_reason: "tool_calls" }), 3600);
  const usage = { prompt_tokens: 7, completion_tokens: 21, prompt_tokens_details: { cached_tokens: 3 } };
  answer.take({ choices: [], usage }, 3600);
  assert.equal(answer.content, "ab");
  assert.equal(answer.reasoning, "hm");
  assert.deepEqual(answer.calls, [{ name: "get", arguments: '{"a": 1}' }]);
  assert.equal(answer.summary(),
    "7 prompt tokens (3 cached) · 21 tokens · 10.0 tokens/s · first after 500 ms · tool_calls");
});

test("the server's error in mid-stream is raised, and what came before stays", () => {
  const answer = new Answer(0);
  answer.take(chunk({ content: "a" }), 1);
  const error = { message: "It broke.", type: "server_error", code: null };
  assert.throws(() => answer.take({ error }, 2), (raised) => raised instanceof StreamFailed && raised.code === "server_error");
  assert.equal(answer.content, "a");
});

test("an answer without usage has a summary too", () => {
  const answer = new Answer(0);
  assert.equal(answer.summary(), "");
  answer.finish = "stopped";
  assert.equal(answer.summary(), "stopped");
});

test("arguments that are JSON are indented", () => {
  assert.equal(readable('{"a":1}'), '{\n  "a": 1\n}');
  assert.equal(readable('{"a":'), '{"a":');
});
