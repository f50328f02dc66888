// The text inside a Markdown block as tokens: emphasis, code, links, math. Knows no document, and makes no markup.
//
// An answer comes in pieces. ``parseInline`` therefore tells up to where its tokens are settled: no text that comes later
// can change them. What is settled is shown once and never touched again.

// A span reaches at most so many characters. Without a limit one unpaired star would keep all the text behind it open.
export const MAX_SPAN = 1000;
const MAX_DEPTH = 8;
const MAX_URL = 2000;

const PLAIN = /[^\\`$*_~[<&!h]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BREAK = /<br\s*\/?>/iy;
const BARE_URL = new RegExp(`https?://[^\\s<>"\`]{1,${MAX_URL}}`, "y");
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const LONGEST_ENTITY = 6;

// The address of a link that may be followed, or "": another scheme could run code in this page.
export function safeAddress(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return "";
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
}

// Tokens: {kind, end} with ``text`` (text, code, math, break), ``children`` (em, strong, del), or both ``href`` and
// ``children`` (link). ``before`` is the character in front of the text. ``isFinal``: no text follows.
export function parseInline(text, { before = "", isFinal = true } = {}) {
  const parser = new Parser(text, before, isFinal);
  return { tokens: parser.range(0, text.length, 0, false), settled: parser.settled };
}

class Parser {
  constructor(text, before, isFinal) {
    this.text = text;
    this.before = before;
    this.isFinal = isFinal;
    this.settled = text.length;
    // Where the outermost token begins that is being read.
    this.outermost = 0;
  }

  range(start, end, depth, inLink) {
    const tokens = [];
    let i = start;
    while (i < end) {
      if (depth === 0) this.outermost = i;
      const token = this.special(i, end, depth, inLink) || this.plain(i, end);
      // A span that touches the end may go on: its last mark may be part of a longer one.
      if (token.kind !== "text" && token.end === this.text.length) this.unsure();
      i = token.end;
      const last = tokens.at(-1);
      // Nothing unsettled is joined to what is settled.
      const isNew = depth === 0 && this.settled === this.outermost;
      if (token.kind === "text" && last?.kind === "text" && !isNew) {
        last.text += token.text;
        last.end = token.end;
      } else {
        tokens.push(token);
      }
    }
    return tokens;
  }

  // Text that comes later could change the outermost token.
  unsure() {
    if (!this.isFinal) this.settled = Math.min(this.settled, this.outermost);
  }

  // A search from ``start`` found nothing before ``limit``; when that is the end of the text, it may come yet.
  missed(limit, start) {
    if (limit === this.text.length && limit - start < MAX_SPAN) this.unsure();
  }

  plain(i, end) {
    PLAIN.lastIndex = i;
    const found = PLAIN.exec(this.text);
    const stop = Math.min(end, i + Math.max(1, found ? found[0].length : 1));
    return { kind: "text", text: this.text.slice(i, stop), end: stop };
  }

  special(i, end, depth, inLink) {
    switch (this.text[i]) {
      case "\\": return this.escape(i, end);
      case "`": return this.code(i, end);
      case "$": return this.text[i + 1] === "$" ? this.math(i, i + 2, "$$", end) : this.atEnd(i + 1, end);
      case "*":
      case "_":
      case "~": return this.emphasis(i, end, depth, inLink);
      case "!": return this.text[i + 1] === "[" ? this.link(i + 1, end, depth, inLink) : this.atEnd(i + 1, end);
      case "[": return this.link(i, end, depth, inLink);
      case "<": return this.angle(i, end, inLink);
      case "&": return this.entity(i, end);
      case "h": return this.address(i, end, inLink);
      default: return null;
    }
  }

  // Nothing is special here yet; it may be with the next character.
  atEnd(next, end) {
    if (next >= end) this.missed(end, next - 1);
    return null;
  }

  escape(i, end) {
    const next = this.text[i + 1];
    if (i + 1 >= end) return this.atEnd(i + 1, end);
    if (next === "(") return this.math(i, i + 2, "\\)", end) || { kind: "text", text: "(", end: i + 2 };
    if (next === "[") return this.math(i, i + 2, "\\]", end) || { kind: "text", text: "[", end: i + 2 };
    return PUNCTUATION.test(next) ? { kind: "text", text: next, end: i + 2 } : null;
  }

  // Formulas stay as they were written, or Markdown would eat parts of them.
  math(i, from, close, end) {
    const at = this.find(close, from, i, end);
    return at < 0 ? null : { kind: "math", text: this.text.slice(i, at + close.length), end: at + close.length };
  }

  find(what, from, start, end) {
    const limit = Math.min(end, start + MAX_SPAN);
    const at = this.text.slice(from, limit).indexOf(what);
    if (at < 0) this.missed(limit, start);
    return at < 0 ? -1 : from + at;
  }

  code(i, end) {
    const n = this.run(i, end);
    const close = this.closingTicks(i, n, end);
    if (close < 0) return { kind: "text", text: this.text.slice(i, i + n), end: i + n };
    let text = this.text.slice(i + n, close).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(text)) text = text.slice(1, -1);
    return { kind: "code", text, end: close + n };
  }

  closingTicks(i, n, end) {
    const limit = Math.min(end, i + MAX_SPAN);
    for (let at = i + n; at < limit;) {
      at = this.text.indexOf("`", at);
      if (at < 0 || at >= limit) break;
      const m = this.run(at, end);
      if (m === n) return at;
      at += m;
    }
    this.missed(limit, i);
    return -1;
  }

  // How many of the same character follow each other.
  run(i, end) {
    let n = 1;
    while (i + n < end && this.text[i + n] === this.text[i]) n += 1;
    return n;
  }

  emphasis(i, end, depth, inLink) {
    const mark = this.text[i];
    const n = this.run(i, end);
    const literal = { kind: "text", text: this.text.slice(i, i + n), end: i + n };
    if (i + n >= end) this.missed(end, i);
    const canOpen = i + n < end && !/\s/.test(this.text[i + n]) && !(mark === "_" && WORD.test(this.previous(i)));
    if (!canOpen || depth >= MAX_DEPTH || n > 3 || (mark === "~" && n !== 2)) return literal;
    for (const length of n === 3 ? [3, 1, 2] : [n]) {
      const close = this.closing(mark, length, i, end);
      if (close < 0) continue;
      const children = this.range(i + length, close, depth + 1, inLink);
      return { ...emphasized(mark, length, children), end: close + length };
    }
    return literal;
  }

  closing(mark, n, start, end) {
    const limit = Math.min(end, start + MAX_SPAN);
    let i = start + n;
    while (i < limit) {
      const char = this.text[i];
      if (char === "\\") {
        i += 2;
      } else if (char === "`") {
        const ticks = this.run(i, end);
        const close = this.closingTicks(i, ticks, limit);
        i = close < 0 ? i + ticks : close + ticks;
      } else if (char === mark) {
        const m = this.run(i, end);
        const fits = m === n || (m === 3 && n < 3);
        const isRight = !/\s/.test(this.text[i - 1]) && !(mark === "_" && WORD.test(this.text[i + m] || ""));
        if (fits && isRight && i > start + n) return i + m - n;
        i += m;
      } else {
        i += 1;
      }
    }
    this.missed(limit, start);
    return -1;
  }

  previous(i) {
    return i ? this.text[i - 1] : this.before;
  }

  // [label](address); an image is a link too, for its address may be anywhere and this page loads nothing from there.
  link(i, end, depth, inLink) {
    if (inLink || depth >= MAX_DEPTH) return null;
    const close = this.closingBracket(i, end);
    if (close < 0) return null;
    TARGET.lastIndex = close + 1;
    const found = TARGET.exec(this.text);
    if (!found || TARGET.lastIndex > Math.min(end, i + MAX_SPAN)) {
      if (close + 1 >= end || this.text[close + 1] === "(") this.missed(end, i);
      return null;
    }
    const address = (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
    const href = safeAddress(address);
    if (!href) return null;
    const children = this.range(i + 1, close, depth + 1, true);
    const label = children.length ? children : [{ kind: "text", text: address, end: close }];
    return { kind: "link", href, children: label, end: close + 1 + found[0].length };
  }

  closingBracket(start, end) {
    const limit = Math.min(end, start + MAX_SPAN);
    let open = 0;
    for (let i = start; i < limit; i += 1) {
      const char = this.text[i];
      if (char === "\\") i += 1;
      else if (char === "[") open += 1;
      else if (char === "]") open -= 1;
      if (open === 0) return i;
    }
    this.missed(limit, start);
    return -1;
  }

  angle(i, end, inLink) {
    if (i + 1 < end && !/[bhm]/i.test(this.text[i + 1])) return null;
    const limit = Math.min(end, i + MAX_SPAN);
    BREAK.lastIndex = i;
    const broken = BREAK.exec(this.text);
    if (broken && BREAK.lastIndex <= limit) return { kind: "break", text: "\n", end: BREAK.lastIndex };
    AUTOLINK.lastIndex = i;
    const found = AUTOLINK.exec(this.text);
    if (found && AUTOLINK.lastIndex <= limit) return this.linkTo(found[1], AUTOLINK.lastIndex, inLink);
    if (!this.text.slice(i, limit).includes(">")) this.missed(limit, i);
    return null;
  }

  entity(i, end) {
    ENTITY.lastIndex = i;
    const found = ENTITY.exec(this.text);
    if (found && ENTITY.lastIndex <= end) return { kind: "text", text: ENTITIES[found[1]], end: ENTITY.lastIndex };
    if (end - i < LONGEST_ENTITY) this.missed(end, i);
    return null;
  }

  address(i, end, inLink) {
    if (WORD.test(this.previous(i))) return null;
    BARE_URL.lastIndex = i;
    const found = BARE_URL.exec(this.text);
    if (!found) {
      const rest = this.text.slice(i, Math.min(end, i + 8));
      if ("https://".startsWith(rest) || "http://".startsWith(rest)) this.missed(end, i);
      return null;
    }
    if (i + found[0].length >= this.text.length) this.unsure();
    return this.linkTo(trimmed(found[0].slice(0, end - i)), null, inLink, i);
  }

  linkTo(address, end, inLink, start = 0) {
    const href = inLink ? "" : safeAddress(address);
    const stop = end ?? start + address.length;
    const text = { kind: "text", text: address, end: stop };
    return href ? { kind: "link", href, children: [text], end: stop } : text;
  }
}

function emphasized(mark, length, children) {
  if (mark === "~") return { kind: "del", children };
  if (length === 1) return { kind: "em", children };
  if (length === 2) return { kind: "strong", children };
  return { kind: "strong", children: [{ kind: "em", children }] };
}

// An address in a sentence, without the sentence's own punctuation behind it.
function trimmed(address) {
  let text = address;
  for (;;) {
    const last = text.at(-1);
    const isClosing = last === ")" && text.split(")").length > text.split("(").length;
    if (text.length < 10 || !(isClosing || /[.,;:!?'*_~\]}]/.test(last))) return text;
    text = text.slice(0, -1);
  }
}
