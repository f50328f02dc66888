// Colours for code, a line at a time: a line is coloured when it is complete, and never again. Knows no document.
//
// It tells comments, strings, numbers and keywords apart. That is no parser: what it does not know stays plain.

const words = (text) => new Set(text.split(" "));

const C = { line: ["//"], multi: [["/*", "*/", "comment"]], quotes: "\"'" };
const HASH = { line: ["#"], multi: [], quotes: "\"'" };
const C_WORDS = "auto bool break case char class const continue default do double else enum extern float for goto if"
  + " include inline int long namespace new nullptr private protected public register return short signed sizeof static"
  + " struct switch template this throw try catch typedef typename union unsigned using virtual void volatile while true"
  + " false NULL define ifdef ifndef endif";
const JS_WORDS = "abstract as async await break case catch class const continue debugger default delete do else enum"
  + " export extends false finally for from function get if implements import in instanceof interface let new null of"
  + " private protected public readonly return set static super switch this throw true try type typeof undefined var"
  + " void while with yield";
const LANGUAGES = {
  python: {
    ...HASH,
    multi: [['"""', '"""', "string"], ["'''", "'''", "string"]],
    words: words("False None True and as assert async await break case class continue def del elif else except finally"
      + " for from global if import in is lambda match nonlocal not or pass raise return self try while with yield"),
  },
  javascript: { ...C, multi: [...C.multi, ["`", "`", "string"]], words: words(JS_WORDS) },
  c: { ...C, words: words(C_WORDS) },
  java: {
    ...C,
    words: words("abstract as assert async await bool boolean break byte case catch char class const continue data"
      + " default do double else enum extends false final finally float for foreach fun get if implements import in"
      + " instanceof int interface internal is let long namespace new null object override package private protected"
      + " public readonly record return sealed set short static string super switch this throw throws true try val var"
      + " virtual void when while yield"),
  },
  go: {
    ...C,
    multi: [...C.multi, ["`", "`", "string"]],
    words: words("any bool break byte case chan const continue default defer else error fallthrough false for func go"
      + " goto if import int interface map nil package range return select string struct switch true type var"),
  },
  rust: {
    ...C,
    quotes: '"',
    words: words("Err None Ok Self Some as async await break const continue crate dyn else enum extern false fn for if"
      + " impl in let loop match mod move mut pub ref return self static struct super trait true type unsafe use where"
      + " while"),
  },
  swift: {
    ...C,
    multi: [...C.multi, ['"""', '"""', "string"]],
    quotes: '"',
    words: words("actor as async await break case catch class continue default defer deinit do else enum extension"
      + " false fileprivate for func guard if import in init inout internal is let nil open override private protocol"
      + " public repeat return self static struct super switch throw throws true try typealias var where while"),
  },
  ruby: {
    ...HASH,
    words: words("alias and begin break case class def do else elsif end ensure false for if in include module next nil"
      + " not or puts raise require rescue return self super then true unless until when while yield"),
  },
  php: {
    ...C,
    line: ["//", "#"],
    words: words("array as break case catch class const continue default do echo else elseif extends false final for"
      + " foreach function if implements interface namespace new null private protected public return static switch"
      + " this throw true try use var while"),
  },
  shell: {
    ...HASH,
    words: words("alias case cd do done echo elif else esac eval exec exit export fi for function if in local read"
      + " return set shift source sudo test then trap unset until while"),
  },
  sql: {
    line: ["--"],
    multi: [["/*", "*/", "comment"]],
    quotes: "\"'",
    ignoresCase: true,
    words: words("add all alter and as asc between by case create cross delete desc distinct drop else end exists false"
      + " foreign from full group having if in index inner insert into is join key left like limit not null offset on or"
      + " order outer primary references right select set table then true union unique update values view when where"
      + " with"),
  },
  json: { line: ["//"], multi: [], quotes: '"', words: words("true false null") },
  yaml: { ...HASH, words: words("true false null yes no on off"), key: /^(\s*(?:- )?)([\w.-]+)(?=\s*[:=])/ },
  html: { line: [], multi: [["<!--", "-->", "comment"]], quotes: '"', words: new Set(), tag: true },
  css: { line: [], multi: [["/*", "*/", "comment"]], quotes: "\"'", words: new Set(), key: /^(\s*)([\w-]+)(?=\s*:)/ },
  diff: { isDiff: true },
};
const NAMES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript",
  tsx: "javascript", typescript: "javascript", "c++": "c", cpp: "c", h: "c", hpp: "c", objc: "c", metal: "c", kotlin: "java",
  kt: "java", cs: "java", csharp: "java", "c#": "java", scala: "java", dart: "java", golang: "go", rs: "rust", rb: "ruby",
  sh: "shell", bash: "shell", zsh: "shell", console: "shell", dockerfile: "shell", makefile: "shell", jsonc: "json",
  yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html", vue: "html", scss: "css", patch: "diff",
};
// A longer line is data and not code.
const MAX_LINE = 2000;

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
const patterns = new Map();

