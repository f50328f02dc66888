// Markdown as it streams: text in, elements out. Finished blocks, lines of code and rows are never touched again, so an
// answer of any length costs the same per piece of text.
//
// It reads what language models write: paragraphs (a line end is a line end), headings, lists, quotes, fenced code, tables
// and rules. Indented code, underlined headings and HTML are plain text.
import { copyButton, element } from "./dom.js";
import { highlightLine, languageOf } from "./highlighting.js";
import { parseInline } from "./inline.js";

// Deeper lists and quotes are text: a browser can't lay out thousands of boxes in each other.
const MAX_DEPTH = 16;
// A browser visits all children of a box to add one, so a long answer has its blocks in sections.
const SECTION_BLOCKS = 64;
const QUOTE = /^ *> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\](?= )/;
const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ *(#{1,6})(?: +|$)/;
const RULE = /^ *(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const DELIMITERS = /^ *\|?(?: *:?-+:? *\|)*(?: *:?-+:? *)\|?$/;
// The beginning of a line that could still be one thing or another.
const UNDECIDED = /^[\s>\d.)*+_#`~=|:-]*(?:[-*+.)] +\[[ xX]?\]?)?$/;
const WAITS_FOR_ITS_END = /^[\s>\d.)*+-]*(?:`{3}|~{3}|\|)/;

export class Markdown {
  #root;
  // Where blocks are added: the root itself, until it has enough of them.
  #section;
  // The open quotes, lists and items, from the outermost in.
  #open = [];
  #leaf = null;
  #pending = "";
  #isInLine = false;
  #headings = new HeadingLevels();

  constructor(root) {
    this.#root = root;
    this.#section = root;
  }

  feed(text) {
    this.#pending += text.replaceAll("\r", "");
    while (this.#pending) {
      const end = this.#pending.indexOf("\n");
      const piece = end < 0 ? this.#pending : this.#pending.slice(0, end);
      if (!this.#isInLine && end < 0 && this.#isUndecided(piece)) break;
      if (this.#isInLine) this.#leaf.write(piece);
      else this.#beginLine(piece.replace(/^[ \t]+/, (blank) => blank.replaceAll("\t", "    ")));
      if (end >= 0) this.#leaf?.endLine();
      this.#isInLine = end < 0;
      this.#pending = end < 0 ? "" : this.#pending.slice(end + 1);
    }
    this.#leaf?.show();
  }

  end() {
    if (this.#isInLine || this.#pending) this.feed("\n");
    this.#close(0);
  }

  #isUndecided(line) {
    if (this.#leaf instanceof Table) return true;
    // A line without the mark of the quote that the code is in ends both.
    const isCode = this.#leaf instanceof Code && !this.#open.some((container) => container instanceof Quote);
    if (isCode) return /^\s*[`~]*$/.test(line);
    return WAITS_FOR_ITS_END.test(line) || UNDECIDED.test(line);
  }

  #beginLine(line) {
    let { rest, depth } = this.#continued(line);
    if (this.#leaf instanceof Code && depth === this.#open.length) {
      if (this.#leaf.isClosedBy(rest)) this.#endLeaf();
      else this.#leaf.beginLine(rest);
      return;
    }
    if (this.#leaf instanceof Paragraph && depth < this.#open.length && this.#isPlain(rest)) {
      this.#leaf.beginLine(rest.trimStart());
      return;
    }
    if (depth < this.#open.length && !this.#goesOnAsList(depth, rest)) this.#close(depth);
    for (;;) {
      const inner = this.#beginContainer(rest, depth);
      if (inner === null) break;
      rest = inner;
      depth = this.#open.length;
    }
    this.#beginLeaf(rest);
  }

  // How many of the open containers go on in this line, and the line without their marks.
  #continued(line) {
    let rest = line;
    let depth = 0;
    for (const container of this.#open) {
      const inner = container.strip(rest, this.#leaf instanceof Code);
      if (inner === null) break;
      rest = inner;
      depth += 1;
    }
    return { rest, depth };
  }

  #isPlain(rest) {
    return rest.trim() !== "" && ![QUOTE, ITEM, FENCE, HEADING, RULE].some((mark) => mark.test(rest));
  }

  #goesOnAsList(depth, rest) {
    const list = this.#open[depth - 1];
    if (!(list instanceof List) || !list.takes(ITEM.exec(rest)) || RULE.test(rest)) return false;
    this.#close(depth);
    return true;
  }

  // The rest of the line inside a new quote or item; null when none begins here.
  #beginContainer(rest, depth) {
    const item = RULE.test(rest) || depth >= MAX_DEPTH ? null : ITEM.exec(rest);
    const inList = this.#open.at(-1) instanceof List;
    if (item && this.#mayBeginList(item, rest, inList)) {
      if (inList && !this.#open.at(-1).takes(item)) this.#close(depth - 1);
      this.#endLeaf();
      if (!(this.#open.at(-1) instanceof List)) this.#push(new List(item));
      const inner = rest.slice(item[0].length);
      // Much space behind the mark is the text's own.
      const width = item[3].length > 4 ? item[0].length - item[3].length + 1 : item[0].length + (item[3] ? 0 : 1);
      this.#push(new Item(width, item[1].length));
      return inner.replace(TASK, (_, mark) => (mark === " " ? "☐" : "☑"));
    }
    // What is no item ends a list.
    if (inList && rest.trim()) this.#close(this.#open.length - 1);
    const quote = depth < MAX_DEPTH && QUOTE.exec(rest);
    if (!quote) return null;
    this.#endLeaf();
    this.#push(new Quote());
    return rest.slice(quote[0].length);
  }

  #mayBeginList([mark, , kind], rest, inList) {
    if (inList || !(this.#leaf instanceof Paragraph)) return true;
    // Within a paragraph a number is more likely a part of the sentence.
    return rest.length > mark.length && (!/^\d/.test(kind) || /^1[.)]$/.test(kind));
  }

  #beginLeaf(rest) {
    const leaf = this.#leaf;
    const fence = FENCE.exec(rest);
    const heading = HEADING.exec(rest);
    if (!rest.trim()) return this.#endLeaf();
    if (fence) return this.#begin(new Code(fence[1], fence[2].trim(), rest.search(/\S/)));
    if (heading) {
      this.#begin(new Heading(this.#headings.of(heading[1].length)));
      return this.#leaf.write(rest.slice(heading[0].length));
    }
    if (leaf instanceof Paragraph && DELIMITERS.test(rest) && leaf.isHeadOf(rest)) {
      const table = new Table(leaf.firstLine, rest);
      leaf.box.replaceWith(table.box);
      this.#leaf = table;
      return undefined;
    }
    if (RULE.test(rest)) {
      this.#begin(new Rule());
      return this.#endLeaf();
    }
    if (leaf instanceof Table && rest.includes("|")) return leaf.row(rest);
    if (!(leaf instanceof Paragraph)) this.#begin(new Paragraph());
    return this.#leaf.beginLine(rest.trimStart());
  }

  #begin(leaf) {
    this.#endLeaf();
    this.#inside().append(leaf.box);
    this.#leaf = leaf;
  }

  #push(container) {
    this.#inside().append(container.box);
    this.#open.push(container);
  }

  #inside() {
    const container = this.#open.at(-1);
    if (container) return container.box;
    if (this.#section.childElementCount >= SECTION_BLOCKS) {
      this.#section = this.#root.appendChild(element("div", "section"));
    }
    return this.#section;
  }

  #endLeaf() {
    this.#leaf?.close();
    this.#leaf = null;
  }

  #close(depth) {
    this.#endLeaf();
    this.#open.length = depth;
  }
}

