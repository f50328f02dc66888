import assert from "node:assert/strict";
import { test } from "node:test";

import { useFakeDocument } from "./fakedom.mjs";
import { Markdown } from "../../mlx_serve/ui/markdown.js";

useFakeDocument();

function render(...pieces) {
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  for (const piece of pieces) markdown.feed(piece);
  markdown.end();
  return root;
}

// Without the captions of code, which are the same everywhere.
const shown = (...pieces) => render(...pieces).children.map((child) => child.html).join("")
  .replace(/<figcaption>.*?<\/figcaption>/g, "");
const code = (...lines) => `<figure.code><pre><code>${
  lines.map((line) => `<span.line>${line}\n</span>`).join("")}</code></pre></figure>`;

for (const [name, text, want] of [
  ["a line end stays", "one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"],
  ["headings", "# A *b*\n### C\n#hash", "<h3>A <em>b</em></h3><h4>C</h4><p>#hash</p>"],
  ["a heading ends a paragraph", "text\n## A", "<p>text</p><h3>A</h3>"],
  ["headings from any level, none left out", "### A\n##### B\n# C\n## D", "<h3>A</h3><h4>B</h4><h3>C</h3><h3>D</h3>"],
  ["rules", "a\n\n---\n* * *\nb", "<p>a</p><hr></hr><hr></hr><p>b</p>"],
  ["a list", "- a\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  ["a list with blank lines", "- a\n\n- b\n\nc", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>c</p>"],
  ["a numbered list", "3. a\n4. b", "<ol start=3><li><p>a</p></li><li><p>b</p></li></ol>"],
  ["another mark is another list", "- a\n* b", "<ul><li><p>a</p></li></ul><ul><li><p>b</p></li></ul>"],
  ["a list in a list", "- a\n  - b\n- c",
    "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>"],
  ["a list in a numbered list, by two spaces", "1. a\n  - b\n  - c\n2. d",
    "<ol><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>"],
  ["two paragraphs in an item", "- a\n\n  b\n- c", "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>"],
  ["a sentence goes on with a number", "it was\n1984. He", "<p>it was\n1984. He</p>"],
  ["a list right behind a paragraph", "these:\n- a", "<p>these:</p><ul><li><p>a</p></li></ul>"],
  ["tasks", "- [ ] a\n- [x] b", "<ul><li><p>☐ a</p></li><li><p>☑ b</p></li></ul>"],
  ["a quote", "> a\n> b\n\nc", "<blockquote><p>a\nb</p></blockquote><p>c</p>"],
  ["a list in a quote", "> - a\n> - b", "<blockquote><ul><li><p>a</p></li><li><p>b</p></li></ul></blockquote>"],
  ["code", "```\na  b\n\n*c*\n```\nd", `${code("a  b", "", "*c*")}<p>d</p>`],
  ["code is no markup", "```\n<b> & `x`\n```", code("&lt;b> &amp; `x`")],
  ["code with more ticks", "````\n```\na\n```\n````", code("```", "a", "```")],
  ["code that is never closed", "~~~\na\n", code("a")],
  ["coloured code", "```py\nif x: # y\n```",
    code("<span.hl-keyword>if</span> x: <span.hl-comment># y</span>")],
  ["code in a list", "1. a\n   ```\n   x\n     y\n   ```\n2. b",
    `<ol><li><p>a</p>${code("x", "  y")}</li><li><p>b</p></li></ol>`],
  ["code in a list, too little indented", "1. a\n   ```\nx\n```\n2. b",
    `<ol><li><p>a</p>${code("x")}</li><li><p>b</p></li></ol>`],
  ["code as an item", "- ```sh\n  ls\n  ```\n- b", `<ul><li>${code("ls")}</li><li><p>b</p></li></ul>`],
  ["a table", "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\nend",
    "<div.scroll><table><thead><tr><th>a</th><th.right>b</th></tr></thead>"
    + "<tbody><tr><td>1</td><td.right><code>x|y</code></td></tr></tbody></table></div><p>end</p>"],
  ["a table without outer bars", "a | b\n:-:|---\n1 |",
    "<div.scroll><table><thead><tr><th.center>a</th><th>b</th></tr></thead>"
    + "<tbody><tr><td.center>1</td><td></td></tr></tbody></table></div>"],
  ["a bar is no table", "a | b\nc", "<p>a | b\nc</p>"],
  ["an empty cell", "|a|b|\n|-|-|\n||2|",
    "<div.scroll><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    + "<tbody><tr><td></td><td>2</td></tr></tbody></table></div>"],
  ["HTML is text", "<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)></p>"],
  ["lines of Windows", "a\r\n\r\nb", "<p>a</p><p>b</p>"],
]) {
  test(name, () => {
    assert.equal(shown(text), want);
    assert.equal(shown(...text), want, "letter by letter");
  });
}

test("quotes and lists are not nested without end", () => {
  let depth = 0;
  for (let box = render(`${">".repeat(5000)} a`); box.children?.length; box = box.children[0]) depth += 1;
  assert.ok(depth < 30);
});

// The rest is random, and the same each time.
function* numbers(seed) {
  for (let state = seed; ;) {
    state = (state * 1103515245 + 12345) % 2 ** 31;
    yield state / 2 ** 31;
  }
}
const PARTS = ["a", "b c", " ", "  ", "    ", "\n", "\n\n", "*", "**", "_", "`", "```", "```py\n", "~~~", "- ", "1. ", "2) ", "> ",
  "# ", "|", "|-|-|\n", "[", "](", ")", "https://a.b/c", "<br>", "<", ">", "&amp;", "&", "\\", "$$", "\\(", "\\)", "!", "---",
  "h", "x_y_z", "é", "漢字", "😀", "\t", "\n- [ ] ", ":", "\"", "#"];

test("an answer looks the same, however it was cut into pieces", () => {
  const random = numbers(Number(process.env.SEED || 7));
  const next = (n) => Math.floor(random.next().value * n);
  for (let round = 0; round < 1500; round += 1) {
    const text = Array.from({ length: 1 + next(30) }, () => PARTS[next(PARTS.length)]).join("");
    const letters = [...text];
    const pieces = [];
    while (letters.length) pieces.push(letters.splice(0, 1 + next(6)).join(""));
    assert.equal(shown(...pieces), shown(text), JSON.stringify(text));
  }
});

test("what is finished is not touched again", () => {
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  const part = "Some *text* here.\n\n- a\n- b\n\n```py\nx = 1\ny = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n";
  markdown.feed(part);
  markdown.feed("Next");
  const finished = root.children.slice(0, -1);
  const changes = (node) => (node.nChanges || 0) + (node.children || []).reduce((sum, child) => sum + changes(child), 0);
  const before = finished.map(changes);
  for (const letter of part.repeat(20)) markdown.feed(letter);
  assert.deepEqual(finished.map(changes), before);
});

test("no box of a long answer has many blocks", () => {
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  const widest = () => Math.max(root.children.length, ...root.children.map((child) => child.children.length));
  for (let i = 0; i < 1000; i += 1) markdown.feed(`part ${i}\n\n`);
  assert.ok(widest() < 100, `${widest()}`);
  assert.equal(root.textContent, Array.from({ length: 1000 }, (_, i) => `part ${i}`).join(""));
});

test("a paragraph, a list and code in progress keep what they have", () => {
  for (const [start, more] of [["", "word *and* "], ["- ", "x\n- "], ["```py\n", "a = 1\n"]]) {
    const root = document.createElement("div");
    const markdown = new Markdown(root);
    markdown.feed(start);
    for (let i = 0; i < 100; i += 1) markdown.feed(more);
    const all = (node) => [node, ...(node.children || []).flatMap(all)];
    const early = new Set(all(root).slice(0, 50));
    for (let i = 0; i < 100; i += 1) markdown.feed(more);
    const late = new Set(all(root));
    assert.deepEqual([...early].filter((node) => !late.has(node)), []);
  }
});
