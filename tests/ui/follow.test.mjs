import assert from "node:assert/strict";
import { test } from "node:test";

import { Follow } from "../../mlx_serve/ui/follow.js";

// What is observed, and who wants to know when its size changes.
const observed = new Map();
globalThis.ResizeObserver = class {
  constructor(work) { this.work = work; }
  observe(element) { observed.set(element, this.work); }
  disconnect() { observed.clear(); }
};

// A box of 100 pixels' height that scrolls.
function made() {
  observed.clear();
  const box = {
    scrollHeight: 100,
    clientHeight: 100,
    lastElementChild: "a turn",
    addEventListener: (_, listener) => { box.scrolled = listener; },
  };
  Object.defineProperty(box, "scrollTop", {
    get: () => box.top || 0,
    set: (top) => { box.top = Math.min(top, box.scrollHeight - box.clientHeight); },
  });
  const changes = [];
  const follow = new Follow(box, (isFollowing) => changes.push(isFollowing));
  const grow = (height) => {
    box.scrollHeight += height;
    follow.grew();
  };
  const scroll = (top) => {
    box.scrollTop = top;
    box.scrolled();
  };
  return { box, follow, changes, grow, scroll };
}

test("the end stays in view while the box grows", () => {
  const { box, grow, changes } = made();
  for (let i = 0; i < 5; i += 1) grow(50);
  assert.equal(box.scrollTop, 250);
  assert.deepEqual(changes, []);
});

test("a scroll up ends it, a scroll to the end begins it again", () => {
  const { box, grow, scroll, changes } = made();
  grow(500);
  scroll(300);
  grow(50);
  assert.equal(box.scrollTop, 300);
  scroll(550);
  grow(50);
  assert.equal(box.scrollTop, 600);
  assert.deepEqual(changes, [false, true]);
});

test("a short way up ends it too, as the first step of a smooth scroll", () => {
  const { box, grow, scroll, changes } = made();
  grow(500);
  scroll(490);
  grow(50);
  assert.equal(box.scrollTop, 490);
  assert.deepEqual(changes, [false]);
  scroll(530);
  assert.deepEqual(changes, [false, true]);
});

test("a box that shrinks is followed", () => {
  const { box, grow, scroll, changes } = made();
  grow(500);
  box.scrollHeight -= 50;
  scroll(450);
  grow(100);
  assert.equal(box.scrollTop, 550);
  assert.deepEqual(changes, []);
});

test("growing between a scroll and its event is no scroll up", () => {
  const { box, grow, changes } = made();
  grow(500);
  box.scrollHeight += 400;
  box.scrolled();
  assert.deepEqual(changes, []);
  grow(0);
  assert.equal(box.scrollTop, 900);
});

test("the button goes to the end", () => {
  const { box, follow, grow, scroll } = made();
  grow(500);
  scroll(0);
  follow.toEnd();
  assert.equal(box.scrollTop, 500);
  assert.ok(follow.isFollowing);
});

test("what turns out to be higher when it is in view is followed", () => {
  const { box, grow, scroll } = made();
  const turnsOutHigher = () => {
    box.scrollHeight += 30;
    observed.get(box.lastElementChild)();
  };
  grow(500);
  turnsOutHigher();
  turnsOutHigher();
  assert.equal(box.scrollTop, 560);
  box.lastElementChild = "the next turn";
  grow(10);
  turnsOutHigher();
  assert.equal(box.scrollTop, 600);
  assert.deepEqual([...observed.keys()], ["the next turn"]);
  scroll(100);
  turnsOutHigher();
  assert.equal(box.scrollTop, 100);
});
