import assert from "node:assert/strict";
import { test } from "node:test";

import { MAX_SPAN, parseInline, safeAddress } from "../../mlx_serve/ui/inline.js";

// Tokens in a short form: ["em", "text"] and plain strings.
const short = (token) => {
  if (token.kind === "text") return token.text;
  const inner = token.children ? token.children.map(short) : [token.text];
  return [token.kind, ...(token.href ? [token.href] : []), ...inner];
};
const parse = (text, options) => parseInline(text, options).tokens.map(short);

for (const [text, ...want] of [
  ["plain", "plain"],
  ["a *b* _c_ **d** __e__ ~~f~~", "a ", ["em", "b"], " ", ["em", "c"], " ", ["strong", "d"], " ", ["strong", "e"], " ",
    ["del", "f"]],
  ["***a***", ["strong", ["em", "a"]]],
  ["**a *b***", ["strong", "a ", ["em", "b"]]],
  ["2 * 3 * 4", "2 * 3 * 4"],
  ["snake_case_name", "snake_case_name"],
  ["~a~ *", "~a~ *"],
  ["`a*b*` ``x`y``", ["code", "a*b*"], " ", ["code", "x`y"]],
  ["*a `b* c`*", ["em", "a ", ["code", "b* c"]]],
  ["`open", "`open"],
  ["\\*a\\* \\a", "*a* \\a"],
  ["\\(x_1 * y\\) and $$a*b*c$$", ["math", "\\(x_1 * y\\)"], " and ", ["math", "$$a*b*c$$"]],
  ["costs $5 and $6", "costs $5 and $6"],
  ["a<br>b <b>", "a", ["break", "\n"], "b <b>"],
  ["&lt;b&gt; &copy;", "<b> &copy;"],
  ["[a *b*](https://x.y/z_1)", ["link", "https://x.y/z_1", "a ", ["em", "b"]]],
  ['[a](https://x.y "title")', ["link", "https://x.y/", "a"]],
  ["![alt](https://x.y/i.png)", ["link", "https://x.y/i.png", "alt"]],
  ["[a](https://x.y/(b)) c", ["link", "https://x.y/(b)", "a"], " c"],
  ["[https://a.b](https://x.y)", ["link", "https://x.y/", "https://a.b"]],
  ["[1] and [a](b)", "[1] and [a](b)"],
  ["<https://x.y/a>", ["link", "https://x.y/a", "https://x.y/a"]],
  ["see https://x.y/a_b_c.", "see ", ["link", "https://x.y/a_b_c", "https://x.y/a_b_c"], "."],
  ["(https://x.y/a_(b))", "(", ["link", "https://x.y/a_(b)", "https://x.y/a_(b)"], ")"],
]) {
  test(`inline: ${text}`, () => assert.deepEqual(parse(text), want));
}

test("only addresses that can run nothing are links", () => {
  assert.equal(safeAddress("https://x.y"), "https://x.y/");
  assert.equal(safeAddress("mailto:a@b.c"), "mailto:a@b.c");
  const bad = ["javascript:alert(1)", " javascript:alert(1)", "java\nscript:alert(1)", "data:text/html,x", "vbscript:x",
    "file:///etc/passwd", "blob:https://x.y/1", "/relative", "#here", "//x.y", ""];
  assert.deepEqual(bad.map(safeAddress), bad.map(() => ""));
  for (const address of bad.filter((one) => !one.includes("https:"))) {
    assert.ok(!JSON.stringify(parse(`[a](${address}) ![b](${address})`)).includes('"link"'), address);
  }
});

test("what is settled is what no further text can change", () => {
  const settled = (text) => parseInline(text, { isFinal: false }).settled;
  assert.equal(settled("all of it"), 9);
  assert.equal(settled("a *b"), 2);
  assert.equal(settled("a *b*"), 2);
  assert.equal(settled("a *b* c"), 7);
  assert.equal(settled("a [b]("), 2);
  assert.equal(settled("at htt"), 3);
  assert.equal(settled("1 < 2"), 5);
});

test("an unpaired mark is text after so many characters", () => {
  const text = `a *${"b ".repeat(MAX_SPAN)}`;
  const { tokens, settled } = parseInline(text, { isFinal: false });
  assert.equal(settled, text.length);
  assert.deepEqual(tokens.map(short), [text]);
});

test("marks without end take no time that grows with their square", () => {
  for (const mark of ["*a ", "[", "`", "**a **", "_", "<b", "&", "\\(", "![", "$$", "[a](", "~~x"]) {
    assert.ok(parseInline(mark.repeat(5000)).tokens.length > 0);
  }
});