// Containers. ``strip`` takes their mark off a line that goes on in them, and gives null for any other line.

class Quote {
  box = element("blockquote");

  strip(line) {
    const mark = QUOTE.exec(line);
    return mark ? line.slice(mark[0].length) : null;
  }
}

class List {
  constructor([, , mark]) {
    const number = Number.parseInt(mark, 10);
    this.mark = mark.at(-1);
    this.box = element(Number.isNaN(number) ? "ul" : "ol");
    if (number !== 1 && !Number.isNaN(number)) this.box.start = number;
  }

  // Its items decide.
  strip(line) {
    return line;
  }

  takes(item) {
    return item !== null && item[2].at(-1) === this.mark;
  }
}

class Item {
  box = element("li");

  constructor(width, indent) {
    this.width = width;
    this.indent = indent;
  }

  strip(line, inCode) {
    const indent = line.search(/\S/);
    if (indent < 0) return "";
    // Models often indent code in a list by less than its text.
    if (indent >= this.width || inCode) return line.slice(Math.min(indent, this.width));
    // And a list in a numbered list by two spaces.
    return indent >= this.indent + 2 && ITEM.test(line) ? line.slice(indent) : null;
  }
}

// Leaves: what holds text. ``write`` takes a part of a line; ``show`` is called once for each piece of the stream.

class Spans {
  #text = "";
  #before = "";
  // Nodes that text to come may change.
  #unsettled = [];

  constructor(box) {
    this.box = box;
  }

  write(text) {
    this.#text += text;
  }

