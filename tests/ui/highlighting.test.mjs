import assert from "node:assert/strict";
import { test } from "node:test";

import { highlightLine, languageOf } from "../../mlx_serve/ui/highlighting.js";

// Each line's parts that have a class.
function marked(name, code) {
  let state = null;
  return code.split("\n").map((line) => {
    const { pairs, state: next } = highlightLine(line, languageOf(name), state);
    assert.equal(pairs.map(([, text]) => text).join(""), line);
    state = next;
    return pairs.filter(([kind]) => kind).map(([kind, text]) => `${kind}:${text}`);
  });
}

for (const [name, code, ...want] of [
  ["python", "def f(x): return 'a' # b", ["keyword:def", "name:f", "keyword:return", "string:'a'", "comment:# b"]],
  ["py", 's = """a\nif b\n""" + 1.5', ['string:"""a'], ["string:if b"], ['string:"""', "number:1.5"]],
  ["js", "/* a\nb */ let x = `c\nd`;", ["comment:/* a"], ["comment:b */", "keyword:let", "string:`c"], ["string:d`"]],
  ["c++", 'int a = 0x1F; // "b"', ["keyword:int", "number:0x1F", 'comment:// "b"']],
  ["bash", "echo $# 'it''s' # x", ["keyword:echo", "string:'it''s'", "comment:# x"]],
  ["sql", "SELECT a FROM b -- c", ["keyword:SELECT", "keyword:FROM", "comment:-- c"]],
  ["json", '{"a": [true, -1]}', ['string:"a"', "keyword:true", "number:1"]],
  ["yaml", "key: 'x' # y", ["name:key", "string:'x'", "comment:# y"]],
  ["html", '<a href="b">c</a><!-- d', ["keyword:<a", 'string:"b"', "keyword:>", "keyword:</a>", "comment:<!-- d"]],
  ["css", "color: red; /* x */", ["name:color", "comment:/* x */"]],
  ["diff", "+a\n-b\n c\n@@ 1", ["added:+a"], ["removed:-b"], [], ["comment:@@ 1"]],
  ["rust", "fn f<'a>() {}", ["keyword:fn"]],
  ["unknown", "if x", []],
]) {
  test(`${name}: ${code}`, () => assert.deepEqual(marked(name, code), want));
}

test("names of languages are looked up as what they are", () => {
  assert.equal(languageOf("TypeScript"), "javascript");
  assert.equal(languageOf("constructor"), "");
  assert.equal(languageOf("__proto__"), "");
});

test("every language that is named has its colours", () => {
  for (const name of ["py", "ts", "cpp", "kt", "go", "rs", "swift", "rb", "php", "zsh", "sql", "json", "toml", "xml", "scss"]) {
    assert.notEqual(languageOf(name), "");
    highlightLine("a 'b' 1", languageOf(name));
  }
});

test("a very long line is data", () => {
  const line = "if ".repeat(1000);
  assert.deepEqual(highlightLine(line, "python").pairs, [["", line]]);
});
