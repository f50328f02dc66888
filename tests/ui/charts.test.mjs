import assert from "node:assert/strict";
import { test } from "node:test";

import { SPAN_S, lines, scaleTop, speedOf } from "../../mlx_serve/ui/charts.js";

test("a scale ends at a round number", () => {
  assert.deepEqual([0, 0.3, 1, 3, 7, 60, 1001].map((value) => scaleTop(value)), [1, 0.5, 1, 5, 10, 100, 2000]);
  assert.equal(scaleTop(3 * 2 ** 30, true), 4 * 2 ** 30);
  assert.equal(scaleTop(0, true), 2 ** 20);
});

test("a line ends at the right and has a gap where nothing was heard", () => {
  const points = [{ at: 0, value: 9 }, { at: 80, value: 0 }, { at: 81, value: 5 }, { at: 139, value: 5 }, { at: 140, value: 10 }];
  assert.deepEqual(lines(points, 80 + SPAN_S / 2, 10), ["120.0,58.0 122.0,30.0", "238.0,30.0 240.0,2.0"]);
  assert.deepEqual(lines([], 0, 1), []);
});

test("the speed is that between the first poll and the last", () => {
  assert.equal(speedOf([]), null);
  assert.equal(speedOf([{ at: 1, tokens: 5 }]), null);
  assert.equal(speedOf([{ at: 1, tokens: 5 }, { at: 1, tokens: 9 }]), null);
  assert.equal(speedOf([{ at: 1, tokens: 5 }, { at: 2, tokens: 6 }, { at: 3, tokens: 25 }]), 10);
});