function pattern(language) {
  if (!patterns.has(language)) {
    const { line, multi, quotes, tag } = LANGUAGES[language];
    const parts = [
      `(?<open>${multi.map(([open]) => escaped(open)).join("|") || "(?!)"})`,
      // A hash begins a comment only at the start of a word: $# and a#b have none.
      `(?<comment>${line.map((mark) => (mark === "#" ? "(?<![\\w$])#" : escaped(mark))).join("|") || "(?!)"})`,
      `(?<string>${[...quotes].map((quote) => `${quote}(?:[^${quote}\\\\]|\\\\.)*${quote}?`).join("|")})`,
      `(?<tag>${tag ? "</?[\\w:-]+|/?>" : "(?!)"})`,
      "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
      "(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)",
    ];
    patterns.set(language, new RegExp(parts.join("|"), "gu"));
  }
  return patterns.get(language);
}

// The name under which a language is known here, or "".
export function languageOf(name) {
  const small = name.toLowerCase();
  const known = Object.hasOwn(NAMES, small) ? NAMES[small] : small;
  return Object.hasOwn(LANGUAGES, known) ? known : "";
}

// A line as pairs [class, text], class "" for plain text, and the state with which the next line begins: the mark that
// closes a comment or a string over several lines, or null. ``language`` is from ``languageOf``.
export function highlightLine(line, language, state = null) {
  if (!language || line.length > MAX_LINE) return { pairs: [["", line]], state };
  if (language === "diff") return { pairs: [[diffClass(line), line]], state: null };
  return new Line(line, language).read(state);
}

function diffClass(line) {
  if (/^(\+\+\+|---|@@|diff |index )/.test(line)) return "comment";
  return { "+": "added", "-": "removed" }[line[0]] || "";
}

class Line {
  constructor(text, name) {
    this.text = text;
    this.language = LANGUAGES[name];
    this.pattern = pattern(name);
    this.pairs = [];
    this.at = 0;
  }

  read(state) {
    let open = state && this.inside(state);
    if (!open && this.at === 0 && this.language.key) this.key();
    while (!open && this.at < this.text.length) {
      this.pattern.lastIndex = this.at;
      const found = this.pattern.exec(this.text);
      this.push("", found ? found.index : this.text.length);
      if (!found) break;
      if (found.groups.open !== undefined) {
        const [mark, close, kind] = this.language.multi.find(([mark]) => mark === found[0]);
        open = this.inside({ close, kind }, this.at + mark.length);
      } else {
        this.push(this.kind(found), found.groups.comment ? this.text.length : this.at + found[0].length);
      }
    }
    return { pairs: this.pairs, state: open };
  }

  // What goes over several lines: up to its end, or the state again when that is not in this line.
  inside(state, from = this.at) {
    const end = this.text.indexOf(state.close, from);
    this.push(state.kind, end < 0 ? this.text.length : end + state.close.length);
    return end < 0 ? state : null;
  }

  key() {
    const found = this.language.key.exec(this.text);
    if (!found) return;
    this.push("", found[1].length);
    this.push("name", found[0].length);
  }

  kind(found) {
    const { comment, string, tag, number } = found.groups;
    if (comment) return "comment";
    if (string) return "string";
    if (tag) return "keyword";
    if (number) return "number";
    const word = this.language.ignoresCase ? found[0].toLowerCase() : found[0];
    if (this.language.words.has(word)) return "keyword";
    return this.text[found.index + found[0].length] === "(" ? "name" : "";
  }

  push(kind, end) {
    if (end <= this.at) return;
    const text = this.text.slice(this.at, end);
    const last = this.pairs.at(-1);
    if (last && last[0] === kind) last[1] += text;
    else this.pairs.push([kind, text]);
    this.at = end;
  }
}
