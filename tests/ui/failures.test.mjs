import assert from "node:assert/strict";
import { test } from "node:test";

import { StreamFailed } from "../../mlx_serve/ui/answer.js";
import { Locked, Refused, explain, refusal } from "../../mlx_serve/ui/failures.js";
import { Interrupted } from "../../mlx_serve/ui/stream.js";

const response = (status, body, headers = {}) => new Response(body, { status, headers });

test("a refusal has the server's message, code and wait", async () => {
  const error = { message: "Busy.", type: "rate_limit_error", code: "rate_limit_exceeded" };
  const refused = await refusal(response(429, JSON.stringify({ error }), { "Retry-After": "5" }));
  assert.deepEqual([refused.status, refused.message, refused.code, refused.retryAfterS],
    [429, "Busy.", "rate_limit_exceeded", 5]);
  const explained = explain(refused);
  assert.equal(explained.text, "The server is busy: its queue is full. Try again in about 5 s.");
  assert.deepEqual([explained.detail, explained.canRetry], ["Busy.", true]);
});

test("a proxy's page is a refusal too", async () => {
  const refused = await refusal(response(502, "<html>Bad Gateway</html>"));
  assert.deepEqual([refused.message, refused.retryAfterS], ["<html>Bad Gateway</html>", null]);
  assert.match(explain(refused).text, /proxy/);
});

for (const [error, text, canRetry] of [
  [new Refused(400, "no", "context_length_exceeded"), /longer than this model can read/, false],
  [new Refused(400, "'temperature' is wrong"), /did not accept/, true],
  [new Refused(403, "no"), /this page's address/, false],
  [new Refused(413, "no"), /too large/, false],
  [new Refused(500, "no"), /failed with this request/, true],
  [new Refused(503, "no"), /can take no request now/, true],
  [new Locked(""), /API key/, true],
  [new StreamFailed({ message: "x" }), /could not finish/, true],
  [new Interrupted(""), /connection to the server was lost/, true],
  [new TypeError("Failed to fetch"), /cannot be reached/, true],
  [new RangeError("a fault here"), /The page failed/, true],
]) {
  test(`explained: ${error.constructor.name} ${error.status || ""}`, () => {
    const explained = explain(error);
    assert.match(explained.text, text);
    assert.equal(explained.canRetry, canRetry);
  });
}

test("it is said when a part of the answer was kept", () => {
  assert.match(explain(new Interrupted(""), { hasText: true }).text, /What has come is kept/);
  assert.doesNotMatch(explain(new Interrupted("")).text, /kept/);
});
