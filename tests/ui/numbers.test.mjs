import assert from "node:assert/strict";
import { test } from "node:test";

import { NONE, bytes, duration, rate, whole } from "../../mlx_serve/ui/numbers.js";

test("numbers are written as people read them", () => {
  assert.equal(whole(1234567), "1,234,567");
  assert.deepEqual([null, undefined, 1.25, 99.96, 123.4].map(rate), [NONE, NONE, "1.3", "100.0", "123"]);
  assert.deepEqual([null, 0.0012, 0.25, 3.14159, 59, 125, 7380].map(duration),
    [NONE, "1.2 ms", "250 ms", "3.14 s", "59 s", "2 min", "2 h 3 min"]);
  assert.deepEqual([0, 512, 2048, 3 * 2 ** 20, 1.5 * 2 ** 40].map(bytes), [NONE, "512 B", "2 KiB", "3.0 MiB", "1.5 TiB"]);
});
