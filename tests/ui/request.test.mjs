import assert from "node:assert/strict";
import { test } from "node:test";

import { asCurl, moreFields, requestBody } from "../../mlx_serve/ui/request.js";

const NONE = { system: "", temperature: "", maxTokens: "", more: "" };
const TURNS = [{ role: "user", content: "a" }, { role: "assistant", content: "b", reasoning: "c", calls: [], model: "m", note: "" }];

test("a request has the conversation, and only the settings that were made", () => {
  const body = requestBody(NONE, "", TURNS);
  assert.deepEqual(body, {
    messages: [{ role: "user", content: "a" }, { role: "assistant", content: "b" }],
    stream: true,
    stream_options: { include_usage: true },
  });
});

test("settings go with it, and further fields win", () => {
  const settings = { system: " Be brief. ", temperature: "0", maxTokens: "5", more: '{"max_tokens": 7, "stream": false}' };
  const body = requestBody(settings, "m", []);
  assert.deepEqual([body.messages, body.model, body.temperature, body.max_tokens, body.stream],
    [[{ role: "system", content: "Be brief." }], "m", 0, 7, true]);
});

test("further fields are a JSON object", () => {
  assert.deepEqual(moreFields("  "), {});
  for (const text of ["{", "[1]", "null", "3"]) assert.throws(() => moreFields(text), SyntaxError);
});

test("the command quotes what a shell would read, and never has the key", () => {
  const command = asCurl({ a: "it's" }, "http://h/v1", true);
  assert.equal(command, "curl -N 'http://h/v1' \\\n  -H 'Content-Type: application/json' \\\n"
    + "  -H \"Authorization: Bearer $MLX_SERVE_API_KEY\" \\\n  -d '{\"a\":\"it'\\''s\"}'");
  assert.ok(!asCurl({}, "http://h", false).includes("Authorization"));
});
