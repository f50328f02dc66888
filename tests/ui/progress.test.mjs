import assert from "node:assert/strict";
import { test } from "node:test";

import "./webcrypto.mjs";
import { newRequestId, progressOf } from "../../mlx_serve/ui/progress.js";

const request = (id, phase, more = {}) => ({ id, phase, model: "m", ...more });
const stats = (...requests) => ({ models: [{ name: "m" }], requests });

test("ids are new each time, and the server takes them", () => {
  assert.match(newRequestId(), /^[A-Za-z0-9._-]{1,128}$/);
  assert.notEqual(newRequestId(), newRequestId());
});

test("the place in the queue counts those of the same model that wait", () => {
  const others = [request("a", "decoding"), request("b", "queued"), request("c", "queued", { model: "other" })];
  assert.equal(progressOf(stats(...others, request("d", "queued"), request("e", "queued")), "d").text,
    "In the queue: place 2 of 3");
  assert.equal(progressOf(stats(request("a", "decoding"), request("d", "queued")), "d").text, "In the queue: next");
});

test("a model that is not in memory is being loaded", () => {
  assert.equal(progressOf({ models: [], requests: [request("d", "queued")] }, "d").text, "Loading m");
});

test("the prompt's progress", () => {
  const reading = (done, all) => progressOf(stats(request("d", "prefill", { prefilled_tokens: done, prompt_tokens: all })), "d");
  assert.deepEqual(reading(6000, 24000), { text: "Reading the prompt: 6,000 of 24,000 tokens (25 %)", share: 0.25 });
  assert.equal(reading(0, 0).share, 0);
});

test("nothing is said of a request that has tokens, or that is not listed", () => {
  assert.equal(progressOf(stats(request("d", "decoding")), "d"), null);
  assert.equal(progressOf(stats(), "d"), null);
});
