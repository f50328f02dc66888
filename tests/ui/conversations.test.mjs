import assert from "node:assert/strict";
import { test } from "node:test";

import "./webcrypto.mjs";
import { asFile, fromFile, newConversation, newestFirst, titleOf } from "../../mlx_serve/ui/conversations.js";

const question = (content) => ({ role: "user", content });
const ANSWER = { role: "assistant", content: "b", reasoning: "", calls: [{ name: "f", arguments: "{}" }], model: "m", note: "" };

test("a conversation is called by its first question", () => {
  const conversation = newConversation(5);
  assert.equal(titleOf(conversation), "New conversation");
  conversation.turns = [question("  what\n is  this? ")];
  assert.equal(titleOf(conversation), "what is this?");
  conversation.turns = [question("x".repeat(100))];
  assert.equal(titleOf(conversation).length, 60);
  assert.notEqual(newConversation().id, conversation.id);
});

test("the newest come first", () => {
  const [a, b] = [newConversation(1), newConversation(2)];
  assert.deepEqual(newestFirst([a, b]), [b, a]);
});

test("what is exported is imported as it was", () => {
  const conversation = { ...newConversation(1), turns: [question("a"), ANSWER] };
  assert.deepEqual(fromFile(asFile([conversation])), [conversation]);
});

test("only what the page writes is taken from a file", () => {
  const conversation = { ...newConversation(1), turns: [{ ...question("a"), more: 1 }], more: 1 };
  const want = { id: conversation.id, title: "", changedAt: 1, turns: [question("a")] };
  assert.deepEqual(fromFile(asFile([conversation])), [want]);
});

test("anything else is refused", () => {
  const bad = (change) => asFile([{ ...newConversation(1), turns: [question("a")], ...change }]);
  const files = ["", "{", "[]", "null", "{}", '{"format": "mlx-serve conversations", "version": 2, "conversations": []}',
    bad({ id: "../x" }), bad({ id: ["a"] }), bad({ title: 3 }), bad({ changedAt: "x" }), bad({ turns: null }),
    bad({ turns: [{ role: "system", content: "a" }] }), bad({ turns: [{ role: "user", content: 3 }] }),
    bad({ turns: [{ ...ANSWER, calls: [{ name: 3 }] }] }), bad({ turns: [{ ...ANSWER, note: {} }] }), asFile([null])];
  for (const text of files) assert.throws(() => fromFile(text), SyntaxError, text);
});