  show(isFinal = false) {
    if (!this.#text) return;
    for (const node of this.#unsettled) node.remove();
    this.#unsettled = [];
    const { tokens, settled } = parseInline(this.#text, { before: this.#before, isFinal });
    for (const token of tokens) {
      if (token.end <= settled) this.#settle(token);
      else this.#unsettled.push(this.box.appendChild(nodeOf(token)));
    }
    if (settled) this.#before = this.#text[settled - 1];
    this.#text = this.#text.slice(settled);
  }

  #settle(token) {
    const last = this.box.lastChild;
    if (token.kind === "text" && last?.nodeType === 3) last.appendData(token.text);
    else this.box.append(nodeOf(token));
  }
}

class Paragraph {
  box = element("p");
  #spans = new Spans(this.box);
  #nLines = 0;
  // The first line may turn out to be a table's head.
  firstLine = "";

  beginLine(text) {
    this.write(this.#nLines ? `\n${text}` : text);
    this.#nLines += 1;
  }

  write(text) {
    if (this.#nLines <= 1) this.firstLine += text;
    this.#spans.write(text);
  }

  isHeadOf(delimiters) {
    const n = cells(this.firstLine).length;
    return this.#nLines === 1 && this.firstLine.includes("|") && n === cells(delimiters).length;
  }

  endLine() {}

  show() {
    this.#spans.show();
  }

  close() {
    this.#spans.show(true);
  }
}

// An answer may begin with any level and leave some out. In the page its headings stand below an h2, and none is left out.
class HeadingLevels {
  #first = 0;
  #latest = 2;

  of(level) {
    this.#first ||= level;
    this.#latest = Math.max(3, Math.min(level - this.#first + 3, this.#latest + 1, 6));
    return this.#latest;
  }
}

class Heading {
  #spans;

  constructor(level) {
    this.box = element(`h${level}`);
    this.#spans = new Spans(this.box);
  }

  // The next line is another block.
  beginLine() {}

  write(text) {
    this.#spans.write(text);
  }

  endLine() {
    this.#spans.show(true);
  }

  show() {
    this.#spans.show();
  }

  close() {
    this.#spans.show(true);
  }
}

class Rule {
  box = element("hr");

  endLine() {}

  show() {}

  close() {}
}

class Code {
  box = element("figure", "code");
  #code = element("code");
  #state = null;
  #line = null;
  #shown = null;

  constructor(fence, info, indent) {
    this.fence = fence;
    this.indent = indent;
    const name = info.split(/\s/)[0];
    this.language = languageOf(name);
    const caption = element("figcaption");
    caption.append(element("span", "", name || "code"), copyButton(() => this.#code.textContent));
    const pre = element("pre");
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", name ? `Code, ${name}` : "Code");
    pre.append(this.#code);
    this.box.append(caption, pre);
  }

  isClosedBy(rest) {
    const mark = rest.trim();
    return mark.length >= this.fence.length && mark === this.fence[0].repeat(mark.length);
  }

  beginLine(text) {
    const indent = Math.max(0, Math.min(this.indent, text.search(/\S|$/)));
    this.#line = text.slice(indent);
  }

  write(text) {
    this.#line += text;
  }

  // The opening fence has no line of code.
  endLine() {
    if (this.#line === null) return;
    const { pairs, state } = highlightLine(this.#line, this.language, this.#state);
    this.#state = state;
    // Each line is a box of its own: in one long text, the browser would lay out all lines again for each new one.
    const line = this.#shown || this.#code.appendChild(element("span", "line"));
    line.replaceChildren(...pairs.map(([kind, text]) => (kind ? element("span", `hl-${kind}`, text) : text)), "\n");
    this.#line = this.#shown = null;
  }

  // The line that is not complete yet is plain.
  show() {
    if (this.#line === null) return;
    this.#shown ||= this.#code.appendChild(element("span", "line"));
    this.#shown.textContent = this.#line;
  }

  close() {
    this.endLine();
  }
}

class Table {
  box = element("div", "scroll");
  #body = element("tbody");

  constructor(head, delimiters) {
    this.aligns = cells(delimiters).map((cell) => (/:$/.test(cell) ? (/^:/.test(cell) ? "center" : "right") : ""));
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Table");
    const table = element("table");
    const top = element("thead");
    top.append(this.#made("th", head));
    table.append(top, this.#body);
    this.box.append(table);
  }

  row(line) {
    this.#body.append(this.#made("td", line));
  }

  #made(name, line) {
    const row = element("tr");
    const found = cells(line);
    for (const [i, align] of this.aligns.entries()) {
      const cell = element(name, align);
      cell.append(...parseInline(found[i] || "").tokens.map(nodeOf));
      row.append(cell);
    }
    return row;
  }

  endLine() {}

  show() {}

  close() {}
}

// The cells of a row; a bar in code or behind a backslash divides nothing.
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  const found = inner.match(/(?:\\.|`[^`]*`|[^|\\]|\\$)+|(?<=^|\|)(?=\||$)/g) || [""];
  return found.map((cell) => cell.replaceAll("\\|", "|").trim());
}

const ELEMENTS = { em: "em", strong: "strong", del: "del", link: "a", code: "code", math: "code" };

function nodeOf(token) {
  if (token.kind === "text") return document.createTextNode(token.text);
  if (token.kind === "break") return element("br");
  const made = element(ELEMENTS[token.kind], token.kind === "math" ? "math" : "", token.text);
  if (token.children) made.append(...token.children.map(nodeOf));
  if (token.kind === "link") {
    made.href = token.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer nofollow";
  }
  return made;
}
