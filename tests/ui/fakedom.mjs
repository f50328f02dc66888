// As much of a document as the page's modules need to build elements, for tests without a browser.

class Node {
  parent = null;

  remove() {
    if (!this.parent) return;
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
    this.parent.touch();
    this.parent = null;
  }

  replaceWith(other) {
    const { parent } = this;
    parent.children[parent.children.indexOf(this)] = other;
    other.parent = parent;
    this.parent = null;
    parent.touch();
  }
}

class Text extends Node {
  nodeType = 3;

  constructor(text) {
    super();
    this.textContent = text;
  }

  appendData(text) {
    this.textContent += text;
    this.parent?.touch();
  }

  get html() {
    return this.textContent.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  }
}

class Element extends Node {
  nodeType = 1;
  children = [];
  attributes = {};
  className = "";
  listeners = {};
  // How often its children changed.
  nChanges = 0;

  constructor(name) {
    super();
    this.name = name;
  }

  touch() {
    this.nChanges += 1;
  }

  get childElementCount() {
    return this.children.filter((child) => child.nodeType === 1).length;
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }

  append(...nodes) {
    for (const node of nodes) {
      const made = typeof node === "string" ? new Text(node) : node;
      made.remove();
      made.parent = this;
      this.children.push(made);
    }
    if (nodes.length) this.touch();
  }

  appendChild(node) {
    this.append(node);
    return node;
  }

  replaceChildren(...nodes) {
    for (const child of this.children) child.parent = null;
    this.children = [];
    this.touch();
    this.append(...nodes);
  }

  get lastChild() {
    return this.children.at(-1) || null;
  }

  get textContent() {
    return this.children.map((child) => child.textContent).join("");
  }

  set textContent(text) {
    this.replaceChildren(...(text === "" ? [] : [String(text)]));
  }

  get html() {
    const inner = this.children.map((child) => child.html).join("");
    const start = [this.name, this.className && `.${this.className}`, this.href && ` ${this.href}`].filter(Boolean).join("");
    return `<${start}${this.start ? ` start=${this.start}` : ""}>${inner}</${this.name}>`;
  }
}

export function useFakeDocument() {
  globalThis.document = {
    createElement: (name) => new Element(name),
    createElementNS: (_, name) => new Element(name),
    createTextNode: (text) => new Text(text),
  };
}
